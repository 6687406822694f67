"""The parts that can be timed: draft step, loss, mask, update, target forward.

All on random weights at a named geometry and one synthetic row without padding. Each returns one flat dictionary, the
same for people, `--json` and `--against`. FLOP counts are those of the arithmetic that has to be done (matmuls and the
visible part of attention; taught slots only in the head), so a rate is comparable with the matmul ceiling.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from draftsmith.bench.timing import Timing, matmul_ceiling, measure
from draftsmith.blocks import Document, DraftBatch, Row, make_draft_batch, pack_row
from draftsmith.compiled.gate import Gate
from draftsmith.compiled.region import Region
from draftsmith.config import DrafterConfig, ObjectiveConfig, OptimizerConfig
from draftsmith.drafter import DrafterSpec, build_masks, resolve_spec
from draftsmith.drafter.model import DraftModel, initialise
from draftsmith.objective import HeadTerms, Objective, Sums, decay_weights
from draftsmith.objective.head_loss import chunk_terms
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.sync import Exchange
from draftsmith.target.forward import Features, Target, run_layer
from draftsmith.target.geometry import FULL, TargetGeometry
from draftsmith.target.head import TargetHead
from draftsmith.target.proof import choose_packing
from draftsmith.training.step import Replica
from draftsmith.training.update import make_updates

GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """What is benchmarked.

    Attributes:
        geometry: of the target.
        device: where.
        length, anchors, block_size, layers: S, N, B and the drafter's depth.
        chunk: taught slots per head chunk.
        documents: documents packed into the row.
    """

    geometry: TargetGeometry
    device: torch.device
    length: int
    anchors: int
    block_size: int
    layers: int
    chunk: int
    documents: int
    runs: int = 10

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def attention(self) -> str:
        return "flex" if self.device.type == "cuda" else "dense"

    def spec(self) -> DrafterSpec:
        """Of the drafter, MASK being the last embedding row."""
        config = DrafterConfig(layers=self.layers, block_size=self.block_size)
        return resolve_spec(config, self.geometry, self.geometry.vocab_rows - 1)

    def row(self) -> Row:
        """A row of equal documents, all tokens the assistant's."""
        generator = torch.Generator().manual_seed(0)
        size = self.length // self.documents
        sizes = [size] * (self.documents - 1) + [self.length - size * (self.documents - 1)]
        documents = [
            Document(
                torch.randint(self.geometry.vocab_rows - 1, (n,), generator=generator), torch.ones(n, dtype=torch.bool)
            )
            for n in sizes
        ]
        return pack_row(0, documents, self.length)

    def batch(self) -> DraftBatch:
        """The row's draft work, on the CPU."""
        spec = self.spec()
        return make_draft_batch(
            self.row(),
            anchors=self.anchors,
            block_size=self.block_size,
            mask_token_id=spec.mask_token_id,
            slot_weights_B=decay_weights(self.block_size),
            chunk=self.chunk,
            kinds=spec.kinds,
            seed=(0,),
            with_tiles=self.attention == "flex",
        )


def draft_flops(setting: Setting, batch: DraftBatch) -> dict[str, float]:
    """FLOP of one draft step, forward and backward: body, attention, head."""
    g, spec = setting.geometry, setting.spec()
    length, queries, hidden = setting.length, setting.anchors * setting.block_size, g.hidden_size
    query_width, key_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    per_slot = 2 * hidden * query_width + 2 * hidden * key_width + 3 * hidden * spec.intermediate_size
    per_context = 2 * hidden * key_width
    body = 2 * spec.layers * (queries * per_slot + length * per_context) * 3
    # The features need no gradient, so fc costs two products instead of three.
    body += 2 * length * len(spec.taps) * hidden * hidden * 2
    intervals = batch.intervals[spec.kinds[0]]
    lo_hi = intervals.tensors()
    visible = float(((lo_hi[1] - lo_hi[0]) + (lo_hi[3] - lo_hi[2])).sum())
    # Two products forward, five in a backward that recomputes the scores.
    attention = spec.layers * visible * query_width * 2 * 7
    return {"body": float(body), "attention": attention, "head": 2.0 * batch.taught * g.vocab_rows * hidden * 2}


