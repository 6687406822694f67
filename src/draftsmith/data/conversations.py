"""Reads conversations, one at a time, from whatever people have, and says exactly where a file is broken.

`places` finds the files of an entry, `formats` makes them records, `layouts` makes those conversations. Cost: one pass;
memory of a few records, however large the data is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from draftsmith.config import DataSource
from draftsmith.data.conversation import Conversation
from draftsmith.data.formats import read_records
from draftsmith.data.layouts import ROLES, to_conversation
from draftsmith.data.places import DataFile, find_files
from draftsmith.errors import UserError

__all__ = ["ROLES", "Conversation", "read_conversations", "read_file", "write_head"]


def read_conversations(entries: Iterable[str | Path | DataSource]) -> Iterator[Conversation]:
    """Yields every conversation of every entry, in order; blank lines are passed over.

    Raises:
        UserError: a file is missing, unreadable or empty, or a record is not a conversation (message without role,
            unknown role, unknown kind of content, no layout that fits).
    """
    for file in find_files(entries):
        yield from read_file(file)


def write_head(entries: Iterable[str | Path | DataSource], count: int, path: Path) -> None:
    """Writes the first `count` conversations of some entries as JSON lines of their own.

    Raises:
        UserError: see `read_conversations`.
    """
    with path.open("w", encoding="utf-8") as file:
        for conversation in islice(read_conversations(entries), count):
            chat = {"messages": conversation.messages, "tools": conversation.tools}
            content = {"text": conversation.text} if conversation.messages is None else chat
            file.write(json.dumps(content, default=str) + "\n")


def read_file(file: DataFile) -> Iterator[Conversation]:
    """Yields every conversation of one file.

    Raises:
        UserError: see `read_conversations`.
    """
    found = False
    layout, columns = file.entry.layout, file.entry.columns
    for number, value in read_records(file.path, file.name):
        found = True
        yield to_conversation(value, f"{file.name}:{number}", layout, columns)
    if not found:
        raise UserError(
            "is empty: no conversation in it",
            where=file.name,
            fix='e.g. one conversation a line: {"messages": [{"role": …, "content": …}]} or {"text": …}',
        )
