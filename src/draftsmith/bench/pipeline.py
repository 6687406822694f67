"""The whole pipeline on random weights: the trainer's own threads, links, hand-off, exchange, warm-up and evidence.

Only what is read from disk is made up: a target with random weights, rows of random tokens. Nothing is saved. After the
run the same work is measured alone (a row on a target, a row on a drafter, an update), from which the model that "auto"
chooses by predicts the speed; the prediction stands beside what was measured.

On CUDA a few updates in the middle are traced: a device's idle share is the part of that time in which none of its
kernels and copies ran.
"""

from __future__ import annotations

import tempfile
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from draftsmith.bench.geometry import kinds_of, twin
from draftsmith.bench.pipeline_figures import Watch, figures, predicted, row_arithmetic, shape_of
from draftsmith.bench.pipeline_trace import KERNELS, read_trace, trace
from draftsmith.bench.random_target import model_config, random_target
from draftsmith.bench.setting import Setting
from draftsmith.blocks import Row
from draftsmith.compiled import Gate, cache
from draftsmith.config import RunConfig, parse_config
from draftsmith.drafter.model import DraftModel
from draftsmith.objective import Sums
from draftsmith.observe.events import EventLog
from draftsmith.pipeline.assemble import batch_maker, make_replicas, make_workers
from draftsmith.pipeline.balance import balance_of
from draftsmith.pipeline.compiling import cache_folder, check_cache
from draftsmith.pipeline.jobs import Job, JobSequence
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.measure import measure_costs, rough_weights, settle
from draftsmith.pipeline.not_finite import NotFinite
from draftsmith.pipeline.out_of_memory import explain
from draftsmith.pipeline.plan import Plan, with_topology
from draftsmith.pipeline.progress import Progress
from draftsmith.pipeline.ranks import Ranks
from draftsmith.pipeline.signals import Signals
from draftsmith.pipeline.supervise import supervise
from draftsmith.pipeline.sync import Exchange
from draftsmith.pipeline.topology import resolve_topology
from draftsmith.pipeline.vitals import Vitals
from draftsmith.target.forward import Features, Target
from draftsmith.target.taps import MaskToken
from draftsmith.training.step import Replica
from draftsmith.training.update import ReplicaUpdate, make_updates, total_sums

POOL = 8  # different rows
STEPS = 24
STEPS_ON_CPU = 10  # the largest geometry without a twin ends within a minute


@dataclass(frozen=True)
class PipelineSetting:
    """What is run.

    Attributes:
        setting: sizes; its device is not used.
        targets, drafters: devices by worker, as in `pipeline.targets` and `pipeline.drafters`; both may be "auto".
        rows: of an update; 0: one for each drafter.
        steps: updates.
        prefetch, queue: threads that make rows; rows that may wait.
        sequence: whether the same work is also done in one thread, one piece after the other.
    """

    setting: Setting
    targets: tuple[str, ...]
    drafters: tuple[str, ...]
    rows: int = 0
    steps: int = STEPS
    prefetch: int = 2
    queue: int = 2
    sequence: bool = False


class _RandomRows:
    """Rows of random tokens, a few different ones over and over."""

    waste = 0.0
    rows_per_epoch = 1_000_000

    def __init__(self, setting: Setting) -> None:
        row = setting.row()
        generator = torch.Generator().manual_seed(1)
        size = (setting.length,)
        self._rows = [
            replace(row, tokens_S=torch.randint(setting.geometry.vocab_rows - 1, size, generator=generator))
            for _ in range(POOL)
        ]

    def row(self, number: int) -> Row:
        return replace(self._rows[number % POOL], number=number)


