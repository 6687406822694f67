"""Shapes of well-known targets, for benchmarks with random weights; on a CPU their small twins."""

from __future__ import annotations

from dataclasses import replace

from draftsmith.errors import UserError
from draftsmith.target.geometry import FULL, RECURRENT, TargetGeometry

HYBRID = "qwen3_5_text"
EVERY = 4  # of a hybrid's layers, one with full attention
LINEAR_HEAD = 128  # of its gated delta nets; value heads twice the key heads, their widths together H and twice that
_TWIN_ABOVE = 200e6  # parameters of the layers


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, tied: bool) -> TargetGeometry:
    return TargetGeometry(
        hidden_size=hidden,
        layers=layers,
        vocab_rows=151_936,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        intermediate_size=intermediate,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40_960,
        hidden_act="silu",
        tie_word_embeddings=tied,
        model_type="qwen3",
    )


GEOMETRIES: dict[str, TargetGeometry] = {
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288, tied=False),
    "qwen3-4b": _qwen3(2560, 36, 32, 9_728, tied=True),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3_072, tied=True),
    # The sizes of transformers' own default configuration of this kind, which is that of a 9B model.
    "qwen3.5-hybrid": TargetGeometry(
        hidden_size=4096,
        layers=32,
        vocab_rows=248_320,
        heads=16,
        kv_heads=4,
        head_dim=256,
        intermediate_size=12_288,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        max_position_embeddings=262_144,
        hidden_act="silu",
        tie_word_embeddings=False,
        model_type=HYBRID,
    ),
    "smollm2": TargetGeometry(
        hidden_size=576,
        layers=30,
        vocab_rows=49_152,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate_size=1_536,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=8_192,
        hidden_act="silu",
        tie_word_embeddings=True,
        model_type="llama",
    ),
    "tiny": TargetGeometry(
        hidden_size=128,
        layers=8,
        vocab_rows=2_048,
        heads=4,
        kv_heads=2,
        head_dim=32,
        intermediate_size=352,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=2_048,
        hidden_act="silu",
        tie_word_embeddings=True,
        model_type="qwen3",
    ),
}


def find_geometry(name: str) -> TargetGeometry:
    """Geometry by name.

    Raises:
        UserError: no such geometry.
    """
    if name not in GEOMETRIES:
        raise UserError(f"{name!r} is not a geometry", where="--geometry", fix=f"use one of {', '.join(GEOMETRIES)}")
    return GEOMETRIES[name]


def name_of(geometry: TargetGeometry) -> str:
    """The name of a geometry that has one."""
    return next(name for name, value in GEOMETRIES.items() if value == geometry)


def twin(geometry: TargetGeometry) -> TargetGeometry:
    """A target of the same kind that a CPU runs in seconds: tiny where its layers are too large, else itself."""
    if geometry.layers * geometry.layer_parameters <= _TWIN_ABOVE:
        return geometry
    return replace(GEOMETRIES["tiny"], tie_word_embeddings=geometry.tie_word_embeddings, model_type=geometry.model_type)


def kinds_of(geometry: TargetGeometry) -> tuple[str, ...]:
    """What each layer of a named geometry attends to, by transformers' names."""
    if geometry.model_type != HYBRID:
        return (FULL,) * geometry.layers
    return tuple(FULL if index % EVERY == EVERY - 1 else RECURRENT for index in range(geometry.layers))


def linear_sizes(geometry: TargetGeometry) -> tuple[int, int, int]:
    """(key heads, value heads, size of each) of a hybrid's gated delta nets."""
    size = min(LINEAR_HEAD, geometry.hidden_size // 4)
    key_heads = max(1, geometry.hidden_size // (2 * size))
    return key_heads, 2 * key_heads, size
