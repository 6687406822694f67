"""One row on one device from tokens to new weights: target, step, update, one behind the other.

What a user waits for, if both roles share a card and nothing overlaps: real tokens per second by length of the row and
number of anchors. The same pass is run once more while every wait of the host for the device is an error, because a
host that waits cannot give the device the next row's work in time.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.bench.parts import draft_flops, make_replica
from draftsmith.bench.random_target import random_target
from draftsmith.bench.setting import Setting, result_of, start
from draftsmith.bench.target import target_flops
from draftsmith.bench.timing import host_milliseconds, measure
from draftsmith.compiled.gate import Gate
from draftsmith.compiled.region import Region
from draftsmith.config import OptimizerConfig
from draftsmith.errors import first_line
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.sync import Exchange
from draftsmith.target import fp8
from draftsmith.target.forward import run_layer
from draftsmith.target.geometry import RECURRENT
from draftsmith.training.update import make_updates

# What reads the device's memory to the host: single values, and sizes that depend on data.
READS = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default})


class _Reads(TorchDispatchMode):
    """Collects where the host reads values, on devices that do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READS:
            self.found.append(f"{function} {_place(traceback.extract_stack())}")
        return function(*args, **(kwargs or {}))


def host_waits(work: Callable[[], object], device: torch.device) -> list[str]:
    """Where `work` makes the host wait for the device; on CUDA the first such place, on the CPU where it would."""
    if device.type != "cuda":
        with _Reads() as reads:
            work()
        return reads.found
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return [f"{first_line(error)} {_place(traceback.extract_tb(error.__traceback__))}"]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return []


def _place(stack: traceback.StackSummary) -> str:
    """The innermost line of ours."""
    ours = [frame for frame in stack if "draftsmith" in frame.filename and not frame.filename.endswith("bench/row.py")]
    frame = (ours or list(stack))[-1]
    return f"at {frame.filename.rpartition('draftsmith/')[2]}:{frame.lineno}"


def bench_row(setting: Setting) -> dict[str, Any]:
    """Features, step and update of one row; "host_waits" is empty where nothing in it waits for the device.

    Raises:
        UserError: see `random_target` and `fp8.lower`.
    """
    start(setting)
    gate, target = Gate(), random_target(setting)
    taps, row, cpu_batch = setting.spec().taps, setting.row(), setting.batch()
    replica = make_replica(setting, gate, target.head())
    target_compiled = setting.device.type == "cuda" and RECURRENT not in target.kinds
    if setting.device.type == "cuda":
        if target_compiled:
            region = Region("bench target", run_layer, gate=gate, device=setting.device, **setting.compile_options)
            target.compile_layers(region)
        cpu_batch = cpu_batch.pin()
    target.free_layers_after(max(taps))
    if setting.precision == "fp8":
        fp8.lower(target, taps, [], math.inf)
    exchange = Exchange(make_updates([replica.model], OptimizerConfig()), Stop())

    def work() -> None:
        features = target.features(row.tokens_S, row.document_S, row.positions_S, taps)
        sums = replica.step(features, cpu_batch.to(setting.device, non_blocking=True))
        exchange.updates[0].accumulate(last=True)
        exchange.update(0, sums, 1.0)

    timing = measure(work, setting.device, runs=setting.runs)
    waits = host_waits(work, setting.device)
    host = {"host_ms": host_milliseconds(work, setting.device)} if setting.device.type == "cuda" else {}
    gate.close()
    flops = target_flops(setting.geometry, max(taps) + 1, setting.length, setting.documents)
    return result_of(
        "row",
        setting,
        timing,
        flops + sum(draft_flops(setting, cpu_batch).values()),
        real_tokens_per_second=cpu_batch.real_tokens / (timing.median * 1e-3),
        taught=cpu_batch.taught,
        attention=setting.way,
        target_layers="compiled" if target_compiled else "eager",
        packing=target.packing,
        host_waits=waits,
        shape={"precision": setting.precision, "packing": target.packing},
        **host,
    )
