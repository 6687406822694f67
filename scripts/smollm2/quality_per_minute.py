"""Quality per GPU-minute: held-out τ against seconds of training, by the default recipe and without each speed feature.

    python scripts/smollm2/quality_per_minute.py [CONFIG] [--steps 400] [--eval-every 100] [--variants default,fp8]
    python scripts/smollm2/quality_per_minute.py --target MODEL.gguf --train train.jsonl --held-out held-out.jsonl

Trains the same drafter once for each variant by `draftsmith train CONFIG`: the same rows, seed and steps, and one or
two keys changed (`VARIANTS`). A speed feature should change the seconds and not the τ at equal steps; by how much
chance alone may change it, the variant `seed` shows (from above: it packs the held-out rows anew, too). What refuses
itself (fp8 where a card has none, or above its bound) stands in the table with the reason.

Seconds count from the end of the first update, which is profiled and so told apart, and are read from the ends of the
updates as the first drafter recorded them. An update that follows an evaluation counts as the median one, so that
evaluations cost nothing here. τ is the proxy that training logs, over uniform anchors of held-out rows: good for
comparing these runs with each other. `--walk N` adds the true one, of N prompts at the end of each run (`walk.py`).

Cost: a run for each variant, and one tokenisation for all. Variants share Inductor's cache, so that only the first one
compiles what they have in common: 38 s of start on an H200.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftsmith.errors import UserError, run_script
from draftsmith.observe.events import read_events

ROOT = Path(__file__).resolve().parents[2]
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "default": ("as the config says", ()),
    "eager-target": ("the target's layers not compiled", ("compile.target=false",)),
    "short-queues": ("one prefetch thread, one row ahead", ("pipeline.prefetch=1", "pipeline.queue=1")),
    "checkpointing": ("activations recomputed", ("training.activation_checkpointing=true",)),
    "fp8": ("the target's linear layers in fp8", ("target.precision=fp8",)),
    "whole-drafter": ("the drafter compiled as one graph", ("compile.drafter=whole",)),
    "dense": ("nothing compiled, all scores computed", ("drafter.attention=dense", "compile.enabled=off")),
    "float32": ("computed in float32", ("training.dtype=float32", "target.dtype=float32")),
    "again": ("the default once more", ()),
    "seed": ("another seed, as a yardstick", ("training.seed=1",)),
}
USUAL = "default,eager-target,short-queues,checkpointing,fp8,whole-drafter,dense"
PATIENCE = 10.0  # seconds for a run to end that is told to
WALKED_TOKENS = 256  # of an answer
TIME_UP = "the time was up"


@dataclass(frozen=True)
class Curve:
    """What a run's events say.

    Attributes:
        start: seconds from the process's start to the first row.
        first_update: seconds of it, compiling excluded.
        seconds: of training from the end of the first update to each evaluation, by its step.
        loss, tau: held out, by step.
        tokens_per_second: real ones, median over the updates.
        done: updates.
    """

    start: float
    first_update: float
    seconds: dict[int, float]
    loss: dict[int, float]
    tau: dict[int, float]
    tokens_per_second: float
    done: int


def curve_of(events: list[dict[str, Any]], began: float) -> Curve:
    """Reads the events of a run whose process began at `began`, seconds since the epoch; the run may have been cut off.

    Raises:
        ValueError: it did too few updates for a median.
    """
    ends, rows = {}, []
    for event in events:
        if event["kind"] == "phase" and event["what"] == "update" and event["worker"] == "drafter 0":
            ends[event["number"] + 1] = event["end"]
        elif event["kind"] == "work" and event["worker"].startswith("target"):
            rows.append(event["start"])
    if len(ends) < 3:
        raise ValueError(f"{len(ends)} updates only")
    evaluations = {event["step"]: event for event in events if event["kind"] == "eval"}
    tokens = {event["step"]: event["tokens"] for event in events if event["kind"] == "step"}
    gaps = {step: end - ends[step - 1] for step, end in ends.items() if step - 1 in ends}
    plain = {step: gap for step, gap in gaps.items() if step - 1 not in evaluations}
    usual = statistics.median(plain.values())
    passed, seconds = 0.0, {1: 0.0}
    for step in sorted(gaps):
        passed += plain.get(step, usual)
        seconds[step] = passed
    known = [step for step in plain if step in tokens and step - 1 in tokens]
    return Curve(
        start=min(rows) - began,
        first_update=ends[1] - min(rows),
        seconds={step: seconds[step] for step in sorted(evaluations) if step in seconds},
        loss={step: float(event["loss"]) for step, event in sorted(evaluations.items())},
        tau={step: float(event["tau_proxy"]) for step, event in sorted(evaluations.items())},
        tokens_per_second=statistics.median((tokens[step] - tokens[step - 1]) / plain[step] for step in known),
        done=max(ends),
    )


def common_overrides(arguments: argparse.Namespace) -> list[str]:
    """What all variants share."""
    given = {"target.path": arguments.target, "data.train": arguments.train, "data.held_out": arguments.held_out}
    return [
        *(f"{key}={json.dumps(str(value))}" for key, value in given.items() if value is not None),
        f"training.steps={arguments.steps}",
        f"training.eval_every={arguments.eval_every}",
        "training.save_every=0",
        "training.tensorboard=false",
        "decoding.every=0",
        f"data.cache={json.dumps(str(arguments.folder / 'tokens'))}",
    ]


def run_variant(name: str, arguments: argparse.Namespace, until: float) -> dict[str, Any]:
    """Trains one variant, until `until` (monotonic seconds) at most; what became of it.

    Returns:
        "refused" or "failed" with the reason, or the figures; with those "stopped" if the time was up before.
    """
    output, path = arguments.folder / name, arguments.folder / f"{name}.log"
    shutil.rmtree(output, ignore_errors=True)
    overrides = [*common_overrides(arguments), *VARIANTS[name][1], f"training.output={json.dumps(str(output))}"]
    command = [sys.executable, "-m", "draftsmith", "train", str(arguments.config), *overrides]
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(arguments.folder / "inductor"), **os.environ}
    began, stopped = time.time(), False
    with path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            code = process.wait(left(until))
        except subprocess.TimeoutExpired:
            stopped, code = True, 0
        finally:
            end(process)
    if code != 0:
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.startswith("draftsmith: ")]
        reason = lines[-1].removeprefix("draftsmith: ") if lines else f"exit code {code}, see {path}"
        return {"refused" if code == 2 and lines else "failed": reason}
    try:
        curve = curve_of(list(read_events(output / "events.jsonl")), began)
    except (ValueError, UserError):  # hardly begun, or no events yet
        assert stopped, f"{name} ended well, but has too few updates: see {path}"
        return {"not run": TIME_UP}
    found: dict[str, Any] = dict(vars(curve))
    return {**found, "stopped": True} if stopped else found


def left(until: float) -> float | None:
    """Seconds until then; None: without end."""
    return None if math.isinf(until) else max(0.0, until - time.monotonic())


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that may have ended already."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def compare(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Adds to each variant's figures its differences from the default's; returns the largest of τ.

    "differences" hold τ minus the default's by step; "ratio" is of the seconds by the last step that both evaluated.
    What another seed changes is no variant's doing and counts for no largest difference.
    """
    base = found.get("default", {})
    worst: dict[str, Any] = {"difference": 0.0, "variant": None, "step": None}
    for name, each in found.items():
        if "tau" not in each or "tau" not in base:
            continue
        each["differences"] = {
            step: tau - base["tau"][step] for step, tau in each["tau"].items() if step in base["tau"]
        }
        timed = [step for step, seconds in each["seconds"].items() if seconds and base["seconds"].get(step)]
        each["ratio"] = each["seconds"][timed[-1]] / base["seconds"][timed[-1]] if timed else None
        for step, difference in each["differences"].items():
            if name not in ("default", "seed") and abs(difference) >= abs(worst["difference"]):
                worst = {"difference": difference, "variant": name, "step": step}
    return worst


