"""What became of the data: counts for people and for machines, and every conversation that is not used in full.

Nothing is dropped silently: each refusal, truncation and untaught turn is an `Incident` with its place and reason. The
listing for people names the first few of each kind; `write_incidents` writes all of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.errors import UserError

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
    """

    conversations: int
    documents: int
    rows: int
    tokens: int
    taught_tokens: int
    anchors: int
    slots_per_anchor: float
    waste: float

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
    length: int
    block_size: int
    stop_token: str | None
    max_token_id: int
    train: PartReport
    held_out: PartReport | None
    incidents: tuple[Incident, ...]

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """How often each (effect, reason) occurred, most frequent first."""
        return count_incidents(self.incidents)

    def lines(self) -> list[str]:
        """A summary for people, one fact a line."""
        effects = Counter(incident.effect for incident in self.incidents)
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
        return lines + describe_incidents(self.incidents)

    def to_json(self) -> dict[str, Any]:
        """The same for machines, ready for `json.dumps`; incidents are counted and the first of each kind named."""
        content = asdict(self)
        content.pop("incidents")
        for name, part in (("train", self.train), ("held_out", self.held_out)):
            if part is not None:
                content[name]["share_taught"] = part.share_taught
        content["incidents"] = [
            {"effect": effect, "reason": reason, "count": count, "first": _first(self.incidents, effect, reason)}
            for (effect, reason), count in self.counts.items()
        ]
        return content

    def write_incidents(self, path: str | Path) -> None:
        """Writes every incident as a JSON line with source, effect, reason and detail.

        Raises:
            UserError: the file cannot be written.
        """
        try:
            with Path(path).open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(incident._asdict()) + "\n" for incident in self.incidents)
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror or error}", where=str(path)) from None


def count_incidents(incidents: Iterable[Incident]) -> dict[tuple[str, str], int]:
    """How often each (effect, reason) occurs, most frequent first."""
    return dict(Counter((incident.effect, incident.reason) for incident in incidents).most_common())


def describe_incidents(incidents: Iterable[Incident]) -> list[str]:
    """One line per effect and reason: how often, where first, and what the first one said."""
    incidents = list(incidents)
    lines = []
    for (effect, reason), count in count_incidents(incidents).items():
        named = ", ".join(_first(incidents, effect, reason))
        more = f" and {count - _NAMED:,} more" if count > _NAMED else ""
        lines.append(f"{effect}: {count:,} × {reason}: {named}{more}")
    return lines


def _first(incidents: Iterable[Incident], effect: str, reason: str) -> list[str]:
    same = (incident for incident in incidents if (incident.effect, incident.reason) == (effect, reason))
    return [f"{i.source} ({i.detail})" if i.detail else i.source for i, _ in zip(same, range(_NAMED), strict=False)]
