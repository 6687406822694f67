"""The serving contract, checked: every finding has a name, every engine a verdict with the reason.

Three things are held against each other: the files (config and the tensors' names, shapes and dtypes; no weights are
loaded), what each engine would make of them (`engines`), and, if given, the target. Verdicts: "loads", "differs" (it
starts and decodes with something else, usually without a word), "refuses".

Cost: reading headers; the target's configuration and tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.config import TargetConfig
from draftsmith.drafter.config_fields import field_faults
from draftsmith.drafter.native import CONFIG, read_config, stated_spec
from draftsmith.drafter.spec import DrafterSpec
from draftsmith.drafter.speculators_layout import is_speculators
from draftsmith.errors import UserError
from draftsmith.export.engines import ENGINES, READERS, FieldMissing, Reading, differences, meant_by
from draftsmith.export.lint_rules import (
    Files,
    Finding,
    Outcome,
    Severity,
    TargetFacts,
    Tensors,
    check_block_size,
    check_dtype,
    check_faults,
    check_ignored,
    check_quantization,
    check_rope,
    check_taps,
    check_target,
    check_tensors,
    check_vocabulary,
    everybody,
    read_tensors,
)
from draftsmith.target.geometry import geometry_of
from draftsmith.target.load import load_tokenizer
from draftsmith.target.source import locate
from draftsmith.target.source import read_config as read_target_config

_RANK: dict[Outcome, int] = {"loads": 0, "differs": 1, "refuses": 2}


@dataclass(frozen=True)
class Verdict:
    """What one engine will do.

    Attributes:
        engine, version: who, and whose rules.
        outcome: "loads", "differs" or "refuses".
        reasons: why not "loads".
        notes: conditions that come with it.
    """

    engine: str
    version: str
    outcome: Outcome
    reasons: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class LintReport:
    """Result of `lint`.

    Attributes:
        folder: what was read.
        layout: "zlab" or "speculators".
        findings: most severe first.
        verdicts: by engine.
        asked: engines that the answer is about.
    """

    folder: Path
    layout: str
    findings: tuple[Finding, ...]
    verdicts: dict[str, Verdict]
    asked: tuple[str, ...]

    @property
    def fine(self) -> bool:
        """No error, and every engine asked about loads it as it was trained."""
        return not any(finding.severity == "error" for finding in self.findings) and all(
            self.verdicts[name].outcome == "loads" for name in self.asked
        )

    def rules(self) -> set[str]:
        """Names of what was found, plain facts left out."""
        return {finding.rule for finding in self.findings if finding.severity != "info"}

    def lines(self) -> list[str]:
        """For people."""
        words = {"loads": "will load", "differs": "will load but differ", "refuses": "will not load"}
        lines = [f"{self.folder}: {self.layout} layout"]
        lines += [f"{finding.severity:<8}{finding.rule}: {finding.text}" for finding in self.findings]
        for name, verdict in self.verdicts.items():
            asked = "" if name in self.asked else " (not asked about)"
            lines.append(f"{verdict.engine} ({verdict.version}): {words[verdict.outcome]}{asked}")
            lines += [f"  because {reason}" for reason in verdict.reasons]
            lines += [f"  note: {note}" for note in verdict.notes]
        return lines

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "folder": str(self.folder),
            "layout": self.layout,
            "fine": self.fine,
            "findings": [vars(finding) for finding in self.findings],
            "verdicts": {name: vars(verdict) for name, verdict in self.verdicts.items()},
        }


def lint(folder: Path, target: TargetConfig | None = None, engines: tuple[str, ...] = ()) -> LintReport:
    """Checks a drafter on disk.

    Args:
        folder: of the drafter.
        target: the model that it drafts for.
        engines: what the answer is about; none: those that read this layout by themselves.

    Raises:
        UserError: no `config.json`, unreadable weights, or a target that does not exist.
    """
    config, tensors = read_config(folder), read_tensors(folder)
    facts = None if target is None else _target_facts(target)
    layout = "speculators" if is_speculators(config) else "zlab"
    asked = engines or (("vllm", "speculators") if layout == "speculators" else ("zlab", "sglang", "vllm"))
    findings = [Finding("config", "error", text, everybody("refuses")) for text in field_faults(config)]
    readings = {name: Reading() for name in ENGINES}
    # Every rule below takes the fields' types for granted.
    if findings:
        findings.append(Finding("config", "info", "nothing else was checked: the fields above have to be right first"))
    else:
        readings = {name: _read(reader, config) for name, reader in READERS.items()}
        findings = list(_findings(folder, config, tensors, readings, facts))
    order = {"error": 0, "warning": 1, "info": 2}
    findings.sort(key=lambda finding: order[finding.severity])
    verdicts = {name: _verdict(name, readings[name], findings) for name in ENGINES}
    return LintReport(folder, layout, tuple(findings), verdicts, asked)


def _findings(
    folder: Path, config: dict[str, Any], tensors: Tensors, readings: dict[str, Reading], facts: TargetFacts | None
) -> Iterator[Finding]:
    """What every rule says."""
    spec = None
    try:
        spec = stated_spec(config, str(folder / CONFIG), None if facts is None else facts.geometry.layers)
    except UserError as error:
        yield Finding("config", "error", error.what)
    files = Files(folder, config, tensors, spec)
    yield from _from_readings(readings, spec)
    for rule in (
        *(check_faults, check_tensors, check_quantization, check_block_size, check_taps, check_rope),
        *(check_vocabulary, check_dtype, check_ignored),
    ):
        yield from rule(files)
    if facts is not None:
        yield from check_target(files, facts)


def _read(reader: Callable[[dict[str, Any]], Reading], config: dict[str, Any]) -> Reading:
    """A reading; an engine that needs a field which is missing refuses."""
    try:
        return reader(config)
    except FieldMissing as error:
        reading = Reading()
        reading.refuse("config", str(error))
        return reading


def _from_readings(readings: dict[str, Reading], spec: DrafterSpec | None) -> Iterator[Finding]:
    """One finding for each rule by which an engine refuses or differs."""
    meant = None if spec is None else meant_by(spec)
    by_rule: dict[str, dict[str, tuple[Outcome, str]]] = {}
    for name, reading in readings.items():
        for rule, text in reading.refusals:
            by_rule.setdefault(rule, {})[name] = ("refuses", text)
        if meant is not None and not reading.refusals:
            for rule, text in differences(reading, meant):
                by_rule.setdefault(rule, {})[name] = ("differs", text)
    for rule, engines in by_rule.items():
        text = "; ".join(f"{ENGINES[name].name}: {said}" for name, (_, said) in engines.items())
        outcomes = {name: outcome for name, (outcome, _) in engines.items()}
        severity: Severity = "error" if len(engines) == len(ENGINES) else "warning"
        yield Finding(rule, severity, text, outcomes, {name: said for name, (_, said) in engines.items()})
    if meant is not None and spec is not None:
        causal = ", ".join("causal" if is_causal else "bidirectional" for _, is_causal in meant.layers)
        yield Finding("attention", "info", f"trained with layers: {causal}")
        states = list(meant.states)
        yield Finding(
            "tap-offsets",
            "info",
            f"taps {list(spec.taps)} are {states} as transformers counts hidden states, as SGLang and vLLM count the "
            "layers before which they capture, and as speculators' ids",
        )


def _verdict(name: str, reading: Reading, findings: list[Finding]) -> Verdict:
    concerned = [finding for finding in findings if name in finding.outcomes]
    outcome: Outcome = max((finding.outcomes[name] for finding in concerned), key=_RANK.__getitem__, default="loads")
    reasons = tuple(f"{finding.rule}: {finding.said.get(name, finding.text)}" for finding in concerned)
    notes = tuple(text for _, text in reading.notes)
    if outcome != "refuses":
        layers = ", ".join(
            f"{'causal' if causal else 'bidirectional'}{'' if window is None else f' window {window}'}"
            for window, causal in reading.layers
        )
        notes = (f"assumes layers {layers}", *notes)
    return Verdict(ENGINES[name].name, ENGINES[name].version, outcome, reasons, notes)


def _target_facts(config: TargetConfig) -> TargetFacts:
    source = locate(config)
    described = read_target_config(config)
    return TargetFacts(source.name, geometry_of(described, source.name), described, load_tokenizer(config))
