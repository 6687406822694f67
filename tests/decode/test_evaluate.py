"""Figures of an evaluation against counts by hand, and the proof of losslessness against faults."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoding import plain_answer, random_prompts, tiny_drafter, tiny_target

from draftsmith import cli
from draftsmith.config import TargetConfig
from draftsmith.decode import Decoded, Sampling, evaluate
from draftsmith.decode.figures import accept_by_slot, distinct_share, summarise
from draftsmith.decode.fitting import fitting, fitting_prompts, take_turns
from draftsmith.decode.prompts import Prompt, encode_prompts, prompts_digest, read_prompts
from draftsmith.decode.rounds import answer_limit, room_for_answer
from draftsmith.decode.ties import find_ties
from draftsmith.drafter import DraftModel, save_drafter
from draftsmith.drafter.native import weights_digest
from draftsmith.errors import UserError
from draftsmith.target.forward import Target
from draftsmith.target.load import load_target

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
    asked, sampling = random_prompts(6, vocab=11), Sampling(1.0)
    result = evaluate(drafter, target, asked, max_new_tokens=40, sampling=sampling, stop_ids=())
    assert result.distribution is not None
    assert result.distribution.tokens == 6 * 40
    assert result.lossless is (result.distribution.p_value >= 1e-3) is True
    assert result.setting["temperature"] == 1.0
    # Every prompt has random numbers of its own: the same prompt twice is not the same answer twice.
    twice = evaluate(drafter, target, [[1, 2, 3]] * 2, max_new_tokens=20, sampling=sampling, stop_ids=())
    assert twice.decoded[0].tokens != twice.decoded[1].tokens


def test_without_rounds_there_is_no_tau() -> None:
    """τ is at least 1 wherever it is defined; an answer that its first token ends has none."""
    result = evaluate(tiny_drafter(), tiny_target(), random_prompts(3), max_new_tokens=1)
    content = result.to_json()
    assert (content["answers"], content["tokens"], content["rounds"], content["lossless"]) == (3, 3, 0, True)
    measured = {"tau", "tau_per_response", "speedup", "seconds_per_token", "seconds_per_round", "tau_prompt_lookup"}
    assert {content[name] for name in measured | {"draft_share", "target_share"}} == {None}
    assert content["not_looping"]["tau"] is None
    assert content["tau_per_prompt"] == [None] * 3
    lines = "\n".join(result.lines())
    assert "no rounds: answers ended at their first token" in lines
    assert "speed-up" not in lines


def test_answers_end_where_the_positions_of_the_target_do() -> None:
    target, drafter = tiny_target(), tiny_drafter()
    longest = target.geometry.max_position_embeddings
    prompts = [random_prompts(1)[0], [3] * (longest - 10), [3] * (longest - 1)]
    result = evaluate(drafter, target, prompts, max_new_tokens=30, stop_ids=())
    for runs in (result.decoded, result.baseline, result.lookup):
        assert [len(run.tokens) for run in runs] == [30, 10, 1]
    assert result.lossless
    with pytest.raises(
        UserError, match="prompt 2: 512 tokens leave no room for an answer: the target has 512 positions"
    ):
        evaluate(drafter, target, [[1], [3] * longest])


def test_prompts_without_room_are_left_out_by_name(tiny_target: Path) -> None:
    target = load_target(TargetConfig(path=str(tiny_target)), "cpu", torch.float32)
    length = len(encode_prompts([Prompt("x", text="the fox " * 100)], target.tokenizer)[0])
    prompts = [
        Prompt("p:1", text="the fox"),
        Prompt("p:2", text="the fox " * 600),
        Prompt("p:3", text="the fox " * 100),
    ]
    fit, encoded, notes = fitting(target, prompts, 513 - length)
    assert [prompt.source for prompt in fit] == ["p:1", "p:3"]
    assert encoded == encode_prompts(fit, target.tokenizer)
    assert notes[0].startswith("left out, because the target has 512 positions: p:2 (")
    assert notes[1].endswith("positions end: p:3")
    assert fitting(target, prompts[:1], 20) == (prompts[:1], encoded[:1], [])
    with pytest.raises(UserError, match="no prompt leaves room for an answer"):
        fitting(target, prompts[1:2], 20)
    # A conversation that outgrows the positions is asked as far as it goes.
    talk = Prompt("p:4", text="the fox", later=("and then", "the fox " * 600, "never asked"))
    turns = take_turns(target, [talk], 8)
    assert len(turns) == 3
    fit, encoded, notes = fitting(target, turns, 8)
    assert len(fit) == 2
    assert fitting_prompts(target, [talk], 8) == (encoded, notes)


def test_room_for_an_answer_ends_with_the_positions() -> None:
    target = tiny_target()
    longest = target.geometry.max_position_embeddings
    rooms = [room_for_answer(target, [1] * length, 10) for length in (1, longest - 10, longest - 9, longest - 1)]
    assert rooms == [10, 10, 9, 1]
    for length in (longest, longest + 1):
        assert room_for_answer(target, [1] * length, 10) == 0
        with pytest.raises(UserError, match="leave no room for an answer: the target has 512 positions"):
            answer_limit(target, [1] * length, 10, "prompt")
    for prompt, limit, fault in (([], 10, "holds no tokens"), ([1], 0, "max_new_tokens 0 leaves no room")):
        with pytest.raises(UserError, match=fault):
            answer_limit(target, prompt, limit, "prompt")


def test_the_command_names_what_it_measured(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_target(TargetConfig(path=str(tiny_target)), "cpu", torch.float32)
    shape = {"vocab_rows": target.geometry.vocab_rows, "target_layers": 6, "mask_token_id": 2}
    model = DraftModel(replace(tiny_drafter().spec, **shape))
    save_drafter(model, tmp_path / "drafter")
    (tmp_path / "p.jsonl").write_text('{"prompt": "the fox"}\n{"prompt": "' + "the fox " * 600 + '"}\n')
    arguments = [
        "eval",
        str(tmp_path / "drafter"),
        "--target",
        str(tiny_target),
        "--prompts",
        str(tmp_path / "p.jsonl"),
    ]
    arguments += ["--device", "cpu", "--max-new-tokens", "6"]
    assert cli.main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert content["answers"] == 1
    assert "p.jsonl:2" in content["notices"][0]
    assert content["notices"][0] in err
    assert content["setting"]["drafter"] == weights_digest(model.state_dict())
    assert content["setting"]["target"] == str(tiny_target)
    assert content["setting"]["prompts"] == prompts_digest(read_prompts(tmp_path / "p.jsonl"))
    assert content["setting"]["prompts"] != prompts_digest(read_prompts(tmp_path / "p.jsonl")[:1])
    assert cli.main([*arguments, "--top-k", "3"]) == 2
    assert "without --temperature nothing is sampled: --top-k would do nothing" in capsys.readouterr().err


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
