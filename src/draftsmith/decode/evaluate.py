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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from draftsmith.decode.distribution import DistributionTest, check_distribution
from draftsmith.decode.figures import Figures, distinct_share, mean, summarise
from draftsmith.decode.rounds import answer_limit, stop_ids_of
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
from draftsmith.decode.ties import Tie, find_ties
from draftsmith.errors import UserError

NOT_LOOPING = 0.6
WARM_UP_TOKENS = 16
GREEDY = Sampling()


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

    def lines(self) -> list[str]:
        """What a person wants to know first: τ and what it is worth, then whether anything changed."""
        lines = []
        for name, figures in (("all answers", self.figures), ("not looping", self.not_looping)):
            first, *more = ["none"] if figures is None else figures.lines()
            lines += [f"{name}: {first}", *more]
        verdict = f"lossless: {'yes' if self.lossless else 'NO'}"
        if self.distribution is not None:
            tokens, p_value = self.distribution.tokens, self.distribution.p_value
            verdict += f" (sampled; {tokens} tokens have the target's own distribution, p = {p_value:.3g})"
        else:
            proved = sum(tie.proved for tie in self.ties)
            ties = f"; {proved} of {len(self.ties)} differences are proved argmax ties" if self.ties else ""
            verdict += f" ({self.exact_answers} of {len(self.taus)} answers equal token for token{ties})"
        return [*lines, verdict, self.way]

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
        taus=[mean(run.accepted_per_round) if run.accepted_per_round else None for run in decoded],
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
