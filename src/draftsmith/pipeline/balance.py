"""Who waits for whom, and what would be faster: the "balance" event of a run.

Shares are of the time between the reports of the first update and of the last, by worker and kind (`clock`): the first
is profiled and fills the queues, and what follows the last, saving above all, is no part of the pipeline's time. With
fewer than `LEAST_UPDATES` between them nothing is said. The sentence compares what the targets can deliver with what
the drafters can take, and asks the same chooser as "auto" for a better use of the same devices. What a row costs is
what "auto" measured, else what the run's own rows took where no two workers share a device; on shared devices nobody
can tell from outside, and only the waiting is told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

from draftsmith.observe.events import Event
from draftsmith.pipeline.clock import WorkerClock, between, shares_of
from draftsmith.pipeline.costs import Costs, Placement, choose, seconds_per_update
from draftsmith.pipeline.topology import place

if TYPE_CHECKING:
    from draftsmith.pipeline.plan import Plan

LEAST_UPDATES = 3
LEAST_ROWS = 3  # of every worker, for its rows to say something
BALANCED = 0.05  # of what the others can do
WORTH_SAYING = 0.02  # of the speed
SHORT = 0.15  # of a role's time


@dataclass(frozen=True)
class _Reading:
    """All clocks at one moment.

    Attributes:
        at: seconds, monotonic.
        step: updates reported.
        spent: seconds by worker and kind, and "rows".
    """

    at: float
    step: int
    spent: dict[str, dict[str, float]]


@dataclass
class Balance:
    """See the module's docstring. A listener of the run's events (`heard`).

    Args:
        clocks: of all workers, named by role and number.
        placement: of targets and drafters.
        devices: that could be used otherwise; fewer than two: none.
        rows: of an update.
        queue: rows that may wait in front of each worker.
        costs: as measured; None: as the run's rows show.
        lacks: why a placement cannot be, "" if it can.
    """

    clocks: Sequence[WorkerClock]
    placement: Placement
    devices: int
    rows: int
    queue: int
    costs: Costs | None = None
    lacks: Callable[[Placement], str] = lambda _placement: ""
    _first: _Reading | None = None
    _last: _Reading | None = None

    def heard(self, event: Event) -> None:
        """Reads the clocks whenever an update is reported."""
        if event["kind"] == "step":
            spent = {clock.worker: {**clock.totals(), "rows": float(clock.rows)} for clock in self.clocks}
            self._last = _Reading(time.monotonic(), event["step"], spent)
            self._first = self._first or self._last

    def to_json(self) -> dict[str, Any] | None:
        """The fields of the event; None: too few updates."""
        first, last = self._first, self._last
        if first is None or last is None or last.step - first.step < LEAST_UPDATES:
            return None
        seconds = last.at - first.at
        spent = {name: between(first.spent[name], own) for name, own in last.spent.items()}
        costs = self.costs if self.costs is not None and self.costs.measured else self._own_costs(spent)
        shares = {
            name: {
                **shares_of(own, seconds),
                "rows": int(own["rows"]),
                "row_ms": round(1e3 * (own["busy"] + own["interpreter"]) / max(1, own["rows"]), 3),
            }
            for name, own in spent.items()
        }
        text = sentence(shares, costs, self.placement, self.devices, self.rows, self.queue, self.lacks)
        told = {"workers": shares, "costs": costs and costs.to_json(), "text": text, "seconds": round(seconds, 1)}
        return {"step": last.step, **told}

    def _own_costs(self, spent: dict[str, dict[str, float]]) -> Costs | None:
        """What a row of this run took; what an update took is part of a drafter's rows."""
        roles = [_of(spent, role) for role in ("target", "drafter")]
        if self.placement.shared or any(own["rows"] < LEAST_ROWS for role in roles for own in role):
            return None
        target, drafter = (
            sum(own["busy"] + own["interpreter"] for own in role) / sum(own["rows"] for own in role) for role in roles
        )
        return Costs(target, drafter, 0.0, source="rows of this run")


