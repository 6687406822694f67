"""Conversations answered anew by the target: what people asked stays, what was answered is the target's own.

A conversation is cut into questions (`dialogue`) and answered turn by turn, each answer standing in the history of the
next.

Two files grow, each line in one write: OUTPUT holds finished conversations, as `data.train` takes them; the answers of
unfinished ones wait in OUTPUT.turns.jsonl. Every answer is on disk before the next request of its conversation is sent,
so a process that is killed loses only what is under way, and a later start asks nothing that was answered before. What
the work is (questions, model, sampling) stands in OUTPUT.meta.json; another work in the same file is refused.

Conversations without an answer (given up by the server) are listed in OUTPUT.failed.jsonl; a later start tries them
again. Many failures in a row end the work: the server has gone, and nothing is lost by waiting for it. Whatever ends
the work, requests under way are waited for and kept, unless the process is killed or interrupted.

Cost: one request per question. Memory: the conversations under way, one number per finished one, and the answers of
unfinished ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith.config import DataSource, what_json_lacks
from draftsmith.data.conversations import read_conversations
from draftsmith.data.places import find_files
from draftsmith.data.tables import hash_file
from draftsmith.decode.answers import text_of
from draftsmith.decode.calls import find_call_opening
from draftsmith.decode.dialogue import Dialogue, is_empty, make_dialogue
from draftsmith.decode.generate import generate
from draftsmith.decode.prompts import Prompt, encode_prompts, has_template
from draftsmith.decode.resumable import OutputLines, open_output, unwritable
from draftsmith.decode.rounds import answer_limit, stop_ids_of
from draftsmith.decode.sampling import check_sampling
from draftsmith.decode.server import ChatServer, GivenUpError, Reply
from draftsmith.errors import UserError
from draftsmith.observe.events import Listener

MANY_FAILURES = 20
_ROUND = 4096  # conversations that the target in this process answers at one time
_TURNS = 1000  # no conversation has more; numbers random streams


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled; recorded with them.

    Attributes:
        extra: more keys of the request, e.g. {"repetition_penalty": 1.05}; only for servers.

    Raises:
        UserError: see `check_sampling`.
    """

    max_tokens: int = 4096
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    template_options: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p)


