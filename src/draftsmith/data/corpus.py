"""From data files to a stream of training rows and a held-out one.

Every file becomes a table of tokens (`tables`, made once and kept on disk). Here the tables are held against S, the
held-out share is split off, weights are applied, and each part is packed once. Whatever cannot be used is reported with
its place and reason; it is an error only when nothing is left.

Held out is decided by the content of a conversation alone: its 64-bit hash falls below the share or it does not.
Reordering, adding or removing lines moves no other conversation across, duplicates stay together, and so do all
documents of one conversation. If hashing leaves one side of a small corpus empty, the conversation with the smallest
(largest) hash goes there, which order does not change either.

A weight w gives every conversation of its entry ⌊w⌋ places in an epoch, and one more to a share of them that is chosen
by content too, the same in every epoch. Held-out rows know no weights.

Cost: tokenising new files, then one pass over the masks and the packing, about two seconds a million documents.
Memory: about 60 bytes a document while it is made and 30 afterwards; tokens stay on disk.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftsmith.config import DataConfig, DataSource
from draftsmith.data.places import DataFile, as_sources, find_files
from draftsmith.data.problems import UnusableData
from draftsmith.data.report import (
    REFUSED,
    TRUNCATED,
    UNTAUGHT,
    DataReport,
    Incident,
    Incidents,
    PartReport,
    Spread,
)
from draftsmith.data.stream import DocumentStore, RowSource, TokenPart
from draftsmith.data.tables import TableCache, TokenTable
from draftsmith.data.template import Tokeniser
from draftsmith.errors import UserError, reason_of

TOO_LONG = "longer than a row"
HELD_OUT_TWIN = "is in the held-out files as well"

_PIECE = 1 << 23  # tokens whose masks are counted at one time
_FRACTION_MIX = np.uint64(0x9E3779B97F4A7C15)  # any odd number: the share of a weight is not the held-out share again


class NothingUsable(UnusableData):
    """Nothing is left to train on; `incidents` says of every conversation why."""

    def __init__(self, what: str, where: str, incidents: Incidents) -> None:
        super().__init__(what, where=where)
        self.incidents = incidents


@dataclass(frozen=True)
class Corpus:
    """Tokenised data, ready to train on.

    Attributes:
        train: stream of training rows.
        held_out: stream of held-out rows, None if there is no held-out share.
        report: what became of every conversation.
        used_ids: bool [at least the tokenizer's length]; true for ids that occur in the data, held-out data and what
            was cut off included.
    """

    train: RowSource
    held_out: RowSource | None
    report: DataReport
    used_ids: np.ndarray


def prepare_corpus(
    data: DataConfig,
    tokenizer: Any,
    *,
    length: int,
    seed: int,
    block_size: int,
    stop_ids: Sequence[int] = (),
    progress: Callable[[int], None] | None = None,
) -> Corpus:
    """Reads, tokenises, splits and packs.

    Args:
        data: files, held-out share, template, policy for what is too long.
        tokenizer: the target's Hugging Face tokenizer.
        length: S, tokens of a row.
        seed: of packing and of the order of rows; the held-out share does not depend on it.
        block_size: B; only the report's slots per anchor depend on it.
        stop_ids: see `Tokeniser`.
        progress: called with the number of conversations read so far, after every batch.

    Raises:
        NothingUsable: no conversation is left.
        UnusableData: a file is empty or broken.
        UserError: a file is missing or unreadable; the template is invalid; the weights leave nothing.
    """
    tokeniser = make_tokeniser(data, tokenizer, stop_ids)
    cache = TableCache(data.cache, tokeniser)
    done = [0]

    def read(entries: Sequence[str | DataSource]) -> list[_Part]:
        parts = []
        for file in find_files(entries):
            told = None if progress is None else lambda count, before=done[0]: progress(before + count)
            table = cache.table(file, told)
            done[0] += table.facts["conversations"]
            parts.append(_Part(file, table))
        return parts

    held_parts, train_parts = read(data.held_out), read(data.train)
    for part in held_parts:
        part.fit(length, data.too_long)
    _refuse_empty(held_parts, data.held_out, cache)
    twins = np.unique(np.concatenate([part.used_keys for part in held_parts])) if held_parts else None
    for part in train_parts:
        if twins is not None:
            part.refuse_twins(twins)
        part.fit(length, data.too_long)
    _refuse_empty(train_parts, data.train, cache)
    return _assemble(held_parts, train_parts, cache, data, length=length, seed=seed, block_size=block_size)


def make_tokeniser(data: DataConfig, tokenizer: Any, stop_ids: Sequence[int] = ()) -> Tokeniser:
    """The tokeniser that `data` asks for.

    Raises:
        UserError: the template file is missing or unreadable, or an option has a reserved name.
    """
    given = data.chat_template
    name = given or "the tokenizer's chat template"
    return Tokeniser(
        tokenizer,
        chat_template=None if given is None else read_template(given),
        template_options=data.template_options,
        stop_ids=stop_ids,
        template_name=name,
    )


def choose_held_out(keys: np.ndarray, share: float) -> np.ndarray:
    """Which conversations are held out.

    Args:
        keys: uint64 [conversations], hashes of their content.
        share: 0 to 0.5.

    Returns:
        bool [conversations]. All false if `share` is 0 or all conversations are the same one.
    """
    if share == 0 or np.unique(keys).size < 2:
        return np.zeros(keys.size, dtype=bool)
    chosen = keys < np.uint64(share * 2**64)
    if not chosen.any():
        chosen = keys == keys.min()
    elif chosen.all():
        chosen = keys != keys.max()
    return chosen


@dataclass
class _Part:
    """One file's table, held against S. Letters as in `TokenTable`.

    Attributes:
        dropped_C: conversations of which nothing is used.
        kept_D: documents that are used.
        length_D: their tokens, after truncation.
        late: incidents that depend on S or on other files, in reading order.
    """

    file: DataFile
    table: TokenTable
    dropped_C: np.ndarray = field(init=False)
    kept_D: np.ndarray = field(init=False)
    length_D: np.ndarray = field(init=False)
    late: list[tuple[int, str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dropped_C = np.zeros(self.table.keys_C.size, dtype=bool)
        self.kept_D = np.ones(self.table.number_D.size, dtype=bool)
        self.length_D = np.diff(self.table.starts_D).astype(np.int32)

    @property
    def used_keys(self) -> np.ndarray:
        return self.table.keys_C[~self.dropped_C]

    def refuse_twins(self, keys: np.ndarray) -> None:
        """Drops conversations whose key is among `keys`, ascending."""
        table = self.table
        place = np.searchsorted(keys, table.keys_C).clip(max=keys.size - 1)
        twin_C = keys[place] == table.keys_C
        self.dropped_C |= twin_C
        first_D = np.diff(table.conversation_D, prepend=-1) > 0
        numbers = table.number_D[first_D & twin_C[table.conversation_D]].tolist()
        self.late += [(number, REFUSED, HELD_OUT_TWIN, "") for number in numbers]

    def fit(self, length: int, too_long: Literal["skip", "truncate"]) -> None:
        """Cuts or drops documents of more than `length` tokens."""
        table, conversation_D = self.table, self.table.conversation_D
        over_D = (self.length_D > length) & ~self.dropped_C[conversation_D]
        longest: dict[int, int] = {}
        for index in np.flatnonzero(over_D).tolist():
            conversation = int(conversation_D[index])
            longest[conversation] = max(longest.get(conversation, 0), int(self.length_D[index]))
            start = int(table.starts_D[index])
            mask = table.mask[start : start + length]
            # What is cut ends with its last taught token, and must have room for an anchor.
            if too_long == "skip" or not (mask[:-1] & mask[1:]).any():
                self.kept_D[index] = False
            else:
                self.length_D[index] = np.flatnonzero(mask)[-1] + 1
        kept_C = np.bincount(conversation_D[self.kept_D], minlength=self.dropped_C.size) > 0
        for conversation, tokens in longest.items():
            number = int(table.number_D[np.searchsorted(conversation_D, conversation)])
            detail = f"{tokens:,} tokens, a row holds {length:,}"
            if kept_C[conversation]:
                effect = TRUNCATED if too_long == "truncate" else UNTAUGHT
                self.late.append((number, effect, TOO_LONG, detail))
            else:
                reason = TOO_LONG if too_long == "skip" else f"{TOO_LONG}, and nothing taught in what fits"
                self.late.append((number, REFUSED, reason, detail))
        self.dropped_C |= ~kept_C
        self.kept_D &= ~self.dropped_C[conversation_D]
        self.late.sort(key=lambda incident: incident[0])

    def incidents(self) -> Iterator[Incident]:
        """All of this file, in reading order; of what is refused, only why."""
        refused = {number for number, effect, _, _ in self.late if effect == REFUSED}
        early = (incident for incident in self.table.incidents() if incident[0] not in refused)
        for number, effect, reason, detail in heapq.merge(early, self.late, key=lambda incident: incident[0]):
            yield Incident(f"{self.file.name}:{number}", effect, reason, detail)

    def copies(self) -> np.ndarray:
        """int64 [C]: places of each conversation in an epoch, by the weight of its entry."""
        whole, fraction = divmod(self.file.entry.weight, 1.0)
        with np.errstate(over="ignore"):
            mixed_C = self.table.keys_C * _FRACTION_MIX
        return int(whole) + (mixed_C < np.uint64(fraction * 2**64)).astype(np.int64)


def _refuse_empty(parts: list[_Part], entries: Sequence[str | DataSource], cache: TableCache) -> None:
    if parts and all(part.dropped_C.all() for part in parts):
        incidents = Incidents([part.incidents for part in parts], owner=cache)
        where = ", ".join(entry.path for entry in as_sources(entries))
        raise NothingUsable(f"no usable conversation ({'; '.join(incidents.lines())})", where, incidents)


def _assemble(
    held_parts: list[_Part],
    train_parts: list[_Part],
    cache: TableCache,
    data: DataConfig,
    *,
    length: int,
    seed: int,
    block_size: int,
) -> Corpus:
    """Splits and packs what `fit` left."""
    parts = [*held_parts, *train_parts]
    keys = np.concatenate([part.used_keys for part in parts])
    if held_parts:
        held_out = np.arange(keys.size) < sum(part.used_keys.size for part in held_parts)
    else:
        held_out = choose_held_out(keys, data.held_out_share)
    # Conversations are numbered through all parts, used ones only.
    offsets = np.cumsum([0, *(part.used_keys.size for part in parts)])
    conversation_D = np.concatenate(
        [
            offset + np.cumsum(~part.dropped_C)[part.table.conversation_D[part.kept_D]] - 1
            for offset, part in zip(offsets, parts, strict=False)
        ]
    )
    store = DocumentStore(
        parts=[TokenPart(part.file.name, part.table.tokens, part.table.mask, part.table.digest) for part in parts],
        part_D=np.repeat(np.arange(len(parts), dtype=np.int32), [int(part.kept_D.sum()) for part in parts]),
        start_D=np.concatenate([part.table.starts_D[:-1][part.kept_D] for part in parts]),
        length_D=np.concatenate([part.length_D[part.kept_D] for part in parts]),
        number_D=np.concatenate([part.table.number_D[part.kept_D] for part in parts]),
        owner=cache,
    )
    counts_D = np.concatenate([count_anchors(part.table, part.length_D, block_size)[part.kept_D] for part in parts])
    copies_C = np.concatenate([part.copies()[~part.dropped_C] for part in parts])
    held_out_D = held_out[conversation_D]
    train_D = np.repeat(np.flatnonzero(~held_out_D), copies_C[conversation_D[~held_out_D]])
    report_part = partial(_report_part, conversation_D=conversation_D, counts_D=counts_D, length_D=store.length_D)
    sources: list[RowSource | None] = []
    reports: list[PartReport | None] = []
    for chosen in (train_D, np.flatnonzero(held_out_D)):
        packed = data.pack == "on"
        rows = RowSource(store, chosen, length=length, seed=seed, packed=packed) if chosen.size else None
        sources.append(rows)
        reports.append(report_part(rows, chosen) if rows is not None else None)
    if sources[0] is None or reports[0] is None:
        raise UserError("the weights leave no conversation to train on", where="data.train", fix="raise them")
    used_ids = np.unique(np.concatenate([part.table.used_ids for part in parts]))
    occurs = np.zeros(max(len(cache.tokeniser.tokenizer), int(used_ids[-1]) + 1), dtype=bool)
    occurs[used_ids] = True
    stop = next((part.table.facts["stop_token"] for part in parts if part.table.facts["stop_token"] is not None), None)
    # A conversation is split if several of its documents were made, whether or not all of them fit.
    split = sum(
        int((np.bincount(part.table.conversation_D, minlength=part.dropped_C.size)[~part.dropped_C] > 1).sum())
        for part in parts
    )
    layouts: Counter[str] = Counter()
    for part in parts:
        layouts.update(part.table.facts["layouts"])
    report = DataReport(
        files=tuple(part.file.name for part in parts),
        conversations=sum(part.table.facts["conversations"] for part in parts),
        plain_text=sum(part.table.facts["plain_text"] for part in parts),
        used=keys.size,
        split=split,
        duplicates=keys.size - np.unique(keys).size,
        left_out=int((copies_C[~held_out] == 0).sum()),
        layouts=dict(layouts),
        length=length,
        block_size=block_size,
        stop_token=None if stop is None else cache.tokeniser.tokenizer.convert_ids_to_tokens(stop),
        max_token_id=int(used_ids[-1]),
        train=reports[0],
        held_out=reports[1],
        incidents=Incidents([part.incidents for part in parts], owner=cache),
    )
    return Corpus(sources[0], sources[1], report, occurs)


def _report_part(
    rows: RowSource, chosen: np.ndarray, *, conversation_D: np.ndarray, counts_D: np.ndarray, length_D: np.ndarray
) -> PartReport:
    taught, anchors, slots = counts_D[chosen].sum(axis=0).tolist()
    return PartReport(
        conversations=int(np.unique(conversation_D[chosen]).size),
        documents=int(chosen.size),
        rows=rows.rows_per_epoch,
        tokens=rows.real_tokens_per_epoch,
        taught_tokens=taught,
        anchors=anchors,
        slots_per_anchor=slots / anchors,
        waste=rows.waste,
        lengths=Spread.of(length_D[chosen]),
        anchors_of_document=Spread.of(counts_D[chosen, 1]),
    )


def count_anchors(table: TokenTable, length_D: np.ndarray, block_size: int) -> np.ndarray:
    """Taught tokens, anchors and taught slots of every document.

    An anchor is a place at which a block can be drafted; its slots are those with a label. A run of r taught tokens has
    r - 1 anchors; the one with d tokens behind it is taught min(d, block_size - 1) slots.

    Args:
        table: of D documents.
        length_D: int, tokens of each that are used, from its start.
        block_size: B.

    Returns:
        int64 [D, 3].
    """
    starts_D = table.starts_D
    counts = np.zeros((length_D.size, 3), dtype=np.int64)
    first = 0
    while first < length_D.size:
        last = max(first + 1, int(np.searchsorted(starts_D, starts_D[first] + _PIECE, side="right")) - 1)
        begin_D = starts_D[first:last] - starts_D[first]
        mask = np.array(table.mask[starts_D[first] : starts_D[last]], dtype=bool)
        for index in np.flatnonzero(length_D[first:last] < np.diff(starts_D[first : last + 1])).tolist():
            mask[begin_D[index] + length_D[first + index] : starts_D[first + index + 1] - starts_D[first]] = False
        border = np.zeros(mask.size, dtype=bool)  # a document begins here
        border[begin_D] = True
        opens, closes = mask.copy(), mask.copy()
        opens[1:] &= ~mask[:-1] | border[1:]
        closes[:-1] &= ~mask[1:] | border[1:]
        starts, ends = np.flatnonzero(opens), np.flatnonzero(closes)
        document = np.searchsorted(begin_D, starts, side="right") - 1
        behind = ends - starts  # tokens behind the first anchor of each run
        short = np.minimum(behind, block_size - 1)
        slots = short * (short + 1) // 2 + (behind - short) * (block_size - 1)
        for column, values in enumerate((behind + 1, behind, slots)):
            # Sums of integers far below 2^53: exact in the float64 that bincount adds in.
            counts[first:last, column] = np.bincount(document, weights=values, minlength=last - first)
        first = last
    return counts


def read_template(path: str | Path) -> str:
    """Source of a chat template.

    Raises:
        UserError: the file is missing, unreadable or empty.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("no such chat template", where=str(path), fix="check data.chat_template") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {reason_of(error)}", where=str(path)) from None
    if not text.strip():  # to the tokenizer, none: it would take its own and say nothing
        raise UserError("an empty chat template", where=str(path), fix="leave it out to use the tokenizer's own")
    return text
