"""A thread that writes a "vitals" event every few seconds: devices, memory, queues, and where each worker's time went;
and now and then, and at the end, a "balance" event that says what of it slows the run down.

It reads what others keep anyway (clocks, links, the allocator's counters), asks no device to wait, and costs some
milliseconds every ten seconds, and less than one every second for memory.

Volatility of a device's memory is (highest - lowest) / highest of what the allocator held within the interval. A run in
its stride has none; where there is some, the counters say why.

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
from draftsmith.pipeline.balance import Balance
from draftsmith.pipeline.clock import WorkerClock, between, shares_of
from draftsmith.pipeline.interpreter import InterpreterProbe
from draftsmith.pipeline.link import Link

VITALS_SECONDS = 10.0
MEMORY_SECONDS = 1.0
BALANCE_SECONDS = 60.0
VOLATILE = 0.01  # share from which a cause is named


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
        balance: says what slows the run down; None: nobody.
        exchange: leaves this rank's sample for the others and returns theirs, by rank.
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
        balance: Balance | None = None,
        exchange: Callable[[dict[str, Any]], list[tuple[int, dict[str, Any]]]] = lambda _sample: [],
    ) -> None:
        self._exchange = exchange
        self._log, self._folder, self._clocks, self._links = log, folder, clocks, links
        self._capacity, self._step = capacity, step
        self._balance = balance
        self._cuda = [device for device in devices if device.type == "cuda"]
        self._memory = {device: _Memory(device) for device in self._cuda}
        self._before: dict[str, dict[str, float]] = {}
        self._before_at = time.monotonic()
        self._over = threading.Event()
        self._probe = InterpreterProbe()
        self._thread = threading.Thread(target=self._work, name="vitals", daemon=True)

    def __enter__(self) -> Vitals:
        for clock in self._clocks:
            clock.interpreter_wait = self._probe.wait
        if self._balance is not None:
            self._log.listen(self._balance.heard)
        self._probe.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._probe.end()
        self._thread.join(5.0)
        self._probe.join(1.0)

    def _work(self) -> None:
        try:
            probe = DeviceProbe(_uuids(self._cuda)) if self._cuda else None
            if probe is not None and probe.reason:
                self._log.write("notice", text=f"no facts about the devices: {probe.reason}")
            # Rank 0 knows everybody's workers from the start, also where its last sample comes before their first.
            idle = {clock.worker: dict.fromkeys(clock.seconds, 0.0) for clock in self._clocks}
            self._exchange({"devices": [], "queues": {}, "workers": idle})
            vitals_at, balance_at = time.monotonic() + VITALS_SECONDS, time.monotonic() + BALANCE_SECONDS
            while not self._over.wait(min(MEMORY_SECONDS, VITALS_SECONDS)):
                for memory in self._memory.values():
                    memory.look()
                if time.monotonic() >= vitals_at:
                    vitals_at += VITALS_SECONDS
                    self._log.write("vitals", **self.sample(probe))
                if time.monotonic() >= balance_at:
                    balance_at += BALANCE_SECONDS
                    self._tell(final=False)
            for memory in self._memory.values():
                memory.look()
            self._log.write("vitals", **self.sample(probe))
            self._tell(final=True)
            if probe is not None:
                probe.close()
        except Exception as error:  # what watches a run must never end it
            self._log.write("notice", text=f"no more vitals: {type(error).__name__}: {error}")

    def _tell(self, *, final: bool) -> None:
        found = self._balance.to_json() if self._balance is not None else None
        if found is not None:
            self._log.write("balance", final=final, **found)

    def interpreter(self) -> dict[str, Any]:
        """How often the interpreter was taken, of late, and for how long; see `InterpreterProbe.to_json`."""
        return self._probe.to_json()

    def sample(self, probe: DeviceProbe | None) -> dict[str, Any]:
        """The fields of one event. Shares are of the time since the last sample."""
        now = time.monotonic()
        seconds = max(now - self._before_at, 1e-9)
        workers: dict[str, dict[str, float]] = {}
        for clock in self._clocks:
            spent = clock.totals()
            workers[clock.worker] = shares_of(between(self._before.get(clock.worker, {}), spent), seconds)
            self._before[clock.worker] = spent
        self._before_at = now
        devices = {each["device"]: each for each in (probe.sample() if probe is not None else [])}
        for device, memory in self._memory.items():
            devices.setdefault(str(device), {"device": str(device)}).update(memory.sample())
        found: dict[str, Any] = {
            "step": self._step(),
            "devices": list(devices.values()),
            "host": host_facts(self._folder),
            "queues": {name: [link.depth(), self._capacity] for name, link in self._links.items()},
            "workers": workers,
            "interpreter": self._probe.to_json(),
        }
        for rank, other in self._exchange(found):
            of = f" of rank {rank}"
            found["devices"] += [{**each, "device": f"{each['device']}{of}"} for each in other["devices"]]
            for what in ("queues", "workers"):
                found[what].update({f"{name}{of}": value for name, value in other[what].items()})
        return found


class _Memory:
    """What the allocator of one device held within an interval, and why that changed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: list[int] = []
        self._before: dict[str, int] = {}

    def look(self) -> None:
        self._held.append(torch.cuda.memory_reserved(self._device))

    def sample(self) -> dict[str, Any]:
        counters = torch.cuda.memory_stats(self._device)
        held = [*self._held, counters.get("reserved_bytes.all.current", 0)]
        self._held = []
        change = {name: counters.get(name, 0) - self._before.get(name, 0) for name in _CHANGES}
        first, self._before = not self._before, {name: counters.get(name, 0) for name in _CHANGES}
        volatility = (max(held) - min(held)) / max(1, *held)
        facts: dict[str, Any] = {
            "allocated": counters.get("allocated_bytes.all.current", 0),
            "allocated_peak": counters.get("allocated_bytes.all.peak", 0),
            "reserved": held[-1],
            "retries": counters.get("num_alloc_retries", 0),
            "volatility": round(volatility, 4),
        }
        if volatility >= VOLATILE and not first:  # a run that has just begun fills its memory: no cause to name
            facts["volatile_because"] = volatile_because(change)
        return facts


_CHANGES = ("num_alloc_retries", "num_device_alloc", "num_device_free")


def volatile_because(change: dict[str, int]) -> str:
    """Why memory came and went, from what the allocator's counters rose by."""
    retries, taken, given = (change[name] for name in _CHANGES)
    if retries > 0:
        return f"too little memory: the allocator gave all back and asked again, {retries} times"
    if given > 0:
        return f"somebody emptied the allocator's cache: {given} pieces went back, {taken} were taken"
    if taken > 0:
        return f"tensors of new sizes, or more of them at a time: {taken} new pieces"
    return "unknown: pieces grew or shrank in place"


def _uuids(devices: list[torch.device]) -> dict[str, str]:
    return {str(torch.cuda.get_device_properties(device).uuid): str(device) for device in devices}
