"""Replicas meeting: the phases of an update with barriers between them.

Host threads meet at a barrier; devices meet through CUDA events recorded before it and awaited after it, so no phase
waits for a device on the host. Sums are formed in replica order: the result does not depend on who arrives first.

With several ranks (`ranks.py`) what the replicas of this one have summed is summed over the ranks before anything is
divided: the loss's sums by every replica for itself, the gradients by the replica that owns them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftsmith.objective import Sums
from draftsmith.pipeline.clock import waiting_for_others
from draftsmith.pipeline.link import Stop, Stopped
from draftsmith.training.update import Across, ReplicaUpdate, total_sums


class Exchange:
    """Runs the shared update of D replicas, one call per replica thread.

    Args:
        updates: of the replicas.
        stop: breaks the barrier.
        across: replica → what adds a tensor of its device up over the ranks, in place; None where there is one rank.

    Attributes:
        updates, stop: as given.
        still: whoever holds this lock finds masters and optimizer state between two updates, on the host's side.
        done: updates that are complete.

    If it fails: a replica that raises ends the pipeline through `Stop`, which breaks the barrier; the others leave with
    `Stopped`.
    """

    def __init__(
        self, updates: list[ReplicaUpdate], stop: Stop, across: Callable[[int], Across | None] = lambda _index: None
    ) -> None:
        self.updates, self.stop = updates, stop
        self._across = [across(index) for index in range(len(updates))]
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
            with waiting_for_others():
                self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Stopped from None

    def update(self, index: int, sums: Sums, lr_factor: float) -> tuple[Sums, Tensor]:
        """One update; returns the sums of all replicas of all ranks and the gradient norm before clipping, here."""
        own = self.updates[index]
        total = self.total(index, sums)
        squares = self.meet(index, own.reduce(self.updates, total.weight, self._across[index]))
        norm = torch.stack([square.to(own.device) for square in squares]).sum().sqrt()
        # One test of both: the norm is not finite either where the loss is not, and such an update changes nothing.
        norm = norm + 0 * total.values[0]
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
        """Sums of all replicas, added in order, and of all ranks."""
        total = total_sums(self.meet(index, sums), self.updates[index].device)
        across = self._across[index]
        if across is not None:
            across(total.values)
        return total

    def agree(self, index: int, flag: bool) -> bool:
        """Replica 0's answer, known to all."""
        return bool(self.meet(index, flag)[0])


class Alone:
    """Stands in for the exchange where one thread does everything."""

    def meet(self, index: int) -> None:
        """There is nobody to wait for."""


def exchange_line(parameters: int, itemsize: int, replicas: int, ranks: int, backend: str) -> str:
    """What an update moves between devices, for people; "" where nothing is moved.

    Among D replicas each reads its share of the others' float32 sums and all other shares of the new weights; over W
    ranks each replica's share of the sums goes round once (2·(W-1)/W of it out, and as much in).

    Args:
        parameters: of the drafter.
        itemsize: bytes of a weight.
        replicas: D, of one rank.
        ranks: W.
        backend: what the ranks exchange through.
    """
    parts = []
    if replicas > 1:
        others = (replicas - 1) / replicas
        inside = parameters * (4 + itemsize) * others
        parts.append(f"{_size(inside)} into each of {replicas} drafters from its peers{_times(inside)}")
    if ranks > 1:
        over = 2 * (ranks - 1) / ranks * 4 * parameters / replicas
        parts.append(f"{_size(over)} out of and into each drafter over {ranks} ranks by {backend}{_times(over)}")
    if not parts:
        return ""
    return f"per update {'; '.join(parts)}; sums in fixed order, so a rerun is identical"


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _times(count: float) -> str:
    """At what the buses typically carry; nothing for what no bus would notice."""
    if count < 1e8:
        return ""
    return f" ({count / 25e9 * 1e3:.0f} ms over PCIe at 25 GB/s, {count / 350e9 * 1e3:.0f} ms over NVLink at 350)"
