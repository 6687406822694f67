"""What a pipeline's speed is said to be, against the pipeline itself; what "auto" chooses, against trying it all."""

from __future__ import annotations

import math
import random

import pytest
import torch

from draftsmith.config import PipelineConfig
from draftsmith.errors import UserError
from draftsmith.pipeline import topology as topology_module
from draftsmith.pipeline.costs import (
    Choice,
    Costs,
    Placement,
    candidates,
    choose,
    reason_of,
    seconds_per_update,
    split,
    together,
)
from draftsmith.pipeline.simulation import simulate
from draftsmith.pipeline.topology import place_and_dtype, resolve_topology


def random_costs(generator: random.Random) -> Costs:
    """Row times within a factor of ten of each other, updates from nothing to longer than a row."""
    target, drafter = (math.exp(generator.uniform(math.log(0.1), math.log(1.0))) for _ in range(2))
    update, exchange = generator.choice([0.01, 0.2, 1.5]), generator.uniform(0, 0.3)
    return Costs(target, drafter, update, exchange, 0.0, 4000.0)


def seconds_of_the_pipeline(costs: Costs, targets: int, drafters: int, rows: int, queue: int) -> float:
    """Of an update, once it is full: by the worker threads themselves, in counted time."""
    turns = math.lcm(targets, drafters)
    period = turns // math.gcd(turns, rows)
    window = period * math.ceil(4 / period)
    ends = simulate(costs, targets, drafters, rows, queue, window + period * math.ceil(3 / period))
    return (ends[-1] - ends[-1 - window]) / window


def test_five_and_three_devices_with_the_times_of_a_27b_target_reach_the_bound() -> None:
    """Within 5 % of max(target/T, drafter/D + (reduce + update)/rows), rows of an update a multiple of D or not."""
    costs = Costs(target=1.15, drafter=0.62, update=0.06, exchange=0.25)
    for rows in (3, 6, 12):
        bound = max(costs.target / 5, costs.drafter / 3 + costs.update_of(3) / rows)
        assert costs.bound(5, 3, rows) == pytest.approx(bound)
        measured = seconds_of_the_pipeline(costs, 5, 3, rows, queue=2) / rows
        assert 1 - 1e-9 <= measured / bound <= 1.05
    for rows in (7, 8):
        measured = seconds_of_the_pipeline(costs, 5, 3, rows, queue=2) / rows
        assert 1 - 1e-9 <= measured / costs.bound(5, 3, rows) <= 1.05


@pytest.mark.parametrize("seed", range(12))
def test_playing_the_rules_in_a_loop_is_what_the_threads_do(seed: int) -> None:
    generator = random.Random(seed)
    targets, drafters, queue = generator.randint(1, 5), generator.randint(1, 4), generator.randint(1, 3)
    rows, costs = generator.randint(drafters, 9), random_costs(generator)
    played = seconds_per_update(costs, split(targets, drafters), rows, queue)
    assert played == pytest.approx(seconds_of_the_pipeline(costs, targets, drafters, rows, queue), rel=1e-6)
    assert played >= costs.bound(targets, drafters, rows) * rows * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_auto_is_what_trying_everything_finds(seed: int) -> None:
    """Every split is run by the worker threads; both roles everywhere lies between two figures that hold for any
    schedule of a device, and is the one where rows divide by devices."""
    generator = random.Random(1000 + seed)
    devices = generator.randint(2, 6)
    rows = devices * generator.randint(1, 2) if seed % 3 == 0 else generator.randint(2, 9)
    costs = random_costs(generator)
    tried: dict[Placement, float] = {
        split(devices - drafters, drafters): seconds_of_the_pipeline(costs, devices - drafters, drafters, rows, 2)
        for drafters in range(1, min(rows, devices - 1) + 1)
    }
    choices = choose(costs, devices, rows, queue=2)
    found = {choice.placement: choice.seconds * rows for choice in choices}
    if devices <= rows:
        work, update = costs.target + costs.drafter, costs.update_of(devices)
        least, most = rows / devices * work + update, math.ceil(rows / devices) * work + update
        tried[together(devices)] = found[together(devices)]
        assert least * (1 - 1e-9) <= tried[together(devices)] <= most * (1 + 1e-9)
        if rows % devices == 0:
            assert tried[together(devices)] == pytest.approx(least)
    assert found.keys() == tried.keys()
    for placement, seconds in tried.items():
        assert found[placement] == pytest.approx(seconds, rel=1e-6), placement.name()
    best = min(tried.values())
    assert tried[choices[0].placement] == pytest.approx(best, rel=1e-6)
    assert choices[0].tokens_per_second == pytest.approx(4000 * rows / best, rel=1e-6)


def test_many_replicas_share_an_update_and_pay_for_the_exchange() -> None:
    costs = Costs(0.1, 0.1, update=0.12, exchange=0.4)
    assert costs.update_of(1) == pytest.approx(0.12)
    assert costs.update_of(4) == pytest.approx(0.03 + 0.3)
    assert costs.update_of(4, devices=1) == pytest.approx(0.03), "nothing is sent on one device"
    one_device = Placement((0,), (0, 0))
    assert seconds_per_update(costs, one_device, 4, 2) == pytest.approx(4 * 0.2 + 0.12)


def test_what_does_not_fit_is_not_chosen_and_the_reason_says_so() -> None:
    costs = Costs(0.095, 0.129, 0.011, 0.02, 0.0005, 4096)
    free, *_ = choose(costs, 2, 2, 2)
    assert free.placement == together(2)
    choices = choose(costs, 2, 2, 2, lambda placement: "needs 200 GiB" if placement.shared else "")
    assert [choice.placement.name() for choice in choices] == ["1 + 1", "both roles on each of 2 devices"]
    reason = reason_of(choices, costs)
    assert "1 + 1: 30,454 real tok/s predicted" in reason
    assert "both roles on each of 2 devices would be faster but needs 200 GiB" in reason
    assert "95.0 ms a row on a target" in reason
    assert "next best 1 + 1, 30,454 real tok/s" in reason_of(choose(costs, 2, 2, 2), costs)


