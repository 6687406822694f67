"""Compiling in the trainer, from the first turn of the warm-up to the last verdict.

Replicas take turns in order, each in its own thread, while all other workers wait: later equal devices load from the
cache what the first one compiled. Then the gate is sealed, and the first update and one every so many is profiled: all
replicas wait at the exchange, replica 0 starts the profiler, all do the update, replica 0 judges. A run whose compiled
path is not seen ends, unless its config says to go on.

Runs without compiling (dense attention on the CPU, by name) keep a ledger too: it says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import draftsmith
from draftsmith.blocks import DraftBatch, Row
from draftsmith.compiled import CompiledTooLate, Evidence, Gate, Ledger, NotCompiled, Region, WarmUp, cache
from draftsmith.compiled.machine import facts
from draftsmith.errors import UserError
from draftsmith.objective.head_loss import chunk_terms
from draftsmith.observe.events import EventLog
from draftsmith.pipeline.plan import Plan
from draftsmith.pipeline.proof import (
    Sample,
    differs_from_reference,
    expectations,
    make_sample,
    regions_of,
    warm_step,
)
from draftsmith.training.step import Replica

SOURCES = Path(draftsmith.__file__).parent
PACKAGES = ("blocks", "drafter", "objective", "training")  # what they hold decides what is compiled


class Meeting(Protocol):
    """Where all replicas' threads wait for each other."""

    def meet(self, index: int) -> Any: ...


class Compiling:
    """Warm-up, ledger and evidence of one run.

    Args:
        plan: of the run.
        gate: of all regions.
        replicas: in the order of their indices.
        exchange: where the replicas' threads meet.
        log: takes "warmup", "ledger" and "evidence" events.
        draft: row → batch, as the run makes them.
        first_update: of this process.
        ledger: path of `ledger.json`; None writes none.
    """

    def __init__(
        self,
        plan: Plan,
        gate: Gate,
        replicas: list[Replica],
        exchange: Meeting,
        log: EventLog,
        draft: Callable[[Row], DraftBatch],
        first_update: int = 0,
        ledger: Path | None = None,
    ) -> None:
        self.plan, self.gate, self.replicas, self.exchange, self.log = plan, gate, replicas, exchange, log
        self.devices = plan.topology.drafters
        self.draft, self.first_update = draft, first_update
        self.ledger = Ledger(gate, machine_facts(), path=ledger)
        self.warm = WarmUp(gate, self.ledger, len(replicas), self._tell)
        self.ledger.watch(region for replica in replicas for region in regions_of(replica))
        self.evidence: Evidence | None = None
        if plan.compiled and plan.config.compile.evidence != "off":
            expected = [
                each
                for index, replica in enumerate(replicas)
                for each in expectations(plan, replica, lambda i=index: self._sample(i), self.devices[index])  # type: ignore[misc]
            ]
            self.evidence = Evidence(gate, expected, self.ledger)
        if not plan.compiled:
            self._show()

    def warm_up(self, index: int) -> None:
        """Called by every replica's thread; returns when all replicas are warm and the gate is sealed.

        Raises:
            UserError: the warm-up never reached the compiled path, or its numbers differ from the reference.
        """
        if not self.plan.compiled:
            return
        for turn in range(len(self.replicas)):
            if turn == index:
                self.warm_turn(index)
            self.exchange.meet(index)
        if index == 0:
            self.sealed()

    def warm_turn(self, index: int) -> None:
        """One replica's turn, in its own thread.

        Raises:
            UserError: as `warm_up`.
        """
        replica, device, sample = self.replicas[index], self.devices[index], self._sample(index)
        with explained():
            self.warm.turn(
                f"drafter {index}",
                str(device),
                regions_of(replica),
                lambda: warm_step(replica, sample, device),
                lambda: differs_from_reference(self.plan, replica, sample),
            )

    def sealed(self) -> None:
        """After the last turn: seal the gate, show the ledger, and note in the cache what it now holds."""
        self.warm.finish(self.plan.config.compile.on_recompile)
        self._show()
        own = cache_folder(self.plan)
        if cache.inductor_folder() == own and cache.coverage(own, needs(self.plan)).missing:
            cache.write_manifest(own, self.ledger.machine, uses(self.plan, self.ledger))

    @contextlib.contextmanager
    def around(self, index: int, update: int) -> Iterator[None]:
        """Stands around an update of replica `index`: profiled and judged if it is due.

        Raises:
            UserError: the compiled path did not run, or something compiled after the warm-up.
        """
        if self.evidence is None or not self._due(update):
            with explained():
                yield
            return
        self.exchange.meet(index)
        if index == 0:
            self.evidence.begin()
        try:
            self.exchange.meet(index)
            with explained():
                yield
            self.exchange.meet(index)
            if index == 0:
                self.judge(update + 1)
            self.exchange.meet(index)
        finally:
            if index == 0:
                self.evidence.abandon()

    def close(self) -> None:
        """Write the ledger as it stands at the end."""
        self.ledger.write()

    def _due(self, update: int) -> bool:
        every = self.plan.config.compile.evidence_every
        done = update - self.first_update
        return done == 0 or (every > 0 and done % every == 0)

    def _sample(self, index: int) -> Sample:
        return make_sample(self.plan, self.draft, self.devices[index])

    def judge(self, step: int) -> bool:
        """End the evidence step that has begun and tell its verdict.

        Raises:
            UserError: the compiled path did not run, and the config says that this is an error.
        """
        assert self.evidence is not None
        verdict = self.evidence.end(step)
        self.log.write("evidence", step=step, ok=verdict.ok, text=verdict.line(), problems=verdict.problems)
        if not verdict.ok and self.plan.config.compile.evidence == "error":
            raise UserError(
                verdict.line(),
                where="compile.evidence",
                fix="draftsmith doctor CONFIG says what is amiss; compile.evidence=warn trains on as it is",
            )
        return verdict.ok

    def _tell(self, text: str, figures: dict[str, Any]) -> None:
        self.log.write("warmup", text=text, **figures)

    def _show(self) -> None:
        self.ledger.write()
        self.log.write("ledger", lines=self.ledger.table())


