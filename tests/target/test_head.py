"""The head equals the model's own embedding and logits, caps and scales included."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, save_tiny
from transformers import Cohere2Config, Cohere2ForCausalLM, GraniteConfig, GraniteForCausalLM

from draftsmith.config import TargetConfig
from draftsmith.errors import UserError
from draftsmith.target import load
from draftsmith.target.head import TargetHead
from draftsmith.target.load import load_target


def loaded(folder: Path):
    return load_target(TargetConfig(path=str(folder)), "cpu", torch.float32)


def check_against_model(target) -> None:
    tokens, entering = torch.arange(0, 300, 7)[None], []
    handle = target.layers[0].register_forward_pre_hook(lambda module, args: entering.append(args[0]))
    with torch.no_grad():
        theirs = target.model(tokens, use_cache=False).logits
        hidden = target.decoder(tokens, use_cache=False).last_hidden_state
    handle.remove()
    torch.testing.assert_close(target.head().logits(hidden), theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(target.head().embed(tokens), entering[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "qwen3.5"])
def test_head_is_the_models(tmp_path: Path, name: str) -> None:
    check_against_model(loaded(save_tiny(tmp_path, name)))


@pytest.mark.parametrize("kind", ["cohere", "granite"])
def test_multipliers_are_the_models(tmp_path: Path, kind: str) -> None:
    save_tiny(tmp_path, "qwen3")  # for the tokenizer
    sizes = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    if kind == "cohere":
        model = Cohere2ForCausalLM(Cohere2Config(**sizes, logit_scale=0.25, sliding_window=8))
    else:
        model = GraniteForCausalLM(GraniteConfig(**sizes, embedding_multiplier=12.0, logits_scaling=8.0))
    model.save_pretrained(tmp_path)
    check_against_model(loaded(tmp_path))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("logit_multiplier", 0.5, "logits"), ("logit_softcap", 1.0, "logits"), ("embedding_scale", 2.0, "embeddings")],
)
def test_a_head_that_is_not_the_models_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: float, message: str
) -> None:
    """A model kind whose constants the geometry does not know, played by a wrong geometry."""
    right = load.geometry_of
    monkeypatch.setattr(load, "geometry_of", lambda *args, **kwargs: replace(right(*args, **kwargs), **{field: value}))
    with pytest.raises(UserError, match=message):
        loaded(save_tiny(tmp_path, "llama"))


def test_cap_and_order_by_hand() -> None:
    embedding, head = torch.eye(3), torch.tensor([[1.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
    ours = TargetHead(embedding, head, softcap=2.0, multiplier=0.5, embedding_scale=3.0)
    logits = ours.logits(torch.tensor([2.0, 1.0, 5.0]))
    expected = 2.0 * torch.tanh(torch.tensor([2.0 * 0.5, 4.0 * 0.5]) / 2.0)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(ours.embed(torch.tensor([[1]])), torch.tensor([[[0.0, 3.0, 0.0]]]))


def test_moving_keeps_tied_weights_tied() -> None:
    weight = torch.randn(5, 3)
    moved = TargetHead(weight, weight).to("meta")
    assert moved.embedding_VH is moved.head_VH
    assert moved.embedding_VH.device.type == "meta"
    untied = TargetHead(weight, weight.clone()).to("meta")
    assert untied.embedding_VH is not untied.head_VH
    assert TargetHead(weight, weight).to("cpu").embedding_VH is weight


def test_no_copy_of_the_models_weights(tmp_path: Path) -> None:
    target = loaded(save_tiny(tmp_path, "qwen3"))
    head = target.head()
    assert head.embedding_VH.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    assert head.head_VH.data_ptr() == head.embedding_VH.data_ptr()
    assert not head.head_VH.requires_grad


@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_final_scale_of_a_norm_that_subtracts_the_mean(tmp_path: Path, size: int, bias: bool) -> None:
    """As Cohere's, StarCoder2's and StableLM's do: ones alone would come out as zero, and the drafter's norm too."""
    target = loaded(save_tiny(tmp_path, "qwen3"))
    target.geometry = replace(target.geometry, hidden_size=size)
    target.decoder.norm = norm = torch.nn.LayerNorm(size, bias=bias)
    norm.weight.data = torch.linspace(0.5, -2.0, size)
    if bias:
        norm.bias.data = torch.linspace(-3.0, 3.0, size)
    torch.testing.assert_close(target.head().final_scale_H, norm.weight.data, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("where", ["model.layers.1.mlp.down_proj.weight", "model.layers.2.input_layernorm.weight"])
def test_hidden_states_that_are_no_numbers_are_refused(tmp_path: Path, where: str) -> None:
    """One number is enough; every comparison with it is false, so none that asks for too much would find it."""
    folder = save_tiny(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    weights[where].view(-1)[3] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"its hidden states are not finite in float32 \(look for damaged weights"):
        loaded(folder)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_final_scale_is_what_the_norm_multiplies_by(tmp_path: Path, name: str) -> None:
    """Gemma stores the scale minus one, Qwen the scale itself."""
    target = loaded(save_tiny(tmp_path, name))
    norm = target.decoder.norm
    norm.weight.data = torch.linspace(0.5, 2.0, norm.weight.numel())
    x = torch.randn(3, norm.weight.numel())
    normalised = x / x.square().mean(-1, keepdim=True).sqrt()
    scale = target.head().final_scale_H
    assert scale is not None
    torch.testing.assert_close(norm(x), normalised * scale, atol=1e-4, rtol=1e-4)
