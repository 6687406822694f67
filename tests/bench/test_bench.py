"""Benchmarks run small on the CPU, count their arithmetic right, and notice a regression."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith import cli_bench
from draftsmith.bench import parts
from draftsmith.bench import row as row_module
from draftsmith.bench import setting as setting_module
from draftsmith.bench.geometry import GEOMETRIES, find_geometry, kinds_of, twin
from draftsmith.bench.parts import BENCHES, default_setting, draft_flops, update_bytes
from draftsmith.bench.random_target import random_target
from draftsmith.bench.results import compare, lines_of, sure
from draftsmith.bench.row import bench_row
from draftsmith.bench.setting import Setting, result_of
from draftsmith.bench.target import target_flops
from draftsmith.bench.timing import Timing, fp8_ceiling
from draftsmith.blocks import dense_mask
from draftsmith.cli import main
from draftsmith.errors import UserError
from draftsmith.target import fp8
from draftsmith.target.geometry import FULL, RECURRENT
from draftsmith.training.update import ReplicaUpdate, make_updates

CPU = torch.device("cpu")


def small() -> Setting:
    return replace(default_setting(find_geometry("tiny"), CPU), length=96, anchors=6, chunk=16, runs=1, documents=2)


@pytest.mark.parametrize("part", sorted(BENCHES))
def test_every_part_runs(part: str) -> None:
    result = BENCHES[part](small())
    assert result["bench"] == part
    assert 0 < result["ms_min"] <= result["ms"] <= result["ms_max"]
    assert result["ms_deviation"] <= result["ms_max"] - result["ms_min"]
    assert result["process_gib"] > 0
    assert result["real_tokens_per_second"] > 0
    assert set(result["shape"]) >= {"S", "N", "B", "layers", "documents"}
    for share, rate in (("share_of_ceiling", "tflop_per_second"), ("share_of_bandwidth", "gb_per_second")):
        assert (share in result) == (rate in result)
        if share in result:  # of what was measured at another moment, when the machine may have been busier: any size
            assert result[share] == pytest.approx(result[rate] / result[f"ceiling_{rate}"])
            assert result[share] > 0
    json.dumps(result)


HYBRID = replace(small(), geometry=twin(find_geometry("qwen3.5-hybrid")))


@pytest.mark.parametrize("part", ["step", "target"])
def test_a_hybrid_runs(part: str) -> None:
    result = BENCHES[part](HYBRID)
    assert result["tflop"] > 0
    if part == "target":
        assert result["packing"] == "separate"
        assert "linear_attention" in result["packing_reason"]


def test_the_command_takes_the_geometries_that_there_are() -> None:
    assert tuple(GEOMETRIES) == cli_bench.GEOMETRIES


def test_on_a_cpu_large_geometries_have_twins() -> None:
    for name, geometry in GEOMETRIES.items():
        setting = default_setting(geometry, CPU, name)
        large = name not in ("smollm2", "tiny")
        assert (setting.geometry != geometry) == large
        assert setting.name == (f"small twin of {name}" if large else name)
        assert kinds_of(setting.geometry)[3] == kinds_of(geometry)[3] == FULL
        assert (RECURRENT in kinds_of(setting.geometry)) == (name == "qwen3.5-hybrid")


@pytest.mark.parametrize("name", ["tiny", "qwen3.5-hybrid"])
def test_the_targets_flops_are_those_of_its_weights(name: str) -> None:
    """Two for each weight of a matrix and token; then the scores, and the state of layers that have one."""
    setting = replace(small(), geometry=twin(find_geometry(name)))
    g, target, layers = setting.geometry, random_target(setting), 5
    products = sum(
        weight.numel()
        for layer in target.layers[:layers]
        for name, weight in layer.named_parameters()
        if weight.dim() == 2
    )
    size, heads = setting.length // setting.documents, g.heads * g.head_dim
    scores = sum(4 * heads * (size * size / 2) * setting.documents for kind in target.kinds[:layers] if kind == FULL)
    state = 0
    for kind, layer in zip(target.kinds[:layers], target.layers, strict=False):
        if kind == RECURRENT:
            delta = layer.linear_attn
            state += 6 * setting.length * delta.num_v_heads * delta.head_k_dim * delta.head_v_dim
    counted = target_flops(g, layers, setting.length, setting.documents)
    assert counted == pytest.approx(2 * setting.length * products + scores + state)


def test_the_target_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "missing", lambda *_: "")
    monkeypatch.setattr(fp8, "NARROW", 64)
    result = BENCHES["target"](replace(small(), precision="fp8"))
    assert result["shape"]["precision"] == "fp8"
    assert all(0.001 < error < 0.2 for error in result["feature_errors"])


def test_the_ceiling_of_fp8_is_that_of_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ceilings far apart, what is held against which shows."""
    monkeypatch.setattr(fp8, "missing", lambda *_: "")
    monkeypatch.setattr(fp8, "NARROW", 100)  # the keys' and values' 64 stay as they are
    monkeypatch.setattr(setting_module, "matmul_ceiling", lambda *_: 0.1)
    monkeypatch.setattr(setting_module, "fp8_ceiling", lambda *_: 10.0)
    lowered = replace(small(), precision="fp8")
    g, layers = lowered.geometry, max(lowered.spec().taps) + 1
    wide = 2 * g.hidden_size * g.heads * g.head_dim + 3 * g.hidden_size * g.intermediate_size
    narrow = 2 * lowered.length * wide * layers / 1e12
    for bench in (BENCHES["target"], bench_row):
        result = bench(lowered)
        assert result["products"]["fp8"] == {"tflop": pytest.approx(narrow), "ceiling_tflop_per_second": 10.0}
        rest = result["products"]["float32"]["tflop"]
        assert rest == pytest.approx(result["tflop"] - narrow)
        assert result["floor_ms"] == pytest.approx(1e3 * (narrow / 10 + rest / 0.1))
        assert result["share_of_ceiling"] == pytest.approx(result["floor_ms"] / result["ms"])
        assert result["share_of_ceiling"] == pytest.approx(
            result["tflop_per_second"] / result["ceiling_tflop_per_second"]
        )
        (line,) = (line for line in lines_of(result) if "ceiling" in line)
        assert f"% of the fp8 matmul ceiling (10) for {narrow:.3g} TFLOP and the float32 matmul ceiling (0.1)" in line
    plain = BENCHES["target"](small())
    assert "products" not in plain
    assert plain["ceiling_tflop_per_second"] == pytest.approx(0.1)
    assert any("% of the matmul ceiling (0.1); floor" in line for line in lines_of(plain))


