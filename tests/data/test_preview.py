"""The picture of a row: the facts against the batch itself, and text that can do no harm."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from toy_tokenizer import build_tokenizer

from draftsmith.blocks import Document, DraftBatch, LayerKind, Row, make_draft_batch, pack_row
from draftsmith.blocks.rule import dense_mask
from draftsmith.data.preview import RowPicture, harmless, picture_row, to_html, to_plain, to_terminal
from draftsmith.errors import UserError

S, N, B = 96, 9, 4
KINDS = (LayerKind(), LayerKind(window=5, causal=True))
EVIL = "<script>alert(1)</script> \x1b[31m\u202e &amp; \"'\x00"


def made(tokenizer: Any, answers: list[str], anchors: int = N) -> tuple[Row, list[Document], DraftBatch]:
    documents = []
    for number, answer in enumerate(answers):
        asked = tokenizer("<|im_start|>user\nHi <b>\n", add_special_tokens=False)["input_ids"]
        said = tokenizer(answer, add_special_tokens=False)["input_ids"]
        mask = torch.arange(len(asked) + len(said)) >= len(asked)
        documents.append(Document(torch.tensor(asked + said), mask, f"<i>{number}</i>.jsonl:{number + 1}"))
    row = pack_row(7, documents, S)
    batch = make_draft_batch(
        row,
        anchors=anchors,
        block_size=B,
        mask_token_id=1,
        slot_weights_B=torch.tensor([0.0, 1.0, 0.5, 0.25]),
        chunk=8,
        kinds=KINDS,
        seed=(0, 7),
        with_tiles=False,
    )
    return row, documents, batch


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def picture(tokenizer: Any, block: int | None = None) -> tuple[RowPicture, Row, DraftBatch]:
    row, documents, batch = made(tokenizer, ["hello world again", "a Æ b c"])
    return picture_row(row, documents, batch, tokenizer, block=block), row, batch


def test_a_block_that_the_row_lacks_is_not_another_one(tokenizer: Any) -> None:
    _, _, batch = picture(tokenizer)
    valid = int(batch.valid_N.sum())
    shown, _, _ = picture(tokenizer, valid - 1)
    assert shown.anchor == int(batch.anchors_N[valid - 1])
    with pytest.raises(UserError, match=f"--block: the row has {valid} blocks, counted from 0"):
        picture(tokenizer, valid)


def test_tokens_are_those_of_the_row(tokenizer: Any) -> None:
    shown, row, batch = picture(tokenizer)
    tokens = [token for document in shown.documents for token in document]
    real = row.document_S >= 0
    assert [token.id for token in tokens] == row.tokens_S[real].tolist()
    assert [token.taught for token in tokens] == row.loss_mask_S[real].tolist()
    assert [token.position for token in tokens] == row.positions_S[real].tolist()
    assert [token.index for token in tokens] == list(range(len(tokens)))
    assert [token.index for token in tokens if token.anchor] == batch.anchors_N[batch.valid_N].tolist()
    assert shown.padding == S - len(tokens)
    assert shown.anchors == (int(batch.valid_N.sum()), N)


@pytest.mark.parametrize("block", range(N))
def test_the_block_is_that_of_the_batch(tokenizer: Any, block: int) -> None:
    shown, _, batch = picture(tokenizer, block)
    texts = {token.index: token.text for document in shown.documents for token in document}
    assert shown.anchor == int(batch.anchors_N[block])
    masks = [dense_mask(batch.intervals[kind], S) for kind in KINDS]
    taught = set(batch.slots_MC.reshape(-1).tolist())
    for view in shown.block:
        query = block * B + view.slot
        assert view.position == int(batch.block_positions_Q[query])
        is_taught = view.slot > 0 and query in taught
        assert view.label == (texts[shown.anchor + view.slot] if is_taught else None)
        assert (view.weight > 0) == is_taught
        assert view.input == ("MASK" if view.slot else texts[shown.anchor])
        for mask, (low, high, own_low, own_high) in zip(masks, view.sees, strict=True):
            assert mask[query].nonzero()[:, 0].tolist() == [
                *range(low, high),
                *(S + block * B + slot for slot in range(own_low, own_high)),
            ]


def test_words_say_the_same(tokenizer: Any) -> None:
    shown, _, _ = picture(tokenizer, 2)
    plain, coloured = to_plain(shown), to_terminal(shown).plain
    assert plain.startswith(f"row 7: 2 documents, {S - shown.padding} of {S} tokens, 9 of 9 anchors")
    assert plain.count("{") == 9
    taught = sum(token.taught for document in shown.documents for token in document)
    assert plain.count("[") == taught - 9
    assert f"slots 0 to 3 see tokens {shown.block[0].sees[0][0]} to {shown.anchor - 1} and slots 0 to 3" in plain
    assert "sliding attention, window 5, causal in the block:" in coloured
    assert "hello" in plain.replace("}{", "").replace("][", "").replace("]{", "").replace("}[", "")


def test_a_row_without_anchors(tokenizer: Any) -> None:
    row, documents, batch = made(tokenizer, [""])
    shown = picture_row(row, documents, batch, tokenizer)
    assert (shown.block, shown.anchor) == ((), -1)
    assert "block" not in to_plain(shown)
    assert to_plain(shown).startswith(f"row 7: 1 document, {S - shown.padding} of {S} tokens, 0 of ")
    assert "<table" not in to_html([shown], "t")


class Page(HTMLParser):
    """Text and elements as a browser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_nothing_in_the_data_becomes_markup_or_moves_the_terminal(tokenizer: Any) -> None:
    row, documents, batch = made(tokenizer, [EVIL])
    shown = picture_row(row, documents, batch, tokenizer)
    page = to_html([shown], EVIL, [EVIL])
    parsed = Page(page)
    allowed = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "span", "small", "div", "br"}
    assert set(parsed.elements) <= allowed | {"table", "tr", "th", "td"}
    assert parsed.words.count(harmless(EVIL)) == 3  # title, heading, fact: whole, as text
    text = "".join(parsed.words)
    assert "<script>alert(1)</script>" in text
    assert "<i>0</i>.jsonl:1" in text
    assert "alert(1)</script>" not in page
    for output in (page, to_plain(shown), to_terminal(shown).plain):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e\u2028]", output)
    assert "src=" not in page.replace("style-src", "")
    assert "http-equiv" in page
    assert html.escape("default-src 'none'", quote=False) in page


def test_every_character_takes_a_visible_place() -> None:
    assert harmless("a\n\x1b\x7f\u202e\u200b é👍🏽") == "a↵␛␡⟨202E⟩⟨200B⟩ é👍🏽"
    assert harmless("\x9b1m\ufeff") == "⟨009B⟩1m⟨FEFF⟩"


def test_parts_of_characters_show_as_the_tokenizer_names_them(tokenizer: Any) -> None:
    row, documents, batch = made(tokenizer, ["漢"])
    shown = picture_row(row, documents, batch, tokenizer)
    assert all("\ufffd" not in token.text and token.text for document in shown.documents for token in document)
