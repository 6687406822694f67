"""Logs and files that are shaped otherwise than ours: nothing that reads a run breaks, and what is left out is said."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.cli import main
from draftsmith.observe.events import EventLog, read_events
from draftsmith.observe.history import read_history
from draftsmith.observe.lock import take_lock
from draftsmith.observe.report import make_report, write_report
from draftsmith.observe.status import read_status
from draftsmith.observe.summary import parse, read_summary
from draftsmith.observe.trace import write_trace
from draftsmith.observe.watch import view, watch

DEVICE = {
    "device": "cuda:0", "name": "H200", "memory_used": 1, "memory_total": 2, "use": 0.5, "clock": 1, "clock_max": 2,
    "power": 1.0, "power_limit": 2.0, "temperature": 40, "slowed_by": ["power cap"], "allocated": 1, "reserved": 1,
    "allocated_peak": 1, "retries": 0, "volatility": 0.5, "volatile_because": "new sizes",
}  # fmt: skip
SHARES = {"busy": 0.5, "input": 0.2, "output": 0.1, "others": 0.1, "compiling": 0.0, "interpreter": 0.1}


def write_run(folder: Path) -> list[dict[str, Any]]:
    """A run with every kind of event and every field that is read; returns the events."""
    folder.mkdir(parents=True, exist_ok=True)
    os.close(take_lock(folder))
    (folder / "run.json").write_text('{"config": {}}')
    with EventLog(folder / "events.jsonl") as log:
        log.write("plan", lines=["target"])
        log.write("run", step=0, steps=40, workers=["target 0"], cards={"cuda:0": "H200"}, anchors=4, data="d")
        log.write("ledger", lines=["region  graph", "drafter 0  eager: dense"])
        log.write("evidence", step=1, ok=True, text="seen")
        log.write("costs", target=0.1)
        for step in range(11, 21):
            for worker in ("target 0", "drafter 0"):
                log.write("work", worker=worker, row=step, start=step, end=step + 0.5, queue=1, input=0.1, output=0.1)
            log.write(
                "step", step=step, steps=40, loss=2.0, tau_proxy=1.5, accept_by_slot=[0.5], lr=0.1, grad_norm=1.0,
                blocks=4.0, tokens_per_second=1e3, rate_seconds=9.0, data_wait=0.1, eta_seconds=9.0, unit="step",
            )  # fmt: skip
        log.write("phase", worker="drafter 0", what="update", number=1, start=20.0, end=20.5)
        log.write("eval", step=20, loss=2.0, tau_proxy=1.5)
        log.write("tau", step=20, decode=1.5, walk=1.5)
        log.write("checkpoint", step=20, path="c/step-20", stall_seconds=0.1, write_seconds=0.1)
        host = {"load": 1.0, "cores": 2, "process_memory": 1, "disk_free": 1, "memory_available": 9, "memory_total": 9}
        parts = {"queues": {"target 0": [1, 2]}, "workers": {"target 0": SHARES}, "interpreter": {"taken": 0.1}}
        log.write("vitals", step=20, devices=[DEVICE], host=host, **parts)
        log.write("balance", step=20, text="nobody waits", workers={"target 0": {**SHARES, "rows": 3, "row_ms": 1.0}})
        log.write("error", topic="checkpoint", text="disk full")
        log.write("notice", topic="tau", standing=True, text="τ falls")
        log.write("end", step=20, reason="interrupted")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert read_summary(folder / "events.jsonl")["malformed"] == 0
    return events


ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**400, float("nan"), "", "x", " ", "\ud800", [], [1], ["x"], [[]], [{}], {}, {"x": 1},
    {"": {}}, {"x": []}, {"x": {"y": "z"}}, {"x": None},
)  # fmt: skip


def spoilt(value: Any, depth: int) -> Iterator[Any]:
    """`value` with one part of it replaced or missing, in all ways."""
    if isinstance(value, dict) and depth:
        for key in value:
            rest = {name: each for name, each in value.items() if name != key}
            if key != "kind":
                yield rest
                yield from ({**value, key: each} for each in spoilt(value[key], depth - 1))
    elif isinstance(value, list) and depth and value:
        yield from ([*value[:-1], each] for each in spoilt(value[-1], depth - 1))
    yield from ODD


def look(run: Path) -> None:
    found = read_status(run)
    assert all(line.isprintable() for line in view(found, 100))
    json.dumps(found.to_json()).encode()


def test_no_spoilt_event_and_no_spoilt_summary_breaks_a_reader(tmp_path: Path) -> None:
    """Each field of each kind in turn, as all kinds of values: alone for `status`, all in one log for the others."""
    run = tmp_path / "run"
    events = write_run(run)
    good = "".join(json.dumps(event) + "\n" for event in events if event["kind"] != "summary")
    last = {event["kind"]: event for event in events}
    all_spoilt = [
        json.dumps(event)
        for kind in last
        for event in spoilt(last[kind], 4)
        if isinstance(event, dict) and event.get("kind") == kind
    ]
    assert len(all_spoilt) > 4000
    log = run / "events.jsonl"
    passed = set()
    for line in dict.fromkeys(all_spoilt):
        event = parse(line.encode())
        if event is None or event["kind"] == "malformed":
            continue  # readers see the same of each
        passed.add(event["kind"])
        if event["kind"] not in ("work", "phase"):
            log.write_text(f"{good}{line}\n")
            look(run)
    assert passed == set(last)
    log.write_text(good + "\n".join(all_spoilt) + "\n")
    watch(run, io.StringIO())
    write_trace(run, run / "trace.json")
    make_report([read_history(run)] * 2, [read_status(run)] * 2)


BAD = (
    '{"kind":"step"}', '{"time":1,"kind":"step"}', '{"time":1,"kind":"step","step":"2"}', '{"time":"abc","kind":"end"}',
    '{"time":1,"kind":"vitals","queues":7}', '{"time":1,"kind":"vitals","queues":{"target 0":7}}',
    '{"time":1,"kind":"summary","content":[]}', '{"time":1,"kind":"summary","content":{"step":3}}',
    '{"time":1,"kind":"notice","topic":["a"]}',
)  # fmt: skip


def test_what_is_left_out_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    with open(tmp_path / "events.jsonl", "a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in BAD))
    (tmp_path / "environment.json").write_text('{"machine": []}')
    assert main(["status", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.count("malformed") == 1
    assert f"note    {len(BAD)} malformed events in the log are left out" in out
    assert main(["watch", str(tmp_path)]) == 1
    assert "step 20/40" in capsys.readouterr().out
    page = write_report([tmp_path], tmp_path / "r.html").read_text()
    assert f"left out: {len(BAD)} malformed events; environment.json, which cannot be understood" in page
    assert main(["report", str(tmp_path), "--trace", str(tmp_path / "t.json")]) == 0
    assert f"{len(BAD)} malformed events left out" in capsys.readouterr().out
    with EventLog(tmp_path / "events.jsonl") as log:  # a resumed run
        log.write("run", step=20, steps=40)
        assert (log.summary["malformed"], log.summary["step"]["step"]) == (len(BAD), 20)


def test_a_kind_that_is_called_like_a_part_of_the_summary_is_no_such_part(tmp_path: Path) -> None:
    write_run(tmp_path)
    before = read_summary(tmp_path / "events.jsonl").content
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write("".join(f'{{"time":1,"kind":"{kind}","step":3}}\n' for kind in ("_init__", "remember", "count")))
    after = read_summary(tmp_path / "events.jsonl").content
    assert {**after, "events": before["events"], "time": before["time"]} == before


def test_a_speed_of_nothing_is_no_best(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        for step in range(1, 30):
            log.write("step", step=step, tokens_per_second=0.0, rate_seconds=9.0)
    assert read_status(tmp_path).to_json()["best_tokens_per_second"] is None


def test_halves_of_letters_become_question_marks_and_whole_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"time":1,"kind":"notice","text":"a \\ud800 \\ud83d\\ude00 \xcf\x84"}\n'
                     b'{"time":1,"kind":"notice","text":"\xed\xa0\x80"}\n')  # fmt: skip
    assert [event["text"] for event in read_events(path)] == ["a ? 😀 τ"]


def test_texts_of_events_are_one_printable_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("notice", topic="x", standing=True, text="a\x1b[2J\x07b\nc\u202ed\xa0e")
        log.write("step", step=21, unit="st\nep\x1b")
        log.write("end", reason="inter\nrupted")
    for command in ("status", "watch"):
        main([command, str(tmp_path)])
        out = capsys.readouterr().out
        assert "a\ufffd[2J\ufffdb c\ufffdd e" in out
        assert all(line.isprintable() for line in out.splitlines())
        assert "inter rupted" in out


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
@pytest.mark.parametrize("json_", [False, True])
def test_any_encoding_of_the_output_will_do(tmp_path: Path, encoding: str, json_: bool) -> None:
    run = tmp_path / os.fsdecode(b"r\xff")
    write_run(run)
    command = [sys.executable, "-m", "draftsmith", "status", str(run), *(["--json"] if json_ else [])]
    result = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding})
    assert result.returncode == 1, result.stderr
    sign = "τ" if encoding == "utf-8" else "?"
    assert f"{sign} decoded 1.50" in (result.stderr if json_ else result.stdout).decode(encoding)
    if json_:
        (notice,) = json.loads(result.stdout)["notices"]
        assert notice["text"] == "τ falls"


def test_streams_that_are_no_files_are_left_alone(tmp_path: Path) -> None:
    write_run(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        assert main(["status", str(tmp_path)]) == 1
    assert "τ decoded" in stream.getvalue()
