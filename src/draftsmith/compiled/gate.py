"""The gate: compiled functions run side by side, a first use runs alone.

Why: while one thread compiles, up to torch 2.13 every compiled call of every other thread may raise (the tracing flag
is global to the process), and on one CUDA device two first uses with a backward deadlock (the compiling thread waits
for the device's autograd thread, which waits for the compile lock). So a first use excludes everything compiled, from
its forward until its backward has returned.

How: a reader-writer lock with writer preference whose unit is a *hold*, not a thread. A hold is stored in torch's own
thread-local state, which `.backward()` carries into the autograd thread: what runs there (checkpoint recompute) is
inside the hold of the thread that called `.backward()`, and never waits at the gate.

Cost: an ordinary call under a sealed gate is one attribute test; unsealed, a lock taken and given back twice.

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
from dataclasses import dataclass, field
from typing import Literal

import torch

from draftsmith.compiled import _torch

OnRecompile = Literal["error", "warn"]
_numbers = itertools.count()
_calling = threading.local()  # .region: the region whose call is running in this thread


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


@dataclass
class Compile:
    """One compile that the gate saw. Seconds are wall-clock; `alone` says that it ran under an exclusive hold;
    `reason` names the guards that failed, empty for a first compile."""

    compile_id: str
    direction: str
    region: str
    thread: str
    alone: bool
    reason: str = ""
    seconds: float | None = None
    began: float = field(default_factory=time.perf_counter, repr=False)


class _Hold:
    """One bracket around compiled work: shared or exclusive. Inactive once left, so that stale copies mean nothing."""

    __slots__ = ("active", "exclusive")

    def __init__(self, exclusive: bool) -> None:
        self.active, self.exclusive = True, exclusive


class Gate:
    """Shared for ordinary compiled calls, exclusive for first uses. One per process is the normal case."""

    def __init__(self) -> None:
        self.compiles: list[Compile] = []
        self.open = False  # sealed with "error": regions go straight through
        self._sealed: OnRecompile | None = None
        self._key = f"draftsmith.gate.{next(_numbers)}"
        self._changed = threading.Condition(threading.Lock())
        self._sharing, self._waiting, self._alone = 0, 0, False
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
        self._listener.listen()
        hold = _Hold(exclusive=True)
        self._acquire_alone()
        yield from self._inside(hold)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Bracket a forward and its backward. Shared until a first use happens inside, then exclusive to the end.

        Never wait for another worker (a queue, a barrier) inside: a thread that wants to compile waits for this end.
        """
        if self.open or self._hold() is not None:
            yield
            return
        if _torch.in_backward():
            raise GateError("a step inside a backward that began outside the gate")
        with self._changed:
            while self._alone or self._waiting:
                self._changed.wait()
            self._sharing += 1
        yield from self._inside(_Hold(exclusive=False))

    @property
    def held(self) -> bool:
        """Whether this thread is inside a hold: a worker asserts `not gate.held` before it waits for others."""
        return self._hold() is not None

    def _hold(self) -> _Hold | None:
        hold: _Hold | None = _torch.inherited(self._key)
        return hold if hold is not None and hold.active else None

    def _inside(self, hold: _Hold) -> Iterator[None]:
        _torch.inherit(self._key, hold)
        try:
            yield
        finally:
            hold.active = False
            _torch.inherit(self._key, None)
            with self._changed:
                if hold.exclusive:
                    self._alone = False
                else:
                    self._sharing -= 1
                self._changed.notify_all()

    def _acquire_alone(self) -> None:
        with self._changed:
            self._wait_alone()

    def _wait_alone(self) -> None:
        self._waiting += 1
        try:
            while self._alone or self._sharing:
                self._changed.wait()
        finally:
            self._waiting -= 1
        self._alone = True

    def _upgrade(self, hold: _Hold) -> None:
        """Shared to exclusive. The share is given up first, so two upgrades at once wait in line instead of for ever:
        nothing compiled runs in this thread meanwhile, so another's first use may safely pass in between."""
        if _torch.in_backward():
            # Waiting here would block the device's autograd thread, which the others need to finish their steps.
            raise GateError(
                "a first use inside a backward: warm it up under `with gate.exclusive()`, backward included"
            )
        self._listener.listen()
        with self._changed:
            self._sharing -= 1
            self._changed.notify_all()
            self._wait_alone()
            hold.exclusive = True

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
        self._listener.listen()
        self._sealed = on_recompile
        self.open = on_recompile == "error"
        torch.compiler.set_stance("fail_on_recompile" if self.open else "default")

    def unseal(self) -> None:
        """Allow compiling again (a new phase with a warm-up of its own, or the end of the run)."""
        if self.open:
            torch.compiler.set_stance("default")
        self._sealed, self.open = None, False

    def close(self) -> None:
        """Unseal and stop listening."""
        self.unseal()
        self._listener.close()

    # -- what torch reports ------------------------------------------------------------------------------------------

    def _compile_starts(self, direction: str, compile_id: str) -> None:
        region = getattr(_calling, "region", "")
        if direction != "forward" and not region:
            region = next((c.region for c in reversed(self.compiles) if c.compile_id == compile_id), "")
        if self.open:
            # A forward is stopped earlier, by the stance; a backward that was never run in the warm-up is not.
            raise CompiledTooLate(region, direction, "its forward was warmed up, this direction was not")
        hold = self._hold()
        alone = hold is not None and hold.exclusive
        reason = _torch.recompile_reason() if direction == "forward" else ""
        self.compiles.append(Compile(compile_id, direction, region, threading.current_thread().name, alone, reason))
        if self._sealed == "warn":
            text = f"{region or 'a function outside any region'} compiles ({direction}) after the warm-up"
            warnings.warn(f"{text}: {reason or 'it was never warmed up'}", stacklevel=2)

    def _compile_ends(self, direction: str, compile_id: str) -> None:
        for seen in reversed(self.compiles):
            if (seen.compile_id, seen.direction) == (compile_id, direction) and seen.seconds is None:
                seen.seconds = time.perf_counter() - seen.began
                break


@contextlib.contextmanager
def calling(region: str) -> Iterator[None]:
    """Name the region that compiles started from this thread belong to."""
    before = getattr(_calling, "region", "")
    _calling.region = region
    try:
        yield
    finally:
        _calling.region = before
