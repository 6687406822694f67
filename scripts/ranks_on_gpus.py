"""Two GPUs in several ways: one of them alone, a role on each, both roles on both, two ranks over NCCL.

    python scripts/ranks_on_gpus.py [--geometry qwen3-8b|qwen3-0.6b] [--steps 24] [--rows 4] [--runs one,both] [--json]

Writes a target with random weights of that geometry and random conversations, then trains the same drafter with
`draftsmith train`: on one card; target on `cuda:0` and drafter on `cuda:1`; both roles on both in one process; as
`pipeline: auto` chooses; and as two ranks under torchrun, each with a card of its own, twice. Prints for each the
steady real tok/s (the first third of the steps is left out), its ratio to one card's, the largest difference of a loss
from one card's, whether the rerun of the ranks had the same bits, and what the exchange went through. The target is
written once and stays in `--folder`.

Costs 16 GB of disk and about a minute a run for qwen3-8b. Exit code 1 if losses differ by more than `TOLERANCE`, a
rerun differs at all, or two cards with both roles reach less than `--least` times one card's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from draftsmith.bench.geometry import GEOMETRIES
from draftsmith.bench.random_data import write_conversations
from draftsmith.bench.random_target import write_random_target
from draftsmith.errors import run_script
from draftsmith.observe.events import read_events

TOLERANCE = 0.02  # of a bf16 loss near 12, whose gradients are summed in another order
DESCRIPTIONS = {
    "one": "one card",
    "1+1": "target on one, drafter on the other",
    "both": "both roles on both, one process",
    "auto": "as pipeline: auto chooses",
    "ranks": "two ranks",
    "again": "two ranks again",
}


def command_of(
    folder: Path, name: str, arguments: argparse.Namespace, pipeline: dict[str, Any], ranks: int, steps: int
) -> list[str]:
    """Writes the config of a run and returns what starts it."""
    output = folder / name
    shutil.rmtree(output, ignore_errors=True)
    on_cuda = torch.cuda.is_available()
    content = {
        "target": {"path": str(folder / f"target-{arguments.geometry}")},
        "data": {"train": str(folder / "data.jsonl"), "held_out_share": 0.02},
        "drafter": {"layers": 5 if on_cuda else 1, "block_size": 16},
        "rows": {"length": 4096, "anchors": 512} if on_cuda else {"length": 256, "anchors": 16},
        # Low: at a usual rate random weights make losses jump, and differences of rounding with them.
        "optimizer": {"lr": 1e-5},
        "training": {
            "steps": steps,
            "rows_per_update": arguments.rows,
            "eval_every": 0,
            "eval_rows": 2,
            "save_every": 0,
            "tensorboard": False,
            "output": str(output),
        },
        "pipeline": pipeline,
    }
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(content))
    command = [sys.executable, "-m", "draftsmith", "train", str(config)]
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        command = [sys.executable, *torchrun, "draftsmith", "train", str(config)]
    return command


def train(folder: Path, name: str, arguments: argparse.Namespace, pipeline: dict[str, Any], ranks: int) -> Path:
    """One run to its end; returns its folder."""
    command = command_of(folder, name, arguments, pipeline, ranks, arguments.steps)
    began, path = time.monotonic(), folder / f"{name}.log"
    with path.open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log).returncode
    assert code == 0, f"{name}: exit code {code}\n{path.read_text()[-3000:]}"
    print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return folder / name


def lose_a_rank(folder: Path, arguments: argparse.Namespace, pipeline: dict[str, Any]) -> dict[str, Any]:
    """Kills rank 1 of a run once steps come; how long the rest took to end, and with what line."""
    command = command_of(folder, "lost", arguments, pipeline, 2, 100_000)
    path, events = folder / "lost.log", folder / "lost" / "events.jsonl"
    with path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 300
        while not (events.exists() and any(e["kind"] == "step" and e["step"] > 3 for e in read_events(events))):
            assert process.poll() is None, path.read_text()[-3000:]
            assert time.monotonic() < deadline, "no step came"
            time.sleep(0.1)
        ranks = [int(each) for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        victim = next(pid for pid in ranks if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        code = process.wait(timeout=120)
    left = [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    lines = [line for line in path.read_text().splitlines() if line.startswith("draftsmith: ")]
    shutil.rmtree(folder / "lost")
    return {"seconds": round(time.monotonic() - began, 1), "code": code, "lines": lines, "left": left}


def figures(output: Path, steps: int) -> dict[str, Any]:
    """What a run's record shows. Removes its checkpoint: twelve bytes a parameter, and four runs."""
    events = list(read_events(output / "events.jsonl"))
    done = {event["step"]: event for event in events if event["kind"] == "step"}
    # An event comes one update late, the last one when everything is saved: the rate is of those between.
    first, before = done[max(1, steps // 3)], done[steps - 1]
    notices = [event["text"] for event in events if event["kind"] == "notice"]
    checkpoint = next((output / "checkpoints").glob("step-*"))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    shutil.rmtree(output / "checkpoints")
    return {
        "tokens_per_second": round((before["tokens"] - first["tokens"]) / (before["time"] - first["time"]), 1),
        "losses": [done[step]["loss"] for step in sorted(done)],
        "exchange": next((text for text in notices if "exchange gradients" in text), ""),
        "evidence": [event["ok"] for event in events if event["kind"] == "evidence"],
        "state": manifest["files"]["trainer.safetensors"]["sha256"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-8b", choices=sorted(GEOMETRIES))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rows", type=int, default=4, help="of an update")
    parser.add_argument("--least", type=float, default=1.9, help="speed of two cards against one; 0: not asked")
    parser.add_argument("--runs", default=",".join(DESCRIPTIONS), help="which, of these; speed and losses against one")
    parser.add_argument("--kill", action="store_true", help="lose a rank, too")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/draftsmith-ranks"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    target, on_cuda = folder / f"target-{arguments.geometry}", torch.cuda.is_available()
    if not (target / "config.json").exists():
        write_random_target(target, GEOMETRIES[arguments.geometry], device="cuda" if on_cuda else "cpu")
    tokens = (4096 if on_cuda else 256) * arguments.rows * arguments.steps // 4
    write_conversations(folder / "data.jsonl", random.Random(0), tokens)
    print(f"target and data: {time.monotonic() - began:.0f} s", file=sys.stderr)
    cards = [f"cuda:{i}" for i in range(2)] if on_cuda else ["cpu", "cpu"]
    one = {"targets": cards[:1], "drafters": cards[:1]}
    ways: dict[str, tuple[dict[str, Any], int]] = {
        "one": (one, 1),
        "1+1": ({"targets": cards[:1], "drafters": cards[1:]}, 1),
        "both": ({"targets": cards, "drafters": cards}, 1),
        "auto": ({}, 1),
        "ranks": (one, 2),
        "again": (one, 2),
    }
    found: dict[str, Any] = {}
    for name in arguments.runs.split(","):
        found[name] = figures(train(folder, name, arguments, *ways[name]), arguments.steps)
        print(f"{DESCRIPTIONS[name]}: {found[name]['tokens_per_second']:,.0f} tok/s", file=sys.stderr)
    base = found.get("one", next(iter(found.values())))
    good = True
    for name, each in found.items():
        each["difference"] = max(abs(a - b) for a, b in zip(each["losses"], base["losses"], strict=True))
        each["speed"] = each["tokens_per_second"] / base["tokens_per_second"]
        good &= each["difference"] <= TOLERANCE
        good &= name not in ("both", "ranks", "again") or each["speed"] >= arguments.least
        print(
            f"{DESCRIPTIONS[name]}: {each['tokens_per_second']:,.0f} tok/s ({each['speed']:.2f}x), losses differ by at "
            f"most {each['difference']:.1e}, last {each['losses'][-1]:.4f}; evidence {each['evidence']}; "
            f"{each['exchange']}",
            file=sys.stderr,
        )
    again = None
    if {"ranks", "again"} <= found.keys():
        again = all(found["ranks"][key] == found["again"][key] for key in ("losses", "state"))
        print(f"rerun of the ranks: {'the same bits' if again else 'OTHER BITS'}", file=sys.stderr)
    lost = None
    if arguments.kill:
        lost = lose_a_rank(folder, arguments, one)
        print(f"rank 1 killed: {lost}", file=sys.stderr)
        good &= lost["code"] != 0 and not lost["left"] and len(lost["lines"]) == 1 and "lost rank 1" in lost["lines"][0]
    if arguments.json:
        print(
            json.dumps({**found, "rerun_identical": again, "lost": lost, "cards": [card_name(card) for card in cards]})
        )
    return 0 if good and again is not False else 1


def card_name(name: str) -> str:
    return torch.cuda.get_device_name(name) if name.startswith("cuda") else f"cpu, {os.cpu_count()} cores"


if __name__ == "__main__":
    run_script(main)
