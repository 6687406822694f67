"""A step reads nothing back to the host: on a GPU each such read would wait until the device is done."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.compiled import Gate
from draftsmith.objective import Sums
from draftsmith.pipeline.compile_commands import _random_head
from draftsmith.pipeline.plan import make_plan
from draftsmith.pipeline.proof import make_sample
from draftsmith.pipeline.run import made_up_drafts, make_replicas
from draftsmith.training.update import make_updates

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class HostReads(TorchDispatchMode):
    """Names of operators that need a value on the host: single values, and sizes that depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in READS:
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("labels", ["data", "kl", "tv"])
def test_forward_loss_backward_and_update(tiny_run, labels: str, weights: str) -> None:
    plan = make_plan(tiny_run("run", objective={"labels": labels, "weights": weights}))
    (replica,) = make_replicas(plan, _random_head(plan), Gate())
    sample = make_sample(plan, made_up_drafts(plan), torch.device("cpu"))
    (update,) = make_updates([replica.model], plan.config.optimizer)
    with HostReads() as reads:
        sums = replica.step(sample.features, sample.batch)
        update.accumulate()
        squared = update.reduce([update], sums.weight)
    assert reads.found == []
    assert float(squared) > 0
    with HostReads() as reads:
        Sums(sums.values).summary()
        sums.values.sum().item()
    assert reads.found, "reading is what this test can see"
