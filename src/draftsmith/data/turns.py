"""One assistant turn as serving would see it: what is fed before the answer, and what the model then wrote.

For assistant turn i of the messages m, with everything found by rendering:

    prompt P_i  = render(m[:i], add_generation_prompt=True)     what the server feeds the model
    through E_i = render(m[:i+1])                               the same conversation with the answer in it
    answer      = E_i behind P_i, up to and including the stop token that the model itself must emit

The stop token is found by rendering a marker as the answer and looking at what the template puts behind the marker
(ChatML: `<|im_end|>` and a newline; the token is taught, the newline is not, since no model is asked to write it).
Nothing is searched for in the text of the conversation itself. Where the template writes nothing behind an answer, the
stop token is what it opens the next turn with, if generation is known to stop at it.

Where E_i does not begin with P_i, or the template hides the beginning of an answer even where it is the last one, the
answer as generated is put together and *verified by rendering*. Let H be what the template writes before an answer,
O = P_i behind H what the prompt opens (a thought, mostly), and c the recorded content:

    c begins with O, and E_i is H + an end of c     the template removes thoughts; answer = c behind O
    c is shown without its beginning                the same without O; answer = c
    O + c and c read the same as history, which     the template takes O for a whole (an empty thought), so the model
    holds all that E_i shows of c                   was fed O and wrote what the template shows of c

Anything else is refused: a model that is told to think has not said what such data says.

An answer whose tool call the template does not write is refused: it would teach to say nothing in the call's place.

Cost: two renderings per assistant turn, three if it calls a tool; marker renderings once per template, and again only
where an answer is hidden.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jinja2

from draftsmith.data.problems import (
    CALL_LEFT_OUT,
    NO_END,
    NOT_A_CONTINUATION,
    NOT_UNICODE,
    NOTHING_BEFORE,
    STOP_INSIDE,
    TEMPLATE_FAILS,
    UNWEIGHTED,
    Problem,
)
from draftsmith.errors import UserError

# Plain letters, so that no template or tokenizer treats it specially.
_MARKER = "draftsmithMarksTheAnswerHere"
_RESERVED = (
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)


class _Closing(NamedTuple):
    """What the template writes behind an answer."""

    text: str
    stop_text: str  # the part of `text` up to and including the stop token, empty when there is none
    stop_id: int | None


@dataclass(frozen=True)
class Turn:
    """One assistant turn, rendered.

    Attributes:
        number: counts assistant turns from 1, for people.
        prompt: P_i.
        through: P_i + answer, stop token included.
        stop_id: the stop token, None if the template writes none.
    """

    number: int
    prompt: str
    through: str
    stop_id: int | None


class TurnRenderer:
    """Renders turns with one tokenizer, template and set of options.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: Jinja source; None: the tokenizer's own.
        options: passed to every rendering, as the server will pass them.
        stop_ids: see `Tokeniser`.
        name: where the template came from, for messages to people.

    Raises:
        UserError: an option has a reserved name.
    """

    def __init__(
        self, tokenizer: Any, template: str | None, options: dict[str, Any], stop_ids: Sequence[int], name: str
    ) -> None:
        for option in options:
            if option in _RESERVED:
                raise UserError(f"{option!r} cannot be a template option", where="data.template_options")
        self.tokenizer, self.template, self.options, self.name = tokenizer, template, options, name
        self._stops = _stop_candidates(tokenizer, stop_ids)
        self._closing: _Closing | None = None
        self._prepared = False
        self._takes_strings = self._takes_parts = True
        self._takes_argument_objects: bool | None = None

    @property
    def stop_token(self) -> int | None:
        """The token that ends an answer, once one has been seen; None if the template writes none."""
        return self._closing.stop_id if self._closing else None

    def generation_prompt(self) -> str | None:
        """What a server feeds between what the user said and the answer; None if the template does not tell.

        Raises:
            UserError: there is no chat template, or it is not valid Jinja.
        """
        self._prepare()
        asked = self._in_form({"role": "user", "content": _MARKER})
        try:
            _, found, behind = self._render([asked], None, generation=True).rpartition(_MARKER)
        except Exception:  # it needs more than one user turn
            return None
        return behind if found else None

    def writes_thought(self, key: str) -> bool:
        """Whether the template writes what stands under `key` of an answer, such as "reasoning_content".

        Raises:
            UserError: there is no chat template, or it is not valid Jinja.
        """
        self._prepare()
        asked = self._in_form({"role": "user", "content": "?"})
        answer = {**self._in_form({"role": "assistant", "content": "!"}), key: _MARKER}
        try:
            return _MARKER in self._render([asked, answer], None, generation=False)
        except Exception:  # needs more than the bare messages: nobody can tell
            return True

    def writes_tools(self) -> bool:
        """Whether the template writes the tools that a conversation brings.

        Raises:
            UserError: there is no chat template, or it is not valid Jinja.
        """
        self._prepare()
        asked = self._in_form({"role": "user", "content": "?"})
        function = {"name": _MARKER, "description": _MARKER, "parameters": {"type": "object", "properties": {}}}
        try:
            return _MARKER in self._render([asked], [{"type": "function", "function": function}], generation=True)
        except Exception:  # needs more than that: nobody can tell
            return True

    def turns(
        self, messages: list[dict[str, Any]], tools: Any, unweighted: Collection[int] = ()
    ) -> list[Turn | Problem]:
        """Every assistant turn of a conversation, or why it cannot be taught.

        Args:
            unweighted: numbers of the turns that are not to be taught; others still read them.

        Raises:
            UserError: there is no chat template, or it is not valid Jinja.
        """
        self._prepare()
        messages = [self._in_form(message) for message in messages]
        if any(message.get("tool_calls") for message in messages):
            messages = [self._calls_in_form(message) for message in messages]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return [
            Problem(UNWEIGHTED, f"assistant turn {number}")
            if number in unweighted
            else self._render_turn(messages[: i + 1], tools, number)
            for number, i in enumerate(answers, start=1)
        ]

    def _render_turn(self, messages: list[dict[str, Any]], tools: Any, number: int) -> Turn | Problem:
        """The prompt and the answer of the assistant turn that `messages` end with, or why it cannot be taught."""
        turn = f"assistant turn {number}"
        if len(messages) == 1:
            return Problem(NOTHING_BEFORE, turn)
        try:
            prompt = self._render(messages[:-1], tools, generation=True)
            through = self._render(messages, tools, generation=False)
            closing = self._find_closing(messages, tools, through)
            answer = self._find_answer(messages, tools, prompt, through, closing)
            call_left_out = self._leaves_call_out(messages, tools, through)
        except Exception as error:  # a template is a program that somebody else wrote: anything may come out of it
            return Problem(TEMPLATE_FAILS, f"{turn}: {type(error).__name__}: {error}")
        if call_left_out:
            return Problem(CALL_LEFT_OUT, turn)
        if answer is None:
            return Problem(NOT_A_CONTINUATION, turn)
        if closing is None:
            return Problem(NO_END, turn)
        if closing.stop_id is not None and self._stops_text(closing.stop_id) in answer:
            return Problem(STOP_INSIDE, turn)
        through = prompt + answer + closing.stop_text
        if not is_unicode(through):
            return Problem(NOT_UNICODE, turn)
        return Turn(number, prompt, through, closing.stop_id)

    def _leaves_call_out(self, messages: list[dict[str, Any]], tools: Any, through: str) -> bool:
        """Whether the conversation reads the same if the answer that it ends with called no tool, though its text does
        not call one either: data that keeps a call twice names the tool there."""
        calls = messages[-1].get("tool_calls")
        if not calls:
            return False
        text = str(messages[-1].get("content") or "")
        if all(str(call.get("function", call).get("name")) in text for call in calls):
            return False
        answer = {key: value for key, value in messages[-1].items() if key != "tool_calls"}
        try:
            return through == self._render([*messages[:-1], answer], tools, generation=False)
        except Exception:  # an answer without text is nothing to this template, so the call is something
            return False

    def _find_answer(
        self, messages: list[dict[str, Any]], tools: Any, prompt: str, through: str, closing: _Closing | None
    ) -> str | None:
        """What the model wrote behind `prompt`, without its end; None if that cannot be verified.

        Without a closing there is no answer to cut out; "" says that the turn at least continues its prompt.
        """
        continues = through.startswith(prompt)
        if closing is None:
            return "" if continues else None
        end = len(through) - len(closing.text)
        content = _text_of(messages[-1])
        if continues and end >= len(prompt):
            shown = through[len(prompt) : end]
            if not _hides_beginning(content, shown):
                return shown
            head = self._head(messages, tools)  # the beginning may stand in the prompt
            hidden = head is None or _hides_beginning(content, through[len(head) : end])
            return content if hidden else shown
        head = self._head(messages, tools)
        if head is None or not (prompt.startswith(head) and through.startswith(head)) or end < len(head):
            return None
        opened, shown = prompt[len(head) :], through[len(head) : end]
        if content.startswith(opened) and _hides_beginning(content, shown):
            return content[len(opened) :]
        # The template takes `opened` away and leaves the content as it stands: what was opened was closed as well.
        history = self._as_history(messages, tools, content) if content else ""
        whole = history.startswith(through[:end]) and history == self._as_history(messages, tools, opened + content)
        return shown if whole else None

    def _head(self, messages: list[dict[str, Any]], tools: Any) -> str | None:
        """What the template writes before the answer that `messages` end with."""
        marked = self._in_form({"role": "assistant", "content": _MARKER})
        head, found, _ = self._render([*messages[:-1], marked], tools, generation=False).rpartition(_MARKER)
        return head if found else None

    def _as_history(self, messages: list[dict[str, Any]], tools: Any, content: str) -> str:
        answer = self._in_form({**messages[-1], "content": content})
        asked = self._in_form({"role": "user", "content": _MARKER})
        return self._render([*messages[:-1], answer, asked], tools, generation=False)

    def _find_closing(self, messages: list[dict[str, Any]], tools: Any, through: str) -> _Closing | None:
        """What stands behind the answer. Known from an earlier turn if a stop token proves it, else rendered anew."""
        known = self._closing
        if known is not None and known.stop_id is not None and known.text and through.endswith(known.text):
            return known
        marked = self._in_form({"role": "assistant", "content": _MARKER})
        _, found, behind = self._render([*messages[:-1], marked], tools, generation=False).rpartition(_MARKER)
        if not found or not through.endswith(behind):
            return None
        closing = self._cut(behind)
        if closing.stop_id is None:
            closing = self._opening_of_the_next(messages, marked, tools, behind) or closing
        if known is None:
            self._closing = closing
        return closing

    def _opening_of_the_next(
        self, messages: list[dict[str, Any]], marked: dict[str, Any], tools: Any, behind: str
    ) -> _Closing | None:
        """The token that begins the next user turn, if generation is known to stop at it (GLM writes no other end)."""
        asked = self._in_form({"role": "user", "content": "?"})
        try:
            text = self._render([*messages[:-1], marked, asked], tools, generation=False).rpartition(_MARKER)[2]
        except Exception:  # this template allows no user turn here
            return None
        found = [stop for stop in self._stops[0] if text.startswith(behind + stop)]
        return _Closing(behind, behind + max(found, key=len), self._stops[0][max(found, key=len)]) if found else None

    def _cut(self, behind: str) -> _Closing:
        """Cuts the text behind an answer after the first stop token in it; earlier classes of candidates win."""
        for candidates in self._stops:
            places = [(behind.find(text), -len(text), text) for text in candidates if text in behind]
            if places:
                start, _, text = min(places)
                return _Closing(behind, behind[: start + len(text)], candidates[text])
        return _Closing(behind, "", None)

    def _stops_text(self, stop_id: int) -> str:
        return next(text for candidates in self._stops for text, token in candidates.items() if token == stop_id)

    def _render(self, messages: list[dict[str, Any]], tools: Any, *, generation: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self.template,
            add_generation_prompt=generation,
            tokenize=False,
            **self.options,
        )

    def _prepare(self) -> None:
        """Finds out, by rendering, whether the template is valid and whether it wants strings or lists of parts."""
        if self._prepared:
            return
        if self.template is None and not getattr(self.tokenizer, "chat_template", None):
            raise UserError(
                "the tokenizer has no chat template, and the data holds chat messages",
                where=self.name,
                fix="set data.chat_template to a file with the template that serving will use",
            )
        self._takes_strings = self._keeps_marker(_MARKER)
        self._takes_parts = self._keeps_marker([{"type": "text", "text": _MARKER}])
        self._prepared = True

    def _keeps_marker(self, content: Any) -> bool:
        """Whether user and assistant content of this form comes out whole, and not as Python's way of writing it."""
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        try:
            text = self._render(messages, None, generation=False)
        except jinja2.TemplateSyntaxError as error:
            place = f"{self.name}:{error.lineno}"
            raise UserError(f"not a valid Jinja template: {error.message}", where=place) from None
        except Exception:  # refuses this form, or needs more than the bare messages; the conversations will tell
            return False
        return text.count(_MARKER) == 2 and "'text'" not in text and '"text"' not in text

    def _in_form(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its content as the template wants it.

        Parts go through as they are if the template knows parts, else they are joined by newlines, as servers do that
        find a template of strings; a string becomes one part only where the template drops strings.
        """
        content = message.get("content")
        if isinstance(content, list) and not self._takes_parts:
            return {**message, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str) and self._takes_parts and not self._takes_strings:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _calls_in_form(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with the arguments of its tool calls as the template wants them: an object, or JSON text."""
        if not message.get("tool_calls"):
            return message
        if self._takes_argument_objects is None:
            self._takes_argument_objects = self._keeps_arguments({_MARKER: 1}) or not self._keeps_arguments(
                json.dumps({_MARKER: 1})
            )
        if self._takes_argument_objects:
            return message
        return {**message, "tool_calls": [_call_with_text(call) for call in message["tool_calls"]]}

    def _keeps_arguments(self, arguments: Any) -> bool:
        """Whether a tool call whose arguments have this form comes out as JSON."""
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text = self._render([{"role": "user", "content": "?"}, answer], None, generation=False)
        except Exception:  # refuses this form, or needs more than the bare messages; the conversations will tell
            return False
        return f'"{_MARKER}"' in text


def _stop_candidates(tokenizer: Any, stop_ids: Sequence[int]) -> list[dict[str, int]]:
    """Texts that may end a turn and their ids, in classes of falling trust.

    What generation stops at, then special tokens, then other added tokens that are more than white space (some
    tokenizers forget to mark their end-of-turn token as special).
    """
    added = {token: str(entry) for token, entry in tokenizer.added_tokens_decoder.items()}
    special = {*tokenizer.all_special_ids, *(i for i, entry in tokenizer.added_tokens_decoder.items() if entry.special)}
    asked = {text: i for i in stop_ids if (text := added.get(i) or tokenizer.convert_ids_to_tokens(i))}
    eos = tokenizer.eos_token_id
    if eos is not None:
        special.add(eos)
    marked = {text: i for i in special if (text := added.get(i) or tokenizer.convert_ids_to_tokens(i))}
    others = {text: i for i, text in added.items() if text.strip()}
    return [asked, marked, others]


def _call_with_text(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call_with_text(call["function"])}
    arguments = call.get("arguments")
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)} if isinstance(arguments, dict) else call


def _text_of(message: dict[str, Any]) -> str:
    """Content of a message as one text."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _hides_beginning(content: str, shown: str) -> bool:
    """Whether `shown` is `content` without its beginning; white space at its ends does not count."""
    return len(shown.strip()) < len(content.strip()) and content.rstrip().endswith(shown.strip())


def is_unicode(text: str) -> bool:
    """JSON can spell lone surrogates, which no tokenizer accepts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
