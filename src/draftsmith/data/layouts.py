"""Records to conversations: the layouts that people have, found by inspection or named.

| name | what a record holds |
| --- | --- |
| messages | `messages`: [{"role", "content"}], or the bare list; `tools` beside it |
| sharegpt | `conversations`: [{"from", "value"}]; `system` and `tools` beside it |
| alpaca | `instruction`, `input`, `output`; `system` and `history` beside it |
| prompt | `prompt` and `response` (or one of their usual other names), each a string or a list of messages |
| text | `text`, or the bare string: plain text, taught from end to end |

"auto" takes the first that fits, top to bottom, record by record. A named layout refuses records of another kind.

What is *malformed* (no role, content of an unknown kind) is a `UserError`, which the reader of files counts. What is
merely *unusable* (an image among the parts, no assistant turn) is a conversation with a `problem`, or like any other;
both are refused by name.

Messages are brought to the form in which servers hand them to a chat template: parts of text in one spelling,
arguments of tool calls as objects, reasoning under `reasoning_content`. The `weight` of an answer, which no server
sends, becomes a fact of the conversation; that of another message says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from draftsmith.data.conversation import Conversation
from draftsmith.data.formats import Media
from draftsmith.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_FIX = 'use {"messages": [{"role": …, "content": …}]}, {"text": …}, or name data.train[…].layout and .columns'
_FROM = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
_PROMPTS = ("prompt", "question", "query", "instruction", "input")
_RESPONSES = ("response", "completion", "answer", "output", "chosen")
_TEXTS = ("text", "input_text", "output_text")
_TURNS = ("messages", "conversations", "conversation")

Layout = Callable[[dict[str, Any], str], "Conversation | None"]


def to_conversation(
    record: Any, source: str, layout: str = "auto", columns: dict[str, str] | None = None
) -> Conversation:
    """One record of a data file as a conversation.

    Args:
        record: what the file holds: an object, a bare list of messages, or a bare string.
        source: "file:number", for messages to people.
        layout: a name of the table above, or "auto".
        columns: our names to the record's, {"prompt": "question_text"}.

    Raises:
        UserError: the record is no conversation, or not one of the named layout.
    """
    if isinstance(record, list):
        record = {"messages": record}
    elif isinstance(record, str):
        record = {"text": record}
    if not isinstance(record, dict):
        raise UserError(f"a {type(record).__name__}, not a conversation", where=source, fix=_FIX)
    for ours, theirs in (columns or {}).items():
        if theirs not in record:
            raise UserError(f"has no column {theirs!r} ({_keys(record)})", where=source, fix="check columns")
        record = {**record, ours: record[theirs]}
    record = _with_lists(record)
    for name, read in LAYOUTS.items():
        if layout in ("auto", name):
            found = read(record, source)
            if found is not None:
                seen = [key for key, value in record.items() if isinstance(value, Media)]
                return replace(found, problem=found.problem or f"an image or sound in {seen[0]!r}") if seen else found
    wanted = "no known layout" if layout == "auto" else f"not of the layout {layout!r}"
    raise UserError(f"{wanted} ({_keys(record)})", where=source, fix=_FIX)


def _with_lists(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its turns as a list: tables that cannot hold them keep them as JSON text."""
    written = [key for key in _TURNS if isinstance(record.get(key), str) and record[key].lstrip().startswith("[")]
    for key in written:
        with suppress(ValueError, RecursionError):  # text it is then, and the layout says so
            record = {**record, key: json.loads(record[key])}
    return record


def _keys(record: dict[str, Any]) -> str:
    return "keys: " + (", ".join(repr(key) for key in list(record)[:6]) or "none")


# -- layouts -------------------------------------------------------------------------------------------------------


def _messages(record: dict[str, Any], source: str) -> Conversation | None:
    messages = record.get("messages")
    for key in ("conversation", "conversations"):  # the same list under ShareGPT's key
        if messages is None and _first_has(record.get(key), "role"):
            messages = record[key]
    if messages is None or _first_has(messages, "from"):
        return None
    return _chat(messages, record, source, "messages")


