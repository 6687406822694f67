"""Runs that are killed with SIGKILL at random moments and resumed: none may be lost, none may differ.

    python scripts/fault_suite.py [--kills 50] [--seed 0] [--target demo] [--data FILE] [--device cuda:0] [--json]

One run goes through undisturbed. Then, for every kill, a run of the same config starts in a folder of its own and is
killed: every other one after a random time, the rest inside a checkpoint, before a random call into the operating
system. Now and then the resumed run is killed as well. At the end every run must have made every row and its draft
batch as the undisturbed run did, and have all steps, that run's loss at each of them, its last checkpoint byte for
byte, a readable event log, and nothing refused. While the first run
goes, a second process asks for the same folder and must be refused.

On a GPU, where kernels may add in another order, rows and batches must be the same, losses may differ by `TOLERANCE`;
the largest difference and whether the bytes were the same are printed. A start compiles there, or loads what the first
run compiled.

Runs are forks of a process that has only imported what they need, so a start costs no import. Exit code 1 if anything
is lost or different.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.bench.random_data import write_texts
from draftsmith.blocks import DraftBatch, Row
from draftsmith.config import RunConfig, parse_config
from draftsmith.errors import UserError, run_script
from draftsmith.observe.events import read_events
from draftsmith.observe.status import read_status
from draftsmith.observe.summary import number
from draftsmith.pipeline import assemble, run
from draftsmith.pipeline.jobs import Job
from draftsmith.training import durable

SAVE_EVERY = 2
SLOWEST_SECONDS = 300.0
TOLERANCE = 0.02  # of a loss in bf16 on a GPU
ROWS = "rows.txt"  # in the run's folder: update, row, and a checksum of what was made of it


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
    """A run of a second or two, on a GPU behind its warm-up."""
    on_cpu = arguments.device == "cpu"
    return parse_config(
        {
            "target": {"path": arguments.target},
            "data": {"train": str(data), "held_out_share": 0.1},
            "drafter": {"layers": 1, "block_size": 4},
            "rows": {"length": 64, "anchors": 8} if on_cpu else {"length": 256, "anchors": 32},
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
            "pipeline": {"targets": [arguments.device] * 2, "drafters": [arguments.device] * 2},
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


def train_and_tell(config: RunConfig, resume: bool = False, behind: Path | None = None) -> None:
    """Trains, and writes down what every row was made of; works in a child, whose modules are its own. No row is made
    before the file `behind` is there."""
    real = assemble.batch_maker
    path = Path(config.training.output).with_suffix(f".{ROWS}")

    def batch_maker(*arguments: Any, **named: Any) -> Any:
        make = real(*arguments, **named)

        def told(job: Job) -> tuple[Row, DraftBatch]:
            while behind is not None and not behind.exists():
                time.sleep(0.01)
            row, batch = make(job)
            if job.learn:
                made = (row.tokens_S, row.document_S, batch.anchors_N, batch.valid_N, batch.inputs_Q, batch.labels_MC)
                checksum = 0
                for tensor in made:
                    checksum = zlib.crc32(tensor.numpy().tobytes(), checksum)
                with path.open("a") as file:
                    file.write(f"{job.update} {job.row} {checksum}\n")
            return row, batch

        return told

    assemble.batch_maker = batch_maker
    run.train(config, resume=resume)


def start(config: RunConfig, kill: Kill | None) -> int:
    """Starts or resumes a run, and returns how it ended."""
    resume = (Path(config.training.output) / "run.json").exists()

    def work() -> None:
        if kill is not None and kill.call is not None:
            durable.os = Deadly(kill.call)  # type: ignore[assignment]
        train_and_tell(config, resume)

    child = fork(work)
    seconds = SLOWEST_SECONDS if kill is None or kill.seconds is None else kill.seconds
    return wait(child, seconds)


@dataclass(frozen=True)
class Facts:
    """What a run left: loss by step (None: not finite), what was made of each row by update, masters and optimizer
    state at the end."""

    losses: dict[int, float | None]
    rows: frozenset[str]
    state: bytes


def facts(folder: Path, steps: int) -> Facts:
    """Reads what a finished run left; of a step that was done twice, the last loss."""
    return Facts(
        {
            event["step"]: number(event["loss"])
            for event in read_events(folder / "events.jsonl")
            if event["kind"] == "step"
        },
        frozenset(folder.with_suffix(f".{ROWS}").read_text().splitlines()),
        (folder / "checkpoints" / f"step-{steps:07d}" / "trainer.safetensors").read_bytes(),
    )


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


def apart(found: Facts, expected: Facts) -> dict[int, float]:
    """Difference of the losses by step; infinite where one of the two lacks the step, or its loss is not finite."""

    def gap(one: float | None, other: float | None) -> float:
        return math.inf if one is None or other is None else abs(one - other)

    steps = sorted({*found.losses, *expected.losses})
    return {step: gap(found.losses.get(step), expected.losses.get(step)) for step in steps}


def compare(folder: Path, found: Facts, expected: Facts, tolerance: float) -> list[str]:
    """What is lost or different; empty if nothing is."""
    problems = []
    if found.rows != expected.rows:
        problems.append(f"rows were made otherwise: {sorted(found.rows ^ expected.rows)[:4]}")
    missing, beyond = expected.losses.keys() - found.losses.keys(), found.losses.keys() - expected.losses.keys()
    if missing or beyond:
        problems.append(f"steps are missing: {sorted(missing)}, or too many: {sorted(beyond)}")
    far = [step for step, gap in apart(found, expected).items() if gap > tolerance and step not in missing | beyond]
    if far:
        problems.append(f"losses differ or are not finite at steps {far}")
    if tolerance == 0 and found.state != expected.state:
        problems.append("the last checkpoint differs")
    refused = [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith("refused")]
    if refused:
        problems.append(f"refused: {refused}")
    if (state := read_status(folder).state) != "finished":
        problems.append(f"its status is {state}")
    return problems


def refuses_a_second(folder: Path, config: RunConfig) -> bool:
    """Does the undisturbed run; whether a second process is refused meanwhile."""
    answered = folder / "answered"  # else the first run, which takes less than a second, may be over by then
    first = fork(lambda: train_and_tell(config, behind=answered))
    while not (folder / "first" / "events.jsonl").exists():
        time.sleep(0.01)
    second = fork(lambda: run.train(config, resume=True))
    refused = wait(second) == 2
    answered.touch()
    assert wait(first) == 0, "the undisturbed run failed"
    return refused


def count_calls(folder: Path, config: RunConfig) -> int:
    """Calls of the checkpoint writer in one whole run, found by killing nothing."""
    path = folder / "calls"

    def work() -> None:
        deadly = Deadly(10**9)
        durable.os = deadly  # type: ignore[assignment]
        run.train(config)
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
    parser.add_argument("--device", default="cpu", help="of two targets and two drafters")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-faults-"))
    say = sys.stderr if arguments.json else sys.stdout
    data = arguments.data
    if data is None:
        data = folder / "data.jsonl"
        write_texts(data, generator)
    tolerance = 0.0 if arguments.device == "cpu" else TOLERANCE
    began, failures, kills, places, worst = time.monotonic(), 0, 0, [], 0.0
    try:
        refused = refuses_a_second(folder, make_config(folder, arguments, data, "first"))
        print(f"a second process on the folder of a running one: {'refused' if refused else 'NOT refused'}", file=say)
        whole = time.monotonic()
        calls = count_calls(folder, make_config(folder, arguments, data, "counted"))
        seconds = time.monotonic() - whole
        expected = facts(folder / "first", arguments.steps)
        print(f"undisturbed: {len(expected.losses)} steps, {seconds:.2f} s, {calls} calls of the writer", file=say)
        number = 0
        while kills < arguments.kills:
            number += 1
            config = make_config(folder, arguments, data, f"run-{number}")
            story = trial(config, generator, seconds, calls)
            found = facts(Path(config.training.output), arguments.steps)
            problems = compare(Path(config.training.output), found, expected, tolerance)
            kills += len(story) - 1
            failures += bool(problems)
            places += story[:-1]
            well = "nothing lost, nothing different"
            if tolerance:
                difference = max(apart(found, expected).values(), default=math.inf)
                worst = max(worst, difference)
                same = "the same bytes" if found.state == expected.state else "other bytes"
                well = f"nothing lost, the same rows; losses differ by at most {difference:.1e}, {same} at the end"
            print(f"run {number}: {', '.join(story)}: {'; '.join(problems) or well}", file=say, flush=True)
            shutil.rmtree(config.training.output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = {"kills": kills, "runs": number, "failed": failures, "second_refused": refused, "places": places}
    result |= {"device": arguments.device, "furthest_loss": worst if math.isfinite(worst) else str(worst)}
    print(f"{kills} kills, {number} runs, {failures} lost or different, {time.monotonic() - began:.0f} s", file=say)
    if arguments.json:
        print(json.dumps(result))
    return 0 if refused and not failures else 1


if __name__ == "__main__":
    run_script(main)
