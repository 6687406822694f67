"""AdamW's update on a GPU in two passes over memory, by Triton; `adamw.py` is the same in torch's operators.

    collect   gradient of the last row, and the float32 sums of the rows before it
              → new sums, or only the sum of squares                                    (deterministic, in two stages)
    adamw     gradient again, master and moments → master, moments, and the weight in the compute dtype

The gradients that autograd left and the weights of the model are many tensors; the kernels find them through tables of
addresses. So nothing has to be copied into a flat buffer first, and a model's parameters stay what they are. The
gradient of an update's last row never becomes float32 in memory: with one row an update that saves two passes.

Bytes for a parameter with bfloat16 weights, one replica, R rows an update:

    rows before the last    6 + 10 · (R - 2)    read 2, write 4; from the second on also read 4     (R > 1)
    squares                 2, or 6 if R > 1
    adamw                   28, or 32 if R > 1: read the same again, read and write master and moments, write 2

30 in all for R = 1. Importing this needs Triton. All kernels are compiled by `FusedUpdate`'s constructor, so that no
two threads compile and no update waits; launching one does not wait for the device.
"""

# A kernel's arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.training.flat import BLOCK, Layout, Segment, span

WARPS = 8
# Elements of a program. A step touches four or five arrays: with one 16-byte access a thread to each, bfloat16 and
# float32 are spread over the threads alike and nothing has to be exchanged. A sum of squares reads one or two, and
# needs more for a thread to do while it waits.
COLLECT, STEP = BLOCK, BLOCK // 4
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _place(flat, segments, firsts, sizes, WHOLE: tl.constexpr):
    """Segment of an element of the buffers, the element's offset in it, and the segment's size."""
    block = flat // WHOLE
    segment = tl.load(segments + block)
    inside = (block - tl.load(firsts + segment)).to(tl.int64) * WHOLE + flat % WHOLE
    return segment, inside, tl.load(sizes + segment)


@triton.jit
def _read(addresses, segment, inside, size, TYPE: tl.constexpr, SIZE: tl.constexpr):
    """float32 [SIZE] of a tensor that is found by its address; zeros behind its end."""
    start = tl.load(addresses + segment).to(tl.pointer_type(TYPE))
    offsets = inside + tl.arange(0, SIZE)
    pointers = tl.multiple_of(start + offsets, [16])
    # A bound that is only known at run time would keep every load from being a wide one.
    if inside + SIZE <= size:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=offsets < size, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _write(addresses, segment, inside, size, values, TYPE: tl.constexpr, SIZE: tl.constexpr):
    start = tl.load(addresses + segment).to(tl.pointer_type(TYPE))
    offsets = inside + tl.arange(0, SIZE)
    pointers = tl.multiple_of(start + offsets, [16])
    if inside + SIZE <= size:
        tl.store(pointers, values.to(TYPE))
    else:
        tl.store(pointers, values.to(TYPE), mask=offsets < size)


@triton.jit(do_not_specialize=["origin"])
def _collect(
    sums,
    partial,
    gradients,
    segments,
    firsts,
    sizes,
    origin,
    LAST: tl.constexpr,
    SUMMED: tl.constexpr,
    STORE: tl.constexpr,
    SQUARES: tl.constexpr,
    TYPE: tl.constexpr,
    WHOLE: tl.constexpr,
    SIZE: tl.constexpr,
):
    start = (origin + tl.program_id(0)).to(tl.int64) * SIZE
    flat = start + tl.arange(0, SIZE)
    if SUMMED:
        total = tl.load(sums + flat)
    if LAST:
        segment, inside, size = _place(start, segments, firsts, sizes, WHOLE)
        last = _read(gradients, segment, inside, size, TYPE, SIZE)
        total = total + last if SUMMED else last
    if STORE:
        tl.store(sums + flat, total)
    if SQUARES:
        tl.store(partial + tl.program_id(0), tl.sum(total * total))


