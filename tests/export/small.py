"""Small drafters for the tests of this folder, one for everything that layer types and causality can say."""

from __future__ import annotations

from pathlib import Path

import torch

from draftsmith.drafter import DrafterSpec, DraftModel, save_drafter

FULL, SLIDING = "full_attention", "sliding_attention"
# name → (layer types, window, causal override)
LAYERS: dict[str, tuple[tuple[str, ...], int | None, bool | None]] = {
    "full": ((FULL, FULL), None, None),
    "sliding": ((SLIDING, SLIDING), 11, None),
    "mixed": ((SLIDING, FULL, SLIDING), 9, None),
    "bidirectional": ((SLIDING, FULL), 6, False),
    "causal": ((FULL, SLIDING), 10, True),
    "causal full": ((FULL, FULL), None, True),
}
MASK, VOCAB = 21, 23


def small_spec(layers: str = "full", **changes: object) -> DrafterSpec:
    types, window, causal = LAYERS[layers]
    values: dict[str, object] = {
        "hidden_size": 32,
        "layers": len(types),
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e5,
        "max_position_embeddings": 4096,
        "vocab_rows": VOCAB,
        "target_layers": 9,
        "taps": (1, 4, 6),
        "block_size": 8,
        "mask_token_id": MASK,
        "layer_types": types,
        "sliding_window": window,
        "causal": causal,
    }
    return DrafterSpec(**{**values, **changes})  # type: ignore[arg-type]


def random_drafter(spec: DrafterSpec, seed: int = 0) -> DraftModel:
    """Weights large enough that every norm, projection and rotation shows in the output."""
    generator = torch.Generator().manual_seed(seed)
    model = DraftModel(spec)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 if parameter.dim() == 2 else 1 + 0.3 * noise)
    return model.requires_grad_(False)


def saved(folder: Path, layers: str = "full", dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    """A random drafter on disk, in our own layout."""
    save_drafter(random_drafter(small_spec(layers, **changes)), folder, dtype)
    return folder
