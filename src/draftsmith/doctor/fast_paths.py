"""Which fast paths a target's layers want, and whether transformers will really take them.

Gated-delta-net layers (Qwen3-Next, Qwen3.5, ...) run through kernels of flash-linear-attention and causal-conv1d if
those are installed and usable, and otherwise through readable PyTorch loops that are many times slower, with one line
in the log. Whether they are taken is seen, not guessed: a tiny model of the same class and layer kinds runs forward
once, and the modules whose functions were entered are noted. On a GPU both ways are timed.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from types import FrameType
from typing import Any

import torch

from draftsmith.compiled import _torch
from draftsmith.config import RunConfig
from draftsmith.doctor.finding import Finding, Say, quiet
from draftsmith.drafter import flash
from draftsmith.drafter.attention import in_words
from draftsmith.errors import UserError, first_line
from draftsmith.pipeline.compiling import COMPILER
from draftsmith.pipeline.plan import check_flex_backend, read_spec_to_start_from, resolve_attention
from draftsmith.target import fp8
from draftsmith.target.geometry import read_geometry
from draftsmith.target.quantised import install_line, method_of
from draftsmith.target.source import read_config

LINEAR = "linear_attention"


@dataclass(frozen=True)
class Kernel:
    """A fast path: the package whose functions it enters, and the reference that runs instead."""

    package: str
    module: str
    slow: str
    what: str


KERNELS = (
    Kernel("flash-linear-attention", "fla", "torch_chunk_gated_delta_rule", "gated delta rule"),
    Kernel("causal-conv1d", "causal_conv1d", "causal_conv1d_fn", "causal convolution"),
)
TIMED_TOKENS = 2048
SLOWER = 1.05  # times: nearer than that two medians are alike
_WARMUPS = 3
_SMALL = {
    "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "max_position_embeddings": 8192,
}  # fmt: skip
# Of those, what stands around a linear-attention layer and takes time of its own.
_AROUND = {
    "intermediate_size", "vocab_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size",
}  # fmt: skip


def check(config: RunConfig, say: Say = quiet) -> list[Finding]:
    """Findings about the drafter's and the target's fast paths under this config; `say` hears what will take long."""
    findings = [*_drafter(config), *_flex_backend(config), *_precision(config)]
    text = read_config(config.target).get_text_config(decoder=True)
    kinds = list(getattr(text, "layer_types", None) or ())
    findings += _target_attention(text, _target_device(config))
    if LINEAR not in kinds:
        findings.append(Finding("target layers", "ok", f"{text.model_type}: attention only, no extra kernels wanted"))
        return findings
    device = _target_device(config)
    return [*findings, *linear_attention(text, device, kinds.count(LINEAR), say)]


def _drafter(config: RunConfig) -> Iterator[Finding]:
    """The attention path that training would take, or why it would refuse, and whether compiling works here."""
    on_cuda = _drafters_on_cuda(config)
    notices: list[str] = []
    block_size = config.drafter.block_size
    if config.drafter.init:
        block_size = read_spec_to_start_from(config, read_geometry(config.target), []).block_size
    try:
        attention, compiled = resolve_attention(config, block_size, on_cuda, notices)
    except UserError as error:
        yield Finding.of_refusal("drafter attention", error)
        return
    if on_cuda:
        for notice in notices:
            yield Finding("drafter attention", "warn", notice, "drafter.attention=flex")
    way = in_words(attention, compiled)
    way += "" if on_cuda else ", on the CPU by name"
    problem = compiles(torch.device("cuda", 0) if on_cuda else torch.device("cpu")) if compiled else ""
    if problem:
        ways = [f"if it lacks a compiler: {COMPILER}", "if a variable forbids it: unset that"]
        ways.append("or compile.enabled=auto, which is eager here" if attention == "dense" else "see triton above")
        mend = "; ".join(ways)
        yield Finding("drafter attention", "bad", f"{way}: a tiny function does not run compiled: {problem}", mend)
    else:
        seen = "; a tiny compiled function was seen to run compiled" if compiled else ""
        yield Finding("drafter attention", "ok", f"{way}{seen}")


def _flex_backend(config: RunConfig) -> Iterator[Finding]:
    """Whether flex attention can run through the kernels that the config asks for, where they are not torch's own."""
    if config.compile.flex_backend != "flash":
        return
    geometry = read_geometry(config.target)
    spec = read_spec_to_start_from(config, geometry, []) if config.drafter.init else None
    head_dim = spec.head_dim if spec else config.drafter.head_dim or geometry.head_dim
    on_cuda = _drafters_on_cuda(config)
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] if on_cuda else []
    dtype = torch.float32 if config.training.dtype == "float32" else torch.bfloat16
    try:
        block_size = spec.block_size if spec else config.drafter.block_size
        attention, _ = resolve_attention(config, block_size, on_cuda, [])
        check_flex_backend(config, attention, head_dim, dtype, devices)
        flash.load()
    except UserError as error:
        yield Finding.of_refusal("flex backend", error)
    else:
        yield Finding("flex backend", "ok", "FlashAttention-4: its package can be imported")


