"""Writes made-up conversations, for timing `draftsmith data prepare`. They mean nothing; their lengths are like chat.

    python scripts/make_conversations.py 1000000 chats.jsonl
    draftsmith data prepare CONFIG data.train=chats.jsonl

A conversation has one to three turns. Questions have one to three sentences, answers one to ten, few more often than
many. Words are made of syllables and repeat as words do (the n-th commonest is about 1/n as frequent). Seeded: the same
file every time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SYLLABLES = ("ka", "lo", "mi", "ren", "tos", "vi", "sha", "qu", "er", "ing", "tion", "al", "be", "str", "ou", "nd")
VOCABULARY = 20_000
SENTENCES = 50_000


def conversations(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yields `count` conversations as records of the layout "messages"."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randrange(1, 5))) for _ in range(VOCABULARY)]
    weights = list(itertools.accumulate(1 / (rank + 10) for rank in range(VOCABULARY)))
    sentences = [
        " ".join(rng.choices(words, cum_weights=weights, k=rng.randrange(4, 16))).capitalize() + rng.choice(".?!")
        for _ in range(SENTENCES)
    ]

    def text(most: int) -> str:
        return " ".join(rng.choices(sentences, k=1 + int(most * rng.random() ** 2)))

    for number in range(count):
        messages = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            messages += [
                {"role": "user", "content": text(3)},
                {"role": "assistant", "content": text(10)},
            ]
        # A number makes every conversation another one.
        messages[0]["content"] += f" {number}"
        yield {"messages": messages}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with arguments.output.open("w", encoding="utf-8") as file:
        for conversation in conversations(arguments.count, arguments.seed):
            file.write(json.dumps(conversation) + "\n")


if __name__ == "__main__":
    main()
