"""Out of memory, in one line: which device, what to lower, and what each of it would save there.

The savings are differences of the plan's own estimate (`memory`) with one setting changed, on the device that is full:
what would change nothing there is not named. Weights that were loaded are not counted twice; the estimate is for the
whole run, so the line is the same whether the device filled up while loading, in the warm-up or later.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator

import torch

from draftsmith.config import RunConfig
from draftsmith.errors import UserError
from draftsmith.pipeline.memory import GIB, estimate_memory
from draftsmith.pipeline.plan import Plan

_NAMED = 4
_LEAST = 0.005 * GIB  # what saves less rounds to nothing
_TILE = 128  # rows and draft slots come in tiles of so many
# torch says it in a plain RuntimeError where the CPU, a library's workspace or page-locked memory is full.
_SIGNS = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is full, of a device or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def asked_for(error: BaseException) -> str:
    """ ", asking for 2.00 GiB", if the exception says so; else ""."""
    asked = re.search(r"tried to allocate ([\d.]+ ?[KMG]i?B|\d+ bytes)", str(error), re.IGNORECASE)
    return f", asking for {asked[1]}" if asked else ""


def explain(plan: Plan, error: BaseException, who: str = "", device: torch.device | None = None) -> UserError:
    """The line.

    Args:
        plan: of the run.
        error: what `is_out_of_memory` knows.
        who: the worker; "" before there are any.
        device: its device; None: as the error says.
    """
    device = device or _device_named(error, plan)
    on_host = device not in plan.topology.devices
    ways = [] if on_host else savings(plan, device)
    fix = "; ".join(f"{what} saves about {size / GIB:.2f} GiB" for what, size in ways[:_NAMED])
    if on_host:
        fix = "lower pipeline.prefetch or pipeline.queue: rows that are made ahead are what the run keeps on the host"
    return UserError(
        f"{who or 'the run'} ran out of memory on {device}{asked_for(error)}",
        where="pipeline",
        fix=fix or "nothing that can be lowered takes much of it: use a larger or further device",
    )


def savings(plan: Plan, device: torch.device) -> list[tuple[str, int]]:
    """(setting, bytes that it saves on a device), the largest first; only what saves something."""
    before = _estimate(plan, plan.config, device)
    found = [(what, before - _estimate(plan, config, device)) for what, config in _lowered(plan)]
    return sorted(((what, size) for what, size in found if size > _LEAST), key=lambda way: -way[1])


def _estimate(plan: Plan, config: RunConfig, device: torch.device) -> int:
    estimates = estimate_memory(
        config,
        plan.topology,
        plan.geometry,
        plan.spec,
        plan.parameters,
        plan.dtype,
        plan.target_dtype,
        plan.attention,
    )
    return sum(each.total for each in estimates if each.device == str(device))


def _lowered(plan: Plan) -> Iterator[tuple[str, RunConfig]]:
    """Every setting that takes memory, lowered by itself: by half, or switched."""
    config = plan.config
    slots = plan.spec.block_size
    tile = _TILE if plan.attention == "flex" else 1
    anchors = _half(config.rows.anchors, tile // math.gcd(tile, slots))
    length = _half(config.rows.length, max(tile, 16))
    if length <= config.rows.anchors:  # which no config may say
        length = config.rows.length
    chunk = max(slots - 1, config.head_chunk(slots) // 2)
    # What the settings are, and what they would be.
    for section, name, now, then in (
        ("rows", "anchors", config.rows.anchors, anchors),
        ("rows", "length", config.rows.length, length),
        ("objective", "chunk", config.head_chunk(slots), chunk),
        ("training", "activation_checkpointing", config.training.activation_checkpointing, True),
        ("pipeline", "queue", config.pipeline.queue, 1),
    ):
        if then != now:
            value = str(then).lower()
            changed = getattr(config, section).model_copy(update={name: then})
            yield f"{section}.{name}={value}", config.model_copy(update={section: changed})
    if config.decoding.every:
        changed = config.decoding.model_copy(update={"every": 0})
        yield "decoding.every=0", config.model_copy(update={"decoding": changed})


def _half(value: int, step: int) -> int:
    """About half of a size, in whole steps, at least one and never more than it is."""
    return min(value, max(step, value // 2 // step * step))


def _device_named(error: BaseException, plan: Plan) -> torch.device:
    devices = plan.topology.devices
    named = re.search(r"\bGPU (\d+)\b", str(error))
    if named and torch.device("cuda", int(named[1])) in devices:
        return torch.device("cuda", int(named[1]))
    kind = "cpu" if isinstance(error, MemoryError) or "CPU" in str(error) else "cuda"
    return next((device for device in devices if device.type == kind), devices[0])


@contextlib.contextmanager
def explained(plan: Plan) -> Iterator[None]:
    """Turns what memory does not hold, wherever inside, into the line."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise explain(plan, error) from error
