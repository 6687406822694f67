"""The hand-off on real devices: what arrives is what was sent, however far ahead the target is. Needs a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from draftsmith.pipeline.clock import Pace
from draftsmith.pipeline.handoff import CudaDevices, HandOff
from draftsmith.target.forward import Features

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ROWS, SIZE = 40, (1024, 2048)


class Unreachable(CudaDevices):
    """Devices that cannot see each other's memory."""

    def reaches(self, source: torch.device, device: torch.device) -> bool:
        return False


def send(source: torch.device, device: torch.device, devices: CudaDevices) -> HandOff:
    """Rows of known numbers; the drafter is slow, so that buffers are used again while copies are on their way."""
    hand_off = HandOff(device, torch.bfloat16, devices=devices)
    target, drafter = torch.cuda.Stream(source), torch.cuda.Stream(device)
    found = torch.zeros(ROWS, device=device)
    busy = torch.randn(2048, 2048, device=device)
    torch.cuda.synchronize(device)
    waiting = []

    def learn() -> None:
        number, arrived = waiting.pop(0)
        with torch.cuda.stream(drafter):
            hand_off.read(arrived)
            for _ in range(4):
                busy @ busy
            found[number] = arrived.features.taps_SF.float().mean()
            hand_off.release(arrived)

    for number in range(ROWS):
        with torch.cuda.device(source), torch.cuda.stream(target):
            taps_SF = torch.empty(SIZE, device=source, dtype=torch.bfloat16).fill_(number)
            waiting.append((number, hand_off.bring(Features(taps_SF))))
            del taps_SF
        if len(waiting) == 3:
            learn()
    while waiting:
        learn()
    torch.cuda.synchronize(device)
    assert found.tolist() == [float(number) for number in range(ROWS)]
    return hand_off


def test_on_one_device_nothing_is_copied() -> None:
    device = torch.device("cuda", 0)
    assert send(device, device, CudaDevices()).buffers == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("devices", [CudaDevices, Unreachable])
def test_from_device_to_device(devices: type[CudaDevices]) -> None:
    assert send(torch.device("cuda", 0), torch.device("cuda", 1), devices()).buffers <= 4


def test_a_thread_stays_two_rows_ahead_and_knows_when_its_device_ran_dry() -> None:
    device = torch.device("cuda", 0)
    pace, busy = Pace(device), torch.randn(4096, 4096, device=device)
    assert pace.idle() == float("inf"), "it never had work"
    for _ in range(5):
        pace.keep()
        for _ in range(20):
            busy @ busy
        pace.mark()
    assert pace.idle() == 0.0, "it still works"
    torch.cuda.synchronize(device)
    assert 0 <= pace.idle() < 0.5
    for _ in range(20):
        busy @ busy
    pace.extend()
    assert pace.idle() == 0.0, "it works on an update"
    torch.cuda.synchronize(device)
    assert 0 <= pace.idle() < 0.5


def test_a_shared_device_is_idle_when_nobody_works_on_it() -> None:
    device = torch.device("cuda", 0)
    target, drafter, alone = (Pace(device) for _ in range(3))
    Pace.share([target, drafter, Pace(torch.device("cpu"))])
    busy = torch.randn(4096, 4096, device=device)
    drafter.mark()
    torch.cuda.synchronize(device)
    time.sleep(0.05)
    assert drafter.idle() >= 0.05
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for _ in range(200):
            busy @ busy
        target.mark()
        alone.mark()
    assert drafter.idle() == 0.0, "the target works"
    torch.cuda.synchronize(device)
    assert drafter.idle() < 0.05, "since the target's end, not since its own"
