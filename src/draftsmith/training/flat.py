"""Where every parameter lies in the flat float32 buffers of an update.

Gradient sums, masters and optimizer state are one buffer each, and a parameter is a segment of it: a few kernels over
gigabytes instead of a few for every tensor, and an owner's part of a replica's sums is one view, so one peer copy.

    replica's sums   | owner 0: decayed · plain · muon | owner 1: decayed · plain · muon | …
    owner's buffers  | decayed · plain · muon |

A segment starts at a multiple of `BLOCK` and is padded with zeros, so a kernel's program never sees two of them, every
access is aligned, and an element's result does not depend on its neighbours. Matrices of one shape that Muon updates
follow each other: a batch for its products is a view, too. Costs BLOCK/2 elements a parameter on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 4096  # elements
DECAYED, PLAIN, MUON = "decayed", "plain", "muon"  # AdamW with weight decay and without, Muon
RULES = (DECAYED, PLAIN, MUON)


@dataclass(frozen=True)
class Segment:
    """One parameter's place, in elements from the start of a replica's sums.

    Attributes:
        name, shape: of the parameter.
        owner: replica that updates it.
        rule: one of `RULES`.
        start, size: where it lies, without padding.
    """

    name: str
    shape: torch.Size
    owner: int
    rule: str
    start: int
    size: int

    @property
    def stop(self) -> int:
        """End of its padding."""
        return self.start + padded(self.size)


@dataclass(frozen=True)
class Layout:
    """All segments, in the order in which they lie.

    Attributes:
        segments: every parameter of the model.
        size: elements of the whole.
    """

    segments: tuple[Segment, ...]
    size: int

    def owned_by(self, owner: int, *rules: str) -> tuple[Segment, ...]:
        """Segments of an owner, of some rules only if they are named; next to each other."""
        return tuple(each for each in self.segments if each.owner == owner and (not rules or each.rule in rules))


def make_layout(shapes: dict[str, torch.Size], owners: dict[str, int], *, muon: bool) -> Layout:
    """The layout of a model's parameters.

    Args:
        shapes: by name.
        owners: by name.
        muon: whether matrices are Muon's; otherwise AdamW's, with weight decay. Vectors are AdamW's, without.
    """

    def rule(name: str) -> str:
        if len(shapes[name]) != 2:
            return PLAIN
        return MUON if muon else DECAYED

    start, segments = 0, []
    for name in sorted(shapes, key=lambda name: (owners[name], RULES.index(rule(name)), tuple(shapes[name]), name)):
        size = math.prod(shapes[name])
        segments.append(Segment(name, shapes[name], owners[name], rule(name), start, size))
        start += padded(size)
    return Layout(tuple(segments), start)


def padded(size: int) -> int:
    """Elements that a parameter of `size` takes up."""
    return -(-size // BLOCK) * BLOCK


def span(segments: Iterable[Segment]) -> tuple[int, int]:
    """(start, stop) of segments that lie next to each other; (0, 0) of none."""
    segments = tuple(segments)
    return (segments[0].start, segments[-1].stop) if segments else (0, 0)


def views(flat: Tensor, segments: Iterable[Segment], origin: int = 0) -> list[Tensor]:
    """The parameters in a buffer whose first element is element `origin` of a replica's sums."""
    return [flat[each.start - origin :][: each.size].view(each.shape) for each in segments]
