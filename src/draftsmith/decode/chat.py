"""A conversation with a target and its drafter, seen while it is decoded: which words were drafted, in which slot.

`Chat` keeps the messages and decodes; `Painter` turns tokens into coloured text as they come and counts. Text is cut
where it can be shown: bytes of a character that is not complete yet wait for the next token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from draftsmith.decode.prompts import Prompt, encode_prompts, has_template
from draftsmith.decode.proposers import DrafterProposer
from draftsmith.decode.rounds import room_for_answer, stop_ids_of
from draftsmith.decode.speculative import Decoded, StaticRounds, decode
from draftsmith.errors import UserError

# Slot 1, 2, …: from warm to cold, because a late slot that stands is the rarer thing. The target's own words are plain.
SLOT_COLOURS = (
    "yellow3",
    "chartreuse3",
    "spring_green3",
    "turquoise2",
    "deep_sky_blue1",
    "slate_blue1",
    "medium_orchid",
)

_MOST_BYTES = 4


class Chat:
    """Messages so far, and how the next answer is decoded.

    Args:
        target: a loaded target.
        drafter: for it, on its device and in its dtype.
        block_size: slots at decoding; none: as trained.
        sampling: temperature, top_k, top_p and seed, as `decode` takes them.
        template_options: passed to the chat template.
        rounds: how rounds are run; none: as captured graphs where that is possible.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any,
        *,
        max_new_tokens: int = 512,
        block_size: int | None = None,
        sampling: dict[str, Any] | None = None,
        template_options: dict[str, Any] | None = None,
        rounds: StaticRounds | None = None,
    ) -> None:
        self.rounds = StaticRounds(target) if rounds is None else rounds
        self._target, self._drafter = target, drafter
        self._options, self._sampling, self._limit = template_options, sampling or {}, max_new_tokens
        self.messages: list[dict[str, Any]] = []
        self.use_block_size(block_size)

    def use_block_size(self, block_size: int | None) -> None:
        """Drafts with this many slots from now on; 1 drafts nothing.

        Raises:
            UserError: more slots than the drafter was trained with, or none.
        """
        self._proposer = DrafterProposer(self._drafter, self._target.head(), block_size)

    @property
    def block_size(self) -> int:
        return self._proposer.block_size

    def say(self, text: str, on_round: Callable[[list[int], int], None]) -> Decoded:
        """Decodes the answer to `text` and keeps both. Without a chat template the text is continued, nothing kept.

        Raises:
            UserError: see `decode`; also a text that the chat template refuses, or a conversation that has outgrown the
                target's positions. `text` is not kept then.
            KeyboardInterrupt: from outside; what was said until then is kept.
        """
        tokenizer = self._target.tokenizer
        chatting = has_template(tokenizer)
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = Prompt("chat", messages=asked) if chatting else Prompt("chat", text=text)
        ids = encode_prompts([prompt], tokenizer, self._options)[0]
        room = room_for_answer(self._target, ids, self._limit)
        if not room:
            positions = self._target.geometry.max_position_embeddings
            raise UserError(
                f"the conversation of {len(ids):,} tokens has outgrown the target's {positions:,} positions",
                where="chat",
                fix="/new starts over" if self.messages else "say it in fewer words",
            )
        stops = stop_ids_of(self._target)
        said: list[int] = []

        def listen(tokens: list[int], drafted: int) -> None:
            said.extend(tokens)
            on_round(tokens, drafted)

        def keep() -> None:
            words = tokenizer.decode([token for token in said if token not in stops])
            self.messages = [*asked, {"role": "assistant", "content": words}] if chatting else []

        try:
            decoded = decode(
                self._target,
                ids,
                self._proposer,
                max_new_tokens=room,
                stop_ids=stops,
                on_round=listen,
                rounds=self.rounds,
                **self._sampling,
            )
        except KeyboardInterrupt:
            keep()
            raise
        keep()
        return decoded


