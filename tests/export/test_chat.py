"""What a person sees of a drafter at work: the words of the answer, coloured by slot, and figures that add up."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small import random_drafter, small_spec

from draftsmith import cli
from draftsmith.config import TargetConfig
from draftsmith.decode.chat import SLOT_COLOURS, Chat, Painter, converse
from draftsmith.decode.prompts import Prompt, encode_prompts
from draftsmith.decode.speculative import GreedyProposer, decode
from draftsmith.drafter import DraftModel, save_drafter
from draftsmith.target.forward import Target
from draftsmith.target.load import load_target


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(TargetConfig(path=str(tiny_target)), "cpu", torch.float32)


@pytest.fixture(scope="module")
def drafter(target: Target) -> DraftModel:
    sizes = {"vocab_rows": target.geometry.vocab_rows, "target_layers": 6, "taps": (1, 2, 3)}
    return random_drafter(small_spec("full", mask_token_id=2, **sizes))


class Words:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")


def painted(rounds: list[tuple[bytes, int]], terminal: bool = False) -> tuple[str, Painter]:
    """What is on the screen after rounds of (bytes, drafted)."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=60, color_system="truecolor" if terminal else None)
    with Painter(console, Words(), frozenset({0}), 4) as painter:
        for text, drafted in rounds:
            painter(list(text), drafted)
    return screen.getvalue(), painter


def test_the_text_is_whole_whatever_the_tokens_cut() -> None:
    whole = "Größe: 5 € – ok\n  zwei\n\nEnde".encode()
    rounds = [(whole[:1], 0), *((whole[at : at + 3], 2) for at in range(1, len(whole), 3))]
    text, painter = painted(rounds)
    assert text == whole.decode() + "\n"
    assert painter.tau == pytest.approx((len(whole) - 1) / (len(rounds) - 1))
    # The stop token is counted and not shown.
    text, painter = painted([(b"a", 0), (b"bc", 1), (b"d\0", 1)])
    assert text == "abcd\n"
    assert painter.tau == 2.0


def test_colours_are_those_of_the_slots() -> None:
    text, painter = painted([(b"a", 0), (b"bcd", 2), (b"efgh", 3), (b"i", 0)], terminal=True)
    from rich.color import Color

    def code(slot: int) -> str:
        return f"\x1b[{';'.join(Color.parse(SLOT_COLOURS[slot - 1]).get_ansi_codes())}m"

    last = text[text.rindex("a" + code(1)) :]
    for letter, slot in zip("bcefg", (1, 2, 1, 2, 3), strict=True):
        assert f"{code(slot)}{letter}\x1b[0m" in last
    for letter in "adhi":
        assert f"m{letter}\x1b[0m" not in last, "the target's own words are plain"
    assert "slots 0.67 0.67 0.33" in painter.status()


def test_a_conversation_is_what_decoding_says(target: Target, drafter: DraftModel) -> None:
    chat = Chat(target, drafter, max_new_tokens=20, block_size=4)
    rounds: list[tuple[list[int], int]] = []
    first = chat.say("the quick fox", lambda tokens, drafted: rounds.append((tokens, drafted)))
    assert [token for tokens, _ in rounds for token in tokens] == first.tokens
    assert [drafted for _, drafted in rounds[1:]] == first.stood_per_round
    ids = encode_prompts([Prompt("t", text="the quick fox")], target.tokenizer)[0]
    plain = decode(target, ids, GreedyProposer(), max_new_tokens=20, stop_ids=target.stop_ids)
    assert first.tokens == plain.tokens
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    second = chat.say("and then", lambda *_: None)
    whole = encode_prompts([Prompt("t", messages=chat.messages[:3])], target.tokenizer)[0]
    assert second.tokens == decode(target, whole, GreedyProposer(), max_new_tokens=20, stop_ids=target.stop_ids).tokens


def test_commands_of_a_conversation(target: Target, drafter: DraftModel) -> None:
    screen = io.StringIO()
    chat = Chat(target, drafter, max_new_tokens=6)
    lines = iter(["fox", "", "/block 3", "dog", "/block 99", "/new", "a", "/quit", "never"])
    assert converse(chat, target, Console(file=screen, width=200), lambda: next(lines)) == 3
    said = screen.getvalue()
    assert "blocks of 3" in said
    assert "block size 99 is outside 1..8" in said
    assert [message["content"] for message in chat.messages if message["role"] == "user"] == ["a"]
    assert said.count(" tok/s") == 3


