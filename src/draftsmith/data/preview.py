"""One training row as people can see it: which tokens are taught, where anchors stand, what a block is asked.

`picture_row` gathers the facts, `to_terminal` and `to_html` draw them. Everything that comes from data is made harmless
first: control and direction characters are replaced by visible ones (a token may hold a terminal's escape sequence, or
half of one), and the page escapes all text. The page is one file without scripts and loads nothing.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.style import Style
from rich.text import Text

from draftsmith.blocks import Document, DraftBatch, LayerKind, Row
from draftsmith.errors import UserError

_NEWLINE = "↵"
_CONTEXT_CELLS = 28  # context tokens left of the anchor that the picture of the mask shows


@dataclass(frozen=True)
class TokenView:
    """One token of the row.

    Attributes:
        text: what it decodes to, harmless.
        id: in the vocabulary.
        index: in the row.
        position: in its document.
        taught: the loss mask.
        anchor: a block is drafted from it.
    """

    text: str
    id: int
    index: int
    position: int
    taught: bool
    anchor: bool


@dataclass(frozen=True)
class SlotView:
    """One slot of the block that is shown.

    Attributes:
        slot: 0 to B - 1.
        position: of the slot in the document.
        input: the text fed into it.
        label: the text that it is taught, None where it is taught nothing.
        weight: of its loss, 0 where it is taught nothing.
        sees: per layer kind of `RowPicture.kinds`: the context indices [first, last) and the slots [first, last).
    """

    slot: int
    position: int
    input: str
    label: str | None
    weight: float
    sees: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class RowPicture:
    """Everything that is shown of a row.

    Attributes:
        number: of the row in the stream.
        length: S.
        names: where each document came from.
        documents: their tokens.
        block: slots of one block; empty if the row has no anchor.
        anchor: index of that block's anchor in the row, -1 without one.
        anchors: how many the row has, and N.
        kinds: the drafter's kinds of layers, for people.
    """

    number: int
    length: int
    names: tuple[str, ...]
    documents: tuple[tuple[TokenView, ...], ...]
    block: tuple[SlotView, ...]
    anchor: int
    anchors: tuple[int, int]
    kinds: tuple[str, ...]

    @property
    def padding(self) -> int:
        """Tokens of the row that belong to no document."""
        return self.length - sum(map(len, self.documents))


def picture_row(
    row: Row, documents: Sequence[Document], batch: DraftBatch, tokenizer: Any, *, block: int | None = None
) -> RowPicture:
    """What training sees of a row.

    Args:
        row: packed from `documents`.
        batch: its draft work.
        tokenizer: of the target.
        block: which of the row's blocks is shown; None: one from the middle.

    Raises:
        UserError: the row has no such block.
    """
    valid = int(batch.valid_N.sum())
    anchors = {int(index) for index in batch.anchors_N[:valid]}
    texts = _Texts(tokenizer)
    shown, start = [], 0
    for document in documents:
        ids, taught = document.tokens.tolist(), document.loss_mask.tolist()
        shown.append(
            tuple(
                TokenView(texts(token), token, start + i, i, taught[i], start + i in anchors)
                for i, token in enumerate(ids)
            )
        )
        start += len(ids)
    kinds = tuple(batch.intervals)
    if block is not None and not 0 <= block < valid:
        raise UserError(f"the row has {valid} blocks, counted from 0", where="--block", fix="name one of them")
    chosen = None if valid == 0 else valid // 2 if block is None else block
    return RowPicture(
        number=row.number,
        length=row.tokens_S.numel(),
        names=tuple(document.name for document in documents),
        documents=tuple(shown),
        block=() if chosen is None else _block(batch, kinds, chosen, row.tokens_S.numel(), texts),
        anchor=-1 if chosen is None else int(batch.anchors_N[chosen]),
        anchors=(valid, batch.anchors_N.numel()),
        kinds=tuple(_describe(kind) for kind in kinds),
    )


def _block(
    batch: DraftBatch, kinds: Sequence[LayerKind], number: int, length: int, texts: _Texts
) -> tuple[SlotView, ...]:
    size = batch.inputs_Q.numel() // batch.anchors_N.numel()
    first = number * size
    taught: dict[int, tuple[int, float]] = {}
    filled = batch.slots_MC.reshape(-1).tolist()
    for slot, label, weight in zip(
        filled, batch.labels_MC.reshape(-1).tolist(), batch.weights_MC.reshape(-1).tolist(), strict=True
    ):
        if slot > 0:
            taught[slot] = label, weight
    views = []
    for slot in range(size):
        query = first + slot
        sees = []
        for kind in kinds:
            low, high, own_low, own_high = (int(part[query]) for part in batch.intervals[kind].tensors())
            sees.append((low, high, own_low - length - first, own_high - length - first))
        label, weight = taught.get(query, (None, 0.0))
        views.append(
            SlotView(
                slot=slot,
                position=int(batch.block_positions_Q[query]),
                input="MASK" if slot else texts(int(batch.inputs_Q[query])),
                label=None if label is None else texts(label),
                weight=weight,
                sees=tuple(sees),
            )
        )
    return tuple(views)


def _describe(kind: LayerKind) -> str:
    reach = "full attention" if kind.window is None else f"sliding attention, window {kind.window}"
    return f"{reach}, {'causal' if kind.causal else 'bidirectional'} in the block"


class _Texts:
    """Token ids to harmless text, each looked up once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if token not in self._known:
            text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if "\ufffd" in text or not text:  # a part of a character, or nothing by itself
                text = str(self._tokenizer.convert_ids_to_tokens(token))
            self._known[token] = harmless(text)
        return self._known[token]


