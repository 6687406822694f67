"""A thread that writes a "vitals" event every few seconds: devices, memory, queues, and where each worker's time went.

It reads what others keep anyway (clocks, links, the allocator's counters), asks no device to wait, and costs some
milliseconds every ten seconds.

If it fails: the run goes on; the failure is one notice, and there are no more vitals.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftsmith.observe.devices import DeviceProbe, host_facts
from draftsmith.observe.events import EventLog
from draftsmith.pipeline.clock import WorkerClock
from draftsmith.pipeline.link import Link

VITALS_SECONDS = 10.0


class Vitals:
    """See the module's docstring; use with `with`.

    Args:
        log: takes the events.
        folder: of the run.
        devices: of all workers; CPU devices have no facts of their own.
        clocks: of all workers.
        links: in front of each worker, by its name.
        capacity: of each link.
        step: updates done so far.
    """

    def __init__(
        self,
        log: EventLog,
        folder: Path,
        devices: tuple[torch.device, ...],
        clocks: list[WorkerClock],
        links: dict[str, Link[Any]],
        capacity: int,
        step: Callable[[], int],
    ) -> None:
        self._log, self._folder, self._clocks, self._links = log, folder, clocks, links
        self._capacity, self._step = capacity, step
        self._cuda = [device for device in devices if device.type == "cuda"]
        self._before: dict[str, dict[str, float]] = {}
        self._before_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="vitals", daemon=True)

    def __enter__(self) -> Vitals:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(5.0)

    def _work(self) -> None:
        try:
            probe = DeviceProbe(_uuids(self._cuda)) if self._cuda else None
            if probe is not None and probe.reason:
                self._log.write("notice", text=f"no facts about the devices: {probe.reason}")
            while not self._over.wait(VITALS_SECONDS):
                self._log.write("vitals", **self.sample(probe))
            self._log.write("vitals", **self.sample(probe))
            if probe is not None:
                probe.close()
        except Exception as error:  # what watches a run must never end it
            self._log.write("notice", text=f"no more vitals: {type(error).__name__}: {error}")

    def sample(self, probe: DeviceProbe | None) -> dict[str, Any]:
        """The fields of one event. Shares are of the time since the last sample."""
        now = time.monotonic()
        seconds = max(now - self._before_at, 1e-9)
        workers: dict[str, dict[str, float]] = {}
        for clock in self._clocks:
            spent = dict(clock.seconds)
            before = self._before.get(clock.worker, {})
            workers[clock.worker] = {
                what: round(min(1.0, (value - before.get(what, 0.0)) / seconds), 4) for what, value in spent.items()
            }
            self._before[clock.worker] = spent
        self._before_at = now
        devices = {each["device"]: each for each in (probe.sample() if probe is not None else [])}
        for device in self._cuda:
            counters = torch.cuda.memory_stats(device)
            devices.setdefault(str(device), {"device": str(device)}).update(
                allocated=counters.get("allocated_bytes.all.current", 0),
                allocated_peak=counters.get("allocated_bytes.all.peak", 0),
                reserved=counters.get("reserved_bytes.all.current", 0),
                retries=counters.get("num_alloc_retries", 0),
            )
        return {
            "step": self._step(),
            "devices": list(devices.values()),
            "host": host_facts(self._folder),
            "queues": {name: [link.depth(), self._capacity] for name, link in self._links.items()},
            "workers": workers,
        }


def _uuids(devices: list[torch.device]) -> dict[str, str]:
    return {str(torch.cuda.get_device_properties(device).uuid): str(device) for device in devices}
