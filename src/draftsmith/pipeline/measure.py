"""What the work costs on this machine: one target and one drafter, alone, on the first rows of the run.

`auto` with several GPUs asks for it before anything else is loaded: target on the first device, drafter on the second,
both compiled as the run compiles them (later ones load from the cache), some rows through each, an update, a transfer.
Cost beside compiling: some ten rows of each role, and the drafter's memory for a moment. The target stays.

Times are those of the wall around work that is given without a pause, until the device has done it all; so they are the
device's, or the host's where that is slower. What several drafters do to one bus at a time is not measured.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.blocks import DraftBatch, Row
from draftsmith.compiled import Gate, Settings, cache
from draftsmith.drafter import DraftModel
from draftsmith.errors import UserError
from draftsmith.objective import Sums
from draftsmith.observe.events import EventLog
from draftsmith.pipeline.assemble import batch_maker, load_targets, made_up_drafts, make_replicas
from draftsmith.pipeline.compiling import Compiling, TargetLayers, cache_folder
from draftsmith.pipeline.costs import Costs
from draftsmith.pipeline.jobs import Job
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.phases import MEASURING
from draftsmith.pipeline.plan import Plan, with_topology
from draftsmith.pipeline.sync import Alone, Exchange
from draftsmith.pipeline.topology import Topology, parse_device, resolve_topology
from draftsmith.target.forward import Features, Target
from draftsmith.training.step import Replica
from draftsmith.training.update import make_updates

ROWS, UPDATES, WARM = 6, 6, 2  # measured, and before that
TRANSFER = 256 * 2**20  # bytes

MakeRow = Callable[[int], tuple[Row, DraftBatch]]


def measure_costs(
    target: Target,
    replicas: Sequence[Replica],
    exchange: Exchange,
    taps: tuple[int, ...],
    make: MakeRow,
    *,
    last_hidden: bool = False,
    block_size: int,
) -> Costs:
    """Measures one target, one replica, the update of all replicas, and what goes between their devices.

    The replicas' weights are changed. Of several replicas the update is measured together with the exchange, and the
    costs are right for so many only.

    Args:
        target, replicas, exchange: warm, and used by nobody else now.
        taps: of the run.
        make: number → row and batch.
        last_hidden: whether the objective needs them.
        block_size: B.
    """
    dtype = next(iter(replicas[0].model.parameters())).dtype
    here, devices = target.device, [update.device for update in exchange.updates]
    there = devices[0]
    made = [make(number) for number in range(ROWS)]

    def features(number: int) -> Features:
        row = made[number % ROWS][0]
        return target.features(row.tokens_S, row.document_S, row.positions_S, taps, last_hidden=last_hidden)

    with _current(here):
        first = _moved(features(0), here, dtype)
        per_target = _seconds(features, ROWS, [here])
    learners = [
        _Learner(replica, exchange, index, _moved(first, device, dtype), [batch for _, batch in made], block_size)
        for index, (replica, device) in enumerate(zip(replicas, devices, strict=True))
    ]
    copy = 0.0
    if here != there:
        place = first.taps_SF.to(there)
        copy = _seconds(lambda _number: place.copy_(first.taps_SF, non_blocking=True), ROWS, [here, there])
    with _current(there):
        per_row = _seconds(learners[0].row, ROWS, [there])
    count, sharing = len(devices), devices.count(there)
    per_update = _together([learner.update_seconds for learner in learners], exchange.stop)
    parameters = sum(parameter.numel() for parameter in replicas[0].model.parameters())
    between = _transfer_seconds(here, there) * parameters * (4 + dtype.itemsize) if count == 1 else 0.0
    tokens = sum(row.real_tokens for row, _ in made) / ROWS
    return Costs(per_target, per_row, per_update * count / sharing, between, copy, tokens)


class _Learner:
    """One replica that learns the same features over and over."""

    def __init__(
        self,
        replica: Replica,
        exchange: Exchange,
        index: int,
        features: Features,
        batches: list[DraftBatch],
        block_size: int,
    ) -> None:
        self._replica, self._exchange, self._index, self._features = replica, exchange, index, features
        self._update, self._block_size = exchange.updates[index], block_size
        self._device = self._update.device
        # They lie ready in page-locked memory, as prefetch workers leave them.
        self._batches = [batch.pin() if self._device.type == "cuda" else batch for batch in batches]

    def row(self, number: int, *, last: bool = False) -> None:
        """A row without an update."""
        self._replica.step(self._features, self._batches[number % ROWS].to(self._device, non_blocking=True))
        self._update.accumulate(last=last)

    def update_seconds(self) -> float:
        """Of an update behind a row, from an idle device to an idle device; all replicas' threads have to be at it."""
        values = torch.zeros(Sums.size(self._block_size), device=self._device)
        values[1:2].fill_(1.0)
        found = []
        with _current(self._device):
            for number in range(WARM + UPDATES):
                self.row(number, last=True)
                _synchronize([self._device])
                self._exchange.meet(self._index)
                began = time.perf_counter()
                self._exchange.update(self._index, Sums(values.clone()), 0.0)
                _synchronize([self._device])
                found.append(time.perf_counter() - began)
        return statistics.median(found[WARM:])


