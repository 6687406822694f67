"""Features from device to device: who waits for what, by an order that is written down; nothing copied without need.

The devices are made up: streams are lists of operations with edges between them, so "before" is a path in a graph, and
a race is two operations on one buffer without a path.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.pipeline.handoff import Arrived, HandOff
from draftsmith.target.forward import Features

GPUS = [torch.device("cuda", index) for index in range(3)]


class Placed(Tensor):
    """A small tensor that claims to lie on another device."""

    where: torch.device

    @staticmethod
    def on(device: torch.device, rows: int = 2, dtype: torch.dtype = torch.float32) -> Placed:
        made = torch.zeros(rows, 3, dtype=dtype).as_subclass(Placed)
        made.where = device
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.where

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        if args == (self.dtype,):
            return self
        made = Placed.on(self.where, self.shape[0], args[0])
        return made


class MadeUp:
    """Devices that only write down. An operation is a number; `before[n]` are those that it waits for directly."""

    def __init__(self, reachable: bool = True) -> None:
        self.reachable = reachable
        self.before: list[set[int]] = []
        self.last: dict[str, set[int]] = {}
        self.writes: dict[int, list[int]] = {}
        self.reads: dict[int, list[int]] = {}
        self.stream = ""
        self.kept: list[str] = []
        self.pinned: list[int] = []

    def operation(self, stream: str) -> int:
        self.before.append(set(self.last.get(stream, set())))
        self.last[stream] = {len(self.before) - 1}
        return len(self.before) - 1

    def reaches(self, _source: torch.device, _device: torch.device) -> bool:
        return self.reachable

    def current(self, device: torch.device) -> str:
        return f"{self.stream} on {device}"

    def copy_stream(self, device: torch.device) -> str:
        return f"copies on {device}"

    def record(self, stream: str) -> set[int]:
        return set(self.last.get(stream, set()))

    def wait(self, stream: str, event: set[int]) -> None:
        self.last[stream] = self.last.get(stream, set()) | event

    def copy(self, to: Tensor, value: Tensor, streams: tuple[str, ...]) -> None:
        number = self.operation(streams[-1])
        self.writes.setdefault(id(to), []).append(number)
        self.reads.setdefault(id(value), []).append(number)

    def keep(self, _value: Tensor, stream: str) -> None:
        self.kept.append(stream)

    def empty(self, value: Tensor, device: torch.device | None) -> Tensor:
        made = Placed.on(device or torch.device("cpu"), value.shape[0], value.dtype)
        if device is None:
            self.pinned.append(id(made))
        return made

    def is_before(self, first: int, second: int) -> bool:
        seen, todo = set(), [second]
        while todo:
            number = todo.pop()
            if number == first:
                return True
            if number not in seen:
                seen.add(number)
                todo += self.before[number]
        return False

    def compute(self, stream: str, device: torch.device, *, writes: Tensor | None = None, reads: Any = ()) -> None:
        """A kernel of a worker."""
        self.stream = stream
        number = self.operation(self.current(device))
        if writes is not None:
            self.writes.setdefault(id(writes), []).append(number)
        for value in reads:
            self.reads.setdefault(id(value), []).append(number)

    def races(self) -> list[str]:
        found = []
        for place, writes in self.writes.items():
            for write, other in itertools.product(writes, self.reads.get(place, []) + writes):
                if write != other and not self.is_before(write, other) and not self.is_before(other, write):
                    found.append(f"{write} and {other}")
        return found


def play(devices: MadeUp, rows: int, waiting: int, seed: int, sources: int = 2) -> tuple[HandOff, list[Tensor]]:
    """Targets on several devices send rows to a drafter on cuda:0, in an order of host events drawn at random."""
    generator = random.Random(seed)
    hand_off = HandOff(GPUS[0], torch.float32, devices=devices)
    queue: list[Arrived] = []
    every: list[Tensor] = []
    sent = done = 0
    while done < rows:
        if sent < rows and len(queue) < waiting and generator.random() < 0.6:
            source = GPUS[1 + sent % sources]
            features = Features(Placed.on(source))
            every.append(features.taps_SF)
            devices.compute(f"target {sent % sources}", source, writes=features.taps_SF)
            queue.append(hand_off.bring(features))
            sent += 1
        elif queue:
            arrived = queue.pop(0)
            devices.stream = "drafter"
            hand_off.read(arrived)
            devices.compute("drafter", GPUS[0], reads=[arrived.features.taps_SF])
            hand_off.release(arrived)
            every.append(arrived.features.taps_SF)
            done += 1
    return hand_off, every


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("reachable", [True, False])
def test_a_buffer_is_never_written_while_somebody_reads_it(seed: int, reachable: bool) -> None:
    devices = MadeUp(reachable)
    hand_off, every = play(devices, rows=24, waiting=3, seed=seed)
    assert devices.races() == []
    assert 1 <= hand_off.buffers <= 4, "as many as rows that wait, and the one in hand"
    assert len({id(value) for value in every if value.device == GPUS[0]}) == hand_off.buffers
    for value in every:
        for read in devices.reads.get(id(value), []):
            assert any(devices.is_before(write, read) for write in devices.writes[id(value)]), "read before written"


def test_the_check_itself_sees_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait for the step that read a buffer, the same play has races."""
    released = HandOff.release

    def forget(self: HandOff, arrived: Arrived) -> None:
        released(self, arrived)
        assert arrived.buffer is not None
        arrived.buffer.free = None

    monkeypatch.setattr(HandOff, "release", forget)
    devices = MadeUp()
    play(devices, rows=24, waiting=3, seed=0)
    assert devices.races()


