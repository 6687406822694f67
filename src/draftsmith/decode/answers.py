"""The target's own answers, written as conversations that a drafter can learn from.

Each prompt's answer is one line of a JSON-lines file that `data.train` takes as it is: `messages` (or `text` for a
target without a chat template), and beside them `prompt_index`, `finish_reason` and `answer_tokens`. Answers are
appended as they finish, so work that stops loses only the answers under way; started again with the same prompts and
options it answers the rest, with the same random numbers as if it had never stopped (one stream per prompt). What the
work is stands in `<output>.meta.json`; an output of other work is refused, and two processes on one output as well.

Prompts can be invented: sampled from the bare user turn of the target's chat template, so the target says what a user
would say. They are kept in `<output>.prompts.jsonl`, resumable in the same way.

Cost: `generate` (batched decoding with a KV cache), and one write per answer.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.conversations import Conversation
from draftsmith.data.template import Tokeniser
from draftsmith.decode.generate import Answer, generate
from draftsmith.decode.prompts import Prompt, UserTurn, bare_user_turn, encode_prompts, has_template
from draftsmith.decode.resumable import open_output
from draftsmith.decode.rounds import room_for_answer, stop_ids_of
from draftsmith.decode.sampling import check_sampling
from draftsmith.errors import UserError, first_of
from draftsmith.observe.events import Listener

# Answers whose text is tokenised again to see whether the tokens come back; all of them would take the decoder's time.
_CHECKED = 500
PROMPT_TOKENS = 256  # what is longer is a text, hardly a question


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are sampled.

    Raises:
        UserError: see `check_sampling`.
    """

    max_new_tokens: int = 512
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int | None = None

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p)

    def sampling(self) -> dict[str, Any]:
        """What decides the answers; the batch size does not."""
        return {key: value for key, value in asdict(self).items() if key != "batch_size"}


