"""`bench decode`: what a drafter is worth on this machine, by task, by block size and by length of context.

Every task's prompts are decoded with the drafter and, in the same loop, at block size 1; figures are those of
`decode.evaluate`. Then a few prompts are decoded at every block size up to the trained one: a smaller block drafts less
and costs less, and which is best depends on the machine. Then prompts are set behind longer and longer texts (other
prompts), up to and beyond the context that the drafter was trained on.

Cost: three decodings per prompt, one per prompt of the sample and block size, one per prompt of the sample and context.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftsmith.decode.evaluate import GREEDY, Evaluation, evaluate
from draftsmith.decode.fitting import fitting_prompts
from draftsmith.decode.prompts import Prompt, encode_prompts
from draftsmith.decode.proposers import DrafterProposer, GreedyProposer, Proposer
from draftsmith.decode.rounds import answer_limit, stop_ids_of
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.speculative import Decoded, StaticRounds, decode
from draftsmith.errors import UserError, reason_of

SAMPLE = 8  # prompts at each block size and context
CONTEXT_ANSWER = 64  # tokens decoded behind each context
_WARM_UP = 8
_NO_ROUNDS = "no rounds: answers ended at their first token"


def bench_decode(
    drafter: Any,
    target: Any,
    tasks: Sequence[tuple[str, Sequence[Prompt]]],
    *,
    max_new_tokens: int = 256,
    sampling: Sampling = GREEDY,
    contexts: Sequence[int] = (),
    trained_length: int | None = None,
    template_options: dict[str, Any] | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _all: None,
    rounds: StaticRounds | None = None,
) -> dict[str, Any]:
    """Measures a drafter; returns one dictionary for people, programs and the picture.

    Args:
        drafter: on the target's device and in its dtype.
        tasks: (name, prompts).
        sampling: how tokens are chosen.
        contexts: tokens of context at which τ is measured.
        trained_length: S, the context of a training row, if known.
        progress: called with what is being done, and how far it is.
        rounds: how rounds are run, at every block size alike; none: as captured graphs where that is possible.

    Raises:
        UserError: no prompts, a context beyond the target's positions, or see `decode`.
    """
    if not tasks or not all(prompts for _, prompts in tasks):
        raise UserError("there are no prompts to decode", where="bench decode", fix="give --prompts TASK=FILE")
    _check_contexts(contexts, target.geometry.max_position_embeddings)
    rounds = StaticRounds(target) if rounds is None else rounds
    results, sample, notices = [], [], []
    for name, prompts in tasks:
        encoded, notes = fitting_prompts(target, prompts, max_new_tokens, rounds, template_options)
        notices += notes
        sample += encoded[: max(1, SAMPLE // len(tasks))]

        def told(done: int, total: int, task: str = name) -> None:
            progress(task, done, total)

        evaluation = evaluate(
            drafter, target, encoded, max_new_tokens=max_new_tokens, sampling=sampling, progress=told, rounds=rounds
        )
        results.append({"task": name, **_task(evaluation)})
    trained = drafter.spec.block_size
    sizes = sorted({2, 3, 4, 6, 8, 12, 16, 24, 32, trained} & set(range(2, trained + 1)))
    by_size = []
    for done, size in enumerate((1, *sizes)):
        progress("block size", done, len(sizes) + 1)
        proposer = GreedyProposer() if size == 1 else DrafterProposer(drafter, target.head(), size)
        runs = _decode_all(target, proposer, sample, max_new_tokens, sampling, rounds)
        by_size.append({"block_size": size, **_figures(runs)})
    timed = [entry for entry in by_size if _ran(entry)]
    best = min(timed, key=lambda entry: entry["seconds_per_token"])["block_size"] if timed else None
    lengths = _by_context(
        drafter, target, tasks, contexts, sampling, trained_length, template_options, progress, rounds
    )
    return {
        "bench": "decode",
        "tasks": results,
        "block_sizes": by_size,
        "best_block_size": best,
        "trained_block_size": trained,
        "contexts": lengths,
        "trained_length": trained_length,
        "machine": _machine(target),
        "notices": notices,
        **rounds.facts(),
        "way": rounds.line(),
    }


def lines_of(result: dict[str, Any]) -> list[str]:
    """The tables, for people."""
    names = (("answers", 8), ("τ", 7), ("τ/answer", 9), ("tok/s", 8), ("plain", 8), ("speed-up", 9), ("ms/round", 9))
    lines = [f"{'task':<16}" + "".join(f"{name:>{width}}" for name, width in names)]
    for task in result["tasks"]:
        if not _ran(task):
            lines.append(f"{task['task']:<16}{task['answers']:>8}  {_NO_ROUNDS}")
            continue
        lines.append(
            f"{task['task']:<16}{task['answers']:>8}{task['tau']:>7.2f}{task['tau_per_response']:>9.2f}"
            f"{1 / task['seconds_per_token']:>8.0f}{1 / task['baseline_seconds_per_token']:>8.0f}"
            f"{task['speedup']:>8.2f}x{1e3 * task['seconds_per_round']:>9.2f}"
        )
        draft, checked = task["draft_share"], task["target_share"]
        slots = " ".join(f"{share:.2f}" for share in task["accept_by_slot"])
        lines.append(f"  a round: drafter {draft:.0%}, target {checked:.0%}, rest {1 - draft - checked:.0%}")
        lines.append(f"  accepted by slot: {slots}")
        said = task["distribution"]
        how = "token for token" if said is None else f"p = {said['p_value']:.3g} over {said['tokens']} tokens"
        lines.append(f"  lossless: {'yes' if task['lossless'] else 'NO'} ({how})")
    lines.append(f"{'block size':<16}{'τ':>7}{'tok/s':>8}{'speed-up':>9}{'ms/round':>9}")
    plain = result["block_sizes"][0]["seconds_per_token"]
    for entry in result["block_sizes"]:
        if not _ran(entry):
            lines.append(f"{entry['block_size']:<16}  {_NO_ROUNDS}")
            continue
        mark = "  best here" if entry["block_size"] == result["best_block_size"] else ""
        lines.append(
            f"{entry['block_size']:<16}{entry['tau']:>7.2f}{1 / entry['seconds_per_token']:>8.0f}"
            f"{plain / entry['seconds_per_token']:>8.2f}x{1e3 * entry['seconds_per_round']:>9.2f}{mark}"
        )
    if result["contexts"]:
        lines.append(f"{'context':<16}{'τ':>7}{'tok/s':>8}{'ms/round':>9}")
        for entry in result["contexts"]:
            if not _ran(entry):
                lines.append(f"{entry['context']:<16}  {_NO_ROUNDS}")
                continue
            beyond = "  beyond the trained context" if entry["beyond_trained"] else ""
            lines.append(
                f"{entry['context']:<16}{entry['tau']:>7.2f}{1 / entry['seconds_per_token']:>8.0f}"
                f"{1e3 * entry['seconds_per_round']:>9.2f}{beyond}"
            )
        if result["trained_length"] is None:
            lines.append("S is not known: none is marked as beyond the trained context (a run's checkpoint knows it)")
    return [*lines, *(f"note: {notice}" for notice in result["notices"]), result["way"]]


def _ran(entry: dict[str, Any]) -> bool:
    """Whether a task, block size or context had rounds to time."""
    return bool(entry["tau"])


def check_picture(path: Path) -> None:
    """Raises UserError where `draw` could not write, before anything is decoded."""
    if path.suffix.lower() != ".png":
        raise UserError("is not the name of a PNG", where=str(path), fix="end it in .png")
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"cannot be written: {reason_of(error)}", where=str(path)) from None


def draw(result: dict[str, Any], path: Path) -> Path:
    """Three panels: acceptance by slot, τ by task, τ by length of context.

    Raises:
        UserError: the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    contexts = result["contexts"]
    figure = Figure(figsize=(12 if contexts else 8.5, 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3 if contexts else 2)
    for task in result["tasks"]:
        shares = task["accept_by_slot"]
        panels[0].plot(range(1, len(shares) + 1), shares, marker="o", markersize=3, label=task["task"])
    panels[0].locator_params(axis="x", integer=True)
    panels[0].set(xlabel="slot", ylabel="share of blocks accepted so far", ylim=(0, 1), title="acceptance by position")
    panels[0].legend(frameon=False, fontsize=8)
    names = [task["task"] for task in result["tasks"]]
    taus = [task["tau"] or 0.0 for task in result["tasks"]]
    bars = panels[1].bar(names, taus, color="#1f6feb")
    panels[1].bar_label(bars, fmt="%.2f")
    panels[1].axhline(1, color="grey", linewidth=1)
    panels[1].set(ylabel="τ (tokens per target forward)", title="τ by task")
    panels[1].tick_params(axis="x", rotation=20)
    if contexts:
        panels[2].plot([entry["context"] for entry in contexts], [entry["tau"] for entry in contexts], marker="o")
        if result["trained_length"]:
            panels[2].axvline(result["trained_length"], color="grey", linestyle="--", label="trained on")
            panels[2].legend(frameon=False, fontsize=8)
        panels[2].set(xlabel="tokens of context", ylabel="τ", title="τ by length of context")
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be written: {error}", where=str(path)) from None
    return path


def _task(evaluation: Evaluation) -> dict[str, Any]:
    content = evaluation.to_json()
    return {key: value for key, value in content.items() if key not in ("ties", "distinct_4grams_per_prompt")}


def _check_contexts(contexts: Sequence[int], limit: int) -> None:
    """Raises UserError for one that leaves no room in the target's positions, before anything is decoded."""
    for context in contexts:
        if not 1 <= context <= limit - CONTEXT_ANSWER:
            raise UserError(
                f"a context of {context} leaves no room for an answer: the target has {limit} positions",
                where="--contexts",
            )


def _by_context(
    drafter: Any,
    target: Any,
    tasks: Sequence[tuple[str, Sequence[Prompt]]],
    contexts: Sequence[int],
    sampling: Sampling,
    trained_length: int | None,
    template_options: dict[str, Any] | None,
    progress: Callable[[str, int, int], None],
    rounds: StaticRounds,
) -> list[dict[str, Any]]:
    tokens = CONTEXT_ANSWER
    texts = [prompt for _, prompts in tasks for prompt in prompts]
    proposer = DrafterProposer(drafter, target.head())
    result = []
    for done, context in enumerate(contexts):
        progress("context", done, len(contexts))
        prompts = [
            lengthened(texts, place, context, target.tokenizer, template_options)
            for place in range(min(SAMPLE // 2, len(texts)))
        ]
        runs = _decode_all(target, proposer, prompts, tokens, sampling, rounds)
        beyond = None if trained_length is None else context > trained_length
        result.append({"context": context, "beyond_trained": beyond, "prompts": len(prompts), **_figures(runs)})
    return result


def lengthened(
    texts: Sequence[Prompt], place: int, length: int, tokenizer: Any, template_options: dict[str, Any] | None = None
) -> list[int]:
    """Token ids of prompt `place` with other prompts in front of what its user says, cut in front to just `length`.

    A prompt that is longer by itself is cut as well; what is behind the cut is what stands before the answer.
    """
    prompt = texts[place]
    said = prompt.as_messages()[-1]["content"]
    before: list[str] = []
    ids: list[int] = []
    turn = place
    while len(ids) < length:
        turn += 1
        before.insert(0, str(texts[turn % len(texts)].as_messages()[-1]["content"]))
        whole = Prompt(prompt.source, text="\n\n".join([*before, str(said)]))
        ids = encode_prompts([whole], tokenizer, template_options)[0]
    return ids[-length:]


def _decode_all(
    target: Any,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling,
    rounds: StaticRounds,
) -> list[Decoded]:
    options = {**asdict(sampling), "stop_ids": stop_ids_of(target), "rounds": rounds}
    first = answer_limit(target, prompts[0], min(tokens, _WARM_UP), "prompt 1")
    decode(target, prompts[0], proposer, max_new_tokens=first, **options)
    return [
        decode(
            target,
            prompt,
            proposer,
            max_new_tokens=answer_limit(target, prompt, tokens, f"prompt {number + 1}"),
            seed=number,
            **options,
        )
        for number, prompt in enumerate(prompts)
    ]


def _figures(runs: Sequence[Decoded]) -> dict[str, float | None]:
    """Pooled τ, seconds per decoded token and per round, prefill excluded; None where there were no rounds."""
    tokens = sum(len(run.tokens) - 1 for run in runs)
    rounds, seconds = sum(run.target_forwards for run in runs), sum(run.seconds for run in runs)
    if not rounds:
        return {"tau": None, "seconds_per_token": None, "seconds_per_round": None}
    return {"tau": tokens / rounds, "seconds_per_token": seconds / tokens, "seconds_per_round": seconds / rounds}


def _machine(target: Any) -> dict[str, Any]:
    device = torch.device(target.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": str(device),
        "name": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(target.dtype).removeprefix("torch."),
    }
