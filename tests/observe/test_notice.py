"""What a run notices: each trouble once, with the causes that the record proves and no others."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.observe.events import EventLog, read_events
from draftsmith.observe.notice import Noticer, causes_of, environment_changes, find_earlier

CARDS = {"cuda:0": "NVIDIA H200"}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    with EventLog(tmp_path / "run" / "events.jsonl") as log:
        log.listen(Noticer(log))
        log.write("run", step=0, steps=10_000, workers=[], cards=CARDS, anchors=64)
        yield log


def go(log: EventLog, first: int, last: int, **fields: Any) -> None:
    for step in range(first, last + 1):
        values = {"loss": 2.0, "tau_proxy": 2.0, "tokens_per_second": 1000.0, "data_wait": 0.02, "blocks": 60.0}
        log.write("step", step=step, steps=10_000, **{**values, **fields})


def notices(log: EventLog, topic: str) -> list[dict[str, Any]]:
    return [event for event in read_events(log.path) if event["kind"] == "notice" and event.get("topic") == topic]


def work(log: EventLog, worker: str, seconds: float, rows: int = 60) -> None:
    for row in range(rows):
        log.write("work", worker=worker, row=row, start=100.0, end=100.0 + seconds)


def vitals(log: EventLog, *, load: float = 1.0, pressure: float = 0.05, retries: int = 0, **device: Any) -> None:
    usual = {"device": "cuda:0", "clock": 1980, "clock_max": 1980, "slowed_by": [], "volatility": 0.0}
    facts = {**usual, "retries": retries, **device}
    log.write(
        "vitals", devices=[facts], host={"load": load, "cores": 8, "cpu_pressure": pressure}, workers={}, queues={}
    )


def test_an_even_run_notices_nothing(log: EventLog) -> None:
    generator = random.Random(0)
    for step in range(1, 1500):
        loss = 4 / step**0.3 * generator.uniform(0.97, 1.03)
        tau = 3 - loss / 2
        go(log, step, step, loss=loss, tau_proxy=tau, tokens_per_second=1000 * generator.uniform(0.93, 1.03))
        if step % 50 == 0:
            log.write("eval", step=step, loss=loss, tau_proxy=tau)
    assert [event for event in read_events(log.path) if event["kind"] == "notice"] == []


def test_slow_is_told_once_and_taken_back(log: EventLog) -> None:
    go(log, 1, 60)
    go(log, 61, 70, tokens_per_second=300.0)  # a short dip is none
    go(log, 71, 100)
    assert notices(log, "slow") == []
    go(log, 101, 300, tokens_per_second=700.0)
    go(log, 301, 340)
    go(log, 341, 400, tokens_per_second=800.0)
    first, back, second = notices(log, "slow")
    assert first["text"] == "700 tok/s, 70% of its best (1.0k at step 9): no cause can be proved"
    assert (first["standing"], first["causes"]) == (True, [])
    assert 101 + 20 <= first["step"] <= 101 + 30
    assert back["standing"] is False
    assert second["standing"] is True


CAUSES = {
    "data-wait": (
        lambda log: None,
        {"data_wait": 0.45},
        "drafters wait for rows 45% of the time, 2% then",
    ),
    "clock": (
        lambda log: vitals(log, clock=1200, slowed_by=["power cap"]),
        {},
        "cuda:0 runs at 1200 MHz, 1980 MHz then (power cap)",
    ),
    "memory": (
        lambda log: vitals(log, retries=7),
        {},
        "cuda:0 is short of memory: the allocator gave memory back and asked again 7 times since",
    ),
    "volatility": (
        lambda log: vitals(log, volatility=0.4, volatile_because="tensors of new sizes"),
        {},
        "memory on cuda:0 is 40% volatile, 0% then (tensors of new sizes)",
    ),
    "pressure": (
        lambda log: vitals(log, pressure=0.6),
        {},
        "somebody waits for a core 60% of the time, 5% then",
    ),
    "load": (lambda log: vitals(log, load=30.0), {}, "the machine's load is 30.0 on 8 cores, 1.0 then"),
    "evidence": (
        lambda log: log.write("evidence", ok=False, text="dense scores on cuda:0", step=60),
        {},
        "compile evidence changed: dense scores on cuda:0",
    ),
    "fast path": (
        lambda log: log.write("ledger", lines=["region  graph", "drafter 0  cuda:0  all    eager: dense attention"]),
        {},
        "a fast path is gone: eager: dense attention",
    ),
    "imbalance": (
        lambda log: work(log, "target 1", 0.3),
        {},
        "imbalance: target 1 takes 2.9 times as long for a row as its like, 1.0 then",
    ),
    "slower devices": (
        lambda log: (work(log, "drafter 0", 0.5), None)[1],
        {},
        "drafters take 484 ms for a row, 150 ms then",
    ),
}


@pytest.mark.parametrize("kind", CAUSES)
def test_the_cause_is_the_one_that_the_record_proves(log: EventLog, kind: str) -> None:
    cause, fields, text = CAUSES[kind]
    log.write("evidence", ok=True, text="flex seen", step=1)
    log.write("ledger", lines=["region  graph", "drafter 0  cuda:0  forward  1.0"])
    for name, seconds in (("target 0", 0.1), ("target 1", 0.1), ("target 2", 0.1), ("drafter 0", 0.15)):
        work(log, name, seconds)
    vitals(log)
    go(log, 1, 60)
    cause(log)
    go(log, 61, 120, tokens_per_second=600.0, **fields)
    (notice,) = notices(log, "slow")
    assert notice["causes"] == [text]
    assert notice["text"].endswith(text)


def test_memory_that_fills_at_the_start_proves_nothing() -> None:
    def facts(**device: Any) -> dict[str, Any]:
        return {"devices": [{"device": "cuda:0", **device}]}

    calm, odd = facts(volatility=0.0), facts(volatility=0.9, volatile_because="tensors of new sizes")
    assert causes_of(calm, odd) == ["memory on cuda:0 is 90% volatile, 0% then (tensors of new sizes)"]
    assert causes_of(calm, facts(volatility=0.9)) == []
    assert causes_of(odd, odd) == causes_of(facts(), odd) == causes_of({}, odd) == []


def test_work_that_took_no_time_is_compared_with_nothing() -> None:
    rows = {"target 0": 0.0, "target 1": 0.0, "target 2": 0.1}
    assert causes_of({"row_seconds": rows}, {"row_seconds": rows}) == []


def test_who_keeps_the_drafters_waiting() -> None:
    def facts(wait: float, busy: float, waits: float) -> dict[str, Any]:
        return {"data_wait": wait, "workers": {"target 0": {"busy": busy, "input": waits, "output": 0.0}}}

    (line,) = causes_of(facts(0.0, 0.5, 0.0), facts(0.5, 0.97, 0.01))
    assert line.endswith(": targets are 97% busy")
    (line,) = causes_of(facts(0.0, 0.5, 0.0), facts(0.5, 0.3, 0.6))
    assert line.endswith(": targets wait for prefetch 60% of the time")
    assert causes_of(facts(0.3, 0.9, 0.0), facts(0.35, 0.9, 0.0)) == []


def test_a_spike_of_the_loss(log: EventLog) -> None:
    generator = random.Random(1)
    for step in range(1, 100):
        go(log, step, step, loss=2.0 + generator.uniform(-0.1, 0.1), grad_norm=0.5)
    go(log, 100, 101, loss=4.0, grad_norm=25.0)
    (spike,) = notices(log, "loss")
    assert spike["text"].startswith("loss 4.000 at step 100, usually 2.")
    assert spike["text"].endswith("gradient norm 25, usually 0.5")
    assert "standing" not in spike


def test_a_spike_near_zero_has_figures(log: EventLog) -> None:
    for step in range(1, 100):
        go(log, step, step, loss=1e-5)
    go(log, 100, 101, loss=0.00025)
    (spike,) = notices(log, "loss")
    assert spike["text"].startswith("loss 0.00025 at step 100, usually 1e-05")


def test_dead_anchors(log: EventLog) -> None:
    go(log, 1, 60, blocks=20.0)
    go(log, 61, 200, blocks=60.0)
    dead, over = notices(log, "anchors")
    assert dead["text"].startswith("69% of the anchors teach nothing")
    assert (dead["standing"], over["standing"]) == (True, False)


@pytest.mark.parametrize("kind", ["step", "eval"])
def test_tau_falls_while_the_loss_falls(log: EventLog, kind: str) -> None:
    count = 1000 if kind == "step" else 12
    for number in range(1, count + 1):
        share = number / count
        log.write(kind, step=number, loss=3 - share, tau_proxy=3 - share)
    for number in range(count + 1, 2 * count):
        log.write(kind, step=number, loss=2.0, tau_proxy=2.0 + number / count)
    which = "training" if kind == "step" else "held-out"
    falls, over = notices(log, f"tau {which}")
    assert falls["text"].startswith(f"{which}: τ falls (")
    assert (falls["standing"], over["standing"]) == (True, False)


def test_both_falling_loss_and_rising_tau_or_the_other_way_is_no_news(log: EventLog) -> None:
    for number in range(1, 30):
        log.write("eval", step=number, loss=3 - number / 30, tau_proxy=1 + number / 30)
    for number in range(30, 60):
        log.write("eval", step=number, loss=2 + number / 30, tau_proxy=3 - number / 30)
    assert notices(log, "tau held-out") == []


# ------------------------------------------------------------------------------------------- earlier runs


def make_run(
    folder: Path, rate: float, *, cards: dict[str, str] = CARDS, layers: int = 5, lr: float = 1e-3, **packages: str
):
    folder.mkdir(parents=True)
    config = {"drafter": {"layers": layers}, "optimizer": {"lr": lr}, "training": {"rows_per_update": 3}}
    (folder / "run.json").write_text(json.dumps({"fingerprint": "x", "config": config}))
    record = {
        "packages": {"torch": "2.11.0", **packages},
        "machine": {"driver": "570", "environment": {}},
        "sources": "abc",
    }
    record["draftsmith"] = "0.1.0"
    (folder / "environment.json").write_text(json.dumps(record))
    log = EventLog(folder / "events.jsonl")
    log.write("run", step=0, steps=10_000, workers=[], cards=cards, anchors=64)
    if rate:
        go(log, 1, 20, tokens_per_second=rate)
    return log


def test_an_earlier_run_with_the_same_shapes_and_cards_is_found(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 900.0).close()
    make_run(tmp_path / "b", 1000.0, lr=5.0).close()  # another learning rate is as fast
    make_run(tmp_path / "c", 5000.0, layers=1).close()
    make_run(tmp_path / "d", 5000.0, cards={"cuda:0": "B200"}).close()
    make_run(tmp_path / "e", 0.0).close()
    (tmp_path / "f").mkdir()
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "run.json").write_text("{")
    (tmp_path / "g" / "events.jsonl").write_text("")
    make_run(tmp_path / "now", 0.0).close()
    found = find_earlier(tmp_path / "now", CARDS)
    assert found is not None
    assert (found.folder, found.rate) == (tmp_path / "b", 1000.0)
    assert find_earlier(tmp_path / "now", {"cuda:0": "CPU"}) is None
    assert find_earlier(tmp_path / "f", CARDS) is None


@pytest.mark.parametrize(
    "line",
    [
        '{"time":1,"kind":"step"}', '{"kind":"step","step":1}', '{"time":1,"kind":"step","step":"1"}',
        '{"time":1,"kind":"summary","content":[]}', '{"time":1,"kind":"summary","content":{"step":7,"history":[[]]}}',
    ],
)  # fmt: skip
def test_what_neighbours_wrote_ends_no_run(tmp_path: Path, line: str) -> None:
    make_run(tmp_path / "a", 1000.0).close()
    with open(tmp_path / "a" / "events.jsonl", "a") as file:
        file.write(f"{line}\n")
    make_run(tmp_path / "now", 0.0).close()
    found = find_earlier(tmp_path / "now", CARDS)
    assert found is not None
    assert found.rate == 1000.0


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("run.json", '{"config": {"training": []}}'), ("run.json", '{"config": 1}'), ("run.json", "[" * 100_000),
        ("environment.json", '{"machine": []}'), ("environment.json", '{"packages": "torch"}'),
    ],
)  # fmt: skip
def test_files_of_neighbours_that_are_shaped_otherwise(tmp_path: Path, file: str, content: str) -> None:
    make_run(tmp_path / "a", 1000.0).close()
    (tmp_path / "a" / file).write_text(content)
    make_run(tmp_path / "now", 0.0).close()
    found = find_earlier(tmp_path / "now", CARDS)
    assert (found is None) == (file == "run.json")
    assert environment_changes(tmp_path / "a", tmp_path / "now") == []


def test_neighbours_that_may_not_be_looked_into_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c", "now"):
        make_run(tmp_path / name, 0.0 if name == "now" else 1000.0).close()
    (tmp_path / "c" / "events.jsonl").unlink()
    os.mkfifo(tmp_path / "c" / "events.jsonl")  # whoever opens it waits for a writer
    real = Path.stat

    def closed(self: Path, **named: Any) -> os.stat_result:
        if self.parent == tmp_path / "a":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(self, **named)

    monkeypatch.setattr(Path, "stat", closed)
    found = find_earlier(tmp_path / "now", CARDS)
    assert found is not None
    assert found.folder == tmp_path / "b"
    monkeypatch.setattr(Path, "iterdir", lambda _self: closed(tmp_path / "a" / "x"))
    assert find_earlier(tmp_path / "now", CARDS) is None


def test_slower_than_an_earlier_run_with_what_changed(tmp_path: Path) -> None:
    make_run(tmp_path / "last-week", 1000.0, **{"flash-linear-attention": "0.4.0"}).close()
    log = make_run(tmp_path / "now", 0.0)
    earlier = find_earlier(tmp_path / "now", CARDS)
    assert earlier is not None
    changes = environment_changes(earlier.folder, tmp_path / "now")
    assert changes == ["flash-linear-attention 0.4.0 then, none now"]
    log.listen(Noticer(log, earlier, changes))
    go(log, 1, 100, tokens_per_second=577.0)
    (notice,) = notices(log, "slower")
    assert notice["text"] == (
        f"58% of the speed of {tmp_path / 'last-week'} (1.0k tok/s), same shapes and cards: "
        "flash-linear-attention 0.4.0 then, none now"
    )
    assert log.summary["standing"].keys() == {"slower"}
    go(log, 101, 200, tokens_per_second=990.0)
    assert [event["standing"] for event in notices(log, "slower")] == [True, False]
    log.close()


def test_as_fast_as_before_is_no_news(tmp_path: Path) -> None:
    make_run(tmp_path / "last-week", 1000.0).close()
    log = make_run(tmp_path / "now", 0.0)
    log.listen(Noticer(log, find_earlier(tmp_path / "now", CARDS)))
    go(log, 1, 200, tokens_per_second=960.0)
    assert notices(log, "slower") == []
    log.close()


def test_environments_that_are_not_known_prove_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 0.0).close()
    make_run(tmp_path / "b", 0.0, torch="2.13.0").close()
    assert environment_changes(tmp_path / "a", tmp_path / "b") == ["torch 2.11.0 then, 2.13.0 now"]
    for content in ("{", "[1]"):
        (tmp_path / "a" / "environment.json").write_text(content)
        assert environment_changes(tmp_path / "a", tmp_path / "b") == []
