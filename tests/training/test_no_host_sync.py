"""A step reads nothing back to the host: on a GPU each such read would wait until the device is done."""

from __future__ import annotations

import pytest
import torch

from draftsmith.bench.row import host_waits
from draftsmith.compiled import Gate
from draftsmith.pipeline.assemble import made_up_drafts, make_replicas
from draftsmith.pipeline.compile_commands import _random_head
from draftsmith.pipeline.plan import make_plan
from draftsmith.pipeline.proof import make_sample
from draftsmith.training.update import make_updates

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("labels", "weights", "optimizer"),
    [
        *((labels, weights, "adamw") for labels in ("data", "kl", "tv") for weights in ("decay", "dpace")),
        ("data", "decay", "muon"),
    ],
)
def test_forward_loss_backward_and_update(tiny_run, labels: str, weights: str, optimizer: str) -> None:
    objective = {"labels": labels, "weights": weights}
    devices = {"targets": ["cpu"], "drafters": ["cpu"]}
    plan = make_plan(
        tiny_run("run", objective=objective, optimizer={"name": optimizer, "weight_decay": 0.1}, pipeline=devices)
    )
    (replica,) = make_replicas(plan, _random_head(plan), Gate())
    sample = make_sample(plan, made_up_drafts(plan), CPU)
    (update,) = make_updates([replica.model], plan.config.optimizer)
    found = []

    def row_and_update() -> None:
        sums = replica.step(sample.features, sample.batch)
        update.accumulate()
        squared = update.reduce([update], sums.weight)
        update.apply(squared.sqrt(), 1.0)
        update.refresh([update])
        found.extend((sums, squared))

    assert host_waits(row_and_update, CPU) == []
    sums, squared = found
    assert float(squared) > 0
    assert host_waits(lambda: sums.values.sum().item(), CPU), "reading is what this test can see"
