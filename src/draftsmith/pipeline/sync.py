"""Replicas meeting: the phases of an update with barriers between them.

Host threads meet at a barrier; devices meet through CUDA events recorded before it and awaited after it, so no phase
waits for a device on the host. Sums are formed in replica order: the result does not depend on who arrives first.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor

from draftsmith.objective import Sums
from draftsmith.pipeline.link import Stop, Stopped
from draftsmith.training.update import ReplicaUpdate, total_sums


class Exchange:
    """Runs the shared update of D replicas, one call per replica thread.

    Attributes:
        updates: of the replicas.
        still: whoever holds this lock finds masters and optimizer state between two updates, on the host's side.
        done: updates that are complete.

    If it fails: a replica that raises ends the pipeline through `Stop`, which breaks the barrier; the others leave with
    `Stopped`.
    """

    def __init__(self, updates: list[ReplicaUpdate], stop: Stop) -> None:
        self.updates = updates
        self.still = threading.Lock()
        self.done = 0
        self._barrier = stop.watch(threading.Barrier(len(updates)))
        self._posted: list[tuple[Any, torch.cuda.Event | None]] = [(None, None)] * len(updates)

    def meet(self, index: int, value: Any = None) -> list[Any]:
        """Waits for all replicas and returns what each brought, in order.

        Work that was given to a replica's device before is ordered before work that any device is given after.
        """
        device = self.updates[index].device
        event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._posted[index] = (value, event)
        self._wait()
        posted = list(self._posted)
        if len(posted) > 1:
            self._wait()  # nobody posts again before everybody has read
        if device.type == "cuda":
            for _, other in posted:
                if other is not None:
                    torch.cuda.current_stream(device).wait_event(other)
        return [value for value, _ in posted]

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Stopped from None

    def update(self, index: int, sums: Sums, lr_factor: float) -> tuple[Sums, Tensor]:
        """One update; returns the sums of all replicas and the gradient norm before clipping, on this device."""
        own = self.updates[index]
        total = self.total(index, sums)
        squares = self.meet(index, own.reduce(self.updates, total.weight))
        norm = torch.stack([square.to(own.device) for square in squares]).sum().sqrt()
        # Replica 0 holds the lock from before the first of them applies until the last of them has.
        with self.still if index == 0 else contextlib.nullcontext():
            if len(self.updates) > 1:
                self._wait()
            own.apply(norm, lr_factor)
            self.meet(index)
            if index == 0:
                self.done += 1
        own.refresh(self.updates)
        return total, norm

    def total(self, index: int, sums: Sums) -> Sums:
        """Sums of all replicas, added in order."""
        return total_sums(self.meet(index, sums), self.updates[index].device)

    def agree(self, index: int, flag: bool) -> bool:
        """Replica 0's answer, known to all."""
        return bool(self.meet(index, flag)[0])
