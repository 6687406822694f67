"""The README's commands exist as they are written: every command, every option, every key of the config."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from draftsmith.cli import app
from draftsmith.config import _apply_override, parse_config

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every line of a shell block that calls draftsmith."""
    found = []
    for page in PAGES:
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").split("\n"):
                words = shlex.split(line, comments=True)
                if words and words[0] == "draftsmith":
                    found.append((page.name, words[1:]))
    return found


def problems(words: list[str]) -> list[str]:
    """What of a command line the program does not know."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while hasattr(command, "commands"):
        if not rest or rest[0] not in command.commands:
            return [f"no command {' '.join(words[: len(words) - len(rest) + 1])}"]
        command = command.commands[rest.pop(0)]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    found = [f"no option {word}" for word in rest if word.startswith("--") and word.split("=")[0] not in options]
    content: dict[str, Any] = {"target": {"path": "x"}, "data": {"train": "x"}}
    for word in rest:
        if re.match(r"[a-z_.]+=", word) and command.name == "train":
            _apply_override(content, word)
    parse_config(content)
    return found


@pytest.mark.parametrize(
    ("page", "words"), commands(), ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60]
)
def test_a_command_of_the_docs_exists(page: str, words: list[str]) -> None:
    assert problems(words) == []


def test_there_are_commands_and_wrong_ones_are_found() -> None:
    assert len([words for page, words in commands() if page == "README.md"]) >= 15
    assert problems(["train", "x.yaml", "--ressume"]) == ["no option --ressume"]
    assert problems(["trane", "x.yaml"]) == ["no command trane"]
