"""Timing a function on a device, and the device's ceilings to hold the result against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftsmith.target.fp8 import RowwiseLinear, to_rows

HOST_RUNS = 5


@dataclass(frozen=True)
class Timing:
    """Milliseconds over several runs.

    Attributes:
        median, low, high: of the runs.
        deviation: median distance from the median; a run out of line does not change it.
        runs: how many.
    """

    median: float
    low: float
    high: float
    deviation: float
    runs: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        """Of the runs' milliseconds."""
        median = statistics.median(times)
        deviation = statistics.median(abs(time - median) for time in times)
        return cls(median, min(times), max(times), deviation, len(times))

    def to_json(self) -> dict[str, float]:
        return {
            "ms": self.median,
            "ms_min": self.low,
            "ms_max": self.high,
            "ms_deviation": self.deviation,
            "runs": self.runs,
        }


def measure(work: Callable[[], object], device: torch.device, *, warmups: int = 3, runs: int = 10) -> Timing:
    """Runs `work` several times; by device events on CUDA, by the host's clock elsewhere."""
    for _ in range(warmups):
        work()
    times = []
    for _ in range(runs):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - began))
    return Timing.of(times)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Of one run by the host's clock, the device's work included: what a first call costs."""
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def host_milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """How long the host needs to hand `work` to an idle CUDA device: the device starves where this is longer than the
    work itself."""
    times = []
    for _ in range(HOST_RUNS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - began))
    torch.cuda.synchronize(device)
    return statistics.median(times)


def copy_ceiling(device: torch.device) -> float:
    """GB/s of a large copy within the device's memory, reading and writing counted: 2 GiB on CUDA, 64 MiB on CPU."""
    count = (2 << 30 if device.type == "cuda" else 64 << 20) // 4
    source, to = torch.zeros(count, device=device), torch.empty(count, device=device)
    timing = measure(lambda: to.copy_(source), device, runs=10 if device.type == "cuda" else 3)
    return 2 * 4 * count / (timing.median * 1e-3) / 1e9


def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a large square matrix product on random data: 8192³ on CUDA, 1024³ on CPU."""
    size = _ceiling_size(device)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return _ceiling(lambda: left @ right, size, device)


def fp8_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of the same product as fp8 layers do it: float8_e4m3fn with a scale for each row of both, into `dtype`.

    The scaled product alone: rounding the activations is what a layer adds to it.
    """
    size = _ceiling_size(device)
    layer = RowwiseLinear(torch.randn(size, size, device=device), None)
    values_MK, scale_M1 = to_rows(torch.randn(size, size, device=device))

    def product() -> None:
        torch._scaled_mm(
            values_MK,
            layer.weight.t(),
            scale_a=scale_M1,
            scale_b=layer.scale_1N,
            out_dtype=dtype,
            use_fast_accum=device.type == "cuda",
        )

    return _ceiling(product, size, device)


def _ceiling_size(device: torch.device) -> int:
    return 8192 if device.type == "cuda" else 1024


def _ceiling(product: Callable[[], object], size: int, device: torch.device) -> float:
    timing = measure(product, device, warmups=3, runs=10 if device.type == "cuda" else 3)
    return 2 * size**3 / (timing.median * 1e-3) / 1e12
