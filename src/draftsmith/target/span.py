"""A target over several devices of one kind: consecutive layers on each, in order.

For targets that no single device holds. Rows enter on the first device, which also has embedding, final norm and head;
what a tapped layer gives is copied back to it, so features are where those of any other target are. Between devices go
the residual stream and what all layers share (rotary tables, masks, documents' bounds), once a row. One device works at
a time on a row; with two target workers on the same span both have work.

Placed by hooks in front of the layers, so that compiled layers and early stop stay as they are. Cost: a look at each
layer's arguments, and a copy of S·H numbers at each border.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_DYNAMIC = "_dynamo_dynamic_indices"


class _Moved(threading.local):
    """What the running forward of this thread has moved already: (tensor, device) → its copy."""

    def __init__(self) -> None:
        self.copies: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}


def share_out(layers: int, devices: int) -> list[int]:
    """Number of the device of every layer: equal parts, the larger ones last, as the first holds embedding and head."""
    small, more = divmod(layers, devices)
    return [number for number in range(devices) for _ in range(small + (number >= devices - more))]


def spread(model: Any, layers: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Puts a model's layers on the devices, and everything else on the first of them.

    Args:
        model: on the CPU.
        layers: of its decoder, in order.
        devices: at least two.
    """
    moved = _Moved()
    first, places = devices[0], share_out(len(layers), len(devices))
    inside = {id(parameter) for layer in layers for parameter in (*layer.parameters(), *layer.buffers())}
    for layer, place in zip(layers, places, strict=True):
        layer.to(devices[place])
        layer.register_forward_pre_hook(_Bring(moved, devices[place], layer is layers[0]), with_kwargs=True)
    for module in model.modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        if any(value is not None and id(value) not in inside for value in own) and not _within(module, layers):
            module._apply(lambda value: value.to(first), recurse=False)
            module.register_forward_pre_hook(_Bring(moved, first, False), with_kwargs=True)


def _within(module: nn.Module, layers: Sequence[nn.Module]) -> bool:
    return any(module is inner for layer in layers for inner in layer.modules())


class _Bring:
    """A hook that brings a module's inputs to its device."""

    def __init__(self, moved: _Moved, device: torch.device, begins: bool) -> None:
        self._moved, self._device, self._begins = moved, device, begins

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._begins:
            self._moved.copies.clear()
        return self._bring(args), self._bring(kwargs)

    def _bring(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.device == self._device else self._copy(value)
        if isinstance(value, dict):
            return {name: self._bring(item) for name, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._bring(item) for item in value)
        return value

    def _copy(self, value: Tensor) -> Tensor:
        key, copies = (id(value), self._device), self._moved.copies
        if key not in copies:
            made = value.to(self._device, non_blocking=True)
            for axis in getattr(value, _DYNAMIC, ()):
                torch._dynamo.mark_dynamic(made, axis)
            copies[key] = (value, made)  # the original too: its number must not be another's meanwhile
        return copies[key][1]
