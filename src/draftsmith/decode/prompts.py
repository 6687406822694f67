"""Prompts: read from a file, and turned into token ids as a server would.

A file whose first line starts with `{` is JSON lines, each `{"prompt": …}` or `{"messages": […]}` (answers at the end
are left out: the target is to write its own), or a line of a public benchmark as it is published, asked in the words of
z-lab's harness (`_BENCHMARKS`): GSM8K, MATH-500, HumanEval, MBPP, MT-Bench. Any other file is plain text, one prompt a
line. Where the tokenizer has a chat template, a plain prompt becomes a user turn; where it has none, the text itself is
continued.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.conversations import ROLES
from draftsmith.errors import UserError, need_file, reason_of

_LAYOUT = 'JSON lines of {"prompt": …} or {"messages": […]}, or plain lines'
_STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# Fields by which a benchmark's lines are known, and what its user says in turn. The wording is that of the harness in
# z-lab's dflash 0.1.0 (benchmark.py): figures compare only where the question is the same to the letter.
_BENCHMARKS: tuple[tuple[frozenset[str], Callable[[dict[str, Any]], list[Any]]], ...] = (
    (frozenset({"question", "answer"}), lambda line: [line["question"] + _STEP_BY_STEP]),
    (frozenset({"problem", "answer"}), lambda line: [line["problem"] + _STEP_BY_STEP]),
    (
        frozenset({"prompt", "entry_point"}),
        lambda line: [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{line['prompt']}\n```"
        ],
    ),
    (frozenset({"turns"}), lambda line: line["turns"]),
    (frozenset({"prompt", "category"}), lambda line: line["prompt"]),
)
# Plain letters, so that no template or tokenizer treats it specially.
_MARKER = "draftsmithMarksTheUserTurnHere"


@dataclass(frozen=True)
class Prompt:
    """What is to be answered: either a text or chat messages that end with a turn that is not the assistant's.

    Attributes:
        source: "file:line", for messages to people.
        later: what the user says next, each after an answer of the target's own (`ask_in_turn`).
    """

    source: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    later: tuple[str, ...] = ()

    def as_messages(self) -> list[dict[str, Any]]:
        """As chat messages; a text becomes a user turn."""
        return self.messages if self.messages is not None else [{"role": "user", "content": self.text}]


@dataclass(frozen=True)
class UserTurn:
    """The frame in which a chat template sets what the user says.

    Attributes:
        opening: token ids of everything before it.
        closing: what follows it, as text.
        stop_id: the special token that `closing` begins with, or None.
    """

    opening: list[int]
    closing: str
    stop_id: int | None


def read_prompts(path: str | Path) -> list[Prompt]:
    """All prompts of a file, in order; blank lines are passed over.

    Raises:
        UserError: the file is missing, a folder, unreadable or empty, or a line is not a prompt.
    """
    path = Path(path)
    need_file(path, "prompt file", f"give a file of prompts: {_LAYOUT}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 at byte {error.start + 1}", where=str(path)) from None
    except OSError as error:
        raise UserError(f"cannot be read: {reason_of(error)}", where=str(path)) from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError("is empty: no prompt in it", where=str(path), fix=_LAYOUT)
    if not numbered[0][1].startswith("{"):
        return [Prompt(f"{path}:{number}", text=line) for number, line in numbered]
    return [_parse(line, f"{path}:{number}") for number, line in numbered]


def without(prompts: Sequence[Prompt], others: Sequence[Prompt]) -> list[Prompt]:
    """The prompts that are not among `others`, whatever form either is written in.

    Raises:
        UserError: all of them are.
    """
    known = {json.dumps(prompt.as_messages(), sort_keys=True) for prompt in others}
    left = [prompt for prompt in prompts if json.dumps(prompt.as_messages(), sort_keys=True) not in known]
    if prompts and not left:
        what = "the only prompt" if len(prompts) == 1 else f"all {len(prompts)} prompts"
        raise UserError(f"leaves out {what}", where="--exclude", fix="give others, or leave it out")
    return left


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, template_options: dict[str, Any] | None = None
) -> list[list[int]]:
    """Token ids of every prompt, with the generation prompt of the chat template behind it.

    Raises:
        UserError: chat messages without a chat template, or a template that fails.
    """
    return [_encode(prompt, tokenizer, template_options or {}) for prompt in prompts]


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Name of a list of prompts: what is asked, in order, wherever it stands."""
    asked = [[prompt.as_messages(), prompt.tools, prompt.later] for prompt in prompts]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def ask_in_turn(prompts: Sequence[Prompt], answer: Callable[[Prompt], str | None]) -> list[Prompt]:
    """Every turn of every prompt as a prompt of its own, in order; what was said before stands in front of it.

    Args:
        answer: the target's own answer to a prompt, asked for where a turn follows; None: it can give none, and the
            turns that follow are not asked.
    """
    asked = []
    for prompt in prompts:
        now = Prompt(prompt.source, prompt.text, prompt.messages, prompt.tools)
        asked.append(now)
        for turn in prompt.later:
            said = answer(now)
            if said is None:
                break
            messages = [*now.as_messages(), {"role": "assistant", "content": said}, {"role": "user", "content": turn}]
            now = Prompt(prompt.source, messages=messages, tools=prompt.tools)
            asked.append(now)
    return asked


