"""Shapes of well-known targets, for benchmarks with random weights."""

from __future__ import annotations

from draftsmith.errors import UserError
from draftsmith.target.geometry import TargetGeometry


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
