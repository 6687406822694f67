"""Anchors, block inputs, labels and head order of a row, against loops written from the rules."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from draftsmith.blocks import Document, DraftBatch, LayerKind, Row, make_draft_batch, pack_row
from draftsmith.blocks.batch import draw_anchors, eligible_anchors

MASK_TOKEN = 5000


def row_of(masks: list[str], length: int, number: int = 0) -> Row:
    """Documents given by their loss mask ("..xx": two tokens of the user, two of the assistant); tokens all differ."""
    documents, next_token = [], 100
    for mask in masks:
        tokens = torch.arange(next_token, next_token + len(mask))
        documents.append(Document(tokens, torch.tensor([letter == "x" for letter in mask])))
        next_token += len(mask)
    return pack_row(number, documents, length)


def random_row(rng: np.random.Generator, length: int) -> Row:
    masks, left = [], length - int(rng.integers(0, 6))
    while left > 0:
        size = min(left, int(rng.integers(1, 20)))
        share = rng.choice([0.0, 0.6, 0.95, 1.0])
        masks.append("".join("x" if rng.random() < share else "." for _ in range(size)))
        left -= size
    return row_of(masks, length)


def batch_of(
    row: Row, anchors: int, block_size: int, chunk: int = 1000, seed: tuple[int, ...] = (0, 0, 0)
) -> DraftBatch:
    return make_draft_batch(
        row,
        anchors=anchors,
        block_size=block_size,
        mask_token_id=MASK_TOKEN,
        slot_weights_B=torch.tensor([99.0] + [1.0 / k for k in range(1, block_size)]),
        chunk=chunk,
        kinds=(LayerKind(),),
        seed=seed,
        with_tiles=False,
    )


def eligible(row: Row) -> list[int]:
    """a is eligible iff a and a+1 are assistant tokens of the same document."""
    return [
        a
        for a in range(row.tokens_S.numel() - 1)
        if row.document_S[a] >= 0
        and row.document_S[a] == row.document_S[a + 1]
        and row.loss_mask_S[a]
        and row.loss_mask_S[a + 1]
    ]


def taught_labels(row: Row, anchor: int, block_size: int) -> dict[int, int]:
    """Label by slot: token a+k while the document lasts and until the first slot that may not be taught."""
    labels = {}
    for slot in range(1, block_size):
        source = anchor + slot
        inside = source < row.tokens_S.numel() and row.document_S[source] == row.document_S[anchor]
        if not inside or not row.loss_mask_S[source]:
            break
        labels[slot] = int(row.tokens_S[source])
    return labels


def test_eligibility_by_hand() -> None:
    row = row_of(["..xxx.x", "xx", "x", ".x", "xx"], 16)
    #             0123456    78    9    01   23  (then 2 of padding)
    assert eligible(row) == [2, 3, 7, 12]
    batch = batch_of(row, 6, 4)
    assert batch.anchors_N[batch.valid_N].tolist() == [2, 3, 7, 12]
    assert batch.valid_N.tolist() == [True] * 4 + [False] * 2


def test_a_row_that_ends_in_an_assistant_token_has_no_anchor_past_its_end() -> None:
    assert batch_of(row_of(["xxx"], 3), 4, 4).anchors_N[:2].tolist() == [0, 1]
    assert int(batch_of(row_of(["xxx"], 3), 4, 4).valid_N.sum()) == 2


@pytest.mark.parametrize("block_size", [4, 7, 8, 10, 16])
def test_batch_equals_the_loops_on_random_rows(block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    for case in range(12):
        length, anchors = int(rng.integers(20, 90)), int(rng.integers(1, 40))
        chunk = int(rng.integers(block_size - 1, 4 * block_size))
        row = random_row(rng, length)
        batch = batch_of(row, anchors, block_size, chunk, seed=(case,))

        may = eligible(row)
        drawn = batch.anchors_N[batch.valid_N].tolist()
        assert len(drawn) == min(anchors, len(may))
        assert drawn == sorted(set(drawn))
        assert set(drawn) <= set(may)
        assert batch.valid_N.tolist() == [True] * len(drawn) + [False] * (anchors - len(drawn))

        expected: dict[int, tuple[int, float, int]] = {}
        for block in range(anchors):
            inputs = batch.inputs_Q.view(anchors, block_size)[block].tolist()
            positions = batch.block_positions_Q.view(anchors, block_size)[block].tolist()
            if not batch.valid_N[block]:
                assert inputs == [MASK_TOKEN] * block_size
                assert positions == list(range(block_size))
                continue
            anchor = drawn[block]
            assert inputs == [int(row.tokens_S[anchor])] + [MASK_TOKEN] * (block_size - 1)
            assert positions == [int(row.positions_S[anchor]) + k for k in range(block_size)]
            for slot, label in taught_labels(row, anchor, block_size).items():
                expected[block * block_size + slot] = (label, 1.0 / slot, anchor + slot - 1)

        filled = batch.slots_MC > 0
        found = {
            slot: (label, pytest.approx(weight), teacher)
            for slot, label, weight, teacher in zip(
                batch.slots_MC[filled].tolist(),
                batch.labels_MC[filled].tolist(),
                batch.weights_MC[filled].tolist(),
                batch.teacher_MC[filled].tolist(),
                strict=True,
            )
        }
        assert int(filled.sum()) == len(found) == batch.taught, "a slot twice, or a wrong count"
        assert found == expected
        for part in (batch.labels_MC, batch.weights_MC, batch.teacher_MC):
            assert not part[~filled].any()
        assert batch.weights_MC.dtype == torch.float32
        assert torch.equal(batch.context_positions_S, row.positions_S)

        # Whole blocks: all slots of a block stand in one chunk; chunks are filled in order.
        chunk_of_block: dict[int, int] = {}
        for number, slots in enumerate(batch.slots_MC.tolist()):
            used = [slot for slot in slots if slot]
            assert slots == used + [0] * (chunk - len(used)), "filling stands in front of a taught slot"
            assert used == sorted(used)
            assert used or batch.slots_MC.shape[0] == 1, "an empty chunk costs a head matmul for nothing"
            for slot in used:
                assert chunk_of_block.setdefault(slot // block_size, number) == number


def test_labels_stop_at_the_documents_end_and_at_a_hole() -> None:
    row = row_of(["xxx", "xxxx.xx"], 10)
    batch = batch_of(row, 10, 5)
    labels = {}
    for slot, label in zip(batch.slots_MC[0].tolist(), batch.labels_MC[0].tolist(), strict=True):
        if slot:
            labels.setdefault(int(batch.anchors_N[slot // 5]), []).append(label)
    #                   document 1: 100 101 102, document 2: 103 104 105 106 (hole: 107) 108 109
    assert labels == {0: [101, 102], 1: [102], 3: [104, 105, 106], 4: [105, 106], 5: [106], 8: [109]}


def test_teacher_is_the_context_token_before_the_label() -> None:
    row = row_of(["xxxxxx"], 8)
    batch = batch_of(row, 5, 4)
    filled = batch.slots_MC > 0
    assert torch.equal(row.tokens_S[batch.teacher_MC[filled] + 1], batch.labels_MC[filled])


def test_same_seed_same_batch_and_other_seed_other_anchors() -> None:
    row = row_of(["x" * 200], 200)
    first, again, other = (batch_of(row, 20, 8, seed=seed) for seed in ((1, 2, 3), (1, 2, 3), (1, 2, 4)))
    for name in ("anchors_N", "inputs_Q", "slots_MC", "labels_MC"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert not torch.equal(first.anchors_N, other.anchors_N)
    # Global generators neither matter nor are touched.
    torch.manual_seed(7)
    np.random.seed(7)
    state = torch.get_rng_state()
    assert torch.equal(batch_of(row, 20, 8, seed=(1, 2, 3)).anchors_N, first.anchors_N)
    assert torch.equal(torch.get_rng_state(), state)


def test_anchors_are_uniform_without_replacement() -> None:
    """Each of 50 eligible tokens is drawn in 1/5 of 2,000 rows, and pairs are not tied to each other."""
    row = row_of(["." * 20 + "x" * 31, "x" * 21], 80)
    draws, anchors = 2000, 10
    may = eligible(row)
    assert len(may) == 50
    hits = np.zeros((draws, 80))
    for seed in range(draws):
        hits[seed, batch_of(row, anchors, 4, seed=(3, seed)).anchors_N.numpy()] = 1
    assert (hits.sum(1) == anchors).all()
    counts = hits.sum(0)[may]
    share = anchors / 50
    # Sum over tokens of the normalised squared deviation: mean 49 (× (1 - 1/50) for sampling without replacement).
    statistic = ((counts - draws * share) ** 2 / (draws * share * (1 - share))).sum()
    assert 20 < statistic < 95
    together = (hits[:, may[0]] * hits[:, may[1]]).mean()
    assert together == pytest.approx(share * (anchors - 1) / 49, abs=0.02)


def test_a_row_without_anchors_keeps_its_shapes() -> None:
    batch = batch_of(row_of(["....", "x"], 8), 3, 4, chunk=7)
    assert batch.taught == 0
    assert batch.slots_MC.shape == (1, 7)
    assert not batch.slots_MC.any()
    assert batch.inputs_Q.shape == (12,)
    assert batch.real_tokens == 5


def test_chunks_must_hold_a_block() -> None:
    with pytest.raises(AssertionError):
        batch_of(row_of(["xxxxx"], 8), 3, 6, chunk=4)


def test_pack_row() -> None:
    row = row_of([".x", "xxx"], 7, number=12)
    assert row.tokens_S.tolist() == [100, 101, 102, 103, 104, 0, 0]
    assert row.document_S.tolist() == [0, 0, 1, 1, 1, -1, -1]
    assert row.positions_S.tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert row.loss_mask_S.tolist() == [False, True, True, True, True, False, False]
    assert (row.number, row.real_tokens) == (12, 5)
    with pytest.raises(AssertionError):
        row_of(["xxx", "xxx"], 5)


def test_a_floor_and_a_ceiling_per_document() -> None:
    lengths = [4, 60, 9, 30, 2, 100]  # eligible anchors: one less each, all tokens being taught
    documents = [Document(torch.arange(n), torch.ones(n, dtype=torch.bool), str(i)) for i, n in enumerate(lengths)]
    row = pack_row(0, documents, 256)
    eligible = [length - 1 for length in lengths]

    def drawn(count: int, seed: int, floor: int, ceiling: int | None) -> list[int]:
        chosen = draw_anchors(row, count, (seed,), (floor, ceiling))
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        assert eligible_anchors(row)[chosen].all()
        return torch.bincount(row.document_S[chosen], minlength=6).tolist()

    for seed in range(20):
        counts = drawn(64, seed, 5, 20)
        assert sum(counts) == 64
        assert all(min(5, most) <= count <= min(20, most) for count, most in zip(counts, eligible, strict=True))
        # The ceiling leaves anchors unused rather than being passed.
        assert drawn(200, seed, 5, 20) == [min(20, most) for most in eligible]
        # Too few for all floors: nobody gets more than its floor.
        assert all(count <= min(5, most) for count, most in zip(drawn(12, seed, 5, None), eligible, strict=True))
        assert sum(drawn(12, seed, 5, None)) == 12
    assert drawn(500, 0, 0, None) == eligible
    # Without a floor and a ceiling it is uniform over the row, as without them.
    totals = np.sum([drawn(40, seed, 0, None) for seed in range(500)], axis=0)
    expected = 40 * 500 * np.array(eligible) / sum(eligible)
    assert np.abs(totals - expected).max() < 5 * np.sqrt(expected.max())
    assert draw_anchors(row, 30, (1,), (2, 9)).tolist() == draw_anchors(row, 30, (1,), (2, 9)).tolist()
    assert draw_anchors(row, 30, (1,), (2, 9)).tolist() != draw_anchors(row, 30, (2,), (2, 9)).tolist()


def test_a_packed_batch_is_the_same_in_one_piece_of_memory() -> None:
    setting = {"anchors": 6, "block_size": 4, "mask_token_id": 99, "slot_weights_B": torch.ones(4), "seed": (0,)}
    kinds = (LayerKind(), LayerKind(8, True))
    row = row_of(["..xxxxxxxx", "xxxxxx"], 20)
    plain = make_draft_batch(row, chunk=5, kinds=kinds, with_tiles=True, **setting)
    packed = plain.pack()

    def tensors(batch: DraftBatch) -> dict[str, torch.Tensor]:
        named = {name: getattr(batch, name) for name in batch.__dataclass_fields__ if name.split("_")[-1].isupper()}
        for kind in kinds:
            named |= {f"interval {kind} {i}": each for i, each in enumerate(batch.intervals[kind].tensors())}
            named |= {f"tile {kind} {i}": each for i, each in enumerate(batch.tiles[kind].tensors())}
        return named

    assert packed.packed is not None
    storage = packed.packed.untyped_storage().data_ptr()
    ends = []
    for name, value in tensors(plain).items():
        own = tensors(packed)[name]
        assert torch.equal(own, value), name
        assert own.dtype == value.dtype, name
        assert own.untyped_storage().data_ptr() == storage, name
        assert (own.data_ptr() - storage) % 128 == 0, name
        assert own._base is None, "compiled code sees plain tensors"
        ends.append((own.data_ptr(), own.data_ptr() + own.numel() * own.itemsize))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(ends))), "none lies over another"
    moved = packed.to("meta")
    assert {name: value.shape for name, value in tensors(moved).items()} == {
        name: value.shape for name, value in tensors(plain).items()
    }
    assert packed.to("cpu") is packed
    # Rows with more chunks keep everything else where it is.
    other = make_draft_batch(row, chunk=16, kinds=kinds, with_tiles=True, **setting).pack()
    assert other.slots_MC.shape != packed.slots_MC.shape
    for name in ("anchors_N", "block_positions_Q", f"tile {kinds[1]} 7"):
        places = [tensors(each)[name].storage_offset() for each in (packed, other)]
        assert places[0] == places[1], name
