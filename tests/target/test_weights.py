"""Bytes of a target counted on paper are those that loading takes, whatever the model is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_quantised import save_fp8
from tiny_models import CONFIGS, save_tiny
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from draftsmith.config import TargetConfig
from draftsmith.errors import UserError
from draftsmith.target.load import load_target
from draftsmith.target.weights import count_weights


@pytest.mark.parametrize("name", list(CONFIGS))
def test_counted_as_loaded(tmp_path: Path, name: str) -> None:
    config = TargetConfig(path=str(save_tiny(tmp_path, name)))
    counted = count_weights(config, torch.float32)
    target = load_target(config, "cpu", torch.float32)
    assert counted.layers == tuple(sum(p.nbytes for p in layer.parameters()) for layer in target.layers)
    assert counted.first(2) == sum(counted.layers[:2])
    assert counted.first(5) + counted.rest == sum(p.nbytes for p in target.model.parameters())
    assert count_weights(config, torch.bfloat16).rest * 2 == counted.rest


def test_experts_are_counted(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "vocab_size": 320}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, head_dim=16))
    model.save_pretrained(tmp_path)
    counted = count_weights(TargetConfig(path=str(tmp_path)), torch.float32)
    assert counted.first(2) + counted.rest == sum(p.nbytes for p in model.parameters())
    assert counted.layers[0] > 8 * 3 * 32 * 16 * 4


def test_a_quantised_one_is_as_large_as_its_files(tmp_path: Path) -> None:
    folder, _ = save_fp8(tmp_path)
    counted = count_weights(TargetConfig(path=str(folder)), torch.float32)
    files = (folder / "model.safetensors").stat().st_size
    assert counted.first(5) + counted.rest == pytest.approx(files, rel=1e-3)


def test_no_target_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such target"):
        count_weights(TargetConfig(path=str(tmp_path / "nothing")), torch.float32)
