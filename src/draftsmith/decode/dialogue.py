"""A conversation that is being answered anew: its questions, and the answers so far.

A question is everything up to the place where an assistant speaks. A dialogue ends early where going on would put words
into the target's mouth: behind an answer that was cut off, that calls a tool (the recorded result belongs to another
call), or that is empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from draftsmith.data.conversation import Conversation

_GOES_ON = ("stop", "eos", "end_turn")  # finish reasons behind which the conversation may go on


@dataclass
class Dialogue:
    """One conversation on its way.

    Attributes:
        index: among all conversations read, from 0.
        source: "file:number".
        questions: for each answer, the messages before it that the answer before does not cover.
        tools: for the chat template.
        answers: so far; each {"message", "finish_reason", "tokens"}.
    """

    index: int
    source: str
    questions: list[list[dict[str, Any]]]
    tools: list[dict[str, Any]] | None = None
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Everything said so far, and the next question if there is one to answer."""
        said: list[dict[str, Any]] = []
        for turn, question in enumerate(self.questions[: len(self.answers) + (not self.ended)]):
            said += question
            if turn < len(self.answers):
                said.append(self.answers[turn]["message"])
        return said

    @property
    def ended(self) -> bool:
        """Whether nothing is left to ask."""
        if len(self.answers) == len(self.questions):
            return True
        if not self.answers:
            return False
        last = self.answers[-1]
        return last["finish_reason"] not in _GOES_ON or bool(last["message"].get("tool_calls")) or is_empty(last)

    def record(self, model: str) -> dict[str, Any]:
        """The line of a finished conversation."""
        tools = {"tools": self.tools} if self.tools else {}
        return {
            "messages": self.messages,
            **tools,
            "prompt_index": self.index,
            "source": self.source,
            "model": model,
            "finish_reason": self.answers[-1]["finish_reason"],
            "finish_reasons": [answer["finish_reason"] for answer in self.answers],
            "answer_tokens": [answer["tokens"] for answer in self.answers],
        }


def make_dialogue(index: int, conversation: Conversation) -> Dialogue | None:
    """The questions of a conversation; None if there is none to answer."""
    if conversation.messages is None or conversation.problem is not None:
        return None
    questions: list[list[dict[str, Any]]] = []
    open_question: list[dict[str, Any]] = []
    for message in [*conversation.messages, {"role": "assistant"}]:
        if message["role"] != "assistant":
            open_question.append(message)
            continue
        if questions and open_question and open_question[0]["role"] in ("tool", "function"):
            break  # results of calls that the target did not make
        if any(part["role"] == "user" for part in open_question):
            questions.append(open_question)
            open_question = []
        elif questions:
            open_question = []  # a second answer to the same question
    return Dialogue(index, conversation.source, questions, conversation.tools) if questions else None


def is_empty(answer: dict[str, Any]) -> bool:
    """Whether an answer says nothing and calls nothing."""
    message = answer["message"]
    return not (message.get("content") or "").strip() and not message.get("tool_calls")
