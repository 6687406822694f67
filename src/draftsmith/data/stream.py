"""The endless stream of training rows, with random access: row k is the same row however one gets there.

Documents lie end to end in flat arrays of tokens, one for each data file, usually mapped from disk; a row is a list of
document numbers, fixed by the packer. Epoch e visits the rows in an order drawn from (seed, e) alone. So resuming needs
a number and nothing else, and any worker may ask for any row, in any order, from any thread.

Cost: `row` copies S tokens (a fraction of a millisecond, more if they come from disk); each new epoch is one
permutation of the row numbers. Memory: 20 bytes per document for the store and 8 per document of an epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from draftsmith.blocks.row import Document, Row, pack_row
from draftsmith.data.packing import pack_flat, seeded


class TokenPart(NamedTuple):
    """The tokens of one data file.

    Attributes:
        name: of the file.
        tokens: int32 [total tokens].
        mask: bool [total tokens].
        digest: hash of both.
    """

    name: str
    tokens: np.ndarray
    mask: np.ndarray
    digest: str


@dataclass(frozen=True)
class DocumentStore:
    """All documents of a corpus, D of them.

    Attributes:
        parts: one for each data file.
        part_D: int32, index into `parts`.
        start_D: int64, first token in the part.
        length_D: int32, tokens.
        number_D: int32, line or record of the file.
        owner: what has to live as long as the parts (a temporary folder), or None.
    """

    parts: Sequence[TokenPart]
    part_D: np.ndarray
    start_D: np.ndarray
    length_D: np.ndarray
    number_D: np.ndarray
    owner: Any = None

    def document(self, index: int) -> Document:
        """Document `index` of the store."""
        part = self.parts[self.part_D[index]]
        start = int(self.start_D[index])
        end = start + int(self.length_D[index])
        return Document(
            torch.from_numpy(part.tokens[start:end].astype(np.int64)),
            torch.from_numpy(np.array(part.mask[start:end], dtype=bool)),
            f"{part.name}:{self.number_D[index]}",
        )


class RowSource:
    """Rows of `length` tokens over some documents of a store.

    Attributes:
        rows_per_epoch: rows that hold every document of the epoch.
        real_tokens_per_epoch: tokens of those rows that are not padding.
        length: S.
    """

    def __init__(
        self, store: DocumentStore, documents: np.ndarray, *, length: int, seed: int, packed: bool = True
    ) -> None:
        """Packs `documents` once.

        Args:
            store: where the documents are.
            documents: indices into `store`; one that occurs twice is in every epoch twice.
            length: S.
            seed: of packing and of the order of rows.
            packed: false: one document a row, in the given order before shuffling.

        Raises:
            AssertionError: there is no document, or one is longer than `length`.
        """
        assert documents.size > 0, "a stream of no documents"
        lengths = store.length_D[documents]
        if packed:
            order, self._row_starts = pack_flat(lengths, length, seed)
            self._row_documents = documents[order]
        else:
            assert lengths.max() <= length, f"a document of {lengths.max()} tokens for rows of {length}"
            self._row_documents, self._row_starts = documents, np.arange(documents.size + 1)
        self._store = store
        self._seed = seed
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))
        self.length = length
        self.rows_per_epoch = self._row_starts.size - 1
        self.real_tokens_per_epoch = int(lengths.sum(dtype=np.int64))

    @property
    def waste(self) -> float:
        """Share of the tokens of all rows that is padding."""
        return 1 - self.real_tokens_per_epoch / (self.rows_per_epoch * self.length)

    @property
    def documents(self) -> int:
        """Documents of an epoch."""
        return self._row_documents.size

    def row(self, number: int) -> Row:
        """Row `number` of the stream, counted over all epochs; any thread, any order, always the same.

        Raises:
            AssertionError: `number` is negative.
        """
        return pack_row(number, self.row_documents(self.packed_row(number)), self.length)

    def packed_row(self, number: int) -> int:
        """Which of the packer's rows row `number` of the stream is.

        Raises:
            AssertionError: `number` is negative.
        """
        assert number >= 0, f"row {number}"
        epoch, place = divmod(number, self.rows_per_epoch)
        return int(self._epoch_order(epoch)[place])

    def row_documents(self, row: int) -> list[Document]:
        """The documents of packed row `row` (0 to rows_per_epoch - 1, the packer's order, the same in every epoch)."""
        chosen = self._row_documents[self._row_starts[row] : self._row_starts[row + 1]]
        return [self._store.document(int(index)) for index in chosen]

    def find(self, name: str) -> int | None:
        """The first row of the stream that holds a document of this name ("file:number"), None if no row does."""
        store = self._store
        file, _, number = name.rpartition(":")
        parts = [index for index, part in enumerate(store.parts) if part.name == file]
        if not parts or not number.isdigit():
            return None
        is_it = np.isin(store.part_D, parts) & (store.number_D == int(number))
        places = np.flatnonzero(is_it[self._row_documents])
        if places.size == 0:
            return None
        packed = int(np.searchsorted(self._row_starts, places[0], side="right")) - 1
        return int(np.flatnonzero(self._epoch_order(0) == packed)[0])

    def fingerprint(self) -> str:
        """Hash of everything that decides what `row` returns; a resumed run must find the one it was saved with."""
        store = self._store
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self.length} {self._seed} {self.rows_per_epoch}".encode())
        digest.update(" ".join(part.digest for part in store.parts).encode())
        for array in (self._row_documents, self._row_starts, store.part_D, store.start_D, store.length_D):
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        return digest.hexdigest()

    def _epoch_order(self, epoch: int) -> np.ndarray:
        # Read and replaced as one tuple: two threads may both draw the same order, neither can see half of one.
        known, order = self._order
        if known != epoch:
            order = seeded(self._seed, epoch).permutation(self.rows_per_epoch)
            self._order = (epoch, order)
        return order
