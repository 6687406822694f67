"""Where a worker's time goes. Host time, one clock per worker, five kinds that never overlap:

    busy         at work: its thread, or its device with what the thread gave it
    input        its device has nothing to do, not for another worker either, because no row has come
    output       its device has nothing to do, because the next worker's queue is full
    others       a replica waits at the exchange for the others' threads
    compiling    in the warm-up
    interpreter  part of the thread's work in which it waited for the interpreter lock, estimated (`interpreter`)

On CUDA a thread only gives work to its device, two rows ahead of it at most. A wait of the thread in which the device
still works is therefore counted as busy; only what is left of it is a wait (`Pace.idle`). Workers that share a device
look at all of its work: a drafter whose target has the card at that moment keeps nothing idle.

Cost: some microseconds a row, and on CUDA an event that is waited for after a wait in which the device ran dry.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

KINDS = ("busy", "input", "output", "others", "compiling", "interpreter")
_Begun = tuple[str, float, float | None]  # kind, seconds before it last paused, since when it goes on; None: it pauses
AHEAD = 2  # rows that a thread may give to its device before one of them is done


class WorkerClock:
    """Adds up host seconds by activity and remembers the spans of single rows.

    Used by one thread; others may read `seconds` and call `drain` at any time.

    Attributes:
        worker: its name.
        seconds: by kind, see the module's docstring.
        rows: that it has worked on.
        interpreter_wait: mean seconds that a thread waits for the interpreter now; set by who measures it.
    """

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.rows = 0
        self.interpreter_wait: Callable[[], float] = lambda: 0.0
        self._spans: list[dict[str, Any]] = []
        self._row: dict[str, Any] = {}
        self._open: tuple[_Begun, ...] = ()  # what has begun and is not counted yet, the innermost last

    def totals(self) -> dict[str, float]:
        """`seconds` with what is going on at this moment."""
        found, now = dict(self.seconds), time.perf_counter()
        for what, seconds, since in self._open:
            found[what] += seconds + (now - since if since is not None else 0.0)
        return found

    @contextmanager
    def opened(self, what: str) -> Iterator[None]:
        """Shows in `totals` that something of a kind goes on; whoever calls it counts it afterwards."""
        outer, now = self._open, time.perf_counter()
        if outer:  # it pauses
            kind, seconds, since = outer[-1]
            assert since is not None
            outer = (*outer[:-1], (kind, seconds + now - since, None))
        self._open = (*outer, (what, 0.0, now))
        try:
            yield
        finally:
            if outer:
                kind, seconds, _ = outer[-1]
                outer = (*outer[:-1], (kind, seconds, time.perf_counter()))
            self._open = outer

    def add(self, what: str, seconds: float) -> None:
        """Counts time that was measured elsewhere."""
        self.seconds[what] += seconds
        if what in ("input", "output"):
            self._row[what] = self._row.get(what, 0.0) + seconds

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Counts the time inside as one of the kinds that are no work on a row."""
        began = time.perf_counter()
        try:
            with self.opened(what):
                yield
        finally:
            self.add(what, time.perf_counter() - began)

    @contextmanager
    def phase(self, what: str, number: int, kind: str = "busy") -> Iterator[None]:
        """Counts the time inside as of a kind, and remembers it as a span under a name of its own."""
        before = {name: self.seconds[name] for name in KINDS}
        began, wall = time.perf_counter(), time.time()
        try:
            with self.opened(kind):
                yield
        finally:
            spent = time.perf_counter() - began
            inside = sum(self.seconds[name] - before[name] for name in KINDS)
            self.seconds[kind] += max(0.0, spent - inside)  # what was counted inside is counted once
            span = {"kind": "phase", "what": what, "number": number, "start": round(wall, 6)}
            self._spans.append({**span, "end": round(wall + spent, 6)})

    @contextmanager
    def busy(self, row: int) -> Iterator[None]:
        """Counts the time inside as work on a row; `done` ends the row."""
        sleeps, on_core = _thread_use()
        began, wall = time.perf_counter(), time.time()
        try:
            with self.opened("busy"):
                yield
        finally:
            spent = time.perf_counter() - began
            sleeps_after, on_core_after = _thread_use()
            off_core = max(0.0, spent - (on_core_after - on_core))
            waited = min(off_core, (sleeps_after - sleeps) * self.interpreter_wait())
            self.seconds["interpreter"] += waited
            self.seconds["busy"] += spent - waited
            self._row.setdefault("start", wall)
            self._row.update(row=row, end=wall + spent)

    def on_device(self, seconds: float) -> None:
        """Counts time in which the thread waited and its device worked on what it was given."""
        self.seconds["busy"] += seconds

    def done(self, queue: int = 0) -> None:
        """Ends the row that was worked on; `queue` rows wait in front of the worker."""
        row, self._row = self._row, {}
        if "row" not in row:
            return
        self.rows += 1
        span: dict[str, Any] = {"kind": "work", "row": row["row"]}
        span.update((name, round(row[name], 6)) for name in ("start", "end"))
        span.update((name, round(row[name], 6)) for name in ("input", "output") if row.get(name, 0.0) >= 1e-6)
        self._spans.append({**span, "queue": queue})

    def drain(self) -> list[dict[str, Any]]:
        """Spans since the last call, as events: "work" on rows, and "phase" for what is none."""
        count = len(self._spans)  # its worker may append at any moment: what comes later stays for the next call
        spans = self._spans[:count]
        del self._spans[:count]
        return [{"worker": self.worker, **span} for span in spans]


