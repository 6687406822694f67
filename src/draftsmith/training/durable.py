"""Folders that are complete or absent: files written aside, summed, synced, renamed.

A folder is built under a hidden name. Every file is written in pieces of at most 4 MiB and hashed on the way, so its
checksum costs no second read; then files and folder are synced, and one rename puts the folder in place. A crash at any
moment leaves the old state or the new one, and at most a hidden folder that the next writer removes.

Tensors are streamed in the safetensors layout (eight bytes of header size, a JSON header, the raw values): the values
are never gathered in memory, and every piece is one `write`, `update` or `fsync` that runs without the interpreter
lock. A thread that saves therefore does not hold up the threads that train.

Every call into the operating system goes through this module's `os`, which is what tests replace to fail each in turn.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

PIECE = 4 * 2**20
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Written:
    """Size in bytes and SHA-256 (hex) of a file."""

    bytes: int
    sha256: str


class Folder:
    """A folder in the making; see the module's docstring.

    Args:
        final: where it will be.

    Raises (all methods):
        OSError: disk full, quota, read-only, a failing device. Call `abandon` then.
    """

    def __init__(self, final: Path) -> None:
        self.final = final
        self.aside = final.with_name(f".{final.name}.partial")
        self.files: dict[str, Written] = {}
        shutil.rmtree(self.aside, ignore_errors=True)
        os.makedirs(self.aside)

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> Written:
        """Writes and syncs one file; remembers its size and checksum."""
        digest, size = hashlib.sha256(), 0
        descriptor = os.open(self.aside / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    done = os.write(descriptor, view[:PIECE])
                    digest.update(view[:done])
                    size += done
                    view = view[done:]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.files[name] = Written(size, digest.hexdigest())
        return self.files[name]

    def write_json(self, name: str, content: object) -> Written:
        """Writes one JSON file."""
        return self.write(name, [(json.dumps(content, indent=2) + "\n").encode()])

    def put_in_place(self) -> Path:
        """Syncs the folder and gives it its final name; what had that name is set aside, never mixed with it."""
        sync(self.aside)
        if os.path.lexists(self.final):
            set_aside(self.final, "replaced")
        os.rename(self.aside, self.final)
        sync(self.final.parent)
        return self.final

    def abandon(self) -> None:
        """Removes what was written, as far as the disk lets us."""
        shutil.rmtree(self.aside, ignore_errors=True)


def set_aside(path: Path, word: str) -> Path:
    """Renames `path` to the first free `<word>-<name>` beside it and returns that: nothing is ever deleted here.

    Raises:
        OSError: it cannot be renamed.
    """
    new, number = path.with_name(f"{word}-{path.name}"), 1
    while os.path.lexists(new):
        number += 1
        new = path.with_name(f"{word}-{path.name}-{number}")
    os.rename(path, new)
    return new


def sync(path: Path) -> None:
    """Makes a folder's entries durable.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sum_file(path: Path) -> Written:
    """Size and checksum of a file as it is now.

    Raises:
        OSError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            size += len(piece)
    return Written(size, digest.hexdigest())


def tensor_pieces(
    tensors: dict[str, Tensor], dtype: torch.dtype | None = None, metadata: dict[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """A safetensors file of tensors on the CPU, piece by piece.

    Args:
        dtype: what floating-point values are turned into, one tensor at a time; None leaves them.
        metadata: goes into the header.
    """

    def kind(value: Tensor) -> torch.dtype:
        return dtype if dtype is not None and value.is_floating_point() else value.dtype

    # Wide types first, so that every tensor starts where its type wants it; then by name, so that equal content gives
    # equal bytes.
    names = sorted(tensors, key=lambda name: (-kind(tensors[name]).itemsize, name))
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    place = 0
    for name in names:
        value = tensors[name]
        end = place + value.numel() * kind(value).itemsize
        header[name] = {"dtype": _NAMES[kind(value)], "shape": list(value.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        value = tensors[name]
        flat = value.detach().to(kind(value)).contiguous().reshape(-1)
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data
