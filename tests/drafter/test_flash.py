"""FlashAttention-4 behind flex attention: where it can run, what is said where it cannot, and its gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from draftsmith.bench.geometry import GEOMETRIES
from draftsmith.bench.setting import Setting
from draftsmith.config import RunConfig
from draftsmith.doctor import fast_paths
from draftsmith.drafter import build_masks, flash
from draftsmith.drafter.attention import attend, attend_dense, dense_masks, flex_options
from draftsmith.errors import UserError
from draftsmith.pipeline.compiling import cache_folder
from draftsmith.pipeline.plan import check_flex_backend, make_plan
from draftsmith.pipeline.topology import Topology, resolve_topology

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
FLASH = {"flex_backend": "flash"}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of that name, which can be imported."""
    names = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    packages = [ModuleType(name) for name in names]
    for name, package in zip(names, packages, strict=True):
        package.__path__ = []
        package.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, name, package)
    return packages[-1]


def obstacle(device: torch.device, head_dim: int, dtype: torch.dtype) -> str:
    """What `check` says, and that what it would have the user do fits; "" if it says nothing."""
    with suppress(UserError):
        flash.check(device, head_dim, dtype)
        return ""
    with pytest.raises(UserError) as refused:
        flash.check(device, head_dim, dtype, "here")
    assert refused.value.where == "here"
    assert ("pip install" in refused.value.fix) == ("not installed" in refused.value.what)
    return refused.value.what.removeprefix("flash is not possible: ")


@pytest.mark.usefixtures("hopper", "installed")
@pytest.mark.parametrize(
    ("device", "head_dim", "dtype", "why"),
    [
        (CARD, 128, torch.bfloat16, ""),
        (CARD, 64, torch.float16, ""),
        (CPU, 128, torch.bfloat16, "it needs a GPU"),
        (CARD, 256, torch.bfloat16, "it takes heads of up to 128 in multiples of 8, not of 256"),
        (CARD, 36, torch.bfloat16, "it takes heads of up to 128 in multiples of 8, not of 36"),
        (CARD, 128, torch.float32, "it computes in bfloat16 and float16, not in float32"),
    ],
)
def test_what_is_in_the_way(device: torch.device, head_dim: int, dtype: torch.dtype, why: str) -> None:
    assert obstacle(device, head_dim, dtype) == why


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("major", [8, 10, 11, 12])
def test_other_cards(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (major, 0))
    assert obstacle(CARD, 128, torch.bfloat16).endswith(f"(compute capability 9.x), and cuda:0 is {major}.x")


@pytest.mark.usefixtures("hopper")
def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert obstacle(CARD, 128, torch.bfloat16) == "the package flash-attn-4 is not installed"
    with pytest.raises(UserError, match="flash-attn-4 cannot be imported: ModuleNotFoundError") as refused:
        flash.load()
    assert "pip install" in refused.value.fix


@pytest.mark.usefixtures("hopper")
def test_beside_a_broken_older_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Looking for the module imports the package around it."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise OSError('libcudart is not there')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert obstacle(CARD, 128, torch.bfloat16) == "the package flash-attn-4 is not installed"


def test_torch_is_told() -> None:
    assert flex_options(CARD, 128, "flash") == {"BACKEND": "FLASH"}


def refusal(config: RunConfig) -> str:
    with pytest.raises(UserError) as refused:
        make_plan(config)
    assert refused.value.where == "compile.flex_backend"
    return refused.value.what


def topology_of(config: RunConfig) -> Topology:
    return resolve_topology(config.pipeline, config.training.rows_per_update)


def doctors(config: RunConfig) -> tuple[str, str]:
    (found,) = fast_paths._flex_backend(config, topology_of(config))
    return found.level, found.text


def test_a_run_without_a_gpu_is_refused_in_one_line_and_the_doctor_says_the_same(
    tiny_run: Callable[..., RunConfig],
) -> None:
    usual = tiny_run("as usual")
    assert list(fast_paths._flex_backend(usual, topology_of(usual))) == []
    config = tiny_run("cpu", compile=FLASH)
    said = refusal(config)
    assert said == "flash is a way of flex attention, and attention is dense here"
    assert doctors(config) == ("bad", f"compile.flex_backend: {said}")


