"""Facts about devices from a management library that stands in for NVIDIA's, and from one that is not there."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from draftsmith.observe.devices import DeviceProbe, host_facts


class NVMLError(Exception):
    pass


def library(*, fails: tuple[str, ...] = (), start: Exception | None = None) -> types.ModuleType:
    """Two cards; calls named in `fails` raise, as on cards that do not offer them."""
    module = types.ModuleType("pynvml")
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda card: f"GPU-uuid-{card}",
        "nvmlDeviceGetName": lambda card: b"NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": lambda card: types.SimpleNamespace(used=3 * 2**30, total=140 * 2**30),
        "nvmlDeviceGetUtilizationRates": lambda card: types.SimpleNamespace(gpu=97),
        "nvmlDeviceGetClockInfo": lambda card, kind: 1200,
        "nvmlDeviceGetMaxClockInfo": lambda card, kind: 1980,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda card: 0x4 | 0x1,
        "nvmlDeviceGetPowerUsage": lambda card: 640_500,
        "nvmlDeviceGetEnforcedPowerLimit": lambda card: 700_000,
        "nvmlDeviceGetTemperature": lambda card, kind: 61,
    }

    def failing(*_: object) -> None:
        raise start or NVMLError("not supported")

    for name, answer in answers.items():
        refused = name in fails or (name == "nvmlInit" and start is not None)
        setattr(module, name, failing if refused else answer)
    module.NVML_CLOCK_SM, module.NVML_TEMPERATURE_GPU = 1, 0  # type: ignore[attr-defined]
    return module


def test_all_facts_of_the_runs_own_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library())
    probe = DeviceProbe({"uuid-1": "cuda:0"})
    assert probe.reason == ""
    assert probe.sample() == [
        {
            "device": "cuda:0",
            "name": "NVIDIA H200",
            "memory_used": 3 * 2**30,
            "memory_total": 140 * 2**30,
            "use": 0.97,
            "clock": 1200,
            "clock_max": 1980,
            "slowed_by": ["power cap"],
            "power": 640.5,
            "power_limit": 700.0,
            "temperature": 61,
        }
    ]
    assert [card["device"] for card in DeviceProbe().sample()] == ["0", "1"]
    probe.close()
    assert probe.sample() == []


def test_what_a_card_does_not_offer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library(fails=("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMaxClockInfo")))
    (card, _) = DeviceProbe().sample()
    assert not {"memory_used", "memory_total", "clock", "clock_max"} & card.keys()
    assert card["temperature"] == 61


def test_no_library_and_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert DeviceProbe().reason == "the package nvidia-ml-py is missing"
    monkeypatch.setitem(sys.modules, "pynvml", library(start=NVMLError("Driver Not Loaded")))
    probe = DeviceProbe()
    assert probe.reason == "NVIDIA's management library does not start: Driver Not Loaded"
    assert probe.sample() == []


def test_the_host(tmp_path: Path) -> None:
    facts = host_facts(tmp_path)
    assert facts["process_memory"] > 2**20
    assert facts["memory_total"] > facts["memory_available"] > 0
    assert facts["disk_total"] > facts["disk_free"] > 0
    assert facts["cores"] >= 1
    assert "disk_free" not in host_facts(tmp_path / "none")
