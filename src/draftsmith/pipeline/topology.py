"""Devices and roles: as configured, or chosen by what the work costs (`costs`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from draftsmith.config import DecodingConfig, PipelineConfig
from draftsmith.errors import UserError
from draftsmith.pipeline.costs import Choice, Costs, Placement, choose, reason_of

WORTH_SAYING = 0.05  # of the speed
JOINT = "+"  # between the devices that one target spans


@dataclass(frozen=True)
class Topology:
    """Which device has which role.

    Attributes:
        targets, drafters: devices by worker; one may appear several times and in both. Of a target that spans several,
            the first, on which rows enter and features end.
        reason: why it is so.
        spans: all devices of each target, in the order of its layers.
        choices: of "auto": every way there was, the best first; empty where nothing was to choose.
        costs: what "auto" chose by.
    """

    targets: tuple[torch.device, ...]
    drafters: tuple[torch.device, ...]
    reason: str
    spans: tuple[tuple[torch.device, ...], ...] = ()
    choices: tuple[Choice, ...] = field(default=(), repr=False)
    costs: Costs | None = None

    def __post_init__(self) -> None:
        if not self.spans:
            object.__setattr__(self, "spans", tuple((device,) for device in self.targets))

    @property
    def cpu_threads(self) -> int:
        """Threads of torch for each worker that computes on the CPU, so that their teams share the cores."""
        workers = [device.type for device in (*self.targets, *self.drafters)].count("cpu")
        share = max(1, (os.cpu_count() or 1) // max(1, workers))
        return min(torch.get_num_threads(), share) if workers else torch.get_num_threads()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Each device once."""
        return tuple(dict.fromkeys((*(device for span in self.spans for device in span), *self.drafters)))

    @property
    def placement(self) -> Placement:
        """The same in numbers of devices; a target that spans several counts for its first."""
        number = {device: index for index, device in enumerate(self.devices)}
        return Placement(tuple(number[d] for d in self.targets), tuple(number[d] for d in self.drafters))

    @property
    def to_measure(self) -> bool:
        """Whether it was chosen among several by costs that nobody has measured yet."""
        return self.costs is not None and not self.costs.measured and len(self.choices) > 1


def place(placement: Placement, devices: Sequence[torch.device], reason: str, **more: object) -> Topology:
    """A placement on real devices."""
    targets, drafters = (
        tuple(devices[number] for number in numbers) for numbers in (placement.targets, placement.drafters)
    )
    return Topology(targets, drafters, reason, **more)  # type: ignore[arg-type]


def resolve_topology(
    config: PipelineConfig,
    rows_per_update: int,
    costs: Costs | None = None,
    lacks: Callable[[Topology], str] = lambda _topology: "",
) -> Topology:
    """Turns "auto" into devices and checks that all of them exist.

    Without a GPU both roles run on the CPU; with one both share it; with more, the fastest way that fits by `costs`.

    Args:
        config: of the pipeline.
        rows_per_update: R.
        costs: of the work; None: all that is known is that it is there, and both roles cost the same.
        lacks: why a topology cannot be, "" if it can (memory).

    Raises:
        UserError: a device that is not there, or nothing fits.
    """
    automatic = [role for role in ("targets", "drafters") if "auto" in getattr(config, role)]
    if not automatic:
        spans = tuple(_span(name) for name in config.targets)
        drafters = tuple(parse_device(name) for name in config.drafters)
        return Topology(tuple(span[0] for span in spans), drafters, "as configured", spans)
    for name in (*config.targets, *config.drafters):
        if name != "auto":
            _span(name)  # what is no device is told as such, before how it stands beside auto
    if len(automatic) == 1 or len(config.targets) > 1 or len(config.drafters) > 1:
        fix = f"name pipeline.{automatic[0]} too" if len(automatic) == 1 else "write auto once for each role, alone"
        raise UserError("auto stands for both roles and for all devices", where=f"pipeline.{automatic[0]}", fix=fix)
    devices = _gpus()
    if not devices:
        return Topology((torch.device("cpu"),), (torch.device("cpu"),), "no GPU found")
    if len(devices) == 1:
        return Topology((devices[0],), (devices[0],), "one GPU: both roles share it")
    costs = costs or Costs(1.0, 1.0, 0.0, source="not measured")
    choices = choose(
        costs, len(devices), rows_per_update, config.queue, lambda each: lacks(place(each, devices, "candidate"))
    )
    best = choices[0]
    if best.lacks:
        raise UserError(
            f"no way to use {len(devices)} devices fits: {best.placement.name()} {best.lacks}",
            where="pipeline",
            fix=f'let a target span devices, such as targets: ["cuda:0{JOINT}cuda:1"], or lower rows.length',
        )
    reason = reason_of(choices, costs) + _more_rows(costs, best, len(devices), rows_per_update, config.queue)
    return place(best.placement, devices, reason, choices=tuple(choices), costs=costs)


