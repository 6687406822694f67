"""Compiling in the trainer, from the first turn of the warm-up to the last verdict.

First the targets' layers, then the replicas take turns in order, each in its own thread, while all other workers wait:
those on the same device load from the cache what its first one compiled. Then the gate is sealed, and the first update
and one every so many is profiled: all replicas wait at the exchange, replica 0 starts the profiler and sends a made-up
row through every target (their own rows may all be done by then), all do the update, replica 0 judges. A run whose
compiled path is not seen ends, unless its config says to go on.

Runs without compiling (dense attention on the CPU, by name) keep a ledger too: it says so.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import draftsmith
from draftsmith.blocks import DraftBatch, Row
from draftsmith.compiled import (
    CompiledTooLate,
    Differs,
    Evidence,
    Expected,
    Gate,
    Ledger,
    NotCompiled,
    Region,
    WarmUp,
    _torch,
    cache,
)
from draftsmith.compiled.machine import facts
from draftsmith.drafter.model import DraftModel, run_part
from draftsmith.errors import UserError
from draftsmith.objective.head_loss import chunk_terms
from draftsmith.observe.aside import remove_left
from draftsmith.observe.events import EventLog
from draftsmith.pipeline.plan import Plan
from draftsmith.pipeline.proof import (
    DOCUMENT,
    LIMITS,
    Sample,
    differs_from_reference,
    expectations,
    make_sample,
    regions_of,
    warm_step,
)
from draftsmith.target.forward import Target, run_layer
from draftsmith.target.geometry import FULL, SLIDING
from draftsmith.target.quantised import method_of
from draftsmith.target.source import read_config
from draftsmith.training.step import ByLayer, Replica

FLASH_KERNEL = r"^(?!.*FlashAttention(For|Back)ward).*flash"  # torch's own, not a drafter's FlashAttention-4
PACKED_KINDS = {FULL, SLIDING}
FP8_SLACK = 2  # a bf16 rounding that differs can move a value to the next fp8 number
SOURCES = Path(draftsmith.__file__).parent
COMPILER = "apt-get install g++, and unset CXX if it names another"
ELSEWHERE = "set DRAFTSMITH_CACHE_DIR to a folder that you may write"
PACKAGES = ("blocks", "drafter", "objective", "target", "training")  # what they hold decides what is compiled


class Meeting(Protocol):
    """Where all replicas' threads wait for each other."""

    def meet(self, index: int) -> Any: ...


