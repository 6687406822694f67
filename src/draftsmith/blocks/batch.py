"""From a packed row to everything the drafter needs besides features: the `DraftBatch`.

Made by prefetch workers on the CPU, from (seed, epoch, row) alone, so that the device never waits for a decision:
anchors, block inputs, labels, the order in which taught slots go through the head, and the mask.

Letters: S context tokens, N anchors, B slots of a block, Q = N·B, M head chunks of C slots.

Rules:
- An anchor a is eligible iff a and a+1 are both assistant tokens of one document. N are drawn uniformly without
  replacement and sorted; where fewer are eligible the rest are padding anchors, which see their own block and weigh
  nothing. A floor and a ceiling per document may bend that: see `draw_anchors`.
- Slot 0 of a block holds token a, slots 1..B-1 hold MASK. Slot k ≥ 1 is taught token a+k while the document lasts and
  every slot before it was taught: decoding cannot reach a token behind a hole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.blocks.row import Row
from draftsmith.blocks.rule import Intervals, LayerKind, visible_intervals
from draftsmith.blocks.tiles import Tiles, make_tiles

ALIGNED = 128  # bytes: what compiled kernels may assume of the beginning of a tensor


@dataclass(frozen=True)
class DraftBatch:
    """One row's draft work. All tensors live on one device; `to` moves them together, in one copy.

    Attributes:
        number: of the row.
        real_tokens: tokens of the row that are not padding.
        anchors_N: int64 index of each anchor; 0 on padding anchors.
        valid_N: bool.
        inputs_Q: int64 block inputs (anchor token, then MASK).
        context_positions_S: int64.
        block_positions_Q: int64, position of the anchor plus slot.
        slots_MC: int64 into Q, the taught slots in head order, whole blocks to a chunk. Filled up with 0: slot 0 of a
            block is never taught, so it can stand for "none".
        labels_MC: int64 token that the slot is taught; 0 on filling.
        weights_MC: float32 static weight of the slot; 0 on filling.
        teacher_MC: int64 into S, the context token whose target distribution the slot imitates (a + k - 1).
        taught: number of taught slots.
        intervals: per layer kind.
        tiles: per layer kind; empty where the dense path runs.
        packed: the memory that holds all of them, uint8; None while each has its own.
    """

    number: int
    real_tokens: int
    taught: int
    anchors_N: Tensor
    valid_N: Tensor
    inputs_Q: Tensor
    context_positions_S: Tensor
    block_positions_Q: Tensor
    slots_MC: Tensor
    labels_MC: Tensor
    weights_MC: Tensor
    teacher_MC: Tensor
    intervals: dict[LayerKind, Intervals]
    tiles: dict[LayerKind, Tiles] = field(default_factory=dict)
    packed: Tensor | None = field(default=None, repr=False, compare=False)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> DraftBatch:
        """The batch on another device; `non_blocking` needs a pinned batch to be of use."""
        if self.anchors_N.device == torch.device(device):
            return self
        packed = self if self.packed is not None else self.pack()
        assert packed.packed is not None
        moved = packed.packed.to(device, non_blocking=non_blocking)
        storage = packed.packed.untyped_storage().data_ptr()
        # Plain tensors over one storage, and no views: compiled code need not know that they lie together.
        return replace(packed._map(lambda value: _over(moved, value, value.data_ptr() - storage)), packed=moved)

    def pin(self) -> DraftBatch:
        """The batch in page-locked memory, from which copies to a GPU do not stop the host."""
        return self.pack(pinned=True)

    def pack(self, *, pinned: bool = False) -> DraftBatch:
        """The same with all tensors in one piece of memory on the CPU, one behind the other."""
        values: list[Tensor] = []
        self._map(lambda value: values.append(value) or value)  # type: ignore[func-returns-value]
        starts, size = [0] * len(values), 0
        # What has M chunks comes last: everything else lies at the same place in every row.
        for place in sorted(range(len(values)), key=lambda place: values[place].shape == self.slots_MC.shape):
            starts[place] = size
            size += -(-values[place].numel() * values[place].itemsize // ALIGNED) * ALIGNED
        packed = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        places = iter(starts)
        return replace(self._map(lambda value: _over(packed, value, next(places)).copy_(value)), packed=packed)

    def _map(self, move: Callable[[Tensor], Tensor]) -> DraftBatch:
        moved: dict[str, Any] = {
            name: move(value)
            for name in self.__dataclass_fields__
            if name != "packed" and isinstance(value := getattr(self, name), Tensor)
        }
        return replace(
            self,
            intervals={kind: Intervals(*map(move, part.tensors())) for kind, part in self.intervals.items()},
            tiles={kind: Tiles(*map(move, part.tensors())) for kind, part in self.tiles.items()},
            **moved,
        )


def _over(memory: Tensor, like: Tensor, start: int) -> Tensor:
    """A tensor of the shape and dtype of `like` over `memory`, from byte `start` on."""
    made = torch.empty(0, dtype=like.dtype, device=memory.device)
    return made.set_(memory.untyped_storage(), start // like.itemsize, like.shape, like.contiguous().stride())


def make_draft_batch(
    row: Row,
    *,
    anchors: int,
    block_size: int,
    mask_token_id: int,
    slot_weights_B: Tensor,
    chunk: int,
    kinds: tuple[LayerKind, ...],
    seed: tuple[int, ...],
    with_tiles: bool,
    per_document: tuple[int, int | None] | None = None,
) -> DraftBatch:
    """Draws anchors and lays out one row's draft work.

    Args:
        row: packed row, on the CPU.
        anchors: N.
        block_size: B.
        mask_token_id: the token that stands in the slots to be filled.
        slot_weights_B: float32, static weight by slot; entry 0 is ignored.
        chunk: C, taught slots per head chunk; at least B - 1.
        kinds: the layer kinds that occur in the drafter.
        seed: decides the anchors, e.g. (seed, epoch, row number).
        with_tiles: also list mask tiles (for the block-sparse kernel).
        per_document: floor and ceiling of the anchors of one document, see `draw_anchors`.
    """
    assert chunk >= block_size - 1, f"a chunk of {chunk} slots cannot hold a block of {block_size}"
    length = row.tokens_S.numel()
    end_S = document_ends(row.document_S)
    chosen = draw_anchors(row, anchors, seed, per_document)
    valid_N = torch.zeros(anchors, dtype=torch.bool)
    valid_N[: chosen.numel()] = True
    anchors_N = torch.zeros(anchors, dtype=torch.int64)
    anchors_N[: chosen.numel()] = chosen

    slot_B = torch.arange(block_size)
    inputs_NB = torch.full((anchors, block_size), mask_token_id, dtype=torch.int64)
    inputs_NB[:, 0] = torch.where(valid_N, row.tokens_S[anchors_N], mask_token_id)
    anchor_position_N = torch.where(valid_N, row.positions_S[anchors_N], 0)

    source_NB = anchors_N[:, None] + slot_B
    inside_NB = (source_NB < end_S[anchors_N][:, None]) & valid_N[:, None]
    source_NB = source_NB.clamp(max=length - 1)
    taught_NB = inside_NB & row.loss_mask_S[source_NB]
    # A contiguous prefix of the slots after the anchor.
    taught_NB[:, 0] = False
    taught_NB[:, 1:] = taught_NB[:, 1:].cumprod(1).bool()

    slots_MC = chunk_whole_blocks(taught_NB, chunk)
    filled_MC = slots_MC > 0
    source_Q = source_NB.reshape(-1)
    labels_MC = torch.where(filled_MC, row.tokens_S[source_Q[slots_MC]], 0)
    weights_MC = torch.where(filled_MC, slot_weights_B[slots_MC % block_size], 0.0)
    teacher_MC = torch.where(filled_MC, source_Q[slots_MC] - 1, 0)

    starts_N = anchors_N - anchor_position_N
    intervals = {kind: visible_intervals(anchors_N, starts_N, valid_N, block_size, length, kind) for kind in kinds}
    return DraftBatch(
        number=row.number,
        real_tokens=row.real_tokens,
        taught=int(taught_NB.sum()),
        anchors_N=anchors_N,
        valid_N=valid_N,
        inputs_Q=inputs_NB.reshape(-1),
        context_positions_S=row.positions_S,
        block_positions_Q=(anchor_position_N[:, None] + slot_B).reshape(-1),
        slots_MC=slots_MC,
        labels_MC=labels_MC,
        weights_MC=weights_MC.to(torch.float32),
        teacher_MC=teacher_MC,
        intervals=intervals,
        tiles={kind: make_tiles(part, length) for kind, part in intervals.items()} if with_tiles else {},
    )


def document_ends(document_S: Tensor) -> Tensor:
    """int64 [S]: for each token the index after the last token of its document; for padding its own index."""
    length = document_S.numel()
    index = torch.arange(length)
    last = torch.ones(length, dtype=torch.bool)
    last[:-1] = document_S[1:] != document_S[:-1]
    # The next index at which a document ends, looking right.
    end = torch.where(last, index + 1, length + 1).flip(0).cummin(0).values.flip(0)
    return torch.where(document_S >= 0, end, index)


def eligible_anchors(row: Row) -> Tensor:
    """bool [S]: token and successor are both assistant tokens of the same document."""
    eligible = row.loss_mask_S.clone()
    eligible[-1] = False
    eligible[:-1] &= row.loss_mask_S[1:] & (row.document_S[1:] == row.document_S[:-1])
    return eligible


def draw_anchors(
    row: Row, count: int, seed: tuple[int, ...], per_document: tuple[int, int | None] | None = None
) -> Tensor:
    """Up to `count` eligible indices, ascending, int64.

    Uniform over the row without replacement. With `per_document` = (floor, ceiling) every document first gets `floor`
    anchors, or as many as are eligible in it; what is left of `count` is drawn uniformly from the rest, but no document
    gets more than `ceiling` (None: no limit). Where `count` is less than all floors together, it is drawn from those.

    The numbers are of numpy's default generator: the same for a seed as long as numpy's version does not change them.
    """
    candidates = eligible_anchors(row).nonzero()[:, 0]
    if per_document is None:
        if candidates.numel() <= count:
            return candidates
        picked = np.random.default_rng(seed).choice(candidates.numel(), size=count, replace=False)
        return candidates[torch.from_numpy(np.sort(picked))]
    floor, ceiling = per_document
    document = row.document_S[candidates].numpy()
    key = np.random.default_rng(seed).random(document.size)
    by_document = np.lexsort((key, document))
    _, first, members = np.unique(document, return_index=True, return_counts=True)
    rank = np.empty(document.size, dtype=np.int64)  # of an anchor among those of its document, at random
    rank[by_document] = np.arange(document.size) - np.repeat(first, members)
    order = np.lexsort((key, rank >= floor))
    if ceiling is not None:
        order = order[rank[order] < ceiling]
    return candidates[torch.from_numpy(np.sort(order[:count]))]


def chunk_whole_blocks(taught_NB: Tensor, chunk: int) -> Tensor:
    """Slots in head order, int64 [M, C]: blocks one after the other, none cut by a chunk's end, filled up with 0.

    M is at least 1, so that a row without a taught slot still has the shape of one.
    """
    block_size = taught_NB.shape[1]
    per_block = taught_NB.sum(1).tolist()
    chunk_of_block, offset_of_block = [], []
    current, used = 0, 0
    for taught in per_block:
        if used + taught > chunk:
            current, used = current + 1, 0
        chunk_of_block.append(current)
        offset_of_block.append(used)
        used += taught
    slots_MC = torch.zeros(current + 1, chunk, dtype=torch.int64)
    block, slot = taught_NB.nonzero(as_tuple=True)
    if block.numel():
        # Taught slots are 1..t, so slot k is the k-th of its block.
        row = torch.tensor(chunk_of_block)[block]
        column = torch.tensor(offset_of_block)[block] + slot - 1
        slots_MC[row, column] = block * block_size + slot
    return slots_MC
