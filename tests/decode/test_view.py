"""The private view: same tensors and same numbers as the model, nothing left behind."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_decoding import tiny_drafter, tiny_target
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftsmith.decode import DrafterProposer, decode, generate
from draftsmith.decode.cache import DecodeCache
from draftsmith.decode.view import NAME, View, grouped_attention
from draftsmith.target import packed
from draftsmith.target.forward import TapHook
from draftsmith.target.span import spread


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


def lists_of(module: nn.Module) -> list[dict[int, Any]]:
    """All that torch keeps of a module's hooks around its forward."""
    return [dict(value) for name, value in vars(module).items() if name.startswith(("_forward_hooks", "_forward_pre"))]


def test_a_view_keeps_the_hooks_that_a_model_needs() -> None:
    """Each kind of hook changes what comes out: a view without it would give other logits."""
    target = tiny_target()
    ids = torch.randint(0, 40, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        plain = target.model(ids).logits
        layer = target.layers[1]
        layer.register_forward_pre_hook(lambda _, args: (args[0] * 1.5, *args[1:]))
        target.layers[2].register_forward_pre_hook(
            lambda _, args, kwargs: ((args[0] * 0.5, *args[1:]), kwargs), with_kwargs=True
        )
        layer.mlp.register_forward_hook(lambda _, args, output: output * 2)
        target.decoder.norm.register_forward_hook(
            lambda _, args, kwargs, output: output * 3, with_kwargs=True, always_call=True
        )
        expected = target.model(ids).logits
        before = [lists_of(module) for module in target.model.modules()]
        with View(target, (0, 3)) as view:
            assert view.model is not target.model
            found = view.model(ids).logits
            of_taps = [
                hook for m in view.model.modules() for hook in m._forward_hooks.values() if type(hook) is TapHook
            ]
            assert of_taps == [], "what only features() needs would be called in every round"
            assert [lists_of(module) for module in target.model.modules()] == before
    assert (found - plain).abs().max() > 1, "the hooks were to change something"
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_target_that_spans_devices_is_decoded() -> None:
    """The borders are crossed by hooks: in decoding as well, and with the answers of the same target on one device."""
    prompts, drafter = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5]], tiny_drafter()
    one, over = tiny_target(), tiny_target()
    spread(over.model, list(over.layers), [torch.device("cpu")] * 2)
    crossed: set[int] = set()
    for number, layer in enumerate(over.layers):
        (bring,) = layer._forward_pre_hooks.values()

        def counted(*given: Any, number: int = number, bring: Any = bring) -> Any:
            crossed.add(number)
            return bring(*given)

        layer._forward_pre_hooks = OrderedDict((key, counted) for key in layer._forward_pre_hooks)
    for answer in (
        lambda target: decode(target, prompts[0], DrafterProposer(drafter, target.head()), max_new_tokens=24).tokens,
        lambda target: {each.index: each.tokens for each in generate(target, prompts, max_new_tokens=24)},
    ):
        assert answer(over) == answer(one)
        assert crossed == {0, 1, 2, 3}
        crossed.clear()


class NoIndicesFromElsewhere(TorchFunctionMode):
    """Refuses what two GPUs refuse, and a device without numbers does not: indices that lie on the other one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__, Tensor.gather):
            parts = [part for each in args for part in (each if isinstance(each, tuple) else (each,))]
            assert len({part.device for part in parts if isinstance(part, Tensor)}) == 1
        return func(*args, **(kwargs or {}))


def test_in_a_view_inputs_follow_the_layers() -> None:
    """The second half lies on a device without numbers: its layers are given what was brought there, and its features
    and its cache are there too."""
    target, meta = tiny_target(), torch.device("meta")
    spread(target.model, list(target.layers), [torch.device("cpu"), meta])
    seen: list[torch.device] = []
    for layer in target.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].device))
    cache = DecodeCache(target.model.config, rows=2, columns=12)
    with torch.inference_mode(), View(target, (0, 3)) as view:
        with pytest.raises(NotImplementedError, match="meta"):  # the head wants numbers
            view.model(torch.ones(2, 6, dtype=torch.int64), past_key_values=cache, use_cache=True)
        assert seen == [torch.device("cpu")] * 2 + [meta] * 2
        with pytest.raises(NotImplementedError, match="meta"):  # brought to the target's device, where there are none
            view.features(6)
        assert [layer.all_keys.device.type for layer in cache.past] == ["cpu", "cpu", "meta", "meta"]
        other = copy.deepcopy(cache)
        with NoIndicesFromElsewhere():
            cache.move_rows(torch.tensor([1]), torch.tensor([0]))
            cache.insert(other, torch.zeros(1, 4, dtype=torch.int64), 1)


def test_features_are_those_of_ones_own_forward() -> None:
    """A model that is used as it is has its hooks called by other threads' forwards too."""
    target = tiny_target()
    target.layers[1].forward = target.layers[1].forward
    mine, others = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])
    with torch.inference_mode(), View(target, (1,)) as view:
        view.model(mine)
        expected = view.features(3)

        def run() -> None:
            with torch.inference_mode():
                target.model(others)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert torch.equal(view.features(3), expected)


def test_cudnn_attention_is_out_while_any_view_is_open() -> None:
    target, before = tiny_target(layers=1), torch.backends.cuda.cudnn_sdp_enabled()
    with View(target):
        with View(target):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