@dataclass
class RegenerateReport:
    """What was done.

    Attributes:
        output: the file.
        conversations: that have a question, as far as they were asked for.
        skipped: read and not to be answered (plain text, images, nobody asks).
        found: finished by an earlier start.
        found_turns: answers of unfinished conversations that an earlier start left.
        written: conversations finished by this start.
        cut_short: of those, that end before their last question.
        finish_reasons: of the answers of this start.
        empty: answers of this start without text.
        tokens: of the answers whose count can be believed.
        uncounted: answers whose count cannot.
        failed: conversations without an answer.
        requests, again: sent, and how many of them were repetitions.
        faults: what made repetitions necessary.
        seconds: of this start.
    """

    output: Path
    conversations: int = 0
    skipped: int = 0
    found: int = 0
    found_turns: int = 0
    written: int = 0
    cut_short: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    empty: int = 0
    tokens: int = 0
    uncounted: int = 0
    failed: int = 0
    requests: int = 0
    again: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """For people."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        answers = sum(self.finish_reasons.values())
        lines = [
            f"{self.output}: {self.found + self.written:,} of {self.conversations:,} conversations answered",
            f"this time: {self.written:,} conversations, {answers:,} answers, {self.tokens:,} tokens in "
            f"{self.seconds:.1f} s ({rate:,.0f} tokens/s)",
        ]
        if self.requests:
            per = self.requests / max(1, answers)
            lines.append(f"cost: {self.requests:,} requests, {self.again:,} of them repeated ({per:.2f} for an answer)")
        if self.faults:
            named = ", ".join(f"{name} {number:,}" for name, number in sorted(self.faults.items()))
            lines.append(f"repeated because of: {named}")
        if self.found or self.found_turns:
            lines.append(f"{self.found:,} conversations and {self.found_turns:,} more answers were there already")
        reasons = ", ".join(f"{name} {number:,}" for name, number in self.finish_reasons.most_common())
        if reasons:
            lines.append(f"answers ended by: {reasons}")
        for number, what in (
            (self.cut_short, "conversations end before their last question (cut off, a tool call, an empty answer)"),
            (self.empty, "answers are empty"),
            (self.uncounted, "answers have no token count that can be believed"),
            (self.skipped, "conversations were skipped: plain text, images, or nobody asks"),
        ):
            if number:
                lines.append(f"{number:,} {what}")
        if self.failed:
            lines.append(
                f"NO: {self.failed:,} conversations have no answer: {self.output}.failed.jsonl; the same command tries "
                "them again"
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {**asdict(self), "output": str(self.output), "finish_reasons": dict(self.finish_reasons)}


def regenerate_from_server(
    entries: Sequence[str | Path | DataSource],
    output: str | Path,
    server: ChatServer,
    sampling: Sampling,
    *,
    limit: int | None = None,
    listener: Listener | None = None,
) -> RegenerateReport:
    """Asks a server for every answer that `output` does not hold yet.

    Raises:
        UserError: the data cannot be read, nothing in it asks, the output holds something else, is in use or cannot be
            written, or the server refuses everything or has gone.
    """
    return asyncio.run(_from_server(entries, Path(output), server, sampling, limit, listener))


async def _from_server(
    entries: Sequence[str | Path | DataSource],
    output: Path,
    server: ChatServer,
    sampling: Sampling,
    limit: int | None,
    listener: Listener | None,
) -> RegenerateReport:
    async with server:
        # The same model may be served elsewhere tomorrow: the address is noted, and decides nothing.
        facts, noted = {"model": server.model}, {"server": server.url}
        with _Work(entries, output, sampling, facts, server.model, limit, listener, noted) as work:
            work.traffic = lambda: (server.traffic.requests, server.traffic.again)
            waiting = work.waiting()
            try:
                await _together([_talk(waiting, work, server, sampling) for _ in range(server.throttle.most)], server)
            finally:
                traffic, report = server.traffic, work.report
                report.requests, report.again, report.faults = traffic.requests, traffic.again, dict(traffic.faults)
    return work.report


async def _talk(waiting: Iterator[Dialogue], work: _Work, server: ChatServer, sampling: Sampling) -> None:
    """Answers one conversation after the other; the next is read only when this one is finished."""
    for dialogue in waiting:
        try:
            while not dialogue.ended:
                request = _request(dialogue, sampling)
                fault = what_json_lacks(request)
                if fault:
                    raise GivenUpError(f"cannot be sent as JSON: {fault}", 0)
                reply = await server.answer(request)
                work.answered(dialogue, _as_answer(reply))
                if server.stopping and not dialogue.ended:
                    return  # what it has is on disk
            work.finished(dialogue)
        except GivenUpError as error:
            if not server.stopping:
                work.failed(dialogue, str(error), error.attempts)
        if server.stopping:
            return


async def _together(talks: list[Coroutine[Any, Any, None]], server: ChatServer) -> None:
    """Runs all until they end. After the first failure requests under way come to their end, then it is raised."""

    async def one(talk: Coroutine[Any, Any, None]) -> None:
        try:
            await talk
        except Exception:
            server.stopping = True
            raise

    results = await asyncio.gather(*map(one, talks), return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        raise failures[0]


def _request(dialogue: Dialogue, sampling: Sampling) -> dict[str, Any]:
    request: dict[str, Any] = {
        "messages": [_for_server(message) for message in dialogue.messages],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": stream_number(sampling.seed, dialogue) % 2**31,
    }
    if sampling.top_k:
        request["top_k"] = sampling.top_k
    if sampling.template_options:
        request["chat_template_kwargs"] = sampling.template_options
    if dialogue.tools:
        request["tools"] = dialogue.tools
    return {**request, **sampling.extra}


def stream_number(seed: int, dialogue: Dialogue) -> int:
    """A random stream for every answer, the same whenever it is asked for."""
    name = f"{seed} {dialogue.index} {len(dialogue.answers)}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")


def _for_server(message: dict[str, Any]) -> dict[str, Any]:
    """The message as the API wants it: arguments of tool calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        calls.append({"type": "function", "id": "call", **call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls}


def _as_answer(reply: Reply) -> dict[str, Any]:
    """What is kept of a reply: the message without what is empty, its reason and its count."""
    kept = ("content", "reasoning_content", "reasoning", "tool_calls")
    said = {key: reply.message[key] for key in kept if reply.message.get(key)}
    if "reasoning" in said and "reasoning_content" not in said:
        said["reasoning_content"] = said.pop("reasoning")
    said.pop("reasoning", None)
    message = {"role": "assistant", "content": None if "tool_calls" in said else "", **said}
    return {"message": message, "finish_reason": reply.finish_reason, "tokens": reply.tokens}


class _Work:
    """The files of one work, and the count of what is done. Used as a context: it holds the lock of the output."""

    def __init__(
        self,
        entries: Sequence[str | Path | DataSource],
        output: Path,
        sampling: Sampling,
        facts: dict[str, Any],
        model: str,
        limit: int | None,
        listener: Listener | None,
        noted: dict[str, Any] | None = None,
    ) -> None:
        self.report = RegenerateReport(output)
        self._noted = noted
        self.traffic: Callable[[], tuple[int, int]] | None = None
        self._entries, self._limit, self._model = entries, limit, model
        self._listener = listener
        self._turns: dict[int, dict[int, dict[str, Any]]] = {}
        self._in_a_row = 0
        self._began = time.monotonic()
        files = find_files(entries)
        self._facts = {
            **facts,
            "sampling": asdict(sampling),
            "questions": [hash_file(file.path, file.name) for file in files],
            "layouts": [[file.entry.layout, file.entry.columns] for file in files],
        }
        self._failed_path = Path(f"{output}.failed.jsonl")

    def __enter__(self) -> _Work:
        output = self.report.output
        self._contexts = [open_output(output, self._facts, noted=self._noted)]
        self._lines: OutputLines = self._contexts[0].__enter__()
        turns = open_output(Path(f"{output}.turns.jsonl"), self._facts, self._found_turn)
        try:
            self._turn_lines: OutputLines = turns.__enter__()
            self._contexts.append(turns)
            self._count()
            self._failed_path.unlink(missing_ok=True)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.report.seconds = time.monotonic() - self._began
        for context in reversed(self._contexts):
            context.__exit__(None, None, None)

    def _found_turn(self, record: dict[str, Any]) -> None:
        if record["prompt_index"] in self._lines.done:
            return
        answer = {key: record[key] for key in ("message", "finish_reason", "tokens")}
        self._turns.setdefault(record["prompt_index"], {})[record["turn"]] = answer

    def _dialogues(self) -> Iterator[Dialogue | None]:
        made = (make_dialogue(index, c) for index, c in enumerate(read_conversations(self._entries)))
        return islice(made, self._limit)

    def _count(self) -> None:
        for dialogue in self._dialogues():
            if dialogue is None:
                self.report.skipped += 1
            else:
                self.report.conversations += 1
                self.report.found += dialogue.index in self._lines.done
        if not self.report.conversations:
            raise UserError("nobody asks anything in it", where=", ".join(map(str, self._entries)))
        self.report.found_turns = sum(map(len, self._turns.values()))

    def waiting(self) -> Iterator[Dialogue]:
        """Conversations that are not finished, with the answers that they have; read as they are asked for."""
        for dialogue in self._dialogues():
            if dialogue is None or dialogue.index in self._lines.done:
                continue
            there = self._turns.pop(dialogue.index, {})
            for turn in range(len(there)):
                dialogue.answers.append(there[turn])
            yield dialogue

    def answered(self, dialogue: Dialogue, answer: dict[str, Any]) -> None:
        """Takes an answer; one that is not the last of its conversation goes to disk by itself."""
        dialogue.answers.append(answer)
        if not dialogue.ended:
            turn = len(dialogue.answers) - 1
            self._turn_lines.append({"prompt_index": dialogue.index, "turn": turn, **answer})
        report = self.report
        report.finish_reasons[answer["finish_reason"]] += 1
        report.empty += is_empty(answer)
        report.uncounted += answer["tokens"] is None
        report.tokens += answer["tokens"] or 0
        self._in_a_row = 0
        if not dialogue.ended:
            self._tell()

    def finished(self, dialogue: Dialogue) -> None:
        """Writes a conversation that has all its answers."""
        self._lines.append(dialogue.record(self._model))
        self.report.written += 1
        self.report.cut_short += len(dialogue.answers) < len(dialogue.questions)
        self._tell()

    def failed(self, dialogue: Dialogue, reason: str, attempts: int) -> None:
        """Lists a conversation that gets no answer.

        Raises:
            UserError: many in a row did not, or the list cannot be written.
        """
        self.report.failed += 1
        self._in_a_row += 1
        record = {
            "prompt_index": dialogue.index,
            "source": dialogue.source,
            "turn": len(dialogue.answers),
            "reason": reason,
            "attempts": attempts,
        }
        try:
            with self._failed_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            raise unwritable(self._failed_path, error) from None
        if self._in_a_row >= MANY_FAILURES:
            raise UserError(
                f"{MANY_FAILURES} conversations in a row got no answer, the last one: {reason}",
                where=dialogue.source,
                fix="what is answered is kept; the same command goes on",
            )
        self._tell()

    def _tell(self) -> None:
        if self._listener is None:
            return
        report = self.report
        seconds = time.monotonic() - self._began
        here = report.written + report.failed
        cost = "conversation"
        if self.traffic is not None:
            requests, again = self.traffic()
            cost = f"{requests:,} requests ({again:,} again) · conversation"
        self._listener(
            {
                "time": time.time(),
                "kind": "step",
                "unit": cost,
                "step": report.found + here,
                "steps": report.conversations,
                "tokens_per_second": report.tokens / max(seconds, 1e-9),
                "eta_seconds": seconds / here * (report.conversations - report.found - here) if here else None,
            }
        )


def regenerate_from_target(
    entries: Sequence[str | Path | DataSource],
    output: str | Path,
    target: Any,
    sampling: Sampling,
    *,
    identity: dict[str, Any],
    chat_template: str | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    listener: Listener | None = None,
) -> RegenerateReport:
    """The same with a target in this process: all first answers of some thousand conversations, then all second ones.

    An answer that calls a tool (`calls`) ends its conversation, as with a server.

    Args:
        target: loaded.
        identity: what makes the target this one, for the record.
        chat_template: Jinja source; None: the tokenizer's own.
        batch_size: answers at a time; by default what fits.

    Raises:
        UserError: as `regenerate_from_server`, or what `generate` refuses.
    """
    if chat_template is not None:
        target.tokenizer.chat_template = chat_template
    if not has_template(target.tokenizer):
        raise UserError("the tokenizer has no chat template, so there are no turns to answer", where="target")
    if sampling.extra:
        raise UserError("only a server takes more keys", where="--extra")
    stops = stop_ids_of(target)
    calls = find_call_opening(target.tokenizer, sampling.template_options)
    name = str(identity.get("path", "target"))
    facts = {
        "target": identity,
        "chat_template": hashlib.sha256(str(target.tokenizer.chat_template).encode()).hexdigest(),
    }
    with _Work(entries, Path(output), sampling, facts, name, limit, listener) as work:
        waiting = work.waiting()
        while round_ := list(islice(waiting, _ROUND)):
            going = {dialogue.index: dialogue for dialogue in round_}
            while going:
                encoded = _encode(going, target, sampling, work)
                for answer in generate(
                    target,
                    list(encoded.values()),
                    indices=[index * _TURNS + len(going[index].answers) for index in encoded],
                    stop_ids=stops,
                    batch_size=batch_size,
                    max_new_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                    seed=sampling.seed,
                ):
                    dialogue = going[answer.index // _TURNS]
                    text = text_of(answer, stops, target.tokenizer)
                    # Its text is kept as it was written, call and all: that is what the template would render.
                    calling = answer.finish_reason == "stop" and bool(dialogue.tools) and calls.opens(text)
                    message = {"role": "assistant", "content": text}
                    reason = "tool_calls" if calling else answer.finish_reason
                    kept = {"message": message, "finish_reason": reason, "tokens": len(answer.tokens)}
                    work.answered(dialogue, kept)
                    if dialogue.ended:
                        work.finished(dialogue)
                        del going[dialogue.index]
    return work.report


def _encode(going: dict[int, Dialogue], target: Any, sampling: Sampling, work: _Work) -> dict[int, list[int]]:
    """Token ids of every next question; conversations that the template refuses are listed and leave `going`."""
    encoded = {}
    for index, dialogue in list(going.items()):
        prompt = Prompt(dialogue.source, messages=dialogue.messages, tools=dialogue.tools)
        try:
            fault = what_json_lacks([dialogue.messages, dialogue.tools])
            if fault:
                raise UserError(f"cannot be written as JSON: {fault}")
            (ids,) = encode_prompts([prompt], target.tokenizer, sampling.template_options)
            answer_limit(target, ids, 1, "the conversation until there")
            encoded[index] = ids
        except UserError as error:
            work.failed(going.pop(index), str(error), 0)
    return encoded
