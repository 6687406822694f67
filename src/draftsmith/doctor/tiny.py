"""Tiny models of a target's class: the same kinds of layers and head sizes, everything else small, random weights.

Kernels depend on the class, the kinds of layers and the size of a head; a forward of some ten thousand weights shows
which of them are taken, in a second and without the target's own weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from draftsmith.target.forward import Target
from draftsmith.target.geometry import geometry_of, layer_kinds

LINEAR = "linear_attention"
_HEADS = 2
SMALL = {
    "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": _HEADS, "num_key_value_heads": 1,
    "vocab_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts": 2,
    "num_experts_per_tok": 1, "num_local_experts": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "max_position_embeddings": 8192,
}  # fmt: skip
# Of those, what stands around a linear-attention layer and takes time of its own.
_AROUND = {
    "intermediate_size", "vocab_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size",
}  # fmt: skip
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")  # beyond a vocabulary of 64


def small_config(text: Any) -> Any:
    """The configuration with one layer of each kind and small sizes; head sizes stay: kernels depend on them.

    Args:
        text: a target's text configuration.
    """
    sizes = {name: value for name, value in SMALL.items() if hasattr(text, name)}
    if not getattr(text, "head_dim", None):
        sizes["hidden_size"] = _HEADS * (text.hidden_size // text.num_attention_heads)
    if getattr(text, "num_key_value_heads", None) == text.num_attention_heads:
        sizes["num_key_value_heads"] = _HEADS  # latent attention knows no groups of heads
    if isinstance(head := getattr(text, "mamba_d_head", None), int) and not hasattr(text, "mamba_d_ssm"):
        sizes["mamba_n_heads"] = max(1, sizes["hidden_size"] * text.mamba_expand // head)
    small = _changed(text, {**sizes, **{name: None for name in _TOKENS if hasattr(text, name)}})
    kinds = layer_kinds(text)
    each = list(dict.fromkeys(kinds))
    if getattr(text, "layer_types", None) is None:
        small.num_hidden_layers = 1
        return small
    try:
        small.layer_types, small.num_hidden_layers = each, len(each)
    except AttributeError:  # reckoned from other fields: as many layers as show every kind
        small.num_hidden_layers = 1 + max(kinds.index(kind) for kind in each)
    return small


def timed_config(text: Any) -> Any:
    """The configuration with one linear-attention layer at its own sizes; what surrounds it is small."""
    sizes = {name: value for name, value in SMALL.items() if name in _AROUND and hasattr(text, name)}
    one = _changed(text, {**sizes, **{name: None for name in _TOKENS if hasattr(text, name)}})
    kind = LINEAR if LINEAR in text.layer_types else "conv"
    one.layer_types, one.num_hidden_layers = [kind], 1
    return one


def small_model(text: Any, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """transformers' model of `small_config`, in eval mode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(text), trust_remote_code=trust_remote_code)
    return model.requires_grad_(False).to(device, dtype).eval()


def small_target(text: Any, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False) -> Target:
    """`small_model` as a target without a tokenizer, whose packing is not decided yet."""
    model = small_model(text, device, dtype, trust_remote_code)
    return Target(model, None, geometry_of(model.config, where=text.model_type), layer_kinds(model.config), ())


@contextlib.contextmanager
def current(device: torch.device) -> Iterator[None]:
    """The device as CUDA's current one within: kernels of other packages may start on that one, whatever they get."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield


def _changed(text: Any, values: dict[str, Any]) -> Any:
    changed = type(text)(**{**text.to_dict(), **values})
    for name, value in values.items():  # some write a field under another name, which wins over ours
        if getattr(changed, name, value) != value:
            setattr(changed, name, value)
    return changed
