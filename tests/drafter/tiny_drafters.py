"""Small drafters, rows and features shared by the tests of this folder."""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.blocks import Document, DraftBatch, Row, make_draft_batch, pack_row
from draftsmith.drafter import DrafterSpec, DraftModel, build_masks

VOCAB = 23
MASK_TOKEN = 21
FULL, SLIDING = "full_attention", "sliding_attention"

# name → (layer types, window, causal override): everything that the layer types and the two overrides can say.
LAYOUTS: dict[str, tuple[tuple[str, ...], int | None, bool | None]] = {
    "full": ((FULL, FULL), None, None),
    "sliding": ((SLIDING, SLIDING), 11, None),
    "sliding narrower than a block": ((SLIDING, SLIDING), 5, None),
    "mixed": ((SLIDING, FULL, SLIDING), 9, None),
    "bidirectional sliding": ((SLIDING, FULL), 6, False),
    "all bidirectional sliding": ((SLIDING, SLIDING), 12, False),
    "all causal": ((FULL, SLIDING), 10, True),
    "causal full": ((FULL, FULL), None, True),
}


def tiny_spec(layout: str = "full", block_size: int = 8, **changes: object) -> DrafterSpec:
    types, window, causal = LAYOUTS[layout]
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
        "block_size": block_size,
        "mask_token_id": MASK_TOKEN,
        "layer_types": types,
        "sliding_window": window,
        "causal": causal,
    }
    return DrafterSpec(**{**values, **changes})  # type: ignore[arg-type]


def random_model(spec: DrafterSpec, seed: int = 0, **options: bool) -> DraftModel:
    """Weights large enough that every norm, projection and rotation shows in the output."""
    generator = torch.Generator().manual_seed(seed)
    model = DraftModel(spec, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(1.0 + 0.3 * noise)
            else:
                parameter.copy_(noise * 1.3 / parameter.shape[1] ** 0.5)
    return model


def random_row(lengths: list[int], length: int, seed: int = 0) -> Row:
    """Documents of random tokens, all written by the assistant."""
    generator = torch.Generator().manual_seed(seed)
    documents = [
        Document(torch.randint(0, MASK_TOKEN, (n,), generator=generator), torch.ones(n, dtype=torch.bool))
        for n in lengths
    ]
    return pack_row(0, documents, length)


def batch_of(row: Row, spec: DrafterSpec, anchors: int, *, with_tiles: bool = False, chunk: int = 64) -> DraftBatch:
    return make_draft_batch(
        row,
        anchors=anchors,
        block_size=spec.block_size,
        mask_token_id=spec.mask_token_id,
        slot_weights_B=torch.ones(spec.block_size),
        chunk=chunk,
        kinds=spec.kinds,
        seed=(0, 0, 0),
        with_tiles=with_tiles,
    )


def training_hidden(
    model: DraftModel, batch: DraftBatch, features_SF: Tensor, embedding_VH: Tensor, attention: str = "dense"
) -> Tensor:
    """[N, B, H] from the training forward."""
    hidden_QH = model(
        features_SF,
        embedding_VH[batch.inputs_Q],
        batch.context_positions_S,
        batch.block_positions_Q,
        build_masks(batch, attention),
    )
    return hidden_QH.view(batch.anchors_N.numel(), -1, hidden_QH.shape[-1])