def plan_of(bench: PipelineSetting, folder: Path) -> Plan:
    """A plan like a run's, without a target or data on disk.

    Raises:
        UserError: a device is not there, or there are more drafters than rows of an update.
    """
    setting, rows = bench.setting, bench.rows or len(bench.drafters)
    config = _config(bench, rows, folder)
    topology = resolve_topology(config.pipeline, rows)
    cuda = topology.drafters[0].type == "cuda"
    setting = replace(
        setting, device=topology.drafters[0], geometry=setting.geometry if cuda else twin(setting.geometry)
    )
    model_config(setting.geometry).save_pretrained(folder)  # what a target is like is read from there, but no weights
    spec = setting.spec()
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in DraftModel(spec).parameters())
    corpus: Any = SimpleNamespace(train=_RandomRows(setting), held_out=None)
    plan = Plan(
        config, topology, setting.geometry, kinds_of(setting.geometry), spec,
        MaskToken(spec.mask_token_id, "configured"),
        setting.dtype, setting.dtype, setting.attention, cuda, corpus, JobSequence(bench.steps, rows, 0, 0),
        parameters, (), (),
    )  # fmt: skip
    return with_topology(plan, topology)


def _config(bench: PipelineSetting, rows: int, folder: Path) -> RunConfig:
    setting = bench.setting
    return parse_config(
        {
            "target": {"path": str(folder)},
            "data": {"train": "random tokens"},
            "drafter": {"layers": setting.layers, "block_size": setting.block_size},
            "rows": {"length": setting.length, "anchors": setting.anchors},
            "objective": {"chunk": setting.chunk},
            "optimizer": {"name": setting.optimizer},
            "compile": {"flex_backend": setting.flex_backend},
            "training": {"steps": bench.steps, "rows_per_update": rows, "output": str(folder), "save_every": 0},
            "pipeline": {
                "targets": list(bench.targets),
                "drafters": list(bench.drafters),
                "prefetch": bench.prefetch,
                "queue": bench.queue,
            },
        }
    )


def known_shape(bench: PipelineSetting) -> dict[str, Any]:
    """What of the result's shape follows from the setting: all of it but the devices that "auto" stands for.

    Raises:
        UserError: see `plan_of`.
    """
    with tempfile.TemporaryDirectory(prefix="draftsmith-bench-") as scratch:
        shape = shape_of(plan_of(bench, Path(scratch))) | {"documents": bench.setting.documents}
    if "auto" in (*bench.targets, *bench.drafters):
        del shape["targets"], shape["drafters"]
    return shape


def bench_pipeline(bench: PipelineSetting) -> dict[str, Any]:
    """Runs it and measures; see the module's docstring.

    Raises:
        UserError: see `plan_of`; a device is out of memory; the compiled path did not run.
    """
    began = time.perf_counter()
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="draftsmith-bench-") as scratch:
        plan = plan_of(bench, Path(scratch))
        check_cache(plan)
        plan, loaded = _settled(bench, plan, Path(scratch))
        torch.set_num_threads(plan.topology.cpu_threads)
        if plan.compiled:
            cache.use(cache_folder(plan))
        gate = Gate()
        try:
            targets = _targets(bench.setting, plan, loaded)
            replicas = make_replicas(plan, targets[0].head(), gate, fill=rough_weights)
            updates = make_updates([replica.model for replica in replicas], plan.config.optimizer)
            ready = time.perf_counter() - began
            result = _run(bench, plan, gate, targets, replicas, updates, Path(scratch))
            result["load_seconds"] = round(ready, 2)
            result["shape"]["documents"] = bench.setting.documents
            result |= row_arithmetic(bench.setting, plan, result["ms_per_row"])
            if plan.topology.choices:
                result["auto"] = plan.topology.reason
                error = plan.topology.choices[0].tokens_per_second / result["tokens_per_second"] - 1
                result["auto_prediction_error"] = error
            make = batch_maker(plan, overfit=False)
            costs = measure_costs(
                targets[0],
                replicas,
                Exchange(updates, Stop()),
                plan.spec.taps,
                lambda number: make(Job(number, True, number, 0)),
                block_size=plan.spec.block_size,
            )
            result |= predicted(plan, costs, result["tokens_per_second"])
            if bench.sequence:
                rate = _in_sequence(plan, targets, replicas, updates)
                result["sequence_tokens_per_second"] = rate
                result["against_sequence"] = result["tokens_per_second"] / rate
        finally:
            gate.close()
            torch.set_num_threads(threads)
    return result


def _settled(bench: PipelineSetting, plan: Plan, scratch: Path) -> tuple[Plan, dict[torch.device, Target]]:
    """Devices chosen as "auto" chooses them, by the same measurement as a run's."""
    with EventLog(scratch / "settling.jsonl") as log:
        return settle(plan, scratch, log, resume=False, load=lambda trial: _targets(bench.setting, trial, {}))


