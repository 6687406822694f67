"""Attention over packed documents by a variable-length kernel instead of a mask.

A row of S tokens is cut where its documents begin; the kernel runs each piece as a causal sequence of its own, so no
score between documents is computed and no S × S mask exists. With 16 equal documents a row that is a sixteenth of the
scores.

transformers lets an attention function be registered under a name, and its decoder layers hand unknown keyword
arguments down to it. `packed_attention` is that function: with `cu_seq_lens_q` it calls torch's `varlen_attn`, without
(decoding, single documents) it is transformers' own SDPA function, masks included.

The number of pieces is the one size that changes from row to row; it is marked dynamic, so that one graph serves all.
Nothing is computed from it but the kernel's own grid. Padding is one more piece: what it attends to is of no interest,
but it has to be finite.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "draftsmith_packed"
_LARGEST_HEAD = 256
# What some models ask of their attention and the kernel cannot do.
_FOREIGN = ("softcap", "s_aux", "position_bias")
# torch 2.11 groups heads without being asked.
_ASKS_FOR_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def missing(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why the kernel cannot run there; "" if it can."""
    if device.type != "cuda":
        return f"no variable-length kernel on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"no variable-length kernel for {str(dtype).removeprefix('torch.')}"
    if head_dim > _LARGEST_HEAD or head_dim % 8:
        return f"no variable-length kernel for heads of {head_dim}"
    return ""


def pieces(document_S: Tensor) -> Tensor:
    """Where the pieces of a row begin, and S: int32 [M+1] on the CPU, ascending.

    Args:
        document_S: int32 on the CPU, -1 on padding.
    """
    changes = torch.nonzero(document_S[1:] != document_S[:-1]).flatten() + 1
    ends = torch.tensor([document_S.numel()])
    return torch.cat([torch.zeros(1, dtype=torch.int64), changes, ends]).to(torch.int32)


def numbers(document_S: Tensor) -> Tensor:
    """Number of the piece that a token is in: int32 [S] on the CPU, from 0; the same pieces as `pieces`."""
    changes = torch.zeros(document_S.numel(), dtype=torch.int32)
    changes[1:] = document_S[1:] != document_S[:-1]
    return changes.cumsum(0, dtype=torch.int32)


def kernel(query: Tensor, key: Tensor, value: Tensor, cuts: Tensor, longest: int, scale: float, window: int) -> Tensor:
    """Causal attention within the pieces; looks `window` tokens back, everything if it is -1.

    Args:
        query, key, value: [S, heads, head_dim]; keys and values may have fewer heads.
        cuts: int32 [M+1].
        longest: no piece is longer.
    """
    options: dict[str, Any] = {"scale": scale, "window_size": (window, 0)}
    if _ASKS_FOR_GROUPS:
        options["enable_gqa"] = True
    out = varlen_attn(query, key, value, cuts, cuts, longest, longest, **options)
    assert isinstance(out, Tensor)
    return out


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function for a decoder layer.

    Args:
        query, key, value: [1, heads, S, head_dim].
        attention_mask: read only without `cu_seq_lens_q`.
        sliding_window: W; query i sees key j iff i - j < W.

    Returns:
        [1, S, heads, head_dim], and no weights.

    Raises:
        NotImplementedError: the model asks for something that the kernel cannot do.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[return-value]
    for name in _FOREIGN:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"variable-length attention has no {name}")
    assert query.shape[0] == 1, "a packed row is a batch of one"
    assert max_length_q is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = -1 if sliding_window is None else sliding_window - 1
    # transposed as views: the kernel reads any strides with a contiguous last dimension
    out = kernel(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_lens_q,
        max_length_q,
        scale,
        window,
    )
    return out[None], None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
