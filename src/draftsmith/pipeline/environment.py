"""What a run remembers of where it ran: versions of everything installed, machine, environment variables, sources.

Written as `environment.json` when a run starts; `draftsmith doctor --against RUN` compares with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import draftsmith
from draftsmith.compiled.machine import harmless_environment, source_hash
from draftsmith.errors import UserError, reason_of
from draftsmith.observe.aside import remove_left, written_aside
from draftsmith.pipeline.compiling import machine_facts

SOURCES = Path(draftsmith.__file__).parent


def environment_record() -> dict[str, Any]:
    """All facts, as JSON can hold them. Costs some 100 ms: every installed distribution is read."""
    machine = machine_facts()
    return {
        "draftsmith": draftsmith.__version__,
        "sources": source_hash([SOURCES]),
        "commit": commit(),
        "executable": sys.executable,
        "machine": {**machine, "environment": {**harmless_environment(), **machine["environment"]}},
        "packages": packages(),
    }


def write_record(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file of a run, whole or not at all; what another process that was killed left of it goes.

    Raises:
        UserError: it cannot be written; what was there stays.
    """
    try:
        remove_left(path)
        with written_aside(path) as file:
            file.write(json.dumps(content, indent=1, default=str) + "\n")
    except OSError as error:
        raise UserError(f"cannot be written: {reason_of(error)}", where=str(path)) from None


def package_name(name: str) -> str:
    """As it is compared: "Typing_Extensions" → "typing-extensions"."""
    return name.lower().replace("_", "-")


def packages() -> dict[str, str]:
    """Installed distributions and their versions, by normalised name."""
    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found[package_name(name)] = distribution.version
    return dict(sorted(found.items()))


def commit() -> dict[str, Any] | None:
    """Commit of the checkout that the sources lie in, a hash of what is not committed, and source files that git does
    not know; None outside a checkout. A repository that only has an environment inside it does not count."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        where = str(SOURCES)
        _git(where, "ls-files", "--error-unmatch", "--", "__init__.py")
        head = _git(where, "rev-parse", "HEAD")
        changes = _git(where, "diff", "HEAD", "--", where)
        untracked = _git(where, "ls-files", "--others", "--exclude-standard", "--", where)
        found = {"id": head.strip(), "changes": hashlib.sha256(changes.encode()).hexdigest()[:16] if changes else ""}
        return {**found, **({"untracked": sorted(untracked.splitlines())} if untracked else {})}
    return None


def _git(where: str, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", where, *arguments], capture_output=True, text=True, check=True, timeout=20
    ).stdout
