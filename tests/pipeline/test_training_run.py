"""Whole runs on the CPU: threads equal one, a rerun and a resume are bit-identical, failures end everything."""

from __future__ import annotations

import _thread
import errno
import json
import os
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith.cli import main
from draftsmith.errors import UserError
from draftsmith.observe.events import read_events
from draftsmith.observe.live import notable_line
from draftsmith.pipeline import progress as progress_module
from draftsmith.pipeline import run as run_module
from draftsmith.pipeline import starting
from draftsmith.pipeline.plan import make_plan
from draftsmith.pipeline.run import train
from draftsmith.target.forward import Target
from draftsmith.training.step import Replica

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE = {"targets": ["cpu"] * 5, "drafters": ["cpu"] * 3, "prefetch": 4}


def trainer_bytes(folder: Path, step: int) -> bytes:
    return (folder / "checkpoints" / f"step-{step:07d}" / "trainer.safetensors").read_bytes()


def test_five_plus_three_plus_four_equals_one_plus_one_plus_one(tiny_run) -> None:
    """Losses equal to float32 tolerance (sums of gradients are formed in another order); a rerun is bit-identical."""
    one = train(tiny_run("one", pipeline={"prefetch": 1}))
    wide = train(tiny_run("wide", pipeline=WIDE))
    again = train(tiny_run("again", pipeline=WIDE))
    assert len(one.losses) == 4
    torch.testing.assert_close(torch.tensor(wide.losses), torch.tensor(one.losses), rtol=0, atol=2e-5)
    assert one.evaluation is not None
    assert wide.evaluation is not None
    assert wide.evaluation["loss"] == pytest.approx(one.evaluation["loss"], abs=2e-5)
    assert wide.evaluation["blocks"] == one.evaluation["blocks"]
    assert wide.losses == again.losses
    assert trainer_bytes(wide.folder, 4) == trainer_bytes(again.folder, 4)


