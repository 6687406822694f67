"""What a run of the whole pipeline on random weights shows: speed, workers' shares, and the model's prediction of both.

Figures are taken between the updates that fill the queues and the last one, from the run's own events.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from draftsmith.bench.parts import draft_flops
from draftsmith.bench.setting import GIB, Setting, arithmetic, process_gib
from draftsmith.bench.target import target_flops
from draftsmith.bench.timing import Timing, matmul_ceiling
from draftsmith.observe.events import Event
from draftsmith.pipeline.clock import between, shares_of
from draftsmith.pipeline.costs import Costs, choose, seconds_per_update
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.plan import Plan

WARM = 3  # updates that are not counted: the first is profiled, and queues fill


@dataclass
class Watch:
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
        """Until so many updates have ended; whether they have, or the run stops."""
        with self.reached:
            while len(self.ends) < updates and not stop.is_set():
                self.reached.wait(0.2)
            return len(self.ends) >= updates


def figures(plan: Plan, watch: Watch, steps: int) -> dict[str, Any]:
    """Speed and shares between the last warm update and the last."""
    first, last = WARM, steps - 2  # the last one's end is told together with the one before
    seconds = watch.ends[last] - watch.ends[first]
    ends = watch.ends[first : last + 1]
    gaps = [1e3 * (late - early) for early, late in itertools.pairwise(ends)]
    rows = plan.sequence.own_rows * (last - first)
    shares = {
        worker: shares_of(between(watch.spent[first][worker], now), seconds)
        for worker, now in watch.spent[last].items()
    }
    topology = plan.topology
    cuda = [device for device in topology.devices if device.type == "cuda"]
    return {
        "bench": "pipeline",
        "device": torch.cuda.get_device_name(cuda[0]) if cuda else "cpu",
        "torch": torch.__version__,
        "attention": plan.way,
        **Timing.of(gaps).to_json(),
        "ms_per_row": 1e3 * seconds / rows,
        "tokens_per_second": (watch.tokens[last] - watch.tokens[first]) / seconds,
        "shape": shape_of(plan),
        "workers": shares,
        "peak_gib": {str(device): torch.cuda.max_memory_allocated(device) / GIB for device in cuda},
        **({} if cuda else {"process_gib": process_gib()}),
    }


def shape_of(plan: Plan) -> dict[str, Any]:
    """What must be equal for results to compare; the row's documents are the caller's to add."""
    return {
        "S": plan.config.rows.length, "N": plan.config.rows.anchors, "B": plan.spec.block_size,
        "layers": plan.spec.layers, "H": plan.geometry.hidden_size, "V": plan.geometry.vocab_rows,
        "chunk": plan.config.objective.chunk, "rows": plan.sequence.own_rows,
        "optimizer": plan.config.optimizer.name,
        "targets": [str(device) for device in plan.topology.targets],
        "drafters": [str(device) for device in plan.topology.drafters],
    }  # fmt: skip


def row_arithmetic(setting: Setting, plan: Plan, ms_per_row: float) -> dict[str, Any]:
    """What a row's features and draft step ask for against the matmul ceiling of all devices; updates do not count.

    Args:
        setting: of the row.
        plan: of the run that was timed.
        ms_per_row: what it took.
    """
    setting = replace(setting, device=plan.topology.drafters[0], geometry=plan.geometry)
    layers = max(plan.spec.taps) + 1
    flops = target_flops(setting.geometry, layers, setting.length, setting.documents)
    flops += sum(draft_flops(setting, setting.batch()).values())
    ceiling = matmul_ceiling(setting.device, setting.dtype) * len(set(plan.topology.devices))
    return arithmetic([("all devices", flops, ceiling)], ms_per_row)


def predicted(plan: Plan, costs: Costs, measured: float) -> dict[str, Any]:
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


def lines_of(result: dict[str, Any]) -> list[str]:
    """For people."""
    shape, costs = result["shape"], Costs(**result["costs"])
    lines = [
        f"pipeline: {result['tokens_per_second']:,.0f} real tok/s, {result['ms_per_row']:.2f} ms a row; an update of "
        f"{shape['rows']} rows {result['ms']:.2f} ms (min {result['ms_min']:.2f}, max {result['ms_max']:.2f})",
        f"  targets on {', '.join(shape['targets'])}; drafters on {', '.join(shape['drafters'])}; "
        f"S={shape['S']} N={shape['N']} B={shape['B']} H={shape['H']} V={shape['V']} documents={shape['documents']}",
        f"  {result['tflop_per_second']:.3g} TFLOP/s, {result['share_of_ceiling']:.0%} of all devices' matmul "
        f"ceiling ({result['ceiling_tflop_per_second']:.3g}); floor {result['floor_ms']:.2f} ms a row without updates",
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
    if "process_gib" in result:
        lines.append(f"  {result['process_gib']:.2f} GiB of this process at most")
    lines += [f"  balance: {result['balance']}"] if result["balance"] else []
    lines.append(
        f"  {result['load_seconds']} s to make the weights, {result['first_update_seconds']} s to the first update"
    )
    return lines + [f"  {line}" for line in result["notes"]]