class TargetLayers:
    """One target's layers as a region, and a made-up row to run them on.

    Where documents run one by one, shapes change from row to row and the layers stay eager, by name; so do layers that
    came quantised and such with state, whose kernels are no part of a graph.

    Args:
        plan: of the run.
        target: whose layers they are.
        gate: that they compile through.
        index: among the run's targets, each counted once, whatever the number of workers that share it.
    """

    def __init__(self, plan: Plan, target: Target, gate: Gate, index: int = 0) -> None:
        self.plan, self.target = plan, target
        why = "as configured"
        if target.packing == "separate":
            why = "documents run one by one"
        elif not set(target.kinds) <= PACKED_KINDS:
            why = "layers with kernels of their own"
        elif target.foreign:
            why = f"the target came quantised ({target.foreign})"
        enabled = plan.compiled and plan.config.compile.target and why == "as configured"
        if not plan.compiled:
            why = f"{plan.attention} attention on {target.device.type}, by name"
        self.region = Region(
            f"target {index}", run_layer, gate=gate, enabled=enabled, device=target.device, why_eager=why
        )
        if enabled:
            target.compile_layers(self.region)

    def run(self) -> Tensor:
        """Features of a made-up row, as a worker makes them; the device is idle afterwards."""
        length = self.plan.config.rows.length
        index_S = torch.arange(length)
        document_S, positions_S = (index_S // DOCUMENT).to(torch.int32), index_S % DOCUMENT
        features = self.target.features(
            index_S % self.target.geometry.vocab_rows,
            document_S,
            positions_S,
            self._taps(),
            last_hidden=self.plan.config.objective.labels != "data",
        )
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return features.taps_SF

    def warm(self) -> None:
        """`run`, for what it compiles and shows."""
        self.run()

    def _taps(self) -> tuple[int, ...]:
        """The run's taps; of a target that was cut down to a layer or two, its last layer."""
        last, taps = self.target.geometry.layers - 1, self.plan.spec.taps
        return taps if max(taps) <= last else (last,)

    def differs_from_eager(self) -> str:
        """Compares with the same layers uncompiled; "" where they agree.

        Rounding grows with depth, a wrong graph shows at once: compared is the first tap behind all kinds of layers.
        """
        kinds, taps, hidden = self.target.kinds, self._taps(), self.target.geometry.hidden_size
        depth = max(kinds.index(kind) for kind in set(kinds))
        place = next((place for place, tap in enumerate(taps) if tap >= depth), len(taps) - 1)
        columns = slice(place * hidden, (place + 1) * hidden)
        ours = self.run()[:, columns].float()
        with self.target.eager():
            reference = self.run()[:, columns].float()
        # By token: the first ones of a document are far larger than all others in many models.
        error = float(((ours - reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-12)).mean())
        limit = LIMITS[self.plan.target_dtype]
        if self.plan.config.target.precision == "fp8":
            limit *= FP8_SLACK
        return "" if error <= limit else f"its features differ from the uncompiled ones by {error:.1e} of their size"

    def expected(self) -> Expected:
        """What an evidence step must show of it."""
        kernels = (FLASH_KERNEL,) if self.target.packing == "pieces" else ()
        return Expected(self.region, kernels=kernels, softmax=True, oracle=self.differs_from_eager)


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
        targets: one for each target that is loaded.
        turn: entered by replica 0 around the warm-up; may wait for other processes.
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
        targets: Sequence[TargetLayers] = (),
        turn: contextlib.AbstractContextManager[None] | None = None,
    ) -> None:
        self.turn = turn or contextlib.nullcontext()
        self.plan, self.gate, self.replicas, self.exchange, self.log = plan, gate, replicas, exchange, log
        self.devices = plan.topology.drafters
        self.draft, self.first_update = draft, first_update
        self.ledger, self._path = Ledger(gate, machine_facts()), ledger
        if ledger is not None:
            with contextlib.suppress(OSError):  # as with all of it, the run is worth more
                remove_left(ledger)
        self.targets = [each for each in targets if each.region.enabled]
        self.warm = WarmUp(gate, self.ledger, [str(device) for device in plan.topology.drafters], self._tell)
        self.ledger.watch(each.region for each in targets)
        self.ledger.watch(region for replica in replicas for region in regions_of(replica))
        self._told = 0  # of the gate's compiles
        self.evidence: Evidence | None = None
        if plan.compiled and plan.config.compile.evidence != "off":
            expected = [
                each
                for index, replica in enumerate(replicas)
                for each in expectations(plan, replica, lambda i=index: self._sample(i), self.devices[index])  # type: ignore[misc]
            ]
            expected += [each.expected() for each in self.targets]
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
        with self.turn if index == 0 else contextlib.nullcontext():
            if index == 0:
                self.warm_targets()
            self.exchange.meet(index)
            for turn in range(len(self.replicas)):
                if turn == index:
                    self.warm_turn(index)
                self.exchange.meet(index)
            if index == 0:
                self.sealed()

    def warm_targets(self) -> None:
        """The turns of all targets, in the calling thread.

        Raises:
            UserError: as `warm_up`.
        """
        warm = WarmUp(self.gate, self.ledger, [each.region.device for each in self.targets], self._tell)
        for each in self.targets:
            with explained():
                warm.turn(each.region.name, each.region.device, [each.region], each.warm, each.differs_from_eager)

    def run_targets(self) -> None:
        """One made-up row through every compiled target."""
        for each in self.targets:
            each.warm()

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
        failure = note_in_cache(self.plan, self.ledger)
        if failure:  # the run has compiled what it needs, and goes on
            self.log.write("notice", text=failure)

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
                if index == 0:
                    self.run_targets()
                yield
            self.exchange.meet(index)
            if index == 0:
                self.judge(update + 1)
            self.exchange.meet(index)
        finally:
            if index == 0:
                self.evidence.abandon()

    def tell_late(self) -> None:
        """Says what has compiled after the warm-up, where that is no error, and writes it into the ledger.

        Cost: a look at a list's length where nothing has.
        """
        new = self.gate.compiles[self._told :]
        if not new:
            return
        self._told += len(new)
        late = [each for each in new if each.late]
        for each in late:
            what = f"{each.region or 'a function outside any region'} compiled ({each.direction}) after the warm-up"
            self.log.write("notice", text=f"{what}, while {each.thread} worked: {each.why()}")
        if late:
            self._write()

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
        self._write()
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

    def _write(self) -> None:
        try:
            self.ledger.write(self._path)
        except OSError as error:  # the run is worth more than its ledger
            self.log.write("notice", text=f"the ledger cannot be written: {error}")

    def _show(self) -> None:
        self._write()
        self.log.write("ledger", lines=self.ledger.table())


@functools.cache
def machine_facts() -> dict[str, Any]:
    """What must match for this project's compiled code to be worth loading, as this process first saw it: compiling
    itself sets variables and options, and a cache must be found again by a process that has not compiled yet."""
    return facts(SOURCES / package for package in PACKAGES)


