"""Tiny random targets of every kind that the target room treats differently, and rows for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from draftsmith.bench.random_target import train_tokenizer
from draftsmith.blocks import Document, Row, pack_row

VOCABULARY = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # loud enough that a wrong mask or norm changes every feature
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def _sized(**changes: Any) -> dict[str, Any]:
    return {**_SIZES, **changes}


CONFIGS = {
    "qwen3": lambda: Qwen3Config(**_sized(tie_word_embeddings=True)),
    "qwen3 sliding": lambda: Qwen3Config(
        **_sized(), use_sliding_window=True, sliding_window=6, max_window_layers=2, tie_word_embeddings=False
    ),
    "llama": lambda: LlamaConfig(**_sized(tie_word_embeddings=False)),
    "mistral sliding": lambda: MistralConfig(**_sized(), sliding_window=6),
    "gemma2": lambda: Gemma2Config(**_sized(), sliding_window=6, query_pre_attn_scalar=8, final_logit_softcapping=2.0),
    "gemma3": lambda: Gemma3TextConfig(
        **_sized(),
        sliding_window=6,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    ),
    "gemma3 wrapped": lambda: Gemma3Config(
        text_config=_sized(
            sliding_window=6, query_pre_attn_scalar=8, layer_types=["sliding_attention"] * 4 + ["full_attention"]
        ),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
        },
    ),
    "qwen3.5": lambda: Qwen3_5TextConfig(
        **_sized(),
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
}


def tiny_tokenizer(padded_to: int = 300, **names: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about `padded_to` tokens."""
    special = ["<|end|>", "<|user|>", "<|stop|>", "<|spare|>", "<|reserved_0|>", "<|reserved_1|>"]
    template = "{% for m in messages %}<|user|>{{ m['content'] }}<|stop|>{% endfor %}"
    text = "the quick brown fox jumps over the lazy dog " * 3
    return train_tokenizer([text], padded_to, special, template, **{"eos_token": "<|stop|>", **names})


def save_tiny(folder: Path, name: str, attention: str = "sdpa") -> Path:
    """Writes the random target `name` with a tokenizer to `folder`."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._attn_implementation = attention
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:  # all equal by default, which would hide a norm left out or applied twice
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def packed_row(lengths: tuple[int, ...], size: int, seed: int = 0) -> Row:
    """Random documents of these lengths, packed into a row of `size` tokens."""
    generator = torch.Generator().manual_seed(seed)
    documents = [
        Document(torch.randint(VOCABULARY, (n,), generator=generator), torch.ones(n, dtype=torch.bool)) for n in lengths
    ]
    return pack_row(0, documents, size)


def slow_features(model: Any, row: Row, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The readable twin: every document alone, all layers, no hooks of ours. Returns ([real, n·H], [real, H]).

    transformers' `hidden_states` has the embedding first and, last, the final norm's output instead of the last
    layer's; the last layer is therefore read by a hook of the test's own.
    """
    decoder = model.get_decoder()
    features, finals = [], []
    for index in range(int(row.document_S.max()) + 1):
        tokens = row.tokens_S[row.document_S == index][None]
        caught: list[Tensor] = []
        handle = decoder.layers[-1].register_forward_hook(
            lambda module, inputs, output, caught=caught: caught.append(
                output[0] if isinstance(output, tuple) else output
            )
        )
        with torch.no_grad():
            result = decoder(input_ids=tokens, output_hidden_states=True, use_cache=False)
        handle.remove()
        states = [*result.hidden_states[1:-1], caught[0]]
        features.append(torch.cat([states[tap][0] for tap in taps], dim=-1))
        finals.append(result.last_hidden_state[0])
    return torch.cat(features), torch.cat(finals)
