"""One row on one device from tokens to new weights: target, step, update, one behind the other.

What a user waits for, if both roles share a card and nothing overlaps: real tokens per second by length of the row and
number of anchors. The same pass is run once more while every wait of the host for the device is an error, because a
host that waits cannot give the device the next row's work in time.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.bench.parts import draft_flops, make_replica
from draftsmith.bench.random_target import random_target
from draftsmith.bench.setting import Setting, result_of, start
from draftsmith.bench.target import fp8_flops, target_flops
from draftsmith.bench.timing import host_milliseconds, measure
from draftsmith.compiled.gate import Gate
from draftsmith.compiled.region import Region
from draftsmith.config import OptimizerConfig
from draftsmith.errors import first_line
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.sync import Exchange
from draftsmith.target import fp8
from draftsmith.target.forward import run_layer
from draftsmith.target.geometry import RECURRENT
from draftsmith.training.update import make_updates

_ATEN = torch.ops.aten
# What reads the device's memory to the host: single values, yes or no, and sizes that depend on data.
READS = frozenset(
    {
        _ATEN._local_scalar_dense.default,
        _ATEN.equal.default,
        _ATEN.allclose.default,
        _ATEN.nonzero.default,
        _ATEN.masked_select.default,
        _ATEN.bincount.default,
        _ATEN._unique.default,
        _ATEN._unique2.default,
        _ATEN.unique_dim.default,
        _ATEN.unique_consecutive.default,
        _ATEN.unique_dim_consecutive.default,
    }
)
# What does where an index is a mask: how many elements it names is what CUDA asks for first.
_LOOKS_UP = frozenset({_ATEN.index.Tensor, _ATEN._unsafe_index.Tensor})
_PUTS = frozenset(
    {
        _ATEN.index_put.default,
        _ATEN.index_put_.default,
        _ATEN._index_put_impl_.default,
        _ATEN._unsafe_index_put.default,
    }
)
# Ways to the host's memory, which on a CPU are no operators: there is nothing to do.
COPIES = frozenset({Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__repr__})


class _Finds:
    """What both of the following find, in order, but for reads of what is the host's own.

    Args:
        host: tensors that lie in the host's memory whatever the device.
    """

    def __init__(self, host: Sequence[Tensor]) -> None:
        self.found: list[str] = []
        self._host = {_memory(each) for each in host}

    def note(self, name: str, read: Any) -> None:
        if not (isinstance(read, Tensor) and _memory(read) in self._host):
            self.found.append(f"{name} {_place(traceback.extract_stack())}")


class _Reads(TorchDispatchMode):
    """Notes operators that read values, on devices that do not tell."""

    def __init__(self, finds: _Finds) -> None:
        super().__init__()
        self._finds = finds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads(function, args, kwargs or {}):
            self._finds.note(str(function), args[0])
        return function(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):
    """Notes methods that copy to the host's memory."""

    def __init__(self, finds: _Finds) -> None:
        super().__init__()
        self._finds = finds

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _copies(function, args, kwargs or {}):
            self._finds.note(f"Tensor.{function.__name__}", args[0])
        return function(*args, **(kwargs or {}))


def _reads(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator would wait on CUDA for what it reads."""
    if function == _ATEN.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if function in _LOOKS_UP:
        return _masked(args[1])
    if function in _PUTS:
        # x[mask] = 0.5 is a fill on CUDA, which asks nothing. The number comes as a value of no dimensions.
        return _masked(args[1]) and (args[2].dim() > 0 or any(args[3:4]))  # what is added is none
    return function in READS


def _masked(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _copies(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a method would wait on CUDA for what it copies."""
    if function == Tensor.__format__:
        return args[0].dim() > 0  # a number is read by an operator
    if function == Tensor.to:
        # A torch.device says nothing here: it may be the work's own.
        place = kwargs.get("device", args[1] if len(args) > 1 else None)
        return isinstance(place, str) and place.partition(":")[0] == "cpu"
    return function in COPIES


def _memory(tensor: Tensor) -> int:
    """Where a tensor's storage begins; views share it."""
    return tensor.untyped_storage().data_ptr()


def host_waits(work: Callable[[], object], device: torch.device, *, host: Sequence[Tensor] = ()) -> list[str]:
    """Where `work` makes the host wait for the device; on CUDA the first such place, on the CPU where it would.

    On the CPU not everything can be seen: a tensor of the host cannot be told from one of the device, so copies between
    them (`copy_`, `.to` a torch.device, out of memory that is not page-locked) pass, as does x[mask] = a tensor of no
    dimensions, and every read counts.

    Args:
        work: done once.
        device: of it.
        host: tensors whose reading waits for nothing, because they lie in the host's memory on CUDA, too.
    """
    if device.type != "cuda":
        finds = _Finds(host)
        with _Copies(finds), _Reads(finds):
            work()
        return finds.found
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return [f"{first_line(error)} {_place(traceback.extract_tb(error.__traceback__))}"]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return []


def _place(stack: traceback.StackSummary) -> str:
    """The innermost line of ours."""
    ours = [frame for frame in stack if "draftsmith" in frame.filename and not frame.filename.endswith("bench/row.py")]
    frame = (ours or list(stack))[-1]
    return f"at {frame.filename.rpartition('draftsmith/')[2]}:{frame.lineno}"


def bench_row(setting: Setting) -> dict[str, Any]:
    """Features, step and update of one row; "host_waits" is empty where nothing in it waits for the device.

    Raises:
        UserError: see `random_target` and `fp8.lower`.
    """
    start(setting)
    gate, target = Gate(), random_target(setting)
    taps, row, cpu_batch = setting.spec().taps, setting.row(), setting.batch()
    replica = make_replica(setting, gate, target.head())
    target_compiled = setting.device.type == "cuda" and RECURRENT not in target.kinds
    if setting.device.type == "cuda":
        if target_compiled:
            region = Region("bench target", run_layer, gate=gate, device=setting.device, **setting.compile_options)
            target.compile_layers(region)
        cpu_batch = cpu_batch.pin()
    target.free_layers_after(max(taps))
    if setting.precision == "fp8":
        fp8.lower(target, taps, [], math.inf)
    exchange = Exchange(make_updates([replica.model], OptimizerConfig()), Stop())

    def work() -> None:
        features = target.features(row.tokens_S, row.document_S, row.positions_S, taps)
        sums = replica.step(features, cpu_batch.to(setting.device, non_blocking=True))
        exchange.updates[0].accumulate(last=True)
        exchange.update(0, sums, 1.0)

    timing = measure(work, setting.device, runs=setting.runs)
    waits = host_waits(work, setting.device, host=(row.tokens_S, row.document_S, row.positions_S))
    host = {"host_ms": host_milliseconds(work, setting.device)} if setting.device.type == "cuda" else {}
    gate.close()
    flops = target_flops(setting.geometry, max(taps) + 1, setting.length, setting.documents)
    return result_of(
        "row",
        setting,
        timing,
        flops + sum(draft_flops(setting, cpu_batch).values()),
        fp8_flops=fp8_flops(target, max(taps) + 1, setting.length),
        real_tokens_per_second=cpu_batch.real_tokens / (timing.median * 1e-3),
        taught=cpu_batch.taught,
        attention=setting.way,
        target_layers="compiled" if target_compiled else "eager",
        packing=target.packing,
        host_waits=waits,
        compile_drafter=setting.compile_drafter if setting.attention == "flex" else None,
        autotune=setting.autotune if setting.attention == "flex" else None,
        shape={"packing": target.packing},
        **host,
    )
