"""Whose a folder in the root of the compile caches is: names of those that are ours, and `flock` on a file in each.

A cache is a folder named by 16 hexadecimal digits; a process that compiles into it or loads from it holds its lock,
shared, until it ends. What a process makes lies meanwhile in a room of its own (".filling-k3x_81ab"), locked
exclusively, and is renamed out of it when it is finished. The kernel frees a lock however the process ends, and asks
for no process number: those of containers that share the root may be equal. Only what can be locked exclusively is
deleted or replaced, so nothing is where the file system knows no locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

LOCK = "in-use.lock"
TRIES, PAUSE = 5, 0.05  # who looks whether a folder is in use holds it for a moment
_CACHE = re.compile(r"[0-9a-f]{16}")
_ROOM = re.compile(r"\.(filling|unpacking|old)-\w{8}")


class CacheRefused(RuntimeError):
    """A cache does not fit, is damaged or in use; the message names the field, the file or the folder."""


class InUse(CacheRefused):
    """Another process has the folder."""


def is_ours(item: Path) -> bool:
    """Whether something in the root is a cache of ours or a room."""
    named = _CACHE.fullmatch(item.name) or _ROOM.fullmatch(item.name)
    return named is not None and item.is_dir() and not item.is_symlink()


def is_room(item: Path) -> bool:
    """Whether something in the root is what a process makes, or left unfinished."""
    return is_ours(item) and _ROOM.fullmatch(item.name) is not None


def cache_around(folder: Path, root: Path) -> Path | None:
    """The cache in the root that a folder is, or lies in, whether it is there or not; both paths resolved."""
    for place in (folder, *folder.parents):
        if place.parent == root and _CACHE.fullmatch(place.name):
            return place
    return None


@contextlib.contextmanager
def room(root: Path, kind: str) -> Iterator[Path]:
    """A new folder for what this process makes; deleted at the end, with all that was not renamed out of it.

    Raises:
        OSError: it cannot be made.
    """
    folder, descriptor = _make_room(root, kind)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def _make_room(root: Path, kind: str) -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=root))
        try:
            return folder, _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            continue  # taken for abandoned before it was locked: whoever did so deletes it
        except OSError as error:
            _warn_unlocked(folder, error)
            return folder, None


def _warn_unlocked(folder: Path, why: OSError) -> None:
    """Python shows the same text of the same line once."""
    text = f"compile caches in {folder.parent} cannot be locked, so others may delete or replace them: "
    warnings.warn(text + (why.strerror or str(why)), stacklevel=1)


def share(folder: Path) -> int | None:
    """Make a folder if it is not there, and keep others from deleting or replacing it until this process ends.

    Returns:
        The lock's descriptor. None, after a warning, where there are no locks; or where this process may only read,
        and nobody who may write has locked the folder before.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            return _lock(folder, fcntl.LOCK_SH)
        except FileNotFoundError:
            continue  # deleted or replaced meanwhile
        except OSError as error:
            _warn_unlocked(folder, error)
            return None


@contextlib.contextmanager
def shared(folder: Path) -> Iterator[None]:
    """Keep others from deleting or replacing a folder; where it cannot be locked, after a warning, do without.

    Raises:
        FileNotFoundError: it is gone.
    """
    try:
        descriptor = _lock(folder, fcntl.LOCK_SH)
    except FileNotFoundError:
        raise
    except OSError as error:
        _warn_unlocked(folder, error)
        yield
        return
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusively(folder: Path) -> Iterator[None]:
    """Hold a folder that no other process has.

    Raises:
        InUse: one has.
        CacheRefused: that cannot be known.
        FileNotFoundError: it is gone.
    """
    descriptor = _lock_alone(folder)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock_alone(folder: Path) -> int:
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE)
        try:
            return _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        except FileNotFoundError:
            raise
        except OSError as error:
            raise CacheRefused(f"{folder} cannot be locked, so it may be in use: {error.strerror or error}") from error
    raise InUse(f"{folder} is in use by another process")


def remove(folder: Path) -> None:
    """Delete a folder that no other process has; under another name, so that nobody begins to use it meanwhile.

    Raises:
        CacheRefused: as `exclusively`.
        OSError: it is gone, or cannot be deleted.
    """
    with exclusively(folder), room(folder.parent, "old") as old:
        os.rename(folder, old / folder.name)
        shutil.rmtree(old / folder.name)


def _lock(folder: Path, how: int) -> int:
    """Lock a folder; returns the descriptor, whose closing frees it.

    Raises:
        BlockingIOError: another process has it.
        FileNotFoundError: it is gone, or another one is in its place since.
        OSError: it cannot be locked.
    """
    descriptor = _open(folder / LOCK)
    try:
        fcntl.flock(descriptor, how)
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open(file: Path) -> int:
    """The descriptor of a lock's file, which is made if need be; to read only where that is all that is allowed."""
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        try:
            return os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise error from None
