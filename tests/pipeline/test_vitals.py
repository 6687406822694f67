"""What a run says of its devices, queues and workers while it goes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from draftsmith.observe.events import EventLog, read_events
from draftsmith.observe.status import read_status
from draftsmith.pipeline import vitals as module
from draftsmith.pipeline.clock import WorkerClock
from draftsmith.pipeline.link import Link, Stop
from draftsmith.pipeline.run import train
from draftsmith.pipeline.vitals import Vitals


def test_shares_are_of_the_time_since_the_last_sample(tmp_path: Path) -> None:
    clock, link = WorkerClock("target 0"), Link[int](0, 1, 2, Stop())
    link.put(0, 0)
    with EventLog(tmp_path / "events.jsonl") as log:
        vitals = Vitals(log, tmp_path, (torch.device("cpu"),), [clock], {"target 0": link}, 2, lambda: 7)
        clock.seconds["busy"] = 1e6
        first = vitals.sample(None)
        time.sleep(0.05)
        clock.seconds["input"] += 0.025
        second = vitals.sample(None)
    assert (first["step"], first["queues"], first["devices"]) == (7, {"target 0": [1, 2]}, [])
    assert first["workers"]["target 0"]["busy"] == 1.0
    assert second["workers"]["target 0"]["busy"] == 0.0
    assert 0.2 < second["workers"]["target 0"]["input"] <= 0.5
    assert second["host"]["disk_free"] > 0


def test_what_waited_for_the_interpreter_was_shown_as_busy_until_it_ended(tmp_path: Path) -> None:
    clock = WorkerClock("target 0")
    clock.interpreter_wait = lambda: 1.0  # all that the thread sleeps is such a wait
    with EventLog(tmp_path / "events.jsonl") as log:
        vitals = Vitals(log, tmp_path, (torch.device("cpu"),), [clock], {}, 2, lambda: 0)
        with clock.busy(0):
            time.sleep(0.05)
            within = vitals.sample(None)["workers"]["target 0"]
        after = vitals.sample(None)["workers"]["target 0"]
    assert within["busy"] > 0 == within["interpreter"]
    assert after["interpreter"] > 0 == after["busy"]


def test_a_run_has_vitals(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VITALS_SECONDS", 0.05)
    result = train(tiny_run("vitals"))
    events = [event for event in read_events(result.folder / "events.jsonl") if event["kind"] == "vitals"]
    assert len(events) > 1
    last = events[-1]
    assert last["queues"].keys() == {"target 0", "drafter 0"}
    assert last["workers"].keys() == {"prefetch 0", "prefetch 1", "target 0", "drafter 0"}
    assert all(0 <= share <= 1 for shares in last["workers"].values() for share in shares.values())
    status = read_status(result.folder)
    assert (status.state, status.healthy) == ("finished", True)
    assert "target 0 0/2" in "\n".join(status.lines())


def test_vitals_that_fail_end_no_run(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such file")

    monkeypatch.setattr(module, "host_facts", fail)
    result = train(tiny_run("blind", training={"steps": 1}))
    notices = [event["text"] for event in read_events(result.folder / "events.jsonl") if event["kind"] == "notice"]
    assert "no more vitals: ValueError: no such file" in notices
    assert result.step == 1