def between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What each kind grew by from one reading of `WorkerClock.totals` to a later one, in seconds.

    Never negative: what an open span counts as busy may turn out, once it ends, to have waited for the interpreter.
    """
    return {what: max(0.0, value - before.get(what, 0.0)) for what, value in after.items()}


def shares_of(grown: dict[str, float], seconds: float) -> dict[str, float]:
    """What `between` found as shares of the time between the two readings, kind by kind; 1 at most, since clocks and
    time are not read at the very same moment."""
    return {kind: round(min(1.0, grown[kind] / seconds), 4) for kind in KINDS}


def _thread_use() -> tuple[int, float]:
    """(times that this thread went to sleep, seconds that it was on a core)."""
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_nvcsw, used.ru_utime + used.ru_stime


@contextmanager
def waiting_for_others() -> Iterator[None]:
    """Counts the time inside for the worker whose thread this is, if it is one's."""
    clock = getattr(threading.current_thread(), "clock", None)
    if clock is None:
        yield
        return
    with clock.waiting("others"):
        yield


class Pace:
    """Keeps a thread at most `AHEAD` rows ahead of its device, so that memory and clocks mean what they say.

    Without a CUDA device the work is done when the call returns, and all of this does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._marks: list[torch.cuda.Event] = []
        self._end: torch.cuda.Event | None = None  # behind everything that was given
        self._on_device: tuple[Pace, ...] = (self,)

    def mark(self) -> None:
        """After a row's work was given to the device."""
        if self._device is not None:
            self._end = self._event()
            self._marks.append(self._end)

    def extend(self) -> None:
        """After further work that is no row (an update): until it is done, the device is not idle."""
        if self._device is not None:
            self._end = self._event()

    def keep(self) -> None:
        """Before a row's work: waits until the device is near enough. The thread sleeps meanwhile."""
        while len(self._marks) >= AHEAD:
            self._marks.pop(0).synchronize()

    @staticmethod
    def share(paces: Iterable[Pace]) -> None:
        """Tells paces of the same device of each other."""
        by_device: dict[torch.device, list[Pace]] = {}
        for pace in paces:
            if pace._device is not None:
                by_device.setdefault(pace._device, []).append(pace)
        for group in by_device.values():
            for pace in group:
                pace._on_device = tuple(group)

    def idle(self) -> float:
        """Seconds for which the device has had nothing to do; infinite where there is none to ask."""
        ends = [end for pace in self._on_device if (end := pace._end) is not None]
        if not ends:
            return float("inf")
        if not all(end.query() for end in ends):
            return 0.0
        now = self._event()
        now.synchronize()
        return 1e-3 * max(0.0, min(end.elapsed_time(now) for end in ends))

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
