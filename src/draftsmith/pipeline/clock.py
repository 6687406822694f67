"""Where a worker's time goes: busy, waiting for input, waiting for output. Host time, one clock per worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class WorkerClock:
    """Adds up host seconds by activity and remembers the spans of single rows.

    Used by one thread; others may read `seconds` and call `drain` at any time.
    """

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.seconds = {"busy": 0.0, "input": 0.0, "output": 0.0}
        self._spans: list[tuple[int, float, float]] = []

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Counts the time inside as waiting for "input" or "output"."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - began

    @contextmanager
    def busy(self, row: int) -> Iterator[None]:
        """Counts the time inside as work on a row."""
        began, wall = time.perf_counter(), time.time()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self.seconds["busy"] += spent
            self._spans.append((row, wall, wall + spent))

    def drain(self) -> list[dict[str, Any]]:
        """Spans since the last call, as fields of "work" events."""
        spans, self._spans = self._spans, []
        return [
            {"worker": self.worker, "row": row, "start": round(start, 6), "end": round(end, 6)}
            for row, start, end in spans
        ]