@pytest.mark.usefixtures("hopper")
def test_every_drafters_card_is_looked_at(
    tiny_run: Callable[..., RunConfig], installed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run("gpu", compile=FLASH)
    cards = [torch.device("cuda", index) for index in range(2)]
    check_flex_backend(config, "flex", 128, torch.bfloat16, cards)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 - device.index, 0))
    with pytest.raises(UserError, match=r"cuda:1 is 8\.x"):
        check_flex_backend(config, "flex", 128, torch.bfloat16, cards)


@pytest.mark.usefixtures("hopper", "installed")
def test_the_doctor_imports_it_and_refuses_what_training_refuses(
    tiny_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def found(**sections: dict[str, object]) -> tuple[str, str]:
        devices = {"targets": ["auto"], "drafters": ["auto"]}
        given = {"rows": {"length": 256, "anchors": 32}, "compile": FLASH, "drafter": {}, **sections}
        given["drafter"] = {"layers": 2, "block_size": 4, "head_dim": 64, **given["drafter"]}
        return doctors(tiny_run("gpu", pipeline=devices, **given))

    assert found() == ("ok", "FlashAttention-4: its package can be imported")
    level, text = found(drafter={"attention": "dense"})
    assert (level, "attention is dense here" in text) == ("bad", True)
    level, text = found(compile={**FLASH, "enabled": "off"})
    assert (level, "without compiling" in text) == ("bad", True)
    level, text = found(drafter={"head_dim": 256})
    assert (level, "not of 256" in text) == ("bad", True)
    monkeypatch.delitem(sys.modules, "flash_attn.cute.interface")
    level, text = found()
    assert (level, "flash-attn-4 cannot be imported: ModuleNotFoundError" in text) == ("bad", True)


def test_another_cache_and_the_same_run(tiny_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled lies elsewhere; a run may go on with other kernels, as on another card."""
    plain, other = tiny_run("plain"), tiny_run("flash", compile=FLASH)
    monkeypatch.setattr("draftsmith.pipeline.plan.check_flex_backend", lambda *_: None)
    plans = make_plan(plain), make_plan(other)
    assert cache_folder(plans[0]) != cache_folder(plans[1])
    assert [plan.way for plan in plans] == ["dense, eager", "dense, eager, FlashAttention-4"]
    assert plain.fingerprint() == other.fingerprint()


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize(
    ("geometry", "length", "anchors", "block_size", "documents"),
    [("qwen3-8b", 1000, 60, 16, 3), ("smollm2", 777, 100, 8, 2)],
)
def test_output_and_gradients_on_a_gpu(
    geometry: str, length: int, anchors: int, block_size: int, documents: int
) -> None:
    """Against the dense path in float32: no further from it than a hundredth, and than bfloat16 in the dense path."""
    setting = Setting(GEOMETRIES[geometry], CARD, length, anchors, block_size, 5, 2048, documents)
    spec, batch = setting.spec(), setting.batch().to(CARD)
    torch.manual_seed(0)
    queries = anchors * block_size

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(heads, tokens, spec.head_dim, device=CARD, dtype=torch.bfloat16)

    inputs = [random(queries, spec.heads), *(random(length + queries, spec.kv_heads) for _ in range(2))]
    direction = random(queries, spec.heads)
    (kind,) = set(spec.kinds)
    mask = build_masks(batch, "flex")[kind]
    dense = dense_masks(batch.intervals[kind], length, block_size)
    compiled = torch.compile(attend, fullgraph=True, dynamic=False)

    def seen(attention: Callable[..., Tensor], dtype: torch.dtype, *more: object) -> list[Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in inputs]
        out = attention(*leaves, *more)
        return [out.detach(), *torch.autograd.grad(out, leaves, direction.to(dtype))]

    right = seen(attend_dense, torch.float32, dense)
    rounded = seen(attend_dense, torch.bfloat16, dense)
    ours = seen(compiled, torch.bfloat16, mask, flex_options(CARD, spec.head_dim, "flash"))
    for mine, other, reference in zip(ours, rounded, right, strict=True):
        error, bound = ((each.float() - reference).norm() / reference.norm() for each in (mine, other))
        assert error < max(0.01, float(bound))
