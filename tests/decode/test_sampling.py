"""Sampled tokens have the distribution they should; every check would notice a wrong rule."""

from __future__ import annotations

import pytest
import torch
from tiny_decoding import chi_square_p, tiny_target
from torch import Tensor

from draftsmith import cli_options
from draftsmith.decode import GreedyProposer, Sampling, decode, regenerate
from draftsmith.decode.answers import AnswerOptions
from draftsmith.decode.sampling import LOWEST_TEMPERATURE, accept_drafts, draw, draw_at
from draftsmith.errors import UserError

# A right sampler fails each of these tests once in ten thousand seeds (the seeds are fixed); the wrong rules that are
# tried beside it are at least a million times less likely.
LEVEL = 1e-4


def slow_probabilities(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The shaping rule token by token."""
    weights = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, 0).tolist()
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    if top_k:
        order = order[:top_k]
    total = sum(weights[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass < top_p:
            kept.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(weights))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 4, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.35, 1e-6])
def test_shaping_follows_the_rule(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(5, 13, generator=torch.Generator().manual_seed(0)) * 2
    shaped = Sampling(temperature, top_k, top_p).probabilities(logits)
    expected = torch.tensor([slow_probabilities(row, temperature, top_k, top_p) for row in logits.tolist()])
    torch.testing.assert_close(shaped, expected.float(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("temperature", [-1.0, 1e-40, 9e-6, float("inf"), float("nan")])
@pytest.mark.parametrize("taker", [Sampling, AnswerOptions, regenerate.Sampling])
def test_temperatures_that_cannot_be_sampled_with_are_refused(taker: type, temperature: float) -> None:
    with pytest.raises(UserError, match=r"temperature .* cannot be sampled with \(0 is greedy; else a finite number"):
        taker(temperature=temperature)


def test_the_lowest_temperature_gives_finite_probabilities() -> None:
    assert LOWEST_TEMPERATURE == cli_options.LOWEST_TEMPERATURE
    for temperature in (LOWEST_TEMPERATURE, 1e300):
        probs = Sampling(temperature).probabilities(torch.tensor([-1e6, 2.0, 1e6]))
        assert probs.isfinite().all()
        torch.testing.assert_close(probs.sum(), torch.tensor(1.0))


def test_draws_follow_the_probabilities() -> None:
    probs = torch.tensor([0.5, 0.0, 0.2, 0.02, 0.28])
    generator = torch.Generator().manual_seed(0)
    many = probs.expand(20000, -1)
    for tokens in (draw(many, generator), draw_at(many, torch.rand(20000, dtype=torch.float64, generator=generator))):
        counts = tokens.bincount(minlength=5)
        assert chi_square_p(counts, probs * 20000) > LEVEL
        assert chi_square_p(counts, torch.tensor([0.48, 0.0, 0.22, 0.02, 0.28]) * 20000) < LEVEL


def test_quantiles_never_hit_a_token_without_mass() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    edges = torch.tensor([0.0, 0.25 - 1e-12, 0.25, 0.5, 1 - 1e-16], dtype=torch.float64)
    assert draw_at(probs.expand(5, -1), edges).tolist() == [1, 1, 3, 3, 3]


def one_block(p: Tensor, q: Tensor, generator: torch.Generator, *, corrected: bool = True) -> tuple[int, int]:
    """First two tokens of a block of three slots whose target has rows p [3, V] and drafter rows q [2, V]."""
    drafts = draw(q, generator)
    accepted, own = accept_drafts(drafts, q, p, generator)
    if not corrected and int(accepted) < 2:
        own = draw(p[int(accepted)], generator)
    tokens = [*drafts[: int(accepted)].tolist(), int(own)]
    # What the block leaves open is drawn from the target itself.
    while len(tokens) < 2:
        tokens.append(int(draw(p[len(tokens)], generator)))
    return tokens[0], tokens[1]


def test_rejection_gives_the_targets_distribution() -> None:
    generator = torch.Generator().manual_seed(1)
    p = Sampling(1.0).probabilities(torch.randn(3, 4, generator=generator) * 1.5)
    q = Sampling(1.0, top_k=3).probabilities(torch.randn(2, 4, generator=generator) * 1.5)
    expected = p[0][:, None] * p[1][None, :] * 6000

    def counts(*, corrected: bool) -> Tensor:
        seen = torch.zeros(4, 4)
        for _ in range(6000):
            seen[one_block(p, q, generator, corrected=corrected)] += 1
        return seen

    assert chi_square_p(counts(corrected=True), expected) > LEVEL
    # Drawing the replacement from p instead of from what q left of it is the classic mistake.
    assert chi_square_p(counts(corrected=False), expected) < 1e-10


class FixedProposer:
    """Drafts from distributions of its own that have nothing to do with the target."""

    block_size = 3
    taps: tuple[int, ...] = ()

    def __init__(self, logits: Tensor, shaped: bool = True) -> None:
        self._logits, self._shaped = logits, shaped

    def start(self, max_length: int, device: torch.device, sampling: Sampling, generator: torch.Generator) -> None:
        self._generator = generator
        self._probs = sampling.probabilities(self._logits)

    def observe(self, features_LF: Tensor, start: int) -> None:
        raise AssertionError

    def propose(self, tokens: list[int], width: int) -> tuple[Tensor, Tensor | None]:
        drafts = draw(self._probs[: width - 1], self._generator)
        # "Certain" drafts that were in fact drawn from q distort nothing either: then q is a single point.
        return drafts, self._probs[: width - 1] if self._shaped else None


@pytest.mark.parametrize("shaped", [True, False])
def test_sampled_answers_have_the_targets_distribution(shaped: bool) -> None:
    target = tiny_target(layers=1, vocab=5)
    settings = {"temperature": 0.8, "top_k": 4, "top_p": 0.95}
    sampling = Sampling(**settings)
    prompt, runs = [1, 3], 400
    expected = torch.zeros(5, 5, 5)
    with torch.inference_mode():
        first = sampling.probabilities(target.model(torch.tensor([prompt])).logits[0, -1])
        for a in range(5):
            second = sampling.probabilities(target.model(torch.tensor([[*prompt, a]])).logits[0, -1])
            for b in range(5):
                third = sampling.probabilities(target.model(torch.tensor([[*prompt, a, b]])).logits[0, -1])
                expected[a, b] = first[a] * second[b] * third
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(3))
    counts, stood = torch.zeros(5, 5, 5), 0
    for seed in range(runs):
        answer = decode(target, prompt, FixedProposer(logits, shaped), max_new_tokens=3, seed=seed, **settings)
        counts[tuple(answer.tokens)] += 1
        stood += sum(answer.stood_per_round)
    assert runs * 0.2 < stood < runs * 1.8  # drafts were both accepted and rejected
    # Rare outcomes are taken together: Pearson's test wants some five expected occurrences each.
    rare = (expected * runs < 5) & (expected > 0)
    assert counts[expected == 0].sum() == 0
    usual = (expected * runs >= 5).flatten()
    grouped = torch.cat((counts.flatten()[usual], counts[rare].sum()[None]))
    wanted = torch.cat((expected.flatten()[usual], expected[rare].sum()[None])) * runs
    assert chi_square_p(grouped, wanted) > LEVEL


def test_the_seed_decides_a_sampled_answer() -> None:
    target = tiny_target(layers=2)

    def answer(seed: int) -> list[int]:
        return decode(target, [1, 2, 3], GreedyProposer(), max_new_tokens=20, temperature=1.0, seed=seed).tokens

    assert answer(4) == answer(4)
    assert answer(4) != answer(5)