def test_the_fp8_ceiling_is_measured() -> None:
    assert fp8_ceiling(CPU, torch.bfloat16) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_fp8_is_held_against_fp8() -> None:
    device = torch.device("cuda", 0)
    if fp8.missing(device, torch.bfloat16):
        pytest.skip("no fp8 products")
    setting = Setting(find_geometry("qwen3-0.6b"), device, 2048, 128, 16, 2, 512, 4, runs=3, precision="fp8")
    result = BENCHES["target"](setting)
    eight, sixteen = (result["products"][each]["ceiling_tflop_per_second"] for each in ("fp8", "bfloat16"))
    assert eight > 1.2 * sixteen
    assert 0 < result["share_of_ceiling"] < 1.1


def test_updates_of_several_rows_and_with_muon() -> None:
    plain, more, muon = (
        BENCHES["update"](replace(small(), **change)) for change in ({}, {"rows": 3}, {"optimizer": "muon"})
    )
    size = plain["parameters"] * 4  # float32 on a CPU: twice the gradient, weight, and six for masters and moments
    assert plain["least_traffic_gb"] == pytest.approx(9 * size / 1e9)
    assert more["least_traffic_gb"] == pytest.approx(16 * size / 1e9)
    assert muon["tflop"] > 0
    assert "operators" in plain["kernels"]
    assert more["shape"]["rows"] == 3


