"""The DFlash drafter: Qwen3-style layers that fill a block of masked slots in one pass.

Context enters as K and V of every layer, projected from `hidden_norm(fc(features))` once computed and never updated;
queries come from the block's slots only. Embedding and head are the target's and are not part of the model. Parameter
names are z-lab's, so saving is exporting.

Letters: S context tokens, Q = N·B slots, H hidden, F = taps·H feature width, D head size.
Training runs all Q slots of a row in one `forward`. Decoding keeps context K and V in a `DraftCache`, `extend`s it with
the features of accepted tokens, and `draft`s one block from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from draftsmith.blocks import LayerKind
from draftsmith.drafter.attention import DenseMask, LayerMasks, attend
from draftsmith.drafter.rope import rotary_tables, rotate
from draftsmith.drafter.spec import DrafterSpec

Rotary = tuple[Tensor, Tensor]


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
        self, hidden_QH: Tensor, context_SH: Tensor, slots: Rotary, context: Rotary, mask: BlockMask | DenseMask
    ) -> Tensor:
        x = self.input_layernorm(hidden_QH)
        key_S, value_S = self.self_attn.keys_values(context_SH, context)
        key_Q, value_Q = self.self_attn.keys_values(x, slots)
        key, value = torch.cat((key_S, key_Q), dim=1), torch.cat((value_S, value_Q), dim=1)
        attended = attend(self.self_attn.queries(x, slots), key, value, mask)
        hidden_QH = hidden_QH + self.self_attn.output(attended)
        return hidden_QH + self.mlp(self.post_attention_layernorm(hidden_QH))


class DraftCache:
    """Context K and V of every layer while decoding, [layers, kv_heads, length, D], allocated once.

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

    def rotary(self, start: int, end: int) -> Rotary:
        return self.cos[start:end], self.sin[start:end]


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
        """Hidden states [Q, H] after the final norm, for all blocks of one row.

        Args:
            features_SF: concatenated taps of the row.
            block_embeddings_QH: the target's embedding rows of the block inputs, scaled.
            context_positions_S, block_positions_Q: int64 rotary positions.
            masks: per layer kind, from `build_masks`.
        """
        spec, dtype = self.spec, block_embeddings_QH.dtype
        context_SH = self.hidden_norm(self.fc(features_SF))
        context = rotary_tables(context_positions_S, spec.head_dim, spec.rope_theta, dtype)
        slots = rotary_tables(block_positions_Q, spec.head_dim, spec.rope_theta, dtype)
        hidden_QH = block_embeddings_QH
        for index, layer in enumerate(self._layers()):
            inputs = (hidden_QH, context_SH, slots, context, masks[spec.layer_kind(index)])
            if self.activation_checkpointing and torch.is_grad_enabled():
                # Layers draw no random numbers; saving and restoring a device's generator would race between threads.
                hidden_QH = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden_QH = layer(*inputs)
        return self.norm(hidden_QH)

    def _layers(self) -> Iterator[Layer]:
        """The layers under their own type."""
        return cast(Iterator[Layer], iter(self.layers))

    def new_cache(self, max_length: int, device: torch.device, dtype: torch.dtype) -> DraftCache:
        """Empty context for a sequence of up to `max_length` tokens."""
        return DraftCache(self.spec, max_length, device, dtype)

    @torch.no_grad()
    def extend(self, cache: DraftCache, features_LF: Tensor, start: int) -> None:
        """Writes K and V of context tokens start..start+L-1; what the cache held from `start` on is forgotten."""
        assert start <= cache.used, f"context has a hole: {cache.used} tokens held, extended at {start}"
        end = start + features_LF.shape[0]
        context_LH = self.hidden_norm(self.fc(features_LF))
        rotary = cache.rotary(start, end)
        for index, layer in enumerate(self._layers()):
            key, value = layer.self_attn.keys_values(context_LH, rotary)
            cache.keys[index, :, start:end] = key
            cache.values[index, :, start:end] = value
        cache.used = end

    @torch.no_grad()
    def draft(self, cache: DraftCache, block_embeddings_bH: Tensor, start: int) -> Tensor:
        """Hidden states [b, H] of one block whose slot 0 stands at position `start`; b may be less than B.

        The block sees the `start` context tokens of the cache (by layer kind) and itself; it leaves no trace in it.
        """
        assert start == cache.used, f"a block at {start} needs exactly that much context, the cache holds {cache.used}"
        width = block_embeddings_bH.shape[0]
        end = start + width
        rotary = cache.rotary(start, end)
        hidden_bH = block_embeddings_bH
        for index, layer in enumerate(self._layers()):
            kind = self.spec.layer_kind(index)
            x = layer.input_layernorm(hidden_bH)
            attention = layer.self_attn
            key, value = attention.keys_values(x, rotary)
            cache.keys[index, :, start:end] = key
            cache.values[index, :, start:end] = value
            # Keys older than the window of slot 0 are seen by no slot.
            first = 0 if kind.window is None else max(0, start - kind.window + 1)
            attended = F.scaled_dot_product_attention(
                attention.queries(x, rotary)[None],
                cache.keys[None, index, :, first:end],
                cache.values[None, index, :, first:end],
                attn_mask=_block_mask(kind, start, width, first, hidden_bH.device),
                enable_gqa=self.spec.heads != self.spec.kv_heads,
            )[0]
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


def initialise(model: DraftModel, seed: int, final_scale_H: Tensor | None = None) -> None:
    """Fresh weights: matrices normal with σ = 0.02, norms one; the same for a seed on every device.

    Args:
        final_scale_H: scale of the target's final norm. The drafter's own final norm starts from it, because the frozen
            head expects hidden states of that size (without it SmolLM2's loss starts at 84 instead of 11).
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
            else:
                parameter.fill_(1.0)
        if final_scale_H is not None:
            model.norm.weight.copy_(final_scale_H)
