"""Muon for all matrices of one shape at a time, on flat float32 buffers.

    b = b + (1 - μ)(g - b)                      momentum
    u = g + μ (b - g)                           Nesterov
    o = five Newton-Schulz steps of u / ‖u‖     bfloat16: nearly the nearest orthogonal matrix
    w = (1 - lr · decay) w - lr · √max(1, rows / columns) · o

The rule, its constants and its state are `torch.optim.Muon`'s; tests hold one against the other. Torch goes matrix by
matrix, some twenty launches each; here equal matrices are one batch, which is a view of the flat buffers.

Costs 10 · rows² · (2 · columns + rows) FLOP for a matrix whose rows are not more than its columns: for large drafters
that is as much as a row's training, and no batching helps.

Source: Keller Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.training.flat import Segment, padded

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SMALLEST_NORM = 1e-7
LARGEST_BATCH = 2**26  # elements: bounds what a batch takes in temporary memory


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape that follow each other: `count` of [rows, columns] from element `start` on."""

    start: int
    count: int
    rows: int
    columns: int

    def of(self, flat: Tensor) -> Tensor:
        """[count, rows, columns], a view."""
        size = self.rows * self.columns
        whole = flat[self.start :][: self.count * padded(size)].view(self.count, -1)
        return whole[:, :size].unflatten(1, (self.rows, self.columns))


def step_flops(shape: Sequence[int]) -> float:
    """FLOP of the matrix products of one step of one matrix."""
    small, large = min(shape), max(shape)
    return 2.0 * STEPS * small**2 * (2 * large + small)


def batches(segments: Sequence[Segment], origin: int) -> list[Batch]:
    """Batches of segments that lie next to each other, in a buffer that begins at element `origin`."""
    found = []
    for (rows, columns), equal in itertools.groupby(segments, lambda each: tuple(each.shape)):
        group = list(equal)
        most = max(1, LARGEST_BATCH // (rows * columns))
        for first in range(0, len(group), most):
            part = group[first : first + most]
            found.append(Batch(part[0].start - origin, len(part), rows, columns))
    return found


def muon_step(
    master: Tensor, momentum: Tensor, gradient: Tensor, go: Tensor, scale: Tensor, lr: float, decay: float
) -> None:
    """One step of a batch, in place.

    Args:
        master, momentum: float32 [count, rows, columns].
        gradient: float32, the same; read only, may be anything where `go` is false.
        go: bool []: whether the step counts; if not, nothing changes.
        scale: float32 []: of the gradient.
        lr, decay: Muon's.
    """
    g = torch.where(go, gradient * scale, 0.0)
    momentum.lerp_(g, (1 - MOMENTUM) * go)
    update = g.lerp_(momentum, MOMENTUM).bfloat16() * go  # a zero matrix stays zero
    rows, columns = master.shape[1:]
    orthogonal = orthogonalise(update.mT).mT if rows > columns else orthogonalise(update)
    if decay:
        master.mul_(1 - lr * decay * go)
    master.add_(orthogonal, alpha=-lr * math.sqrt(max(1, rows / columns)))


def orthogonalise(matrices: Tensor) -> Tensor:
    """Newton-Schulz steps on bfloat16 [count, rows, columns] with rows ≤ columns: singular values go to about 1."""
    a, b, c = COEFFICIENTS
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    x = matrices / norms.clamp_min(SMALLEST_NORM)
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x
