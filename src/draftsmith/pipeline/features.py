"""Features once, trained often: the target's taps on disk. (`stored` reads them in its place.)

For one small GPU (target and drafter never share it) or many epochs (the target runs once). `write_features` runs the
target over every document of a run's data and keeps only what the run's config needs: the configured taps, and the
last hidden state if the objective asks for the target's own distribution. Beside them lie the embedding and the head,
so that training loads no target at all.

Layout of the folder: `manifest.json`, `head.safetensors`, and shards `features-00000.safetensors` of about a gibibyte
with

    taps    [T, n·H]  bfloat16, or float8_e4m3fn with
    scales  [T, n]    float32, one for each token and tap: value = taps · scale
    last    [T, H]    bfloat16, only where it is needed
    keys    [D]       int64, hash of each document's tokens
    lengths [D]       int32

Features belong to a document and not to a row: they depend on its tokens alone, so rows may be packed anew, in another
order or length. They are found by a hash of the tokens; a document that was never written (other data) is not found,
and that is an error. The manifest names target, weights, tokenizer, template and taps; a run of another one is refused.

Resumable: a shard appears whole, by a rename; a later start skips the documents of the shards that are there.

Cost: one forward of the target per row; training reads n·H·2 bytes a token from disk (a page cache's speed from the
second epoch on, if it fits), n·H with fp8.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.blocks import Document, pack_row
from draftsmith.config import RunConfig, TargetConfig
from draftsmith.data.corpus import Corpus, make_tokeniser
from draftsmith.data.tables import fingerprint_tokenizer
from draftsmith.drafter import resolve_spec
from draftsmith.errors import UserError, reason_of, what_is_at
from draftsmith.observe.aside import written_aside
from draftsmith.observe.events import Listener
from draftsmith.pipeline.plan import read_spec_to_start_from
from draftsmith.target.forward import Target
from draftsmith.target.geometry import TargetGeometry
from draftsmith.target.head import TargetHead
from draftsmith.target.source import locate

Stored = Literal["bf16", "fp8"]
SHARD_BYTES = 1 << 30
FORMAT = 1
_FP8_MOST = 448.0  # largest float8_e4m3fn
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16  # of every weight file
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Prediction:
    """What writing will take.

    Attributes:
        documents, tokens: of the run's data, each counted once however often an epoch has it.
        bytes: on disk, when all is written.
        there: of them, already on disk.
        free: on that disk now.
    """

    documents: int
    tokens: int
    bytes: int
    there: int
    free: int

    @property
    def missing(self) -> int:
        """Bytes that are still to be written."""
        return max(0, self.bytes - self.there)

    def line(self) -> str:
        """For people."""
        return (
            f"{self.tokens:,} tokens of {self.documents:,} documents: {_gib(self.missing)} to write"
            f"{f', {_gib(self.there)} are there' if self.there else ''}, {_gib(self.free)} free"
        )


@dataclass(frozen=True)
class Wanted:
    """What is kept of every token.

    Attributes:
        taps: layers, ascending as the drafter wants them.
        hidden_size: H.
        last: the hidden state behind the final norm as well.
        dtype: how taps are stored.
    """

    taps: tuple[int, ...]
    hidden_size: int
    last: bool
    dtype: Stored

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        taps = len(self.taps) * (self.hidden_size * _DTYPES[self.dtype].itemsize + (4 if self.dtype == "fp8" else 0))
        return taps + (2 * self.hidden_size if self.last else 0)


def wanted_by(config: RunConfig, geometry: TargetGeometry, dtype: Stored) -> Wanted:
    """What a run's config needs of its target; taps are those of `drafter.init`, if it names one, as in training."""
    if config.drafter.init:
        taps = read_spec_to_start_from(config, geometry, []).taps
    else:
        taps = resolve_spec(config.drafter, geometry, config.drafter.mask_token_id or 0).taps
    return Wanted(tuple(taps), geometry.hidden_size, config.objective.labels != "data", dtype)


def predict(corpus: Corpus, wanted: Wanted, geometry: TargetGeometry, folder: Path, dtype: torch.dtype) -> Prediction:
    """Size of everything that `write_features` will write, before a weight is loaded.

    Args:
        dtype: of the target's weights: embedding and head are kept as they are.
    """
    lengths = {document_key(d.tokens): len(d) for d in _documents(corpus)}
    matrices = 1 if geometry.tie_word_embeddings else 2
    head = matrices * geometry.vocab_rows * geometry.hidden_size * dtype.itemsize
    place = next(path for path in (folder, *folder.absolute().parents) if what_is_at(path))
    tokens = sum(lengths.values())
    size = tokens * wanted.token_bytes + 12 * len(lengths) + head
    there = sum(path.stat().st_size for path in (*shard_paths(folder), *folder.glob("head.safetensors")))
    return Prediction(len(lengths), tokens, size, there, shutil.disk_usage(place).free)


