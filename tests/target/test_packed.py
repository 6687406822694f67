"""Variable-length attention, with the kernel's slow twin in its place, against separate documents; compiled layers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from tiny_models import CONFIGS, packed_row, save_tiny, slow_features
from torch.nn.functional import scaled_dot_product_attention

from draftsmith.compiled import Gate, Region
from draftsmith.config import TargetConfig
from draftsmith.target import packed
from draftsmith.target.forward import Target, run_layer
from draftsmith.target.load import load_target, shallow_target
from draftsmith.target.proof import choose_packing, packing_error

LENGTHS, SIZE = (17, 1, 30, 2, 11), 70
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}
PACKABLE = [name for name in CONFIGS if name not in ("gemma2", "qwen3.5")]  # a soft cap, recurrent layers


@torch.library.custom_op("draftsmith_tests::pieces", mutates_args={})
def slow_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cuts: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    """One piece after the other, under a mask written from the rule."""
    out = torch.full_like(query, torch.nan)
    repeat = query.shape[1] // key.shape[1]
    bounds = cuts.tolist()
    for start, end in itertools.pairwise(bounds):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        assert end - start <= longest
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None, :]
        visible = (distance >= 0) & (distance <= (window if window >= 0 else longest))
        out[start:end] = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale).transpose(0, 1)
    return out


@slow_kernel.register_fake
def _(query, key, value, cuts, longest, scale, window):
    return torch.empty_like(query)


@pytest.fixture
def with_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has a kernel: the slow one."""
    monkeypatch.setattr(packed, "kernel", slow_kernel)
    monkeypatch.setattr(packed, "missing", lambda *_: "")


@pytest.fixture
def load(tmp_path: Path):
    return lambda name: load_target(
        TargetConfig(path=str(save_tiny(tmp_path / "t", name, "sdpa"))), "cpu", torch.float32
    )


def features(target: Target, row, taps=(0, 2, 3)):
    return target.features(row.tokens_S, row.document_S, row.positions_S, taps, last_hidden=True)


@pytest.mark.parametrize(
    ("document", "cuts"),
    [
        ([0, 0, 1, 1, 1, -1, -1], [0, 2, 5, 7]),
        ([0] * 5, [0, 5]),
        ([0, 1, 2], [0, 1, 2, 3]),
        ([-1, -1], [0, 2]),
    ],
)
def test_pieces(document: list[int], cuts: list[int]) -> None:
    assert packed.pieces(torch.tensor(document, dtype=torch.int32)).tolist() == cuts


@pytest.mark.parametrize("name", PACKABLE)
def test_pieces_equal_separate_documents(with_twin, load, name: str) -> None:
    target = load(name)
    assert target.packing == "pieces", target.packing_reason
    row = packed_row(LENGTHS, SIZE)
    ours = features(target, row)
    slow_taps, slow_last = slow_features(target.model, row, (0, 2, 3))
    real = row.document_S >= 0
    torch.testing.assert_close(ours.taps_SF[real], slow_taps, **TOLERANCE)
    torch.testing.assert_close(ours.last_SH[real], slow_last, **TOLERANCE)
    assert ours.taps_SF.isfinite().all(), "padding must be finite: it is multiplied by zero later"