def later_turns(prompts: Sequence[Prompt], where: str) -> str:
    """What to tell where only first turns are answered; "" if no prompt has further ones."""
    count = sum(bool(prompt.later) for prompt in prompts)
    turns = sum(len(prompt.later) for prompt in prompts)
    if not count:
        return ""
    return f"{where}: {count} prompts have {turns} further turns, which are not asked here: only the first is answered"


def has_template(tokenizer: Any) -> bool:
    """Whether prompts are set in a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def bare_user_turn(tokenizer: Any, template_options: dict[str, Any] | None = None) -> UserTurn:
    """Where the chat template lets the user begin: sampling from here makes the target invent a prompt.

    Raises:
        UserError: there is no chat template, or it does not show what the user says.
    """
    if not has_template(tokenizer):
        raise UserError(
            "the tokenizer has no chat template, so there is no user turn to invent prompts from",
            where="target",
            fix="give prompts in a file",
        )
    text = _render(
        [{"role": "user", "content": _MARKER}], None, tokenizer, template_options or {}, "chat template", False
    )
    opening, found, closing = text.partition(_MARKER)
    if not found:
        raise UserError("does not show what the user says", where="chat template", fix="give prompts in a file")
    ids = _ids(closing, tokenizer, special=False)
    stop_id = ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None
    return UserTurn(_ids(opening, tokenizer, special=False), closing.strip(), stop_id)


def _encode(prompt: Prompt, tokenizer: Any, options: dict[str, Any]) -> list[int]:
    if not has_template(tokenizer):
        if prompt.messages is not None:
            raise UserError("chat messages, but the tokenizer has no chat template", where=prompt.source)
        return _ids(prompt.text, tokenizer, special=True)
    text = _render(prompt.as_messages(), prompt.tools, tokenizer, options, prompt.source, True)
    return _ids(text, tokenizer, special=False)


def _ids(text: str | None, tokenizer: Any, *, special: bool) -> list[int]:
    """Token ids of a text; whether the target has positions for them is said by who decodes, not by the tokenizer."""
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _render(
    messages: list[dict[str, Any]], tools: Any, tokenizer: Any, options: dict[str, Any], where: str, generation: bool
) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generation, tokenize=False, **options
        )
    except Exception as error:  # a template is a program that somebody else wrote: anything may come out of it
        raise UserError(f"the chat template fails on it: {type(error).__name__}: {error}", where=where) from error


def _parse(line: str, source: str) -> Prompt:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON: {error}", where=source, fix=_LAYOUT) from None
    if not isinstance(content, dict):
        raise UserError(f"a {type(content).__name__}, not a prompt", where=source, fix=_LAYOUT)
    for fields, turns_of in _BENCHMARKS:
        if fields <= content.keys() and not (fields == {"prompt", "category"} and isinstance(content["prompt"], str)):
            return _of_turns(turns_of, content, source)
    messages, text = content.get("messages"), content.get("prompt")
    if messages is not None:
        return Prompt(source, messages=_asked(messages, source), tools=content.get("tools") or None)
    if not isinstance(text, str) or not text.strip():
        raise UserError("has neither a prompt nor messages", where=source, fix=_LAYOUT)
    return Prompt(source, text=text)


def _of_turns(turns_of: Callable[[dict[str, Any]], list[Any]], content: dict[str, Any], source: str) -> Prompt:
    """A benchmark's line as a prompt and the turns that follow it."""
    try:
        first, *later = turns_of(content)
        if not all(isinstance(turn, str) and turn.strip() for turn in (first, *later)):
            raise TypeError("a turn is no text")
    except (TypeError, ValueError) as error:
        raise UserError(f"looks like a benchmark's line, but cannot be asked: {error}", where=source) from None
    return Prompt(source, text=first, later=tuple(later))


def _asked(messages: Any, source: str) -> list[dict[str, Any]]:
    """The messages up to the last turn that is not the assistant's."""
    if not isinstance(messages, list):
        raise UserError(f"messages is a {type(messages).__name__}, not a list", where=source, fix=_LAYOUT)
    for number, message in enumerate(messages, start=1):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            problem = "has no role" if role is None else f"has the unknown role {role!r}"
            raise UserError(f"message {number} {problem}", where=source, fix=f"one of {', '.join(ROLES)}")
    asked = list(messages)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    if not any(message["role"] == "user" for message in asked):
        raise UserError("nobody asks anything: no user turn", where=source)
    return asked
