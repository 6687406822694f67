"""An output file that work is appended to line by line, and that a later start continues.

One line of JSON per finished piece of work, written in one system call: a process that is killed leaves whole lines and
at most one torn one, which the next start drops. What the work is stands beside it in `<output>.meta.json`; a start
with another description is refused, and so is a second process on the same file. An empty output holds no work yet and
is free for any, so that a start that was refused after it opened its output stands in nobody's way.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError, reason_of
from draftsmith.observe.aside import remove_left, written_aside

Found = Callable[[dict[str, Any]], None]


class OutputLines:
    """An output file that is locked and continued; `done` holds the prompt indices that it answers."""

    def __init__(self, path: Path, descriptor: int, found: Found | None = None) -> None:
        self._path = path
        self._descriptor = descriptor
        self.done = self._read_done(found)

    def append(self, record: dict[str, Any]) -> None:
        """Writes one line.

        Raises:
            UserError: it cannot be written whole; the torn part is dropped at the next start.
        """
        data = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        try:
            written = os.write(self._descriptor, data)
            if written < len(data):
                raise OSError(f"{written} of {len(data)} bytes written")
        except OSError as error:
            raise unwritable(self._path, error) from None
        self.done.add(record["prompt_index"])

    def drop(self) -> None:
        """Takes all lines back.

        Raises:
            UserError: the file cannot be written.
        """
        try:
            os.ftruncate(self._descriptor, 0)
        except OSError as error:
            raise unwritable(self._path, error) from None
        self.done.clear()

    def _read_done(self, found: Found | None) -> set[int]:
        done: set[int] = set()
        whole = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                try:
                    record = json.loads(line)
                    done.add(int(record["prompt_index"]))
                except (ValueError, KeyError, TypeError):
                    raise UserError("not a line that was written here", where=f"{self._path}:{number}") from None
                if found is not None:
                    found(record)
        os.ftruncate(self._descriptor, whole)  # an answer that a crash tore
        return done


@contextmanager
def open_output(
    path: Path, facts: dict[str, Any], found: Found | None = None, noted: dict[str, Any] | None = None
) -> Iterator[OutputLines]:
    """Opens an output of the work described by `facts`, new or continued, and holds its lock.

    Args:
        path: the file.
        facts: what the work is, as JSON can hold it.
        found: gets every record that is there already.
        noted: written down beside `facts` and not compared: it does not decide what comes out.

    Raises:
        UserError: the output holds something else, is in use, or cannot be written. An empty one holds nothing.
    """
    meta = Path(f"{path}.meta.json")
    try:
        if path.exists() and not meta.exists() and not _is_empty(path):
            raise UserError("exists and is not the output of this work", where=str(path), fix="name another output")
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise unwritable(path, error) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _check_facts(meta, facts, noted or {}, path, free=os.fstat(descriptor).st_size == 0)
            lines = OutputLines(path, descriptor, found)
        except BlockingIOError:
            raise UserError("another process is writing it", where=str(path), fix="wait for it or stop it") from None
        except OSError as error:
            raise unwritable(path, error) from None
        yield lines  # what goes wrong in there has nothing to do with this file
    finally:
        os.close(descriptor)


def _is_empty(path: Path) -> bool:
    """Whether this is a file with nothing in it; what is no file (a pipe, a device) has no size that says so."""
    return path.is_file() and path.stat().st_size == 0


def _check_facts(meta: Path, facts: dict[str, Any], noted: dict[str, Any], path: Path, free: bool) -> None:
    """Writes down what the work is, or compares with what stands there; beside a `free` output that means nothing, if
    it was written here."""
    facts = json.loads(json.dumps(facts))
    there = _read_facts(meta) if meta.exists() else None
    if there is not None and free:
        if not facts.keys() <= there.keys():
            raise UserError("was not written here", where=str(meta), fix="name another output")
        there = None
    if there is None:
        remove_left(meta)
        with written_aside(meta) as file:
            file.write(json.dumps({**facts, **noted}, indent=1))
        return
    differing = [key for key in facts if there.get(key) != facts[key]]
    if differing:
        details = "; ".join(f"{key} {there.get(key)} there, {facts[key]} here" for key in differing[:2])
        raise UserError(f"holds other work ({details})", where=str(path), fix="name another output")


def _read_facts(meta: Path) -> dict[str, Any]:
    try:
        there = json.loads(meta.read_text(encoding="utf-8"))
    except ValueError:
        there = None
    if not isinstance(there, dict):
        raise UserError("cannot be understood", where=str(meta), fix="name another output")
    return there


def unwritable(path: Path, error: OSError) -> UserError:
    """What a failing disk is to the user."""
    return UserError(f"cannot be written: {reason_of(error)}", where=str(path), fix="name another output")
