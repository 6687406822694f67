"""The fault suite, kept short: ten kills at seeded random moments, a second process on a folder that is in use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "fault_suite.py"


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
