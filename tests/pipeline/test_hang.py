"""Runs in which nothing moves: who is named, what is written, that the process ends, and what is no hang."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from draftsmith.compiled import Gate, Region
from draftsmith.pipeline import assemble, hang, supervise
from draftsmith.pipeline import run as run_module
from draftsmith.pipeline.compiling import Compiling
from draftsmith.pipeline.hang import HangWatch, HungError
from draftsmith.pipeline.run import train
from draftsmith.target.forward import Target
from draftsmith.training.step import Replica

pytestmark = pytest.mark.usefixtures("one_thread")
TWO_AND_TWO = {"targets": ["cpu"] * 2, "drafters": ["cpu"] * 2, "prefetch": 1, "hang_seconds": 2.0}


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch):
    """Makes the n-th call of something wait until the test is over."""
    monkeypatch.setattr(supervise, "HUNG_JOIN_SECONDS", 0.2)
    release, calls = threading.Event(), [0]

    def make(place: str, at: int) -> None:
        holder, _, name = place.rpartition(".")
        owner = {"Target": Target, "Replica": Replica, "Compiling": Compiling}.get(holder)
        if owner is None:
            owner = assemble if name == "make_draft_batch" else run_module
        original = getattr(owner, name)

        def wait(*arguments, **named):
            calls[0] += 1
            if calls[0] == at:
                release.wait(120)
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, wait)

    yield make
    release.set()


@pytest.mark.parametrize(
    ("place", "cause", "waits"),
    [
        ("Target.features", "target ", "drafter "),
        ("Replica.step", "drafter ", "waits to meet drafter "),
        ("make_draft_batch", "prefetch 0 is busy with row ", "of prefetch 0"),
    ],
)
def test_who_stands_still_and_who_waits_for_it(tiny_run, stuck, place: str, cause: str, waits: str) -> None:
    stuck(place, 9)
    config = tiny_run("hung", pipeline=TWO_AND_TWO, training={"eval_rows": 0, "steps": 50})
    began = time.monotonic()
    with pytest.raises(HungError, match=r"nothing moved for \d+ s: ") as found:
        train(config)
    assert time.monotonic() - began < 100, "it waited for what hangs"
    text = str(found.value)
    first, *others = text.partition(" s: ")[2].split("; ")
    assert cause in first
    assert " is busy with row " in first
    assert ", inside wait)" in first  # threading's, in which our function hangs
    assert "(since " in first
    assert any(waits in other and " waits " in other for other in others), text
    stacks = Path(config.training.output) / "stacks.txt"
    assert str(stacks) in text
    written = stacks.read_text()
    for name in ("-- target 0", "-- target 1", "-- drafter 0", "-- drafter 1", "-- prefetch 0", "-- MainThread"):
        assert name in written
    assert "release.wait(120)" in written
    events = (Path(config.training.output) / "events.jsonl").read_text()
    assert "nothing moved" in events


def test_the_warm_up_has_longer(tiny_run, stuck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "WARM_UP_FACTOR", 2.0)
    stuck("Compiling.warm_up", 1)
    began = time.monotonic()
    with pytest.raises(HungError, match=r"in the warm-up.*drafter 0 is busy"):
        train(tiny_run("cold", pipeline={"hang_seconds": 0.5}))
    assert time.monotonic() - began > 1.0


def test_slow_is_not_hung_and_nothing_is_left_behind(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    features = Target.features

    def slow(self, *arguments, **named):
        time.sleep(0.3)
        return features(self, *arguments, **named)

    monkeypatch.setattr(Target, "features", slow)
    config = tiny_run("slow", pipeline={"hang_seconds": 3.0}, training={"steps": 4, "rows_per_update": 3})
    result = train(config)
    assert result.step == 4
    assert result.seconds > 3.0
    assert not (result.folder / "stacks.txt").exists()


def test_a_disk_that_is_slow_for_the_last_checkpoint_is_no_hang(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    save = run_module.save_checkpoint

    def slow(*arguments, **named):
        time.sleep(5.0)
        return save(*arguments, **named)

    monkeypatch.setattr(run_module, "save_checkpoint", slow)
    config = tiny_run("slow-disk", pipeline={"hang_seconds": 2.0}, training={"steps": 2, "save_every": 0})
    result = train(config)
    assert result.checkpoint is not None
    assert result.checkpoint.name == "step-0000002"


def test_who_waits_at_the_compile_gate_is_no_cause() -> None:
    gate = Gate()
    region = Region("own", torch.sin, gate=gate, backend="eager")
    region(torch.ones(2))

    def step() -> None:
        with gate.step():
            pass

    for call in (step, lambda: region(torch.ones(2))):
        with gate.exclusive():
            thread = threading.Thread(target=call, name="target 0", daemon=True)
            thread.start()
            deadline, standing = time.monotonic() + 60, None
            while (standing is None or not standing.what.startswith("waits")) and time.monotonic() < deadline:
                time.sleep(0.01)
                standing = hang.stand(thread, [thread], sys._current_frames())  # type: ignore[arg-type, list-item]
        thread.join(60)
        assert not thread.is_alive()
        assert (standing.what, standing.cause) == ("waits at the compile gate", False)
    gate.close()


def fake_worker() -> SimpleNamespace:
    return SimpleNamespace(name="target 0", ident=None, clock=SimpleNamespace(seconds={"busy": 0.0}))


def made_up_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    wall = {name: getattr(time, name) for name in ("time", "strftime", "localtime")}
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: now[0], **wall))
    return now


def test_a_process_that_was_stopped_wakes_without_an_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = made_up_clock(monkeypatch)
    with HangWatch([fake_worker()], 60.0, tmp_path) as watch:
        now[0] += 1
        assert watch.check(0, warming_up=False) is None
        now[0] += 3600
        assert watch.check(0, warming_up=False) is None
        for _ in range(117):  # the hour counted as a second
            now[0] += 0.5
            assert watch.check(0, warming_up=False) is None
        now[0] += 0.5
        assert isinstance(watch.check(0, warming_up=False), HungError)


def test_events_updates_and_rows_are_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = made_up_clock(monkeypatch)
    worker = fake_worker()

    def passes(seconds: float, done: int) -> bool:
        for _ in range(int(seconds / 0.5)):
            now[0] += 0.5
            if watch.check(done, warming_up=False) is not None:
                return False
        return True

    with HangWatch([worker], 10.0, tmp_path) as watch:
        assert passes(9, 0)
        watch.heard({"kind": "warmup"})
        assert passes(9, 0)
        assert passes(9, 1)
        worker.clock.seconds["busy"] += 1
        assert passes(9, 1)
        watch.heard({"kind": "vitals"})  # which come by the clock
        assert not passes(9, 1)
    with HangWatch([worker], 0.0, tmp_path) as watch:
        assert passes(1000, 0)
    assert not (tmp_path / "nothing").exists()


def test_a_lock_on_the_interpreter_is_seen_from_outside(tmp_path: Path) -> None:
    with HangWatch([fake_worker()], 0.2, tmp_path) as watch:
        time.sleep(0.3)
        assert watch.check(0, warming_up=False) is None
        stacks, deadline = tmp_path / "stacks.txt", time.monotonic() + 60
        while not stacks.read_text() and time.monotonic() < deadline:
            ctypes.PyDLL(None).usleep(2_000_000)  # in C, and the interpreter's lock is kept
        assert "test_a_lock_on_the_interpreter" in stacks.read_text()


def test_the_command_ends_although_a_thread_hangs_for_ever(tiny_run, tmp_path: Path) -> None:
    """Exit code and one line; no temporary file, no process."""
    config = tiny_run("command", pipeline={"hang_seconds": 3.0}, data={"cache": "off"}, training={"eval_rows": 0})
    path, scratch = tmp_path / "run.yaml", tmp_path / "scratch"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    scratch.mkdir()
    code = (
        "import sys, time\n"
        "from draftsmith.training.step import Replica\n"
        "Replica.step = lambda *a, **n: time.sleep(1000)\n"
        "from draftsmith.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "train", str(path)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("draftsmith: ")
    assert "drafter 0 is busy with row 0" in last
    assert [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor")] == []
