"""Types and ranges of the fields in a drafter's `config.json`, of either layout, checked where the file is read.

What stands in one table here need not be asked again by whoever reads a field: a field that is there and not null has
the type that the table gives it. Whether a field has to be there is the business of its reader; fields that no engine
and nobody here reads are not looked at. Null counts as left out (`without_nulls`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any


def _size(most: int, least: int = 1) -> tuple[Callable[[Any], bool], str]:
    return (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most,
        f"a whole number from {least} to {most}",
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # a whole number beyond every float
        return False


def _list_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(holds(entry) for entry in value)


# Far beyond every drafter, and small enough that a tensor of such sizes can still be described.
_MOST_SIZE, _MOST_HEADS, _MOST_LAYERS, _MOST_ROWS = 2**20, 2**12, 2**10, 2**31 - 1
_NUMBER = (_is_number, "a finite number")
_POSITIVE = (lambda value: _is_number(value) and value > 0, "a number above 0")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
_TEXT = (lambda value: isinstance(value, str), "a text")
_TEXTS = (_list_of(_TEXT[0]), "a list of texts")
_OBJECT = (lambda value: isinstance(value, dict), "an object")
_LAYERS_OF_TARGET = (_list_of(_size(_MOST_ROWS, -_MOST_ROWS)[0]), "a list of layer numbers")

_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "target_hidden_size"), _size(_MOST_SIZE)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), _size(_MOST_HEADS)),
    **dict.fromkeys(("num_hidden_layers", "num_target_layers"), _size(_MOST_LAYERS)),
    **dict.fromkeys(("vocab_size", "draft_vocab_size", "max_position_embeddings"), _size(_MOST_ROWS)),
    **dict.fromkeys(("sliding_window", "swa_window_size"), _size(_MOST_ROWS)),
    "block_size": _size(_MOST_HEADS, 2),
    "speculative_tokens": _size(_MOST_HEADS),
    "max_window_layers": _size(_MOST_ROWS, 0),
    "mask_token_id": _size(_MOST_ROWS, 0),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "input_embedding_scale", "output_multiplier"), _POSITIVE),
    **dict.fromkeys(("final_logit_softcapping", "logit_scale", "partial_rotary_factor"), _NUMBER),
    **dict.fromkeys(("attention_dropout", "initializer_range"), _NUMBER),
    **dict.fromkeys(("is_causal", "causal", "attention_bias", "tie_word_embeddings", "use_sliding_window"), _FLAG),
    **dict.fromkeys(("use_swa", "sliding_window_non_causal", "sample_from_anchor", "is_neox_style"), _FLAG),
    "rope_is_neox_style": _FLAG,
    **dict.fromkeys(("model_type", "hidden_act", "dtype", "torch_dtype", "speculators_model_type"), _TEXT),
    **dict.fromkeys(("rope_type", "type", "name_or_path"), _TEXT),
    **dict.fromkeys(("architectures", "layer_types"), _TEXTS),
    **dict.fromkeys(("target_layer_ids", "aux_hidden_state_layer_ids"), _LAYERS_OF_TARGET),
    "eagle_aux_hidden_state_layer_ids": _LAYERS_OF_TARGET,
    "proposal_methods": (_list_of(_OBJECT[0]), "a list of objects"),
    **dict.fromkeys(("dflash_config", "transformer_layer_config", "rope_parameters", "rope_scaling"), _OBJECT),
    **dict.fromkeys(("speculators_config", "verifier", "quantization_config"), _OBJECT),
}
# Objects whose own fields are fields of this table as well.
_INSIDE = (
    *("dflash_config", "transformer_layer_config", "rope_parameters", "rope_scaling", "speculators_config"),
    *("verifier", "proposal_methods"),
)


def field_faults(config: dict[str, Any], above: str = "") -> Iterator[str]:
    """One line for each field whose value cannot be what it stands for; null counts as left out.

    Args:
        above: names of the objects around `config`, each with a dot behind it.
    """
    for name, value in config.items():
        if value is None or name not in _KINDS:
            continue
        fits, words = _KINDS[name]
        if not fits(value):
            yield f"{above}{name} is {_shown(value)}, not {words}"
        elif name in _INSIDE:
            for inner in value if isinstance(value, list) else [value]:
                yield from field_faults(inner, f"{above}{name}.")


def without_nulls(value: Any) -> Any:
    """A value from JSON without the fields that are null, at whatever depth; entries of lists stay."""
    if isinstance(value, dict):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _shown(value: Any, most: int = 40) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"
