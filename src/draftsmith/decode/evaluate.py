"""What a drafter is worth: acceptance length, losslessness and speed-up, measured by decoding.

Every prompt is answered by three proposers in the same loop, dtype and thread count: the drafter, nobody (plain
decoding with its KV cache, the baseline) and prompt look-up. Drafter and baseline take turns in going first, so that a
machine that slows down slows both; one short answer of each beforehand takes the first-call costs.

- τ: tokens emitted per target forward after the prefill, the target's own included. Pooled over all forwards, and as
  the mean of the answers' own τ ("per response"), which other harnesses report.
- Acceptance by slot: share of the blocks that drafted slot k in which slots 1..k all stood. Without clipping,
  τ = 1 + the sum over slots.
- Speed-up: ratio of the mean time per output token, prefill excluded. All three run their rounds in the same way:
  as captured graphs (`static`), or all eagerly.
- Lossless: in float32 the drafter's answers equal the baseline's token for token. In bfloat16 a block and a single
  token run different kernels, so near-ties of the argmax flip; then every token of the drafter's answer has to be the
  target's argmax under teacher forcing or to lie within `Tie.tolerance` of it. Each such tie is listed.
- Sampled answers: tokens cannot be compared, distributions can; every token is tested against the target's own
  distribution behind the tokens before it, and the p-value is reported (`distribution`).
- An answer that loops is easy to draft: figures are also given for answers with at least 60 % distinct 4-grams.

Cost: three decodings per prompt; one forward more for an answer that differs or is sampled, and two more for each tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from draftsmith.decode.cache import DecodeCache
from draftsmith.decode.distribution import DistributionTest, check_distribution
from draftsmith.decode.prompts import Prompt, ask_in_turn, encode_prompts
from draftsmith.decode.rounds import answer_limit, room_for_answer
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.speculative import (
    Decoded,
    DrafterProposer,
    GreedyProposer,
    PromptLookupProposer,
    Proposer,
    StaticRounds,
    decode,
)
from draftsmith.errors import UserError, first_of

NOT_LOOPING = 0.6
WARM_UP_TOKENS = 16
GREEDY = Sampling()


@dataclass(frozen=True)
class Tie:
    """A token of the drafter's answer that is not what the target alone would have said.

    Attributes:
        prompt: index of the prompt.
        position: place of the token in the answer.
        token: what was emitted.
        best: the target's argmax under teacher forcing; the baseline's token where the two answers part.
        gap: by how much, in logits, `token` and `best` lie below the top (the larger of the two).
        noise: largest difference between the target's logits from one long forward and from a one-token step there.
        tolerance: twice the noise, and at least two units in the last place of the top logit.
    """

    prompt: int
    position: int
    token: int
    best: int
    gap: float
    noise: float
    tolerance: float

    @property
    def proved(self) -> bool:
        """The gap is within what rounding does to these logits."""
        return self.gap <= self.tolerance


@dataclass(frozen=True)
class Figures:
    """The numbers of a set of answers.

    Attributes:
        answers: how many.
        tokens: in them, by the drafter.
        rounds: target forwards after the prefill, with the drafter. Without any (every answer ended at its first token)
            there is neither τ nor speed: the rates below are 0, and null in `to_json`.
        tau: pooled; `tau_per_response`: mean of the answers' own.
        accept_by_slot: entry k-1 belongs to slot k.
        speedup: ratio of the mean seconds per output token, baseline over drafter.
        seconds_per_token, baseline_seconds_per_token: these means.
        draft_share, target_share: shares of the drafter's decoding time spent on drafting and in target forwards; what
            is left is the check, the cache and the loop.
        seconds_per_round: of its rounds, on average.
        tau_prompt_lookup, speedup_prompt_lookup: the same for prompt look-up.
    """

    answers: int
    tokens: int
    rounds: int
    tau: float
    tau_per_response: float
    accept_by_slot: list[float]
    speedup: float
    seconds_per_token: float
    baseline_seconds_per_token: float
    draft_share: float
    target_share: float
    seconds_per_round: float
    tau_prompt_lookup: float
    speedup_prompt_lookup: float

    def to_json(self) -> dict[str, Any]:
        """As plain values; a rate that was not measured is null."""
        if not self.rounds:
            known = {"answers": self.answers, "tokens": self.tokens, "rounds": 0, "accept_by_slot": []}
            return {**dict.fromkeys(asdict(self)), **known}
        others = ("speedup", "tau_prompt_lookup", "speedup_prompt_lookup")  # they may have had no rounds
        return {**asdict(self), **{name: getattr(self, name) or None for name in others}}


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate`; see the module's docstring.

    Attributes:
        figures: of all answers.
        not_looping: of those with at least 60 % distinct 4-grams; None if there are none.
        taus: τ of every answer; None where the first token already ended it.
        distinct_4grams: share of distinct 4-grams of every answer.
        lossless: greedy: see above; sampled: the test of the distribution does not speak against it.
        distribution: that test; None for greedy answers.
        exact_answers: answers that equal the baseline's token for token.
        ties: empty in a lossless float32 evaluation.
        way: how rounds were run, one line for people.
        decoded, baseline, lookup: the runs themselves, by prompt.
    """

    figures: Figures
    not_looping: Figures | None
    taus: list[float | None]
    distinct_4grams: list[float]
    lossless: bool
    distribution: DistributionTest | None
    exact_answers: int
    ties: list[Tie]
    way: str
    setting: dict[str, Any]
    decoded: list[Decoded] = field(repr=False)
    baseline: list[Decoded] = field(repr=False)
    lookup: list[Decoded] = field(repr=False)

    @property
    def tau(self) -> float:
        return self.figures.tau

    @property
    def speedup(self) -> float:
        return self.figures.speedup

    def to_json(self) -> dict[str, Any]:
        """Everything but the token ids, as plain values."""
        return {
            **self.figures.to_json(),
            "tau_per_prompt": self.taus,
            "lossless": self.lossless,
            "distribution": None if self.distribution is None else asdict(self.distribution),
            "exact_answers": self.exact_answers,
            "ties": [{**asdict(tie), "proved": tie.proved} for tie in self.ties],
            "distinct_4grams_per_prompt": self.distinct_4grams,
            "not_looping": None if self.not_looping is None else self.not_looping.to_json(),
            "setting": self.setting,
        }


