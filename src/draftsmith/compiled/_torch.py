"""Everything that this package takes from PyTorch's private side, in one place.

Checked on torch 2.11 (CUDA) and 2.13 (CPU). Each function says what it falls back to when the private name is gone, so
that a new torch version costs evidence or comfort, never correctness.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

# What torch says (from 2.13 on) where fullgraph=True was asked for and Dynamo is switched off.
NO_FRAMES = "found no compiled frames"
# A stance violation is a plain RuntimeError in every version so far; this part of its text is what names it.
STANCE_VIOLATION = "fail_on_recompile"


PLACES = 256  # numbers below this are made once by CPython and never freed
NO_PLACE = -1


def inherit(key: str, place: int) -> None:
    """Store a small number in torch's own thread-local state, which `.backward()` hands on to the autograd thread.

    A number and not an object: torch 2.11 gives back more references than it takes, so an object is freed while it is
    still stored (seen there as a segmentation fault at the next look; torch 2.13 counts right).
    """
    assert NO_PLACE <= place < PLACES, place
    _keep(place)
    torch._C._stash_obj_in_tls(key, place)


def inherited(key: str) -> int:
    """What this thread, or the thread whose backward this one runs, stored under `key`; NO_PLACE if nothing."""
    if not torch._C._is_key_in_tls(key):
        return NO_PLACE
    place: int = torch._C._get_obj_in_tls(key)
    _keep(place)
    return place


def _keep(place: int) -> None:
    """Outweigh the reference that torch may drop: before Python 3.12 even small numbers count theirs. One too many is
    harmless for what is never freed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(place))


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


_listening = threading.Lock()


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

        with _listening:
            if self._start in callback_handler.start_callbacks:
                return
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)

    def close(self) -> None:
        """Take the callbacks back."""
        from torch._dynamo.callback import callback_handler

        if self._start in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._start)
            callback_handler.remove_end_callback(self._end)


# How a guard on a function that is an argument is stated; what follows are addresses, and the line that called.
_OTHER_FUNCTION = re.compile(r"___check_obj_id\((\w+)\.__code__, \d+\).*")


