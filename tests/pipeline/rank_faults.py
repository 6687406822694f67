"""What several ranks do when something is wrong in one of them: real processes, for `test_ranks.py`.

    python rank_faults.py TARGET DATA CASE...

Prints one JSON object: for each case the exit codes, what each rank said on stderr and stdout, and the seconds it took.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from ranks_show import Started, losses_of, make_config, start, wait_for_step

from draftsmith.errors import UserError
from draftsmith.observe.events import read_events
from draftsmith.pipeline import ranks, run
from draftsmith.pipeline.compiling import Compiling
from draftsmith.target.forward import Target
from draftsmith.training.step import Replica

ONE = {"targets": ["cpu"], "drafters": ["cpu"], "prefetch": 1}
Case = Callable[[Path, argparse.Namespace], Started]


def break_steps(error: Exception, after: int) -> Callable[[int], None]:
    """In rank 1 the drafter raises after so many rows."""

    def prepare(rank: int) -> None:
        step, done = Replica.step, []

        def broken(self: Replica, *args: Any, **named: Any) -> Any:
            done.append(1)
            if rank == 1 and len(done) > after:
                raise error
            return step(self, *args, **named)

        Replica.step = broken  # type: ignore[method-assign]

    return prepare


def user_error_in_one(folder: Path, arguments: argparse.Namespace) -> Started:
    config = make_config(folder, arguments, 500, "user", ONE)
    return start(config, 2, prepare=break_steps(UserError("a row of mine is odd", where="here"), 9))


def bug_in_one(folder: Path, arguments: argparse.Namespace) -> Started:
    config = make_config(folder, arguments, 500, "bug", ONE)
    return start(config, 2, prepare=break_steps(RuntimeError("boom"), 9))


def config_that_is_wrong(folder: Path, arguments: argparse.Namespace) -> Started:
    return start(make_config(folder, arguments, 4, "wrong", {**ONE, "prefetsch": 3}), 2)


def other_settings(folder: Path, arguments: argparse.Namespace) -> Started:
    """Rank 1 is given other settings, as from a stale file on another machine."""

    config = make_config(folder, arguments, 4, "other", ONE)
    return start(config, 2, prepare=lambda rank: ["optimizer.lr=0.5"] if rank == 1 else None)


def signal_to_one(folder: Path, arguments: argparse.Namespace) -> Started:
    started = start(make_config(folder, arguments, 5000, "signal", ONE), 2)
    wait_for_step(folder / "signal", 10)
    os.kill(started.pids[1], signal.SIGTERM)
    return started


def standing_still(folder: Path, arguments: argparse.Namespace) -> Started:
    """Rank 1 is stopped: it neither ends nor answers."""

    def prepare(_rank: int) -> None:
        ranks.LOST_SECONDS = 5.0  # instead of a minute

    started = start(make_config(folder, arguments, 5000, "still", ONE), 2, prepare=prepare)
    wait_for_step(folder / "still", 10)
    os.kill(started.pids[1], signal.SIGSTOP)
    started.wait([0], seconds=120)
    os.kill(started.pids[1], signal.SIGKILL)
    return started


def killed_in_the_warm_up(folder: Path, arguments: argparse.Namespace) -> Started:
    """Rank 1 is killed before the first row, and rank 0 is told to end at once, as torchrun does then."""

    def prepare(_rank: int) -> None:
        Compiling.warm_up = lambda *_: time.sleep(60)  # type: ignore[method-assign]

    started = start(make_config(folder, arguments, 500, "warm", ONE), 2, prepare=prepare)
    events, deadline = folder / "warm" / "events.jsonl", time.monotonic() + 60
    while time.monotonic() < deadline:
        if events.exists() and any(event["kind"] == "run" for event in read_events(events)):
            break
        time.sleep(0.05)
    time.sleep(0.3)
    os.kill(started.pids[1], signal.SIGKILL)
    os.kill(started.pids[0], signal.SIGTERM)
    return started


def interrupted_early(folder: Path, arguments: argparse.Namespace) -> Started:
    """Ctrl-C, which a launcher hands on to all ranks, while they plan."""

    def prepare(rank: int) -> None:
        def planning(*_: Any, **__: Any) -> None:
            (folder / f"plans-{rank}").touch()
            time.sleep(60)

        run.make_plan = planning  # type: ignore[assignment]

    started = start(make_config(folder, arguments, 500, "early", ONE), 2, prepare=prepare)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (folder / "plans-0").exists():  # rank 1 plans after it
        time.sleep(0.02)
    for pid in started.pids:
        os.kill(pid, signal.SIGINT)
    return started


def target_that_hangs(folder: Path, arguments: argparse.Namespace) -> Started:
    """In rank 1 the target never comes back from its tenth row."""

    def prepare(rank: int) -> None:
        features, done = Target.features, []

        def hanging(self: Target, *args: Any, **named: Any) -> Any:
            done.append(1)
            if rank == 1 and len(done) == 10:
                time.sleep(600)
            return features(self, *args, **named)

        Target.features = hanging  # type: ignore[method-assign]

    return start(make_config(folder, arguments, 500, "hang", {**ONE, "hang_seconds": 3}), 2, prepare=prepare)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        *(user_error_in_one, bug_in_one, config_that_is_wrong, other_settings),
        *(signal_to_one, standing_still, killed_in_the_warm_up, target_that_hangs, interrupted_early),
    )
}


def main() -> None:
    arguments = argparse.Namespace(target=sys.argv[1], data=sys.argv[2])
    found = {}
    for name in sys.argv[3:]:
        with tempfile.TemporaryDirectory() as place:
            folder, began = Path(place), time.monotonic()
            started = CASES[name](folder, arguments)
            codes = started.wait(seconds=120)
            runs = [path for path in folder.iterdir() if (path / "run.json").exists()]
            found[name] = {
                "codes": codes,
                "said": [started.said(rank) for rank in range(2)],
                "seconds": time.monotonic() - began,
                "steps": [len(losses_of(path)[0]) for path in runs],
                "checkpoints": [sorted(each.name for each in (path / "checkpoints").glob("*")) for path in runs],
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
