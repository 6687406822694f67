"""Geometry of a drafter, resolved: what `config.json` of a checkpoint says and nothing of how it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from draftsmith.blocks import LayerKind
from draftsmith.config import DrafterConfig
from draftsmith.errors import UserError
from draftsmith.target.geometry import TargetGeometry
from draftsmith.target.taps import check_taps, choose_taps


@dataclass(frozen=True)
class DrafterSpec:
    """Everything needed to build the model and to serve it.

    Attributes:
        taps: target layers whose outputs are the features, in order of concatenation.
        target_layers: depth of the target.
        vocab_rows: rows of the target's embedding.
        layer_types: "full_attention" or "sliding_attention" per layer.
        causal: overrides every layer; None: sliding layers causal, full layers bidirectional.
        input_scale: factor on the target's raw embedding rows.
        logit_multiplier, logit_softcap: applied to the head's output.
    """

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_rows: int
    target_layers: int
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    causal: bool | None = None
    input_scale: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None

    def require_target(self, target: TargetGeometry, where: str) -> None:
        """Refuses a drafter that was trained for another target than this.

        Args:
            target: that it is to draft for.
            where: the drafter, for the message.

        Raises:
            UserError: hidden size, depth or vocabulary differ.
        """
        theirs = (self.hidden_size, self.target_layers, self.vocab_rows)
        ours = (target.hidden_size, target.layers, target.vocab_rows)
        if ours != theirs:
            raise UserError(
                f"is for another target: its hidden size, layers and vocabulary are {theirs}, the target's are {ours}",
                where=where,
                fix="name the target that it was trained for",
            )

    def faults(self) -> Iterator[tuple[str, str]]:
        """(rule, text) of every number that does not fit the others: nothing can decode with such a drafter."""
        outside = [tap for tap in self.taps if not 0 <= tap < self.target_layers]
        if outside:
            yield "tap-range", f"taps {outside} are outside the target's {self.target_layers} layers"
        if not 0 <= self.mask_token_id < self.vocab_rows:
            yield "mask-token-range", f"mask token {self.mask_token_id} is outside the {self.vocab_rows} embedding rows"
        strange = sorted(set(self.layer_types) - {"full_attention", "sliding_attention"})
        if strange:
            yield "layer-type-unknown", f"layer type {strange[0]!r} is neither full_attention nor sliding_attention"
        if self.heads % self.kv_heads:
            yield "head-sizes", f"{self.heads} heads cannot share {self.kv_heads} K/V heads"
        if self.head_dim < 2 or self.head_dim % 2:
            yield "head-sizes", f"head_dim is {self.head_dim}; rotary positions need an even one"

    def layer_kind(self, layer: int) -> LayerKind:
        """Attention of one layer, the unset `causal` resolved as serving engines do."""
        sliding = self.layer_types[layer] == "sliding_attention"
        causal = sliding if self.causal is None else self.causal
        return LayerKind(self.sliding_window if sliding else None, causal)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct layer kinds, in order of first use."""
        return tuple(dict.fromkeys(self.layer_kind(layer) for layer in range(self.layers)))


def resolve_spec(config: DrafterConfig, target: TargetGeometry, mask_token_id: int) -> DrafterSpec:
    """Fills what the config leaves open from the target.

    Raises:
        UserError: sizes that do not divide, taps out of range, mask token outside the vocabulary.
    """
    taps = config.taps if config.taps is not None else choose_taps(target.layers, config.layers)
    check_taps(taps, target.layers)
    heads = config.heads or target.heads
    kv_heads = config.kv_heads or target.kv_heads
    if heads % kv_heads:
        raise UserError(
            f"{heads} heads cannot share {kv_heads} kv_heads", where="drafter", fix="heads must be a multiple"
        )
    head_dim = config.head_dim or target.head_dim
    if head_dim % 2:
        raise UserError(f"head_dim {head_dim} is odd", where="drafter", fix="rotary positions need an even one")
    if not 0 <= mask_token_id < target.vocab_rows:
        raise UserError(
            f"mask token {mask_token_id} is outside the target's {target.vocab_rows} embedding rows",
            where="drafter.mask_token_id",
        )
    return DrafterSpec(
        hidden_size=target.hidden_size,
        layers=config.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size or target.intermediate_size,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_position_embeddings,
        vocab_rows=target.vocab_rows,
        target_layers=target.layers,
        taps=tuple(taps),
        block_size=config.block_size,
        mask_token_id=mask_token_id,
        layer_types=config.layer_types or ("full_attention",) * config.layers,
        sliding_window=config.sliding_window,
        causal=config.causal,
        input_scale=target.embedding_scale,
        logit_multiplier=target.logit_multiplier,
        logit_softcap=target.logit_softcap,
    )