def needs(plan: Plan) -> dict[str, float | None]:
    """What a run of this plan compiles: a name for each region and device, and the seconds that it may take.

    The name carries a hash of everything that shapes the graphs. Seconds are what an H200 took at the geometry of
    Qwen3-8B, for the first worker of a device and for its others; None on other kinds of device.
    """
    config, spec, precision = plan.config, plan.spec, plan.config.target.precision
    shape = {
        "rows": config.rows.model_dump(),
        "spec": vars(spec),
        "objective": config.objective.model_dump(),
        "attention": plan.attention,
        "dtype": str(plan.dtype),
        # Inductor's CPU code is made for a number of threads.
        "threads": plan.topology.cpu_threads if plan.topology.drafters[0].type == "cpu" else None,
        "checkpointing": config.training.activation_checkpointing,
        "drafter": [config.compile.drafter, config.compile.flex_backend],
        "target": [str(plan.target_dtype), vars(plan.geometry), sorted(set(plan.kinds)), plan.spec.taps, precision],
        "head": [plan.geometry.logit_multiplier, plan.geometry.logit_softcap, plan.geometry.vocab_rows],
    }
    mark = hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()[:12]
    found: dict[str, float | None] = {}
    drafters = plan.topology.drafters
    for index, device in enumerate(drafters):
        first = device not in drafters[:index]
        cold = {"drafter": 20.0, "objective": 4.0} if first else {"drafter": 3.0, "objective": 1.0}
        for role, seconds in cold.items():
            found[f"{role} {index} on {device} ({mark})"] = seconds if device.type == "cuda" else None
    plain = not method_of(read_config(config.target))
    if config.compile.target and plain and set(plan.kinds) <= PACKED_KINDS:
        for index, device in enumerate(dict.fromkeys(plan.topology.targets)):
            found[f"target {index} on {device} ({mark})"] = 8.0 if device.type == "cuda" else None
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


def note_in_cache(plan: Plan, ledger: Ledger) -> str:
    """Write into Draftsmith's own cache what it holds now, if this run filled it; why that failed, or ""."""
    own = cache_folder(plan)
    if cache.inductor_folder() != own or not cache.coverage(own, needs(plan)).missing:
        return ""
    try:
        cache.write_manifest(own, ledger.machine, uses(plan, ledger))
    except OSError as error:
        return f"what the compile cache holds could not be noted in it: {error}"
    return ""


def check_cache(plan: Plan) -> None:
    """Whether what this plan compiles could be kept.

    A cache that is there already may be one that is only read; torch makes a folder that the environment names itself.

    Raises:
        UserError: the folder cannot be made.
    """
    folder = cache_folder(plan)
    if plan.compiled and cache.may_choose() and not folder.is_dir():
        with cache_refusals(fix=ELSEWHERE):
            cache.make_writable(folder.parent)


def check_compiler(plan: Plan) -> None:
    """Whether torch finds the compiler without which nothing of this plan runs compiled on the CPU.

    Raises:
        UserError: it does not.
    """
    devices = [*plan.topology.drafters, *(plan.topology.targets if plan.config.compile.target else ())]
    if plan.compiled and any(device.type == "cpu" for device in devices):
        why = _torch.lacks_compiler()
        if why:
            raise UserError(f"torch cannot compile on this machine: {why}", where="compile", fix=COMPILER)


def use_cache(plan: Plan) -> str:
    """Have torch keep what it compiles in Draftsmith's own cache for this plan, and load it from there.

    Returns:
        What to tell where the environment names another folder; else "".
    """
    chosen, places = cache.use(cache_folder(plan)), []
    named = cache.inductor_folder()
    if not chosen:
        how = "" if cache.own_cache_of(named) else ", which has no lock and which no command of Draftsmith changes"
        places.append(f"TORCHINDUCTOR_CACHE_DIR names the compile cache: {named}{how}")
    flash = os.environ[cache.FLASH_FOLDER]
    if plan.config.compile.flex_backend == "flash" and Path(flash) != named / "flash":
        places.append(f"{cache.FLASH_FOLDER} names another place for FlashAttention-4's kernels: {flash}")
    return "; ".join(places)


@contextlib.contextmanager
def cache_refusals(fix: str = "") -> Iterator[None]:
    """Turns what Draftsmith's caches refuse, or a place of them that cannot be read or written, into the user's error.

    Args:
        fix: what to do about it, where the message does not say.
    """
    try:
        yield
    except (cache.CacheRefused, OSError) as error:
        raise UserError(str(error), where="compile cache", fix=fix) from error


def make_regions(plan: Plan, index: int, model: DraftModel, gate: Gate) -> tuple[Callable[..., Tensor], Region]:
    """What a replica compiles: the drafter's forward, whole or by layer, and one chunk of the objective."""
    device = plan.topology.drafters[index]
    why = f"{plan.attention} attention on {device.type}, by name"

    def region(name: str, function: Callable[..., Any]) -> Region:
        return Region(f"{name} {index}", function, gate=gate, enabled=plan.compiled, device=device, why_eager=why)

    terms = region("objective", chunk_terms)
    if plan.config.compile.drafter == "whole":
        return region("drafter", model.fill_blocks), terms
    return ByLayer(model.fill_blocks, region("drafter", run_part)), terms


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
    except Differs as error:
        raise UserError(
            str(error),
            where="warm-up",
            fix="compile.flex_backend=triton if it is flash; otherwise report this: what was compiled is wrong",
        ) from error
    except NotCompiled as error:
        raise UserError(
            str(error), where="warm-up", fix="draftsmith doctor CONFIG says what keeps torch from compiling"
        ) from error
    except Exception as error:
        cause = _torch.why_it_failed(error)
        if not cause:
            raise
        raise UserError(
            f"torch cannot compile on this machine: {cause}",
            where="warm-up",
            fix=f"if a compiler is missing: {COMPILER}; draftsmith doctor CONFIG looks for what compiling needs",
        ) from error