def evaluate(
    drafter: Any,
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 256,
    stop_ids: Iterable[int] | None = None,
    block_size: int | None = None,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    rounds: StaticRounds | None = None,
    measured: dict[str, Any] | None = None,
) -> Evaluation:
    """Decodes every prompt with and without `drafter`. No answer goes beyond the target's positions.

    Args:
        drafter: a `DraftModel` on the target's device and in its dtype.
        target: a loaded `Target`.
        prompts: token ids of each prompt, template applied.
        stop_ids: none: the target's own.
        block_size: slots at decoding; none: as trained.
        seed: of the first prompt's random numbers; every prompt has its own.
        progress: called with (prompts done, prompts).
        rounds: how rounds are run, of all three proposers alike; none: as captured graphs where that is possible.
        measured: names of what is measured, for `setting`.

    Raises:
        UserError: no prompts, one that leaves no room in the target's positions, or see `decode`.
    """
    if not prompts:
        raise UserError("there are no prompts to decode", where="evaluation")
    limits = [
        answer_limit(target, prompt, max_new_tokens, f"prompt {number}")
        for number, prompt in enumerate(prompts, start=1)
    ]
    stops = stop_ids_of(target) if stop_ids is None else frozenset(stop_ids)
    proposer = DrafterProposer(drafter, target.head(), block_size)
    rounds = StaticRounds(target) if rounds is None else rounds

    def answer(index: int, by: Proposer, limit: int) -> Decoded:
        return decode(
            target,
            prompts[index],
            by,
            max_new_tokens=limit,
            stop_ids=stops,
            **asdict(sampling),
            seed=seed + index,
            rounds=rounds,
        )

    runs = _in_turns(answer, limits, proposer, progress)
    decoded, baseline, lookup = ([run[column] for run in runs] for column in range(3))
    distinct = [distinct_share(run.tokens) for run in decoded]
    fresh = [run for run, share in zip(runs, distinct, strict=True) if share >= NOT_LOOPING]
    return Evaluation(
        figures=summarise(runs, proposer.block_size),
        not_looping=summarise(fresh, proposer.block_size) if fresh else None,
        taus=[_mean(run.accepted_per_round) if run.accepted_per_round else None for run in decoded],
        distinct_4grams=distinct,
        **vars(_judge(target, prompts, decoded, baseline, sampling, seed)),
        way=rounds.line(),
        setting={
            "block_size": proposer.block_size,
            "max_new_tokens": max_new_tokens,
            **asdict(sampling),
            "seed": seed,
            "stop_ids": sorted(stops),
            **_machine(target),
            **rounds.facts(),
            **(measured or {}),
        },
        decoded=decoded,
        baseline=baseline,
        lookup=lookup,
    )


