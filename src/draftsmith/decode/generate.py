"""The target's own answers to many prompts: batched decoding that spends next to nothing on finished sequences.

Sequences are rows 0..n-1 of one `DecodeCache`. All rows write their next token into the same column, so a sequence
that began late simply begins at a later column: its tokens stand at the right edge, its positions count from its own
first token, columns before that are masked (left padding, made row by row). When a sixteenth of the sequences has
finished, the last rows move into the holes and n shrinks; when an eighth of the rows is free, the next prompts are
prefilled and join.

Prompts are prefilled padded on the right, without a mask, up to their last token only; that token is the first input
of the common step, so the first answer token comes from the same code as all others.

Prompts are taken longest first: one that joins is never longer than what the rows already hold. Order, random numbers
(one stream per prompt, counted by `seed` and the prompt's index) and batches depend on nothing but the arguments; an
answer does not depend on its neighbours, up to rounding in the last place.

Cost of a step: one target forward over n tokens and one transfer of n numbers to the host.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.decode.cache import DecodeCache, attention_windows
from draftsmith.decode.rounds import answer_limit
from draftsmith.decode.sampling import Sampling, draw_at
from draftsmith.decode.speculative import FinishReason
from draftsmith.decode.view import View
from draftsmith.errors import UserError

MOST_ROWS = {"cuda": 2048, "cpu": 128}
# Prompt tokens of one prefill: enough to keep the device busy, small enough for its activations.
PREFILL_TOKENS = {"cuda": 65536, "cpu": 4096}


# Shares of the rows, as divisors: moving rows and prefilling new ones have a fixed cost per layer.
CLOSE_AT, JOIN_AT = 16, 8


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        index: which prompt.
        tokens: the answer, the stop token included.
        finish_reason: "stop" or "length".
    """

    index: int
    tokens: list[int]
    finish_reason: FinishReason


def generate(
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Iterable[int] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int | None = None,
    indices: Sequence[int] | None = None,
) -> Iterator[Answer]:
    """Yields one answer per prompt, in the order in which they finish. None goes beyond the target's positions.

    Args:
        target: a loaded `Target`.
        prompts: token ids of each prompt.
        batch_size: most sequences at a time; none: as many as half of the free memory holds.
        indices: what the answers call each prompt; none: its place in `prompts`. A prompt's random numbers belong to
            its index, so a part of a list is answered as the whole would be.

    Raises:
        UserError: an empty prompt, one that leaves no room in the target's positions, sampling out of range, a target
            that cannot be decoded in batches, or too little memory.
    """
    sampling, stops = Sampling(temperature, top_k, top_p), frozenset(stop_ids)
    attention_windows(target.model.config)
    if batch_size is not None and batch_size < 1:
        raise UserError(f"batch size {batch_size} is not positive", where="decoding")
    names = range(len(prompts)) if indices is None else indices
    assert len(names) == len(prompts)
    limits = [
        answer_limit(target, prompt, max_new_tokens, f"prompt {name}")
        for name, prompt in zip(names, prompts, strict=True)
    ]
    return _answers(target, prompts, names, limits, stops, sampling, seed, batch_size)


def _answers(
    target: Any,
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    limits: Sequence[int],
    stops: frozenset[int],
    sampling: Sampling,
    seed: int,
    batch_size: int | None,
) -> Iterator[Answer]:
    """The generator behind `generate`, whose arguments are checked."""
    if not prompts:
        return
    most = max(limits)
    waiting = sorted(range(len(prompts)), key=lambda place: (len(prompts[place]), -place))
    longest = len(prompts[waiting[-1]])
    rows = min(batch_size or rows_that_fit(target, longest + most, sampling.greedy), len(prompts))
    try:
        with View(target) as view:
            batch = _Batch(view, target, rows, longest, most, sampling)
            while waiting or batch.live:
                free = rows - batch.live
                if waiting and free * JOIN_AT >= rows:
                    taken = [waiting.pop() for _ in range(min(free, len(waiting)))]
                    names, ends = [indices[place] for place in taken], [limits[place] for place in taken]
                    batch.join(names, [list(prompts[place]) for place in taken], ends, seed)
                yield from batch.step(stops)
    except torch.OutOfMemoryError:
        raise UserError(
            f"{target.device} ran out of memory with {rows} sequences of up to {longest + most} tokens",
            where="decoding",
            fix="give a smaller batch size",
        ) from None


