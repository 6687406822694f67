"""The fault suite, kept short: ten kills at seeded random moments, a second process on a folder that is in use; and
what it says of a run that lost something."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from draftsmith.observe.events import EventLog

SCRIPT = Path(__file__).parents[2] / "scripts" / "fault_suite.py"
pytestmark = pytest.mark.timeout(900)  # dozens of processes, one after the other


def test_ten_kills_lose_nothing_and_change_nothing(tiny_target: Path, tiny_chats: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--kills", "10", "--seed", "1", "--steps", "10", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, "--target", str(tiny_target), "--data", str(tiny_chats)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["kills"] >= 10
    assert found["failed"] == 0
    assert found["second_refused"]
    assert "in use by another process" in result.stderr
    assert any("before call" in place for place in found["places"])
    assert any("after" in place for place in found["places"])


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; every run's status is that it finished."""
    spec = importlib.util.spec_from_file_location("fault_suite", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fault_suite", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "read_status", lambda _folder: SimpleNamespace(state="finished"))
    return module


def left_by_a_run(folder: Path, losses: dict[int, float]) -> Path:
    """What the suite reads of a run of two steps that logged these losses."""
    saved = folder / "checkpoints" / "step-0000002"
    saved.mkdir(parents=True)
    (saved / "trainer.safetensors").touch()
    folder.with_suffix(".rows.txt").touch()
    with EventLog(folder / "events.jsonl") as log:
        for step, loss in losses.items():
            log.write("step", step=step, loss=loss)
    return folder


@pytest.mark.parametrize(
    ("losses", "problems"),
    [
        ({1: 2.0, 2: 1.0}, []),
        ({1: 2.0, 2: 1.125}, ["losses differ or are not finite at steps [2]"]),
        ({1: float("nan"), 2: 1.0}, ["losses differ or are not finite at steps [1]"]),
        ({1: 2.0, 2: float("inf")}, ["losses differ or are not finite at steps [2]"]),
        ({2: 1.0}, ["steps are missing: [1], or too many: []"]),
        ({1: 2.0, 2: 1.0, 3: 1.0}, ["steps are missing: [], or too many: [3]"]),
    ],
)
def test_what_a_run_lost_is_said(
    losses: dict[int, float], problems: list[str], suite: ModuleType, tmp_path: Path
) -> None:
    folder = left_by_a_run(tmp_path / "found", losses)
    expected = suite.facts(left_by_a_run(tmp_path / "expected", {1: 2.0, 2: 1.0}), 2)
    for tolerance in (0.0, suite.TOLERANCE):
        assert suite.compare(folder, suite.facts(folder, 2), expected, tolerance) == problems


def test_two_losses_that_are_not_finite_are_not_the_same(suite: ModuleType, tmp_path: Path) -> None:
    first, second = (suite.facts(left_by_a_run(tmp_path / name, {1: float("nan")}), 2) for name in "ab")
    assert suite.apart(first, second) == {1: float("inf")}