def recompile_reason() -> str:
    """The guards that failed before the compile that is starting in this thread; empty for a first compile.

    Read from Dynamo's metrics of the compile in progress; where they are gone, the reason is empty.
    """
    from torch._dynamo.utils import get_metrics_context

    text = str(getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason") or "")
    lines = text.split("User stack trace", maxsplit=1)[0].splitlines()
    guards = (_OTHER_FUNCTION.sub(r"\1 is another function", line.strip()) for line in lines)
    return "; ".join(guard for guard in guards if guard)


# -- graphs and their cache entries -----------------------------------------------------------------------------------

GraphListener = Callable[[str, bool, bool, str], None]
_graph_listeners: list[GraphListener] = []
_plain_lookup: Any = None


def listen_to_graphs(listener: GraphListener) -> None:
    """Call `listener(key, is_backward, hit, compile_id)` at every look-up of a graph in Inductor's cache.

    A graph that is compiled is looked up first, so the look-ups of a compile are its graphs in the order of compiling.
    Wraps `FxGraphCache.load_with_key`; where that is gone, nothing is heard and ledgers show no keys.
    """
    from torch._inductor.codecache import FxGraphCache

    with _listening:
        if listener not in _graph_listeners:
            _graph_listeners.append(listener)
        if _plain_lookup is None:
            _wrap_lookup(FxGraphCache)


def _wrap_lookup(cache: Any) -> None:
    global _plain_lookup
    plain = getattr(cache, "load_with_key", None)
    if plain is None:
        return
    parameters = inspect.signature(plain)

    def look_up(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        given = parameters.bind(*args, **kwargs).arguments
        for each in tuple(_graph_listeners):
            each(given["key"], bool(given.get("is_backward")), result[0] is not None, current_compile_id())
        return result

    _plain_lookup = plain
    cache.load_with_key = staticmethod(look_up)


def stop_listening_to_graphs(listener: GraphListener) -> None:
    """Take a listener back; the last one restores torch's own function."""
    global _plain_lookup
    with _listening:
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


def graph_breaks() -> int:
    """Graph breaks that Dynamo has met in this process; 0 where it does not say."""
    from torch._dynamo.utils import counters

    return sum(counters.get("graph_break", {}).values())


def compile_metrics(compile_id: str) -> dict[str, Any]:
    """Dynamo's own figures of the newest compile with that id; empty where they are gone.

    Used: `entire_frame_compile_time_s`, `backend_compile_time_s`, `inductor_compile_time_s`, `fail_type`.
    """
    from torch._dynamo import utils

    read = getattr(utils, "get_compilation_metrics", None)
    for found in reversed(read() if read else []):
        if found.compile_id == compile_id and found.is_forward is not False:
            return dict(vars(found)) if hasattr(found, "__dict__") else {}
    return {}


def failed(compile_id: str) -> bool:
    """Whether a compile ended in an error that Dynamo kept to itself (`suppress_errors`): the function ran eager."""
    return bool(compile_metrics(compile_id).get("fail_type"))


def why_nothing_compiles() -> str:
    """What keeps torch.compile from compiling in this process, in words."""
    import torch._dynamo.config as config

    if os.environ.get("TORCH_COMPILE_DISABLE") == "1" or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCH_COMPILE_DISABLE=1 is set"
    if config.disable:
        return "torch._dynamo.config.disable is set"
    if stance() == "force_eager":
        return "the stance is force_eager"
    return "it had been compiled before, or compiling is switched off by something unknown"


def lacks_compiler() -> str:
    """Why torch finds no C++ compiler, whatever its caches hold; "" where it finds one, or does not say.

    Inductor's code for the CPU wants one even to load what is cached; what a GPU runs may load without.
    """
    from torch._inductor import cpp_builder, exc

    look = getattr(cpp_builder, "get_cpp_compiler", None)
    refusal = getattr(exc, "InvalidCxxCompiler", OSError)
    try:
        if look is not None:
            look()
    except (refusal, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def why_it_failed(error: BaseException) -> str:
    """The cause in one line where compiling failed by what the machine lacks; "" for every other error.

    A compiler that is missing or fails, no Triton, a GPU too old for it, a cache that cannot be written. Where the
    private names are gone nothing is recognised, and the error keeps its traceback.
    """
    import torch._dynamo.exc as dynamo
    import torch._inductor.exc as inductor

    failed = getattr(dynamo, "BackendCompilerFailed", None)
    if failed is not None and isinstance(error, failed):
        error = error.inner_exception
    elif isinstance(error, OSError):  # not from compiling
        return ""
    names = ("InvalidCxxCompiler", "CppCompileError", "TritonMissing", "GPUTooOldForTriton")
    kinds = tuple(getattr(inductor, name) for name in names if hasattr(inductor, name))
    if not isinstance(error, (*kinds, OSError)) and "Failed to find C compiler" not in str(error):  # Triton's words
        return ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = (line for line in lines if re.search(r"\berror: |Failed to find C compiler", line))
    said = next(telling, lines[0] if lines else "")
    return f"{type(error).__name__}: {said}"


# -- profiling ---------------------------------------------------------------------------------------------------------

COMPILED_GRAPH = re.compile(r"## Call CompiledFxGraph (\w+) ##")


class Span(NamedTuple):
    """One event of a trace. `device`: index of the one that ran it, None for the host; times in nanoseconds."""

    name: str
    device: int | None
    thread: int
    start: int
    end: int
    sequence: int
    forward_thread: int
    event: Any

    def shapes(self) -> list[tuple[int, ...]]:
        """Of the tensors that an operator took."""
        return [tuple(shape) for shape in self.event.shapes() or () if shape]


class Recorder:
    """torch's profiler over the host events of all threads, and the kernels of all devices with `cuda`.

    Its events are read as they were recorded: `torch.profiler`'s own list of them, with parents and sums, costs about
    30 µs an event, during which no thread gets on.
    """

    def __init__(self, cuda: bool) -> None:
        # The profiler's library prints about itself otherwise.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = torch.autograd.profiler.profile(
            use_device="cuda" if cuda else None,
            use_kineto=True,
            record_shapes=True,
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )

    def start(self) -> None:
        """Record from now on."""
        self._profile.__enter__()

    def stop(self) -> list[Span]:
        """Everything since `start`; waits for the devices."""
        self._profile.__exit__(None, None, None)
        results = self._profile.kineto_results
        assert results is not None
        host = torch.autograd.DeviceType.CPU
        return [
            Span(
                event.name(),
                None if event.device_type() == host else event.device_index(),
                event.start_thread_id(),
                event.start_ns(),
                event.end_ns(),
                event.sequence_nr(),
                event.fwd_thread_id(),
                event,
            )
            for event in results.events()
        ]


def prepare_profiler(cuda: bool) -> None:
    """Let the profiler's library set itself up in this thread (the main one, as it asks)."""
    recorder = Recorder(cuda)
    recorder.start()
    recorder.stop()


def stance() -> str:
    """torch's compiler stance: "default", "force_eager", "fail_on_recompile", ..."""
    from torch._dynamo import eval_frame

    found = getattr(eval_frame, "_stance", None)
    return str(getattr(found, "stance", "unknown"))
