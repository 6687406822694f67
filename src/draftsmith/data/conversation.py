"""One conversation, before it is tokens."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Conversation:
    """One record of a data file.

    Attributes:
        source: "file:number", for messages to people; the number is the line in JSON lines, else the record.
        messages: chat messages as the template wants them, or None for plain text.
        text: plain text, or None for chat.
        tools: tool descriptions for the chat template.
        cut: the last answer stopped at a length limit (`"finish_reason": "length"` beside it), so its end is not the
            model's and is not taught.
        unweighted: numbers of the answers that are not to be taught (`"weight": 0`), counted from 1 among the
            assistant's messages.
        problem: why it cannot be used whatever the template says (an image), or None.
        malformed: why it is no conversation at all (no JSON, no role), or None.
        layout: name of the layout that it was found in.
    """

    source: str
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    cut: bool = False
    unweighted: frozenset[int] = frozenset()
    problem: str | None = None
    malformed: str | None = None
    layout: str = field(default="", compare=False)

    def key(self) -> int:
        """64-bit hash of the content, the same wherever the conversation stands and whatever its JSON spacing was."""
        content = self.text if self.messages is None else [self.messages, self.tools]
        canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
        return int.from_bytes(hashlib.blake2b(canonical.encode("ascii"), digest_size=8).digest(), "little")
