"""Which fast paths a target's layers want, and whether transformers will really take them.

Layers that carry state (gated delta nets, state-space layers, short convolutions) run through kernels of packages of
their own if those are installed and usable, and otherwise through readable PyTorch loops that are many times slower,
with one line in the log. Whether they are taken is seen, not guessed: a tiny model of the same class and layer kinds
runs forward once, and the modules whose functions were entered are noted. On a GPU both ways are timed.

Everything is tried on the configured devices: the first drafter's, and the first of the first target's.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch

from draftsmith.compiled import _torch
from draftsmith.config import RunConfig
from draftsmith.doctor import packed_rows
from draftsmith.doctor.finding import Finding, Say, quiet
from draftsmith.doctor.tiny import LINEAR, current, small_model, timed_config
from draftsmith.drafter import flash
from draftsmith.drafter.attention import in_words
from draftsmith.errors import UserError, first_line
from draftsmith.pipeline.compiling import COMPILER
from draftsmith.pipeline.plan import check_flex_backend, read_spec_to_start_from, resolve_attention
from draftsmith.pipeline.topology import Topology
from draftsmith.target import fp8
from draftsmith.target.geometry import FULL, SLIDING, layer_kinds, read_geometry
from draftsmith.target.quantised import install_line, method_of
from draftsmith.target.source import read_config

# Kinds that attention alone computes; what else may stand for a layer is feed-forward.
ATTENTION = {FULL, SLIDING, "chunked_attention"}
_FEED_FORWARD = {"moe", "mlp", "sparse", "dense"}


@dataclass(frozen=True)
class Kernel:
    """A fast path: the package whose functions it enters, and the reference that runs instead.

    A model wants it if transformers' module of the model has a function of the reference's name.
    """

    package: str
    module: str
    slow: str
    what: str


KERNELS = (
    Kernel("flash-linear-attention", "fla", "torch_chunk_gated_delta_rule", "gated delta rule"),
    Kernel("causal-conv1d", "causal_conv1d", "causal_conv1d_fn", "causal convolution"),
    Kernel("flash-linear-attention", "fla", "chunk_kimi_delta_attention", "Kimi delta rule"),
    Kernel("mamba-ssm", "mamba_ssm", "mamba2_chunk_scan", "state-space scan"),
    Kernel("mamba-ssm", "mamba_ssm", "mamba_selective_scan", "selective scan"),
)
TIMED_TOKENS = 2048
SLOWER = 1.05  # times: nearer than that two medians are alike
_WARMUPS = 3


def check(config: RunConfig, topology: Topology, say: Say = quiet) -> list[Finding]:
    """Findings about the drafter's and the target's fast paths.

    Args:
        config: of the run.
        topology: its devices, as training resolves them.
        say: is told in a line what will take long, before it does.

    Raises:
        UserError: the target or the drafter to start from cannot be read.
    """
    findings = [*_drafter(config, topology), *_flex_backend(config, topology), *_precision(config, topology)]
    text = read_config(config.target).get_text_config(decoder=True)
    if config.target.features:
        return [*findings, Finding("target layers", "ok", f"features are read from {config.target.features}")]
    device, trust = _target_device(config, topology), config.target.trust_remote_code
    head_dim = read_geometry(config.target).head_dim
    findings += packed_rows.check(text, head_dim, device, _target_dtype(config, topology), trust)
    return [*findings, *_layers(text, device, say, trust)]


def _layers(text: Any, device: torch.device, say: Say, trust_remote_code: bool = False) -> list[Finding]:
    """What the target's layers beside plain attention run through."""
    kinds = _kinds_of(text)
    others = [kind for kind in kinds if kind not in ATTENTION | _FEED_FORWARD]
    if others:
        count = others.count(LINEAR) or len(others)
        return linear_attention(text, device, count, say, trust_remote_code)
    if type(text).__module__.startswith("transformers_modules"):
        return [_unchecked(text, "its code comes with the model")]
    return [Finding("target layers", "ok", f"{text.model_type}: attention only, no extra kernels wanted")]


