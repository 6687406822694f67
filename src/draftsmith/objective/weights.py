"""Slot weights: how much the k-th token of a block counts.

- decay: w_k = exp(-(k-1)/γ), fixed (DFlash paper, eq. 4).
- dpace: from the drafter's own probabilities, so that a slot counts as much as decoding is likely to reach it and the
  slots behind it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def default_gamma(block_size: int) -> float:
    """γ by block size: 7 for 16, 4 for 8, otherwise 0.45·B."""
    return {16: 7.0, 8: 4.0}.get(block_size, 0.45 * block_size)


def decay_weights(block_size: int, gamma: float | None = None) -> Tensor:
    """float32 [B]; slot 0 is never taught and weighs 0."""
    gamma = default_gamma(block_size) if gamma is None else gamma
    return torch.tensor([0.0] + [math.exp(-(slot - 1) / gamma) for slot in range(1, block_size)])


def dpace_weights(loss_NB: Tensor, taught_NB: Tensor, alpha: float) -> Tensor:
    """D-PACE weights [N, B], detached; 0 where not taught.

    With q = exp(-CE) and s = (1-α)·q + α: w_k = Σ over taught m ≥ k of Π_{i ≤ m} s_i, where an untaught slot
    contributes the factor 1 and no term.

    Args:
        loss_NB: float32 cross-entropy of each slot against its data token.
        taught_NB: bool.
        alpha: α, the floor of a factor.
    """
    survival = torch.where(taught_NB, (1.0 - alpha) * torch.exp(-loss_NB) + alpha, 1.0).cumprod(1)
    terms = torch.where(taught_NB, survival, 0.0)
    reached = terms.flip(1).cumsum(1).flip(1)
    return torch.where(taught_NB, reached, 0.0).detach()
