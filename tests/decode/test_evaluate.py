"""Figures of an evaluation against counts by hand, and the proof of losslessness against faults."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_decoding import plain_answer, random_prompts, tiny_drafter, tiny_target

from draftsmith.decode import Decoded, evaluate
from draftsmith.decode.evaluate import accept_by_slot, distinct_share, find_ties, summarise
from draftsmith.errors import UserError
from draftsmith.target.forward import Target

STOPS = (7, 9)


def run(accepted: list[int], drafted: list[int], stood: list[int], seconds: float) -> Decoded:
    return Decoded(
        list(range(1 + sum(accepted))),
        "length",
        accepted,
        drafted,
        stood,
        seconds=seconds,
        draft_seconds=seconds / 4,
        target_seconds=seconds / 2,
    )


def test_figures_are_what_the_rounds_say() -> None:
    ours = [run([3, 1, 4], [3, 3, 3], [2, 0, 3], 4.0), run([2], [3], [1], 1.0), Decoded([7], "stop")]
    base = [run([1] * 8, [0] * 8, [0] * 8, 16.0), run([1, 1], [0, 0], [0, 0], 2.0), Decoded([7], "stop")]
    lookup = [
        run([1, 1, 2, 4], [0, 0, 3, 3], [0, 0, 1, 3], 8.0),
        run([1, 1], [0, 3], [0, 0], 2.0),
        Decoded([7], "stop"),
    ]
    figures = summarise(list(zip(ours, base, lookup, strict=True)), 4)
    assert (figures.answers, figures.tokens) == (3, 9 + 3 + 1)
    assert figures.tau == pytest.approx((3 + 1 + 4 + 2) / 4)
    assert figures.tau_per_response == pytest.approx((8 / 3 + 2) / 2)
    assert figures.accept_by_slot == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert figures.tau == pytest.approx(1 + sum(figures.accept_by_slot))
    assert figures.seconds_per_token == pytest.approx((4 / 8 + 1 / 2) / 2)
    assert figures.speedup == pytest.approx(((16 / 8 + 2 / 2) / 2) / ((4 / 8 + 1 / 2) / 2))
    assert figures.draft_share == pytest.approx(1 / 4)
    assert figures.target_share == pytest.approx(1 / 2)
    assert figures.seconds_per_round == pytest.approx(5 / 4)
    assert figures.tau_prompt_lookup == pytest.approx((1 + 1 + 2 + 4 + 1 + 1) / 6)


def test_slots_that_were_not_drafted_do_not_count() -> None:
    assert accept_by_slot([run([3, 2], [2, 1], [2, 1], 1.0)], 5) == [1.0, 1.0, 0.0, 0.0]


def test_distinct_share() -> None:
    assert distinct_share([1, 2, 3]) == 1.0
    assert distinct_share([1, 2, 3, 4, 5]) == 1.0
    assert distinct_share([1, 1, 1, 1, 1, 1, 1]) == 1 / 4
    assert distinct_share([1, 2] * 10) == 2 / 17


def test_evaluation_of_a_float32_drafter() -> None:
    target, drafter = tiny_target(vocab=11), tiny_drafter(vocab=11)
    prompts, seen = random_prompts(6, seed=1, vocab=11), []
    result = evaluate(drafter, target, prompts, max_new_tokens=30, progress=lambda done, of: seen.append((done, of)))
    assert result.lossless is True
    assert (result.exact_answers, result.ties) == (6, [])
    for prompt, ours, base, lookup in zip(prompts, result.decoded, result.baseline, result.lookup, strict=True):
        assert ours.tokens == base.tokens == lookup.tokens == plain_answer(target, prompt, 30, STOPS)
        assert base.accepted_per_round == [1] * (len(base.tokens) - 1)
    assert seen == [(done, 6) for done in range(1, 7)]
    assert 1 <= result.tau <= 6
    assert result.speedup > 0
    content = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert content["tau"] == result.tau
    assert content["lossless"] is True
    assert len(content["tau_per_prompt"]) == len(content["distinct_4grams_per_prompt"]) == 6
    fresh = sum(share >= 0.6 for share in result.distinct_4grams)
    assert (result.not_looping.answers if result.not_looping else 0) == fresh


def test_sampled_evaluation_tests_the_distribution() -> None:
    target, drafter = tiny_target(vocab=11), tiny_drafter(vocab=11)
    result = evaluate(drafter, target, random_prompts(6, vocab=11), max_new_tokens=40, temperature=1.0, stop_ids=())
    assert result.distribution is not None
    assert result.distribution.tokens == 6 * 40
    assert result.lossless is (result.distribution.p_value >= 1e-3) is True
    assert result.setting["temperature"] == 1.0
    # Every prompt has random numbers of its own: the same prompt twice is not the same answer twice.
    twice = evaluate(drafter, target, [[1, 2, 3]] * 2, max_new_tokens=20, temperature=1.0, stop_ids=())
    assert twice.decoded[0].tokens != twice.decoded[1].tokens


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(UserError, match="no prompts"):
        evaluate(tiny_drafter(), tiny_target(), [])


def test_a_lossy_loop_is_found_out(monkeypatch: Any) -> None:
    """A fault in the check (everything is accepted) must not pass as lossless, in float32 or as a bfloat16 tie."""
    from draftsmith.decode import speculative

    right = speculative.check_block

    def careless(drafts: Any, draft_probs: Any, logits: Any, *others: Any) -> tuple[list[int], int]:
        emitted, _ = right(drafts, draft_probs, logits, *others)
        return ([*drafts.tolist(), int(logits[-1].argmax())], len(drafts)) if len(drafts) else (emitted, 0)

    monkeypatch.setattr(speculative, "check_block", careless)
    for dtype in (torch.float32, torch.bfloat16):
        target, drafter = tiny_target(), tiny_drafter().to(dtype)
        target.model.to(dtype)
        result = evaluate(drafter, target, random_prompts(3), max_new_tokens=20)
        assert result.lossless is False
        assert any(not tie.proved for tie in result.ties)


def nearly_tied_target() -> Target:
    """A bfloat16 target whose tokens come in pairs with almost the same logits: its argmax hangs on rounding."""
    target = tiny_target(seed=4)
    with torch.no_grad():
        rows = target.model.get_input_embeddings().weight
        rows[1::2] = rows[0:-1:2] * (1 + 1e-3)
    target.model.to(torch.bfloat16)
    return target


def test_near_ties_in_bfloat16_are_proved_and_listed() -> None:
    target = nearly_tied_target()
    drafter = tiny_drafter().to(torch.bfloat16)
    prompts = random_prompts(5, seed=6)
    result = evaluate(drafter, target, prompts, max_new_tokens=30, stop_ids=())
    assert result.lossless is True
    assert result.exact_answers == 5 or result.ties
    assert all(tie.proved and math.isfinite(tie.gap) for tie in result.ties)

    # The same prompt with a partner token put in is a tie; with a far token it is not.
    prompt, answer = prompts[0], result.baseline[0].tokens
    place = 3
    partner = [*answer]
    partner[place] = answer[place] ^ 1
    ties = find_ties(target, 0, prompt, partner[: place + 1], answer[: place + 1])
    assert [tie.position for tie in ties if not tie.proved] == []
    assert any((tie.position, tie.token, tie.best) == (place, partner[place], answer[place]) for tie in ties)
    far = replace(result.decoded[0]).tokens[: place + 1]
    far[place] = (answer[place] + 13) % 40
    assert any(tie.position == place and not tie.proved for tie in find_ties(target, 0, prompt, far, answer))


def test_a_missing_token_is_no_tie() -> None:
    target, prompt = tiny_target(), [1, 2, 3]
    answer = plain_answer(target, prompt, 8, ())
    (tie,) = find_ties(target, 0, prompt, answer[:5], answer)
    assert tie.gap == math.inf
    assert not tie.proved
