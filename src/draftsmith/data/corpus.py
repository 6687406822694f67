"""From data files to a stream of training rows and a held-out one.

Conversations are read, tokenised in batches, held against S, and laid into flat arrays; then the held-out share is
split off and each part is packed once. Whatever cannot be used is reported with its place and reason; it is an error
only when nothing is left.

Held out is decided by the content of a conversation alone: its 64-bit hash falls below the share or it does not.
Reordering, adding or removing lines moves no other conversation across, duplicates stay together, and so do all
documents of one conversation. If hashing leaves one side of a small corpus empty, the conversation with the smallest
(largest) hash goes there, which order does not change either.

Cost: one pass over the files. Memory: 5 bytes per token (int32 and the mask) and about 60 per document; the tokenizer
is the bottleneck and runs on all its threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftsmith.blocks.row import Document
from draftsmith.config import DataConfig
from draftsmith.data.conversations import Conversation, read_conversations
from draftsmith.data.report import (
    REFUSED,
    TRUNCATED,
    UNTAUGHT,
    DataReport,
    Incident,
    PartReport,
    describe_incidents,
)
from draftsmith.data.stream import DocumentStore, RowSource
from draftsmith.data.template import Tokenised, Tokeniser, make_document
from draftsmith.errors import UserError

TOO_LONG = "longer than a row"
HELD_OUT_TWIN = "is in the held-out files as well"

_BATCH = 512  # conversations tokenised at one time …
_BATCH_CHARACTERS = 4_000_000  # … unless they are long


@dataclass(frozen=True)
class Corpus:
    """Tokenised data, ready to train on.

    Attributes:
        train: stream of training rows.
        held_out: stream of held-out rows, None if there is no held-out share.
        report: what became of every conversation.
        used_ids: bool [at least the tokenizer's length]; true for ids that occur, held-out rows included.
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
        UserError: a file is missing, empty, unreadable or broken; the template is invalid; nothing usable remains.
    """
    template, name = _read_template(data.chat_template)
    tokeniser = Tokeniser(
        tokenizer,
        chat_template=template,
        template_options=data.template_options,
        stop_ids=stop_ids,
        template_name=name,
    )
    builder = _Builder(tokeniser, (*data.train, *data.held_out), length, block_size, data.too_long, progress)
    if data.held_out:
        builder.read(data.held_out)
        twins, held_out_conversations = frozenset(builder.keys), len(builder.keys)
        builder.read(data.train, twins)
        held_out = np.arange(len(builder.keys)) < held_out_conversations
    else:
        builder.read(data.train)
        held_out = choose_held_out(np.frombuffer(builder.keys, dtype=np.uint64), data.held_out_share)
    return builder.finish(held_out, seed)


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


class _Builder:
    """Grows the flat arrays; one entry per token, per document, and per used conversation."""

    def __init__(
        self,
        tokeniser: Tokeniser,
        files: tuple[str, ...],
        length: int,
        block_size: int,
        too_long: Literal["skip", "truncate"],
        progress: Callable[[int], None] | None,
    ) -> None:
        self.tokeniser, self.files, self.length = tokeniser, files, length
        self.block_size, self.too_long, self.progress = block_size, too_long, progress
        self.incidents: list[Incident] = []
        self.read_count = self.plain_text = self.split = 0
        self.keys = array("Q")  # of used conversations
        self.tokens, self.mask, self.starts = array("i"), bytearray(), array("q", [0])
        self.file_of, self.line_of, self.conversation_of = array("i"), array("i"), array("i")
        self.taught, self.anchors, self.slots = array("q"), array("q"), array("q")
        self.used_ids = np.zeros(len(tokeniser.tokenizer), dtype=bool)

    def read(self, paths: Sequence[str], twins: frozenset[int] = frozenset()) -> None:
        """Adds the files; conversations whose key is in `twins` are refused.

        Raises:
            UserError: broken files, or nothing usable in all of them.
        """
        before, incidents_before = len(self.keys), len(self.incidents)
        for batch in _batches(read_conversations(paths)):
            keys = [conversation.key() for conversation in batch]
            for conversation, key in zip(batch, keys, strict=True):
                if key in twins:
                    self.incidents.append(Incident(conversation.source, REFUSED, HELD_OUT_TWIN))
            fresh = [(c, key) for c, key in zip(batch, keys, strict=True) if key not in twins]
            for tokenised, (_, key) in zip(self.tokeniser([c for c, _ in fresh]), fresh, strict=True):
                self._add(tokenised, key)
            self.read_count += len(batch)
            self.plain_text += sum(conversation.messages is None for conversation in batch)
            if self.progress is not None:
                self.progress(self.read_count)
        if len(self.keys) == before:
            reasons = "; ".join(describe_incidents(self.incidents[incidents_before:]))
            raise UserError(f"no usable conversation ({reasons})", where=", ".join(paths))

    def _add(self, tokenised: Tokenised, key: int) -> None:
        source, refusal = tokenised.source, tokenised.refusal
        documents = [fitted for document in tokenised.documents if (fitted := self._fit(document)) is not None]
        if refusal is not None:
            self.incidents.append(Incident(source, REFUSED, refusal.reason, refusal.detail))
            return
        longest = max(len(document) for document in tokenised.documents)
        detail = f"{longest:,} tokens, a row holds {self.length:,}"
        if not documents:
            reason = TOO_LONG if self.too_long == "skip" else f"{TOO_LONG}, and nothing taught in what fits"
            self.incidents.append(Incident(source, REFUSED, reason, detail))
            return
        self.incidents += [Incident(source, UNTAUGHT, reason, detail) for reason, detail in tokenised.untaught]
        if longest > self.length:
            effect = TRUNCATED if self.too_long == "truncate" else UNTAUGHT
            self.incidents.append(Incident(source, effect, TOO_LONG, detail))
        for document in documents:
            self._store(document)
        self.split += len(tokenised.documents) > 1
        self.keys.append(key)

    def _fit(self, document: Document) -> Document | None:
        """The document as the policy wants it, None if nothing of it is left."""
        if len(document) <= self.length:
            return document
        if self.too_long == "skip":
            return None
        tokens, mask = document.tokens.numpy(), document.loss_mask.numpy()
        return make_document(document.name, tokens[: self.length], mask[: self.length])

    def _store(self, document: Document) -> None:
        tokens, mask = document.tokens.numpy(), document.loss_mask.numpy()
        self.tokens.frombytes(tokens.astype(np.int32).tobytes())
        self.mask += mask.tobytes()
        self.starts.append(self.starts[-1] + tokens.size)
        file, _, line = document.name.rpartition(":")
        self.file_of.append(self.files.index(file))
        self.line_of.append(int(line))
        self.conversation_of.append(len(self.keys))
        anchors, slots = count_anchors(mask, self.block_size)
        self.taught.append(int(mask.sum()))
        self.anchors.append(anchors)
        self.slots.append(slots)
        largest = int(tokens.max())
        if largest >= self.used_ids.size:
            self.used_ids = np.concatenate([self.used_ids, np.zeros(largest + 1 - self.used_ids.size, dtype=bool)])
        self.used_ids[tokens] = True

    def finish(self, held_out: np.ndarray, seed: int) -> Corpus:
        """Packs both parts. `held_out`: bool [used conversations]."""
        store = DocumentStore(
            tokens=np.frombuffer(self.tokens, dtype=np.int32),
            loss_mask=np.frombuffer(self.mask, dtype=bool),
            starts=np.frombuffer(self.starts, dtype=np.int64),
            file_of=np.frombuffer(self.file_of, dtype=np.int32),
            line_of=np.frombuffer(self.line_of, dtype=np.int32),
            files=self.files,
        )
        is_held_out = held_out[np.frombuffer(self.conversation_of, dtype=np.int32)]
        parts: list[RowSource | None] = []
        reports: list[PartReport | None] = []
        for chosen in (np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)):
            rows = RowSource(store, chosen, length=self.length, seed=seed) if chosen.size else None
            parts.append(rows)
            reports.append(self._report_part(rows, chosen) if rows is not None else None)
        train, train_report = parts[0], reports[0]
        assert train is not None, "the split left nothing to train on"
        assert train_report is not None
        stop = self.tokeniser.stop_token
        report = DataReport(
            files=self.files,
            conversations=self.read_count,
            plain_text=self.plain_text,
            used=len(self.keys),
            split=self.split,
            duplicates=len(self.keys) - len(set(self.keys)),
            length=self.length,
            block_size=self.block_size,
            stop_token=None if stop is None else self.tokeniser.tokenizer.convert_ids_to_tokens(stop),
            max_token_id=int(np.flatnonzero(self.used_ids)[-1]),
            train=train_report,
            held_out=reports[1],
            incidents=tuple(self.incidents),
        )
        return Corpus(train, parts[1], report, self.used_ids)

    def _report_part(self, rows: RowSource, chosen: np.ndarray) -> PartReport:
        def total(counts: array[int]) -> int:
            return int(np.frombuffer(counts, dtype=np.int64)[chosen].sum())

        anchors = total(self.anchors)
        return PartReport(
            conversations=int(np.unique(np.frombuffer(self.conversation_of, dtype=np.int32)[chosen]).size),
            documents=int(chosen.size),
            rows=rows.rows_per_epoch,
            tokens=rows.real_tokens_per_epoch,
            taught_tokens=total(self.taught),
            anchors=anchors,
            slots_per_anchor=total(self.slots) / anchors,
            waste=rows.waste,
        )


def count_anchors(mask: np.ndarray, block_size: int) -> tuple[int, int]:
    """Places in a document at which a block can be drafted, and the slots with a label of all those blocks.

    A run of r taught tokens has r - 1 anchors; the one with d tokens behind it is taught min(d, block_size - 1) slots.

    Args:
        mask: bool [L].
    """
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    behind = edges[1::2] - edges[::2] - 1  # tokens behind the first anchor of each run
    short = np.minimum(behind, block_size - 1)
    return int(behind.sum()), int((short * (short + 1) // 2 + (behind - short) * (block_size - 1)).sum())


def _batches(conversations: Iterator[Conversation]) -> Iterator[list[Conversation]]:
    batch: list[Conversation] = []
    characters = 0
    for conversation in conversations:
        batch.append(conversation)
        characters += _size(conversation)
        if len(batch) == _BATCH or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _size(conversation: Conversation) -> int:
    """Characters, roughly; the prompts of a conversation are encoded as well as the whole."""
    if conversation.messages is None:
        return len(conversation.text or "")
    contents = [message.get("content") or "" for message in conversation.messages]
    parts = chain.from_iterable([c] if isinstance(c, str) else [part["text"] for part in c] for c in contents)
    return 2 * sum(map(len, parts))


def _read_template(path: str | None) -> tuple[str | None, str]:
    """Source of the template and its name for messages; None means the tokenizer's own."""
    if path is None:
        return None, "the tokenizer's chat template"
    try:
        return Path(path).read_text(encoding="utf-8"), path
    except FileNotFoundError:
        raise UserError("no such chat template", where=path, fix="check data.chat_template") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=path) from None
