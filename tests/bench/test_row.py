"""One row from tokens to new weights waits for nothing; and a wait would be seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftsmith.bench.geometry import find_geometry, twin
from draftsmith.bench.parts import default_setting
from draftsmith.bench.row import bench_row, host_waits
from draftsmith.bench.setting import Setting
from draftsmith.cli import main
from draftsmith.training.update import ReplicaUpdate

CPU = torch.device("cpu")
SMALL = replace(default_setting(find_geometry("tiny"), CPU), length=96, anchors=6, chunk=16, runs=1, documents=2)


def test_a_row_reads_nothing_back() -> None:
    result = bench_row(SMALL)
    assert result["host_waits"] == []
    assert result["real_tokens_per_second"] > 0
    assert result["shape"]["packing"] == "mask"


def test_a_read_is_found_and_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate = ReplicaUpdate.accumulate

    def reading(self: ReplicaUpdate, *, last: bool = False) -> None:
        float(next(iter(self.parameters)).grad.sum())
        accumulate(self, last=last)

    monkeypatch.setattr(ReplicaUpdate, "accumulate", reading)
    (found,) = bench_row(SMALL)["host_waits"]
    assert found.startswith("aten._local_scalar_dense.default at ")


def test_a_host_that_waits_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--length", "96", "--anchors", "6", "--chunk", "16", "--layers", "1", "--runs", "1"]
    arguments = ["bench", "row", "--device", "cpu", "--geometry", "tiny", *sizes]
    assert main(arguments) == 0
    assert "  the host waits for nothing in it\n" in capsys.readouterr().out
    accumulate = ReplicaUpdate.accumulate

    def reading(self: ReplicaUpdate, *, last: bool = False) -> None:
        next(iter(self.parameters)).grad.cpu()
        accumulate(self, last=last)

    monkeypatch.setattr(ReplicaUpdate, "accumulate", reading)
    assert main(arguments) == 1
    assert "  the host waits for the device: Tensor.cpu at " in capsys.readouterr().out


X, MASK, FEW = torch.arange(6.0), torch.arange(6) > 2, torch.tensor([0, 1])
WAITS = {
    "item": lambda: X[0].item(),
    "float": lambda: float(X[0]),
    "bool": lambda: bool(MASK.any()),
    "slice": lambda: X[: FEW[1]],
    "masked_select": lambda: X.masked_select(MASK),
    "nonzero": lambda: MASK.nonzero(),
    "where of one": lambda: torch.where(MASK),
    "argwhere": lambda: torch.argwhere(MASK),
    "bincount": lambda: torch.bincount(FEW),
    "unique": lambda: X.unique(),
    "unique with inverse": lambda: torch.unique(X, sorted=False, return_inverse=True),
    "unique by dim": lambda: X[:, None].unique(dim=0),
    "unique_consecutive": lambda: X.unique_consecutive(),
    "unique_consecutive by dim": lambda: X[:, None].unique_consecutive(dim=0),
    "equal": lambda: torch.equal(X, X + 1),
    "allclose": lambda: torch.allclose(X, X),
    "repeat_interleave": lambda: torch.repeat_interleave(FEW),
    "repeat_interleave of values": lambda: X[:2].repeat_interleave(FEW),
    "mask as index": lambda: X[MASK],
    "bytes as index": lambda: X[MASK.byte()],
    "mask as second index": lambda: X.expand(2, 6)[:, MASK],
    "values to a mask": lambda: X.clone().__setitem__(MASK, X[:3]),
    "values to a mask, a copy": lambda: X.index_put((MASK,), X[:3]),
    "values of one dimension to a mask": lambda: X.clone().index_put_((MASK,), X[:1]),
    "a number added to a mask": lambda: X.clone().index_put_((MASK,), torch.tensor(0.5), accumulate=True),
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "numpy": lambda: X.numpy(),
    "numpy by numpy": lambda: np.asarray(X),
    "to": lambda: X.to("cpu"),
    "to by name": lambda: X.to(device="cpu:0", dtype=torch.float64),
    "text": lambda: str(X),
    "formatted text": lambda: f"{X}",
    "formatted number": lambda: f"{X[0]:.2f}",
}
FREE = {
    "numbers as index": lambda: X[FEW],
    "a number to a mask": lambda: X.clone().__setitem__(MASK, 0.5),
    "values to numbers": lambda: X.clone().index_put_((FEW,), X[:2]),
    "where": lambda: torch.where(MASK, X, 0.0),
    "masked_fill": lambda: X.masked_fill(MASK, 0.0),
    "index_select": lambda: X.index_select(0, FEW),
    "repeat_interleave of known size": lambda: torch.repeat_interleave(FEW, output_size=1),
    "repeat_interleave by a number": lambda: X.repeat_interleave(2),
    "to the device": lambda: X.to(CPU),
    "to another dtype": lambda: X.to(torch.float64),
    "rows": lambda: list(X),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", sorted(WAITS))
def test_what_waits_on_cuda_is_seen_on_a_cpu(name: str) -> None:
    assert len(host_waits(WAITS[name], CPU)) == 1


@pytest.mark.parametrize("name", sorted(FREE))
def test_what_waits_for_nothing_is_not(name: str) -> None:
    assert host_waits(FREE[name], CPU) == []


def test_the_backward_of_a_masked_look_up_waits_too() -> None:
    leaf = X.clone().requires_grad_()
    assert len(host_waits(lambda: leaf[MASK].sum().backward(), CPU)) == 2


def test_reading_what_is_the_hosts_own_waits_for_nothing() -> None:
    def work() -> None:
        FEW.tolist()
        FEW[:1].tolist()
        X.tolist()

    assert len(host_waits(work, CPU, host=(FEW,))) == 1


def test_in_a_row_of_documents_by_themselves_only_the_library_reads() -> None:
    """The target asks where documents begin, but of the row, which is in the host's memory everywhere."""
    found = bench_row(replace(SMALL, packing="separate"))["host_waits"]
    assert [each for each in found if "tolist" in each or not each.startswith("aten.")] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", sorted({*WAITS, *FREE}))
def test_on_a_gpu_the_same_waits_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("X", "MASK", "FEW"):
        monkeypatch.setitem(globals(), each, globals()[each].cuda())
    if name in ("numpy", "numpy by numpy", "to the device"):
        pytest.skip("something else there")
    if name.endswith("by dim"):
        pytest.skip("waits within a library that torch does not watch")
    found = host_waits({**WAITS, **FREE}[name], torch.device("cuda", 0))
    assert len(found) == (name in WAITS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_on_a_gpu_every_wait_is_an_error(name: str) -> None:
    setting = Setting(find_geometry(name), torch.device("cuda", 0), 512, 64, 16, 2, 512, 4, runs=1)
    assert bench_row(setting)["host_waits"] == []
    (found,) = host_waits(lambda: torch.ones(4, device="cuda").sum().item(), torch.device("cuda", 0))
    assert "synchroniz" in found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_hybrid_waits_for_nothing_but_its_library() -> None:
    geometry = twin(find_geometry("qwen3.5-hybrid"))
    result = bench_row(Setting(geometry, torch.device("cuda", 0), 512, 64, 16, 2, 512, 4, runs=1))
    assert not [wait for wait in result["host_waits"] if "pipeline" in wait or "training" in wait]
