"""Every layout by inspection and by name: the same conversation, whatever shape it came in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftsmith.data.conversation import Conversation
from draftsmith.data.layouts import LAYOUTS, to_conversation
from draftsmith.errors import UserError

ASK, SAY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief"}
CHATS: list[tuple[str, Any]] = [
    ("messages", {"messages": [SYSTEM, ASK, SAY], "id": 7}),
    ("messages", [SYSTEM, ASK, SAY]),
    ("messages", {"conversations": [SYSTEM, ASK, SAY]}),
    ("messages", {"conversation": [SYSTEM, ASK, SAY], "text": "rendered"}),
    ("sharegpt", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}),
    ("messages", {"messages": json.dumps([SYSTEM, ASK, SAY])}),
    ("sharegpt", {"conversations": json.dumps([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}])}),
    ("sharegpt", {"messages": [{"from": "user", "value": "Hi"}, {"from": "model", "value": "Hello", "weight": None}]}),
    ("alpaca", {"instruction": "Hi", "input": "", "output": "Hello"}),
    ("alpaca", {"instruction": "Hi", "output": "Hello", "text": "### Instruction: Hi"}),
    ("prompt", {"prompt": "Hi", "response": "Hello"}),
    ("prompt", {"prompt": "Hi", "completion": "Hello"}),
    ("prompt", {"question": "Hi", "answer": "Hello"}),
    ("prompt", {"input": "Hi", "output": "Hello"}),
    ("prompt", {"prompt": [ASK], "completion": [SAY]}),
    ("prompt", {"prompt": "Hi", "chosen": [ASK, SAY], "rejected": [ASK, ASK]}),
]


@pytest.mark.parametrize(("name", "record"), CHATS)
def test_a_chat_in_every_layout(name: str, record: Any) -> None:
    if isinstance(record, dict) and name != "messages":
        record = {**record, "system": "Be brief"}
    expected = Conversation("a:1", messages=[SYSTEM, ASK, SAY])
    found = to_conversation(record, "a:1")
    assert found == expected
    assert found.layout == name
    assert to_conversation(record, "a:1", name) == expected
    readers = {other for other in LAYOUTS if _reads(record, other)}
    # A "text" or an "output" beside it may be another layout, if it is asked for.
    assert name in readers
    assert len(readers) <= 3


def _reads(record: Any, layout: str) -> bool:
    try:
        to_conversation(record, "a:1", layout)
    except UserError:
        return False
    return True


def test_plain_text_and_a_prompt_alone() -> None:
    assert to_conversation({"text": "x"}, "a:1") == to_conversation("x", "a:1") == Conversation("a:1", text="x")
    assert to_conversation({"prompt": "Hi"}, "a:1").messages == [ASK]


def test_columns_by_name() -> None:
    found = to_conversation({"q": "Hi", "a": "Hello"}, "a:1", columns={"prompt": "q", "response": "a"})
    assert found.messages == [ASK, SAY]
    with pytest.raises(UserError, match=r"a:1: has no column 'q' \(keys: 'x'\)"):
        to_conversation({"x": 1}, "a:1", columns={"prompt": "q"})
    with pytest.raises(UserError, match=r"a:1: not of the layout 'sharegpt' \(keys: 'prompt'\)"):
        to_conversation({"prompt": "Hi"}, "a:1", "sharegpt")


def test_alpaca_has_input_system_and_history() -> None:
    record = {
        "instruction": "Add",
        "input": "1 2",
        "output": "3",
        "system": "Count",
        "history": [["Hi", "Hello"]],
    }
    assert to_conversation(record, "a:1").messages == [
        {"role": "system", "content": "Count"},
        ASK,
        SAY,
        {"role": "user", "content": "Add\n1 2"},
        {"role": "assistant", "content": "3"},
    ]


def test_tools_and_calls_come_as_objects_whatever_they_were_written_as() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    as_text = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    result = {"role": "tool", "content": "2"}
    calls = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, result, SAY]
    expected = Conversation("a:1", messages=calls, tools=[tool])
    for tools in ([tool], json.dumps([tool])):
        for written in ([call], [as_text], json.dumps([as_text])):
            asks = {"role": "assistant", "tool_calls": written}
            assert to_conversation({"messages": [ASK, asks, result, SAY], "tools": tools}, "a:1") == expected
    shared = [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "Hello"},
    ]
    assert to_conversation({"conversations": shared, "tools": [tool]}, "a:1") == expected


def test_parts_reasoning_and_what_is_no_text() -> None:
    parts = ["Hi", {"type": "input_text", "text": " you"}, {"text": "!"}, {"type": "text", "text": "?"}]
    found = to_conversation([{"role": "user", "content": parts}, SAY], "a:1")
    assert found.messages is not None
    assert [part["text"] for part in found.messages[0]["content"]] == ["Hi", " you", "!", "?"]
    assert {part["type"] for part in found.messages[0]["content"]} == {"text"}
    thought = to_conversation([ASK, {**SAY, "reasoning": "hm"}], "a:1")
    assert thought.messages == [ASK, {**SAY, "reasoning_content": "hm"}]
    image = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "x"}}]
    seen = to_conversation([{"role": "user", "content": image}, SAY], "a:1")
    assert seen.problem == "a part of type 'image_url' in message 1"


@pytest.mark.parametrize(("weight", "taught"), [(0, False), (0.0, False), (1, True), (1.0, True), (None, True)])
def test_the_weight_of_an_answer_says_whether_it_is_taught(weight: Any, taught: bool) -> None:
    """In both layouts of turns; that of a question says nothing, and a template sees none."""
    chats = {"messages": [{**ASK, "weight": 0.3}, {**SAY, "weight": weight}, ASK, SAY]}
    human, gpt = {"from": "human", "value": "Hi", "weight": 0.0}, {"from": "gpt", "value": "Hello"}
    for record in (chats, {"conversations": [human, {**gpt, "weight": weight}, human, {**gpt, "weight": 1.0}]}):
        found = to_conversation(record, "a:1")
        assert found.unweighted == (set() if taught else {1})
        assert found.messages == [ASK, SAY, ASK, SAY]


@pytest.mark.parametrize("weight", [0.5, 2, -1, "0", True, False, float("nan"), [0]])
def test_another_weight_is_refused(weight: Any) -> None:
    with pytest.raises(UserError, match=r"a:1: message 2 has the weight .* \(1: the answer is taught, 0: it is not\)"):
        to_conversation([ASK, {**SAY, "weight": weight}], "a:1")