def _sharegpt(record: dict[str, Any], source: str) -> Conversation | None:
    keys = ("conversations", "conversation", "messages")
    turns = next((record[key] for key in keys if record.get(key) is not None), None)
    if turns is None:
        return None
    if not isinstance(turns, list):
        raise UserError(f"conversations is a {type(turns).__name__}, not a list", where=source, fix=_FIX)
    messages = [_from_turn(turn, number, source) for number, turn in enumerate(turns, start=1)]
    return _chat(_with_system(messages, record), record, source, "sharegpt")


def _from_turn(turn: Any, number: int, source: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise UserError(f"turn {number} is a {type(turn).__name__}, not an object", where=source, fix=_FIX)
    said = turn.get("from")
    role = _FROM.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        problem = "has no 'from'" if said is None else f"is from the unknown {said!r}"
        raise UserError(f"turn {number} {problem}", where=source, fix=f"one of {', '.join(_FROM)}")
    message = {key: value for key, value in turn.items() if key not in ("from", "value")}
    message |= {"role": role, "content": turn.get("value")}
    if said == "function_call":
        call = _parse_object(message["content"])
        if call is None:
            raise UserError(f"turn {number} is a function call, but no JSON object", where=source)
        message |= {"content": None, "tool_calls": [{"type": "function", "function": call}]}
    return message


def _alpaca(record: dict[str, Any], source: str) -> Conversation | None:
    if record.get("instruction") is None or record.get("output") is None:
        return None
    asked = _string(record, "instruction", source)
    more = _string(record, "input", source) if record.get("input") is not None else ""
    messages: list[Any] = []
    for pair in record.get("history") or []:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise UserError("history is not a list of [question, answer]", where=source)
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    messages.append({"role": "user", "content": f"{asked}\n{more}" if more else asked})
    messages.append({"role": "assistant", "content": _string(record, "output", source)})
    return _chat(_with_system(messages, record), record, source, "alpaca")


def _prompt(record: dict[str, Any], source: str) -> Conversation | None:
    """A prompt alone is a conversation too, for `data regenerate`; training refuses it by name."""
    prompt = next((record[key] for key in _PROMPTS if record.get(key) is not None), None)
    response = next((record[key] for key in _RESPONSES if record.get(key) is not None), None)
    if prompt is None or (response is None and record.get("prompt") is None):
        return None
    if isinstance(response, list) and not _first_has_role(response, "assistant"):
        prompt = None  # the chosen answer of a preference pair, with the question in it
    messages: list[Any] = []
    for role, said in (("user", prompt), ("assistant", response)):
        if isinstance(said, list):
            messages += said
        elif isinstance(said, str):
            messages.append({"role": role, "content": said})
        elif said is not None:
            what = "prompt" if role == "user" else "response"
            raise UserError(f"{what} is a {type(said).__name__}, not a string", where=source, fix=_FIX)
    return _chat(_with_system(messages, record), record, source, "prompt")


def _text(record: dict[str, Any], source: str) -> Conversation | None:
    if record.get("text") is None:
        return None
    return Conversation(source, text=_string(record, "text", source), layout="text")


LAYOUTS: dict[str, Layout] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt": _prompt,
    "text": _text,
}


def _first_has(turns: Any, key: str) -> bool:
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and key in turns[0]


def _first_has_role(messages: list[Any], role: str) -> bool:
    return _first_has(messages, "role") and messages[0]["role"] == role


