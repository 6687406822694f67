"""Checkpoints: complete or absent, refused by name when they are not what they seem, and the one before used."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_update import SPEC, fresh

from draftsmith.config import OptimizerConfig
from draftsmith.drafter import load_drafter
from draftsmith.errors import UserError
from draftsmith.training import durable
from draftsmith.training.checkpoint import (
    Checkpoint,
    clean_up,
    list_checkpoints,
    load_checkpoint,
    newest_usable,
    prune_checkpoints,
    save_checkpoint,
)
from draftsmith.training.durable import tensor_pieces
from draftsmith.training.update import make_updates
from failing_disk import FailingDisk


def tensors(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {name: t + value for name, t in make_updates([fresh()], OptimizerConfig())[0].state_tensors().items()}


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


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


def test_what_is_streamed_is_what_the_library_writes(tmp_path: Path) -> None:
    """Every type, an empty tensor, a scalar, a view that is not contiguous, and metadata."""
    values = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "half": torch.arange(5).to(torch.bfloat16),
        "count": torch.arange(7),
        "mask": torch.tensor([True, False]),
        "bytes": torch.arange(3, dtype=torch.uint8),
    }
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    own.write_bytes(b"".join(bytes(piece) for piece in tensor_pieces(values, metadata={"format": "pt"})))
    save_file({name: value.contiguous() for name, value in values.items()}, str(theirs), {"format": "pt"})
    assert own.stat().st_size == theirs.stat().st_size
    left, right = load_file(str(own)), load_file(str(theirs))
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        assert torch.equal(value, right[name])
    with safe_open(str(own), "pt") as file:
        assert file.metadata() == {"format": "pt"}
    narrow = tmp_path / "narrow"
    narrow.write_bytes(b"".join(bytes(piece) for piece in tensor_pieces(values, torch.bfloat16)))
    cut = load_file(str(narrow))
    assert {name: value.dtype for name, value in cut.items()} == {
        name: torch.bfloat16 if value.is_floating_point() else value.dtype for name, value in values.items()
    }
    assert torch.equal(cut["turned"], values["turned"].bfloat16())


def test_keeps_the_newest_the_round_ones_and_the_spared(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11, 20, 30, 31):
        save_checkpoint(tmp_path, step, SPEC, tensors(), torch.float32, {})
    removed = prune_checkpoints(tmp_path, 2, keep_every=10, spare=[tmp_path / "checkpoints" / "step-0000002"])
    assert [path.name for path in removed] == ["step-0000001", "step-0000011"]
    assert names(tmp_path) == [f"step-{step:07d}" for step in (2, 10, 20, 30, 31)]
    prune_checkpoints(tmp_path, 2)
    assert names(tmp_path) == ["step-0000030", "step-0000031"]


def calls_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    disk = FailingDisk(errno.ENOSPC)
    with monkeypatch.context() as patch:
        patch.setattr(durable, "os", disk)
        save_checkpoint(tmp_path / "counted", 2, SPEC, tensors(), torch.float32, {})
    return disk.calls


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS], ids=errno.errorcode.get)
def test_every_write_failing_in_turn_leaves_the_one_before(tmp_path: Path, monkeypatch, code: int) -> None:
    save_checkpoint(tmp_path, 1, SPEC, tensors(), torch.float32, {})
    calls = calls_of_a_save(tmp_path, monkeypatch)
    assert {name: calls.count(name) for name in ("makedirs", "rename")} == {"makedirs": 1, "rename": 1}
    assert calls.count("write") > 30
    assert calls.count("fsync") == 7  # five files, the folder, and the folder that holds it
    after_the_rename = len(calls) - calls[::-1].index("rename")
    for number in range(len(calls)):
        with monkeypatch.context() as patch:
            patch.setattr(durable, "os", FailingDisk(code, lambda n, _name, number=number: n == number))
            with pytest.raises(OSError, match=re.escape(os.strerror(code))) as caught:
                save_checkpoint(tmp_path, 2, SPEC, tensors(), torch.float32, {})
        assert caught.value.errno == code
        left = ["step-0000001"] if number < after_the_rename else ["step-0000001", "step-0000002"]
        assert names(tmp_path) == left, f"call {number} ({calls[number]})"
        for folder in list_checkpoints(tmp_path):
            load_checkpoint(folder)
        shutil.rmtree(tmp_path / "checkpoints" / "step-0000002", ignore_errors=True)
    save_checkpoint(tmp_path, 2, SPEC, tensors(), torch.float32, {})
    load_checkpoint(tmp_path / "checkpoints" / "step-0000002")


def test_writes_that_take_a_part_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "os", FailingDisk(errno.ENOSPC, short=7))
    saved = tensors()
    back = load_checkpoint(save_checkpoint(tmp_path, 1, SPEC, saved, torch.float32, {}))
    assert {name: value.tolist() for name, value in back.tensors.items()} == {n: v.tolist() for n, v in saved.items()}


def test_a_kill_between_any_two_writes_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process cleans nothing up: here the clean-up is what is taken away."""
    save_checkpoint(tmp_path, 1, SPEC, tensors(), torch.float32, {})
    count = len(calls_of_a_save(tmp_path, monkeypatch))
    for number in range(0, count, 5):
        with monkeypatch.context() as patch:
            patch.setattr(durable, "os", FailingDisk(errno.EIO, lambda n, _name, number=number: n >= number))
            patch.setattr(durable.Folder, "abandon", lambda self: None)
            with pytest.raises(OSError, match="Input/output"):
                save_checkpoint(tmp_path, 2, SPEC, tensors(), torch.float32, {})
        assert list_checkpoints(tmp_path)[0].name == "step-0000001"
        for folder in list_checkpoints(tmp_path):
            load_checkpoint(folder)
    save_checkpoint(tmp_path, 3, SPEC, tensors(), torch.float32, {})
    assert load_checkpoint(list_checkpoints(tmp_path)[-1]).step == 3


