"""The parts that can be timed: draft step, loss, mask, update (here), and the target's forward (`target`).

All on random weights at a named geometry and one synthetic row without padding. Each returns one flat dictionary, the
same for people, `--json` and `--against`. FLOP counts are those of the arithmetic that has to be done (matmuls and the
visible part of attention; taught slots only in the head), so a rate is comparable with the matmul ceiling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftsmith.bench.geometry import twin
from draftsmith.bench.setting import GIB, Setting, result_of, start
from draftsmith.bench.target import bench_target
from draftsmith.bench.timing import copy_ceiling, host_milliseconds, measure, seconds_of
from draftsmith.blocks import DraftBatch
from draftsmith.compiled.gate import Gate
from draftsmith.compiled.region import Region
from draftsmith.config import ObjectiveConfig, OptimizerConfig
from draftsmith.drafter import build_masks, flash
from draftsmith.drafter.model import DraftModel, empty_model, run_part
from draftsmith.objective import HeadTerms, Objective, Sums
from draftsmith.objective.head_loss import chunk_terms
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.measure import rough_weights
from draftsmith.pipeline.sync import Exchange
from draftsmith.target.forward import Features
from draftsmith.target.geometry import TargetGeometry
from draftsmith.target.head import TargetHead
from draftsmith.training.muon import step_flops
from draftsmith.training.step import ByLayer, Replica
from draftsmith.training.update import make_updates


def draft_flops(setting: Setting, batch: DraftBatch) -> dict[str, float]:
    """FLOP of one draft step, forward and backward: body, attention, head."""
    g, spec = setting.geometry, setting.spec()
    length, queries, hidden = setting.length, setting.anchors * setting.block_size, g.hidden_size
    query_width, key_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    per_slot = 2 * hidden * query_width + 2 * hidden * key_width + 3 * hidden * spec.intermediate_size
    per_context = 2 * hidden * key_width
    # Anchors count behind the last attention too, where the drafter leaves them out: 0.7 % of a step.
    body = 2 * spec.layers * (queries * per_slot + length * per_context) * 3
    # The features need no gradient, so fc costs two products instead of three.
    body += 2 * length * len(spec.taps) * hidden * hidden * 2
    intervals = batch.intervals[spec.kinds[0]]
    lo_hi = intervals.tensors()
    visible = float(((lo_hi[1] - lo_hi[0]) + (lo_hi[3] - lo_hi[2])).sum())
    # Two products forward, five in a backward that recomputes the scores.
    attention = spec.layers * visible * query_width * 2 * 7
    return {"body": float(body), "attention": attention, "head": 2.0 * batch.taught * g.vocab_rows * hidden * 2}


def make_replica(
    setting: Setting, gate: Gate, head: TargetHead | None = None, *, checkpointing: bool = False
) -> Replica:
    """A drafter with random weights as the trainer would have it.

    Args:
        setting: sizes and device.
        gate: of its regions.
        head: a target's; None: random embedding and head.
        checkpointing: layers are computed again in the backward.
    """
    spec, device, dtype = setting.spec(), setting.device, setting.dtype
    compiled = setting.attention == "flex"
    model = _random_drafter(setting, checkpointing)
    if head is None:
        vocabulary = (setting.geometry.vocab_rows, setting.geometry.hidden_size)
        embedding = torch.randn(vocabulary, device=device, dtype=dtype) * 0.02
        tied = setting.geometry.tie_word_embeddings
        head = TargetHead(embedding, embedding if tied else torch.randn_like(embedding) * 0.02)
    terms = Region("bench objective", chunk_terms, gate=gate, enabled=compiled)
    objective = Objective(ObjectiveConfig(chunk=setting.chunk), spec.block_size, HeadTerms(head.head_VH), terms)
    by_layer = setting.compile_drafter == "layers"
    function = run_part if by_layer else model.fill_blocks
    region = Region("bench drafter", function, gate=gate, enabled=compiled, **setting.compile_options)
    fill_blocks = ByLayer(model.fill_blocks, region) if by_layer else region
    return Replica(model, head, objective, setting.attention, fill_blocks)


def _random_drafter(setting: Setting, checkpointing: bool = False) -> DraftModel:
    """With weights of the usual size."""
    if setting.flex_backend == "flash":
        flash.load("--flex-backend")
    model = empty_model(
        setting.spec(),
        checkpointing,
        device=setting.device,
        dtype=setting.dtype,
        flex_backend=setting.flex_backend,
    )
    rough_weights(model)
    return model


def bench_step(setting: Setting) -> dict[str, Any]:
    """Forward, loss and backward of one row, as the trainer runs them; the optimizer is not part of it."""
    start(setting)
    gate = Gate()
    replica = make_replica(setting, gate)
    cpu_batch = setting.batch()
    batch = cpu_batch.to(setting.device)
    width = len(replica.model.spec.taps) * setting.geometry.hidden_size
    features = Features(torch.randn(setting.length, width, device=setting.device, dtype=setting.dtype))

    def step() -> None:
        replica.step(features, batch)

    def forget() -> None:
        for parameter in replica.model.parameters():
            parameter.grad = None

    def work() -> None:
        forget()
        step()

    cold = seconds_of(work, setting.device)
    timing = measure(work, setting.device, runs=setting.runs)
    gate.close()
    flops = draft_flops(setting, cpu_batch)
    peak = {}
    if setting.device.type == "cuda":
        forget()
        peak["peak_gib"] = torch.cuda.max_memory_allocated(setting.device) / GIB
        torch.cuda.reset_peak_memory_stats(setting.device)
        step()
        torch.cuda.synchronize(setting.device)
        peak["step_peak_gib"] = torch.cuda.max_memory_allocated(setting.device) / GIB
        peak["host_ms"] = host_milliseconds(work, setting.device)
    return result_of(
        "step",
        setting,
        timing,
        sum(flops.values()),
        tflop_by_part={name: value / 1e12 for name, value in flops.items()},
        real_tokens_per_second=cpu_batch.real_tokens / (timing.median * 1e-3),
        taught=cpu_batch.taught,
        attention=setting.way,
        cold_seconds=cold,
        compile_drafter=setting.compile_drafter if setting.attention == "flex" else None,
        autotune=setting.autotune if setting.attention == "flex" else None,
        **peak,
    )


def bench_loss(setting: Setting) -> dict[str, Any]:
    """The head alone: loss and hidden-state gradient of all taught slots."""
    start(setting)
    gate = Gate()
    replica = make_replica(setting, gate)
    cpu_batch = setting.batch()
    batch = cpu_batch.to(setting.device)
    queries = setting.anchors * setting.block_size
    hidden = torch.randn(queries, setting.geometry.hidden_size, device=setting.device, dtype=setting.dtype)
    timing = measure(lambda: replica.objective(hidden, batch), setting.device, runs=setting.runs)
    gate.close()
    return result_of(
        "loss",
        setting,
        timing,
        draft_flops(setting, cpu_batch)["head"],
        taught=cpu_batch.taught,
        real_tokens_per_second=cpu_batch.real_tokens / (timing.median * 1e-3),
    )


def bench_mask(setting: Setting) -> dict[str, Any]:
    """Making a row's batch, mask tiles included, on one CPU thread; and putting it together on the device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        making = measure(setting.batch, torch.device("cpu"), runs=setting.runs)
    finally:
        torch.set_num_threads(threads)
    cpu_batch = setting.batch()
    batch = cpu_batch.to(setting.device)
    building = measure(lambda: build_masks(batch, setting.attention), setting.device, runs=setting.runs)
    return result_of(
        "mask",
        setting,
        making,
        None,
        on_device_ms=building.median,
        real_tokens_per_second=cpu_batch.real_tokens / (making.median * 1e-3),
    )


