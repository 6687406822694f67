"""Runs that are killed with SIGKILL at random moments and resumed: none may be lost, none may differ.

    python scripts/fault_suite.py [--kills 50] [--seed 0] [--target demo] [--data FILE] [--json]

One run goes through undisturbed. Then, for every kill, a run of the same config starts in a folder of its own and is
killed: every other one after a random time, the rest inside a checkpoint, before a random call into the operating
system. Now and then the resumed run is killed as well. At the end every run must have all steps, the undisturbed run's
loss at each of them, its last checkpoint byte for byte, a readable event log, and nothing refused. While the first run
goes, a second process asks for the same folder and must be refused.

Runs are forks of a process that has only imported what they need, so a start costs no import. Exit code 1 if anything
is lost or different.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.bench.random_data import write_texts
from draftsmith.config import RunConfig, parse_config
from draftsmith.errors import UserError
from draftsmith.observe.events import read_events
from draftsmith.observe.status import read_status
from draftsmith.pipeline.run import train
from draftsmith.training import durable

SAVE_EVERY = 2
SLOWEST_SECONDS = 300.0


@dataclass(frozen=True)
class Kill:
    """When a run is killed: after so many seconds, or before a call of a checkpoint's writer."""

    seconds: float | None
    call: int | None

    def __str__(self) -> str:
        return f"after {self.seconds:.2f} s" if self.seconds is not None else f"before call {self.call} of a checkpoint"


class Deadly:
    """`os` for `draftsmith.training.durable`: kills its own process before the chosen call."""

    def __init__(self, call: int) -> None:
        self._left = call

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("makedirs", "open", "write", "fsync", "rename"):
            return real

        def call(*arguments: Any, **named: Any) -> Any:
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
            return real(*arguments, **named)

        return call


def make_config(folder: Path, arguments: argparse.Namespace, data: Path, output: str) -> RunConfig:
    """A run of a second or two."""
    return parse_config(
        {
            "target": {"path": arguments.target},
            "data": {"train": str(data), "held_out_share": 0.1},
            "drafter": {"layers": 1, "block_size": 4},
            "rows": {"length": 64, "anchors": 8},
            "objective": {"chunk": 16},
            "optimizer": {"lr": 1e-3},
            "training": {
                "steps": arguments.steps,
                "rows_per_update": 2,
                "eval_every": 5,
                "eval_rows": 1,
                "save_every": SAVE_EVERY,
                "keep": 2,
                "tensorboard": False,
                "output": str(folder / output),
            },
            "pipeline": {"targets": ["cpu", "cpu"], "drafters": ["cpu", "cpu"]},
        }
    )


def fork(work: Callable[[], object]) -> int:
    """Runs `work` in a child that is silent unless it fails; returns its number."""
    child = os.fork()
    if child:
        return child
    try:
        import torch

        torch.set_num_threads(1)
        work()
        os._exit(0)
    except UserError as error:
        print(error, file=sys.stderr)
        os._exit(2)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def wait(child: int, seconds: float = SLOWEST_SECONDS) -> int:
    """Exit code of a child, or minus the signal that ended it; kills it after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline += 60
        time.sleep(0.005)


def start(config: RunConfig, kill: Kill | None) -> int:
    """Starts or resumes a run, and returns how it ended."""
    resume = (Path(config.training.output) / "run.json").exists()

    def work() -> None:
        if kill is not None and kill.call is not None:
            durable.os = Deadly(kill.call)  # type: ignore[assignment]
        train(config, resume=resume)

    child = fork(work)
    seconds = SLOWEST_SECONDS if kill is None or kill.seconds is None else kill.seconds
    return wait(child, seconds)


def facts(folder: Path, steps: int) -> tuple[dict[int, float], bytes]:
    """Loss by step, the last value of each, and the last checkpoint's masters and optimizer state."""
    losses = {event["step"]: event["loss"] for event in read_events(folder / "events.jsonl") if event["kind"] == "step"}
    return losses, (folder / "checkpoints" / f"step-{steps:07d}" / "trainer.safetensors").read_bytes()


