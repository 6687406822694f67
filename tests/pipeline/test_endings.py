"""How a run ends where somebody is slow, starting, or asks twice: nothing fails that has been saved, nobody is left."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from typing import Any

import pytest

from draftsmith.observe.events import read_events
from draftsmith.pipeline import held_out, supervise
from draftsmith.pipeline.compiling import Compiling
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.progress import Progress
from draftsmith.pipeline.pulse import Pulse, RankLost
from draftsmith.pipeline.run import train
from draftsmith.pipeline.saving import Saver
from draftsmith.pipeline.signals import Terminated
from draftsmith.pipeline.workers import DrafterWorker, PrefetchWorker
from draftsmith.target.forward import Target
from draftsmith.training.update import ReplicaUpdate

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_target_in_the_middle_of_a_long_row_is_waited_for(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large target on the CPU takes longer for a row than a worker that fails is given to leave."""
    monkeypatch.setattr(supervise, "JOIN_SECONDS", 0.1)
    begun, saved, finished = threading.Event(), threading.Event(), threading.Event()
    features, finish, rows = Target.features, Saver.finish, iter(range(1000))

    def slow(self: Target, *arguments: Any, **named: Any) -> Any:
        if threading.current_thread().name == "target 0" and next(rows):  # the second row is the long one
            begun.set()
            assert saved.wait(60)
            time.sleep(1.5)
            finished.set()
        return features(self, *arguments, **named)

    def save(self: Saver, *arguments: Any) -> None:
        assert begun.wait(60)
        finish(self, *arguments)
        saved.set()

    monkeypatch.setattr(Target, "features", slow)
    monkeypatch.setattr(Saver, "finish", save)
    training = {"steps": 5000, "rows_per_update": 1, "save_every": 0, "eval_rows": 0}
    config = tiny_run("long-row", training=training)
    result = train(config, max_minutes=1e-9)
    assert result.reason == "time limit"
    assert finished.is_set()
    assert result.checkpoint is not None
    told = [event["text"] for event in read_events(result.folder / "events.jsonl") if event["kind"] == "notice"]
    assert any(text.endswith("target 0 still at work on a row (Ctrl-C: do not wait)") for text in told)


def test_sigterm_behind_ctrl_c_does_not_wait_for_the_warm_up(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, request = threading.Event(), Progress.request_end
    watched, check = threading.Event(), supervise.HangWatch.check

    def hear(self: Progress, reason: str, **named: Any) -> None:
        request(self, reason, **named)
        heard.set()

    def watch(self: supervise.HangWatch, *arguments: Any, **named: Any) -> Any:
        watched.set()
        return check(self, *arguments, **named)

    def compile_for_long(self: Compiling, index: int) -> None:
        assert watched.wait(60)
        _thread.interrupt_main()
        assert heard.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3.0)

    monkeypatch.setattr(Progress, "request_end", hear)
    monkeypatch.setattr(supervise.HangWatch, "check", watch)
    monkeypatch.setattr(Compiling, "warm_up", compile_for_long)
    began = time.monotonic()
    with pytest.raises(Terminated):
        train(tiny_run("both"))
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("kind", [DrafterWorker, PrefetchWorker])
def test_ctrl_c_while_workers_are_started(tiny_run, monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Whoever was started is not started again, and leaves."""
    before, start, interrupted = set(threading.enumerate()), kind.start, []

    def begin(self: Any) -> None:
        start(self)
        if not interrupted:
            interrupted.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(kind, "start", begin)
    config = tiny_run("starting", pipeline={"prefetch": 2}, training={"steps": 5000, "save_every": 0, "eval_rows": 0})
    if kind is DrafterWorker:  # nothing runs yet that an update could end
        with pytest.raises(KeyboardInterrupt):
            train(config)
    else:
        assert train(config).reason == "interrupted"
    deadline = time.monotonic() + 60
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_an_update_that_was_given_up_does_not_count(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes to its end while the state before it is written, however late it then hears of the end."""
    reduce, end, calls, given_up = ReplicaUpdate.reduce, Stop.set, [0], threading.Event()

    def slow(self: ReplicaUpdate, *arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            assert given_up.wait(60)
        return reduce(self, *arguments, **named)

    def late(self: Stop, *arguments: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            given_up.set()
            time.sleep(1.0)  # in which the update would come to its end
        end(self, *arguments)

    monkeypatch.setattr(ReplicaUpdate, "reduce", slow)
    monkeypatch.setattr(Stop, "set", late)
    config = tiny_run("given-up", training={"steps": 50, "save_every": 0, "eval_rows": 0, "grace": 3.0})
    result = train(config)
    assert result.reason == "terminated"
    (saved,) = [event for event in read_events(result.folder / "events.jsonl") if event["kind"] == "checkpoint"]
    assert result.step == saved["step"] == 2


def test_a_second_interrupt_while_the_saver_closes_ends_the_decoder_too(tiny_run, monkeypatch) -> None:
    closed = []
    close = Saver.close

    def interrupted(self: Saver) -> None:
        close(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Saver, "close", interrupted)
    monkeypatch.setattr(held_out.HeldOut, "close", lambda self: closed.append(self))
    with pytest.raises(KeyboardInterrupt):
        train(tiny_run("closing", decoding={"every": 100}, training={"steps": 2, "eval_rows": 2}))
    assert len(closed) == 1


def test_a_connection_that_breaks_without_a_word_ends_the_run_all_the_same() -> None:
    class Store:
        def set(self, _key: str, _value: str) -> None:
            pass

        def check(self, keys: list[str]) -> bool:
            return keys[0].startswith("here")

    pulse, stop = Pulse(Store(), None, 0, 2, lambda: None), Stop()  # type: ignore[arg-type]
    pulse.watch(stop)
    pulse._broken(RuntimeError())
    assert isinstance(stop.cause, RankLost)
    assert stop.cause.what == "lost the connection to other ranks: RuntimeError"
