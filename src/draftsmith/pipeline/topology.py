"""Devices and roles."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from draftsmith.config import DecodingConfig, PipelineConfig
from draftsmith.errors import UserError


@dataclass(frozen=True)
class Topology:
    """Which device has which role.

    Attributes:
        targets, drafters: devices by worker; one may appear several times and in both.
        reason: why it is so.
    """

    targets: tuple[torch.device, ...]
    drafters: tuple[torch.device, ...]
    reason: str

    @property
    def cpu_threads(self) -> int:
        """Threads of torch for each worker that computes on the CPU, so that their teams share the cores."""
        workers = [device.type for device in (*self.targets, *self.drafters)].count("cpu")
        share = max(1, (os.cpu_count() or 1) // max(1, workers))
        return min(torch.get_num_threads(), share) if workers else torch.get_num_threads()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Each device once."""
        return tuple(dict.fromkeys((*self.targets, *self.drafters)))


def resolve_topology(config: PipelineConfig, rows_per_update: int) -> Topology:
    """Turns "auto" into devices and checks that all of them exist.

    Without a GPU both roles run on the CPU; with one both share it; with more, three in eight are drafters (by rule of
    thumb, not measured), at most one per row of an update.

    Raises:
        UserError: a device that is not there.
    """
    automatic = [role for role in ("targets", "drafters") if "auto" in getattr(config, role)]
    if not automatic:
        targets, drafters = (tuple(map(parse_device, names)) for names in (config.targets, config.drafters))
        return Topology(targets, drafters, "as configured")
    if len(automatic) == 1 or len(config.targets) > 1 or len(config.drafters) > 1:
        raise UserError("auto stands for both roles and for all devices", where=f"pipeline.{automatic[0]}")
    count = torch.cuda.device_count()
    if count == 0:
        return Topology((torch.device("cpu"),), (torch.device("cpu"),), "no GPU found")
    devices = [torch.device("cuda", index) for index in range(count)]
    if count == 1:
        return Topology((devices[0],), (devices[0],), "one GPU: both roles share it")
    split = count - max(1, min(rows_per_update, count * 3 // 8))
    return Topology(tuple(devices[:split]), tuple(devices[split:]), "rule of thumb, not measured")


def decoding_device(config: DecodingConfig, topology: Topology) -> torch.device:
    """Where prompts are decoded: as configured, else a GPU that has no role, else the first target's device.

    Raises:
        UserError: the configured device is not there.
    """
    if config.device is not None:
        return parse_device(config.device)
    free = [
        device
        for device in (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
        if device not in topology.devices
    ]
    return free[0] if free and topology.targets[0].type == "cuda" else topology.targets[0]


def parse_device(name: str) -> torch.device:
    """A device that exists here.

    Raises:
        UserError: it does not, or is of a kind that is not supported.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{name!r} is not a device", where="pipeline", fix="use cpu, cuda:0, cuda:1, ...") from None
    if device.type == "cuda":
        count = torch.cuda.device_count()
        device = torch.device("cuda", device.index or 0)
        if device.index >= count:
            have = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
            raise UserError(f"{name!r} does not exist: this machine has {have}", where="pipeline")
    elif device.type != "cpu":
        raise UserError(f"{name!r} is not supported", where="pipeline", fix="use cpu or cuda:N")
    return device