def bench_update(setting: Setting) -> dict[str, Any]:
    """One optimizer update with float32 sums and masters: sum the rows, reduce, clip, step, write the weights."""
    start(setting)
    model = _random_drafter(setting)
    config = OptimizerConfig.model_validate({"name": setting.optimizer})
    (update,) = updates = make_updates([model], config)
    exchange = Exchange(updates, Stop())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    gradients = [torch.randn_like(parameter) * 1e-3 for parameter in model.parameters()]
    total = torch.zeros(Sums.size(setting.block_size), device=setting.device)
    total[1] = 1.0

    def work() -> None:
        for row in range(setting.rows):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            update.accumulate(last=row + 1 == setting.rows)
        exchange.update(0, Sums(total), 1.0)

    timing = measure(work, setting.device, runs=setting.runs)
    figures: dict[str, Any] = {
        "parameters": parameters,
        "kernels": update.describe(),
        "real_tokens_per_second": setting.rows * setting.length / (timing.median * 1e-3),
    }
    if setting.optimizer == "muon":
        flops = sum(step_flops(parameter.shape) for parameter in model.parameters() if parameter.dim() == 2)
        return result_of("update", setting, timing, flops, **figures)
    traffic = parameters * update_bytes(setting.rows, setting.dtype.itemsize)
    rate, ceiling = traffic / (timing.median * 1e-3) / 1e9, copy_ceiling(setting.device)
    return result_of(
        "update",
        setting,
        timing,
        None,
        least_traffic_gb=traffic / 1e9,
        gb_per_second=rate,
        ceiling_gb_per_second=ceiling,
        share_of_bandwidth=rate / ceiling,
        floor_ms=traffic / ceiling / 1e6,
        **figures,
    )


def update_bytes(rows: int, size: int) -> int:
    """Bytes that AdamW moves for a parameter where nothing is read or written twice for nothing (`training/fused.py`).

    The clip factor needs the norm of the whole gradient, so the gradient is read twice: for the norm and by the step.
    bfloat16: 30 for one row, 44 for two, 10 more for each further one.

    Args:
        rows: of an update. The rows before the last are added up in float32.
        size: bytes of a weight and of its gradient.
    """
    gradient = size if rows == 1 else 4 + size  # the last row's; of several rows with the sum of the others
    summing = 0 if rows == 1 else (size + 4) + (rows - 2) * (size + 8)  # the first is written, others are added
    step = 6 * 4 + size  # master and two moments read and written, the weight written
    return summing + 2 * gradient + step


BENCHES: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "step": bench_step,
    "target": bench_target,
    "mask": bench_mask,
    "loss": bench_loss,
    "update": bench_update,
}


def default_setting(geometry: TargetGeometry, device: torch.device, name: str = "") -> Setting:
    """S=4096, N=512, B=16, five layers on CUDA; small on CPU, so that every benchmark ends within a minute.

    A geometry too large for a CPU is replaced by its small twin, and the setting's name says so.
    """
    if device.type == "cuda":
        return Setting(geometry, device, 4096, 512, 16, 5, 2048, 8, name=name)
    small = twin(geometry)
    name = name if small is geometry else f"small twin of {name or geometry.model_type}"
    return Setting(small, device, 256, 32, 8, 2, 256, 4, runs=5, name=name)
