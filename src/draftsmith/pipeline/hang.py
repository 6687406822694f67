"""A run in which nothing moves: who waits for whom, every thread's stack in the run's folder, and an end.

`HangWatch.check` is called by the main thread again and again. Whatever shows that somebody got something done counts
as progress: a worker that finished a row or a wait, an update, an event of the warm-up, a checkpoint. If none of it
happens for `pipeline.hang_seconds`, the stacks of all threads go to `stacks.txt` and one `HungError` names the worker
that waits for nobody, since when, and who waits for it. Rows are handed over by number, so one worker that stands still
stops all others within a few rows; a single slow one does not, and is no hang.

More time is given where little shows: `WARM_UP_FACTOR` times as much before the first update (compiling), and as long
as a disk is tried again for the last checkpoint. Only time in which the main thread was awake counts: a process that
was stopped (SIGSTOP, a suspended machine) wakes without a false alarm.

What workers do is read from their stacks, and only once nothing moves: a look at a frame's variables keeps them alive.
Cost otherwise: a few tuples, four times a second.

If a thread holds the interpreter's lock for ever, the main thread stands still too. `faulthandler` then writes the
stacks from outside the interpreter; the process stays.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import draftsmith
from draftsmith.compiled import Gate
from draftsmith.errors import UserError
from draftsmith.observe.events import Event
from draftsmith.pipeline.jobs import Job
from draftsmith.pipeline.link import Link
from draftsmith.pipeline.ranks import Ranks
from draftsmith.pipeline.sync import Exchange

WARM_UP_FACTOR = 3.0
CHECK_SECONDS = 0.25
LOCKED_FACTOR = 1.5  # of the limit: later than the ordinary way, which says more
EXIT_SECONDS = 20.0  # for a process whose threads hang to come to its end by itself
STACKS = "stacks.txt"
_PROGRESS = ("warmup", "evidence", "step", "eval", "checkpoint")  # kinds of events that show that something was done
_SOURCES = Path(draftsmith.__file__).parent
_RANKS = _SOURCES / "pipeline" / "ranks.py"


class HungError(UserError):
    """Nothing moved for too long. Threads of this process may hang for ever: end it soon."""


class Watched(Protocol):
    """What is asked of a worker. Its name is its role and number: "target 2"."""

    @property
    def name(self) -> str: ...
    @property
    def ident(self) -> int | None: ...
    @property
    def clock(self) -> Any: ...


@dataclass(frozen=True)
class Standing:
    """What one worker stands at.

    Attributes:
        waits_for: workers.
        what: for people, behind "target 2 ".
        cause: it waits for nobody and does not come to an end.
    """

    waits_for: tuple[str, ...]
    what: str
    cause: bool = False


class HangWatch:
    """See the module's docstring; use with `with`. One thread calls `check`.

    Args:
        workers: of all kinds.
        seconds: without progress; 0: never a hang.
        folder: of the run, for the stacks.
        rank: of this process; each but the first has a file of its own.
    """

    def __init__(self, workers: Sequence[Watched], seconds: float, folder: Path, rank: int = 0) -> None:
        self._workers, self._seconds = workers, seconds
        self._path = folder / (STACKS if rank == 0 else STACKS.replace(".", f"-rank-{rank}."))
        self._events = 0
        self._before: object = None
        self._idle = 0.0
        self._checked = time.monotonic()
        self._since = {worker.name: (self._checked, ()) for worker in workers}
        self._file: Any = None
        self._armed = 0.0

    def __enter__(self) -> HangWatch:
        if self._seconds:
            with contextlib.suppress(OSError):  # a watch that cannot write watches all the same
                self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        with contextlib.suppress(OSError):
            if not self._path.stat().st_size:
                self._path.unlink()

    def heard(self, event: Event) -> None:
        """A listener of the run's events."""
        self._events += event["kind"] in _PROGRESS

    def check(self, done: int, *, warming_up: bool, more: float = 0.0) -> HungError | None:
        """Looks whether anything moved; the error that ends the run if nothing did for too long.

        Args:
            done: updates so far.
            warming_up: before the first row.
            more: seconds on top of the limit.
        """
        now = time.monotonic()
        if not self._seconds or now - self._checked < CHECK_SECONDS:
            return None
        limit = self._seconds * (WARM_UP_FACTOR if warming_up else 1.0) + more
        self._arm(now, limit)
        awake = min(now - self._checked, 4 * CHECK_SECONDS)
        self._checked = now
        spent = {worker.name: tuple(worker.clock.seconds.values()) for worker in self._workers}
        for name, seconds in spent.items():
            if seconds != self._since[name][1]:
                self._since[name] = (now, seconds)
        state = (done, self._events, spent)
        self._idle = self._idle + awake if state == self._before else 0.0
        self._before = state
        return self._hung(warming_up) if self._idle >= limit else None

    def _arm(self, now: float, limit: float) -> None:
        """Moves the moment at which stacks are written although the main thread cannot run."""
        if self._file is not None and now - self._armed > limit / 10:
            self._armed = now
            faulthandler.dump_traceback_later(limit * LOCKED_FACTOR + 4 * CHECK_SECONDS, file=self._file)

    def _hung(self, warming_up: bool) -> HungError:
        frames = sys._current_frames()
        standing = {worker.name: stand(worker, self._workers, frames) for worker in self._workers}
        lines = [f"{name} {self._since_text(name)}: {standing[name].what}" for name in standing]
        where = self._write(lines, frames)
        fix = "pipeline.hang_seconds is the limit: raise it if work may take so long"
        during = " in the warm-up" if warming_up else ""
        return HungError(f"nothing moved for {self._idle:.0f} s{during}: {self._tell(standing)}", where=where, fix=fix)

    def _tell(self, standing: dict[str, Standing]) -> str:
        """Causes first, then who waits for them, one worker of each cause's queue."""
        causes = [name for name, each in standing.items() if each.cause] or list(standing)[:1]
        parts = [f"{name} {standing[name].what} ({self._since_text(name)})" for name in causes]
        others = [name for name in standing if name not in causes]
        nearest = [name for name in others if set(standing[name].waits_for) & set(causes)]
        parts += [f"{name} {standing[name].what} ({self._since_text(name)})" for name in nearest[:2]]
        left = len(others) - len(nearest[:2])
        return "; ".join(parts) + (f"; {left} more wait behind them" if left else "")

    def _since_text(self, name: str) -> str:
        ago = time.monotonic() - self._since[name][0]
        return "since " + time.strftime("%H:%M:%S", time.localtime(time.time() - ago))

    def _write(self, lines: list[str], frames: dict[int, FrameType]) -> str:
        """Appends all stacks; returns what to call the place."""
        if self._file is None:
            return "pipeline"
        named = {thread.ident: thread.name for thread in threading.enumerate()}
        with contextlib.suppress(OSError):
            print(time.strftime("%Y-%m-%d %H:%M:%S"), "nothing moves", file=self._file)
            print("\n".join(lines), file=self._file)
            for ident, frame in frames.items():
                print(f"\n-- {named.get(ident, f'thread {ident}')}", file=self._file)
                self._file.writelines(traceback.format_stack(frame))
            self._file.flush()
            os.fsync(self._file.fileno())
        return str(self._path)


