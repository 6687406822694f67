"""How long a thread that wants the interpreter has to wait for it: a probe that wants it fifty times a second.

One interpreter lock serves all threads of a process. The probe sleeps for a moment and looks how late it runs again;
what the machine's timer adds (looked at before the workers start), and what the kernel says the thread waited for a
core, is taken off. The mean of the rest is what a thread pays each time it goes to sleep for the lock.

A worker's estimate (`clock`) is that mean times the number of times it went to sleep inside its work, and never more
than the time in which it was not on a core. It is an upper estimate: a thread also sleeps for locks of the driver. What
the autograd thread waits for is not seen.

Cost: some 20 µs of the interpreter, fifty times a second.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PERIOD = 0.02
KEPT = 500  # samples: ten seconds
TRIALS = 5  # sleeps that the timer's own lateness is the least of
NOTICEABLE = 5e-5  # seconds above the timer's own lateness
TURN = 1e-4  # seconds for which a thread may keep the interpreter while another wants it


@contextmanager
def short_turns() -> Iterator[None]:
    """Within it, a thread that wants the interpreter gets it after `TURN`; Python's own 5 ms are longer than dozens of
    operators take, and a thread lets it go at every operator that it calls.

    Four threads calling small operators: 2.7 times the time of one thread doing it all with Python's turns, 1.1 times
    with these.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class InterpreterProbe(threading.Thread):
    """See the module's docstring; `start`, then `end`. If it fails, waits count as 0 from then on."""

    def __init__(self) -> None:
        super().__init__(name="interpreter probe", daemon=True)
        self._late: deque[float] = deque(maxlen=KEPT)
        self._floor = min(_lateness(0.002) for _ in range(TRIALS))
        self._over = threading.Event()

    def run(self) -> None:
        queued = _queued()
        while not self._over.is_set():
            late = _lateness(PERIOD)
            before, queued = queued, _queued()
            self.note(late - (queued - before))

    def note(self, late: float) -> None:
        """One sample, in seconds."""
        self._floor = min(self._floor, max(0.0, late))
        self._late.append(late)

    def end(self) -> None:
        self._over.set()

    def wait(self) -> float:
        """Mean seconds of a wait, of those moments of the last ten seconds at which there was one; else 0."""
        waits = self._waits()
        return sum(waits) / len(waits) if waits else 0.0

    def to_json(self) -> dict[str, Any]:
        """Share of the moments at which somebody else held it, and milliseconds until it was free then."""
        waits = self._waits()
        return {"taken": round(len(waits) / max(1, len(self._late)), 4), "wait_ms": round(1e3 * self.wait(), 3)}

    def _waits(self) -> list[float]:
        floor = self._floor
        return [each - floor for each in list(self._late) if each - floor > NOTICEABLE]


def _lateness(seconds: float) -> float:
    """Of a sleep of so many seconds."""
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began - seconds


def _queued() -> float:
    """Seconds that this thread has waited for a core; 0 where the kernel does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0
