"""Checkpoints: one folder each, a drafter that serving engines load plus what resuming needs.

    <run>/checkpoints/step-0000120/
        config.json, model.safetensors   the drafter, z-lab's layout
        trainer.safetensors              float32 masters and optimizer state, by parameter name
        state.json                       update number, stream position, config fingerprint

Written aside, synced and renamed, so a folder with the final name is always complete. All randomness of a run is drawn
from (seed, epoch, row), so the position in the stream is the state of every generator.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.drafter import DrafterSpec, save_weights
from draftsmith.errors import UserError

TRAINER = "trainer.safetensors"
STATE = "state.json"
VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """What was read back.

    Attributes:
        folder: where it lies.
        step: updates done.
        tensors: masters and optimizer state, as `ReplicaUpdate.state_tensors` names them, on the CPU.
        state: the rest of `state.json`.
    """

    folder: Path
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def masters(self) -> dict[str, Tensor]:
        return {name.removeprefix("master/"): t for name, t in self.tensors.items() if name.startswith("master/")}


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:07d}"


def save_checkpoint(
    run: Path, step: int, spec: DrafterSpec, tensors: dict[str, Tensor], dtype: torch.dtype, state: dict[str, Any]
) -> Path:
    """Writes the checkpoint of update `step` and returns its folder.

    Args:
        run: run folder.
        step: updates done.
        spec: of the drafter.
        tensors: masters and optimizer state of all replicas; the drafter's weights are the masters in `dtype`.
        dtype: of the drafter's weights on disk.
        state: further facts for `state.json`.

    Raises:
        OSError: disk full, read-only, and the like. Nothing with the final name is left behind then.
    """
    final = checkpoint_folder(run, step)
    aside = final.with_name(f".{final.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        on_cpu = {name: value.to("cpu").contiguous() for name, value in tensors.items()}
        masters = {n.removeprefix("master/"): t for n, t in on_cpu.items() if n.startswith("master/")}
        save_weights({name: value.to(dtype) for name, value in masters.items()}, spec, aside)
        save_file(on_cpu, str(aside / TRAINER))
        content = {"version": VERSION, "step": step, **state}
        (aside / STATE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for path in (*aside.iterdir(), aside):
            _sync(path)
        if final.exists():
            shutil.rmtree(final)
        os.replace(aside, final)
        _sync(final.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def prune_checkpoints(run: Path, keep: int) -> None:
    """Removes all but the newest `keep`."""
    for folder in list_checkpoints(run)[:-keep]:
        shutil.rmtree(folder)


def list_checkpoints(run: Path) -> list[Path]:
    """Complete checkpoint folders, oldest first."""
    root = run / "checkpoints"
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if re.fullmatch(r"step-\d{7,}", path.name))


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads a checkpoint back.

    Raises:
        UserError: torn, truncated, or of a version that this release does not know.
    """
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        version = state.get("version")
        if version != VERSION:
            raise UserError(f"checkpoint version {version} is not {VERSION}", where=str(folder))
        tensors = load_file(str(folder / TRAINER))
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"this checkpoint is not readable: {error}", where=str(folder)) from None
    return Checkpoint(folder, int(state["step"]), tensors, state)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
