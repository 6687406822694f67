"""A target is loaded whole or refused with one line; wrong paths and broken folders never get further."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from draftsmith.config import TargetConfig
from draftsmith.errors import UserError
from draftsmith.target.geometry import read_geometry
from draftsmith.target.load import load_target, load_tokenizer, read_stop_ids


def load(path: Path | str, **options):
    return load_target(TargetConfig(path=str(path), **options), "cpu", torch.float32)


def test_a_loaded_target_is_frozen_and_complete(tmp_path: Path) -> None:
    target = load(save_tiny(tmp_path, "qwen3"))
    assert target.device == torch.device("cpu")
    assert target.dtype == torch.float32
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target.stop_ids == (2,)
    assert target.tokenizer.eos_token == "<|stop|>"
    assert target.geometry == read_geometry(TargetConfig(path=str(tmp_path)))
    saved = load_file(tmp_path / "model.safetensors")
    for name, parameter in target.model.named_parameters():
        assert torch.equal(parameter, saved[name]), name


def test_bfloat16(tmp_path: Path) -> None:
    target = load_target(TargetConfig(path=str(save_tiny(tmp_path, "gemma3"))), "cpu", torch.bfloat16)
    assert target.packing == "mask", target.packing_reason
    document = torch.zeros(8, dtype=torch.int32)
    out = target.features(torch.arange(8), document, torch.arange(8), (0, 1), last_hidden=True)
    assert out.taps_SF.dtype == out.last_SH.dtype == torch.bfloat16
    assert target.decoder.rotary_emb.full_attention_inv_freq.dtype == torch.float32


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    load(tmp_path)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.3.mlp.up_proj.weight", "model.norm.weight"])
def test_missing_weights_are_refused(tmp_path: Path, name: str) -> None:
    save_tiny(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"1 weights did not load: {name}") as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(31)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot be loaded"):
        load(tmp_path)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent: no such target \(set target.path"):
        load(tmp_path / "absent")
    with pytest.raises(UserError, match="no such target"):
        load(tmp_path / "absent.gguf")
    with pytest.raises(UserError, match="no such target"):
        load("./absent/model")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"holds no config\.json"):
        load(empty)
    (empty / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"set target\.gguf_file, e\.g\. model-q4\.gguf"):
        load(empty)
    with pytest.raises(UserError, match=r"holds no other\.gguf"):
        load(empty, gguf_file="other.gguf")
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(UserError, match=r"not a \.gguf file"):
        load(text)
    with pytest.raises(UserError, match="neither a directory nor a hub name"):
        load("three/part/name")

    folder = save_tiny(tmp_path / "target", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(tmp_path / name)
    with pytest.raises(UserError, match="holds no tokenizer"):
        load(folder)
    (tmp_path / "tokenizer.json").rename(folder / "tokenizer.json")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no weights"):
        load(folder)


@pytest.mark.parametrize("text", ["{ not json", json.dumps({"hidden_size": 3}), json.dumps({"model_type": "nonsense"})])
def test_a_broken_configuration(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="cannot be loaded"):
        read_geometry(TargetConfig(path=str(tmp_path)))


def test_a_hub_name_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"nobody/nothing-like-this.*check the name and the connection"):
        read_geometry(TargetConfig(path="nobody/nothing-like-this"))


def test_code_of_the_model_is_not_run(tmp_path: Path) -> None:
    content = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match=r"target\.trust_remote_code"):
        read_geometry(TargetConfig(path=str(tmp_path)))


def test_embedding_rows_must_be_the_configured_ones(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    content = json.loads((tmp_path / "config.json").read_text())
    content["vocab_size"] = 321
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError):
        load(tmp_path)


def test_threads_load_at_the_same_time(tmp_path: Path) -> None:
    """transformers' loading is not safe in threads; ours takes turns. All must be right and in float32."""
    folders = [save_tiny(tmp_path / str(i), name) for i, name in enumerate(["qwen3", "llama", "gemma3", "llama"])]
    results: list = [None] * len(folders)
    start = threading.Barrier(len(folders))

    def work(i: int) -> None:
        start.wait()
        results[i] = load(folders[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(folders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for folder, target in zip(folders, results, strict=True):
        saved = load_file(folder / "model.safetensors")
        for name, parameter in target.model.named_parameters():
            assert torch.equal(parameter, saved[name]), name
    assert torch.get_default_dtype() == torch.float32


def test_tokenizer_alone(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    tokenizer = load_tokenizer(TargetConfig(path=str(tmp_path)))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "fox"}], tokenize=False) == "<|user|>fox<|stop|>"


def test_stop_ids_are_known_without_weights(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "t", "llama")
    config = TargetConfig(path=str(folder))
    tokenizer = load_tokenizer(config)
    assert read_stop_ids(config, tokenizer) == load_target(config, "cpu", torch.float32).stop_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert set(read_stop_ids(config, tokenizer)) >= {5, 7}
    assert read_stop_ids(config, tokenizer) == load_target(config, "cpu", torch.float32).stop_ids
