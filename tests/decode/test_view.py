"""The private view: same tensors and same numbers as the model, nothing left behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_decoding import tiny_target
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftsmith.decode.view import NAME, View, grouped_attention
from draftsmith.target import packed


@pytest.mark.parametrize("heads", [2, 4, 6])
@pytest.mark.parametrize("length", [1, 5, 80])
@pytest.mark.parametrize("rows", [1, 3])
def test_grouped_attention_equals_attention_over_repeated_heads(heads: int, length: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(rows, count, size, 8, generator=generator) for count, size in ((heads, length), (2, 97), (2, 97))
    )
    query = query.transpose(1, 2).contiguous().transpose(1, 2)  # laid out as projections leave it
    visible = torch.rand(rows, 1, length, 97, generator=generator) < 0.7
    visible[..., 0] = True
    module = SimpleNamespace(num_key_value_groups=heads // 2, is_causal=True)
    for mask in (visible, torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)):
        ours, _ = grouped_attention(module, query, key, value, mask, scaling=0.3)
        expected, _ = sdpa_attention_forward(module, query, key, value, visible, scaling=0.3)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    if length == 1:
        ours, _ = grouped_attention(module, query, key, value, None, scaling=0.3)
        expected, _ = sdpa_attention_forward(module, query, key, value, None, scaling=0.3)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_a_view_shares_tensors_and_changes_nothing() -> None:
    target = tiny_target("sliding")
    ids = torch.randint(0, 40, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), View(target, (0, 3)) as view:
        expected = target.model(ids, output_hidden_states=True)
        found = view.model(ids)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
        # hidden_states[i + 1] is the output of layer i, except that the last one has the final norm applied.
        first, last = view.features(20).chunk(2, dim=-1)
        torch.testing.assert_close(first, expected.hidden_states[1][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(target.decoder.norm(last), expected.hidden_states[4][0], atol=1e-4, rtol=1e-4)
    ours, theirs = dict(view.model.named_parameters()), dict(target.model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in ours)
    assert view.model.config._attn_implementation == NAME
    assert target.model.config._attn_implementation == "sdpa"


def test_a_view_of_a_compiled_target_with_packed_attention() -> None:
    """Decoding runs uncompiled, and with its own attention: transformers' would copy the cache in every step."""
    target = tiny_target("sliding")
    ids = torch.randint(0, 40, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = target.model(ids).logits

    def never(*_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError("a compiled layer ran outside of features()")

    target.model.config._attn_implementation = packed.NAME
    target.compile_layers(never)
    with torch.inference_mode(), View(target, (0, 3)) as view:
        assert view.model.config._attn_implementation == NAME
        assert view.model is not target.model
        torch.testing.assert_close(view.model(ids).logits, expected, atol=1e-4, rtol=1e-4)
        assert view.features(20).shape == (20, 64)
        torch.testing.assert_close(target.model(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_model_with_replaced_forwards_is_used_as_it_is() -> None:
    target = tiny_target()
    layer = target.layers[1]
    layer.forward = layer.forward  # what spreading a model over devices does
    hooks = len(layer._forward_hooks)
    with torch.inference_mode(), View(target, (1,)) as view:
        assert view.model is target.model
        view.model(torch.tensor([[1, 2, 3]]))
        assert view.features(3).shape == (3, 32)
    assert len(layer._forward_hooks) == hooks


def test_cudnn_attention_is_out_while_any_view_is_open() -> None:
    target, before = tiny_target(layers=1), torch.backends.cuda.cudnn_sdp_enabled()
    with View(target):
        with View(target):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
