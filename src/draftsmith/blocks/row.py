"""The two things that everything else passes around: a `Document` and a packed `Row`.

S: context tokens of a row. Documents lie one behind the other, padding (if any) at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """One tokenised conversation.

    Attributes:
        tokens: int64 [L].
        loss_mask: bool [L]; true where the token was written by the assistant.
        name: where it came from ("chats.jsonl:17"), for messages to people.
    """

    tokens: Tensor
    loss_mask: Tensor
    name: str = ""

    def __len__(self) -> int:
        return self.tokens.numel()


@dataclass(frozen=True)
class Row:
    """Documents packed into S tokens, on the CPU.

    Attributes:
        number: position in the stream; decides which worker handles it.
        tokens_S: int64, padding is 0.
        loss_mask_S: bool, false on padding.
        document_S: int32 index of the document within the row, -1 on padding.
        positions_S: int64, restarts at 0 in every document; 0 on padding.
    """

    number: int
    tokens_S: Tensor
    loss_mask_S: Tensor
    document_S: Tensor
    positions_S: Tensor

    @property
    def real_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.document_S >= 0).sum())


def pack_row(number: int, documents: list[Document], length: int) -> Row:
    """Lays `documents` one behind the other into a row of `length` tokens.

    Raises:
        AssertionError: they do not fit; the packer has to see to that.
    """
    total = sum(len(document) for document in documents)
    assert total <= length, f"{total} tokens packed into a row of {length}"
    tokens = torch.zeros(length, dtype=torch.int64)
    loss_mask = torch.zeros(length, dtype=torch.bool)
    index = torch.full((length,), -1, dtype=torch.int32)
    positions = torch.zeros(length, dtype=torch.int64)
    start = 0
    for number_in_row, document in enumerate(documents):
        end = start + len(document)
        tokens[start:end] = document.tokens
        loss_mask[start:end] = document.loss_mask
        index[start:end] = number_in_row
        positions[start:end] = torch.arange(len(document))
        start = end
    return Row(number, tokens, loss_mask, index, positions)