def _precision(config: RunConfig) -> Iterator[Finding]:
    """Whether weights that come quantised have what they need, and whether fp8 can run where it is asked for."""
    method = method_of(read_config(config.target))
    if method:
        mend = install_line(method)
        lacks = "packages are missing" if mend else "runs as it is, its layers uncompiled"
        yield Finding("target weights", "bad" if mend else "ok", f"quantised ({method}): {lacks}", mend)
    if config.target.precision == "fp8":
        dtype = torch.float32 if config.target.dtype == "float32" else torch.bfloat16
        why = fp8.missing(_target_device(config), dtype)
        text = f"fp8 is not possible: {why}" if why else "fp8: a small row-wise product came out right"
        yield Finding("target precision", "bad" if why else "ok", text, "target.precision=full" if why else "")


def _target_attention(text: Any, device: torch.device) -> Iterator[Finding]:
    """Which kernel scaled_dot_product_attention takes at the target's head size with a mask, as packed rows need."""
    if device.type != "cuda":
        return
    heads = int(text.num_attention_heads)
    dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    query = torch.randn(1, 2, 256, dim, device=device, dtype=torch.bfloat16)
    mask = torch.ones(256, 256, dtype=torch.bool, device=device).tril()
    torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
        torch.cuda.synchronize(device)
    names = {event.name for event in profiler.events() or []}
    fused = sorted(name for name in names if re.search(r"flash|fmha|efficient|cudnn_generated", name, re.IGNORECASE))
    if fused:
        yield Finding("target attention", "ok", f"head size {dim}, masked: {fused[0][:80]}")
    else:
        text_ = f"head size {dim}, masked: no fused kernel was seen, all scores are computed"
        yield Finding("target attention", "bad", text_, "unset what disables SDPA kernels (torch.backends.cuda.*_sdp)")


def compiles(device: torch.device) -> str:
    """Compiles a tiny function and looks for its graph in a profile; "" if it ran compiled, else what was seen."""
    from draftsmith.compiled import Evidence, Expected, Gate, Region

    gate = Gate()
    try:
        region = Region("doctor", _tiny, gate=gate, device=device)
        x = torch.ones(64, device=device, requires_grad=True)
        with gate.exclusive():
            region(x).backward()
        with gate.step():
            evidence = Evidence(gate, [Expected(region, backward=True)])
            evidence.begin()
            region(x).backward()
            verdict = evidence.end(0)
        return "" if verdict.ok else f"{verdict.problems[0]} ({_torch.why_nothing_compiles()})"
    except Exception as error:  # whatever torch raises is the finding
        if _torch.NO_FRAMES in str(error):
            return _torch.why_nothing_compiles()
        return _torch.why_it_failed(error) or f"{type(error).__name__}: {first_line(error)}"
    finally:
        gate.close()


def _tiny(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).sum()


def linear_attention(text: Any, device: torch.device, count: int, say: Say = quiet) -> list[Finding]:
    """What a tiny model with this configuration's linear-attention layers enters in a forward.

    Args:
        text: the target's text configuration.
        device: where the target will run.
        count: of such layers in the target, for the text.
        say: is told in a line what will take long, before it does.
    """
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small_config(text)).to(device, dtype).eval()
        tokens = torch.zeros(1, 128, dtype=torch.long, device=device)
        entered = modules_entered(lambda: model(tokens, use_cache=False))
    except Exception as error:
        text_ = f"a tiny {text.model_type} does not run on {device}: {first_line(error)}"
        return [Finding("target layers", "bad", text_, "pip install --upgrade transformers")]
    return [_linear_finding(kernel, text, device, count, entered, say) for kernel in KERNELS]