def stand(worker: Watched, workers: Sequence[Watched], frames: dict[int, FrameType]) -> Standing:
    """What a worker stands at, from its stack."""
    if worker.ident is None:
        drafters = tuple(each.name for each in workers if each.name.startswith("drafter"))
        return Standing(drafters, "waits for the drafters to be warm")
    frame = frames.get(worker.ident)
    if frame is None:
        return Standing((), "has ended")
    for inner in _outwards(frame):
        if inner.f_code is Link.take.__code__:
            number = inner.f_locals["number"]
            whom = _by_number(number, "prefetch" if worker.name.startswith("target") else "target", workers)
            return Standing(whom, f"waits for row {number} of {' '.join(whom)}")
        if inner.f_code in (Link.put.__code__, Link.reserve.__code__):
            number, link = inner.f_locals["number"], inner.f_locals["self"]
            whom = tuple(each.name for each in workers if getattr(each, "inbox", None) is link)
            return Standing(whom, f"waits to hand row {number} to {' '.join(whom)}, whose queue is full")
        if inner.f_code is Exchange._wait.__code__:
            late = tuple(each.name for each in workers if each.name.startswith("drafter") and not _meets(each, frames))
            return Standing(late, f"waits to meet {', '.join(late) or 'the other drafters'}")
        if inner.f_code is Ranks.add_up.__code__:
            return Standing((), "waits for the other ranks", cause=True)
        if inner.f_code in (Gate._wait_alone.__code__, Gate.enter.__code__):
            return Standing((), "waits at the compile gate")
        if Path(inner.f_code.co_filename) == _RANKS:
            return Standing((), f"waits for the other ranks in {_place(frame)}", cause=True)
    jobs = (outer.f_locals.get("job") for outer in _outwards(frame) if "job" in outer.f_code.co_varnames)
    row = next((f" with row {job.number}" for job in jobs if isinstance(job, Job)), "")
    return Standing((), f"is busy{row} in {_place(frame)}", cause=True)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _by_number(number: int, role: str, workers: Sequence[Watched]) -> tuple[str, ...]:
    """The worker of a role that makes this row; its role where there is none of it here."""
    made_by = [each.name for each in workers if each.name.startswith(role)]
    return (made_by[number % len(made_by)],) if made_by else (role,)


def _meets(worker: Watched, frames: dict[int, FrameType]) -> bool:
    frame = frames.get(worker.ident) if worker.ident is not None else None
    return any(inner.f_code is Exchange._wait.__code__ for inner in _outwards(frame))


def _place(frame: FrameType) -> str:
    """The innermost line of this package, and what it called."""
    own = next((inner for inner in _outwards(frame) if Path(inner.f_code.co_filename).is_relative_to(_SOURCES)), None)
    if own is None:
        return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
    file = Path(own.f_code.co_filename).relative_to(_SOURCES)
    called = "" if own is frame else f", inside {frame.f_code.co_name}"
    return f"{file}:{own.f_lineno} ({own.f_code.co_name}{called})"


def leave_soon() -> None:
    """Sees to it that this process ends: threads that hang can keep the interpreter from ending by itself."""
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115 (as long as we live)