@triton.jit(do_not_specialize=["origin", "decayed"])
def _adamw(
    master,
    exp_avg,
    exp_avg_sq,
    sums,
    factors,
    gradients,
    weights,
    segments,
    firsts,
    sizes,
    origin,
    decayed,
    keep,
    first,
    second,
    eps,
    left,
    LAST: tl.constexpr,
    SUMMED: tl.constexpr,
    TYPE: tl.constexpr,
    WHOLE: tl.constexpr,
    SIZE: tl.constexpr,
):
    if tl.load(factors) != 0:
        start = (origin + tl.program_id(0)).to(tl.int64) * SIZE
        flat = start + tl.arange(0, SIZE)
        own = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        segment, inside, size = _place(start, segments, firsts, sizes, WHOLE)
        w = tl.load(master + own)
        m = tl.load(exp_avg + own)
        v = tl.load(exp_avg_sq + own)
        if SUMMED:
            g = tl.load(sums + flat)
        if LAST:
            last = _read(gradients, segment, inside, size, TYPE, SIZE)
            g = g + last if SUMMED else last
        g *= tl.load(factors + 1)
        m += first * (g - m)
        v = second * v + left * g * g
        if tl.program_id(0) < decayed:
            w *= keep
        w -= tl.load(factors + 2) * tl.div_rn(m, tl.sqrt_rn(v) * tl.load(factors + 3) + eps)
        tl.store(master + own, w)
        tl.store(exp_avg + own, m)
        tl.store(exp_avg_sq + own, v)
        _write(weights, segment, inside, size, w, TYPE, SIZE)


class AddressTable:
    """Addresses of tensors on the device, int64 [tensors]; sent again only when one has changed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: list[int] = []
        self._table: Tensor | None = None

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The table for these tensors. They must be contiguous, begin at a multiple of 16 bytes, and stay alive."""
        addresses = [each.data_ptr() for each in tensors]
        if self._table is None or addresses != self._known:
            assert all(address % 16 == 0 for address in addresses), "a kernel would read beside a tensor"
            on_cuda = self._device.type == "cuda"
            host = torch.tensor(addresses, dtype=torch.int64, pin_memory=on_cuda)
            self._table, self._known = host.to(self._device, non_blocking=on_cuda), addresses
        return self._table


