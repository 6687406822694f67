"""Drafters in the layout of the library speculators: read from its `config.json`, and written for it.

The tensors have z-lab's names, so only the config differs:

- dimensions lie in `transformer_layer_config`, a Qwen3 config of its own;
- taps are counted from the embedding (`aux_hidden_state_layer_ids` = tap + 1);
- full layers are always bidirectional there, sliding ones causal unless `sliding_window_non_causal`;
- the target is named (`speculators_config.verifier`), because embedding and head are fetched from it;
- the vocabulary may be reduced (`draft_vocab_size`, tensors `t2d` and `d2t`, a head of its own).

What its fields cannot say is written in fields that it keeps and ignores, so that nothing is lost on the way back:
`num_target_layers`, `dflash_config` (embedding factor, logit factor and cap), and `is_causal` in the layer config,
which vLLM reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftsmith.drafter.spec import DrafterSpec
from draftsmith.errors import UserError

VERSION = "0.9.0"  # of speculators, whose fields these are
# Tensors that a checkpoint of speculators may hold and that are the target's, or map between vocabularies.
TARGET_OWNED = frozenset(
    {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t"}
)


def is_speculators(config: dict[str, Any]) -> bool:
    """Whether a `config.json` is of this layout."""
    return config.get("speculators_model_type") is not None


def spec_to_speculators(
    spec: DrafterSpec, dtype: torch.dtype, verifier: str, architectures: Sequence[str]
) -> dict[str, Any]:
    """`config.json` of a drafter for speculators.

    Args:
        spec: of the drafter.
        dtype: of the weights on disk.
        verifier: directory or hub name of the target, from which embedding and head are fetched.
        architectures: of the target's `config.json`.
    """
    name = str(dtype).removeprefix("torch.")
    sliding = [layer for layer, kind in enumerate(spec.layer_types) if kind == "sliding_attention"]
    layer: dict[str, Any] = {
        "model_type": "qwen3",
        "dtype": name,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "max_position_embeddings": spec.max_position_embeddings,
        "vocab_size": spec.vocab_rows,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "layer_types": list(spec.layer_types),
        "use_sliding_window": bool(sliding),
        "sliding_window": spec.sliding_window,
    }
    causal = {spec.layer_kind(index).causal for index in range(spec.layers)}
    if spec.causal is not None or len(causal) == 1:
        layer["is_causal"] = causal.pop()
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": spec.block_size - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": spec.vocab_rows,
        "block_size": spec.block_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in spec.taps],
        "mask_token_id": spec.mask_token_id,
        # Of sliding layers only; but vLLM takes its opposite for all layers, so it says the truth without any as well.
        "sliding_window_non_causal": not any(spec.layer_kind(index).causal for index in range(spec.layers)),
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": name,
        "num_target_layers": spec.target_layers,
    }
    extras: dict[str, Any] = {}
    if spec.input_scale != 1.0:
        extras["input_embedding_scale"] = spec.input_scale
    if spec.logit_multiplier != 1.0:
        extras["output_multiplier"] = spec.logit_multiplier
    if spec.logit_softcap is not None:
        extras["final_logit_softcapping"] = spec.logit_softcap
    if extras:
        config["dflash_config"] = extras
    return config


def zlab_fields(config: dict[str, Any], where: str, target_layers: int | None) -> dict[str, Any]:
    """The same drafter's `config.json` in z-lab's layout, as far as the fields go.

    Args:
        config: of speculators' layout, its fields of the right types and none of them null (`config_fields`).
        where: for messages.
        target_layers: depth of the target, where the file does not say it.

    Raises:
        UserError: another kind of speculator, or one whose blocks mean something else.
    """
    if config["speculators_model_type"] != "dflash":
        raise UserError(f"is a speculator of type {config['speculators_model_type']!r}, not dflash", where=where)
    if config.get("sample_from_anchor"):
        raise UserError(
            "samples from the anchor slot (sample_from_anchor), which a DFlash drafter is not trained to", where=where
        )
    layer = config.get("transformer_layer_config")
    taps = config.get("aux_hidden_state_layer_ids")
    if layer is None or not taps:
        raise UserError("transformer_layer_config or aux_hidden_state_layer_ids is missing", where=where)
    if layer.get("model_type", "qwen3") != "qwen3":
        raise UserError(f"has layers of type {layer['model_type']!r} (qwen3 is supported)", where=where)
    if config.get("target_hidden_size") not in (None, layer.get("hidden_size")):
        raise UserError("is narrower or wider than its target (target_hidden_size)", where=where)
    fields = {key: value for key, value in layer.items() if key not in ("architectures", "transformers_version")}
    types = layer.get("layer_types") or []
    causal = layer.get("is_causal")
    if causal is None and "sliding_attention" in types and config.get("sliding_window_non_causal"):
        causal = False
    dflash = {
        "target_layer_ids": [tap - 1 for tap in taps],
        **({"mask_token_id": config["mask_token_id"]} if "mask_token_id" in config else {}),
        "block_size": config.get("block_size", 8),
        **(config.get("dflash_config") or {}),
    }
    depth = config.get("num_target_layers") or target_layers
    fields |= {
        "architectures": ["DFlashDraftModel"],
        "block_size": dflash["block_size"],
        "dflash_config": dflash,
        **({} if depth is None else {"num_target_layers": depth}),
        **({} if causal is None else {"is_causal": causal}),
    }
    return fields