def test_copies_run_beside_the_work_of_targets_and_drafter() -> None:
    devices = MadeUp()
    play(devices, rows=3, waiting=1, seed=0, sources=1)
    assert set(devices.last) == {"target 0 on cuda:1", "copies on cuda:1", "copies on cuda:0", "drafter on cuda:0"}
    assert set(devices.kept) == {"copies on cuda:1"}, "the target's memory is kept for the copy"


def test_without_peer_access_features_go_through_page_locked_memory_and_one_line_says_so() -> None:
    devices, told = MadeUp(reachable=False), []
    hand_off = HandOff(GPUS[0], torch.float32, told.append, devices)
    for _ in range(3):
        devices.stream = "target 0"
        arrived = hand_off.bring(Features(Placed.on(GPUS[1]), Placed.on(GPUS[1])))
        hand_off.release(arrived)
    assert len(devices.pinned) == 2, "one buffer of two tensors, used again"
    assert told == ["cuda:1 cannot reach the memory of cuda:0: features go through the host's memory"]


def test_nothing_is_copied_where_both_roles_share_a_device() -> None:
    devices = MadeUp()
    hand_off = HandOff(GPUS[1], torch.float32, devices=devices)
    features = Features(Placed.on(GPUS[1]), Placed.on(GPUS[1]))
    devices.compute("target 0", GPUS[1], writes=features.taps_SF)
    arrived = hand_off.bring(features)
    assert arrived.features is features
    assert (arrived.buffer, hand_off.buffers, devices.reads) == (None, 0, {})
    devices.stream = "drafter"
    hand_off.read(arrived)
    devices.compute("drafter", GPUS[1], reads=[features.taps_SF])
    hand_off.release(arrived)
    assert devices.races() == []
    assert devices.kept == ["drafter on cuda:1"] * 2, "the allocator waits for the drafter's stream too"


def test_on_the_cpu_features_pass_through() -> None:
    hand_off = HandOff(torch.device("cpu"), torch.float32)
    features = Features(torch.ones(2, 3), torch.ones(2, 3))
    arrived = hand_off.bring(features)
    assert arrived.features is features
    assert arrived.ready is None
    assert hand_off.size(features) == 2 * 2 * 3 * 4
    hand_off.read(arrived)
    hand_off.release(arrived)
    other = HandOff(torch.device("cpu"), torch.bfloat16).bring(features)
    assert other.features.taps_SF.dtype == torch.bfloat16
    assert features.taps_SF.dtype == torch.float32
