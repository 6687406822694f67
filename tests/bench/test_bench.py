"""Benchmarks run small on the CPU, count their arithmetic right, and notice a regression."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.bench.geometry import find_geometry
from draftsmith.bench.parts import BENCHES, Setting, compare, default_setting, draft_flops
from draftsmith.blocks import dense_mask
from draftsmith.cli import main

CPU = torch.device("cpu")


def small() -> Setting:
    return replace(default_setting(find_geometry("tiny"), CPU), length=96, anchors=6, chunk=16, runs=1, documents=2)


@pytest.mark.parametrize("part", sorted(BENCHES))
def test_every_part_runs(part: str) -> None:
    result = BENCHES[part](small())
    assert result["bench"] == part
    assert 0 < result["ms_min"] <= result["ms"] <= result["ms_max"]
    json.dumps(result)


def test_flops_are_those_of_counting() -> None:
    setting = small()
    batch, spec, g = setting.batch(), setting.spec(), setting.geometry
    queries = setting.anchors * setting.block_size
    visible = int(dense_mask(batch.intervals[spec.kinds[0]], setting.length).sum())
    hidden, wide, narrow = g.hidden_size, g.heads * g.head_dim, g.kv_heads * g.head_dim
    forward = 0
    for _ in range(spec.layers):
        forward += 2 * queries * hidden * wide * 2  # queries and output projection
        forward += 2 * (setting.length + queries) * hidden * narrow * 2  # keys and values
        forward += 2 * queries * hidden * g.intermediate_size * 3
    feature_projection = 2 * setting.length * len(spec.taps) * hidden * hidden
    flops = draft_flops(setting, batch)
    assert flops["body"] == 3 * forward + 2 * feature_projection
    assert flops["attention"] == spec.layers * 2 * visible * wide * 7
    assert flops["head"] == 2 * 2 * batch.taught * hidden * g.vocab_rows


def test_the_draft_step_of_qwen3_8b_is_75_tflop() -> None:
    setting = Setting(find_geometry("qwen3-8b"), CPU, 4096, 512, 16, 5, 2048, 1)
    total = sum(draft_flops(setting, setting.batch()).values()) / 1e12
    assert total == pytest.approx(75, rel=0.05)


def test_a_regression_counts_only_beyond_noise() -> None:
    earlier = {"bench": "step", "shape": {"S": 1}, "ms": 100.0, "ms_min": 98.0, "ms_max": 104.0}
    assert compare({**earlier, "ms": 105.0}, earlier)[0]
    slower, line = compare({**earlier, "ms": 107.0}, earlier)
    assert not slower
    assert "+7.0 %" in line
    assert not compare({**earlier, "shape": {"S": 2}}, earlier)[0]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "mask", "--device", "cpu", "--geometry", "tiny", "--length", "96", "--runs", "1", "--json"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    fast = tmp_path / "fast.json"
    fast.write_text(json.dumps({**result, "ms": 1e-6, "ms_min": 1e-6, "ms_max": 1e-6}))
    slow_run = {**result, "ms": 1e9, "ms_min": 1e9, "ms_max": 1e9}
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(slow_run))
    assert main([*arguments, "--against", str(slow)]) == 0
    capsys.readouterr()
    for wrong in (["bench", "everything"], ["bench", "mask", "--geometry", "gpt-9"]):
        assert main(wrong) == 2
    assert main([*arguments, "--against", str(tmp_path / "none.json")]) == 2
    assert "no such file" in capsys.readouterr().err