def test_a_folder_with_the_final_name_is_set_aside_not_removed(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        save_checkpoint(tmp_path, 5, SPEC, tensors(value), torch.float32, {"value": value})
    assert names(tmp_path) == ["replaced-step-0000005", "replaced-step-0000005-2", "step-0000005"]
    assert load_checkpoint(tmp_path / "checkpoints" / "step-0000005").state["value"] == 3.0


def cut(name: str, size: int | float):
    def spoil(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * size) if isinstance(size, float) else size])

    return spoil


def flip(name: str, place: float):
    def spoil(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        (folder / name).write_bytes(bytes(content))

    return spoil


def manifest(**changes: object):
    def spoil(folder: Path) -> None:
        content = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**content, **changes}))

    return spoil


def without(name: str):
    return lambda folder: (folder / name).unlink()


SPOILT = {
    "torn manifest": (cut("manifest.json", 0.5), "manifest.json is not readable"),
    "empty manifest": (cut("manifest.json", 0), "manifest.json is not readable"),
    "no manifest": (without("manifest.json"), "manifest.json is missing"),
    "truncated weights": (cut("model.safetensors", 0.5), "model.safetensors is truncated"),
    "truncated by a byte": (cut("trainer.safetensors", -1), "trainer.safetensors is truncated"),
    "longer": (
        lambda folder: (folder / "trainer.safetensors").write_bytes(
            (folder / "trainer.safetensors").read_bytes() + b"x"
        ),
        "trainer.safetensors is too long",
    ),
    "no trainer": (without("trainer.safetensors"), "trainer.safetensors is missing"),
    "no state": (without("state.json"), "state.json is missing"),
    **{
        f"one bit of {name} at {place}": (flip(name, place), f"{name} was altered")
        for name in ("config.json", "model.safetensors", "trainer.safetensors", "state.json")
        for place in (0.0, 0.5, 1.0)
    },
    "future": (manifest(version=3, draftsmith="9.1"), r"written by a later release \(9.1, checkpoint version 3"),
    "past": (manifest(version=1), "checkpoint version 1 is not 2"),
    "another program's": (manifest(format="lightning"), "not that of a Draftsmith checkpoint"),
    "another program's file": (
        lambda folder: (folder / "manifest.json").write_text("[1, 2]"),
        "not that of a Draftsmith checkpoint",
    ),
    "fewer files": (manifest(files={}), "does not name config.json, model.safetensors, state.json, trainer"),
    "a file of another kind": (manifest(files=[1]), "manifest.json is not readable"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_each_corruption_is_refused_by_name_and_the_one_before_used(tmp_path: Path, kind: str) -> None:
    spoil, message = SPOILT[kind]
    save_checkpoint(tmp_path, 1, SPEC, tensors(), torch.float32, {"mark": 1})
    folder = save_checkpoint(tmp_path, 2, SPEC, tensors(), torch.float32, {"mark": 2})
    load_checkpoint(folder)
    spoil(folder)
    with pytest.raises(UserError, match=message) as caught:
        load_checkpoint(folder)
    assert str(folder) in str(caught.value)
    refusals: list[tuple[str, str]] = []
    found = newest_usable(tmp_path, lambda _: None, lambda error, place: refusals.append((str(error), place.name)))
    assert found is not None
    assert (found.step, found.state["mark"]) == (1, 1)
    assert [place for _, place in refusals] == ["refused-step-0000002"]
    assert str(folder) in refusals[0][0]
    assert names(tmp_path) == ["refused-step-0000002", "step-0000001"]


def test_a_renamed_one_and_one_of_another_run_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, SPEC, tensors(), torch.float32, {"run": "ours"})
    (save_checkpoint(tmp_path, 2, SPEC, tensors(), torch.float32, {"run": "ours"})).rename(
        tmp_path / "checkpoints" / "step-0000007"
    )
    save_checkpoint(tmp_path, 3, SPEC, tensors(), torch.float32, {"run": "theirs"})

    def accept(checkpoint: Checkpoint) -> None:
        if checkpoint.state["run"] != "ours":
            raise UserError("this checkpoint is of another run", where=str(checkpoint.folder))

    refusals: list[str] = []
    found = newest_usable(tmp_path, accept, lambda error, _place: refusals.append(error.what))
    assert found is not None
    assert found.step == 1
    assert refusals == ["this folder holds the checkpoint of step 2: renamed?", "this checkpoint is of another run"]


def test_when_all_are_refused_the_newest_is_named_and_none_is_lost(tmp_path: Path, monkeypatch) -> None:
    assert newest_usable(tmp_path, lambda _: None, lambda *_: None) is None
    for step in (1, 2):
        without("state.json")(save_checkpoint(tmp_path, step, SPEC, tensors(), torch.float32, {}))
    monkeypatch.setattr(durable, "os", FailingDisk(errno.EROFS, lambda _n, name: name == "rename"))
    places: list[str] = []
    with pytest.raises(UserError, match=r"step-0000002: no checkpoint can be used; the newest: state.json is missing"):
        newest_usable(tmp_path, lambda _: None, lambda _error, place: places.append(place.name))
    assert places == ["step-0000002", "step-0000001"]  # read-only: they stay where they are
    assert names(tmp_path) == ["step-0000001", "step-0000002"]


def test_a_second_resume_does_not_quietly_start_from_nothing(tmp_path: Path) -> None:
    without("state.json")(save_checkpoint(tmp_path, 1, SPEC, tensors(), torch.float32, {}))
    for message in ("state.json is missing", "all its checkpoints were refused at an earlier start"):
        with pytest.raises(UserError, match=message):
            newest_usable(tmp_path, lambda _: None, lambda *_: None)
    assert names(tmp_path) == ["refused-step-0000001"]


def test_what_a_killed_process_left_behind_is_removed_and_nothing_else(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, SPEC, tensors(), torch.float32, {})
    for name in (".step-0000002.partial", ".step-0000003.removed", "refused-step-0000009", "mine"):
        (tmp_path / "checkpoints" / name / "deep").mkdir(parents=True)
    clean_up(tmp_path)
    clean_up(tmp_path / "none")
    assert names(tmp_path) == ["mine", "refused-step-0000009", "step-0000001"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_one_that_may_not_be_read(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 1, SPEC, tensors(), torch.float32, {})
    (folder / "state.json").chmod(0)
    with pytest.raises(UserError, match=r"state.json is not readable: Permission denied"):
        load_checkpoint(folder)
