"""What a replica is warmed up with, what an evidence step must show of it, and the reference its numbers must equal.

The warm-up row is made up and sharp: documents of 16 tokens, so that a block sees few keys and one key too many changes
its output by a lot. The reference is the eager dense path over a few blocks only, under a mask written down again from
the rule (not from the batch's intervals or tiles): blocks do not see each other, so a few of them cost k·B·S scores.
Compared is what those blocks give, and the gradients that they send to the weights of queries, keys and values: these
are what a kernel's backward computes, of all layers below the last one too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.blocks import DraftBatch, LayerKind, Row
from draftsmith.compiled import Expected, Region
from draftsmith.drafter.attention import DenseMask
from draftsmith.pipeline.plan import Plan
from draftsmith.target.forward import Features
from draftsmith.training.step import ByLayer, Replica

# Of compiled flex attention, forward and backward, by `compile.flex_backend`.
FLEX_KERNELS = {
    "triton": (r"flex_attention(?!_backward)", r"flex_attention_backward"),
    "flash": (r"FlashAttentionForward", r"FlashAttentionBackward(?!Pre|Post)"),
}
OUTPUT = "output"
PROJECTIONS = {"queries": ".q_proj.weight", "keys": ".k_proj.weight", "values": ".v_proj.weight"}
DOCUMENT = 16  # tokens of a made-up document
BLOCKS = 4  # compared with the reference
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 4e-2}  # ‖difference‖ / ‖reference‖
GRADIENT_SLACK = 2.5  # times those: a gradient has gone through as many roundings again
ROUNDINGS = 2.0  # times what rounding the reference's scores to the dtype changes


@dataclass(frozen=True)
class Sample:
    """Made-up input of the run's shapes on a replica's device; `document_S` stays on the CPU."""

    batch: DraftBatch
    features: Features
    document_S: Tensor


def make_sample(plan: Plan, draft: Callable[[Row], DraftBatch], device: torch.device) -> Sample:
    """A row of short documents and random features; the same on every device.

    Args:
        plan: sizes.
        draft: row → batch, as the run makes them.
        device: where the replica is.
    """
    length = plan.config.rows.length
    index_S = torch.arange(length)
    document_S = (index_S // DOCUMENT).to(torch.int32)
    row = Row(
        0, index_S % plan.geometry.vocab_rows, torch.ones(length, dtype=torch.bool), document_S, index_S % DOCUMENT
    )
    generator = torch.Generator().manual_seed(0)
    width = len(plan.spec.taps) * plan.spec.hidden_size

    def random(columns: int) -> Tensor:
        return torch.randn(length, columns, generator=generator).to(device, plan.dtype)

    features = Features(
        random(width), None if plan.config.objective.labels == "data" else random(plan.spec.hidden_size)
    )
    return Sample(draft(row).to(device), features, document_S)


def regions_of(replica: Replica) -> list[Region]:
    """A replica's regions: the drafter's forward and the objective's chunk."""
    forward = replica.fill_blocks
    found = [forward.region if isinstance(forward, ByLayer) else forward, replica.objective.terms]
    return [region for region in found if isinstance(region, Region)]


def warm_step(replica: Replica, sample: Sample, device: torch.device) -> None:
    """One step on the sample; leaves no gradient behind."""
    replica.step(sample.features, sample.batch)
    for parameter in replica.model.parameters():
        parameter.grad = None
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def differs_from_reference(plan: Plan, replica: Replica, sample: Sample) -> str:
    """Compares the replica's drafter with the dense reference on a few blocks, output and gradients; "" where they
    agree.

    Agreeing means: close by the dtype's tolerance, or by what rounding the reference's own scores changes (with sharp
    attention that is more), and much closer than a reference that leaks the anchor's own token, so a drafter that
    attention hardly moves cannot pass by that. Leaves no gradient behind.

    Cost: a row's forward and backward, and two sets of gradients of the projections.
    """
    batch = sample.batch
    valid = int(batch.valid_N.sum())
    if valid == 0:
        return "the made-up row has no anchor to compare"
    blocks_k = torch.linspace(0, valid - 1, min(BLOCKS, valid)).round().long().unique().to(batch.anchors_N.device)
    block_size = plan.spec.block_size
    slots_K = (blocks_k[:, None] * block_size + torch.arange(block_size, device=blocks_k.device)).reshape(-1)

    def reference(leak: int = 0, *, float32: bool = True) -> dict[str, list[Tensor]]:
        return _seen(replica, _reference(plan, replica, sample, blocks_k, slots_K, leak, float32))

    right = reference()
    errors = _distances(_seen(replica, replica.hidden(sample.features, batch)[slots_K]), right)
    rounding = _distances(reference(float32=False), right)
    leaks = _distances(reference(leak=1), right)
    for what, error in errors.items():
        slack = 1.0 if what == OUTPUT else GRADIENT_SLACK
        limit = max(slack * LIMITS[plan.dtype], ROUNDINGS * rounding[what])
        if not error <= limit:
            return f"its {what} differs from the dense reference by {error:.1e} of its size (limit {limit:.0e})"
        if not error <= leaks[what] / 2:
            return (
                f"its {what} is no nearer to the dense reference ({error:.1e}) than one that sees the anchor "
                f"({leaks[what]:.1e})"
            )
    return ""


