"""One picture of a run: loss and τ over the steps, as PNG, drawn from events.

Upper panel: training loss (thin: every step, thick: exponential mean) and held-out loss. Lower panel: the τ proxy of
the same, and the τ measured by decoding, if there is one, as a level line. Steps that a resume repeated count once,
with their last value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.errors import UserError, reason_of
from draftsmith.observe.events import Event
from draftsmith.observe.figures import smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRAIN = "#1f6feb"
_HELD_OUT = "#d1570c"
_MEASURED = "#1a7f37"


def draw_run(events: Iterable[Event], path: str | Path, *, title: str = "", tau: float | None = None) -> Path:
    """Draws loss and τ over the steps.

    Args:
        events: of one run, in the order of writing.
        path: the PNG to write.
        title: shown above.
        tau: acceptance length measured by decoding, drawn as a line.

    Raises:
        UserError: the events hold no step, or the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    curves = read_curves(events)
    if not curves["step", "loss"]:
        raise UserError("no training step to draw", where=str(path))
    figure = Figure(figsize=(8, 6.4), dpi=120, layout="constrained")  # not pyplot: no global state, any thread
    FigureCanvasAgg(figure)
    loss_axes, tau_axes = figure.subplots(2, 1, sharex=True)
    _draw_panel(loss_axes, curves["step", "loss"], curves["eval", "loss"], "loss (weighted mean, nats)")
    _draw_panel(tau_axes, curves["step", "tau_proxy"], curves["eval", "tau_proxy"], "τ (tokens per target forward)")
    if tau is not None:
        tau_axes.axhline(tau, color=_MEASURED, linestyle="--", linewidth=1.5, label=f"measured by decoding: {tau:.2f}")
    tau_axes.set_xlabel("step (optimizer updates)")
    tau_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss_axes, tau_axes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    if title:
        figure.suptitle(title)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"the picture cannot be written: {reason_of(error)}", where=str(path)) from None
    return Path(path)


def read_curves(events: Iterable[Event]) -> dict[tuple[str, str], dict[int, float]]:
    """(kind, name) → {step: value}, sorted by step, for the loss and τ proxy of "step" and "eval" events.

    A repeated step keeps its last value; values that are not finite are left out.
    """
    curves: dict[tuple[str, str], dict[int, float]] = {
        (kind, name): {} for kind in ("step", "eval") for name in ("loss", "tau_proxy")
    }
    for event in events:
        for name in ("loss", "tau_proxy"):
            curve = curves.get((event["kind"], name))
            if curve is not None and event.get(name) is not None and math.isfinite(float(event[name])):
                curve[int(event["step"])] = float(event[name])
    return {key: dict(sorted(curve.items())) for key, curve in curves.items()}


def _draw_panel(axes: Axes, train: dict[int, float], held_out: dict[int, float], label: str) -> None:
    axes.set_ylabel(label)
    if train:
        steps, values = list(train), list(train.values())
        axes.plot(steps, values, color=_TRAIN, alpha=0.3, linewidth=0.8)
        axes.plot(steps, smooth(values), color=_TRAIN, linewidth=1.8, label="training" + _tail(label))
        top = visible_top(values)
        if top is not None:
            axes.set_ylim(0, top)
            axes.annotate(f"starts at {values[0]:.0f}", (0.02, 0.94), xycoords="axes fraction", va="top", fontsize=8)
    if held_out:
        axes.plot(
            list(held_out),
            list(held_out.values()),
            "o-",
            color=_HELD_OUT,
            markersize=4,
            label="held-out" + _tail(label),
        )


def visible_top(values: Sequence[float]) -> float | None:
    """Where the axis ends if the first tenth of a curve would flatten the rest of it; None if all of it can be shown.

    A drafter's loss starts far above what it ever is again, because the frozen head gives loud logits from the start.
    """
    rest = values[len(values) // 10 :]
    if len(values) < 20 or max(values) <= 3 * max(rest):
        return None
    return 1.1 * max(rest)


def _tail(label: str) -> str:
    """The proxy of τ is named as one: the mean over uniform anchors is usually higher than what decoding reaches."""
    return " (proxy)" if label.startswith("τ") else ""
