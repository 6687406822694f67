"""What a run says of its devices, queues and workers while it goes."""

from __future__ import annotations

import sys
import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftsmith.observe.events import EventLog, read_events
from draftsmith.observe.status import read_status
from draftsmith.pipeline import clock as clock_module
from draftsmith.pipeline import vitals as module
from draftsmith.pipeline.clock import WorkerClock
from draftsmith.pipeline.link import Link, Stop
from draftsmith.pipeline.run import train
from draftsmith.pipeline.vitals import Vitals
from draftsmith.training.step import Replica


def test_shares_are_of_the_time_since_the_last_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock, link = WorkerClock("target 0"), Link[int](0, 1, 2, Stop())
    link.put(0, 0)
    with EventLog(tmp_path / "events.jsonl") as log:
        vitals = Vitals(log, tmp_path, (torch.device("cpu"),), [clock], {"target 0": link}, 2, lambda: 7)
        clock.seconds["busy"] = 1e6
        now[0] += 12.0
        first = vitals.sample(None)
        now[0] += 4.0
        clock.seconds["input"] += 1.0
        second = vitals.sample(None)
    assert (first["step"], first["queues"], first["devices"]) == (7, {"target 0": [1, 2]}, [])
    assert first["workers"]["target 0"]["busy"] == 1.0
    assert second["workers"]["target 0"]["busy"] == 0.0
    assert second["workers"]["target 0"]["input"] == 0.25
    assert second["host"]["disk_free"] > 0


def test_what_waited_for_the_interpreter_was_shown_as_busy_until_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps = count()
    monkeypatch.setattr(clock_module, "_thread_use", lambda: (next(sleeps), 0.0))  # it sleeps, and was on no core
    clock = WorkerClock("target 0")
    clock.interpreter_wait = lambda: 1e6  # all that the thread sleeps is such a wait
    with EventLog(tmp_path / "events.jsonl") as log:
        vitals = Vitals(log, tmp_path, (torch.device("cpu"),), [clock], {}, 2, lambda: 0)
        with clock.busy(0):
            time.sleep(0.05)
            within = vitals.sample(None)["workers"]["target 0"]
        after = vitals.sample(None)["workers"]["target 0"]
    assert within["busy"] > 0 == within["interpreter"]
    assert after["interpreter"] > 0 == after["busy"]


def test_a_run_has_vitals(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VITALS_SECONDS", 0.02)
    sample, taken, step = Vitals.sample, threading.Event(), Replica.step

    def sampled(self, probe):
        taken.set()
        return sample(self, probe)

    def late_step(self, *arguments, **named):
        assert taken.wait(60)
        return step(self, *arguments, **named)

    monkeypatch.setattr(Vitals, "sample", sampled)
    monkeypatch.setattr(Replica, "step", late_step)
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


class Library(SimpleNamespace):
    """Stands in for NVIDIA's on a machine with one card."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __getattr__(self, name: str) -> object:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        answers: dict[str, object] = {
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "card",
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3 * 2**30, total=140 * 2**30),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
            "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
        }
        return lambda *asked: f"GPU-{asked[0]}" if name == "nvmlDeviceGetUUID" else answers.get(name, 700)


def test_what_is_written_of_gpus_is_what_readers_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this rank's card all facts, with a cause once its memory came and went; of another's what it sent."""
    monkeypatch.setattr(module, "VITALS_SECONDS", 0.02)
    monkeypatch.setitem(sys.modules, "pynvml", Library())
    taken = count(4)
    stats = {"reserved_bytes.all.current": 2**34, "allocated_bytes.all.current": 2**33, "num_alloc_retries": 0}
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _device: SimpleNamespace(uuid="card"))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _device: 2**33)
    monkeypatch.setattr("torch.cuda.memory_stats", lambda _device: {**stats, "num_device_alloc": next(taken)})
    clock, written = WorkerClock("drafter 0"), threading.Event()
    with EventLog(tmp_path / "events.jsonl") as log:
        parts = log, tmp_path, (torch.device("cuda", 0),), [clock], {"drafter 0": Link[int](0, 1, 2, Stop())}, 2
        log.listen(lambda _event: written.set())
        with Vitals(*parts, lambda: 7, exchange=lambda sample: [(1, sample)]):
            assert written.wait(60)  # and another sample comes at the end
        notices = [each["text"] for each in log.summary["notices"].values()]
    assert notices == []
    events = list(read_events(tmp_path / "events.jsonl"))
    assert {event["kind"] for event in events} == {"vitals"}
    own, other, *_ = events[-1]["devices"]
    assert (own["device"], other["device"]) == ("cuda:0", "cuda:0 of rank 1")
    assert own == {
        "device": "cuda:0", "name": "NVIDIA H200", "memory_used": 3 * 2**30, "memory_total": 140 * 2**30, "use": 0.97,
        "clock": 700, "clock_max": 700, "slowed_by": ["power cap"], "power": 0.7, "power_limit": 0.7,
        "temperature": 700, "allocated": 2**33, "allocated_peak": 0, "reserved": 2**34, "retries": 0,
        "volatility": 0.5, "volatile_because": "tensors of new sizes, or more of them at a time: 1 new pieces",
    }  # fmt: skip
    assert events[-1]["queues"].keys() == {"drafter 0", "drafter 0 of rank 1"}


def test_vitals_that_fail_end_no_run(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such file")

    monkeypatch.setattr(module, "host_facts", fail)
    result = train(tiny_run("blind", training={"steps": 1}))
    notices = [event["text"] for event in read_events(result.folder / "events.jsonl") if event["kind"] == "notice"]
    assert "no more vitals: ValueError: no such file" in notices
    assert result.step == 1
