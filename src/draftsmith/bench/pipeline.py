"""The whole pipeline on random weights: the trainer's own threads, links, hand-off, exchange, warm-up and evidence.

Only what is read from disk is made up: a target with random weights, rows of random tokens. Nothing is saved. After the
run the same work is measured alone (a row on a target, a row on a drafter, an update), from which the model that "auto"
chooses by predicts the speed; the prediction stands beside what was measured.

On CUDA a few updates in the middle are traced: a device's idle share is the part of that time in which none of its
kernels and copies ran.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from draftsmith.bench.geometry import kinds_of, twin
from draftsmith.bench.setting import GIB, Setting
from draftsmith.bench.target import model_config, random_target
from draftsmith.blocks import Row
from draftsmith.compiled import Gate, cache
from draftsmith.config import RunConfig, parse_config
from draftsmith.drafter.model import DraftModel
from draftsmith.objective import Sums
from draftsmith.observe.events import Event, EventLog
from draftsmith.pipeline.balance import balance_of
from draftsmith.pipeline.clock import KINDS
from draftsmith.pipeline.compiling import cache_folder
from draftsmith.pipeline.costs import Costs, choose, seconds_per_update
from draftsmith.pipeline.jobs import Job, JobSequence
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.measure import measure_costs, rough_weights, settle
from draftsmith.pipeline.not_finite import NotFinite
from draftsmith.pipeline.out_of_memory import explain
from draftsmith.pipeline.plan import Plan, with_topology
from draftsmith.pipeline.progress import Progress
from draftsmith.pipeline.ranks import Ranks
from draftsmith.pipeline.run import batch_maker, make_replicas, make_workers
from draftsmith.pipeline.signals import Signals
from draftsmith.pipeline.supervise import supervise
from draftsmith.pipeline.sync import Exchange
from draftsmith.pipeline.topology import resolve_topology
from draftsmith.pipeline.vitals import Vitals
from draftsmith.target.forward import Features, Target
from draftsmith.target.taps import MaskToken
from draftsmith.training.step import Replica
from draftsmith.training.update import ReplicaUpdate, make_updates, total_sums

WARM = 3  # updates that are not counted: the first is profiled, and queues fill
TRACED = 4  # updates under the profiler, in the middle
RAMP = 0.2  # of the traced time, at either end, that starting and stopping the profiler may disturb
POOL = 8  # different rows


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
    steps: int = 24
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
            "training": {"steps": bench.steps, "rows_per_update": rows, "output": str(folder), "save_every": 0},
            "pipeline": {
                "targets": list(bench.targets),
                "drafters": list(bench.drafters),
                "prefetch": bench.prefetch,
                "queue": bench.queue,
            },
        }
    )


@dataclass
class _Watch:
    """When updates ended, where workers' time had gone by then, and what the events said."""

    clocks: Sequence[Any]
    ends: list[float] = field(default_factory=list)
    spent: list[dict[str, dict[str, float]]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    reached: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, event: Event) -> None:
        if event["kind"] == "step":
            with self.reached:
                self.ends.append(time.perf_counter())
                self.spent.append({clock.worker: {**clock.totals(), "rows": clock.rows} for clock in self.clocks})
                self.tokens.append(event["tokens"])
                self.reached.notify_all()
        elif event["kind"] in ("warmup", "evidence", "notice"):
            self.lines.append(f"{event['kind']}: {event['text']}")

    def wait_for(self, updates: int, stop: Stop) -> bool:
        with self.reached:
            while len(self.ends) < updates and not stop.is_set():
                self.reached.wait(0.2)
            return len(self.ends) >= updates