class CountingKernels:
    """Stands where Triton's kernels do, and counts what they would read and write for a parameter."""

    seconds = 0.0

    def __init__(self, size: int) -> None:
        self.size, self.bytes = size, 0

    def _gradient(self, sums: Any, last: Any) -> int:
        return 4 * (sums is not None) + self.size * (last is not None)

    def add(self, sums: Any, last: Any, *, summed: bool) -> None:
        self.bytes += self._gradient(sums if summed else None, last) + 4

    def squares(self, sums: Any, last: Any, _owned: Any) -> torch.Tensor:
        self.bytes += self._gradient(sums, last)
        return torch.ones(())

    def step(self, state: Any, sums: Any, last: Any, *_more: Any) -> None:
        self.bytes += 2 * 4 * len(state) + self._gradient(sums, last) + self.size


@pytest.mark.parametrize(("rows", "size", "expected"), [(1, 2, 30), (2, 2, 44), (3, 2, 54), (1, 4, 36), (4, 4, 76)])
def test_bytes_of_an_update_are_those_of_its_kernels(rows: int, size: int, expected: int, monkeypatch) -> None:
    kernels = CountingKernels(size)
    monkeypatch.setattr(ReplicaUpdate, "_make_kernels", lambda _self: kernels)
    monkeypatch.setattr(parts, "make_updates", partial(make_updates, fused=True))
    monkeypatch.setattr(parts, "measure", lambda work, *_more, **_named: work() or Timing.of([1.0]))
    bench = BENCHES["update"](replace(small(), rows=rows))
    assert kernels.bytes == update_bytes(rows, size) == expected
    assert bench["least_traffic_gb"] == pytest.approx(bench["parameters"] * update_bytes(rows, 4) / 1e9)


def test_a_way_of_packing_can_be_asked_for() -> None:
    results = [BENCHES["target"](replace(small(), packing=packing)) for packing in ("mask", "separate")]
    assert [result["packing"] for result in results] == ["mask", "separate"]
    with pytest.raises(UserError, match="cannot be packed as mask"):
        BENCHES["target"](replace(HYBRID, packing="mask"))


def test_flops_are_those_of_counting() -> None:
    setting = small()
    batch, spec, g = setting.batch(), setting.spec(), setting.geometry
    queries = setting.anchors * setting.block_size
    visible = int(dense_mask(batch.intervals[spec.kinds[0]], setting.length).sum())
    hidden, wide, narrow = g.hidden_size, g.heads * g.head_dim, g.kv_heads * g.head_dim
    forward = 0
    for _ in range(spec.layers):
        forward += 2 * queries * hidden * wide * 2  # queries and output projection
        forward += 2 * (setting.length + queries) * hidden * narrow * 2  # keys and values
        forward += 2 * queries * hidden * g.intermediate_size * 3
    feature_projection = 2 * setting.length * len(spec.taps) * hidden * hidden
    flops = draft_flops(setting, batch)
    assert flops["body"] == 3 * forward + 2 * feature_projection
    assert flops["attention"] == spec.layers * 2 * visible * wide * 7
    assert flops["head"] == 2 * 2 * batch.taught * hidden * g.vocab_rows


def test_the_draft_step_of_qwen3_8b_is_75_tflop() -> None:
    setting = Setting(find_geometry("qwen3-8b"), CPU, 4096, 512, 16, 5, 2048, 1)
    total = sum(draft_flops(setting, setting.batch()).values()) / 1e12
    assert total == pytest.approx(75, rel=0.05)


