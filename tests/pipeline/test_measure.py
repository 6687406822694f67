"""Several GPUs and "auto": what is measured, what is made of it, and what a resumed run does. GPUs are made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.compiled import Gate
from draftsmith.errors import UserError
from draftsmith.observe.events import EventLog, read_events
from draftsmith.pipeline import measure as module
from draftsmith.pipeline import plan as plan_module
from draftsmith.pipeline import topology as topology_module
from draftsmith.pipeline.assemble import batch_maker, load_targets, make_replicas
from draftsmith.pipeline.costs import Costs, counted_costs
from draftsmith.pipeline.jobs import Job
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.measure import measure_costs, settle
from draftsmith.pipeline.plan import Plan, make_plan, with_topology
from draftsmith.pipeline.sync import Exchange
from draftsmith.pipeline.topology import Topology
from draftsmith.training.update import make_updates

MEASURED = Costs(1.4, 0.8, 0.05, 0.05, 0.001, 90.0)


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "cache_folder", lambda _plan: tmp_path / "no" / "cache")
    monkeypatch.setattr(topology_module.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(topology_module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plan_module.torch.cuda, "mem_get_info", lambda _device: (100 * 2**30, 140 * 2**30))


def auto_plan(tiny_run: Any, **training: int) -> Plan:
    return make_plan(
        tiny_run(
            "auto",
            rows={"length": 128, "anchors": 32},
            training={"rows_per_update": 6, **training},
            compile={"enabled": "auto"},
        )
    )


def test_a_plan_says_that_nothing_was_measured(tiny_run, eight_gpus) -> None:
    plan = auto_plan(tiny_run)
    assert plan.topology.to_measure
    (line,) = [line for line in plan.lines() if line.startswith("devices")]
    assert "counted, not measured" in line
    assert "tok/s" not in line
    assert plan.to_json()["devices"]["costs"]["source"] == "counted, not measured"


def test_what_was_measured_decides_and_is_written_down(tiny_run, eight_gpus, tmp_path, monkeypatch) -> None:
    plan, target = auto_plan(tiny_run), object()
    monkeypatch.setattr(module, "_measure", lambda *_: (MEASURED, {torch.device("cuda", 0): target}))
    with EventLog(tmp_path / "events.jsonl") as log:
        settled, loaded = settle(plan, tmp_path, log, resume=False)
        assert settled.topology.placement.name() == "5 + 3"
        assert "5 + 3: " in settled.topology.reason
        assert "(measured)" in settled.topology.reason
        assert loaded == {torch.device("cuda", 0): target}
        assert [memory.device for memory in settled.memory] == [f"cuda:{i}" for i in range(8)]
        assert not settled.topology.to_measure

        # A resumed run keeps the devices it had, whatever would be measured now.
        (tmp_path / "resolved.json").write_text(json.dumps(settled.to_json(), default=str))
        monkeypatch.setattr(module, "_measure", lambda *_: pytest.fail("measured again"))
        again, loaded = settle(plan, tmp_path, log, resume=True)
        assert (again.topology.targets, again.topology.drafters) == (
            settled.topology.targets,
            settled.topology.drafters,
        )
        assert again.topology.costs == MEASURED
        assert loaded == {}


def test_on_other_devices_than_before_it_is_measured_anew(tiny_run, eight_gpus, tmp_path, monkeypatch) -> None:
    plan = auto_plan(tiny_run)
    record = {"devices": {"targets": ["cuda:0"], "drafters": ["cuda:11"], "costs": None}}
    (tmp_path / "resolved.json").write_text(json.dumps(record))
    monkeypatch.setattr(module, "_measure", lambda *_: (MEASURED, {}))
    with EventLog(tmp_path / "events.jsonl") as log:
        settled, _ = settle(plan, tmp_path, log, resume=True)
    assert settled.topology.costs == MEASURED


def test_what_does_not_fit_is_left_out(tiny_run, eight_gpus, tmp_path, monkeypatch) -> None:
    """Both roles on a device want more than is free: a split is chosen although it is slower."""
    plan = auto_plan(tiny_run, rows_per_update=8)
    cheap = Costs(1.0, 1.0, 0.01, 0.0, 0.0, 90.0)
    monkeypatch.setattr(module, "_measure", lambda *_: (cheap, {}))
    with EventLog(tmp_path / "events.jsonl") as log:
        settled, _ = settle(plan, tmp_path, log, resume=False)
        assert settled.topology.placement.shared
        need = settled.memory[0].total
        monkeypatch.setattr(plan_module.torch.cuda, "mem_get_info", lambda _device: (need - 1, need))
        settled, _ = settle(plan, tmp_path, log, resume=False)
        assert not settled.topology.placement.shared
        assert "would be faster but needs about" in settled.topology.reason
        monkeypatch.setattr(plan_module.torch.cuda, "mem_get_info", lambda _device: (1000, need))
        with pytest.raises(UserError, match="no way to use 8 devices fits"):
            settle(plan, tmp_path, log, resume=False)


def test_by_hand_nothing_is_measured(tiny_run, tmp_path) -> None:
    plan = make_plan(tiny_run("hand"))
    with EventLog(tmp_path / "events.jsonl") as log:
        assert settle(plan, tmp_path, log, resume=False) == (plan, {})
    assert not list(read_events(tmp_path / "events.jsonl"))


@pytest.mark.parametrize("replicas", [1, 2])
def test_costs_are_measured_on_the_runs_own_work(tiny_run, replicas: int) -> None:
    plan = make_plan(tiny_run("measured", pipeline={"targets": ["cpu"], "drafters": ["cpu"] * replicas}))
    (target,) = load_targets(plan)
    gate = Gate()
    made = make_replicas(plan, target.head(), gate)
    exchange = Exchange(make_updates([replica.model for replica in made], plan.config.optimizer), Stop())
    make = batch_maker(plan, overfit=False)
    taken: list[int] = []

    def job(number: int) -> Any:
        taken.append(number)
        return make(Job(number, True, number, 0))

    costs = measure_costs(target, made, exchange, plan.spec.taps, job, block_size=plan.spec.block_size)
    gate.close()
    assert costs.measured
    assert min(costs.target, costs.drafter, costs.update) > 0
    assert (costs.copy, costs.exchange) == (0.0, 0.0), "one device"
    rows = [plan.corpus.train.row(number) for number in taken]
    assert costs.tokens == pytest.approx(sum(row.real_tokens for row in rows) / len(rows))


def test_counted_costs_follow_the_sizes(tiny_run) -> None:
    """Twice the anchors: more for the drafter, the same for the target; twice the context: more for both."""
    plan = make_plan(tiny_run("counted"))

    def count(**rows: int) -> Costs:
        config = plan.config.model_copy(update={"rows": plan.config.rows.model_copy(update=rows)})
        return counted_costs(config, plan.geometry, plan.spec, plan.parameters, 4)

    usual, wide, long = count(), count(anchors=24), count(length=192)
    assert wide.target == usual.target
    assert wide.drafter > 1.5 * usual.drafter
    assert long.target == pytest.approx(2 * usual.target)
    assert usual.drafter < long.drafter < wide.drafter
    assert not usual.measured


def test_the_same_plan_on_other_devices(tiny_run) -> None:
    plan = make_plan(tiny_run("moved"))
    cpu = torch.device("cpu")
    moved = with_topology(plan, Topology((cpu,), (cpu,) * 4, "as configured"))
    assert any("not a multiple of 4 drafters" in notice for notice in moved.notices)
    back = with_topology(moved, plan.topology)
    assert back.notices == plan.notices
    assert back.memory == plan.memory
    with pytest.raises(UserError, match="too few"):
        with_topology(plan, Topology((cpu,), (cpu,) * 7, "as configured"))


def test_what_was_compiled_to_measure_is_handed_on(tmp_path: Path) -> None:
    filled, place = tmp_path / "cache" / "a", tmp_path / "cache" / "b"
    (filled / "fxgraph").mkdir(parents=True)
    (filled / "fxgraph" / "graph").write_text("x")
    module._hand_on(filled, place)
    assert (place / "fxgraph" / "graph").read_text() == "x"
    (filled / "fxgraph" / "other").write_text("y")
    module._hand_on(filled, place)
    assert not (place / "fxgraph" / "other").exists(), "a cache that is there is its own"
    module._hand_on(filled, tmp_path / "elsewhere" / "c")
    assert not (tmp_path / "elsewhere").exists(), "the user's own cache is not copied"


def test_a_replica_that_fails_leaves_nobody_waiting(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others stand at the exchange; what it raised comes out."""
    plan = make_plan(tiny_run("fails", pipeline={"targets": ["cpu"], "drafters": ["cpu"] * 2}))
    (target,) = load_targets(plan)
    gate = Gate()
    made = make_replicas(plan, target.head(), gate)
    exchange = Exchange(make_updates([replica.model for replica in made], plan.config.optimizer), Stop())
    make, step, calls = batch_maker(plan, overfit=False), made[1].step, [0]

    def fail(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise MemoryError
        return step(*arguments, **named)

    monkeypatch.setattr(made[1], "step", fail)
    with pytest.raises(MemoryError):
        measure_costs(
            target, made, exchange, plan.spec.taps, lambda n: make(Job(n, True, n, 0)), block_size=plan.spec.block_size
        )
    gate.close()