def test_eight_workers_overlap_in_time(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every target meets the others and the drafters in its second row, every drafter in its first: none of them could
    leave if one had to wait for another's end, and the spans of all eight lie over each other."""
    features, step = Target.features, Replica.step
    together, rows = threading.Barrier(8), Counter[str]()

    def meet(at: int) -> None:
        name = threading.current_thread().name
        rows[name] += 1
        if rows[name] == at:
            together.wait(60)

    def meeting_features(self, *args, **kwargs):
        meet(2)
        return features(self, *args, **kwargs)

    def meeting_step(self, *args, **kwargs):
        meet(1)
        return step(self, *args, **kwargs)

    load = run_module.load_targets

    def load_and_patch(*args):
        targets = load(*args)
        monkeypatch.setattr(Target, "features", meeting_features)
        return targets

    monkeypatch.setattr(run_module, "load_targets", load_and_patch)
    monkeypatch.setattr(Replica, "step", meeting_step)
    result = train(tiny_run("overlap", pipeline=WIDE, training={"steps": 5, "eval_rows": 0, "rows_per_update": 6}))
    spans = [event for event in read_events(result.folder / "events.jsonl") if event["kind"] == "work"]
    edges = sorted(
        [(span["start"], 1, span["worker"]) for span in spans if not span["worker"].startswith("prefetch")]
        + [(span["end"], -1, span["worker"]) for span in spans if not span["worker"].startswith("prefetch")]
    )
    busy: dict[str, int] = {}
    most = 0
    for _, change, worker in edges:
        busy[worker] = busy.get(worker, 0) + change
        most = max(most, sum(count > 0 for count in busy.values()))
    assert {span["worker"] for span in spans} == {
        *(f"target {i}" for i in range(5)),
        *(f"drafter {i}" for i in range(3)),
        *(f"prefetch {i}" for i in range(4)),
    }
    assert most == 8


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resuming_equals_never_having_stopped(tiny_run, optimizer: str) -> None:
    """Bit for bit: masters, optimizer state, and every loss after the checkpoint."""
    settings = {"optimizer": {"name": optimizer}, "training": {"steps": 4}}
    whole = train(tiny_run("whole", **settings))
    parts = tiny_run("parts", **settings)
    train(parts)
    shutil.rmtree(Path(parts.training.output) / "checkpoints" / "step-0000004")
    resumed = train(parts, resume=True)
    assert resumed.losses == whole.losses[2:]
    assert trainer_bytes(resumed.folder, 4) == trainer_bytes(whole.folder, 4)


def test_what_watches_a_run_may_change_when_it_is_resumed(tiny_run) -> None:
    """Among it is what an error of the compiled path names as its remedy; not a bit of what is learned changes."""
    whole = train(tiny_run("whole"))
    parts = tiny_run("parts")
    train(parts)
    shutil.rmtree(Path(parts.training.output) / "checkpoints" / "step-0000004")
    watching = {"evidence": "warn", "on_recompile": "warn", "evidence_every": 1}
    training = {"eval_every": 1, "eval_rows": 1, "activation_checkpointing": True}
    resumed = train(tiny_run("parts", compile=watching, training=training), resume=True)
    assert resumed.losses == whole.losses[2:]
    assert trainer_bytes(resumed.folder, 4) == trainer_bytes(whole.folder, 4)
    evaluated = [event["step"] for event in read_events(resumed.folder / "events.jsonl") if event["kind"] == "eval"]
    assert evaluated == [2, 4, 3, 4]


def test_a_time_limit_saves_and_the_rest_can_follow(tiny_run) -> None:
    config = tiny_run("limit", training={"steps": 3, "save_every": 0})
    first = train(config, max_minutes=0.0)
    assert (first.reason, first.step) == ("time limit", 1)
    assert first.checkpoint is not None
    assert first.checkpoint.is_dir()
    second = train(config, resume=True)
    assert (second.reason, second.step) == ("all steps done", 3)
    whole = train(tiny_run("limit-whole", training={"steps": 3, "save_every": 0}))
    assert first.losses + second.losses == whole.losses
    nothing_left = train(config, resume=True).to_json()
    assert (nothing_left["step"], nothing_left["loss"], nothing_left["tau_proxy"]) == (3, None, None)
    assert "NaN" not in json.dumps(nothing_left)


@pytest.mark.parametrize("where", ["prefetch", "target", "drafter"])
def test_the_first_failure_ends_everything_with_its_cause(tiny_run, monkeypatch, where: str) -> None:
    class Broken(RuntimeError):
        pass

    def fail(*_args, **_kwargs):
        raise Broken(where)

    place = {
        "prefetch": "draftsmith.pipeline.assemble.make_draft_batch",
        "target": "draftsmith.target.forward.Target.features",
        "drafter": "draftsmith.training.step.Replica.step",
    }[where]
    monkeypatch.setattr(place, fail)
    with pytest.raises(Broken, match=where):
        train(tiny_run(f"broken-{where}", pipeline=WIDE))
    names = {thread.name for thread in threading.enumerate()}
    assert not [name for name in names if name.startswith(("prefetch", "target", "drafter"))]


def test_one_interrupt_finishes_the_step_and_saves(tiny_run) -> None:
    config = tiny_run("interrupted", training={"steps": 5000, "save_every": 0, "eval_every": 0})
    seen: list[int] = []

    def interrupt_at_three(event) -> None:
        if event["kind"] == "step":
            seen.append(event["step"])
            if event["step"] == 3:
                _thread.interrupt_main()

    result = train(config, listener=interrupt_at_three)
    assert result.reason == "interrupted"
    assert 3 <= result.step < 5000
    assert result.checkpoint is not None
    assert result.checkpoint.name == f"step-{result.step:07d}"


def test_overfitting_one_row_reaches_almost_no_loss(tiny_run) -> None:
    config = tiny_run(
        "overfit",
        rows={"length": 48, "anchors": 6},
        drafter={"layers": 2, "block_size": 4},
        optimizer={"lr": 2e-2},
        training={"steps": 600, "rows_per_update": 1, "save_every": 0},
    )
    result = train(config, overfit=True)
    assert result.succeeded
    assert result.reason == "overfitted"
    assert result.losses[0] > 3
    assert json.loads((result.folder / "resolved.json").read_text())["overfit"] is True


def test_a_plan_refuses_the_folder_that_a_run_refuses(tiny_run, tmp_path: Path, capsys) -> None:
    """With the same line and before the data is read; that the folder holds this very run is a note."""
    run, config = tiny_run("there", training={"steps": 1}), tmp_path / "run.yaml"
    train(run)
    config.write_text(yaml.safe_dump(run.model_dump(mode="json", exclude_none=True)))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    before = sorted(tmp_path.rglob("*"))
    cases = (
        [f"training.output={config}"],
        ["training.output=/proc/foo"],
        [f"training.output={tmp_path}/mine"],
        ["training.steps=2"],  # another run
    )
    for overrides in cases:
        said = []
        for options in ([], ["--plan"]):
            assert main(["train", str(config), *overrides, *options]) == 2
            said.append(capsys.readouterr())
        assert said[0] == said[1]
        assert said[0].err.count("\n") == 1
    assert main(["train", str(config), "--plan"]) == 0
    assert f"note      {tmp_path}/there holds this run: train --resume goes on with it" in capsys.readouterr().out
    assert main(["train", str(config), "--plan", f"training.output={tmp_path}/deep/new"]) == 0
    assert "--resume" not in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_nobody_may_look_into_is_told_by_the_check_of_a_run(tiny_run, monkeypatch) -> None:
    """Not by the question whether a run is there, which has no words for it."""

    def denied(config: Any) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{config.training.output}/run.json")

    def refuse(_config: Any, *, resume: bool) -> None:
        assert not resume
        raise UserError("cannot be used as run folder: Permission denied")

    monkeypatch.setattr(starting, "holds_run", denied)
    monkeypatch.setattr(starting, "check_run_folder", refuse)
    with pytest.raises(UserError, match="cannot be used as run folder"):
        starting.notes_on_folder(tiny_run("locked"))


def test_a_loss_that_is_not_finite_stops_the_run(tiny_run) -> None:
    with pytest.raises(UserError, match="not finite"):
        train(tiny_run("diverged", optimizer={"lr": 1e18}, training={"steps": 20}))


def test_resuming_with_other_data_is_refused(tiny_run, tiny_chats: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    lines = tiny_chats.read_text().splitlines(keepends=True)
    copy.write_text("".join(lines))
    config = tiny_run("other-data", data={"train": str(copy)}, training={"steps": 2})
    train(config)
    copy.write_text("".join(lines[:-5]))
    with pytest.raises(UserError, match="training rows are not those"):
        train(config, resume=True)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"drafter": {"taps": [0, 99]}}, "out of range"),
        ({"drafter": {"mask_token_id": 10_000}}, "outside the target's"),
        ({"drafter": {"attention": "flex"}}, "cannot learn on CPU"),
        ({"pipeline": {"targets": ["cpu"]}}, r"auto stands for both .* \(name pipeline.drafters too\)"),
        ({"pipeline": {"targets": ["cuda:7"]}}, "'cuda:7' does not exist"),
        (
            {"pipeline": {"targets": ["auto", "cpu"]}},
            r"auto stands for both .* \(write auto once for each role, alone\)",
        ),
        ({"pipeline": {"targets": ["cuda:7"], "drafters": ["cpu"]}}, "does not exist"),
        ({"pipeline": {"targets": ["tpu"], "drafters": ["cpu"]}}, "is not a device"),
        ({"pipeline": {"targets": ["tpu"]}}, "'tpu' is not a device"),
        ({"drafter": {"heads": 4, "kv_heads": 3}}, "cannot share"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(tiny_run, sections, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(tiny_run("bad", **sections))


def test_an_idle_share_is_printed(tiny_run) -> None:
    plan = make_plan(tiny_run("idle", pipeline={"targets": ["cpu"], "drafters": ["cpu"] * 4}))
    assert any("25 % of the drafters' time is idle" in line for line in plan.lines())


def no_space(*_args, **_kwargs):
    raise OSError(28, "No space left on device")


def test_a_full_disk_costs_a_checkpoint_but_not_the_run(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    save, calls = run_module.save_checkpoint, []

    def full_at_first(*args, **kwargs):
        calls.append(args)
        return no_space() if len(calls) == 1 else save(*args, **kwargs)

    monkeypatch.setattr(run_module, "save_checkpoint", full_at_first)
    result = train(tiny_run("full"))
    assert result.step == 4
    assert [path.name for path in (result.folder / "checkpoints").iterdir()] == ["step-0000004"]
    errors = [event["text"] for event in read_events(result.folder / "events.jsonl") if event["kind"] == "error"]
    assert len(errors) == 1
    assert "checkpoint of step 2 could not be written: No space left on device; training goes on" in errors[0]


def test_a_last_checkpoint_that_cannot_be_written_is_said(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "save_checkpoint", no_space)
    monkeypatch.setattr(progress_module, "LAST_SAVE_SECONDS", 0.0)
    with pytest.raises(UserError, match="checkpoint of step 4 could not be written: No space left"):
        train(tiny_run("never"))


def test_what_was_refused_is_counted_and_named(tiny_run, tiny_chats: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.jsonl"
    unanswered = '{"messages": [{"role": "user", "content": "the quick fox"}]}\n'
    mixed.write_text(unanswered + tiny_chats.read_text())
    config = tiny_run("mixed", data={"train": str(mixed)}, training={"steps": 1})
    plan = make_plan(config)
    assert any("1 refused" in line for line in plan.lines())
    result = train(config)
    named = (result.folder / "data-incidents.jsonl").read_text()
    assert f"{mixed}:1" in named


def test_a_target_whose_weights_are_cut_short_costs_nothing(tiny_run, tiny_target: Path, tmp_path: Path) -> None:
    """Refused in one line, and the same command works once the file is mended."""
    broken = tmp_path / "target"
    shutil.copytree(tiny_target, broken)
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    config = tiny_run("run", target={"path": str(broken)}, training={"steps": 1})
    seen: list[str] = []
    with pytest.raises(UserError, match="target"):
        train(config, listener=lambda event: seen.append(notable_line(event) or ""))
    assert any(line.startswith("target") for line in seen)
    assert not any("error" in line or "failed" in line for line in seen), "the command says it, once"
    assert [path.name for path in Path(config.training.output).iterdir() if path.name != "lock"] == []
    weights.write_bytes(whole)
    assert train(config).step == 1
