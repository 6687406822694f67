"""fp8 layers: their arithmetic against a readable twin, what they change, when they are refused, one graph a kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import packed_row, save_tiny
from torch import nn

from draftsmith.compiled import Gate, Region
from draftsmith.config import TargetConfig, parse_config
from draftsmith.errors import UserError
from draftsmith.pipeline.assemble import load_targets
from draftsmith.pipeline.plan import make_plan
from draftsmith.target import fp8
from draftsmith.target.forward import Target, run_layer
from draftsmith.target.load import load_target

TAPS = (0, 2, 3)


@pytest.fixture
def possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as able, and the tiny layers as wide enough."""
    monkeypatch.setattr(fp8, "missing", lambda *_: "")
    monkeypatch.setattr(fp8, "NARROW", 32)


@pytest.fixture
def load(tmp_path: Path):
    return lambda name="qwen3": load_target(
        TargetConfig(path=str(save_tiny(tmp_path / "t", name))), "cpu", torch.float32
    )


def slow_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row, value by value, the nearest of all numbers that float8_e4m3fn has."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].unique()
    rows, scales = [], []
    for row in x.float():
        scale = row.abs().max() / 448
        wanted = row / scale if scale > 0 else row
        rows.append(every[(wanted[:, None] - every[None, :]).abs().argmin(dim=1)])
        scales.append(scale)
    return torch.stack(rows), torch.stack(scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(7, 96, generator=generator) * torch.logspace(-6, 4, 7)[:, None]).to(dtype)
    values, scales = fp8.to_rows(x)
    slow_values, slow_scales = slow_rows(x)
    assert values.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(scales[:, 0], slow_scales, rtol=1e-6, atol=0)
    ours, wanted = values.float(), x.float() / scales
    # halves may go to either side: no further away than the nearest
    assert ((ours - wanted).abs() <= (slow_values - wanted).abs() + 1e-5 * wanted.abs()).all()
    assert ours.abs().amax(1).eq(448).all()


def test_rows_of_zeros_stay_zero() -> None:
    values, scales = fp8.to_rows(torch.zeros(2, 16))
    assert not values.float().any()
    assert scales.isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_a_layer_is_the_product_of_the_rounded_rows(shape: tuple[int, ...], bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, 64, generator=generator)
    shift = torch.randn(48, generator=generator) if bias else None
    x = torch.randn(*shape, 64, generator=generator)
    values, scales = slow_rows(weight)
    rows, row_scales = slow_rows(x.reshape(-1, 64))
    slow = (rows.double() * row_scales[:, None]) @ (values.double() * scales[:, None]).T
    slow = slow if shift is None else slow + shift
    ours = fp8.RowwiseLinear(weight, shift)(x)
    assert ours.dtype == x.dtype
    torch.testing.assert_close(ours.double(), slow.view(*shape, 48), rtol=1e-4, atol=1e-3)


def test_relative_error_is_by_token() -> None:
    theirs = torch.tensor([[3.0, 4.0], [300.0, 400.0]])
    ours = theirs + torch.tensor([[0.5, 0.0], [0.0, 0.0]])
    assert float(fp8.relative_error(ours, theirs)) == pytest.approx(0.1 / 2**0.5)


@pytest.mark.parametrize("last", [False, True])
def test_only_linear_layers_up_to_the_last_tap(possible, load, last: bool) -> None:
    target = load()
    head = target.head().head_VH.clone()
    row = packed_row((30, 20, 9), 64)
    before = target.features(row.tokens_S, row.document_S, row.positions_S, TAPS, last)
    lowered = fp8.lower(target, TAPS, [row, packed_row((40,), 64, seed=3)], 0.5, last_hidden=last)
    kinds = [[type(module) for module in layer.modules() if isinstance(module, nn.Linear | fp8.RowwiseLinear)]
             for layer in target.layers]  # fmt: skip
    depth = 5 if last else 4
    # keys and values are 16 wide: too narrow
    assert [names.count(fp8.RowwiseLinear) for names in kinds] == [5] * depth + [0] * (5 - depth)
    assert lowered.linears == 5 * depth
    assert 0.8 < lowered.share < 1
    assert len(lowered.errors) == len(TAPS) + last
    after = target.features(row.tokens_S, row.document_S, row.positions_S, TAPS, last)
    real = row.document_S >= 0
    for place, error in enumerate(lowered.errors[: len(TAPS)]):
        columns = slice(32 * place, 32 * place + 32)
        here = float(fp8.relative_error(after.taps_SF[real, columns], before.taps_SF[real, columns]))
        assert 0.005 < here < 0.2
        assert error == pytest.approx(here, rel=0.5), "two rows there, one here"
    assert torch.equal(target.head().head_VH, head)
    assert all(f"{tap}: " in fp8.line_of(lowered, TAPS, 0.5) for tap in TAPS)