def _drafter(config: RunConfig, topology: Topology) -> Iterator[Finding]:
    """The attention path that training would take, or why it would refuse, and whether compiling works here."""
    on_cuda = _drafters_on_cuda(topology)
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
    elif any(device.type == "cuda" for device in topology.drafters):
        text = "one drafter is on the CPU: those on GPUs attend densely, too"
        yield Finding("drafter attention", "warn", text, "pipeline.drafters of GPUs only")
    way = in_words(attention, compiled)
    way += "" if on_cuda else ", on the CPU by name"
    tried = _compiled_on(config, topology) if compiled else []
    problems = [(device, problem) for device in tried if (problem := compiles(device))]
    if problems:
        device, problem = problems[0]
        ways = [f"if it lacks a compiler: {COMPILER}", "if a variable forbids it: unset that"]
        ways.append("or compile.enabled=auto, which is eager here" if attention == "dense" else "see triton above")
        mend = "; ".join(ways)
        text = f"{way}: a tiny function does not run compiled on {device}: {problem}"
        yield Finding("drafter attention", "bad", text, mend)
    else:
        places = " and ".join(map(str, tried))
        seen = f"; a tiny compiled function was seen to run compiled on {places}" if compiled else ""
        yield Finding("drafter attention", "ok", f"{way}{seen}")


def _compiled_on(config: RunConfig, topology: Topology) -> list[torch.device]:
    """The first drafter's device, and the first target's if its layers may be compiled on another one."""
    devices = [_drafter_device(config, topology)]
    if config.compile.target and not config.target.features and not method_of(read_config(config.target)):
        devices.append(_target_device(config, topology))
    return list(dict.fromkeys(devices))


def _flex_backend(config: RunConfig, topology: Topology) -> Iterator[Finding]:
    """Whether flex attention can run through the kernels that the config asks for, where they are not torch's own."""
    if config.compile.flex_backend != "flash":
        return
    geometry = read_geometry(config.target)
    spec = read_spec_to_start_from(config, geometry, []) if config.drafter.init else None
    head_dim = spec.head_dim if spec else config.drafter.head_dim or geometry.head_dim
    dtype = torch.float32 if config.training.dtype == "float32" else torch.bfloat16
    try:
        block_size = spec.block_size if spec else config.drafter.block_size
        attention, _ = resolve_attention(config, block_size, _drafters_on_cuda(topology), [])
        check_flex_backend(config, attention, head_dim, dtype, topology.drafters)
        flash.load()
    except UserError as error:
        yield Finding.of_refusal("flex backend", error)
    else:
        yield Finding("flex backend", "ok", "FlashAttention-4: its package can be imported")


def _precision(config: RunConfig, topology: Topology) -> Iterator[Finding]:
    """Whether weights that come quantised have what they need, and whether fp8 can run where it is asked for."""
    method = "" if config.target.features else method_of(read_config(config.target))
    if method:
        mend = install_line(method)
        lacks = "packages are missing" if mend else "runs as it is, its layers uncompiled"
        yield Finding("target weights", "bad" if mend else "ok", f"quantised ({method}): {lacks}", mend)
        if any(len(span) > 1 for span in topology.spans):
            text = "came quantised, and such a target cannot span devices"
            yield Finding("target weights", "bad", text, "name one device in pipeline.targets")
    if config.target.precision == "fp8":
        dtype = _target_dtype(config, topology)
        devices = [_tried_on(config.pipeline.targets, device) for device in topology.targets]
        why = next((why for device in dict.fromkeys(devices) if (why := fp8.missing(device, dtype))), "")
        text = f"fp8 is not possible: {why}" if why else "fp8: a small row-wise product came out right"
        yield Finding("target precision", "bad" if why else "ok", text, "target.precision=full" if why else "")


def compiles(device: torch.device) -> str:
    """Compiles a tiny function and looks for its graph in a profile; "" if it ran compiled, else what was seen."""
    from draftsmith.compiled import Evidence, Expected, Gate, Region

    gate = Gate()
    try:
        with current(device):
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