def _together(work: Sequence[Callable[[], float]], stop: Stop) -> float:
    """The longest time that is told by pieces of work in a thread each, as in the pipeline.

    Raises what the first that fails raises; `stop` then ends the others, which wait for it at the exchange.
    """
    found: list[float] = []
    settings = Settings.capture()

    def measured(each: Callable[[], float]) -> None:
        try:
            found.append(settings.run(each))
        except BaseException as error:
            stop.set(error)

    threads = [threading.Thread(target=measured, args=(each,), daemon=True) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if stop.cause is not None:
        raise stop.cause
    return max(found)


def _moved(features: Features, device: torch.device, dtype: torch.dtype) -> Features:
    last = features.last_SH
    return Features(features.taps_SF.to(device, dtype), None if last is None else last.to(device, dtype))


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _seconds(work: Callable[[int], object], count: int, devices: list[torch.device]) -> float:
    """Of one of `count` pieces of work that follow each other without a pause."""
    for number in range(WARM):
        work(number)
    _synchronize(devices)
    began = time.perf_counter()
    for number in range(count):
        work(number)
    _synchronize(devices)
    return (time.perf_counter() - began) / count


def _synchronize(devices: list[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _transfer_seconds(source: torch.device, device: torch.device) -> float:
    """A byte from one device to another; 0 on one device."""
    if source == device or "cpu" in (source.type, device.type):
        return 0.0
    value = torch.empty(TRANSFER, dtype=torch.uint8, device=source)
    place: Tensor = torch.empty(TRANSFER, dtype=torch.uint8, device=device)
    return _seconds(lambda _number: place.copy_(value, non_blocking=True), ROWS, [source, device]) / TRANSFER


@torch.no_grad()
def rough_weights(model: DraftModel) -> None:
    """Weights of the usual size from the device's own numbers: those of a run's seed take the CPU ten seconds."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, 0.02)
        else:
            parameter.fill_(1.0)


def settle(
    plan: Plan,
    folder: Path,
    log: EventLog,
    *,
    resume: bool,
    share: Callable[[Any], Any] = lambda value: value,
    load: Callable[[Plan], list[Target]] | None = None,
) -> tuple[Plan, dict[torch.device, Target]]:
    """The plan with its devices settled, and what was loaded on the way.

    Nothing happens unless "auto" had several GPUs to choose from. A resumed run keeps the devices it had, so that its
    sums are formed in the same order.

    Args:
        plan: made without measuring.
        folder: of the run.
        log: is told.
        resume: whether the run goes on.
        share: what rank 0 has, on all ranks.
        load: the targets of a plan; None: as a run loads them.

    Raises:
        UserError: nothing fits; or what loading and compiling raise.
    """
    if not plan.topology.to_measure:
        return plan, {}
    before = share(_recorded(folder) if resume else None)
    if before is not None:
        return with_topology(plan, _as_recorded(before)), {}
    lacks = plan.lacks()  # before anything takes memory
    costs, loaded = _measure(plan, log, load)
    costs = Costs(**share(costs.to_json()))
    topology = resolve_topology(plan.config.pipeline, plan.sequence.own_rows, costs, lacks)
    settled = with_topology(plan, topology)
    if settled.compiled:
        try:
            _hand_on(cache.inductor_folder(), cache_folder(settled))
        except OSError as error:
            log.write("notice", text=f"what was compiled to measure is compiled again: {error}")
    return settled, loaded


def _hand_on(filled: Path, place: Path) -> None:
    """What was compiled to measure is there for the run, whose cache has another name, unless it has one already."""
    if not place.exists() and filled.parent == place.parent:
        cache.hand_on(filled, place)


def _measure(
    plan: Plan, log: EventLog, load: Callable[[Plan], list[Target]] | None
) -> tuple[Costs, dict[torch.device, Target]]:
    first, second, *_ = sorted(plan.topology.devices, key=lambda device: device.index or 0)
    trial = with_topology(plan, Topology((first,), (second,), "to measure"))
    log.write("notice", topic=MEASURING, text=f"measures a row on {first} and on {second} to choose devices")
    began = time.monotonic()
    (target,) = (load or load_targets)(trial)
    if trial.compiled:
        cache.use(cache_folder(trial))
    gate = Gate()
    try:
        replicas = make_replicas(trial, target.head(), gate, fill=rough_weights)
        compiling = Compiling(
            trial, gate, replicas, Alone(), log, made_up_drafts(trial), targets=[TargetLayers(trial, target, gate)]
        )
        if trial.compiled:
            compiling.warm_targets()
            compiling.warm_turn(0)
        exchange = Exchange(make_updates([replicas[0].model], plan.config.optimizer), Stop())
        make = batch_maker(plan, overfit=False)
        costs = measure_costs(
            target,
            replicas,
            exchange,
            plan.spec.taps,
            lambda number: make(Job(number, True, number, 0)),
            last_hidden=plan.config.objective.labels != "data",
            block_size=plan.spec.block_size,
        )
    finally:
        gate.close()
    del replicas, compiling, exchange
    gc.collect()
    torch.cuda.empty_cache()
    log.write("costs", **costs.to_json())
    log.write("notice", text=f"measured in {time.monotonic() - began:.0f} s, loading included: {costs.line()}")
    return costs, {first: target}


def _recorded(folder: Path) -> dict[str, Any] | None:
    """The devices that the run had, if they are known and all here."""
    try:
        devices = json.loads((folder / "resolved.json").read_text(encoding="utf-8"))["devices"]
        found: dict[str, Any] = {name: devices[name] for name in ("targets", "drafters", "costs")}
        _as_recorded(found)
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None
    return found


def _as_recorded(devices: dict[str, Any]) -> Topology:
    targets, drafters = (tuple(parse_device(name) for name in devices[role]) for role in ("targets", "drafters"))
    costs = Costs(**devices["costs"]) if devices["costs"] else None
    return Topology(targets, drafters, "as chosen when the run began", costs=costs)
