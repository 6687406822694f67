"""`draftsmith demo`: from prompts to a drafter that decodes, on a CPU, in minutes.

1. The embedded target answers training prompts greedily, in batches. Answers that fall into a loop or were cut at the
   length limit are left out: they teach little.
2. A drafter learns from these answers through the ordinary `train`; its config is written down, so the run can be
   repeated and changed.
3. Held-out prompts are decoded plainly, with the drafter, and by prompt look-up, in the same loop, dtype and thread
   count; the answers are compared token for token.

The held-out prompts share no 8-gram of tokens with a training prompt, and were chosen among those whose greedy answer
does not loop (`scripts/make_demo_target.py`). Figures are given for all answers and for those that do not loop.

Everything is float32 on the CPU. Matrices this small gain nothing from a second thread, so training uses one thread a
worker and several workers, and decoding one thread.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from draftsmith.config import RunConfig, TargetConfig, parse_config
from draftsmith.decode.evaluate import NOT_LOOPING, Evaluation, evaluate
from draftsmith.decode.figures import Figures, distinct_share
from draftsmith.decode.generate import Answer, generate
from draftsmith.decode.prompts import Prompt, encode_prompts, read_prompts
from draftsmith.drafter import load_drafter
from draftsmith.errors import UserError
from draftsmith.observe.aside import written_aside
from draftsmith.observe.events import Listener, read_events
from draftsmith.observe.picture import draw_run
from draftsmith.pipeline.run import TrainResult, train
from draftsmith.pipeline.signals import Terminated
from draftsmith.target.load import Target, load_target

PROMPTS = Path(__file__).resolve().parent / "prompts"
TAU_ASSERTED, SPEEDUP_ASSERTED = 2.2, 1.2


@dataclass(frozen=True)
class Size:
    """How much of everything.

    Attributes:
        prompts: training prompts that the target answers.
        held_out: held-out prompts that are decoded.
        answer_tokens: length limit of an answer.
        steps: updates; None: as many as `EPOCHS` make.
    """

    prompts: int
    held_out: int
    answer_tokens: int
    steps: int | None


FULL = Size(prompts=3800, held_out=40, answer_tokens=128, steps=None)
QUICK = Size(prompts=24, held_out=3, answer_tokens=48, steps=6)
EPOCHS = 1.1
BATCH = 128
MOST_WORKERS = 4


def run_demo(output: Path, *, seed: int = 0, listener: Listener | None = None, quick: bool = False) -> dict[str, Any]:
    """Runs the demo into `output`, a folder that is new or empty.

    Args:
        output: run folder: config.yaml, data/, events.jsonl, checkpoints/, result.json, training.png.
        seed: of the drafter's weights and of the order of the data.
        listener: gets every event, for a live line.
        quick: the same way with so little work that τ says nothing; for tests.

    Returns:
        What result.json holds, and "text", the same for people.

    Raises:
        UserError: the folder holds something already or cannot be written.
        KeyboardInterrupt: interrupted; `Terminated` by SIGTERM while it trains.
    """
    size = QUICK if quick else FULL
    clock = _Clock()
    _claim(output)
    target = load_target(TargetConfig(path="demo", dtype="float32"), "cpu", torch.float32)
    geometry = target.geometry
    parameters = sum(parameter.numel() for parameter in target.model.parameters())
    _say(
        f"The target: Qwen3 architecture, {geometry.layers} layers x {geometry.hidden_size}, "
        f"{parameters / 1e6:.1f} M parameters, trained on Python's standard library. It writes function bodies.",
        f"1/3 It answers {size.prompts:,} training prompts: a drafter learns from what its target says.",
    )
    with _threads(1):
        prompts = read_prompts(PROMPTS / "train.jsonl")[: size.prompts]
        answers = _answer(target, prompts, size.answer_tokens, listener)
        kept = _write_conversations(target, prompts, answers, output / "data" / "answers.jsonl")
    tokens = sum(len(answer.tokens) for answer in answers)
    seconds = {"answers": clock.lap()}
    _say(f"    {tokens:,} tokens; {kept:,} answers ended by themselves without looping. {seconds['answers']:.0f} s.")

    config = demo_config(output, size, seed)
    _write_config(config, output / "config.yaml")
    _say(
        f"2/3 A drafter of {config.drafter.layers} layer(s) learns to draft blocks of {config.drafter.block_size}. "
        f"Its config is {output / 'config.yaml'}."
    )
    with _threads(1):
        trained = train(config, listener=listener)
    _require_finished(trained)
    seconds["training"] = clock.lap()
    _say(f"    {trained.step:,} updates, loss {trained.loss:.2f}. {seconds['training']:.0f} s.")

    held_out = read_prompts(PROMPTS / "held_out.jsonl")[: size.held_out]
    _say(f"3/3 {len(held_out)} held-out prompts are decoded with the drafter, without it, and by prompt look-up.")
    with _threads(1):
        evaluation = _evaluate(target, trained, held_out, size.answer_tokens, listener)
    seconds["decoding"] = clock.lap()
    seconds["total"] = clock.total()
    result = _result(evaluation, trained, quick, len(answers), kept, tokens, seconds)
    draw_run(read_events(output / "events.jsonl"), output / "training.png", title="draftsmith demo", tau=evaluation.tau)
    with written_aside(output / "result.json") as file:
        file.write(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    return {**result, "text": "\n".join(_account(result, evaluation, output))}


def demo_config(output: Path, size: Size, seed: int) -> RunConfig:
    """The run that the demo trains; what it found to pay on two CPU cores is in docs/lab-notes.md."""
    return parse_config(
        {
            "target": {"path": "demo", "dtype": "float32"},
            "data": {"train": str(output / "data" / "answers.jsonl"), "held_out_share": 0.03},
            "drafter": {"layers": 2, "block_size": 8, "taps": [5, 10, 14]},
            # Short rows: on the dense path every slot is scored against the whole row, seen or not.
            "rows": {"length": 256, "anchors": 128},
            "objective": {"chunk": 896},
            "optimizer": {"name": "muon", "lr": 3e-3, "muon_lr": 0.03, "schedule": "wsd", "decay": 0.4},
            "training": {
                "output": str(output),
                "epochs": EPOCHS,
                "steps": size.steps,
                "rows_per_update": 2,
                "seed": seed,
                "eval_every": 100 if size.steps is None else 0,
                "eval_rows": 8 if size.steps is None else 1,
                "save_every": 0,
            },
            # Two of each, one thread each: small matrices gain nothing from a second thread.
            "pipeline": {"targets": ["cpu"], "drafters": ["cpu", "cpu"], "prefetch": 1},
        },
        where="demo",
    )


def asserted(result: dict[str, Any]) -> bool:
    """Whether the demo shows what it claims; see `shortcomings`."""
    return not shortcomings(result)


def shortcomings(result: dict[str, Any]) -> list[str]:
    """What the demo claims and `result` does not show. Of a quick demo only that nothing changes."""
    found = [] if result["lossless"] else ["decoding with the drafter changed answers"]
    if result["quick"]:
        return found
    if result["tau"] < TAU_ASSERTED:
        found.append(f"τ is below the {TAU_ASSERTED} that the demo stands for")
    if result["tau"] <= result["tau_prompt_lookup"]:
        found.append("plain prompt look-up does as well")
    if result["speedup"] < SPEEDUP_ASSERTED:
        found.append(f"decoding is not {SPEEDUP_ASSERTED} times as fast")
    return found


def _claim(output: Path) -> None:
    """Makes the folder, which must be new or empty."""
    try:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise UserError("is in use", where=str(output), fix="name another --output")
        (output / "data").mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", where=str(output), fix="name another --output"
        ) from None


def _answer(target: Target, prompts: Sequence[Prompt], limit: int, listener: Listener | None) -> list[Answer]:
    """Greedy answers in the order of the prompts; each core answers a share of them."""
    encoded = encode_prompts(prompts, target.tokenizer)
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    answers: list[Answer] = []
    lock, began, written = threading.Lock(), time.monotonic(), 0
    over = threading.Event()

    def work(first: int) -> None:
        nonlocal written
        own = range(first, len(encoded), workers)
        for answer in generate(
            target,
            [encoded[index] for index in own],
            max_new_tokens=limit,
            stop_ids=target.stop_ids,
            batch_size=BATCH,
            indices=list(own),
        ):
            if over.is_set():
                return
            with lock:
                answers.append(answer)
                written += len(answer.tokens)
                done, tokens = len(answers), written
            if listener is not None:
                rate = tokens / max(time.monotonic() - began, 1e-9)
                listener(
                    {"kind": "step", "unit": "answer", "step": done, "steps": len(prompts), "tokens_per_second": rate}
                )

    with ThreadPoolExecutor(workers) as pool:
        try:
            for finished in [pool.submit(work, first) for first in range(workers)]:
                finished.result()
        except BaseException:  # Ctrl-C, or one share failed: the pool waits for its threads, which must not go on
            over.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return sorted(answers, key=lambda answer: answer.index)


def _write_conversations(target: Target, prompts: Sequence[Prompt], answers: Sequence[Answer], path: Path) -> int:
    """Writes the answers worth learning from as conversations; returns how many there are."""
    lines = []
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.finish_reason == "stop" and distinct_share(answer.tokens) >= NOT_LOOPING:
            text = target.tokenizer.decode(answer.tokens[:-1], clean_up_tokenization_spaces=False)
            lines.append({"messages": [*prompt.as_messages(), {"role": "assistant", "content": text}]})
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return len(lines)


def _write_config(config: RunConfig, path: Path) -> None:
    """The config as YAML, without what is left at its default."""
    head = "# The run of this demo. Repeat it, or change it, with\n#   draftsmith train {} training.output=runs/again\n"
    content = yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True), sort_keys=False, allow_unicode=True)
    with written_aside(path) as file:
        file.write(head.format(shlex.quote(str(path))) + content)


def _require_finished(trained: TrainResult) -> None:
    """Raises KeyboardInterrupt if the training was stopped: its drafter is not the one that the demo measures."""
    if trained.reason in ("interrupted", "terminated"):
        ended = Terminated if trained.reason == "terminated" else KeyboardInterrupt
        raise ended(f"{trained.reason} at step {trained.step} of the training: what is kept is {trained.checkpoint}")


def _evaluate(
    target: Target, trained: TrainResult, prompts: Sequence[Prompt], limit: int, listener: Listener | None
) -> Evaluation:
    """Decodes the held-out prompts with the exported drafter, as a user would load it."""
    assert trained.checkpoint is not None

    def tell(done: int, count: int) -> None:
        if listener is not None:
            listener({"kind": "step", "unit": "prompt", "step": done, "steps": count})

    drafter = load_drafter(trained.checkpoint, target.device, target.dtype)
    return evaluate(drafter, target, encode_prompts(prompts, target.tokenizer), max_new_tokens=limit, progress=tell)


def _result(
    evaluation: Evaluation,
    trained: TrainResult,
    quick: bool,
    answers: int,
    kept: int,
    tokens: int,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """What result.json holds: the figures of `evaluate`, then how they came about."""
    result = evaluation.to_json()
    share = result["distinct_4grams_per_prompt"]
    result |= {
        "prompts": len(share),
        "prompts_not_looping": sum(value >= NOT_LOOPING for value in share),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "training": {
            "answers": answers,
            "answers_used": kept,
            "answer_tokens": tokens,
            "updates": trained.step,
            "loss": trained.loss,
            "tau_proxy": trained.tau_proxy,
            "held_out": trained.evaluation,
            "drafter": str(trained.checkpoint),
        },
        "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
        "tau_asserted": TAU_ASSERTED,
        "quick": quick,
    }
    return {**result, "passed": asserted(result)}


def _account(result: dict[str, Any], evaluation: Evaluation, output: Path) -> list[str]:
    """The closing table and what it means."""
    shown = [("all answers", evaluation.figures)]
    if evaluation.not_looping is not None:
        shown.append(("not looping", evaluation.not_looping))

    def row(name: str, value: Callable[[Figures], str]) -> str:
        return f"  {name:<44}" + "".join(f"{value(figures):>14}" for _, figures in shown)

    def tokens_per_second(figures: Figures, seconds: float) -> str:
        return f"{1 / seconds:.0f}" if seconds else "-"

    slots = " ".join(f"{share:.2f}" for share in evaluation.figures.accept_by_slot)
    return [
        "",
        "  " + " " * 44 + "".join(f"{name:>14}" for name, _ in shown),
        row("held-out answers", lambda figures: f"{figures.answers}"),
        row("τ, tokens per target forward: drafter", lambda figures: f"{figures.tau:.2f}"),
        row("τ: prompt look-up", lambda figures: f"{figures.tau_prompt_lookup:.2f}"),
        row("tokens per second: plain decoding", lambda f: tokens_per_second(f, f.baseline_seconds_per_token)),
        row("tokens per second: with the drafter", lambda f: tokens_per_second(f, f.seconds_per_token)),
        row("speed-up", lambda figures: f"{figures.speedup:.2f}x"),
        "",
        f"  drafts accepted up to slot 1, 2, …: {slots}",
        f"  lossless: {'yes' if result['lossless'] else 'NO'}, {evaluation.exact_answers} of {result['prompts']} "
        "answers are the plain ones token for token",
        f"  {result['seconds']['total']:.0f} s in all; drafter {result['training']['drafter']}; "
        f"all figures {output / 'result.json'}",
        *_verdict(result),
    ]


def _verdict(result: dict[str, Any]) -> list[str]:
    lines = [f"  NO: {text}" for text in shortcomings(result)]
    if result["quick"]:
        lines.append("  quick: far too little training for these figures to mean anything")
    return lines


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """torch computes with that many threads, in threads started meanwhile too."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Clock:
    """Seconds since the last lap, and in all."""

    def __init__(self) -> None:
        self._began = self._lap = time.monotonic()

    def lap(self) -> float:
        last, self._lap = self._lap, time.monotonic()
        return self._lap - last

    def total(self) -> float:
        return time.monotonic() - self._began


def _say(*lines: str) -> None:
    print("\n".join(lines), flush=True)
