"""Geometry is read right from every kind of configuration, and without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import CONFIGS, save_tiny
from transformers import Cohere2Config, GraniteConfig, MambaConfig, Qwen3Config

from draftsmith.config import TargetConfig
from draftsmith.errors import UserError
from draftsmith.target.geometry import geometry_of, layer_kinds, read_geometry

SLIDING, FULL = "sliding_attention", "full_attention"


def test_all_fields_without_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()
    geometry = read_geometry(TargetConfig(path=str(tmp_path)))
    assert (geometry.hidden_size, geometry.layers, geometry.vocab_rows) == (32, 5, 320)
    assert (geometry.heads, geometry.kv_heads, geometry.head_dim) == (4, 2, 8)
    assert (geometry.intermediate_size, geometry.rms_norm_eps) == (48, 1e-6)
    assert (geometry.max_position_embeddings, geometry.hidden_act) == (256, "silu")
    assert geometry.tie_word_embeddings
    assert geometry.model_type == "qwen3"
    assert (geometry.embedding_scale, geometry.logit_softcap, geometry.logit_multiplier) == (1.0, None, 1.0)


def test_head_dim_need_not_divide() -> None:
    assert geometry_of(Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=128), "x").head_dim == 128


@pytest.mark.parametrize(
    "field", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}]
)
def test_rope_theta_in_old_and_new_files(tmp_path: Path, field: dict) -> None:
    content = {"model_type": "qwen3", "num_hidden_layers": 2, **field}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_geometry(TargetConfig(path=str(tmp_path))).rope_theta == 5e5


def test_rope_theta_per_layer_kind_is_the_full_layers() -> None:
    config = CONFIGS["gemma3"]()
    assert {config.rope_parameters[kind]["rope_theta"] for kind in (SLIDING, FULL)} == {1e4, 1e6}
    assert geometry_of(config, "x").rope_theta == 1e6


def test_scales() -> None:
    gemma = geometry_of(CONFIGS["gemma2"](), "x")
    assert gemma.embedding_scale == pytest.approx(32**0.5)
    assert gemma.logit_softcap == 2.0
    assert gemma.hidden_act == "gelu_pytorch_tanh"
    assert geometry_of(Cohere2Config(logit_scale=0.25), "x").logit_multiplier == 0.25
    granite = geometry_of(GraniteConfig(embedding_multiplier=12.0, logits_scaling=8.0), "x")
    assert (granite.embedding_scale, granite.logit_multiplier) == (12.0, 0.125)


def test_wrapped_text_model() -> None:
    geometry = geometry_of(CONFIGS["gemma3 wrapped"](), "x")
    assert (geometry.model_type, geometry.hidden_size, geometry.layers) == ("gemma3_text", 32, 5)


def test_layer_kinds() -> None:
    assert layer_kinds(CONFIGS["llama"]()) == (FULL,) * 5
    assert layer_kinds(CONFIGS["mistral sliding"]()) == (SLIDING,) * 5
    assert layer_kinds(CONFIGS["qwen3 sliding"]()) == (FULL, FULL, SLIDING, SLIDING, SLIDING)
    assert layer_kinds(CONFIGS["gemma3 wrapped"]()) == (SLIDING,) * 4 + (FULL,)
    assert "linear_attention" in layer_kinds(CONFIGS["qwen3.5"]())


def test_not_a_decoder() -> None:
    with pytest.raises(UserError, match="no num_attention_heads"):
        geometry_of(MambaConfig(), "x")
