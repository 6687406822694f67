"""Tap and mask-token rules on cases worked out by hand."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_tokenizer

from draftsmith.errors import UserError
from draftsmith.target.taps import MaskToken, check_mask_token, check_taps, choose_mask_token, choose_taps


@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (30, 5, (1, 8, 14, 20, 27)),  # 7.5 → 8 and 20.5 → 20: halves go to even
        (28, 5, (1, 7, 13, 19, 25)),
        (12, 3, (1, 5, 9)),
        (36, 1, (18,)),
        (5, 2, (1, 2)),
        (64, 6, (1, 13, 25, 37, 49, 61)),
    ],
)
def test_tap_rule(layers: int, count: int, taps: tuple[int, ...]) -> None:
    assert choose_taps(layers, count) == taps


@pytest.mark.parametrize(("layers", "count"), [(6, 5), (4, 2), (3, 3)])
def test_too_shallow_a_target(layers: int, count: int) -> None:
    with pytest.raises(UserError, match=r"drafter\.taps"):
        choose_taps(layers, count)


@pytest.mark.parametrize(("taps", "message"), [((3, 9), "out of range"), ((-1,), "out of range"), ((2, 2), "twice")])
def test_bad_taps(taps: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_taps(taps, 9)


def test_good_taps() -> None:
    check_taps((0, 8), 9)


def used(*ids: int, rows: int = 320) -> torch.Tensor:
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[list(ids)] = True
    return mask


def test_mask_rules_in_order() -> None:
    with_mask = tiny_tokenizer(mask_token="<|spare|>")
    plain = tiny_tokenizer()
    rows = len(plain)
    assert with_mask.mask_token_id == 3
    assert choose_mask_token(with_mask, rows + 9) == MaskToken(3, "tokenizer.mask_token")
    assert choose_mask_token(with_mask, rows + 9, used(3)) == MaskToken(rows, "padded row")
    assert choose_mask_token(plain, rows + 9) == MaskToken(rows, "padded row")
    assert choose_mask_token(plain, rows + 9, used(rows)) == MaskToken(rows + 1, "padded row")
    assert choose_mask_token(plain, rows) == MaskToken(4, "reserved token")
    assert choose_mask_token(plain, rows, used(4)) == MaskToken(5, "reserved token")
    # 1 stands in the chat template and 2 ends answers: neither may be MASK, although neither was seen.
    assert choose_mask_token(plain, rows, used(4, 5)) == MaskToken(0, "special token")
    assert choose_mask_token(plain, rows, used(0, 4, 5)) == MaskToken(3, "special token")
    with pytest.raises(UserError, match="no embedding row is free"):
        choose_mask_token(plain, rows, used(0, 3, 4, 5))


def test_configured_mask() -> None:
    tokenizer = tiny_tokenizer()
    assert choose_mask_token(tokenizer, 320, used(7), configured=8) == MaskToken(8, "configured")
    with pytest.raises(UserError, match="occurs in the data"):
        choose_mask_token(tokenizer, 320, used(7), configured=7)
    with pytest.raises(UserError, match="outside the target's 320"):
        choose_mask_token(tokenizer, 320, configured=320)


def test_a_used_vector_shorter_than_the_embedding() -> None:
    check_mask_token(310, 320, used(rows=300))
    with pytest.raises(UserError, match="occurs"):
        check_mask_token(299, 320, used(299, rows=300))
