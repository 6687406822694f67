"""AdamW on flat float32 buffers, in torch's operators: what runs where Triton does not, and the twin of what does.

    g = scale · gradient                        scale = clip factor / Σ w
    m = m + (1 - β₁)(g - m)
    v = β₂ v + (1 - β₂) g²
    w = (1 - lr · decay) w - step_size · m / (√v · root + ε)
                                                step_size = lr / (1 - β₁ᵗ),  root = 1 / √(1 - β₂ᵗ)

What depends on the gradient (scale, whether it is finite at all, and with it the number t of steps) stays on the device
as `factors`, so the host waits for nothing. A step whose gradient is not finite changes nothing, t included.
Costs a dozen passes over memory; pieces of `PIECE` elements keep them in a CPU's cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = {"cpu": 2**17}  # elements; on other devices a launch costs more than what a cache would save
LARGE_PIECE = 2**26
GO, SCALE, STEP_SIZE, ROOT = range(4)  # places in `factors`


class StepCount:
    """The number of AdamW steps done, on the device.

    Args:
        betas: decay of the two moments.
        device: of the buffers.

    Attributes:
        steps: float32 [], whole numbers: exact up to 2²⁴.
    """

    def __init__(self, betas: tuple[float, float], device: torch.device) -> None:
        self.steps = torch.zeros((), device=device)
        self._betas = torch.tensor(betas, dtype=torch.float64, device=device)

    def factors(self, go: Tensor, scale: Tensor, lr: float) -> Tensor:
        """Counts a step and returns its `factors`, float32 [4].

        Args:
            go: bool []: whether the step counts.
            scale: float32 []: of the gradient.
            lr: learning rate of this step.
        """
        self.steps += go
        # In float64: 1 - 0.999 loses four of float32's seven digits.
        left = 1 - self._betas ** self.steps.double()
        step_size, root = lr / left[0], left[1].rsqrt()
        wanted = torch.stack((torch.ones_like(root), scale.double(), step_size, root)).float()
        return torch.where(go, wanted, 0.0)


def adamw_step(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    factors: Tensor,
    betas: tuple[float, float],
    eps: float,
    keep: float,
) -> None:
    """One step in place.

    Args:
        master, exp_avg, exp_avg_sq: float32 [n].
        gradient: float32 [n], read only; may be anything where factors[GO] is 0.
        factors: from `StepCount.factors`.
        betas, eps: AdamW's.
        keep: 1 - lr · decay.
    """
    go = factors[GO]
    first, second = (1 - betas[0]) * go, torch.where(go > 0, betas[1], 1.0)
    root = torch.where(go > 0, factors[ROOT], 1.0)
    kept = torch.where(go > 0, keep, 1.0) if keep != 1 else None
    piece = PIECE.get(master.device.type, LARGE_PIECE)
    for start in range(0, master.numel(), piece):
        w, m, v, g = (flat[start : start + piece] for flat in (master, exp_avg, exp_avg_sq, gradient))
        g = torch.where(go > 0, g * factors[SCALE], 0.0)
        m.lerp_(g, first)
        v.mul_(second).addcmul_(g, g, value=1 - betas[1])
        if kept is not None:
            w.mul_(kept)
        w.sub_((m / v.sqrt().mul_(root).add_(eps)).mul_(factors[STEP_SIZE]))