class FusedUpdate:
    """The kernels over one replica's buffers.

    Args:
        layout: of the buffers.
        weights: the model's parameters, in the layout's order.
        alone: whether the last row's gradient may go straight into the step; else everything comes from the sums.

    Attributes:
        seconds: that compiling took, or reading from Triton's cache.
    """

    def __init__(self, layout: Layout, weights: Sequence[Tensor], *, alone: bool) -> None:
        began = time.monotonic()
        self.device, self.type = weights[0].device, TYPES[weights[0].dtype]
        self.layout, self.weights = layout, weights
        self._tables = _tables(layout.segments, self.device)
        self._gradients, self._weights = AddressTable(self.device), AddressTable(self.device)
        self._nothing = torch.zeros(BLOCK, device=self.device)  # in place of buffers that are not there
        self._compile(alone)
        self.seconds = time.monotonic() - began

    def add(self, sums: Tensor, last: Sequence[Tensor], *, summed: bool) -> None:
        """sums += last, or = last. `last` is in the layout's order; `sums` float32 [layout.size]."""
        table = self._gradients.of(last)
        self._collect(sums, self._nothing, table, 0, self.layout.size // COLLECT, True, summed, True, False)

    def squares(self, sums: Tensor | None, last: Sequence[Tensor] | None, owned: Sequence[Segment]) -> Tensor:
        """float32 []: squared norm of sums + last over the owned segments; either may be missing."""
        start, stop = span(owned)
        count = (stop - start) // COLLECT
        partial = torch.empty(count, device=self.device)
        table = self._table(last)
        flat = self._nothing if sums is None else sums
        self._collect(flat, partial, table, start // COLLECT, count, last is not None, sums is not None, False, True)
        return partial.sum()

    def step(
        self,
        state: tuple[Tensor, Tensor, Tensor],
        sums: Tensor | None,
        last: Sequence[Tensor] | None,
        owned: Sequence[Segment],
        decayed: int,
        factors: Tensor,
        betas: tuple[float, float],
        eps: float,
        keep: float,
    ) -> None:
        """One AdamW step; the model gets its weights.

        Args:
            state: master, exp_avg and exp_avg_sq of the owned segments, float32.
            sums, last: as for `squares`.
            owned: AdamW's segments of the owner.
            decayed: elements that weight decay applies to; they come first.
            factors: see `adamw.py`.
            betas, eps, keep: as for `adamw.adamw_step`.
        """
        start, stop = span(owned)
        flat = self._nothing if sums is None else sums
        with self._current():
            _adamw[((stop - start) // STEP,)](
                *state, flat, factors, self._table(last), self._weights.of(self.weights), *self._tables,
                start // STEP, decayed // STEP, keep, 1 - betas[0], betas[1], eps, 1 - betas[1],
                LAST=last is not None, SUMMED=sums is not None,
                TYPE=self.type, WHOLE=BLOCK, SIZE=STEP, num_warps=WARPS,
            )  # fmt: skip

    def _collect(
        self,
        sums: Tensor,
        partial: Tensor,
        table: Tensor,
        origin: int,
        count: int,
        last: bool,
        summed: bool,
        store: bool,
        squares: bool,
    ) -> None:
        with self._current():
            _collect[(count,)](
                sums, partial, table, *self._tables, origin,
                LAST=last, SUMMED=summed, STORE=store, SQUARES=squares,
                TYPE=self.type, WHOLE=BLOCK, SIZE=COLLECT, num_warps=WARPS,
            )  # fmt: skip

    def _table(self, last: Sequence[Tensor] | None) -> Tensor:
        return self._tables[2] if last is None else self._gradients.of(last)

    def _current(self) -> contextlib.AbstractContextManager[object]:
        """Triton launches on the current device, whatever its tensors say."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _compile(self, alone: bool) -> None:
        """Runs every kernel that updates will use, on one block of scratch memory."""
        tables, weights = self._tables, self.weights
        scratch = torch.zeros(BLOCK, dtype=self.weights[0].dtype, device=self.device)
        segment = Segment("scratch", torch.Size([BLOCK]), 0, "plain", 0, BLOCK)
        self._tables, self.weights = _tables([segment], self.device), [scratch]
        state = tuple(torch.zeros(BLOCK, device=self.device) for _ in range(3))
        factors = torch.zeros(4, device=self.device)
        sums = torch.zeros(BLOCK, device=self.device)
        row = [torch.zeros_like(scratch)]
        for summed in (False, True):
            table = self._gradients.of(row)
            self._collect(sums, self._nothing, table, 0, BLOCK // COLLECT, True, summed, True, False)
        # With other ranks, or a row that was not known to be the last, a replica alone steps from its sums, too.
        sources = [(sums, None), *([(None, row), (sums, row)] if alone else [])]
        for flat, last in sources:
            self.squares(flat, last, [segment])
            self.step(state, flat, last, [segment], 0, factors, (0.9, 0.999), 1e-8, 1.0)  # type: ignore[arg-type]
        self._tables, self.weights = tables, weights


def _tables(segments: Sequence[Segment], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(segment of every block, first block of every segment, size of every segment)."""
    counts = torch.tensor([(each.stop - each.start) // BLOCK for each in segments])
    of_block = torch.repeat_interleave(torch.arange(len(segments), dtype=torch.int32), counts)
    firsts = torch.tensor([each.start // BLOCK for each in segments], dtype=torch.int32)
    sizes = torch.tensor([each.size for each in segments], dtype=torch.int64)
    return of_block.to(device), firsts.to(device), sizes.to(device)
