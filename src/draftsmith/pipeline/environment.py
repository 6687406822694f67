"""What a run remembers of where it ran: versions of everything installed, machine, environment variables, sources.

Written as `environment.json` when a run starts; `draftsmith doctor --against RUN` compares with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import draftsmith
from draftsmith.compiled.machine import harmless_environment, source_hash
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


def packages() -> dict[str, str]:
    """Installed distributions and their versions, by normalised name."""
    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found[name.lower().replace("_", "-")] = distribution.version
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
