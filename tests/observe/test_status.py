"""Summaries, locks, `status` and `watch`: one look at a run from another process, whatever became of the run."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.cli import main
from draftsmith.errors import UserError
from draftsmith.observe import events as events_module
from draftsmith.observe import summary as summary_module
from draftsmith.observe.events import EventLog, read_events
from draftsmith.observe.history import read_history
from draftsmith.observe.lock import Held, look_at_lock, take_lock
from draftsmith.observe.status import read_status
from draftsmith.observe.summary import Summary, read_summary
from draftsmith.observe.watch import bars, view, watch


def steps(log: EventLog, first: int, last: int, **fields: Any) -> None:
    for step in range(first, last + 1):
        values = {"loss": 4.0 / step, "tau_proxy": 1 + step / 100, "tokens_per_second": 1000.0, "eta_seconds": 60.0}
        log.write("step", step=step, steps=100, **{**values, **fields})


def start(folder: Path) -> EventLog:
    (folder / "run.json").parent.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text("{}")
    log = EventLog(folder / "events.jsonl")
    log.write("plan", lines=[])
    log.write("run", step=0, steps=100, workers=["target 0"], cards={"cpu": "cpu"})
    return log


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A run folder that this process holds."""
    lock = take_lock(tmp_path)
    yield tmp_path
    os.close(lock)


# ---------------------------------------------------------------------------------------------------- summaries


def test_a_summary_read_from_the_end_equals_all_events_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "SUMMARY_EVERY", 7)
    with start(tmp_path) as log:
        steps(log, 1, 40)
        log.write("error", text="the checkpoint of step 3 could not be written", topic="checkpoint")
        log.write("error", text="the checkpoint of step 4 could not be written", topic="checkpoint")
        log.write("checkpoint", step=20, path="a")
        log.write("eval", step=20, loss=1.5, tau_proxy=2.0)
        steps(log, 41, 50, tokens_per_second=2000.0)
        log.write("tau", step=50, decode=1.5, walk=1.5)
    whole = Summary()
    for event in read_events(tmp_path / "events.jsonl"):
        whole.fold(event)
    assert read_summary(tmp_path / "events.jsonl").content == whole.content
    assert log.summary.content == whole.content
    (error,) = whole["errors"].values()
    assert (error["count"], whole["error_count"], whole["save_failures"]) == (2, 2, 0)
    assert (whole["best_rate"]["rate"], whole["best_rate"]["step"]) == (
        2000.0,
        45,
    )  # when most of the last nine steps were that fast
    assert whole["best_tau"]["decode"] == 1.5


@pytest.mark.parametrize("block", [64, 1000, 2**18])
def test_summaries_are_found_across_any_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(events_module, "SUMMARY_EVERY", 5)
    monkeypatch.setattr(summary_module, "BLOCK", block)
    path = tmp_path / "events.jsonl"
    with start(tmp_path) as log:
        steps(log, 1, 23)
        log.write("notice", text='quotes ,"kind":"summary", in a text')
    content = path.read_bytes()
    for cut in (0, 1, 30, 200):
        path.write_bytes(content[: len(content) - cut])
        whole = Summary()
        for event in read_events(path):
            whole.fold(event)
        found = read_summary(path).content
        if cut == 1:  # a line without its newline is still being written: readers of the tail leave it out
            assert found["events"] == whole["events"] - 1
        else:
            assert found == whole.content


def test_a_resumed_log_goes_on_counting(tmp_path: Path) -> None:
    with start(tmp_path) as log:
        steps(log, 1, 10)
        log.write("error", text="one")
        log.write("end", reason="interrupted", step=10)
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("plan", lines=[])
        assert log.summary["end"] is None
        log.write("run", step=10, steps=100, workers=[])
        log.write("error", text="two")
    found = read_summary(tmp_path / "events.jsonl")
    assert (found["starts"], found["error_count"], found["end"]) == (2, 2, None)
    assert found["step"]["step"] == 10


def test_the_best_before_the_step_from_which_a_run_goes_on_is_still_known(tmp_path: Path) -> None:
    """Evaluations come between checkpoints: the best of them may lie behind the one that a crash leaves."""
    with start(tmp_path) as log:
        steps(log, 1, 30)
        for step, figure in ((5, 1.0), (10, 3.0), (20, 2.5), (30, 3.1)):
            log.write("eval", step=step, loss=5 - figure, tau_proxy=figure)
            log.write("tau", step=step, decode=figure, walk=figure)
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("run", step=20, steps=100, workers=[])
        assert (log.summary["best_tau"]["step"], log.summary["best_evaluation"]["step"]) == (10, 10)
        log.write("tau", step=30, decode=2.6, walk=2.6)
        assert log.summary["best_tau"]["step"] == 10
        log.write("run", step=4, steps=100, workers=[])
        assert (log.summary["best_tau"], log.summary["best_evaluation"]) == (None, None)


