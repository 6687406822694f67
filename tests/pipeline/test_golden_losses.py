"""A refactor must reproduce these seeded losses. Bit for bit on one machine; here to what other CPUs may differ by."""

from __future__ import annotations

import pytest
import torch

from draftsmith.pipeline.run import train

GOLDEN = {
    "decay": [6.22268, 6.16487, 6.20157, 6.24084],
    "dpace": [6.21112, 6.13870, 6.18997, 6.21144],
}


@pytest.mark.parametrize("weights", sorted(GOLDEN))
def test_seeded_losses_are_the_ones_they_were(tiny_run, weights: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = train(tiny_run(f"golden-{weights}", objective={"weights": weights}, pipeline={"prefetch": 1}))
    finally:
        torch.set_num_threads(before)
    assert result.losses == pytest.approx(GOLDEN[weights], rel=1e-4)
