"""The main thread while workers run: starts them, waits, answers Ctrl-C and signals, raises what went wrong first.

Ctrl-C once finishes the update and saves, twice stops at once, but for a checkpoint that is being written. SIGTERM
saves within the grace: an update that takes longer than its share of that time is given up, and the state before it
saved. If nothing moves for too long, the run ends with the name of the worker that stands still (`hang`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import torch

from draftsmith.errors import UserError
from draftsmith.pipeline.hang import HangWatch, HungError
from draftsmith.pipeline.interpreter import short_turns
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.out_of_memory import is_out_of_memory
from draftsmith.pipeline.progress import LAST_SAVE_SECONDS, Progress
from draftsmith.pipeline.pulse import RankLost
from draftsmith.pipeline.signals import Signals, Terminated
from draftsmith.pipeline.workers import DrafterWorker, Worker
from draftsmith.training.checkpoint import list_checkpoints

JOIN_SECONDS = 10.0
HUNG_JOIN_SECONDS = 2.0  # for the others, behind a worker that hangs
PATIENT_SHARE = 0.4  # of the grace, for the update under way


Explain = Callable[[BaseException, str, torch.device], UserError]


def supervise(
    workers: list[Worker], stop: Stop, progress: Progress, signals: Signals, grace: float, out_of_memory: Explain
) -> None:
    """Starts the workers and waits for the end.

    Args:
        workers: of all kinds; those that are no drafters start once the drafters are warm.
        stop: ends all of them.
        progress: told when the run should end or save.
        signals: tells what has arrived.
        grace: seconds from SIGTERM to the end.
        out_of_memory: makes the error of a worker (its exception, name and device) whose memory is full.

    Raises:
        UserError: a device is out of memory, nothing moves any more, or what a worker raised.
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
    limit, folder = progress.config.pipeline.hang_seconds, progress.log.path.parent
    with short_turns(), HangWatch(workers, limit, folder, progress.ranks.rank) as watch:
        progress.log.listen(watch.heard)
        while not stop.is_set():
            try:
                # Everybody else waits until the drafters have compiled.
                if waiting and progress.warm.wait(0.05):
                    for worker in waiting:
                        if worker.ident is None:  # else Ctrl-C came between two of them
                            worker.start()
                    waiting = []
                stop.wait(0.05)
                if progress.requested == "terminated" and termination.given_up(warming_up=bool(waiting)):
                    return
                more = LAST_SAVE_SECONDS if progress.saving_last else 0.0
                hung = watch.check(progress.steps_done, warming_up=bool(waiting), more=more)
                if hung is not None:
                    stop.set(hung)
            except KeyboardInterrupt as interrupt:
                interrupts += 1
                if isinstance(interrupt, Terminated):
                    stop.set()
                    raise
                if interrupts > 1:
                    stop.set()
                    kept = _kept(progress)
                    raise KeyboardInterrupt(f"interrupted twice, at step {progress.steps_done}: {kept}") from None
                progress.request_end("interrupted")
            except BaseException:  # whatever it is, the workers must not go on without this thread
                stop.set()
                raise
    if stop.cause is not None:
        started = [worker for worker in workers if worker.ident is not None]
        _join(started, HUNG_JOIN_SECONDS if isinstance(stop.cause, HungError | RankLost) else JOIN_SECONDS)
        _raise_cause(stop, workers, out_of_memory)
    with suppress(KeyboardInterrupt):  # all is saved, and the workers are not needed any more
        _await_rows(workers, progress, limit or math.inf)


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
            self.stop.set()  # before the update can go on, and count
        # Each worker leaves after its row; the process should not end in the middle of one.
        _join(self.workers, self.patience + self.grace * (1 - PATIENT_SHARE) - 1.0 - time.monotonic())
        return True


def _kept(progress: Progress) -> str:
    """What a run leaves that ends at once: the newest checkpoint of its folder, once none is being written any more."""
    if progress.ranks.writes:
        progress.saver.close()
    saved = list_checkpoints(progress.log.path.parent)
    return f"what is kept is {saved[-1]}" if saved else "nothing was saved"


def _join(workers: list[Worker], seconds: float) -> None:
    """Waits for the workers, so many seconds in all."""
    deadline = time.monotonic() + seconds
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))


def _await_rows(workers: list[Worker], progress: Progress, limit: float) -> None:
    """Waits until each worker has left after its row, which takes a large target on the CPU minutes; not for longer
    than a hang may last, nor than a signal leaves time."""
    began, told = time.monotonic(), False
    while busy := [worker for worker in workers if worker.is_alive()]:
        seconds = time.monotonic() - began
        if seconds > limit or progress.seconds_left < 1.0:
            break
        if seconds > JOIN_SECONDS and not told:
            told, names = True, " and ".join(worker.name for worker in busy)
            progress.log.write("notice", text=f"all is saved; {names} still at work on a row (Ctrl-C: do not wait)")
        busy[0].join(0.05)
    assert not busy or progress.seconds_left < math.inf, f"workers did not end: {[each.name for each in busy]}"


def _raise_cause(stop: Stop, workers: list[Worker], out_of_memory: Explain) -> NoReturn:
    """Raises what the run ended with."""
    cause = stop.cause
    assert cause is not None
    worker = next((worker for worker in workers if worker.name == stop.worker), None)
    if worker is not None and is_out_of_memory(cause):
        raise out_of_memory(cause, worker.name, worker.device) from cause
    if not isinstance(cause, UserError) and hasattr(cause, "add_note"):  # Python 3.10 has no notes
        cause.add_note(f"in worker {stop.worker!r}")
    raise cause