def _more_rows(costs: Costs, best: Choice, devices: int, rows: int, queue: int) -> str:
    """What a multiple of the devices as rows of an update would change, if it is much."""
    more = devices * (rows // devices + 1)
    other = choose(costs, devices, more, queue)[0]
    gain = best.seconds / other.seconds - 1
    if not costs.measured or rows % devices == 0 or gain < WORTH_SAYING:
        return ""
    return f"; with training.rows_per_update={more} {other.placement.name()} would give {gain:+.0%}"


def _gpus() -> list[torch.device]:
    """All that this process sees.

    Raises:
        UserError: they are there, and CUDA does not start, as with a driver that is too old for this torch. To work on
            the CPU instead would be a guess.
    """
    count = torch.cuda.device_count()
    if count and not torch.cuda.is_available():
        raise UserError(
            f"{count} GPU{'s' * (count > 1)} and a torch for CUDA {torch.version.cuda}, but CUDA does not start",
            fix="draftsmith doctor says why; CUDA_VISIBLE_DEVICES= (empty) leaves the CPU",
        )
    return [torch.device("cuda", index) for index in range(count)]


def _span(name: str) -> tuple[torch.device, ...]:
    """The devices of one entry of `pipeline.targets`, "cuda:0" or "cuda:0+cuda:1"."""
    span = tuple(parse_device(part.strip()) for part in name.split(JOINT))
    if len({device.type for device in span}) > 1:
        raise UserError(f"{name!r}: a target spans devices of one kind", where="pipeline.targets")
    twice = next((device for device in span if span.count(device) > 1), None)
    if twice is not None:
        raise UserError(
            f"{name!r} names {twice} twice: a target's layers are shared out over devices that differ",
            where="pipeline.targets",
            fix="name each device once; for several target workers on a device, repeat it in the list",
        )
    return span


def decoding_device(config: DecodingConfig, topology: Topology) -> torch.device:
    """Where prompts are decoded: as configured, else a GPU that has no role, else the first target's device.

    Raises:
        UserError: the configured device is not there.
    """
    if config.device is not None:
        return parse_device(config.device, where="decoding.device")
    if topology.targets[0].type == "cpu":
        return topology.targets[0]
    free = [device for device in _gpus() if device not in topology.devices]
    return free[0] if free else topology.targets[0]


def place_and_dtype(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """What --device and the name of a dtype mean here; "auto": the first GPU if there is one, and bfloat16 there.

    Raises:
        UserError: no such device.
    """
    place = parse_device(("cuda:0" if _gpus() else "cpu") if device == "auto" else device, where="--device")
    name = ("bfloat16" if place.type == "cuda" else "float32") if dtype == "auto" else dtype
    return place, getattr(torch, name)


def parse_device(name: str, where: str = "pipeline") -> torch.device:
    """A device that exists here, "cpu" or "cuda:N"; `where` it is named, for the error.

    Raises:
        UserError: it does not, or is of a kind that is not supported.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{name!r} is not a device", where=where, fix="use cpu, cuda:0, cuda:1, ...") from None
    if device.type == "cuda":
        own = _gpus()
        index = device.index or 0
        if index >= len(own):
            have = f"cuda:0 to cuda:{len(own) - 1}" if own else "no CUDA device"
            raise UserError(f"{name!r} does not exist: this machine has {have}", where=where)
        return own[index]
    if device.type != "cpu":
        raise UserError(f"{name!r} is not supported", where=where, fix="use cpu or cuda:N")
    if device.index:
        raise UserError(f"{name!r} does not exist: all cores are one device", where=where, fix="use cpu")
    return torch.device("cpu")  # "cpu:0" is another to torch, and the same to everybody else
