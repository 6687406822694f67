"""Why something of a conversation, or a whole file, cannot be taught: the reasons that reports count, in one place."""

from __future__ import annotations

from typing import NamedTuple

from draftsmith.errors import UserError

MALFORMED = "malformed"
NOT_TEXT = "holds more than text"
NO_MESSAGES = "no messages"
NO_TEXT = "no text"
NO_ASSISTANT = "no assistant turn"
UNWEIGHTED = "the answer has weight 0"
NOTHING_BEFORE = "the answer has nothing before it"
TEMPLATE_FAILS = "the chat template fails on it"
CALL_LEFT_OUT = "the chat template does not write the answer's tool call"
NOT_UNICODE = "holds half of a surrogate pair, which is no text"
NOT_A_CONTINUATION = "the answer as rendered does not continue the generation prompt"
NO_END = "the end of the answer cannot be found in the rendering"
STOP_INSIDE = "the answer holds the stop token as text"
CROSSES_START = "a token crosses the start of the answer"
CROSSES_END = "a token crosses the end of the answer"
NO_ANCHOR = "no two taught tokens in a row"


class UnusableData(UserError):
    """Data were found and read, and what they hold is what is wrong: an answer about them, where they are asked about.

    A file that is not there or may not be read is a plain `UserError`.
    """


class Problem(NamedTuple):
    """Why something of a conversation cannot be taught.

    Attributes:
        reason: one of this module's constants; what is counted.
        detail: what only concerns this conversation (the template's own message, the turn).
    """

    reason: str
    detail: str = ""
