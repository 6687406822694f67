"""The pipeline itself, with work that only takes time: the same worker threads, links, hand-off and exchange.

Two clocks. With `sleeping` everybody sleeps for as long as the work would take, and the result is what a clock on the
wall says. Otherwise time is only counted: every thread has a time of its own, a row carries the time at which it was
ready, a link remembers when a row was taken, and replicas that meet go on at the latest of their times. Threads then
run as fast as they can, and the result is the same whatever the machine does. It holds for workers with a device each.

What it is for: `costs.seconds_per_update` plays the same rules in a loop, and this says whether it plays them right.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from draftsmith.objective import Sums
from draftsmith.pipeline.costs import Costs
from draftsmith.pipeline.handoff import HandOff
from draftsmith.pipeline.jobs import JobSequence
from draftsmith.pipeline.link import Link, Stop
from draftsmith.pipeline.sync import Exchange
from draftsmith.pipeline.workers import DrafterWorker, PrefetchWorker, TargetWorker, Worker
from draftsmith.target.forward import Features

CPU = torch.device("cpu")
BLOCK = 2  # slots of a block: the sums are as small as can be


class _Time(threading.local):
    """Of the thread that asks."""

    now: float = 0.0

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def at_least(self, moment: float) -> None:
        self.now = max(self.now, moment)


class _WallTime:
    """The machine's."""

    @property
    def now(self) -> float:
        return time.monotonic()

    def spend(self, seconds: float) -> None:
        time.sleep(seconds)

    def at_least(self, moment: float) -> None:
        """It is."""


class _TimedLink(Link[Any]):
    """A link that knows when, in counted time, a row was ready, and when it was taken."""

    def __init__(self, first: int, stride: int, capacity: int, stop: Stop, clock: _Time | _WallTime) -> None:
        super().__init__(first, stride, capacity, stop)
        self._clock = clock
        self._taken: dict[int, float] = {}

    def reserve(self, number: int, size: int = 0) -> None:
        super().reserve(number, size)
        self._clock.at_least(self._taken.get(number - self._capacity * self._stride, 0.0))

    def put(self, number: int, item: Any) -> None:
        with self._changed:
            if number not in self._reserved:
                self.reserve(number)
            super().put(number, (item, self._clock.now))

    def take(self, number: int) -> Any:
        with self._changed:
            item, ready = super().take(number)
            self._clock.at_least(ready)
            self._taken[number] = self._clock.now
            return item


class _TimedExchange(Exchange):
    """Replicas go on at the latest of their times."""

    clock: _Time | _WallTime

    def meet(self, index: int, value: Any = None) -> list[Any]:
        met = super().meet(index, (value, self.clock.now))
        self.clock.at_least(max(moment for _, moment in met))
        return [value for value, _ in met]


class _Target:
    device = CPU

    def __init__(self, seconds: float, clock: _Time | _WallTime) -> None:
        self._seconds, self._clock = seconds, clock

    def features(self, *_row: Any, **_more: Any) -> Features:
        self._clock.spend(self._seconds)
        return Features(torch.zeros(1, 1))


class _Replica:
    model = torch.nn.Module()

    def __init__(self, seconds: float, clock: _Time | _WallTime) -> None:
        self._seconds, self._clock = seconds, clock

    def step(self, *_row: Any, **_more: Any) -> Sums:
        self._clock.spend(self._seconds)
        return Sums(torch.zeros(Sums.size(BLOCK)))


class _Update:
    device = CPU

    def __init__(self, seconds: float, clock: _Time | _WallTime) -> None:
        self._seconds, self._clock = seconds, clock

    def accumulate(self, **_which: bool) -> None:
        """Part of a row's time."""

    def reduce(self, *_replicas: Any, **_more: Any) -> Tensor:
        return torch.zeros(())

    def apply(self, *_factors: Any) -> None:
        self._clock.spend(self._seconds)

    def refresh(self, *_replicas: Any) -> None:
        """Part of the update's time."""


class _Progress:
    """Only notes when updates ended."""

    not_finite = SimpleNamespace(note=lambda *_row: None)

    def __init__(self, clock: _Time | _WallTime) -> None:
        self._clock = clock
        self.ends: list[float] = []
        self.began = 0.0

    def begin(self) -> None:
        self.began = self._clock.now

    def stepped(self, *_figures: Any) -> None:
        self.ends.append(self._clock.now - self.began)

    def wants_end(self, _update: int) -> bool:
        return False

    def saves_after(self, _update: int) -> bool:
        return False

    def lr_factor(self, _update: int) -> float:
        return 1.0

    def count_tokens(self, _tokens: int) -> None:
        """Of no interest."""

    def flush(self) -> None:
        """Nothing is on its way."""


class _NothingToCompile:
    def warm_up(self, _index: int) -> None:
        """Everything is warm."""

    @contextlib.contextmanager
    def around(self, _index: int, _update: int) -> Iterator[None]:
        yield

    def tell_late(self) -> None:
        """Nothing has compiled."""


def simulate(
    costs: Costs, targets: int, drafters: int, rows: int, queue: int, updates: int, *, sleeping: bool = False
) -> list[float]:
    """Seconds from the start to the end of each update.

    Args:
        costs: of the work; copies take none.
        targets, drafters: T and D, each on a device of its own.
        rows: R, of an update.
        queue: rows that may wait in front of each worker.
        updates: how many.
        sleeping: whether time passes, or is counted.
    """
    clock: Any = _WallTime() if sleeping else _Time()
    stop, sequence, progress = Stop(), JobSequence(updates, rows, 0, 0), _Progress(clock)
    before: list[Link[Any]] = [_TimedLink(i, targets, queue, stop, clock) for i in range(targets)]
    between: list[Link[Any]] = [_TimedLink(i, drafters, queue, stop, clock) for i in range(drafters)]
    stepped: Any = [_Update(costs.update_of(drafters), clock) for _ in range(drafters)]
    exchange = _TimedExchange(stepped, stop)
    exchange.clock = clock
    batch: Any = SimpleNamespace(real_tokens=1, to=lambda *_device, **_more: batch)
    row: Any = SimpleNamespace(tokens_S=None, document_S=None, positions_S=None)
    workers: list[Worker] = [PrefetchWorker(0, 1, sequence, 0, lambda _job: (row, batch), before, stop, pin=False)]
    hand_offs = [HandOff(CPU, torch.float32) for _ in range(drafters)]
    for index in range(targets):
        target: Any = _Target(costs.target, clock)
        workers.append(
            TargetWorker(index, target, (0,), False, sequence, 0, before[index], targets, between, hand_offs, stop)
        )
    for index in range(drafters):
        replica, told, compiling = _Replica(costs.drafter, clock), progress, _NothingToCompile()
        own: Any = (replica, BLOCK, CPU, sequence, 0, between[index], hand_offs[index], exchange, told, compiling, stop)
        workers.append(DrafterWorker(index, *own))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if stop.cause is not None:
        raise stop.cause
    return progress.ends
