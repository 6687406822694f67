"""What a drafter would say if something were wrong: its forward, written out plainly, with one switch per known fault.

A twin of `DraftModel` that shares none of its code: every block by itself, no cache, masks written out. With all
switches off it is the drafter; with one on, it is the drafter served or trained with that fault. A difference between
two sets of logits is named by finding the switch that reproduces it.

Letters: L context tokens before the anchor, B slots, H hidden, F = taps·H, D head size.
Cost: one block at a time over its whole context: layers · (L + B) · H² a block. For diagnosis, not for decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.drafter.model import DraftModel
from draftsmith.target.head import TargetHead

Kind = Literal["position", "rotary", "norm", "mask", "tap", "labels", "embedding", "logits"]


@dataclass(frozen=True)
class Fault:
    """One thing gone wrong. All switches off: nothing.

    Attributes:
        name: for people.
        kind: what sort of thing it is.
        frequency_dtype: dtype to which the inverse frequencies are rounded.
        rotary_share: share of the head that is rotated.
        theta: another base.
        interleaved: neighbouring pairs are rotated instead of halves.
        block_shift: added to the block's positions, not to the context's.
        tap_shift: layers by which every tap is off.
        tap_normed: a shifted tap of the target's last layer has the final norm applied, as transformers' last hidden
            state has.
        taps_reversed: the taps are laid side by side in the opposite order.
        final_norm: times that the final norm is applied.
        context_norm: False leaves out `hidden_norm`.
        context_layer_norm: the context goes through each layer's input norm as well.
        head_norms: False leaves out q_norm and k_norm.
        causal: of all layers.
        window: False drops the window of sliding layers.
        window_from_anchor: the window is counted from the anchor for every slot.
        context_end: added to the number of context tokens that a block sees; 1 shows it its anchor's own feature.
        label_shift: slots by which logits stand too late: position a+k gets those of slot k - shift.
        mask_token: another token in the slots to be filled.
        factors: False leaves out the factors on embedding rows and logits and the cap.
    """

    name: str = "none"
    kind: Kind = "position"
    frequency_dtype: torch.dtype | None = None
    rotary_share: float = 1.0
    theta: float | None = None
    interleaved: bool = False
    block_shift: int = 0
    tap_shift: int = 0
    tap_normed: bool = False
    taps_reversed: bool = False
    final_norm: int = 1
    context_norm: bool = True
    context_layer_norm: bool = False
    head_norms: bool = True
    causal: bool | None = None
    window: bool = True
    window_from_anchor: bool = False
    context_end: int = 0
    label_shift: int = 0
    mask_token: int | None = None
    factors: bool = True


NOTHING = Fault()


def known_faults(model: DraftModel, head: TargetHead, depth: int, thetas: tuple[float, ...] = ()) -> list[Fault]:
    """The faults that could show on this drafter; those that would change nothing are left out.

    Args:
        model, head: the drafter and its target's embedding and head.
        depth: of the target; taps that a shift would push outside are not tried.
        thetas: rotary bases that somebody may have used instead.
    """
    spec = model.spec
    kinds = [spec.layer_kind(layer) for layer in range(spec.layers)]
    faults = [
        Fault("inverse frequencies rounded to bfloat16", "rotary", frequency_dtype=torch.bfloat16),
        Fault("inverse frequencies rounded to float16", "rotary", frequency_dtype=torch.float16),
        *(Fault(f"only {share:.0%} of the head rotated", "rotary", rotary_share=share) for share in (0.25, 0.5, 0.75)),
        *(
            Fault(f"θ {theta:g} instead of {spec.rope_theta:g}", "rotary", theta=theta)
            for theta in sorted({1e4, 1e5, 5e5, 1e6, 1e7, *thetas} - {spec.rope_theta})
        ),
        Fault("neighbouring pairs rotated instead of halves", "rotary", interleaved=True),
        Fault("block one position too late", "position", block_shift=1),
        Fault("block one position too early", "position", block_shift=-1),
        Fault("taps in reversed order", "tap", taps_reversed=True),
        *_shifted_taps(spec.taps, depth),
        Fault("final norm applied twice", "norm", final_norm=2),
        Fault("final norm left out", "norm", final_norm=0),
        Fault("context norm left out", "norm", context_norm=False),
        Fault("context also normed by the layers", "norm", context_layer_norm=True),
        Fault("query and key norms left out", "norm", head_norms=False),
        Fault("anchor's own feature visible", "mask", context_end=1),
        Fault("the last context token hidden", "mask", context_end=-1),
        Fault("logits one slot late", "labels", label_shift=1),
        Fault("logits one slot early", "labels", label_shift=-1),
    ]
    if not all(kind.causal for kind in kinds):
        faults.append(Fault("causal where it is bidirectional", "mask", causal=True))
    if any(kind.causal for kind in kinds):
        faults.append(Fault("bidirectional where it is causal", "mask", causal=False))
    if any(kind.window for kind in kinds):
        faults.append(Fault("the window of sliding layers ignored", "mask", window=False))
        faults.append(Fault("the window counted from the anchor", "mask", window_from_anchor=True))
    if head.embedding_scale != 1.0 or head.multiplier != 1.0 or head.softcap is not None:
        faults.append(Fault("factors on embedding and logits left out", "embedding", factors=False))
    faults += [
        Fault(f"token {token} in the place of the mask token", "embedding", mask_token=token)
        for token in (0, spec.mask_token_id + 1)
        if token != spec.mask_token_id and token < spec.vocab_rows
    ]
    return faults


def _shifted_taps(taps: tuple[int, ...], depth: int) -> list[Fault]:
    faults = []
    for shift in (1, -1, 2, -2):
        shifted = [tap + shift for tap in taps]
        if min(shifted) < 0 or max(shifted) >= depth:
            continue
        name = f"taps {abs(shift)} layer(s) too {'late' if shift > 0 else 'early'}"
        faults.append(Fault(name, "tap", tap_shift=shift))
        if depth - 1 in shifted:
            faults.append(Fault(f"{name}, the last one normed", "tap", tap_shift=shift, tap_normed=True))
    return faults


@torch.no_grad()
def block_logits(
    model: DraftModel, head: TargetHead, features_SF: Tensor, tokens: list[int], start: int, fault: Fault = NOTHING
) -> Tensor:
    """Logits [B-1, V] for positions start+1..start+B-1, as the drafter with `fault` gives them.

    Args:
        features_SF: of all tokens; with a `tap_shift`, those of the shifted taps, normed if the fault says so.
        tokens: of the text.
        start: index of the anchor.
    """
    spec = model.spec
    device, dtype = features_SF.device, model.fc.weight.dtype
    seen = min(max(start + fault.context_end, 0), features_SF.shape[0])
    features_LF = features_SF[:seen]
    if fault.taps_reversed:
        features_LF = features_LF.unflatten(1, (len(spec.taps), -1)).flip(1).flatten(1)
    context_LH = F.linear(features_LF, model.fc.weight)
    if fault.context_norm:
        context_LH = _rms(context_LH, model.hidden_norm.weight, spec.rms_norm_eps)
    mask_token = spec.mask_token_id if fault.mask_token is None else fault.mask_token
    ids = torch.tensor([tokens[start]] + [mask_token] * (spec.block_size - 1), device=device)
    x_BH = (head.embed(ids) if fault.factors else F.embedding(ids, head.embedding_VH)).to(dtype)
    position_L = torch.arange(seen, device=device)
    slot_B = torch.arange(spec.block_size, device=device)
    position_B = start + fault.block_shift + slot_B
    for layer in range(spec.layers):
        x_BH = _layer(model, layer, x_BH, context_LH, position_L, position_B, start, fault)
    for _ in range(fault.final_norm):
        x_BH = _rms(x_BH, model.norm.weight, spec.rms_norm_eps)
    logits_BV = head.logits(x_BH) if fault.factors else F.linear(x_BH, head.head_VH)
    if fault.label_shift == 0:
        return logits_BV[1:]
    shifted = torch.full_like(logits_BV[1:], float("nan"))  # what no slot speaks about
    source = slot_B[1:] - fault.label_shift
    inside = (source >= 0) & (source < spec.block_size)
    shifted[inside] = logits_BV[source[inside]]
    return shifted


def _layer(
    model: DraftModel,
    index: int,
    x_BH: Tensor,
    context_LH: Tensor,
    position_L: Tensor,
    position_B: Tensor,
    start: int,
    fault: Fault,
) -> Tensor:
    spec = model.spec
    weights = dict(model.layers[index].named_parameters())
    kind = spec.layer_kind(index)
    normed_BH = _rms(x_BH, weights["input_layernorm.weight"], spec.rms_norm_eps)
    if fault.context_layer_norm:
        context_LH = _rms(context_LH, weights["input_layernorm.weight"], spec.rms_norm_eps)
    keyed = torch.cat((context_LH, normed_BH))
    positions = torch.cat((position_L, position_B))

    def heads(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"self_attn.{name}_proj.weight"]).unflatten(1, (-1, spec.head_dim)).transpose(0, 1)

    query, key, value = heads(normed_BH, "q"), heads(keyed, "k"), heads(keyed, "v")
    if fault.head_norms:
        query = _rms(query, weights["self_attn.q_norm.weight"], spec.rms_norm_eps)
        key = _rms(key, weights["self_attn.k_norm.weight"], spec.rms_norm_eps)
    query, key = _rotate(query, position_B, spec.rope_theta, fault), _rotate(key, positions, spec.rope_theta, fault)
    group = spec.heads // spec.kv_heads
    scores = query.float() @ key.float().repeat_interleave(group, 0).mT / spec.head_dim**0.5
    visible = _visible(kind.window, kind.causal, position_L.numel(), position_B.numel(), start, fault, x_BH.device)
    mixed = scores.masked_fill(~visible, float("-inf")).softmax(-1).to(x_BH.dtype)
    attended = mixed @ value.repeat_interleave(group, 0)
    x_BH = x_BH + F.linear(attended.transpose(0, 1).flatten(1), weights["self_attn.o_proj.weight"])
    normed_BH = _rms(x_BH, weights["post_attention_layernorm.weight"], spec.rms_norm_eps)
    gate = F.silu(F.linear(normed_BH, weights["mlp.gate_proj.weight"]))
    up = F.linear(normed_BH, weights["mlp.up_proj.weight"])
    return x_BH + F.linear(gate * up, weights["mlp.down_proj.weight"])


def _visible(
    window: int | None, causal: bool, context: int, block: int, start: int, fault: Fault, device: torch.device
) -> Tensor:
    """bool [B, L + B]. Indices are positions: the text is one document."""
    causal = causal if fault.causal is None else fault.causal
    query = torch.arange(start, start + block, device=device)[:, None]
    key = torch.cat((torch.arange(context, device=device), torch.arange(start, start + block, device=device)))
    own = torch.arange(context + block, device=device) >= context
    visible = torch.ones(block, context + block, dtype=torch.bool, device=device)
    if causal:
        visible &= (key <= query) | ~own
    if window is not None and fault.window:
        if fault.window_from_anchor:
            visible &= (key >= start - window) | own
        else:
            visible &= (query - key < window) & (key - query < window)
    return visible


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype)


def _rotate(x: Tensor, positions: Tensor, theta: float, fault: Fault) -> Tensor:
    """x [heads, n, D] rotated by its positions; what lies behind the rotated share stays as it is."""
    size = int(x.shape[-1] * fault.rotary_share) // 2 * 2
    base = theta if fault.theta is None else fault.theta
    frequency = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32, device=x.device) / size)
    if fault.frequency_dtype is not None:
        frequency = frequency.to(fault.frequency_dtype).float()
    angle = positions.float()[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    turned, rest = x[..., :size], x[..., size:]
    if fault.interleaved:
        low, high = turned[..., 0::2], turned[..., 1::2]
        result = torch.stack((low * cos - high * sin, high * cos + low * sin), dim=-1).flatten(-2)
    else:
        low, high = turned[..., : size // 2], turned[..., size // 2 :]
        result = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return torch.cat((result, rest), dim=-1)
