"""What every decoding loop keeps of a round, whoever drafted and however the forwards run.

`Decoded` is an answer with its counts and times. `check_block` says what a checked block emits, `settle` clips that at
stop token and limit and counts it. Cost: one transfer of at most 2·B numbers to the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.decode.sampling import Sampling, accept_drafts
from draftsmith.errors import UserError

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


def check_request(prompt: Sequence[int], max_new_tokens: int) -> None:
    """Refuses what no decoder can answer.

    Raises:
        UserError: empty prompt or no room for an answer.
    """
    if not prompt:
        raise UserError("the prompt holds no tokens", where="prompt", fix="give at least a beginning-of-text token")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens {max_new_tokens} leaves no room for an answer", where="decoding")


def room_for_answer(target: Any, prompt: Sequence[int], max_new_tokens: int) -> int:
    """Tokens that the answer to a prompt may have: `max_new_tokens`, or as many as the target has positions left for.

    0: the prompt fills them all.
    """
    assert max_new_tokens > 0
    return max(0, min(max_new_tokens, target.geometry.max_position_embeddings - len(prompt)))


def answer_limit(target: Any, prompt: Sequence[int], max_new_tokens: int, where: str) -> int:
    """`room_for_answer`, of which there has to be some.

    Args:
        where: the prompt, for the message.

    Raises:
        UserError: see `check_request`; also a prompt that leaves no room.
    """
    check_request(prompt, max_new_tokens)
    room = room_for_answer(target, prompt, max_new_tokens)
    if not room:
        positions = target.geometry.max_position_embeddings
        raise UserError(
            f"{len(prompt):,} tokens leave no room for an answer: the target has {positions:,} positions", where=where
        )
    return room


def stop_ids_of(target: Any) -> frozenset[int]:
    """End-of-answer tokens of a target."""
    return frozenset(target.stop_ids)


def check_block(
    drafts: Tensor, draft_probs: Tensor | None, logits: Tensor, sampling: Sampling, generator: torch.Generator
) -> tuple[list[int], int]:
    """(tokens that the block emits, drafts accepted), from the target's logits [b, V]; one transfer to the host."""
    if sampling.greedy:
        host = torch.cat((drafts, logits.argmax(-1))).tolist()
        return longest_match(host[: drafts.shape[0]], host[drafts.shape[0] :])
    target_probs = sampling.probabilities(logits)
    if draft_probs is None:
        draft_probs = torch.zeros_like(target_probs[:-1]).scatter_(-1, drafts[:, None], 1.0)
    accepted, own = accept_drafts(drafts, draft_probs, target_probs, generator)
    *proposed, stood, last = torch.cat((drafts, torch.stack((accepted, own)))).tolist()
    return [*proposed[:stood], last], stood


def longest_match(drafts: list[int], chosen: list[int]) -> tuple[list[int], int]:
    """(tokens that a block emits, drafts accepted) where `chosen` is what the target says behind every slot."""
    stood = 0
    while stood < len(drafts) and drafts[stood] == chosen[stood]:
        stood += 1
    return chosen[: stood + 1], stood


def settle(
    answer: Decoded, tokens: list[int], emitted: list[int], stood: int, width: int, limit: int, stops: frozenset[int]
) -> list[int]:
    """Appends what a round emitted to `tokens`, clipped at `limit` tokens and behind a stop token, and counts it.

    Args:
        stood: drafts accepted.
        width: slots of the block that was checked.

    Returns:
        What was appended.
    """
    emitted = emitted[: limit - len(tokens)]
    stop = next((place for place, token in enumerate(emitted) if token in stops), None)
    if stop is not None:
        del emitted[stop + 1 :]
        answer.finish_reason = "stop"
    tokens += emitted
    answer.accepted_per_round.append(len(emitted))
    answer.drafted_per_round.append(width - 1 if stop is None else min(width - 1, len(emitted)))
    answer.stood_per_round.append(min(stood, len(emitted)))
    return emitted


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
