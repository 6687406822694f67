"""Imports go one way: every module imports only from rooms further down, or from its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftsmith

ROOT = Path(draftsmith.__file__).parent
# Lowest first. A room may import from every room before it, except where ONLY says less.
ORDER = (
    "errors", "config", "compiled", "observe", "blocks", "data", "target", "objective", "drafter", "training", "decode",
    "export", "pipeline", "bench", "demo", "doctor", "cli_options", "cli_bench", "cli_compile", "cli_data", "cli_run",
    "cli_export", "cli", "__main__",
)  # fmt: skip
ONLY = {"errors": set(), "config": {"errors"}, "compiled": set(), "observe": {"errors", "config"}}


def room_of(module: str) -> str:
    """draftsmith.data.packing → data; draftsmith itself (the version) → ''."""
    return module.split(".")[1] if "." in module else ""


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Full names of everything a source imports, wherever in the file; `package` is what relative names start from."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            # "from draftsmith import data" names a room in what looks like an attribute.
            yield from ((f"{base}.{alias.name}" for alias in node.names) if base == "draftsmith" else [base])


def forbidden(source: str, module: str) -> list[str]:
    """Imports of `source` that its room may not have."""
    room = room_of(module)
    allowed = ONLY.get(room, set(ORDER[: ORDER.index(room)])) | {room, "", "__version__"}
    names = [name for name in imported_modules(source, module.rpartition(".")[0]) if name.split(".")[0] == "draftsmith"]
    return [name for name in names if room_of(name) not in allowed]


def modules() -> list[tuple[str, Path]]:
    paths = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]
    return [(".".join(["draftsmith", *path.relative_to(ROOT).with_suffix("").parts]), path) for path in paths]


@pytest.mark.parametrize(("module", "path"), modules(), ids=[module for module, _ in modules()])
def test_imports_go_down(module: str, path: Path) -> None:
    assert room_of(module) in ORDER, f"{module}: give its room a place in ORDER"
    assert forbidden(path.read_text(encoding="utf-8"), module) == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("draftsmith.data.packing", "from draftsmith.blocks.row import Row", []),
        ("draftsmith.data.packing", "from . import stream", []),
        ("draftsmith.data.packing", "from draftsmith.decode.generate import Answer", ["draftsmith.decode.generate"]),
        ("draftsmith.data.packing", "def f():\n    import draftsmith.pipeline.run", ["draftsmith.pipeline.run"]),
        ("draftsmith.data.packing", "from draftsmith import decode", ["draftsmith.decode"]),
        ("draftsmith.data.packing", "from ..decode import evaluate", ["draftsmith.decode"]),
        ("draftsmith.compiled.gate", "from draftsmith.errors import UserError", ["draftsmith.errors"]),
        ("draftsmith.observe.live", "from draftsmith.blocks.row import Row", ["draftsmith.blocks.row"]),
        ("draftsmith.cli", "from draftsmith.demo.run import run_demo\nfrom draftsmith import __version__", []),
    ],
)
def test_the_rule_itself(module: str, source: str, found: list[str]) -> None:
    assert forbidden(source, module) == found
