"""The warm-up: every region of every device compiled, run and checked before the first step.

A *turn* belongs to one worker: with the gate held alone it runs its job (a whole step on made-up input of the real
shapes, forward and backward) twice. The first run compiles or loads; the second must compile nothing, or the warm-up
does not cover what it is there for. Then an optional proof compares the result with a reference.

Each turn says what happened in one line ("drafter 1 on cuda:5: traced 2.1 s, compiled 17.3 s, from cache 0 of 3,
verified"), and after the first and the second turn how long all of them will take. Workers on one device load what its
first one compiled. Another device compiles again unless an earlier run did so for it: Inductor's code names the number
of its device (seen on two H200), and so does the key under which it is kept.

A job that never reaches a compiled region, or reaches it without anything being compiled (compiling switched off by an
environment variable, a stance that forces eager), raises NotCompiled: a quiet warm-up is not a warm one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from draftsmith.compiled import _torch
from draftsmith.compiled.gate import Gate, OnRecompile
from draftsmith.compiled.ledger import Ledger
from draftsmith.compiled.region import Region

_LOADING = 0.1  # of the first turn's compiling: what loading is taken for until it was seen


class NotCompiled(RuntimeError):
    """The warm-up ended without the compiled path having run."""


class Differs(NotCompiled):
    """It ran, and its numbers are not those of the reference."""


@dataclass(frozen=True)
class Turn:
    """What one worker's turn took. Seconds; `graphs` of which `hits` came from the cache."""

    worker: str
    device: str
    seconds: float
    traced: float
    compiled: float
    loaded: float
    graphs: int
    hits: int
    step_seconds: float
    verified: bool

    def line(self) -> str:
        """For people."""
        place = f"{self.worker} on {self.device}" if self.device else self.worker
        parts = [f"traced {self.traced:.1f} s"]
        if self.compiled or not self.hits:
            parts.append(f"compiled {self.compiled:.1f} s")
        if self.hits:
            parts.append(f"loaded {self.loaded:.1f} s")
        parts.append(f"from cache {self.hits} of {self.graphs}")
        parts.append("verified" if self.verified else "not compared with a reference")
        return f"{place}: {', '.join(parts)}"


@dataclass
class WarmUp:
    """Turns of equal workers through one gate.

    Args:
        gate, ledger: shared by the regions.
        devices: of all workers, in the order of their turns, for the prediction.
        tell: gets a line of text and a dict of its figures for each turn and each prediction.
    """

    gate: Gate
    ledger: Ledger
    devices: Sequence[str]
    tell: Callable[[str, dict[str, Any]], None] = lambda _text, _figures: None
    turns: list[Turn] = field(default_factory=list)

    def turn(
        self,
        worker: str,
        device: str,
        regions: Sequence[Region],
        job: Callable[[], None],
        proof: Callable[[], str] | None = None,
    ) -> Turn:
        """Run `job` alone, twice, and check that it warmed `regions`.

        Args:
            worker, device: for the line.
            regions: all of them must be reached; those that are not enabled run as they are.
            job: forward and backward as in training; leaves nothing behind, ends with the device idle.
            proof: returns "" where the result equals the reference, else what differs.

        Raises:
            NotCompiled: a region was not reached, ran without compiling, or compiled again in the second run.
            Differs: `proof` found something.
        """
        self.ledger.watch(regions)
        enabled = [region for region in regions if region.enabled]
        with self.gate.exclusive():
            first = len(self.gate.compiles)
            began = time.perf_counter()
            try:
                job()
            except RuntimeError as error:
                if _torch.NO_FRAMES not in str(error):
                    raise
                raise NotCompiled(f"{worker}: nothing was compiled ({_torch.why_nothing_compiles()})") from error
            middle = time.perf_counter()
            settled = len(self.gate.compiles)
            job()
            step = time.perf_counter() - middle
            self._check(worker, enabled, settled)
            differs = proof() if proof else ""
            if differs:
                raise Differs(f"{worker} on {device}: {differs}")
        turn = self._summary(worker, device, middle - began, first, step, proof is not None)
        self.turns.append(turn)
        self.ledger.warm_up.append(asdict(turn))
        self.tell(turn.line(), asdict(turn))
        workers = len(self.devices)
        if len(self.turns) <= min(2, workers - 1):
            seconds = self.predicted()
            self.tell(
                f"{workers} equal workers: about {seconds:.0f} s in all",
                {"predicted_seconds": seconds, "workers": workers},
            )
        return turn

    def predicted(self) -> float:
        """Seconds that all turns together will take, from those that were seen."""
        assert self.turns, "no turn yet"
        new: list[float] = []  # of a device's first worker
        more: list[float] = []  # of its others
        devices: set[str] = set()
        for turn in self.turns:
            (more if turn.device in devices else new).append(turn.seconds + turn.step_seconds)
            devices.add(turn.device)
        if not more:
            first = self.turns[0]
            more = [first.seconds - first.compiled * (1 - _LOADING) + first.step_seconds]
        seconds = sum(turn.seconds + turn.step_seconds for turn in self.turns)
        for device in self.devices[len(self.turns) :]:
            seconds += sum(more) / len(more) if device in devices else sum(new) / len(new)
            devices.add(device)
        return seconds

    def finish(self, on_recompile: OnRecompile) -> None:
        """Seal the gate and write the ledger."""
        self.gate.seal(on_recompile)
        self.ledger.write()

    def _check(self, worker: str, regions: Sequence[Region], settled: int) -> None:
        compiled = {each.region for each in self.gate.compiles if not _torch.failed(each.compile_id)}
        for region in regions:
            if not region.first_uses:
                raise NotCompiled(
                    f"{worker}: region {region.name!r} was never called in the warm-up: nothing was compiled for it"
                )
            if region.name not in compiled:
                raise NotCompiled(
                    f"{worker}: region {region.name!r} ran, but nothing was compiled ({_torch.why_nothing_compiles()})"
                )
        again = self.gate.compiles[settled:]
        if again:
            names = ", ".join(f"{c.region or 'a function outside any region'} ({c.direction})" for c in again)
            reason = next((c.reason for c in again if c.reason), "no guard named")
            raise NotCompiled(f"{worker}: the same step compiled again: {names}: {reason}")

    def _summary(self, worker: str, device: str, seconds: float, first: int, step: float, verified: bool) -> Turn:
        numbers = range(first, len(self.gate.compiles))
        entries = [entry for number in numbers for entry in self.ledger.entries_of(number)]
        graphs = [entry for entry in entries if entry.cache != "none"]
        return Turn(
            worker,
            device,
            seconds,
            traced=sum(entry.traced for entry in entries),
            compiled=sum(entry.compiled for entry in entries),
            loaded=sum(entry.loaded for entry in entries),
            graphs=len(graphs),
            hits=sum(entry.cache == "hit" for entry in graphs),
            step_seconds=step,
            verified=verified,
        )