def _documents(corpus: Corpus) -> Iterator[Document]:
    for source in (corpus.train, corpus.held_out):
        if source is not None:
            for row in range(source.rows_per_epoch):
                yield from source.row_documents(row)


def document_key(tokens: Tensor) -> int:
    """64-bit hash of a document's tokens, as a signed number."""
    data = tokens.to(torch.int32).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def describe_run(config: RunConfig, geometry: TargetGeometry, tokenizer: Any) -> dict[str, Any]:
    """What features must have been made with to be those of this run."""
    tokeniser = make_tokeniser(config.data, tokenizer)
    template = str(tokeniser.template or getattr(tokenizer, "chat_template", None))
    return {
        "target": asdict(geometry),
        "weights": fingerprint_weights(config.target),
        "tokenizer": fingerprint_tokenizer(tokenizer),
        "template": hashlib.sha256(template.encode()).hexdigest()[:16],
        "template_options": config.data.template_options,
    }


def fingerprint_weights(config: TargetConfig) -> str | None:
    """Hash of samples from all over the target's weight files; None where there are none (they are not needed here)."""
    source = locate(config)
    if source.gguf_file is not None:
        found = source.gguf_path()
        paths = [Path(found)] if found else []
    else:
        known = source.place if source.local else None
        if known is None:
            cached = try_to_load_from_cache(source.place, "config.json")
            known = str(Path(cached).parent) if isinstance(cached, str) else None
        paths = [] if known is None else sorted({path for kind in _WEIGHTS for path in Path(known).glob(kind)})
    if not paths:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // max(1, _SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def write_features(
    target: Target,
    corpus: Corpus,
    wanted: Wanted,
    run: dict[str, Any],
    folder: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    listener: Listener | None = None,
) -> int:
    """Runs the target over every document that `folder` does not hold yet; returns how many that were.

    Args:
        target: with all layers that are wanted.
        corpus: of the run.
        wanted: what is kept.
        run: of `describe_run`.
        folder: new, or begun by the same work.
        listener: gets a "step" event after every row.

    Raises:
        UserError: the folder holds other features, is in use, or cannot be written.
    """
    facts = {"format": FORMAT, **run, "taps": list(wanted.taps), "last": wanted.last, "dtype": wanted.dtype}
    with _locked(folder):
        manifest = read_manifest(folder)
        if manifest is None:
            _write_manifest(folder, {**facts, "complete": False})
        else:
            check_manifest(folder, manifest, facts)
        writer = _ShardWriter(folder, wanted, shard_bytes)
        _write_head(folder / "head.safetensors", target.head())
        written = 0
        for source in (corpus.train, corpus.held_out):
            if source is None:
                continue
            for number in range(source.rows_per_epoch):
                documents = source.row_documents(number)
                if any(document_key(document.tokens) not in writer.known for document in documents):
                    written += _write_row(target, documents, source.length, writer, wanted)
                if listener is not None:
                    listener(
                        {"time": 0.0, "kind": "step", "unit": "row", "step": number + 1, "steps": source.rows_per_epoch}
                    )
        writer.close()
        _write_manifest(folder, {**facts, "complete": True, "documents": len(writer.known)})
    return written


@torch.no_grad()
def _write_row(target: Target, documents: list[Document], length: int, writer: _ShardWriter, wanted: Wanted) -> int:
    row = pack_row(0, documents, length)
    features = target.features(row.tokens_S, row.document_S, row.positions_S, wanted.taps, last_hidden=wanted.last)
    start, written = 0, 0
    for document in documents:
        end = start + len(document)
        last = None if features.last_SH is None or not wanted.last else features.last_SH[start:end].cpu()
        written += writer.add(document.tokens, features.taps_SF[start:end].cpu(), last)
        start = end
    return written