def _linear_finding(
    kernel: Kernel, text: Any, device: torch.device, count: int, entered: set[str], say: Say
) -> Finding:
    layers = f"{text.model_type}: {kernel.what} of {count} layers"
    if any(name == kernel.module or name.startswith(f"{kernel.module}.") for name in entered):
        text_ = f"{layers} runs through {kernel.package}; {slow_down(kernel, text, device, say)}"
        return Finding("target layers", "ok", text_)
    version = _installed(kernel.package)
    if device.type != "cuda":
        text_ = f"{layers} runs in plain PyTorch: {kernel.package} needs a GPU; slow-down not measured"
        return Finding("target layers", "bad", text_, "pipeline.targets=cuda:0, on a machine with a GPU")
    if version is None:
        text_ = f"{layers} runs in plain PyTorch: {kernel.package} is not installed; slow-down not measured"
        return Finding("target layers", "bad", text_, f"pip install {kernel.package}")
    why = _import_problem(kernel.module)
    text_ = f"{layers} runs in plain PyTorch although {kernel.package} {version} is installed"
    mend = f"pip install --force-reinstall --no-build-isolation {kernel.package}"
    return Finding("target layers", "bad", f"{text_}{f': {why}' if why else ''}; slow-down not measured", mend)


def small_config(text: Any) -> Any:
    """The configuration with one layer of each kind and small sizes; head sizes stay: kernels depend on them."""
    small = type(text)(**{**text.to_dict(), **{k: v for k, v in _SMALL.items() if hasattr(text, k)}})
    kinds = list(dict.fromkeys(text.layer_types))
    small.layer_types, small.num_hidden_layers = kinds, len(kinds)
    return small


def modules_entered(call: Callable[[], object]) -> set[str]:
    """Names of all modules whose Python functions were entered while `call` ran, in this thread."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            entered.add(frame.f_globals.get("__name__", ""))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with torch.no_grad():
            call()
    finally:
        sys.setprofile(before)
    return entered


def slow_down(kernel: Kernel, text: Any, device: torch.device, say: Say = quiet) -> str:
    """Times one layer of the target's own sizes with the fast path and with the reference, or says "not measured"."""
    if device.type != "cuda":
        return "slow-down without it not measured"
    say(f"timing a layer with {kernel.package} and without: its first time on a machine can take two minutes")
    try:
        times = with_and_without(kernel, timed_config(text), device, torch.bfloat16)
    except Exception as error:  # whatever a kernel raises is no reason to say nothing of the rest
        return f"slow-down without it not measured: {first_line(error)}"
    if times is None:
        return "slow-down without it not measured"
    with_it, without = times
    ratio = without / with_it
    how = f"{ratio:.1f} times slower" if ratio >= SLOWER else "no slower"
    seen = f"a layer, {TIMED_TOKENS:,} tokens: {without:.2f} against {with_it:.2f} ms"
    return f"without it {how} on this card ({seen})"


def timed_config(text: Any) -> Any:
    """The configuration with one linear-attention layer at its own sizes; what surrounds it is small."""
    around = {name: value for name, value in _SMALL.items() if name in _AROUND and hasattr(text, name)}
    one = type(text)(**{**text.to_dict(), **around})
    one.layer_types, one.num_hidden_layers = [LINEAR], 1
    return one


def with_and_without(
    kernel: Kernel, config: Any, device: torch.device, dtype: torch.dtype, runs: int = 10
) -> tuple[float, float] | None:
    """Milliseconds of a model's forward with a kernel's fast path and with its reference, medians of runs in turn;
    None where the model's module has no reference to go back to."""
    from transformers import AutoModelForCausalLM

    with device:
        model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    module: Any = sys.modules[type(model).__module__]
    fast = getattr(module, kernel.slow, None)
    reference: Any = fast
    while hasattr(reference, "__wrapped__"):
        reference = reference.__wrapped__
    if fast is None or reference is fast:
        return None
    tokens = torch.zeros(1, TIMED_TOKENS, dtype=torch.long, device=device)
    times: dict[Any, list[float]] = {fast: [], reference: []}
    try:
        for _ in range(_WARMUPS + runs):
            for function, seen in times.items():
                setattr(module, kernel.slow, function)
                seen.append(_milliseconds(lambda: model(tokens, use_cache=False), device))
    finally:
        setattr(module, kernel.slow, fast)
    with_it, without = (statistics.median(seen[_WARMUPS:]) for seen in times.values())
    return with_it, without


@torch.no_grad()
def _milliseconds(work: Callable[[], object], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _device: None
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    return (time.perf_counter() - began) * 1e3


def _drafters_on_cuda(config: RunConfig) -> bool:
    return torch.cuda.is_available() and all(not name.startswith("cpu") for name in config.pipeline.drafters)


def _target_device(config: RunConfig) -> torch.device:
    on_cuda = torch.cuda.is_available() and not config.pipeline.targets[0].startswith("cpu")
    return torch.device("cuda", 0) if on_cuda else torch.device("cpu")


def _installed(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _import_problem(module: str) -> str:
    try:
        __import__(module)
    except Exception as error:
        return first_line(error)
    return ""
