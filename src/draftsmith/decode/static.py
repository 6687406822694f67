"""Rounds of one shape: on a GPU captured as CUDA graphs, so that a round costs the host a few replays.

Decoding one answer in eager PyTorch is bound by the host: hundreds of small kernels are launched one by one. Here the
parts of a round have shapes and addresses that never change:

    draft     block of MASKs behind the last token → the drafter over its context → drafts
    check     block → the target over its cache → what it says behind every slot, and features
    extend    features of all slots → K and V of the drafter's context

Where a round starts and how many of its slots count are two numbers in memory; caches have a constant number of columns
(prompt, answer and a block, rounded up to a bucket) and masks are made from positions, so one graph serves every
length. `check` and `extend` always take the whole block: what was rejected, or lies behind a shortened block, is
written over by the next round before anything can see it. Prefill is eager; so are proposers other than the drafter,
and choosing from distributions when sampling, so random numbers are those of the eager loop.

Cost of a round: three replays, one copy of three numbers to the device, one of 2·B back, the only one that is waited
for (while `extend` runs). Attention reads the whole bucket. A part is captured when first needed, before an answer's
rounds are timed.

Targets that this cannot serve decode eagerly, and `StaticRounds.line` says why: recurrent layers (their state goes by
snapshot and replay), a model spread over devices, rotary frequencies that change with length, a forward that waits for
the device. And because a model may handle caches and masks in ways of its own, the first answer compares logits of
one block with those of the eager forward (the first two, if the first block had one slot).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.decode.cache import RECURRENT, DecodeCache, kinds_and_windows
from draftsmith.decode.graphs import CannotCaptureError, Graphs, Part
from draftsmith.decode.proposers import DrafterProposer, Proposer
from draftsmith.decode.rounds import Decoded, Stopwatch, check_block, longest_match, settle
from draftsmith.decode.sampling import Sampling, draw
from draftsmith.decode.static_draft import StaticDraftCache
from draftsmith.decode.view import NAME, View
from draftsmith.errors import UserError
from draftsmith.target.geometry import FULL, SLIDING

Compile = Literal["auto", "on", "off"]
SMALLEST_BUCKET = 256
# Largest difference of two forwards' logits, as a share of the largest logit: rounding stays far below, a token that is
# seen where it should not be lies far above.
_ALIKE = {torch.float32: 5e-3}
_ALIKE_HALF = 0.1
# Attention that takes a mask to be added.
_MASKED = (NAME, "sdpa", "eager")


def bucket(tokens: int) -> int:
    """Columns for `tokens`: a multiple of 256, from 4,096 on of 512, from 8,192 on of 1,024, …"""
    step = max(SMALLEST_BUCKET, 2 ** (tokens.bit_length() - 1) // 8)
    return -(-tokens // step) * step


def obstacle(target: Any) -> str:
    """Why rounds of static shape cannot serve a target, as far as its configuration tells; "" if nothing speaks
    against them."""
    config = target.model.config
    text = config.get_text_config(decoder=True)
    try:
        kinds = {kind for kind, _ in kinds_and_windows(config)}
    except UserError as error:
        return error.what
    recurrent = sorted(kinds & set(RECURRENT))
    if recurrent:
        return f"the target has {', '.join(recurrent)} layers, whose state goes by snapshot and replay"
    if len({parameter.device for parameter in target.model.parameters()}) > 1:
        return "the target is spread over devices"
    with View(target) as view:
        attention = view.model.config._attn_implementation
    if attention not in _MASKED:
        return f"the target's attention ({attention}) takes no mask by position"
    rope = getattr(text, "rope_parameters", None) or {}
    types = {str(part.get("rope_type", "")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    changing = sorted(kind for kind in types if "dynamic" in kind or kind == "longrope")
    return f"the target's rotary frequencies change with length ({', '.join(changing)})" if changing else ""


@dataclass
class _Drafting:
    """A drafter with a context of its own. Captured parts read its weights, so it must not be freed before them."""

    drafter: Any
    head: Any
    cache: StaticDraftCache


class StaticRounds:
    """Decodes answers of one target, one after the other, keeping caches and graphs; give it to `decode`.

    Args:
        target: a loaded `Target`.
        compile: "auto": static rounds on CUDA if the target lets it; "on": an error where that is not possible; "off":
            eager.
        graphs: capture; none: yes. Without, static rounds run plainly, on any device: the twin of the captured ones.

    Attributes:
        why_not: why answers are decoded eagerly; "" while they are not.
        answers: decoded here.

    Raises:
        UserError: it was to be "on" and cannot.
    """

    def __init__(self, target: Any, compile: Compile = "auto", graphs: bool | None = None) -> None:
        self.target = target
        self.device = torch.device(target.device)
        self.answers = 0
        self.why_not = ""
        self._must, self._captures = compile == "on", graphs is not False
        self._proved = 0  # slots of the block whose logits were compared
        self._cache: DecodeCache | None = None
        self._columns = self._slots = 0
        self._forget()
        if compile == "off":
            self.why_not = "as asked for"
        elif self._captures and self.device.type != "cuda":
            self._give_up(f"there are no CUDA graphs on {self.device.type}")
        else:
            self._give_up(obstacle(target))

    def line(self) -> str:
        """Which way answers were decoded, and why, for people."""
        ways = []
        if self.answers or not self.why_not:
            how = "CUDA graphs" if self._captures else "static shapes without graphs"
            ways.append(f"rounds in {how}, caches of {self._columns} columns")
        if self.why_not:
            ways.append(f"eager, because {self.why_not}" if self.why_not != "as asked for" else "eager, as asked for")
        before = f"; then (after {self.answers} answers) "
        return f"decoding: {before.join(ways)}"

    def facts(self) -> dict[str, Any]:
        """The same for programs."""
        if not self.why_not:
            way = "graphs" if self._captures else "static"
        else:
            way = "mixed" if self.answers else "eager"
        return {"rounds": way, "rounds_eager_because": self.why_not or None}

    def answer(
        self,
        prompt: list[int],
        proposer: Proposer,
        limit: int,
        stops: frozenset[int],
        sampling: Sampling,
        seed: int,
        on_round: Callable[[list[int], int], None] | None,
    ) -> Decoded | None:
        """One answer, as `decode` gives it; None if it has to be decoded eagerly.

        Args:
            limit: tokens of prompt and answer.

        Raises:
            UserError: rounds were to be static and cannot.
        """
        if self.why_not:
            return None
        self._make_room(limit + proposer.block_size, proposer.block_size)
        assert self._cache is not None
        current = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        guard: AbstractContextManager[Any] = current
        with guard, View(self.target, proposer.taps) as self._view:
            self._asked = _Asked(proposer, limit, stops, sampling, bucket(limit + proposer.block_size))
            self._drafting = self._find_drafting(proposer)
            self._generator = torch.Generator(self.device).manual_seed(seed)
            watch = Stopwatch(self.device)
            watch.start()
            tokens = [*prompt, self._prefill(prompt)]
            answer = Decoded([], "stop" if tokens[-1] in stops else "length")
            answer.prefill_seconds = watch.stop()
            try:
                self._prepare(tokens)
            except CannotCaptureError as error:
                self._give_up(str(error))
                return None
            if on_round is not None:
                on_round(tokens[-1:], 0)
            watch.start()
            while len(tokens) < limit and tokens[-1] not in stops:
                emitted = self._round(answer, tokens, watch)
                if on_round is not None:
                    on_round(emitted, answer.stood_per_round[-1])
            answer.seconds = watch.stop()
        answer.draft_seconds, answer.target_seconds = watch.part("draft"), watch.part("target")
        answer.tokens = tokens[len(prompt) :]
        self.answers += 1
        return answer

    def _give_up(self, reason: str) -> None:
        """From now on answers are decoded eagerly, if there is a reason.

        Raises:
            UserError: that was excluded.
        """
        if reason and self._must:
            raise UserError(f"decoding cannot be compiled: {reason}", where="--compile on", fix="use --compile auto")
        self.why_not = reason
        if reason:
            self._cache = None
            self._forget()

    def _forget(self) -> None:
        """Drops everything that is tied to the memory of the present caches."""
        self._parts: dict[tuple[Any, ...], Part] = {}
        self._homes: dict[tuple[Any, ...], Tensor] = {}
        self._draftings: dict[int, _Drafting] = {}
        self._now: dict[Any, Part] = {}  # of the running answer: "draft", "extend", and what checks so many slots
        self._drafting = None
        self._graphs: Graphs | None = None

    def _make_room(self, columns: int, slots: int) -> None:
        """Caches of at least so many columns, numbers for at least so many slots; what is there is kept if it does."""
        if columns <= self._columns and slots <= self._slots and self._cache is not None:
            return
        self._columns, self._slots = max(bucket(columns), self._columns), max(slots, self._slots)
        self._cache = None  # the old one is to be gone before there is a new one
        self._forget()
        self._cache = DecodeCache(self.target.model.config, rows=1, columns=self._columns)
        self._numbers = torch.arange(self._columns, device=self.device)
        # Where the round starts, where its last slot that counts ends, the block, and what the target says behind it.
        size = 2 + 2 * self._slots
        self._state = torch.zeros(size, dtype=torch.int64, device=self.device)
        self._start, self._end = self._state[0], self._state[1]
        self._block, self._said = self._state[2 : 2 + self._slots], self._state[2 + self._slots :]
        pinned = self.device.type == "cuda"
        self._sent, self._received = (torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(2))
        self._sent_numbers = self._sent.numpy()
        self._arrived = torch.cuda.Event() if pinned else None

    def _find_drafting(self, proposer: Proposer) -> _Drafting | None:
        """The drafter behind a proposer that drafts as `DrafterProposer` does and in no way of its own."""
        if type(proposer) is not DrafterProposer or proposer.block_size == 1:
            return None
        drafter, head = proposer.drafter, proposer.head
        if id(drafter) not in self._draftings:
            dtype = next(drafter.parameters()).dtype
            cache = StaticDraftCache(drafter.spec, self._columns, self._end, self.device, dtype)
            self._draftings[id(drafter)] = _Drafting(drafter, head, cache)
        return self._draftings[id(drafter)]

    def _prefill(self, prompt: list[int]) -> int:
        """Reads the prompt eagerly, into the caches; returns the first token of the answer."""
        cache, asked = self._cache, self._asked
        assert cache is not None
        cache.show(0, 0)
        ids = torch.tensor([prompt], device=self.device)
        logits = self._forward(ids, self._numbers[None, : len(prompt)], 1)
        if self._drafting is None:
            asked.proposer.start(asked.limit, self.device, asked.sampling, self._generator)
            if asked.proposer.taps:
                asked.proposer.observe(self._view.features(len(prompt)), 0)
        else:
            self._drafting.drafter.extend(self._drafting.cache, self._view.features(len(prompt)), 0)
        sampling = asked.sampling
        return int(logits.argmax(-1) if sampling.greedy else draw(sampling.probabilities(logits), self._generator))

    def _forward(self, ids: Tensor, positions: Tensor, keep: int, masks: Any = None) -> Tensor:
        """The target's logits [keep, V] of the last tokens of `ids` [1, L]."""
        result = self._view.model(
            ids,
            attention_mask=masks,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return result.logits[0]

    def _round(self, answer: Decoded, tokens: list[int], watch: Stopwatch) -> list[int]:
        """Drafts, checks and takes over one block; returns what it emitted."""
        asked, drafting = self._asked, self._drafting
        sampling, proposer = asked.sampling, asked.proposer
        start = len(tokens) - 1
        width = min(proposer.block_size, asked.limit - start)
        drafts, draft_probs = self._block[1:1], None
        if width > 1:
            watch.begin_part("draft")
            if drafting is None:
                drafts, draft_probs = proposer.propose(tokens, width)
                width = 1 + drafts.shape[0]
                self._send(start, width, tokens[-1])
                self._block[1:width] = drafts
            else:
                self._send(start, width, tokens[-1])
                self._now["draft"]()
                drafts = self._block[1:width]
                if not sampling.greedy:
                    draft_probs = sampling.probabilities(self._homes["draft logits", proposer.block_size][: width - 1])
                    drafts.copy_(draw(draft_probs, self._generator))
            watch.end_part()
        else:
            self._send(start, width, tokens[-1])
        slots = self._slots_to_check(width)
        watch.begin_part("target")
        self._now[slots]()
        watch.end_part()
        if sampling.greedy:
            self._fetch()
        if drafting is not None and width > 1:
            watch.begin_part("draft")
            self._now["extend"]()
            watch.end_part()
        if sampling.greedy:
            emitted, stood = self._match(width)
        else:
            logits = self._homes["logits", slots][:width]
            emitted, stood = check_block(drafts, draft_probs, logits, sampling, self._generator)
        emitted = settle(answer, tokens, emitted, stood, width, asked.limit, asked.stops)
        if drafting is None and proposer.taps and width > 1:
            watch.begin_part("draft")
            proposer.observe(self._homes[proposer.taps, slots][: len(emitted)], start)
            watch.end_part()
        return emitted

    def _send(self, start: int, width: int, token: int) -> None:
        """The round's three numbers to the device. The last round's were read long ago: its results have come back."""
        self._sent_numbers[:3] = start, start + width, token
        self._state[:3].copy_(self._sent[:3], non_blocking=True)

    def _fetch(self) -> None:
        """Starts the transfer of the block and of what the target said."""
        self._received.copy_(self._state, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def _match(self, width: int) -> tuple[list[int], int]:
        """(tokens that the block emits, drafts accepted), once that transfer has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers = self._received.tolist()
        said = 2 + self._slots
        return longest_match(numbers[3 : 2 + width], numbers[said : said + width])

    def _slots_to_check(self, width: int) -> int:
        """Slots of the part that checks `width` of them: all, or the one if nothing was proposed."""
        return 1 if width == 1 and self._drafting is None else self._asked.proposer.block_size

    def _part(self, key: tuple[Any, ...], run: Callable[..., None], *arguments: Any) -> Part:
        """The part of that name; if there is none, it is made, run and captured.

        Raises:
            CannotCaptureError: it cannot be captured.
        """
        if key not in self._parts:
            part = Part(partial(run, *arguments))
            part()
            if self._captures:
                if self._graphs is None:
                    self._graphs = Graphs(self.device)
                part.capture(self._graphs)
            self._parts[key] = part
        return self._parts[key]

    # What is captured. All of it reads and writes static tensors only, and may run more than once.

    def _draft(self, drafting: _Drafting, slots: int, shown: int, greedy: bool) -> None:
        """Drafts of a whole block into its slots, or their logits into a home."""
        self._block[1:slots].fill_(drafting.drafter.spec.mask_token_id)
        drafting.cache.shown = shown
        embeddings_BH = drafting.head.embed(self._block[:slots])
        hidden_BH = drafting.drafter.draft(drafting.cache, embeddings_BH, self._start)
        logits = drafting.head.logits(hidden_BH[1:])
        if greedy:
            self._block[1:slots].copy_(logits.argmax(-1))
        else:
            self._keep("draft logits", slots, logits)

    def _check(self, slots: int, shown: int, taps: tuple[int, ...], greedy: bool) -> None:
        """What the target says behind every slot, or its logits, and the features."""
        logits = self._logits(slots, shown)
        if greedy:
            self._said[:slots].copy_(logits.argmax(-1))
        else:
            self._keep("logits", slots, logits)
        if taps:
            self._keep(taps, slots, self._view.features(slots))

    def _logits(self, slots: int, shown: int) -> Tensor:
        """The target's logits [slots, V] of the block, over the first `shown` columns of its cache."""
        assert self._cache is not None
        places_L = self._start + self._numbers[:slots]
        # Slots that do not count must not ask for positions that a table of them may not have.
        positions_L = torch.minimum(places_L, self._end - 1)
        with self._cache.fixed(places_L, shown):
            return self._forward(self._block[None, :slots], positions_L[None], slots, self._masks(places_L, shown))

    def _masks(self, places_L: Tensor, shown: int) -> Any:
        """Masks [1, 1, L, shown], to be added, in the form the decoder takes: by layer kind if it knows kinds."""
        target = self.target
        text = target.decoder.config

        def mask(window: int | None) -> Tensor:
            distance = places_L[:, None] - self._numbers[:shown]
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            zeros = torch.zeros(hidden.shape, dtype=target.dtype, device=self.device)
            return zeros.masked_fill_(hidden, -torch.inf)[None, None]

        by_kind = {kind: mask(text.sliding_window if kind == SLIDING else None) for kind in sorted(set(target.kinds))}
        assert set(by_kind) <= {FULL, SLIDING}
        return by_kind if getattr(text, "layer_types", None) is not None else by_kind[target.kinds[0]]

    def _extend(self, drafting: _Drafting, slots: int) -> None:
        """K and V of all slots into the drafter's context; those that did not stand are written over."""
        taps = tuple(drafting.drafter.spec.taps)
        drafting.drafter.extend(drafting.cache, self._homes[taps, slots], self._start)

    def _keep(self, name: Any, slots: int, tensor: Tensor) -> None:
        """Copies a result to where it stays, whichever graph runs next; features are named by their taps."""
        if (name, slots) not in self._homes:
            self._homes[name, slots] = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._homes[name, slots].copy_(tensor)

    def _prepare(self, tokens: list[int]) -> None:
        """Makes every part that this answer needs, and proves that the target can be served.

        Raises:
            CannotCaptureError: it cannot.
        """
        asked = self._asked
        block_size, limit = asked.proposer.block_size, asked.limit
        start = len(tokens) - 1
        if len(tokens) >= limit or tokens[-1] in asked.stops:
            return
        width = min(block_size, limit - start)
        self._send(start, width, tokens[-1])
        if self._proved < min(2, width):
            self._prove(start, width)
        shown, greedy, taps, drafting = asked.shown, asked.sampling.greedy, asked.proposer.taps, self._drafting
        if drafting is not None:
            drawn = drafting, block_size, shown, greedy
            self._now["draft"] = self._part(("draft", id(drafting), *drawn[1:]), self._draft, *drawn)
        for slots in {self._slots_to_check(width) for width in (1, block_size)}:
            what = slots, shown, taps, greedy
            self._now[slots] = self._part(("check", *what), self._check, *what)
        if drafting is not None:
            self._now["extend"] = self._part(("extend", id(drafting), block_size), self._extend, drafting, block_size)

    def _prove(self, start: int, width: int) -> None:
        """Compares logits of a block with those of the eager forward.

        Raises:
            CannotCaptureError: they differ, or the model does not take what it is given.
        """
        cache = self._cache
        assert cache is not None
        self._block[1:width].fill_(0)
        expected = self._forward(self._block[None, :width], self._numbers[None, start : start + width], width).float()
        cache.crop_to(start)
        try:
            found = self._logits(width, self._asked.shown).float()
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            said = str(error).strip().splitlines() or [""]
            raise CannotCaptureError(
                f"the target takes no mask by position ({type(error).__name__}: {said[0]})"
            ) from error
        alike = _ALIKE.get(self.target.dtype, _ALIKE_HALF) * float(expected.abs().max())
        if not float((found - expected).abs().max()) <= alike:
            raise CannotCaptureError("the target's logits over a cache of static size are not those over its own")
        self._proved = width


@dataclass(frozen=True)
class _Asked:
    """What the running answer was asked for; `shown`: columns that its forwards see."""

    proposer: Any
    limit: int
    stops: frozenset[int]
    sampling: Sampling
    shown: int
