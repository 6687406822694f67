"""Attention of draft blocks over `[S context | Q slots]`: a block-sparse compiled kernel and a dense reference.

- flex: torch's flex_attention over 128 × 128 tiles; needs CUDA and `torch.compile`, costs only the tiles that are seen.
- dense: eager matmuls with explicit masks. The own-block part of the scores is block-diagonal, so it is computed per
  block: Q × (S + B) scores instead of Q × (S + Q). Runs anywhere; the only path with a backward on CPU.

Shapes: queries [heads, Q, D], keys and values [kv_heads, S + Q, D].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftsmith.blocks import TILE, DraftBatch, Intervals, LayerKind

LayerMasks = dict[LayerKind, "BlockMask | DenseMask"]


@dataclass(frozen=True)
class DenseMask:
    """Masks of the dense path, true where visible: context [Q, S], own block [N, B, B].

    `float32` has scores and sums computed in float32, as kernels keep them, whatever the inputs' dtype.
    """

    context_QS: Tensor
    own_NBB: Tensor
    float32: bool = False


def build_masks(batch: DraftBatch, attention: str) -> LayerMasks:
    """Masks of all layer kinds of a batch, on the batch's device. Call it outside the step's compiled region.

    Args:
        batch: with tiles if `attention` is "flex".
        attention: "flex" or "dense".
    """
    length, queries = batch.context_positions_S.numel(), batch.inputs_Q.numel()
    if attention == "dense":
        block_size = queries // batch.anchors_N.numel()
        return {kind: dense_masks(part, length, block_size) for kind, part in batch.intervals.items()}
    assert attention == "flex", attention
    assert batch.tiles, "flex attention needs a batch made with tiles"
    return {kind: _flex_mask(batch, kind, length, queries) for kind in batch.intervals}


def dense_masks(intervals: Intervals, length: int, block_size: int) -> DenseMask:
    """Splits the rule into context [Q, S] and own-block [N, B, B] parts."""
    context_lo, context_hi, own_lo, own_hi = (t[:, None] for t in intervals.tensors())
    key = torch.arange(length, dtype=torch.int32, device=context_lo.device)
    context = (key >= context_lo) & (key < context_hi)
    first = torch.arange(context_lo.shape[0], device=context_lo.device) // block_size * block_size + length
    own_key = first[:, None] + torch.arange(block_size, device=context_lo.device)
    own = (own_key >= own_lo) & (own_key < own_hi)
    return DenseMask(context, own.view(-1, block_size, block_size))


def _flex_mask(batch: DraftBatch, kind: LayerKind, length: int, queries: int) -> BlockMask:
    context_lo, context_hi, own_lo, own_hi = batch.intervals[kind].tensors()

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_context = (key >= context_lo[query]) & (key < context_hi[query])
        in_own_block = (key >= own_lo[query]) & (key < own_hi[query])
        return in_context | in_own_block

    tiles = batch.tiles[kind]
    return BlockMask(
        seq_lengths=(queries, length + queries),
        kv_num_blocks=tiles.kv_count,
        kv_indices=tiles.kv_index,
        full_kv_num_blocks=tiles.full_kv_count,
        full_kv_indices=tiles.full_kv_index,
        q_num_blocks=tiles.q_count,
        q_indices=tiles.q_index,
        full_q_num_blocks=tiles.full_q_count,
        full_q_indices=tiles.full_q_index,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=visible,
    )


def in_words(attention: str, compiled: bool, flex_backend: str = "triton") -> str:
    """How a drafter attends, for people: "flex, compiled, FlashAttention-4"."""
    kernels = ", FlashAttention-4" if flex_backend == "flash" else ""
    return f"{attention}, {'compiled' if compiled else 'eager'}{kernels}"


def flex_options(device: torch.device, head_dim: int, backend: str = "triton") -> dict[str, Any]:
    """Kernel options of flex_attention for a card; empty: torch's own choice.

    Args:
        device: the card.
        head_dim: D.
        backend: "triton", or "flash" where `flash.missing` has nothing to say.

    Hopper, measured on an H200 at 8,192 slots over 12,288 keys (forward and backward in ms, with torch's choice and
    with this one): 32 heads of 128: 1.00 + 2.93 and 0.94 + 2.68; 9 heads of 64: 0.27 + 0.60 and 0.24 + 0.51.
    """
    if backend == "flash":
        return {"BACKEND": "FLASH"}
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return {}
    forward = {64: (128, 64, 4, 3), 128: (128, 128, 8, 3)}.get(head_dim)
    if forward is None:
        return {}
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    backward = {"BLOCK_M1": 64, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 64, "num_warps": 4, "num_stages": 2}
    return {f"fwd_{name}": value for name, value in zip(names, forward, strict=True)} | {
        f"bwd_{name}": value for name, value in backward.items()
    }


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | DenseMask, options: dict[str, Any] | None = None
) -> Tensor:
    """[heads, Q, D] from queries over keys and values [kv_heads, S + Q, D]; scale 1/√D.

    Args:
        options: of the flex kernel, from `flex_options`.
    """
    if isinstance(mask, DenseMask):
        return attend_dense(query, key, value, mask)
    grouped = query.shape[0] != key.shape[0]
    out = flex_attention(
        query[None],
        key[None],
        value[None],
        block_mask=mask,
        enable_gqa=grouped,
        kernel_options=cast(Any, options or None),
    )
    assert isinstance(out, Tensor)
    return out[0]


def attend_dense(query: Tensor, key: Tensor, value: Tensor, mask: DenseMask) -> Tensor:
    """The dense reference; softmax in float32 whatever the dtype of the inputs."""
    if mask.float32:
        return attend_dense(query.float(), key.float(), value.float(), replace(mask, float32=False)).to(value.dtype)
    heads, queries, dim = query.shape
    kv_heads, length = key.shape[0], mask.context_QS.shape[1]
    count, block_size = mask.own_NBB.shape[:2]
    group = heads // kv_heads
    key_context, key_own = key[:, :length], key[:, length:].reshape(kv_heads, 1, count, block_size, dim)
    value_context, value_own = value[:, :length], value[:, length:].reshape(kv_heads, 1, count, block_size, dim)

    query = query.reshape(kv_heads, group * queries, dim) * dim**-0.5
    scores_context = (query @ key_context.mT).view(kv_heads, group, queries, length)
    scores_own = query.view(kv_heads, group, count, block_size, dim) @ key_own.mT
    scores = torch.cat(
        (
            scores_context.masked_fill(~mask.context_QS, float("-inf")),
            scores_own.masked_fill(~mask.own_NBB, float("-inf")).view(kv_heads, group, queries, block_size),
        ),
        dim=-1,
    )
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    weights_context = weights[..., :length].reshape(kv_heads, group * queries, length)
    weights_own = weights[..., length:].reshape(kv_heads, group, count, block_size, block_size)
    out = (weights_context @ value_context).view(kv_heads, group, count, block_size, dim) + weights_own @ value_own
    return out.reshape(heads, queries, dim)
