"""Pure functions of one training row: anchors, block inputs, labels, and the rule of who sees whom.

Nothing here knows a model or a device; everything runs on the CPU, in prefetch workers.
"""

from draftsmith.blocks.batch import DraftBatch, make_draft_batch
from draftsmith.blocks.row import Document, Row, pack_row
from draftsmith.blocks.rule import Intervals, LayerKind, dense_mask, visible_intervals
from draftsmith.blocks.tiles import TILE, Tiles, make_tiles

__all__ = [
    "TILE",
    "Document",
    "DraftBatch",
    "Intervals",
    "LayerKind",
    "Row",
    "Tiles",
    "dense_mask",
    "make_draft_batch",
    "make_tiles",
    "pack_row",
    "visible_intervals",
]
