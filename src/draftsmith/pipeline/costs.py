"""What the work of one row costs, and how fast a pipeline with these costs is.

`Costs` are seconds, measured (`measure`) or counted. `seconds_per_update` plays the pipeline through in them: targets
and drafters as the workers are (job j at target j mod T and drafter j mod D, links that hold so many rows, replicas
that meet once an update), work on a device that several share slowed down by their number. It needs no device and no
threads: some thousands of events, milliseconds. `choose` plays through every way to use so many devices and takes the
fastest that fits.

What the figure is near to, without queues: max(target/T, (⌈R/D⌉·drafter + update(D)) / R) for T + D devices, and with
both roles on each of n about (target + drafter)/n + update(n)/R.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.config import RunConfig
from draftsmith.drafter import DrafterSpec
from draftsmith.target.geometry import TargetGeometry

AWAY = 1e-9  # of the work left counts as done
SETTLE, WINDOW = 24, 48  # rows that are played before, and that are counted; two updates at least
FILL = 100  # rows of each device, where roles share it: until queues are full, targets take more than their part of it
PEAK, BANDWIDTH, LINK = 4e14, 2e12, 5e10  # FLOP/s, bytes/s of memory and between devices: only proportions count


@dataclass(frozen=True)
class Costs:
    """Seconds, each on a device that does nothing else.

    Attributes:
        target: of a row through a target.
        drafter: of a row through a drafter: forward, backward, and adding its gradients up.
        update: of an update of all parameters on one device.
        exchange: of sending all gradients and getting all weights back, from one device to another.
        copy: of sending a row's features from one device to another.
        tokens: real tokens of a row, on average.
        source: "measured", or how they were come by.
    """

    target: float
    drafter: float
    update: float
    exchange: float = 0.0
    copy: float = 0.0
    tokens: float = 0.0
    source: str = "measured"

    @property
    def measured(self) -> bool:
        return self.source == "measured"

    def update_of(self, replicas: int, devices: int | None = None) -> float:
        """Seconds of an update that so many replicas share, on a device each unless said otherwise: each steps its
        part, and gets the others'."""
        devices = replicas if devices is None else devices
        return self.update / replicas + self.exchange * (devices - 1) / devices

    def bound(self, targets: int, drafters: int, rows: int) -> float:
        """The least seconds a row of T targets and D drafters on devices of their own, with R rows an update."""
        drafting = math.ceil(rows / drafters) * self.drafter + self.update_of(drafters)
        return max(self.target / targets, drafting / rows)

    def line(self) -> str:
        """For people."""
        parts = [f"{1e3 * self.target:.1f} ms a row on a target", f"{1e3 * self.drafter:.1f} on a drafter"]
        parts.append(f"{1e3 * self.update:.1f} an update")
        if self.exchange:
            parts.append(f"{1e3 * self.exchange:.1f} for gradients there and weights back")
        if self.copy:
            parts.append(f"{1e3 * self.copy:.2f} for a row's features from device to device")
        return f"{', '.join(parts)} ({self.source})"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Placement:
    """Who works where, by the number of the device."""

    targets: tuple[int, ...]
    drafters: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """Whether some device has more than one worker."""
        return len({*self.targets, *self.drafters}) < len(self.targets) + len(self.drafters)

    def name(self) -> str:
        """For people: "5 + 3", or "both roles on each of 2 devices"."""
        if self.targets == self.drafters and len(set(self.targets)) == len(self.targets):
            count = len(self.targets)
            return "both roles on one device" if count == 1 else f"both roles on each of {count} devices"
        return f"{len(self.targets)} + {len(self.drafters)}"


def split(targets: int, drafters: int) -> Placement:
    """T targets and D drafters, each on a device of its own."""
    return Placement(tuple(range(targets)), tuple(range(targets, targets + drafters)))


def together(devices: int) -> Placement:
    """Both roles on every device."""
    return Placement(tuple(range(devices)), tuple(range(devices)))


