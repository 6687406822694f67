"""Speculative decoding of one answer: a single loop for every proposer, the plain baseline included.

Prefill the target over the prompt and choose the first token. Then, round by round: a block holds the last token in
slot 0 and the proposer's drafts behind it; one target forward checks the whole block; the drafts that stand and one
token of the target's own are emitted; the target's cache is cut back to the tokens that stand; their features (slot 0
and the accepted drafts, not the new token) go to the proposer.

Cost of a round: one proposal, one target forward over at most B tokens, one transfer of 2·B numbers to the host. With
temperature 0 the answer equals plain greedy decoding token for token wherever a block and a single token give the same
argmax (always in float32, up to near-ties in bfloat16); above 0 it has the target's distribution.

Targets with recurrent layers: their state is copied before a block is checked and put back if a draft is rejected; the
tokens that stood are then read again, together with the next block, so most rounds stay one forward. When as many wait
as a block has slots, they are read by a forward of their own and the copy moves on.

With `rounds` the same rounds run as captured graphs (`static`); this loop is their slow twin.

Near the length limit blocks shrink, and no block is drafted past it, as in the reference decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode.cache import DecodeCache
from draftsmith.decode.proposers import DrafterProposer, GreedyProposer, PromptLookupProposer, Proposer
from draftsmith.decode.rounds import Decoded, FinishReason, Stopwatch, check_block, check_request, settle
from draftsmith.decode.sampling import Sampling, draw
from draftsmith.decode.static import StaticRounds
from draftsmith.decode.view import View

__all__ = [
    "Decoded",
    "DrafterProposer",
    "FinishReason",
    "GreedyProposer",
    "PromptLookupProposer",
    "Proposer",
    "StaticRounds",
    "decode",
]


@torch.inference_mode()
def decode(
    target: Any,
    prompt_ids: Sequence[int],
    proposer: Proposer,
    *,
    max_new_tokens: int,
    stop_ids: Iterable[int] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    on_round: Callable[[list[int], int], None] | None = None,
    rounds: StaticRounds | None = None,
) -> Decoded:
    """Answers one prompt; see the module's docstring.

    Args:
        target: a loaded `Target`.
        prompt_ids: token ids, at least one.
        stop_ids: tokens that end the answer.
        on_round: gets the tokens that each target forward emitted, the prefill's first one included, and how many of
            them were drafts; the drafts come first, in slots 1, 2, …
        rounds: runs the rounds on static shapes where the target lets it, kept from answer to answer; none: eager.

    Raises:
        UserError: empty prompt, no room for an answer, sampling out of range, or a target that cannot be cut back.
    """
    prompt, stops, sampling = list(prompt_ids), frozenset(stop_ids), Sampling(temperature, top_k, top_p)
    check_request(prompt, max_new_tokens)
    if rounds is not None:
        assert rounds.target is target
        done = rounds.answer(prompt, proposer, len(prompt) + max_new_tokens, stops, sampling, seed, on_round)
        if done is not None:
            return done
    device = torch.device(target.device)
    generator = torch.Generator(device).manual_seed(seed)
    limit = len(prompt) + max_new_tokens
    cache = DecodeCache(target.model.config, rows=1, columns=limit + proposer.block_size)
    positions = torch.arange(limit + proposer.block_size, device=device)[None]
    block = torch.zeros(1, proposer.block_size, dtype=torch.int64, device=device)
    watch = Stopwatch(device)

    def run(ids: Tensor, start: int, keep: int) -> Tensor:
        """Logits [keep, V] of the last tokens of `ids` [1, L], whose first stands at position `start`."""
        where = positions[:, start : start + ids.shape[1]]
        result = view.model(ids, position_ids=where, past_key_values=cache, use_cache=True, logits_to_keep=keep)
        return result.logits[0]

    with View(target, proposer.taps) as view:
        watch.start()
        logits = run(torch.tensor([prompt], device=device), 0, 1)
        proposer.start(limit, device, sampling, generator)
        if proposer.taps:
            proposer.observe(view.features(len(prompt)), 0)
        first = logits.argmax(-1) if sampling.greedy else draw(sampling.probabilities(logits), generator)
        tokens = [*prompt, int(first)]
        answer = Decoded([], "stop" if tokens[-1] in stops else "length")
        answer.prefill_seconds = watch.stop()
        if on_round is not None:
            on_round(tokens[-1:], 0)

        state = _RecurrentState(cache, len(prompt))
        watch.start()
        while len(tokens) < limit and tokens[-1] not in stops:
            start = len(tokens) - 1
            width = min(proposer.block_size, limit - start)
            block[0, 0] = tokens[-1]
            drafts, draft_probs = block[0, 1:1], None
            if width > 1:
                watch.begin_part("draft")
                drafts, draft_probs = proposer.propose(tokens, width)
                watch.end_part()
                width = 1 + drafts.shape[0]
                block[0, 1:width] = drafts
            watch.begin_part("target")
            behind = start - state.at if state.exists else 0
            if behind and (behind >= proposer.block_size or width == 1):
                cache.crop_to(state.at)
                run(torch.tensor([tokens[state.at : start]], device=device), state.at, 1)
                state.moved_to(start)
                behind = 0
            checked = block[:, :width]
            if behind:
                cache.crop_to(state.at)
                checked = torch.cat((torch.tensor([tokens[state.at : start]], device=device), checked), dim=1)
            if width > 1:
                state.remember()
            logits = run(checked, start - behind, width)
            watch.end_part()
            emitted, stood = check_block(drafts, draft_probs, logits, sampling, generator)
            emitted = settle(answer, tokens, emitted, stood, width, limit, stops)
            cache.crop_to(len(tokens) - 1)
            if len(tokens) - 1 == start + width:
                state.moved_to(start + width)
            else:
                state.forget_block()
            if on_round is not None:
                on_round(emitted, answer.stood_per_round[-1])
            if proposer.taps and width > 1:
                watch.begin_part("draft")
                proposer.observe(view.features(len(emitted), behind), start)
                watch.end_part()
        answer.seconds = watch.stop()
    answer.draft_seconds, answer.target_seconds = watch.part("draft"), watch.part("target")
    answer.tokens = tokens[len(prompt) :]
    return answer


class _RecurrentState:
    """Where the recurrent layers of a target stand, and how to get back there; nothing to do for a target without.

    Attributes:
        exists: the target has such layers.
        at: tokens that the state has read.
    """

    def __init__(self, cache: DecodeCache, at: int) -> None:
        self._cache = cache
        self._copy: list[Any] | None = None
        self.exists = bool(cache.states)
        self.at = at

    def remember(self) -> None:
        """Copies the state, unless a copy of it is there."""
        if self.exists and self._copy is None:
            self._copy = self._cache.snapshot()

    def moved_to(self, at: int) -> None:
        """Everything read so far stands."""
        self.at, self._copy = at, None

    def forget_block(self) -> None:
        """Back to where the copy was made: what stood since is to be read again."""
        if self.exists:
            assert self._copy is not None, "a draft was rejected, and the state before it was not kept"
            self._cache.restore(self._copy)
