"""fp8 for the layers that features run through: row-wise scaled matrix products, and what they change, measured.

    x [M, K] tokens, W [N, K] weights: each row by itself is divided by its largest absolute value / 448 and rounded to
    float8_e4m3fn; the product of the rounded ones is multiplied by both rows' scales        y = (x8 @ W8ᵀ) · sx · sWᵀ

Weights are rounded once, after loading, layer by layer, so that never more than one layer exists in both forms.
Activations are rounded in the forward; in a compiled layer that is part of the kernel which makes them (norm, SwiGLU).
Embedding, head, norms, attention and linear layers narrower than 256 (routers, gates of recurrent layers: no time in
them, and what they decide is sharp) stay as they are. Products on Hopper and Ada run at up to twice the rate of bf16.

What it costs is measured, not assumed: the same rows go through the target before and after, and the relative error of
every tap is compared with a bound. The error of a token is ‖after - before‖ / ‖before‖, and of a tap the root mean
square over its tokens: the first tokens of a document are tens of times larger than all others in many models, and in
a plain norm over the row nothing else would count. Rounding to e4m3 (three bits behind the leading one) is off by 2.6 %
of the value (RMS); both factors of a product are, so 3.7 % of what a layer adds is the least to expect, and a residual
stream sums many layers whose errors are independent: 3.0 to 6.9 % at the taps of SmolLM2-135M, where bf16 alone is off
by 0.5 to 1.3 %. Hence the bound of 10 %: below it the drafter sees rounding noise, which a small one hardly notices
(docs/lab-notes.md), above it something is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftsmith.blocks import Row
from draftsmith.errors import UserError, first_line
from draftsmith.target.forward import Features, Target

MOST = 448.0  # largest float8_e4m3fn
NARROW = 256  # rows or columns, below which a linear layer stays
_STEP = 16  # what the kernels ask of K and N


def to_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [M, K] as float8_e4m3fn and their scales [M, 1] in float32; a row of zeros stays one."""
    wide = x_MK.float()
    scale_M1 = (wide.abs().amax(-1, keepdim=True) / MOST).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scale_M1).to(torch.float8_e4m3fn), scale_M1


class RowwiseLinear(nn.Module):
    """A linear layer whose weight is kept in fp8; takes and gives the dtype of its input.

    Attributes:
        weight: [N, K] float8_e4m3fn.
        scale_1N: float32, of the weight's rows.
        bias: [N] or None, as it was.
    """

    weight: Tensor
    scale_1N: Tensor
    bias: Tensor | None

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        super().__init__()
        values, scale_N1 = to_rows(weight_NK.detach())
        self.out_features, self.in_features = weight_NK.shape
        self.register_buffer("weight", values)
        self.register_buffer("scale_1N", scale_N1.mT.contiguous())
        self.register_buffer("bias", None if bias_N is None else bias_N.detach())

    def forward(self, x: Tensor) -> Tensor:
        values_MK, scale_M1 = to_rows(x.reshape(-1, self.in_features))
        y = torch._scaled_mm(
            values_MK,
            self.weight.t(),
            scale_a=scale_M1,
            scale_b=self.scale_1N,
            out_dtype=x.dtype,
            use_fast_accum=x.is_cuda,
        )
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, float8_e4m3fn"


@dataclass(frozen=True)
class Lowered:
    """What `lower` did.

    Attributes:
        linears: linear layers now in fp8.
        share: of the parameters of the layers that run.
        freed: bytes of weights given back.
        errors: relative error of each tap, and of the last hidden states where they are wanted.
    """

    linears: int
    share: float
    freed: int
    errors: tuple[float, ...]


def missing(device: torch.device, dtype: torch.dtype) -> str:
    """Why fp8 cannot run there, found out by running it; "" if it can."""
    if device.type != "cuda":
        return f"there are no fast fp8 products on {device.type}"
    if dtype != torch.bfloat16:
        return f"fp8 products come out as bfloat16, and the target is {str(dtype).removeprefix('torch.')}"
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (
        torch.randn(rows, 64, device=device, dtype=dtype, generator=generator) for rows in (_STEP * 2, _STEP * 3)
    )
    try:
        ours = RowwiseLinear(weight, None)(x)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        card = torch.cuda.get_device_name(device)
        return f"{card} with torch {torch.__version__} has no row-wise products: {first_line(error)}"
    error_ = float(relative_error(ours, x @ weight.mT))
    return "" if error_ < 0.1 else f"a small product comes out wrong by {error_:.0%}"


