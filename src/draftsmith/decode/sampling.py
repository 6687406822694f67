"""How a token is chosen: greedily, or from the distribution shaped by temperature, top-k and top-p.

Order of shaping: divide by the temperature, keep the k likeliest, then keep the smallest set of likeliest tokens whose
mass reaches p, renormalise. V: vocabulary rows.

Speculative rejection (Leviathan et al. 2023, Chen et al. 2023): a draft x, drawn from q, is accepted with probability
min(1, p(x)/q(x)); the first rejected slot is drawn from max(0, p - q) renormalised, and if none is rejected one more
token is drawn from p. The result is distributed exactly as if the target had been sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.errors import UserError

LOWEST_TEMPERATURE = 1e-5  # above 0; far below it, logits divided by it leave float32


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Refuses what cannot be sampled with, also where the temperature is 0 and the others would do nothing.

    Raises:
        UserError: the temperature is neither 0 nor a finite number from `LOWEST_TEMPERATURE` up, `top_k` is negative,
            or `top_p` is not in (0, 1].
    """
    if temperature != 0 and not LOWEST_TEMPERATURE <= temperature < math.inf:
        fix = f"0 is greedy; else a finite number from {LOWEST_TEMPERATURE:g} up"
        raise UserError(f"temperature {temperature:g} cannot be sampled with", where="sampling", fix=fix)
    if top_k < 0:
        raise UserError(f"top_k {top_k} is negative", where="sampling", fix="0 keeps every token")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p {top_p} is outside (0, 1]", where="sampling", fix="1 keeps every token")


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy and ignores the rest; `top_k` 0 and `top_p` 1 keep everything.

    Raises:
        UserError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Shaped distribution, float32 [..., V], of logits [..., V]."""
        assert not self.greedy
        scores = logits.float() / self.temperature
        vocabulary = scores.shape[-1]
        if not 0 < self.top_k < vocabulary:
            return self._nucleus(torch.softmax(scores, dim=-1))
        best, ids = scores.topk(self.top_k, dim=-1)
        return torch.zeros_like(scores).scatter_(-1, ids, self._nucleus(torch.softmax(best, dim=-1)))

    def _nucleus(self, probs: Tensor) -> Tensor:
        if self.top_p >= 1:
            return probs
        ordered, ids = probs.sort(dim=-1, descending=True)
        # A token stays while the mass of those before it is still short of p, so at least one always stays.
        short = torch.cat((torch.zeros_like(ordered[..., :1]), ordered.cumsum(-1)[..., :-1]), dim=-1) < self.top_p
        kept = torch.zeros_like(probs).scatter_(-1, ids, ordered * short)
        return kept / kept.sum(-1, keepdim=True)


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """One token id per distribution: int64 [...] from probs [..., V], which need not be normalised.

    Exponential races: p_i / e_i is largest at i with probability p_i; needs no look at the device's numbers.
    """
    race = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / race).argmax(-1)


def draw_at(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token at quantile `uniform` in [0, 1), float64 [...], of each distribution [..., V]: no hidden state."""
    mass = probs.double().cumsum(-1)
    ids = torch.searchsorted(mass, uniform[..., None] * mass[..., -1:], right=True).clamp_(max=probs.shape[-1] - 1)
    # Rounding in a parallel scan may land on a neighbour that has no mass at all.
    lost = probs.gather(-1, ids) == 0
    return torch.where(lost, probs.argmax(-1, keepdim=True), ids)[..., 0]


def accept_drafts(
    drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Speculative rejection for one block, without a host sync.

    Args:
        drafts: int64 [b-1], drawn from `draft_probs` [b-1, V].
        target_probs: [b, V]; row k is the target's distribution after k drafts.

    Returns:
        (number of leading drafts accepted, the token that follows them), int64 scalars on the device.
    """
    column = drafts[:, None]
    p, q = target_probs[:-1].gather(-1, column)[:, 0], draft_probs.gather(-1, column)[:, 0]
    uniform = torch.rand(p.shape, device=p.device, dtype=p.dtype, generator=generator)
    accepted = (uniform * q < p).long().cumprod(0).sum(0, keepdim=True)
    # After the last draft nothing was proposed: q is zero there and the remainder is p itself.
    proposed = torch.cat((draft_probs, torch.zeros_like(target_probs[:1])))
    wanted = target_probs.index_select(0, accepted)[0]
    remainder = (wanted - proposed.index_select(0, accepted)[0]).clamp_(min=0)
    # p equal to q up to rounding leaves nothing; then p is as good.
    remainder = torch.where(remainder.sum() > 0, remainder, wanted)
    return accepted[0], draw(remainder, generator)
