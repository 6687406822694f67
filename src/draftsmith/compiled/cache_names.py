"""Names of folders in the root of the compile caches: which are ours, and which may be deleted.

A cache is a folder named by 16 hexadecimal digits. What a process has not finished says whose it is
(".filling-12-node7"): several hosts may share the root, and only a process's own host knows whether it lives.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

_CACHE = re.compile(r"[0-9a-f]{16}")
_KINDS = r"filling|checking|unpacking|[0-9a-f]{16}\.old"
_UNFINISHED = re.compile(rf"\.({_KINDS})-(?P<pid>\d{{1,9}})(-(?P<host>.+))?")  # without a host: of this one
_UNOWNED = re.compile(r"\.unpacking-\w+")


def own_name(kind: str) -> str:
    """A name for what this process has not finished yet: ".filling-12-node7"."""
    return f".{kind}-{os.getpid()}-{socket.gethostname()}"


def is_unfinished(item: Path) -> bool:
    """Whether a name says which process has not finished it."""
    return _UNFINISHED.fullmatch(item.name) is not None


def why_kept(item: Path) -> str:
    """Why something in the root may not be deleted; "" if it may."""
    unfinished = _UNFINISHED.fullmatch(item.name)
    ours = unfinished or _CACHE.fullmatch(item.name) or _UNOWNED.fullmatch(item.name)
    if not ours or item.is_symlink() or not item.is_dir():
        return "not made by Draftsmith"
    if unfinished is None:
        return ""
    host, pid = unfinished["host"] or socket.gethostname(), int(unfinished["pid"])
    if host != socket.gethostname():
        return f"process {pid} on {host} may be writing it"
    return f"process {pid} is writing it" if _lives(pid) else ""


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
