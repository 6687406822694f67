"""The frozen target timed alone: one packed row, stopped after the last tap, layers compiled and as they are."""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.bench.geometry import HYBRID, kinds_of, linear_sizes
from draftsmith.bench.random_target import random_target
from draftsmith.bench.setting import Setting, result_of, start
from draftsmith.bench.timing import host_milliseconds, measure, seconds_of
from draftsmith.compiled.gate import Gate
from draftsmith.compiled.region import Region
from draftsmith.target import fp8
from draftsmith.target.forward import Target, run_layer
from draftsmith.target.geometry import FULL, RECURRENT, TargetGeometry


def bench_target(setting: Setting) -> dict[str, Any]:
    """One row's features: as the trainer makes them, and with uncompiled layers.

    Layers with state are never compiled (their kernels are no part of a graph), and on the CPU none are.

    Raises:
        UserError: fp8 is asked for and the device cannot do it, or a way of packing that the target does not take.
    """
    start(setting)
    target = random_target(setting)
    taps, row = setting.spec().taps, setting.row()
    eager_ms, error = None, None

    def work() -> None:
        target.features(row.tokens_S, row.document_S, row.positions_S, taps)

    target.free_layers_after(max(taps))
    if setting.precision == "fp8":
        error = fp8.lower(target, taps, [row], float("inf")).errors
    compiles = setting.device.type == "cuda" and RECURRENT not in target.kinds
    timing = measure(work, setting.device, runs=setting.runs)
    gate, cold = Gate(), None
    if compiles:
        eager_ms = timing.median
        region = Region("bench target", run_layer, gate=gate, device=setting.device, **setting.compile_options)
        target.compile_layers(region)
        cold = seconds_of(work, setting.device)
        timing = measure(work, setting.device, runs=setting.runs)
    graphs = len(gate.compiles)
    gate.close()
    peak = {}
    if setting.device.type == "cuda":
        held = torch.cuda.memory_allocated(setting.device)
        peak["peak_gib"] = torch.cuda.max_memory_allocated(setting.device) / 2**30
        torch.cuda.reset_peak_memory_stats(setting.device)
        work()
        torch.cuda.synchronize(setting.device)
        peak["working_gib"] = (torch.cuda.max_memory_allocated(setting.device) - held) / 2**30
        peak["host_ms"] = host_milliseconds(work, setting.device)
    return result_of(
        "target",
        setting,
        timing,
        target_flops(setting.geometry, max(taps) + 1, setting.length, setting.documents),
        fp8_flops=fp8_flops(target, max(taps) + 1, setting.length),
        target_layers="compiled" if compiles else "eager",
        layers_run=max(taps) + 1,
        packing=target.packing,
        packing_reason=target.packing_reason,
        eager_ms=eager_ms,
        graphs=graphs,
        cold_seconds=cold,
        feature_errors=error,
        real_tokens_per_second=setting.length / (timing.median * 1e-3),
        autotune=setting.autotune if compiles else None,
        shape={"packing": target.packing},
        **peak,
    )


def fp8_flops(target: Target, layers: int, length: int) -> float:
    """FLOP of a row that the first `layers` layers do as fp8 products; 0 for a target that was not lowered.

    Attention's scores and narrow linear layers stay as they are.
    """
    modules = (module for layer in target.layers[:layers] for module in layer.modules())
    return float(sum(2 * length * each.weight.numel() for each in modules if isinstance(each, fp8.RowwiseLinear)))


def target_flops(g: TargetGeometry, layers: int, length: int, documents: int) -> float:
    """FLOP of a row through the first `layers` layers: matrix products and the causal half of each document's scores.

    Of a gated delta net: its projections, and for each token and value head three products with the state (what it
    holds for the key, what is written, what the query reads).
    """
    mlp = 3 * g.hidden_size * g.intermediate_size
    per_token = {FULL: 2 * g.hidden_size * g.head_dim * (g.heads + g.kv_heads) + mlp}
    size = length / documents
    other = {FULL: 4 * g.heads * g.head_dim * length * size / 2}
    if g.model_type == HYBRID:
        key_heads, value_heads, head = linear_sizes(g)
        per_token[FULL] += g.hidden_size * g.head_dim * g.heads  # the gate of its attention's output
        width = head * (2 * key_heads + 2 * value_heads) + 2 * value_heads
        per_token[RECURRENT] = g.hidden_size * (width + head * value_heads) + mlp
        other[RECURRENT] = 2 * 3 * length * value_heads * head * head
    return float(sum(2 * length * per_token[kind] + other[kind] for kind in kinds_of(g)[:layers]))
