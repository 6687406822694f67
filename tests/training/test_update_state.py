"""State of the update: resumed bit for bit, taken over from torch's own optimizers, and untouched by a bad gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_update import SPEC, fresh, muon_limit

from draftsmith.config import OptimizerConfig
from draftsmith.drafter.model import DraftModel
from draftsmith.training.update import ReplicaUpdate, make_updates

CONFIG = {"lr": 1e-2, "weight_decay": 0.05, "clip": 0.5}
Gradient = Callable[[int, int, str, torch.Size], torch.Tensor]


def noise(step: int, row: int, name: str, shape: torch.Size) -> torch.Tensor:
    """A row's made-up gradient of a parameter."""
    names = [each for each, _ in DraftModel(SPEC).named_parameters()]
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + 100 * row + names.index(name)))


class Trainer:
    """Replicas that are updated one after another in this thread."""

    def __init__(self, replicas: int, dtype: torch.dtype = torch.float32, **optimizer: object) -> None:
        self.models = [fresh().to(dtype) for _ in range(replicas)]
        self.updates = make_updates(self.models, OptimizerConfig.model_validate({**CONFIG, **optimizer}))
        self.norms: list[float] = []

    def row(self, step: int, row: int, gradient: Gradient = noise, **hint: bool) -> None:
        index = row % len(self.models)
        for name, parameter in self.models[index].named_parameters():
            parameter.grad = gradient(step, row, name, parameter.shape).to(parameter.dtype)
        self.updates[index].accumulate(**hint)

    def finish(self, step: int, weight: float = 2.0, across: Callable[[torch.Tensor], None] | None = None) -> None:
        squares = [each.reduce(self.updates, torch.tensor(weight), across) for each in self.updates]
        norm = torch.stack(squares).sum().sqrt()
        for each in self.updates:
            each.apply(norm, 1 / (step + 1))
        for each in self.updates:
            each.refresh(self.updates)
        self.norms.append(float(norm))

    def step(self, step: int, rows: int = 4, gradient: Gradient = noise) -> None:
        for row in range(rows):
            self.row(step, row, gradient)
        self.finish(step)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for each in self.updates for name, value in each.state_tensors().items()}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        for each in self.updates:
            each.load_state_tensors(tensors)
        for each in self.updates:
            each.refresh(self.updates)

    def weights(self) -> dict[str, torch.Tensor]:
        found = [{name: value.detach().clone() for name, value in model.named_parameters()} for model in self.models]
        for other in found[1:]:
            assert_same(other, found[0])
        return found[0]


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Bit for bit, and nothing but finite numbers."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_resumed_run_and_a_rerun_are_the_same_bits(name: str, replicas: int) -> None:
    straight = Trainer(replicas, torch.bfloat16, name=name)
    for step in range(4):
        straight.step(step)
    first, second = Trainer(replicas, torch.bfloat16, name=name), Trainer(replicas, torch.bfloat16, name=name)
    for step in range(2):
        first.step(step)
    saved = first.state()
    first.step(7)  # what the saved tensors hold does not move on
    second.step(8)  # what is loaded replaces everything
    second.load(saved)
    assert_same(second.state(), saved)
    for step in range(2, 4):
        second.step(step)
    assert_same(second.state(), straight.state())
    assert_same(second.weights(), straight.weights())
    assert second.norms[-2:] == straight.norms[-2:]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_takes_over_what_torchs_own_optimizers_left(name: str) -> None:
    """Checkpoints of earlier releases hold their state: same names, same meaning. Tolerance: as test_update.py."""
    plain = fresh()
    matrices = [p for p in plain.parameters() if p.dim() == 2]
    vectors = [p for p in plain.parameters() if p.dim() != 2]
    optimizers: list[torch.optim.Optimizer]
    if name == "muon":
        optimizers = [torch.optim.Muon(matrices, lr=0.1, weight_decay=0.05)]
        optimizers += [torch.optim.AdamW(vectors, lr=1e-2, weight_decay=0)]
    else:
        optimizers = [torch.optim.AdamW(matrices, lr=1e-2, weight_decay=0.05)]
        optimizers += [torch.optim.AdamW(vectors, lr=1e-2, weight_decay=0)]

    def step(number: int) -> None:
        for key, parameter in plain.named_parameters():
            parameter.grad = noise(number, 0, key, parameter.shape) / 2.0
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()

    for number in range(3):
        step(number)
    tensors = {f"master/{key}": value.detach().clone() for key, value in plain.named_parameters()}
    names = {id(value): key for key, value in plain.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            tensors.update({f"state/{names[id(parameter)]}/{key}": v.clone() for key, v in state.items()})

    ours = Trainer(2, name=name)
    ours.load(tensors)
    assert set(ours.state()) == set(tensors)
    assert_same(ours.state(), tensors)
    for number in range(3, 5):
        step(number)
        ours.row(number, 0)
        squares = [each.reduce(ours.updates, torch.tensor(2.0)) for each in ours.updates]
        for each in ours.updates:
            each.apply(torch.stack(squares).sum().sqrt(), 1.0)
        for each in ours.updates:
            each.refresh(ours.updates)
    for key, value in ours.weights().items():
        limit = muon_limit(value, 0.1) if name == "muon" else 2e-6
        torch.testing.assert_close(value, plain.get_parameter(key), rtol=0, atol=limit, msg=key)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_update_that_is_not_finite_might_as_well_not_have_been(name: str, replicas: int, bad: float) -> None:
    """At the very first update, too, where the moments' corrections divide by nothing."""

    def spoilt(step: int, row: int, key: str, shape: torch.Size) -> torch.Tensor:
        gradient = noise(step, row, key, shape)
        if row == 1 and key == "norm.weight":
            gradient[3] = bad
        return gradient

    good, tried = (Trainer(replicas, torch.bfloat16, name=name) for _ in range(2))
    for step, wrong in enumerate([True, False, True, False]):
        if wrong:
            before = tried.state()
            tried.step(step, gradient=spoilt)
            assert not torch.tensor(tried.norms[-1]).isfinite()
            assert_same(tried.state(), before)
        else:
            good.step(step)
            tried.step(step)
    assert_same(tried.state(), good.state())
    assert_same(tried.weights(), good.weights())


def test_a_parameter_without_a_gradient_counts_as_zero() -> None:
    """Not as what the update before left in the sums."""

    def without(step: int, row: int, key: str, shape: torch.Size) -> torch.Tensor:
        return torch.zeros(shape) if key == "fc.weight" else noise(step, row, key, shape)

    zeros, nothing = Trainer(1), Trainer(1)
    for trainer in (zeros, nothing):
        trainer.step(0)
    zeros.step(1, rows=1, gradient=without)
    for name, parameter in nothing.models[0].named_parameters():
        parameter.grad = None if name == "fc.weight" else noise(1, 0, name, parameter.shape)
    nothing.updates[0].accumulate()
    nothing.finish(1)
    assert_same(nothing.state(), zeros.state())


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_sums_over_ranks_come_before_everything_that_is_not_linear(name: str, replicas: int) -> None:
    """Two ranks with the same rows and twice the weight are one rank: clip, norm and step see the sum."""
    alone, two = Trainer(replicas, name=name), Trainer(replicas, name=name)
    seen: list[torch.Tensor] = []

    def across(flat: torch.Tensor) -> None:
        assert flat.is_contiguous()
        assert flat.dim() == 1
        seen.append(flat.clone())
        flat *= 2

    for step in range(2):
        for row in range(2):  # with three replicas, the last one has no row
            alone.row(step, row)
            two.row(step, row)
        alone.finish(step, weight=2.0)
        two.finish(step, weight=4.0, across=across)
    assert two.norms == pytest.approx(alone.norms, rel=1e-6)
    for key, value in two.weights().items():
        torch.testing.assert_close(value, alone.weights()[key], rtol=0, atol=2e-6)
    owners = sum(bool(each.owned) for each in two.updates)
    assert len(seen) == 2 * owners, "one tensor for each owner and update"
    assert sum(each.numel() for each in seen[:owners]) == two.updates[0].layout.size


def test_the_hint_that_a_row_is_the_last_changes_nothing() -> None:
    plain, hinted, wrong = (Trainer(1) for _ in range(3))
    for step in range(3):
        for row in range(3):
            plain.row(step, row)
            hinted.row(step, row, last=row == 2)
            wrong.row(step, row, last=True)
        for trainer in (plain, hinted, wrong):
            trainer.finish(step)
    assert_same(hinted.state(), plain.state())
    assert_same(wrong.state(), plain.state())


def test_three_replicas_on_two_rows_agree_with_their_sum_in_order() -> None:
    """The owned part of the sums is the replicas' in their order, whoever owns it."""
    trainer = Trainer(3)
    parts = []
    for row in range(3):
        trainer.row(0, row)
        parts.append({name: noise(0, row, name, p.shape) for name, p in trainer.models[0].named_parameters()})
    for each in trainer.updates:
        each.reduce(trainer.updates, torch.tensor(1.0))
    for update in trainer.updates:
        assert isinstance(update, ReplicaUpdate)
        assert update._sums is not None
        for segment in update.owned:
            found = update._sums[segment.start :][: segment.size].view(segment.shape)
            first, second, third = (part[segment.name] for part in parts)
            assert torch.equal(found, first + second + third), segment.name