@dataclass
class AnswerReport:
    """What was written.

    Attributes:
        output: the file.
        prompts: how many there are.
        found: answers of an earlier start, not repeated.
        finish_reasons: "stop" and "length" → answers of this start.
        empty: answers of this start without text.
        tokens: answer tokens of this start.
        seconds: of this start.
        checked: answers whose text was tokenised again.
        exact: how many of those gave the very tokens that the target wrote.
        too_long: where prompts come from that leave no room for an answer in the target's positions; left out.
    """

    output: Path
    prompts: int
    found: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    empty: int = 0
    tokens: int = 0
    seconds: float = 0.0
    checked: int = 0
    exact: int = 0
    too_long: list[str] = field(default_factory=list)

    @property
    def written(self) -> int:
        """Answers of this start."""
        return sum(self.finish_reasons.values())

    def lines(self) -> list[str]:
        """For people."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        lines = [
            f"{self.output}: {self.found + self.written} answers to {self.prompts} prompts",
            f"this time: {self.written} answers, {self.tokens} tokens in {self.seconds:.1f} s ({rate:.0f} tokens/s)",
        ]
        if self.found:
            lines.append(f"{self.found} were there already")
        if self.finish_reasons["length"]:
            lines.append(f"{self.finish_reasons['length']} stopped at the length limit")
        if self.empty:
            lines.append(f"{self.empty} are empty")
        if self.too_long:
            lines.append(f"left out, because they fill the target's positions: {first_of(self.too_long)}")
        if self.checked:
            lines.append(f"{self.exact} of {self.checked} checked give the same tokens when tokenised again")
        return lines

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        content = {**asdict(self), "output": str(self.output), "finish_reasons": dict(self.finish_reasons)}
        return {**content, "written": self.written}


def write_answers(
    target: Any,
    prompts: Sequence[Prompt],
    output: str | Path,
    options: AnswerOptions,
    *,
    template_options: dict[str, Any] | None = None,
    listener: Listener | None = None,
) -> AnswerReport:
    """Answers every prompt that `output` does not answer yet.

    Args:
        target: a loaded target.
        prompts: at least one.
        template_options: passed to the chat template.
        listener: gets a "step" event with the progress after every answer.

    Raises:
        UserError: no prompts, a template that fails, an output that holds something else, is in use or cannot be
            written, or what `generate` refuses.
    """
    if not prompts:
        raise UserError("no prompts to answer", where=str(output))
    encoded = encode_prompts(prompts, target.tokenizer, template_options)
    facts = {
        "target": identity_of(target),
        "options": options.sampling(),
        "template_options": template_options or {},
        "prompts": len(prompts),
        "prompt_hash": hashlib.sha256(json.dumps(encoded).encode()).hexdigest()[:16],
    }
    report = AnswerReport(Path(output), len(prompts))
    stops = stop_ids_of(target)
    check = _round_trip(target, stops, template_options)
    with open_output(report.output, facts) as lines:
        report.found = len(lines.done)
        rooms = [room_for_answer(target, ids, options.max_new_tokens) for ids in encoded]
        answerable = [index for index, room in enumerate(rooms) if room]
        report.too_long = [prompt.source for prompt, room in zip(prompts, rooms, strict=True) if not room]
        waiting = [index for index in answerable if index not in lines.done]
        progress = _Progress("answer", report.found, len(answerable), listener)
        for answer in generate(
            target,
            [encoded[index] for index in waiting],
            indices=waiting,
            stop_ids=stops,
            batch_size=options.batch_size,
            **options.sampling(),
        ):
            prompt = prompts[answer.index]
            text = text_of(answer, stops, target.tokenizer)
            conversation = _conversation(prompt, text, has_template(target.tokenizer))
            lines.append(
                {
                    **conversation,
                    "prompt_index": answer.index,
                    "finish_reason": answer.finish_reason,
                    "answer_tokens": len(answer.tokens),
                }
            )
            report.finish_reasons[answer.finish_reason] += 1
            report.tokens += len(answer.tokens)
            report.empty += not text.strip()
            if report.checked < _CHECKED and text.strip():
                report.checked += 1
                report.exact += check(conversation, encoded[answer.index] + answer.tokens)
            report.seconds = progress(len(answer.tokens))
    return report


def invent_prompts(
    target: Any,
    count: int,
    output: str | Path,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_new_tokens: int = PROMPT_TOKENS,
    batch_size: int | None = None,
    template_options: dict[str, Any] | None = None,
    listener: Listener | None = None,
) -> list[Prompt]:
    """Lets the target say `count` times what a user would say; keeps it in `<output>.prompts.jsonl`.

    Returns:
        The usable ones in order: ended by the target itself, not empty, and each only once. How many were not, and why,
        is told to the listener in a "notice".

    Raises:
        UserError: no chat template, nothing usable, or as `write_answers`. Where nothing is usable, nothing is kept
            either, so that the same output takes prompts that are invented in another way.
    """
    turn = bare_user_turn(target.tokenizer, template_options)
    options = AnswerOptions(max_new_tokens, temperature, 0, top_p, seed, batch_size)
    facts = {"target": identity_of(target), "options": options.sampling(), "prompts": count, "opening": turn.opening}
    path = Path(f"{output}.prompts.jsonl")
    stops = stop_ids_of(target) | ({turn.stop_id} if turn.stop_id is not None else set())
    with open_output(path, facts) as lines:
        waiting = [index for index in range(count) if index not in lines.done]
        progress = _Progress("prompt", len(lines.done), count, listener)
        for answer in generate(
            target,
            [turn.opening] * len(waiting),
            indices=waiting,
            stop_ids=stops,
            batch_size=batch_size,
            **options.sampling(),
        ):
            text = _said(answer, turn, stops, target.tokenizer)
            lines.append({"prompt": text, "prompt_index": answer.index, "finish_reason": answer.finish_reason})
            progress(len(answer.tokens))
        found = _Invented.read(path)
        if not found.usable:
            lines.drop()
            raise UserError(found.why_none(max_new_tokens), where=str(path), fix=found.remedy(max_new_tokens))
    if listener is not None and found.left_out:
        text = f"{found.left_out} of {found.count} invented prompts are left out: {found.reasons(max_new_tokens)}"
        listener({"time": time.time(), "kind": "notice", "text": text})
    return [Prompt(f"{path}:{index}", text=text) for text, index in found.usable.items()]


class _Progress:
    """Tells a listener how far the work is; calling it counts one more and returns the seconds since the start."""

    def __init__(self, unit: str, done: int, total: int, listener: Listener | None) -> None:
        self._unit, self._found, self._done, self._total = unit, done, done, total
        self._listener = listener
        self._tokens = 0
        self._start = time.monotonic()

    def __call__(self, tokens: int) -> float:
        self._done += 1
        self._tokens += tokens
        seconds = time.monotonic() - self._start
        if self._listener is not None:
            pace = seconds / (self._done - self._found)
            self._listener(
                {
                    "time": time.time(),
                    "kind": "step",
                    "unit": self._unit,
                    "step": self._done,
                    "steps": self._total,
                    "tokens_per_second": self._tokens / max(seconds, 1e-9),
                    "eta_seconds": pace * (self._total - self._done),
                }
            )
        return seconds


def _round_trip(
    target: Any, stops: frozenset[int], template_options: dict[str, Any] | None
) -> Callable[[dict[str, Any], list[int]], bool]:
    """A check whether a conversation, tokenised as training does it, is the very tokens the target read and wrote."""
    tokeniser = Tokeniser(target.tokenizer, template_options=template_options, stop_ids=sorted(stops))

    def check(conversation: dict[str, Any], tokens: list[int]) -> bool:
        result = tokeniser([Conversation("", **conversation)])[0]
        again = result.documents[-1].tokens.tolist() if result.documents else []
        # Training ends a text that the length limit cut with a stop token of its own; what comes before must agree.
        cut = tokens[:-1] if tokens[-1] in stops else tokens
        return again[: len(cut)] == cut

    return check


def text_of(answer: Answer, stops: frozenset[int], tokenizer: Any) -> str:
    """An answer as it was written, special tokens and all, without the token that ended it."""
    tokens = answer.tokens[:-1] if answer.tokens and answer.tokens[-1] in stops else answer.tokens
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _conversation(prompt: Prompt, text: str, chat: bool) -> dict[str, Any]:
    """The keys of a data file's line that say who wrote what."""
    if not chat:
        return {"text": f"{prompt.text}{text}"}
    tools = {"tools": prompt.tools} if prompt.tools else {}
    return {"messages": [*prompt.as_messages(), {"role": "assistant", "content": text}], **tools}


