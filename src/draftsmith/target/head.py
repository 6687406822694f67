"""The target's input embedding and output head, frozen, as the drafter uses them.

The drafter owns neither. Both may be one tensor (tied weights); it stays one on every device. Order of the logits:
hidden @ headᵀ, times the multiplier, then the tanh cap, which is also the order in which exported drafters are decoded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class TargetHead:
    """Frozen embedding and head.

    Attributes:
        embedding_VH: rows of the input embedding, unscaled.
        head_VH: rows of the output head; the same tensor as `embedding_VH` when the target ties them.
        softcap: c in c·tanh(logits/c), or None.
        multiplier: factor on the logits before the cap.
        embedding_scale: factor on embedding rows.
        final_scale_H: what the target's final norm multiplies a normalised hidden state by, on the CPU; None where the
            decoder has no such norm. The size of hidden states that the head expects.
    """

    embedding_VH: Tensor
    head_VH: Tensor
    softcap: float | None = None
    multiplier: float = 1.0
    embedding_scale: float = 1.0
    final_scale_H: Tensor | None = None

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., H] of token ids [...], scaled."""
        rows = F.embedding(ids, self.embedding_VH)
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H] after the final norm, in the dtype of `hidden`."""
        logits = F.linear(hidden, self.head_VH)
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def to(self, device: torch.device | str) -> TargetHead:
        """The same head on another device; nothing is copied when it is there already."""
        embedding = self.embedding_VH.to(device)
        tied = self.head_VH.data_ptr() == self.embedding_VH.data_ptr()
        return replace(self, embedding_VH=embedding, head_VH=embedding if tied else self.head_VH.to(device))
