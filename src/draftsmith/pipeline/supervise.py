"""The main thread while workers run: starts them, waits, answers Ctrl-C and signals, raises what went wrong first.

Ctrl-C once finishes the update and saves, twice stops at once. SIGTERM saves within the grace: an update that takes
longer than its share of that time is given up, and the state before it saved.
"""

from __future__ import annotations

import math
import time

import torch

from draftsmith.errors import UserError
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.progress import Progress
from draftsmith.pipeline.signals import Signals, Terminated
from draftsmith.pipeline.workers import DrafterWorker, Worker

JOIN_SECONDS = 10.0
_CPU_IS_FULL = "DefaultCPUAllocator"  # torch says so in a plain RuntimeError
PATIENT_SHARE = 0.4  # of the grace, for the update under way


def supervise(workers: list[Worker], stop: Stop, progress: Progress, signals: Signals, grace: float) -> None:
    """Starts the workers and waits for the end.

    Args:
        workers: of all kinds; those that are no drafters start once the drafters are warm.
        stop: ends all of them.
        progress: told when the run should end or save.
        signals: tells what has arrived.
        grace: seconds from SIGTERM to the end.

    Raises:
        UserError: a device is out of memory, or what a worker raised.
        KeyboardInterrupt: interrupted twice.
        Terminated: before the first update, so nothing is saved.
    """
    signals.end = lambda: progress.request_end("terminated", within=grace)
    signals.save = progress.request_save
    termination = _Termination(workers, stop, progress, grace)
    waiting = [worker for worker in workers if not isinstance(worker, DrafterWorker)]
    for worker in workers:
        if worker not in waiting:
            worker.start()
    interrupts = 0
    while not stop.is_set():
        try:
            # Everybody else waits until the drafters have compiled.
            if waiting and progress.warm.wait(0.05):
                for worker in waiting:
                    worker.start()
                waiting = []
            stop.wait(0.05)
            if progress.requested == "terminated" and termination.given_up(warming_up=bool(waiting)):
                return
        except Terminated:
            raise
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts == 1:
                progress.request_end("interrupted")
            else:
                stop.set()
                raise
    _join([worker for worker in workers if worker not in waiting], JOIN_SECONDS)
    _raise_cause(stop)
    hanging = [worker.name for worker in workers if worker.is_alive()]
    assert not hanging, f"workers did not end: {hanging}"


class _Termination:
    """What SIGTERM leads to."""

    def __init__(self, workers: list[Worker], stop: Stop, progress: Progress, grace: float) -> None:
        self.workers, self.stop, self.progress, self.grace = workers, stop, progress, grace
        self.exchange = next(worker.exchange for worker in workers if isinstance(worker, DrafterWorker))
        self.first_update, self.patience = progress.steps_done, math.inf

    def given_up(self, *, warming_up: bool) -> bool:
        """Called again and again from the signal on; true once the update under way was given up and all is saved.

        Raises:
            Terminated: there is nothing to save yet.
        """
        if warming_up:
            self.stop.set()
            raise Terminated("terminated before the first update")
        self.patience = min(self.patience, time.monotonic() + self.grace * PATIENT_SHARE)
        if time.monotonic() < self.patience or self.progress.saving_last:
            return False
        # The update takes too long: what is saved is the state before it.
        with self.exchange.still:
            self.progress.save_between(self.first_update + self.exchange.done)
        self.stop.set()
        # Each worker leaves after its row; the process should not end in the middle of one.
        _join(self.workers, self.patience + self.grace * (1 - PATIENT_SHARE) - 1.0 - time.monotonic())
        return True


def _join(workers: list[Worker], seconds: float) -> None:
    """Waits for the workers, so many seconds in all."""
    deadline = time.monotonic() + seconds
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))


def _raise_cause(stop: Stop) -> None:
    """Raises what a worker ended the run with, if one did."""
    cause = stop.cause
    if cause is None:
        return
    if isinstance(cause, torch.cuda.OutOfMemoryError | MemoryError) or _CPU_IS_FULL in str(cause):
        raise UserError(
            f"{stop.worker} ran out of memory on its device",
            where="pipeline",
            fix="lower rows.anchors, rows.length or objective.chunk, or set training.activation_checkpointing",
        ) from cause
    if not isinstance(cause, UserError) and hasattr(cause, "add_note"):  # Python 3.10 has no notes
        cause.add_note(f"in worker {stop.worker!r}")
    raise cause
