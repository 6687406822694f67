"""Checkpoints are written by a thread of their own: training waits only for the copy to the host.

`take` copies masters and optimizer state into host buffers that are used again and again (page-locked ones for GPUs, so
that the copies run at the bus's speed) and hands them over; hashing, writing and syncing happen in the thread, none of
it under the interpreter lock for long. Costs one copy of masters and optimizer state in host memory: 12 bytes a
parameter with AdamW.

One checkpoint is written at a time. While the thread is busy, or a disk that failed is given time to recover, `ready`
is false and whoever wanted a checkpoint asks again after the next update.

If it fails: an `OSError` (disk full, quota, read-only, a failing device) is told as an "error" event, `failed` is set
and `ready` turns true again after a pause that grows with every failure. A `UserError` (weights that are not finite, of
which no checkpoint is written) ends the run. Anything else is our bug. Both are raised by the next `take` or `finish`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError, reason_of
from draftsmith.observe.events import EventLog
from draftsmith.pipeline.hang import HungError
from draftsmith.pipeline.link import Stop, Stopped

RETRY_SECONDS = 15.0  # after the first failure; twice as long after each further one
LONGEST_RETRY_SECONDS = 600.0
POLL_SECONDS = 0.1
HUNG_CLOSE_SECONDS = 5.0

Write = Callable[[int, dict[str, Tensor], dict[str, Any]], Path]


def page_locked(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, str]:
    """(a buffer on the host that GPUs copy into at the bus's speed, "" or why it is an ordinary one).

    Its pages are touched before they are locked: while CUDA locks memory, calls of other threads wait, seconds for a
    gigabyte that the system has yet to find. torch's own pinned memory does both at once, and rounds sizes up to powers
    of two.

    Args:
        shape, dtype: of the buffer.
        device: a GPU that the run uses; asked on any other, CUDA would take memory there, too.
    """
    buffer = torch.empty(shape, dtype=dtype)
    size = buffer.numel() * buffer.element_size()
    if not size:
        return buffer, ""
    buffer.zero_()
    cuda, address = torch.cuda.cudart(), buffer.data_ptr()
    with torch.cuda.device(device):
        failure = cuda.cudaHostRegister(address, size, 0)
    if int(failure):
        return buffer, f"CUDA error {int(failure)}"
    weakref.finalize(buffer, cuda.cudaHostUnregister, address).atexit = False
    return buffer, ""


@dataclass(frozen=True)
class _Job:
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    stall: float
    last: bool


class Saver:
    """See the module's docstring. One thread calls `prepare`, `ready`, `take` and `finish`; any may read the rest.

    Args:
        write: (step, tensors on the CPU, state) → folder; raises OSError, or UserError for what must not be written.
        log: takes "checkpoint" and "error" events.
        stop: of the run; when it is set with a failure, nobody waits any longer.
        written: called with (step, folder) after each checkpoint, in the saving thread.

    Attributes:
        last: folder of the last checkpoint written.
        failed: what kept the last attempt from being written; None after a success.
    """

    def __init__(
        self,
        write: Write,
        log: EventLog,
        stop: Stop,
        written: Callable[[int, Path], None] = lambda _step, _folder: None,
    ) -> None:
        self.last: Path | None = None
        self.last_step = -1
        self.failed: OSError | None = None
        self._write, self._log, self._stop, self._written = write, log, stop, written
        self._buffers: dict[str, Tensor] = {}
        self._job: _Job | None = None
        self._preparing: dict[str, tuple[torch.Size, torch.dtype, torch.device]] | None = None
        self._failures, self._not_before = 0, 0.0
        self._error: BaseException | None = None
        self._closed = self._told = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Has the host buffers for these tensors made in the thread: gigabytes of fresh memory take seconds."""
        wanted = {name: (value.shape, value.dtype, value.device) for name, value in tensors.items() if value.is_cuda}
        if wanted:
            with self._changed:
                self._preparing = wanted
                self._wake()

    @property
    def ready(self) -> bool:
        """Whether `take` would neither wait nor meet a disk that has just failed."""
        with self._changed:
            return self._idle() and time.monotonic() >= self._not_before

    def take(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], *, last: bool = False) -> None:
        """Copies the tensors and has them written; waits for the thread to be free first.

        The caller sees to it that no work on any device still changes them.

        Raises:
            Stopped: after `close`.
        """
        self._wait_until_idle()
        began = time.monotonic()
        copies: dict[str, Tensor] = {}
        devices = set()
        for name, value in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                like = value.shape, value.dtype, value.device
                self._buffers[name] = buffer = self._host_buffer(*like) if value.is_cuda else torch.empty_like(value)
            buffer.copy_(value, non_blocking=value.is_cuda)
            copies[name] = buffer
            if value.is_cuda:
                devices.add(value.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        with self._changed:
            if self._closed:  # what has been said of the last checkpoint must stay true
                raise Stopped
            self._job = _Job(step, copies, state, time.monotonic() - began, last)
            self._wake()

    def finish(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], seconds_left: Callable[[], float]
    ) -> None:
        """Writes the last checkpoint and waits for it; a disk that fails is tried again while there are seconds left.

        Raises:
            OSError: what kept it from being written.
            UserError: it must not be written.
        """
        self.take(step, tensors, state, last=True)
        while True:
            self._wait_until_idle()
            if self.failed is None:
                return
            again = time.monotonic() + RETRY_SECONDS
            while not self._stop.is_set() and seconds_left() > 0 and time.monotonic() < again:
                self._stop.wait(min(POLL_SECONDS, RETRY_SECONDS))  # a signal may shorten what is left
            if seconds_left() <= 0 or self._stop.is_set():
                raise self.failed
            self.take(step, tensors, state, last=True)

    def close(self) -> None:
        """Waits for what is being written, and ends the thread: nothing is written from then on.

        Behind a hang it does not wait for long: the thread may be the cause.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(HUNG_CLOSE_SECONDS if isinstance(self._stop.cause, HungError) else None)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="saver", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _idle(self) -> bool:
        return self._job is None and self._preparing is None

    def _wait_until_idle(self) -> None:
        with self._changed:
            while not self._idle():
                self._changed.wait(POLL_SECONDS)
            if self._error is not None:
                raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._idle() and not self._closed:
                    self._changed.wait()
                job, preparing = self._job, self._preparing
                if job is None and preparing is None:
                    return
            try:
                if preparing is not None:
                    for name, like in preparing.items():
                        self._buffers[name] = self._host_buffer(*like)
                else:
                    assert job is not None
                    self._save(job)
            except BaseException as error:
                self._error = error
                if isinstance(error, UserError):
                    self._stop.set(error, "saver")
            with self._changed:
                if preparing is not None:
                    self._preparing = None
                else:
                    self._job = None
                self._changed.notify_all()

    def _host_buffer(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer, why_not = page_locked(shape, dtype, device)
        if why_not and not self._told:
            self._told = True
            self._log.write(
                "notice",
                text=f"host memory for checkpoints is not page-locked ({why_not}): each holds training up longer",
            )
        return buffer

    def _save(self, job: _Job) -> None:
        began = time.monotonic()
        try:
            folder = self._write(job.step, job.tensors, job.state)
        except OSError as error:
            self._failures += 1
            pause = min(LONGEST_RETRY_SECONDS, RETRY_SECONDS * 2 ** (self._failures - 1))
            self._not_before = time.monotonic() + pause
            self.failed = error
            self._log.write(
                "error",
                topic="checkpoint",
                step=job.step,
                text=f"the checkpoint of step {job.step} could not be written: {reason_of(error)}"
                + ("" if job.last else f"; training goes on, tried again in {pause:.0f} s"),
            )
            return
        self._failures, self._not_before, self.failed = 0, 0.0, None
        self.last, self.last_step = folder, job.step
        self._log.write(
            "checkpoint",
            step=job.step,
            path=str(folder),
            stall_seconds=round(job.stall, 3),
            write_seconds=round(time.monotonic() - began, 3),
        )
        try:
            self._written(job.step, folder)
        except OSError as error:
            self._log.write("notice", text=f"an old checkpoint could not be removed: {reason_of(error)}")