def test_a_regression_counts_only_beyond_noise() -> None:
    earlier = {"bench": "step", "shape": {"S": 1}, **Timing.of([98.0, 99.0, 100.0, 101.0, 104.0] * 2).to_json()}
    assert compare({**earlier, "ms": 103.0}, earlier)[0]
    right, line = compare({**earlier, "ms": 107.0}, earlier)
    assert not right
    assert "+7.0 %" in line
    with pytest.raises(UserError, match="the earlier shape is S=1, not S=2"):
        compare({**earlier, "shape": {"S": 2}}, earlier)
    with pytest.raises(UserError, match="the earlier shape is S=None, not S=1"):
        compare(earlier, {**earlier, "shape": {}})
    with pytest.raises(UserError, match="the earlier shape has S, which this one lacks"):
        compare({**earlier, "shape": {}}, earlier)
    with pytest.raises(UserError, match="the earlier benchmark is step, not loss"):
        compare({**earlier, "bench": "loss"}, earlier)
    with pytest.raises(UserError, match="the earlier geometry is qwen3-8b, not tiny"):
        compare({**earlier, "geometry": "tiny"}, {**earlier, "geometry": "qwen3-8b"})


RESULT: dict[str, Any] = {"bench": "step", "shape": {}, **Timing.of([99.0, 100.0, 101.0] * 4).to_json()}


def test_a_change_says_what_was_done_otherwise() -> None:
    flash, usual = ({**RESULT, "attention": f"flex, compiled{more}"} for more in (", FlashAttention-4", ""))
    assert compare(flash, usual)[1].endswith("; before: attention flex, compiled")
    for way, before, now in (
        ("torch", "2.11.0", "2.13.0"),
        ("device", "NVIDIA H200", "cpu"),
        ("target_layers", "compiled", "eager"),
        ("compile_drafter", "whole", "layers"),
        ("autotune", False, True),
    ):
        assert compare({**RESULT, way: now}, {**RESULT, way: before})[1].endswith(f"; before: {way} {before}")
        assert compare({**RESULT, way: now}, RESULT)[1].endswith(f"; the earlier result does not say its {way}")
        assert "earlier" not in compare({**RESULT, way: now}, {**RESULT, way: now})[1]


def test_a_change_says_that_more_memory_was_used() -> None:
    before, little, more = ({**RESULT, "peak_gib": size} for size in (10.0, 10.1, 12.0))
    assert "memory" not in compare(little, before)[1]
    assert "memory" not in compare(before, more)[1]
    right, line = compare(more, before)
    assert right
    assert line.endswith("; more memory: 12.00 GiB at most, 10.00 before")
    now, then = ({**RESULT, "peak_gib": {"cuda:0": 9.0, "cuda:1": size}} for size in (8.0, 7.0))
    assert compare(now, then)[1].endswith("; more memory: 8.00 GiB at most on cuda:1, 7.00 before")
    assert "8.00 GiB at most in a step" in compare({**RESULT, "step_peak_gib": 8}, {**RESULT, "step_peak_gib": 7})[1]
    assert "memory" not in compare(now, before)[1]


def test_noise_of_one_run_is_not_known() -> None:
    one, silent = {**RESULT, "runs": 1, "ms_deviation": 0.0}, {**RESULT, "ms_deviation": None}
    assert "noise not known from one run before and one run now: 2.00 ms allowed" in compare(one, one)[1]
    assert "noise not known from one run before: " in compare(RESULT, one)[1]
    assert "noise not known from runs of unknown deviation before: " in compare(RESULT, silent)[1]
    assert "not known" not in compare(RESULT, RESULT)[1]
    assert not compare({**one, "ms": 103.0}, one)[0]


@pytest.mark.parametrize("runs", [*range(2, 11), 20])
def test_chance_alone_is_a_regression_once_in_741_comparisons(runs: int) -> None:
    """Whatever the number of runs; here 200,000 pairs of normal samples, of which 270 are expected."""
    generator = torch.Generator().manual_seed(runs)
    times = torch.randn(2, 200_000, runs, generator=generator, dtype=torch.float64).numpy()
    medians = np.median(times, axis=2)
    deviations = np.median(abs(times - medians[..., None]), axis=2)
    allowed = sure(runs) * 1.4826 * np.sqrt(np.pi / 2 / runs) * np.hypot(*deviations)
    assert 0.0008 < (medians[1] - medians[0] > allowed).mean() < 0.0017


