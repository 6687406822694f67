"""Who proposes the tokens of a block: the drafter, the text itself, or nobody.

A proposer lives through one answer at a time: `start`, then per round `propose` and, once the target has checked the
block, `observe` with the target's features of the tokens that stood. The decoding loop knows nothing else of it.

b: slots of this round's block, slot 0 (the last known token) included; H hidden; F = taps·H; V vocabulary rows.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.decode.sampling import Sampling, draw
from draftsmith.errors import UserError


class Proposer(Protocol):
    """What the decoding loop asks of a proposer.

    Attributes:
        block_size: most slots of a block; 1 never proposes anything.
        taps: target layers whose outputs `observe` gets, concatenated; empty: `observe` is not called.
    """

    block_size: int
    taps: tuple[int, ...]

    def start(self, max_length: int, device: torch.device, sampling: Sampling, generator: torch.Generator) -> None:
        """Forgets the last answer; the next one holds at most `max_length` tokens, prompt included."""

    def observe(self, features_LF: Tensor, start: int) -> None:
        """Features of the tokens at positions start..start+L-1, which are now certain."""

    def propose(self, tokens: list[int], width: int) -> tuple[Tensor, Tensor | None]:
        """Drafts for slots 1..width-1 of a block whose slot 0 is `tokens[-1]`.

        Returns:
            int64 [at most width-1] on the device, and, if sampled, the distributions they were drawn from [same, V]
            (None: they were certain).
        """


class GreedyProposer:
    """Proposes nothing: one token per target forward. The plain baseline, in the same loop."""

    block_size = 1
    taps: tuple[int, ...] = ()

    def start(self, max_length: int, device: torch.device, sampling: Sampling, generator: torch.Generator) -> None:
        pass

    def observe(self, features_LF: Tensor, start: int) -> None:
        raise AssertionError("asked for no features")

    def propose(self, tokens: list[int], width: int) -> tuple[Tensor, Tensor | None]:
        raise AssertionError("a block of one slot holds no drafts")


def check_block_size(block_size: int | None, trained: int) -> None:
    """Raises UserError for slots at decoding, if any are given, that a drafter trained with `trained` does not have."""
    if block_size is not None and not 1 <= block_size <= trained:
        raise UserError(f"block size {block_size} is outside 1..{trained}, the slots that this drafter learned")


class DrafterProposer:
    """A block per forward of a DFlash drafter.

    Args:
        drafter: with `spec`, `new_cache`, `extend` and `draft`.
        head: the target's embedding and head, on the drafter's device: `embed(ids)` and `logits(hidden)`.
        block_size: slots at decoding; none: as trained.

    Raises:
        UserError: the block size is below 1 or above the drafter's own.
    """

    def __init__(self, drafter: Any, head: Any, block_size: int | None = None) -> None:
        check_block_size(block_size, drafter.spec.block_size)
        self.block_size = block_size or drafter.spec.block_size
        self.taps = tuple(drafter.spec.taps) if self.block_size > 1 else ()
        self.drafter, self.head = drafter, head
        self._cache: Any = None
        self._position = 0

    def start(self, max_length: int, device: torch.device, sampling: Sampling, generator: torch.Generator) -> None:
        dtype = next(self.drafter.parameters()).dtype
        self._cache = self.drafter.new_cache(max_length, device, dtype)
        self._sampling, self._generator, self._position = sampling, generator, 0
        self._block = torch.full((self.block_size,), self.drafter.spec.mask_token_id, device=device)

    def observe(self, features_LF: Tensor, start: int) -> None:
        self.drafter.extend(self._cache, features_LF, start)
        self._position = start + features_LF.shape[0]

    def logits(self, tokens: list[int], width: int) -> Tensor:
        """[width-1, V] of slots 1..width-1 of a block whose slot 0 is `tokens[-1]`."""
        self._block[0] = tokens[-1]
        embeddings_bH = self.head.embed(self._block[:width])
        hidden_bH = self.drafter.draft(self._cache, embeddings_bH, self._position)
        return self.head.logits(hidden_bH[1:])

    def propose(self, tokens: list[int], width: int) -> tuple[Tensor, Tensor | None]:
        logits = self.logits(tokens, width)
        if self._sampling.greedy:
            return logits.argmax(-1), None
        probs = self._sampling.probabilities(logits)
        return draw(probs, self._generator), probs


class PromptLookupProposer:
    """Copies what followed the last occurrence of the newest n-gram in prompt and answer; no model at all.

    The longest n-gram of `longest`..`shortest` tokens that occurred before wins, of its occurrences the latest. An
    index from n-gram to the place behind it is kept up to date, so a look-up costs a few dictionary reads.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, block_size: int = 8, longest: int = 3, shortest: int = 1) -> None:
        if block_size < 2 or not 1 <= shortest <= longest:
            raise UserError(
                f"prompt look-up with block size {block_size} and n-grams {shortest}..{longest} cannot propose anything"
            )
        self.block_size, self._sizes = block_size, range(longest, shortest - 1, -1)

    def start(self, max_length: int, device: torch.device, sampling: Sampling, generator: torch.Generator) -> None:
        self._device = device
        self._behind: dict[tuple[int, ...], int] = {}
        self._indexed = 1

    def observe(self, features_LF: Tensor, start: int) -> None:
        raise AssertionError("asked for no features")

    def propose(self, tokens: list[int], width: int) -> tuple[Tensor, Tensor | None]:
        # An n-gram enters the index when the token behind it is known: the newest never finds itself.
        for behind in range(self._indexed, len(tokens)):
            for size in self._sizes:
                if size <= behind:
                    self._behind[tuple(tokens[behind - size : behind])] = behind
        self._indexed = len(tokens)
        drafts: list[int] = []
        for size in self._sizes:
            place = self._behind.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if place is not None:
                drafts = tokens[place : place + width - 1]
                break
        return torch.tensor(drafts, dtype=torch.int64, device=self._device), None