def lower(
    target: Target, taps: tuple[int, ...], rows: Sequence[Row], bound: float, *, last_hidden: bool = False
) -> Lowered:
    """Puts the linear layers that features run through into fp8, and measures what that changes.

    Args:
        target: its weights plain; uncompiled still.
        taps: whose features are compared, in the order of the result.
        rows: to compare on; none: nothing is compared.
        bound: relative error above which it is refused.
        last_hidden: the layers behind the last tap run too.

    Raises:
        UserError: the target came quantised, device or dtype cannot do it, or a tap changes by more than `bound`.
    """
    where = "target.precision"
    if target.foreign:
        raise UserError(f"the target came quantised ({target.foreign})", where=where, fix="leave out target.precision")
    why = missing(target.device, target.dtype)
    if why:
        raise UserError(f"fp8 is not possible: {why}", where=where, fix="leave out target.precision")
    before = [_features(target, row, taps, last_hidden) for row in rows]
    depth = target.geometry.layers if last_hidden else max(taps) + 1
    layers = target.layers[:depth]
    whole = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    linears = lowered = freed = 0
    for layer in layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if _fits(child):
                    assert isinstance(child, nn.Linear)
                    setattr(parent, name, RowwiseLinear(child.weight, child.bias))
                    linears += 1
                    lowered += child.weight.numel()
                    freed += child.weight.numel() * (child.weight.element_size() - 1)
    if not linears:
        raise UserError("the target has no linear layer that fp8 could speed up", where=where, fix="leave it out")
    errors = _errors(before, [_features(target, row, taps, last_hidden) for row in rows], len(taps))
    result = Lowered(linears, lowered / whole, freed, errors)
    names = [f"layer {tap}" for tap in taps] + ["the last hidden states"] * last_hidden
    worst = max(range(len(errors)), key=lambda place: _ordered(errors[place]), default=None)
    if worst is not None and not errors[worst] <= bound:
        raise UserError(
            f"fp8 changes the features of {names[worst]} by {errors[worst]:.1%} of their size, more than {bound:.0%}",
            where=where,
            fix="leave it out, or raise target.fp8_bound",
        )
    return result


def line_of(lowered: Lowered, taps: Sequence[int], bound: float) -> str:
    """For people."""
    text = f"fp8: {lowered.linears} linear layers, {lowered.share:.0%} of the weights that run"
    if not lowered.errors:
        return f"{text}; not compared"
    by_tap = ", ".join(f"{tap}: {error:.1%}" for tap, error in zip(taps, lowered.errors, strict=False))
    last = f", last hidden: {lowered.errors[-1]:.1%}" if len(lowered.errors) > len(taps) else ""
    return f"{text}; features differ from those before by layer {by_tap}{last} (refused above {bound:.0%})"


def relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """Root mean square over rows of ‖ours - theirs‖ / ‖theirs‖."""
    ours, theirs = ours.float(), theirs.float()
    by_row = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-12)
    return by_row.square().mean().sqrt()


def _fits(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:
        return False
    sizes = (module.in_features, module.out_features)
    return min(sizes) >= NARROW and all(size % _STEP == 0 for size in sizes)


def _features(target: Target, row: Row, taps: tuple[int, ...], last_hidden: bool) -> Features:
    """Of the row's real tokens."""
    real_S = row.document_S >= 0
    features = target.features(row.tokens_S, row.document_S, row.positions_S, taps, last_hidden)
    real_S = real_S.to(target.device)
    return Features(features.taps_SF[real_S], None if features.last_SH is None else features.last_SH[real_S])


def _errors(before: list[Features], after: list[Features], taps: int) -> tuple[float, ...]:
    """By tap, then of the last hidden states; over the tokens of all rows."""
    if not before:
        return ()
    pairs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(taps)]
    last: list[tuple[Tensor, Tensor]] = []
    for one, other in zip(before, after, strict=True):
        parts = zip(one.taps_SF.chunk(taps, dim=-1), other.taps_SF.chunk(taps, dim=-1), strict=True)
        for place, (theirs, ours) in enumerate(parts):
            pairs[place].append((ours, theirs))
        if one.last_SH is not None and other.last_SH is not None:
            last.append((other.last_SH, one.last_SH))
    return tuple(
        float(relative_error(torch.cat([ours for ours, _ in each]), torch.cat([theirs for _, theirs in each])))
        for each in [*pairs, last]
        if each
    )


def _ordered(error: float) -> float:
    return math.inf if math.isnan(error) else error