def _result(name: str, setting: Setting, timing: Timing, flops: float, **more: Any) -> dict[str, Any]:
    ceiling = matmul_ceiling(setting.device, setting.dtype)
    rate = flops / (timing.median * 1e-3) / 1e12
    result: dict[str, Any] = {
        "bench": name,
        "device": torch.cuda.get_device_name(setting.device) if setting.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        **timing.to_json(),
        "tflop": flops / 1e12,
        "tflop_per_second": rate,
        "ceiling_tflop_per_second": ceiling,
        "share_of_ceiling": rate / ceiling,
        "floor_ms": flops / ceiling / 1e9,
        "shape": {
            "S": setting.length, "N": setting.anchors, "B": setting.block_size, "layers": setting.layers,
            "H": setting.geometry.hidden_size, "V": setting.geometry.vocab_rows, "chunk": setting.chunk,
        },
        **more,
    }  # fmt: skip
    if setting.device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated(setting.device) / GIB
    return result


def _replica(setting: Setting) -> tuple[Replica, Gate]:
    spec, device, dtype = setting.spec(), setting.device, setting.dtype
    gate = Gate()
    compiled = setting.attention == "flex"
    model = DraftModel(spec)
    initialise(model, 0)
    model = model.to(device, dtype)
    vocabulary = (setting.geometry.vocab_rows, setting.geometry.hidden_size)
    embedding = torch.randn(vocabulary, device=device, dtype=dtype) * 0.02
    head = embedding if setting.geometry.tie_word_embeddings else torch.randn_like(embedding) * 0.02
    terms = Region("bench objective", chunk_terms, gate=gate, enabled=compiled)
    objective = Objective(ObjectiveConfig(chunk=setting.chunk), spec.block_size, HeadTerms(head), terms)
    forward = Region("bench drafter", model.forward, gate=gate, enabled=compiled)
    return Replica(model, TargetHead(embedding, head), objective, setting.attention, forward), gate


def _start(setting: Setting) -> None:
    torch.manual_seed(0)
    if setting.device.type == "cuda":
        torch.cuda.init()  # without it the next line knows no device
        torch.cuda.reset_peak_memory_stats(setting.device)


def bench_step(setting: Setting) -> dict[str, Any]:
    """Forward, loss and backward of one row, as the trainer runs them; the optimizer is not part of it."""
    _start(setting)
    replica, gate = _replica(setting)
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

    timing = measure(work, setting.device, runs=setting.runs)
    gate.close()
    flops = draft_flops(setting, cpu_batch)
    peak = {}
    if setting.device.type == "cuda":
        forget()
        torch.cuda.reset_peak_memory_stats(setting.device)
        step()
        torch.cuda.synchronize(setting.device)
        peak["step_peak_gib"] = torch.cuda.max_memory_allocated(setting.device) / GIB
    return _result(
        "step",
        setting,
        timing,
        sum(flops.values()),
        tflop_by_part={name: value / 1e12 for name, value in flops.items()},
        real_tokens_per_second=cpu_batch.real_tokens / (timing.median * 1e-3),
        taught=cpu_batch.taught,
        **peak,
    )


def bench_loss(setting: Setting) -> dict[str, Any]:
    """The head alone: loss and hidden-state gradient of all taught slots."""
    _start(setting)
    replica, gate = _replica(setting)
    cpu_batch = setting.batch()
    batch = cpu_batch.to(setting.device)
    queries = setting.anchors * setting.block_size
    hidden = torch.randn(queries, setting.geometry.hidden_size, device=setting.device, dtype=setting.dtype)
    timing = measure(lambda: replica.objective(hidden, batch), setting.device, runs=setting.runs)
    gate.close()
    return _result("loss", setting, timing, draft_flops(setting, cpu_batch)["head"], taught=cpu_batch.taught)


