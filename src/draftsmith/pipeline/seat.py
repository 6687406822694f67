"""Where torchrun put this process, and which of its machine's GPUs are its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from draftsmith.errors import UserError

_taken: list[str] = []  # the devices of this process, in words


@dataclass(frozen=True)
class Seat:
    """Where torchrun put this process.

    Attributes:
        rank, world: of all processes.
        local_rank, local_world: of those on this machine.
        restarts: how often torchrun has started all of them again.
        launched: by torchrun, whose end of patience (30 s from Ctrl-C or SIGTERM) holds then.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    restarts: int = 0
    launched: bool = False

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Seat:
        """From the variables that torchrun sets; without them, the only process."""
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            if environment.get("WORLD_SIZE", "1") != "1" or environment.get("RANK", "0") != "0":
                given, lacking = ("RANK", "WORLD_SIZE") if "RANK" in environment else ("WORLD_SIZE", "RANK")
                what = f"{given} is {environment[given]} and {lacking} is not set: this would be a run of one process"
                raise UserError(what, where="environment", fix=f"start with torchrun, or unset {given}")
            return cls()
        try:
            rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            return cls(
                rank,
                world,
                int(environment.get("LOCAL_RANK", rank)),
                int(environment.get("LOCAL_WORLD_SIZE", world)),
                int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
                "TORCHELASTIC_RUN_ID" in environment,
            )
        except ValueError as error:
            raise UserError(f"RANK, WORLD_SIZE and their like must be numbers: {error}", where="environment") from None

    def take_devices(self, per_rank: int | None) -> str:
        """Leaves this process its own GPUs only, which are `cuda:0` and so on for it; says which they are.

        Must come before CUDA is used. The slice is cut from CUDA_VISIBLE_DEVICES, or from all GPUs of the machine; once
        for each process, a second call changes nothing.

        Raises:
            UserError: there are not so many.
        """
        if _taken:
            return _taken[0]
        count = torch.cuda.device_count()
        if not count:
            if per_rank:
                raise UserError(f"is {per_rank}, but no GPU is seen here", where="pipeline.devices_per_rank")
            return ""
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [name.strip() for name in listed.split(",")][:count] if listed else [str(i) for i in range(count)]
        own, text = slice_of(names, self.local_rank, self.local_world, per_rank)
        if own != names:
            assert not torch.cuda.is_initialized(), "devices must be chosen before CUDA is used"
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
            if torch._C._cuda_getDeviceCount() != len(own):  # what CUDA itself sees, not what the variable says
                raise UserError(
                    "this process cannot be kept to its own GPUs: CUDA looked at them already",
                    where="pipeline.devices_per_rank",
                    fix="set CUDA_VISIBLE_DEVICES for each rank",
                )
        _taken.append(text)
        return text


def slice_of(names: list[str], local_rank: int, local_world: int, per_rank: int | None) -> tuple[list[str], str]:
    """The devices of one rank among those of its machine, and that in words.

    Raises:
        UserError: `per_rank` devices for each rank are not there.
    """
    count = len(names)
    each = per_rank or count // local_world
    if per_rank and per_rank * local_world > count:
        raise UserError(
            f"{local_world} ranks of {per_rank} devices need {local_world * per_rank}; this machine has {count}",
            where="pipeline.devices_per_rank",
            fix=f"use {count // local_world or 1}, or fewer ranks",
        )
    if not each:
        name = names[local_rank % count]
        return [name], f"GPU {name}, shared: {local_world} ranks and {count} GPUs"
    own = names[local_rank * each : (local_rank + 1) * each]
    idle = count - each * local_world
    return own, f"GPU {', '.join(own)} of {count}" + (f" ({idle} belong to no rank)" if idle else "")