def _said(answer: Answer, turn: UserTurn, stops: frozenset[int], tokenizer: Any) -> str:
    """What the target said in the user's place, without the end of the turn."""
    tokens = answer.tokens[:-1] if answer.tokens[-1] in stops else answer.tokens
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return (text.partition(turn.closing)[0] if turn.closing else text).strip()


@dataclass
class _Invented:
    """What became of invented prompts.

    Attributes:
        count: of all of them.
        usable: text → the number of the first with it, in order.
        cut, empty, repeated: how many are not usable for this reason, the first that holds.
    """

    count: int = 0
    usable: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    empty: int = 0
    repeated: int = 0

    @staticmethod
    def read(path: Path) -> _Invented:
        """Sorts the prompts of a file."""
        lines = path.read_text(encoding="utf-8").split("\n")
        records = sorted((json.loads(line) for line in lines if line.strip()), key=lambda each: each["prompt_index"])
        found = _Invented(len(records))
        for record in records:
            text = record["prompt"]
            if record["finish_reason"] != "stop":
                found.cut += 1
            elif not text:
                found.empty += 1
            elif text in found.usable:
                found.repeated += 1
            else:
                found.usable[text] = record["prompt_index"]
        return found

    @property
    def left_out(self) -> int:
        return self.count - len(self.usable)

    def reasons(self, limit: int) -> str:
        """How many are left out and why; `limit` is of a prompt's tokens."""
        named = ((self.cut, f"cut at {limit} tokens"), (self.empty, "empty"), (self.repeated, "repeated"))
        return ", ".join(f"{number} {what}" for number, what in named if number)

    def why_none(self, limit: int) -> str:
        return f"none of {self.count} invented prompts is usable: {self.reasons(limit)}"

    def remedy(self, limit: int) -> str:
        """What helps where none is usable; a limit as high as it goes was not what cut them."""
        if self.cut and limit < PROMPT_TOKENS:
            return f"raise --max-new-tokens, of which a prompt gets {PROMPT_TOKENS} at most, or give --prompts"
        return "give --prompts"


def identity_of(target: Any) -> dict[str, Any]:
    """What makes a target this one, as far as its configuration tells."""
    return {**asdict(target.geometry), "dtype": str(target.dtype), "tokens": len(target.tokenizer)}
