"""The Triton kernels against torch's operators: on a GPU where there is one, else through Triton's interpreter.

Tolerance: float32 rounding in another order, a millionth of a tensor's largest element after three steps. A weight in
the compute dtype is the rounded master exactly (the interpreter cuts instead of rounding).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from test_update import fresh, muon_limit
from test_update_state import assert_same, noise

from draftsmith.config import OptimizerConfig
from draftsmith.training.flat import BLOCK, padded
from draftsmith.training.update import ReplicaUpdate, buffer_bytes, make_updates

TRITON = importlib.util.find_spec("triton") is not None
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.gpu  # too: without one the kernels are interpreted
kernels = pytest.mark.skipif(not TRITON or (DEVICE.type == "cpu" and not INTERPRETED), reason="no Triton, or no GPU")


@pytest.mark.skipif(not TRITON or DEVICE.type == "cuda" or INTERPRETED, reason="no Triton, or nothing to interpret")
def test_through_the_interpreter() -> None:
    """All of this file in a process of its own: Triton settles what a kernel is when it is imported."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def run(
    fused: bool, dtype: torch.dtype, rows: int, replicas: int, name: str = "adamw", hint: bool = True, bad: int = -1
) -> tuple[list[ReplicaUpdate], list[float]]:
    """Three updates; the one of number `bad` has a gradient that is not a number."""
    models = [fresh().to(DEVICE, dtype) for _ in range(replicas)]
    config = OptimizerConfig(name=name, lr=1e-2, weight_decay=0.05, clip=0.5)  # type: ignore[arg-type]
    updates = make_updates(models, config, fused=fused)
    norms = []
    for step in range(3):
        for row in range(rows):
            for index, model in enumerate(models):
                for key, parameter in model.named_parameters():
                    value = noise(step, 10 * index + row, key, parameter.shape)
                    if step == bad and key == "norm.weight":
                        value[0] = float("nan")
                    parameter.grad = value.to(DEVICE, dtype)
                updates[index].accumulate(last=hint and row == rows - 1)
        weight = torch.tensor(3.0, device=DEVICE)
        norm = torch.stack([each.reduce(updates, weight) for each in updates]).sum().sqrt()
        norms.append(float(norm))
        for each in updates:
            each.apply(norm, 1 / (step + 1))
        for each in updates:
            each.refresh(updates)
    return updates, norms


def state(updates: list[ReplicaUpdate]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for each in updates for name, value in each.state_tensors().items()}


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "replicas", "name", "hint"),
    [(1, 1, "adamw", True), (1, 1, "adamw", False), (3, 1, "adamw", True), (2, 2, "adamw", True), (2, 1, "muon", True)],
    ids=["one row", "one row, not known", "three rows", "two replicas", "muon"],
)
def test_kernels_agree_with_torchs_operators(
    dtype: torch.dtype, rows: int, replicas: int, name: str, hint: bool
) -> None:
    ours, norms = run(True, dtype, rows, replicas, name, hint)
    twin, expected = run(False, dtype, rows, replicas, name)
    assert norms == pytest.approx(expected, rel=1e-6)
    theirs = state(twin)
    for key, value in state(ours).items():
        limit = 1e-6 * float(theirs[key].abs().max())
        if name == "muon" and key.startswith("master/"):
            limit = max(limit, muon_limit(value, 0.1))
        torch.testing.assert_close(value, theirs[key], rtol=0, atol=limit, msg=key)
    for each in ours:
        for weight, master in zip(each._weights, each._masters, strict=True):
            error = (weight.detach().float() - master).abs()
            resolution = torch.finfo(dtype).eps * (0.5 if DEVICE.type == "cuda" else 1)
            assert bool((error <= master.abs() * resolution).all())
            if DEVICE.type == "cuda":
                assert torch.equal(weight.detach(), master.to(dtype))


@kernels
def test_the_sums_are_only_made_where_they_are_needed() -> None:
    """As the plan of memory says."""
    size, cuda = 10**6, torch.device("cuda")
    for rows, name, needed in ((1, "adamw", False), (2, "adamw", True), (1, "muon", True)):
        (update,), _ = run(True, torch.bfloat16, rows, 1, name)
        assert (update._sums is not None) == needed
        state = (8 if name == "muon" else 12) * size
        assert buffer_bytes(size, 1, rows, update.config, cuda) == state + (4 * size if needed else 0)


@kernels
def test_padding_stays_zero() -> None:
    (update,), _ = run(True, torch.bfloat16, 2, 1)
    assert update._sums is not None
    for flat in (update._master, update._exp_avg, update._exp_avg_sq, update._sums):
        for segment in update.layout.segments:
            behind = flat[segment.start + segment.size : segment.start + padded(segment.size)]
            assert behind.numel() == -segment.size % BLOCK
            assert not behind.any()


@kernels
@pytest.mark.parametrize("rows", [1, 2])
def test_a_gradient_that_is_not_finite_changes_nothing(rows: int) -> None:
    (update,), norms = run(True, torch.bfloat16, rows, 1, bad=2)
    assert not torch.tensor(norms[2]).isfinite()
    (short,), _ = run(True, torch.bfloat16, rows, 1, bad=2)
    assert_same(state([update]), state([short]))
    assert update._count.steps == 2
    assert all(value.isfinite().all() for value in update.parameters)


@kernels
def test_gradients_that_a_kernel_could_not_read_are_copied_first() -> None:
    """Of another dtype, transposed, or beginning in the middle of sixteen bytes."""
    model = fresh().to(DEVICE, torch.bfloat16)
    updates = make_updates([model], OptimizerConfig(lr=1e-2), fused=True)
    twins = make_updates([fresh().to(DEVICE, torch.bfloat16)], OptimizerConfig(lr=1e-2), fused=False)
    values = {key: noise(0, 0, key, p.shape).to(DEVICE, torch.bfloat16) for key, p in model.named_parameters()}
    odd = torch.empty(values["norm.weight"].numel() + 1, dtype=torch.bfloat16, device=DEVICE)[1:]
    odd.copy_(values["norm.weight"])
    assert odd.data_ptr() % 16 != 0
    turned = values["fc.weight"].t().contiguous().t()
    assert not turned.is_contiguous()
    order = [each.name for each in updates[0].layout.segments]
    for group, special in ((updates, {"norm.weight": odd, "fc.weight": turned}), (twins, {})):
        for key, parameter in zip(order, group[0].parameters, strict=True):
            parameter.grad = {**values, **special}[key]
        group[0].accumulate(last=True)
        norm = group[0].reduce(group, torch.tensor(1.0, device=DEVICE)).sqrt()
        group[0].apply(norm, 1.0)
    for key, value in state(updates).items():
        torch.testing.assert_close(value, state(twins)[key], rtol=0, atol=1e-6, msg=key)
