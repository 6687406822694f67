"""Batched answers equal those of each prompt alone, whatever the batch, and cost no step for the finished."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tiny_decoding import chi_square_p, plain_answer, random_prompts, tiny_target

from draftsmith.decode import Answer, Sampling, generate
from draftsmith.decode.generate import rows_that_fit
from draftsmith.errors import UserError
from draftsmith.target.forward import Target

STOPS = (3, 7, 9, 13, 20, 31, 35)


def by_index(target: Target, prompts: list[list[int]], **options: Any) -> dict[int, Answer]:
    answers = list(generate(target, prompts, **options))
    assert len({answer.index for answer in answers}) == len(answers)
    return {answer.index: answer for answer in answers}


@pytest.mark.parametrize("kind", ["full", "sliding", "llama"])
def test_greedy_answers_equal_those_without_cache_or_batch(kind: str) -> None:
    target, prompts = tiny_target(kind), random_prompts(14)
    expected = [plain_answer(target, prompt, 30, STOPS) for prompt in prompts]
    assert len({len(answer) for answer in expected}) > 4  # rows end, move and join at different times
    for batch_size in (None, 1, 5):
        answers = by_index(target, prompts, max_new_tokens=30, stop_ids=STOPS, batch_size=batch_size)
        assert [answers[index].tokens for index in range(len(prompts))] == expected
        assert all(
            answer.finish_reason == ("stop" if answer.tokens[-1] in STOPS else "length") for answer in answers.values()
        )


def test_answers_end_where_the_positions_of_the_target_do() -> None:
    target = tiny_target()
    positions = target.geometry.max_position_embeddings
    prompts = [random_prompts(1)[0], [3] * (positions - 10), [3] * (positions - 1)]
    for options in ({}, {"temperature": 1.0}):
        answers = by_index(target, prompts, max_new_tokens=30, **options)
        assert [len(answers[index].tokens) for index in range(3)] == [30, 10, 1]
        assert {answer.finish_reason for answer in answers.values()} == {"length"}
    with pytest.raises(UserError, match=f"prompt 7: {positions} tokens leave no room"):
        generate(target, [[1], [3] * positions], max_new_tokens=3, indices=[2, 7])


def test_long_work_moves_the_columns_to_the_front(monkeypatch: Any) -> None:
    """Generations of rows in a cache with little to spare, prompts of one token among them."""
    # The package exports a function of the module's name, which hides the module.
    monkeypatch.setattr(sys.modules[generate.__module__], "_columns", lambda length: length + 3)
    target = tiny_target("sliding")
    prompts = [*random_prompts(18, longest=12, seed=4), [3], [5]]
    expected = [plain_answer(target, prompt, 14, (7,)) for prompt in prompts]
    answers = by_index(target, prompts, max_new_tokens=14, stop_ids=[7], batch_size=4)
    assert [answers[index].tokens for index in range(len(prompts))] == expected


def test_no_row_is_spent_on_a_finished_sequence() -> None:
    target, prompts = tiny_target(), random_prompts(20, seed=2)
    expected = [plain_answer(target, prompt, 40, STOPS) for prompt in prompts]
    rows: list[int] = []
    # A decoding leaves the hooks of others behind, so look where it cannot: at the embedding.
    original = torch.nn.functional.embedding

    def counted(ids: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if ids.shape[1] == 1:
            rows.append(ids.shape[0])
        return original(ids, *args, **options)

    torch.nn.functional.embedding = counted
    try:
        answers = by_index(target, prompts, max_new_tokens=40, stop_ids=STOPS, batch_size=8)
    finally:
        torch.nn.functional.embedding = original
    # Prompts of two tokens are prefilled in one column as well; they are the only other forwards that narrow.
    prefills = sum(rows) - sum(len(answer.tokens) for answer in answers.values())
    assert 0 <= prefills <= sum(len(prompt) <= 2 for prompt in prompts)
    assert sum(len(answer) for answer in expected) == sum(len(answer.tokens) for answer in answers.values())


def test_sampled_answers_do_not_depend_on_the_batch() -> None:
    target, prompts = tiny_target(), random_prompts(15, seed=3)
    options = {
        "max_new_tokens": 25, "stop_ids": STOPS, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 11,
    }  # fmt: skip
    whole = by_index(target, prompts, batch_size=15, **options)
    assert by_index(target, prompts, batch_size=4, **options) == whole
    # A part of the list, called by its places in the whole, as when interrupted work is taken up again.
    part = by_index(target, prompts[5:9], indices=range(5, 9), batch_size=2, **options)
    assert part == {index: whole[index] for index in range(5, 9)}
    assert by_index(target, prompts, **{**options, "seed": 12}) != whole
    # The same prompt twice gives two answers.
    twice = by_index(target, [prompts[0], prompts[0]], **options)
    assert twice[0].tokens != twice[1].tokens


def test_sampled_tokens_have_the_targets_distribution() -> None:
    target, runs = tiny_target(layers=1, vocab=6), 8000
    settings = {"temperature": 0.9, "top_k": 5, "top_p": 0.9}
    sampling, prompt = Sampling(**settings), [2, 4, 1]
    expected = torch.zeros(6, 6)
    with torch.inference_mode():
        first = sampling.probabilities(target.model(torch.tensor([prompt])).logits[0, -1])
        for a in range(6):
            second = sampling.probabilities(target.model(torch.tensor([[*prompt, a]])).logits[0, -1])
            expected[a] = first[a] * second
    counts = torch.zeros(6, 6)
    for answer in generate(target, [prompt] * runs, max_new_tokens=2, batch_size=1000, seed=3, **settings):
        counts[tuple(answer.tokens)] += 1
    usual = (expected * runs >= 5) | (expected == 0)
    grouped = torch.cat((counts[usual], counts[~usual].sum()[None]))
    wanted = torch.cat((expected[usual], expected[~usual].sum()[None])) * runs
    assert chi_square_p(grouped, wanted) > 1e-4  # a right sampler fails once in ten thousand seeds
    # A little too much of one outcome is noticed.
    doubled = torch.where(wanted == wanted.max(), wanted * 1.15, wanted)
    assert chi_square_p(grouped, doubled * (runs / doubled.sum())) < 1e-4


def test_one_prompt_with_one_token_and_no_prompts() -> None:
    target = tiny_target()
    assert by_index(target, [[5]], max_new_tokens=9)[0].tokens == plain_answer(target, [5], 9, ())
    assert by_index(target, [], max_new_tokens=9) == {}


def test_batch_follows_the_free_memory() -> None:
    target = tiny_target()
    short, long = rows_that_fit(target, 100, True), rows_that_fit(target, 10**9, True)
    assert 1 < short <= 128
    assert long == 1


def test_wrong_requests_are_named_before_anything_runs() -> None:
    target = tiny_target(layers=1)
    with pytest.raises(UserError, match="no tokens"):
        generate(target, [[1], []], max_new_tokens=3)
    with pytest.raises(UserError, match="no room"):
        generate(target, [[1]], max_new_tokens=0)
    with pytest.raises(UserError, match="batch size 0"):
        generate(target, [[1]], max_new_tokens=3, batch_size=0)
