"""Checkpoints: complete or absent, refused by name when they are not what they seem."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from test_update import SPEC, fresh

from draftsmith.config import OptimizerConfig
from draftsmith.drafter import load_drafter
from draftsmith.errors import UserError
from draftsmith.training import checkpoint as module
from draftsmith.training.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from draftsmith.training.update import make_updates


def tensors() -> dict[str, torch.Tensor]:
    return make_updates([fresh()], OptimizerConfig())[0].state_tensors()


def test_round_trip_and_the_drafter_in_it(tmp_path: Path) -> None:
    saved = tensors()
    folder = save_checkpoint(tmp_path, 12, SPEC, saved, torch.bfloat16, {"fingerprint": "abc"})
    assert folder.name == "step-0000012"
    back = load_checkpoint(folder)
    assert back.step == 12
    assert back.state["fingerprint"] == "abc"
    assert {name: value.tolist() for name, value in back.tensors.items()} == {n: v.tolist() for n, v in saved.items()}
    drafter = load_drafter(folder)
    for name, value in drafter.named_parameters():
        assert torch.equal(value, saved[f"master/{name}"].bfloat16())


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 30):
        save_checkpoint(tmp_path, step, SPEC, tensors(), torch.float32, {})
    prune_checkpoints(tmp_path, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-0000002", "step-0000030"]


@pytest.mark.parametrize("fails", ["save_file", "save_weights", "_sync", "replace"])
def test_a_disk_that_fails_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch, fails: str) -> None:
    save_checkpoint(tmp_path, 1, SPEC, tensors(), torch.float32, {})

    def no_space(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if fails == "replace":
            patch.setattr(os, "replace", no_space)
        else:
            patch.setattr(module, fails, no_space)
        with pytest.raises(OSError, match="No space"):
            save_checkpoint(tmp_path, 2, SPEC, tensors(), torch.float32, {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000001"]
    load_checkpoint(tmp_path / "checkpoints" / "step-0000001")


def test_refusals(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 1, SPEC, tensors(), torch.float32, {})
    weights = folder / "trainer.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not readable"):
        load_checkpoint(folder)
    weights.write_bytes(whole)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "version": 99}))
    with pytest.raises(UserError, match="version 99"):
        load_checkpoint(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(UserError, match="not readable"):
        load_checkpoint(folder)
