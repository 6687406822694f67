"""Files of this package are there whole or not at all: written beside their place, then renamed into it."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def aside_of(file: Path) -> Path:
    """Where a file is written before it is renamed; a new name at each call, so writers at once do not meet."""
    return file.with_name(f".{file.name}.{secrets.token_hex(4)}.new")


def write_aside(file: Path, text: str) -> None:
    """Write a UTF-8 file that takes its place once it is on disk; after a failure what was there stays, alone.

    Raises:
        OSError: it cannot be written.
    """
    aside = aside_of(file)
    try:
        with aside.open("x", encoding="utf-8") as new:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
        os.replace(aside, file)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
