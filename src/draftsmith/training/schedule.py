"""Learning rate by step, as a factor on the configured one.

Warm-up is linear. cosine falls to `final_lr` over the rest, wsd holds and then falls linearly over the last `decay`
share, constant holds. A pure function of the step, so that resuming needs no state.
"""

from __future__ import annotations

import math

from draftsmith.config import OptimizerConfig


def learning_rate_factor(config: OptimizerConfig, step: int, steps: int) -> float:
    """Factor for update `step` (0-based) of `steps`; never 0 at the first update."""
    warmup = round(config.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "cosine":
        progress = (step - warmup) / max(1, steps - warmup)
        return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    decay = max(1, round(config.decay * steps))
    left = (steps - step) / decay
    return config.final_lr + (1 - config.final_lr) * min(1.0, left)