def rows_that_fit(target: Any, length: int, greedy: bool) -> int:
    """Sequences of `length` tokens that half of the device's free memory holds, at least 1."""
    geometry, device = target.geometry, torch.device(target.device)
    size = torch.empty((), dtype=target.dtype).element_size()
    cache = _columns(length) * geometry.layers * 2 * geometry.kv_heads * geometry.head_dim * size
    # One layer's K and V repeated over the query heads, and logits with what choosing a token makes of them.
    work = 2 * length * geometry.heads * geometry.head_dim * size + geometry.vocab_rows * (8 if greedy else 40)
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + held
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 30
    return max(1, min(MOST_ROWS.get(device.type, 64), free // 2 // (cache + work)))


def _columns(length: int) -> int:
    """Cache columns for sequences of `length`: some more, so that shifting to the front is rare."""
    return length + max(64, length // 4)


@dataclass
class _Sequence:
    """A row on the host: which prompt, the column of its first token, tokens its answer may have, its answer so far."""

    index: int
    start: int
    limit: int
    answer: list[int] = field(default_factory=list)
    finished: bool = False


class _Batch:
    """The sequences and their cache: entry r of `sequences`, of tensors named _R, and of the cache is row r.

    Finished sequences stay in their rows, computed in vain, until enough of them have come together (`holes`).
    """

    def __init__(
        self, view: View, target: Any, rows: int, longest: int, max_new_tokens: int, sampling: Sampling
    ) -> None:
        self.view, self.sampling, self.max_new_tokens = view, sampling, max_new_tokens
        self.device = torch.device(target.device)
        self.columns = _columns(longest + max_new_tokens)
        self.cache = DecodeCache(target.model.config, rows, self.columns)
        self.sequences: list[_Sequence] = []
        self.holes: list[int] = []
        self.starts_R = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.last_R = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.column_numbers = torch.arange(self.columns, device=self.device)
        if not sampling.greedy:
            self.first_input_R = torch.zeros(rows, dtype=torch.int64, device=self.device)
            self.uniform_RT = torch.zeros(rows, max_new_tokens, dtype=torch.float64, device=self.device)

    @property
    def live(self) -> int:
        """Rows in use."""
        return len(self.sequences)

    @torch.inference_mode()
    def join(self, indices: list[int], prompts: list[list[int]], limits: list[int], seed: int) -> None:
        """Prefills `prompts`, longest first, and puts them behind the live rows; `limits` are of their answers."""
        if not self.live:
            self.cache.show(0, len(prompts[0]) - 1)
        assert len(prompts[0]) - 1 <= self.cache.length
        at_once = PREFILL_TOKENS.get(self.device.type, 4096)
        begin = 0
        while begin < len(prompts):
            width = max(1, len(prompts[begin]) - 1)
            end = min(len(prompts), begin + max(1, at_once // width))
            self._prefill(prompts[begin:end], self.live + begin)
            begin = end
        column = self.cache.first + self.cache.length
        fresh = slice(self.live, self.live + len(prompts))
        starts = [column - len(prompt) + 1 for prompt in prompts]
        self.starts_R[fresh] = torch.tensor(starts, device=self.device)
        self.last_R[fresh] = torch.tensor([prompt[-1] for prompt in prompts], device=self.device)
        if not self.sampling.greedy:
            self.first_input_R[fresh] = column
            uniform = np.stack([_uniform(seed, index, self.max_new_tokens) for index in indices])
            self.uniform_RT[fresh] = torch.from_numpy(uniform).to(self.device)
        self.sequences += [_Sequence(*each) for each in zip(indices, starts, limits, strict=True)]

    def _prefill(self, prompts: list[list[int]], row: int) -> None:
        """K and V of all prompt tokens but the last, moved to the right edge of the columns shown."""
        lengths = torch.tensor([len(prompt) - 1 for prompt in prompts])
        width = int(lengths.max())
        if not width:
            return
        ids = torch.tensor([prompt[:-1] + [0] * (width + 1 - len(prompt)) for prompt in prompts])
        cache = DecodeCache(self.view.model.config, len(prompts), width)
        positions = torch.arange(width, device=self.device)[None]
        # Causal attention keeps the padding on the right out of every real token; its logits are of no interest.
        self.view.model(
            ids.to(self.device), position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        source = (torch.arange(width) - (width - lengths[:, None])).clamp(min=0)
        self.cache.insert(cache, source.to(self.device), row)

    @torch.inference_mode()
    def step(self, stops: frozenset[int]) -> list[Answer]:
        """One token for every sequence; returns those that it finished."""
        self._make_room()
        live, first, column = self.live, self.cache.first, self.cache.first + self.cache.length
        starts = self.starts_R[:live]
        mask = None
        if any(sequence.start != first for sequence in self.sequences):
            mask = self.column_numbers[first : column + 1] >= starts[:, None]
        result = self.view.model(
            self.last_R[:live, None],
            attention_mask=mask,
            position_ids=(column - starts)[:, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        chosen = self._choose(result.logits[:, -1], column)
        self.last_R[:live] = chosen
        finished: list[Answer] = []
        for row, (sequence, token) in enumerate(zip(self.sequences, chosen.tolist(), strict=True)):
            if sequence.finished:
                continue
            sequence.answer.append(token)
            stopped = token in stops
            if stopped or len(sequence.answer) == sequence.limit:
                sequence.finished = True
                finished.append(Answer(sequence.index, sequence.answer, "stop" if stopped else "length"))
                self.holes.append(row)
        if self.holes and len(self.holes) * CLOSE_AT >= live:
            self._close()
        return finished

    def _choose(self, logits: Tensor, column: int) -> Tensor:
        """int64 [live] from logits [live, V]."""
        if self.sampling.greedy:
            return logits.argmax(-1)
        live = logits.shape[0]
        # Finished rows may have run past their last number.
        step = (column - self.first_input_R[:live])[:, None].clamp(max=self.max_new_tokens - 1)
        uniform = self.uniform_RT[:live].gather(1, step)[:, 0]
        return draw_at(self.sampling.probabilities(logits), uniform)

    def _make_room(self) -> None:
        """Hides columns that no unfinished row uses; if the last column is taken, shifts all to the front."""
        first = min(sequence.start for sequence in self.sequences if not sequence.finished)
        end = self.cache.first + self.cache.length
        self.cache.show(first, end - first)
        if end < self.columns:
            return
        assert first > 0, "a sequence is longer than the cache"
        self.cache.shift(self.live)
        for sequence in self.sequences:
            sequence.start -= first
        self.starts_R -= first
        if not self.sampling.greedy:
            self.first_input_R -= first

    def _close(self) -> None:
        """Removes the finished rows: rows from the end take their places."""
        left = self.live - len(self.holes)
        targets = [row for row in self.holes if row < left]
        sources = [row for row in range(left, self.live) if not self.sequences[row].finished]
        self.holes = []
        assert len(targets) == len(sources)
        if targets:
            to, fro = torch.tensor(targets, device=self.device), torch.tensor(sources, device=self.device)
            self.cache.move_rows(fro, to)
            tensors = [self.starts_R, self.last_R]
            if not self.sampling.greedy:
                tensors += [self.first_input_R, self.uniform_RT]
            for tensor in tensors:
                tensor[to] = tensor[fro]
        for target, source in zip(targets, sources, strict=True):
            self.sequences[target] = self.sequences[source]
        del self.sequences[left:]


def _uniform(seed: int, index: int, count: int) -> np.ndarray:
    """float64 [count] in [0, 1): the random numbers of one prompt, the same wherever and with whomever it is run."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64))).random(count)
