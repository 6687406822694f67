"""Where the commands print to: a full disk is one line and code 2, a reader who has left changes no code."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, TextIO

import pytest

from draftsmith import cli
from draftsmith.observe.events import EventLog

LOST = "draftsmith: output: cannot be written: No space left on device\n"


@pytest.fixture
def finished(tmp_path: Path) -> str:
    with EventLog(tmp_path / "run" / "events.jsonl") as log:
        log.write("step", step=1, loss=2.0)
        log.write("end", reason="all steps done", step=1)
    return str(tmp_path / "run")


def closed_pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def print_to(monkeypatch: pytest.MonkeyPatch, stream: TextIO) -> None:
    monkeypatch.setattr(sys, "stdout", stream)


@pytest.mark.parametrize(
    "command", ["status RUN", "status RUN --json", "watch RUN", "version", "--help", "watch --help"]
)
def test_a_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], finished: str, command: str
) -> None:
    with open("/dev/full", "w") as stream:
        print_to(monkeypatch, stream)
        assert cli.main(command.replace("RUN", finished).split()) == 2
    said = capfd.readouterr().err
    assert said.endswith(LOST)
    assert said == LOST or "--json" in command


@pytest.mark.parametrize(
    "command", ["status RUN", "status RUN --json", "watch RUN", "version", "--help", "watch --help"]
)
@pytest.mark.parametrize("healthy", [True, False])
def test_a_reader_who_has_left_changes_no_code(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], finished: str, command: str, healthy: bool
) -> None:
    if not healthy:
        with EventLog(Path(finished) / "events.jsonl") as log:
            log.write("end", reason="failed", step=1)
    with closed_pipe() as stream:
        print_to(monkeypatch, stream)
        code = cli.main(command.replace("RUN", finished).split())
    assert code == (0 if healthy or "RUN" not in command else 1)
    assert "draftsmith:" not in capfd.readouterr().err


def test_nothing_is_complained_about_when_the_process_ends(finished: str) -> None:
    command = [sys.executable, "-m", "draftsmith", "status", finished]
    for stream, code, said in ((closed_pipe(), 0, ""), (open("/dev/full", "w"), 2, LOST)):  # noqa: SIM115
        with stream:
            done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == (code, said)


def test_another_pipe_that_breaks_is_our_fault(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], finished: str
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("draftsmith.observe.status.read_status", broken)
    with pytest.raises(cli._Closed) as raised:
        cli.main(["status", finished])
    assert isinstance(raised.value.__cause__, BrokenPipeError)


@pytest.mark.parametrize(
    ("reason", "succeeded", "code"), [("done", True, 0), ("done", False, 1), ("interrupted", True, 130)]
)
@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_a_run_keeps_its_code_wherever_its_result_goes(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    reason: str,
    succeeded: bool,
    code: int,
    json_: list[str],
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("target: {path: nowhere/target}\ndata: {train: nowhere.jsonl}\n")
    result = types.SimpleNamespace(
        reason=reason, step=1, steps=1, losses=[], checkpoint=None, succeeded=succeeded, rank=0
    )
    result.to_json = lambda: {"step": 1}
    module = types.ModuleType("draftsmith.pipeline.run")
    module.train = lambda *_, **__: result  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "draftsmith.pipeline.run", module)
    for stream, said in ((closed_pipe(), False), (open("/dev/full", "w"), True)):  # noqa: SIM115
        with stream:
            print_to(monkeypatch, stream)
            assert cli.main(["train", str(config), *json_]) == code
        assert (LOST in capfd.readouterr().err) == said
