"""The endless stream of training rows, with random access: row k is the same row however one gets there.

Documents lie end to end in one flat array of tokens; a row is a list of document numbers, fixed by the packer. Epoch e
visits the rows in an order drawn from (seed, e) alone. So resuming needs a number and nothing else, and any worker may
ask for any row, in any order, from any thread.

Cost: `row` copies S tokens (a fraction of a millisecond); each new epoch is one permutation of the row numbers.
Memory: 5 bytes per token plus 24 per document.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from draftsmith.blocks.row import Document, Row, pack_row
from draftsmith.data.packing import pack, seeded


@dataclass(frozen=True)
class DocumentStore:
    """All documents of a corpus, flat.

    Attributes:
        tokens: int32 [total tokens].
        loss_mask: bool [total tokens].
        starts: int64 [documents + 1]; document d is `starts[d]:starts[d+1]`.
        file_of: int32 [documents] index into `files`.
        line_of: int32 [documents].
        files: names of the data files.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    starts: np.ndarray
    file_of: np.ndarray
    line_of: np.ndarray
    files: tuple[str, ...]

    def document(self, index: int) -> Document:
        """Document `index` of the store."""
        start, end = int(self.starts[index]), int(self.starts[index + 1])
        return Document(
            torch.from_numpy(self.tokens[start:end].astype(np.int64)),
            torch.from_numpy(self.loss_mask[start:end].copy()),
            f"{self.files[self.file_of[index]]}:{self.line_of[index]}",
        )


class RowSource:
    """Rows of `length` tokens over some documents of a store.

    Attributes:
        rows_per_epoch: rows that hold every document once.
        real_tokens_per_epoch: tokens of those rows that are not padding.
        length: S.
    """

    def __init__(self, store: DocumentStore, documents: np.ndarray, *, length: int, seed: int) -> None:
        """Packs `documents` (indices into `store`) once.

        Raises:
            AssertionError: there is no document, or one is longer than `length`.
        """
        assert documents.size > 0, "a stream of no documents"
        lengths = np.diff(store.starts)[documents]
        rows = pack(lengths, length, seed)
        self._store = store
        self._seed = seed
        self._row_documents = documents[np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])]
        self._row_starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))
        self.length = length
        self.rows_per_epoch = len(rows)
        self.real_tokens_per_epoch = int(lengths.sum())

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
        assert number >= 0, f"row {number}"
        epoch, place = divmod(number, self.rows_per_epoch)
        return pack_row(number, self.row_documents(int(self._epoch_order(epoch)[place])), self.length)

    def row_documents(self, row: int) -> list[Document]:
        """The documents of packed row `row` (0 to rows_per_epoch - 1, the packer's order, the same in every epoch)."""
        chosen = self._row_documents[self._row_starts[row] : self._row_starts[row + 1]]
        return [self._store.document(int(index)) for index in chosen]

    def fingerprint(self) -> str:
        """Hash of everything that decides what `row` returns; a resumed run must find the one it was saved with."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self.length} {self._seed} {self.rows_per_epoch}".encode())
        store = self._store
        for array in (
            self._row_documents,
            self._row_starts,
            store.starts,
            store.tokens,
            store.loss_mask,
        ):
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        return digest.hexdigest()

    def _epoch_order(self, epoch: int) -> np.ndarray:
        # Read and replaced as one tuple: two threads may both draw the same order, neither can see half of one.
        known, order = self._order
        if known != epoch:
            order = seeded(self._seed, epoch).permutation(self.rows_per_epoch)
            self._order = (epoch, order)
        return order