def test_ctrl_c_at_the_prompt_loses_no_conversation(target: Target, drafter: DraftModel) -> None:
    screen = io.StringIO()
    chat = Chat(target, drafter, max_new_tokens=6)
    asked = iter(["fox", KeyboardInterrupt(), "dog", EOFError()])

    def ask() -> str:
        said = next(asked)
        if isinstance(said, BaseException):
            raise said
        return said

    assert converse(chat, target, Console(file=screen, width=200), ask) == 2
    assert len(chat.messages) == 4
    assert "/quit or Ctrl-D ends" in screen.getvalue()


def test_what_is_wrong_with_a_command_is_said_and_changes_nothing(
    target: Target, drafter: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    chat = Chat(target, drafter, max_new_tokens=6)
    monkeypatch.setattr(chat, "say", lambda *_: pytest.fail("sent to the model"))
    wrong = [
        "/block abc",
        "/block -3",
        "/block 0",
        "/block ²",
        "/block",
        "/block 3 4",
        "/blockade",
        "/nonsense [/x]",
        "/new x",
    ]
    lines = iter([*wrong, "/quit"])
    assert converse(chat, target, Console(file=screen, width=200), lambda: next(lines)) == 0
    said = screen.getvalue().splitlines()[2:]
    assert len(said) == len(wrong)
    assert sum("not one whole number of slots" in line for line in said) == 4
    assert sum("outside 1..8" in line for line in said) == 2
    assert sum("no such command" in line for line in said) == 3
    assert "/nonsense [/x]: no such command" in screen.getvalue()
    assert chat.block_size == 8


def test_a_text_that_the_template_refuses_is_forgotten(
    target: Target, drafter: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a template says is printed as it stands: brackets are no markup, colons no emoji."""
    template = target.tokenizer.chat_template
    refuses = "{% if 'dog' in messages[-1].content %}{{ raise_exception('[/INST] :smile:') }}{% endif %}"
    monkeypatch.setattr(target.tokenizer, "chat_template", refuses + template)
    screen = io.StringIO()
    chat = Chat(target, drafter, max_new_tokens=6)
    lines = iter(["fox", "dog [/INST]", "fox again [bold]", "/quit"])
    assert converse(chat, target, Console(file=screen, width=200), lambda: next(lines)) == 2
    assert "[/INST] :smile:" in screen.getvalue()
    assert [message["content"] for message in chat.messages[::2]] == ["fox", "fox again [bold]"]


def test_a_stopped_answer_is_kept_as_far_as_it_came(target: Target, drafter: DraftModel) -> None:
    chat = Chat(target, drafter, max_new_tokens=30)

    def interrupt(tokens: list[int], drafted: int) -> None:
        said.extend(tokens)
        if len(said) > 3:
            raise KeyboardInterrupt

    said: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        chat.say("fox", interrupt)
    assert chat.messages[-1] == {"role": "assistant", "content": target.tokenizer.decode(said)}


def test_the_command(
    target: Target, drafter: DraftModel, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    save_drafter(drafter, tmp_path / "drafter")
    arguments = ["chat", str(tmp_path / "drafter"), "--target", str(tiny_target), "--device", "cpu"]
    assert cli.main([*arguments, "--max-new-tokens", "12", "--prompt", "the fox"]) == 0
    ids = encode_prompts([Prompt("t", text="the fox")], target.tokenizer)[0]
    words = target.tokenizer.decode(
        decode(target, ids, GreedyProposer(), max_new_tokens=12, stop_ids=target.stop_ids).tokens
    )
    assert words.split("\n")[0] in capsys.readouterr().out

    assert cli.main([*arguments, "--prompt", "the fox " * 400]) == 2
    out, err = capsys.readouterr()
    assert "outgrown the target's 512 positions" in err.splitlines()[-1]
    assert "outgrown" not in out
    assert cli.main([*arguments, "--top-k", "3"]) == 2
    assert "--top-k would do nothing" in capsys.readouterr().err

    def typed(*_: Any) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", typed)
    assert cli.main(arguments) == 0
    assert cli.main([*arguments, "--block-size", "99"]) == 2
    assert "outside 1..8" in capsys.readouterr().err
