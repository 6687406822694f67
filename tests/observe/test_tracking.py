"""Trackers behind one interface: what each is told, that none holds up or ends a run, that a missing one is said."""

from __future__ import annotations

import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.observe import tracking
from draftsmith.observe.events import EventLog, read_events
from draftsmith.observe.tracking import Background, Tracking, find_tracker, run_facts, scalars_of, trackers

STEP = {"kind": "step", "step": 3, "time": 12.5, "loss": 2.0, "grad_norm": "nan", "accept_by_slot": [0.5, None, 0.25]}
EVENTS: list[dict[str, Any]] = [
    {"kind": "run", "step": 0},
    STEP,
    {"kind": "work", "worker": "target 0"},
    {"kind": "eval", "step": 3, "time": 13.0, "loss": 2.5, "tau_proxy": 1.5},
    {"kind": "tau", "step": 3, "time": 14.0, "decode": 1.25, "walk": 1.25},
    {"kind": "notice", "text": "slow"},
    {"kind": "end", "step": 3, "reason": "all steps done"},
]
SCALARS = [
    (3, {"train/loss": 2.0, "train_accept/slot_01": 0.5, "train_accept/slot_03": 0.25}),
    (3, {"held_out/loss": 2.5, "held_out/tau_proxy": 1.5}),
    (3, {"held_out/decode": 1.25, "held_out/walk": 1.25}),
]


class Recorder:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def scalars(self, step: int, values: dict[str, float], seconds: float) -> None:
        self.calls.append((step, values))

    def text(self, kind: str, text: str) -> None:
        self.calls.append((kind, text))

    def close(self) -> None:
        self.calls.append(("closed",))


def test_events_become_scalars_and_texts() -> None:
    assert scalars_of(STEP) == SCALARS[0][1]
    recorder = Recorder()
    made: list[int] = []
    listener = Tracking(lambda step: made.append(step) or recorder)  # type: ignore[func-returns-value]
    listener({"kind": "notice", "text": "before there is anything to show"})
    for event in EVENTS:
        listener(event)
    assert made == [3]
    assert recorder.calls == [*SCALARS, ("notice", "slow"), ("closed",)]


def test_a_slow_tracker_holds_nobody_up_and_what_is_dropped_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "QUEUE", 5)
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 5.0)
    go_on, told = threading.Event(), []

    class Slow(Recorder):
        def scalars(self, *arguments: Any) -> None:
            go_on.wait(10)
            super().scalars(*arguments)

    slow = Slow()
    listener = Background("slow one", Tracking(lambda _step: slow), told.append)
    for step in range(100):
        listener({**STEP, "step": step})
    go_on.set()
    while listener._events.qsize():
        pass
    listener(EVENTS[-1])
    assert slow.calls[-1] == ("closed",)
    assert 5 <= len(slow.calls) - 1 <= 7
    assert told == [f"slow one was too slow: {101 - len(slow.calls)} events were not sent"]


