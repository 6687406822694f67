"""The gate: compiled functions run side by side, a first use runs alone.

Why: while one thread compiles, up to torch 2.13 every compiled call of every other thread may raise (the tracing flag
is global to the process), and on one CUDA device two first uses with a backward deadlock (the compiling thread waits
for the device's autograd thread, which waits for the compile lock). So a first use excludes everything compiled, from
its forward until its backward has returned.

How: a reader-writer lock with writer preference whose unit is a *hold*, not a thread. The number of a hold's place is
stored in torch's own thread-local state, which `.backward()` carries into the autograd thread: what runs there
(checkpoint recompute) is inside the hold of the thread that called `.backward()`, and never waits at the gate.

Cost: an ordinary call under a sealed gate is one attribute test; unsealed, a lock taken and given back twice
(`python -m draftsmith.compiled.bench` prints both).

Two forms:

    library   with gate.step():            # shared; turns exclusive by itself at a first use, until the end of the step
                  region(x).sum().backward()
    trainer   with gate.exclusive(): ...   # each worker in turn, in the warm-up, forward and backward
              gate.seal()                  # from here on compiling is an error that names region and guard
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from draftsmith.compiled import _torch

OnRecompile = Literal["error", "warn"]
_numbers = itertools.count()
_calling = threading.local()  # .region: whose call runs in this thread; .refused: it began to compile beside others


class GateError(RuntimeError):
    """The gate was used in a way that could hang or race; says what to do instead."""


class CompiledTooLate(RuntimeError):
    """Something wanted to compile after the gate was sealed.

    Attributes: `region` (name, or "" for a function outside any region), `direction` ("forward" or "backward"),
    `reason` (the guards that failed, as torch states them; empty when nothing had been compiled yet), `given` (the
    shapes that came).
    """

    def __init__(self, region: str, direction: str, reason: str, given: str = "") -> None:
        self.region, self.direction, self.reason, self.given = region, direction, reason, given
        parts = [f"{region or 'a function outside any region'}: compiling ({direction}) after the warm-up"]
        parts += [f"given {given}"] if given else []
        parts += [reason.strip() or "it was never warmed up"]
        super().__init__("; ".join(parts))


@dataclass(frozen=True)
class Graph:
    """One graph of a compile, as Inductor's cache was asked for it. `seconds` is Inductor's own time; None on a hit."""

    key: str
    direction: str
    hit: bool
    seconds: float | None = None


@dataclass
class Compile:
    """One compile that the gate saw. Seconds are wall-clock; `alone` says that it ran under an exclusive hold;
    `reason` names the guards that failed, empty for a first compile; `given` the tensors that came, of a forward in a
    region; `late` says that the gate was sealed; `graph_breaks` are those that Dynamo met in it, None where others may
    have compiled beside it."""

    compile_id: str
    direction: str
    region: str
    thread: str
    alone: bool
    reason: str = ""
    given: str = ""
    late: bool = False
    graph_breaks: int | None = None
    seconds: float | None = None
    graphs: list[Graph] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter, repr=False)

    def why(self) -> str:
        """The guards that failed and the tensors that came, in words."""
        reason = " ".join(self.reason.split()) or "it was never warmed up"
        return f"{reason}; it was called with {self.given}" if self.given else reason


class Hold:
    """One bracket around compiled work: shared or exclusive; `place` is where other threads' backwards find it.

    A region keeps one of its own for its ordinary calls, which never change it: any number of threads may be in it.
    """

    __slots__ = ("exclusive", "place", "region")

    def __init__(self, exclusive: bool, region: str = "") -> None:
        self.exclusive, self.place, self.region = exclusive, _torch.NO_PLACE, region


class Gate:
    """Shared for ordinary compiled calls, exclusive for first uses. One per process is the normal case."""

    def __init__(self) -> None:
        self.compiles: list[Compile] = []
        self.open = False  # sealed with "error": nothing may compile, so nobody needs to wait
        self.straight = False  # open, and nobody watches: regions call the compiled function and do nothing else
        self.watched = False  # a profiler runs: regions mark their calls in its trace
        # By name, whether all regions of it are of one graph: then nothing of a call has run when it begins to compile.
        self.whole: dict[str, bool] = {}
        self._sealed: OnRecompile | None = None
        self._key = f"draftsmith.gate.{next(_numbers)}"
        self._handed: list[Hold | None] = [None] * _torch.PLACES  # holds by place, for the autograd thread
        self._free = list(range(_torch.PLACES))  # places; popping and appending are atomic
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._here = threading.local()  # .hold: of this thread; torch's copy is for threads that run its backward
        self._sharing, self._waiting, self._alone = 0, 0, False
        self._graphs_before = self._breaks_before = 0
        self._listener = _torch.CompileListener(self._compile_starts, self._compile_ends)

    # -- holds -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Run alone: no compiled call of another thread is inside. May stand inside itself or inside `step`.

        Raises GateError where waiting could hang: in the autograd thread, outside any hold.
        """
        hold = self._hold()
        if hold is not None:
            if not hold.exclusive:
                self._upgrade(hold)
            yield
            return
        if _torch.in_backward():
            raise GateError("a first use inside a backward that began outside the gate: put both in `with gate.step()`")
        self._listen()
        hold = Hold(exclusive=True)
        self._acquire_alone()
        self._here.hold = hold
        self._hand_on(hold)
        try:
            yield
        finally:
            self.leave()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Bracket a forward and its backward. Shared until a first use happens inside, then exclusive to the end.

        Never wait for another worker (a queue, a barrier) inside: a thread that wants to compile waits for this end.
        """
        hold = Hold(exclusive=False)
        if self.open or not self.enter(hold):
            yield
            return
        self._hand_on(hold)
        try:
            yield
        finally:
            self.leave()

    def enter(self, hold: Hold) -> bool:
        """Shares the gate for one call that goes no backward; true if `leave` has to follow, false inside a hold."""
        here = self._here
        if getattr(here, "hold", None) is not None:
            return False
        if _torch.in_backward():
            if self._hold() is not None:
                return False
            raise GateError("a step inside a backward that began outside the gate")
        with self._lock:
            while self._alone or self._waiting:
                self._changed.wait()
            self._sharing += 1
        here.hold = hold
        return True

    def _hand_on(self, hold: Hold) -> None:
        """Lets what the autograd thread runs for this thread find the hold, until it is left."""
        try:
            hold.place = self._free.pop()
        except IndexError:
            self.leave()
            raise GateError(f"more than {_torch.PLACES} threads inside the gate at once") from None
        self._handed[hold.place] = hold
        _torch.inherit(self._key, hold.place)

    def leave(self) -> None:
        """End the hold of this thread."""
        hold: Hold = self._here.hold
        self._here.hold = None
        if hold.place != _torch.NO_PLACE:
            # This thread must forget the place before another's hold may have it.
            _torch.inherit(self._key, _torch.NO_PLACE)
            self._handed[hold.place] = None
            self._free.append(hold.place)
        with self._lock:
            if hold.exclusive:
                self._alone = False
                self._changed.notify_all()
            else:
                self._sharing -= 1
                if self._waiting:  # nobody else waits for a share to end
                    self._changed.notify_all()

    @property
    def held(self) -> bool:
        """Whether this thread is inside a hold: a worker asserts `not gate.held` before it waits for others."""
        return self._hold() is not None

    def _hold(self) -> Hold | None:
        hold: Hold | None = getattr(self._here, "hold", None)
        if hold is not None:
            return hold
        if not _torch.in_backward():
            return None
        place = _torch.inherited(self._key)
        return None if place == _torch.NO_PLACE else self._handed[place]

    def _acquire_alone(self) -> None:
        with self._changed:
            self._wait_alone()

    def _wait_alone(self) -> None:
        self._waiting += 1
        try:
            while self._alone or self._sharing:
                self._changed.wait()
            self._alone = True
        finally:
            self._waiting -= 1
            if not self._alone:  # interrupted: those who let this thread go first must look again
                self._changed.notify_all()

    def _upgrade(self, hold: Hold) -> None:
        """Shared to exclusive. The share is given up first, so two upgrades at once wait in line instead of for ever:
        nothing compiled runs in this thread meanwhile, so another's first use may safely pass in between."""
        if _torch.in_backward():
            # Waiting here would block the device's autograd thread, which the others need to finish their steps.
            raise GateError(
                "a first use inside a backward: warm it up under `with gate.exclusive()`, backward included"
            )
        self._listen()
        with self._changed:
            self._sharing -= 1
            self._changed.notify_all()
            alone = False
            try:
                self._wait_alone()
                alone = True
                if hold.region:  # other threads' calls have it too: from here on this one has a hold of its own
                    self._here.hold = Hold(exclusive=True, region=hold.region)
                else:
                    hold.exclusive = True
            finally:
                self._sharing += not alone  # interrupted: it is a share again, and ends as one

    # -- sealing -----------------------------------------------------------------------------------------------------

    @property
    def sealed(self) -> bool:
        return self._sealed is not None

    def seal(self, on_recompile: OnRecompile = "error") -> None:
        """End the warm-up. "error": any later compile raises CompiledTooLate, in every thread (torch's stance is
        process-wide; a compiled function that is no region raises torch's own RuntimeError), and calls pass the gate
        untouched. "warn": a later first use still runs alone, and warns with region and guard."""
        assert on_recompile in ("error", "warn"), on_recompile
        assert not self.held, "sealing inside a hold"
        self._listen()
        self._sealed = on_recompile
        self.open = on_recompile == "error"
        self.watch(self.watched)
        torch.compiler.set_stance("fail_on_recompile" if self.open else "default")

    def unseal(self) -> None:
        """Allow compiling again (a new phase with a warm-up of its own, or the end of the run)."""
        if self.open:
            torch.compiler.set_stance("default")
        self._sealed, self.open, self.straight = None, False, False

    def watch(self, watched: bool) -> None:
        """While watched, regions mark their calls for the profiler; evidence switches this on for one step."""
        self.watched = watched
        self.straight = self.open and not watched

    def close(self) -> None:
        """Unseal and stop listening."""
        self.unseal()
        self._listener.close()
        _torch.stop_listening_to_graphs(self._graph_looked_up)

    def _listen(self) -> None:
        self._listener.listen()
        _torch.listen_to_graphs(self._graph_looked_up)

    # -- what torch reports ------------------------------------------------------------------------------------------

    def _compile_starts(self, direction: str, compile_id: str) -> None:
        hold = self._hold()
        region = getattr(_calling, "region", "") or (hold.region if hold is not None else "")
        if direction != "forward" and not region:
            region = next((c.region for c in reversed(self.compiles) if c.compile_id == compile_id), "")
        if self.open:
            # A forward is stopped earlier, by the stance; a backward that was never run in the warm-up is not.
            raise CompiledTooLate(region, direction, "its forward was warmed up, this direction was not")
        alone = hold is not None and hold.exclusive
        beside = hold is not None and not hold.exclusive
        may_call_again = direction == "forward" and self.whole.get(region, False) and not _torch.in_backward()
        if beside and may_call_again:
            # What `signature` does not know has changed: a mode, a frozen weight, the inside of an object. (A backward
            # goes on: others need its thread to end their steps, so nobody may wait for the gate there.)
            _calling.refused = True
            raise GateError("compiles beside others: the region calls again, alone")
        reason = _torch.recompile_reason() if direction == "forward" else ""
        name = threading.current_thread().name
        self._graphs_before, self._breaks_before = len(_torch.inductor_seconds()), _torch.graph_breaks()
        given = getattr(_calling, "given", "") if direction == "forward" else ""
        new = Compile(compile_id, direction, region, name, alone, reason, given, late=self.sealed)
        self.compiles.append(new)
        if self._sealed == "warn":
            text = f"{region or 'a function outside any region'} compiles ({direction}) after the warm-up"
            warnings.warn(f"{text}: {new.why()}", stacklevel=2)
        elif beside and region:
            warnings.warn(f"{region} compiles ({direction}) beside other threads: {new.why()}", stacklevel=2)

    def _graph_looked_up(self, key: str, is_backward: bool, hit: bool, compile_id: str) -> None:
        running = next((c for c in reversed(self.compiles) if c.compile_id == compile_id and c.seconds is None), None)
        if running is not None:
            running.graphs.append(Graph(key, "backward" if is_backward else "forward", hit))

    def _compile_ends(self, direction: str, compile_id: str) -> None:
        for seen in reversed(self.compiles):
            if (seen.compile_id, seen.direction) == (compile_id, direction) and seen.seconds is None:
                seen.seconds = time.perf_counter() - seen.began
                seen.graph_breaks = _torch.graph_breaks() - self._breaks_before if seen.alone else None
                # Alone in its hold, so what Inductor has compiled meanwhile are this compile's misses, in order.
                times = iter(_torch.inductor_seconds()[self._graphs_before :])
                seen.graphs[:] = [g if g.hit else replace(g, seconds=next(times, None)) for g in seen.graphs]
                break


def refused() -> bool:
    """Whether a compile was refused in this thread since this was asked last, because it would not have been alone."""
    was: bool = getattr(_calling, "refused", False)
    _calling.refused = False
    return was


def calling(region: str, given: str = "") -> str:
    """Name the region that compiles started from this thread belong to, and the tensors that it was called with;
    returns the region before, to be put back."""
    before: str = getattr(_calling, "region", "")
    _calling.region, _calling.given = region, given
    return before
