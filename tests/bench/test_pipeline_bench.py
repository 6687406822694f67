"""The pipeline's benchmark: it runs the real one, small, and its figures are those of what it ran."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.bench import pipeline as pipeline_module
from draftsmith.bench.geometry import find_geometry
from draftsmith.bench.parts import default_setting, draft_flops
from draftsmith.bench.pipeline import STEPS_ON_CPU, PipelineSetting, bench_pipeline, known_shape, plan_of
from draftsmith.bench.pipeline_figures import WARM, Watch, figures, lines_of
from draftsmith.bench.pipeline_trace import idle_shares
from draftsmith.bench.results import compare
from draftsmith.bench.target import target_flops
from draftsmith.cli import main
from draftsmith.errors import UserError
from draftsmith.pipeline import topology as topology_module
from draftsmith.pipeline.clock import KINDS

CPU = torch.device("cpu")


def small(**more: Any) -> PipelineSetting:
    setting = default_setting(find_geometry("tiny"), CPU)
    setting = replace(setting, length=64, anchors=4, block_size=4, chunk=16, documents=2, layers=1)
    return PipelineSetting(setting, **{"targets": ("cpu",), "drafters": ("cpu",), "steps": 8, **more})


def test_workers_share_one_device_and_the_prediction_stands_beside_the_figure() -> None:
    result = bench_pipeline(small(targets=("cpu", "cpu"), drafters=("cpu", "cpu"), rows=4, sequence=True))
    assert result["bench"] == "pipeline"
    assert 0 < result["ms_min"] <= result["ms"] <= result["ms_max"]
    assert result["tokens_per_second"] == pytest.approx(64 / (1e-3 * result["ms_per_row"]))
    error = result["predicted_tokens_per_second"] / result["tokens_per_second"] - 1
    assert result["prediction_error"] == pytest.approx(error)
    assert result["sequence_tokens_per_second"] > 0
    assert result["costs"]["tokens"] == 64
    row = small().setting
    draft = sum(draft_flops(row, row.batch()).values())
    flops = draft + target_flops(row.geometry, max(row.spec().taps) + 1, 64, 2)
    assert result["tflop"] == pytest.approx(flops / 1e12)
    assert result["floor_ms"] == pytest.approx(result["share_of_ceiling"] * result["ms_per_row"])
    assert result["process_gib"] > 0
    assert result["shape"]["targets"] == ["cpu", "cpu"]
    assert result["workers"].keys() == {"prefetch 0", "prefetch 1", "target 0", "target 1", "drafter 0", "drafter 1"}
    for drafter in ("drafter 0", "drafter 1"):  # the others are done before the last update
        assert result["workers"][drafter].keys() == set(KINDS)
        assert result["workers"][drafter]["busy"] > 0
    text = "\n".join(lines_of(result))
    assert "in sequence" in text
    assert "of all devices' matmul ceiling" in text
    assert "drafter 1" in text
    json.dumps(result)


def test_auto_measures_on_two_devices_and_says_how_right_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two GPUs, with two names for the CPU."""
    monkeypatch.setattr(topology_module, "_gpus", lambda: [CPU, torch.device("cpu", 1)])
    result = bench_pipeline(small(targets=("auto",), drafters=("auto",), rows=2))
    best = "both roles on each of 2 devices" if len(result["shape"]["drafters"]) == 2 else "1 + 1"
    assert result["auto"].startswith(f"{best}: ")
    assert "(measured)" in result["auto"]
    predicted = float(result["auto"].split(": ")[1].split(" real")[0].replace(",", ""))
    assert result["auto_prediction_error"] == pytest.approx(predicted / result["tokens_per_second"] - 1, abs=0.01)
    assert any(line.startswith(f"  auto, before anything ran: {best}") for line in lines_of(result))