def bench_pipeline(bench: PipelineSetting) -> dict[str, Any]:
    """Runs it and measures; see the module's docstring.

    Raises:
        UserError: see `plan_of`; a device is out of memory; the compiled path did not run.
    """
    began = time.perf_counter()
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="draftsmith-bench-") as scratch:
        plan, loaded = _settled(bench, plan_of(bench, Path(scratch)), Path(scratch))
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
            result |= _predicted(plan, costs, result["tokens_per_second"])
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
        watch = _Watch(progress.clocks)
        log.listen(watch)
        tracer = threading.Thread(target=lambda: _trace(bench, watch, stop, scratch), daemon=True)
        if plan.compiled:
            tracer.start()
        links = {worker.name: worker.inbox for worker in workers if hasattr(worker, "inbox")}
        began, done = time.perf_counter(), lambda: progress.steps_done
        devices, balance = plan.topology.devices, balance_of(plan, progress.clocks)
        with Vitals(log, scratch, devices, progress.clocks, links, bench.queue, done, balance, progress.warm) as vitals:
            supervise(workers, stop, progress, Signals(), 0.0, partial(explain, plan))
            interpreter = vitals.interpreter()
        if plan.compiled:
            tracer.join(60)
        return {
            **_figures(plan, watch, bench.steps),
            "first_update_seconds": round(watch.ends[0] - began, 2),
            "balance": log.summary["balance"] and log.summary["balance"]["text"],
            "interpreter": interpreter,
            "notes": watch.lines,
            **_traced(scratch / "kernels.json"),
        }


def _figures(plan: Plan, watch: _Watch, steps: int) -> dict[str, Any]:
    """Speed and shares between the last warm update and the last."""
    first, last = WARM, steps - 2  # the last one's end is told together with the one before
    seconds = watch.ends[last] - watch.ends[first]
    gaps = [1e3 * (late - early) for early, late in zip(watch.ends[first:], watch.ends[first + 1 :], strict=False)]
    rows = plan.sequence.own_rows * (last - first)
    shares = {
        worker: {kind: round((now[kind] - watch.spent[first][worker][kind]) / seconds, 4) for kind in KINDS}
        for worker, now in watch.spent[last].items()
    }
    topology = plan.topology
    cuda = [device for device in topology.devices if device.type == "cuda"]
    return {
        "bench": "pipeline",
        "device": torch.cuda.get_device_name(cuda[0]) if cuda else "cpu",
        "torch": torch.__version__,
        "ms": statistics.median(gaps),
        "ms_min": min(gaps),
        "ms_max": max(gaps),
        "runs": len(gaps),
        "ms_per_row": 1e3 * seconds / rows,
        "tokens_per_second": (watch.tokens[last] - watch.tokens[first]) / seconds,
        "shape": {
            "S": plan.config.rows.length, "N": plan.config.rows.anchors, "B": plan.spec.block_size,
            "layers": plan.spec.layers, "H": plan.geometry.hidden_size, "V": plan.geometry.vocab_rows,
            "chunk": plan.config.objective.chunk, "rows": plan.sequence.own_rows,
            "targets": [str(device) for device in topology.targets],
            "drafters": [str(device) for device in topology.drafters],
        },
        "workers": shares,
        "peak_gib": {str(device): torch.cuda.max_memory_allocated(device) / GIB for device in cuda},
    }  # fmt: skip


def _predicted(plan: Plan, costs: Costs, measured: float) -> dict[str, Any]:
    """What the model says of this use of the devices, and of the others."""
    rows, queue = plan.sequence.own_rows, plan.config.pipeline.queue
    seconds = seconds_per_update(costs, plan.topology.placement, rows, queue) / rows
    found: dict[str, Any] = {
        "costs": costs.to_json(),
        "predicted_tokens_per_second": costs.tokens / seconds,
        "prediction_error": costs.tokens / seconds / measured - 1,
    }
    cuda = [device for device in plan.topology.devices if device.type == "cuda"]
    if len(cuda) > 1 and len(plan.topology.drafters) == 1:
        choices = choose(costs, len(cuda), max(rows, len(cuda)), queue)
        found["choices"] = {each.placement.name(): each.tokens_per_second for each in choices}
    return found


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