def _in_turns(
    answer: Callable[[int, Proposer, int], Decoded],
    limits: Sequence[int],
    proposer: DrafterProposer,
    progress: Callable[[int, int], None] | None,
) -> list[tuple[Decoded, Decoded, Decoded]]:
    """(drafter, baseline, prompt look-up) runs of every prompt; drafter and baseline take turns in going first.

    Args:
        answer: decodes a prompt, by its index, with a proposer and up to a limit.
        limits: of the answers, by prompt.
    """
    plain, lookup = GreedyProposer(), PromptLookupProposer(max(2, proposer.block_size))
    proposers: tuple[Proposer, ...] = (proposer, plain, lookup)
    for by in proposers:
        answer(0, by, min(limits[0], WARM_UP_TOKENS))
    runs = []
    for index, limit in enumerate(limits):
        order = (plain, proposer) if index % 2 else (proposer, plain)
        answers = {by: answer(index, by, limit) for by in (*order, lookup)}
        runs.append((answers[proposer], answers[plain], answers[lookup]))
        if progress is not None:
            progress(index + 1, len(limits))
    return runs


@dataclass(frozen=True)
class _Verdict:
    """See the same fields of `Evaluation`."""

    lossless: bool
    distribution: DistributionTest | None
    exact_answers: int
    ties: list[Tie]


def _judge(
    target: Any,
    prompts: Sequence[Sequence[int]],
    decoded: Sequence[Decoded],
    baseline: Sequence[Decoded],
    sampling: Sampling,
    seed: int,
) -> _Verdict:
    """Whether the drafter's answers are the target's own: by their tokens or, sampled, by their distribution."""
    exact = [ours.tokens == base.tokens for ours, base in zip(decoded, baseline, strict=True)]
    if not sampling.greedy:
        test = check_distribution(target, prompts, [run.tokens for run in decoded], sampling, seed)
        return _Verdict(test.passed, test, sum(exact), [])
    ties: list[Tie] = []
    for index, same in enumerate(exact):
        if not same:
            ties += find_ties(target, index, prompts[index], decoded[index].tokens, baseline[index].tokens)
    lossless = all(exact) or (target.dtype != torch.float32 and all(tie.proved for tie in ties))
    return _Verdict(lossless, None, sum(exact), ties)


def _machine(target: Any) -> dict[str, Any]:
    """What the times hang on."""
    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def take_turns(
    target: Any,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    template_options: dict[str, Any] | None = None,
    rounds: StaticRounds | None = None,
) -> list[Prompt]:
    """Every turn of multi-turn prompts as a prompt of its own, the target's own greedy answers between them.

    A turn that leaves no room in the target's positions is the last one of its prompt; `fitting` names it.

    Raises:
        UserError: see `decode`; also turns for a target without a chat template.
    """
    stops = stop_ids_of(target)

    def answer(prompt: Prompt) -> str | None:
        ids = encode_prompts([prompt], target.tokenizer, template_options)[0]
        room = room_for_answer(target, ids, max_new_tokens)
        if not room:
            return None
        said = decode(target, ids, GreedyProposer(), max_new_tokens=room, stop_ids=stops, rounds=rounds).tokens
        return target.tokenizer.decode([token for token in said if token not in stops])

    return ask_in_turn(prompts, answer)


def fitting_prompts(
    target: Any,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    rounds: StaticRounds | None = None,
    template_options: dict[str, Any] | None = None,
) -> tuple[list[list[int]], list[str]]:
    """(token ids of every turn that leaves room for an answer, lines as of `fitting`), for `evaluate`.

    Raises:
        UserError: see `take_turns` and `fitting`.
    """
    turns = take_turns(target, prompts, max_new_tokens, template_options, rounds)
    _, encoded, notes = fitting(target, turns, max_new_tokens, template_options)
    return encoded, notes


def fitting(
    target: Any, prompts: Sequence[Prompt], max_new_tokens: int, template_options: dict[str, Any] | None = None
) -> tuple[list[Prompt], list[list[int]], list[str]]:
    """(prompts that leave room for an answer in the target's positions, their token ids, a line on the others and one
    on short room).

    Raises:
        UserError: none leaves room; see also `encode_prompts`.
    """
    positions = target.geometry.max_position_embeddings
    encoded = encode_prompts(prompts, target.tokenizer, template_options)
    roomy = [
        (prompt, ids, room_for_answer(target, ids, max_new_tokens))
        for prompt, ids in zip(prompts, encoded, strict=True)
    ]
    fit = [(prompt, ids) for prompt, ids, room in roomy if room]
    too_long = [f"{prompt.source} ({len(ids):,} tokens)" for prompt, ids, room in roomy if not room]
    short = [prompt.source for prompt, _, room in roomy if 0 < room < max_new_tokens]
    if not fit:
        raise UserError(
            f"no prompt leaves room for an answer: the target has {positions:,} positions", where=too_long[0]
        )
    notes = []
    if too_long:
        notes.append(f"left out, because the target has {positions:,} positions: {first_of(too_long)}")
    if short:
        notes.append(
            f"room for fewer than {max_new_tokens:,} tokens before the target's {positions:,} positions end: "
            f"{first_of(short)}"
        )
    return [prompt for prompt, _ in fit], [ids for _, ids in fit], notes


