"""The figures of a set of answers: τ, acceptance by slot, speed-up; what each means is said in `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.decode.rounds import Decoded


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

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"{self.answers} answers, {self.tokens} tokens"]
        if not self.rounds:
            return [*lines, "  no rounds: answers ended at their first token"]
        slots = " ".join(f"{share:.2f}" for share in self.accept_by_slot)
        return [
            *lines,
            f"  τ {self.tau:.3f} pooled, {self.tau_per_response:.3f} per response; "
            f"prompt look-up {self.tau_prompt_lookup:.3f}",
            f"  accepted by slot {slots}",
            f"  speed-up {self.speedup:.2f}x ({1e3 * self.seconds_per_token:.2f} ms a token against "
            f"{1e3 * self.baseline_seconds_per_token:.2f}); a round takes {1e3 * self.seconds_per_round:.2f} ms: "
            f"drafter {self.draft_share:.0%}, target {self.target_share:.0%}, "
            f"rest {1 - self.draft_share - self.target_share:.0%}",
        ]


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
        tau=mean([count for run in ours for count in run.accepted_per_round]),
        tau_per_response=mean([mean(run.accepted_per_round) for run in ours if run.accepted_per_round]),
        accept_by_slot=accept_by_slot(ours, block_size),
        speedup=_ratio(base_seconds, seconds),
        seconds_per_token=seconds,
        baseline_seconds_per_token=base_seconds,
        draft_share=_ratio(sum(run.draft_seconds for run in ours), sum(run.seconds for run in ours)),
        target_share=_ratio(sum(run.target_seconds for run in ours), sum(run.seconds for run in ours)),
        seconds_per_round=_ratio(sum(run.seconds for run in ours), sum(run.target_forwards for run in ours)),
        tau_prompt_lookup=mean([count for run in lookup for count in run.accepted_per_round]),
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


def _seconds_per_token(runs: Sequence[Decoded]) -> float:
    """Mean over the answers of the decoding seconds per token that decoding emitted."""
    return mean([run.seconds / (len(run.tokens) - 1) for run in runs if len(run.tokens) > 1])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0
