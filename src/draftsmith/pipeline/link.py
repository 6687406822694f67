"""Hand-off between workers: bounded, and in order by number.

One `Link` stands in front of each consumer. It knows which numbers that consumer handles (first, first + stride, …), so
several producers may fill it in any order and the consumer still takes them in sequence. A producer reserves room first
and waits while its number is `capacity` or more ahead of what was taken, or its bytes are too many beside those that
are reserved. The lowest number always fits, whatever its size, so nothing can block for ever.

`Stop` is the one switch that ends everything: the first failure is kept, every waiting worker wakes up within a poll
interval and leaves through `Stopped`.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Item = TypeVar("Item")
POLL_SECONDS = 0.2


class Stopped(Exception):
    """Raised in a worker that is waiting when the pipeline ends."""


class Stop:
    """Ends all workers; remembers the first cause."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._barriers: list[threading.Barrier] = []
        self.cause: BaseException | None = None
        self.worker = ""

    def watch(self, barrier: threading.Barrier) -> threading.Barrier:
        """Breaks the barrier when the pipeline ends."""
        with self._lock:
            self._barriers.append(barrier)
        return barrier

    def set(self, cause: BaseException | None = None, worker: str = "") -> None:
        """Ends the pipeline, with or without a failure."""
        with self._lock:
            if cause is not None and self.cause is None and not self._event.is_set():
                self.cause, self.worker = cause, worker
            self._event.set()
            barriers = list(self._barriers)
        for barrier in barriers:
            barrier.abort()

    def is_set(self) -> bool:
        """Whether the pipeline has ended."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits for the end; returns whether it came."""
        return self._event.wait(seconds)

    def check(self) -> None:
        """Raises `Stopped` once the pipeline has ended."""
        if self._event.is_set():
            raise Stopped


class Link(Generic[Item]):
    """Ordered, bounded hand-off to one consumer.

    Args:
        first: first number that the consumer handles.
        stride: distance between its numbers.
        capacity: items that may wait.
        stop: ends waiting.
        most_bytes: that may wait, unless a single item is larger; None: no limit.
    """

    def __init__(self, first: int, stride: int, capacity: int, stop: Stop, most_bytes: int | None = None) -> None:
        self._next = first
        self._stride = stride
        self._capacity = capacity
        self._stop = stop
        self._most_bytes = most_bytes
        self._items: dict[int, Item] = {}
        self._reserved: dict[int, int] = {}  # bytes by number, from the reservation until the item is taken
        self._changed = threading.Condition()

    def reserve(self, number: int, size: int = 0) -> None:
        """Waits until `number` is near enough and `size` bytes have room; `put` does not wait then.

        Raises:
            Stopped: the pipeline ended.
        """
        with self._changed:
            assert (number - self._next) % self._stride == 0, f"{number} is not of this consumer"
            assert number >= self._next, f"{number} was taken already, and handed over twice"
            assert number not in self._reserved, f"{number} was handed over twice"
            while not self._fits(number, size):
                self._wait()
            self._reserved[number] = size

    def put(self, number: int, item: Item) -> None:
        """Leaves the item; without a reservation it waits for one, of no bytes.

        Raises:
            Stopped: the pipeline ended.
        """
        with self._changed:
            assert number not in self._items, f"{number} was handed over twice"
            if number not in self._reserved:
                self.reserve(number)
            self._items[number] = item
            self._changed.notify_all()

    def take(self, number: int) -> Item:
        """Waits for the item `number`, which must be the next one of this consumer.

        Raises:
            Stopped: the pipeline ended.
        """
        with self._changed:
            assert number == self._next, f"{number} taken before {self._next}"
            while number not in self._items:
                self._wait()
            item = self._items.pop(number)
            del self._reserved[number]
            self._next += self._stride
            self._changed.notify_all()
            return item

    def depth(self) -> int:
        """Items that wait."""
        with self._changed:
            return len(self._items)

    def bytes(self) -> int:
        """Bytes that wait or are reserved."""
        with self._changed:
            return sum(self._reserved.values())

    def _fits(self, number: int, size: int) -> bool:
        if number == self._next:
            return True
        if number - self._next >= self._capacity * self._stride:
            return False
        return self._most_bytes is None or sum(self._reserved.values()) + size <= self._most_bytes

    def _wait(self) -> None:
        self._stop.check()
        self._changed.wait(POLL_SECONDS)
        self._stop.check()
