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

Near the length limit blocks shrink, and no block is drafted past it, as in the reference decoder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.decode.cache import DecodeCache
from draftsmith.decode.proposers import DrafterProposer, GreedyProposer, PromptLookupProposer, Proposer
from draftsmith.decode.sampling import Sampling, accept_drafts, draw
from draftsmith.decode.view import View
from draftsmith.errors import UserError

__all__ = ["Decoded", "DrafterProposer", "GreedyProposer", "PromptLookupProposer", "Proposer", "decode"]

FinishReason = Literal["stop", "length"]


@dataclass
class Decoded:
    """One answer and what it cost.

    Attributes:
        tokens: the answer, the stop token included; the first one comes from the prefill.
        finish_reason: "stop" at a stop token, "length" at `max_new_tokens`.
        accepted_per_round: tokens emitted by each target forward after the prefill, the target's own included, clipped
            at stop token and limit. Their sum is `len(tokens) - 1`, their mean is τ.
        drafted_per_round: drafts that each of these forwards checked, those behind a stop token left out.
        stood_per_round: how many of those were accepted.
        seconds: of all rounds, prefill excluded.
        draft_seconds: the proposer's part of it.
        target_seconds: the target's forwards in it; what is left is the check, the cache and the loop.
        prefill_seconds: target prefill, first token, and the proposer's reading of the prompt.
    """

    tokens: list[int]
    finish_reason: FinishReason
    accepted_per_round: list[int] = field(default_factory=list)
    drafted_per_round: list[int] = field(default_factory=list)
    stood_per_round: list[int] = field(default_factory=list)
    seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    prefill_seconds: float = 0.0

    @property
    def target_forwards(self) -> int:
        """Target forwards after the prefill."""
        return len(self.accepted_per_round)


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
) -> Decoded:
    """Answers one prompt; see the module's docstring.

    Args:
        target: a loaded `Target`.
        prompt_ids: token ids, at least one.
        stop_ids: tokens that end the answer.
        on_round: gets the tokens that each target forward emitted, the prefill's first one included, and how many of
            them were drafts; the drafts come first, in slots 1, 2, …

    Raises:
        UserError: empty prompt, no room for an answer, sampling out of range, or a target that cannot be cut back.
    """
    prompt, stops, sampling = list(prompt_ids), frozenset(stop_ids), Sampling(temperature, top_k, top_p)
    check_request(prompt, max_new_tokens)
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
            emitted, stood = _check(drafts, draft_probs, logits, sampling, generator)

            emitted = emitted[: limit - len(tokens)]
            stop = next((k for k, token in enumerate(emitted) if token in stops), None)
            if stop is not None:
                del emitted[stop + 1 :]
                answer.finish_reason = "stop"
            tokens += emitted
            cache.crop_to(len(tokens) - 1)
            if len(tokens) - 1 == start + width:
                state.moved_to(start + width)
            else:
                state.forget_block()
            answer.accepted_per_round.append(len(emitted))
            answer.drafted_per_round.append(width - 1 if stop is None else min(width - 1, len(emitted)))
            answer.stood_per_round.append(min(stood, len(emitted)))
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


def check_request(prompt: Sequence[int], max_new_tokens: int) -> None:
    """Refuses what no decoder can answer.

    Raises:
        UserError: empty prompt or no room for an answer.
    """
    if not prompt:
        raise UserError("the prompt holds no tokens", where="prompt", fix="give at least a beginning-of-text token")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens {max_new_tokens} leaves no room for an answer", where="decoding")


def _check(
    drafts: Tensor, draft_probs: Tensor | None, logits: Tensor, sampling: Sampling, generator: torch.Generator
) -> tuple[list[int], int]:
    """(tokens that the block emits, drafts accepted), from the target's logits [b, V]; one transfer to the host."""
    if sampling.greedy:
        host = torch.cat((drafts, logits.argmax(-1))).tolist()
        proposed, chosen = host[: drafts.shape[0]], host[drafts.shape[0] :]
        stood = 0
        while stood < len(proposed) and proposed[stood] == chosen[stood]:
            stood += 1
        return chosen[: stood + 1], stood
    target_probs = sampling.probabilities(logits)
    if draft_probs is None:
        draft_probs = torch.zeros_like(target_probs[:-1]).scatter_(-1, drafts[:, None], 1.0)
    accepted, own = accept_drafts(drafts, draft_probs, target_probs, generator)
    *proposed, stood, last = torch.cat((drafts, torch.stack((accepted, own)))).tolist()
    return [*proposed[:stood], last], stood


class Stopwatch:
    """Seconds of a span, and of named parts within it, without making a GPU wait inside the span."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._parts: list[tuple[str, Any, Any]] = []

    def start(self) -> None:
        self._begin = self._now()

    def stop(self) -> float:
        """Seconds since `start`; waits for the device."""
        return self._now() - self._begin

    def begin_part(self, name: str) -> None:
        self._name, self._opened = name, self._mark()

    def end_part(self) -> None:
        self._parts.append((self._name, self._opened, self._mark()))

    def part(self, name: str) -> float:
        """Seconds of all parts of that name; on a GPU those of its stream, so call it after `stop`."""
        spans = [(begin, end) for part, begin, end in self._parts if part == name]
        if self._device is None:
            return sum(end - begin for begin, end in spans)
        return sum(begin.elapsed_time(end) for begin, end in spans) / 1000

    def _now(self) -> float:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _mark(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
