"""Where workers' time goes, and the sentence that is made of it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.observe.events import read_events
from draftsmith.observe.live import notable_line
from draftsmith.observe.status import read_status
from draftsmith.observe.trace import write_trace
from draftsmith.pipeline import balance as balance_module
from draftsmith.pipeline import clock as clock_module
from draftsmith.pipeline.balance import Balance, sentence
from draftsmith.pipeline.clock import KINDS, Pace, WorkerClock, waiting_for_others
from draftsmith.pipeline.costs import Costs, Placement, split, together
from draftsmith.pipeline.interpreter import TURN, InterpreterProbe, short_turns
from draftsmith.pipeline.link import Stop, Stopped
from draftsmith.pipeline.run import train
from draftsmith.pipeline.vitals import _Memory, volatile_because
from draftsmith.pipeline.workers import Worker

IDLE = dict.fromkeys(KINDS, 0.0)


def workers(target: dict[str, float], drafter: dict[str, float], prefetch: dict[str, float] | None = None) -> Any:
    found = {f"target {i}": {**IDLE, **target} for i in range(2)}
    found |= {f"drafter {i}": {**IDLE, **drafter} for i in range(2)}
    return found | {"prefetch 0": {**IDLE, **(prefetch or {"busy": 0.1})}}


def heard(step: int, *balances: Balance) -> None:
    for balance in balances:
        balance.heard({"time": 0.0, "kind": "step", "step": step})


def say(costs: Costs | None, placement: Placement, devices: int, rows: int, **shares: Any) -> str:
    usual = workers({"busy": 1.0}, {"busy": 0.6, "input": 0.4})
    return sentence(shares.get("workers", usual), costs, placement, devices, rows, 2)


def test_the_slower_role_and_what_would_be_faster() -> None:
    assert (
        say(Costs(2.0, 0.7, 0.0), split(5, 3), 8, 6)
        == "targets are 1.7× too slow for 3 drafters: 6 + 2 would give +14 %"
    )
    text = say(Costs(0.095, 0.129, 0.01, 0.02), split(1, 1), 2, 2)
    assert text == "the drafter is 1.4× too slow for 1 target: both roles on each of 2 devices would give +12 %"
    text = say(Costs(1.4, 0.84, 0.0), split(5, 3), 8, 6)
    assert text == "5 targets and 3 drafters are balanced: no other use of these 8 devices would be faster"


def test_the_gain_is_that_of_the_two_figures() -> None:
    """6 + 2 against 5 + 3, by hand: 2.0/5 = 0.4 a row now; then max(2.0/6, 0.7/2) = 0.35."""
    assert f"+{100 * (0.4 / 0.35 - 1):.0f} %" in say(Costs(2.0, 0.7, 0.0), split(5, 3), 8, 6)


def test_what_does_not_fit_is_not_proposed() -> None:
    shares = workers({"busy": 1.0}, {"busy": 0.6, "input": 0.4})
    text = sentence(
        shares,
        Costs(2.0, 0.7, 0.0),
        split(5, 3),
        8,
        6,
        2,
        lambda placement: "" if placement == split(5, 3) else "too large",
    )
    assert text.endswith("no other use of these 8 devices would be faster")


def test_prefetch_and_the_interpreter_can_be_the_bottleneck_too() -> None:
    starved = workers({"input": 0.5, "busy": 0.5}, {"input": 0.6, "busy": 0.4}, {"busy": 0.9})
    assert "raise pipeline.prefetch" in say(Costs(1.0, 1.0, 0.0), split(2, 2), 4, 2, workers=starved)
    slowed = workers({"busy": 0.6, "interpreter": 0.4}, {"busy": 1.0})
    assert say(None, split(2, 2), 0, 2, workers=slowed) == (
        "nobody waits; targets wait for the interpreter up to 40% of the time"
    )
    assert say(None, together(2), 0, 2).startswith("both roles on each of 2 devices; drafters have work 60%")


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets what the balance takes for the time."""
    now = [0.0]
    monkeypatch.setattr(balance_module.time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def test_costs_come_from_the_runs_own_rows_unless_devices_are_shared(at) -> None:
    clocks = [WorkerClock("target 0"), WorkerClock("drafter 0")]
    balance = Balance(clocks, split(1, 1), 0, 1, 2)
    shared = Balance(clocks, Placement((0,), (0,)), 0, 1, 2)
    clocks[1].seconds["compiling"] = 30.0
    heard(1, balance, shared)
    at(2.0)
    for clock, busy in zip(clocks, (2.0, 1.0), strict=True):
        clock.rows = 10
        clock.seconds["busy"] += busy
    clocks[1].seconds["input"] += 1.0
    heard(11, balance, shared)
    found = balance.to_json()
    assert found["costs"]["target"] == pytest.approx(0.2)
    assert found["costs"]["drafter"] == pytest.approx(0.1)
    assert found["text"] == "the target is 2.0× too slow for 1 drafter"
    assert found["workers"]["drafter 0"]["input"] == pytest.approx(0.5)
    assert found["workers"]["drafter 0"]["compiling"] == 0.0, "from the first row on"
    assert found["workers"]["target 0"]["row_ms"] == pytest.approx(200)
    assert shared.to_json()["costs"] is None


def test_shares_are_of_the_time_in_which_they_were_spent(at) -> None:
    """A drafter that is always at work, and saves for long after the last update."""
    clocks = [WorkerClock("target 0"), WorkerClock("drafter 0")]
    balance = Balance(clocks, together(1), 0, 1, 2)
    for step in range(1, 5):
        at(1.0 + step)
        clocks[1].seconds["busy"] = 1.0 + step
        heard(step, balance)
        assert (balance.to_json() is None) == (step < 4), "nothing is said of a few updates"
    at(60.0)
    clocks[1].seconds["busy"] = 60.0
    found = balance.to_json()
    assert (found["seconds"], found["step"]) == (3.0, 4)
    assert found["workers"]["drafter 0"]["busy"] == 1.0
    assert found["text"].endswith("drafters have work 100% of the time")


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function in which seconds pass on the clocks of workers, and in nothing else."""
    now = [1000.0]
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: now[0], time=lambda: now[0]))
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_what_goes_on_counts_in_full_where_another_kind_interrupts_it(work) -> None:
    clock = WorkerClock("drafter 0")
    with clock.phase("update", 0):
        work(2.0)
        with clock.waiting("others"):
            work(1.0)
            within = clock.totals()
        work(0.5)
        after = clock.totals()
    assert (within["busy"], within["others"]) == (2.0, 1.0)
    assert (after["busy"], after["others"]) == (2.5, 1.0)
    assert clock.totals() == after


def test_kinds_of_time_never_overlap(work) -> None:
    clock = WorkerClock("drafter 0")

    class Meeting(threading.Thread):
        def run(self) -> None:
            with clock.phase("update", 3):
                work(2.0)
                with waiting_for_others():
                    work(3.0)

    thread = Meeting()
    thread.clock = clock  # type: ignore[attr-defined]
    thread.start()
    thread.join()
    assert clock.seconds == {**IDLE, "others": 3.0, "busy": 2.0}
    (span,) = clock.drain()
    assert (span["kind"], span["what"], span["number"]) == ("phase", "update", 3)


def test_a_rows_span_holds_its_waits(work) -> None:
    clock = WorkerClock("target 0")
    with clock.waiting("input"):
        work(1.0)
    with clock.busy(7):
        work(0.5)
    with clock.waiting("output"):
        work(2.0)
    assert clock.drain() == [], "the row is not over"
    clock.done(queue=2)
    (span,) = clock.drain()
    assert (span["kind"], span["row"], span["queue"], span["worker"]) == ("work", 7, 2, "target 0")
    assert (span["input"], span["output"]) == (1.0, 2.0)
    assert (span["start"], span["end"]) == (1001.0, 1001.5)
    assert clock.rows == 1


def test_without_a_device_of_its_own_a_wait_is_a_wait() -> None:
    pace = Pace(torch.device("cpu"))
    pace.keep()
    pace.mark()
    assert pace.idle() == float("inf")


def test_sleeping_in_a_row_counts_for_the_interpreter_only_as_often_as_it_is_taken() -> None:
    """A thread that sleeps five times in its work, while a wait for the interpreter takes 2 ms."""
    clock = WorkerClock("target 0")
    clock.interpreter_wait = lambda: 0.002
    began = time.perf_counter() - time.thread_time()
    with clock.busy(0):
        for _ in range(5):
            time.sleep(0.004)
    off_core = time.perf_counter() - time.thread_time() - began
    # at least its five sleeps, and never more than it was off the core
    assert 0.0099 <= clock.seconds["interpreter"] <= off_core + 1e-3
    assert clock.seconds["busy"] + clock.seconds["interpreter"] >= 0.02
    quiet = WorkerClock("target 1")
    with quiet.busy(0):
        time.sleep(0.01)
    assert quiet.seconds["interpreter"] == 0.0


def test_the_probe_tells_a_taken_interpreter_from_a_free_one() -> None:
    probe = InterpreterProbe()
    for _ in range(60):
        probe.note(1e-5)  # what the timer always adds
    assert probe.wait() == 0.0
    assert probe.to_json() == {"taken": 0.0, "wait_ms": 0.0}
    for _ in range(20):
        probe.note(1e-5 + 4e-3)
    assert probe.wait() == pytest.approx(4e-3, rel=0.01)
    assert probe.to_json() == {"taken": 0.25, "wait_ms": pytest.approx(4.0, rel=0.01)}


def test_the_probe_notices_a_thread_that_keeps_the_interpreter() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    over = threading.Event()

    def keep() -> None:
        while not over.is_set():
            sum(range(20_000))

    probe, thread = InterpreterProbe(), threading.Thread(target=keep, daemon=True)
    try:
        thread.start()
        probe.start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (probe.to_json()["taken"] > 0.5 and probe.wait() > 0.0005):
            time.sleep(0.1)
        assert probe.to_json()["taken"] > 0.5
        assert probe.wait() > 0.0005
    finally:
        over.set()
        probe.end()
        thread.join(5)
        probe.join(5)
        sys.setswitchinterval(before)


def test_the_first_look_at_memory_names_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {"reserved_bytes.all.current": 100, "num_device_alloc": 4}
    monkeypatch.setattr("torch.cuda.memory_stats", lambda _device: counters)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _device: 50)
    memory = _Memory(torch.device("cuda:0"))
    for first in (True, False):
        memory.look()
        counters["num_device_alloc"] += 1
        facts = memory.sample()
        assert facts["volatility"] == 0.5
        assert ("volatile_because" in facts) == (not first)


def test_volatile_memory_has_a_cause() -> None:
    none = {"num_alloc_retries": 0, "num_device_alloc": 0, "num_device_free": 0}
    assert "asked again, 3 times" in volatile_because({**none, "num_alloc_retries": 3, "num_device_free": 9})
    assert "2 pieces went back" in volatile_because({**none, "num_device_free": 2, "num_device_alloc": 1})
    assert "4 new pieces" in volatile_because({**none, "num_device_alloc": 4})


def test_a_run_ends_with_its_balance(tiny_run, tmp_path) -> None:
    settings = {"pipeline": {"targets": ["cpu"] * 2, "drafters": ["cpu"]}, "training": {"steps": 8, "eval_every": 4}}
    result = train(tiny_run("balance", **settings))
    events = list(read_events(result.folder / "events.jsonl"))
    last = [event for event in events if event["kind"] == "balance"][-1]
    assert last["final"] is True
    assert last["workers"].keys() == {"prefetch 0", "prefetch 1", "target 0", "target 1", "drafter 0"}
    assert all(set(KINDS) <= own.keys() for own in last["workers"].values())
    # From the report of the first update, which comes with the second, to the end.
    assert last["workers"]["drafter 0"]["rows"] == 6 * 6 + 2 * 2
    # Clocks are read while others work, a moment before the time is: a share may be a little too large.
    assert all(0 < sum(own[kind] for kind in KINDS) < 1.5 for own in last["workers"].values())
    assert notable_line(last) == f"balance: {last['text']}"
    status = read_status(result.folder)
    assert any(line.startswith("balance") and last["text"] in line for line in status.lines())
    phases = [event["what"] for event in events if event["kind"] == "phase"]
    assert phases.count("update") == 8
    count = write_trace(result.folder, tmp_path / "trace.json")
    assert 2 * 50 <= count["arrows"] <= 2 * 52, "the last spans may come after the last step"


class FakeEnd:
    """An event that was passed so many milliseconds ago; None: not yet."""

    def __init__(self, ago: float | None) -> None:
        self.ago = ago

    def query(self) -> bool:
        return self.ago is not None

    def elapsed_time(self, now: object) -> float:
        assert self.ago is not None
        return self.ago

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize(("target", "idle"), [(None, 0.0), (5.0, 0.005), (80.0, 0.03)])
def test_workers_of_one_device_look_at_all_of_its_work(monkeypatch, target: float | None, idle: float) -> None:
    monkeypatch.setattr(Pace, "_event", lambda self: FakeEnd(0.0))
    card, other = torch.device("cuda", 0), torch.device("cuda", 1)
    paces = [Pace(card), Pace(card), Pace(other), Pace(torch.device("cpu"))]
    Pace.share(paces)
    paces[0]._end, paces[1]._end, paces[2]._end = FakeEnd(30.0), FakeEnd(target), FakeEnd(None)
    assert paces[0].idle() == pytest.approx(idle)
    assert paces[2].idle() == 0.0
    assert paces[3].idle() == float("inf")


def test_a_wait_in_which_the_run_ends_is_counted() -> None:
    """What `totals` showed while it went on does not vanish, or a share of time would be negative."""
    worker = Worker("target 0", torch.device("cpu"), Stop())
    shown = []

    def wait() -> None:
        with worker.waiting("output"):
            time.sleep(0.01)
            shown.append(worker.clock.totals()["output"])
            raise Stopped

    with pytest.raises(Stopped):
        wait()
    assert worker.clock.totals()["output"] >= shown[0] >= 0.01


def test_threads_take_short_turns_while_a_run_goes_on(tiny_run) -> None:
    before, within = sys.getswitchinterval(), []
    train(tiny_run("turns"), listener=lambda event: within.append((event["kind"], sys.getswitchinterval())))
    turns = [turn for kind, turn in within if kind == "step"]
    assert turns == pytest.approx([TURN] * len(turns), rel=0.01)
    assert turns
    assert sys.getswitchinterval() == before
    with pytest.raises(ValueError, match="whatever"), short_turns():
        raise ValueError("whatever")
    assert sys.getswitchinterval() == before
