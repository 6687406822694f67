"""Are sampled answers distributed as the target alone would have sampled them? A test with a p-value.

Every token x of an answer is turned into u = (mass of the tokens before x in some fixed order) + v · p(x), where p is
the target's own distribution behind the tokens before it (shaped as asked for) and v is uniform. If, and only if, x was
drawn from p, u is uniform on [0, 1), whatever the tokens before it: so all tokens of all answers go into one
Kolmogorov-Smirnov test, and no second set of answers is needed. Two orders are tried, because one alone can be blind:
likeliest first shows drafts that are accepted too easily or too rarely, token number shows everything else. The p-value
is twice the smaller of the two (Bonferroni).

Cost: one target forward per answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode.sampling import Sampling

# Below this a right decoder fails once in a thousand evaluations.
SIGNIFICANT = 1e-3
# Rounding may put a token of the border of top-k or top-p on its other side.
_BORDER = 2e-3


@dataclass(frozen=True)
class DistributionTest:
    """Result of `check_distribution`.

    Attributes:
        p_value: probability of so large a deviation if the answers are the target's own.
        tokens: tested.
        impossible: tokens that the target would never have said.
    """

    p_value: float
    tokens: int
    impossible: int

    @property
    def passed(self) -> bool:
        """Nothing speaks against the answers being the target's own."""
        return self.p_value >= SIGNIFICANT


@torch.inference_mode()
def check_distribution(
    target: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], sampling: Sampling, seed: int = 0
) -> DistributionTest:
    """Tests sampled answers against the target; see the module's docstring.

    Args:
        prompts, answers: token ids, one answer to each prompt, drawn with random numbers of their own.
        sampling: as asked for; not greedy.
        seed: of v.
    """
    generator = torch.Generator().manual_seed(seed)
    by_mass, by_number, impossible = [], [], 0
    for prompt, answer in zip(prompts, answers, strict=True):
        if not answer:
            continue
        ids = torch.tensor([[*prompt, *answer]], device=target.device)
        logits = target.model(ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
        probs = sampling.probabilities(logits).double().cpu()
        token = torch.tensor(list(answer))[:, None]
        own = probs.gather(1, token)[:, 0]
        said = own > 0
        impossible += int((~said).sum())
        likelier = (probs > own[:, None]) | ((probs == own[:, None]) & (torch.arange(probs.shape[1]) < token))
        lower = torch.arange(probs.shape[1]) < token
        noise = torch.rand(own.shape, generator=generator, dtype=torch.float64) * own
        by_mass.append(((probs * likelier).sum(1) + noise)[said])
        by_number.append(((probs * lower).sum(1) + noise)[said])
    if not by_mass:
        return DistributionTest(1.0, 0, impossible)
    tokens = sum(part.numel() for part in by_mass)
    if impossible > max(2.0, _BORDER * (tokens + impossible)):
        return DistributionTest(0.0, tokens, impossible)
    smaller = min(uniform_p(torch.cat(by_mass)), uniform_p(torch.cat(by_number)))
    return DistributionTest(min(1.0, 2 * smaller), tokens, impossible)


def uniform_p(values: Tensor) -> float:
    """p-value of the Kolmogorov-Smirnov test that `values` [n] are uniform on [0, 1); good from a few dozen on."""
    ordered = values.double().sort().values.clamp(0, 1)
    count = ordered.numel()
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = float(torch.maximum((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))
    # Stephens' correction for finite n.
    scaled = distance * (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count))
    if scaled < 0.2:
        return 1.0
    series = sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * series))
