"""What a drafter's config leaves open comes from the target; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.blocks import LayerKind
from draftsmith.config import DrafterConfig
from draftsmith.drafter import resolve_spec
from draftsmith.errors import UserError
from draftsmith.target.geometry import TargetGeometry


def target(**changes: Any) -> TargetGeometry:
    values: dict[str, Any] = {
        "hidden_size": 64, "layers": 36, "vocab_rows": 1000, "heads": 8, "kv_heads": 2, "head_dim": 16,
        "intermediate_size": 160, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 2048,
        "hidden_act": "silu", "tie_word_embeddings": True, "model_type": "qwen3", "embedding_scale": 8.0,
        "logit_softcap": 30.0, "logit_multiplier": 0.5,
    }  # fmt: skip
    return TargetGeometry(**{**values, **changes})


def test_open_fields_come_from_the_target() -> None:
    spec = resolve_spec(DrafterConfig(), target(), mask_token_id=999)
    assert (spec.hidden_size, spec.vocab_rows, spec.target_layers, spec.max_position_embeddings) == (64, 1000, 36, 2048)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.intermediate_size) == (8, 2, 16, 160)
    assert (spec.rms_norm_eps, spec.rope_theta) == (1e-5, 1e6)
    assert (spec.input_scale, spec.logit_softcap, spec.logit_multiplier) == (8.0, 30.0, 0.5)
    assert (spec.layers, spec.block_size, spec.mask_token_id) == (5, 16, 999)
    assert spec.taps == (1, 9, 17, 25, 33)
    assert spec.layer_types == ("full_attention",) * 5
    assert spec.kinds == (LayerKind(None, False),)


def test_given_fields_win() -> None:
    config = DrafterConfig(
        layers=2, block_size=7, taps=(30, 3), heads=6, kv_heads=3, head_dim=10, intermediate_size=33,
        layer_types=("sliding_attention", "full_attention"), sliding_window=12,
    )  # fmt: skip
    spec = resolve_spec(config, target(), mask_token_id=0)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.intermediate_size) == (6, 3, 10, 33)
    assert spec.taps == (30, 3)  # in the order given: it is the order of concatenation
    assert spec.kinds == (LayerKind(12, True), LayerKind(None, False))


@pytest.mark.parametrize(("causal", "kinds"), [
    (None, [LayerKind(12, True), LayerKind(None, False)]),
    (False, [LayerKind(12, False), LayerKind(None, False)]),
    (True, [LayerKind(12, True), LayerKind(None, True)]),
])  # fmt: skip
def test_causal_overrides_every_layer(causal: bool | None, kinds: list[LayerKind]) -> None:
    types = ("sliding_attention", "full_attention", "sliding_attention")
    config = DrafterConfig(layers=3, layer_types=types, sliding_window=12, causal=causal)
    spec = resolve_spec(config, target(), mask_token_id=0)
    assert [spec.layer_kind(layer) for layer in range(3)] == [kinds[0], kinds[1], kinds[0]]
    assert list(spec.kinds) == kinds


@pytest.mark.parametrize(
    ("config", "mask_token_id", "where"),
    [
        ({"taps": (1, 36)}, 0, "taps"),
        ({"heads": 8, "kv_heads": 3}, 0, "drafter"),
        ({"heads": 7}, 0, "drafter"),
        ({"head_dim": 15}, 0, "drafter"),
        ({}, 1000, "mask_token_id"),
        ({}, -1, "mask_token_id"),
    ],
)
def test_what_cannot_be_is_refused(config: dict[str, Any], mask_token_id: int, where: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_spec(DrafterConfig(**config), target(), mask_token_id)
    assert where in caught.value.where


def test_a_drafter_for_another_target_is_refused() -> None:
    spec = resolve_spec(DrafterConfig(), target(), mask_token_id=999)
    spec.require_target(target(), "here")
    for change in ({"layers": 28}, {"vocab_rows": 1001}, {"hidden_size": 32}):
        with pytest.raises(UserError, match="here: is for another target"):
            spec.require_target(target(**change), "here")
