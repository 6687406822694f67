"""Compare this environment with a run's, and the commands that make one like it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftsmith.compiled.machine import differences
from draftsmith.errors import UserError, reason_of
from draftsmith.observe.shape import ENVIRONMENT
from draftsmith.pipeline.environment import environment_record

RECORD = "environment.json"


def environment_of(run: Path) -> dict[str, Any]:
    """A run's `environment.json`.

    Raises:
        UserError: the run has none, or it cannot be read.
    """
    path = run / RECORD
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("no record of an environment here: not a run folder?", where=str(run.resolve())) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot be read: {reason_of(error)}", where=str(path)) from None
    try:
        ENVIRONMENT.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "all of it"
        raise UserError(f"is no record of an environment: {place}: {first['msg']}", where=str(path)) from None
    return content


def against(run: Path) -> list[str]:
    """What changed since that run, one line each, "packages.torch: 2.11.0 there, 2.13.0 here"."""
    return differences(environment_of(run), environment_record())


def restore(run: Path) -> list[str]:
    """Commands for a clean environment and checkout like that run's.

    What cannot be restored by commands (driver, GPU, uncommitted changes, own builds, sources without a commit) is said
    in comment lines.
    """
    record = environment_of(run)
    machine = record["machine"]
    python = str(machine.get("python", "3"))
    lines = [f"# as {run} ran: Python {python}, torch {machine.get('torch')}, GPUs {machine.get('gpus') or 'none'}"]
    if machine.get("driver"):
        lines.append(f"# NVIDIA driver {machine['driver']}: not restored by these commands")
    checkout = record["commit"] if record.get("commit") else None
    if checkout:
        lines += _checkout(checkout)
    lines.append(f"python{shlex.quote('.'.join(python.split('.')[:2]))} -m venv .venv")
    lines += _installs({name: version for name, version in record["packages"].items() if name != "draftsmith"})
    if checkout:
        lines.append(".venv/bin/pip install --no-deps --editable .")
    else:
        sources = f"sources with hash {record['sources']}" if record.get("sources") else "no hash of its sources"
        lines.append(
            f"# draftsmith {record['draftsmith']}: no index holds it, and the run recorded no commit, but {sources}"
        )
        lines.append("# from a folder with those sources: .venv/bin/pip install --no-deps --editable FOLDER")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in machine["environment"].items()]
    return lines


def _checkout(commit: dict[str, Any]) -> list[str]:
    """The run's sources in a folder of their own; what git did not keep of them is said."""
    folder = shlex.quote(f"../draftsmith-{commit['id'][:12]}")
    lines = [
        "# in a checkout of Draftsmith:",
        f"git worktree add {folder} {shlex.quote(commit['id'])}",
        f"cd {folder}",
    ]
    if commit.get("changes"):
        lines.append(f"# the run had changes that were not committed (hash {commit['changes']}): not restored")
    if commit.get("untracked"):
        names = ", ".join(map(str, commit["untracked"]))
        lines.append(f"# the run had source files that git did not track: {names}: not restored")
    return lines


def _installs(packages: dict[str, str]) -> list[str]:
    """Commands for all packages, torch from its own index; builds that no index holds are said."""
    packages = dict(packages)
    tooling: dict[str, str] = {name: packages.pop(name) for name in ("pip", "setuptools", "wheel") if name in packages}
    torch = packages.pop("torch", "")
    version, _, build = torch.partition("+")
    local = {name: each for name, each in packages.items() if "+" in each}
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    if build and not re.fullmatch(r"cpu|xpu|cu\d+|rocm[\d.]+", build):
        local, torch = {"torch": torch, **local}, ""
    lines = [_pip(tooling)] if tooling else []
    lines += [f"{_pip({'torch': version})}{index}"] if torch else []
    if local:
        names = ", ".join(f"{name} {each}" for name, each in local.items())
        lines.append(f"# builds of somebody's own, which no index holds: {names}: not restored")
    pins = {name: each for name, each in packages.items() if name not in local}
    return [*lines, _pip(pins, "--no-deps ")] if pins else lines


def _pip(pins: dict[str, str], options: str = "") -> str:
    return f".venv/bin/pip install {options}" + " ".join(
        shlex.quote(f"{name}=={version}") for name, version in pins.items()
    )
