"""The update on a GPU: against torch's optimizers, the same bits again, in threads, and without waiting for anybody."""

from __future__ import annotations

import importlib.util
import threading

import pytest
import torch
from test_update import SPEC
from test_update_state import assert_same

from draftsmith.config import OptimizerConfig
from draftsmith.drafter import DrafterSpec
from draftsmith.drafter.model import DraftModel, initialise
from draftsmith.objective import Sums
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.sync import Exchange
from draftsmith.training.update import make_updates

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LARGER = DrafterSpec(**{**vars(SPEC), "hidden_size": 256, "layers": 3, "intermediate_size": 520, "head_dim": 64})
CONFIG = {"lr": 1e-2, "weight_decay": 0.05, "clip": 0.5}
WAYS = [("adamw", True), ("adamw", False), ("muon", True), ("muon", False)]


def model() -> DraftModel:
    found = DraftModel(LARGER)
    initialise(found, seed=3)
    return found.to("cuda", torch.bfloat16)


def gradients(step: int, row: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(100 * step + row)
    return {
        name: torch.randn(value.shape, generator=generator, device="cuda").bfloat16()
        for name, value in DraftModel(LARGER).named_parameters()
    }


def run(
    name: str,
    fused: bool,
    rows: int = 2,
    replicas: int = 1,
    steps: range = range(3),
    state: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """State after some updates, replicas being threads with streams of their own."""
    if fused and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    models = [model() for _ in range(replicas)]
    config = OptimizerConfig.model_validate({**CONFIG, "name": name})
    exchange = Exchange(make_updates(models, config, fused=fused), Stop())
    if state is not None:
        for each in exchange.updates:
            each.load_state_tensors(state)
        for each in exchange.updates:
            each.refresh(exchange.updates)
    made = {(step, row): gradients(step, row) for step in steps for row in range(rows)}
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for step in steps:
                    total = torch.zeros(Sums.size(LARGER.block_size), device="cuda")
                    for row in range(index, rows, replicas):
                        for key, parameter in models[index].named_parameters():
                            parameter.grad = made[step, row][key].clone()
                        exchange.updates[index].accumulate(last=row + replicas >= rows)
                        total[1] += 1.0
                    exchange.update(index, Sums(total), 1 / (step + 1))
        except BaseException as error:
            failures.append(error)
            exchange._barrier.abort()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures
    torch.cuda.synchronize()
    found = {key: value.cpu() for each in exchange.updates for key, value in each.state_tensors().items()}
    weights = [dict(each.named_parameters()) for each in models]
    for key, value in weights[0].items():
        assert all(torch.equal(each[key], value) for each in weights), key
        assert torch.equal(value.detach().cpu(), found[f"master/{key}"].bfloat16()), key
    return found


@pytest.mark.parametrize(("name", "fused"), WAYS)
@pytest.mark.parametrize("rows", [1, 3])
def test_equals_torchs_optimizers(name: str, fused: bool, rows: int) -> None:
    """Tolerance: AdamW 2e-6 a step; Muon's products are bfloat16: lr · √(rows / columns) · 2⁻⁷ a step."""
    plain = model().float()
    matrices = [p for p in plain.parameters() if p.dim() == 2]
    vectors = [p for p in plain.parameters() if p.dim() != 2]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(vectors, lr=1e-2, weight_decay=0)]
    if name == "muon":
        optimizers.append(torch.optim.Muon(matrices, lr=0.1, weight_decay=0.05))
    else:
        optimizers.append(torch.optim.AdamW(matrices, lr=1e-2, weight_decay=0.05))
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    for step in range(3):
        made = [gradients(step, row) for row in range(rows)]
        for key, parameter in plain.named_parameters():
            parameter.grad = sum(each[key].float() for each in made) / rows
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate / (step + 1)
            optimizer.step()
    ours = run(name, fused, rows)
    for key, value in plain.named_parameters():
        limit = 6e-6
        if name == "muon" and value.dim() == 2:
            limit = 2 * 0.1 * max(1.0, value.shape[0] / value.shape[1]) ** 0.5 * 2**-7
        torch.testing.assert_close(ours[f"master/{key}"], value.detach().cpu(), rtol=0, atol=limit, msg=key)


@pytest.mark.parametrize(("name", "fused"), WAYS)
@pytest.mark.parametrize("replicas", [1, 3])
def test_again_is_the_same_bits(name: str, fused: bool, replicas: int) -> None:
    assert_same(run(name, fused, 4, replicas), run(name, fused, 4, replicas))


@pytest.mark.parametrize(("name", "fused"), WAYS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_resumed_are_the_same_bits(name: str, fused: bool, replicas: int) -> None:
    half = run(name, fused, 4, replicas, range(2))
    assert_same(run(name, fused, 4, replicas, range(2, 4), half), run(name, fused, 4, replicas, range(4)))


def test_replicas_in_threads_agree_with_one() -> None:
    one, three = run("adamw", True, 4, 1), run("adamw", True, 4, 3)
    for key, value in one.items():
        torch.testing.assert_close(three[key], value, rtol=1e-4, atol=2e-6, msg=key)


@pytest.mark.parametrize(("name", "fused"), WAYS)
@pytest.mark.parametrize("rows", [1, 2])
def test_waits_for_nothing(name: str, fused: bool, rows: int) -> None:
    """Gradients lie elsewhere every time, so addresses are sent again."""
    trained = model()
    (update,) = make_updates([trained], OptimizerConfig.model_validate({**CONFIG, "name": name}), fused=fused)
    weight, kept = torch.tensor(2.0, device="cuda"), []
    for step in range(4):
        made = [gradients(step, row) for row in range(rows)]
        kept.append(made)
        torch.cuda.synchronize()
        if step >= 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            for row in range(rows):
                for key, parameter in trained.named_parameters():
                    parameter.grad = made[row][key]
                update.accumulate(last=row + 1 == rows)
            norm = update.reduce([update], weight).sqrt()
            update.apply(norm, 0.5)
            update.refresh([update])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert float(norm) > 0


def test_nothing_compiles_after_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    compiled: list[str] = []

    def note(*_: object, **told: object) -> None:
        compiled.append(str(told.get("repr", "?")))

    from draftsmith.training import fused

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    for name, rows, replicas in (("adamw", 1, 1), ("adamw", 3, 1), ("adamw", 4, 3), ("muon", 2, 1)):
        for kernel in (fused._collect, fused._adamw):
            kernel.device_caches.clear()  # of this process
        make_updates([model() for _ in range(replicas)], OptimizerConfig.model_validate({**CONFIG, "name": name}))
        assert compiled
        compiled.clear()
        run(name, True, rows, replicas)
        assert compiled == [], (name, rows, replicas)
