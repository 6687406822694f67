"""How long `draftsmith status` takes over a log of ten million events.

    python scripts/status_of_a_long_log.py [--events 10000000] [--keep FOLDER]

Writes a run folder with that many events, as a run of some 1.5 million steps would (work spans, steps, evaluations,
vitals, checkpoints, notices), the summaries among them included, and then times the command five times, each in a
process of its own. Exit code 1 if the slowest takes a second or more, or if what it says is wrong. About 2 GB on disk
and a few minutes; the folder is removed unless `--keep` names it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from draftsmith.errors import run_script
from draftsmith.observe.events import SUMMARY_EVERY
from draftsmith.observe.summary import Summary

LIMIT_SECONDS = 1.0


def write_log(path: Path, count: int) -> Summary:
    """A log of `count` events, written in large pieces but line by line what `EventLog` would write."""
    summary, began = Summary(), time.time() - count * 0.06
    with open(path, "wb", buffering=2**22) as file:
        for number in range(count):
            event = {"time": began + number * 0.06, **one(number, count)}
            file.write((json.dumps(event, ensure_ascii=False, separators=(",", ":")) + "\n").encode())
            summary.fold(event)
            if number % SUMMARY_EVERY == SUMMARY_EVERY - 1:
                line = {"time": event["time"], "kind": "summary", "content": summary.content}
                file.write((json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n").encode())
    return summary


def one(number: int, count: int) -> dict[str, object]:
    """Event `number`: mostly work, a step every seven, and now and then something else."""
    step = number // 7 + 1
    if number == 0:
        return {"kind": "run", "step": 0, "steps": count // 7, "workers": ["target 0", "drafter 0"]}
    if number % 700_000 == 13:
        return {"kind": "error", "topic": "checkpoint", "text": f"the checkpoint of step {step} could not be written"}
    if number % 35_000 == 15:
        return {"kind": "checkpoint", "step": step, "path": f"checkpoints/step-{step:07d}", "stall_seconds": 0.1}
    if number % 7_000 == 16:
        return {"kind": "eval", "step": step, "loss": 2.0 + 100 / step, "tau_proxy": 2.0}
    if number % 7:
        return {"kind": "work", "worker": f"target {number % 5}", "row": number, "start": number * 0.06, "end": number}
    rate = 21_000.0 + number % 1000
    slots = [round(0.9 / k, 4) for k in range(1, 16)]
    return {"kind": "step", "step": step, "steps": count // 7, "loss": 2.0 + 100 / step, "tau_proxy": 2.1,
            "accept_by_slot": slots, "tokens_per_second": rate, "data_wait": 0.01, "eta_seconds": 60.0}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="draftsmith-log-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        began = time.monotonic()
        summary = write_log(folder / "events.jsonl", arguments.events)
        size = os.path.getsize(folder / "events.jsonl")
        print(f"{arguments.events:,} events, {size / 2**30:.2f} GiB, written in {time.monotonic() - began:.0f} s")
        command = [sys.executable, "-m", "draftsmith", "status", str(folder), "--json"]
        seconds = []
        for _ in range(5):
            began = time.monotonic()
            result = subprocess.run(command, capture_output=True, text=True)
            seconds.append(time.monotonic() - began)
        found = json.loads(result.stdout)
        print(result.stderr, end="")
        print("status took " + ", ".join(f"{each:.2f}" for each in seconds) + " s")
        right = (found["events"], found["error_count"]) == (arguments.events, summary["error_count"])
        if not right:
            print(f"NO: it counts {found['events']:,} events and {found['error_count']} errors", file=sys.stderr)
        return 0 if right and max(seconds) < LIMIT_SECONDS else 1
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    run_script(main)