def walk(arguments: argparse.Namespace, found: dict[str, dict[str, Any]], until: float) -> str:
    """Adds true τ to the figures of each finished run; what went wrong, if anything did."""
    drafters = {}
    for name in found:
        saved = sorted((arguments.folder / name / "checkpoints").glob("step-*"))
        if saved and "tau" in found[name]:
            drafters[name] = saved[-1]
    if not drafters:
        return "no drafter to walk with"
    target = arguments.target or yaml.safe_load(arguments.config.read_text())["target"]["path"]
    prompts = arguments.prompts or arguments.held_out or ROOT / "examples" / "prompts.jsonl"
    command = [
        sys.executable, str(Path(__file__).with_name("walk.py")), *(str(folder) for folder in drafters.values()),
        "--target", str(target), "--prompts", str(prompts), "--limit", str(arguments.walk),
        "--max-new-tokens", str(WALKED_TOKENS),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left(until))
    except subprocess.TimeoutExpired:
        return TIME_UP
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    by_folder = {line["drafter"]: line for line in map(json.loads, done.stdout.splitlines())}
    for name, folder in drafters.items():
        line = by_folder[str(folder)]
        found[name]["walked"] = {key: line[key] for key in ("tau", "tau_per_response", "answers", "tokens")}
    return ""


