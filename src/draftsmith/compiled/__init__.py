"""Compiled means executed: gate, region and what proves that a compiled kernel ran. Needs torch and nothing of ours."""

from draftsmith.compiled.evidence import Evidence, EvidenceMissing, Expected, Verdict
from draftsmith.compiled.gate import Compile, CompiledTooLate, Gate, GateError
from draftsmith.compiled.ledger import Entry, Ledger
from draftsmith.compiled.region import FirstUse, Region
from draftsmith.compiled.settings import Settings
from draftsmith.compiled.warmup import Differs, NotCompiled, Turn, WarmUp

__all__ = [
    "Compile",
    "CompiledTooLate",
    "Differs",
    "Entry",
    "Evidence",
    "EvidenceMissing",
    "Expected",
    "FirstUse",
    "Gate",
    "GateError",
    "Ledger",
    "NotCompiled",
    "Region",
    "Settings",
    "Turn",
    "Verdict",
    "WarmUp",
]
