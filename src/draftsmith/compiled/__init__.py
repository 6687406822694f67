"""Compiled means executed: gate, region and what proves that a compiled kernel ran. Needs torch and nothing of ours."""

from draftsmith.compiled.gate import Compile, CompiledTooLate, Gate, GateError
from draftsmith.compiled.region import FirstUse, Region

__all__ = ["Compile", "CompiledTooLate", "FirstUse", "Gate", "GateError", "Region"]
