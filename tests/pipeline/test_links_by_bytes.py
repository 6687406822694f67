"""A link is bounded by rows and by bytes, and can never stand still."""

from __future__ import annotations

import random
import threading
import time

import pytest

from draftsmith.pipeline.link import Link, Stop


def test_bytes_bound_what_waits_and_the_lowest_number_always_fits() -> None:
    link: Link[str] = Link(first=0, stride=2, capacity=5, stop=Stop(), most_bytes=10)
    link.reserve(2, 8)
    link.reserve(0, 50)  # larger than everything, but its turn
    blocked = threading.Thread(target=link.reserve, args=(4, 3), daemon=True)
    blocked.start()
    time.sleep(0.05)
    assert blocked.is_alive()
    assert link.bytes() == 58
    link.put(0, "a")
    assert link.take(0) == "a"
    time.sleep(0.05)
    assert blocked.is_alive(), "8 of 10 bytes are still reserved"
    link.put(2, "b")
    assert link.take(2) == "b"
    blocked.join(60)
    assert not blocked.is_alive()
    assert link.bytes() == 3


def test_a_reservation_is_made_once() -> None:
    link: Link[int] = Link(0, 1, 4, Stop(), 10)
    link.reserve(1, 4)
    with pytest.raises(AssertionError, match="twice"):
        link.reserve(1, 4)
    with pytest.raises(AssertionError, match="not of this consumer"):
        Link[int](0, 2, 4, Stop()).reserve(1)


@pytest.mark.parametrize("seed", range(25))
def test_any_sizes_and_any_timing_come_through_in_order_and_within_bounds(seed: int) -> None:
    """Random producers, consumers, capacities and sizes, some larger than the limit: everything arrives, and what waits
    behind the lowest number is never more than the limit."""
    generator = random.Random(seed)
    producers, consumers = generator.randint(1, 4), generator.randint(1, 4)
    capacity, most, count = generator.randint(1, 4), generator.randint(1, 40), 60
    sizes = [generator.randint(0, 60) for _ in range(count)]
    stop = Stop()
    links: list[Link[int]] = [Link(index, consumers, capacity, stop, most) for index in range(consumers)]
    taken: list[list[int]] = [[] for _ in range(consumers)]
    excess: list[str] = []

    def produce(index: int) -> None:
        for number in range(index, count, producers):
            link = links[number % consumers]
            link.reserve(number, sizes[number])
            with link._changed:
                later = [size for other, size in link._reserved.items() if other != link._next]
                if (len(later) > 1 and sum(later) > most) or len(link._reserved) > capacity:
                    excess.append(f"{link._reserved} with {link._next} next, {most} bytes, {capacity} rows")
            if generator.random() < 0.2:
                time.sleep(0.0005)
            link.put(number, number)

    def consume(index: int) -> None:
        for number in range(index, count, consumers):
            taken[index].append(links[index].take(number))
            if generator.random() < 0.2:
                time.sleep(0.0005)

    threads = [threading.Thread(target=produce, args=(i,), daemon=True) for i in range(producers)]
    threads += [threading.Thread(target=consume, args=(i,), daemon=True) for i in range(consumers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "it stands still"
    assert taken == [list(range(index, count, consumers)) for index in range(consumers)]
    assert not excess