def stop_ids_of(target: Any) -> frozenset[int]:
    """End-of-answer tokens of a target."""
    return frozenset(target.stop_ids)


def distinct_share(tokens: Sequence[int]) -> float:
    """Share of distinct 4-grams; 1 for an answer too short to hold one."""
    grams = [tuple(tokens[place : place + 4]) for place in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def summarise(runs: Sequence[tuple[Decoded, Decoded, Decoded]], block_size: int) -> Figures:
    """Figures of (drafter, baseline, prompt look-up) runs; those that ended at their first token have no share in τ."""
    ours, base, lookup = ([run[column] for run in runs] for column in range(3))
    seconds, base_seconds, lookup_seconds = (_seconds_per_token(column) for column in (ours, base, lookup))
    return Figures(
        answers=len(runs),
        tokens=sum(len(run.tokens) for run in ours),
        rounds=sum(run.target_forwards for run in ours),
        tau=_mean([count for run in ours for count in run.accepted_per_round]),
        tau_per_response=_mean([_mean(run.accepted_per_round) for run in ours if run.accepted_per_round]),
        accept_by_slot=accept_by_slot(ours, block_size),
        speedup=_ratio(base_seconds, seconds),
        seconds_per_token=seconds,
        baseline_seconds_per_token=base_seconds,
        draft_share=_ratio(sum(run.draft_seconds for run in ours), sum(run.seconds for run in ours)),
        target_share=_ratio(sum(run.target_seconds for run in ours), sum(run.seconds for run in ours)),
        seconds_per_round=_ratio(sum(run.seconds for run in ours), sum(run.target_forwards for run in ours)),
        tau_prompt_lookup=_mean([count for run in lookup for count in run.accepted_per_round]),
        speedup_prompt_lookup=_ratio(base_seconds, lookup_seconds),
    )


def accept_by_slot(runs: Sequence[Decoded], block_size: int) -> list[float]:
    """[B-1]: of the blocks that drafted slot k, the share in which slots 1..k stood; 0 where none drafted it."""
    drafted = [count for run in runs for count in run.drafted_per_round]
    stood = [count for run in runs for count in run.stood_per_round]
    return [
        _ratio(sum(count >= slot for count in stood), sum(count >= slot for count in drafted))
        for slot in range(1, block_size)
    ]


@torch.inference_mode()
def find_ties(target: Any, index: int, prompt: Sequence[int], ours: list[int], base: list[int]) -> list[Tie]:
    """Every place where `ours` is not the target's choice under teacher forcing, and the place where it leaves `base`.

    An answer that is a mere beginning of the other one parts from it by a missing token, which no rounding explains:
    its gap is infinite.
    """
    prompt = list(prompt)
    device = torch.device(target.device)
    ids = torch.tensor([prompt + ours], device=device)
    logits = target.model(ids, use_cache=False, logits_to_keep=len(ours) + 1).logits[0, :-1]
    chosen = logits.argmax(-1).tolist()
    parting = next((place for place, (a, b) in enumerate(zip(ours, base, strict=False)) if a != b), None)
    if parting is None:
        return [Tie(index, min(len(ours), len(base)), -1, -1, math.inf, 0.0, 0.0)]
    ties = []
    for place, (token, best) in enumerate(zip(ours, chosen, strict=True)):
        other = base[place] if place == parting else best
        if token == best and place != parting:
            continue
        row = logits[place].float()
        top = float(row.max())
        gap = top - min(float(row[token]), float(row[other]))
        stand = len(prompt) + place - 1
        # What plain decoding does there: one token, everything before it in a cache.
        cache = DecodeCache(target.model.config, 1, stand + 1)
        positions = torch.arange(stand + 1, device=device)[None]
        for part in (slice(0, stand), slice(stand, stand + 1))[not stand :]:
            step = target.model(
                ids[:, part],
                position_ids=positions[:, part],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[0, -1]
        noise = float((step.float() - row).abs().max())
        unit = torch.finfo(logits.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(top), 1e-6)))
        ties.append(Tie(index, place, token, other, gap, noise, max(2 * noise, 2 * unit)))
    return ties


def _seconds_per_token(runs: Sequence[Decoded]) -> float:
    """Mean over the answers of the decoding seconds per token that decoding emitted."""
    return _mean([run.seconds / (len(run.tokens) - 1) for run in runs if len(run.tokens) > 1])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0
