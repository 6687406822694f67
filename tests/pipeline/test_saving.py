"""Saving in the background: no long stall, disks that fail, signals, and checkpoints that are not what they seem."""

from __future__ import annotations

import _thread
import errno
import itertools
import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.errors import UserError
from draftsmith.observe.events import Event, EventLog, read_events
from draftsmith.pipeline import saving, supervise
from draftsmith.pipeline.link import Stop, Stopped
from draftsmith.pipeline.progress import Progress
from draftsmith.pipeline.run import train
from draftsmith.pipeline.saving import Saver
from draftsmith.pipeline.signals import Terminated, listening
from draftsmith.training import durable
from draftsmith.training.checkpoint import load_checkpoint, save_checkpoint
from draftsmith.training.step import Replica
from failing_disk import FailingDisk

pytestmark = pytest.mark.usefixtures("one_thread")


def of_kind(folder: Path, kind: str) -> list[Event]:
    return [event for event in read_events(folder / "events.jsonl") if event["kind"] == kind]


def trainer_bytes(folder: Path, step: int) -> bytes:
    return (folder / "checkpoints" / f"step-{step:07d}" / "trainer.safetensors").read_bytes()


def test_a_slow_disk_does_not_stall_the_steps(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes the first checkpoint only once ten more updates are reported."""
    reported, went_on = threading.Semaphore(0), []

    def slow(number: int, _name: str) -> bool:
        if number == 0:
            went_on.append(all(reported.acquire(timeout=60) for _ in range(10)))
        return False

    monkeypatch.setattr(durable, "os", FailingDisk(errno.EIO, slow))
    result = train(
        tiny_run("slow", training={"steps": 60, "save_every": 1, "eval_every": 0, "rows_per_update": 1}),
        listener=lambda event: reported.release() if event["kind"] == "step" else None,
    )
    assert went_on == [True]
    saved = [event["step"] for event in of_kind(result.folder, "checkpoint")]
    assert saved[0] == 1
    assert saved[1] > 8  # those due meanwhile were saved as one, later
    assert saved[-1] == result.step == 60


def test_a_snapshot_is_not_touched_by_later_updates(tmp_path: Path) -> None:
    written: dict[int, float] = {}
    go_on = threading.Event()

    def write(step: int, tensors: dict[str, torch.Tensor], _state: dict[str, Any]) -> Path:
        assert go_on.wait(60)
        written[step] = float(tensors["master/w"].sum())
        return tmp_path / str(step)

    weights = torch.ones(1000)
    with EventLog(tmp_path / "events.jsonl") as log:
        saver = Saver(write, log, Stop())
        assert saver.ready
        saver.take(1, {"master/w": weights}, {})
        assert not saver.ready
        weights.zero_()
        go_on.set()
        saver.close()
    assert written == {1: 1000.0}
    assert saver.last == tmp_path / "1"


def test_a_bug_in_writing_is_not_swallowed(tmp_path: Path) -> None:
    def write(*_: object) -> Path:
        raise ZeroDivisionError("ours")

    with EventLog(tmp_path / "events.jsonl") as log:
        saver = Saver(write, log, Stop())
        saver.take(1, {}, {})
        with pytest.raises(ZeroDivisionError, match="ours"):
            saver.take(2, {}, {})
        saver.close()


def test_a_disk_is_given_longer_and_longer_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])

    def write(*_: object) -> Path:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    pauses = []
    with EventLog(tmp_path / "events.jsonl") as log:
        saver = Saver(write, log, Stop())
        for step in range(1, 9):
            saver.take(step, {}, {})
            saver._wait_until_idle()
            began = now[0]
            while not saver.ready:
                now[0] += 1.0
            pauses.append(now[0] - began)
        saver.close()
    assert pauses == [15, 30, 60, 120, 240, 480, 600, 600]
    assert "Disk quota exceeded" in of_kind(tmp_path, "error")[0]["text"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_any_write_may_fail_and_the_run_goes_on_and_saves_later(tiny_run, monkeypatch, code: int) -> None:
    """One run in which the first write of the first checkpoint fails, the second of the second, and so on."""
    monkeypatch.setattr(saving, "RETRY_SECONDS", 0.0)
    made: list[FailingDisk] = []

    class Folder(durable.Folder):
        def __init__(self, final: Path) -> None:
            number = len(made)
            made.append(FailingDisk(code, lambda n, _name: n == number))
            monkeypatch.setattr(durable, "os", made[-1])
            super().__init__(final)

    monkeypatch.setattr("draftsmith.training.checkpoint.Folder", Folder)
    settings = {"steps": 5000, "save_every": 1, "eval_every": 0, "rows_per_update": 1, "keep": 2}
    ended = threading.Event()

    def end_once_saved(event: Event) -> None:
        if event["kind"] == "checkpoint" and not ended.is_set():
            ended.set()
            os.kill(os.getpid(), signal.SIGTERM)

    result = train(
        tiny_run("failing", rows={"length": 32, "anchors": 4}, drafter={"layers": 1}, training=settings),
        listener=end_once_saved,
    )
    assert result.reason == "terminated"
    errors = of_kind(result.folder, "error")
    called = {disk.calls[number] for number, disk in enumerate(made) if number < len(disk.calls)}
    assert called == {"makedirs", "open", "write", "fsync", "rename"}  # each kind of call has failed
    assert len(errors) >= 60
    assert all(os.strerror(code) in event["text"] for event in errors)
    steps = [event["step"] for event in of_kind(result.folder, "step")]
    assert steps == list(range(1, result.step + 1))
    assert result.checkpoint is not None
    assert load_checkpoint(result.checkpoint).step == result.step


def test_a_last_save_waits_for_a_disk_that_recovers(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "RETRY_SECONDS", 0.05)
    failures = itertools.count()
    disk = FailingDisk(errno.ENOSPC, lambda _n, name: name == "makedirs" and next(failures) < 3)
    monkeypatch.setattr(durable, "os", disk)
    result = train(tiny_run("recovers", training={"steps": 2, "save_every": 0}))
    assert result.checkpoint is not None
    assert load_checkpoint(result.checkpoint).step == 2
    assert len(of_kind(result.folder, "error")) == 3


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_save_and_end_within_the_grace(tiny_run, number: int) -> None:
    config = tiny_run("term", training={"steps": 5000, "save_every": 0, "eval_every": 0, "grace": 60.0})
    sent: list[float] = []

    def terminate(event: Event) -> None:
        if event["kind"] == "step" and event["step"] == 3:
            sent.append(time.monotonic())
            os.kill(os.getpid(), number)

    handler = signal.getsignal(number)
    result = train(config, listener=terminate)
    assert time.monotonic() - sent[0] < 60.0
    assert signal.getsignal(number) is handler
    assert result.reason == "terminated"
    assert 3 <= result.step < 5000
    assert result.checkpoint is not None
    assert load_checkpoint(result.checkpoint).step == result.step


def test_interrupted_twice_says_what_is_kept(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second Ctrl-C comes while the checkpoint that the first one asked for is being written."""
    config = tiny_run("twice", training={"steps": 5000, "save_every": 0, "eval_every": 0})
    fails, kept, heard = False, supervise._kept, threading.Event()
    asked: list[int] = []

    def write(*arguments: Any) -> Path:
        _thread.interrupt_main()
        assert heard.wait(60)
        if fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save_checkpoint(*arguments)

    def hear(progress: Progress) -> str:
        heard.set()
        return kept(progress)

    def interrupt(event: Event) -> None:
        if event["kind"] == "step" and event["step"] % 3 == 0 and not asked:
            asked.append(event["step"])
            _thread.interrupt_main()

    monkeypatch.setattr("draftsmith.pipeline.run.save_checkpoint", write)
    monkeypatch.setattr(supervise, "_kept", hear)
    with pytest.raises(KeyboardInterrupt, match="interrupted twice, at step") as ended:
        train(config, listener=interrupt)
    folder = Path(config.training.output)
    (saved,) = (folder / "checkpoints").glob("step-*")
    assert str(ended.value).endswith(f": what is kept is {saved}")
    assert load_checkpoint(saved).step >= 3
    fails = True  # then the one before it is what is left
    heard.clear()
    asked.clear()
    with pytest.raises(KeyboardInterrupt, match="interrupted twice, at step") as ended:
        train(config, resume=True, listener=interrupt)
    assert str(ended.value).endswith(f": what is kept is {saved}")


def test_nothing_is_written_after_the_end(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        saver = Saver(lambda *_: tmp_path, log, Stop())
        saver.close()
        with pytest.raises(Stopped):
            saver.take(1, {}, {})
    assert saver.last is None


def test_a_disk_that_fails_during_the_grace_is_not_waited_for_longer(tiny_run, monkeypatch) -> None:
    monkeypatch.setattr(durable, "os", FailingDisk(errno.EROFS, lambda _n, name: name == "makedirs"))
    monkeypatch.setattr(saving, "RETRY_SECONDS", 0.1)
    config = tiny_run("short", training={"steps": 5000, "save_every": 0, "eval_every": 0, "grace": 1.5})
    sent: list[float] = []

    def terminate(event: Event) -> None:
        if event["kind"] == "step" and event["step"] == 2:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(UserError, match="could not be written: Read-only file system; there is no earlier one"):
        train(config, listener=terminate)
    assert 1.0 < time.monotonic() - sent[0] < 60.0  # and not for the minutes that any other last checkpoint is given


def test_an_update_longer_than_the_grace_is_given_up_and_the_state_before_it_saved(tiny_run, monkeypatch) -> None:
    """Three replicas, one of them with two rows of six seconds in the third update, so that the others wait for it in
    the middle of the exchange. Resumed, the run comes to the same end."""
    wide = {"pipeline": {"targets": ["cpu"] * 2, "drafters": ["cpu"] * 3}, "training": {"steps": 4, "save_every": 0}}
    whole = train(tiny_run("whole-grace", **wide))
    step, rows, sent = Replica.step, itertools.count(), []

    def slow(self: Replica, *args: Any, **kwargs: Any) -> Any:
        if next(rows) >= 14:
            if not sent:
                sent.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(6.0 if threading.current_thread().name == "drafter 1" else 0.0)
        return step(self, *args, **kwargs)

    wide["training"]["grace"] = 10.0
    config = tiny_run("grace", **wide)
    with monkeypatch.context() as patch:
        patch.setattr(Replica, "step", slow)
        result = train(config)
        assert time.monotonic() - sent[0] < 10.0
    assert (result.reason, result.step) == ("terminated", 2)
    assert result.checkpoint is not None
    assert load_checkpoint(result.checkpoint).step == 2
    for thread in threading.enumerate():  # those that were left behind
        if thread.name.startswith("drafter"):
            thread.join(60)
    resumed = train(config, resume=True)
    assert resumed.losses == whole.losses[2:]
    assert trainer_bytes(resumed.folder, 4) == trainer_bytes(whole.folder, 4)


def test_sigterm_shortens_the_wait_for_a_disk_that_refuses_the_last_checkpoint(tiny_run, monkeypatch) -> None:
    monkeypatch.setattr(durable, "os", FailingDisk(errno.ENOSPC, lambda _n, name: name == "makedirs"))
    monkeypatch.setattr(saving, "RETRY_SECONDS", 250.0)
    sent: list[float] = []

    def terminate(event: Event) -> None:
        if event["kind"] == "error" and not sent:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

    config = tiny_run("late", training={"steps": 2, "save_every": 0, "grace": 0.5})
    with pytest.raises(UserError, match="checkpoint of step 2 could not be written: No space left"):
        train(config, listener=terminate)
    assert time.monotonic() - sent[0] < 60.0


def test_sigusr1_saves_and_goes_on(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_run("user", training={"steps": 40, "save_every": 0, "eval_every": 0, "rows_per_update": 1})
    request, heard = Progress.request_save, threading.Event()

    def hear(self: Progress) -> None:
        request(self)
        heard.set()

    def ask(event: Event) -> None:
        if event["kind"] == "step" and event["step"] == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert heard.wait(60)

    monkeypatch.setattr(Progress, "request_save", hear)
    result = train(config, listener=ask)
    assert heard.is_set()
    steps = [event["step"] for event in of_kind(result.folder, "checkpoint")]
    assert len(steps) == 2
    assert 3 <= steps[0] < 40
    assert steps[1] == result.step == 40


def test_sigterm_before_there_is_anything_to_save() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with listening():
        os.kill(os.getpid(), signal.SIGUSR1)  # nothing to save yet, and no reason to end
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    seen: list[object] = []

    def work() -> None:
        with listening():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_a_clock_that_jumps_back_changes_nothing(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock falls by a day in the middle of a run: same losses, sane speeds, the right newest checkpoint."""
    straight = train(tiny_run("straight"))
    real = time.time
    jumped: list[float] = []
    monkeypatch.setattr(time, "time", lambda: real() - (86_400.0 if jumped else 0.0))

    def jump(event: Event) -> None:
        if event["kind"] == "step" and event["step"] == 2:
            jumped.append(1.0)

    result = train(tiny_run("jumps"), listener=jump)
    assert jumped
    assert result.losses == straight.losses
    events = of_kind(result.folder, "step")
    assert events[-1]["time"] < events[0]["time"]
    assert all(event["tokens_per_second"] > 0 and event["eta_seconds"] >= 0 for event in events)
    assert 0 < result.seconds < 600
    assert train(tiny_run("jumps"), resume=True).step == 4
    assert trainer_bytes(result.folder, 4) == trainer_bytes(straight.folder, 4)


def test_a_corrupt_newest_checkpoint_is_refused_and_the_run_comes_to_the_same_end(tiny_run) -> None:
    whole = train(tiny_run("whole", training={"steps": 6}))
    parts = tiny_run("parts", training={"steps": 6})
    train(parts)
    newest = Path(parts.training.output) / "checkpoints" / "step-0000006"
    content = bytearray((newest / "trainer.safetensors").read_bytes())
    content[len(content) // 2] ^= 4
    (newest / "trainer.safetensors").write_bytes(bytes(content))
    resumed = train(parts, resume=True)
    saved = {path.name for path in newest.parent.iterdir()}
    assert {"refused-step-0000006", "step-0000006"} <= saved
    notices = [event["text"] for event in of_kind(resumed.folder, "notice")]
    assert any("refused" in text and "step-0000006: trainer.safetensors was altered" in text for text in notices)
    assert resumed.losses
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert trainer_bytes(resumed.folder, 6) == trainer_bytes(whole.folder, 6)


def test_a_checkpoint_of_another_run_is_refused(tiny_run) -> None:
    ours, theirs = tiny_run("ours", training={"steps": 2}), tiny_run("theirs", training={"steps": 2, "seed": 5})
    train(ours)
    train(theirs)
    place = Path(ours.training.output) / "checkpoints" / "step-0000002"
    place.rename(place.with_name("step-0000001"))
    (Path(theirs.training.output) / "checkpoints" / "step-0000002").rename(place)
    with pytest.raises(UserError, match="no checkpoint can be used; the newest: this checkpoint is of another run"):
        train(ours, resume=True)
    assert {path.name for path in place.parent.iterdir()} == {"refused-step-0000001", "refused-step-0000002"}


CARD = torch.device("cuda", 5)


class FakeRuntime:
    """Stands for the CUDA runtime: locks pages, or fails with a code."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.locked = code, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        if not self.code:
            self.locked[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_host_buffers_are_locked_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, asked = FakeRuntime(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: asked.append(device) or nullcontext())
    buffer, why_not = saving.page_locked(torch.Size([3, 5]), torch.float32, CARD)
    assert asked == [CARD]
    assert (buffer.shape, why_not) == ((3, 5), "")
    assert runtime.locked == {buffer.data_ptr(): 60}
    view = buffer[1:]
    del buffer
    assert len(runtime.locked) == 1, "its memory is still in use"
    del view
    assert runtime.locked == {}
    assert saving.page_locked(torch.Size([0]), torch.float32, CARD)[1] == ""
    assert runtime.locked == {}


def test_memory_that_cannot_be_locked_is_used_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(code=2))
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    with EventLog(tmp_path / "events.jsonl") as log:
        saver = Saver(lambda *_: tmp_path, log, Stop())
        first, second = (saver._host_buffer(torch.Size([size]), torch.float32, CARD) for size in (4, 6))
        saver.close()
    assert (first.shape, second.shape) == ((4,), (6,))
    (notice,) = of_kind(tmp_path, "notice")
    assert "not page-locked (CUDA error 2)" in notice["text"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_prepared_buffers_take_what_the_gpu_has(tmp_path: Path) -> None:
    written: dict[str, torch.Tensor] = {}

    def write(_step: int, tensors: dict[str, torch.Tensor], _state: dict[str, Any]) -> Path:
        written.update((name, value.clone()) for name, value in tensors.items())
        return tmp_path

    tensors = {"a": torch.randn(1000, 1000, device="cuda"), "b": torch.tensor(3.0, device="cuda")}
    with EventLog(tmp_path / "events.jsonl") as log:
        saver = Saver(write, log, Stop())
        saver.prepare(tensors)
        saver._wait_until_idle()
        assert all(saver._buffers[name].is_pinned() for name in tensors)
        saver.take(1, tensors, {})
        saver.close()
    assert all(torch.equal(written[name], value.cpu()) for name, value in tensors.items())
    assert of_kind(tmp_path, "notice") == []
