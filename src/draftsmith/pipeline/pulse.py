"""Whether all ranks of a run live, and what ended it where it ended first.

A thread of every rank meets those of the others in a small all-reduce (gloo) twice a second. Its two numbers say
whether anybody is still at work and whether anybody has failed. A rank that fails leaves its error in the store first,
so the others find it there; a rank that is killed breaks the connection at once, and one that only stands still lets
the all-reduce run out of its time. Then all that live say so in the store, and who is missing is lost.

Costs 8 bytes and some tenths of a millisecond of a thread each time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from draftsmith.errors import UserError, first_line
from draftsmith.pipeline.link import Stop

PULSE_SECONDS = 0.5
ROLL_SECONDS = 3.0  # for those who live to say so


class RankFailed(UserError):
    """Another rank ended with an error."""


class RankLost(UserError):
    """Another rank is gone without a word. Threads of this process may be stuck for ever."""


class Pulse:
    """See the module's docstring. Starts with `start`.

    Args:
        store: with a connection of its own, which nobody waits in.
        group: of all ranks, over gloo; its timeout is how long a rank may stand still.
        rank, world: whose this is, of how many.
        let_go: called once everything is over because of another rank: ends what devices wait for.

    Attributes:
        names: of all ranks, for people.
        cause: what ended the run in another rank, or None.
        over: set when there is no pulse any more.
        all_know: whether the others have heard that this rank, or another, failed.
    """

    def __init__(
        self, store: dist.Store, group: dist.ProcessGroup, rank: int, world: int, let_go: Callable[[], None]
    ) -> None:
        self.names = [f"rank {each}" for each in range(world)]
        self.cause: UserError | None = None
        self.over = threading.Event()
        self.all_know = False
        self._store, self._group, self._rank, self._world, self._let_go = store, group, rank, world, let_go
        self._failed = self._done = False
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._stop: Stop | None = None
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, stop: Stop) -> None:
        """From now on `stop` is set when another rank fails or is lost."""
        with self._lock:
            self._stop = stop
            cause = self.cause
        if cause is not None:
            stop.set(cause, "ranks")

    def wait_for_the_others(self) -> None:
        """This rank is done: waits until all are, or one has failed."""
        self._done = True
        self._wake.set()
        while self._thread.is_alive():
            try:
                self._thread.join(PULSE_SECONDS)
            except KeyboardInterrupt:  # rank 0, which may still be saving, decides
                if self._rank == 0:
                    raise

    def tell(self, text: str) -> None:
        """This rank has failed: leaves the reason, if it is its own, and waits until all know, or some seconds."""
        with suppress(RuntimeError):  # the store may be gone with the machine that held it
            if text:
                self._store.set(f"failed/{self._rank}", text)
            self._failed = True
            self._wake.set()
            self._thread.join(ROLL_SECONDS + 2 * PULSE_SECONDS)

    def failures(self) -> list[str]:
        """What other ranks left in the store, "rank 1: …"."""
        found = []
        with suppress(RuntimeError):
            for rank in range(self._world):
                if rank != self._rank and self._store.check([f"failed/{rank}"]):
                    text = self._store.get(f"failed/{rank}").decode(errors="replace")
                    found.append(f"rank {rank}: {text}")
        return found

    def _beat(self) -> None:
        try:
            while True:
                state = torch.tensor([not self._done, self._failed], dtype=torch.int32)
                work = dist.all_reduce(state, dist.ReduceOp.MAX, group=self._group, async_op=True)
                while not work.is_completed():
                    if self._known_as_broken():
                        raise RuntimeError("another rank found the connection broken")
                    time.sleep(0.02)
                work.wait()
                if state[1]:
                    self.all_know = True
                    self._someone_failed()
                    return
                if not state[0]:
                    return
                self._wake.wait(PULSE_SECONDS)
                if self._wake.is_set():
                    time.sleep(0.02)
        except Exception as error:
            self._broken(error)
        finally:
            self.over.set()

    def _known_as_broken(self) -> bool:
        try:
            return self._store.check(["broken"])
        except RuntimeError:  # no store any more: the connection itself will show what that means
            return False

    def _someone_failed(self) -> None:
        texts = self.failures()
        if texts:
            self._end(RankFailed("; ".join(texts)), told=self._rank != 0)

    def _broken(self, error: Exception) -> None:
        """Calls the roll: whoever lives says so in the store."""
        missing: list[int] = []
        try:
            self._store.set("broken", "1")
            self._store.set(f"here/{self._rank}", "1")
            deadline = time.monotonic() + ROLL_SECONDS
            keys = {rank: f"here/{rank}" for rank in range(self._world)}
            while not self._store.check(list(keys.values())) and time.monotonic() < deadline:
                time.sleep(0.05)
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            if any(self._store.check([f"failed/{rank}"]) for rank in missing):
                self._someone_failed()
                return
            first = min(rank for rank in keys if rank not in missing)
        except RuntimeError:  # the store went down with rank 0, or with the machine of torchrun's first agent
            missing, first = [0], self._rank
        who = " and ".join(self.names[rank] for rank in missing)
        what = f"lost {who}" if missing else f"lost the connection to other ranks: {first_line(error)[:200]}"
        fix = "the run goes on from its last checkpoint: by itself with torchrun --max-restarts, else with --resume"
        self._end(RankLost(what, where=f"rank {self._rank}", fix=fix), told=self._rank != first)

    def _end(self, cause: UserError, *, told: bool) -> None:
        cause.told = told
        with self._lock:
            self.cause = cause
            stop = self._stop
        self.over.set()
        if stop is not None:
            stop.set(cause, "ranks")
        self._let_go()