@pytest.mark.parametrize("wrong", ["one piece", "window"])
def test_a_wrong_kernel_is_found_out(with_twin, load, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    def kernel(query, key, value, cuts, longest, scale, window):
        if wrong == "one piece":
            cuts = torch.tensor([0, query.shape[0]], dtype=torch.int32)
        return slow_kernel(query, key, value, cuts, longest, scale, window if wrong == "one piece" else -1)

    monkeypatch.setattr(packed, "kernel", kernel)
    target = load("qwen3 sliding")
    assert target.packing == "mask"
    assert "pieces differ by" in target.packing_reason


def test_a_model_that_asks_for_more_falls_back_by_name(with_twin, load) -> None:
    target = load("gemma2")
    assert target.packing == "mask"
    assert target.packing_reason.endswith("(it refuses variable-length attention)")
    assert target.decoder.config._attn_implementation == "sdpa"


def test_why_there_is_no_kernel() -> None:
    assert packed.missing(torch.device("cpu"), torch.bfloat16, 64) == "no variable-length kernel on cpu"
    assert packed.missing(torch.device("cuda"), torch.float32, 64) == "no variable-length kernel for float32"
    assert "heads of 65" in packed.missing(torch.device("cuda"), torch.bfloat16, 65)


def test_decoding_is_unchanged(with_twin, load) -> None:
    """Without pieces the registered function is the model's own attention, cache and masks included."""
    target = load("qwen3 sliding")
    tokens = packed_row((40,), 40).tokens_S[None]
    ours = target.model(input_ids=tokens, use_cache=True).logits
    cached = target.model(input_ids=tokens[:, :25], use_cache=True)
    step = target.model(input_ids=tokens[:, 25:], past_key_values=cached.past_key_values, use_cache=True).logits
    target.decoder.config._attn_implementation = "sdpa"
    assert torch.equal(ours, target.model(input_ids=tokens, use_cache=True).logits)
    torch.testing.assert_close(step, ours[:, 25:], **TOLERANCE)


def test_features_that_are_no_numbers_prove_nothing(load, monkeypatch) -> None:
    target = load("llama")
    monkeypatch.setattr("draftsmith.target.proof.packing_error", lambda _target, _packing: math.nan)
    choose_packing(target)
    assert target.packing == "separate"
    assert "differ from separate ones by nan" in target.packing_reason


@pytest.mark.parametrize("packing", ["pieces", "mask"])
@pytest.mark.parametrize(("name", "graphs"), [("llama", 1), ("qwen3 sliding", 2)])
def test_compiled_layers_are_one_graph_for_each_kind(with_twin, load, name: str, graphs: int, packing: str) -> None:
    """Whatever number of documents a row has; `eager()` and decoding go round the region."""
    target = load(name)
    assert packing_error(target, packing) is not None  # leaves the packing set
    gate = Gate()
    try:
        region = Region("target 0", run_layer, gate=gate, backend="aot_eager")
        target.compile_layers(region)
        for lengths in (LENGTHS, (20, 20, 21), (SIZE,)):
            row = packed_row(lengths, SIZE)
            compiled = features(target, row)
            with target.eager():
                torch.testing.assert_close(compiled.taps_SF, features(target, row).taps_SF, atol=1e-5, rtol=1e-5)
        assert len(gate.compiles) == (graphs if packing == "pieces" else 1)
        calls = len(region.first_uses)
        target.model(input_ids=packed_row((9,), 9).tokens_S[None])
        assert len(region.first_uses) == calls
    finally:
        gate.close()
        torch._dynamo.reset()


@pytest.mark.parametrize("name", ["llama", "qwen3 sliding", "gemma3 wrapped", "qwen3.5"])
def test_a_shallow_target_has_every_kind_of_layer(tmp_path: Path, name: str) -> None:
    config = TargetConfig(path=str(save_tiny(tmp_path / "t", name, "sdpa")))
    whole = load_target(config, "cpu", torch.float32)
    shallow = shallow_target(config, "cpu", torch.float32)
    assert set(shallow.kinds) == set(whole.kinds)
    assert len(shallow.layers) <= len(whole.layers)
    assert shallow.packing == whole.packing
    row = packed_row((5, 7), 12)
    taps = (len(shallow.layers) - 1,)
    assert shallow.features(row.tokens_S, row.document_S, row.positions_S, taps).taps_SF.shape == (12, 32)
    choose_packing(shallow)


@pytest.mark.parametrize("heeds", [True, False])
def test_layers_with_state_are_told_where_documents_begin(
    with_twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heeds: bool
) -> None:
    """With kernels that read the library's index (here slow twins: piece by piece), a hybrid runs packed; else not."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as library

    conv, rule = library.causal_conv1d_fn, library.torch_chunk_gated_delta_rule

    def rule_by_piece(query, key, value, *, g, beta, cu_seqlens=None, **_):
        if cu_seqlens is None:
            return rule(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        parts = [
            rule(
                *(x[:, a:b] for x in (query, key, value)), g=g[:, a:b], beta=beta[:, a:b], use_qk_l2norm_in_kernel=True
            )
            for a, b in itertools.pairwise(cu_seqlens.tolist())
        ]
        return torch.cat([part[0] for part in parts], 1), None

    def conv_by_piece(x, weight, bias, activation, seq_idx=None, **_):
        cuts = [0, x.shape[-1]] if seq_idx is None else packed.pieces(seq_idx[0]).tolist()
        return torch.cat(
            [conv(x[..., a:b], weight, bias, activation=activation) for a, b in itertools.pairwise(cuts)], -1
        )

    if heeds:
        monkeypatch.setattr(library, "torch_chunk_gated_delta_rule", rule_by_piece)
        monkeypatch.setattr(library, "causal_conv1d_fn", conv_by_piece)
    target = load_target(TargetConfig(path=str(save_tiny(tmp_path, "qwen3.5"))), "cpu", torch.float32)
    assert target.packing == ("pieces" if heeds else "separate"), target.packing_reason
    assert ("separates them to" if heeds else "the library's index leaves") in target.packing_reason
    row = packed_row(LENGTHS, SIZE)
    ours = features(target, row)
    slow_taps, slow_last = slow_features(target.model, row, (0, 2, 3))
    real = row.document_S >= 0
    torch.testing.assert_close(ours.taps_SF[real], slow_taps, **TOLERANCE)
    torch.testing.assert_close(ours.last_SH[real], slow_last, **TOLERANCE)


def test_numbers_are_those_of_the_pieces() -> None:
    document = torch.tensor([0, 0, 1, 2, 2, -1, -1], dtype=torch.int32)
    assert packed.numbers(document).tolist() == [0, 0, 1, 2, 2, 3, 3]
