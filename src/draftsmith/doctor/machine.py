"""Python, torch and its CUDA, driver, Triton, GPUs and the paths between them, memory, disk, caches, variables."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from draftsmith.compiled.cache import inductor_folder, root_folder
from draftsmith.compiled.machine import driver
from draftsmith.compiled.machine import environment as may_change_compiling
from draftsmith.config import RunConfig
from draftsmith.doctor.finding import Finding
from draftsmith.errors import first_line, reason_of

GIB = 2**30
DISK_GIB = 5.0  # below this a checkpoint or a cache may not fit

# Variables that switch compiling off or change what is compiled, and what to say of them.
_DISABLING = {
    "TORCH_COMPILE_DISABLE": "nothing is compiled",
    "TORCHDYNAMO_DISABLE": "nothing is compiled",
    "TORCHDYNAMO_SUPPRESS_ERRORS": "what fails to compile runs eager, silently",
    "TRITON_INTERPRET": "Triton kernels are interpreted in Python",
    "PYTORCH_JIT": "kernels that need it run eager",
}
_SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "every start compiles everything",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "the cache may be off",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "every start compiles FlashAttention-4's kernels",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "compiling takes minutes longer, and its CUDA graphs are not thread-safe",
    "TORCH_CACHING_PRECOMPILE": "breaks with flex_attention on torch 2.13",
    "TORCH_LOGS": "writes logs while compiling",
    "TORCHDYNAMO_VERBOSE": "writes logs while compiling",
    "NVIDIA_TF32_OVERRIDE": "changes the precision of float32 matmuls",
}
_SLOW_WHEN_OFF = ("TORCHINDUCTOR_FX_GRAPH_CACHE", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED")
_COMPILERS = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_", "TRITON_")
_OFF = ("", "0", "false", "False", "no")


def check(config: RunConfig | None = None) -> list[Finding]:
    """All findings about the machine."""
    return [
        *_versions(),
        *_gpus(config),
        *_room(config),
        *_folders(config),
        *variables(os.environ, may_change_compiling()),
    ]


def _versions() -> Iterator[Finding]:
    supported = (3, 10) <= sys.version_info[:2] <= (3, 14)
    text = f"{platform.python_version()} in {sys.prefix}"
    if supported:
        yield Finding("python", "ok", text)
    else:
        yield Finding("python", "warn", f"{text}; tested with 3.10 to 3.14", "python3.12 -m venv .venv")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield Finding("torch", "ok", f"{torch.__version__}, {build}")
    if not torch.version.cuda:
        return
    found = driver()
    if found is None:
        yield Finding("driver", "warn", "no NVIDIA driver answers", "nvidia-smi")
    else:
        yield Finding("driver", "ok", found)
    try:
        import triton

        yield Finding("triton", "ok", triton.__version__)
    except ImportError as error:
        mend = f"pip install --force-reinstall torch=={torch.__version__.split('+')[0]}"
        yield Finding("triton", "bad", f"cannot be imported: {error}", mend)


def _gpus(config: RunConfig | None) -> Iterator[Finding]:
    count = torch.cuda.device_count()
    wanted = sorted(set(config.pipeline.targets + config.pipeline.drafters if config else ()))
    cuda_wanted = [name for name in wanted if name.startswith("cuda")]
    if count == 0:
        if cuda_wanted:
            mend = "nvidia-smi; python -c 'import torch; torch.cuda.init()' says why torch sees no GPU"
            yield Finding("gpu", "bad", f"the config asks for {', '.join(cuda_wanted)}; torch sees no GPU", mend)
        else:
            way = "compiled" if config is not None and config.compile.enabled == "on" else "eager"
            yield Finding("gpu", "ok", f"none: dense attention, {way}, on the CPU by name")
        return
    for index in range(count):
        try:
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:  # the driver counts it, and CUDA does not start
            mend = f"a driver for CUDA {torch.version.cuda}, or a restart of the machine: nvidia-smi says which it has"
            yield Finding("gpu", "bad", f"cuda:{index} cannot be used: {first_line(error)}", mend)
            return
        major, minor = torch.cuda.get_device_capability(index)
        text = f"cuda:{index} {torch.cuda.get_device_name(index)} sm_{major}{minor}, {free / GIB:.1f} of "
        text = f"{text}{total / GIB:.1f} GiB free"
        if free > 0.5 * total:
            yield Finding("gpu", "ok", text)
        else:
            mend = f"nvidia-smi --id={index} names the processes that hold it: end them, or choose another device"
            yield Finding("gpu", "warn", text, mend)
        if (major, minor) < (8, 0):
            yield Finding("gpu", "warn", f"cuda:{index} has no bfloat16 matmuls in hardware", "training.dtype=float32")
    if count > 1:
        blind = [
            f"{one}→{other}"
            for one in range(count)
            for other in range(count)
            if one != other and not torch.cuda.can_device_access_peer(one, other)
        ]
        if blind:
            mend = "nvidia-smi topo --matrix shows how they are joined: give both roles to GPUs that reach each other"
            text = f"none between {', '.join(blind)}: copies pass the host"
            yield Finding("peer access", "warn", text, mend)
        else:
            yield Finding("peer access", "ok", f"every pair of {count} GPUs")


def _room(config: RunConfig | None) -> Iterator[Finding]:
    places = {"temporary files": Path(tempfile.gettempdir())}
    if config is not None:
        places["run folder"] = _existing(Path(config.training.output))
    for name, place in places.items():
        free = shutil.disk_usage(place).free / GIB
        enough = free >= DISK_GIB
        mend = "" if enough else f"free some room in {place}, or choose another place"
        yield Finding(f"disk, {name}", "ok" if enough else "warn", f"{free:.1f} GiB free in {place}", mend)
    available = _memory_available()
    if available is not None:
        few = available <= 4 * GIB
        mend = "ps aux --sort=-rss | head shows what holds it; pipeline.prefetch=1 pipeline.queue=1 need less" * few
        yield Finding("memory", "warn" if few else "ok", f"{available / GIB:.1f} GiB available", mend)


def _folders(config: RunConfig | None) -> Iterator[Finding]:
    places = [
        ("compile cache", root_folder(), "DRAFTSMITH_CACHE_DIR"),
        ("inductor cache", inductor_folder(), "TORCHINDUCTOR_CACHE_DIR"),
    ]
    if config is not None:
        places.append(("run folder", Path(config.training.output), "training.output"))
    for name, place, setting in places:
        problem = _unwritable(place)
        if problem:
            mend = f"set {setting} to a folder that you may write, or make this one so: ls -ld {_existing(place)}"
            yield Finding(name, "bad", f"{place} cannot be written: {problem}", mend)
        else:
            yield Finding(name, "ok", str(place))


def _unwritable(place: Path) -> str:
    """Why no file can be made there or in the nearest folder above, found out by making one; "" if one can."""
    try:
        with tempfile.TemporaryFile(dir=_existing(place)):
            return ""
    except OSError as error:
        return reason_of(error)


def variables(environment: os._Environ[str] | dict[str, str], others: Iterable[str] = ()) -> list[Finding]:
    """Findings about variables that switch compiling off or change it.

    Args:
        environment: name → value.
        others: names of which it is only known that they may change what is compiled.
    """
    findings = []
    for name, effect in _DISABLING.items():
        value = environment.get(name)
        on = value is not None and (value in _OFF if name == "PYTORCH_JIT" else value not in _OFF)
        if on:
            findings.append(Finding("environment variables", "bad", f"{name}={value}: {effect}", f"unset {name}"))
    for name, effect in _SLOWING.items():
        value = environment.get(name)
        off_is_bad = name in _SLOW_WHEN_OFF
        if value is not None and (value in _OFF) == off_is_bad:
            findings.append(Finding("environment variables", "warn", f"{name}={value}: {effect}", f"unset {name}"))
    for name in others:
        if name.startswith(_COMPILERS) and name not in _DISABLING and name not in _SLOWING:
            text = f"{name}={environment[name]}: may change what is compiled"
            findings.append(Finding("environment variables", "warn", text, f"unset {name}"))
    return findings or [Finding("environment variables", "ok", "none that changes compiling")]


def _existing(place: Path) -> Path:
    """The place, or the nearest folder above it that is there."""
    place = place.absolute()
    while not os.path.exists(place):
        place = place.parent
    return place


def _memory_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
