"""scripts/smollm2/quality_per_minute.py: what it reads from events, and the whole of it in small on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from draftsmith.config import load_config

SCRIPT = Path(__file__).parent.parent / "scripts" / "smollm2" / "quality_per_minute.py"


@pytest.fixture(scope="module")
def quality() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quality_per_minute", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def made_up(ends: list[float], evaluated: dict[int, float]) -> list[dict[str, Any]]:
    """Events of a run whose first row starts at 105 and whose updates of 100 tokens end at `ends`."""
    events: list[dict[str, Any]] = [{"kind": "work", "worker": "target 0", "row": 0, "start": 105.0, "end": 105.5}]
    for number, end in enumerate(ends):
        of_all = {"kind": "phase", "what": "update", "number": number, "start": end - 0.1}
        events += [{**of_all, "worker": f"drafter {place}", "end": end + place} for place in range(2)]
        events.append({"kind": "step", "step": number + 1, "tokens": 100 * (number + 1)})
        if number + 1 in evaluated:
            events.append({"kind": "eval", "step": number + 1, "loss": "nan", "tau_proxy": evaluated[number + 1]})
    return events


def test_evaluations_and_the_first_update_cost_no_seconds(quality: ModuleType) -> None:
    # Two seconds an update; an evaluation of 50 s follows the second; the first one, profiled, takes 15.
    events = made_up([120.0, 122.0, 174.0, 176.0, 178.0], {2: 1.5, 5: 2.5})
    curve = quality.curve_of(events, 100.0)
    assert (curve.start, curve.first_update, curve.done) == (5.0, 15.0, 5)
    assert curve.seconds == {2: 2.0, 5: 8.0}
    assert curve.tau == {2: 1.5, 5: 2.5}
    assert curve.tokens_per_second == 50.0
    with pytest.raises(ValueError, match="2 updates only"):
        quality.curve_of(made_up([120.0, 122.0], {2: 1.5}), 100.0)


def test_the_largest_difference_is_that_of_a_variant(quality: ModuleType) -> None:
    def figures(seconds: float, *tau: float) -> dict[str, Any]:
        return {"tau": dict(enumerate(tau, 1)), "seconds": {step: step * seconds for step in range(1, len(tau) + 1)}}

    found = {
        "default": figures(1.0, 1.0, 2.0, 3.0),
        "dense": figures(4.0, 1.5, 1.75),  # stopped early
        "fp8": {"refused": "no"},
        "seed": figures(1.0, 9.0, 9.0, 9.0),
    }
    worst = quality.compare(found)
    assert (worst["variant"], worst["step"], worst["difference"]) == ("dense", 1, 0.5)
    assert found["dense"]["ratio"] == 4.0
    assert found["dense"]["differences"] == {1: 0.5, 2: -0.25}
    assert quality.compare({"fp8": {"refused": "no"}})["variant"] is None


def test_variants_are_configs(quality: ModuleType) -> None:
    default = load_config(quality.ROOT / "examples" / "smollm2.yaml")
    for name, (_, overrides) in quality.VARIANTS.items():
        changed = load_config(quality.ROOT / "examples" / "smollm2.yaml", list(overrides))
        assert (changed == default) == (name in ("default", "again"))
    assert set(quality.USUAL.split(",")) < set(quality.VARIANTS)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, env=environment)


def test_variants_learn_the_same(tiny_target: Path, tiny_chats: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    content = {
        "target": {"path": "given on the command line"},
        "data": {"train": "too", "held_out_share": 0.1},
        "drafter": {"layers": 1, "block_size": 4},
        "rows": {"length": 96, "anchors": 12},
        "optimizer": {"lr": 1e-2},
        "training": {"eval_rows": 2},
        "pipeline": {"targets": "cpu", "drafters": "cpu"},
    }
    config.write_text(json.dumps(content))
    folder = tmp_path / "runs"
    given = ["--target", str(tiny_target), "--train", str(tiny_chats), "--folder", str(folder), "--json"]
    steps = ["--steps", "6", "--eval-every", "3", "--variants", "default,checkpointing"]
    done = run(str(config), *given, *steps)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    variants = content["variants"]
    default, checkpointing = variants["default"], variants["checkpointing"]
    assert list(default["tau"]) == list(default["seconds"]) == ["3", "6"]
    assert 0 < default["seconds"]["3"] < default["seconds"]["6"]
    assert default["loss"]["6"] < default["loss"]["3"]
    assert default["tokens_per_second"] > 0
    # Recomputed activations are the same bits on a CPU.
    assert checkpointing["loss"] == default["loss"]
    assert checkpointing["differences"] == {"3": 0.0, "6": 0.0}
    assert content["largest"]["difference"] == 0.0
    assert "largest difference of held-out τ at equal steps from the default: +0.000" in done.stderr
    assert not list(folder.glob("*/checkpoints"))


def test_what_is_not_run_is_named(tmp_path: Path) -> None:
    done = run("--seconds", "0", "--variants", "default,dense", "--folder", str(tmp_path))
    assert done.returncode == 0
    assert done.stdout.count("not run: the time was up") == 2
    # Told to end before it could write an event.
    done = run("--seconds", "0.3", "--variants", "dense", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "not run: the time was up" in done.stdout
    done = run("--variants", "fast", "--folder", str(tmp_path))
    assert done.returncode == 2
    assert "valid: default, eager-target" in done.stderr


def test_what_refuses_itself_is_named(tmp_path: Path) -> None:
    given = [str(tmp_path / "none.yaml"), "--folder", str(tmp_path), "--variants"]
    done = run(*given, "dense")
    assert done.returncode == 0, done.stderr
    assert "refused: " in done.stdout
    assert "no such config file" in done.stdout
    # Where that is the default, it is the config, and nothing else is tried.
    done = run(*given, "default,dense")
    assert done.returncode == 2
    assert "no such config file" in done.stderr
    assert done.stdout == ""
