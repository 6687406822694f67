"""What a run says of itself while it trains: steps, evaluations, checkpoints, and when to end.

The drafter of replica 0 calls in at the end of each update, with sums that are still being computed on its device. They
are copied to the host without waiting and read one update later, so that reporting never drains the device's queue.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.config import RunConfig
from draftsmith.errors import UserError
from draftsmith.objective import Sums
from draftsmith.observe.events import EventLog
from draftsmith.pipeline.clock import WorkerClock
from draftsmith.pipeline.jobs import JobSequence
from draftsmith.pipeline.saving import Saver
from draftsmith.training.schedule import learning_rate_factor

RATE_SECONDS = 20.0
LAST_SAVE_SECONDS = 600.0  # for which a disk that refuses the last checkpoint is tried again

Snapshot = Callable[[], tuple[dict[str, Tensor], dict[str, Any]]]


@dataclass(frozen=True)
class _Pending:
    """One update whose figures are on their way to the host."""

    update: int
    kind: str
    values: Tensor
    ready: torch.cuda.Event | None
    tokens: int
    time: float


class Progress:
    """See the module's docstring. `begin` to `finish` are called by replica 0's thread, `request_end` by any.

    Args:
        config: of the run.
        sequence: the order of work.
        first_update: where this process starts.
        log: takes the events.
        clocks: of all workers.
        saver: writes checkpoints.
        snapshot: (masters and optimizer state of all replicas, further facts), for a checkpoint.
        max_minutes: end after this time, with a checkpoint.
        overfit: end once the loss is near zero.
    """

    def __init__(
        self,
        config: RunConfig,
        sequence: JobSequence,
        first_update: int,
        log: EventLog,
        clocks: list[WorkerClock],
        saver: Saver,
        snapshot: Snapshot,
        max_minutes: float | None,
        overfit: bool,
    ) -> None:
        self.config, self.sequence, self.log, self.clocks = config, sequence, log, clocks
        self.saver, self._snapshot, self._overfit = saver, snapshot, overfit
        self._limit = None if max_minutes is None else max_minutes * 60
        self.requested = ""
        self.urgent = False  # somebody waits for the end
        self._deadline = math.inf  # monotonic, for the last checkpoint
        self._save_requested = False
        self._save_due = False
        self._last_save = threading.Lock()  # taken by whoever writes the last checkpoint, and kept
        self._saving = -1  # the update that a checkpoint follows
        self._paused = 0.0  # seconds that are not counted when speed is measured
        self.warm = threading.Event()
        self._lock = threading.Lock()
        self._tokens = 0
        self._first_update = first_update
        self._began = time.monotonic()
        self._recent: deque[tuple[float, int, float]] = deque()
        self._pending: deque[_Pending] = deque()
        self.steps_done = first_update
        self.reason = "all steps done"
        self.loss = math.nan
        self.losses: list[float] = []
        self.tau_proxy = math.nan
        self.evaluation: dict[str, object] | None = None

    @property
    def checkpoint(self) -> Path | None:
        """The last checkpoint that this process wrote."""
        return self.saver.last

    @property
    def saving_last(self) -> bool:
        """Whether the last checkpoint is being written, or is."""
        return self._last_save.locked()

    @property
    def tokens(self) -> int:
        """Real tokens trained on by this process."""
        return self._tokens

    @property
    def seconds(self) -> float:
        """Since the first row could start."""
        return time.monotonic() - self._began

    def begin(self) -> None:
        """Everything is warm: time starts to count, and the other workers may start."""
        self._began = time.monotonic()
        self.warm.set()

    def request_end(self, reason: str, within: float = math.inf) -> None:
        """Ends the run after the update that is being worked on, with a checkpoint, in so many seconds at most."""
        self.requested = self.requested or reason
        self.urgent = self.urgent or reason in ("interrupted", "terminated")
        self._deadline = min(self._deadline, time.monotonic() + within)

    def request_save(self) -> None:
        """Saves after the update that is being worked on, and goes on."""
        self._save_requested = True

    def count_tokens(self, tokens: int) -> None:
        """Adds a row's real tokens; called by all drafters."""
        with self._lock:
            self._tokens += tokens

    def lr_factor(self, update: int) -> float:
        """Learning-rate factor of an update."""
        return learning_rate_factor(self.config.optimizer, update, self.sequence.steps)

    def stepped(self, update: int, sums: Sums, norm: Tensor) -> None:
        """An update was given to the device."""
        self.steps_done = update + 1
        self._report("step", update, torch.cat((norm.reshape(1), sums.values)))

    def evaluated(self, update: int, sums: Sums) -> None:
        """Held-out rows were given to the device."""
        self._report("eval", update, torch.cat((torch.zeros(1, device=sums.values.device), sums.values)))

    def wants_end(self, update: int) -> bool:
        """Whether this update is to be the last. Also settles whether a checkpoint follows it."""
        if self._limit is not None and self.seconds >= self._limit:
            self.request_end("time limit")
        if self._overfit and self.loss < OVERFIT_LOSS:
            self.request_end(OVERFITTED)
        end = update + 1 == self.sequence.steps
        if self.requested and not end:
            self.reason, end = self.requested, True
        if update == self._first_update:
            self.saver.prepare(self._snapshot()[0])
        every = self.config.training.save_every
        decode_every = self.config.decoding.every
        due = any(each > 0 and (update + 1) % each == 0 for each in (every, decode_every))
        # What could not be written is due again, and so is what came while another was being written.
        self._save_due = self._save_due or due or self._save_requested or self.saver.failed is not None
        if end or (self._save_due and self.saver.ready):
            self._saving = update
        return end

    def saves_after(self, update: int) -> bool:
        """Whether a checkpoint follows. Asked by all replicas, after they agreed on what `wants_end` said."""
        return self._saving == update

    def save(self, update: int, *, last: bool) -> None:
        """Has the checkpoint of an update written: in the background, or to the end if it is the run's last.

        Raises:
            UserError: the last checkpoint of the run could not be written.
        """
        self.flush()
        began = time.monotonic()
        tensors, state = self._snapshot()
        self._save_due = self._save_requested = False
        if last:
            if self._last_save.acquire(blocking=False):
                self._finish_saving(update + 1, tensors, state)
        else:
            self.saver.take(update + 1, tensors, state)
            self._paused += time.monotonic() - began

    def save_between(self, updates: int) -> bool:
        """Writes the last checkpoint from another thread, which holds masters and optimizer state still.

        Args:
            updates: done in all.

        Returns:
            Whether it did: false if replica 0 is at it already, or no update was done since the last checkpoint.

        Raises:
            UserError: it could not be written.
        """
        if not self._last_save.acquire(blocking=False):
            return False
        self.steps_done, self.reason = updates, self.requested
        if updates in (self._first_update, self.saver.last_step):
            return False
        tensors, state = self._snapshot()
        for device in {value.device for value in tensors.values() if value.is_cuda}:
            torch.cuda.synchronize(device)
        self._finish_saving(updates, tensors, state)
        return True

    def _finish_saving(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        try:
            limit = time.monotonic() + LAST_SAVE_SECONDS
            self.saver.finish(step, tensors, state, lambda: min(limit, self._deadline) - time.monotonic())
        except OSError as error:
            kept = f"the last one is {self.checkpoint}" if self.checkpoint else "there is no earlier one"
            raise UserError(
                f"the checkpoint of step {step} could not be written: {error.strerror or error}; {kept}",
                where=self.config.training.output,
            ) from None

    def finish(self) -> None:
        """Reports what is still on its way."""
        self.flush()

    def flush(self) -> None:
        """Waits for the device and reports everything."""
        while self._pending:
            self._emit(self._pending.popleft())

    def _report(self, kind: str, update: int, values: Tensor) -> None:
        event = None
        if values.device.type == "cuda":
            stream = torch.cuda.current_stream(values.device)
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            values, event = host, stream.record_event()
        self._pending.append(_Pending(update, kind, values, event, self._tokens, time.monotonic() - self._paused))
        while len(self._pending) > 1:
            self._emit(self._pending.popleft())

    def _emit(self, pending: _Pending) -> None:
        if pending.ready is not None:
            pending.ready.synchronize()
        summary = Sums(pending.values[1:]).summary()
        loss = summary["loss"]
        step = pending.update + 1
        if pending.kind == "eval":
            self.evaluation = {"step": step, **summary}
            self.log.write("eval", step=step, **summary)
            return
        norm = float(pending.values[0])
        assert isinstance(loss, float)
        if not math.isfinite(norm) or (math.isnan(loss) and summary["blocks"]):
            raise UserError(
                f"loss {loss} and gradient norm {norm} at step {step} are not finite",
                where="training",
                fix="lower optimizer.lr, or resume from the last checkpoint with other settings",
            )
        if not math.isnan(loss):
            self.loss, self.tau_proxy = loss, float(summary["tau_proxy"])  # type: ignore[arg-type]
        self.losses.append(loss)
        rate, wait, covered = self._rates(pending)
        done = step - self._first_update
        self.log.write(
            "step",
            step=step,
            steps=self.sequence.steps,
            loss=loss,
            tau_proxy=summary["tau_proxy"],
            accept_by_slot=summary["accept_by_slot"],
            lr=self.config.optimizer.lr * self.lr_factor(pending.update),
            grad_norm=norm,
            blocks=summary["blocks"],
            tokens=pending.tokens,
            tokens_per_second=rate,
            rate_seconds=round(covered, 3),
            data_wait=wait,
            eta_seconds=self.seconds / done * (self.sequence.steps - step),
        )
        for clock in self.clocks:
            for span in clock.drain():
                self.log.write("work", **span)

    def _rates(self, pending: _Pending) -> tuple[float, float, float]:
        """(real tokens per second, share of the drafters' time spent waiting for rows, seconds that both cover)."""
        drafters = [clock for clock in self.clocks if clock.worker.startswith("drafter")]
        waited = sum(clock.seconds["input"] for clock in drafters) / len(drafters)
        if not self._recent:
            self._recent.append((self._began, 0, 0.0))
        self._recent.append((pending.time, pending.tokens, waited))
        while len(self._recent) > 2 and pending.time - self._recent[1][0] > RATE_SECONDS:
            self._recent.popleft()
        began, tokens, waited_before = self._recent[0]
        seconds = max(pending.time - began, 1e-9)
        return (pending.tokens - tokens) / seconds, min(1.0, (waited - waited_before) / seconds), seconds


OVERFIT_LOSS, OVERFITTED = 0.05, "overfitted"
