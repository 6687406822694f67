"""The three kinds of worker threads: prefetch (makes batches), target (makes features), drafter (learns).

Each handles every n-th job of the sequence and passes its row on through a `Link`:

    prefetch --(row, batch)--> target --(batch, features)--> drafter

On CUDA every worker has its own stream. A tensor crosses streams with an event: recorded by the producer after the
work, awaited by the consumer's stream before the first use, so the host waits for no device.

If one fails: the exception is kept in `Stop`, all links and barriers open, the others leave through `Stopped`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from draftsmith.blocks import DraftBatch, Row
from draftsmith.compiled import Settings
from draftsmith.objective import Sums
from draftsmith.pipeline.clock import WorkerClock
from draftsmith.pipeline.compiling import Compiling
from draftsmith.pipeline.jobs import Job, JobSequence
from draftsmith.pipeline.link import Link, Stop, Stopped
from draftsmith.pipeline.progress import Progress
from draftsmith.pipeline.sync import Exchange
from draftsmith.target.forward import Features
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
    features: Features
    ready: torch.cuda.Event | None


class Worker(threading.Thread):
    """A thread that reports its failure to `Stop`."""

    def __init__(self, name: str, device: torch.device, stop: Stop) -> None:
        super().__init__(name=name, daemon=True)
        self.device = device
        self.stop = stop
        self.clock = WorkerClock(name)
        self._settings = Settings.capture()  # of the thread that makes it, which set them

    def run(self) -> None:
        try:
            self._settings.run(self._work_on_own_stream)
        except Stopped:
            pass
        except BaseException as error:
            self.stop.set(error, self.name)

    def _work_on_own_stream(self) -> None:
        with self._on_own_stream():
            self.work()

    def work(self) -> None:
        raise NotImplementedError

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
        drafter_devices: list[torch.device],
        dtype: torch.dtype,
        stop: Stop,
    ) -> None:
        super().__init__(f"target {index}", target.device, stop)
        self.index, self.count = index, count
        self.target, self.taps, self.last_hidden = target, taps, last_hidden
        self.sequence, self.first_update = sequence, first_update
        self.inbox, self.drafters, self.drafter_devices, self.dtype = inbox, drafters, drafter_devices, dtype

    def work(self) -> None:
        for job in self.sequence.jobs(self.first_update):
            if job.number % self.count != self.index:
                continue
            with self.clock.waiting("input"):
                prepared = self.inbox.take(job.number)
            drafter = job.number % len(self.drafters)
            with self.clock.busy(job.number):
                row = prepared.row
                features = self.target.features(
                    row.tokens_S, row.document_S, row.positions_S, self.taps, last_hidden=self.last_hidden
                )
                moved, ready = self._hand_over(features, self.drafter_devices[drafter])
            with self.clock.waiting("output"):
                self.drafters[drafter].put(job.number, Featured(prepared.batch, moved, ready))

    def _hand_over(self, features: Features, device: torch.device) -> tuple[Features, torch.cuda.Event | None]:
        """Features on the drafter's device in its dtype, and the event after which they may be read there."""
        last_SH = None if features.last_SH is None else features.last_SH.to(device, self.dtype, non_blocking=True)
        moved = Features(features.taps_SF.to(device, self.dtype, non_blocking=True), last_SH)
        if device.type != "cuda":
            return moved, None
        # A copy to another device is ordered on both devices' current streams, so an event there covers it.
        return moved, torch.cuda.current_stream(device).record_event()


class DrafterWorker(Worker):
    """Trains one replica; all replicas meet in the `Exchange` once per update.

    Args:
        index: of the replica.
        replica: drafter, head and objective on this device.
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
        exchange: Exchange,
        progress: Progress,
        compiling: Compiling,
        stop: Stop,
    ) -> None:
        super().__init__(f"drafter {index}", device, stop)
        self.index, self.count = index, len(exchange.updates)
        self.replica, self.block_size = replica, block_size
        self.sequence, self.first_update = sequence, first_update
        self.inbox, self.exchange, self.progress, self.compiling = inbox, exchange, progress, compiling

    def work(self) -> None:
        self.compiling.warm_up(self.index)
        self.exchange.meet(self.index)
        if self.index == 0:
            self.progress.begin()
        for update in range(self.first_update, self.sequence.steps):
            learn, evaluate = self.sequence.of_update(update)
            with self.compiling.around(self.index, update):
                sums = self._rows(learn, learn=True)
                total, norm = self.exchange.update(self.index, sums, self.progress.lr_factor(update))
            if self.index == 0:
                self.progress.stepped(update, total, norm)
            if evaluate:
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
            self.progress.finish()
            self.stop.set()

    def _rows(self, jobs: list[Job], *, learn: bool) -> Sums:
        total = torch.zeros(Sums.size(self.block_size), device=self.device)
        for job in jobs:
            if job.number % self.count != self.index:
                continue
            with self.clock.waiting("input"):
                item = self.inbox.take(job.number)
            with self.clock.busy(job.number):
                if item.ready is not None:
                    stream = torch.cuda.current_stream(self.device)
                    stream.wait_event(item.ready)
                    for tensor in (item.features.taps_SF, item.features.last_SH):
                        if tensor is not None:
                            tensor.record_stream(stream)
                batch = item.batch.to(self.device, non_blocking=True)
                sums = self.replica.step(item.features, batch, learn=learn)
                if learn:
                    self.exchange.updates[self.index].accumulate()
                    self.progress.count_tokens(item.batch.real_tokens)
                total += sums.values
        return Sums(total)
