"""The estimate of memory by device, and the count of what a compiled pass keeps against torch's own partitioner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import draftsmith.bench.memory as memory_bench
import draftsmith.drafter.model as drafter_model
from draftsmith.bench.geometry import find_geometry
from draftsmith.bench.memory import CASES, bench_memory, predict
from draftsmith.bench.parts import default_setting
from draftsmith.bench.setting import Setting
from draftsmith.config import parse_config
from draftsmith.drafter import DrafterSpec, resolve_spec
from draftsmith.drafter.model import DraftModel
from draftsmith.errors import UserError
from draftsmith.pipeline.memory import (
    GIB,
    DeviceMemory,
    RowShape,
    estimate_memory,
    last_layer_more,
    layer_parameters,
    saved_by_layer,
    step_peak,
)
from draftsmith.pipeline.plan import make_plan
from draftsmith.pipeline.topology import Topology

CPU = torch.device("cpu")


def test_decoding_while_training_brings_a_second_target(tiny_run) -> None:
    (without,) = make_plan(tiny_run("without")).memory
    (beside,) = make_plan(tiny_run("beside", decoding={"every": 2})).memory
    assert beside.target == without.target + without.loading > 0, "all layers there, up to the last tap here"
    assert beside.drafter - without.drafter == without.drafter, "weights"
    assert (beside.optimizer, beside.activations) == (without.optimizer, without.activations)


def test_drafters_on_one_device_share_the_optimizers_state(tiny_run) -> None:
    """Masters and two moments exist once; sums of gradients for each replica."""
    training = {"rows_per_update": 3}
    (one,) = make_plan(tiny_run("one", training=training)).memory
    (three,) = make_plan(
        tiny_run("three", training=training, pipeline={"targets": ["cpu"], "drafters": ["cpu"] * 3})
    ).memory
    parameters = one.optimizer // 16
    temporary = three.optimizer - parameters * (12 + 3 * 4)
    assert temporary == 2 * 4 * 2**25, "what is added up at a time"
    assert three.drafter == 3 * one.drafter


def test_a_target_that_spans_devices_is_shared_out(tiny_run) -> None:
    """Layers by halves; embedding and head on the first device, where features are, too."""
    plan = make_plan(tiny_run("run"))
    one, two = torch.device("cpu"), torch.device("meta")
    span = Topology((one,), (two,), "", ((one, two),))
    first, second = estimate_memory(
        plan.config, span, plan.geometry, plan.spec, plan.parameters, plan.dtype, plan.target_dtype, "dense"
    )
    (whole,) = estimate_memory(
        plan.config, plan.topology, plan.geometry, plan.spec, plan.parameters, plan.dtype, plan.target_dtype, "dense"
    )
    assert first.target + second.target == whole.target
    assert first.target - second.target == plan.geometry.vocab_rows * plan.geometry.hidden_size * 4
    assert first.drafter == 0
    assert second.drafter > whole.drafter, "no embedding is on that device"


def test_stored_features_need_no_target(tiny_run) -> None:
    plan = make_plan(tiny_run("run"))
    (memory,) = plan.memory
    assert memory.loading > memory.target, "layers behind the last tap are loaded, and given back"
    config = plan.config.model_copy(update={"target": plan.config.target.model_copy(update={"features": "x"})})
    (stored,) = estimate_memory(
        config, plan.topology, plan.geometry, plan.spec, plan.parameters, plan.dtype, plan.target_dtype, "dense"
    )
    assert (stored.target, stored.loading) == (0, 0)
    assert stored.drafter > memory.drafter, "embedding and head are its own then"


def test_rows_that_wait_count_as_far_as_the_queue_lets_them(tiny_run) -> None:
    """By number, and by bytes; one row always may wait."""
    sizes = []
    for queue in ({"queue": 4}, {"queue": 4, "queue_gib": 1e-9}, {"queue": 1}):
        plan = make_plan(tiny_run("run", pipeline=queue))
        sizes.append(plan.memory[0].activations)
    features = plan.config.rows.length * len(plan.spec.taps) * plan.geometry.hidden_size * plan.dtype.itemsize
    assert sizes[0] - sizes[1] == 3 * features
    assert sizes[1] == sizes[2]


def test_the_fullest_moment_may_be_loading() -> None:
    memory = DeviceMemory("cpu", 4 * GIB, GIB, GIB, GIB, None, loading=9 * GIB)
    assert memory.total == 9 * GIB
    assert "about 9.00 GiB (target 4.00, drafter 1.00, optimizer 1.00, a step 1.00)" in memory.line()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch):
    """Bytes that the partitioner keeps of a drafter's pass, inputs and weights left out, on no device at all."""

    @torch.library.custom_op("draftsmith_tests::attention", mutates_args={})
    def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)

    @torch.library.custom_op("draftsmith_tests::attention_backward", mutates_args={})
    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sizes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    for op in (attention, backward):
        op.register_fake(op._init_fn)
    attention.register_autograd(
        lambda ctx, gradient, _: backward(gradient, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
    )
    monkeypatch.setattr(drafter_model, "attend", lambda q, k, v, *_: attention(q[None], k[None], v[None])[0][0])

    def count(spec: DrafterSpec, length: int, queries: int, checkpointing: bool) -> int:
        graphs: dict[str, Any] = {}

        def keeper(name: str) -> Callable[..., Any]:
            def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
                graphs[name] = graph
                return nop(graph, inputs)

            return keep

        backend = aot_autograd(
            fw_compiler=keeper("forward"),
            bw_compiler=keeper("backward"),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        with torch.device("meta"):
            model = DraftModel(spec, checkpointing).to(torch.bfloat16)
            features, slots = (
                torch.empty(rows, width, dtype=torch.bfloat16)
                for rows, width in ((length, len(spec.taps) * spec.hidden_size), (queries, spec.hidden_size))
            )
            positions = [torch.empty(rows, dtype=torch.int64) for rows in (length, queries)]
        try:
            forward = torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=False)
            forward(features, slots, *positions, dict.fromkeys(spec.kinds)).sum().backward()
        finally:
            torch._dynamo.reset()
        (outputs,) = next(node for node in graphs["forward"].graph.nodes if node.op == "output").args
        storages = {}
        for node in outputs[1:]:  # the first is the result
            value = node.meta["val"]
            if node.op != "placeholder" and isinstance(value, Tensor):
                storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        return sum(storages.values())

    return count


@pytest.mark.parametrize(("name", "layers"), [("qwen3-8b", 1), ("smollm2", 3)])
def test_what_a_layer_keeps_is_what_the_partitioner_keeps(kept, name: str, layers: int) -> None:
    setting = Setting(find_geometry(name), CPU, 1024, 64, 16, layers, 256, 1)
    spec, length, queries = setting.spec(), 1024, 1024
    row = RowShape(length, queries, 256, "data", 2, compiled=True, checkpointing=False)
    ours = saved_by_layer(spec, row) * layers + last_layer_more(spec, row) + 2 * length * spec.hidden_size * 2
    assert ours == pytest.approx(kept(spec, length, queries, False), rel=2e-3)


def test_with_checkpointing_a_layer_keeps_its_residual(kept) -> None:
    spec = Setting(find_geometry("qwen3-0.6b"), CPU, 1024, 64, 16, 2, 256, 1).spec()
    slots, context = 1024 * spec.hidden_size * 2, 2 * 1024 * spec.hidden_size * 2
    assert kept(spec, 1024, 1024, True) == pytest.approx((spec.layers - 1) * slots + context, rel=1e-2)


def test_layer_parameters_are_those_of_the_model() -> None:
    spec = default_setting(find_geometry("tiny"), CPU).spec()
    with torch.device("meta"):
        model = DraftModel(spec)
    assert layer_parameters(spec) == sum(parameter.numel() for parameter in model.layers[0].parameters())


def test_the_step_at_qwen3_8b() -> None:
    """Weights 1.95 GiB, embedding and head 2.32, the row's features 0.16, and this; a prototype with chunks of 3.8k
    slots took 12.4 GiB in all, one that keeps logits in float32 or recomputes nothing would be far off."""
    spec = Setting(find_geometry("qwen3-8b"), CPU, 4096, 512, 16, 5, 2048, 1).spec()
    row = RowShape(4096, 8192, 2048, "data", 2, compiled=True, checkpointing=False)
    assert 4.43 + step_peak(spec, row, 151_936) / GIB < 12.5
    prototype = 4.43 + step_peak(spec, replace(row, chunk=3840), 151_936) / GIB
    assert prototype == pytest.approx(12.4, rel=0.05)


def test_a_drafter_of_a_32b_target_fits_cards_of_96_gb_and_three_share_its_state(monkeypatch) -> None:
    """2.57 B parameters: weights, sums and a step on every card, a third of masters and moments."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (96 * 10**9, 96 * 10**9))
    geometry = replace(find_geometry("qwen3-8b"), hidden_size=5120, layers=64, heads=64, intermediate_size=25_600)
    config = parse_config({"target": {"path": "t"}, "data": {"train": "d"}, "training": {"rows_per_update": 6}})
    spec = resolve_spec(config.drafter, geometry, 0)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in DraftModel(spec).parameters())
    assert parameters == pytest.approx(2.57e9, rel=0.01)

    def drafter(count: int) -> DeviceMemory:
        devices = [torch.device("cuda", index) for index in range(5 + count)]
        topology = Topology(tuple(devices[:5]), tuple(devices[5:]), "")
        dtype = torch.bfloat16
        return estimate_memory(config, topology, geometry, spec, parameters, dtype, dtype, "flex")[5]

    one, three = drafter(1), drafter(3)
    whole = one.drafter + one.optimizer + one.activations
    assert whole < 0.7 * 96e9
    saved = whole - (three.drafter + three.optimizer + three.activations)
    assert saved == pytest.approx(12 * parameters * 2 / 3, rel=0.05), "less what is added up at a time"


@pytest.mark.parametrize("change", [{"queries": 4096}, {"length": 512}, {"chunk": 256}, {"checkpointing": True}])
def test_every_setting_that_can_be_lowered_saves(change: dict[str, Any]) -> None:
    spec = Setting(find_geometry("qwen3-8b"), CPU, 4096, 512, 16, 5, 2048, 1).spec()
    row = RowShape(4096, 8192, 2048, "data", 2, compiled=True, checkpointing=False)
    assert step_peak(spec, replace(row, **change), 151_936) < step_peak(spec, row, 151_936)


def test_where_slots_are_few_gradients_are_the_peak() -> None:
    """Then a row half as long saves nothing: all gradients exist together at the end."""
    spec = Setting(find_geometry("qwen3-8b"), CPU, 1024, 8, 16, 5, 16, 1).spec()
    row = RowShape(1024, 128, 16, "data", 2, compiled=True, checkpointing=False)
    gradients = 5 * layer_parameters(spec) * 2
    assert gradients < step_peak(spec, row, 1_000) < 1.3 * gradients


def test_the_cases_of_the_benchmark_are_what_they_say() -> None:
    """Half of them held out, no two alike, whole tiles, every spec resolves; and each is predicted without a device."""
    assert [case.fit for case in CASES].count(True) == [case.fit for case in CASES].count(False) == 5
    assert len({(c.geometry, c.layers, c.length, c.anchors, c.block_size, c.chunk) for c in CASES}) == len(CASES)
    for case in CASES:
        assert case.length % 128 == 0
        assert case.anchors * case.block_size % 128 == 0
        memory = predict(case, CPU)
        assert 0.1 * GIB < memory.total < 40 * GIB
        assert memory.loading > memory.target


def test_the_benchmark_counts_on_cuda_only() -> None:
    with pytest.raises(UserError, match="on CUDA devices only"):
        bench_memory(CPU)


def test_the_benchmarks_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured as predicted is right; a held-out case that is a fifth too small is not, a fitted one may be."""
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(memory_bench, "predict", lambda _case, _device: DeviceMemory("", GIB, GIB, GIB, GIB, None))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    for wrong, ok in ((None, True), (CASES[0].name, True), (CASES[-1].name, False)):
        monkeypatch.setattr(
            memory_bench, "_measure", lambda case, _, wrong=wrong: {"measured_gib": 5.0 if case.name == wrong else 4.0}
        )
        lines: list[str] = []
        result = bench_memory(cuda, progress=lines.append)
        assert result["ok"] is ok
        assert result["held_out_worst"] == pytest.approx(0.0 if ok else 0.2)
        assert len(lines) == len(CASES)
    assert "(-20.0 %), held out" in lines[-1]