def test_what_lay_behind_the_step_from_which_a_run_goes_on_is_forgotten(tmp_path: Path) -> None:
    """Its newest checkpoint was refused: neither it nor what was measured of it is there any more."""
    with start(tmp_path) as log:
        steps(log, 1, 30)
        for step, loss in ((10, 2.0), (30, 1.0)):
            log.write("eval", step=step, loss=loss, tau_proxy=3 - loss)
            log.write("tau", step=step, decode=3 - loss, walk=3 - loss)
            log.write("checkpoint", step=step, path=f"checkpoints/step-{step:07d}")
        log.write("run", step=30, steps=100, workers=[])
        assert log.summary["best_tau"]["step"] == log.summary["step"]["step"] == 30
        log.write("run", step=20, steps=100, workers=[])
        log.write("eval", step=20, loss=3.0, tau_proxy=1.0)
    found = read_status(tmp_path).to_json()
    assert (found["held_out"]["step"], found["best_held_out"]["step"], found["best_tau"]["step"]) == (20, 10, 10)
    assert [found[name] for name in ("step", "tau", "checkpoint")] == [None] * 3
    assert [point[0] for point in read_summary(tmp_path / "events.jsonl")["history"]] == list(range(1, 21))
    history = read_history(tmp_path)
    assert (history.train.steps, history.held_out.steps, history.tau.steps) == (list(range(1, 21)), [10, 20], [10])


def test_a_log_without_summaries_is_read_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    monkeypatch.setattr(events_module, "SUMMARY_EVERY", 10**9)
    with start(tmp_path) as log:
        steps(log, 1, 3000)
    assert not read_summary(path)["partial"]
    monkeypatch.setattr(summary_module, "HEAD_BYTES", 2000)
    monkeypatch.setattr(summary_module, "TAIL_BYTES", 3000)
    found = read_summary(path)
    assert found["partial"]
    assert found["run"]["workers"] == ["target 0"]
    assert found["step"]["step"] == 3000
    assert found["events"] < 60


def test_history_stays_small_and_covers_the_whole_run() -> None:
    summary = Summary()
    for step in range(1, 100_001):
        summary.fold({"kind": "step", "step": step, "loss": 1.0 / step})
    found = [point[0] for point in summary["history"]]
    assert 120 <= len(found) <= 240
    assert found[0] < 1000
    assert found[-1] > 99_000
    assert found == sorted(found)
    summary.fold({"kind": "step", "step": found[5], "loss": 9.0})  # a resume from there
    assert summary["history"][-1][:2] == [found[5], 9.0]


def test_many_different_errors_do_not_swell_it() -> None:
    summary = Summary()
    for number in range(5000):
        summary.fold({"kind": "error", "text": chr(97 + number % 26) * (number % 300 + 1), "time": number})
    assert summary["error_count"] == 5000
    assert sum(each["count"] for each in summary["errors"].values()) == 5000
    assert len(json.dumps(summary.content)) < 60_000


# ---------------------------------------------------------------------------------------------------- lock


def test_the_lock_is_seen_without_being_taken(tmp_path: Path) -> None:
    assert look_at_lock(tmp_path).held == "no"
    lock = take_lock(tmp_path)
    holder = look_at_lock(tmp_path)
    assert (holder.held, holder.pid, holder.host) == ("yes", os.getpid(), socket.gethostname())
    with pytest.raises(Held, match=f"pid {os.getpid()}"):
        take_lock(tmp_path)
    os.close(lock)
    assert look_at_lock(tmp_path).held == "no"
    os.close(take_lock(tmp_path))


def test_a_look_does_not_keep_a_run_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(take_lock(tmp_path))
    looking = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("draftsmith.observe.lock.time.sleep", lambda _seconds: fcntl.flock(looking, fcntl.LOCK_UN))
    os.close(take_lock(tmp_path))
    os.close(looking)


