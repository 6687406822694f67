"""Everything that this package takes from PyTorch's private side, in one place.

Checked on torch 2.11 (CUDA) and 2.13 (CPU). Each function says what it falls back to when the private name is gone, so
that a new torch version costs evidence or comfort, never correctness.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

# A stance violation is a plain RuntimeError in every version so far; this part of its text is what names it.
STANCE_VIOLATION = "fail_on_recompile"


def inherit(key: str, value: object) -> None:
    """Store `value` in torch's own thread-local state, which `.backward()` hands on to the autograd thread."""
    torch._C._stash_obj_in_tls(key, value)


def inherited(key: str) -> Any:
    """What this thread, or the thread whose backward this one runs, stored under `key`; None if nothing."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def in_backward() -> bool:
    """Whether this thread runs a node of the autograd graph (on CUDA: the device's single autograd thread)."""
    return torch._C._current_graph_task_id() != -1


def backward_with_forward() -> contextlib.AbstractContextManager[object]:
    """Compile a graph's backward together with its forward instead of lazily in the autograd thread.

    Without the option (torch < 2.7) the backward is compiled lazily, inside the same exclusive hold.
    """
    import torch._functorch.config as config

    if hasattr(config, "force_non_lazy_backward_lowering"):
        return config.patch(force_non_lazy_backward_lowering=True)
    return contextlib.nullcontext()


class CompileListener:
    """Calls `start(direction, compile_id)` and `end(direction, compile_id)` around every compile in the process.

    Direction is "forward", "backward" (compiled late, at the first `.backward()`) or "cudagraph". An exception from
    `start` prevents that compile; for a forward Dynamo wraps it in its own error, for a backward it comes out of
    `.backward()` as it is. `torch._dynamo.reset()` removes listeners; `listen()` puts them back.
    """

    _DIRECTIONS: ClassVar = {"DYNAMO": "forward", "LAZY_BACKWARD": "backward", "CUDAGRAPH_RECORDING": "cudagraph"}

    def __init__(self, start: Callable[[str, str], None], end: Callable[[str, str], None]) -> None:
        self._start = lambda args: start(self._direction(args), args.compile_id)
        self._end = lambda args: end(self._direction(args), args.compile_id)

    def _direction(self, args: Any) -> str:
        return self._DIRECTIONS.get(args.callback_trigger.name, args.callback_trigger.name.lower())

    def listen(self) -> None:
        """Register with Dynamo unless registered already."""
        from torch._dynamo.callback import callback_handler

        if self._start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)

    def close(self) -> None:
        """Take the callbacks back."""
        from torch._dynamo.callback import callback_handler

        if self._start in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._start)
            callback_handler.remove_end_callback(self._end)


def recompile_reason() -> str:
    """The guards that failed before the compile that is starting in this thread; empty for a first compile.

    Read from Dynamo's metrics of the compile in progress; where they are gone, the reason is empty.
    """
    from torch._dynamo.utils import get_metrics_context

    return str(getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason") or "")


# -- graphs and their cache entries -----------------------------------------------------------------------------------

GraphListener = Callable[[str, bool, bool, str], None]
_graph_listeners: list[GraphListener] = []
_plain_lookup: Any = None


def listen_to_graphs(listener: GraphListener) -> None:
    """Call `listener(key, is_backward, hit, compile_id)` at every look-up of a graph in Inductor's cache.

    A graph that is compiled is looked up first, so the look-ups of a compile are its graphs in the order of compiling.
    Wraps `FxGraphCache.load_with_key`; where that is gone, nothing is heard and ledgers show no keys.
    """
    global _plain_lookup
    if listener not in _graph_listeners:
        _graph_listeners.append(listener)
    if _plain_lookup is not None:
        return
    from torch._inductor.codecache import FxGraphCache

    plain = getattr(FxGraphCache, "load_with_key", None)
    if plain is None:
        return
    parameters = inspect.signature(plain)

    def look_up(*args: Any, **kwargs: Any) -> Any:
        graph, info = result = plain(*args, **kwargs)
        given = parameters.bind(*args, **kwargs).arguments
        for each in tuple(_graph_listeners):
            each(given["key"], bool(given.get("is_backward")), graph is not None, current_compile_id())
        return result

    _plain_lookup = plain
    FxGraphCache.load_with_key = look_up  # type: ignore[method-assign, assignment]


def stop_listening_to_graphs(listener: GraphListener) -> None:
    """Take a listener back; the last one restores torch's own function."""
    global _plain_lookup
    if listener in _graph_listeners:
        _graph_listeners.remove(listener)
    if not _graph_listeners and _plain_lookup is not None:
        from torch._inductor.codecache import FxGraphCache

        FxGraphCache.load_with_key = staticmethod(_plain_lookup)  # type: ignore[method-assign]
        _plain_lookup = None


def current_compile_id() -> str:
    """Of the compile that runs in this thread, "3/0"; empty outside one."""
    context = torch._guards.CompileContext
    found = context.current_compile_id()
    return "" if found is None else str(found)


def graph_path(key: str) -> Path | None:
    """Where Inductor keeps the graph of that key on disk; None if it is not there."""
    from torch._inductor.codecache import FxGraphCache

    folder = getattr(FxGraphCache, "_get_tmp_dir_for_key", None)
    path = Path(folder(key)) if folder else None
    return path if path is not None and path.exists() else None


def inductor_seconds() -> list[float]:
    """Seconds of every graph that Inductor has compiled in this process, in order; empty where torch does not say."""
    from torch._dynamo.utils import compilation_time_metrics as times

    return list(times.get("fx_codegen_and_compile") or times.get("compile_fx_inner") or ())


def compile_metrics(compile_id: str) -> dict[str, Any]:
    """Dynamo's own figures of the newest compile with that id; empty where they are gone.

    Used: `entire_frame_compile_time_s`, `backend_compile_time_s`, `inductor_compile_time_s`, `num_graph_breaks`.
    """
    from torch._dynamo import utils

    read = getattr(utils, "get_compilation_metrics", None)
    for found in reversed(read() if read else []):
        if found.compile_id == compile_id and found.is_forward is not False:
            return dict(vars(found)) if hasattr(found, "__dict__") else {}
    return {}


def dropped_callbacks() -> bool:
    """Whether a compile would be reported to nobody: Dynamo disabled as a whole, by configuration or environment."""
    import torch._dynamo.config as config

    return bool(config.disable) or os.environ.get("TORCH_COMPILE_DISABLE") == "1"


# -- profiling ---------------------------------------------------------------------------------------------------------

COMPILED_GRAPH = re.compile(r"## Call CompiledFxGraph (\w+) ##")


def profiler_of_all_threads(cuda: bool) -> torch.profiler.profile:
    """A profiler, not yet started, that also sees the host events of threads other than the one that starts it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(activities=activities, record_shapes=True, experimental_config=config)


def stance() -> str:
    """torch's compiler stance: "default", "force_eager", "fail_on_recompile", ..."""
    from torch._dynamo import eval_frame

    found = getattr(eval_frame, "_stance", None)
    return str(getattr(found, "stance", "unknown"))
