"""Dense and flex attention against torch's own attention under the full [Q, S + Q] mask."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from tiny_drafters import batch_of, random_row, tiny_spec
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from draftsmith.blocks import DraftBatch, LayerKind, dense_mask
from draftsmith.drafter import attention, build_masks
from draftsmith.drafter.attention import attend

# (documents, S, N, B, heads, kv_heads, head size); nothing divides anything.
SIZES = [
    ([40, 7, 90], 143, 11, 7, 6, 2, 10),
    ([33], 33, 5, 16, 3, 3, 6),
    ([2, 2, 30], 50, 9, 4, 4, 1, 8),
    ([300, 61], 401, 45, 8, 4, 2, 16),
]
KINDS = [LayerKind(), LayerKind(None, True), LayerKind(9, True), LayerKind(5, False), LayerKind(1, False)]


def problem(size: tuple, kind: LayerKind, first_anchor: int = 0) -> tuple[DraftBatch, Tensor, Tensor, Tensor]:
    lengths, length, anchors, block_size, heads, kv_heads, dim = size
    causal, window = kind.causal, kind.window
    types = ("full_attention" if window is None else "sliding_attention",)
    spec = tiny_spec(block_size=block_size, layers=1, layer_types=types, sliding_window=window, causal=causal)
    assert spec.kinds == (kind,)
    row = random_row(lengths, length)
    row.loss_mask_S[:first_anchor] = False
    batch = batch_of(row, spec, anchors, with_tiles=True)
    generator = torch.Generator().manual_seed(0)
    queries, keys = anchors * block_size, length + anchors * block_size
    query = torch.randn(heads, queries, dim, generator=generator)
    key, value = (torch.randn(kv_heads, keys, dim, generator=generator) for _ in range(2))
    return batch, query, key, value


def twin(query: Tensor, key: Tensor, value: Tensor, visible_QK: Tensor) -> Tensor:
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    return scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=visible_QK)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_dense_equals_torch_forward_and_backward(size: tuple, kind: LayerKind) -> None:
    batch, *inputs = problem(size, kind)
    visible_QK = dense_mask(batch.intervals[kind], size[1])
    ours, theirs = ([part.clone().requires_grad_() for part in inputs] for _ in range(2))
    out, expected = attend(*ours, build_masks(batch, "dense")[kind]), twin(*theirs, visible_QK)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for grad, want in zip(
        torch.autograd.grad(out, ours, cotangent), torch.autograd.grad(expected, theirs, cotangent), strict=True
    ):
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)


def test_dense_in_bfloat16() -> None:
    kind = LayerKind(9, True)
    batch, *inputs = problem(SIZES[0], kind)
    out = attend(*(part.bfloat16() for part in inputs), build_masks(batch, "dense")[kind])
    assert out.dtype == torch.bfloat16
    expected = twin(*inputs, dense_mask(batch.intervals[kind], SIZES[0][1]))
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.03)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", KINDS)
def test_eager_flex_equals_dense(kind: LayerKind) -> None:
    """Checks the predicate; eager flex ignores tiles."""
    batch, *inputs = problem(SIZES[0], kind)
    out = attend(*inputs, build_masks(batch, "flex")[kind])
    torch.testing.assert_close(out, attend(*inputs, build_masks(batch, "dense")[kind]), rtol=1e-4, atol=1e-5)


def compare_compiled_flex_with_dense() -> None:
    """Checks the tiles as a kernel walks them, full ones included; S, Q and S + Q divide no tile."""
    kind = LayerKind()
    batch, *inputs = problem(SIZES[3], kind, first_anchor=250)
    assert batch.tiles[kind].full_kv_count.sum() > 0
    assert batch.tiles[kind].kv_count.sum() > 0
    expected = attend(*inputs, build_masks(batch, "dense")[kind])
    attention.flex_attention = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    with torch.no_grad():
        out = attend(*inputs, build_masks(batch, "flex")[kind])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_compiled_flex_equals_dense() -> None:
    """In a process and an environment of its own: without vector instructions, which other tests switch off to compile
    faster, torch's CPU has no lowering for flex attention."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    done = subprocess.run([sys.executable, __file__], env=own, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_block_mask_is_the_one_that_torch_would_make() -> None:
    """Every list stands in its own field, in both directions."""
    kind = LayerKind(450, False)
    row = random_row([600, 30], 640)
    row.loss_mask_S[:400] = False  # late anchors only, so that some tiles are full
    spec = tiny_spec(
        block_size=16, layers=1, layer_types=("sliding_attention",), sliding_window=kind.window, causal=False
    )
    batch = batch_of(row, spec, 16, with_tiles=True)
    ours = build_masks(batch, "flex")[kind]
    visible_QK = dense_mask(batch.intervals[kind], 640)
    theirs = create_block_mask(lambda _b, _h, q, k: visible_QK[q, k], 1, 1, 256, 640 + 256, device="cpu")
    assert ours.shape == theirs.shape
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = [getattr(mask, f"{name}_num_blocks")[0, 0] for mask in (ours, theirs)]
        indices = [getattr(mask, f"{name}_indices")[0, 0] for mask in (ours, theirs)]
        assert torch.equal(*counts)
        assert counts[0].sum() > 0, f"no {name} tile: this row tests nothing"
        for row_number, used in enumerate(counts[0].tolist()):
            assert torch.equal(*(index[row_number, :used] for index in indices))


def test_flex_without_tiles_is_a_fault() -> None:
    spec = tiny_spec()
    with pytest.raises(AssertionError):
        build_masks(batch_of(random_row([9], 16), spec, 2), "flex")


if __name__ == "__main__":
    compare_compiled_flex_with_dense()