def machine_facts() -> dict[str, Any]:
    """What must match for this project's compiled code to be worth loading."""
    return facts(SOURCES / package for package in PACKAGES)


def needs(plan: Plan) -> dict[str, float | None]:
    """What a run of this plan compiles: a name for each region and device, and the seconds that it may take.

    The name carries a hash of everything that shapes the graphs. Seconds are what an H200 took at the geometry of
    Qwen3-8B, equal devices after the first; None on other kinds of device.
    """
    config, spec = plan.config, plan.spec
    shape = {
        "rows": config.rows.model_dump(),
        "spec": vars(spec),
        "objective": config.objective.model_dump(),
        "attention": plan.attention,
        "dtype": str(plan.dtype),
        # Inductor's CPU code is made for a number of threads.
        "threads": plan.topology.cpu_threads if plan.topology.drafters[0].type == "cpu" else None,
        "checkpointing": config.training.activation_checkpointing,
        "head": [plan.geometry.logit_multiplier, plan.geometry.logit_softcap, plan.geometry.vocab_rows],
    }
    mark = hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()[:12]
    found: dict[str, float | None] = {}
    for index, device in enumerate(plan.topology.drafters):
        cold = {"drafter": 20.0, "objective": 4.0} if index == 0 else {"drafter": 3.0, "objective": 1.0}
        for role, seconds in cold.items():
            found[f"{role} {index} on {device} ({mark})"] = seconds if device.type == "cuda" else None
    return found


def uses(plan: Plan, ledger: Ledger) -> list[cache.Use]:
    """What a ledger shows as compiled or loaded, under the names of `needs`."""
    entries = ledger.entries()
    found = []
    for name in needs(plan):
        region = " ".join(name.split()[:2])
        own = [entry for entry in entries if entry.region == region and entry.key]
        seconds = sum(entry.traced + entry.compiled + entry.loaded for entry in own)
        found.append(cache.Use(name, tuple(dict.fromkeys(entry.key for entry in own)), seconds))
    return found


def cache_folder(plan: Plan) -> Path:
    """Draftsmith's own compile cache for this plan on this machine; it need not be there."""
    content = json.dumps([machine_facts(), sorted(needs(plan))], sort_keys=True, default=str)
    return cache.root_folder() / hashlib.sha256(content.encode()).hexdigest()[:16]


def make_regions(plan: Plan, index: int, forward: Callable[..., Any], gate: Gate) -> tuple[Region, Region]:
    """The regions of a replica: the drafter's forward, and one chunk of the objective."""
    device = plan.topology.drafters[index]
    why = f"{plan.attention} attention on {device.type}, by name"

    def region(name: str, function: Callable[..., Any]) -> Region:
        return Region(f"{name} {index}", function, gate=gate, enabled=plan.compiled, device=device, why_eager=why)

    return region("drafter", forward), region("objective", chunk_terms)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turns what the gate and the warm-up refuse into the user's error, with what to do about it."""
    try:
        yield
    except CompiledTooLate as error:
        raise UserError(
            str(error),
            where="compile.on_recompile",
            fix="compile.on_recompile=warn compiles it and goes on; shapes should not change in a run, so report this",
        ) from error
    except NotCompiled as error:
        raise UserError(
            str(error), where="warm-up", fix="draftsmith doctor CONFIG says what keeps torch from compiling"
        ) from error
