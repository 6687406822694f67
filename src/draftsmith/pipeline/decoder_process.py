"""The process that decodes held-out prompts while a run trains: `python -m draftsmith.pipeline.decoder_process PID`,
with the number of the run's process.

It reads JSON lines: first what to decode with (target, prompts, lengths), then one checkpoint after another, and
answers each with the figures of that checkpoint. It ends when its input does, and in the middle of an answer when the
run is killed, so it never outlives the run. What it loads is what a serving engine would: the drafter's folder, by its
native layout, and the reference decoder.

Two figures of the same text, prompt by prompt:

    decode  speculative decoding for real: tokens that each target forward emits
    walk    the forward of training over the finished answer, a drafter block at every token of it at once, and then
            a <- a + accepted + 1 along it

What trains is what serves if and only if both accept the same drafts from the same tokens. Near the length limit
decoding drafts shorter blocks, and a bidirectional drafter sees fewer masks than in training there: those rounds are
left out of the comparison, not of the figures. Rounds run eagerly: every checkpoint is a new drafter, whose graphs
would serve a few answers, and memory for them would be taken from a GPU that trains.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from draftsmith.config import TargetConfig
from draftsmith.decode.prompts import encode_prompts, read_prompts
from draftsmith.decode.rounds import room_for_answer, stop_ids_of
from draftsmith.decode.speculative import DrafterProposer, decode
from draftsmith.decode.walk import accepted_from_every_token, answer_row
from draftsmith.drafter import DraftModel, load_drafter
from draftsmith.errors import UserError
from draftsmith.pipeline.parent import end_with
from draftsmith.target.forward import Target
from draftsmith.target.load import load_target


@dataclass
class Rounds:
    """Target forwards and the tokens they emitted, added up over answers.

    Attributes:
        forwards, tokens: of all rounds.
        whole_forwards, whole_tokens: of the rounds whose block had all its slots.
    """

    forwards: int = 0
    tokens: int = 0
    whole_forwards: int = 0
    whole_tokens: int = 0

    def add(self, tokens: int, *, whole: bool) -> None:
        """Counts one round."""
        self.forwards += 1
        self.tokens += tokens
        self.whole_forwards += whole
        self.whole_tokens += tokens * whole

    def tau(self) -> float:
        """Tokens per target forward."""
        return self.tokens / self.forwards if self.forwards else float("nan")

    def whole_tau(self) -> float:
        """The same of the rounds with whole blocks."""
        return self.whole_tokens / self.whole_forwards if self.whole_forwards else float("nan")


def compare(
    drafter: DraftModel, target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> dict[str, Any]:
    """Decodes all prompts and walks along the answers.

    Args:
        drafter: on the target's device.
        prompts: token ids.
        max_new_tokens: length limit of an answer.

    Returns:
        decode, walk: τ of all rounds.
        decode_whole, walk_whole: τ of the rounds with whole blocks: these are to be equal.
        agree: share of decoding's whole rounds in which the walk accepts as many drafts from the same token.
        answers, tokens, forwards, seconds.
        too_long: prompts that leave no room for an answer in the target's positions, left out.
    """
    began = time.monotonic()
    head, stops, size = target.head(), stop_ids_of(target), drafter.spec.block_size
    proposer = DrafterProposer(drafter, head)
    decoded, walked, agreeing, too_long = Rounds(), Rounds(), 0, 0
    for prompt in prompts:
        room = room_for_answer(target, prompt, max_new_tokens)
        if not room:
            too_long += 1
            continue
        answer = decode(target, prompt, proposer, max_new_tokens=room, stop_ids=stops)
        if not answer.accepted_per_round:
            continue
        row = answer_row(prompt, answer.tokens)
        first, end, limit = len(prompt), row.tokens_S.numel(), len(prompt) + room
        features = target.features(row.tokens_S, row.document_S, row.positions_S, drafter.spec.taps)
        accepted = accepted_from_every_token(drafter, head, row, features.taps_SF)

        def emits(place: int, accepted: dict[int, int] = accepted, end: int = end) -> int:
            return min(accepted[place] + 1, end - 1 - place)

        place = first
        for emitted in answer.accepted_per_round:
            whole = place + size <= limit
            decoded.add(emitted, whole=whole)
            agreeing += whole and emits(place) == emitted
            place += emitted
        place = first
        while place < end - 1:
            emitted = emits(place)
            walked.add(emitted, whole=place + size <= limit)
            place += emitted
    return {
        "decode": decoded.tau(),
        "walk": walked.tau(),
        "decode_whole": decoded.whole_tau(),
        "walk_whole": walked.whole_tau(),
        "agree": agreeing / decoded.whole_forwards if decoded.whole_forwards else float("nan"),
        "answers": len(prompts) - too_long,
        "too_long": too_long,
        "tokens": decoded.tokens,
        "forwards": decoded.forwards,
        "seconds": time.monotonic() - began,
    }


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answers every line of `requests`, a checkpoint that fails by its error; see the module's docstring."""
    setting = json.loads(requests.readline())
    dtype, drafter_dtype = getattr(torch, setting["target_dtype"]), getattr(torch, setting["drafter_dtype"])
    target = load_target(TargetConfig.model_validate(setting["target"]), setting["device"], dtype)
    prompts = setting["prompts"]
    if isinstance(prompts, str):
        prompts = encode_prompts(read_prompts(prompts)[: setting["limit"]], target.tokenizer)
    for line in requests:
        request = json.loads(line)
        try:
            drafter = load_drafter(Path(request["folder"]), target.device, drafter_dtype).eval()
            result = compare(drafter, target, prompts, setting["max_new_tokens"])
        except (UserError, OSError, RuntimeError) as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"step": request["step"], **result}), file=answers, flush=True)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    # Answers have the standard output for themselves: whatever libraries print goes where errors go.
    own_output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        serve(sys.stdin, own_output)
    except UserError as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        sys.exit(2)
