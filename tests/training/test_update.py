"""The shared update against one plain float32 optimizer, and the learning-rate schedule."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from draftsmith.config import OptimizerConfig
from draftsmith.drafter import DrafterSpec
from draftsmith.drafter.model import DraftModel, initialise
from draftsmith.objective import Sums
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.sync import Exchange
from draftsmith.training.schedule import learning_rate_factor
from draftsmith.training.update import choose_owners, make_updates

SPEC = DrafterSpec(
    hidden_size=8, layers=1, heads=2, kv_heads=1, head_dim=4, intermediate_size=12, rms_norm_eps=1e-6, rope_theta=1e4,
    max_position_embeddings=64, vocab_rows=17, target_layers=4, taps=(1, 2), block_size=4, mask_token_id=0,
    layer_types=("full_attention",),
)  # fmt: skip
BLOCK = SPEC.block_size


def fresh() -> DraftModel:
    model = DraftModel(SPEC)
    initialise(model, seed=3)
    return model


def row_gradients(rows: int) -> list[tuple[dict[str, torch.Tensor], float]]:
    """Gradient of Σ w·loss and Σ w of every row, made up."""
    generator = torch.Generator().manual_seed(5)
    shapes = {name: value.shape for name, value in fresh().named_parameters()}
    return [
        ({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}, float(2 + row))
        for row in range(rows)
    ]


def run_shared(replicas: int, updates: list[list[int]], rows, config: OptimizerConfig):
    """Feeds rows to replicas by number, in threads; returns the replicas' models and the norms."""
    models = [fresh() for _ in range(replicas)]
    exchange = Exchange(make_updates(models, config), Stop())
    norms: list[float] = []

    def work(index: int) -> None:
        for step, numbers in enumerate(updates):
            total = torch.zeros(Sums.size(BLOCK))
            for number in numbers:
                if number % replicas != index:
                    continue
                gradients, weight = rows[number]
                for name, parameter in models[index].named_parameters():
                    parameter.grad = gradients[name].clone()
                exchange.updates[index].accumulate()
                total[1] += weight
            _, norm = exchange.update(index, Sums(total), 1.0 / (step + 1))
            if index == 0:
                norms.append(float(norm))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return models, exchange, norms