def trial(config: RunConfig, generator: random.Random, whole_seconds: float, calls: int) -> list[str]:
    """One run, killed and resumed until it is through; what was done to it, one line a start."""
    story = []
    for attempt in range(20):
        kill = None
        if attempt == 0 or generator.random() < 0.3:
            by_time = generator.random() < 0.5
            kill = (
                Kill(generator.uniform(0.05, whole_seconds), None)
                if by_time
                else Kill(None, generator.randrange(calls))
            )
        code = start(config, kill)
        if code == 0:
            return [*story, "ended"]
        if code != -signal.SIGKILL:
            raise AssertionError(f"{config.training.output}: exit code {code} {'; '.join(story)}")
        story.append(f"killed {kill}")
    raise AssertionError(f"{config.training.output}: never ended")


def compare(folder: Path, expected: tuple[dict[int, float], bytes]) -> list[str]:
    """What is lost or different; empty if nothing is."""
    losses, state = facts(folder, max(expected[0]))
    found = []
    if losses != expected[0]:
        steps = [step for step in expected[0] if losses.get(step) != expected[0][step]]
        found.append(f"losses differ or are missing at steps {steps}")
    if state != expected[1]:
        found.append("the last checkpoint differs")
    refused = [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith("refused")]
    if refused:
        found.append(f"refused: {refused}")
    if (state := read_status(folder).state) != "finished":
        found.append(f"its status is {state}")
    return found


def refuses_a_second(folder: Path, config: RunConfig) -> bool:
    """Does the undisturbed run; whether a second process is refused meanwhile."""
    first = fork(lambda: train(config))
    while not (folder / "first" / "events.jsonl").exists():
        time.sleep(0.01)
    second = fork(lambda: train(config, resume=True))
    refused = wait(second) == 2
    assert wait(first) == 0, "the undisturbed run failed"
    return refused


def count_calls(folder: Path, config: RunConfig) -> int:
    """Calls of the checkpoint writer in one whole run, found by killing nothing."""
    path = folder / "calls"

    def work() -> None:
        deadly = Deadly(10**9)
        durable.os = deadly  # type: ignore[assignment]
        train(config)
        path.write_text(str(10**9 - deadly._left))

    assert wait(fork(work)) == 0
    return int(path.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24, help="updates of a run")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-faults-"))
    say = sys.stderr if arguments.json else sys.stdout
    data = arguments.data
    if data is None:
        data = folder / "data.jsonl"
        write_texts(data, generator)
    began, failures, kills, places = time.monotonic(), 0, 0, []
    try:
        refused = refuses_a_second(folder, make_config(folder, arguments, data, "first"))
        print(f"a second process on the folder of a running one: {'refused' if refused else 'NOT refused'}", file=say)
        whole = time.monotonic()
        calls = count_calls(folder, make_config(folder, arguments, data, "counted"))
        seconds = time.monotonic() - whole
        expected = facts(folder / "first", arguments.steps)
        print(f"undisturbed: {len(expected[0])} steps, {seconds:.2f} s, {calls} calls of the writer", file=say)
        number = 0
        while kills < arguments.kills:
            number += 1
            config = make_config(folder, arguments, data, f"run-{number}")
            story = trial(config, generator, seconds, calls)
            problems = compare(Path(config.training.output), expected)
            kills += len(story) - 1
            failures += bool(problems)
            places += story[:-1]
            print(
                f"run {number}: {', '.join(story)}: {'; '.join(problems) or 'nothing lost, nothing different'}",
                file=say,
            )
            shutil.rmtree(config.training.output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = {"kills": kills, "runs": number, "failed": failures, "second_refused": refused, "places": places}
    print(f"{kills} kills, {number} runs, {failures} lost or different, {time.monotonic() - began:.0f} s", file=say)
    if arguments.json:
        print(json.dumps(result))
    return 0 if refused and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
