"""Signals at the edges of a run: before anything is imported, behind its last step, and while the process goes down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from draftsmith.observe.summary import read_summary
from draftsmith.pipeline.signals import Terminated, listening, starting

HEAD = """
import atexit, os, signal, sys

def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)

class Imports:  # sees torch being imported
    def find_spec(self, name, path, target=None):
        if name == "torch":
            send(signal.SIGUSR1, *AT_IMPORT)

atexit.register(send, signal.SIGUSR1, signal.SIGTERM)  # registered first, called last
sys.meta_path.insert(0, Imports())
from draftsmith.cli import main
assert "torch" not in sys.modules
"""


def command(path: Path, tail: str, at_import: str = "()") -> subprocess.CompletedProcess[str]:
    code = f"AT_IMPORT = {at_import}{HEAD}code = main(['train', sys.argv[1]])\n{tail}\nsys.exit(code)"
    return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120)


def test_what_has_finished_stays_finished(tiny_run, tmp_path: Path) -> None:
    config = tiny_run("run", training={"steps": 2})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    ended = command(tmp_path / "run.yaml", "send(signal.SIGTERM, signal.SIGUSR1)")
    assert ended.returncode == 0, ended.stderr
    assert "all steps done at step 2" in ended.stdout
    summary = read_summary(tmp_path / "run" / "events.jsonl")
    assert (summary["end"]["reason"], summary["malformed"]) == ("all steps done", 0)


def test_what_did_not_run_can_be_ended(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("target: {path: none}\ndata: {train: none}\n")
    ended = command(tmp_path / "run.yaml", "send(signal.SIGTERM)")
    assert ended.returncode == -signal.SIGTERM, ended.stderr


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_torch_loads_ends_with_one_line(tmp_path: Path, number: int) -> None:
    (tmp_path / "run.yaml").write_text("target: {path: none}\ndata: {train: none}\n")
    ended = command(tmp_path / "run.yaml", "", f"({int(number)},)")
    assert ended.returncode == 143
    assert ended.stderr == "draftsmith: terminated before the first update: nothing new to save\n"


def test_ranks_are_ended_by_the_signal_itself() -> None:
    """They wait for each other where Python hears nothing."""
    before = signal.getsignal(signal.SIGTERM)
    with starting(ranks=True):
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("default_signals")
def test_after_a_run_others_get_sigterm_back_and_a_late_sigusr1_does_nothing() -> None:
    with listening():
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(Terminated), listening(last=True):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("default_signals")
def test_the_start_hands_over_to_the_run_and_leaves_nothing_behind() -> None:
    with starting(ranks=False):
        early = signal.getsignal(signal.SIGTERM)
        assert early is signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
        with pytest.raises(Terminated), listening():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a run has begun: there may be something to save"
    with starting(ranks=False):
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.usefixtures("default_signals")
def test_whoever_listens_says_what_becomes_of_the_work() -> None:
    with pytest.raises(Terminated, match=r"^nothing is kept$"), listening("nothing is kept"):
        os.kill(os.getpid(), signal.SIGTERM)
    with listening("nothing is kept") as signals:
        signals.words = "half of it is kept"
        with pytest.raises(Terminated, match=r"^half of it is kept$"):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("default_signals")
def test_a_sighup_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with starting(ranks=False), listening():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.usefixtures("default_signals")
def test_handlers_of_others_come_back() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _frame: heard.append(number))
    with listening():
        os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