def muon_limit(parameter: torch.Tensor, lr: float) -> float:
    """What a few numbers that round to another bfloat16 may do to a parameter: a sixtieth of a Muon step's size."""
    if parameter.dim() != 2:
        return 2e-6
    rows, columns = parameter.shape
    return lr * max(1.0, rows / columns) ** 0.5 * min(rows, columns) ** -0.5 / 60


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_shared_update_equals_one_plain_optimizer(name: str, replicas: int) -> None:
    """Tolerance 2e-6: sums over rows are formed in another order. Muon rounds to bfloat16 on its way (`muon_limit`)."""
    config = OptimizerConfig(name=name, lr=1e-2, weight_decay=0.01, clip=0.5)
    rows = row_gradients(7)
    updates = [[0, 1, 2], [3, 4], [5, 6]]
    models, _, norms = run_shared(replicas, updates, rows, config)

    plain = fresh()
    matrices = [p for p in plain.parameters() if p.dim() == 2]
    vectors = [p for p in plain.parameters() if p.dim() != 2]
    vector_group = {"params": vectors, "weight_decay": 0.0}
    if name == "muon":
        optimizers = [torch.optim.Muon(matrices, lr=0.1, weight_decay=0.01), torch.optim.AdamW([vector_group], lr=1e-2)]
    else:
        optimizers = [torch.optim.AdamW([vector_group, {"params": matrices, "weight_decay": 0.01}], lr=1e-2)]
    base = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    expected_norms = []
    for step, numbers in enumerate(updates):
        weight = sum(rows[number][1] for number in numbers)
        for key, parameter in plain.named_parameters():
            parameter.grad = sum(rows[number][0][key] for number in numbers) / weight
        expected_norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        for optimizer, rates in zip(optimizers, base, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate / (step + 1)
            optimizer.step()

    assert norms == pytest.approx(expected_norms, rel=1e-5)
    for model in models:
        for key, parameter in model.named_parameters():
            limit = muon_limit(parameter, 0.1) if name == "muon" else 2e-6
            torch.testing.assert_close(parameter, plain.get_parameter(key), rtol=0, atol=limit, msg=key)


def test_a_replica_without_rows_takes_part_and_changes_nothing() -> None:
    rows = row_gradients(3)
    config = OptimizerConfig(lr=1e-2)
    wide, _, _ = run_shared(3, [[0, 1], [0]], rows, config)
    narrow, _, _ = run_shared(1, [[0, 1], [0]], rows, config)
    for key, parameter in wide[2].named_parameters():
        torch.testing.assert_close(parameter, narrow[0].get_parameter(key), rtol=0, atol=1e-6)


def test_bfloat16_weights_follow_float32_masters() -> None:
    """Steps far below bfloat16's resolution still add up, because the masters hold them."""
    model = fresh().bfloat16()
    config = OptimizerConfig(lr=1e-5, clip=1e9)
    exchange = Exchange(make_updates([model], config), Stop())
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    total = torch.zeros(Sums.size(BLOCK))
    total[1] = 1.0
    for _ in range(600):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        exchange.updates[0].accumulate()
        exchange.update(0, Sums(total), 1.0)
    moved = (before["norm.weight"].float() - model.norm.weight.detach().float()).mean()
    assert moved.item() == pytest.approx(600e-5, rel=0.4)


def test_state_survives_another_number_of_replicas() -> None:
    """Masters and moments saved by three owners and loaded by one continue as three would have."""
    config = OptimizerConfig(lr=1e-2)
    rows = row_gradients(6)
    _, first, _ = run_shared(3, [[0, 1, 2]], rows, config)
    tensors = {name: value.clone() for update in first.updates for name, value in update.state_tensors().items()}
    assert sum(name.startswith("master/") for name in tensors) == len(list(fresh().named_parameters()))

    model = fresh()
    updates = make_updates([model], config)
    updates[0].load_state_tensors(tensors)
    updates[0].refresh(updates)
    exchange = Exchange(updates, Stop())
    total = torch.zeros(Sums.size(BLOCK))
    for number in (3, 4, 5):
        gradients, weight = rows[number]
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].clone()
        exchange.updates[0].accumulate()
        total[1] += weight
    exchange.update(0, Sums(total), 0.5)
    whole, _, _ = run_shared(3, [[0, 1, 2], [3, 4, 5]], rows, config)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, whole[0].get_parameter(key), rtol=0, atol=1e-6)


def test_owners_share_the_work_evenly() -> None:
    sizes = {f"p{i}": size for i, size in enumerate([100, 100, 100, 50, 50, 50, 7, 3])}
    owners = choose_owners(sizes, 3)
    loads = [sum(size for name, size in sizes.items() if owners[name] == index) for index in range(3)]
    assert max(loads) - min(loads) <= 7
    assert owners == choose_owners(dict(reversed(list(sizes.items()))), 3)


def test_schedules() -> None:
    cosine = OptimizerConfig(schedule="cosine", warmup=0.1, final_lr=0.1)
    factors = [learning_rate_factor(cosine, step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1.0
    assert factors[55] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert factors == sorted(factors[:10]) + sorted(factors[10:], reverse=True)

    wsd = OptimizerConfig(schedule="wsd", warmup=0.1, decay=0.2)
    factors = [learning_rate_factor(wsd, step, 100) for step in range(100)]
    assert factors[9:81] == [1.0] * 72
    assert factors[90] == pytest.approx(0.5)
    assert factors[99] == pytest.approx(0.05)

    constant = OptimizerConfig(schedule="constant", warmup=0.0)
    assert {learning_rate_factor(constant, step, 7) for step in range(7)} == {1.0}
