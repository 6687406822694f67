"""A target over several devices: where its layers lie, that inputs follow them, and that features do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny
from torch import Tensor, nn

from draftsmith.config import TargetConfig
from draftsmith.pipeline import topology
from draftsmith.pipeline.run import train
from draftsmith.target.load import load_target
from draftsmith.target.span import _Bring, _Moved, share_out, spread

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")


def test_layers_are_shared_out_in_order() -> None:
    assert share_out(6, 2) == [0, 0, 0, 1, 1, 1]
    assert share_out(7, 3) == [0, 0, 1, 1, 2, 2, 2]
    assert share_out(2, 1) == [0, 0]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_features_over_a_span_are_those_of_one_device(tmp_path: Path, kind: str) -> None:
    config = TargetConfig(path=str(save_tiny(tmp_path, kind)))
    one, over = (load_target(config, "cpu", torch.float32, span) for span in ((), (CPU, CPU)))
    length, taps = 24, (0, one.geometry.layers - 1)
    tokens = torch.arange(length) % one.geometry.vocab_rows
    document = torch.tensor([0] * 10 + [1] * 14, dtype=torch.int32)
    positions = torch.cat([torch.arange(10), torch.arange(14)])
    expected = one.features(tokens, document, positions, taps, last_hidden=True)
    found = over.features(tokens, document, positions, taps, last_hidden=True)
    assert torch.equal(found.taps_SF, expected.taps_SF)
    assert found.last_SH is not None
    assert torch.equal(found.last_SH, expected.last_SH)
    assert "shared out over cpu, cpu" in over.remarks[-1]


def test_inputs_follow_the_layers(tmp_path: Path) -> None:
    """The second half lies on a device without numbers: its layers run there on what was brought to it."""
    target = load_target(TargetConfig(path=str(save_tiny(tmp_path, "qwen3"))), "cpu", torch.float32)
    layers = list(target.layers)
    spread(target.model, layers, [CPU, ELSEWHERE])
    half = len(layers) // 2
    assert {p.device for layer in layers[:half] for p in layer.parameters()} == {CPU}
    assert {p.device for layer in layers[half:] for p in layer.parameters()} == {ELSEWHERE}
    assert target.device == CPU
    assert target.model.get_output_embeddings().weight.device == CPU
    ran: list[set[torch.device]] = []

    def look(_module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors: list[Tensor] = []
        todo = [*args, *kwargs.values()]
        while todo:
            value = todo.pop()
            todo += list(value) if type(value) in (tuple, list) else []
            tensors += [value] if isinstance(value, Tensor) else []
        ran.append({value.device for value in tensors})

    for layer in layers:
        layer.register_forward_pre_hook(look, with_kwargs=True)
    with pytest.raises(NotImplementedError, match="meta"):  # what comes back from there holds no numbers
        target.features(torch.arange(8), torch.zeros(8, dtype=torch.int32), torch.arange(8), (len(layers) - 1,))
    assert ran == [{CPU}] * half + [{ELSEWHERE}] * (len(layers) - half)


def test_what_all_layers_share_is_brought_once_a_row_and_stays_dynamic() -> None:
    moved = _Moved()
    first, later = _Bring(moved, ELSEWHERE, False), _Bring(moved, ELSEWHERE, False)
    begins = _Bring(moved, CPU, True)
    shared, residual = torch.ones(3), torch.zeros(2)
    torch._dynamo.mark_dynamic(shared, 0)
    (args, kwargs) = first(nn.Identity(), (residual,), {"cuts": shared, "mask": {"full": (shared, None)}, "length": 3})
    assert args[0].device == kwargs["cuts"].device == ELSEWHERE
    assert kwargs["mask"]["full"] == (kwargs["cuts"], None)
    assert kwargs["length"] == 3
    assert kwargs["cuts"]._dynamo_dynamic_indices == {0}
    assert later(nn.Identity(), (), {"cuts": shared})[1]["cuts"] is kwargs["cuts"]
    begins(nn.Identity(), (), {})
    assert later(nn.Identity(), (), {"cuts": shared})[1]["cuts"] is not kwargs["cuts"], "a row later it is another"


def test_a_run_whose_target_spans_devices_learns_the_same(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    one = train(tiny_run("one", pipeline={"targets": ["cpu"], "drafters": ["cpu"]}))
    monkeypatch.setattr(topology, "_span", lambda _name: (CPU, CPU))  # which nobody may write: it makes no sense
    config = tiny_run("over", pipeline={"targets": ["cpu"], "drafters": ["cpu"]})
    over = train(config)
    assert over.losses == one.losses
    events = (Path(config.training.output) / "events.jsonl").read_text()
    assert "layers are shared out over cpu, cpu" in events
