"""All checks in order: machine, packages, environment, and with a config what training refuses and its fast paths."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from draftsmith.config import RunConfig
from draftsmith.doctor import fast_paths, machine, packages, refusals
from draftsmith.doctor.finding import Finding, Say, quiet
from draftsmith.errors import UserError


def examine(config: RunConfig | None = None, constraints: Path | None = None, say: Say = quiet) -> list[Finding]:
    """Everything that can be found out without loading weights.

    Args:
        config: adds the checks of its devices, its compile settings and its target's layers.
        constraints: a file of pinned versions to compare with; None: `constraints.txt` where one is beside the sources.
        say: is told in a line what will take long, before it does.
    """
    findings = [*machine.check(config), *packages.check(constraints)]
    if config is not None:
        topology, geometry, refused = refusals.check(config)
        findings += refused
        if topology is None or geometry is None:  # nothing to try fast paths on
            return findings
        try:
            findings += fast_paths.check(config, topology, say)
        except UserError as error:
            findings.append(Finding.of_refusal("config", error))
    return findings


def healthy(findings: Iterable[Finding]) -> bool:
    """Whether the configured fast path will be taken, as far as everything could be found out."""
    return all(finding.level in ("ok", "warn") for finding in findings)


def verdict(findings: Iterable[Finding]) -> str:
    """In words, whether the configured fast path will be taken."""
    levels = {finding.level for finding in findings}
    if "bad" in levels:
        return "the configured fast path will NOT be taken"
    if "unknown" in levels:
        return "the configured fast path may be taken, as far as could be found out"
    return "the configured fast path will be taken"
