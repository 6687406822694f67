"""What became of the data: counts for people and for machines, and every conversation that is not used in full.

Nothing is dropped silently: each refusal, truncation and untaught turn is an `Incident` with its place and reason. The
listing for people names the first few of each kind; `Incidents.write` writes all of them. Incidents stay on disk: there
may be millions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftsmith.errors import UserError, reason_of
from draftsmith.observe.aside import written_aside

REFUSED, TRUNCATED, UNTAUGHT = "refused", "truncated", "turn untaught"
_NAMED = 3  # incidents of each kind that are named in the summary


class Incident(NamedTuple):
    """One conversation that is not used in full.

    Attributes:
        source: "file:line".
        effect: REFUSED (nothing of it is used), TRUNCATED (its end is cut off) or UNTAUGHT (an answer is not taught).
        reason: what is counted.
        detail: what only concerns this conversation.
    """

    source: str
    effect: str
    reason: str
    detail: str = ""


class Incidents:
    """Incidents in reading order, read anew whenever they are looked at; only counts and the first few are kept.

    Args:
        parts: each gives the incidents of one data file.
        owner: what has to live as long as the parts can be read (a temporary folder), or None.
    """

    def __init__(self, parts: Sequence[Callable[[], Iterator[Incident]]] = (), owner: Any = None) -> None:
        self._parts = tuple(parts)
        self._owner = owner
        counts: Counter[tuple[str, str]] = Counter()
        self._named: dict[tuple[str, str], list[str]] = {}
        for incident in self:
            kind = (incident.effect, incident.reason)
            counts[kind] += 1
            if counts[kind] <= _NAMED:
                named = f"{incident.source} ({incident.detail})" if incident.detail else incident.source
                self._named.setdefault(kind, []).append(named)
        self.counts = dict(counts.most_common())

    def __iter__(self) -> Iterator[Incident]:
        for part in self._parts:
            yield from part()

    def __len__(self) -> int:
        return sum(self.counts.values())

    def __getitem__(self, index: int) -> Incident:
        return next(islice(self, index, None))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Incidents) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def write(self, path: str | Path) -> None:
        """Writes every incident as a JSON line with source, effect, reason and detail.

        Raises:
            UserError: the file cannot be written.
        """
        try:
            with written_aside(Path(path)) as file:
                file.writelines(json.dumps(incident._asdict()) + "\n" for incident in self)
        except OSError as error:
            raise UserError(f"cannot be written: {reason_of(error)}", where=str(path)) from None

    def first(self, effect: str, reason: str) -> list[str]:
        """Places and details of the first few of a kind."""
        return self._named[effect, reason]

    def lines(self) -> list[str]:
        """One line per effect and reason: how often, where first, and what the first one said."""
        lines = []
        for (effect, reason), count in self.counts.items():
            more = f" and {count - _NAMED:,} more" if count > _NAMED else ""
            lines.append(f"{effect}: {count:,} × {reason}: {', '.join(self.first(effect, reason))}{more}")
        return lines


@dataclass(frozen=True)
class Spread:
    """How something is distributed over documents."""

    least: int
    median: int
    p90: int
    p99: int
    most: int

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        """Of at least one value; percentiles are values that occur."""
        return cls(*(int(value) for value in np.quantile(values, (0, 0.5, 0.9, 0.99, 1), method="higher")))

    def __str__(self) -> str:
        return f"{self.least:,} to {self.most:,}, median {self.median:,}, 90 % {self.p90:,}, 99 % {self.p99:,}"


@dataclass(frozen=True)
class PartReport:
    """Training or held-out share.

    Attributes:
        conversations, documents, rows: how many.
        tokens: real tokens of an epoch, padding left out.
        taught_tokens: of those, the ones that the assistant wrote (or all, in plain text).
        anchors: places at which a block can be drafted.
        slots_per_anchor: mean number of slots that have a label, of block_size - 1; low means that answers are short.
        waste: share of padding in the rows.
        lengths: tokens of a document.
        anchors_of_document: anchors of a document.
    """

    conversations: int
    documents: int
    rows: int
    tokens: int
    taught_tokens: int
    anchors: int
    slots_per_anchor: float
    waste: float
    lengths: Spread
    anchors_of_document: Spread

    @property
    def share_taught(self) -> float:
        """Taught share of the real tokens."""
        return self.taught_tokens / self.tokens


@dataclass(frozen=True)
class DataReport:
    """Everything that is known about a corpus.

    Attributes:
        files: data files read, in order.
        conversations: lines read; `used` + refused.
        plain_text: of those, lines of plain text.
        used: conversations of which something is taught.
        split: used conversations that became several documents, because some turn's context as served is not how it
            reads later (the template rewrites history, or tokens join across the border of prompt and answer).
        duplicates: used conversations that equal an earlier one.
        left_out: used conversations that a weight below 1 leaves out of every epoch.
        layouts: how many conversations came in each layout.
        length, block_size: S and B that the numbers are for.
        stop_token: what ends an answer, as text; None if the template writes no such token (or there is no chat).
        max_token_id: largest id that occurs.
        incidents: everything not used in full, in reading order.
    """

    files: tuple[str, ...]
    conversations: int
    plain_text: int
    used: int
    split: int
    duplicates: int
    left_out: int
    layouts: dict[str, int]
    length: int
    block_size: int
    stop_token: str | None
    max_token_id: int
    train: PartReport
    held_out: PartReport | None
    incidents: Incidents

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """How often each (effect, reason) occurred, most frequent first."""
        return self.incidents.counts

    def lines(self) -> list[str]:
        """A summary for people, one fact a line."""
        effects: Counter[str] = Counter()
        for (effect, _), count in self.counts.items():
            effects[effect] += count
        files = f"{len(self.files)} file{'s' * (len(self.files) != 1)}"
        lines = [
            f"{self.conversations:,} conversations in {files}: {self.used:,} used, {effects[REFUSED]:,} refused, "
            f"{effects[TRUNCATED]:,} truncated, {self.duplicates:,} duplicates"
        ]
        if self.split:
            lines.append(
                f"{self.split:,} conversations split into several documents: served, their turns read differently"
            )
        for name, part in (("train", self.train), ("held out", self.held_out)):
            if part is not None:
                lines.append(
                    f"{name}: {part.documents:,} documents in {part.rows:,} rows of {self.length:,}, "
                    f"{part.tokens:,} tokens, {part.share_taught:.1%} taught, {part.waste:.2%} padding; "
                    f"{part.anchors:,} anchors with {part.slots_per_anchor:.1f} of {self.block_size - 1} slots taught"
                )
        if self.left_out:
            lines.append(f"{self.left_out:,} conversations are left out by weights below 1")
        return lines + self.incidents.lines()

    def to_json(self) -> dict[str, Any]:
        """The same for machines, ready for `json.dumps`; incidents are counted and the first of each kind named."""
        content = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "incidents"}
        for name, part in (("train", self.train), ("held_out", self.held_out)):
            if part is not None:
                content[name] = {**asdict(part), "share_taught": part.share_taught}
        content["incidents"] = [
            {"effect": effect, "reason": reason, "count": count, "first": self.incidents.first(effect, reason)}
            for (effect, reason), count in self.counts.items()
        ]
        return content
