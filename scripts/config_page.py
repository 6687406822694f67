#!/usr/bin/env python
"""Every key of a run's config as a page: docs/config.md.

python scripts/config_page.py            # prints it
python scripts/config_page.py --write    # into docs/config.md
"""

from __future__ import annotations

import argparse
import re
import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from draftsmith.config import RunConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
HEAD = """# Every key of a config

`draftsmith init` writes a config with the keys that matter; this page has all of them, as `draftsmith.config` describes
them. Any key can be given on the command line behind a command's CONFIG, as in `draftsmith train CONFIG
section.key=value`. Written by `python scripts/config_page.py --write`.
"""
NAMES = {str: "text", bool: "true, false", int: "whole number", float: "number", type(None): "none"}


def kind(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """What a value may be, in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return kind(parts[0], annotation.__metadata__)
    if origin is Literal:
        return ", ".join(str(part) for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind(part, metadata) for part in parts))
    if origin is tuple:
        return f"list of {kind(parts[0])}"
    if origin is dict:
        return "keys with values"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "keys of its own"
    bounds = [
        f"{sign} {value:,}"
        for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        for part in metadata
        if (value := getattr(part, name, None)) is not None
    ]
    return f"{NAMES[annotation]} {', '.join(bounds)}".strip() if annotation in (int, float) else NAMES[annotation]


def nested(annotation: Any) -> type[BaseModel] | None:
    """The section inside an annotation, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(nested, get_args(annotation))), None)


def rows(prefix: str, section: type[BaseModel], told: set[type[BaseModel]]) -> list[str]:
    """Of a section, and behind each key of the keys inside it; the same ones stand there once."""
    found = []
    for key, field in section.model_fields.items():
        name, inner = f"{prefix}.{key}", nested(field.annotation)
        found.append(row(name, field))
        if inner is not None and inner not in told:
            told.add(inner)
            many = "[]" if "list" in kind(field.annotation) else ""
            found += rows(f"{name}{many}", inner, told)
    return found


def row(name: str, field: FieldInfo) -> str:
    """Of the table."""
    assert field.description, f"{name} has no description"
    default = field.get_default(call_default_factory=True)
    if field.is_required():
        told = "must be given"
    elif isinstance(default, BaseModel) or default in ((), {}):
        told = "nothing"
    else:
        told = ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)
        told = {"None": "none", "True": "true", "False": "false"}.get(told, told)
    cells = (f"`{name}`", kind(field.annotation, tuple(field.metadata)), told, field.description)
    return f"| {' | '.join(re.sub('[|]', ' or ', cell) for cell in cells)} |"


def page() -> str:
    """All of it."""
    parts = [HEAD]
    for name, section in RunConfig.model_fields.items():
        model = section.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        about = " ".join((model.__doc__ or "").split())
        parts.append(f"## {name}\n{about}\n\n| key | values | default | meaning |\n| --- | --- | --- | --- |")
        parts[-1] += "".join(f"\n{each}" for each in rows(name, model, set())) + "\n"
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
