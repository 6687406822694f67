"""Loss and gradient of the drafter's hidden states through the target's frozen head, chunk by chunk.

For each chunk of C taught slots: logits = hidden @ headᵀ, per-slot loss, the logits turned into their own gradient, and
one matmul back. Two matmuls per taught slot and no recompute; at most one chunk's logits [C, V] exist at a time, and
untaught slots cost nothing. The head is frozen, so its gradient is never formed.

`chunk_terms` is pure and of static shape, so it is what gets compiled; the loop over the chunks (their number is known
on the CPU) stands outside. Chunks hold whole blocks, because dpace weights tie the slots of a block together.

Gradients are those of Σ w·loss; dividing by Σ w over everything is the update's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.blocks import DraftBatch
from draftsmith.config import ObjectiveConfig
from draftsmith.objective.sums import Sums
from draftsmith.objective.weights import dpace_weights


@dataclass(frozen=True)
class HeadTerms:
    """The target's frozen head: weights [V, H], then factor and tanh cap of the logits."""

    head_VH: Tensor
    multiplier: float = 1.0
    softcap: float | None = None


ChunkTerms = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


def chunk_terms(
    hidden_QH: Tensor,
    slots_C: Tensor,
    labels_C: Tensor,
    weights_C: Tensor,
    head_VH: Tensor,
    teacher_CH: Tensor | None,
    *,
    labels: str,
    alpha: float | None,
    block_size: int,
    multiplier: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, weight, correctness and hidden-state gradient of one chunk of taught slots.

    Args:
        hidden_QH: drafter output, detached.
        slots_C: int64 into Q, 0 on filling.
        labels_C: int64 data tokens.
        weights_C: float32 static weights, 0 on filling.
        head_VH: the target's head.
        teacher_CH: the target's final hidden states for these slots, where `labels` is "kl" or "tv".
        labels: "data", "kl" or "tv".
        alpha: of the dpace weights; None uses `weights_C`.
        block_size: B.
        multiplier, softcap: of the target's logits.

    Returns:
        loss_C float32, weight_C float32, correct_C bool, gradient_CH in the dtype of the hidden states.
    """
    hidden_CH = hidden_QH[slots_C]
    logits_CV, slope_CV = _logits(hidden_CH, head_VH, multiplier, softcap)
    # torch.logsumexp, spelled so that the compiler finds maximum and sum in one pass over the logits instead of two.
    largest_C1 = logits_CV.amax(-1, keepdim=True)
    total_C1 = torch.exp(logits_CV - largest_C1).sum(-1, keepdim=True)
    log_norm_C = (total_C1.log() + largest_C1)[:, 0]
    label_logit_C = logits_CV.gather(1, labels_C[:, None])[:, 0]
    cross_entropy_C = log_norm_C - label_logit_C
    # torch.argmax's choice, the first of equal ones, as decoding takes it: in bfloat16 the largest logits of one row in
    # twenty are equal. Spelled out because compiled kernels break ties otherwise, and to share the gradient's pass.
    index_V = torch.arange(logits_CV.shape[1], device=labels_C.device)
    beaten_C = ((logits_CV == largest_C1) & (index_V < labels_C[:, None])).any(-1)
    correct_C = (label_logit_C >= largest_C1[:, 0]) & ~beaten_C

    weight_C = weights_C
    if alpha is not None:
        weight_C = _dpace_of_chunk(cross_entropy_C, slots_C, hidden_QH.shape[0], block_size, alpha)

    probability_CV = torch.exp(logits_CV - log_norm_C[:, None])
    if labels == "data":
        loss_C = cross_entropy_C
        is_label_CV = index_V == labels_C[:, None]
        gradient_CV = probability_CV - is_label_CV.to(probability_CV.dtype)
    else:
        assert teacher_CH is not None
        teacher_logits_CV, _ = _logits(teacher_CH, head_VH, multiplier, softcap)
        teacher_log_CV = torch.log_softmax(teacher_logits_CV, dim=-1)
        teacher_CV = torch.exp(teacher_log_CV)
        if labels == "kl":
            loss_C = (teacher_CV * (teacher_log_CV - logits_CV + log_norm_C[:, None])).sum(-1)
            gradient_CV = probability_CV - teacher_CV
        else:
            loss_C = 0.5 * (probability_CV - teacher_CV).abs().sum(-1)
            sign_CV = 0.5 * torch.sign(probability_CV - teacher_CV)
            mean_sign_C = (sign_CV * probability_CV).sum(-1, keepdim=True)
            gradient_CV = probability_CV * (sign_CV - mean_sign_C)
    gradient_CV = gradient_CV * weight_C[:, None]
    if slope_CV is not None:
        gradient_CV = gradient_CV * slope_CV
    gradient_CH = (gradient_CV.to(head_VH.dtype) @ head_VH) * multiplier
    return loss_C, weight_C, correct_C, gradient_CH


def _logits(
    hidden_CH: Tensor, head_VH: Tensor, multiplier: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Logits in float32 and, with a softcap, their derivative by the uncapped ones."""
    logits_CV = (hidden_CH @ head_VH.mT).float()
    if multiplier != 1.0:
        logits_CV = logits_CV * multiplier
    if softcap is None:
        return logits_CV, None
    capped_CV = torch.tanh(logits_CV / softcap)
    return capped_CV * softcap, 1.0 - capped_CV.square()


def _dpace_of_chunk(loss_C: Tensor, slots_C: Tensor, slots: int, block_size: int, alpha: float) -> Tensor:
    """dpace weights of a chunk's slots; the chunk holds whole blocks, so the others can stay empty."""
    filled_C = slots_C > 0
    loss_Q = torch.zeros(slots, device=loss_C.device).index_copy(0, slots_C, loss_C)
    taught_Q = torch.zeros(slots, dtype=torch.bool, device=loss_C.device).index_copy(0, slots_C, filled_C)
    weights_NB = dpace_weights(loss_Q.view(-1, block_size), taught_Q.view(-1, block_size), alpha)
    return torch.where(filled_C, weights_NB.view(-1)[slots_C], 0.0)


class Objective:
    """Loss, gradient and statistics of a row's drafter output.

    Args:
        config: labels, weights, α.
        block_size: B.
        head: the target's head on the device of the drafter.
        terms: `chunk_terms` or its compiled twin.
    """

    def __init__(
        self, config: ObjectiveConfig, block_size: int, head: HeadTerms, terms: ChunkTerms = chunk_terms
    ) -> None:
        self.block_size = block_size
        self.head = head
        self.terms = terms
        self.labels = config.labels
        self.alpha = config.alpha if config.weights == "dpace" else None

    def __call__(self, hidden_QH: Tensor, batch: DraftBatch, last_SH: Tensor | None = None) -> tuple[Sums, Tensor]:
        """Sums of the row and the gradient [Q, H] of Σ w·loss by `hidden_QH`.

        Args:
            hidden_QH: drafter output; no autograd graph is built through it.
            batch: on the same device.
            last_SH: the target's final hidden states, for kl and tv.
        """
        hidden_QH = hidden_QH.detach()
        slots = hidden_QH.shape[0]
        gradient_QH = torch.zeros_like(hidden_QH)
        taught_Q = torch.zeros(slots, dtype=torch.bool, device=hidden_QH.device)
        correct_Q = torch.zeros_like(taught_Q)
        weighted = torch.zeros((), device=hidden_QH.device)
        weight = torch.zeros((), device=hidden_QH.device)
        for chunk in range(batch.slots_MC.shape[0]):
            slots_C = batch.slots_MC[chunk]
            loss_C, weight_C, correct_C, gradient_CH = self.terms(
                hidden_QH,
                slots_C,
                batch.labels_MC[chunk],
                batch.weights_MC[chunk],
                self.head.head_VH,
                None if self.labels == "data" else _teacher(last_SH, batch.teacher_MC[chunk]),
                labels=self.labels,
                alpha=self.alpha,
                block_size=self.block_size,
                multiplier=self.head.multiplier,
                softcap=self.head.softcap,
            )
            # Filling writes zeros to slot 0 of block 0, which is never taught.
            gradient_QH.index_copy_(0, slots_C, gradient_CH)
            taught_Q.index_copy_(0, slots_C, slots_C > 0)
            correct_Q.index_copy_(0, slots_C, correct_C)
            weighted = weighted + (weight_C * loss_C).sum()
            weight = weight + weight_C.sum()
        shape = (-1, self.block_size)
        return Sums.collect(weighted, weight, taught_Q.view(shape), correct_Q.view(shape)), gradient_QH


def _teacher(last_SH: Tensor | None, teacher_C: Tensor) -> Tensor:
    assert last_SH is not None, "distillation needs the target's final hidden states"
    return last_SH[teacher_C]
