"""A view of a run that renews itself: the lines of `status`, and how loss, τ and speed went, as bars.

Reads the run's folder again every few seconds, so it may run on another machine and be started and left at any time.
On a terminal the view is redrawn in place; elsewhere a line is printed whenever the step has changed.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from draftsmith.observe.live import printable, short_count, step_line
from draftsmith.observe.status import Status, read_status

BARS = "▁▂▃▄▅▆▇█"
OVER = ("finished", "stopped", "failed", "crashed")


def watch(
    folder: str | Path, stream: TextIO, *, seconds: float = 2.0, sleep: Callable[[float], object] = time.sleep
) -> Status:
    """Shows a run until it is over, and returns its last status.

    Args:
        folder: of the run.
        stream: where to show.
        seconds: between two looks.
        sleep: for tests.

    Raises:
        UserError: as `read_status`.
    """
    if not stream.isatty():
        return _print_lines(folder, stream, seconds, sleep)
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    status = read_status(folder)
    console = Console(file=stream, highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            columns = shutil.get_terminal_size().columns
            live.update(Text("\n".join(view(status, columns))), refresh=True)
            if status.state in OVER:
                return status
            sleep(seconds)
            status = read_status(folder)


def view(status: Status, columns: int) -> list[str]:
    """What a terminal of so many columns shows."""
    lines = status.lines()
    points = status.summary["history"]
    if len(points) > 1:
        lines.append("")
        for index, name in ((1, "loss"), (2, "τ proxy"), (3, "tok/s")):
            values = [point[index] for point in points if point[index] is not None]
            if values:
                low, high = min(values), max(values)
                shown = short_count if name == "tok/s" else "{:.3f}".format
                lines.append(f"{name:<8}{bars(values, max(10, min(100, columns - 30)))} {shown(low)} to {shown(high)}")
    return lines


def bars(values: Sequence[float], width: int) -> str:
    """Values as bars of eight heights, lowest to highest; each bar is the mean of its share of the values."""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1)) if span else 0] for mean in means)


def _print_lines(folder: str | Path, stream: TextIO, seconds: float, sleep: Callable[[float], object]) -> Status:
    shown: object = None
    while True:
        status = read_status(folder)
        step = status.summary["step"]
        mark = (status.state, None if step is None else step["step"])
        if mark != shown:
            print(f"{status.state}: {printable(step_line(step))}" if step else status.state, file=stream, flush=True)
            shown = mark
        if status.state in OVER:
            print("\n".join(status.lines()), file=stream, flush=True)
            return status
        sleep(seconds)
