"""The attention rule: which keys a draft slot sees.

Keys of a row are `[S context | Q = N·B slots]`. A slot of the block drafted from anchor a sees context j iff j lies in
a's document and j < a, strictly (when decoding, the target has not yet processed a), and the slots of its own block.
Sliding layers cut both to `position(query) - position(key) < W`; a causal layer hides the later slots of the block.

Documents are contiguous and positions count up by one inside them, so what one query sees is always two intervals:
one of the context, one of its own block. Everything else (dense mask, tiles, the kernel's predicate) reads those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class LayerKind(NamedTuple):
    """What distinguishes one drafter layer's attention from another's.

    Attributes:
        window: W of a sliding layer, None for full attention.
        causal: slots see no later slot of their block.
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True)
class Intervals:
    """Half-open key intervals [lo, hi) of every query, int32 [Q]; an empty one has lo == hi.

    `own_*` are key numbers too, so they start at S.
    """

    context_lo_Q: Tensor
    context_hi_Q: Tensor
    own_lo_Q: Tensor
    own_hi_Q: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.context_lo_Q, self.context_hi_Q, self.own_lo_Q, self.own_hi_Q


def visible_intervals(
    anchors_N: Tensor, starts_N: Tensor, valid_N: Tensor, block_size: int, length: int, kind: LayerKind
) -> Intervals:
    """Intervals of all Q = N·B queries.

    Args:
        anchors_N: int64, index of each anchor in the row.
        starts_N: int64, index of the first token of each anchor's document.
        valid_N: bool; padding anchors see their own block only.
        block_size: B.
        length: S.
        kind: of the layer.
    """
    count = anchors_N.numel()
    slot_NB = torch.arange(block_size).expand(count, block_size)
    anchor_NB = anchors_N[:, None].expand(count, block_size)
    context_lo = starts_N[:, None].expand(count, block_size)
    own_lo = torch.zeros_like(slot_NB)
    own_hi = slot_NB + 1 if kind.causal else torch.full_like(slot_NB, block_size)
    if kind.window is not None:
        # Query position minus key position < W; positions differ as indices do, inside a document.
        context_lo = torch.maximum(context_lo, anchor_NB + slot_NB - kind.window + 1)
        own_lo = torch.clamp(slot_NB - kind.window + 1, min=0)
        own_hi = torch.minimum(own_hi, slot_NB + kind.window)
    context_hi = torch.where(valid_N[:, None], anchor_NB, torch.zeros_like(anchor_NB))
    context_lo = torch.minimum(context_lo, context_hi)
    first_key = length + block_size * torch.arange(count)[:, None]
    parts = (context_lo, context_hi, first_key + own_lo, first_key + own_hi)
    return Intervals(*(part.reshape(-1).to(torch.int32) for part in parts))


def dense_mask(intervals: Intervals, length: int) -> Tensor:
    """The rule as bool [Q, S + Q], true where the query sees the key. For tests, pictures and small slices."""
    queries = intervals.context_lo_Q.numel()
    key = torch.arange(length + queries, dtype=torch.int32, device=intervals.context_lo_Q.device)
    context_lo, context_hi, own_lo, own_hi = (t[:, None] for t in intervals.tensors())
    return ((key >= context_lo) & (key < context_hi)) | ((key >= own_lo) & (key < own_hi))
