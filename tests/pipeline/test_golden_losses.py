"""A refactor must reproduce these seeded losses. Bit for bit on one machine; here to what other CPUs may differ by."""

from __future__ import annotations

import pytest
import torch

from draftsmith.pipeline.run import train

GOLDEN = {
    "decay": [6.21369, 6.14556, 6.18660, 6.22991],
    "dpace": [6.20038, 6.11876, 6.17586, 6.19963],
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
