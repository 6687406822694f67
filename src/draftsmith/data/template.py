"""Chat template to tokens and loss mask: which tokens the assistant wrote, exact to the token.

The span of a turn is what *serving* would produce, and only rendering can tell: `turns` gives the prompt that a server
would feed and the answer that the model then wrote, as text. Here they become tokens.

A turn is taught inside a document D only if D begins with the turn's own rendering, prompt and answer, and if the
tokens of the prompt, encoded alone as a server would, are the first tokens of D. Where that fails, the conversation is
split:

- Templates that rewrite earlier turns (thinking removed from history) fail on the text. Working from the last turn
  backwards, each turn that no document holds as it was generated gets a document of its own, with the history as the
  template rewrites it.
- Where a token would straddle the border (a prompt that ends in newlines and an answer whose tokens join them), the
  turn's document is the tokens of P_i followed by those of the answer encoded alone, as generation would have made
  them; it must decode to the text again, else the turn stays untaught with a reason.

So every taught token stands behind exactly the context in which the model would have written it.

Documents end with their last taught token: text behind it is seen by nobody (the target is causal, anchors look back).

Cost: beside the renderings, one encoding of every document and of every turn's prompt, in batches (the tokenizer works
on many threads); turns with a straddling token are encoded once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from draftsmith.blocks.row import Document
from draftsmith.data.conversation import Conversation
from draftsmith.data.problems import (
    CROSSES_END,
    CROSSES_START,
    MALFORMED,
    NO_ANCHOR,
    NO_ASSISTANT,
    NO_END,
    NO_MESSAGES,
    NO_TEXT,
    NOT_TEXT,
    NOT_UNICODE,
    Problem,
)
from draftsmith.data.turns import Turn, TurnRenderer, is_unicode


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


@dataclass
class _Draft:
    """A document that is rendered and not yet tokenised."""

    text: str
    turns: list[Turn] = field(default_factory=list)


@dataclass
class _Plan:
    """Everything of a conversation that must be encoded."""

    source: str
    refusal: Problem | None = None
    drafts: list[_Draft] = field(default_factory=list)
    plain: str | None = None
    untaught: list[Problem] = field(default_factory=list)
    documents: list[tuple[int, Document]] = field(default_factory=list)  # and the number of the last turn in it
    answers: int = 0  # of the conversation

    @property
    def ends_with_last_answer(self) -> bool:
        """Whether the last document ends where the conversation's last answer does."""
        return max((number for number, _ in self.documents), default=0) == self.answers


@dataclass(frozen=True)
class _Straddler:
    """A turn whose tokens do not stand in its draft as generation would have made them."""

    plan: _Plan
    turn: Turn
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
        self.stop_ids = tuple(stop_ids)
        self.template_name = template_name
        self._turns = TurnRenderer(tokenizer, chat_template, self.options, self.stop_ids, template_name)

    def fresh(self) -> Tokeniser:
        """The same, without what was learnt from conversations seen: its results depend on nothing but its input."""
        return Tokeniser(
            self.tokenizer,
            chat_template=self.template,
            template_options=self.options,
            stop_ids=self.stop_ids,
            template_name=self.template_name,
        )

    @property
    def stop_token(self) -> int | None:
        """The token that ends an answer, once a conversation has been seen; None if the template writes none."""
        return self._turns.stop_token

    def writes_thought(self, key: str) -> bool:
        """See `TurnRenderer.writes_thought`."""
        return self._turns.writes_thought(key)

    def writes_tools(self) -> bool:
        """See `TurnRenderer.writes_tools`."""
        return self._turns.writes_tools()

    def generation_prompt(self) -> str | None:
        """See `TurnRenderer.generation_prompt`."""
        return self._turns.generation_prompt()

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
            self._without_end(result) if conversation.cut and plan.ends_with_last_answer else result
            for conversation, plan, result in zip(conversations, plans, results, strict=True)
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

    def _plan(self, conversation: Conversation) -> _Plan:
        source = conversation.source
        if conversation.malformed is not None:
            return _Plan(source, Problem(MALFORMED, conversation.malformed))
        if conversation.problem is not None:
            return _Plan(source, Problem(NOT_TEXT, conversation.problem))
        if conversation.text is not None:
            if not conversation.text.strip():
                return _Plan(source, Problem(NO_TEXT))
            if not is_unicode(conversation.text):
                return _Plan(source, Problem(NOT_UNICODE))
            return _Plan(source, plain=conversation.text)
        if not conversation.messages:
            return _Plan(source, Problem(NO_MESSAGES))
        if not any(message["role"] == "assistant" for message in conversation.messages):
            return _Plan(source, Problem(NO_ASSISTANT))
        answers = sum(message["role"] == "assistant" for message in conversation.messages)
        plan, turns = _Plan(source, answers=answers), []
        for turn in self._turns.turns(conversation.messages, conversation.tools, conversation.unweighted):
            if isinstance(turn, Turn):
                turns.append(turn)
            else:
                plan.untaught.append(turn)
        plan.drafts = _split(turns)
        return plan

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
            mask, last = np.zeros(len(tokens), dtype=bool), 0
            for turn, prompt in zip(draft.turns, prompts, strict=True):
                span = _span(tokens, prompt, turn.stop_id, ends.get(turn.number))
                if isinstance(span, str):
                    straddlers.append(_Straddler(plan, turn, prompt, span))
                else:
                    mask[span[0] : span[1]], last = True, turn.number
            document = make_document(plan.source, np.asarray(tokens, dtype=np.int64), mask)
            if document is not None:
                plan.documents.append((last, document))
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


def _split(turns: list[Turn]) -> list[_Draft]:
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
