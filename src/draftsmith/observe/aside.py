"""A file that is there whole or not at all: written beside its place, then moved into it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def written_aside(path: Path, *, errors: str = "strict") -> Iterator[TextIO]:
    """Yields a UTF-8 file that takes the place of `path` once it is written and on disk.

    On any error, a full disk for one, what was at `path` stays and the new file goes; a process that is killed leaves
    it behind (`asides`). Each has a name of its own, so two writers at a time do not tear each other's: the last stays.

    Args:
        path: of the file; its folder must be there.
        errors: what becomes of text that UTF-8 cannot hold, as for `open`.

    Raises:
        OSError: it cannot be written, or the path names a folder by its form ("/", ".").
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    aside = path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}.new")
    try:
        with aside.open("x", encoding="utf-8", errors=errors) as file:  # not mkstemp: others may read it as any file
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def asides(path: Path) -> list[Path]:
    """Files that writers of `path` are at, or left behind when they were killed."""
    return [each for each in path.parent.glob("*.new") if each.name.startswith(_prefix(path))]


def remove_left(path: Path) -> None:
    """Removes what writers of a file left behind when they were killed; only for who holds the folder.

    Raises:
        OSError: one cannot be removed.
    """
    for left in asides(path):
        left.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    return f".{path.name}."
