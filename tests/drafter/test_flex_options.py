"""Kernel options of flex attention by card."""

from __future__ import annotations

import pytest
import torch

from draftsmith.blocks import TILE
from draftsmith.drafter.attention import flex_options


@pytest.mark.parametrize("head_dim", [64, 128])
def test_on_hopper_the_kernels_tiles_divide_the_masks(monkeypatch, head_dim: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    options = flex_options(torch.device("cuda", 0), head_dim)
    tiles = {name: size for name, size in options.items() if "BLOCK" in name}
    assert len(tiles) == 6
    assert all(TILE % size == 0 for size in tiles.values()), tiles
    # torch computes the query gradients with one tile inside the other.
    assert tiles["bwd_BLOCK_M1"] == tiles["bwd_BLOCK_N2"]
    assert tiles["bwd_BLOCK_N1"] == tiles["bwd_BLOCK_M2"]


def test_elsewhere_torch_chooses(monkeypatch) -> None:
    assert flex_options(torch.device("cpu"), 128) == {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (12, 0))
    assert flex_options(torch.device("cuda", 0), 128) == {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert flex_options(torch.device("cuda", 0), 96) == {}
