"""Shape of a target, read without its weights.

Everything the drafter copies or has to respect: sizes, rope base, and the three scalars by which targets differ from a
plain decoder: the factor on the input embedding, the factor on the logits, and their tanh cap. `load_target` proves
those three on the loaded weights, so an unknown kind of model is refused instead of drafted for wrongly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from draftsmith.config import TargetConfig
from draftsmith.errors import UserError
from draftsmith.target.source import locate, read_config

FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True)
class TargetGeometry:
    """Sizes and constants of a target.

    Attributes:
        hidden_size: H.
        layers: decoder layers.
        vocab_rows: V, rows of the embedding, padding rows included.
        embedding_scale: factor on the embedding row of an input token.
        logit_softcap: c in c·tanh(logits/c), applied after the multiplier, or None.
        logit_multiplier: factor on hidden @ headᵀ.
    """

    hidden_size: int
    layers: int
    vocab_rows: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    hidden_act: str
    tie_word_embeddings: bool
    model_type: str
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    logit_multiplier: float = 1.0

    @property
    def layer_parameters(self) -> int:
        """Of one layer of a dense decoder, norms left out."""
        attention = 2 * self.hidden_size * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size


def read_geometry(config: TargetConfig) -> TargetGeometry:
    """Geometry of a target from its configuration (for GGUF: its header); loads no weights.

    Raises:
        UserError: the target does not exist, cannot be read, or is not a decoder-only transformer.
    """
    return geometry_of(read_config(config), where=locate(config).name)


def read_kinds(config: TargetConfig) -> tuple[str, ...]:
    """What each decoder layer attends to, from the target's configuration; see `layer_kinds`.

    Raises:
        UserError: as `read_geometry`.
    """
    return layer_kinds(read_config(config))


def geometry_of(hf_config: Any, where: str) -> TargetGeometry:
    """Geometry from a transformers configuration; multi-modal wrappers are looked through.

    Raises:
        UserError: a size is missing.
    """
    text = hf_config.get_text_config(decoder=True)

    def need(name: str) -> Any:
        value = getattr(text, name, None)
        if value is None:
            raise UserError(
                f"its configuration ({text.model_type}) has no {name}",
                where=where,
                fix="targets are decoder-only transformers with attention",
            )
        return value

    hidden, heads = int(need("hidden_size")), int(need("num_attention_heads"))
    intermediate = need("intermediate_size")
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return TargetGeometry(
        hidden_size=hidden,
        layers=int(need("num_hidden_layers")),
        vocab_rows=int(need("vocab_size")),
        heads=heads,
        kv_heads=int(kv_heads),
        head_dim=int(getattr(text, "head_dim", None) or hidden // heads),
        intermediate_size=int(intermediate[0] if isinstance(intermediate, list | tuple) else intermediate),
        rms_norm_eps=float(getattr(text, "rms_norm_eps", None) or getattr(text, "norm_eps", None) or 1e-6),
        rope_theta=_rope_theta(text),
        max_position_embeddings=int(getattr(text, "max_position_embeddings", None) or 32768),
        hidden_act=str(getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None) or "silu"),
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        model_type=str(text.model_type),
        embedding_scale=_embedding_scale(text),
        logit_softcap=getattr(text, "final_logit_softcapping", None),
        logit_multiplier=_logit_multiplier(text),
    )


def layer_kinds(hf_config: Any) -> tuple[str, ...]:
    """What each decoder layer attends to, by transformers' names ("full_attention", "sliding_attention", …)."""
    text = hf_config.get_text_config(decoder=True)
    layers = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        return tuple(kinds)[:layers]
    if getattr(text, "sliding_window", None) is not None:
        return (SLIDING,) * layers
    if getattr(text, "attention_chunk_size", None) is not None:
        return ("chunked_attention",) * layers
    return (FULL,) * layers


def _rope_theta(text: Any) -> float:
    """θ of the full-attention layers: transformers 5 keeps it in `rope_parameters`, per layer kind for some models."""
    rope = getattr(text, "rope_parameters", None) or {}
    if "rope_theta" not in rope:
        nested = [value for value in (rope.get(FULL), *rope.values()) if isinstance(value, dict)]
        rope = next((value for value in nested if "rope_theta" in value), {})
    return float(rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0)


def _embedding_scale(text: Any) -> float:
    """√H for the Gemma family; Granite, Falcon-H1 and MiniCPM state theirs."""
    if text.model_type.startswith(("gemma", "recurrent_gemma")):
        return math.sqrt(text.hidden_size)
    return float(getattr(text, "embedding_multiplier", None) or getattr(text, "scale_emb", None) or 1.0)


def _logit_multiplier(text: Any) -> float:
    """Cohere and Falcon-H1 multiply, Granite divides."""
    scaling = getattr(text, "logits_scaling", None)
    if scaling:
        return 1.0 / float(scaling)
    return float(getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None) or 1.0)
