"""Which layers are tapped, and which embedding row is MASK.

Taps: outputs of evenly spaced layers, from layer 1 to three before the end. MASK: the embedding is frozen, so MASK has
to be a row that exists and that no text uses. Both are recorded with the drafter, because serving must use the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftsmith.errors import UserError

_SPARE = re.compile(r"reserved|unused|placeholder|extra|dummy|control_|\[pad\d+\]", re.IGNORECASE)


@dataclass(frozen=True)
class MaskToken:
    """An embedding row that stands for "not known yet".

    Attributes:
        id: row of the target's embedding.
        rule: why this one ("configured", "tokenizer.mask_token", "padded row", "reserved token", "special token").
    """

    id: int
    rule: str


def choose_taps(layers: int, count: int) -> tuple[int, ...]:
    """Evenly spaced taps: one → the middle layer, else `round(1 + i·(layers-4)/(count-1))`, halves to even.

    Raises:
        UserError: the target is too shallow for that many different taps.
    """
    assert count >= 1
    taps = (layers // 2,) if count == 1 else tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))
    if len(set(taps)) != count or min(taps) < 0 or max(taps) >= layers:
        fix = "set drafter.taps to fewer layers, e.g. " + str(list(range(min(count, layers))))
        raise UserError(f"a target of {layers} layers has no {count} evenly spaced taps", where="drafter.taps", fix=fix)
    return taps


def check_taps(taps: Sequence[int], layers: int) -> None:
    """Refuses taps that no target of `layers` layers can deliver.

    Raises:
        UserError: none at all, out of range, or named twice.
    """
    if not taps:
        raise UserError("names no layer", where="drafter.taps", fix="leave it out to choose taps by rule")
    for tap in taps:
        if not 0 <= tap < layers:
            fix = f"the target's layers are 0..{layers - 1}"
            raise UserError(f"layer {tap} is out of range", where="drafter.taps", fix=fix)
        if list(taps).count(tap) > 1:
            raise UserError(f"layer {tap} is named twice", where="drafter.taps", fix="name every layer once")


def choose_mask_token(
    tokenizer: Any, vocab_rows: int, used: Tensor | None = None, configured: int | None = None
) -> MaskToken:
    """The MASK row: as configured, else the tokenizer's mask token, else a row past the vocabulary, else a spare token.

    Spare tokens are added tokens of the tokenizer that have no role and do not appear in its chat template: names that
    say "reserved" or the like first, then special tokens, lowest id first.

    Args:
        tokenizer: of the target.
        vocab_rows: V, rows of the target's embedding.
        used: bool [≤ V], true for tokens that occur in the data; None: not known yet, check later.
        configured: `drafter.mask_token_id`.

    Raises:
        UserError: `configured` is outside the embedding or occurs in the data, or no row is free.
    """
    if configured is not None:
        check_mask_token(configured, vocab_rows, used)
        return MaskToken(configured, "configured")

    def free(row: int | None) -> bool:
        return row is not None and 0 <= row < vocab_rows and not _occurs(row, used)

    if free(tokenizer.mask_token_id):
        return MaskToken(int(tokenizer.mask_token_id), "tokenizer.mask_token")
    past = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))
    padded = next((row for row in range(past, vocab_rows) if free(row)), None)
    if padded is not None:
        return MaskToken(padded, "padded row")
    for row, rule in _spare_tokens(tokenizer):
        if free(row):
            return MaskToken(row, rule)
    raise UserError(
        "no embedding row is free for MASK: no mask token, no padded row, and every special token occurs in the data",
        where="drafter.mask_token_id",
        fix="set it to the id of a token that your data never uses",
    )


def check_mask_token(row: int, vocab_rows: int, used: Tensor | None = None) -> None:
    """Refuses a MASK that the embedding lacks or that the data contains.

    Raises:
        UserError: see above.
    """
    where, fix = "drafter.mask_token_id", "leave it out to choose one by rule"
    if not 0 <= row < vocab_rows:
        raise UserError(f"{row} is outside the target's {vocab_rows} embedding rows", where=where, fix=fix)
    if _occurs(row, used):
        raise UserError(f"token {row} occurs in the data, so it cannot stand for MASK", where=where, fix=fix)


def _occurs(row: int, used: Tensor | None) -> bool:
    return used is not None and row < used.numel() and bool(used[row])


def _spare_tokens(tokenizer: Any) -> list[tuple[int, str]]:
    """(id, rule) of added tokens without a role, most clearly unused first."""
    roles = {
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
    }
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else str(tokenizer.chat_template)
    reserved, special = [], []
    for row, token in sorted(tokenizer.added_tokens_decoder.items()):
        if row in roles or token.content in template:
            continue
        if _SPARE.search(token.content):
            reserved.append((row, "reserved token"))
        elif token.special:
            special.append((row, "special token"))
    return reserved + special
