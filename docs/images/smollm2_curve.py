"""Draws held-out loss and τ proxy over seconds from a run's events.

python docs/images/smollm2_curve.py runs/smollm2/events.jsonl docs/images/smollm2-curve.png
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def with_seconds(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps and evaluations with their seconds of training: without warm-ups, and without what a resume did again."""
    processes: list[list[dict[str, Any]]] = []
    for line in lines:
        if line["kind"] == "ledger":  # the end of a warm-up
            processes.append([line])
        elif line["kind"] in ("step", "eval") and processes:
            processes[-1].append(line)
    found, before = [], 0.0
    for process, later in itertools.zip_longest(processes, processes[1:]):
        end = later[1]["step"] if later else float("inf")
        kept = [line | {"seconds": before + line["time"] - process[0]["time"]} for line in process[1:]]
        found += [line for line in kept if line["step"] < end]
        before = found[-1]["seconds"]
    return found


def main(events: Path, picture: Path) -> None:
    """Reads JSON lines (gzip if named .gz); writes a PNG."""
    content = gzip.decompress(events.read_bytes()) if events.suffix == ".gz" else events.read_bytes()
    lines = with_seconds([json.loads(line) for line in content.decode().split("\n") if line])
    steps = [line for line in lines if line["kind"] == "step"]
    evals = [line for line in lines if line["kind"] == "eval"]
    at = [line["seconds"] for line in evals]
    loss_color, tau_color = "#1f4e8c", "#b3541e"

    figure, left = pyplot.subplots(figsize=(6.6, 3.8), dpi=130)
    left.plot(
        [line["seconds"] for line in steps],
        [line["loss"] for line in steps],
        color="#c9d3e0",
        lw=0.6,
        label="training loss of one update",
    )
    left.plot(at, [line["loss"] for line in evals], "o-", color=loss_color, label="held-out loss")
    left.set(ylim=(1.5, 9), xlim=(0, None), xlabel="seconds after the warm-up", ylabel="weighted cross-entropy, nats")
    left.grid(alpha=0.25)
    right = left.twinx()
    right.plot(at, [line["tau_proxy"] for line in evals], "s--", color=tau_color, label="held-out τ proxy")
    right.set(ylim=(1, 4.2), ylabel="τ proxy, tokens per target forward")
    labelled = -math.inf
    for line, second in zip(evals, at, strict=True):
        if second - labelled < at[-1] / 20:  # the label would lie on the one before
            continue
        labelled = second
        right.annotate(
            f"update {line['step']}" if line is evals[0] else str(line["step"]),
            (second, line["tau_proxy"]),
            textcoords="offset points",
            xytext=(0, -13),
            fontsize=7,
            ha="center",
            color=tau_color,
        )
    handles, labels = left.get_legend_handles_labels()
    more_handles, more_labels = right.get_legend_handles_labels()
    left.legend(handles + more_handles, labels + more_labels, fontsize=8, loc="upper center", frameon=False)
    figure.tight_layout()
    figure.savefig(picture)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
