"""The order of work, and the bounded hand-off that keeps it."""

from __future__ import annotations

import threading
import time

import pytest

from draftsmith.pipeline.jobs import JobSequence
from draftsmith.pipeline.link import Link, Stop, Stopped


@pytest.mark.parametrize(
    ("steps", "rows", "every", "evals"), [(7, 3, 2, 2), (6, 1, 3, 4), (5, 2, 0, 3), (4, 2, 1, 0), (1, 1, 5, 1)]
)
def test_numbers_are_those_of_counting(steps: int, rows: int, every: int, evals: int) -> None:
    sequence = JobSequence(steps, rows, every, evals)
    number = 0
    for update in range(steps):
        assert sequence.first_number(update) == number
        for row in range(update * rows, (update + 1) * rows):
            job = list(sequence.jobs(update))[row - update * rows]
            assert (job.number, job.row, job.learn) == (number, row, True)
            number += 1
        due = evals and ((every and (update + 1) % every == 0) or update + 1 == steps)
        assert sequence.evaluates_after(update) == bool(due)
        number += evals if due else 0
    assert [job.number for job in sequence.jobs(0)] == list(range(number))
    for start in range(steps):  # resuming is the tail of the whole
        tail = [job for job in sequence.jobs(0) if job.update >= start]
        assert list(sequence.jobs(start)) == tail


def test_a_link_is_bounded_and_ordered() -> None:
    stop = Stop()
    link: Link[str] = Link(first=1, stride=3, capacity=2, stop=stop)
    link.put(4, "second")
    link.put(1, "first")
    blocked = threading.Thread(target=link.put, args=(7, "third"), daemon=True)
    blocked.start()
    time.sleep(0.05)
    assert blocked.is_alive()
    assert link.depth() == 2
    assert link.take(1) == "first"
    blocked.join(60)
    assert not blocked.is_alive()
    assert [link.take(4), link.take(7)] == ["second", "third"]


def test_a_link_refuses_what_would_break_the_order() -> None:
    link: Link[int] = Link(first=0, stride=2, capacity=4, stop=Stop())
    link.put(2, 2)
    with pytest.raises(AssertionError, match="twice"):
        link.put(2, 2)
    with pytest.raises(AssertionError, match="not of this consumer"):
        link.put(3, 3)
    with pytest.raises(AssertionError, match="taken before"):
        link.take(2)


def test_stop_wakes_every_waiter_and_keeps_the_first_cause() -> None:
    stop = Stop()
    full: Link[int] = Link(0, 1, 1, stop)
    full.put(0, 0)
    empty: Link[int] = Link(0, 1, 1, stop)
    barrier = stop.watch(threading.Barrier(2))
    ended: list[str] = []

    def wait(name: str, what) -> None:
        try:
            what()
        except (Stopped, threading.BrokenBarrierError):
            ended.append(name)

    threads = [
        threading.Thread(target=wait, args=("put", lambda: full.put(1, 1))),
        threading.Thread(target=wait, args=("take", lambda: empty.take(0))),
        threading.Thread(target=wait, args=("barrier", barrier.wait)),
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    first, second = ValueError("first"), ValueError("second")
    stop.set(first, "worker 1")
    stop.set(second, "worker 2")
    for thread in threads:
        thread.join(60)
    assert sorted(ended) == ["barrier", "put", "take"]
    assert (stop.cause, stop.worker) == (first, "worker 1")


def test_many_producers_and_consumers_lose_nothing_and_never_block() -> None:
    stop, count, consumers, producers = Stop(), 200, 3, 4
    links: list[Link[int]] = [Link(index, consumers, 1, stop) for index in range(consumers)]
    taken: list[list[int]] = [[] for _ in range(consumers)]

    def produce(index: int) -> None:
        for number in range(index, count, producers):
            links[number % consumers].put(number, number)

    def consume(index: int) -> None:
        for number in range(index, count, consumers):
            taken[index].append(links[index].take(number))

    threads = [threading.Thread(target=produce, args=(i,), daemon=True) for i in range(producers)]
    threads += [threading.Thread(target=consume, args=(i,), daemon=True) for i in range(consumers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert taken == [list(range(index, count, consumers)) for index in range(consumers)]
