"""The stream: every document once an epoch, in another order every epoch, the same from any thread and any start."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftsmith.blocks.row import Row
from draftsmith.data.stream import DocumentStore, RowSource, TokenPart

S = 32


def make_store(count: int = 50, seed: int = 0) -> DocumentStore:
    """Document d holds the token d, 2 to 32 times."""
    lengths = np.random.default_rng(seed).integers(2, S + 1, count)
    tokens = np.repeat(np.arange(count), lengths).astype(np.int32)
    mask = np.concatenate([np.arange(length) > 0 for length in lengths])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    half = count // 2  # two files, the second counts its tokens from 0 again
    cut = starts[half]
    pieces = ((tokens[:cut], mask[:cut]), (tokens[cut:], mask[cut:]))
    second = np.arange(count) >= half
    return DocumentStore(
        parts=[
            TokenPart(name, *piece, hashlib.sha256(piece[0].tobytes() + piece[1].tobytes()).hexdigest())
            for name, piece in zip(("a.jsonl", "b.jsonl"), pieces, strict=True)
        ],
        part_D=second.astype(np.int32),
        start_D=starts[:-1] - np.where(second, cut, 0),
        length_D=lengths.astype(np.int32),
        number_D=np.arange(count, dtype=np.int32) + 1,
    )


def all_tokens(store: DocumentStore) -> list[int]:
    return [token for part in store.parts for token in part.tokens.tolist()]


def source(store: DocumentStore, seed: int = 0, **how: bool) -> RowSource:
    return RowSource(store, np.arange(store.length_D.size), length=S, seed=seed, **how)


def equal(a: Row, b: Row) -> bool:
    tensors = ("tokens_S", "loss_mask_S", "document_S", "positions_S")
    return a.number == b.number and all(torch.equal(getattr(a, name), getattr(b, name)) for name in tensors)


def test_an_epoch_holds_every_token_once() -> None:
    store = make_store()
    rows = source(store)
    for epoch in range(3):
        tokens: list[int] = []
        for number in range(epoch * rows.rows_per_epoch, (epoch + 1) * rows.rows_per_epoch):
            row = rows.row(number)
            assert row.number == number
            assert row.tokens_S.shape == (S,)
            tokens += row.tokens_S[row.document_S >= 0].tolist()
        assert sorted(tokens) == all_tokens(store)
    assert rows.real_tokens_per_epoch == store.length_D.sum()
    assert rows.waste == 1 - store.length_D.sum() / (rows.rows_per_epoch * S)
    assert rows.documents == 50


def test_documents_keep_their_mask_name_and_positions() -> None:
    store = make_store()
    rows = source(store)
    row = rows.row(3)
    for index in range(int(row.document_S.max()) + 1):
        place = row.document_S == index
        assert row.positions_S[place].tolist() == list(range(int(place.sum())))
        assert row.loss_mask_S[place].tolist() == [False] + [True] * (int(place.sum()) - 1)
        assert row.tokens_S[place].unique().numel() == 1
    for packed in range(rows.rows_per_epoch):
        for document in rows.row_documents(packed):
            number = int(document.tokens[0])
            assert document.name == f"{'ab'[number >= 25]}.jsonl:{number + 1}"


def test_every_epoch_and_seed_has_its_own_order_of_the_same_rows() -> None:
    store = make_store()
    rows = source(store)
    per = rows.rows_per_epoch
    epochs = [[tuple(rows.row(e * per + i).tokens_S.tolist()) for i in range(per)] for e in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2]), "packed once"
    assert [tuple(source(store, seed=1).row(i).tokens_S.tolist()) for i in range(per)] != epochs[0]


def test_any_thread_any_order_any_start_gives_the_same_rows() -> None:
    store = make_store()
    expected = [source(store).row(number) for number in range(100)]
    shared = source(store)
    numbers = np.random.default_rng(0).permutation(100).tolist()
    with ThreadPoolExecutor(8) as pool:
        for number, row in zip(numbers, pool.map(shared.row, numbers), strict=True):
            assert equal(row, expected[number])


def test_the_fingerprint_changes_with_everything_that_changes_rows() -> None:
    store = make_store()
    same = source(make_store()).fingerprint()
    assert source(store).fingerprint() == same
    shorter = make_store()
    shorter.length_D[3] -= 1
    changed = make_store()
    changed = replace(changed, parts=[changed.parts[0], changed.parts[1]._replace(digest="other")])
    others = [
        source(store, seed=1),
        RowSource(store, np.arange(49), length=S, seed=0),
        RowSource(store, np.arange(50), length=S + 1, seed=0),
        source(shorter),
        source(changed),
        source(store, packed=False),
        source(make_store(seed=1)),
    ]
    assert len({same, *(other.fingerprint() for other in others)}) == 8


def test_unpacked_is_one_document_a_row() -> None:
    store = make_store()
    rows = source(store, packed=False)
    assert rows.rows_per_epoch == 50
    assert [d.name for i in range(50) for d in rows.row_documents(i)] == [store.document(i).name for i in range(50)]
    seen = [rows.row(number) for number in range(50)]
    assert all(row.document_S.max() == 0 for row in seen)
    assert sorted(token for row in seen for token in row.tokens_S[row.document_S >= 0].tolist()) == all_tokens(store)
    assert rows.waste == 1 - store.length_D.sum() / (50 * S)


def test_a_document_given_twice_is_there_twice() -> None:
    store = make_store(4)
    rows = RowSource(store, np.array([0, 1, 1, 3]), length=S, seed=0)
    found = [d.name for i in range(rows.rows_per_epoch) for d in rows.row_documents(i)]
    assert sorted(found) == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:2", "b.jsonl:4"]


def test_no_documents_and_negative_rows_are_faults() -> None:
    with pytest.raises(AssertionError, match="no documents"):
        RowSource(make_store(), np.arange(0), length=S, seed=0)
    with pytest.raises(AssertionError, match="row -1"):
        source(make_store()).row(-1)