class _ShardWriter:
    """Collects documents and writes a shard whenever enough have come together."""

    def __init__(self, folder: Path, wanted: Wanted, shard_bytes: int) -> None:
        self.folder, self.wanted, self.shard_bytes = folder, wanted, shard_bytes
        self.known: set[int] = set()
        self._number = 0
        for left in folder.glob("*.new"):  # by one that died: we hold the lock
            left.unlink()
        for path in shard_paths(folder):
            self._number = max(self._number, int(path.stem.rpartition("-")[2]) + 1)
            with safe_open(path, "pt") as file:
                self.known.update(file.get_tensor("keys").tolist())
        self._clear()

    def _clear(self) -> None:
        self._taps: list[Tensor] = []
        self._scales: list[Tensor] = []
        self._last: list[Tensor] = []
        self._keys: list[int] = []
        self._lengths: list[int] = []

    def add(self, tokens: Tensor, taps: Tensor, last: Tensor | None) -> bool:
        """Takes a document unless it is there; says whether it was taken."""
        key = document_key(tokens)
        if key in self.known:
            return False
        self.known.add(key)
        if self.wanted.dtype == "fp8":
            taps, scales = to_fp8(taps, len(self.wanted.taps))
            self._scales.append(scales)
        else:
            taps = taps.to(torch.bfloat16)
        self._taps.append(taps)
        if last is not None:
            self._last.append(last.to(torch.bfloat16))
        self._keys.append(key)
        self._lengths.append(tokens.numel())
        if sum(self._lengths) * self.wanted.token_bytes >= self.shard_bytes:
            self.close()
        return True

    def close(self) -> None:
        """Writes what was collected."""
        if not self._keys:
            return
        tensors = {
            "taps": torch.cat(self._taps),
            "keys": torch.tensor(self._keys, dtype=torch.int64),
            "lengths": torch.tensor(self._lengths, dtype=torch.int32),
        }
        if self._scales:
            tensors["scales"] = torch.cat(self._scales)
        if self._last:
            tensors["last"] = torch.cat(self._last)
        _save(tensors, self.folder / f"features-{self._number:05d}.safetensors")
        self._number += 1
        self._clear()


def to_fp8(taps: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Taps [T, n·H] as float8_e4m3fn and a float32 scale [T, n] for each token and tap."""
    by_tap = taps.float().unflatten(-1, (count, -1))
    scales = (by_tap.abs().amax(-1) / _FP8_MOST).clamp(min=torch.finfo(torch.float32).tiny)
    return (by_tap / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2), scales


def from_fp8(taps: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of `to_fp8`'s result."""
    return (taps.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


def _write_head(path: Path, head: TargetHead) -> None:
    tensors = {"embedding": head.embedding_VH.cpu().contiguous()}
    if head.head_VH.data_ptr() != head.embedding_VH.data_ptr():
        tensors["head"] = head.head_VH.cpu().contiguous()
    if head.final_scale_H is not None:
        tensors["final_scale"] = head.final_scale_H.cpu().contiguous()
    numbers = {"softcap": head.softcap, "multiplier": head.multiplier, "embedding_scale": head.embedding_scale}
    _save(tensors, path, {"numbers": json.dumps(numbers)})


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    new = path.with_name(f"{path.name}.new")
    try:
        save_file(tensors, new, metadata)
        with new.open("rb") as file:
            os.fsync(file.fileno())
        new.rename(path)
    except (OSError, RuntimeError) as error:
        new.unlink(missing_ok=True)
        raise UserError(
            f"cannot be written: {reason_of(error)}", where=str(path), fix="what is whole is kept"
        ) from None


def shard_paths(folder: Path) -> list[Path]:
    """The shards that are whole, in order."""
    return sorted(folder.glob("features-[0-9]*.safetensors"))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What a folder holds; None if it has no manifest."""
    path = folder / "manifest.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {reason_of(error)}", where=str(path)) from None
    if not isinstance(content, dict):
        raise UserError("is no manifest of features", where=str(path))
    return content


def _write_manifest(folder: Path, content: dict[str, Any]) -> None:
    path = folder / "manifest.json"
    try:
        with written_aside(path) as file:
            file.write(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot be written: {reason_of(error)}", where=str(path)) from None


def check_manifest(folder: Path, manifest: dict[str, Any], facts: dict[str, Any]) -> None:
    """Refuses a folder whose features are not those of `facts`."""
    facts = json.loads(json.dumps(facts))
    for key, value in facts.items():
        there = manifest.get(key)
        if key == "weights" and (value is None or there is None):
            continue  # one of the two machines has no weights: nothing to compare
        if there != value:
            detail = "" if isinstance(value, dict) else f" ({there} there, {value} here)"
            raise UserError(f"holds features of another {key.replace('_', ' ')}{detail}", where=str(folder))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=str(folder)) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError("another process is writing it", where=str(folder), fix="wait for it or stop it") from None
        yield
    finally:
        os.close(descriptor)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
