"""What must match for compiled code to be worth loading, and what a run should remember of where it ran.

`facts()` is cheap (milliseconds, no CUDA context beyond what torch has) and plain JSON. `differences` names the fields
in which two machines differ, so that a refusal can say which one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PREFIXES = ("TORCH", "TRITON", "CUDA", "PYTORCH", "FLASH_ATTENTION_", "CUTE_DSL_", "OMP_NUM_", "MKL_NUM_")
# What changes nothing about what is compiled: places; torchrun's, which differ in every start and rank; what is logged
# and how much of it; communication; how memory is allocated, and launches are queued.
_PLACES = (
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TORCH_HOME", "TORCH_TRACE"),
    *("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "CUTE_DSL_CACHE_DIR"),
)
_LAUNCHER = ("TORCHELASTIC_", "TORCH_ELASTIC_")
_HARMLESS = (
    "TORCH_LOGS",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCHDYNAMO_VERBOSE",
    "TORCHDYNAMO_EXTENDED_",
    "TORCH_NCCL_",
    "TORCH_DISTRIBUTED_DEBUG",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TRITON_PRINT_AUTOTUNING",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING",
    "OMP_NUM_",  # bits on a CPU depend on it; what is compiled there is named by the threads that a run gives it
    "MKL_NUM_",
)


def facts(sources: Iterable[Path] = ()) -> dict[str, Any]:
    """Versions, GPUs, configuration, and the variables that may change what is compiled.

    Args:
        sources: files or folders whose content decides what is compiled; their hash is the field "sources".
    """
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_git": getattr(torch.version, "git_version", None),
        "cuda": torch.version.cuda,
        "triton": _version("triton") or _version("pytorch-triton"),
        "flash": [_version(name) for name in ("flash-attn-4", "nvidia-cutlass-dsl")],
        "driver": driver(),
        "gpus": gpus(),
        "cpu": platform.machine(),
        "inductor_config": inductor_config(),
        "environment": environment(),
    }
    sources = list(sources)
    if sources:
        found["sources"] = source_hash(sources)
    return found


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Fields that differ as JSON, each as "torch: 2.11.0 there, 2.13.0 here"."""
    return _differences(*(json.loads(json.dumps(each, default=str)) for each in (there, here)))


def _differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    found = []
    for key in sorted({*there, *here}):
        one, other = there.get(key), here.get(key)
        if one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            found += [f"{key}.{line}" for line in _differences(one, other)]
        else:
            found.append(f"{key}: {_short(one)} there, {_short(other)} here")
    return found


def gpus() -> list[str]:
    """Each kind of GPU once, "NVIDIA H200 sm_90"."""
    kinds: dict[str, None] = {}
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        kinds[f"{torch.cuda.get_device_name(index)} sm_{major}{minor}"] = None
    return list(kinds)


def driver() -> str | None:
    """Version of the NVIDIA driver; None where there is none."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
            return version.decode() if isinstance(version, bytes) else str(version)
        finally:
            pynvml.nvmlShutdown()
    return None


def environment() -> dict[str, str]:
    """Variables of torch, Triton and CUDA that may change what is compiled: all that are not known to be harmless."""
    return {name: value for name, value in _variables().items() if not name.startswith(_HARMLESS)}


def harmless_environment() -> dict[str, str]:
    """Those that change speed, memory or messages, and nothing about what is compiled."""
    return {name: value for name, value in _variables().items() if name.startswith(_HARMLESS)}


def _variables() -> dict[str, str]:
    """All of them, without those that only name places or who started the process."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES)
        and name not in _PLACES
        and not name.startswith(_LAUNCHER)
        and "VISIBLE" not in name
    }


def inductor_config() -> str:
    """Hash of Inductor's configuration as this thread sees it."""
    import torch._inductor.config as config

    content = config.save_config_portable() if hasattr(config, "save_config_portable") else {}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def source_hash(sources: Iterable[Path]) -> str:
    """Hash of the Python files in some places, by name and content."""
    digest = hashlib.sha256()
    for place in sources:
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        for file in files:
            digest.update(str(file.relative_to(place) if place.is_dir() else file.name).encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
