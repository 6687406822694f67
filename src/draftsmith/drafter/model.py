"""The DFlash drafter: Qwen3-style layers that fill a block of masked slots in one pass.

Context enters as K and V of every layer, projected from `hidden_norm(fc(features))` once computed and never updated;
queries come from the block's slots only. Embedding and head are the target's and are not part of the model. Parameter
names are z-lab's, so saving is exporting.

Letters: S context tokens, Q = N·B slots, H hidden, F = taps·H feature width, D head size.
Training runs all Q slots of a row in one `forward`. Decoding keeps context K and V in a `DraftCache`, `extend`s it with
the features of accepted tokens, and `draft`s one block from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from draftsmith.blocks import LayerKind
from draftsmith.drafter.attention import DenseMask, LayerMasks, attend, flex_options
from draftsmith.drafter.rope import rotary_tables, rotate
from draftsmith.drafter.spec import DrafterSpec

Rotary = tuple[Tensor, Tensor]
_SEED_STRIDE = 1_000_003  # more than a drafter has parameters: no two seeds share a generator
_DRAWING_THREADS = 8


class Norm(nn.Module):
    """RMS norm in float32 with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Queries from slots; keys and values from context and slots through the same projections."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.flex_options: dict[str, Any] = {}
        self.q_proj = nn.Linear(spec.hidden_size, spec.heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, spec.kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, spec.kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.hidden_size, bias=False)
        self.q_norm = Norm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = Norm(spec.head_dim, spec.rms_norm_eps)

    def queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        """[heads, L, D] from hidden states [L, H]."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), *rotary)

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Two [kv_heads, L, D] from hidden states [L, H]."""
        key = rotate(self.k_norm(self._heads(self.k_proj(x))), *rotary)
        return key, self._heads(self.v_proj(x))

    def output(self, attended: Tensor) -> Tensor:
        """[L, H] from [heads, L, D]."""
        return self.o_proj(attended.transpose(0, 1).flatten(1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.head_dim).transpose(0, 1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm decoder layer; the context is not normed again here."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.input_layernorm = Norm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = Norm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def forward(
        self,
        hidden_QH: Tensor,
        context_SH: Tensor,
        slots: Rotary,
        context: Rotary,
        mask: BlockMask | DenseMask,
        without_anchors: int = 0,
    ) -> Tensor:
        """[Q, H] from [Q, H]; with `without_anchors`, the block size, slots 1 to B-1 of each block come out."""
        x = self.input_layernorm(hidden_QH)
        key_S, value_S = self.self_attn.keys_values(context_SH, context)
        key_Q, value_Q = self.self_attn.keys_values(x, slots)
        key, value = torch.cat((key_S, key_Q), dim=1), torch.cat((value_S, value_Q), dim=1)
        attended = attend(self.self_attn.queries(x, slots), key, value, mask, self.self_attn.flex_options)
        if without_anchors:
            attended = attended.unflatten(1, (-1, without_anchors))[:, :, 1:].flatten(1, 2)
            hidden_QH = hidden_QH.unflatten(0, (-1, without_anchors))[:, 1:].flatten(0, 1)
        hidden_QH = hidden_QH + self.self_attn.output(attended)
        return hidden_QH + self.mlp(self.post_attention_layernorm(hidden_QH))


class DraftCache:
    """Context K and V of every layer while decoding, [layers, kv_heads, length, D], allocated once.

    Tokens enter in two steps: `open_context` or `open_block` says where they stand, `write` stores one layer's K and V
    there. `attend` is then the attention of the block that was opened.

    Attributes:
        used: context tokens held.
    """

    def __init__(self, spec: DrafterSpec, max_length: int, device: torch.device, dtype: torch.dtype) -> None:
        # Room for one block behind the context: a block's own K and V are written there and overwritten later.
        shape = (spec.layers, spec.kv_heads, max_length + spec.block_size, spec.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        positions = torch.arange(shape[2], device=device)
        self.cos, self.sin = rotary_tables(positions, spec.head_dim, spec.rope_theta, dtype)
        self.used = 0

    def open_context(self, start: int, length: int) -> Rotary:
        """Rotary tables of context tokens start..start+length-1; what was held from `start` on is forgotten."""
        assert start <= self.used, f"context has a hole: {self.used} tokens held, extended at {start}"
        self.used = start + length
        return self._open(start, length)

    def open_block(self, start: int, width: int) -> Rotary:
        """Rotary tables of a block whose slot 0 stands at `start`, right behind the context."""
        assert start == self.used, f"a block at {start} needs exactly that much context, the cache holds {self.used}"
        self._masks: dict[LayerKind, Tensor | None] = {}
        return self._open(start, width)

    def _open(self, start: int, count: int) -> Rotary:
        self._places = slice(start, start + count)
        return self.cos[self._places], self.sin[self._places]

    def write(self, index: int, key: Tensor, value: Tensor) -> None:
        """Stores K and V [kv_heads, count, D] of layer `index` where the opened tokens stand."""
        self.keys[index, :, self._places] = key
        self.values[index, :, self._places] = value

    def attend(self, index: int, kind: LayerKind, query: Tensor) -> Tensor:
        """[heads, b, D] from queries [heads, b, D] of the opened block in layer `index`."""
        start, end = self._places.start, self._places.stop
        # Keys older than the window of slot 0 are seen by no slot.
        first = 0 if kind.window is None else max(0, start - kind.window + 1)
        if kind not in self._masks:
            self._masks[kind] = _block_mask(kind, start, end - start, first, query.device)
        return F.scaled_dot_product_attention(
            query[None],
            self.keys[None, index, :, first:end],
            self.values[None, index, :, first:end],
            attn_mask=self._masks[kind],
            enable_gqa=query.shape[0] != self.keys.shape[1],
        )[0]


def run_part(part: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """One part of `DraftModel.fill_blocks`, as it is."""
    return part(*inputs)


def _read_context(fc: nn.Linear, norm: Norm, features_SF: Tensor) -> Tensor:
    return norm(fc(features_SF))  # type: ignore[no-any-return]


def _through_layer(layer: Layer, again: bool, *inputs: Any) -> Tensor:
    """`again`: computed once more in the backward pass instead of kept."""
    if again:
        # Layers draw no random numbers; saving and restoring a device's generator would race between threads.
        return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
    return layer(*inputs)  # type: ignore[no-any-return]


def _through_last(layer: Layer, norm: Norm, block_size: int, again: bool, *inputs: Any) -> Tensor:
    """Behind the last layer's attention nobody asks for the anchors any more: slot 0 comes out as zeros."""
    hidden_NBH = norm(_through_layer(layer, again, *inputs, block_size)).unflatten(0, (-1, block_size - 1))
    return F.pad(hidden_NBH, (0, 0, 1, 0)).flatten(0, 1)


class DraftModel(nn.Module):
    """See the module's docstring. `activation_checkpointing` recomputes layers in the backward pass."""

    def __init__(self, spec: DrafterSpec, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.activation_checkpointing = activation_checkpointing
        self.fc = nn.Linear(len(spec.taps) * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = Norm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.norm = Norm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self,
        features_SF: Tensor,
        block_embeddings_QH: Tensor,
        context_positions_S: Tensor,
        block_positions_Q: Tensor,
        masks: LayerMasks,
    ) -> Tensor:
        """Hidden states [Q, H] after the final norm, for all blocks of one row; zeros in slot 0.

        Args:
            features_SF: concatenated taps of the row.
            block_embeddings_QH: the target's embedding rows of the block inputs, scaled.
            context_positions_S, block_positions_Q: int64 rotary positions.
            masks: per layer kind, from `build_masks`.
        """
        context, slots = (
            self.rotary(places, block_embeddings_QH.dtype) for places in (context_positions_S, block_positions_Q)
        )
        return self.fill_blocks(features_SF, block_embeddings_QH, context, slots, masks)

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """Tables of int64 positions, for `fill_blocks`."""
        return rotary_tables(positions, self.spec.head_dim, self.spec.rope_theta, dtype)

    def fill_blocks(
        self,
        features_SF: Tensor,
        block_embeddings_QH: Tensor,
        context: Rotary,
        slots: Rotary,
        masks: LayerMasks,
        run: Callable[..., Tensor] = run_part,
    ) -> Tensor:
        """`forward` behind the rotary tables of context and slots: what the trainer compiles.

        The tables are inputs, because a compiler fuses what makes them into every kernel that reads them and then
        takes sines once for each head and layer (3 % of a step at Qwen3-8B's size).

        Args:
            features_SF, block_embeddings_QH, context, slots, masks: as `forward`.
            run: called as `run_part(part, *inputs)` for the context, each layer but the last, and the last with the
                final norm. A compiled twin of `run_part` makes four graphs, however many layers are alike: the first
                layer's input asks for no gradient, so it has one of its own.
        """
        spec = self.spec
        again = self.activation_checkpointing and torch.is_grad_enabled()
        context_SH = run(_read_context, self.fc, self.hidden_norm, features_SF)
        hidden_QH = block_embeddings_QH
        for index, layer in enumerate(self._layers()):
            inputs = (hidden_QH, context_SH, slots, context, masks[spec.layer_kind(index)])
            if index < spec.layers - 1:
                hidden_QH = run(_through_layer, layer, again, *inputs)
            else:
                hidden_QH = run(_through_last, layer, self.norm, spec.block_size, again, *inputs)
        return hidden_QH

    def _layers(self) -> Iterator[Layer]:
        """The layers under their own type."""
        return cast(Iterator[Layer], iter(self.layers))

    def new_cache(self, max_length: int, device: torch.device, dtype: torch.dtype) -> DraftCache:
        """Empty context for a sequence of up to `max_length` tokens."""
        return DraftCache(self.spec, max_length, device, dtype)

    @torch.no_grad()
    def extend(self, cache: DraftCache, features_LF: Tensor, start: int) -> None:
        """Writes K and V of context tokens start..start+L-1; what the cache held from `start` on is forgotten."""
        context_LH = self.hidden_norm(self.fc(features_LF))
        rotary = cache.open_context(start, features_LF.shape[0])
        for index, layer in enumerate(self._layers()):
            cache.write(index, *layer.self_attn.keys_values(context_LH, rotary))

    @torch.no_grad()
    def draft(self, cache: DraftCache, block_embeddings_bH: Tensor, start: int) -> Tensor:
        """Hidden states [b, H] of one block whose slot 0 stands at position `start`; b may be less than B.

        The block sees the `start` context tokens of the cache (by layer kind) and itself; it leaves no trace in it.
        """
        rotary = cache.open_block(start, block_embeddings_bH.shape[0])
        hidden_bH = block_embeddings_bH
        for index, layer in enumerate(self._layers()):
            x = layer.input_layernorm(hidden_bH)
            attention = layer.self_attn
            cache.write(index, *attention.keys_values(x, rotary))
            attended = cache.attend(index, self.spec.layer_kind(index), attention.queries(x, rotary))
            hidden_bH = hidden_bH + attention.output(attended)
            hidden_bH = hidden_bH + layer.mlp(layer.post_attention_layernorm(hidden_bH))
        return self.norm(hidden_bH)


def _block_mask(kind: LayerKind, start: int, width: int, first: int, device: torch.device) -> Tensor | None:
    """bool [b, keys] for one decoding block; None where every key is visible."""
    window, causal = kind.window, kind.causal
    if window is None and not causal:
        return None
    query = torch.arange(start, start + width, device=device)[:, None]
    key = torch.arange(first, start + width, device=device)
    visible = torch.ones(width, key.numel(), dtype=torch.bool, device=device)
    if causal:
        visible &= key <= query
    if window is not None:
        visible &= (query - key < window) & (key - query < window)
    return visible


def empty_model(
    spec: DrafterSpec,
    activation_checkpointing: bool = False,
    *,
    device: torch.device,
    dtype: torch.dtype,
    flex_backend: str = "triton",
) -> DraftModel:
    """A drafter to train: its kernels are chosen for the device, its weights are memory without values, for
    `initialise` or a file to fill.

    Building it on a device would draw torch's own initial weights first: seconds for a billion of them.
    """
    with torch.device("meta"):
        model = DraftModel(spec, activation_checkpointing)
    for layer in model._layers():
        layer.self_attn.flex_options = flex_options(device, spec.head_dim, flex_backend)
    return model.to(dtype).to_empty(device=device)


def initialise(model: DraftModel, seed: int, final_scale_H: Tensor | None = None) -> None:
    """Fresh weights: matrices normal with σ = 0.02, norms one; the same for a seed on every device.

    Each parameter has a generator of its own, so threads draw side by side: a billion numbers take a CPU thread ten
    seconds.

    Args:
        final_scale_H: scale of the target's final norm. The drafter's own final norm starts from it, because the frozen
            head expects hidden states of that size (without it SmolLM2's loss starts at 84 instead of 11).
    """

    @torch.no_grad()
    def draw(index: int, parameter: nn.Parameter) -> None:
        if parameter.dim() == 2:
            generator = torch.Generator().manual_seed(_SEED_STRIDE * seed + index)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        else:
            parameter.fill_(1.0)

    parameters = list(model.parameters())
    with ThreadPoolExecutor(min(_DRAWING_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(draw, range(len(parameters)), parameters))
    if final_scale_H is not None:
        with torch.no_grad():
            model.norm.weight.copy_(final_scale_H)