def _string(record: dict[str, Any], key: str, source: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise UserError(f"{key} is a {type(value).__name__}, not a string", where=source)
    return value


def _with_system(messages: list[Any], record: dict[str, Any]) -> list[Any]:
    system = record.get("system") or record.get("system_prompt")
    first = messages[0].get("role") if messages and isinstance(messages[0], dict) else None
    if isinstance(system, str) and first not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    return messages


# -- messages ------------------------------------------------------------------------------------------------------


def _chat(messages: Any, record: dict[str, Any], source: str, layout: str) -> Conversation:
    if not isinstance(messages, list):
        raise UserError(f"messages is a {type(messages).__name__}, not a list", where=source, fix=_FIX)
    problems: list[str] = []
    checked = [_message(message, number, source, problems) for number, message in enumerate(messages, start=1)]
    answers = [(number, each) for number, each in enumerate(checked, start=1) if each["role"] == "assistant"]
    weights = [_weight(message.get("weight"), number, source) for number, message in answers]
    return Conversation(
        source,
        messages=[{key: value for key, value in message.items() if key != "weight"} for message in checked],
        tools=_tools(record.get("tools"), source),
        cut=record.get("finish_reason") == "length",
        unweighted=frozenset(answer for answer, weight in enumerate(weights, start=1) if not weight),
        problem=problems[0] if problems else None,
        layout=layout,
    )


def _tools(tools: Any, source: str) -> list[dict[str, Any]] | None:
    """Descriptions of tools; tables that cannot hold them keep them as JSON text."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise UserError("tools is a string that is not JSON", where=source) from None
    if not tools:
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError("tools is not a list of objects", where=source)
    return tools


def _message(message: Any, number: int, source: str, problems: list[str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UserError(f"message {number} is a {type(message).__name__}, not an object", where=source, fix=_FIX)
    role = message.get("role")
    if role is None:
        raise UserError(f"message {number} has no role", where=source, fix=f"one of {', '.join(ROLES)}")
    if role not in ROLES:
        what = f"message {number} has the unknown role {role!r}"
        raise UserError(what, where=source, fix=f"one of {', '.join(ROLES)}")
    if message.get("tool_calls"):
        message = {**message, "tool_calls": _tool_calls(message["tool_calls"], number, source)}
    if isinstance(message.get("reasoning"), str) and message.get("reasoning_content") is None:
        message = {key: value for key, value in message.items() if key != "reasoning"} | {
            "reasoning_content": message["reasoning"]
        }
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None:
        # An assistant that only calls a tool has nothing to say.
        if role == "assistant" and message.get("tool_calls"):
            return {**message, "content": None}
        raise UserError(f"message {number} has no content", where=source)
    if not isinstance(content, list):
        found = type(content).__name__
        raise UserError(f"content of message {number} is a {found}", where=source, fix="a string or a list of parts")
    return {**message, "content": [_part(part, number, source, problems) for part in content]}


def _weight(weight: Any, number: int, source: str) -> bool:
    """Whether an answer is taught; what says neither yes nor no is no guess of ours."""
    if weight is None:
        return True
    if isinstance(weight, bool) or weight not in (0, 1):
        what = f"message {number} has the weight {json.dumps(weight, default=str)}"
        raise UserError(what, where=source, fix="1: the answer is taught, 0: it is not")
    return bool(weight)


def _part(part: Any, number: int, source: str, problems: list[str]) -> dict[str, Any]:
    """A part of text in the one spelling that templates know. What is no text makes the conversation unusable."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        what = f"message {number} has a content part of type {type(part).__name__!r}"
        raise UserError(what, where=source, fix='use {"type": "text", "text": …}')
    kind = part.get("type", "text")
    if kind not in _TEXTS:
        problems.append(f"a part of type {kind!r} in message {number}")
        return part
    if not isinstance(part.get("text"), str):
        raise UserError(f"message {number} has a content part of type {kind!r} without text", where=source)
    return part if kind == "text" and "type" in part else {"type": "text", "text": part["text"]}


def _tool_calls(calls: Any, number: int, source: str) -> list[dict[str, Any]]:
    """Calls with their arguments as objects: the API sends JSON text, servers parse it for the template."""
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except ValueError:
            calls = None
    if not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise UserError(f"tool_calls of message {number} is not a list of objects", where=source)
    return [_tool_call(call) for call in calls]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = _parse_object(call.get("arguments"))
    return call if arguments is None else {**call, "arguments": arguments}


def _parse_object(text: Any) -> dict[str, Any] | None:
    if not isinstance(text, str):
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