@dataclass
class _Worker:
    """One target or drafter as it is played."""

    role: str
    index: int
    device: int
    job: int  # the next, or the one at work
    left: float = 0.0  # seconds of work
    state: str = "idle"  # "work", "put" (a target with a finished row), "meet", "update", "updated"


class _Play:
    """The state of one pipeline. Every step is deterministic: workers are looked at in a fixed order."""

    def __init__(self, costs: Costs, placement: Placement, rows: int, queue: int) -> None:
        self.costs, self.rows, self.queue = costs, rows, queue
        self.target_count, self.drafter_count = len(placement.targets), len(placement.drafters)
        self.targets = [_Worker("target", i, device, i) for i, device in enumerate(placement.targets)]
        self.drafters = [_Worker("drafter", i, device, i) for i, device in enumerate(placement.drafters)]
        self.update = costs.update_of(self.drafter_count, len({*placement.drafters}))
        self.ready: dict[int, float] = {}  # rows that wait in a link, and when their features have arrived
        self.ends: list[float] = []  # of the updates
        self.now = 0.0

    def run(self, updates: int) -> list[float]:
        while len(self.ends) < updates:
            while self._begin():
                pass
            self._pass_time()
        return self.ends

    def _begin(self) -> bool:
        """Lets everybody go on who can; whether somebody did."""
        went = False
        for target in self.targets:
            if target.state == "idle":
                target.state, target.left, went = "work", self.costs.target, True
            elif target.state == "put" and self._room(target.job):
                drafter = self.drafters[target.job % self.drafter_count]
                away = self.costs.copy if drafter.device != target.device else 0.0
                self.ready[target.job] = self.now + away
                target.job += self.target_count
                target.state, went = "idle", True
        done = len(self.ends)
        for drafter in self.drafters:
            if drafter.state != "idle":
                continue
            if drafter.job >= (done + 1) * self.rows:
                drafter.state, went = "meet", True
            elif self.ready.get(drafter.job, math.inf) <= self.now:
                del self.ready[drafter.job]
                drafter.job += self.drafter_count
                drafter.state, drafter.left, went = "work", self.costs.drafter, True
        if all(drafter.state == "meet" for drafter in self.drafters):
            for drafter in self.drafters:
                drafter.state, drafter.left = "update", self.update
            went = True
        return went

    def _room(self, job: int) -> bool:
        drafter = self.drafters[job % self.drafter_count]
        # Where a drafter has its next job, its link has its next number.
        return job - drafter.job < self.queue * self.drafter_count

    def _pass_time(self) -> None:
        active = [each for each in (*self.targets, *self.drafters) if each.state in ("work", "update")]
        load: dict[int, int] = {}
        for each in active:
            load[each.device] = load.get(each.device, 0) + 1
        steps = [each.left * load[each.device] for each in active]
        steps += [at - self.now for at in self.ready.values() if at > self.now]
        assert steps, "everybody waits for everybody"
        step = min(steps)
        self.now += step
        for each in active:
            each.left -= step / load[each.device]
            if each.left > AWAY * max(self.costs.target, self.costs.drafter, self.update):
                continue
            if each.state == "update":
                each.state = "updated"
            else:
                each.state = "put" if each.role == "target" else "idle"
        if all(drafter.state == "updated" for drafter in self.drafters):
            self.ends.append(self.now)
            for drafter in self.drafters:
                drafter.state = "idle"


def seconds_per_update(costs: Costs, placement: Placement, rows: int, queue: int) -> float:
    """How long an update of R rows takes once the pipeline is full.

    Args:
        costs: of the work.
        placement: workers by device; there are no more drafters than rows.
        rows: R.
        queue: rows that may wait in front of each drafter.
    """
    assert len(placement.drafters) <= rows, "a drafter would never get a row"
    turns = math.lcm(len(placement.targets), len(placement.drafters))
    period = turns // math.gcd(turns, rows)  # updates after which the same rows meet the same workers again
    before = FILL * len(placement.drafters) if placement.shared else SETTLE
    settle, window = (period * math.ceil(max(2, math.ceil(count / rows)) / period) for count in (before, WINDOW))
    ends = _Play(costs, placement, rows, queue).run(settle + window)
    return (ends[-1] - ends[settle - 1]) / window


