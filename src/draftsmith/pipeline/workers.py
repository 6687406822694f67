"""The three kinds of worker threads: prefetch (makes batches), target (makes features), drafter (learns).

Each handles every n-th job of the sequence and passes its row on through a `Link`:

    prefetch --(row, batch)--> target --(batch, features)--> drafter

On CUDA every worker has its own stream, and features cross streams and devices with events (`handoff`). A thread gives
its device at most two rows ahead (`Pace`); a drafter's takes a row when its features are there. Both waits are asleep,
and neither lets a device run dry: there is a row in front of it.

If one fails: the exception is kept in `Stop`, all links and barriers open, the others leave through `Stopped`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from draftsmith.blocks import DraftBatch, Row
from draftsmith.compiled import Settings
from draftsmith.objective import Sums
from draftsmith.pipeline.clock import Pace, WorkerClock
from draftsmith.pipeline.compiling import Compiling, explained
from draftsmith.pipeline.handoff import Arrived, HandOff
from draftsmith.pipeline.jobs import Job, JobSequence
from draftsmith.pipeline.link import Link, Stop, Stopped
from draftsmith.pipeline.progress import Progress
from draftsmith.pipeline.sync import Exchange
from draftsmith.target.load import Target
from draftsmith.training.step import Replica

MakeBatch = Callable[[Job], tuple[Row, DraftBatch]]


@dataclass(frozen=True)
class Prepared:
    """A row ready for a target, on the CPU."""

    row: Row
    batch: DraftBatch


@dataclass(frozen=True)
class Featured:
    """A row ready for a drafter: features on the drafter's device, batch on the CPU."""

    batch: DraftBatch
    arrived: Arrived


