"""What the devices do, by NVIDIA's management library (nvidia-ml-py); no torch, no CUDA context.

Where the library or a driver is missing there are no facts, and `reason` says so. A single fact that a card does not
offer is left out. Cost of a sample: about a millisecond a card.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean "slower than it could be". Idle and the clocks that an
# application asked for are left out.
_SLOWED = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class DeviceProbe:
    """Samples the cards of a machine.

    Args:
        uuids: torch's name of a device ("cuda:0") by the card's UUID; only those are sampled. None: all cards, by
            their number.

    Attributes:
        reason: why there are no facts; empty if there are.
    """

    def __init__(self, uuids: dict[str, str] | None = None) -> None:
        self.reason = ""
        self._cards: list[tuple[str, Any]] = []
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
        except ImportError:
            self.reason = "the package nvidia-ml-py is missing"
            return
        except Exception as error:  # NVMLError; its class depends on the library's version
            self.reason = f"NVIDIA's management library does not start: {error}"
            return
        self._nvml = pynvml
        for index in range(pynvml.nvmlDeviceGetCount()):
            card = pynvml.nvmlDeviceGetHandleByIndex(index)
            if uuids is None:
                self._cards.append((str(index), card))
                continue
            uuid = _text(pynvml.nvmlDeviceGetUUID(card)).removeprefix("GPU-")
            self._cards += [(name, card) for own, name in uuids.items() if own.removeprefix("GPU-") == uuid]

    def sample(self) -> list[dict[str, Any]]:
        """One dict per card; sizes in bytes, clocks in MHz, power in watts, temperature in °C, use as a share."""
        return [self._card(name, card) for name, card in self._cards]

    def close(self) -> None:
        """Gives the library back."""
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
            self._nvml, self._cards = None, []

    def _card(self, name: str, card: Any) -> dict[str, Any]:
        nvml = self._nvml
        facts: dict[str, Any] = {"device": name}

        def ask(read: Callable[[], dict[str, Any]]) -> None:
            with contextlib.suppress(Exception):  # not every card knows everything
                facts.update(read())

        def memory() -> dict[str, Any]:
            found = nvml.nvmlDeviceGetMemoryInfo(card)
            return {"memory_used": int(found.used), "memory_total": int(found.total)}

        def clocks() -> dict[str, Any]:
            return {
                "clock": int(nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)),
                "clock_max": int(nvml.nvmlDeviceGetMaxClockInfo(card, nvml.NVML_CLOCK_SM)),
            }

        def slowed() -> dict[str, Any]:
            read = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
            bits = (read or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(card)
            return {"slowed_by": [word for bit, word in _SLOWED.items() if bits & bit]}

        ask(lambda: {"name": _text(nvml.nvmlDeviceGetName(card))})
        ask(memory)
        ask(lambda: {"use": nvml.nvmlDeviceGetUtilizationRates(card).gpu / 100})
        ask(clocks)
        ask(slowed)
        ask(lambda: {"power": nvml.nvmlDeviceGetPowerUsage(card) / 1000})
        ask(lambda: {"power_limit": nvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1000})
        ask(lambda: {"temperature": int(nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU))})
        return facts


def host_facts(folder: Path) -> dict[str, Any]:
    """This process's memory, the machine's load and memory, and what is free on the disk of `folder`."""
    facts: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        facts["load"] = round(os.getloadavg()[0], 2)
        facts["cores"] = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError, IndexError):
        # "some avg10=12.34 …": per cent of the last ten seconds in which somebody waited for a core.
        first = Path("/proc/pressure/cpu").read_text(encoding="ascii").split()
        facts["cpu_pressure"] = float(first[1].removeprefix("avg10=")) / 100
    with contextlib.suppress(OSError, ValueError):
        facts["process_memory"] = _kilobytes(Path("/proc/self/status"), "VmRSS")
        facts["memory_total"] = _kilobytes(Path("/proc/meminfo"), "MemTotal")
        facts["memory_available"] = _kilobytes(Path("/proc/meminfo"), "MemAvailable")
    with contextlib.suppress(OSError):
        disk = os.statvfs(folder)
        facts["disk_free"], facts["disk_total"] = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    return {name: value for name, value in facts.items() if value is not None}


def _kilobytes(path: Path, name: str) -> int | None:
    lines: Iterable[str] = path.read_text(encoding="ascii", errors="replace").splitlines()
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
