"""What decoding would accept along a text that is there already, from every token of it at once.

Greedy speculative decoding writes what the target alone would write, so its rounds can be replayed on the target's own
answer: one drafter forward, as in training, with an anchor at every token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.blocks import Row, make_draft_batch
from draftsmith.drafter import DraftModel, build_masks
from draftsmith.target.head import TargetHead

BLOCKS_AT_ONCE = 64  # whose logits exist at one time


def answer_row(prompt: Sequence[int], answer: Sequence[int]) -> Row:
    """One document, the answer taught."""
    length = len(prompt) + len(answer)
    mask = torch.arange(length) >= len(prompt)
    tokens = torch.tensor([*prompt, *answer])
    return Row(0, tokens, mask, torch.zeros(length, dtype=torch.int32), torch.arange(length))


@torch.no_grad()
def accepted_from_every_token(drafter: DraftModel, head: TargetHead, row: Row, features_SF: Tensor) -> dict[int, int]:
    """Drafts that stand, by the place of the token they were drafted from: the forward of training, dense attention.

    Args:
        drafter, head: on the device of the features.
        row: one document, from `answer_row`.
        features_SF: its taps side by side.
    """
    spec, length, device = drafter.spec, row.tokens_S.numel(), features_SF.device
    batch = make_draft_batch(
        row,
        anchors=int(row.loss_mask_S.sum()) - 1,
        block_size=spec.block_size,
        mask_token_id=spec.mask_token_id,
        slot_weights_B=torch.ones(spec.block_size),
        chunk=spec.block_size,
        kinds=spec.kinds,
        seed=(0,),
        with_tiles=False,
    ).to(device)
    dtype = next(drafter.parameters()).dtype
    hidden_QH = drafter(
        features_SF.to(dtype),
        head.embed(batch.inputs_Q).to(dtype),
        batch.context_positions_S,
        batch.block_positions_Q,
        build_masks(batch, "dense"),
    )
    hidden_NBH = hidden_QH.view(-1, spec.block_size, spec.hidden_size)[:, 1:]
    drafts_NK = torch.cat([head.logits(part).argmax(-1) for part in hidden_NBH.split(BLOCKS_AT_ONCE)])
    place_NK = batch.anchors_N[:, None] + torch.arange(1, spec.block_size, device=device)
    text_NK = row.tokens_S.to(device)[place_NK.clamp(max=length - 1)]
    right_NK = (drafts_NK == text_NK) & (place_NK < length)
    accepted_N = right_NK.long().cumprod(1).sum(1)
    return dict(zip(batch.anchors_N.tolist(), accepted_N.tolist(), strict=True))
