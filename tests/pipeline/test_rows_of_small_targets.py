"""A config for a small target says what longer rows may bring; others say nothing of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftsmith.bench.geometry import find_geometry
from draftsmith.pipeline.init import DataFacts, longer_rows

DOCUMENT, USED = torch.ones(900, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)
MUCH = DataFacts(100, 100, 50_000_000, 900, (DOCUMENT,), USED, whole=True)


@pytest.mark.parametrize(
    ("name", "length", "tokens", "said"),
    [
        ("smollm2", 3072, MUCH.tokens, True),
        ("qwen3-0.6b", 4096, MUCH.tokens, True),
        ("smollm2", 8192, MUCH.tokens, False),
        ("smollm2", 3072, 60 * 8192, False),
        ("qwen3-4b", 3072, MUCH.tokens, False),
        ("tiny", 1024, MUCH.tokens, True),
        ("tiny", 2048, MUCH.tokens, False),
    ],
)
def test_longer_rows(name: str, length: int, tokens: int, said: bool) -> None:
    geometry = find_geometry(name)
    hint = longer_rows(replace(MUCH, tokens=tokens), geometry, length)
    assert bool(hint) == said
    assert not said or str(min(8192, geometry.max_position_embeddings)) in hint