def harmless(text: str) -> str:
    """Text in which every character takes a place of its own and does nothing: "\\x1b" → "␛", U+202E → "⟨202E⟩"."""
    return "".join(_harmless(character) for character in text)


def _harmless(character: str) -> str:
    code = ord(character)
    if character == "\n":
        return _NEWLINE
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return f"⟨{code:04X}⟩"
    return character


# -- terminal ------------------------------------------------------------------------------------------------------

_TAUGHT = Style(color="black", bgcolor="green3")
_ANCHOR = Style(color="black", bgcolor="gold1", bold=True)
_SEEN = Style(dim=True)
_HEADING = Style(bold=True)


def to_terminal(picture: RowPicture) -> Text:
    """The row and one block, coloured."""
    out = Text(no_wrap=False)
    out.append(_title(picture) + "\n", _HEADING)
    out.append("untaught", _SEEN).append("  ").append("taught", _TAUGHT).append("  ").append("anchor", _ANCHOR)
    out.append("\n")
    for name, tokens in zip(picture.names, picture.documents, strict=True):
        out.append(f"\n{harmless(name)}: {_counts(tokens)}\n", _HEADING)
        for token in tokens:
            style = _ANCHOR if token.anchor else _TAUGHT if token.taught else _SEEN
            out.append(_broken(token.text), style)
        out.append("\n")
    if picture.block:
        out.append(f"\nthe block drafted from token {picture.anchor}\n", _HEADING)
        out.append("\n".join(_block_lines(picture)) + "\n")
    return out


def to_plain(picture: RowPicture) -> str:
    """The row and one block without colours: taught tokens in [ ], anchors in { }, the rest as it is."""
    lines = [_title(picture)]
    for name, tokens in zip(picture.names, picture.documents, strict=True):
        lines.append(f"\n{harmless(name)}: {_counts(tokens)}")
        lines.append("".join(map(_marked, tokens)))
    if picture.block:
        lines += [f"\nthe block drafted from token {picture.anchor}", *_block_lines(picture)]
    return "\n".join(lines)


def _marked(token: TokenView) -> str:
    opens, closes = ("{", "}") if token.anchor else ("[", "]") if token.taught else ("", "")
    return _broken(f"{opens}{token.text}{closes}")


def _broken(text: str) -> str:
    """The text with its lines broken where it says so."""
    return text.replace(_NEWLINE, f"{_NEWLINE}\n")


def _title(picture: RowPicture) -> str:
    used, most = picture.anchors
    count = len(picture.documents)
    return (
        f"row {picture.number}: {count} document{'' if count == 1 else 's'}, {picture.length - picture.padding} of "
        f"{picture.length} tokens, {used} of {most} anchors"
    )


def _counts(tokens: Sequence[TokenView]) -> str:
    return (
        f"{len(tokens)} tokens, {sum(token.taught for token in tokens)} taught, "
        f"{sum(token.anchor for token in tokens)} anchors"
    )


def _block_lines(picture: RowPicture) -> list[str]:
    lines = ["slot  position  weight  input → label"]
    for view in picture.block:
        label = "not taught" if view.label is None else repr_text(view.label)
        lines.append(f"{view.slot:>4}  {view.position:>8}  {view.weight:>6.3f}  {repr_text(view.input)} → {label}")
    for number, kind in enumerate(picture.kinds):
        lines.append(f"{kind}:")
        lines += [f"  {words}" for words in _sees(picture, number)]
    return lines


def _sees(picture: RowPicture, kind: int) -> list[str]:
    """What the slots see, slots that see the same together."""
    groups: list[tuple[list[int], tuple[int, int, int, int]]] = []
    for view in picture.block:
        if groups and groups[-1][1] == view.sees[kind]:
            groups[-1][0].append(view.slot)
        else:
            groups.append(([view.slot], view.sees[kind]))
    lines = []
    for slots, (low, high, own_low, own_high) in groups:
        who = f"slot {slots[0]} sees" if len(slots) == 1 else f"slots {slots[0]} to {slots[-1]} see"
        context = f"tokens {low} to {high - 1}" if high > low else "no token before the block"
        lines.append(f"{who} {context} and slots {own_low} to {own_high - 1}")
    return lines


def repr_text(text: str) -> str:
    """In quotes, so that blanks at the ends show."""
    return f"“{text}”"


# -- page ----------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --ink: #1d1f21; --paper: #fff; --line: #d5d8dc; --dim: #687078;
  --taught: #c9efc9; --anchor: #ffd75e; --cell: #2f6f9f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181a; --line: #3a3f44; --dim: #9aa2aa;
  --taught: #1f4d2b; --anchor: #8a6a00; --cell: #6fb1e0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .3rem; } h2 small { color: var(--dim);
  font-weight: normal; }
