"""`target.precision: fp8` of a run: refused where it cannot be before anything is loaded, done right after loading.

Only targets that train are lowered. The process that decodes while training keeps the weights as they are, for it
measures what will be served; and `draftsmith data features` writes features of the plain weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from draftsmith.config import RunConfig
from draftsmith.errors import UserError
from draftsmith.target import fp8
from draftsmith.target.forward import Target

if TYPE_CHECKING:
    from draftsmith.pipeline.plan import Plan

ROWS = 2  # of the run's data, on which features are compared


def check_precision(config: RunConfig, devices: tuple[torch.device, ...], dtype: torch.dtype) -> None:
    """Refuses what is plain before loading.

    Raises:
        UserError: fp8 is asked for and a target's device or dtype cannot do it.
    """
    if config.target.precision != "fp8":
        return
    for device in dict.fromkeys(devices):
        why = fp8.missing(device, dtype)
        if why:
            raise UserError(f"fp8 is not possible: {why}", where="target.precision", fix="leave out target.precision")


def lower_target(plan: Plan, target: Target, *, compare: bool = True) -> None:
    """Puts a loaded target into the precision that the plan asks for, and says so in its remarks.

    Args:
        plan: of the run.
        target: plain; it may be cut down to a few layers.
        compare: on rows of the run's data; else nothing is compared (random weights).

    Raises:
        UserError: see `fp8.lower`.
    """
    config = plan.config
    if config.target.precision != "fp8":
        return
    last = target.geometry.layers - 1
    taps = tuple(tap for tap in plan.spec.taps if tap <= last) or (last,)
    source = plan.corpus.train
    rows = [source.row(number) for number in range(min(ROWS, source.rows_per_epoch))] if compare else []
    lowered = fp8.lower(target, taps, rows, config.target.fp8_bound, last_hidden=config.objective.labels != "data")
    target.remarks += (fp8.line_of(lowered, taps, config.target.fp8_bound),)
