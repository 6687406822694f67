"""The folder of one run: made once, locked while in use, never overwritten.

`run.json` names the run by its config's fingerprint. A folder is accepted when it is new or holds no more than what was
prepared for the run (`config.yaml`, `data/`), or, with `resume=True`, when it holds the run with the same fingerprint.
While it is in use it is locked (`lock.py`); a crash never leaves a folder locked.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import draftsmith
from draftsmith.config import RunConfig, parse_config
from draftsmith.errors import UserError, reason_of, what_is_at
from draftsmith.observe.aside import asides, remove_left, written_aside
from draftsmith.observe.lock import LOCK_FILE, Held, take_lock

_RUN_FILE = "run.json"
_PREPARED = {"config.yaml", "data"}  # never written here
_SYSTEM = ("/proc", "/sys")
_OTHER_OUTPUT = "choose another training.output"


class RunFolder:
    """A run folder that this process holds. Close it (or use `with`) to free it for others."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @property
    def events(self) -> Path:
        """The event file."""
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """The folder TensorBoard reads."""
        return self.path / "tensorboard"

    def discard(self) -> None:
        """Removes what this process wrote: for a run that never began. The same command can be given again then."""
        for item in self.path.iterdir():
            if item.name in _PREPARED or item.name == LOCK_FILE:
                continue
            if item.is_dir():
                shutil.rmtree(item, ignore_errors=True)
            else:
                item.unlink(missing_ok=True)

    def close(self) -> None:
        """Frees the lock. The lock file stays: removing it would race with a process that waits for it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_run_folder(config: RunConfig, *, resume: bool = False) -> RunFolder:
    """Creates `config.training.output`, or with `resume` opens it again, and locks it.

    Raises:
        UserError: the folder holds something else, a different run, or the same run and `resume` is false; there is
            nothing to resume; another process uses it; it cannot be written.
    """
    path = Path(config.training.output)
    check_run_folder(config, resume=resume)
    try:
        if not resume:
            path.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(path)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        _check(path, config, resume)  # again, now that no other process can change it
        if not resume:
            _write_run_file(path, config)
    except OSError as error:
        os.close(lock)
        raise _unwritable(path, error) from None
    except BaseException:
        os.close(lock)
        raise
    return RunFolder(path, lock)


def check_run_folder(config: RunConfig, *, resume: bool = False) -> None:
    """Raises what `open_run_folder` would, without writing: for before the work that comes before the first write.

    Only what a first write alone can tell (a full disk, another process on the folder) is left to it.
    """
    path = Path(config.training.output)
    try:
        _check(path, config, resume)
        _check_writable(path)
    except OSError as error:
        raise _unwritable(path, error) from None


def holds_run(config: RunConfig) -> bool:
    """Whether the config's output folder holds a run already, whichever it is."""
    return (Path(config.training.output) / _RUN_FILE).exists()


def next_free(path: str | Path) -> Path:
    """`path` if nothing is there or it is empty, else the first free one of `path-2`, `path-3`, …

    Raises:
        UserError: nobody may look.
    """
    path = Path(path)
    candidate, number = path, 1
    try:
        while (there := what_is_at(candidate)) and (there == "file" or any(candidate.iterdir())):
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")
    except OSError as error:
        raise UserError(f"cannot be read: {reason_of(error)}", where=str(candidate)) from None
    return candidate


def _check(path: Path, config: RunConfig, resume: bool) -> None:
    """Raises UserError unless `path` is free for a new run, or holds just this one when `resume`."""
    where = str(path)
    if path.exists() and not path.is_dir():
        raise UserError("is a file, not a run folder", where=where, fix=_OTHER_OUTPUT)
    content = {item.name for item in path.iterdir()} if path.exists() else set()
    if _RUN_FILE not in content:
        if resume:
            raise UserError("no run here to resume", where=where, fix="start it without --resume")
        if content - _PREPARED - {LOCK_FILE, *(each.name for each in asides(path / _RUN_FILE))}:
            raise UserError("is not empty and holds no run", where=where, fix=_OTHER_OUTPUT)
        return
    there = _read_run_file(path)
    if there["fingerprint"] != config.fingerprint():
        raise UserError(
            f"already holds a different run ({_difference(there['config'], config)})",
            where=where,
            fix="choose another training.output, or resume with the config that started it",
        )
    if not resume:
        raise UserError(
            "already holds this run", where=where, fix="continue it with --resume, or choose another training.output"
        )


def _check_writable(path: Path) -> None:
    """Raises OSError if a folder cannot be made or written there, as far as looking tells; makes nothing."""
    nearest = path.absolute()
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    status = os.stat(nearest)
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if os.statvfs(nearest).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    # What the system shows there as files has the right bits for root, who cannot make anything all the same.
    shown = any(os.path.ismount(each) and os.stat(each).st_dev == status.st_dev for each in _SYSTEM)
    if shown or not os.access(nearest, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def _take_lock(path: Path) -> int:
    try:
        return take_lock(path)
    except Held as error:
        name = error.holder.name()
        raise UserError(
            f"in use by another process{f' ({name})' if name else ''}",
            where=str(path),
            fix="wait for it, stop it, or choose another training.output",
        ) from None


def _write_run_file(path: Path, config: RunConfig) -> None:
    """Writes run.json aside and moves it into place: a crash leaves a folder without a run, not with half of one."""
    content = {
        "fingerprint": config.fingerprint(),
        "draftsmith": draftsmith.__version__,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config": config.model_dump(mode="json"),
    }
    remove_left(path / _RUN_FILE)
    with written_aside(path / _RUN_FILE) as file:
        json.dump(content, file, indent=1, ensure_ascii=False)


def _read_run_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads((path / _RUN_FILE).read_text(encoding="utf-8"))
        if isinstance(content["fingerprint"], str) and isinstance(content["config"], dict):
            return content
        problem = "its entries have the wrong types"
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise UserError(
        f"cannot be understood: {problem}", where=str(path / _RUN_FILE), fix="choose another training.output"
    )


def _difference(there: dict[str, Any], config: RunConfig) -> str:
    """The first keys whose values differ and may not where a run is resumed, "drafter.layers 5 there, 4 here"."""
    flat_there, flat_here = _flatten(there), _flatten(config.learned_by())
    with suppress(UserError):  # written by another version, it may hold what this one does not know
        flat_there = _flatten(parse_config(there).learned_by())
    differing = [
        f"{key} {_word(flat_there.get(key))} there, {_word(value)} here"
        for key, value in sorted(flat_here.items())
        if flat_there.get(key) != value
    ]
    if not differing:
        return "same settings, other version of the config"
    more = f"; {len(differing) - 3} more" if len(differing) > 3 else ""
    return "; ".join(differing[:3]) + more


def _word(value: Any) -> Any:
    """A value as the config's pages and YAML write it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else value


def _flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _unwritable(path: Path, error: OSError) -> UserError:
    problem = reason_of(error)
    return UserError(f"cannot be used as run folder: {problem}", where=str(path), fix=_OTHER_OUTPUT)