def test_a_queue_that_is_full_at_the_end_still_closes_the_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the server believes that the run still goes on."""
    monkeypatch.setattr(tracking, "QUEUE", 5)
    go_on, told = threading.Event(), []

    class Slow(Recorder):
        def scalars(self, *arguments: Any) -> None:
            assert go_on.wait(10)
            super().scalars(*arguments)

    slow = Slow()
    listener = Background("slow one", Tracking(lambda _step: slow), told.append)
    for step in range(50):
        listener({**STEP, "step": step})
    threading.Timer(0.05, go_on.set).start()
    listener(EVENTS[-1])
    assert not listener._thread.is_alive()
    assert slow.calls[-1] == ("closed",)
    assert told == [f"slow one was too slow: {51 - len(slow.calls)} events were not sent"]


def test_a_tracker_that_fails_at_the_end_holds_nobody_up(tmp_path: Path) -> None:
    """Whoever waits for its thread holds the log, which the thread must not need to say why it died."""

    class Gone(Recorder):
        def close(self) -> None:
            raise ConnectionError("server gone")

    with EventLog(tmp_path / "events.jsonl") as log:
        listener = Background("far one", Tracking(lambda _step: Gone()), lambda text: log.write("notice", text=text))
        log.listen(listener)
        log.write("step", step=1, loss=1.0)
        began = time.monotonic()
        log.write("end", step=1, reason="all steps done")
        assert time.monotonic() - began < tracking.CLOSE_SECONDS / 2
    texts = [event["text"] for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "notice"]
    assert texts == ["far one failed and is left out: ConnectionError: server gone"]


def test_a_tracker_that_never_comes_back_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 0.1)
    go_on, told = threading.Event(), []

    class Stuck(Recorder):
        def scalars(self, *_: Any) -> None:
            go_on.wait(10)

    listener = Background("stuck one", Tracking(lambda _step: Stuck()), told.append)
    for event in EVENTS:
        listener(event)
    assert told == ["stuck one has not taken everything in 0 s; it is left behind"]
    go_on.set()


def test_a_tracker_that_fails_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    def fail(_step: int) -> Recorder:
        raise ConnectionError("no route to host")

    with EventLog(tmp_path / "events.jsonl") as log:
        listener = Background("far one", Tracking(fail), lambda text: log.write("notice", text=text))
        log.listen(listener)
        log.write("step", step=1, loss=1.0)
        listener._thread.join(5)
        log.write("step", step=2, loss=1.0)
        log.write("end", step=2, reason="all steps done")
    texts = [event["text"] for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "notice"]
    assert texts == ["far one failed and is left out: ConnectionError: no route to host"]


def test_one_that_is_not_installed(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.pipeline.run import train

    monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny_run("untracked", training={"trackers": ["wandb"]})
    with pytest.raises(
        UserError, match=r"training.trackers: wandb is not installed.*pip install 'draftsmith\[wandb\]'"
    ):
        train(config)
    assert not Path(config.training.output).exists()


# ------------------------------------------------------------------ each library, by a stand-in for its module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my-run"
    path.mkdir()
    (path / "run.json").write_text('{"fingerprint": "f", "created": "c", "config": {"drafter": {"layers": 5}}}')
    return path


def feed(name: str, folder: Path) -> list[str]:
    told: list[str] = []
    (listener,) = trackers((name,), folder, told.append)
    for event in EVENTS:
        listener(event)
    return told


def stand_in(calls: list[Any]) -> Any:
    """A run of wandb or trackio that remembers what it is told."""
    return types.SimpleNamespace(
        log=lambda values, **more: calls.append((values, more)),
        finish=lambda: calls.append("finished"),
        define_metric=lambda *names, **more: calls.append((names, more)),
    )


def test_wandb(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    module = types.ModuleType("wandb")
    module.init = lambda **how: calls.append(how) or stand_in(calls)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert feed("wandb", folder) == []
    identifier, config = run_facts(folder)
    how, metric, *logged = calls
    assert how == {
        "project": "draftsmith", "id": identifier, "name": "my-run", "config": config, "dir": str(folder),
        "resume": "allow",
    }  # fmt: skip
    assert metric == (("*",), {"step_metric": "update"})
    assert logged == [
        *(({"update": step, **values}, {}) for step, values in SCALARS),
        ({"notice": "slow"}, {}),
        "finished",
    ]


def test_trackio(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    module = types.ModuleType("trackio")
    module.init = lambda **how: calls.append(how) or stand_in(calls)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    assert feed("trackio", folder) == []
    identifier, config = run_facts(folder)
    assert calls[0]["name"] == f"my-run-{identifier[:6]}"
    assert (calls[0]["project"], calls[0]["config"], calls[0]["resume"]) == ("draftsmith", config, "allow")
    assert calls[1:] == [
        *((values, {"step": step}) for step, values in SCALARS),
        ({"notice": "slow"}, {}),
        "finished",
    ]


class MlflowClient:
    """Keeps runs in a dict, as a server would between two starts of a run."""

    def __init__(self, runs: dict[str, dict[str, Any]]) -> None:
        self.runs = runs

    def get_experiment_by_name(self, name: str) -> Any:
        return types.SimpleNamespace(experiment_id="1") if self.runs else None

    def create_experiment(self, name: str) -> str:
        return "1"

    def search_runs(self, places: list[str], query: str, max_results: int) -> list[Any]:
        found = [run for run in self.runs.values() if run["tags"]["draftsmith.run"] in query]
        return [types.SimpleNamespace(info=types.SimpleNamespace(run_id=run["id"])) for run in found]

    def create_run(self, place: str, run_name: str, tags: dict[str, str]) -> Any:
        key = f"run-{len(self.runs)}"
        self.runs[key] = {
            "id": key,
            "name": run_name,
            "tags": dict(tags),
            "params": {},
            "metrics": [],
            "state": "RUNNING",
        }
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=key))

    def update_run(self, run: str, state: str) -> None:
        self.runs[run]["state"] = state

    def log_param(self, run: str, name: str, value: str) -> None:
        self.runs[run]["params"][name] = value

    def log_batch(self, run: str, metrics: list[Any]) -> None:
        self.runs[run]["metrics"] += [vars(metric) for metric in metrics]

    def set_tag(self, run: str, name: str, value: str) -> None:
        self.runs[run]["tags"][name] = value

    def set_terminated(self, run: str) -> None:
        self.runs[run]["state"] = "FINISHED"


def test_mlflow_and_that_a_resumed_run_is_the_same_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: dict[str, dict[str, Any]] = {}
    module, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    module.MlflowClient = lambda: MlflowClient(runs)  # type: ignore[attr-defined]
    entities.Metric = lambda key, value, timestamp, step: types.SimpleNamespace(  # type: ignore[attr-defined]
        key=key, value=value, timestamp=timestamp, step=step
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    for _ in range(2):
        assert feed("mlflow", folder) == []
    (run,) = runs.values()
    assert (run["name"], run["state"], run["params"]) == ("my-run", "FINISHED", {"drafter.layers": "5"})
    assert run["tags"]["notice.001"] == "slow"
    assert run["metrics"][0] == {"key": "train/loss", "value": 2.0, "timestamp": 12_500, "step": 3}
    assert len(run["metrics"]) == 2 * sum(len(values) for _, values in SCALARS)


def test_an_identifier_is_the_runs_own(folder: Path, tmp_path: Path) -> None:
    assert run_facts(folder) == run_facts(folder)
    (tmp_path / "other").mkdir()
    assert run_facts(tmp_path / "other")[0] != run_facts(folder)[0]
    assert run_facts(tmp_path / "other")[1] == {}


def test_names_that_do_not_exist() -> None:
    with pytest.raises(UserError, match="no-such-tracker is not installed"):
        find_tracker("no-such-tracker")
