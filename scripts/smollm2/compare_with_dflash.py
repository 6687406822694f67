"""Decodes the same prompts with a drafter twice: by draftsmith, and by z-lab's own decoder (the wheel `dflash`).

    python scripts/smollm2/compare_with_dflash.py DRAFTER --target MODEL.gguf --prompts prompts.jsonl [--limit 16]

Each side loads the target for itself: draftsmith by its own reader of GGUF files, the reference by transformers', so a
difference in loading would show as well. In float32 both must write the same tokens and need the same number of
target forwards. τ is (tokens - 1) / (target forwards after the prefill) on both sides: the reference's own count of
accepted tokens is clipped at stop token and length limit in the same way, but needs CUDA.

Prints one JSON object. Exit code 0 if all tokens are equal and τ agrees within 0.05, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import AutoModelForCausalLM

from draftsmith.config import TargetConfig
from draftsmith.decode.evaluate import distinct_share
from draftsmith.decode.prompts import encode_prompts, read_prompts
from draftsmith.decode.speculative import DrafterProposer, decode
from draftsmith.drafter import load_drafter
from draftsmith.target.load import load_target

TOLERANCE = 0.05


class CountedForwards:
    """Counts the forwards of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        model.register_forward_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


def by_draftsmith(
    folder: Path, gguf: Path, prompts: Path, limit: int | None, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[list[int]], list[int], list[list[int]], list[int]]:
    """(prompts, stop tokens, answers, target forwards of each)."""
    target = load_target(TargetConfig(path=str(gguf)), device, dtype)
    encoded = encode_prompts(read_prompts(prompts)[:limit], target.tokenizer)
    proposer = DrafterProposer(load_drafter(folder, device, dtype), target.head())
    runs = [decode(target, ids, proposer, max_new_tokens=tokens, stop_ids=target.stop_ids) for ids in encoded]
    return encoded, list(target.stop_ids), [run.tokens for run in runs], [run.target_forwards for run in runs]


def by_reference(
    folder: Path,
    gguf: Path,
    encoded: list[list[int]],
    stops: list[int],
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[list[list[int]], list[int]]:
    """(answers, target forwards of each)."""
    target: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype)
    target = target.to(device).eval()
    drafter = DFlashDraftModel.from_pretrained(folder, dtype=dtype).to(device).eval()
    forwards = CountedForwards(target)
    answers, counts = [], []
    for ids in encoded:
        forwards.count = 0
        whole = dflash_generate(
            drafter, target, torch.tensor([ids], device=device), max_new_tokens=tokens, stop_token_ids=stops
        )
        answers.append(whole[0, len(ids) :].tolist())
        counts.append(forwards.count - 1)  # one is the prefill
    return answers, counts


def tau(answers: list[list[int]], forwards: list[int]) -> float:
    """Pooled over all answers."""
    return sum(len(answer) - 1 for answer in answers) / max(1, sum(forwards))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    tokens = arguments.max_new_tokens

    began = time.monotonic()
    encoded, stops, ours, our_forwards = by_draftsmith(
        arguments.drafter, arguments.target, arguments.prompts, arguments.limit, tokens, device, dtype
    )
    between = time.monotonic()
    theirs, their_forwards = by_reference(arguments.drafter, arguments.target, encoded, stops, tokens, device, dtype)
    equal = [a == b for a, b in zip(ours, theirs, strict=True)]
    result = {
        "prompts": len(encoded),
        "max_new_tokens": tokens,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "equal": all(equal),
        "equal_per_prompt": equal,
        "tau_draftsmith": tau(ours, our_forwards),
        "tau_dflash": tau(theirs, their_forwards),
        "tokens": [len(answer) for answer in ours],
        "forwards_draftsmith": our_forwards,
        "forwards_dflash": their_forwards,
        "distinct_4grams": [distinct_share(answer) for answer in ours],
        "seconds": [between - began, time.monotonic() - between],
    }
    print(json.dumps(result))
    close = abs(result["tau_draftsmith"] - result["tau_dflash"]) <= TOLERANCE
    return 0 if result["equal"] and close else 1


if __name__ == "__main__":
    sys.exit(main())
