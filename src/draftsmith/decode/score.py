"""How much of given answers the target would have said itself: teacher-forced log-probability and greedy agreement.

A drafter learns from data and is judged by the target; where the two disagree it learns what will be rejected. For
every taught token t at place i of a document the target is asked at i - 1, in one forward over packed rows:

    log p(t | what stands before it)         mean over tokens
    argmax p(· | what stands before it) = t  share of tokens

Greedy answers of the target itself give a share of 1, up to ties of bfloat16; sampled ones less, the hotter the less.

Cost: one forward of the whole target per row, and logits of taught tokens, in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.blocks import Row
from draftsmith.target.forward import Target

_CHUNK = 512  # taught tokens whose logits exist at one time


@dataclass(frozen=True)
class Score:
    """What the target says of given answers.

    Attributes:
        tokens: taught tokens looked at.
        mean_logprob: natural logarithm.
        greedy_share: share of tokens that are the target's first choice.
    """

    tokens: int
    mean_logprob: float
    greedy_share: float

    def line(self) -> str:
        """For people."""
        return (
            f"the target's own view of {self.tokens:,} taught tokens: mean log-probability {self.mean_logprob:.3f}, "
            f"{self.greedy_share:.1%} are its first choice"
        )

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {"tokens": self.tokens, "mean_logprob": self.mean_logprob, "greedy_share": self.greedy_share}


@torch.no_grad()
def score_rows(
    target: Target, rows: Iterable[Row], tokens: int, progress: Callable[[int], None] | None = None
) -> Score | None:
    """Scores taught tokens until at least `tokens` were looked at; None if the rows hold none.

    Args:
        target: with all its layers.
        rows: packed rows, on the CPU.
        tokens: how many are enough.
        progress: called with the tokens scored so far, after every row.
    """
    seen, total, equal = 0, 0.0, 0
    head = target.head()
    for row in rows:
        first = torch.zeros_like(row.loss_mask_S)
        first[1:] = row.document_S[1:] == row.document_S[:-1]
        places = (row.loss_mask_S & first).nonzero()[:, 0]
        if places.numel() == 0:
            continue
        features = target.features(row.tokens_S, row.document_S, row.positions_S, (0,), last_hidden=True)
        assert features.last_SH is not None
        for part in places.split(_CHUNK):
            logits = head.logits(features.last_SH[(part - 1).to(features.last_SH.device)]).float()
            labels = row.tokens_S[part].to(logits.device)
            total += float(logits.log_softmax(-1).gather(1, labels[:, None]).sum())
            equal += int((logits.argmax(-1) == labels).sum())
        seen += places.numel()
        if progress is not None:
            progress(seen)
        if seen >= tokens:
            break
    return Score(seen, total / seen, equal / seen) if seen else None
