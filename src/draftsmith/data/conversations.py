"""Reads JSON lines of conversations, one at a time, and says exactly where a file is broken.

A line is `{"messages": [{"role": …, "content": …}, …]}`, a bare list of messages, or `{"text": "…"}`. `tools` beside
`messages` are handed to the chat template; other keys are ignored, so identifiers and metadata may stay. When a line
has both `messages` and `text`, the messages are read: only they say who wrote what.

Algorithm: binary lines (a line ends at a newline byte and nowhere else, so line numbers agree with every editor),
decoded and parsed one by one. Cost: one pass, memory of one line.

What is *broken* (not JSON, no role, content of an unknown kind) is a `UserError` at once, because it says that the file
is not what its owner believes. What is merely *unusable* (no assistant turn) is a conversation like any other here;
`template` gives the reason why it cannot teach.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_LAYOUT = 'one conversation per line: {"messages": [{"role": …, "content": …}]} or {"text": …}'


@dataclass(frozen=True)
class Conversation:
    """One line of a data file.

    Attributes:
        source: "file:line", for messages to people.
        messages: chat messages as the template wants them, or None for plain text.
        text: plain text, or None for chat.
        tools: tool descriptions for the chat template.
        cut: the last answer stopped at a length limit (`"finish_reason": "length"` in the line), so its end is not
            the model's and is not taught.
    """

    source: str
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    cut: bool = False

    def key(self) -> int:
        """64-bit hash of the content, the same wherever the conversation stands and whatever its JSON spacing was."""
        content = self.text if self.messages is None else [self.messages, self.tools]
        canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return int.from_bytes(hashlib.blake2b(canonical.encode("ascii"), digest_size=8).digest(), "little")


def read_conversations(paths: Iterable[str | Path]) -> Iterator[Conversation]:
    """Yields every conversation of every file, in order; blank lines are passed over.

    Raises:
        UserError: a file is missing, unreadable, a directory or empty; a line is not JSON, is not UTF-8, or is not a
            conversation (message without role, unknown role, unknown kind of content).
    """
    for path in paths:
        yield from _read_file(str(path))


def _read_file(path: str) -> Iterator[Conversation]:
    found, number = False, 0
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    found = True
                    yield _parse(line, f"{path}:{number}")
    except FileNotFoundError:
        raise UserError("no such data file", where=path, fix="check data.train and data.held_out") from None
    except IsADirectoryError:
        raise UserError("is a directory, not a data file", where=path, fix="name the files in it") from None
    except OSError as error:
        place = f"{path}:{number + 1}" if number else path
        raise UserError(f"cannot be read: {error.strerror or error}", where=place) from None
    if not found:
        raise UserError("is empty: no conversation in it", where=path, fix=_LAYOUT)


def _parse(line: bytes, source: str) -> Conversation:
    try:
        content = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 at byte {error.start + 1} of the line", where=source) from None
    except json.JSONDecodeError as error:
        raise UserError(f"not valid JSON: {error.msg} at column {error.colno}", where=source, fix=_LAYOUT) from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"not JSON that can be read: {error}", where=source, fix=_LAYOUT) from None
    if isinstance(content, list):
        return Conversation(source, messages=_check_messages(content, source))
    if not isinstance(content, dict):
        raise UserError(f"a {type(content).__name__}, not a conversation", where=source, fix=_LAYOUT)
    if content.get("messages") is not None:
        tools = content.get("tools") or None
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise UserError("tools is not a list of objects", where=source)
        messages = _check_messages(content["messages"], source)
        return Conversation(source, messages=messages, tools=tools, cut=content.get("finish_reason") == "length")
    if content.get("text") is not None:
        if not isinstance(content["text"], str):
            raise UserError(f"text is a {type(content['text']).__name__}, not a string", where=source)
        return Conversation(source, text=content["text"])
    keys = ", ".join(repr(key) for key in list(content)[:6]) or "none"
    raise UserError(f"has neither messages nor text (keys: {keys})", where=source, fix=_LAYOUT)


def _check_messages(messages: Any, source: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise UserError(f"messages is a {type(messages).__name__}, not a list", where=source, fix=_LAYOUT)
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise UserError(f"message {number} is a {type(message).__name__}, not an object", where=source, fix=_LAYOUT)
        role = message.get("role")
        if role is None:
            raise UserError(f"message {number} has no role", where=source, fix=f"one of {', '.join(ROLES)}")
        if role not in ROLES:
            raise UserError(
                f"message {number} has the unknown role {role!r}", where=source, fix=f"one of {', '.join(ROLES)}"
            )
        _check_content(message, number, source)
    return messages


def _check_content(message: dict[str, Any], number: int, source: str) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None:
        # An assistant that only calls a tool has nothing to say.
        if message["role"] == "assistant" and message.get("tool_calls"):
            return
        raise UserError(f"message {number} has no content", where=source)
    if not isinstance(content, list):
        found = type(content).__name__
        raise UserError(
            f"content of message {number} is a {found}", where=source, fix="a string or a list of text parts"
        )
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(
                f"message {number} has a content part of type {kind!r}",
                where=source,
                fix='only {"type": "text", "text": …} can be used',
            )
