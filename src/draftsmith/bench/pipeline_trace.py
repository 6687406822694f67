"""A few updates of a running pipeline under the profiler: how long each device had nothing to do.

Only the devices' own events are recorded. A device's idle share is the part of the traced time in which none of its
kernels and copies ran; the ends of it do not count, which starting and stopping the profiler may disturb.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.bench.pipeline_figures import WARM, Watch
from draftsmith.pipeline.link import Stop

TRACED = 4  # updates under the profiler, in the middle
RAMP = 0.2  # of the traced time, at either end, that starting and stopping the profiler may disturb
KERNELS = "kernels.json"


def trace(steps: int, watch: Watch, stop: Stop, scratch: Path) -> None:
    """Has some updates in the middle profiled; the devices' events only."""
    first = max(WARM, steps // 2)
    if steps < first + TRACED + 1 or not watch.wait_for(first, stop):
        return
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.start()
    watch.wait_for(len(watch.ends) + TRACED, stop)
    profiler.stop()
    profiler.export_chrome_trace(str(scratch / KERNELS))


def read_trace(path: Path) -> dict[str, Any]:
    """Idle share of every device, and milliseconds of copies between devices for a row."""
    if not path.exists():
        return {}
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    on_device = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not on_device:
        return {}
    found = {f"cuda:{number}": share for number, share in idle_shares(on_device).items()}
    peer = [each["dur"] for each in on_device if "PtoP" in each.get("name", "")]
    large = [each for each in peer if each > 0.1 * max(peer)]
    return {"idle": found, **({"peer_copy_ms": statistics.median(large) / 1e3} if large else {})}


def idle_shares(events: Sequence[dict[str, Any]]) -> dict[int, float]:
    """By device, the share of the traced time in which nothing ran on it; the ends of the trace are left out.

    Args:
        events: of a Chrome trace, with "ts" and "dur" in microseconds and the device in "args".
    """
    begin = min(each["ts"] for each in events)
    end = max(each["ts"] + each["dur"] for each in events)
    first, last = begin + RAMP * (end - begin), end - RAMP * (end - begin)
    shares = {}
    for device in sorted({each["args"]["device"] for each in events}):
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["args"]["device"] == device)
        busy, until = 0.0, first
        for start, stop in own:
            start, stop = max(start, until), min(stop, last)
            if stop > start:
                busy, until = busy + stop - start, stop
        shares[device] = 1 - busy / (last - first)
    return shares
