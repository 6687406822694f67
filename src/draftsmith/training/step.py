"""One row's step: features → draft → loss → gradients. The whole of the learning, without any I/O.

    embeddings = target's embedding rows of the block inputs        [Q, H]   frozen
    hidden     = drafter(features, embeddings, positions, masks)    [Q, H]   compiled
    sums, grad = objective(hidden, labels)                          [Q, H]   no graph: the head is frozen
    hidden.backward(grad)                                                    gradients of Σ w·loss

Nothing here waits for the device: shapes are static, decisions were made on the CPU when the batch was built, and the
sums stay on the device. Dividing by Σ w, clipping and stepping are `update.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from draftsmith.blocks import DraftBatch
from draftsmith.compiled import Region
from draftsmith.drafter import DraftModel, build_masks
from draftsmith.objective import Objective, Sums
from draftsmith.target.forward import Features
from draftsmith.target.head import TargetHead


class ByLayer:
    """A drafter's `fill_blocks` with every part through one region: equal layers share a graph.

    Args:
        fill_blocks: the model's.
        region: of `run_part`.
    """

    def __init__(self, fill_blocks: Callable[..., Tensor], region: Region) -> None:
        self.region = region
        self._fill_blocks = fill_blocks

    def __call__(self, *inputs: Any) -> Tensor:
        return self._fill_blocks(*inputs, run=self.region)


class Replica:
    """A drafter on one device with everything a row's step needs.

    Args:
        model: the drafter, in the compute dtype.
        head: the target's embedding and head on the same device.
        objective: loss and gradient through the head.
        attention: "flex" or "dense".
        fill_blocks: the model's `fill_blocks`, or its compiled twin: a `Region` or `ByLayer`.
    """

    def __init__(
        self,
        model: DraftModel,
        head: TargetHead,
        objective: Objective,
        attention: str,
        fill_blocks: Callable[..., Tensor] | None = None,
    ) -> None:
        self.model = model
        self.head = head
        self.objective = objective
        self.attention = attention
        self.fill_blocks = fill_blocks or model.fill_blocks

    def hidden(self, features: Features, batch: DraftBatch) -> Tensor:
        """Hidden states [Q, H] of the row's slots; features and batch on this replica's device."""
        embeddings_QH = self.head.embed(batch.inputs_Q).to(features.taps_SF.dtype)
        context, slots = (
            self.model.rotary(places, embeddings_QH.dtype)
            for places in (batch.context_positions_S, batch.block_positions_Q)
        )
        masks = build_masks(batch, self.attention)
        return self.fill_blocks(features.taps_SF, embeddings_QH, context, slots, masks)

    def step(self, features: Features, batch: DraftBatch, *, learn: bool = True) -> Sums:
        """Adds the row's gradients to the parameters' `.grad` and returns its sums.

        Args:
            features: of the row, on this replica's device.
            batch: of the row, on this replica's device.
            learn: False computes the sums only. The forward is the same graph either way, so evaluating compiles
                nothing new.
        """
        hidden_QH = self.hidden(features, batch)
        sums, gradient_QH = self.objective(hidden_QH, batch, features.last_SH)
        if learn:
            hidden_QH.backward(gradient_QH)
        return sums
