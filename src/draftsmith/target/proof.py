"""What is assumed about a target is tried on it once, right after loading.

Three dozen random tokens, forward only: the cost is a few target forwards of that length. Proved are

- packing: a packed row, through variable-length attention or explicit masks, gives the features of separate documents.
  Windows are shrunk to three tokens for the trial (models read them from their configuration when they make a mask, and
  from the layer for a kernel), so that a window of thousands shows on a dozen tokens. What fails runs as separate
  documents from then on. Layers that carry state are tried with their library's own index of documents, which only some
  of their kernels read.
- head: our logits are the model's, and the embedding scale is the factor between a token's embedding row and what
  enters layer 0. A model that computes either in a way of its own is refused: its drafter would be trained on one
  function and served with another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.target import packed
from draftsmith.target.forward import Features, Target, document_spans
from draftsmith.target.geometry import FULL, RECURRENT, SLIDING

_LENGTHS = (5, 13, 1, 9)
_PADDING = 4
_WINDOW = 3
# Mean relative error per token of hidden states: a leak or a wrong window is above 0.1, rounding below these.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
_HALF_TOLERANCE = 5e-2


def choose_packing(target: Target) -> None:
    """Sets `target.packing` and `target.packing_reason`: the fastest way that equals separate documents."""
    foreign = sorted(set(target.kinds) - {FULL, SLIDING})
    config = target.decoder.config
    if foreign:
        target.packing_reason = f"it has {', '.join(foreign)} layers, which no mask can separate"
        if foreign == [RECURRENT]:
            target.packing_reason += f"; {_try_index(target)}"
        return
    if config._attn_implementation not in ("sdpa", "eager"):
        target.packing_reason = f"its attention ({config._attn_implementation}) takes no explicit mask"
        return
    before = config._attn_implementation
    no_kernel = packed.missing(target.device, target.dtype, target.geometry.head_dim)
    if not no_kernel and before == "sdpa":
        target.model.config._attn_implementation = packed.NAME
        error = packing_error(target, "pieces")
        if error is not None and error <= _tolerance(target):
            target.packing = "pieces"
            target.packing_reason = f"variable-length attention; packed features equal separate ones to {error:.1e}"
            return
        target.model.config._attn_implementation = before
        no_kernel = "it refuses variable-length attention" if error is None else f"pieces differ by {error:.1e}"
    error = packing_error(target, "mask")
    bound = _tolerance(target)
    if error is None:
        target.packing, target.packing_reason = "separate", "its forward does not take explicit masks"
    elif not error <= bound:  # also where it is no number
        target.packing = "separate"
        target.packing_reason = f"packed features differ from separate ones by {error:.1e}, more than {bound:.0e}"
    else:
        target.packing = "mask"
        target.packing_reason = f"packed features equal separate ones to {error:.1e} ({no_kernel or before})"


def _try_index(target: Target) -> str:
    """Layers with state, told where documents begin; sets `target.packing` if they heed it. Returns why or why not."""
    config = target.decoder.config
    before = config._attn_implementation
    no_kernel = packed.missing(target.device, target.dtype, target.geometry.head_dim)
    if no_kernel or before != "sdpa":
        return f"the library's index of documents is not tried ({no_kernel or before})"
    target.model.config._attn_implementation = packed.NAME
    error = packing_error(target, "pieces")
    if error is not None and error <= _tolerance(target):
        target.packing = "pieces"
        return f"the library's index of documents separates them to {error:.1e}"
    target.model.config._attn_implementation = before
    target.packing = "separate"
    found = "it refuses the library's index" if error is None else f"the library's index leaves {error:.1e}"
    return f"{found} (flash-linear-attention and causal-conv1d heed it)"


def packing_error(target: Target, packing: str) -> float | None:
    """Mean relative difference between the features of a row packed that way and separate ones; None if the model
    cannot run it at all."""
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(_LENGTHS)] + [torch.full((_PADDING,), -1)]).int()
    positions = torch.cat([torch.arange(n) for n in _LENGTHS] + [torch.zeros(_PADDING, dtype=torch.int64)])
    tokens = _random_tokens(target, document.numel())
    # Rounding grows with depth, a wrong mask shows at once: in half precision stop one layer after every kind was met.
    depth = target.geometry.layers - 1
    if target.dtype not in _TOLERANCE:
        depth = min(depth, 1 + max(target.kinds.index(kind) for kind in set(target.kinds)))
    with _narrow_window(target):
        target.packing = "separate"
        separate: Features = target.features(tokens, document, positions, (depth,))
        target.packing = packing
        try:
            joined = target.features(tokens, document, positions, (depth,))
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError):
            return None
    real = torch.cat([torch.arange(start, end) for start, end in document_spans(document)]).to(target.device)
    return _relative_error(joined.taps_SF[real], separate.taps_SF[real])


@contextmanager
def _narrow_window(target: Target) -> Iterator[None]:
    """Sliding windows of three tokens, as long as the context lasts, in the configuration and in the layers."""
    if SLIDING not in target.kinds:
        yield
        return
    holders = [target.decoder.config, *target.decoder.modules()]
    before = [(holder, holder.sliding_window) for holder in holders if getattr(holder, "sliding_window", None)]
    try:
        for holder, _ in before:
            holder.sliding_window = _WINDOW
        yield
    finally:
        for holder, window in before:
            holder.sliding_window = window


@torch.no_grad()
def prove_head(target: Target, where: str) -> None:
    """Compares `target.head()` with the model's own embedding and logits.

    Raises:
        UserError: the model computes its logits or its input embeddings otherwise.
    """
    output = target.model.get_output_embeddings()
    if output is None or not isinstance(getattr(output, "weight", None), Tensor):
        raise UserError("has no output head", where=where, fix="a target is a causal LM, not a bare encoder or decoder")
    tokens = _random_tokens(target, max(_LENGTHS)).to(target.device)[None]
    entering: list[Tensor] = []

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering.append(args[0] if args else kwargs["hidden_states"])

    handle = target.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        theirs = target.model(input_ids=tokens, use_cache=False).logits
    finally:
        handle.remove()
    head, bound = target.head(), _tolerance(target)
    hidden = target.decoder(input_ids=tokens, use_cache=False).last_hidden_state
    if not torch.isfinite(hidden).all():
        raise UserError(
            f"its hidden states are not finite in {str(target.dtype).removeprefix('torch.')}",
            where=where,
            fix="look for damaged weights, or give another target.dtype: bfloat16 or float32",
        )
    error = _relative_error(head.logits(hidden), theirs)
    if not error <= bound:
        raise UserError(
            f"computes its logits in an unknown way (ours differ by {error:.1e})",
            where=where,
            fix="this kind of model needs an entry in draftsmith/target/geometry.py",
        )
    rows, entered = head.embed(tokens).flatten().double(), entering[0].flatten().double()
    factor = float(rows @ entered / (rows @ rows))
    # Learned positions and embedding norms also enter layer 0; only a pure factor can be told apart, and must be ours.
    if _relative_error(entering[0], head.embed(tokens) * factor) <= bound and abs(factor - 1) > bound:
        scale = target.geometry.embedding_scale
        raise UserError(
            f"scales its embeddings by {scale * factor:.4g}, but its configuration says {scale:.4g}",
            where=where,
            fix="this kind of model needs an entry in draftsmith/target/geometry.py",
        )


def _random_tokens(target: Target, count: int) -> Tensor:
    """Token ids [count] on the CPU, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.geometry.vocab_rows, (count,), generator=generator)


def _relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Mean over tokens of |ours - theirs| / |theirs|, norms over the last dimension."""
    ours, theirs = ours.float(), theirs.float()
    norms = theirs.norm(dim=-1).clamp_min(1e-12)
    return float(((ours - theirs).norm(dim=-1) / norms).mean())


def _tolerance(target: Target) -> float:
    return _TOLERANCE.get(target.dtype, _HALF_TOLERANCE)
