"""Features on their way from a target's device to a drafter's.

    same device    the tensors themselves, and an event; nothing is copied
    peer           device to device, on a copy stream of its own at either end, into a buffer that is used again
    pinned host    where the devices cannot reach each other's memory: through page-locked memory, and a notice says so
    CPU            an ordinary copy at most

No copy stops a host thread. What orders them, with target stream → copy stream → drafter stream:

    the copy waits for the features (event of the target's stream)
    the copy waits for the step that read the buffer last (event of the drafter's stream)
    the drafter waits for the copy (event of the copy stream)

Buffers are kept in a free list, and not left to the caching allocator with `record_stream`: its blocks return whenever
the allocator happens to look, so that what lies on the drafter's device would have no bound, and would grow and shrink.
Here a buffer exists for each row that waits, is being copied, or is being worked on; the link bounds their number, so
after the first rows no memory comes or goes. On the target's side the features are the allocator's, and `record_stream`
keeps them for the copy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.target.forward import Features


class Devices(Protocol):
    """What a hand-off asks of the devices. Streams and events are theirs."""

    def reaches(self, source: torch.device, device: torch.device) -> bool: ...
    def current(self, device: torch.device) -> Any: ...
    def copy_stream(self, device: torch.device) -> Any: ...
    def record(self, stream: Any) -> Any: ...
    def wait(self, stream: Any, event: Any) -> None: ...
    def copy(self, to: Tensor, value: Tensor, streams: tuple[Any, ...]) -> None: ...
    def keep(self, value: Tensor, stream: Any) -> None: ...
    def empty(self, value: Tensor, device: torch.device | None) -> Tensor: ...


class CudaDevices:
    """The real ones. Copy streams are made once for each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def reaches(self, source: torch.device, device: torch.device) -> bool:
        return torch.cuda.can_device_access_peer(source, device)

    def current(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def copy_stream(self, device: torch.device) -> torch.cuda.Stream:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            return self._streams[device]

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def copy(self, to: Tensor, value: Tensor, streams: tuple[torch.cuda.Stream, ...]) -> None:
        """On the last of `streams`; the others become current on their devices, for torch's own ordering."""
        first, *more = streams
        with torch.cuda.stream(first):
            if more:
                self.copy(to, value, tuple(more))
            else:
                to.copy_(value, non_blocking=True)

    def keep(self, value: Tensor, stream: torch.cuda.Stream) -> None:
        value.record_stream(stream)

    def empty(self, value: Tensor, device: torch.device | None) -> Tensor:
        """Memory like `value` on a device; None: page-locked memory of the host."""
        if device is None:
            return torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        with torch.cuda.stream(self.copy_stream(device)):  # what the memory held before was read on this stream
            return torch.empty(value.shape, dtype=value.dtype, device=device)


@dataclass
class Buffer:
    """Memory for one row's features on the drafter's device, and what has to be over before it is written again."""

    tensors: list[Tensor]
    staging: list[Tensor] = field(default_factory=list)  # page-locked, where devices cannot reach each other
    free: Any = None  # event of the step that read it last


@dataclass(frozen=True)
class Arrived:
    """A row's features on the drafter's device.

    Attributes:
        features: readable once `ready` has come.
        ready: event; None where nothing has to be waited for.
        buffer: whose memory it is; None where it is the target's.
    """

    features: Features
    ready: Any
    buffer: Buffer | None


class HandOff:
    """Brings features to one drafter. Target threads call `bring`, the drafter's thread `read` and `release`.

    Args:
        device: the drafter's.
        dtype: that features arrive in.
        tell: gets a line for people, once for each pair of devices that cannot reach each other.
        devices: for tests; by default those of torch.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        tell: Callable[[str], None] = lambda _text: None,
        devices: Devices | None = None,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.buffers = 0  # made so far
        self._tell, self._devices = tell, devices or CudaDevices()
        self._free: deque[Buffer] = deque()
        self._direct: dict[torch.device, bool] = {}
        self._lock = threading.Lock()

    def size(self, features: Features) -> int:
        """Bytes that a row will take on the drafter's device."""
        return sum(value.numel() for value in _values(features)) * self.dtype.itemsize

    def bring(self, features: Features) -> Arrived:
        """Starts what has to be done for the drafter to read them; waits for nothing.

        Args:
            features: given to the current stream of the target's device.
        """
        source = features.taps_SF.device
        if source.type != "cuda" or self.device.type != "cuda":
            # Nothing runs beside the host's thread on at least one side; `to` waits as long as it has to.
            moved = [value.to(self.device, self.dtype) for value in _values(features)]
            ready = self._devices.record(self._devices.current(self.device)) if self.device.type == "cuda" else None
            return Arrived(features if _same(moved, features) else Features(*moved), ready, None)
        values = [value.to(self.dtype) for value in _values(features)]
        made = self._devices.record(self._devices.current(source))
        if source == self.device:
            return Arrived(features if _same(values, features) else Features(*values), made, None)
        buffer = self._buffer(values, direct=self._reaches(source))
        outgoing, incoming = self._devices.copy_stream(source), self._devices.copy_stream(self.device)
        self._devices.wait(outgoing, made)
        if buffer.free is not None:
            self._devices.wait(incoming, buffer.free)
            self._devices.wait(outgoing, buffer.free)
        for place, value in enumerate(values):
            self._devices.keep(value, outgoing)
            if not buffer.staging:
                self._devices.copy(buffer.tensors[place], value, (incoming, outgoing))
                continue
            self._devices.copy(buffer.staging[place], value, (outgoing,))
            self._devices.wait(incoming, self._devices.record(outgoing))
            self._devices.copy(buffer.tensors[place], buffer.staging[place], (incoming,))
        if not buffer.staging:
            self._devices.wait(incoming, self._devices.record(outgoing))
        return Arrived(Features(*buffer.tensors), self._devices.record(incoming), buffer)

    def read(self, arrived: Arrived) -> None:
        """Before the drafter's step: its current stream may read them from here on."""
        if arrived.ready is None:
            return
        stream = self._devices.current(self.device)
        self._devices.wait(stream, arrived.ready)
        if arrived.buffer is None:
            for value in _values(arrived.features):
                self._devices.keep(value, stream)

    def release(self, arrived: Arrived) -> None:
        """After the step was given to the drafter's current stream: the buffer may be used again behind it."""
        if arrived.buffer is None:
            return
        arrived.buffer.free = self._devices.record(self._devices.current(self.device))
        with self._lock:
            self._free.append(arrived.buffer)

    def _buffer(self, values: list[Tensor], *, direct: bool) -> Buffer:
        with self._lock:
            for place, buffer in enumerate(self._free):
                if bool(buffer.staging) != direct:
                    del self._free[place]
                    return buffer
            self.buffers += 1
        tensors = [self._devices.empty(value, self.device) for value in values]
        return Buffer(tensors, [] if direct else [self._devices.empty(value, None) for value in values])

    def _reaches(self, source: torch.device) -> bool:
        with self._lock:
            if source not in self._direct:
                self._direct[source] = self._devices.reaches(source, self.device)
                if not self._direct[source]:
                    self._tell(
                        f"{source} cannot reach the memory of {self.device}: features go through the host's memory"
                    )
            return self._direct[source]


def _values(features: Features) -> list[Tensor]:
    return [features.taps_SF] if features.last_SH is None else [features.taps_SF, features.last_SH]


def _same(values: list[Tensor], features: Features) -> bool:
    return all(value is own for value, own in zip(values, _values(features), strict=True))
