"""The attention rule as intervals, dense mask and tiles against a loop written straight from the rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.blocks import (
    TILE,
    Document,
    DraftBatch,
    LayerKind,
    Row,
    Tiles,
    dense_mask,
    make_draft_batch,
    make_tiles,
    pack_row,
    visible_intervals,
)

BLOCK_SIZES = (4, 7, 8, 10, 16)


def sees(row: Row, anchor: int | None, slot: int, key: int, block: int, block_size: int, kind: LayerKind) -> bool:
    """The rule, one (query, key) pair at a time: slot `slot` of block number `block`, drafted from `anchor`."""
    length = row.tokens_S.numel()
    if key < length:
        if anchor is None or row.document_S[key] != row.document_S[anchor] or not key < anchor:
            return False
        distance = int(row.positions_S[anchor]) + slot - int(row.positions_S[key])
        return kind.window is None or distance < kind.window
    other_block, other_slot = divmod(key - length, block_size)
    if other_block != block:
        return False
    if kind.causal and other_slot > slot:
        return False
    return kind.window is None or abs(slot - other_slot) < kind.window


def loop_mask(row: Row, anchors: list[int | None], block_size: int, kind: LayerKind) -> Tensor:
    keys = row.tokens_S.numel() + len(anchors) * block_size
    return torch.tensor(
        [
            [sees(row, anchor, slot, key, block, block_size, kind) for key in range(keys)]
            for block, anchor in enumerate(anchors)
            for slot in range(block_size)
        ]
    )


def row_of(lengths: list[int], length: int, taught: object = None) -> Row:
    documents = [Document(torch.arange(n), torch.ones(n, dtype=torch.bool)) for n in lengths]
    row = pack_row(0, documents, length)
    if taught is not None:
        row.loss_mask_S.logical_and_(torch.as_tensor(taught))
    return row


def batch_of(row: Row, block_size: int, anchors: int, kinds: tuple[LayerKind, ...], seed: int = 0) -> DraftBatch:
    return make_draft_batch(
        row,
        anchors=anchors,
        block_size=block_size,
        mask_token_id=999,
        slot_weights_B=torch.ones(block_size),
        chunk=64,
        kinds=kinds,
        seed=(seed,),
        with_tiles=True,
    )


def anchors_of(batch: DraftBatch) -> list[int | None]:
    return [int(a) if ok else None for a, ok in zip(batch.anchors_N, batch.valid_N, strict=True)]


def kinds_for(block_size: int, longest: int) -> tuple[LayerKind, ...]:
    windows = (None, 1, 2, block_size - 1, block_size, block_size + 3, longest, longest + 50)
    return tuple(LayerKind(window, causal) for window in windows for causal in (False, True))


def random_lengths(rng: np.random.Generator, length: int) -> list[int]:
    """Documents that fill a row almost, exactly or by half; single-token ones included."""
    lengths, left = [], int(length * rng.choice([0.5, 0.9, 1.0]))
    while left:
        size = min(left, int(rng.choice([1, 2, 3, rng.integers(1, length + 1)])))
        lengths.append(size)
        left -= size
    return lengths


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_dense_mask_equals_the_loop_on_random_rows(block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    for case in range(3):
        length = int(rng.integers(16, 60))
        lengths = random_lengths(rng, length)
        row = row_of(lengths, length, rng.random(length) < 0.8)
        kinds = kinds_for(block_size, max(lengths))
        batch = batch_of(row, block_size, int(rng.integers(1, 6)), kinds, case)
        for kind in rng.permutation(len(kinds))[:7]:
            expected = loop_mask(row, anchors_of(batch), block_size, kinds[kind])
            assert torch.equal(dense_mask(batch.intervals[kinds[kind]], length), expected), (lengths, kinds[kind])


ADVERSARIAL = {
    "one document fills the row": ([20], 20),
    "every document is two tokens": ([2] * 10, 20),
    "documents of one token around a real one": ([1, 1, 9, 1], 16),
    "nothing but padding behind the first": ([3], 40),
    "no anchor anywhere": ([1] * 8, 20),
    "last anchor is the last but one token": ([4, 16], 20),
}


@pytest.mark.parametrize("name", list(ADVERSARIAL))
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_dense_mask_equals_the_loop_on_adversarial_rows(name: str, block_size: int) -> None:
    lengths, length = ADVERSARIAL[name]
    row = row_of(lengths, length)
    kinds = (*kinds_for(block_size, max(lengths))[::3], LayerKind(1, False), LayerKind(1, True))
    batch = batch_of(row, block_size, 4, kinds)
    for kind in kinds:
        expected = loop_mask(row, anchors_of(batch), block_size, kind)
        assert torch.equal(dense_mask(batch.intervals[kind], length), expected), kind


def test_padding_anchors_see_their_own_block_only() -> None:
    batch = batch_of(row_of([3], 20), 4, 5, (LayerKind(),))
    mask = dense_mask(batch.intervals[LayerKind()], 20).view(5, 4, 40)
    assert batch.valid_N.tolist() == [True, True, False, False, False]
    assert not mask[2:, :, :20].any()
    for block in range(5):
        assert mask[block, :, 20:].sum(1).tolist() == [4] * 4
        assert mask[block, :, 20 + 4 * block : 24 + 4 * block].all()


def test_intervals_keep_their_promises() -> None:
    """Empty intervals have lo == hi, and what is not valid sees no context whatever its index."""
    anchors_N, starts_N = torch.tensor([30, 40, 7, 21]), torch.tensor([28, 36, 0, 20])
    valid_N = torch.tensor([True, True, False, False])
    for kind in kinds_for(8, 20):
        part = visible_intervals(anchors_N, starts_N, valid_N, 8, 50, kind)
        assert (part.context_lo_Q <= part.context_hi_Q).all()
        assert (part.own_lo_Q < part.own_hi_Q).all()
        assert torch.equal(part.context_lo_Q[16:], part.context_hi_Q[16:])
        assert all(bound.dtype == torch.int32 for bound in part.tensors())


def listed(count: Tensor, index: Tensor) -> Tensor:
    """bool matrix of the listed tiles; also checks the form of the lists."""
    count, index = count[0, 0], index[0, 0]
    assert count.dtype == index.dtype == torch.int32
    assert count.is_contiguous()
    assert index.is_contiguous()
    matrix = torch.zeros(index.shape, dtype=torch.bool)
    for row, (used, columns) in enumerate(zip(count.tolist(), index.tolist(), strict=True)):
        assert columns[:used] == sorted(columns[:used])
        assert sorted(columns) == list(range(len(columns)))  # every entry is a valid tile, even behind the count
        matrix[row, columns[:used]] = True
    return matrix


def check_tiles(mask: Tensor, tiles: Tiles) -> tuple[int, int, int]:
    """Asserts that the tiles describe `mask` exactly; returns how many are skipped, partial and full."""
    partial = listed(tiles.kv_count, tiles.kv_index)
    full = listed(tiles.full_kv_count, tiles.full_kv_index)
    assert torch.equal(listed(tiles.q_count, tiles.q_index), partial.T)
    assert torch.equal(listed(tiles.full_q_count, tiles.full_q_index), full.T)
    queries, keys = mask.shape
    assert partial.shape == full.shape == (-(-queries // TILE), -(-keys // TILE))
    assert not (partial & full).any()
    for q in range(partial.shape[0]):
        for k in range(partial.shape[1]):
            tile = mask[q * TILE : (q + 1) * TILE, k * TILE : (k + 1) * TILE]
            if full[q, k]:
                assert tile.all()
                assert tile.shape[1] == TILE, "keys past the end would be attended to"
            else:
                # A partial tile may not be all there is: what can be full is full, what is empty is skipped.
                assert bool(partial[q, k]) == bool(tile.any()), (q, k)
                assert not (tile.all() and tile.shape == (TILE, TILE)), (q, k)
    # What a kernel computes: full tiles without the predicate, partial ones with it.
    reach = full.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:queries, :keys]
    asked = partial.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:queries, :keys]
    assert torch.equal(reach | (asked & mask), mask)
    return int((~partial & ~full).sum()), int(partial.sum()), int(full.sum())


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_tiles_describe_the_mask_exactly(block_size: int) -> None:
    rng = np.random.default_rng(100 + block_size)
    totals = np.zeros(3, dtype=int)
    for case in range(6):
        length = int(rng.choice([64, 128, 257, 500, 512, 700]))
        lengths = [length] if case == 0 else random_lengths(rng, length)
        row = row_of(lengths, length, rng.random(length) < 0.9)
        kinds = kinds_for(block_size, max(lengths))
        chosen = [kinds[i] for i in rng.permutation(len(kinds))[:5]] + [LayerKind()]
        batch = batch_of(row, block_size, int(rng.integers(1, 50)), tuple(chosen), case)
        for kind in chosen:
            totals += check_tiles(dense_mask(batch.intervals[kind], length), batch.tiles[kind])
    assert totals[0] > 0
    assert totals[1] > 0


def test_full_tiles_occur_and_save_the_predicate() -> None:
    """Late anchors of one long document: the early context is seen by all of them."""
    taught = torch.arange(640) > 400
    batch = batch_of(row_of([640], 640, taught), 16, 16, (LayerKind(), LayerKind(300, False)))
    _, _, full = check_tiles(dense_mask(batch.intervals[LayerKind()], 640), batch.tiles[LayerKind()])
    assert full >= 2 * 3
    kind = LayerKind(300, False)
    check_tiles(dense_mask(batch.intervals[kind], 640), batch.tiles[kind])


@pytest.mark.parametrize("first_token", [0, 1, 127, 128, 129])
@pytest.mark.parametrize("first_anchor", [383, 384, 385])
def test_tile_edges(first_token: int, first_anchor: int) -> None:
    """Documents and anchors that begin one token before, at and after the edge of a tile."""
    for anchors in (8, 5):  # 128 queries are exactly a tile, 80 a part of one
        anchors_N = first_anchor + torch.arange(anchors)
        starts_N, valid_N = torch.full_like(anchors_N, first_token), torch.ones_like(anchors_N, dtype=torch.bool)
        for window in (None, *range(255, 260), *range(382, 387)):
            part = visible_intervals(anchors_N, starts_N, valid_N, 16, 600, LayerKind(window, False))
            _, _, full = check_tiles(dense_mask(part, 600), make_tiles(part, 600))
            if window is None:
                assert full == max(0, first_anchor // TILE - -(-first_token // TILE))


def test_tiles_equal_those_of_torch() -> None:
    """`create_block_mask` asks every pair; from intervals comes the same (sizes that fill their tiles)."""
    from torch.nn.attention.flex_attention import create_block_mask

    row = row_of([300, 200, 100], 640)
    batch = batch_of(row, 8, 32, (LayerKind(40, False), LayerKind()))
    for kind, part in batch.intervals.items():
        mask = dense_mask(part, 640)
        theirs = create_block_mask(lambda _b, _h, q, k, m=mask: m[q, k], 1, 1, 256, 640 + 256, device="cpu")
        tiles = batch.tiles[kind]
        ours_and_theirs = (
            (tiles.kv_count, tiles.kv_index, theirs.kv_num_blocks, theirs.kv_indices),
            (tiles.full_kv_count, tiles.full_kv_index, theirs.full_kv_num_blocks, theirs.full_kv_indices),
            (tiles.q_count, tiles.q_index, theirs.q_num_blocks, theirs.q_indices),
            (tiles.full_q_count, tiles.full_q_index, theirs.full_q_num_blocks, theirs.full_q_indices),
        )
        for count, index, their_count, their_index in ours_and_theirs:
            assert torch.equal(listed(count, index), listed(their_count, their_index))


def test_tiles_move_and_keep_their_values() -> None:
    batch = batch_of(row_of([30], 40), 4, 3, (LayerKind(),))
    moved = batch.to("cpu")
    for kind in batch.tiles:
        assert all(
            torch.equal(a, b) for a, b in zip(moved.tiles[kind].tensors(), batch.tiles[kind].tensors(), strict=True)
        )
    assert moved.number == batch.number
    assert moved.taught == batch.taught
    assert moved.real_tokens == 30


def test_make_tiles_of_the_same_intervals_is_the_same() -> None:
    batch = batch_of(row_of([100, 50], 200), 7, 9, (LayerKind(12, True),))
    again = make_tiles(batch.intervals[LayerKind(12, True)], 200)
    assert all(
        torch.equal(a, b) for a, b in zip(again.tensors(), batch.tiles[LayerKind(12, True)].tensors(), strict=True)
    )
