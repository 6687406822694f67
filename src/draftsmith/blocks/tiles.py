"""The attention rule as 128 × 128 tiles, the form that a block-sparse kernel wants.

A tile that no query sees is skipped, one that every query of it sees completely is computed without the predicate, the
others are computed with it. Built from intervals on the CPU, in O(Q) plus the size of the lists: about 2 ms for
Q = 8,192, where asking every (query, key) pair takes seconds.
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
    query_tile_Q = torch.arange(queries) // TILE
    meeting = torch.zeros(query_tiles, key_tiles + 1, dtype=torch.int32)
    covering = torch.zeros_like(meeting)
    lo_hi = intervals.tensors()
    for lo, hi in (lo_hi[:2], lo_hi[2:]):
        some = lo < hi
        _count_ranges(meeting, query_tile_Q, lo // TILE, torch.where(some, (hi + TILE - 1) // TILE, lo // TILE))
        _count_ranges(covering, query_tile_Q, (lo + TILE - 1) // TILE, hi // TILE)
    members = torch.bincount(query_tile_Q, minlength=query_tiles)[:, None]
    # No query's two intervals cover the same tile, so a tile counted by every query is seen completely by each.
    full = covering.cumsum(1)[:, :-1] == members
    return (meeting.cumsum(1)[:, :-1] > 0) & ~full, full


def _count_ranges(steps: Tensor, query_tile_Q: Tensor, first_Q: Tensor, end_Q: Tensor) -> None:
    """Adds one to the key tiles [first, end) of each query's row, as +1 and -1 that a cumulative sum turns into it."""
    width = steps.shape[1]
    end_Q = torch.maximum(first_Q, end_Q)
    ones = torch.ones_like(first_Q)
    steps.view(-1).index_add_(0, query_tile_Q * width + first_Q, ones)
    steps.view(-1).index_add_(0, query_tile_Q * width + end_Q, -ones)


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of a bool matrix: how many entries are set, and all columns with the set ones first, in order."""
    count = tiles.sum(1, dtype=torch.int32)
    index = torch.argsort((~tiles).to(torch.int8), dim=1, stable=True).to(torch.int32)
    return count[None, None].contiguous(), index[None, None].contiguous()
