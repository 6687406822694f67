"""Whether weights and optimizer state hold only numbers, and what is said if they do not.

Cost: one pass over memory without a copy, and one read from each device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftsmith.errors import UserError


@torch.no_grad()
def first_not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Name of the first tensor that holds an infinity or what is no number; "" if none does."""
    names: dict[torch.device, list[str]] = {}
    extremes: dict[torch.device, list[Tensor]] = {}
    for name, value in tensors.items():
        if value.is_floating_point() and value.numel():
            names.setdefault(value.device, []).append(name)
            extremes.setdefault(value.device, []).append(torch.stack(torch.aminmax(value)).float())
    broken = {
        name
        for device, pairs in extremes.items()
        for name, fine in zip(names[device], torch.stack(pairs).isfinite().all(1).tolist(), strict=True)
        if not fine
    }
    return next((name for name in tensors if name in broken), "")


def broken_weights(step: int, name: str, checkpoint: int | None) -> UserError:
    """What a run ends with whose weights are broken: no row is to blame, and no further update can mend them.

    Args:
        step: the first that shows it.
        name: of what is not finite.
        checkpoint: updates of the newest checkpoint, which is a good one; None: there is none.
    """
    if checkpoint is None:
        fix = "there is no checkpoint: start again, with a lower optimizer.lr or longer optimizer.warmup"
    else:
        fix = f"go back to checkpoint step {checkpoint} with --resume; if it comes again, lower optimizer.lr"
    return UserError(f"the drafter's weights are not finite since step {step} ({name})", where="training", fix=fix)