def test_the_command_and_its_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> None:
    sizes = ["--length", "64", "--anchors", "4", "--block-size", "4", "--chunk", "16", "--layers", "1", "--steps", "6"]
    assert main(["bench", "pipeline", *sizes, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (tmp_path / "before.json").write_text(json.dumps(result | {"ms": 1e9, "ms_min": 1e9, "ms_max": 1e9}))
    assert main(["bench", "pipeline", *sizes, "--against", str(tmp_path / "before.json")]) == 0
    capsys.readouterr()
    assert known_shape(small(steps=6)).keys() == result["shape"].keys()
    (tmp_path / "fast.json").write_text(json.dumps(result | {"ms": 1e-6}))
    assert main(["bench", "pipeline", *sizes, "--against", str(tmp_path / "fast.json")]) == 1
    capsys.readouterr()
    monkeypatch.setattr(pipeline_module, "bench_pipeline", lambda _bench: pytest.fail("it was timed"))
    for key, value in result["shape"].items():  # another amount of work
        other = result | {"shape": result["shape"] | {key: value * 2 if isinstance(value, int) else "another"}}
        (tmp_path / "other.json").write_text(json.dumps(other))
        assert main(["bench", "pipeline", *sizes, "--against", str(tmp_path / "other.json")]) == 2
        assert f"the earlier shape is {key}=" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["bench", "pipeline", "--targets", "cuda:9"]) == 2
    assert main(["bench", "step", "--targets", "cpu"]) == 2


def test_gaps_are_those_between_ends_and_a_slower_run_is_a_regression(tmp_path: Path) -> None:
    """The last end is told together with the one before: it is no gap, and not the measure of noise either."""
    plan, steps = plan_of(small(steps=12), tmp_path), 12

    def result(seconds: float) -> dict[str, Any]:
        ends = [seconds * (number + 0.02 * (number % 3)) for number in range(steps - 1)]
        ends.append(ends[-1] + 1e-4)
        idle = dict.fromkeys(KINDS, 0.0)
        spent = [{"target 0": {**idle, "busy": 1.0 + 0.75 * end, "input": 0.125 * end}} for end in ends]
        return figures(plan, Watch((), ends, spent, list(range(steps))), steps)

    before, after = result(0.1), result(0.2)
    assert before["workers"] == {"target 0": {**dict.fromkeys(KINDS, 0.0), "busy": 0.75, "input": 0.125}}
    assert before["runs"] == steps - 2 - WARM
    assert before["ms_min"] == pytest.approx(96)
    assert compare(before, before)[0]
    right, line = compare(after, before)
    assert not right
    assert "+100.0 %" in line


def test_on_a_cpu_there_are_fewer_updates_unless_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def bench(setting: PipelineSetting) -> dict[str, Any]:
        asked.append(setting.steps)
        raise UserError("enough")

    monkeypatch.setattr(pipeline_module, "bench_pipeline", bench)
    for options in ([], ["--steps", "20"]):
        assert main(["bench", "pipeline", "--device", "cpu", *options]) == 2
    assert asked == [STEPS_ON_CPU, 20]


def test_devices_that_auto_stands_for_are_not_known_before() -> None:
    shape = known_shape(small(targets=("auto",), drafters=("auto",)))
    assert shape.keys() == known_shape(small()).keys() - {"targets", "drafters"}


def test_more_drafters_than_rows_are_refused() -> None:
    with pytest.raises(UserError, match="rows_per_update"):
        bench_pipeline(small(drafters=("cpu", "cpu"), rows=1))


def test_idle_shares_are_those_of_overlapping_kernels() -> None:
    """Twenty per cent at either end do not count: 200 to 800 of 1000 are looked at."""

    def kernel(start: float, seconds: float, device: int = 0) -> dict[str, Any]:
        return {"ts": start, "dur": seconds, "args": {"device": device}}

    events = [kernel(0, 300), kernel(250, 100), kernel(260, 10), kernel(400, 300), kernel(900, 100)]
    events += [kernel(0, 1000, device=1)]
    shares = idle_shares(events)
    # cuda:0 runs from 200 to 350 and from 400 to 700
    assert shares == {0: pytest.approx(1 - 450 / 600), 1: pytest.approx(0.0)}