def test_no_candidate_has_more_drafters_than_rows() -> None:
    assert [placement.name() for placement in candidates(4, 2)] == ["3 + 1", "2 + 2"]
    assert together(4) in candidates(4, 4)


class TestAuto:
    """`pipeline: auto` on a machine with made-up GPUs."""

    @pytest.fixture(autouse=True)
    def _gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 8
        monkeypatch.setattr(topology_module.torch.cuda, "device_count", lambda: self.count)
        monkeypatch.setattr(topology_module.torch.cuda, "is_available", lambda: True)

    def test_gpus_on_which_cuda_does_not_start_are_not_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(topology_module.torch.cuda, "is_available", lambda: False)
        for look in (lambda: resolve_topology(PipelineConfig(), 6), lambda: place_and_dtype("auto", "auto")):
            with pytest.raises(UserError, match=r"8 GPUs .* CUDA does not start"):
                look()
        assert place_and_dtype("cpu", "auto") == (torch.device("cpu"), torch.float32)

    def test_measured_costs_decide(self) -> None:
        costs = Costs(1.4, 0.8, 0.05, 0.05, 0.0, 4000.0)
        found = resolve_topology(PipelineConfig(), 6, costs)
        assert [str(device) for device in found.targets] == [f"cuda:{i}" for i in range(5)]
        assert [str(device) for device in found.drafters] == [f"cuda:{i}" for i in range(5, 8)]
        assert "5 + 3: " in found.reason
        assert "measured" in found.reason
        assert not found.to_measure
        assert isinstance(found.choices[0], Choice)

    def test_what_more_rows_would_give_is_said(self) -> None:
        self.count = 2
        found = resolve_topology(PipelineConfig(), 1, Costs(0.095, 0.129, 0.011, 0.02, 0.0, 4096.0))
        assert found.placement.name() == "1 + 1"
        gain = (0.129 + 0.011) / ((0.095 + 0.129) / 2 + (0.0055 + 0.01) / 2) - 1
        assert f"with training.rows_per_update=2 both roles on each of 2 devices would give {gain:+.0%}" in found.reason
        again = resolve_topology(PipelineConfig(), 2, Costs(0.095, 0.129, 0.011, 0.02, 0.0, 4096.0))
        assert "would give" not in again.reason

    def test_without_measuring_it_says_so_and_wants_to(self) -> None:
        found = resolve_topology(PipelineConfig(), 6, Costs(1.4, 0.8, 0.05, source="counted, not measured"))
        assert "not measured" in found.reason
        assert "tok/s" not in found.reason
        assert found.to_measure

    def test_one_gpu_and_none_leave_nothing_to_choose(self) -> None:
        self.count = 1
        found = resolve_topology(PipelineConfig(), 1)
        assert (found.targets, found.drafters) == ((torch.device("cuda", 0),),) * 2
        assert not found.to_measure
        self.count = 0
        assert resolve_topology(PipelineConfig(), 1).targets == (torch.device("cpu"),)

    def test_nothing_fits(self) -> None:
        with pytest.raises(UserError, match=r"no way to use 8 devices fits: .* needs 90 GiB.*span devices"):
            resolve_topology(PipelineConfig(), 8, lacks=lambda _topology: "needs 90 GiB")

    def test_by_hand_devices_may_repeat_and_a_target_may_span_several(self) -> None:
        config = PipelineConfig(targets=("cuda:0+cuda:1", "cuda:2"), drafters=("cuda:2", "cuda:2"))
        found = resolve_topology(config, 2)
        assert [str(device) for device in found.targets] == ["cuda:0", "cuda:2"]
        assert [len(span) for span in found.spans] == [2, 1]
        assert [str(device) for device in found.devices] == ["cuda:0", "cuda:1", "cuda:2"]
        assert found.placement == Placement((0, 2), (2, 2))
        assert found.reason == "as configured"
        with pytest.raises(UserError, match="one kind"):
            resolve_topology(PipelineConfig(targets=("cuda:0+cpu",), drafters=("cpu",)), 1)
        with pytest.raises(UserError, match="cuda:9"):
            resolve_topology(PipelineConfig(targets=("cuda:9",), drafters=("cpu",)), 1)

    @pytest.mark.parametrize(
        ("name", "twice"),
        [
            *(("cpu+cpu", "cpu"), ("cpu+cpu:0", "cpu"), ("cpu + cpu + cpu", "cpu")),
            *(("cuda+cuda:0", "cuda:0"), ("cuda:1+cuda:0+cuda:1", "cuda:1"), ("cuda:2+cuda:2", "cuda:2")),
        ],
    )
    def test_a_device_twice_in_one_span_is_said(self, name: str, twice: str) -> None:
        with pytest.raises(UserError, match=f"pipeline.targets: .*names {twice} twice"):
            resolve_topology(PipelineConfig(targets=("cpu", name), drafters=("cpu",)), 1)

    def test_the_cpu_is_one_device_by_whatever_name(self) -> None:
        found = resolve_topology(PipelineConfig(targets=("cpu", "cpu:0"), drafters=("cpu:0",)), 1)
        assert found.devices == (torch.device("cpu"),)
        with pytest.raises(UserError, match="'cpu:1' does not exist"):
            resolve_topology(PipelineConfig(targets=("cpu:1",), drafters=("cpu",)), 1)
