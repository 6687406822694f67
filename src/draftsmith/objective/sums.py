"""Additive sums of one or many rows: the loss's numerator and denominator, and what acceptance is read from.

Sums of rows, replicas and ranks add up; ratios are formed once, by whoever reads them. They stay one tensor on the
device, so that a step needs no host sync.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """float32 [3 + 3·B]: Σ w·loss, Σ w, blocks, then per slot: taught, correct, accepted."""

    values: Tensor

    @staticmethod
    def size(block_size: int) -> int:
        return 3 + 3 * block_size

    @staticmethod
    def collect(weighted_loss: Tensor, weight: Tensor, taught_NB: Tensor, correct_NB: Tensor) -> Sums:
        """From one row.

        Args:
            weighted_loss, weight: scalars Σ w·loss and Σ w.
            taught_NB: bool; blocks without a taught slot are not counted.
            correct_NB: bool; the drafter's first choice equals the label.
        """
        right = taught_NB & correct_NB
        accepted = right[:, 1:].to(torch.float32).cumprod(1)
        accepted = torch.nn.functional.pad(accepted, (1, 0))
        per_slot = torch.cat((taught_NB.float().sum(0), right.float().sum(0), accepted.sum(0)))
        head = torch.stack((weighted_loss.float(), weight.float(), taught_NB.any(1).float().sum()))
        return Sums(torch.cat((head, per_slot)))

    @property
    def weight(self) -> Tensor:
        """Σ w, a scalar tensor on the device."""
        return self.values[1]

    def summary(self) -> dict[str, float | list[float]]:
        """Readable ratios; synchronises if the sums are on a GPU.

        Returns:
            loss: Σ w·loss / Σ w.
            tau_proxy: mean accepted prefix + 1 over uniform anchors; usually higher than the true τ, because decoding
                visits few blocks in easy text.
            accept_by_slot: share of the blocks with a label at slot k whose slots 1..k are all correct, k = 1..B-1.
            correct_by_slot: share of the taught slots that are correct, k = 1..B-1.
            blocks: number of blocks.
        """
        values = self.values.double().tolist()
        weighted, weight, blocks = values[:3]
        size = (len(values) - 3) // 3
        taught, correct, accepted = (values[3 + i * size : 3 + (i + 1) * size] for i in range(3))
        nan = float("nan")
        return {
            "loss": weighted / weight if weight else nan,
            "tau_proxy": 1.0 + sum(accepted) / blocks if blocks else nan,
            "accept_by_slot": [a / t if t else nan for a, t in zip(accepted[1:], taught[1:], strict=True)],
            "correct_by_slot": [c / t if t else nan for c, t in zip(correct[1:], taught[1:], strict=True)],
            "blocks": blocks,
        }
