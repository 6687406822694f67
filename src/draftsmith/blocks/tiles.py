"""The attention rule as 128 × 128 tiles, the form that a block-sparse kernel wants.

A tile that no query sees is skipped, one that every query of it sees completely is computed without the predicate, the
others are computed with it. Built from intervals in O(Q · KV/128) on the CPU: 3–8 ms for Q = 8,192, where asking every
(query, key) pair takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.blocks.rule import Intervals

TILE = 128


@dataclass(frozen=True)
class Tiles:
    """Tile lists in both directions, int32, with leading [1, 1] batch and head axes.

    `kv_*` list, per query tile, the key tiles it needs (backward of queries and the forward pass); `q_*` list, per key
    tile, the query tiles that need it (backward of keys). Counts are [1, 1, rows], indices [1, 1, rows, columns] with
    the listed tiles first. `full_*` need no predicate.
    """

    kv_count: Tensor
    kv_index: Tensor
    full_kv_count: Tensor
    full_kv_index: Tensor
    q_count: Tensor
    q_index: Tensor
    full_q_count: Tensor
    full_q_index: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """All eight, in the order of the fields."""
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)


def make_tiles(intervals: Intervals, length: int) -> Tiles:
    """Classifies every tile of the [Q, S + Q] rule; sizes need not be multiples of the tile."""
    partial, full = classify_tiles(intervals, length)
    lists: list[Tensor] = []
    for tiles in (partial, full, partial.T, full.T):
        lists.extend(_ordered(tiles))
    return Tiles(*lists)


def classify_tiles(intervals: Intervals, length: int) -> tuple[Tensor, Tensor]:
    """(partial, full): bool [⌈Q/128⌉, ⌈(S+Q)/128⌉]; a tile is in at most one of them."""
    queries = intervals.context_lo_Q.numel()
    query_tiles = -(-queries // TILE)
    key_tiles = -(-(length + queries) // TILE)
    first = TILE * torch.arange(key_tiles, dtype=torch.int32)
    touched = torch.zeros(query_tiles, key_tiles, dtype=torch.bool)
    covered = torch.zeros(query_tiles * TILE, key_tiles, dtype=torch.bool)
    covered[queries:] = True  # rows past the end do not object to a full tile
    lo_hi = intervals.tensors()
    for lo, hi in (lo_hi[:2], lo_hi[2:]):
        lo, hi = lo[:, None], hi[:, None]
        meets = (lo < first + TILE) & (hi > first) & (lo < hi)
        meets = torch.nn.functional.pad(meets, (0, 0, 0, query_tiles * TILE - queries))
        touched |= meets.view(query_tiles, TILE, key_tiles).any(1)
        covered[:queries] |= (lo <= first) & (hi >= first + TILE)
    full = covered.view(query_tiles, TILE, key_tiles).all(1)
    return touched & ~full, full


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of a bool matrix: how many entries are set, and all columns with the set ones first, in order."""
    count = tiles.sum(1, dtype=torch.int32)
    index = torch.argsort((~tiles).to(torch.int8), dim=1, stable=True).to(torch.int32)
    return count[None, None].contiguous(), index[None, None].contiguous()