def bench_mask(setting: Setting) -> dict[str, Any]:
    """Making a row's batch, mask tiles included, on one CPU thread; and putting it together on the device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        making = measure(setting.batch, torch.device("cpu"), runs=setting.runs)
    finally:
        torch.set_num_threads(threads)
    batch = setting.batch().to(setting.device)
    building = measure(lambda: build_masks(batch, setting.attention), setting.device, runs=setting.runs)
    return {
        "bench": "mask",
        **making.to_json(),
        "on_device_ms": building.median,
        "shape": {"S": setting.length, "N": setting.anchors, "B": setting.block_size},
    }


def bench_update(setting: Setting) -> dict[str, Any]:
    """One optimizer update with float32 sums and masters: reduce, clip, step, copy back."""
    _start(setting)
    model = DraftModel(setting.spec())
    initialise(model, 0)
    model = model.to(setting.device, setting.dtype)
    exchange = Exchange(make_updates([model], OptimizerConfig()), Stop())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    gradients = [torch.randn_like(parameter) * 1e-3 for parameter in model.parameters()]
    total = torch.zeros(Sums.size(setting.block_size), device=setting.device)
    total[1] = 1.0

    def work() -> None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        exchange.updates[0].accumulate()
        exchange.update(0, Sums(total), 1.0)

    timing = measure(work, setting.device, runs=setting.runs)
    # Per parameter: gradient read; master, two moments read and written; weight written.
    size = setting.dtype.itemsize
    traffic = parameters * (size + 6 * 4 + size)
    return {
        "bench": "update",
        **timing.to_json(),
        "parameters": parameters,
        "least_traffic_gb": traffic / 1e9,
        "gb_per_second": traffic / (timing.median * 1e-3) / 1e9,
        "shape": {"H": setting.geometry.hidden_size, "layers": setting.layers},
    }


def bench_target(setting: Setting) -> dict[str, Any]:
    """The frozen target over one packed row, stopped after the last tap: its layers compiled, and as they are."""
    _start(setting)
    g, target = setting.geometry, _random_target(setting)
    taps, row = setting.spec().taps, setting.row()

    def work() -> None:
        target.features(row.tokens_S, row.document_S, row.positions_S, taps)

    eager = measure(work, setting.device, runs=setting.runs)
    gate, cold = Gate(), None
    if setting.device.type == "cuda":
        region = Region("bench target", run_layer, gate=gate, device=setting.device)
        target.compile_layers(region)
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(setting.device)
        cold = time.perf_counter() - began
        timing = measure(work, setting.device, runs=setting.runs)
    else:
        timing = eager
    graphs = len(gate.compiles)
    gate.close()
    layers = max(taps) + 1
    per_token = 2 * g.hidden_size * g.head_dim * (g.heads + g.kv_heads) + 3 * g.hidden_size * g.intermediate_size
    size = setting.length / setting.documents
    attention = 4 * g.heads * g.head_dim * setting.length * size / 2
    flops = layers * (2 * setting.length * per_token + attention)
    return _result(
        "target",
        setting,
        timing,
        flops,
        layers_run=layers,
        packing=target.packing,
        eager_ms=eager.median,
        graphs=graphs,
        cold_seconds=cold,
        real_tokens_per_second=setting.length / (timing.median * 1e-3),
    )


def _random_target(setting: Setting) -> Target:
    """A model of the geometry's kind with random weights."""
    g = setting.geometry
    fields: dict[str, Any] = {
        "vocab_size": g.vocab_rows,
        "hidden_size": g.hidden_size,
        "intermediate_size": g.intermediate_size,
        "num_hidden_layers": g.layers,
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "max_position_embeddings": g.max_position_embeddings,
        "tie_word_embeddings": g.tie_word_embeddings,
    }
    model: Any
    with torch.device(setting.device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(setting.dtype)
        try:
            model = LlamaForCausalLM(LlamaConfig(**fields)) if g.model_type == "llama" else None
            model = model or Qwen3ForCausalLM(Qwen3Config(**fields))
        finally:
            torch.set_default_dtype(before)
    model.requires_grad_(False).eval()
    target = Target(model, None, g, (FULL,) * g.layers, ())
    choose_packing(target)
    return target


BENCHES: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "step": bench_step,
    "target": bench_target,
    "mask": bench_mask,
    "loss": bench_loss,
    "update": bench_update,
}


def default_setting(geometry: TargetGeometry, device: torch.device) -> Setting:
    """S=4096, N=512, B=16, five layers on CUDA; small on CPU, so that every benchmark ends within a minute."""
    if device.type == "cuda":
        return Setting(geometry, device, 4096, 512, 16, 5, 2048, 8)
    return Setting(geometry, device, 256, 32, 8, 2, 256, 4, runs=3)


def compare(result: dict[str, Any], earlier: dict[str, Any]) -> tuple[bool, str]:
    """(no regression, one line): slower only counts when it is outside both runs' own spread and 2 %."""
    if (result["bench"], result["shape"]) != (earlier.get("bench"), earlier.get("shape")):
        return False, "the earlier result is of another benchmark or shape"
    before, now = float(earlier["ms"]), float(result["ms"])
    noise = max(
        0.02 * before,
        float(earlier["ms_max"]) - float(earlier["ms_min"]),
        float(result["ms_max"]) - float(result["ms_min"]),
    )
    change = f"{before:.2f} ms before, {now:.2f} ms now ({100 * (now / before - 1):+.1f} %, noise {noise:.2f} ms)"
    return now - before <= noise, change
