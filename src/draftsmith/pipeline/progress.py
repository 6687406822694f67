"""What a run says of itself while it trains: steps, evaluations, checkpoints, and when to end.

The drafter of replica 0 calls in at the end of each update, with sums that are still being computed on its device. They
are copied to the host without waiting and read one update later, so that reporting never drains the device's queue.

With several ranks each has its own, and all of them decide alike: at the end of an update they send each other a note
(`ranks.py`), read it at the end of the next, and act upon that. So whatever one rank wants happens one update later in
all. Figures are the whole run's; only rank 0 saves.
"""

from __future__ import annotations

import hashlib
import json
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
from draftsmith.errors import UserError, reason_of
from draftsmith.objective import Sums
from draftsmith.observe.events import EventLog
from draftsmith.pipeline.clock import WorkerClock
from draftsmith.pipeline.jobs import JobSequence
from draftsmith.pipeline.not_finite import NotFinite
from draftsmith.pipeline.ranks import Note, Ranks
from draftsmith.pipeline.saving import Saver
from draftsmith.training.checkpoint import newest_step
from draftsmith.training.finite import broken_weights, first_not_finite
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
    time: float


class Progress:
    """See the module's docstring. Replica 0's thread calls it; any may request an end or a checkpoint and count tokens,
    and the main thread may `save_between`.

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
        not_finite: judges updates that are not finite.
        ranks: of the run.
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
        not_finite: NotFinite,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.not_finite = not_finite
        self.config, self.sequence, self.log, self.clocks = config, sequence, log, clocks
        self.saver, self._snapshot, self._overfit = saver, snapshot, overfit
        self._limit = None if max_minutes is None else max_minutes * 60
        self.requested = ""
        self.urgent = False  # somebody waits for the end
        self._deadline = math.inf  # monotonic, for the end
        self._save_requested = False
        self._save_due = False
        self._last_save = threading.Lock()  # taken by whoever writes the last checkpoint, and kept
        self._saving = -1  # the update that a checkpoint follows
        self._comparing = False  # whether the ranks compare their weights after this update
        self._paused = 0.0  # seconds that are not counted when speed is measured
        self.warm = threading.Event()
        self._lock = threading.Lock()
        self._tokens = 0
        self._tokens_told = 0  # of all ranks
        self._posted: tuple[int, Callable[[], list[Note]]] | None = None
        self._notes: dict[int, list[Note]] = {}
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
        """Real tokens trained on since the start, by all ranks as far as they have told."""
        return self._tokens if self.ranks.world == 1 else self._tokens_told

    @property
    def seconds(self) -> float:
        """Since the first row could start."""
        return time.monotonic() - self._began

    @property
    def seconds_left(self) -> float:
        """Until this process should have ended; infinite if nobody said so."""
        return self._deadline - time.monotonic()

    def begin(self) -> None:
        """Everything is warm: time starts to count, and the other workers may start."""
        self._began = time.monotonic()
        self.warm.set()

    def request_end(self, reason: str, within: float = math.inf) -> None:
        """Ends the run after the update that is being worked on, with a checkpoint, in so many seconds at most.

        The first reason is the run's, but for "terminated": whoever asked before has more time than that leaves.
        """
        if not self.requested or reason == "terminated":
            self.requested = reason
        if reason == "interrupted" and self.ranks.seat.launched:
            within = min(within, self.config.training.grace)  # after which the launcher kills
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
        self._post(update)
        self._report("step", update, torch.cat((norm.reshape(1), sums.values)))

    def evaluated(self, update: int, sums: Sums) -> None:
        """Held-out rows were given to the device."""
        self._report("eval", update, torch.cat((torch.zeros(1, device=sums.values.device), sums.values)))

    def wants_end(self, update: int) -> bool:
        """Whether this update is to be the last, in all ranks. Also settles whether a checkpoint follows it."""
        self._request_what_is_due()
        end = update + 1 == self.sequence.steps
        wanted, save = self._wishes(update)
        if wanted and not end:
            self.reason, end = wanted, True
        every = self.config.training.save_every
        self._comparing = self.ranks.world > 1 and (end or (every > 0 and (update + 1) % every == 0))
        if not self.ranks.writes:
            return end
        decode_every = self.config.decoding.every
        due = any(each > 0 and (update + 1) % each == 0 for each in (every, decode_every))
        # What could not be written is due again, and so is what came while another was being written.
        self._save_due = self._save_due or due or save or self.saver.failed is not None
        if end or (self._save_due and self.saver.ready):
            self._saving = update
        return end

    def _request_what_is_due(self) -> None:
        if self._limit is not None and self.seconds >= self._limit:
            self.request_end("time limit")
        if self._overfit and self.loss < OVERFIT_LOSS:
            self.request_end(OVERFITTED)

    def _wishes(self, update: int) -> tuple[str, bool]:
        """(why to end, whether to save): what all ranks said at the end of the update before; alone, what holds now."""
        if self.ranks.world == 1:
            return self.requested, self._save_requested
        if update == self._first_update:
            return "", False
        notes = self._hear(update - 1)
        return next((note.end for note in notes if note.end), ""), any(note.save for note in notes)

    def _post(self, update: int) -> None:
        """Tells the other ranks how this one stands at the end of an update, after hearing of the one before."""
        if self._posted is not None:
            self._hear(self._posted[0])
        self._request_what_is_due()
        waited = [clock.seconds["input"] for clock in self.clocks if clock.worker.startswith("drafter")]
        note = Note(self._tokens, sum(waited), len(waited), self.requested, self._save_requested)
        if self.ranks.world > 1 and note.save:  # a request that came since then is for the next note
            self._save_requested = False
        self._posted = (update, self.ranks.post(note))

    def _hear(self, update: int) -> list[Note]:
        """The notes of all ranks at the end of an update."""
        if update not in self._notes:
            assert self._posted is not None
            assert self._posted[0] == update
            self._notes = {number: notes for number, notes in self._notes.items() if number >= update - 2}
            self._notes[update] = self._posted[1]()
            self._tokens_told = sum(note.tokens for note in self._notes[update])
        return self._notes[update]

    def saves_after(self, update: int) -> bool:
        """Whether all replicas stand still after it, for `save`. Asked after they agreed on what `wants_end` said."""
        return self._saving == update or self._comparing

    def save(self, update: int, *, last: bool) -> None:
        """Has the checkpoint of an update written: in the background, or to the end if it is the run's last.

        Where there are several ranks, they first make sure that they hold the same weights.

        Raises:
            UserError: the last checkpoint of the run could not be written, or the ranks have drifted apart.
        """
        self.flush()
        if self._comparing:
            self._compare(update + 1)
        if self._saving != update:
            return
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
        if not self.ranks.writes or updates in (self._first_update, self.saver.last_step):
            return False
        tensors, state = self._snapshot()
        for device in {value.device for value in tensors.values() if value.is_cuda}:
            torch.cuda.synchronize(device)
        self._finish_saving(updates, tensors, state)
        return True

    def _compare(self, step: int) -> None:
        """Raises UserError if the ranks' masters differ by a bit."""
        masters = sorted((name, t) for name, t in self._snapshot()[0].items() if name.startswith("master/"))
        sums = [value.view(torch.int32).sum(dtype=torch.int64) for _, value in masters]
        digest = hashlib.sha256(json.dumps([int(each) for each in sums]).encode()).hexdigest()
        found = self.ranks.gather(digest)
        others = [str(rank) for rank, each in enumerate(found) if each != found[0]]
        if others:
            raise UserError(
                f"after step {step} rank {', '.join(others)} holds other weights than rank 0",
                where="training",
                fix="resume from the last checkpoint; if it comes again, a device or its link is faulty",
            )

    def _finish_saving(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        try:
            limit = time.monotonic() + LAST_SAVE_SECONDS
            self.saver.finish(step, tensors, state, lambda: min(limit - time.monotonic(), self.seconds_left))
        except OSError as error:
            kept = f"the last one is {self.checkpoint}" if self.checkpoint else "there is no earlier one"
            raise UserError(
                f"the checkpoint of step {step} could not be written: {reason_of(error)}; {kept}",
                where=self.config.training.output,
            ) from None

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
        self._pending.append(_Pending(update, kind, values, event, time.monotonic() - self._paused))
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
        skipped = not math.isfinite(norm)
        if skipped:
            self._check_weights(step)
            text = self.not_finite.bad(pending.update, loss, norm)
            self.log.write("notice", topic="not finite", step=step, text=text)
        else:
            self.not_finite.fine(pending.update)
        if not math.isnan(loss) and not skipped:
            self.loss, self.tau_proxy = loss, float(summary["tau_proxy"])  # type: ignore[arg-type]
        self.losses.append(loss)
        notes = self._hear(pending.update)
        tokens = sum(note.tokens for note in notes)
        rate, wait, covered = self._rates(pending.time, notes)
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
            **({"skipped": True} if skipped else {}),
            blocks=summary["blocks"],
            tokens=tokens,
            tokens_per_second=rate,
            rate_seconds=round(covered, 3),
            data_wait=wait,
            eta_seconds=self.seconds / done * (self.sequence.steps - step),
        )
        for clock in self.clocks:
            for span in clock.drain():
                self.log.write(**span)

    def _check_weights(self, step: int) -> None:
        """Behind an update that was not finite: it changed nothing, so what is broken now was so before.

        Raises:
            UserError: weights or optimizer state are not finite.
        """
        name = self.not_finite.broken_weight() or first_not_finite(self._snapshot()[0])
        if name:
            raise broken_weights(step, name, newest_step(Path(self.config.training.output)))

    def _rates(self, now: float, notes: list[Note]) -> tuple[float, float, float]:
        """(real tokens per second, share of the drafters' time spent waiting for rows, seconds that both cover)."""
        tokens = sum(note.tokens for note in notes)
        waited = sum(note.waited for note in notes) / sum(note.drafters for note in notes)
        if not self._recent:
            self._recent.append((self._began, 0, 0.0))
        self._recent.append((now, tokens, waited))
        while len(self._recent) > 2 and now - self._recent[1][0] > RATE_SECONDS:
            self._recent.popleft()
        began, tokens_before, waited_before = self._recent[0]
        seconds = max(now - began, 1e-9)
        return (tokens - tokens_before) / seconds, min(1.0, (waited - waited_before) / seconds), seconds


OVERFIT_LOSS, OVERFITTED = 0.05, "overfitted"
