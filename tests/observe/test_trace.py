"""The trace of a run: tracks, slices, arrows and counters as its events say, in the form that viewers read."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from draftsmith.cli import main
from draftsmith.errors import UserError
from draftsmith.observe.events import EventLog
from draftsmith.observe.trace import write_trace


def write_run(folder: Path, rows: int = 4) -> Path:
    with EventLog(folder / "events.jsonl") as log:
        log.write("run", step=0, steps=2)
        for row in range(rows):
            start = 1000.0 + row
            log.write("work", worker=f"prefetch {row % 2}", row=row, start=start, end=start + 0.1, output=0.2, queue=0)
            log.write("work", worker="target 0", row=row, start=start + 0.3, end=start + 0.5, input=0.1, queue=1)
            log.write("work", worker="drafter 0", row=row, start=start + 0.6, end=start + 0.9, input=0.05, queue=0)
        log.write("phase", worker="drafter 0", what="update", number=0, start=1004.0, end=1004.1)
        log.write("vitals", devices=[{"device": "cuda:0", "use": 0.5, "reserved": 2**31}], interpreter={"taken": 0.25})
        log.write("notice", text="something")
    return folder


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in content["traceEvents"]:
        found[event["ph"]].append(event)
    return found


def test_rows_are_slices_and_arrows_follow_them(tmp_path: Path) -> None:
    count = write_trace(write_run(tmp_path), tmp_path / "trace.json")
    found = read(tmp_path / "trace.json")
    names = {event["tid"]: event["args"]["name"] for event in found["M"] if event["name"] == "thread_name"}
    assert list(names.values()) == ["prefetch 0", "prefetch 1", "target 0", "drafter 0"]
    slices: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in found["X"]:
        slices[names[event["tid"]]].append(event)
    work = {worker: [event["name"] for event in own if event["cat"] == "work"] for worker, own in slices.items()}
    assert work["target 0"] == ["row 0", "row 1", "row 2", "row 3"]
    assert work["prefetch 1"] == ["row 1", "row 3"]
    first = next(event for event in slices["drafter 0"] if event["name"] == "row 0")
    assert (first["ts"], first["dur"]) == (pytest.approx(1000.6e6), pytest.approx(0.3e6))
    waits = {(names[event["tid"]], event["name"]) for event in found["X"] if event["cat"] == "wait"}
    assert waits == {
        ("prefetch 0", "waits for room"), ("prefetch 1", "waits for room"), ("target 0", "waits for a row"),
        ("drafter 0", "waits for features"),
    }  # fmt: skip
    assert [event["name"] for event in found["X"] if event["cat"] == "phase"] == ["update 0"]
    ends = {event["id"]: event for event in found["f"]}
    assert len(found["s"]) == len(ends) == 8, "two arrows a row"
    for leave in found["s"]:
        arrive = ends[leave["id"]]
        assert leave["ts"] <= arrive["ts"]
        for event in (leave, arrive):  # a viewer binds an arrow to the slice around its end
            inside = [
                s for s in found["X"] if s["tid"] == event["tid"] and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
            ]
            assert any(s["cat"] == "work" for s in inside)
    assert count == {"slices": len(found["X"]), "arrows": 8, "counters": len(found["C"]), "marks": 1}
    counters = {event["name"]: event["args"] for event in found["C"]}
    assert counters["rows in front of target 0"] == {"rows": 1}
    assert counters["cuda:0 memory held, GiB"] == {"value": 2.0}
    assert counters["cuda:0 use"] == {"value": 50.0}
    assert counters["interpreter taken, per cent"] == {"value": 25.0}


def test_a_resumed_runs_rows_are_told_apart_and_ranks_are_processes(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_run(tmp_path)  # the same numbers again
    (tmp_path / "rank-1.jsonl").write_bytes((tmp_path / "events.jsonl").read_bytes())
    write_trace(tmp_path, tmp_path / "trace.json")
    found = read(tmp_path / "trace.json")
    assert len({event["id"] for event in found["s"]}) == len(found["s"]) == 32
    assert {event["pid"] for event in found["X"]} == {0, 1}


def test_only_the_last_rows_are_kept(tmp_path: Path) -> None:
    write_trace(write_run(tmp_path, rows=100), tmp_path / "trace.json", last=30)
    rows = {event["args"]["row"] for event in read(tmp_path / "trace.json")["X"] if event["cat"] == "work"}
    assert min(rows) >= 89


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    assert main(["report", str(tmp_path), "--trace", str(tmp_path / "t.json"), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["slices"] > 0
    assert out["bytes"] == (tmp_path / "t.json").stat().st_size
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "empty").mkdir()
    with EventLog(tmp_path / "empty" / "events.jsonl") as log:
        log.write("run", step=0)
    with pytest.raises(UserError, match="no row"):
        write_trace(tmp_path / "empty", tmp_path / "t.json")
    assert main(["report", str(tmp_path), str(tmp_path), "--trace", str(tmp_path / "t.json")]) == 2
