"""The line about a start: phases from events, loading told apart, once a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.observe.events import EventLog, read_events
from draftsmith.pipeline.phases import MEASURING, PHASES, StartPhases
from draftsmith.pipeline.run import train


def start(tmp_path: Path, events: list[dict]) -> list[dict]:
    """What is written for these events of a run that began at second 100."""
    with EventLog(tmp_path / "events.jsonl") as log:
        phases = StartPhases(log, 100.0)
        for event in events:
            phases(event)
    return [event for event in read_events(tmp_path / "events.jsonl") if event.get("topic") == "startup"]


RUN = [
    {"kind": "plan", "time": 102.0},
    {"kind": "notice", "time": 112.5, "text": "target loaded", "weights_seconds": 10.0},
    {"kind": "run", "time": 115.0},
    {"kind": "warmup", "time": 121.0, "traced": 2.0, "compiled": 3.0, "loaded": 0.0, "text": ""},
    {"kind": "warmup", "time": 121.0, "predicted_seconds": 9.0, "text": ""},
    {"kind": "warmup", "time": 123.0, "traced": 0.5, "compiled": 0.0, "loaded": 1.0, "text": ""},
    {"kind": "ledger", "time": 124.0},
    {"kind": "evidence", "time": 126.0},
    {"kind": "step", "time": 126.5},
]


def test_phases(tmp_path: Path) -> None:
    (event,) = start(tmp_path, RUN)
    assert event["phases"] == {
        "plan": 2.0, "measure": 0.0, "load": 10.0, "build": 3.0, "trace": 2.5, "compile": 3.0, "from cache": 1.0,
        "warm": 2.5, "first update": 2.0,
    }  # fmt: skip
    assert set(event["phases"]) == set(PHASES)
    assert event["seconds"] == 16.0
    assert sum(event["phases"].values()) == 26.0, "nothing is counted twice or left out"
    assert event["text"].startswith("first update after 16.0 s without loading the target: plan 2.0, load 10.0, build")


def test_without_evidence_a_step_ends_it(tmp_path: Path) -> None:
    (event,) = start(tmp_path, [each for each in RUN if each["kind"] != "evidence"])
    assert event["phases"]["first update"] == 2.5


def test_measuring_is_a_phase_of_its_own(tmp_path: Path) -> None:
    """It comes before the plan is told, which names what was chosen."""
    measuring = {"kind": "notice", "topic": MEASURING, "time": 101.5, "text": ""}
    plan, loaded = {**RUN[0], "time": 107.0}, {**RUN[1], "weights_seconds": 5.0}
    (event,) = start(tmp_path, [measuring, {"kind": "costs", "time": 106.5}, plan, loaded, *RUN[2:]])
    assert (event["phases"]["plan"], event["phases"]["measure"]) == (2.0, 5.0)
    assert sum(event["phases"].values()) == 26.0


def test_a_run_that_never_stepped_says_nothing(tmp_path: Path) -> None:
    assert start(tmp_path, RUN[:-2]) == []


def test_a_run_says_it_once(tiny_run) -> None:
    result = train(tiny_run("run", training={"eval_rows": 0, "save_every": 0}))
    told = [event for event in read_events(result.folder / "events.jsonl") if event.get("topic") == "startup"]
    assert len(told) == 1
    phases = told[0]["phases"]
    assert phases["load"] > 0
    assert phases["compile"] == phases["trace"] == 0, "eager on the CPU"
    assert told[0]["seconds"] == pytest.approx(sum(phases.values()) - phases["load"], abs=0.05)
