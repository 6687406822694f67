"""The drafter's context for rounds of static shape: the places where tokens go are tensors, masks hide the rest.

Every block attends to the same number of columns. What it may not see (columns behind it, those of slots that a
shortened block does not have, those out of a layer's window) is masked, by position. Query heads that share a K/V head
stand below each other as further query rows: torch's kernels group heads only where there is no mask.

Columns that are masked hold zeros or stale finite numbers, and weigh exactly nothing. Cost: attention over `shown`
columns instead of those in use.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.blocks import LayerKind
from draftsmith.drafter.model import DraftCache, Rotary
from draftsmith.drafter.spec import DrafterSpec


class StaticDraftCache(DraftCache):
    """A `DraftCache` whose `start` is an int64 scalar tensor (a number will do where nothing is captured).

    Args:
        columns: tokens that fit, the last block included.
        end: int64 scalar tensor: number of the position behind the last slot that counts, read by every block.
    """

    def __init__(self, spec: DrafterSpec, columns: int, end: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(spec, columns - spec.block_size, device, dtype)
        self._end, self._dtype = end, dtype
        self._columns = torch.arange(columns, device=device)
        self.shown = columns

    def open_context(self, start: Tensor | int, length: int) -> Rotary:
        return self._open_at(start, length)

    def open_block(self, start: Tensor | int, width: int) -> Rotary:
        self._masks = {}
        return self._open_at(start, width)

    def _open_at(self, start: Tensor | int, count: int) -> Rotary:
        self._places_L = start + self._columns[:count]
        return self.cos.index_select(0, self._places_L), self.sin.index_select(0, self._places_L)

    def write(self, index: int, key: Tensor, value: Tensor) -> None:
        self.keys[index].index_copy_(1, self._places_L, key)
        self.values[index].index_copy_(1, self._places_L, value)

    def attend(self, index: int, kind: LayerKind, query: Tensor) -> Tensor:
        heads, width, size = query.shape
        kv_heads = self.keys.shape[1]
        if kind not in self._masks:
            self._masks[kind] = self._mask(kind).repeat(heads // kv_heads, 1)
        attended = F.scaled_dot_product_attention(
            query.reshape(1, kv_heads, -1, size),
            self.keys[None, index, :, : self.shown],
            self.values[None, index, :, : self.shown],
            attn_mask=self._masks[kind],
        )
        # Some kernels return heads and tokens the other way round in memory.
        return attended.reshape(heads, width, size)

    def _mask(self, kind: LayerKind) -> Tensor:
        """[b, shown], to be added: 0 where visible."""
        query, key = self._places_L[:, None], self._columns[: self.shown]
        visible = key < self._end
        if kind.causal:
            visible = visible & (key <= query)
        if kind.window is not None:
            visible = visible & (query - key < kind.window) & (key - query < kind.window)
        # Slots behind the end see at least themselves, so that nothing that is not a number gets into the cache.
        visible = visible | (key == query)
        hidden = torch.zeros(visible.shape, dtype=self._dtype, device=visible.device)
        return hidden.masked_fill_(~visible, -torch.inf)
