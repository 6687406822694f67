"""A region: one function that is compiled as a whole, under a name, behind a gate.

Each region compiles a code object of its own, named after the region. Dynamo keeps its compiled variants, its recompile
limit and its memory of changing shapes per code object, so regions made from one function (one for each device, say)
neither share a limit nor make each other's shapes dynamic; on disk they still hit the same cache entries.

Cost of a call: sealed gate, one attribute test; otherwise the signature of the arguments (about 1 µs) and the gate's
lock, twice. A function or bound method is copied with a code object of its own; any other callable (an `nn.Module`,
whose class's code is shared by all its objects) is wrapped in one.
"""

from __future__ import annotations

import operator
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.compiled import _torch
from draftsmith.compiled.gate import CompiledTooLate, Gate, Hold, calling, refused


@dataclass(frozen=True)
class FirstUse:
    """A call with a signature that the region had not seen. `seconds` is the forward call alone."""

    region: str
    signature: tuple[Any, ...]
    given: str
    thread: str
    seconds: float


class Region:
    """`Region("drafter@cuda:0", model.forward, gate=gate)(*inputs)` runs the function compiled, or not at all.

    Args:
        name: unique in a run; appears in errors, ledger and evidence.
        function: what to compile: a function, a bound method or an `nn.Module`.
        gate: the gate shared by every region of the process.
        enabled: False runs `function` as it is: the named, visible way to run eager.
        fullgraph: one graph or an error; False allows graph breaks, which the ledger then counts.
        dynamic: passed to `torch.compile`; static shapes unless asked otherwise.
        device: where it runs, as ledger and evidence name it; None where it does not matter.
        why_eager: what the ledger says of a region that is not enabled.
        compile_options: further arguments for `torch.compile` (backend, mode, options, recompile_limit, ...).

    Raises, when called: CompiledTooLate after `gate.seal()`; GateError where waiting at the gate could hang.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        gate: Gate,
        enabled: bool = True,
        fullgraph: bool = True,
        dynamic: bool | None = False,
        device: torch.device | str | None = None,
        why_eager: str = "not enabled",
        **compile_options: Any,
    ) -> None:
        self.name, self.function, self.gate, self.enabled = name, function, gate, enabled
        self.device = "" if device is None else str(device)
        self.why_eager = why_eager
        self.fullgraph = fullgraph
        self.first_uses: list[FirstUse] = []
        self._seen: set[tuple[Any, ...]] = set()
        self._hold = Hold(exclusive=False, region=name)  # of ordinary calls
        self._compiled = function
        if enabled:
            gate.whole[name] = fullgraph and gate.whole.get(name, True)
            own = _own_code(function, name)
            self._compiled = torch.compile(own, fullgraph=fullgraph, dynamic=dynamic, **compile_options)

    def __repr__(self) -> str:
        return f"Region({self.name!r}, enabled={self.enabled}, first_uses={len(self.first_uses)})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gate = self.gate
        if gate.straight:
            try:
                return self._compiled(*args, **kwargs)
            except RuntimeError as error:
                if _torch.STANCE_VIOLATION not in str(error):
                    raise
                raise self._too_late(error, args, kwargs) from error
        if gate.watched:
            with torch.profiler.record_function(mark(self.name)):
                return self._gated(args, kwargs)
        return self._gated(args, kwargs)

    def _gated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.enabled:
            return self.function(*args, **kwargs)
        if self.gate.open:
            try:
                return self._compiled(*args, **kwargs)
            except RuntimeError as error:
                if _torch.STANCE_VIOLATION not in str(error):
                    raise
                raise self._too_late(error, args, kwargs) from error
        key = signature(args, kwargs)
        if key in self._seen:
            entered, before = self.gate.enter(self._hold), ""
            if not entered:
                before = calling(self.name)
            try:
                return self._compiled(*args, **kwargs)
            except RuntimeError:
                if not refused():
                    raise
            finally:
                if entered:
                    self.gate.leave()
                else:
                    calling(before)
        return self._first_use(key, args, kwargs)

    def _too_late(self, error: RuntimeError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledTooLate:
        return CompiledTooLate(self.name, "forward", _reason(str(error)), describe(args, kwargs))

    def _first_use(self, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.gate.exclusive(), _torch.backward_with_forward():
            # Another thread may have been first while this one waited; then this is an ordinary call, only alone.
            given = describe(args, kwargs)
            began, before = time.perf_counter(), calling(self.name, given)
            try:
                result = self._compiled(*args, **kwargs)
            finally:
                calling(before)
            if key not in self._seen:
                seconds, thread = time.perf_counter() - began, threading.current_thread().name
                self.first_uses.append(FirstUse(self.name, key, given, thread, seconds))
                self._seen.add(key)
        return result


def mark(region: str) -> str:
    """How a region's call is called in a profiler's trace while the gate is watched."""
    return f"compiled region: {region}"


def _own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    if isinstance(function, types.FunctionType):
        own = types.FunctionType(
            function.__code__.replace(co_name=name),
            function.__globals__,
            name,
            function.__defaults__,
            function.__closure__,
        )
        own.__kwdefaults__ = function.__kwdefaults__
        return own
    if isinstance(function, types.MethodType) and isinstance(function.__func__, types.FunctionType):
        return types.MethodType(_own_code(function.__func__, name), function.__self__)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return _own_code(call, name)


_Tensor = torch.Tensor
_grad_enabled, _inference_enabled = torch.is_grad_enabled, torch.is_inference_mode_enabled
_autocast_enabled, _autocast_dtype, _strided = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.strided
_facts = operator.attrgetter("layout", "shape", "dtype", "device", "requires_grad")


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a call a different use: shapes, strides, dtypes, devices, requires_grad, plain values, grad mode, and
    autocast with its dtype.

    Tensors inside an object that is neither a container nor plain (a BlockMask) are not looked into: it counts by its
    type and `shape`. Dynamo's guards stay the judge: where one fails that this does not know, a region of one graph is
    called again as a first use; of one with graph breaks part has run, so the gate warns of a compile beside others.
    """
    key: list[Any] = [_grad_enabled(), _inference_enabled()]
    key.append(_autocast_enabled("cpu") and _autocast_dtype("cpu"))
    key.append(_autocast_enabled("cuda") and _autocast_dtype("cuda"))
    for value in args:
        if type(value) is _Tensor:  # the common case in two calls
            facts = _facts(value)
            key += facts, value.stride() if facts[0] is _strided else None
        else:
            key.append(_leaf(value))
    if kwargs:
        key += [(name, _leaf(value)) for name, value in kwargs.items()]
    return tuple(key)


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        stride = value.stride() if value.layout is _strided else None
        return value.shape, stride, value.dtype, value.device, value.requires_grad
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    if isinstance(value, tuple | list):
        return (type(value), *map(_leaf, value))
    if isinstance(value, dict):
        return (dict, *((k, _leaf(v)) for k, v in value.items()))
    if isinstance(value, torch.nn.Module):
        return type(value), id(value), value.training
    return type(value), tuple(shape) if isinstance(shape := getattr(value, "shape", None), tuple) else None


def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The arguments' tensors in words: "float32[2, 8] on cpu, int64[4] on cpu"."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}" for t in tensors)


def _reason(message: str) -> str:
    """The guards out of torch's stance message: its lines that begin with a dash."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines() if line.strip().startswith("- ")]
    return "; ".join(lines)
