"""Targets with random weights: loaded ones for benchmarks, and whole folders for runs that need one on disk.

A folder holds what a downloaded target's does: configuration, weights, and a tokenizer with a chat template, here a
byte-level BPE trained on a few words. Its ids use the first few hundred rows of the embedding. Writing one costs the
time to draw the weights and to write them: 16 GB for the geometry of Qwen3-8B.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3_5TextConfig, Qwen3Config

from draftsmith.bench.geometry import HYBRID, kinds_of, linear_sizes
from draftsmith.bench.random_data import WORDS
from draftsmith.bench.setting import Setting
from draftsmith.errors import UserError
from draftsmith.target.forward import Target
from draftsmith.target.geometry import RECURRENT, TargetGeometry
from draftsmith.target.proof import choose_packing

TURN_START, TURN_END, MASK = "<|im_start|>", "<|im_end|>", "<|mask|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model_config(g: TargetGeometry) -> Any:
    """transformers' configuration of a model of the geometry's kind."""
    fields: dict[str, Any] = {
        "vocab_size": g.vocab_rows,
        "hidden_size": g.hidden_size,
        "intermediate_size": g.intermediate_size,
        "num_hidden_layers": g.layers,
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "rms_norm_eps": g.rms_norm_eps,
        "rope_theta": g.rope_theta,
        "max_position_embeddings": g.max_position_embeddings,
        "tie_word_embeddings": g.tie_word_embeddings,
    }
    if g.model_type == HYBRID:
        key_heads, value_heads, head = linear_sizes(g)
        linear: dict[str, Any] = {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": head,
            "linear_value_head_dim": head,
        }
        return Qwen3_5TextConfig(**fields, **linear, layer_types=list(kinds_of(g)))
    return LlamaConfig(**fields) if g.model_type == "llama" else Qwen3Config(**fields)


def random_model(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' causal model of a configuration, its weights drawn on the device by torch's seed of the moment."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def random_target(setting: Setting) -> Target:
    """A model of the geometry's kind with random weights, packed as the setting says.

    Raises:
        UserError: it cannot be packed in that way.
    """
    g = setting.geometry
    kinds = kinds_of(g)
    model = random_model(model_config(g), setting.device, setting.dtype)
    model.requires_grad_(False).eval()
    target = Target(model, None, g, kinds, ())
    choose_packing(target)
    if setting.packing and setting.packing != target.packing:
        if setting.packing != "separate" and (setting.packing == "pieces" or RECURRENT in kinds):
            raise UserError(
                f"this target cannot be packed as {setting.packing}: {target.packing_reason}", where="--packing"
            )
        if target.packing == "pieces":
            model.config._attn_implementation = "sdpa"
        target.packing, target.packing_reason = setting.packing, "as asked for"
    return target


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, special: Sequence[str], template: str | None, **names: str
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocabulary` tokens at most, the special ones first, then the 256 bytes.

    Args:
        names: which special token is which, e.g. `eos_token`.
    """
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **names)


def chat_tokenizer(vocabulary: int = 400) -> PreTrainedTokenizerFast:
    """A tokenizer with a chat template and a mask token that knows the words of `random_data`."""
    names = {"eos_token": TURN_END, "pad_token": TURN_END, "mask_token": MASK}
    return train_tokenizer([" ".join(WORDS)] * 4, vocabulary, [TURN_START, TURN_END, MASK], CHATML, **names)


def write_random_target(
    folder: Path,
    geometry: TargetGeometry,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    weights: bool = True,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **fields: Any,
) -> None:
    """Writes a whole target: configuration, tokenizer, and weights that are the same every time on the same device.

    Args:
        folder: made if it is not there.
        geometry: `geometry.vocab_rows` holds the tokenizer's ids.
        dtype: of the weights.
        device: where they are drawn; memory for all of them is needed there, and given back.
        weights: False: only what is read before a target is loaded.
        tokenizer: none: `chat_tokenizer()`.
        fields: further ones of the configuration, e.g. `initializer_range`.
    """
    tokenizer, device = tokenizer or chat_tokenizer(), torch.device(device)
    assert len(tokenizer) <= geometry.vocab_rows, f"{len(tokenizer)} tokens, {geometry.vocab_rows} rows"
    config = model_config(geometry)
    config.eos_token_id = tokenizer.eos_token_id
    for name, value in fields.items():
        assert hasattr(config, name), f"{type(config).__name__} has no {name}"
        setattr(config, name, value)
    tokenizer.save_pretrained(folder)
    if not weights:
        config.save_pretrained(folder)
        return
    torch.manual_seed(0)
    model = random_model(config, device, dtype)
    model.save_pretrained(folder)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()
