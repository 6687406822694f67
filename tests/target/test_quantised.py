"""Targets that come quantised: loaded as they are or refused with one line, never cast in passing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import packed_row, save_tiny
from torch import nn

from draftsmith.config import TargetConfig
from draftsmith.errors import UserError
from draftsmith.pipeline.compiling import TargetLayers, needs
from draftsmith.pipeline.plan import make_plan
from draftsmith.target import quantised
from draftsmith.target.load import load_target, shallow_target
from draftsmith.target.source import read_config

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def mark(folder: Path, **quantisation: Any) -> Path:
    """Says in the configuration that the weights are quantised."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "quantization_config": quantisation}))
    return folder


def save_fp8(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint with fp8 weights and one scale for each tile of 128 × 128; and the weights that it means."""
    save_tiny(folder, "qwen3")
    stored, meant = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        stored[name] = meant[name] = value
        if name.endswith("proj.weight"):
            scale = (value.abs().amax() / 448).reshape(1, 1)
            stored[name] = (value / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            meant[name] = stored[name].float() * scale
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return mark(folder, **FP8, modules_to_not_convert=["lm_head"]), meant


def load(folder: Path):
    return load_target(TargetConfig(path=str(folder)), "cpu", torch.float32)


def test_where_there_are_no_kernels_fp8_weights_are_unpacked(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers loads quantised weights with it; `make test` installs it")
    folder, meant = save_fp8(tmp_path)
    target = load(folder)
    assert target.foreign == ""
    assert target.remarks == ("the target came quantised (fp8); unpacked to float32: no kernels for it here",)
    for name, value in target.model.named_parameters():
        torch.testing.assert_close(value, meant[name], rtol=1e-6, atol=1e-7)
    row = packed_row((20, 9), 32)
    assert target.features(row.tokens_S, row.document_S, row.positions_S, (1,)).taps_SF.isfinite().all()


@pytest.mark.parametrize(
    ("method", "more", "command"),
    [
        ("awq", {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, "gptqmodel"),
        ("gptq", {"bits": 4, "group_size": 128}, "optimum gptqmodel"),
        ("compressed-tensors", {"config_groups": {}}, "compressed-tensors"),
    ],
)
def test_a_missing_package_is_one_line_with_the_command(tmp_path: Path, method: str, more: dict, command: str) -> None:
    if not quantised.install_line(method):
        pytest.skip(f"what {method} needs is installed")
    folder = mark(save_tiny(tmp_path, "qwen3"), quant_method=method, **more)
    with pytest.raises(UserError, match="needs a package that is missing") as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert caught.value.fix.startswith("pip install ")
    assert caught.value.fix.endswith(command)


def test_the_method_is_read_from_every_form_of_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    config = TargetConfig(path=str(folder))
    assert quantised.method_of(read_config(config)) == ""
    mark(folder, **FP8)
    assert quantised.method_of(read_config(config)) == "fp8"
    plain = read_config(config)
    plain.quantization_config = SimpleNamespace(quant_method=SimpleNamespace(value="gptq"))
    assert quantised.method_of(plain) == "gptq"
    plain.quantization_config = {"bits": 4}
    assert quantised.method_of(plain) == "an unnamed method"
    monkeypatch.setattr(quantised, "_installed", lambda name: name != "accelerate")
    assert quantised.install_line("never heard of") == quantised.install_line("gptq") == "pip install accelerate"
    monkeypatch.setattr(quantised, "_installed", lambda name: True)
    assert quantised.install_line("gptq") == ""


class _Model(nn.Module):
    """As transformers leaves a quantised one: marked, packed weights in the layers, a plain head or not."""

    is_quantized = True

    def __init__(self, head: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4).to(torch.float16)
        self.layer = nn.Module()
        self.layer.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))
        self.head = nn.Module()
        self.head.register_buffer("weight", torch.zeros(8, 4).to(head))

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


def test_what_is_said_of_one_that_stays_quantised() -> None:
    method, line = quantised.describe("gptq", _Model(torch.float16), torch.bfloat16)
    assert method == "gptq"
    assert "(gptq) and runs as it is, uncompiled" in line
    assert "hidden states in float16" in line
    for head in (torch.float8_e4m3fn, torch.int32):
        with pytest.raises(UserError, match="its output head is quantised"):
            quantised.describe("gptq", _Model(head), torch.bfloat16)


def test_its_layers_stay_uncompiled_and_whole(tmp_path: Path, tiny_run) -> None:
    config = tiny_run("run", compile={"enabled": "on"})
    plan = make_plan(config)
    target = shallow_target(config.target, "cpu", torch.float32)
    assert any(name.startswith("target 0") for name in needs(plan))
    from draftsmith.compiled import Gate

    gate = Gate()
    try:
        assert TargetLayers(plan, target, gate).region.enabled
        target.foreign = "gptq"
        layers = TargetLayers(plan, target, gate).region
        assert not layers.enabled
        assert layers.why_eager == "the target came quantised (gptq)"
    finally:
        gate.close()
    foreign = load(save_tiny(tmp_path, "qwen3"))
    foreign.foreign = "gptq"
    foreign.free_layers_after(1)
    assert {parameter.device.type for parameter in foreign.layers[4].parameters()} == {"cpu"}
