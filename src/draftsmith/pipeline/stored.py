"""A stand-in for the target that reads features from disk, as `features` wrote them.

Cost: a hash of every document of a row, and a copy of its slices out of mapped files. Memory: 24 bytes per document.
"""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.config import RunConfig
from draftsmith.errors import UserError
from draftsmith.pipeline.features import (
    FORMAT,
    check_manifest,
    describe_run,
    document_key,
    from_fp8,
    read_manifest,
    shard_paths,
)
from draftsmith.target.forward import Features, Target
from draftsmith.target.geometry import TargetGeometry
from draftsmith.target.head import TargetHead
from draftsmith.target.load import load_tokenizer

if TYPE_CHECKING:
    from draftsmith.pipeline.plan import Plan


class StoredTarget:
    """Gives the features of a folder as a `Target` would compute them. Threads may share it.

    Attributes:
        device: where features go.
        geometry: of the target.
        packing: "separate": nothing of it is compiled.
        packing_reason: for people.
    """

    packing = "separate"
    remarks: tuple[str, ...] = ()
    foreign = ""
    kinds: tuple[str, ...] = ()

    def __init__(self, folder: Path, geometry: TargetGeometry, device: torch.device, dtype: torch.dtype) -> None:
        self.geometry, self.device, self.dtype = geometry, device, dtype
        self.packing_reason = f"features are read from {folder}"
        self._folder = folder
        manifest = read_manifest(folder)
        assert manifest is not None, "open_features checks it"
        self._taps, self._fp8 = list(manifest["taps"]), manifest["dtype"] == "fp8"
        self._files: list[Any] = []
        keys, shards, starts, lengths = [], [], [], []
        for number, path in enumerate(shard_paths(folder)):
            file = safe_open(path, "pt").__enter__()
            self._files.append(file)
            length = file.get_tensor("lengths").numpy().astype(np.int64)
            keys.append(file.get_tensor("keys").numpy())
            lengths.append(length)
            starts.append(np.concatenate([[0], np.cumsum(length)[:-1]]))
            shards.append(np.full(length.size, number, dtype=np.int32))
        order = np.argsort(np.concatenate(keys), kind="stable")
        self._keys = np.concatenate(keys)[order]
        self._shards, self._starts, self._lengths = (np.concatenate(part)[order] for part in (shards, starts, lengths))
        self._lock = threading.Lock()

    def head(self) -> TargetHead:
        """Embedding and head, on the device."""
        path = self._folder / "head.safetensors"
        tensors = load_file(path, device=str(self.device))
        with safe_open(path, "pt") as file:
            numbers = json.loads(file.metadata()["numbers"])
        embedding = tensors["embedding"].to(self.dtype)
        final_scale = tensors.get("final_scale")
        return TargetHead(
            embedding_VH=embedding,
            head_VH=tensors["head"].to(self.dtype) if "head" in tensors else embedding,
            final_scale_H=None if final_scale is None else final_scale.float().cpu(),
            **numbers,
        )

    def features(
        self,
        tokens_S: Tensor,
        document_S: Tensor,
        positions_S: Tensor,
        taps: tuple[int, ...],
        last_hidden: bool = False,
    ) -> Features:
        """Features of a packed row; zeros on padding. See `Target.features`.

        Raises:
            UserError: a document of the row was never written.
        """
        length, hidden = tokens_S.numel(), self.geometry.hidden_size
        columns = [self._taps.index(tap) for tap in taps]
        taps_SF = torch.zeros(length, len(taps) * hidden, dtype=self.dtype)
        last_SH = torch.zeros(length, hidden, dtype=self.dtype) if last_hidden else None
        edges = [0, *((document_S[1:] != document_S[:-1]).nonzero()[:, 0] + 1).tolist(), length]
        for start, end in itertools.pairwise(edges):
            if int(document_S[start]) < 0:
                continue
            stored, last = self._read(tokens_S[start:end], last_hidden)
            by_tap = stored.unflatten(-1, (len(self._taps), hidden))
            taps_SF[start:end] = by_tap[:, columns].flatten(-2).to(self.dtype)
            if last_SH is not None and last is not None:
                last_SH[start:end] = last.to(self.dtype)
        return Features(
            taps_SF.to(self.device, non_blocking=True),
            None if last_SH is None else last_SH.to(self.device, non_blocking=True),
        )

    def _read(self, tokens: Tensor, last: bool) -> tuple[Tensor, Tensor | None]:
        key = document_key(tokens)
        place = int(np.searchsorted(self._keys, key))
        if place == self._keys.size or self._keys[place] != key or self._lengths[place] != tokens.numel():
            raise UserError(
                f"holds no features of a document of {tokens.numel()} tokens: the data or rows.length changed",
                where=str(self._folder),
                fix="run draftsmith data features again",
            )
        start = int(self._starts[place])
        end = start + tokens.numel()
        file = self._files[self._shards[place]]
        with self._lock:
            taps = file.get_slice("taps")[start:end]
            if self._fp8:
                taps = from_fp8(taps, file.get_slice("scales")[start:end])
            return taps, file.get_slice("last")[start:end] if last else None


def check_features(
    folder: Path, config: RunConfig, geometry: TargetGeometry, tokenizer: Any, taps: tuple[int, ...]
) -> None:
    """Whether a folder can stand in for the target of a run, by its manifest.

    Raises:
        UserError: see `open_features`.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError("holds no features", where=str(folder), fix="draftsmith data features writes them")
    check_manifest(folder, manifest, {"format": FORMAT, **describe_run(config, geometry, tokenizer)})
    if not set(taps) <= set(manifest["taps"]):
        raise UserError(
            f"holds features of other taps ({manifest['taps']} there, {list(taps)} here)", where=str(folder)
        )
    if config.objective.labels != "data" and not manifest["last"]:
        raise UserError(
            f"holds no last hidden states, which objective.labels: {config.objective.labels} needs", where=str(folder)
        )
    if not manifest.get("complete"):
        raise UserError("is not complete", where=str(folder), fix="run draftsmith data features again: it goes on")


def open_features(
    folder: Path,
    config: RunConfig,
    geometry: TargetGeometry,
    tokenizer: Any,
    taps: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> StoredTarget:
    """The features of a run in place of its target.

    Raises:
        UserError: the folder holds no features, not all of them, or those of another target, weights, tokenizer,
            template or set of taps.
    """
    check_features(folder, config, geometry, tokenizer, taps)
    return StoredTarget(folder, geometry, device, dtype)


def stored_targets(plan: Plan, folder: Path) -> list[Target]:
    """One stand-in per target worker of a plan; workers on one device share it.

    Raises:
        UserError: see `open_features`.
    """
    tokenizer = load_tokenizer(plan.config.target)
    by_device: dict[torch.device, Any] = {}
    for device in plan.topology.targets:
        if device not in by_device:
            by_device[device] = open_features(
                folder, plan.config, plan.geometry, tokenizer, tuple(plan.spec.taps), device, plan.target_dtype
            )
    return [by_device[device] for device in plan.topology.targets]
