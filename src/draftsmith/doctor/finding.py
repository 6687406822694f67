"""One thing that the doctor found, and who hears of what takes long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from draftsmith.errors import UserError

Level = Literal["ok", "warn", "unknown", "bad"]
Say = Callable[[str], None]  # told in a line what will take long, before it does


def quiet(_text: str) -> None:
    """For who does not want to hear."""


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and what mends it.

    Attributes:
        check: short name, "torch", "environment variables".
        level: "ok", "warn"; "bad": the fast path will not be taken; "unknown": nobody could find out whether it will.
        text: in words.
        mend: a command or a change; empty where there is nothing to mend.
    """

    check: str
    level: Level
    text: str
    mend: str = ""

    @classmethod
    def of_refusal(cls, check: str, error: UserError) -> Finding:
        """What training refuses."""
        text = f"{error.where}: {error.what}" if error.where else error.what
        return cls(check, "bad", text, error.fix or "draftsmith train CONFIG --plan, once changed")

    def line(self) -> str:
        """For people."""
        sign = {"ok": "ok  ", "warn": "warn", "unknown": "??  ", "bad": "BAD "}[self.level]
        mend = f"\n       mend: {self.mend}" if self.mend else ""
        return f"{sign}  {self.check}: {self.text}{mend}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
