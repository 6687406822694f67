"""Compare this environment with a run's, and the commands that make one like it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.compiled.machine import differences
from draftsmith.errors import UserError
from draftsmith.pipeline.environment import environment_record

RECORD = "environment.json"


def read_record(run: Path) -> dict[str, Any]:
    """A run's `environment.json`.

    Raises:
        UserError: the run has none, or it cannot be read.
    """
    path = run / RECORD
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("no record of an environment here: not a run folder?", where=str(path)) from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from None
    if not isinstance(content, dict):
        raise UserError("holds no record", where=str(path))
    return content


def against(run: Path) -> list[str]:
    """What changed since that run, one line each, "packages.torch: 2.11.0 there, 2.13.0 here"."""
    return differences(read_record(run), json.loads(json.dumps(environment_record(), default=str)))


def restore(run: Path) -> list[str]:
    """Commands for a clean environment and checkout like that run's.

    What cannot be restored by commands (driver, GPU, uncommitted changes) is said in comment lines.
    """
    record = read_record(run)
    machine = record.get("machine", {})
    python = str(machine.get("python", "3"))
    lines = [f"# as {run} ran: Python {python}, torch {machine.get('torch')}, GPUs {machine.get('gpus') or 'none'}"]
    if machine.get("driver"):
        lines.append(f"# NVIDIA driver {machine['driver']}: not restored by these commands")
    checkout = record.get("commit")
    if checkout:
        lines.append(f"git worktree add ../draftsmith-{checkout['id'][:12]} {checkout['id']}")
        lines.append(f"cd ../draftsmith-{checkout['id'][:12]}")
        if checkout.get("changes"):
            lines.append(f"# the run had changes that were not committed (hash {checkout['changes']})")
    lines.append(f"python{'.'.join(python.split('.')[:2])} -m venv .venv")
    packages = {name: version for name, version in record.get("packages", {}).items() if name != "draftsmith"}
    torch = packages.pop("torch", None)
    tooling = {name: packages.pop(name) for name in ("pip", "setuptools", "wheel") if name in packages}
    lines += [f".venv/bin/pip install {name}=={version}" for name, version in tooling.items() if name == "pip"]
    if torch:
        version, _, build = torch.partition("+")
        index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
        lines.append(f".venv/bin/pip install torch=={version}{index}")
    pins = " ".join(f"{name}=={version}" for name, version in packages.items() if "+" not in version)
    lines.append(f".venv/bin/pip install --no-deps {pins}")
    lines.append(
        ".venv/bin/pip install --no-deps " + ("--editable ." if checkout else f"draftsmith=={record['draftsmith']}")
    )
    environment = machine.get("environment", {})
    lines += [f"export {name}='{value}'" for name, value in environment.items()]
    return lines
