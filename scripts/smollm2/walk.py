"""τ of many answers at once, without decoding: the drafter walks along the target's own greedy text.

    python scripts/smollm2/walk.py --target MODEL.gguf --prompts prompts.jsonl DRAFTER [DRAFTER …]

Greedy speculative decoding writes what the target alone would write. So its rounds can be replayed: answer all prompts
in one batch, run the drafter from every token of an answer at once, as training does, and walk a ← a + accepted + 1.
The accepted lengths are those of decoding, but for the last block of an answer that the length limit ends: decoding
makes it shorter. One JSON line per drafter; seconds instead of the minutes that decoding one by one takes, which makes
curves over checkpoints affordable. `draftsmith eval` and `compare_with_dflash.py` decode for real.

Cost: one batched generation, one target forward per answer, one drafter forward per answer and drafter.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from draftsmith.config import TargetConfig
from draftsmith.decode.evaluate import NOT_LOOPING
from draftsmith.decode.figures import distinct_share
from draftsmith.decode.generate import generate
from draftsmith.decode.prompts import encode_prompts, read_prompts
from draftsmith.decode.walk import accepted_from_every_token, answer_row
from draftsmith.drafter.native import load_drafter_for
from draftsmith.errors import run_script
from draftsmith.target.forward import Target
from draftsmith.target.load import load_target


def walk(accepted: dict[int, int], first: int, length: int) -> list[int]:
    """Tokens that each target forward emits, from the first answer token at place `first` on."""
    emitted, place = [], first
    while place < length - 1:
        emitted.append(min(accepted[place] + 1, length - 1 - place))
        place += emitted[-1]
    return emitted


def figures(rounds: list[list[int]]) -> dict[str, float]:
    """τ pooled and per answer."""
    flat = [count for one in rounds for count in one]
    per_answer = [sum(one) / len(one) for one in rounds if one]
    return {
        "answers": len(rounds),
        "tokens": sum(flat),
        "tau": sum(flat) / max(1, len(flat)),
        "tau_per_response": sum(per_answer) / max(1, len(per_answer)),
    }


def answers_of(target: Target, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """The target's greedy answers, in the order of the prompts."""
    found = generate(target, prompts, max_new_tokens=tokens, stop_ids=target.stop_ids)
    by_index = {answer.index: answer.tokens for answer in found}
    return [by_index[index] for index in range(len(prompts))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("drafters", type=Path, nargs="+")
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    asked, config = read_prompts(arguments.prompts)[: arguments.limit], TargetConfig(path=arguments.target)
    drafters = {folder: load_drafter_for(config, folder).to(device, dtype) for folder in arguments.drafters}
    target = load_target(config, device, dtype)
    head = target.head()
    prompts = encode_prompts(asked, target.tokenizer)
    answers = answers_of(target, prompts, arguments.max_new_tokens)
    looping = [distinct_share(answer) < NOT_LOOPING for answer in answers]

    rounds: dict[Path, list[list[int]]] = {folder: [] for folder in drafters}
    for prompt, answer in zip(prompts, answers, strict=True):
        row = answer_row(prompt, answer)
        features: dict[tuple[int, ...], torch.Tensor] = {}
        for folder, drafter in drafters.items():
            if len(answer) < 2:
                rounds[folder].append([])
                continue
            taps = drafter.spec.taps
            if taps not in features:
                features[taps] = target.features(row.tokens_S, row.document_S, row.positions_S, taps).taps_SF
            accepted = accepted_from_every_token(drafter, head, row, features[taps])
            rounds[folder].append(walk(accepted, len(prompt), len(prompt) + len(answer)))
    for folder, found in rounds.items():
        fresh = [one for one, loops in zip(found, looping, strict=True) if not loops]
        print(
            json.dumps(
                {
                    "drafter": str(folder),
                    **figures(found),
                    "not_looping": figures(fresh),
                    "accepted_per_round": found,
                    "looping": looping,
                }
            ),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    run_script(main)