@dataclass(frozen=True)
class Choice:
    """One way to use the devices, and what it is worth.

    Attributes:
        placement: workers by device.
        seconds: a row.
        tokens_per_second: real tokens.
        lacks: why it cannot be, "" if it can.
    """

    placement: Placement
    seconds: float
    tokens_per_second: float
    lacks: str = ""


def candidates(devices: int, rows: int) -> list[Placement]:
    """Every split of the devices, and both roles on every one of them; no more drafters than rows of an update."""
    found = [split(devices - drafters, drafters) for drafters in range(1, min(rows, devices - 1) + 1)]
    return found + ([together(devices)] if devices <= rows else [])


def choose(
    costs: Costs,
    devices: int,
    rows: int,
    queue: int,
    lacks: Callable[[Placement], str] = lambda _placement: "",
) -> list[Choice]:
    """All candidates, the best that fits first; those that do not fit are last.

    Args:
        costs: of the work.
        devices: how many there are, all alike.
        rows: of an update.
        queue: rows that may wait in front of each drafter.
        lacks: why a placement cannot be, "" if it can.
    """
    found = []
    for placement in candidates(devices, rows):
        seconds = seconds_per_update(costs, placement, rows, queue) / rows
        found.append(Choice(placement, seconds, costs.tokens / seconds, lacks(placement)))
    # Of equal ones the one with fewer drafters: less to exchange, less memory.
    return sorted(found, key=lambda each: (bool(each.lacks), each.seconds, len(each.placement.drafters)))


def reason_of(choices: list[Choice], costs: Costs) -> str:
    """Why the first of them: its figure, the runner-up's, and what did not fit."""
    best, *others = choices
    parts = [best.placement.name()]
    if costs.tokens:
        parts[0] += f": {_figure(best)} predicted"
    runner = next((each for each in others if not each.lacks), None)
    if runner is not None:
        figure = _figure(runner) if costs.tokens else f"{runner.seconds / best.seconds - 1:+.0%} time a row"
        parts.append(f"next best {runner.placement.name()}, {figure}")
    faster = [each for each in others if each.lacks and each.seconds < best.seconds]
    parts += [f"{each.placement.name()} would be faster but {each.lacks}" for each in faster[:1]]
    return f"{'; '.join(parts)}; {costs.line()}"


def _figure(choice: Choice) -> str:
    return f"{choice.tokens_per_second:,.0f} real tok/s"


def counted_costs(config: RunConfig, geometry: TargetGeometry, spec: DrafterSpec, parameters: int, size: int) -> Costs:
    """Arithmetic and traffic over round figures: what "auto" plans with until something was measured.

    Args:
        config, geometry, spec: of the run.
        parameters: of the drafter.
        size: bytes of a weight.
    """
    length, queries, hidden = config.rows.length, config.rows.anchors * spec.block_size, geometry.hidden_size
    depth = geometry.layers if config.objective.labels != "data" else max(spec.taps) + 1
    own = 2 * spec.hidden_size * spec.head_dim * (spec.heads + spec.kv_heads)
    own += 3 * spec.hidden_size * spec.intermediate_size
    context = 2 * spec.hidden_size * spec.head_dim * spec.kv_heads * length * spec.layers
    drafting = 3 * (own * queries * spec.layers + context) + 2 * length * len(spec.taps) * hidden * hidden
    drafting += 2 * queries * geometry.vocab_rows * hidden
    features = length * len(spec.taps) * hidden * size
    return Costs(
        target=2 * geometry.layer_parameters * depth * length / PEAK,
        drafter=2 * drafting / PEAK,
        update=parameters * (24 + 2 * size) / BANDWIDTH,
        exchange=parameters * (4 + size) / LINK,
        copy=features / LINK,
        source="counted, not measured",
    )