class Worker(threading.Thread):
    """A thread that reports its failure to `Stop`."""

    def __init__(self, name: str, device: torch.device, stop: Stop) -> None:
        super().__init__(name=name, daemon=True)
        self.device = device
        self.stop = stop
        self.clock = WorkerClock(name)
        self.pace = Pace(device)
        self._settings = Settings.capture()  # of the thread that makes it, which set them

    def run(self) -> None:
        try:
            self._settings.run(self._work_on_own_stream)
        except Stopped:
            pass
        except BaseException as error:
            self.stop.set(error, self.name)

    def _work_on_own_stream(self) -> None:
        with self._on_own_stream(), explained():
            self.work()

    def work(self) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Counts the time inside as a wait, but what of it the device still worked as busy."""
        began = time.perf_counter()
        try:
            with self.clock.opened(what):
                yield
        finally:  # also where the run ends while it waits: what was shown as open must be counted
            spent = time.perf_counter() - began
            dry = min(spent, self.pace.idle())
            self.clock.add(what, dry)
            self.clock.on_device(spent - dry)

    @contextlib.contextmanager
    def keeping_pace(self) -> Iterator[None]:
        """Around the work on a row: begins when the device is near enough, and marks where it ends."""
        began = time.perf_counter()
        with self.clock.opened("busy"):
            self.pace.keep()
        self.clock.on_device(time.perf_counter() - began)
        yield
        self.pace.mark()

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        if self.device.type != "cuda":
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream(self.device)):
            yield


class PrefetchWorker(Worker):
    """Makes rows, anchors, labels and mask tiles on the CPU, ahead of the targets."""

    def __init__(
        self,
        index: int,
        count: int,
        sequence: JobSequence,
        first_update: int,
        make: MakeBatch,
        targets: list[Link[Prepared]],
        stop: Stop,
        pin: bool,
    ) -> None:
        super().__init__(f"prefetch {index}", torch.device("cpu"), stop)
        self.index, self.count = index, count
        self.sequence, self.first_update = sequence, first_update
        self.make, self.targets, self.pin = make, targets, pin

    def work(self) -> None:
        for job in self.sequence.jobs(self.first_update):
            if job.number % self.count != self.index:
                continue
            self.stop.check()
            with self.clock.busy(job.number):
                row, batch = self.make(job)
                if self.pin:
                    batch = batch.pin()
            with self.clock.waiting("output"):
                self.targets[job.number % len(self.targets)].put(job.number, Prepared(row, batch))
            self.clock.done()


class TargetWorker(Worker):
    """Runs the frozen target over rows and hands the features to the drafter that the row belongs to."""

    def __init__(
        self,
        index: int,
        target: Target,
        taps: tuple[int, ...],
        last_hidden: bool,
        sequence: JobSequence,
        first_update: int,
        inbox: Link[Prepared],
        count: int,
        drafters: list[Link[Featured]],
        hand_offs: list[HandOff],
        stop: Stop,
    ) -> None:
        super().__init__(f"target {index}", target.device, stop)
        self.index, self.count = index, count
        self.target, self.taps, self.last_hidden = target, taps, last_hidden
        self.sequence, self.first_update = sequence, first_update
        self.inbox, self.drafters, self.hand_offs = inbox, drafters, hand_offs

    def work(self) -> None:
        for job in self.sequence.jobs(self.first_update):
            if job.number % self.count != self.index:
                continue
            with self.waiting("input"):
                prepared = self.inbox.take(job.number)
            drafter = job.number % len(self.drafters)
            link, hand_off, row = self.drafters[drafter], self.hand_offs[drafter], prepared.row
            with self.keeping_pace(), self.clock.busy(job.number):
                features = self.target.features(
                    row.tokens_S, row.document_S, row.positions_S, self.taps, last_hidden=self.last_hidden
                )
            with self.waiting("output"):
                link.reserve(job.number, hand_off.size(features))
            link.put(job.number, Featured(prepared.batch, hand_off.bring(features)))
            self.clock.done(self.inbox.depth())


class DrafterWorker(Worker):
    """Trains one replica; all replicas meet in the `Exchange` once per update.

    Args:
        index: of the replica.
        replica: drafter, head and objective on this device.
        hand_off: what brings its features.
        exchange: the shared update.
        progress: replica 0 reports to it.
        compiling: compiles what the replicas need before the first row, and watches single updates.
    """

    def __init__(
        self,
        index: int,
        replica: Replica,
        block_size: int,
        device: torch.device,
        sequence: JobSequence,
        first_update: int,
        inbox: Link[Featured],
        hand_off: HandOff,
        exchange: Exchange,
        progress: Progress,
        compiling: Compiling,
        stop: Stop,
    ) -> None:
        super().__init__(f"drafter {index}", device, stop)
        self.index, self.count = index, len(exchange.updates)
        self.replica, self.block_size = replica, block_size
        self.sequence, self.first_update = sequence, first_update
        self.inbox, self.hand_off = inbox, hand_off
        self.exchange, self.progress, self.compiling = exchange, progress, compiling

    def work(self) -> None:
        with self.clock.phase("warm-up", self.index, "compiling"):
            self.compiling.warm_up(self.index)
            self.exchange.meet(self.index)
        if self.index == 0:
            self.progress.begin()
        for update in range(self.first_update, self.sequence.steps):
            learn, evaluate = self.sequence.of_update(update)
            with self.compiling.around(self.index, update):
                sums = self._rows(learn, learn=True)
                with self.clock.phase("update", update):
                    total, norm = self.exchange.update(self.index, sums, self.progress.lr_factor(update))
                    self.pace.extend()
            if self.index == 0:
                self.compiling.tell_late()
                self.progress.stepped(update, total, norm)
            if self.sequence.evaluates_after(update):  # also where none of the held-out rows is this rank's
                total = self.exchange.total(self.index, self._rows(evaluate, learn=False))
                if self.index == 0:
                    self.progress.evaluated(update, total)
            end = self.exchange.agree(self.index, self.index == 0 and self.progress.wants_end(update))
            if end or self.progress.saves_after(update):
                if self.index == 0:
                    self.progress.save(update, last=end)
                self.exchange.meet(self.index)
            if end:
                break
        if self.index == 0:
            self.compiling.tell_late()
            self.progress.flush()
            self.stop.set()

    def _rows(self, jobs: list[Job], *, learn: bool) -> Sums:
        total = torch.zeros(Sums.size(self.block_size), device=self.device)
        for job in jobs:
            if job.number % self.count != self.index:
                continue
            with self.waiting("input"):
                item = self.inbox.take(job.number)
                if item.arrived.ready is not None:
                    item.arrived.ready.synchronize()
            with self.keeping_pace(), self.clock.busy(job.number):
                self.hand_off.read(item.arrived)
                batch = item.batch.to(self.device, non_blocking=True)
                sums = self.replica.step(item.arrived.features, batch, learn=learn)
                self.hand_off.release(item.arrived)
                if learn:
                    self.progress.not_finite.note(job, sums, self.replica.model)
                    self.exchange.updates[self.index].accumulate(last=job.number + self.count > jobs[-1].number)
                    self.progress.count_tokens(item.batch.real_tokens)
                total += sums.values
            self.clock.done(self.inbox.depth())
        return Sums(total)
