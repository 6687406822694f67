"""Decodes the same prompts with a drafter twice: by draftsmith, and by z-lab's own decoder (the wheel `dflash`).

    python scripts/smollm2/compare_with_dflash.py DRAFTER --target MODEL.gguf --prompts prompts.jsonl [--limit 16]
        [--speed]

Each side loads the target for itself: draftsmith by its own reader of GGUF files, the reference by transformers', so a
difference in loading would show as well. In float32 both must write the same tokens and need the same number of
target forwards. τ is (tokens - 1) / (target forwards after the prefill) on both sides: the reference's own count of
accepted tokens is clipped at stop token and length limit in the same way, but needs CUDA.

`--speed` has each side answer once more with blocks of one token, by the same loop: what the drafter gains there, in
seconds of decoding without loading. Both decode eagerly, after a short answer that is not timed.

Prints one JSON object. Exit code 0 if all tokens are equal and τ agrees within 0.05, else 1.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import AutoModelForCausalLM

from draftsmith.config import TargetConfig
from draftsmith.decode.figures import distinct_share
from draftsmith.decode.prompts import encode_prompts, read_prompts
from draftsmith.decode.proposers import DrafterProposer, GreedyProposer, Proposer
from draftsmith.decode.speculative import Decoded, decode
from draftsmith.drafter.native import load_drafter_for
from draftsmith.errors import run_script
from draftsmith.target.load import load_target

TOLERANCE = 0.05
WARMING_TOKENS = 8


class CountedForwards:
    """Counts the forwards of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        model.register_forward_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


@dataclass(frozen=True)
class Side:
    """What one decoder did.

    Attributes:
        answers: tokens of each.
        forwards: of the target for each, the prefill left out.
        seconds: of decoding them all.
        plain_seconds: the same with blocks of one token; None if not asked.
    """

    answers: list[list[int]]
    forwards: list[int]
    seconds: float
    plain_seconds: float | None

    @property
    def tau(self) -> float:
        """Pooled over all answers."""
        return sum(len(answer) - 1 for answer in self.answers) / max(1, sum(self.forwards))

    @property
    def speed_up(self) -> float | None:
        return self.plain_seconds / self.seconds if self.plain_seconds is not None else None


def timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What `work` returns, and its seconds; the device has done all it was given."""
    began = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - began


def by_draftsmith(
    arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> tuple[list[list[int]], list[int], Side]:
    """(prompts, stop tokens, what was decoded)."""
    asked, config = read_prompts(arguments.prompts)[: arguments.limit], TargetConfig(path=str(arguments.target))
    drafter = load_drafter_for(config, arguments.drafter).to(device, dtype)
    target = load_target(config, device, dtype)
    encoded = encode_prompts(asked, target.tokenizer)
    drafting = DrafterProposer(drafter, target.head())

    def answer(proposer: Proposer, prompts: list[list[int]], tokens: int) -> list[Decoded]:
        return [decode(target, ids, proposer, max_new_tokens=tokens, stop_ids=target.stop_ids) for ids in prompts]

    answer(drafting, encoded[:1], WARMING_TOKENS)
    runs, seconds = timed(lambda: answer(drafting, encoded, arguments.max_new_tokens), device)
    plain = None
    if arguments.speed:
        _, plain = timed(lambda: answer(GreedyProposer(), encoded, arguments.max_new_tokens), device)
    side = Side([run.tokens for run in runs], [run.target_forwards for run in runs], seconds, plain)
    return encoded, list(target.stop_ids), side


def by_reference(
    arguments: argparse.Namespace,
    encoded: list[list[int]],
    stops: list[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Side:
    """The same prompts by z-lab's decoder."""
    gguf = arguments.target
    target: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype)
    target = target.to(device).eval()
    drafter = DFlashDraftModel.from_pretrained(arguments.drafter, dtype=dtype).to(device).eval()
    forwards = CountedForwards(target)

    def answer(prompts: list[list[int]], tokens: int, block_size: int | None) -> list[tuple[list[int], int]]:
        answers = []
        for ids in prompts:
            forwards.count = 0
            prompt = torch.tensor([ids], device=device)
            whole = dflash_generate(
                drafter, target, prompt, max_new_tokens=tokens, stop_token_ids=stops, block_size=block_size
            )
            answers.append((whole[0, len(ids) :].tolist(), forwards.count - 1))  # one is the prefill
        return answers

    answer(encoded[:1], WARMING_TOKENS, None)
    found, seconds = timed(lambda: answer(encoded, arguments.max_new_tokens, None), device)
    plain = None
    if arguments.speed:
        _, plain = timed(lambda: answer(encoded, arguments.max_new_tokens, 1), device)
    return Side([tokens for tokens, _ in found], [count for _, count in found], seconds, plain)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--speed", action="store_true", help="also the speed-up of each side; twice the work and more")
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)

    encoded, stops, ours = by_draftsmith(arguments, device, dtype)
    theirs = by_reference(arguments, encoded, stops, device, dtype)
    equal = [a == b for a, b in zip(ours.answers, theirs.answers, strict=True)]
    result = {
        "prompts": len(encoded),
        "max_new_tokens": arguments.max_new_tokens,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "equal": all(equal),
        "equal_per_prompt": equal,
        "tau_draftsmith": ours.tau,
        "tau_dflash": theirs.tau,
        "speed_up_draftsmith": ours.speed_up,
        "speed_up_dflash": theirs.speed_up,
        "seconds_draftsmith": ours.seconds,
        "seconds_dflash": theirs.seconds,
        "tokens": [len(answer) for answer in ours.answers],
        "forwards_draftsmith": ours.forwards,
        "forwards_dflash": theirs.forwards,
        "distinct_4grams": [distinct_share(answer) for answer in ours.answers],
    }
    print(json.dumps(result))
    close = abs(ours.tau - theirs.tau) <= TOLERANCE
    return 0 if result["equal"] and close else 1


if __name__ == "__main__":
    run_script(main)