def linear_attention(
    text: Any, device: torch.device, count: int, say: Say = quiet, trust_remote_code: bool = False
) -> list[Finding]:
    """What a tiny model with this configuration's kinds of layers enters in a forward.

    Args:
        text: the target's text configuration.
        device: where the target will run.
        count: of layers that are no attention in the target, for the text.
        say: is told in a line what will take long, before it does.
        trust_remote_code: whether code that comes with the target may run.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with current(device):
        try:
            model = small_model(text, device, dtype, trust_remote_code)
        except Exception as error:  # whatever a model of any kind raises: what is small here may not fit together
            return [_unchecked(text, f"a tiny model of them cannot be made: {first_line(error)}")]
        tokens = torch.zeros(1, 128, dtype=torch.long, device=device)
        try:
            entered = modules_entered(lambda: model(tokens, use_cache=False))
        except Exception as error:
            why = f"a tiny {text.model_type} does not run on {device}: {first_line(error)}"
            broken = next((kernel for kernel in KERNELS if _raised_in(error, kernel.module)), None)
            if broken is None:
                return [_unchecked(text, why)]
            mend = f"pip install --force-reinstall --no-build-isolation {broken.package}"
            return [Finding("target layers", "bad", f"{why} (in {broken.package})", mend)]
        module = sys.modules[type(model).__module__]
        wanted = [kernel for kernel in KERNELS if hasattr(module, kernel.slow)]
        if not wanted:
            return [_unchecked(text, "transformers' module of it names no kernel that is known here")]
        return [_linear_finding(kernel, text, device, count, entered, say) for kernel in wanted]


def _kinds_of(text: Any) -> Sequence[str]:
    """Of all layers, as the model's configuration calls them."""
    kinds: Sequence[str] = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    return kinds or layer_kinds(text)


def _unchecked(text: Any, why: str) -> Finding:
    kinds = _kinds_of(text)
    names = ", ".join(f"{kind} ({kinds.count(kind)})" for kind in dict.fromkeys(kinds))
    said = f"{text.model_type}: the kernels of its layers were not checked: {names}; {why}"
    mend = "a first short run tells: transformers logs what is falling back to its reference implementation"
    return Finding("target layers", "unknown", said, mend)


def _raised_in(error: BaseException, module: str) -> bool:
    """Whether code of a package was running when it was raised."""
    return any(_is_of(frame.f_globals.get("__name__", ""), module) for frame, _ in walk_tb(error.__traceback__))


def _is_of(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _linear_finding(
    kernel: Kernel, text: Any, device: torch.device, count: int, entered: set[str], say: Say
) -> Finding:
    layers = f"{text.model_type}: {kernel.what} of {count} layers"
    if any(_is_of(name, kernel.module) for name in entered):
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


def _drafters_on_cuda(topology: Topology) -> bool:
    return {device.type for device in topology.drafters} == {"cuda"}


def _drafter_device(config: RunConfig, topology: Topology) -> torch.device:
    return _tried_on(config.pipeline.drafters, topology.drafters[0])


def _target_device(config: RunConfig, topology: Topology) -> torch.device:
    """The first target's device; of several that it spans, the first."""
    return _tried_on(config.pipeline.targets, topology.targets[0])


def _tried_on(names: tuple[str, ...], first: torch.device) -> torch.device:
    """Which GPU "auto" gives a role is known only once a run has measured; they are alike, so the first is tried."""
    return torch.device("cuda", 0) if "auto" in names and first.type == "cuda" else first


def _target_dtype(config: RunConfig, topology: Topology) -> torch.dtype:
    """Of weights and features: where it is left to the rule, half precision only if all targets are on GPUs."""
    on_cuda = all(device.type == "cuda" for device in topology.targets)
    name = ("bfloat16" if on_cuda else "float32") if config.target.dtype == "auto" else config.target.dtype
    return torch.bfloat16 if name == "bfloat16" else torch.float32


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