def test_a_run_out_of_line_hides_no_regression() -> None:
    def result(*times: float) -> dict[str, Any]:
        return {"bench": "step", "shape": {}, **Timing.of(times).to_json()}

    before, after = [10.0, 10.1, 10.0, 9.9, 10.2], [12.0, 12.1, 11.9, 12.0, 12.1]
    assert not compare(result(*after), result(*before[:4], 90.0))[0]
    assert not compare(result(*after[:4], 90.0), result(*before))[0]
    assert compare(result(*before[:4], 90.0), result(*before))[0]


def test_a_result_of_another_benchmark_is_refused_before_anything_is_timed(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "mask.json"
    path.write_text(json.dumps({"bench": "mask", "shape": {}, "ms": 1.0, "ms_min": 1.0, "ms_max": 1.0}))
    monkeypatch.setitem(BENCHES, "update", lambda _setting: pytest.fail("it was timed"))
    assert main(["bench", "update", "--against", str(path)]) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ms": 0}, "ms: Input should be greater than 0"),
        ({"ms": float("nan")}, "ms: Input should be"),
        ({"ms": 10**400}, "ms: "),
        ({"ms": "3"}, "ms: Input should be a valid number"),
        ({"ms": None}, "ms: Input should be a valid number"),
        ({"ms_min": True}, "ms_min: Input should be a valid number"),
        ({"ms_deviation": -0.1}, "ms_deviation: Input should be greater than or equal to 0"),
        ({"ms_deviation": float("inf")}, "ms_deviation: Input should be"),
        ({"runs": 0}, "runs: Input should be greater than or equal to 1"),
        ({"runs": 2.5}, "runs: Input should be a valid integer"),
        ({"bench": ["mask"]}, "bench: Input should be a valid string"),
        ({"shape": [1]}, "shape: Input should be a valid dictionary"),
        ({"geometry": 7}, "geometry: Input should be a valid string"),
        ({"torch": {}}, "torch: Input should be a valid string"),
        ({"autotune": "yes"}, "autotune: Input should be a valid boolean"),
        ({"peak_gib": "much"}, "peak_gib."),
    ],
)
def test_a_broken_result_is_refused_before_anything_is_timed(change, said, tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "mask.json"
    path.write_text(json.dumps({**RESULT, "bench": "mask", **change}))
    monkeypatch.setitem(BENCHES, "mask", lambda _setting: pytest.fail("it was timed"))
    assert main(["bench", "mask", "--against", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"draftsmith: {path}: is not a benchmark result: {said}")


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", "{'ms': 1}", "[" * 100_000, '{"ms": 1', "\xff"])
def test_what_is_no_result_at_all_is_refused(text: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "mask.json"
    path.write_bytes(text.encode("latin-1"))
    assert main(["bench", "mask", "--against", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"draftsmith: {path}: is not a benchmark result: ")
    assert error.count("\n") == 1


SIZES = {
    "length": 128, "anchors": 6, "block_size": 4, "chunk": 16, "layers": 1, "documents": 2, "precision": "fp8",
    "packing": "separate", "optimizer": "muon", "rows": 3,
}  # fmt: skip


def test_another_shape_is_refused_before_anything_is_timed(tmp_path: Path, monkeypatch, capsys) -> None:
    """By every size and way that is part of the shape and that the part takes."""
    path, began = tmp_path / "before.json", [False]
    result: dict[str, Any] = {}

    def stands_in(part: str) -> Callable[[Setting], dict[str, Any]]:
        def bench(setting: Setting) -> dict[str, Any]:
            began[0] = True
            more = {"packing": setting.packing or "mask"} if part in ("target", "row") else {}
            return result_of(part, setting, Timing.of([1.0, 1.0]), None, shape=more)

        return bench

    for part in BENCHES:
        monkeypatch.setitem(BENCHES, part, stands_in(part))
    monkeypatch.setattr(row_module, "bench_row", stands_in("row"))
    for part in (*BENCHES, "row"):
        usual = ["bench", part, "--device", "cpu", "--geometry", "tiny"]
        assert main([*usual, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        path.write_text(json.dumps(result))
        against = [*usual, "--against", str(path)]
        assert main(against) == 0
        changes = [
            [f"--{name.replace('_', '-')}", str(value)]
            for name, value in SIZES.items()
            if part in cli_bench.USED_BY[name]
        ]
        for change in [*changes, ["--geometry", "smollm2"]]:
            began[0] = False
            capsys.readouterr()
            assert main([*against, *change]) == 2, (part, change)
            assert "--against: the earlier " in capsys.readouterr().err
            assert not began[0], (part, change)


def test_what_only_the_run_could_show_is_refused_behind_the_new_result(tmp_path: Path, capsys) -> None:
    """Which way of packing a target takes shows once it is there."""
    arguments = ["bench", "target", "--device", "cpu", "--geometry", "tiny", "--length", "96", "--runs", "1", "--json"]
    assert main([*arguments, "--packing", "separate"]) == 0
    path = tmp_path / "separate.json"
    path.write_text(capsys.readouterr().out)
    assert main([*arguments, "--against", str(path)]) == 2
    output = capsys.readouterr()
    assert json.loads(output.out)["shape"]["packing"] == "mask"
    assert "--against: the earlier shape is packing=separate, not packing=mask" in output.err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "mask", "--device", "cpu", "--geometry", "tiny", "--length", "96", "--runs", "1", "--json"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    fast = tmp_path / "fast.json"
    fast.write_text(json.dumps({**result, "ms": 1e-6, "ms_min": 1e-6, "ms_max": 1e-6}))
    assert main([*arguments, "--against", str(fast)]) == 1
    against = json.loads(capsys.readouterr().out)["against"]
    assert against.startswith("0.00 ms before, ")
    assert "noise not known from one run before and one run now" in against
    slow_run = {**result, "ms": 1e9, "ms_min": 1e9, "ms_max": 1e9}
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(slow_run))
    assert main([*arguments, "--against", str(slow)]) == 0
    capsys.readouterr()
    for wrong in (
        ["bench", "everything"],
        ["bench", "mask", "--geometry", "gpt-9"],
        ["bench", "mask", "--precision", "fp8", "--device", "cpu"],
        ["bench", "mask", "--optimizer", "muon", "--device", "cpu"],
        ["bench", "target", "--precision", "fp8", "--device", "cpu", "--geometry", "tiny", "--runs", "1"],
        ["bench", "mask", "--documents", "97", "--length", "96", "--device", "cpu"],
    ):
        assert main(wrong) == 2
    assert main([*arguments, "--against", str(tmp_path / "none.json")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main([*arguments, "--against", str(tmp_path / ("n" * 300))]) == 2
    assert capsys.readouterr().err.endswith(f"{'n' * 300}: cannot be read: File name too long\n")


def test_sizes_beyond_the_machines_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "mask", "--geometry", "tiny", "--device", "cpu", "--length", str(10**13)]) == 2
    assert capsys.readouterr().err.startswith("draftsmith: out of memory, asking for 20000000000000 bytes (smaller ")


def test_what_runs_slowly_in_a_hybrid_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU the gated delta nets have no kernels; attention needs none."""
    arguments = ["bench", "target", "--device", "cpu", "--length", "96", "--layers", "1", "--runs", "1", "--json"]
    assert main([*arguments, "--geometry", "qwen3.5-hybrid"]) == 0
    output = capsys.readouterr()
    slow = json.loads(output.out)["remarks"]
    assert ["gated delta rule of 6 layers runs in plain PyTorch" in line for line in slow] == [True, False]
    assert all(line in output.err for line in slow)
    assert main([*arguments, "--geometry", "tiny"]) == 0
    assert "remarks" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("part", "options", "said"),
    [
        ("update", ["--autotune"], "--autotune is of step, target, row"),
        ("step", ["--steps", "10", "--picture", "x.png"], "--steps is of pipeline; --picture is of decode"),
        (
            "step",
            ["--compile-drafter", "layers", "--device", "cpu"],
            "nothing is compiled on the CPU: --compile-drafter would do nothing",
        ),
        ("row", ["--autotune", "--device", "cpu"], "nothing is compiled on the CPU: --autotune would do nothing"),
        # With its default value it is given all the same.
        ("target", ["--optimizer", "adamw"], "--optimizer is of update, pipeline"),
        ("step", ["--rows", "1", "--dtype", "auto"], "--rows is of update, pipeline; --dtype is of decode"),
        ("decode", ["d", "--target", "t", "--prompts", "p", "--precision", "full"], "--precision is of target, row"),
        ("pipeline", ["d"], "DRAFTER is of decode"),
        ("memory", ["--geometry", "tiny"], "--geometry is of step, target, row, mask, loss, update, pipeline"),
        ("update", ["--anchors", "4"], "--anchors is of step, row, mask, loss, pipeline"),
        ("mask", ["--layers", "1"], "--layers is of step, target, row, update, pipeline"),
        ("loss", ["--limit", "2"], "--limit is of memory, decode"),
        ("everything", ["--steps", "10"], "'everything' cannot be timed"),
    ],
)
def test_an_option_without_use_is_refused(part: str, options: list[str], said: str, capsys) -> None:
    assert main(["bench", part, *options]) == 2
    assert said in capsys.readouterr().err


GIVEN = {
    "geometry": "tiny", "length": "96", "anchors": "4", "block_size": "4", "chunk": "16", "layers": "1",
    "documents": "2", "precision": "fp8", "packing": "mask", "optimizer": "muon", "rows": "2", "targets": "cpu",
    "drafters": "cpu", "steps": "10", "sequence": None, "autotune": None, "compile_drafter": "whole",
    "flex_backend": "flash", "runs": "1",
    "against": "a.json", "target": "demo", "prompts": "p", "max_new_tokens": "3", "limit": "2", "temperature": "0.5",
    "contexts": "64", "dtype": "bfloat16", "compile": "on", "picture": "p.png",
}  # fmt: skip


def test_every_option_is_refused_by_the_parts_that_do_not_use_it(capsys) -> None:
    assert {*GIVEN, "drafter"} == set(cli_bench.USED_BY)
    assert {*GIVEN, "drafter", "ctx", "part", "device", "json_"} == set(inspect.signature(cli_bench.bench).parameters)
    for name, value in GIVEN.items():
        option = f"--{name.replace('_', '-')}"
        used = [part for part in cli_bench.PARTS if part in cli_bench.USED_BY[name]]
        assert cli_bench.USED_BY[name] < set(cli_bench.PARTS)
        for part in set(cli_bench.PARTS) - set(used):
            assert main(["bench", part, option, *([value] if value is not None else [])]) == 2, (part, option)
            assert f"bench {part}: {option} is of {', '.join(used)} (leave it out)" in capsys.readouterr().err


def test_on_a_cpu_it_says_that_nothing_is_compiled(capsys) -> None:
    sizes = ["--device", "cpu", "--geometry", "tiny", "--length", "96", "--layers", "1", "--runs", "1"]
    for part, said in (("step", "attention: dense, eager"), ("target", "layers of the target: eager"), ("row", "both")):
        assert main(["bench", part, *sizes]) == 0
        text = capsys.readouterr().out
        assert "compiling included" not in text
        for line in ("attention: dense, eager", "layers of the target: eager"):
            assert (f"  {line}\n" in text) == (said in (line, "both"))
    assert main(["bench", "step", *sizes, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["attention"], result["compile_drafter"]) == ("dense, eager", None)
