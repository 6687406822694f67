"""The single record of a run: typed events, one JSON object a line.

Workers of any thread call `EventLog.write`; everything that shows something (live line, TensorBoard, picture, status)
reads the same events, either while they are written (a listener) or later from the file (`read_events`).

Each line is one `write` system call on a descriptor opened with O_APPEND, so lines of several threads never mix and a
crash can tear at most the last one. A torn line is closed with a newline by the next writer and skipped by readers.
Every few hundred lines, and at the end, a "summary" event says what all lines before it add up to (`summary.py`).
Cost: about 15 µs an event. Numbers that JSON has no word for are written as the strings "nan", "inf" and "-inf", which
`float()` reads back.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.observe.summary import Event, parse, read_summary

SUMMARY_EVERY = 250
Listener = Callable[[Event], None]


class EventLog:
    """Appends events to a file and hands each one to the listeners.

    Args:
        path: the file; made with its parent folder, continued if it is there.
        listeners: called with every event, in the thread that writes it, one at a time.

    If it fails: an event that cannot be written (disk full) does not stop the run. It still reaches the listeners, is
    counted in `lost`, and a "notice" with the count follows once writing works again. A listener that raises is
    dropped and named in a "notice".

    Raises:
        UserError: the file cannot be opened.
    """

    def __init__(self, path: str | Path, listeners: Iterable[Listener] = ()) -> None:
        self.path = Path(path)
        self.lost = 0
        self._listeners = list(listeners)
        self._lock = threading.RLock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            self._torn = _ends_torn(self._descriptor)
        except OSError as error:
            raise UserError(f"events cannot be written: {error.strerror}", where=str(self.path)) from None
        self._closed = False
        self.summary = read_summary(self.path)
        self._since_summary = 0

    def write(self, kind: str, **fields: Any) -> None:
        """Records one event. `fields` may hold numbers, text, paths, tensors and arrays (as lists), and nestings."""
        event: Event = {"time": time.time(), "kind": kind, **{key: _plain(value) for key, value in fields.items()}}
        with self._lock:
            self._append(event)
            self.summary.fold(event)
            self._since_summary += 1
            if self._since_summary >= SUMMARY_EVERY or kind == "end":
                self._append_summary(event["time"])
            for listener in tuple(self._listeners):
                try:
                    listener(event)
                except Exception as error:  # what shows a run must never end it
                    self._listeners.remove(listener)
                    self.write("notice", text=f"a listener failed and was dropped: {type(error).__name__}: {error}")

    def listen(self, listener: Listener) -> None:
        """Adds a listener that gets every event from now on."""
        with self._lock:
            self._listeners.append(listener)

    def close(self) -> None:
        """Closes the file; events written later reach the listeners only."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._descriptor)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append_summary(self, now: float) -> None:
        self._since_summary = 0
        self._append({"time": now, "kind": "summary", "content": self.summary.content})

    def _append(self, event: Event) -> None:
        if self._closed:
            return
        line = (json.dumps(event, ensure_ascii=False, separators=(",", ":")) + "\n").encode("utf-8", "replace")
        if self.lost:
            notice = {"time": event["time"], "kind": "notice", "text": f"{self.lost} events could not be written"}
            line = (json.dumps(notice) + "\n").encode() + line
        try:
            data = b"\n" + line if self._torn else line
            written = os.write(self._descriptor, data)
            if written < len(data):
                self._torn = True
                raise OSError(f"{written} of {len(data)} bytes written")
        except OSError as error:
            if not self.lost:
                print(f"draftsmith: {self.path}: events cannot be written: {error}", file=sys.stderr)
            self.lost += 1
        else:
            self._torn = False
            self.lost = 0


def read_events(path: str | Path) -> Iterator[Event]:
    """Yields the events of a file in the order of writing, also while a run writes it.

    Lines that are not whole (torn by a crash, or half written at this moment) are skipped, and so are summaries; for an
    event that is malformed one of that kind comes (`summary.parse`).

    Raises:
        UserError: the file is missing or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            for line in file:
                event = parse(line)
                if event is not None and event["kind"] != "summary":
                    yield event
    except FileNotFoundError:
        raise UserError("no events here: not a run folder?", where=str(Path(path).resolve().parent)) from None
    except OSError as error:
        raise UserError(f"events cannot be read: {error.strerror}", where=str(path)) from None


def _ends_torn(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it. Raises TypeError for what has no such form, which is our bug and not the user's."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # tensors and arrays, without importing either library
        return _plain(value.tolist())
    return str(value) if isinstance(value, BaseException) else _refuse(value)


def _refuse(value: Any) -> Any:
    raise TypeError(f"an event cannot hold {type(value).__name__}")
