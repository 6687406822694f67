"""Prompts as they are decoded: each turn of a conversation by itself; what leaves no room for an answer is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftsmith.decode.prompts import Prompt, ask_in_turn, encode_prompts
from draftsmith.decode.rounds import room_for_answer, stop_ids_of
from draftsmith.decode.speculative import GreedyProposer, StaticRounds, decode
from draftsmith.errors import UserError, first_of


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
