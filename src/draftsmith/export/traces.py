"""What a drafter says about a text: when it decodes, and in the training-time forward over the same tokens.

Both become a `Trace`: logits by anchor and by the position that they are about, so that a slot read one place off or a
label shifted by one shows as what it is. In decoding that position is the one at which the draft would stand; in
training it is the position of the label that the slot is taught.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.blocks import Document, DraftBatch, Row, make_draft_batch, pack_row
from draftsmith.decode.proposers import DrafterProposer
from draftsmith.decode.speculative import decode
from draftsmith.drafter import build_masks
from draftsmith.drafter.model import DraftModel


@dataclass(frozen=True)
class Trace:
    """What a drafter said about one text.

    Attributes:
        tokens: prompt and answer.
        prompt: tokens of the prompt.
        logits: (anchor, position) → logits [V] for the token at that position.
    """

    tokens: list[int]
    prompt: int
    logits: dict[tuple[int, int], Tensor]

    @property
    def anchors(self) -> list[int]:
        """Where blocks began."""
        return sorted({anchor for anchor, _ in self.logits})


class RecordingProposer(DrafterProposer):
    """A drafter whose logits are kept, by anchor; `start` forgets them."""

    def start(self, *arguments: Any, **keywords: Any) -> None:
        super().start(*arguments, **keywords)
        self.said: dict[int, Tensor] = {}

    def logits(self, tokens: list[int], width: int) -> Tensor:
        logits = super().logits(tokens, width)
        # A shortened block holds fewer MASKs than any in training.
        if width == self.drafter.spec.block_size:
            self.said[len(tokens) - 1] = logits.float().cpu()
        return logits


def decoding_trace(
    target: Any, proposer: RecordingProposer, prompt: Sequence[int], max_new_tokens: int, stop_ids: Iterable[int]
) -> Trace:
    """Decodes one answer and keeps what the drafter said about the tokens that came."""
    answer = decode(target, prompt, proposer, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    tokens = [*prompt, *answer.tokens]
    return Trace(tokens, len(prompt), lay(proposer.said, len(tokens)))


def lay(said: dict[int, Tensor], length: int) -> dict[tuple[int, int], Tensor]:
    """Logits [B-1, V] by anchor, laid at the positions that they are about."""
    return {
        (anchor, anchor + slot): row
        for anchor, rows in said.items()
        for slot, row in enumerate(rows, start=1)
        if anchor + slot < length
    }


def training_row(tokens: Sequence[int], prompt: int) -> Row:
    """One document as a training row: the answer is what the assistant wrote."""
    loss_mask = torch.zeros(len(tokens), dtype=torch.bool)
    loss_mask[prompt:] = True
    return pack_row(0, [Document(torch.tensor(list(tokens)), loss_mask)], len(tokens))


def training_batch(row: Row, model: DraftModel) -> DraftBatch:
    """Every anchor of a row, as training lays them out."""
    spec = model.spec
    return make_draft_batch(
        row,
        anchors=max(1, int(row.loss_mask_S.sum())),
        block_size=spec.block_size,
        mask_token_id=spec.mask_token_id,
        slot_weights_B=torch.ones(spec.block_size),
        chunk=max(256, spec.block_size),
        kinds=spec.kinds,
        seed=(0,),
        with_tiles=False,
    )


@torch.no_grad()
def training_trace(
    target: Any, model: DraftModel, row: Row, prompt: int, anchors: Sequence[int], batch: DraftBatch | None = None
) -> Trace:
    """What the training-time forward says about a row, each slot's logits at the position of its label.

    Args:
        anchors: whose blocks are kept.
        batch: the row's draft work; none: as training makes it.
    """
    head, device = target.head(), torch.device(target.device)
    batch = training_batch(row, model) if batch is None else batch
    features = target.features(row.tokens_S, row.document_S, row.positions_S, model.spec.taps)
    moved = batch.to(device)
    embeddings_QH = head.embed(moved.inputs_Q).to(features.taps_SF.dtype)
    hidden_QH = model(
        features.taps_SF,
        embeddings_QH,
        moved.context_positions_S,
        moved.block_positions_Q,
        build_masks(moved, "dense"),
    )
    filled = batch.slots_MC > 0
    slots, labels_at = batch.slots_MC[filled], batch.teacher_MC[filled] + 1
    assert torch.equal(batch.labels_MC[filled], row.tokens_S[labels_at]), "labels are not the tokens they stand for"
    anchor_of = batch.anchors_N[slots // model.spec.block_size]
    kept = torch.isin(anchor_of, torch.tensor(list(anchors)))
    logits = head.logits(hidden_QH[slots[kept].to(device)]).float().cpu()
    pairs = zip(anchor_of[kept].tolist(), labels_at[kept].tolist(), strict=True)
    return Trace(row.tokens_S.tolist(), prompt, dict(zip(pairs, logits, strict=True)))


def difference(one: Tensor, other: Tensor) -> float:
    """Largest difference of two rows of logits, in units of the first one's spread. What is not known in one is nan."""
    gap = (one - other).abs().max() / one.std().clamp_min(1e-6)
    return float(gap)


def compare(served: Trace, trained: Trace) -> list[tuple[tuple[int, int], float]]:
    """(anchor and position, difference) where both speak, in the order of the text; nan counts as infinite."""
    both = sorted(served.logits.keys() & trained.logits.keys(), key=lambda key: (key[1], key[0]))
    gaps = [(key, difference(trained.logits[key], served.logits[key])) for key in both]
    return [(key, float("inf") if gap != gap else gap) for key, gap in gaps]
