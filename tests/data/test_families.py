"""Well-known chat formats: every span exact to the token, and every taught token behind what a server would feed."""

from __future__ import annotations

import random
from typing import Any

import pytest
from families import FAMILIES, Family
from test_template import lists, pieces

from draftsmith.data.conversation import Conversation
from draftsmith.data.template import Tokenised, Tokeniser


def tokenise_all(family: Family, tokenizer: Any, conversations: list[Conversation]) -> list[Tokenised]:
    stops = [tokenizer.convert_tokens_to_ids(stop) for stop in family.stops]
    return Tokeniser(tokenizer, template_options=family.options, stop_ids=stops)(conversations)


def test_there_are_twenty() -> None:
    assert len({name.partition(",")[0] for name in FAMILIES}) >= 20


@pytest.mark.parametrize("name", FAMILIES)
def test_spans_are_exact(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    assert all(tokenizer.tokenize(special) == [special] for special in family.specials)
    (result,) = tokenise_all(family, tokenizer, [Conversation("a:1", messages=family.messages())])
    assert (result.refusal, result.untaught) == (None, ())
    assert [lists(document) for document in result.documents] == [
        pieces(tokenizer, *document) for document in family.documents
    ]
    # Every answer ends in one token that a server would stop at.
    for document in result.documents:
        tokens, mask = lists(document)
        ends = [i for i in range(len(mask)) if mask[i] and (i + 1 == len(mask) or not mask[i + 1])]
        assert all(tokenizer.added_tokens_decoder[tokens[end]].special for end in ends)


def test_an_end_that_only_the_next_turn_shows_is_taught_from_single_turns_alone() -> None:
    """GLM writes nothing behind an answer; that generation stops at what would follow is known from its config."""
    family = FAMILIES["GLM-4"]
    tokenizer = family.tokenizer()
    messages = family.messages()[1:3]
    conversations = [Conversation("a:1", messages=messages), Conversation("a:2", messages=messages)]
    for result in tokenise_all(family, tokenizer, conversations):
        (document,) = result.documents
        assert lists(document) == pieces(
            tokenizer, ("[gMASK]<sop><|user|>\nOne?<|assistant|>", False), ("\nYes<|user|>", True)
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_what_stands_before_an_answer_is_what_a_server_would_feed(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    rng = random.Random(7)
    words = ["hello", " world", "\n", "\n\n", " ", "é", "漢字", "👍🏽", "a", ".", "Hi", "\t"]

    def content() -> str:
        return rng.choice(["Hi", "word", "Æ"]) + "".join(rng.choices(words, k=rng.randrange(12))) + "."

    conversations = []
    for _ in range(15):
        messages = [{"role": "system", "content": content()}] * family.system
        for _ in range(rng.randrange(1, 4)):
            thought = f"<think>\n{content()}</think>\n\n" if "<think>" in family.answers[0] else ""
            messages += [{"role": "user", "content": content()}, {"role": "assistant", "content": thought + content()}]
        conversations.append(Conversation("a:1", messages=messages))
    taught = 0
    for conversation, result in zip(conversations, tokenise_all(family, tokenizer, conversations), strict=True):
        assert (result.refusal, result.untaught) == (None, ())
        messages = conversation.messages or []
        fed = [
            tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, return_dict=False, **family.options)
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        starts = 0
        for document in result.documents:
            tokens, mask = lists(document)
            for start in [i for i in range(len(mask)) if mask[i] and not mask[i - 1]]:
                assert tokens[:start] in fed, tokenizer.decode(tokens)
                starts += 1
        assert starts == len(fed)
        taught += starts
    assert taught >= 15
