"""Ranks on the CPU: equal losses whatever the topology, and a run that loses a rank and goes on.

    python scripts/ranks_show.py [--steps 200] [--seed 0] [--target demo] [--data FILE] [--quick] [--json]

First, short runs of one config as 1+1+1 (targets, drafters, prefetch workers), as 5+3+4, with both roles everywhere, as
2 ranks × (2+1+1) and as 3 ranks of which each gets another number of rows: their losses must be equal to `TOLERANCE`,
and every one bit for bit the same when it is run again.

Then a run of two ranks over `--steps` updates goes through undisturbed; in another, rank 1 is killed in the middle.
Rank 0 must end with a line that names it, and what is left must reach the undisturbed run's final loss to the
tolerance when it is resumed with 2 ranks, with 1 and with 4, and a run begun by 1 rank when it is resumed with 2.

With `--quick` most topologies run once and nothing runs as 4 ranks. Ranks are forks of a process that has only imported
what they need. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import draftsmith.pipeline.run  # noqa: F401 (before the forks, which need it)
from draftsmith.bench.random_data import write_texts
from draftsmith.cli import main as draftsmith_command
from draftsmith.errors import run_script
from draftsmith.observe.events import read_events

TOLERANCE = 1e-4  # of a loss; sums of gradients are formed in another order
SLOWEST_SECONDS = 1800.0
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "1+1+1": (1, {"targets": ["cpu"], "drafters": ["cpu"], "prefetch": 1}),
    "5+3+4": (1, {"targets": ["cpu"] * 5, "drafters": ["cpu"] * 3, "prefetch": 4}),
    "both roles on 3": (1, {"targets": ["cpu"] * 3, "drafters": ["cpu"] * 3, "prefetch": 2}),
    "2 ranks x (2+1+1)": (2, {"targets": ["cpu"] * 2, "drafters": ["cpu"], "prefetch": 1}),
    "2 ranks x (1+2+2)": (2, {"targets": ["cpu"], "drafters": ["cpu"] * 2, "prefetch": 2}),
    "4 ranks, 2+2+1+1 rows": (4, {"targets": ["cpu"], "drafters": ["cpu"], "prefetch": 1}),
}

QUICK_AGAIN = "2 ranks x (1+2+2)"  # what runs twice with --quick


@dataclass
class Started:
    """The processes of a run, by rank, and what they said."""

    pids: list[int]
    errors: list[Path]
    codes: dict[int, int] = field(default_factory=dict)

    def wait(self, ranks: list[int] | None = None, seconds: float = SLOWEST_SECONDS) -> list[int]:
        """Exit codes of these ranks (all), or minus the signals that ended them; kills them after so many seconds."""
        deadline = time.monotonic() + seconds
        wanted = range(len(self.pids)) if ranks is None else ranks
        for rank in wanted:
            while rank not in self.codes:
                done, status = os.waitpid(self.pids[rank], os.WNOHANG)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(self.pids[rank], signal.SIGKILL)
                time.sleep(0.005)
        return [self.codes[rank] for rank in wanted]

    def said(self, rank: int) -> str:
        return self.errors[rank].read_text(errors="replace")


def make_config(folder: Path, arguments: argparse.Namespace, steps: int, output: str, pipeline: dict[str, Any]) -> Path:
    """Writes the config of a small run."""
    content = {
        "target": {"path": str(arguments.target)},
        "data": {"train": str(arguments.data), "held_out_share": 0.1, "cache": str(folder / "tokens")},
        "drafter": {"layers": 2, "block_size": 4},
        "rows": {"length": 64, "anchors": 8},
        "objective": {"chunk": 16},
        "optimizer": {"lr": 1e-3},
        "training": {
            "steps": steps,
            "rows_per_update": 6,
            "eval_every": max(1, steps // 4),
            "eval_rows": 3,
            "save_every": max(2, steps // 10),
            "tensorboard": False,
            "output": str(folder / output),
        },
        "pipeline": pipeline,
    }
    path = folder / f"{output}.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return path


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def start(
    config: Path, ranks: int, *flags: str, prepare: Callable[[int], list[str] | None] = lambda _rank: None
) -> Started:
    """Starts `draftsmith train` as so many ranks; each first does `prepare(rank)`, which may add flags."""
    port, pids = free_port(), []
    errors = [config.with_name(f"{config.stem}-{time.monotonic_ns()}-{rank}.txt") for rank in range(ranks)]
    for rank in range(ranks):
        child = os.fork()
        if child:
            pids.append(child)
            continue
        code = 70
        try:
            if ranks > 1:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in place.items()})
            descriptor = os.open(errors[rank], os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            import torch

            torch.set_num_threads(1)
            more = prepare(rank) or []
            code = draftsmith_command(["train", str(config), *flags, *more])
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return Started(pids, errors)


def run(config: Path, ranks: int, *flags: str) -> None:
    """Starts a run and waits for its end, which must be a good one."""
    started = start(config, ranks, *flags)
    codes = started.wait()
    assert codes == [0] * ranks, f"{config.stem}: exit codes {codes}\n" + "\n".join(map(started.said, range(ranks)))


def losses_of(folder: Path) -> tuple[list[float], list[float]]:
    """(loss of every step, held-out losses), the last value of each."""
    steps, held_out = {}, {}
    for event in read_events(folder / "events.jsonl"):
        if event["kind"] in ("step", "eval"):
            (steps if event["kind"] == "step" else held_out)[event["step"]] = float(event["loss"])
    return [steps[step] for step in sorted(steps)], [held_out[step] for step in sorted(held_out)]


def state_of(folder: Path, steps: int) -> bytes:
    return (folder / "checkpoints" / f"step-{steps:07d}" / "trainer.safetensors").read_bytes()


def apart(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other), f"{len(one)} losses against {len(other)}"
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def equality(folder: Path, arguments: argparse.Namespace, steps: int) -> list[dict[str, Any]]:
    """Runs every topology twice and compares."""
    found, first = [], None
    for number, (name, (ranks, pipeline)) in enumerate(WAYS.items()):
        if arguments.quick and ranks == 4:
            continue
        outputs = [f"way-{number}", f"way-{number}-again"][: 1 if arguments.quick and name != QUICK_AGAIN else 2]
        for output in outputs:
            run(make_config(folder, arguments, steps, output, pipeline), ranks)
        results = [(losses_of(folder / output), state_of(folder / output, steps)) for output in outputs]
        one = results[0][0]
        first = first or one
        each: dict[str, Any] = {"way": name}
        each["largest_difference"] = max(apart(one[0], first[0]), apart(one[1], first[1]))
        if len(results) > 1:
            each["rerun_identical"] = results[0] == results[1]
        found.append(each)
    return found


def killed(folder: Path, arguments: argparse.Namespace, steps: int) -> list[dict[str, Any]]:
    """Kills rank 1 of 2 in the middle, and resumes with 2, 1 and 4 ranks; a run of 1 goes on with 2."""
    pipeline = {"targets": ["cpu"], "drafters": ["cpu"], "prefetch": 1}
    run(make_config(folder, arguments, steps, "whole", pipeline), 2)
    whole = losses_of(folder / "whole")
    config = make_config(folder, arguments, steps, "cut", pipeline)
    started = start(config, 2)
    wait_for_step(folder / "cut", steps // 2)
    os.kill(started.pids[1], signal.SIGKILL)
    began = time.monotonic()
    code = started.wait([0])[0]
    seconds = time.monotonic() - began
    started.wait([1])
    last = [line for line in started.said(0).splitlines() if line.strip()][-1]
    found: list[dict[str, Any]] = [{"killed": 1, "exit_code": code, "seconds": round(seconds, 1), "line": last}]
    kept = folder / "kept"
    (folder / "cut").rename(kept)
    for ranks in (2, 1) if arguments.quick else (2, 1, 4):
        shutil.copytree(kept, folder / "cut")
        run(config, ranks, "--resume")
        found.append({"way": f"2 ranks, resumed with {ranks}", **against(folder / "cut", whole)})
        shutil.rmtree(folder / "cut")
    config = make_config(folder, arguments, steps, "grown", pipeline)
    started = start(config, 1)
    wait_for_step(folder / "grown", steps // 2)
    os.kill(started.pids[0], signal.SIGKILL)
    started.wait()
    run(config, 2, "--resume")
    found.append({"way": "1 rank, resumed with 2", **against(folder / "grown", whole)})
    return found


def against(folder: Path, whole: tuple[list[float], list[float]]) -> dict[str, Any]:
    losses = losses_of(folder)
    return {
        "final_loss": losses[0][-1],
        "undisturbed": whole[0][-1],
        "largest_difference": max(apart(losses[0], whole[0]), apart(losses[1], whole[1])),
    }


def wait_for_step(folder: Path, step: int) -> None:
    path, deadline = folder / "events.jsonl", time.monotonic() + SLOWEST_SECONDS
    while time.monotonic() < deadline:
        if path.exists() and any(
            event.get("step", 0) >= step for event in read_events(path) if event["kind"] == "step"
        ):
            return
        time.sleep(0.02)
    raise AssertionError(f"{folder} never came to step {step}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="of the run that loses a rank")
    parser.add_argument("--few", type=int, default=6, help="steps of the runs whose topologies are compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-ranks-"))
    generator = random.Random(arguments.seed)
    if arguments.data is None:
        arguments.data = folder / "data.jsonl"
        write_texts(arguments.data, generator)
    say, began = (sys.stderr if arguments.json else sys.stdout), time.monotonic()
    try:
        found = equality(folder, arguments, arguments.few)
        found += killed(folder, arguments, arguments.steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    good = True
    for each in found:
        fine = each.get("largest_difference", 0.0) <= TOLERANCE and each.get("rerun_identical", True)
        if "killed" in each:
            fine = each["exit_code"] not in (0, -signal.SIGKILL) and "lost rank 1" in each["line"]
        good &= fine
        print(("  " if fine else "NO ") + ", ".join(f"{name} {value}" for name, value in each.items()), file=say)
    print(f"{time.monotonic() - began:.0f} s", file=say)
    if arguments.json:
        print(json.dumps({"good": good, "found": found}))
    return 0 if good else 1


if __name__ == "__main__":
    run_script(main)
