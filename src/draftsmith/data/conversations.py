"""Reads conversations, one at a time, from whatever people have, and says exactly where a file is broken.

`places` finds the files of an entry, `formats` makes them records, `layouts` makes those conversations. Cost: one pass;
memory of a few records, however large the data is.

A record that is malformed (a line that is no JSON, a message without a role) comes out as a conversation that says so,
and is refused and counted like any other. A file in which nothing is well-formed, or whose first `ALL_MALFORMED`
records are not, is not what its owner believes: that is an error, with the first record's place.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith.config import DataSource
from draftsmith.data.conversation import Conversation
from draftsmith.data.formats import Malformed, read_records
from draftsmith.data.layouts import ROLES, to_conversation
from draftsmith.data.places import DataFile, find_files
from draftsmith.data.problems import UnusableData
from draftsmith.errors import UserError

ALL_MALFORMED = 100

__all__ = ["ROLES", "Conversation", "read_conversations", "read_file", "write_head"]


def read_conversations(entries: Iterable[str | Path | DataSource]) -> Iterator[Conversation]:
    """Yields every conversation of every entry, in order; blank lines are passed over.

    Raises:
        UnusableData: a file is empty, broken or malformed throughout.
        UserError: a file is missing or may not be read.
    """
    for file in find_files(entries):
        yield from read_file(file)


def write_head(entries: Iterable[str | Path | DataSource], count: int, path: Path) -> None:
    """Writes the first `count` well-formed conversations of some entries as JSON lines of their own.

    Raises:
        UserError: see `read_conversations`.
    """
    with path.open("w", encoding="utf-8") as file:
        well_formed = (each for each in read_conversations(entries) if each.malformed is None)
        for conversation in islice(well_formed, count):
            file.write(json.dumps(to_record(conversation), default=str) + "\n")


def to_record(conversation: Conversation) -> dict[str, Any]:
    """A record of which `to_conversation` makes this well-formed conversation again, problems aside."""
    if conversation.messages is None:
        return {"text": conversation.text}
    messages, answers = [], itertools.count(1)
    for message in conversation.messages:
        untaught = message["role"] == "assistant" and next(answers) in conversation.unweighted
        messages.append({**message, "weight": 0} if untaught else message)
    cut = {"finish_reason": "length"} if conversation.cut else {}
    return {"messages": messages, "tools": conversation.tools, **cut}


def read_file(file: DataFile) -> Iterator[Conversation]:
    """Yields every conversation of one file.

    Raises:
        UserError: see `read_conversations`.
    """
    held: list[tuple[Conversation, UserError]] = []  # malformed ones before the first that is not
    good = False
    layout, columns = file.entry.layout, file.entry.columns
    for number, value in read_records(file.path, file.name):
        source = f"{file.name}:{number}"
        try:
            if isinstance(value, Malformed):
                raise value.error
            conversation = to_conversation(value, source, layout, columns)
        except UserError as error:
            conversation = Conversation(source, malformed=error.what)
            if not good:
                held.append((conversation, error))
                if len(held) == ALL_MALFORMED:
                    raise _all_malformed(held, f"the first {ALL_MALFORMED} records are all malformed") from None
                continue
        else:
            if not good:
                yield from (each for each, _ in held)
                good = True
        yield conversation
    if held and not good:
        raise _all_malformed(held, f"all {len(held)} records are malformed")
    if not good:
        raise UnusableData(
            "is empty: no conversation in it",
            where=file.name,
            fix='e.g. one conversation a line: {"messages": [{"role": …, "content": …}]} or {"text": …}',
        )


def _all_malformed(held: list[tuple[Conversation, UserError]], how_many: str) -> UnusableData:
    first = held[0][1]
    what = first.what if len(held) == 1 else f"{first.what}; {how_many}"
    return UnusableData(what, where=first.where, fix=first.fix)
