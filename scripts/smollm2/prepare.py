"""From the target's answers to training data: held out first, then cleaned.

    python scripts/smollm2/prepare.py FOLDER answers-0.jsonl [answers-1.jsonl …] [--held-out 256] [--exclude FILE]

Reads what `draftsmith data generate` wrote and writes to FOLDER

- `held-out.jsonl`, conversations that are only evaluated: drawn by the hash of the prompt, before anything else is
  looked at, so looping answers are among them in their true share;
- `prompts.jsonl`, the prompts of the first 64 of them, for `draftsmith eval`;
- `train.jsonl`, the rest, without
    - prompts that occurred before (compared by their words),
    - prompts that share a run of 8 words with a held-out prompt or one of `--exclude` (a prompt shorter than that: all
      of its words),
    - answers that are empty,
    - answers that loop (fewer than 60 % of their 4-grams of words are distinct), beyond `--looping` of the rest;
- `small.jsonl`, every fourth line of it, for the curve by data size;
- `counts.json`, how many of which.

Greedy answers of a small model loop often. Some are kept, because the drafter will be asked to draft such text too;
more would spend its capacity on copying, which is easy. Evaluation reports looping answers apart.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

NOT_LOOPING = 0.6
RUN = 8
SMALL = 4
EVALUATED_PROMPTS = 64


def words(text: str) -> list[str]:
    """Lower-case words, punctuation left out."""
    return re.findall(r"\w+", text.lower())


def runs(text: str) -> set[tuple[str, ...]]:
    """All runs of 8 words; the whole text if it is shorter."""
    found = words(text)
    return {tuple(found[start : start + RUN]) for start in range(max(1, len(found) - RUN + 1))}


def distinct_share(text: str) -> float:
    """Share of distinct 4-grams of words; 1 for a text too short to hold one."""
    found = words(text)
    grams = [tuple(found[start : start + 4]) for start in range(len(found) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def read(paths: Iterable[Path]) -> Iterator[dict]:
    """Conversations of all files; the last line may be torn where generating was stopped."""
    for path in paths:
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                yield json.loads(line)
            except ValueError:
                continue


def prompt_of(conversation: dict) -> str:
    return next(turn["content"] for turn in conversation["messages"] if turn["role"] == "user")


def split(
    conversations: Iterable[dict], held_out: int, excluded: Iterable[str], looping: float = 0.0
) -> tuple[list, list, Counter]:
    """(training, held-out, counts): see the module's docstring."""
    counts: Counter[str] = Counter()
    by_prompt: dict[tuple[str, ...], dict] = {}
    for conversation in conversations:
        counts["answers"] += 1
        key = tuple(words(prompt_of(conversation)))
        if not key or key in by_prompt:
            counts["prompt occurred before"] += 1
            continue
        by_prompt[key] = conversation
    drawn = sorted(by_prompt, key=lambda key: hashlib.sha256(" ".join(key).encode()).digest())
    outside = [by_prompt[key] for key in drawn[:held_out]]
    known = set().union(*(runs(prompt_of(conversation)) for conversation in outside), *map(runs, excluded))
    training, loops = [], []
    for key in drawn[held_out:]:
        conversation = by_prompt[key]
        answer = conversation["messages"][-1]["content"]
        if not runs(prompt_of(conversation)).isdisjoint(known):
            counts[f"shares {RUN} words with a held-out prompt"] += 1
        elif not answer.strip():
            counts["empty answer"] += 1
        elif distinct_share(answer) < NOT_LOOPING:
            loops.append(conversation)
        else:
            training.append(conversation)
    kept = loops[: int(looping * len(training))]
    counts["looping answer"] = len(loops) - len(kept)
    counts["training that loops"] = len(kept)
    training += kept
    random.Random(0).shuffle(training)
    counts["held out"], counts["training"] = len(outside), len(training)
    counts["held out that loop"] = sum(distinct_share(c["messages"][-1]["content"]) < NOT_LOOPING for c in outside)
    counts["training that the length limit cut"] = sum(c.get("finish_reason") == "length" for c in training)
    counts["training answer tokens"] = sum(c.get("answer_tokens", 0) for c in training)
    return training, outside, counts


def write(path: Path, lines: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("answers", type=Path, nargs="+")
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--looping", type=float, default=0.08, help="looping answers for each that does not")
    parser.add_argument("--exclude", type=Path, action="append", default=[])
    arguments = parser.parse_args()
    excluded = [json.loads(line)["prompt"] for path in arguments.exclude for line in path.open(encoding="utf-8")]
    training, outside, counts = split(read(arguments.answers), arguments.held_out, excluded, arguments.looping)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write(arguments.folder / "train.jsonl", training)
    write(arguments.folder / "small.jsonl", training[::SMALL])
    write(arguments.folder / "held-out.jsonl", outside)
    prompts = [{"prompt": prompt_of(conversation)} for conversation in outside[:EVALUATED_PROMPTS]]
    write(arguments.folder / "prompts.jsonl", prompts)
    (arguments.folder / "counts.json").write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