def test_refused_above_the_bound(possible, load) -> None:
    with pytest.raises(
        UserError, match=r"fp8 changes the features of layer [023] by \d+\.\d% .* more than 0%"
    ) as caught:
        fp8.lower(load(), TAPS, [packed_row((30,), 32)], 0.001)
    assert "target.fp8_bound" in str(caught.value)


def test_not_a_number_is_above_every_bound(possible, load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "relative_error", lambda *_: torch.tensor(float("nan")))
    with pytest.raises(UserError, match="nan"):
        fp8.lower(load(), TAPS, [packed_row((30,), 32)], 1e9)


def test_refused_where_it_cannot_run(load) -> None:
    target = load()
    with pytest.raises(UserError, match="no fast fp8 products on cpu"):
        fp8.lower(target, TAPS, [], 0.1)
    assert "bfloat16" in fp8.missing(torch.device("cuda"), torch.float32)
    target.foreign = "awq"
    with pytest.raises(UserError, match="came quantised"):
        fp8.lower(target, TAPS, [], 0.1)


def test_nothing_to_lower(possible, load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "NARROW", 1000)
    with pytest.raises(UserError, match="no linear layer"):
        fp8.lower(load(), TAPS, [], 0.1)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_equal_layers_are_one_graph(possible, load, name: str) -> None:
    target: Target = load(name)
    fp8.lower(target, TAPS, [], 0.5)
    gate = Gate()
    try:
        target.compile_layers(Region("target 0", run_layer, gate=gate, backend="aot_eager"))
        for lengths in ((17, 30), (40,)):
            row = packed_row(lengths, 50)
            ours = target.features(row.tokens_S, row.document_S, row.positions_S, TAPS).taps_SF
            with target.eager():
                eager = target.features(row.tokens_S, row.document_S, row.positions_S, TAPS).taps_SF
            assert float(fp8.relative_error(ours, eager)) < 0.02
        assert len(gate.compiles) == 1
    finally:
        gate.close()
        torch._dynamo.reset()


def test_a_run_lowers_its_target_and_says_what_that_changes(possible, tiny_run, tmp_path: Path) -> None:
    plan = make_plan(tiny_run("run", target={"precision": "fp8", "fp8_bound": 0.5}))
    assert any("fp8 up to the last tap" in line for line in plan.lines())
    (target,) = load_targets(plan)
    assert any(isinstance(module, fp8.RowwiseLinear) for module in target.model.modules())
    (remark,) = target.remarks
    assert remark.startswith("fp8: ")
    assert "refused above 50%" in remark


def test_a_run_that_cannot_is_refused_before_loading(tiny_run) -> None:
    with pytest.raises(UserError, match="fp8 is not possible: there are no fast fp8 products on cpu"):
        make_plan(tiny_run("run", target={"precision": "fp8"}))


def test_stored_features_have_no_precision(tiny_run) -> None:
    with pytest.raises(UserError, match="features are read from disk"):
        parse_config({"target": {"path": "x", "features": "y", "precision": "fp8"}, "data": {"train": "z"}})


def test_what_was_trained_before_has_the_same_fingerprint(tiny_run) -> None:
    """The bound decides nothing that is learned; full precision is what there was before."""
    plain, bound = tiny_run("a").fingerprint(), tiny_run("a", target={"fp8_bound": 0.3}).fingerprint()
    lowered = tiny_run("a", target={"precision": "fp8"}).fingerprint()
    assert plain == bound != lowered


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_product_is_that_of_the_rounded_rows() -> None:
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) < (8, 9):
        assert fp8.missing(device, torch.bfloat16)
        return
    assert fp8.missing(device, torch.bfloat16) == ""
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (
        torch.randn(rows, 512, device=device, dtype=torch.bfloat16, generator=generator) for rows in (100, 1024)
    )
    linear = fp8.RowwiseLinear(weight, None)
    values, scales = fp8.to_rows(x)
    reference = (values.float() * scales) @ (linear.weight.float() * linear.scale_1N.mT).mT
    for forward in (linear, torch.compile(linear, fullgraph=True, dynamic=False)):
        # Fast sums keep fewer bits than float32; the result is rounded to bfloat16.
        assert float(fp8.relative_error(forward(x), reference)) < 1e-2
    torch._dynamo.reset()
