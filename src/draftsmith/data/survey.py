"""What kind of text a data set holds: languages, thoughts, tools, turns. Estimates from a sample, for people.

Languages are guessed: the writing system of most letters, and for Latin letters the language whose commonest words
occur most. Good enough to see that a tenth of the data is Chinese; no more is claimed.

Cost: one pass of reading, without tokenising; guessing only for a sample that is spread evenly over the data.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from draftsmith.data.conversation import Conversation

_LETTERS = 2000  # looked at in one conversation
_SCRIPTS = {
    "CJK": "Chinese",
    "HIRAGANA": "Japanese",
    "KATAKANA": "Japanese",
    "HANGUL": "Korean",
    "CYRILLIC": "Cyrillic",
    "ARABIC": "Arabic",
    "HEBREW": "Hebrew",
    "DEVANAGARI": "Devanagari",
    "BENGALI": "Bengali",
    "THAI": "Thai",
    "GREEK": "Greek",
    "TAMIL": "Tamil",
    "TELUGU": "Telugu",
    "GEORGIAN": "Georgian",
    "ARMENIAN": "Armenian",
}
_WORDS = {
    "English": "the and of to in is that for it with as on be this are you was not have",
    "German": "der die und das ist nicht ein eine zu den mit von für auf sich dem auch wie ich es",
    "French": "le la les des et est une un que pour dans pas vous qui sur avec ce il je sont",
    "Spanish": "el los las que una por con para del es se no lo como pero más su un y en",
    "Portuguese": "não uma para com os que do da em por mais como mas ao você são um o e",
    "Italian": "il che di una non per con sono gli della è si nel anche questo più lo ma un e",
    "Dutch": "het een van en niet dat zijn op voor met die ook maar aan wordt bij ik je naar de",
    "Polish": "nie się jest na że do to jak dla przez ale czy tego oraz być co od może już w",
    "Turkish": "bir ve bu için ile çok olarak daha gibi de da ne olan kadar var değil sonra ama en ya",
    "Indonesian": "yang dan untuk dengan tidak dari ini dalam adalah pada itu akan juga atau bisa anda ke saya",
}
THOUGHT_FIELDS = ("reasoning_content", "thinking")  # as templates call it
_BY_WORD: dict[str, list[str]] = {}
for _language, _words in _WORDS.items():
    for _word in _words.split():
        _BY_WORD.setdefault(_word, []).append(_language)


@dataclass
class Survey:
    """Counts over conversations.

    Attributes:
        conversations: looked at.
        answers: assistant turns of chats.
        thinking: of those, with a thought (a field for it, or a closing </think> in the text).
        thought_fields: how many answers have a thought in the field of this name.
        calls: of the answers, that call a tool.
        turns: how many conversations have so many assistant turns.
        with_system: conversations that bring a system turn.
        with_tools: conversations that bring tools.
        languages: guesses for a sample of the conversations.
    """

    conversations: int = 0
    answers: int = 0
    thinking: int = 0
    thought_fields: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    turns: Counter[int] = field(default_factory=Counter)
    with_system: int = 0
    with_tools: int = 0
    languages: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """For people."""
        guessed = sum(self.languages.values())
        named = ", ".join(f"{name} {count / guessed:.0%}" for name, count in self.languages.most_common(6))
        lines = [f"languages, guessed from {guessed:,} conversations: {named}"] if guessed else []
        if self.answers:
            several = sum(count for turns, count in self.turns.items() if turns > 1) / self.conversations
            lines.append(
                f"{self.answers:,} answers: {self.thinking / self.answers:.1%} with a thought, "
                f"{self.calls / self.answers:.1%} call a tool; {several:.1%} of conversations have several, "
                f"{self.with_system / self.conversations:.1%} bring a system turn"
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "conversations": self.conversations,
            "answers": self.answers,
            "thinking_share": self.thinking / self.answers if self.answers else None,
            "tool_call_share": self.calls / self.answers if self.answers else None,
            "turns": {str(turns): count for turns, count in sorted(self.turns.items())},
            "system_share": self.with_system / self.conversations if self.conversations else None,
            "languages": dict(self.languages.most_common()),
        }


def survey(conversations: Iterable[Conversation], every: int = 1) -> Survey:
    """Looks at all conversations, and guesses the language of one in `every`."""
    found = Survey()
    well_formed = (conversation for conversation in conversations if conversation.malformed is None)
    for number, conversation in enumerate(well_formed):
        found.conversations += 1
        messages = conversation.messages or []
        answers = [message for message in messages if message["role"] == "assistant"]
        found.answers += len(answers)
        found.thinking += sum(map(_thinks, answers))
        found.thought_fields.update(key for key in THOUGHT_FIELDS for message in answers if message.get(key))
        found.calls += sum(bool(message.get("tool_calls")) for message in answers)
        found.turns[len(answers)] += 1
        found.with_system += any(message["role"] in ("system", "developer") for message in messages)
        found.with_tools += bool(conversation.tools)
        if number % every == 0:
            found.languages[guess_language(_words_of(conversation))] += 1
    return found


def guess_language(text: str) -> str:
    """Name of a language or a writing system; "Latin, other" or "no letters" where there is none to name."""
    letters = [character for character in text[:_LETTERS] if character.isalpha()]
    if not letters:
        return "no letters"
    scripts = Counter(unicodedata.name(letter, "UNKNOWN").split(" ")[0].split("-")[0] for letter in letters)
    # Japanese is written with Chinese characters as well; any kana among them decides.
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.1 * len(letters):
        return "Japanese"
    script, _ = scripts.most_common(1)[0]
    if script != "LATIN":
        return _SCRIPTS.get(script, script.capitalize())
    votes: Counter[str] = Counter()
    for word in text[: 4 * _LETTERS].lower().split():
        votes.update(_BY_WORD.get(word.strip(".,;:!?()\"'"), ()))
    language, found = votes.most_common(1)[0] if votes else ("", 0)
    return language if found > 1 else "Latin, other"


def _thinks(message: dict[str, Any]) -> bool:
    if any(message.get(key) for key in THOUGHT_FIELDS):
        return True
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content or []]
    return any("</think>" in text for text in texts)


def _words_of(conversation: Conversation) -> str:
    if conversation.messages is None:
        return conversation.text or ""
    contents = (message.get("content") for message in conversation.messages if message["role"] != "system")
    return "\n".join(content for content in contents if isinstance(content, str))
