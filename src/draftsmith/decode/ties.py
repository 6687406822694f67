"""Whether an answer that differs from plain decoding's is still the target's own: near-ties of its argmax, proved.

Cost: one forward over prompt and answer, and two more for each tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.decode.cache import DecodeCache


@dataclass(frozen=True)
class Tie:
    """A token of the drafter's answer that is not what the target alone would have said.

    Attributes:
        prompt: index of the prompt.
        position: place of the token in the answer.
        token: what was emitted.
        best: the target's argmax under teacher forcing; the baseline's token where the two answers part.
        gap: by how much, in logits, `token` and `best` lie below the top (the larger of the two).
        noise: largest difference between the target's logits from one long forward and from a one-token step there.
        tolerance: twice the noise, and at least two units in the last place of the top logit.
    """

    prompt: int
    position: int
    token: int
    best: int
    gap: float
    noise: float
    tolerance: float

    @property
    def proved(self) -> bool:
        """The gap is within what rounding does to these logits."""
        return self.gap <= self.tolerance


@torch.inference_mode()
def find_ties(target: Any, index: int, prompt: Sequence[int], ours: list[int], base: list[int]) -> list[Tie]:
    """Every place where `ours` is not the target's choice under teacher forcing, and the place where it leaves `base`.

    An answer that is a mere beginning of the other one parts from it by a missing token, which no rounding explains:
    its gap is infinite.
    """
    prompt = list(prompt)
    device = torch.device(target.device)
    ids = torch.tensor([prompt + ours], device=device)
    logits = target.model(ids, use_cache=False, logits_to_keep=len(ours) + 1).logits[0, :-1]
    chosen = logits.argmax(-1).tolist()
    parting = next((place for place, (a, b) in enumerate(zip(ours, base, strict=False)) if a != b), None)
    if parting is None:
        return [Tie(index, min(len(ours), len(base)), -1, -1, math.inf, 0.0, 0.0)]
    ties = []
    for place, (token, best) in enumerate(zip(ours, chosen, strict=True)):
        other = base[place] if place == parting else best
        if token == best and place != parting:
            continue
        row = logits[place].float()
        top = float(row.max())
        gap = top - min(float(row[token]), float(row[other]))
        stand = len(prompt) + place - 1
        # What plain decoding does there: one token, everything before it in a cache.
        cache = DecodeCache(target.model.config, 1, stand + 1)
        positions = torch.arange(stand + 1, device=device)[None]
        for part in (slice(0, stand), slice(stand, stand + 1))[not stand :]:
            step = target.model(
                ids[:, part],
                position_ids=positions[:, part],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[0, -1]
        noise = float((step.float() - row).abs().max())
        unit = torch.finfo(logits.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(top), 1e-6)))
        ties.append(Tie(index, place, token, other, gap, noise, max(2 * noise, 2 * unit)))
    return ties
