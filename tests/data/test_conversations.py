"""Reading: what is accepted, and that everything broken is one clear line with file and line number."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from draftsmith.data import conversations, formats
from draftsmith.data.conversations import Conversation, read_conversations, write_head
from draftsmith.errors import UserError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_layouts_blank_lines_and_names(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, CHAT[1]]
    tools = [{"name": "forge"}]
    first = write(tmp_path / "a.jsonl", {"messages": CHAT, "id": 7}, "", CHAT, {"text": "plain\u2028text"})
    second = write(tmp_path / "b.jsonl", {"messages": parts, "tools": tools}, {"messages": CHAT, "text": "rendered"})
    assert list(read_conversations([first, second])) == [
        Conversation(f"{first}:1", messages=CHAT),
        Conversation(f"{first}:3", messages=CHAT),
        Conversation(f"{first}:4", text="plain\u2028text"),
        Conversation(f"{second}:1", messages=parts, tools=tools),
        Conversation(f"{second}:2", messages=CHAT),
    ]


def test_line_separators_byte_order_mark_and_missing_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "tw\xe2\x80\xa8o"}\n{"text": "three"}')
    assert [(c.source, c.text) for c in read_conversations([path])] == [
        (f"{path}:1", "one"),
        (f"{path}:2", "tw\u2028o"),
        (f"{path}:3", "three"),
    ]


def test_an_assistant_may_only_call_a_tool(tmp_path: Path) -> None:
    messages = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]
    path = write(tmp_path / "a.jsonl", {"messages": messages})
    assert next(read_conversations([path])).messages == messages


BROKEN = [
    ('{"messages": [', "not valid JSON: Expecting value at column 15"),
    ('{"text": "x', "not valid JSON: Unterminated string starting at column 10"),
    ("[" * 200_000, "not JSON that can be read"),
    ("17", "a int, not a conversation"),
    ({"id": 3, "title": "x"}, "no known layout (keys: 'id', 'title')"),
    ({"prompt": 3}, "prompt is a int"),
    ({"text": 3}, "text is a int"),
    ({"messages": {"role": "user"}}, "messages is a dict"),
    ({"messages": [CHAT[0], "hello"]}, "message 2 is a str"),
    ({"messages": [CHAT[0], {"content": "x"}]}, "message 2 has no role"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "message 1 has the unknown role 'bot'"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role ['user']"),
    ({"messages": [{"role": "user"}]}, "message 1 has no content"),
    ({"messages": [{"role": "user", "content": 5}]}, "content of message 1 is a int"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content part of type 'text' without text"),
    ({"messages": [{"role": "user", "content": [5]}]}, "content part of type 'int'"),
    ({"messages": CHAT, "tools": "forge"}, "tools is a string that is not JSON"),
    ({"messages": CHAT, "tools": {"name": "forge"}}, "tools is not a list"),
    ({"messages": [CHAT[0], {"role": "assistant", "tool_calls": "f()"}]}, "tool_calls of message 2"),
    ({"conversations": "x"}, "conversations is a str"),
    ({"messages": "[1, "}, "messages is a str"),
    ({"messages": "[1]"}, "message 1 is a int"),
    ({"conversations": [{"from": "human", "value": "x"}, "y"]}, "turn 2 is a str"),
    ({"conversations": [{"value": "x"}]}, "turn 1 has no 'from'"),
    ({"conversations": [{"from": "narrator", "value": "x"}]}, "turn 1 is from the unknown 'narrator'"),
    ({"conversations": [{"from": "function_call", "value": "f()"}]}, "turn 1 is a function call, but no JSON"),
    ({"instruction": ["x"], "output": "y"}, "instruction is a list"),
    ({"instruction": "x", "output": "y", "history": ["z"]}, "history is not a list of"),
]


@pytest.mark.parametrize(("line", "says"), BROKEN)
def test_a_malformed_line_is_a_refusal_and_a_file_of_nothing_else_an_error(
    tmp_path: Path, line: object, says: str
) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": CHAT}, "", line, {"messages": CHAT})
    before, malformed, after = read_conversations([path])
    assert (before.malformed, after.malformed) == (None, None)
    assert malformed.source == f"{path}:3"
    assert says in (malformed.malformed or "")
    assert malformed.messages is malformed.text is None
    path = write(tmp_path / "b.jsonl", "", line, line)
    with pytest.raises(UserError) as caught:
        list(read_conversations([path]))
    assert caught.value.where == f"{path}:2"
    assert says in caught.value.what
    assert "; all 2 records are malformed" in caught.value.what
    assert "\n" not in str(caught.value)


def test_malformed_records_at_the_beginning_are_told_once_one_is_not(tmp_path: Path) -> None:
    count = conversations.ALL_MALFORMED
    path = write(tmp_path / "a.jsonl", *["{"] * (count - 1), {"messages": CHAT}, *["{"] * count)
    found = list(read_conversations([path]))
    assert [each.source for each in found] == [f"{path}:{number}" for number in range(1, 2 * count + 1)]
    assert [each.malformed is None for each in found] == [number == count - 1 for number in range(2 * count)]
    path = write(tmp_path / "b.jsonl", *["{"] * count, {"messages": CHAT})
    with pytest.raises(UserError, match=rf"b\.jsonl:1: not valid JSON.*; the first {count} records are all malformed"):
        list(read_conversations([path]))


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ok"}\n{"text": "\xff"}\n')
    _, malformed = read_conversations([path])
    assert malformed.malformed == "not UTF-8 at byte 11 of the line"


def test_missing_and_empty(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    write(tmp_path / "blank.jsonl", "", "  ")
    (tmp_path / "folder").mkdir()
    for name, says in [
        ("none.jsonl", "no such data file"),
        ("empty.jsonl", "is empty"),
        ("blank.jsonl", "is empty"),
        ("folder", "is a directory without data files"),
        ("*.parquet", "no such data file"),
    ]:
        with pytest.raises(UserError, match=says) as caught:
            list(read_conversations([tmp_path / name]))
        assert caught.value.where == str(tmp_path / name)


def test_a_file_that_may_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, os.strerror(13), str(self))

    path = write(tmp_path / "a.jsonl", {"messages": CHAT})
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match="cannot be read: Permission denied") as caught:
        list(read_conversations([path]))
    assert caught.value.where == path


def test_a_disk_that_fails_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(io.RawIOBase):
        reads = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            self.reads += 1
            if self.reads == 3:
                raise OSError(5, os.strerror(5))
            line = b'{"text": "one"}\n'
            buffer[: len(line)] = line
            return len(line)

    write(tmp_path / "a.jsonl", {"text": "x"})
    monkeypatch.setattr(formats, "open_bytes", lambda _path: io.BufferedReader(Failing()))
    read = read_conversations([tmp_path / "a.jsonl"])
    assert [next(read).text, next(read).text] == ["one", "one"]
    with pytest.raises(UserError, match=r"a.jsonl:3: cannot be read: Input/output error"):
        next(read)


def test_the_key_depends_on_the_content_alone() -> None:
    turned = [{"content": m["content"], "role": m["role"]} for m in CHAT]
    assert Conversation("a:1", messages=CHAT).key() == Conversation("b:9", messages=turned).key()
    others = [
        Conversation("a:1", messages=CHAT, tools=[{"name": "f"}]),
        Conversation("a:1", messages=CHAT[::-1]),
        Conversation("a:1", text="Hi"),
        Conversation("a:1", text="Hi "),
        Conversation("a:1", text="\ud800"),
    ]
    assert len({other.key() for other in [*others, Conversation("a:1", messages=CHAT)]}) == 6


def test_a_length_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    messages = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
    lines = [f'{{"messages": {messages}, "finish_reason": "{reason}"}}' for reason in ("length", "stop")]
    path.write_text("\n".join([*lines, f'{{"messages": {messages}}}']))
    assert [conversation.cut for conversation in read_conversations([path])] == [True, False, False]


def test_the_head_of_any_data_as_json_lines(tmp_path: Path) -> None:
    tools = [{"name": "forge"}]
    first = write(tmp_path / "a.jsonl", {"conversations": [{"from": "human", "value": "Hi"}]}, {"text": "plain"})
    second = write(tmp_path / "b.jsonl", {"messages": CHAT, "tools": tools}, {"text": "never"})
    write_head([first, second], 3, tmp_path / "head.jsonl")
    assert [(c.messages, c.text, c.tools) for c in read_conversations([tmp_path / "head.jsonl"])] == [
        ([CHAT[0]], None, None),
        (None, "plain", None),
        (CHAT, None, tools),
    ]


def test_the_head_of_data_says_what_is_not_taught(tmp_path: Path) -> None:
    talk = {"messages": [*CHAT, CHAT[0], {**CHAT[1], "weight": 0}, *CHAT], "finish_reason": "length"}
    first = write(tmp_path / "a.jsonl", talk)
    write_head([first], 1, tmp_path / "head.jsonl")
    (found,) = read_conversations([tmp_path / "head.jsonl"])
    assert found.messages == CHAT * 3
    assert (found.unweighted, found.cut) == ({2}, True)


def test_a_weight_that_is_neither_0_nor_1_costs_its_conversation_only(tmp_path: Path) -> None:
    half = {"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}
    first, second = read_conversations([write(tmp_path / "a.jsonl", half, CHAT)])
    assert first.malformed == "message 2 has the weight 0.5"
    assert second.messages == CHAT
