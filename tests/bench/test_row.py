"""One row from tokens to new weights waits for nothing; and a wait would be seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftsmith.bench.geometry import find_geometry, twin
from draftsmith.bench.parts import default_setting
from draftsmith.bench.row import bench_row, host_waits
from draftsmith.bench.setting import Setting
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
