"""The lock of a run folder: `flock` on its file `lock`, which holds the process number and the host's name.

The kernel frees the lock when the process ends, however it ends. Others may look whether it is held, also where they
may not write: looking takes a shared lock for a moment, which is why a taker tries more than once.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LOCK_FILE = "lock"
TRIES, PAUSE = 5, 0.05


@dataclass(frozen=True)
class Holder:
    """Who holds a run folder.

    Attributes:
        held: "yes"; "no"; "unknown" where the lock was last taken on another host, whose kernel knows.
        pid, host: of the process that took it last; None if nobody ever did.
    """

    held: Literal["yes", "no", "unknown"]
    pid: int | None
    host: str | None

    def name(self) -> str:
        """For people: "pid 12", or "pid 12 on node7" from elsewhere; empty for nobody."""
        if self.pid is None:
            return ""
        return f"pid {self.pid}" + (f" on {self.host}" if self.host not in (None, socket.gethostname()) else "")


class Held(Exception):
    """The lock is another process's."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(holder.name())
        self.holder = holder


def take_lock(folder: Path) -> int:
    """Takes the lock and returns its descriptor; closing that frees it.

    Raises:
        Held: another process has it.
        OSError: the file cannot be written, or the file system knows no locks.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        for attempt in range(TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == TRIES - 1:
                    raise Held(_written(descriptor, "yes")) from None
                time.sleep(PAUSE)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def look_at_lock(folder: Path) -> Holder:
    """Who holds the lock, without keeping it; needs to read only.

    Raises:
        OSError: the file is there but cannot be opened.
    """
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return Holder("no", None, None)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _written(descriptor, "yes")
        except OSError:  # a file system without locks
            return _written(descriptor, "unknown")
        found = _written(descriptor, "no")
        if found.host not in (None, socket.gethostname()):
            return Holder("unknown", found.pid, found.host)
        return found
    finally:
        os.close(descriptor)


def _written(descriptor: int, held: Literal["yes", "no", "unknown"]) -> Holder:
    words = os.pread(descriptor, 300, 0).decode(errors="replace").split()
    if not words or not words[0].isdigit():
        return Holder(held, None, None)
    return Holder(held, int(words[0]), words[1] if len(words) > 1 else None)
