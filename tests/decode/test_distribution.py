"""The test of sampled answers: right answers pass, every wrong way of drawing them is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_decoding import random_prompts, tiny_drafter, tiny_target
from torch import Tensor

from draftsmith.decode import DrafterProposer, decode, rounds, sampling, speculative
from draftsmith.decode.distribution import DistributionTest, check_distribution, uniform_p
from draftsmith.decode.sampling import Sampling, draw

VOCAB = 11


def outcome_of(shaping: Sampling, answers: int = 24, tokens: int = 40, seed: int = 0) -> DistributionTest:
    """The p-value of answers decoded with a drafter as things stand."""
    target, drafter = tiny_target(vocab=VOCAB), tiny_drafter(vocab=VOCAB)
    prompts = random_prompts(answers, seed=seed, vocab=VOCAB)
    proposer = DrafterProposer(drafter, target.head())
    said = [
        decode(
            target, prompt, proposer, max_new_tokens=tokens, temperature=shaping.temperature, top_k=shaping.top_k,
            top_p=shaping.top_p, seed=1000 * seed + number,
        ).tokens
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip
    return check_distribution(target, prompts, said, shaping)


@pytest.mark.parametrize("shaping", [Sampling(1.0), Sampling(0.6), Sampling(1.5, top_k=5, top_p=0.9)])
def test_right_answers_pass(shaping: Sampling) -> None:
    result = outcome_of(shaping)
    assert result.passed
    assert result.tokens == 24 * 40
    assert result.impossible == 0


def test_p_values_of_right_answers_are_spread_out() -> None:
    values = [outcome_of(Sampling(1.0), answers=4, seed=seed).p_value for seed in range(8)]
    assert sum(value < 0.5 for value in values) in range(1, 8)
    assert min(values) > 1e-3


def accept_all(drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: Any) -> tuple[Tensor, Tensor]:
    return torch.tensor(drafts.numel()), draw(target_probs[-1], generator)


def reject_without_remainder(
    drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: Any
) -> tuple[Tensor, Tensor]:
    """The rejected slot drawn from p itself instead of max(0, p - q)."""
    accepted, _ = sampling.accept_drafts(drafts, draft_probs, target_probs, generator)
    return accepted, draw(target_probs[accepted], generator)


def accept_easily(drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: Any) -> tuple[Tensor, Tensor]:
    return sampling.accept_drafts(drafts, draft_probs * 0.5, target_probs, generator)


@pytest.mark.parametrize("rule", [accept_all, reject_without_remainder, accept_easily])
def test_wrong_rules_are_found(rule: Callable[..., tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "accept_drafts", rule)
    result = outcome_of(Sampling(1.0), answers=40)
    assert result.p_value < 1e-4
    assert not result.passed


def test_another_temperature_or_an_impossible_token_is_found() -> None:
    target, prompts = tiny_target(vocab=VOCAB), random_prompts(20, vocab=VOCAB)
    said = [
        decode(target, p, speculative.GreedyProposer(), max_new_tokens=40, temperature=1.0, seed=n).tokens
        for n, p in enumerate(prompts)
    ]
    assert check_distribution(target, prompts, said, Sampling(1.0)).passed
    assert check_distribution(target, prompts, said, Sampling(0.7)).p_value < 1e-6
    result = check_distribution(target, prompts, said, Sampling(1.0, top_k=1))
    assert (result.p_value, result.passed) == (0.0, False)
    assert result.impossible > 100


def test_the_kolmogorov_smirnov_p_value() -> None:
    """Against the textbook's table for large n: 5 % at 1.358/√n, 1 % at 1.628/√n."""
    count = 10_000
    even = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    assert uniform_p(even) == 1.0
    for share, level in ((1.358, 0.05), (1.628, 0.01)):
        shifted = (even * (1 - share / count**0.5)).clamp(0, 1)  # the largest distance is at the right end
        assert uniform_p(shifted) == pytest.approx(level, rel=0.06)