def _seen(replica: Replica, hidden_KH: Tensor) -> dict[str, list[Tensor]]:
    """What is compared of some slots' hidden states: themselves, and the gradients of a made-up loss of theirs with
    respect to each projection's weights, layer by layer."""
    generator = torch.Generator().manual_seed(1)
    direction_KH = torch.randn(hidden_KH.shape, generator=generator).to(hidden_KH.device, hidden_KH.dtype)
    weights = {
        name: weight for name, weight in replica.model.named_parameters() if name.endswith(tuple(PROJECTIONS.values()))
    }
    gradients = torch.autograd.grad(hidden_KH, list(weights.values()), direction_KH)
    by_name = dict(zip(weights, gradients, strict=True))
    found = {OUTPUT: [hidden_KH.detach()]}
    for what, end in PROJECTIONS.items():
        found[f"gradient of {what}"] = [gradient for name, gradient in by_name.items() if name.endswith(end)]
    return found


def _distances(seen: dict[str, list[Tensor]], reference: dict[str, list[Tensor]]) -> dict[str, float]:
    """Of each thing that is compared the largest ‖difference‖ / ‖reference‖ of a layer; a layer whose gradient is far
    smaller than the others' counts as a tenth of their size."""
    found = {}
    for what, theirs in reference.items():
        sizes = torch.stack([each.float().norm() for each in theirs])
        least = sizes.square().mean().sqrt() / 10
        errors = [(mine.float() - each.float()).norm() for mine, each in zip(seen[what], theirs, strict=True)]
        found[what] = float((torch.stack(errors) / sizes.maximum(least).clamp_min(1e-12)).max())
    return found


def _reference(
    plan: Plan, replica: Replica, sample: Sample, blocks_k: Tensor, slots_K: Tensor, leak: int, float32: bool
) -> Tensor:
    batch, device = sample.batch, slots_K.device
    embeddings_KH = replica.head.embed(batch.inputs_Q[slots_K]).to(sample.features.taps_SF.dtype)
    document_S = sample.document_S.to(device)
    masks = {
        kind: replace(
            dense_rule(kind, document_S, batch.anchors_N[blocks_k] + leak, plan.spec.block_size, leak), float32=float32
        )
        for kind in plan.spec.kinds
    }
    return replica.model.forward(
        sample.features.taps_SF,
        embeddings_KH,
        batch.context_positions_S,
        batch.block_positions_Q[slots_K],
        masks,  # type: ignore[arg-type]
    )


def dense_rule(kind: LayerKind, document_S: Tensor, bounds_k: Tensor, block_size: int, leak: int = 0) -> DenseMask:
    """The attention rule of k blocks, written down directly.

    Args:
        kind: window and causality.
        document_S: document of each context token.
        bounds_k: first context token that a block does not see: its anchor, plus `leak`.
        block_size: B.
        leak: tokens too many that `bounds_k` lets in; 0 is the rule.
    """
    device = document_S.device
    anchors_k = bounds_k - leak
    slot_B = torch.arange(block_size, device=device)
    key_S = torch.arange(document_S.numel(), device=device)
    context_kBS = (
        (document_S[None, None, :] == document_S[anchors_k][:, None, None])
        & (key_S[None, None, :] < bounds_k[:, None, None])
    ).expand(-1, block_size, -1)
    distance_BB = slot_B[:, None] - slot_B[None, :]
    own_BB = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    if kind.causal:
        own_BB = own_BB & (distance_BB >= 0)
    if kind.window is not None:
        query_kB = anchors_k[:, None] + slot_B[None, :]
        context_kBS = context_kBS & (query_kB[:, :, None] - key_S[None, None, :] < kind.window)
        own_BB = own_BB & (distance_BB.abs() < kind.window)
    count = bounds_k.numel()
    return DenseMask(
        context_kBS.reshape(count * block_size, -1), own_BB.expand(count, block_size, block_size).contiguous()
    )


def expectations(plan: Plan, replica: Replica, sample: Callable[[], Sample], device: torch.device) -> list[Expected]:
    """What an evidence step must show of one replica; `sample` is made anew when numbers are compared."""
    forward, *others = regions_of(replica)
    flex = plan.attention == "flex"
    queries = plan.config.rows.anchors * plan.spec.block_size
    keys = plan.config.rows.length + queries
    drafter = Expected(
        forward,
        backward=True,
        kernels=FLEX_KERNELS[plan.config.compile.flex_backend] if flex and device.type == "cuda" else (),
        score_shapes=((queries, keys),) if flex else (),
        softmax=not flex,
        memory=memory_bound(plan, device) if flex else None,
        oracle=lambda: differs_from_reference(plan, replica, sample()),
    )
    return [drafter, *(Expected(region, softmax=True) for region in others)]


def memory_bound(plan: Plan, device: torch.device) -> int | None:
    """Bytes a step may add to what is allocated, below what dense scores would add; None where they are too small to
    tell: less than half of what is expected anyway."""
    queries = plan.config.rows.anchors * plan.spec.block_size
    layers = 1 if plan.config.training.activation_checkpointing else plan.spec.layers
    scores = layers * plan.spec.heads * queries * (plan.config.rows.length + queries) * plan.dtype.itemsize
    expected = sum(memory.activations for memory in plan.memory if memory.device == str(device))
    return expected + scores // 2 if scores >= expected / 2 else None