def _trace(bench: PipelineSetting, watch: _Watch, stop: Stop, scratch: Path) -> None:
    """Has some updates in the middle profiled; the devices' events only."""
    first = max(WARM, bench.steps // 2)
    if bench.steps < first + TRACED + 1 or not watch.wait_for(first, stop):
        return
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.start()
    watch.wait_for(len(watch.ends) + TRACED, stop)
    profiler.stop()
    profiler.export_chrome_trace(str(scratch / "kernels.json"))


def _traced(path: Path) -> dict[str, Any]:
    """Idle share of every device, and milliseconds of copies between devices for a row."""
    if not path.exists():
        return {}
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    on_device = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not on_device:
        return {}
    found = {f"cuda:{number}": share for number, share in idle_shares(on_device).items()}
    peer = [each["dur"] for each in on_device if "PtoP" in each.get("name", "")]
    large = [each for each in peer if each > 0.1 * max(peer)]
    return {"idle": found, **({"peer_copy_ms": statistics.median(large) / 1e3} if large else {})}


def idle_shares(events: Sequence[dict[str, Any]]) -> dict[int, float]:
    """By device, the share of the traced time in which nothing ran on it; the ends of the trace are left out.

    Args:
        events: of a Chrome trace, with "ts" and "dur" in microseconds and the device in "args".
    """
    begin = min(each["ts"] for each in events)
    end = max(each["ts"] + each["dur"] for each in events)
    first, last = begin + RAMP * (end - begin), end - RAMP * (end - begin)
    shares = {}
    for device in sorted({each["args"]["device"] for each in events}):
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["args"]["device"] == device)
        busy, until = 0.0, first
        for start, stop in own:
            start, stop = max(start, until), min(stop, last)
            if stop > start:
                busy, until = busy + stop - start, stop
        shares[device] = 1 - busy / (last - first)
    return shares


def lines_of(result: dict[str, Any]) -> list[str]:
    """For people."""
    shape, costs = result["shape"], Costs(**result["costs"])
    lines = [
        f"pipeline: {result['tokens_per_second']:,.0f} real tok/s, {result['ms_per_row']:.2f} ms a row; an update of "
        f"{shape['rows']} rows {result['ms']:.2f} ms (min {result['ms_min']:.2f}, max {result['ms_max']:.2f})",
        f"  targets on {', '.join(shape['targets'])}; drafters on {', '.join(shape['drafters'])}; "
        f"S={shape['S']} N={shape['N']} B={shape['B']} H={shape['H']} V={shape['V']}",
        f"  alone: {costs.line()}",
        f"  predicted from that {result['predicted_tokens_per_second']:,.0f} real tok/s "
        f"({result['prediction_error']:+.1%})",
    ]
    lines += [f"  predicted {rate:,.0f} real tok/s: {name}" for name, rate in result.get("choices", {}).items()]
    if "auto" in result:
        lines.append(f"  auto, before anything ran: {result['auto']} ({result['auto_prediction_error']:+.1%})")
    if "sequence_tokens_per_second" in result:
        lines.append(
            f"  the same work in sequence {result['sequence_tokens_per_second']:,.0f} real tok/s: "
            f"{result['against_sequence']:.2f} times as fast in threads"
        )
    for worker, shares in result["workers"].items():
        lines.append(
            f"  {worker:<11}" + ", ".join(f"{share:.0%} {kind}" for kind, share in shares.items() if share > 0)
        )
    lines += [f"  {device} idle {share:.1%} of a traced stretch" for device, share in result.get("idle", {}).items()]
    if "peer_copy_ms" in result:
        lines.append(f"  {result['peer_copy_ms']:.3f} ms for a row's features from device to device")
    lines += [f"  {device} {size:.2f} GiB at most" for device, size in result["peak_gib"].items()]
    lines += [f"  balance: {result['balance']}"] if result["balance"] else []
    lines.append(
        f"  {result['load_seconds']} s to make the weights, {result['first_update_seconds']} s to the first update"
    )
    return lines + [f"  {line}" for line in result["notes"]]