def lines_of(found: dict[str, dict[str, Any]], worst: dict[str, Any]) -> list[str]:
    """The table, a line for each variant and evaluation, and the one line it comes down to."""
    head = "| variant | step | s | × default's | held-out loss | τ proxy | real tok/s | s to first row + first update |"
    lines = [head, "| --- " * head.count(" | ") + "| --- |"]
    for name, each in found.items():
        said = f"{name}: {VARIANTS[name][0]}"
        if "tau" not in each:
            why = next(f"{kind}: {each[kind]}" for kind in ("refused", "failed", "not run") if kind in each)
            lines.append(f"| {said} | {why} | | | | | | |")
            continue
        if not each["tau"]:
            lines.append(f"| {said} | stopped after {each['done']} steps, before an evaluation | | | | | | |")
        for place, step in enumerate(each["tau"]):
            last = step == max(each["tau"])
            ratio = f"{each['ratio']:.2f}" if last and each.get("ratio") else ""
            rest = f"{each['tokens_per_second']:,.0f} | {each['start']:.1f} + {each['first_update']:.1f}"
            loss, tau, seconds = each["loss"][step], each["tau"][step], each["seconds"][step]
            stopped = f" (stopped after {each['done']})" if last and each.get("stopped") else ""
            lines.append(
                f"| {'' if place else said} | {step}{stopped} | {seconds:.1f} | {ratio} | {loss:.4f} | {tau:.3f} | "
                f"{'|' if place else rest} |"
            )
    lines += [
        f"{name}: true τ {each['walked']['tau']:.3f} over {each['walked']['answers']} answers, walked"
        for name, each in found.items()
        if "walked" in each
    ]
    if worst["variant"] is None:
        return [*lines, "no variant to compare with the default"]
    what = f"largest difference of held-out τ at equal steps from the default: {worst['difference']:+.3f}"
    return [*lines, f"{what} ({worst['variant']}, step {worst['step']})"]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "examples" / "smollm2.yaml", metavar="CONFIG")
    parser.add_argument("--target", help="GGUF file or folder, instead of the config's")
    parser.add_argument("--train", type=Path, help="conversations, instead of the config's")
    parser.add_argument("--held-out", type=Path, help="likewise; none: as the config says")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--variants", default=USUAL, help=f"of {', '.join(VARIANTS)}; without more: {USUAL}")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/draftsmith-quality"))
    parser.add_argument("--walk", type=int, default=0, metavar="N", help="true τ of so many prompts, too")
    parser.add_argument("--prompts", type=Path, help="of --walk; none: the held-out file, else examples/prompts.jsonl")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="limit for everything")
    parser.add_argument("--most", type=float, default=0.0, help="exit 1 if a τ differs by more; 0: not asked")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, text on stderr")
    arguments = parser.parse_args()
    arguments.names = [name for name in arguments.variants.split(",") if name]
    unknown = [name for name in arguments.names if name not in VARIANTS]
    if unknown or not arguments.names:
        parser.error(f"--variants: {', '.join(unknown) or 'none'} (valid: {', '.join(VARIANTS)})")
    if arguments.steps < 3 or not 2 <= arguments.eval_every <= arguments.steps:
        parser.error("--steps must be 3 at least, and --eval-every between 2 and as many")
    return arguments


def main() -> int:
    arguments = options()
    until = time.monotonic() + arguments.seconds
    text = sys.stderr if arguments.json else sys.stdout
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for name in arguments.names:
        began = time.monotonic()
        if began >= until:
            found[name] = {"not run": TIME_UP}
            continue
        found[name] = run_variant(name, arguments, until)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if name == "default" and "refused" in found[name]:  # the config itself: nothing else would run either
            print(f"quality_per_minute: {found[name]['refused']}", file=sys.stderr)
            return 2
    worst = compare(found)
    wrong = walk(arguments, found, until) if arguments.walk else ""
    for name in found:
        shutil.rmtree(arguments.folder / name / "checkpoints", ignore_errors=True)  # twelve bytes a parameter each
    for line in [*lines_of(found, worst), *([f"not walked: {wrong}"] if wrong else [])]:
        print(line, file=text)
    if arguments.json:
        print(json.dumps({"variants": found, "largest": worst, "steps": arguments.steps, "not_walked": wrong}))
    bad = any("failed" in each for each in found.values()) or wrong not in ("", TIME_UP)
    return 1 if bad or 0 < arguments.most < abs(worst["difference"]) else 0


if __name__ == "__main__":
    run_script(main)
