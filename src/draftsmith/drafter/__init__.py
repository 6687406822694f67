"""The drafter: spec, model, attention, and its place on disk."""

from draftsmith.drafter.attention import build_masks
from draftsmith.drafter.model import DraftCache, DraftModel
from draftsmith.drafter.native import load_drafter, read_spec, save_drafter, save_weights
from draftsmith.drafter.spec import DrafterSpec, resolve_spec

__all__ = [
    "DraftCache",
    "DraftModel",
    "DrafterSpec",
    "build_masks",
    "load_drafter",
    "read_spec",
    "resolve_spec",
    "save_drafter",
    "save_weights",
]