class Painter:
    """Shows an answer while it comes: drafted words in the colour of their slot, a line of figures below.

    Args:
        console: to draw on; without a terminal there are neither colours nor a line that changes.
        tokenizer: of the target.
        stop_ids: tokens that are not shown.
        block_size: slots of a block.
    """

    def __init__(self, console: Console, tokenizer: Any, stop_ids: frozenset[int], block_size: int) -> None:
        self._console, self._tokenizer, self._stops, self._slots = console, tokenizer, stop_ids, block_size
        self._tokens: list[int] = []
        self._shown_from = self._shown_to = 0  # the tokens whose text is already there, as a window for the next ones
        self._line = Text()
        self._rounds = self._emitted = 0
        self._by_slot = [0] * max(1, block_size)
        self._began = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Painter:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        if self._emitted:
            self._bring_out("")
            self._show_line()

    def __call__(self, tokens: list[int], drafted: int) -> None:
        """One round: `drafted` tokens that stood, then the target's own."""
        if self._emitted:
            self._rounds += 1
            self._by_slot[drafted if drafted < len(self._by_slot) else -1] += 1
        else:
            self._began = time.monotonic()  # the first token is the prefill's
        self._emitted += len(tokens)
        for place, token in enumerate(tokens, start=1):
            if token not in self._stops:
                self._add(token, SLOT_COLOURS[(place - 1) % len(SLOT_COLOURS)] if place <= drafted else "")
        if self._live is not None:
            self._live.update(Group(self._line, Text(self.status(), style="dim")), refresh=True)

    @property
    def tau(self) -> float:
        """Tokens per target forward after the prefill."""
        return (self._emitted - 1) / self._rounds if self._rounds else 0.0

    def status(self) -> str:
        """τ, speed, and how far drafts went, in one line."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        stood = [sum(self._by_slot[slot:]) / max(1, self._rounds) for slot in range(1, self._slots)]
        slots = " ".join(f"{share:.2f}" for share in stood[:6])
        return (
            f"τ {self.tau:.2f} · {max(0, self._emitted - 1) / seconds:.0f} tok/s · {self._emitted} tokens, "
            f"{self._rounds} rounds · slots {slots or 'none'}"
        )

    def _add(self, token: int, colour: str) -> None:
        self._tokens.append(token)
        waiting = len(self._tokens) - self._shown_to
        whole = self._tokenizer.decode(self._tokens[self._shown_from :])
        # Half a character waits for its other bytes; no character has more than four.
        if waiting >= _MOST_BYTES or not whole.endswith("\ufffd"):
            self._bring_out(colour)

    def _bring_out(self, colour: str) -> None:
        """Appends the text of all tokens that waited; finished lines scroll away above."""
        before = self._tokenizer.decode(self._tokens[self._shown_from : self._shown_to])
        piece = self._tokenizer.decode(self._tokens[self._shown_from :])[len(before) :]
        if self._shown_to < len(self._tokens):
            self._shown_from, self._shown_to = self._shown_to, len(self._tokens)
        *finished, rest = piece.split("\n")
        for part in finished:
            self._line.append(part, style=colour)
            self._show_line()
        self._line.append(rest, style=colour)

    def _show_line(self) -> None:
        self._console.print(self._line, soft_wrap=True)
        self._line = Text()


def legend(block_size: int) -> Text:
    """Which colour stands for which slot."""
    text = Text("drafted in slot ")
    for slot in range(1, block_size):
        text.append(f"{slot} ", style=SLOT_COLOURS[(slot - 1) % len(SLOT_COLOURS)])
    text.append("  the target's own words are plain")
    return text


def tell(console: Console, text: str, style: str = "dim") -> None:
    """Prints a line as it is: in what users and targets write, brackets and colons mean nothing."""
    console.print(Text(text, style=style), soft_wrap=True)


def answer(chat: Chat, target: Any, console: Console, text: str) -> None:
    """Shows the answer to `text` as it comes, and its figures. Ctrl-C ends the answer.

    Raises:
        UserError: see `Chat.say`.
    """
    painter = Painter(console, target.tokenizer, stop_ids_of(target), chat.block_size)
    try:
        with painter:
            chat.say(text, painter)
    except KeyboardInterrupt:
        tell(console, "(stopped)")
    tell(console, painter.status())


def converse(chat: Chat, target: Any, console: Console, ask: Callable[[], str]) -> int:
    """Asks, answers and shows until there is nothing more to say; returns the answers given.

    `/new` forgets the conversation, `/block N` drafts with N slots, `/quit` ends. Ctrl-C ends the answer under way,
    or empties the line that is being written.
    What else begins with a slash is an error of the user's, and goes nowhere.

    Args:
        ask: returns what the user says; raises EOFError at the end.
    """
    console.print(legend(chat.block_size))
    tell(console, "/new forgets, /block N drafts with N slots (1: none), /quit ends; Ctrl-C stops an answer")
    answers = 0
    while True:
        try:
            text = ask().strip()
        except EOFError:
            console.print()  # the prompt's line is still open
            return answers
        except KeyboardInterrupt:  # perhaps meant for an answer that ended just before
            console.print()
            tell(console, "/quit or Ctrl-D ends")
            continue
        if text in ("/quit", "/exit"):
            return answers
        try:
            if text.startswith("/"):
                tell(console, _obey(chat, text))
            elif text:
                answer(chat, target, console, text)
                answers += 1
        except UserError as error:
            tell(console, str(error), "red")


def _obey(chat: Chat, text: str) -> str:
    """Does what a line that begins with a slash asks for, and returns what to tell.

    Raises:
        UserError: there is no such command, or its number is none.
    """
    command, *words = text.split()
    if command == "/new" and not words:
        chat.messages.clear()
        return "forgotten"
    if command != "/block":
        raise UserError("no such command", where=text, fix="/new, /block N, /quit")
    try:
        (word,) = words
        slots = int(word)
    except ValueError:
        raise UserError("is not one whole number of slots", where=text, fix="/block N") from None
    chat.use_block_size(slots)
    return f"blocks of {chat.block_size}"