def balance_of(plan: Plan, clocks: Sequence[WorkerClock]) -> Balance:
    """Of a run."""
    topology, gpus = plan.topology, [device for device in plan.topology.devices if device.type == "cuda"]
    lacks = plan.lacks(empty=True)
    return Balance(
        clocks,
        topology.placement,
        len(gpus),
        plan.sequence.own_rows,
        plan.config.pipeline.queue,
        topology.costs,
        lambda placement: lacks(place(placement, gpus, "candidate")),
    )


def _of(spent: dict[str, dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [own for name, own in spent.items() if name.startswith(role)]


def sentence(
    workers: dict[str, dict[str, Any]],
    costs: Costs | None,
    placement: Placement,
    devices: int,
    rows: int,
    queue: int,
    lacks: Callable[[Placement], str] = lambda _placement: "",
) -> str:
    """The bottleneck, for people.

    Args:
        workers: shares of each worker's time by kind.
        costs: of a row; None: unknown.
        placement, devices, rows, queue, lacks: see `Balance`.
    """
    text = _short_of_rows(workers)
    if not text:
        text = _slower_role(workers, costs, placement, rows)
        if costs is not None and devices > 1:
            text += _better(costs, placement, devices, rows, queue, lacks)
    slowed = {role: mean(own["interpreter"] for own in _of(workers, role)) for role in ("target", "drafter")}
    role = max(slowed, key=lambda role: slowed[role])
    if slowed[role] > SHORT:
        text += f"; {role}s wait for the interpreter up to {slowed[role]:.0%} of the time"
    return text


def _short_of_rows(workers: dict[str, dict[str, Any]]) -> str:
    """Where neither role is at fault."""
    targets, prefetch = _of(workers, "target"), _of(workers, "prefetch")
    waits, work = mean(own["input"] for own in targets), mean(own["busy"] for own in prefetch) if prefetch else 0.0
    starved = mean(own["input"] for own in _of(workers, "drafter"))
    if waits > SHORT and starved > SHORT and work > 0.5:
        return f"prefetch workers are too slow: targets wait for rows {waits:.0%} of the time; raise pipeline.prefetch"
    return ""


def _slower_role(workers: dict[str, dict[str, Any]], costs: Costs | None, placement: Placement, rows: int) -> str:
    count = {"target": len(placement.targets), "drafter": len(placement.drafters)}
    if placement.targets == placement.drafters and placement.shared:
        busy = mean(own["busy"] + own["interpreter"] for own in _of(workers, "drafter"))
        return f"{placement.name()}; drafters have work {busy:.0%} of the time"
    if costs is None:
        starved, held = (mean(own[kind] for own in _of(workers, role)) for role, kind in _WAITS)
        if max(starved, held) < BALANCED:
            return "nobody waits"
        return (
            f"drafters wait for rows {starved:.0%} of the time"
            if starved > held
            else f"targets are held back {held:.0%} of the time"
        )
    drafting = (math.ceil(rows / count["drafter"]) * costs.drafter + costs.update_of(count["drafter"])) / rows
    ratio = (costs.target / count["target"]) / drafting
    slow, other = ("target", "drafter") if ratio > 1 else ("drafter", "target")
    factor = max(ratio, 1 / ratio)
    if factor < 1 + BALANCED:
        return f"{_many('target', count)} and {_many('drafter', count)} are balanced"
    verb = "is" if count[slow] == 1 else "are"
    subject = f"the {slow}" if count[slow] == 1 else f"{slow}s"
    return f"{subject} {verb} {factor:.1f}× too slow for {_many(other, count)}"


_WAITS = (("drafter", "input"), ("target", "output"))


def _many(role: str, count: dict[str, int]) -> str:
    return f"{count[role]} {role}{'' if count[role] == 1 else 's'}"


def _better(
    costs: Costs,
    placement: Placement,
    devices: int,
    rows: int,
    queue: int,
    lacks: Callable[[Placement], str],
) -> str:
    now = seconds_per_update(costs, placement, rows, queue) / rows
    best = choose(costs, devices, rows, queue, lacks)[0]
    gain = now / best.seconds - 1
    if best.lacks or gain < WORTH_SAYING:
        return f": no other use of these {devices} devices would be faster"
    return f": {best.placement.name()} would give +{100 * gain:.0f} %"
