"""Words at random, as texts and as conversations: something to train on where nothing has to be learned."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = (
    "the", "a", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "then", "it", "runs", "far", "away",
    "from", "here", "to", "there", "again",
)  # fmt: skip


def words(generator: random.Random, count: int) -> str:
    """So many words in a row."""
    return " ".join(generator.choices(WORDS, k=count))


def write_texts(path: Path, generator: random.Random, lines: int = 200) -> None:
    """Writes JSON lines of plain texts of 10 to 60 words."""
    with path.open("w", encoding="utf-8") as file:
        for _ in range(lines):
            file.write(json.dumps({"text": words(generator, generator.randint(10, 60))}) + "\n")


def write_conversations(path: Path, generator: random.Random, tokens: int) -> None:
    """Writes JSON lines of a question of 8 words and an answer of 60 to 400, of so many words altogether at least."""
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < tokens:
            count = generator.randint(60, 400)
            messages = [
                {"role": "user", "content": words(generator, 8)},
                {"role": "assistant", "content": words(generator, count)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
            written += count