.tokens { font: 13px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid
  var(--line); border-radius: 6px; padding: .6rem .8rem; }
.tokens span { border-radius: 3px; padding: .1rem 0; color: var(--dim); box-shadow: inset 0 0 0 .5px var(--line); }
.tokens .taught, .legend .taught { background: var(--taught); color: var(--ink); }
.tokens .anchor, .legend .anchor { background: var(--anchor); color: var(--ink); font-weight: 600; }
.tokens .shown { outline: 2px solid var(--cell); }
.legend span { padding: .1rem .5rem; margin-right: .6rem; border-radius: 3px; border: 1px solid var(--line); }
table { border-collapse: collapse; font: 13px ui-monospace, monospace; } th, td { padding: .15rem .7rem; text-align:
  left; border-bottom: 1px solid var(--line); white-space: pre-wrap; } td.number { text-align: right; }
.untaught td { color: var(--dim); }
.mask { border-collapse: separate; border-spacing: 1px; overflow-x: auto; display: block; }
.mask td { width: 13px; height: 13px; padding: 0; border: 0; background: var(--line); opacity: .45; }
.mask td.on { background: var(--cell); opacity: 1; } .mask td.gap { background: none; width: 10px; }
.mask th { border: 0; padding: 0 .4rem 0 0; font-weight: normal; color: var(--dim); font-size: 12px;
  white-space: nowrap; }
"""


def to_html(pictures: Sequence[RowPicture], title: str, facts: Sequence[str] = ()) -> str:
    """A page of rows.

    Args:
        pictures: the rows.
        title: heading of the page.
        facts: lines above the rows, e.g. the report of the data.
    """
    escape = html.escape
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{escape(harmless(title))}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(harmless(title))}</h1>",
        *(f"<p>{escape(harmless(fact))}</p>" for fact in facts),
        '<p class="legend"><span>untaught</span><span class="taught">taught</span><span class="anchor">anchor</span> '
        f"{_NEWLINE} stands for a line break; hover over a token for its id and position.</p>",
    ]
    for picture in pictures:
        parts.append(f"<h2>{escape(_title(picture))}</h2>")
        for name, tokens in zip(picture.names, picture.documents, strict=True):
            parts.append(f"<h2>{escape(harmless(name))} <small>{escape(_counts(tokens))}</small></h2>")
            parts.append('<div class="tokens">' + "".join(_span(token, picture.anchor) for token in tokens) + "</div>")
        if picture.block:
            parts += _block_html(picture)
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def _span(token: TokenView, shown: int) -> str:
    kinds = [kind for kind, is_so in (("taught", token.taught), ("anchor", token.anchor)) if is_so]
    if token.index == shown:
        kinds.append("shown")
    where = html.escape(f"id {token.id}, position {token.position}, token {token.index} of the row")
    return f'<span class="{" ".join(kinds)}" title="{where}">{html.escape(_broken(token.text))}</span>'


def _block_html(picture: RowPicture) -> list[str]:
    escape = html.escape
    parts = [
        f"<h2>One block, drafted from token {picture.anchor} <small>outlined above</small></h2>",
        "<table><tr><th>slot</th><th>position</th><th>input</th><th>label</th><th>weight</th></tr>",
    ]
    for view in picture.block:
        row = "untaught" if view.label is None else ""
        label = "not taught" if view.label is None else repr_text(view.label)
        parts.append(
            f'<tr class="{row}"><td class="number">{view.slot}</td><td class="number">{view.position}</td>'
            f"<td>{escape(repr_text(view.input))}</td><td>{escape(label)}</td>"
            f'<td class="number">{view.weight:.3f}</td></tr>'
        )
    parts.append("</table>")
    for number, kind in enumerate(picture.kinds):
        parts.append(f"<h2>What the slots see <small>{escape(kind)}</small></h2>")
        parts.append("<p>" + "<br>".join(escape(line) for line in _sees(picture, number)) + "</p>")
        parts.append(_mask_html(picture, number))
    return parts


def _mask_html(picture: RowPicture, kind: int) -> str:
    """The mask of the block: the last context tokens and the anchor's own place on the left, the slots on the right."""
    left = list(range(max(0, picture.anchor - _CONTEXT_CELLS), picture.anchor + 2))
    rows = []
    for view in picture.block:
        low, high, own_low, own_high = view.sees[kind]
        context = "".join(_cell(low <= index < high) for index in left)
        own = "".join(_cell(own_low <= slot < own_high) for slot in range(len(picture.block)))
        rows.append(f'<tr><th>slot {view.slot}</th>{context}<td class="gap"></td>{own}</tr>')
    note = f"left: tokens {left[0]} to {left[-1]} of the row, the anchor is {picture.anchor}; right: the block's slots"
    return f'<table class="mask">{"".join(rows)}</table><p><small>{note}</small></p>'


def _cell(on: bool) -> str:
    return '<td class="on"></td>' if on else "<td></td>"
