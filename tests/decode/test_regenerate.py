"""Regenerating against a server that is slow, drops, refuses and lies; killed at any moment, it loses nothing."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hostile_server import HostileServer, answer_to, question_of

from draftsmith import cli
from draftsmith.config import TargetConfig
from draftsmith.data.conversation import Conversation
from draftsmith.data.conversations import read_conversations
from draftsmith.decode import regenerate as module
from draftsmith.decode.calls import find_call_opening
from draftsmith.decode.dialogue import make_dialogue
from draftsmith.decode.generate import Answer
from draftsmith.decode.prompts import Prompt, encode_prompts
from draftsmith.decode.regenerate import (
    RegenerateReport,
    Sampling,
    regenerate_from_server,
    regenerate_from_target,
)
from draftsmith.decode.server import ChatServer, Throttle, _well_formed
from draftsmith.decode.speculative import GreedyProposer, decode
from draftsmith.errors import UserError
from draftsmith.target.load import load_target, load_tokenizer


def write(path: Path, count: int, turns: int = 1) -> Path:
    lines = []
    for i in range(count):
        messages = [{"role": "system", "content": "Be brief"}] if i % 3 == 0 else []
        for turn in range(turns):
            messages += [{"role": "user", "content": f"question {i}.{turn}"}, {"role": "assistant", "content": "old"}]
        lines.append({"messages": messages})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(url: str, data: Path, output: Path, **how: Any) -> RegenerateReport:
    limit, listener = how.pop("limit", None), how.pop("listener", None)
    sampling = how.pop("sampling", Sampling(max_tokens=50, temperature=0.5))
    settings = {"concurrency": 8, "attempts": 6, "timeout": 30, "first_wait": 0.01, **how}
    return regenerate_from_server([data], output, ChatServer(url, **settings), sampling, limit=limit, listener=listener)


def records(path: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["prompt_index"] for record in found}) == len(found), "a conversation twice"
    return {record["prompt_index"]: record for record in found}


def check_conversations(path: Path, data: Path) -> None:
    """The slow twin: every conversation answered turn by turn, as the server answers."""
    found = records(path)
    for index, conversation in enumerate(read_conversations([data])):
        said: list[dict[str, Any]] = []
        for message in conversation.messages or []:
            if message["role"] == "assistant":
                said.append({"role": "assistant", "content": answer_to(said)})
            else:
                said.append(message)
        assert found[index]["messages"] == said


def test_every_turn_is_answered_in_the_history_of_new_answers(tmp_path: Path) -> None:
    data, output = write(tmp_path / "data.jsonl", 20, turns=3), tmp_path / "out.jsonl"
    events: list[dict[str, Any]] = []
    sampling = Sampling(64, 0.6, 0.9, 20, 7, {"enable_thinking": False}, {"repetition_penalty": 1.1})
    with HostileServer() as server:
        report = run(server.url, data, output, sampling=sampling, listener=events.append, api_key="secret")
    check_conversations(output, data)
    assert (report.conversations, report.written, report.requests, report.again) == (20, 20, 60, 0)
    assert report.finish_reasons == {"stop": 60}
    assert report.tokens == sum(sum(record["answer_tokens"]) for record in records(output).values())
    body = server.asked[0]
    assert {key: body[key] for key in ("model", "max_tokens", "temperature", "top_p", "top_k", "n", "stream")} == {
        "model": "smith",
        "max_tokens": 64,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "n": 1,
        "stream": False,
    }
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["repetition_penalty"] == 1.1
    assert len({body["seed"] for body in server.asked}) == 60
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}
    assert server.most_under_way <= 8
    meta = (tmp_path / "out.jsonl.meta.json").read_text()
    assert json.loads(meta)["sampling"]["temperature"] == 0.6
    assert "secret" not in meta
    assert events[-1]["step"] == events[-1]["steps"] == 20
    assert events[-1]["unit"] == "60 requests (0 again) · conversation"
    # What was written trains: read, and the last answers are the target's own.
    again = list(read_conversations([output]))
    assert len(again) == 20
    assert not any(conversation.cut for conversation in again)


FAULTS = ["drop", 429, 500, "cut", "half", "empty list", "two choices", "no message", 503, "hang", 502, "drop", 408]


def test_a_server_that_does_everything_wrong_costs_repetitions_and_no_answer(tmp_path: Path) -> None:
    data, output = write(tmp_path / "data.jsonl", 12, turns=2), tmp_path / "out.jsonl"
    with HostileServer([*FAULTS, "slow", "counts", "uncounted"]) as server:
        report = run(server.url, data, output, concurrency=6, timeout=6)
    check_conversations(output, data)
    assert report.failed == 0
    # On a busy machine a good answer may come too late as well.
    assert report.again >= len(FAULTS)
    assert report.requests == 24 + report.again
    assert sum(report.faults.values()) == report.again
    names = {"status 429", "status 500", "not JSON", "not one choice", "no message", "ReadTimeout"}
    assert names <= report.faults.keys()
    assert report.uncounted == 2
    assert "2 answers have no token count that can be believed" in report.lines()
    cost = f"cost: {report.requests} requests, {report.again} of them repeated"
    assert any(line.startswith(cost) for line in report.lines())


def test_a_busy_server_sets_the_pace(tmp_path: Path) -> None:
    data, output = write(tmp_path / "data.jsonl", 120), tmp_path / "out.jsonl"

    allowed: list[float] = []
    with HostileServer() as server:
        chat = ChatServer(server.url, concurrency=32, attempts=100, timeout=30, first_wait=0.02)

        def more_than_three_is_too_many(_number: int) -> int | None:
            allowed.append(chat.throttle.allowed)
            return 429 if server.under_way >= 3 else None

        server.then, server.pause = more_than_three_is_too_many, 0.01
        report = regenerate_from_server([data], output, chat, Sampling(max_tokens=50))
    check_conversations(output, data)
    assert report.faults.keys() == {"status 429"}
    assert allowed[0] == 32
    assert min(allowed) <= 17  # how far down depends on who else uses the machine


def test_the_pace_halves_once_for_requests_of_one_time_and_recovers_one_by_one() -> None:
    async def pace() -> list[float]:
        throttle, allowed = Throttle(32), []
        for _ in range(7):
            time.sleep(0.001)  # sent after what was refused before
            began = time.monotonic()
            for _ in range(5):  # sent together, refused together
                throttle.busy(began)
            allowed.append(throttle.allowed)
        for _ in range(3):
            throttle.well()
            allowed.append(throttle.allowed)
        for _ in range(2000):
            throttle.well()
        return [*allowed, throttle.allowed]

    assert asyncio.run(pace()) == [16, 8, 4, 2, 1, 1, 1, 2, 2, 3, 32]


def test_no_more_requests_are_under_way_than_the_pace_allows() -> None:
    async def most() -> int:
        throttle, seen = Throttle(8), []
        throttle.busy(time.monotonic())

        async def request() -> None:
            async with throttle:
                seen.append(throttle.under_way)
                await asyncio.sleep(0)

        await asyncio.gather(*(request() for _ in range(40)))
        assert len(seen) == 40
        return max(seen)

    assert asyncio.run(most()) == 4


def test_where_a_conversation_must_end_early(tmp_path: Path) -> None:
    data, output = write(tmp_path / "data.jsonl", 4, turns=3), tmp_path / "out.jsonl"
    with HostileServer([None, "length", "tool", "silent"]) as server:
        report = run(server.url, data, output, concurrency=1)
    found = records(output)
    # The first conversation: one answer, then one that was cut off. The second calls a tool, the third says nothing.
    assert [found[index]["finish_reasons"] for index in range(4)] == [
        ["stop", "length"],
        ["tool_calls"],
        ["stop"],
        ["stop"] * 3,
    ]
    assert [message["role"] for message in found[0]["messages"]][-4:] == ["user", "assistant"] * 2
    assert found[1]["messages"][-1]["tool_calls"][0]["function"]["name"] == "f"
    assert found[2]["messages"][-1]["content"] == ""
    assert (report.cut_short, report.empty) == (3, 1)
    assert [conversation.cut for conversation in read_conversations([output])] == [
        record["finish_reason"] == "length" for record in found.values()
    ]


def test_refusals_of_one_conversation_are_listed_and_tried_again_later(tmp_path: Path) -> None:
    data, output = write(tmp_path / "data.jsonl", 6), tmp_path / "out.jsonl"
    with HostileServer([None, 400, None, *[500] * 3]) as server:
        report = run(server.url, data, output, concurrency=1, attempts=3)
    assert (report.written, report.failed) == (4, 2)
    failed = [json.loads(line) for line in (tmp_path / "out.jsonl.failed.jsonl").read_text().splitlines()]
    assert [(entry["prompt_index"], entry["attempts"]) for entry in failed] == [(1, 1), (3, 3)]
    assert failed[0]["reason"] == "status 400: fault 400 as asked"
    assert failed[0]["source"] == f"{data}:2"
    assert failed[1]["reason"] == "no answer after 3 requests, the last one: status 500"
    assert report.lines()[-1].startswith("NO: 2 conversations have no answer")
    with HostileServer() as server:
        meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
        for name in ("out.jsonl.meta.json", "out.jsonl.turns.jsonl.meta.json"):
            (tmp_path / name).write_text(json.dumps({**meta, "server": server.url}))
        again = run(server.url, data, output)
    assert (again.found, again.written, again.failed, again.requests) == (4, 2, 0, 2)
    check_conversations(output, data)
    assert not (tmp_path / "out.jsonl.failed.jsonl").exists()


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (401, "refuses: status 401: fault 401 as asked"),
        (404, "refuses: status 404"),
        (400, "20 conversations in a row got no answer, the last one: status 400"),
        (500, "20 conversations in a row got no answer, the last one: no answer after 2 requests"),
    ],
)
def test_a_server_that_answers_nothing_ends_the_work(tmp_path: Path, then: int, says: str) -> None:
    data, output = write(tmp_path / "data.jsonl", 60), tmp_path / "out.jsonl"
    with HostileServer([None] * 3, lambda _number: then) as server, pytest.raises(UserError, match=says):
        run(server.url, data, output, concurrency=3, attempts=2)
    assert len(records(output)) == 3
    assert len(server.asked) < 3 + 3 * 50


def test_no_server_models_and_addresses(tmp_path: Path) -> None:
    data, output = write(tmp_path / "data.jsonl", 2), tmp_path / "out.jsonl"
    with HostileServer() as server:
        server.models = ["a", "b"]
        with pytest.raises(UserError, match=r"has 2 models \(give --model: a, b\)"):
            run(server.url, data, output)
        assert run(server.url, data, output, model="b").written == 2
        assert {body["model"] for body in server.asked} == {"b"}
    with pytest.raises(UserError, match=r"does not tell its models: no answer after 2 requests.*ConnectError"):
        run(server.url, data, tmp_path / "other.jsonl", attempts=2)
    with pytest.raises(UserError, match="is no address"):
        run("localhost:8000", data, tmp_path / "other.jsonl", model="x")


def test_other_work_and_a_second_process_are_refused(tmp_path: Path) -> None:
    data, output = write(tmp_path / "data.jsonl", 3), tmp_path / "out.jsonl"
    with HostileServer() as server:
        run(server.url, data, output)
        with pytest.raises(UserError, match=r"holds other work \(sampling"):
            run(server.url, data, output, sampling=Sampling(temperature=0.1))
        write(data, 4)
        with pytest.raises(UserError, match=r"holds other work \(questions"):
            run(server.url, data, output)
        write(data, 3)
    with HostileServer() as moved:  # the same model at another address is the same work
        assert moved.url != server.url
        assert run(moved.url, data, output).found == 3
        assert moved.asked == []
    assert json.loads((tmp_path / "out.jsonl.meta.json").read_text())["server"] == server.url
    with HostileServer() as server:

        def start() -> None:
            with pytest.raises(UserError, match="another process is writing it"):
                run(server.url, data, tmp_path / "two.jsonl")

        with ThreadPoolExecutor(1) as pool:
            tried: list[Future[None]] = []

            def second(_event: dict[str, Any]) -> None:
                if not tried:
                    tried.append(pool.submit(start))
                    tried[0].result()

            assert run(server.url, data, tmp_path / "two.jsonl", listener=second).written == 3
        assert tried
        (tmp_path / "text.jsonl").write_text('{"text": "plain"}\n')
        with pytest.raises(UserError, match="nobody asks anything in it"):
            run(server.url, tmp_path / "text.jsonl", tmp_path / "three.jsonl")


CHILD = """
import sys
from draftsmith.decode.regenerate import Sampling, regenerate_from_server
from draftsmith.decode.server import ChatServer
url, data, output = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
server = ChatServer(url, concurrency=5, timeout=60, first_wait=0.01)
regenerate_from_server([data], output, server, Sampling(max_tokens=50))
"""


def test_killed_again_and_again_it_loses_and_repeats_nothing(tmp_path: Path) -> None:
    data, output = write(tmp_path / "data.jsonl", 60, turns=3), tmp_path / "out.jsonl"
    turns = Path(f"{output}.turns.jsonl")
    rng = random.Random(0)
    faults = ["drop", 429, 500, "cut", None, None, None, None, None, None]

    def kept() -> set[str]:
        """Requests whose answer is on disk, as the server names them."""
        names = set()
        for path in (output, turns):
            for line in path.read_text().splitlines() if path.exists() else []:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue  # torn by the kill
                if "turn" in record:
                    names.add(f"question {record['prompt_index']}.{record['turn']} / {record['turn']}")
                else:
                    names |= {f"question {record['prompt_index']}.{turn} / {turn}" for turn in range(3)}
        return names

    kills = 2
    with HostileServer(then=lambda _number: rng.choice(faults)) as server:
        server.pause = 0.01
        command = [sys.executable, "-c", CHILD, server.url, str(data), str(output)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
        for process in [subprocess.Popen(command, **pipes) for _ in range(kills)]:  # type: ignore[call-overload]
            assert process.stdout.readline() == b"ready\n"
            safe, before = kept(), len(server.asked)
            process.stdin.write(b"\n")
            process.stdin.flush()
            wanted = before + rng.randrange(20, 60)
            while process.poll() is None and len(server.asked) < wanted:
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            repeated = [question_of(body) for body in server.asked[before:] if question_of(body) in safe]
            assert repeated == [], "asked again although the answer was on disk"
            assert safe < kept(), "lost"
            with turns.open("ab") as file:  # the worst moment: a line that is half written
                file.write(b'{"prompt_index": 1, "tu')
        safe, before = kept(), len(server.asked)
        report = run(server.url, data, output, sampling=Sampling(max_tokens=50), attempts=30)
        assert not safe & {question_of(body) for body in server.asked[before:]}
    assert report.found > 0
    assert report.written + report.found == 60
    check_conversations(output, data)
    assert len(records(output)) == 60
    counts = Counter(server.answered)
    # What was under way when it was killed is all that was ever answered twice.
    assert sum(counts.values()) - len(counts) <= 5 * kills


@pytest.mark.parametrize(
    ("roles", "questions"),
    [
        ("u", ["u"]),
        ("sua", ["su"]),
        ("suaua", ["su", "u"]),
        ("auau", ["u", "u"]),
        ("uaaua", ["u", "u"]),
        ("uau", ["u", "u"]),
        ("uuau", ["uu", "u"]),
        ("uatua", ["u"]),
        ("uatau", ["u"]),
        ("sa", []),
        ("a", []),
    ],
)
def test_questions_of_a_conversation(roles: str, questions: list[str]) -> None:
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    messages = [{"role": names[role], "content": f"{i}"} for i, role in enumerate(roles)]
    dialogue = make_dialogue(3, Conversation("a:4", messages=messages))
    found = [] if dialogue is None else dialogue.questions
    assert ["".join(message["role"][0] for message in question) for question in found] == questions
    assert make_dialogue(0, Conversation("a:1", text="x")) is None
    assert make_dialogue(0, Conversation("a:1", messages=messages, problem="an image")) is None


def test_a_target_in_this_process_answers_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(TargetConfig(path="demo"), "cpu", torch.float32)  # type: ignore[call-arg]
    data, output = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    asks = ["base64\ndef b32encode(s):", "utf_8_sig.IncrementalDecoder\ndef reset(self):", "ast\ndef parse(self):"]
    chats = [[{"role": "user", "content": asks[i + turn]} for turn in range(2)] for i in range(2)]
    old = {"role": "assistant", "content": "old"}
    data.write_text("".join(json.dumps({"messages": [one, old, two]}) + "\n" for one, two in chats))
    sampling = Sampling(max_tokens=90, temperature=0.0)

    def start(path: Path) -> RegenerateReport:
        return regenerate_from_target([data], path, target, sampling, identity={"path": "demo"})

    whole = start(tmp_path / "whole.jsonl")
    assert whole.written == 2
    real, calls = module.generate, [0]

    def stops(*arguments: Any, **options: Any) -> Any:
        for answer in real(*arguments, **options):
            calls[0] += 1
            if calls[0] > 2:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(module, "generate", stops)
    with pytest.raises(KeyboardInterrupt):
        start(output)
    monkeypatch.setattr(module, "generate", real)
    report = start(output)
    assert records(output) == records(tmp_path / "whole.jsonl")
    assert report.found + report.written == 2
    # Nothing was asked twice: two answers came before, the rest now.
    assert sum(report.finish_reasons.values()) == sum(whole.finish_reasons.values()) - 2
    stop_ids = set(target.stop_ids)
    for index, chat in enumerate(chats):
        said: list[dict[str, Any]] = []
        for question in chat:
            said.append(question)
            (ids,) = encode_prompts([Prompt("", messages=said)], target.tokenizer)
            slow = decode(target, ids, GreedyProposer(), max_new_tokens=90, stop_ids=stop_ids)
            text = target.tokenizer.decode([token for token in slow.tokens if token not in stop_ids])
            said.append({"role": "assistant", "content": text})
            if slow.finish_reason != "stop":
                break
        assert records(output)[index]["messages"] == said
        assert records(output)[index]["finish_reasons"][-1] == slow.finish_reason


def test_conversations_that_json_cannot_hold_are_listed(tmp_path: Path) -> None:
    """Python writes and reads them; a server gets none, and no line of them is written."""
    data, output, here = (tmp_path / name for name in ("data.jsonl", "out.jsonl", "here.jsonl"))
    ask = [{"role": "user", "content": "ast\ndef parse(self):"}, {"role": "assistant", "content": "old"}]
    lines = [
        {"messages": [{**ask[0], "content": "half \ud800"}, ask[1]]},
        {"messages": ask, "tools": [{"type": "function", "function": {"name": "f", "minimum": float("nan")}}]},
        {"messages": ask},
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with HostileServer() as server:
        report = run(server.url, data, output)
        assert len(server.asked) == 1
    assert (report.written, report.failed) == (1, 2)
    target = load_target(TargetConfig(path="demo"), "cpu", torch.float32)  # type: ignore[call-arg]
    report = regenerate_from_target([data], here, target, Sampling(max_tokens=8), identity={"path": "demo"})
    assert (report.written, report.failed) == (1, 2)
    for path, what in ((output, "cannot be sent as JSON: "), (here, "cannot be written as JSON: ")):
        assert list(records(path)) == [2]
        failed = [json.loads(line) for line in Path(f"{path}.failed.jsonl").read_text().splitlines()]
        assert [(line["prompt_index"], line["reason"].startswith(what)) for line in failed] == [(0, True), (1, True)]


def test_a_conversation_that_fills_the_positions_of_a_target_here_is_listed(tmp_path: Path) -> None:
    target = load_target(TargetConfig(path="demo"), "cpu", torch.float32)  # type: ignore[call-arg]
    data, output = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    asks = ["ast\ndef parse(self):", "x " * target.geometry.max_position_embeddings]
    old = {"role": "assistant", "content": "old"}
    data.write_text("".join(json.dumps({"messages": [{"role": "user", "content": ask}, old]}) + "\n" for ask in asks))
    report = regenerate_from_target([data], output, target, Sampling(max_tokens=8), identity={"path": "demo"})
    assert (report.written, report.failed) == (1, 1)
    assert list(records(output)) == [0]


def test_an_answer_of_a_target_here_that_calls_a_tool_ends_its_conversation(tmp_path: Path, monkeypatch) -> None:
    """As with a server; the call stays in the text, and without tools in the conversation it is only text."""
    target = load_target(TargetConfig(path="demo"), "cpu", torch.float32)  # type: ignore[call-arg]
    tokenizer = target.tokenizer
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    asks = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "old"},
        {"role": "user", "content": "two"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps(line) + "\n" for line in ({"messages": asks, "tools": tools}, {"messages": asks}))
    )
    seen: list[str] = []

    def says(_target: Any, prompts: Any, *, indices: Any, **_options: Any) -> Any:
        for prompt, index in zip(prompts, indices, strict=True):
            seen.append(tokenizer.decode(prompt))
            tokens = tokenizer("<call>f</call>", add_special_tokens=False)["input_ids"]
            yield Answer(index, tokens, "stop")

    monkeypatch.setattr(module, "generate", says)
    output, identity = tmp_path / "out.jsonl", {"path": "demo"}
    own = tokenizer.chat_template
    report = regenerate_from_target([data], output, target, Sampling(), identity=identity, chat_template=template)
    found = records(output)
    assert found[0]["finish_reasons"] == ["tool_calls"]
    assert found[1]["finish_reasons"] == ["stop", "stop"]
    assert found[0]["messages"][-1] == {"role": "assistant", "content": "<call>f</call>"}
    assert report.cut_short == 1
    assert seen[0].endswith("[user]one[assistant]"), "the given template was rendered"
    with pytest.raises(UserError, match=r"holds other work \(chat_template"):
        regenerate_from_target([data], output, target, Sampling(), identity=identity, chat_template=own)


OPENINGS = {
    '<tool_call>\n{"name": "NAME"}': ("<tool_call>", ["<tool_call>x", "Let me see.\n<tool_call>"], ["tool_call", ""]),
    '{"name": "NAME"}': ("", ['{"name":"f"}', '\n{ "name": "g"'], ['say {"name": "f"}', '{"n": 1}']),
    "": ("", [], ["{", "<tool_call>"]),
}


@pytest.mark.parametrize("call", OPENINGS)
def test_how_a_template_opens_calls(call: str) -> None:
    tokenizer = load_tokenizer(TargetConfig(path="demo"))  # type: ignore[call-arg]
    tokenizer.add_tokens(["<tool_call>"])
    before, _, after = call.partition("NAME")
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
        + (f"{before}{{{{ c.function.name }}}}{after}" if call else "")
        + "{% endfor %}{% endfor %}"
    )
    token, calls, no_calls = OPENINGS[call]
    opening = find_call_opening(tokenizer)
    assert opening.token == token
    assert all(opening.opens(text) for text in calls)
    assert not any(opening.opens(text) for text in no_calls)


# What Python reads as JSON, and nobody else: numbers without end, half of a surrogate pair, nesting without end.
NOT_JSON = ('{"a": NaN}', '{"a": [-Infinity]}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a": ' * 100_000)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    data, output = write(tmp_path / "data.jsonl", 5), tmp_path / "out.jsonl"
    monkeypatch.setenv("MY_KEY", "k")
    with HostileServer([None, 400]) as server:
        arguments = ["data", "regenerate", str(output), str(data), "--server", server.url, "--concurrency", "1"]
        assert cli.main([*arguments, "--limit", "3", "--api-key-env", "MY_KEY", "--json"]) == 1
        out, err = capsys.readouterr()
        assert (json.loads(out)["written"], json.loads(out)["failed"]) == (2, 1)
        assert "requests (" in err
        assert cli.main([*arguments, "--limit", "3", "--api-key-env", "MY_KEY"]) == 0
        assert "3 of 3 conversations answered" in capsys.readouterr().out
        assert {headers["authorization"] for headers in server.headers} == {"Bearer k"}
    assert cli.main([*arguments, "--chat-template", str(data)]) == 2
    assert "a server has its own template (give it to the server)" in capsys.readouterr().err
    for wrong, says in [
        (["--target", "demo"], "give either --server URL or --target PATH"),
        (["--top-p", "0"], "Invalid value for '--top-p'"),
        (["--extra", "[1]"], "--extra: not a JSON object"),
        (["--template-options", "{"], "--template-options: not valid JSON"),
        *((["--extra", text], "--extra: not valid JSON") for text in NOT_JSON),
        *((["--template-options", text], "--template-options: not valid JSON") for text in NOT_JSON),
    ]:
        assert cli.main([*arguments, *wrong]) == 2
        assert says in capsys.readouterr().err


def test_a_template_that_is_not_there_is_named_by_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = write(tmp_path / "data.jsonl", 1), tmp_path / "out.jsonl"
    command = ["data", "regenerate", str(output), str(data), "--target", "demo", "--device", "cpu"]
    assert cli.main([*command, "--chat-template", str(tmp_path / "none")]) == 2
    assert f"{tmp_path / 'none'}: no such chat template (check --chat-template)" in capsys.readouterr().err
    assert not output.exists()


def test_a_refused_start_does_not_block_the_corrected_one(tmp_path: Path) -> None:
    data, output = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    with pytest.raises(UserError, match=r"top_p 0 is outside \(0, 1\]"):
        Sampling(top_p=0)
    data.write_text('{"text": "plain"}\n')
    with HostileServer() as server:
        with pytest.raises(UserError, match="nobody asks anything in it"):
            run(server.url, data, output)
        write(data, 2)
        assert run(server.url, data, output, sampling=Sampling(max_tokens=50, temperature=0.1)).written == 2


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "tool_calls"])
def test_an_answer_may_have_no_content(key: str) -> None:
    """A model that was cut off inside its thought says only that; servers name it either way."""
    reply: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": None, key: "so far"}}]}
    assert _well_formed(httpx.Response(200, json=reply), "/chat/completions") == reply
    reply["choices"][0]["message"][key] = None
    assert _well_formed(httpx.Response(200, json=reply), "/chat/completions") == "neither content nor tool calls"


def test_a_server_without_a_model_to_take_leaves_no_connection_open() -> None:
    async def ask(url: str) -> ChatServer:
        chat = ChatServer(url)
        with pytest.raises(UserError, match="has 2 models"):
            await chat.__aenter__()
        return chat

    with HostileServer() as server:
        server.models = ["a", "b"]
        assert asyncio.run(ask(server.url))._client.is_closed
