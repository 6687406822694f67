"""Readers of finished or resumed runs: the picture and TensorBoard."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.observe.picture import draw_run, read_curves, visible_top
from draftsmith.observe.tensorboard import TensorBoard, write_tensorboard


def run_events(steps: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"kind": "run", "time": 0.0}]
    for step in range(1, steps + 1):
        slots = [0.9, 0.5]
        event = {"kind": "step", "time": float(step), "step": step, "loss": 10.0 / step, "accept_by_slot": slots}
        events.append({**event, "tau_proxy": 1 + step / steps, "lr": 1e-3, "tokens_per_second": 1000.0})
        if step % 10 == 0:
            events.append({"kind": "eval", "time": float(step), "step": step, "loss": 11.0 / step, "tau_proxy": 1.5})
    return events


def test_curves_keep_the_last_value_of_a_repeated_step() -> None:
    events = [
        {"kind": "step", "step": 1, "loss": 3.0},
        {"kind": "step", "step": 2, "loss": 2.0},
        {"kind": "step", "step": 3, "loss": "nan", "tau_proxy": 1.25},
        {"kind": "step", "step": 2, "loss": 1.5},
        {"kind": "eval", "step": 2, "loss": 4.0},
        {"kind": "checkpoint", "step": 2},
    ]
    curves = read_curves(events)
    assert curves["step", "loss"] == {1: 3.0, 2: 1.5}
    assert curves["step", "tau_proxy"] == {3: 1.25}
    assert curves["eval", "loss"] == {2: 4.0}


def test_the_picture_is_a_readable_png(tmp_path: Path) -> None:
    from matplotlib import image

    path = draw_run(run_events(100), tmp_path / "run.png", title="demo", tau=2.4)
    pixels = image.imread(path)
    height, width = pixels.shape[:2]
    assert (width, height) == (960, 768)
    red, green, blue = (pixels[..., channel] for channel in range(3))
    assert ((blue > 0.8) & (red < 0.3)).sum() > 500  # the training curves
    assert ((red > 0.7) & (green < 0.45) & (blue < 0.2)).sum() > 100  # the held-out points


def test_a_picture_needs_steps_and_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no training step"):
        draw_run([{"kind": "run"}], tmp_path / "run.png")
    from matplotlib.figure import Figure

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(UserError, match="No space left on device"):
        draw_run(run_events(2), tmp_path / "run.png")


def test_tensorboard_holds_the_scalars_and_forgets_repeated_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_tensorboard(run_events(20), tmp_path)
    board = TensorBoard(tmp_path)  # the resumed run starts again at step 15
    for event in run_events(20)[15:]:
        board({**event, "loss": 7.0} if event["kind"] == "step" else event)
    board({"kind": "end", "reason": "done", "step": 20})

    read = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    read.Reload()
    losses = [(scalar.step, scalar.value) for scalar in read.Scalars("train/loss")]
    assert [step for step, _ in losses] == list(range(1, 21))
    assert losses[0] == (1, 10.0)
    assert losses[-1] == (20, 7.0)
    assert [scalar.value for scalar in read.Scalars("train_accept/slot_02")][:2] == [0.5, 0.5]
    assert {"held_out/loss", "held_out/tau_proxy", "train/tokens_per_second"} <= set(read.Tags()["scalars"])


def test_watching_imports_no_torch() -> None:
    code = (
        "import sys, draftsmith.observe.events, draftsmith.observe.live, draftsmith.observe.run_folder\n"
        "import draftsmith.observe.tensorboard, draftsmith.observe.picture\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'tensorboard')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_loud_start_does_not_flatten_the_curve() -> None:
    calm = [2.0 + 1.0 / (step + 1) for step in range(100)]
    assert visible_top(calm) is None
    assert visible_top([46.0, 40.0, 9.0, *calm]) == pytest.approx(1.1 * max(calm[7:]))
    assert visible_top([46.0, 2.0]) is None, "two points are all there is to show"
    spiking = [*calm, 40.0]
    assert visible_top(spiking) is None, "what happens later stays in the picture"
