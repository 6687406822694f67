"""Whether a text that a target wrote calls a tool, as its chat template writes calls.

A server parses an answer and says "tool_calls"; a target in this process only writes text. What a call looks like is
found by rendering one: the text that the template puts between the place where an answer begins and the name of the
function. If a token of its own opens calls (`<tool_call>`, `[TOOL_CALLS]`), that token in an answer is a call, wherever
it stands. Else an answer that begins like the rendered call is one (`{"name": "…`), white space left out.

Cost: two renderings per template and set of options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_NAME, _SAID = "draftsmithNamesTheFunctionHere", "draftsmithMarksTheAnswerHere"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Does nothing.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
_LEAST = 2  # characters of an opening without a token of its own


@dataclass(frozen=True)
class CallOpening:
    """How calls open.

    Attributes:
        token: text of the token that opens them, or "".
        begins: what an answer that is a call begins with, white space left out; "" where `token` decides, or where the
            template writes no calls.
    """

    token: str
    begins: str

    def opens(self, answer: str) -> bool:
        """Whether an answer calls a tool."""
        if self.token:
            return self.token in answer
        return bool(self.begins) and "".join(answer.split()).startswith(self.begins)


def find_call_opening(tokenizer: Any, template_options: dict[str, Any] | None = None) -> CallOpening:
    """How the tokenizer's chat template opens a tool call; of a template that knows none, an opening of nothing."""
    asked = [{"role": "user", "content": "?"}]
    # Templates differ in how they want arguments.
    for arguments in ({"x": "y"}, '{"x": "y"}'):
        call = {"type": "function", "id": "call00000", "function": {"name": _NAME, "arguments": arguments}}
        answers = ({"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "assistant", "content": _SAID})
        try:
            called, said = (
                tokenizer.apply_chat_template(
                    [*asked, answer], tools=[_TOOL], tokenize=False, **(template_options or {})
                )
                for answer in answers
            )
        except Exception:  # a template is a program that somebody else wrote: anything may come out of it
            continue
        head, found, _ = said.rpartition(_SAID)
        if not found or not called.startswith(head):
            continue
        opening, found, _ = called[len(head) :].partition(_NAME)
        if found:
            return _opening(opening, tokenizer)
    return CallOpening("", "")


def _opening(text: str, tokenizer: Any) -> CallOpening:
    added = [str(entry) for entry in tokenizer.added_tokens_decoder.values()]
    places = [(text.find(token), -len(token), token) for token in added if token.strip() and token in text]
    if places:
        return CallOpening(min(places)[2], "")
    begins = "".join(text.split())
    return CallOpening("", begins if len(begins) >= _LEAST else "")