def test_a_lock_of_another_host_is_not_judged_from_here(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("12 node7\n")
    holder = look_at_lock(tmp_path)
    assert (holder.held, holder.name()) == ("unknown", "pid 12 on node7")


# ---------------------------------------------------------------------------------------------------- status


def test_a_running_run(held: Path) -> None:
    with start(held) as log:
        assert read_status(held).state == "starting"
        steps(log, 1, 30)
        steps(log, 31, 42, tokens_per_second=900.0, data_wait=0.25)
        log.write("eval", step=40, loss=1.25, tau_proxy=1.5)
        log.write("tau", step=40, decode=1.41, walk=1.41)
        log.write("checkpoint", step=40, path="runs/x/checkpoints/step-0000040", stall_seconds=0.1)
        log.write("evidence", step=1, ok=True, text="flex seen on cuda:0")
        device = {"device": "cuda:0", "name": "H200", "memory_used": 2**33, "memory_total": 2**37, "use": 0.98}
        log.write(
            "vitals",
            devices=[device],
            host={"load": 1.0, "cores": 2},
            queues={"target 0": [1, 2]},
            workers={f"target {i}": {"busy": share, "input": 0.1, "output": 0.0} for i, share in enumerate((0.8, 1))},
        )
    status = read_status(held)
    assert (status.state, status.problems) == ("running", [])
    facts = status.to_json()
    assert facts["share_of_best"] == pytest.approx(0.9)
    assert (facts["step"], facts["steps"], facts["queues"]) == (42, 100, {"target 0": [1, 2]})
    text = "\n".join(status.lines())
    for part in (
        "running · step 42/100 (42%) · ETA 1:00",
        "held-out 1.250, τ proxy 1.50 at step 40",
        "τ decoded 1.41 at step 40, best 1.41 at step 40",
        "900 tok/s · 90% of its best (1.0k) · data-wait 25%",
        "cuda:0 H200 · 8.0/128.0 GiB · 98% busy",
        "target 0 1/2",
        "2 target 90% busy, 10% short of rows, 0% held back",
        "flex seen on cuda:0",
        "step-0000040, 0 s ago",
    ):
        assert part in text
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize(
    ("end", "state", "problem"),
    [
        ({"reason": "all steps done"}, "finished", None),
        ({"reason": "interrupted"}, "stopped", None),
        ({"reason": "time limit"}, "stopped", None),
        ({"reason": "terminated"}, "stopped", "stopped before the last step: terminated"),
        ({"reason": "failed"}, "failed", "failed: device lost"),
        (None, "crashed", "no process holds it"),
    ],
)
def test_how_runs_end(tmp_path: Path, end: dict[str, Any] | None, state: str, problem: str | None) -> None:
    os.close(take_lock(tmp_path))
    with start(tmp_path) as log:
        steps(log, 1, 10)
        log.write("error", text="device lost")
        if end is not None:
            log.write("end", step=10, **end)
    status = read_status(tmp_path)
    assert status.state == state
    assert main(["status", str(tmp_path)]) == (0 if problem is None else 1)
    assert (problem is None) == status.healthy
    assert problem is None or problem in " ".join(status.problems)


def test_silence_is_noticed_also_when_only_steps_are_missing(held: Path) -> None:
    with start(held) as log:
        steps(log, 1, 5)
        now = time.time()
        assert read_status(held, now + 100).state == "running"
        assert read_status(held, now + 400).state == "silent"
        log.summary.content["step_times"] = [now - 4000, now - 3990]
        for late in range(250):  # vitals still come
            log.write("vitals", devices=[], number=late)
    status = read_status(held, now)
    assert status.state == "silent"
    assert "no step for" in status.problems[0]


def test_of_another_host_only_the_age_tells(tmp_path: Path) -> None:
    with start(tmp_path) as log:
        steps(log, 1, 5)
    (tmp_path / "lock").write_text("12 node7\n")
    assert read_status(tmp_path).state == "running"
    assert read_status(tmp_path, time.time() + 5000).state == "silent"


def test_clocks_that_disagree(held: Path) -> None:
    with start(held) as log:
        steps(log, 1, 20)
    status = read_status(held, time.time() - 86_400)
    assert (status.state, status.age, status.healthy) == ("running", 0.0, True)
    assert status.lines(time.time() - 86_400)


@pytest.mark.parametrize(
    ("kind", "fields", "problem"),
    [
        ("error", {"topic": "checkpoint", "text": "disk full"}, "the last 1 attempts to save failed"),
        ("evidence", {"ok": False, "text": "dense scores seen"}, "the compiled path is not proved: dense scores seen"),
        ("step", {"step": 21, "loss": "nan"}, "the loss of step 21 is nan"),
        ("notice", {"topic": "tau", "standing": True, "text": "τ falls while loss falls"}, "τ falls while loss falls"),
    ],
)
def test_problems(held: Path, kind: str, fields: dict[str, Any], problem: str) -> None:
    with start(held) as log:
        steps(log, 1, 20)
        assert read_status(held).healthy
        log.write(kind, **fields)
        assert read_status(held).problems == [problem]
        cure = {
            "error": ("checkpoint", {"step": 20, "path": "x"}),
            "evidence": ("evidence", {"ok": True, "text": "yes"}),
            "step": ("step", {"step": 22, "loss": 1.0}),
            "notice": ("notice", {"topic": "tau", "standing": False, "text": "over"}),
        }[kind]
        log.write(cure[0], **cure[1])
    assert read_status(held).healthy


def test_slower_than_its_own_best(held: Path) -> None:
    with start(held) as log:
        steps(log, 1, 20)
        steps(log, 21, 40, tokens_per_second=600.0)
    assert read_status(held).problems == ["60% of its own best speed (1.0k tok/s, step 9)"]


def test_speeds_right_after_a_start_do_not_count(held: Path) -> None:
    with start(held) as log:
        steps(log, 1, 20, tokens_per_second=9000.0, rate_seconds=1.0)
        steps(log, 21, 40, rate_seconds=20.0)
    status = read_status(held)
    assert status.healthy
    assert status.to_json()["best_tokens_per_second"] == 1000.0


def test_a_run_that_is_over_is_not_slow(held: Path) -> None:
    with start(held) as log:
        steps(log, 1, 20)
        log.write("notice", topic="slow", standing=True, text="slow")
        assert not read_status(held).healthy
        log.write("end", reason="all steps done", step=20)
    assert read_status(held).healthy


def test_what_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path / "none")]) == 2
    assert main(["status", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["status", "."]) == 2
    assert capsys.readouterr().err == f"draftsmith: {tmp_path.resolve()}: no events here: not a run folder?\n"
    with pytest.raises(UserError, match=re.escape(f"{tmp_path.resolve()}: no events here")):
        list(read_events("events.jsonl"))
    (tmp_path / "run.json").write_text("{}")
    lock = take_lock(tmp_path)
    assert read_status(tmp_path).state == "starting"  # between its folder and its first event
    os.close(lock)
    with pytest.raises(UserError, match="no such run folder"):
        read_status(tmp_path / "run.json")


def run_status(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own that fails if it imports torch, or reads more than the end of the log."""
    code = (
        "import sys\nfrom draftsmith.cli import main\nfrom draftsmith.observe import events, summary\n"
        "parse, read = summary.parse, []\n"
        "summary.parse = lambda line: read.append(line) or parse(line)\n"
        "code = main(sys.argv[1:])\n"
        "assert 0 < len(read) <= 2 * events.SUMMARY_EVERY, f'{len(read)} lines read'\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'heavy imports'\nsys.exit(code)"
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def test_the_command_is_quick_imports_nothing_heavy_and_writes_nothing(held: Path) -> None:
    with start(held) as log:
        steps(log, 1, 3000)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in held.rglob("*")}
    result = run_status("status", str(held), "--json")
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in held.rglob("*")} == before
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["step"] == 3000
    assert "running · step 3,000/100" in result.stderr


def test_a_folder_that_may_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to write fails, as on a read-only mount."""
    os.close(take_lock(tmp_path))
    with start(tmp_path) as log:
        steps(log, 1, 20)
        log.write("end", reason="all steps done", step=20)
    real = os.open

    def read_only(path: Any, flags: int, *more: Any, **named: Any) -> int:
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC), "something is written"
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", read_only)
    assert read_status(tmp_path).state == "finished"


# ---------------------------------------------------------------------------------------------------- watch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
def test_watching_to_the_end(held: Path, stream: io.StringIO) -> None:
    log = start(held)
    steps(log, 1, 30)
    looks = iter(range(3))

    def sleep(_seconds: float) -> None:
        look = next(looks)
        steps(log, 31 + look, 31 + look)
        if look == 2:
            log.write("end", reason="all steps done", step=33)

    status = watch(held, stream, sleep=sleep)
    log.close()
    assert status.state == "finished"
    text = " ".join(stream.getvalue().split())  # a terminal's lines wrap
    for step in (30, 31, 32, 33):
        assert f"step {step}/100" in text
    assert ("█" in text) == stream.isatty()


def test_bars() -> None:
    assert bars([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert bars([5.0, 5.0], 40) == "▁▁"
    assert bars(list(range(1000)), 4) == "▁▃▆█"


def test_a_view_fits_its_terminal(held: Path) -> None:
    with start(held) as log:
        steps(log, 1, 300)
    lines = view(read_status(held), 60)
    assert any(line.startswith("loss") and "█" in line for line in lines)
    assert all(len(line) <= 60 for line in lines if "█" in line)