def _targets(setting: Setting, plan: Plan, loaded: dict[torch.device, Target]) -> list[Target]:
    """One for each device, cut off behind the last tap as in a run."""
    found = dict(loaded)
    for device in plan.topology.targets:
        if device not in found:
            found[device] = random_target(replace(setting, device=device, geometry=plan.geometry))
            found[device].free_layers_after(max(plan.spec.taps))
    return [found[device] for device in plan.topology.targets]


def _run(
    bench: PipelineSetting,
    plan: Plan,
    gate: Gate,
    targets: list[Target],
    replicas: list[Replica],
    updates: list[ReplicaUpdate],
    scratch: Path,
) -> dict[str, Any]:
    stop, ranks = Stop(), Ranks()
    ranks.writes = False  # nothing is saved
    with EventLog(scratch / "events.jsonl") as log:
        not_finite = NotFinite("stop", lambda _row: [])
        nobody: Any = None
        progress = Progress(
            plan.config, plan.sequence, 0, log, [], nobody, dict, None, False, not_finite, ranks  # type: ignore[arg-type]
        )  # fmt: skip
        exchange = Exchange(updates, stop)
        workers = make_workers(plan, targets, replicas, exchange, progress, gate, log, 0, stop, False)
        progress.clocks.extend(worker.clock for worker in workers)
        watch = Watch(progress.clocks)
        log.listen(watch)
        tracer = threading.Thread(target=lambda: trace(bench.steps, watch, stop, scratch), daemon=True)
        if plan.compiled:
            tracer.start()
        links = {worker.name: worker.inbox for worker in workers if hasattr(worker, "inbox")}
        began, done = time.perf_counter(), lambda: progress.steps_done
        devices, balance = plan.topology.devices, balance_of(plan, progress.clocks)
        with Vitals(log, scratch, devices, progress.clocks, links, bench.queue, done, balance) as vitals:
            supervise(workers, stop, progress, Signals(), 0.0, partial(explain, plan))
            interpreter = vitals.interpreter()
        if plan.compiled:
            tracer.join(60)
        return {
            **figures(plan, watch, bench.steps),
            "geometry": bench.setting.name,
            "first_update_seconds": round(watch.ends[0] - began, 2),
            "balance": log.summary["balance"] and log.summary["balance"]["text"],
            "interpreter": interpreter,
            "notes": watch.lines,
            **read_trace(scratch / KERNELS),
        }


def _in_sequence(plan: Plan, targets: list[Target], replicas: list[Replica], updates: list[ReplicaUpdate]) -> float:
    """Real tokens per second of the same work in one thread, one piece behind the other on the same devices."""
    make, rows, count = batch_maker(plan, overfit=False), plan.sequence.own_rows, 4
    made = [make(Job(number, True, number, 0)) for number in range(rows)]
    cuda = [device for device in plan.topology.devices if device.type == "cuda"]

    def update_once() -> None:
        sums = [torch.zeros(Sums.size(plan.spec.block_size), device=update.device) for update in updates]
        for number, (row, batch) in enumerate(made):
            target, place = targets[number % len(targets)], number % len(replicas)
            features = target.features(row.tokens_S, row.document_S, row.positions_S, plan.spec.taps)
            device = updates[place].device
            moved = Features(features.taps_SF.to(device, plan.dtype))
            sums[place] += replicas[place].step(moved, batch.to(device)).values
            updates[place].accumulate()
        totals = [total_sums([Sums(each) for each in sums], update.device) for update in updates]
        squares = [update.reduce(updates, total.weight) for update, total in zip(updates, totals, strict=True)]
        for update in updates:
            update.apply(torch.stack([square.to(update.device) for square in squares]).sum().sqrt(), 0.0)
        for update in updates:
            update.refresh(updates)
        for device in cuda:
            torch.cuda.synchronize(device)

    update_once()
    began = time.perf_counter()
    for _ in range(count):
        update_once()
    return count * sum(row.real_tokens for row, _ in made) / (time.perf_counter() - began)
