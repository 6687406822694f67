"""Chat template to tokens and loss mask: which tokens the assistant wrote, exact to the token.

The span of a turn is what *serving* would produce, and only rendering can tell. For assistant turn i of the messages m:

    prompt P_i  = render(m[:i], add_generation_prompt=True)     what the server feeds the model
    through E_i = render(m[:i+1])                               the same conversation with the answer in it
    answer      = E_i behind P_i, up to and including the stop token that the model itself must emit

The stop token is found by rendering a marker as the answer and looking at what the template puts behind the marker
(ChatML: `<|im_end|>` and a newline; the token is taught, the newline is not, since no model is asked to write it).
Nothing is searched for in the text of the conversation itself.

A turn is taught inside a document D only if D begins with the turn's own rendering P_i + answer, and if the tokens of
P_i, encoded alone as a server would, are the first tokens of D. Where that fails, the conversation is split:

- Templates that rewrite earlier turns (thinking removed from history) fail on the text. Working from the last turn
  backwards, each turn that no document holds as it was generated gets a document of its own, with the history as the
  template rewrites it.
- Where a token would straddle the border (a prompt that ends in newlines and an answer whose tokens join them), the
  turn's document is the tokens of P_i followed by those of the answer encoded alone, as generation would have made
  them; it must decode to the text again, else the turn stays untaught with a reason.

So every taught token stands behind exactly the context in which the model would have written it.

Documents end with their last taught token: text behind it is seen by nobody (the target is causal, anchors look back).

Cost: two renderings per assistant turn, one encoding of every document and of every turn's prompt, in batches (the
tokenizer works on many threads); turns with a straddling token are encoded once more. Marker renderings happen once per
template, not per conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jinja2
import numpy as np
import torch

from draftsmith.blocks.row import Document
from draftsmith.data.conversations import Conversation
from draftsmith.errors import UserError

NO_MESSAGES = "no messages"
NO_TEXT = "no text"
NO_ASSISTANT = "no assistant turn"
NOTHING_BEFORE = "the answer has nothing before it"
TEMPLATE_FAILS = "the chat template fails on it"
NOT_UNICODE = "holds half of a surrogate pair, which is no text"
NOT_A_CONTINUATION = "the answer as rendered does not continue the generation prompt"
NO_END = "the end of the answer cannot be found in the rendering"
STOP_INSIDE = "the answer holds the stop token as text"
CROSSES_START = "a token crosses the start of the answer"
CROSSES_END = "a token crosses the end of the answer"
NO_ANCHOR = "no two taught tokens in a row"

# Plain letters, so that no template or tokenizer treats it specially.
_MARKER = "draftsmithMarksTheAnswerHere"
_RESERVED = (
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)


class Problem(NamedTuple):
    """Why something of a conversation cannot be taught.

    Attributes:
        reason: one of this module's constants; what is counted.
        detail: what only concerns this conversation (the template's own message, the turn).
    """

    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Tokenised:
    """What one conversation became.

    Attributes:
        source: "file:line".
        documents: usually one; several when a turn's context as served is not how it reads later; none when refused.
        refusal: why nothing of it can be taught, or None.
        untaught: problems of single turns of a conversation that is used all the same.
    """

    source: str
    documents: tuple[Document, ...] = ()
    refusal: Problem | None = None
    untaught: tuple[Problem, ...] = ()


class _Closing(NamedTuple):
    """What the template writes behind an answer."""

    text: str
    stop_text: str  # the part of `text` up to and including the stop token, empty when there is none
    stop_id: int | None


@dataclass(frozen=True)
class _Turn:
    number: int  # counts assistant turns from 1, for people
    prompt: str  # P_i
    through: str  # P_i + answer, stop token included
    stop_id: int | None


@dataclass
class _Draft:
    """A document that is rendered and not yet tokenised."""

    text: str
    turns: list[_Turn] = field(default_factory=list)


@dataclass
class _Plan:
    """Everything of a conversation that must be encoded."""

    source: str
    refusal: Problem | None = None
    drafts: list[_Draft] = field(default_factory=list)
    plain: str | None = None
    untaught: list[Problem] = field(default_factory=list)
    documents: list[tuple[int, Document]] = field(default_factory=list)  # and the number of the last turn in it


@dataclass(frozen=True)
class _Straddler:
    """A turn whose tokens do not stand in its draft as generation would have made them."""

    plan: _Plan
    turn: _Turn
    prompt: list[int]
    reason: str


class Tokeniser:
    """Turns conversations into documents with one tokenizer, template and set of options.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chat_template: Jinja source; none: the tokenizer's own.
        template_options: passed to every rendering (`{"enable_thinking": False}`), as the server will pass them.
        stop_ids: what generation stops at (the generation config's `eos_token_id`, often several). Empty: the
            tokenizer's special tokens are candidates, which finds the template's own end-of-turn token.
        template_name: where the template came from, for messages to people.

    Raises:
        UserError: the template is not valid Jinja, or an option has a reserved name.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        template_options: dict[str, Any] | None = None,
        stop_ids: Sequence[int] = (),
        template_name: str = "chat template",
    ) -> None:
        self.tokenizer = tokenizer
        self.template = chat_template
        self.options = dict(template_options or {})
        self.template_name = template_name
        for name in self.options:
            if name in _RESERVED:
                raise UserError(f"{name!r} cannot be a template option", where="data.template_options")
        self._stops = _stop_candidates(tokenizer, stop_ids)
        self._closing: _Closing | None = None
        self._prepared = False
        self._takes_strings = self._takes_parts = True

    @property
    def stop_token(self) -> int | None:
        """The token that ends an answer, once a conversation has been seen; None if the template writes none."""
        return self._closing.stop_id if self._closing else None

    def __call__(self, conversations: Sequence[Conversation]) -> list[Tokenised]:
        """Tokenises a batch; what cannot be used comes back as a reason, in its place.

        Raises:
            UserError: there are chat messages but no chat template, or the template is not valid Jinja.
        """
        plans = [self._plan(conversation) for conversation in conversations]
        plain = self._encode([plan.plain for plan in plans if plan.plain is not None], special=True)
        texts: list[str] = []
        for plan in plans:
            for draft in plan.drafts:
                texts.append(draft.text)
                texts += [turn.prompt for turn in draft.turns]
                texts += [turn.through for turn in draft.turns[:-1] if turn.stop_id is None]
        encoded, plain_encoded = iter(self._encode(texts, special=False)), iter(plain)
        straddlers = [straddler for plan in plans for straddler in self._place(plan, encoded)]
        answers = self._encode([s.turn.through[len(s.turn.prompt) :] for s in straddlers], special=False)
        for straddler, answer in zip(straddlers, answers, strict=True):
            self._place_alone(straddler, answer)
        results = [
            _all_taught(plan.source, next(plain_encoded)) if plan.plain is not None else _finish(plan) for plan in plans
        ]
        return [
            self._without_end(result) if conversation.cut else result
            for conversation, result in zip(conversations, results, strict=True)
        ]

    def _without_end(self, tokenised: Tokenised) -> Tokenised:
        """The same without the stop token of the last answer, which the template wrote and the model did not."""
        if not tokenised.documents or int(tokenised.documents[-1].tokens[-1]) != self.stop_token:
            return tokenised
        *others, last = tokenised.documents
        shorter = make_document(last.name, last.tokens[:-1].numpy(), last.loss_mask[:-1].numpy())
        documents = (*others, *([shorter] if shorter is not None else []))
        if not documents:
            return Tokenised(tokenised.source, refusal=Problem(NO_ANCHOR))
        return replace(tokenised, documents=documents)

    # -- rendering ---------------------------------------------------------------------------------------------

    def _plan(self, conversation: Conversation) -> _Plan:
        source = conversation.source
        if conversation.text is not None:
            if not conversation.text.strip():
                return _Plan(source, Problem(NO_TEXT))
            if not _is_unicode(conversation.text):
                return _Plan(source, Problem(NOT_UNICODE))
            return _Plan(source, plain=conversation.text)
        if not conversation.messages:
            return _Plan(source, Problem(NO_MESSAGES))
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if not answers:
            return _Plan(source, Problem(NO_ASSISTANT))
        if not self._prepared:
            self._prepare()
        messages = [self._in_form(message) for message in conversation.messages]
        plan, turns = _Plan(source), []
        for number, i in enumerate(answers, start=1):
            turn = self._render_turn(messages[: i + 1], conversation.tools, number)
            if isinstance(turn, _Turn):
                turns.append(turn)
            else:
                plan.untaught.append(turn)
        plan.drafts = _split(turns)
        return plan

    def _render_turn(self, messages: list[dict[str, Any]], tools: Any, number: int) -> _Turn | Problem:
        """The prompt and the answer of the assistant turn that `messages` end with, or why it cannot be taught."""
        turn = f"assistant turn {number}"
        if len(messages) == 1:
            return Problem(NOTHING_BEFORE, turn)
        try:
            prompt = self._render(messages[:-1], tools, generation=True)
            through = self._render(messages, tools, generation=False)
            if not through.startswith(prompt):
                return Problem(NOT_A_CONTINUATION, turn)
            closing = self._find_closing(messages, tools, through)
        except Exception as error:  # a template is a program that somebody else wrote: anything may come out of it
            return Problem(TEMPLATE_FAILS, f"{turn}: {type(error).__name__}: {error}")
        if closing is None or len(through) - len(closing.text) < len(prompt):
            return Problem(NO_END, turn)
        answer = through[len(prompt) : len(through) - len(closing.text)]
        if closing.stop_id is not None and self._stops_text(closing.stop_id) in answer:
            return Problem(STOP_INSIDE, turn)
        through = prompt + answer + closing.stop_text
        if not _is_unicode(through):
            return Problem(NOT_UNICODE, turn)
        return _Turn(number, prompt, through, closing.stop_id)

    def _find_closing(self, messages: list[dict[str, Any]], tools: Any, through: str) -> _Closing | None:
        """What stands behind the answer. Known from an earlier turn if a stop token proves it, else rendered anew."""
        known = self._closing
        if known is not None and known.stop_id is not None and through.endswith(known.text):
            return known
        marked = self._in_form({"role": "assistant", "content": _MARKER})
        _, found, behind = self._render([*messages[:-1], marked], tools, generation=False).rpartition(_MARKER)
        if not found or not through.endswith(behind):
            return None
        closing = self._cut(behind)
        if known is None:
            self._closing = closing
        return closing

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
        if self.template is None and not getattr(self.tokenizer, "chat_template", None):
            raise UserError(
                "the tokenizer has no chat template, and the data holds chat messages",
                where=self.template_name,
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
            place = f"{self.template_name}:{error.lineno}"
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

    # -- tokens ------------------------------------------------------------------------------------------------

    def _encode(self, texts: list[str], *, special: bool) -> list[list[int]]:
        if not texts:
            return []
        return self.tokenizer(
            texts,
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]

    def _place(self, plan: _Plan, encoded: Iterator[list[int]]) -> list[_Straddler]:
        """Places the spans of a plan; returns the turns that need a document of their own.

        `encoded` yields ids in the order in which `__call__` listed the texts.
        """
        straddlers = []
        for draft in plan.drafts:
            tokens = next(encoded)
            prompts = [next(encoded) for _ in draft.turns]
            ends = {turn.number: next(encoded) for turn in draft.turns[:-1] if turn.stop_id is None}
            mask = np.zeros(len(tokens), dtype=bool)
            for turn, prompt in zip(draft.turns, prompts, strict=True):
                span = _span(tokens, prompt, turn.stop_id, ends.get(turn.number))
                if isinstance(span, str):
                    straddlers.append(_Straddler(plan, turn, prompt, span))
                else:
                    mask[span[0] : span[1]] = True
            document = make_document(plan.source, np.asarray(tokens, dtype=np.int64), mask)
            if document is not None:
                plan.documents.append((draft.turns[-1].number, document))
        return straddlers

    def _place_alone(self, straddler: _Straddler, answer: list[int]) -> None:
        """Gives a turn its own document, if prompt and answer, encoded one by one, are the text that was rendered."""
        plan, turn, tokens = straddler.plan, straddler.turn, straddler.prompt + answer
        text = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text != turn.through or (turn.stop_id is not None and turn.stop_id not in answer):
            plan.untaught.append(Problem(straddler.reason, f"assistant turn {turn.number}"))
            return
        mask = np.arange(len(tokens)) >= len(straddler.prompt)
        document = make_document(plan.source, np.asarray(tokens, dtype=np.int64), mask)
        if document is not None:
            plan.documents.append((turn.number, document))


def tokenise(
    conversation: Conversation,
    tokenizer: Any,
    *,
    template_options: dict[str, Any] | None = None,
    chat_template: str | None = None,
    stop_ids: Sequence[int] = (),
) -> Tokenised:
    """One conversation; see `Tokeniser`, which is the thing to use for many."""
    tokeniser = Tokeniser(tokenizer, chat_template=chat_template, template_options=template_options, stop_ids=stop_ids)
    return tokeniser([conversation])[0]


def make_document(source: str, tokens: np.ndarray, mask: np.ndarray) -> Document | None:
    """A document that ends with its last taught token, or None if no anchor can stand in it.

    An anchor needs two taught tokens in a row: its own and the one that slot 1 is taught.

    Args:
        tokens: int64 [L].
        mask: bool [L].
    """
    if not (mask[:-1] & mask[1:]).any():
        return None
    end = int(np.flatnonzero(mask)[-1]) + 1
    return Document(torch.from_numpy(tokens[:end].copy()), torch.from_numpy(mask[:end].copy()), source)


def _all_taught(source: str, ids: list[int]) -> Tokenised:
    document = make_document(source, np.asarray(ids, dtype=np.int64), np.ones(len(ids), dtype=bool))
    if document is None:
        return Tokenised(source, refusal=Problem(NO_ANCHOR))
    return Tokenised(source, (document,))


def _finish(plan: _Plan) -> Tokenised:
    """The result of a plan whose documents are complete, in reading order."""
    if plan.documents:
        documents = sorted(plan.documents, key=lambda numbered: numbered[0])
        return Tokenised(plan.source, tuple(document for _, document in documents), untaught=tuple(plan.untaught))
    # The first turn's problem speaks for the conversation; without one, the answers are too short for an anchor.
    refusal = plan.refusal or (plan.untaught[0] if plan.untaught else Problem(NO_ANCHOR))
    return Tokenised(plan.source, refusal=refusal)


def _split(turns: list[_Turn]) -> list[_Draft]:
    """The fewest documents, latest turn first, in which every turn stands as it was generated; in reading order.

    A template that leaves history alone gives one document; one that rewrites it gives a document per rewritten turn.
    """
    drafts = []
    left = list(turns)
    while left:
        text = left[-1].through
        drafts.append(_Draft(text, [turn for turn in left if text.startswith(turn.through)]))
        left = [turn for turn in left if not text.startswith(turn.through)]
    return drafts[::-1]


def _span(
    tokens: list[int], prompt: list[int], stop_id: int | None, through: list[int] | None
) -> tuple[int, int] | str:
    """First and past-the-last token of an answer in `tokens`, or the reason why there is no such span.

    Args:
        prompt: the tokens that a server would feed the model.
        stop_id: what ends the answer; its first occurrence does, since generation would stop there.
        through: tokens of prompt and answer, where no stop token marks the end of a turn that is not the last.
    """
    start = len(prompt)
    if tokens[:start] != prompt:
        return CROSSES_START
    if stop_id is not None:
        try:
            return start, tokens.index(stop_id, start) + 1
        except ValueError:
            return NO_END
    if through is None:
        return start, len(tokens)
    if tokens[: len(through)] != through:
        return CROSSES_END
    return start, len(through)


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


def _is_unicode(text: str) -> bool:
    """JSON can spell lone surrogates, which no tokenizer accepts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
