"""The doctor: findings from made-up packages and variables, a gated-delta-net target, and comparing with a run."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from functools import wraps
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftsmith.cli import main
from draftsmith.doctor import against, examine, fast_paths, healthy, machine, packed_rows, restore, verdict
from draftsmith.doctor.fast_paths import modules_entered
from draftsmith.doctor.machine import variables
from draftsmith.doctor.packages import drift, flavours, foreign_modules, leftovers, serving
from draftsmith.errors import UserError
from draftsmith.pipeline import environment
from draftsmith.pipeline.environment import environment_record
from draftsmith.pipeline.plan import make_plan, resolve_attention
from draftsmith.pipeline.topology import decoding_device, resolve_topology
from draftsmith.target import fp8, packed


def installed(folder: Path, name: str, version: str, requires: tuple[str, ...] = (), files: bool = True):
    """A distribution on disk; `files` says whether its module is there too."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "top_level.txt").write_text(name.replace("-", "_") + "\n")
    if files:
        (folder / name.replace("-", "_")).mkdir()
    return metadata.Distribution.at(info)


# Since CUDA 13 the major version is in the version; cuFFT's and cuSOLVER's have always been their own.
NAMED_BY_VERSION = (
    ("nvidia-cublas", "13.1.0"), ("nvidia-cuda-runtime", "13.0.96"), ("nvidia-cublas-cu12", "12.8.4"),
    ("nvidia-cufft", "12.0.0"), ("nvidia-ml-py", "13.590"),
)  # fmt: skip


def gpus(monkeypatch, count: int) -> None:
    """So many of them, as far as anybody asks how many."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)


def topology_of(config):
    return resolve_topology(config.pipeline, config.training.rows_per_update)


def test_two_flavours(tmp_path):
    one = installed(tmp_path / "a", "torch", "2.11.0")
    two = installed(tmp_path / "b", "torch", "2.13.0")
    (found,) = flavours([one, two])
    assert (found.level, found.mend.split()[:2]) == ("bad", ["pip", "uninstall"])
    libraries = [installed(tmp_path / "c", f"nvidia-{n}-cu{v}", "1") for n, v in (("cublas", 12), ("cublas", 13))]
    libraries.append(installed(tmp_path / "c", "nvidia-cudnn-cu13", "9"))
    (found,) = flavours(libraries)
    assert found.text == "CUDA libraries of two versions: 1 for CUDA 12, 2 for CUDA 13"
    assert found.mend == "pip uninstall nvidia-cublas-cu12"
    assert flavours([one])[0].level == "ok"
    mixed = [installed(tmp_path / "d", name, version) for name, version in NAMED_BY_VERSION]
    (found,) = flavours(mixed)
    assert found.text == "CUDA libraries of two versions: 1 for CUDA 12, 2 for CUDA 13"
    torches = [installed(tmp_path / "e", *each) for each in (("torch", "2.11.0+cu130"), ("torchvision", "0.26.0+cpu"))]
    (found,) = flavours(torches)
    assert (found.level, found.text) == (
        "bad",
        "built for different devices: torch 2.11.0+cu130, torchvision 0.26.0+cpu",
    )


def test_leftovers(tmp_path):
    installed(tmp_path, "whole", "1.0")
    assert [finding.level for finding in leftovers([tmp_path])] == ["ok"]
    installed(tmp_path, "hollow", "1.0", files=False)
    (tmp_path / "~orch").mkdir()
    torn, hollow = leftovers([tmp_path])
    assert "~orch" in torn.text
    assert "hollow 1.0 is listed, but its files are gone" in hollow.text


@pytest.mark.parametrize("there", [True, False])
def test_leftovers_by_the_list_of_files(tmp_path, there):
    """Half of all packages name no modules of theirs."""
    installed(tmp_path, "modern", "2.0", files=there)
    info = tmp_path / "modern-2.0.dist-info"
    (info / "top_level.txt").unlink()
    (info / "RECORD").write_text("modern-2.0.dist-info/METADATA,,\nmodern/core.py,,\n../../../bin/modern,,\n")
    if there:
        (tmp_path / "modern" / "core.py").touch()
    assert [finding.level for finding in leftovers([tmp_path])] == ["ok" if there else "warn"]


def test_serving_stack_that_moved_a_pin(tmp_path):
    torch_ = installed(tmp_path, "torch", "2.13.0")
    sglang = installed(tmp_path, "sglang", "0.6", ("torch==2.11.0", "numpy; extra == 'x'"))
    (found,) = serving([torch_, sglang])
    assert "sglang 0.6 is installed beside the trainer; it wants torch==2.11.0, 2.13.0 is installed" in found.text
    assert serving([torch_])[0].level == "ok"


def test_modules_from_outside(tmp_path, monkeypatch):
    (tmp_path / "strayed.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = foreign_modules(["strayed", "json_that_is_nowhere"])
    assert found.text == f"strayed comes from {tmp_path / 'strayed.py'}"
    assert foreign_modules(["torch", "draftsmith"])[0].level == "ok"


def test_our_own_sources_from_another_checkout(tmp_path, monkeypatch):
    other = tmp_path / "src" / "draftsmith"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    spec = SimpleNamespace(origin=str(other / "__init__.py"))
    monkeypatch.setattr("draftsmith.doctor.packages.importlib.util.find_spec", lambda _name: spec)
    (found,) = foreign_modules(["draftsmith"])
    assert found.text == f"draftsmith comes from {other / '__init__.py'}"


def test_threads_of_operators_are_remembered(monkeypatch):
    """Bits on a CPU depend on them; what is compiled does not, or is named by them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environment_record()["machine"]["environment"]["OMP_NUM_THREADS"] == "3"
    assert not any("OMP" in found.text for found in machine.check())


def test_what_forbids_compiling_is_the_finding(monkeypatch):
    """Whatever torch says about frames."""
    monkeypatch.setattr(fast_paths._torch, "why_nothing_compiles", lambda: "TORCH_COMPILE_DISABLE=1 is set")

    def nothing(*_arguments, **_more):
        raise RuntimeError(f"torch.compile {fast_paths._torch.NO_FRAMES}. Skipped frames:")

    monkeypatch.setattr("draftsmith.compiled.Region", nothing)
    assert fast_paths.compiles(torch.device("cpu")) == "TORCH_COMPILE_DISABLE=1 is set"


def test_variables_that_change_compiling():
    assert [finding.level for finding in variables({})] == ["ok"]
    found = variables({"TORCH_COMPILE_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "1", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"})
    assert [finding.level for finding in found] == ["bad", "warn", "warn"]
    assert found[0].mend == "unset TORCH_COMPILE_DISABLE"
    fine = {"TORCH_COMPILE_DISABLE": "0", "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "CUDA_HOME": "/usr/local/cuda"}
    assert variables(fine, fine)[0].level == "ok"


def test_a_variable_that_nobody_lists_is_told_too(monkeypatch):
    """It makes another cache, so "none that changes compiling" would be wrong."""
    monkeypatch.setenv("TORCHINDUCTOR_COORDINATE_DESCENT_TUNING", "1")
    told = [
        (found.level, found.text, found.mend) for found in machine.check() if found.check == "environment variables"
    ]
    text = "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1: may change what is compiled"
    assert ("warn", text, "unset TORCHINDUCTOR_COORDINATE_DESCENT_TUNING") in told


def test_drift_from_pinned_versions(tmp_path):
    pins = tmp_path / "constraints.txt"
    here = metadata.version("pytest")
    pins.write_text(f'pytest=={here}\n# a comment\nnever-installed==1\nnumpy==0.1; python_version < "3"\n')
    assert drift(pins)[0].text == "all 1 as in constraints.txt"
    pins.write_text("pytest==0.1\ntorch==" + torch.__version__.partition("+")[0] + "\n")
    (found,) = drift(pins)
    assert found.text == f"1 differ from constraints.txt: pytest {here} (pinned ==0.1)"
    assert found.mend == "pip install pytest==0.1"
    assert drift(tmp_path / "none.txt")[0].text == f"not checked: there is no {tmp_path / 'none.txt'}"
    assert drift(None)[0].text == "not checked: no constraints.txt lies beside the sources"


@pytest.mark.parametrize(
    ("build", "commands"),
    [
        ("", ["pip install 'torch<2.0,>=1.0' pytest==0.1 numpy==0.2"]),
        (
            "+cu130",
            [
                "pip install 'torch<2.0,>=1.0' --index-url https://download.pytorch.org/whl/cu130",
                "pip install pytest==0.1 numpy==0.2",
            ],
        ),
    ],
)
def test_the_mend_of_drift_names_what_differs_and_what_is_missing(tmp_path, monkeypatch, build, commands):
    """Draftsmith itself is on no index, so nothing may ask pip for it; what no extra of anybody's needs stays away."""
    versions = {"torch": f"2.11.0{build}", "pytest": "9.0"}

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("draftsmith.doctor.packages.metadata.version", version)
    pins = tmp_path / "constraints.txt"
    pins.write_text("torch>=1.0,<2.0\npytest==0.1\nnumpy==0.2\nof-an-extra==1.0\n")
    (found,) = drift(pins)
    assert found.text.startswith("3 differ from constraints.txt: torch 2.11.0")
    assert "numpy is missing (pinned ==0.2)" in found.text
    assert found.mend == " && ".join(commands)


def test_modules_entered_sees_functions_of_a_package():
    assert "json" in modules_entered(lambda: json.dumps({}))
    assert "json" not in modules_entered(lambda: torch.ones(2))


@pytest.fixture(scope="session")
def gated_delta_target(tmp_path_factory, tiny_target) -> Path:
    """A directory with a tiny random Qwen3-Next: three gated-delta-net layers and one of attention."""
    from transformers import AutoTokenizer, Qwen3NextConfig, Qwen3NextForCausalLM

    folder = tmp_path_factory.mktemp("gated-delta")
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, max_position_embeddings=512,
    )  # fmt: skip
    Qwen3NextForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_gated_delta_net_target_runs_on_the_slow_path_and_is_named(tiny_run, gated_delta_target):
    findings = examine(tiny_run("gdn", target={"path": str(gated_delta_target)}))
    rule, convolution = [finding for finding in findings if finding.check == "target layers"]
    assert rule.level == "bad"
    assert rule.text.startswith("qwen3_next: gated delta rule of 3 layers runs in plain PyTorch")
    assert "flash-linear-attention" in rule.text
    assert "not measured" in rule.text
    assert "causal-conv1d" in convolution.text
    assert not healthy(findings), "the fast path will not be taken"


def test_a_layer_is_timed_with_its_kernel_and_without(gated_delta_target, monkeypatch):
    """In turn, at the target's own sizes, and the module is left as it was."""
    from transformers import AutoConfig
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    rule, reference, calls = fast_paths.KERNELS[0], module.torch_chunk_gated_delta_rule.__wrapped__, []

    def counted(name):
        @wraps(reference)
        def call(*arguments, **more):
            calls.append((name, tuple(arguments[0].shape)))
            return reference(*arguments, **more)

        return call

    plain, fast = counted("reference"), counted("kernel")
    fast.__wrapped__ = plain
    del plain.__wrapped__
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", fast)
    monkeypatch.setattr(fast_paths, "TIMED_TOKENS", 48)
    config = fast_paths.timed_config(AutoConfig.from_pretrained(gated_delta_target))
    assert (config.layer_types, config.hidden_size, config.linear_value_head_dim) == (["linear_attention"], 32, 16)
    times = fast_paths.with_and_without(rule, config, torch.device("cpu"), torch.float32, runs=2)
    assert all(each > 0 for each in times)
    assert [name for name, _ in calls] == ["kernel", "reference"] * 5
    assert {shape for _, shape in calls} == {(1, 48, 2, 16)}
    assert module.torch_chunk_gated_delta_rule is fast
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", plain)
    assert fast_paths.with_and_without(rule, config, torch.device("cpu"), torch.float32) is None


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((2.0, 9.0), "without it 4.5 times slower on this card (a layer, 2,048 tokens: 9.00 against 2.00 ms)"),
        ((11.05, 8.88), "without it no slower on this card (a layer, 2,048 tokens: 8.88 against 11.05 ms)"),
        (None, "slow-down without it not measured"),
        (RuntimeError("no memory\nat all"), "slow-down without it not measured: no memory"),
    ],
)
def test_how_a_slow_down_is_said(gated_delta_target, monkeypatch, times, said):
    from transformers import AutoConfig

    def measured(*_arguments):
        if isinstance(times, Exception):
            raise times
        return times

    monkeypatch.setattr(fast_paths, "with_and_without", measured)
    text = AutoConfig.from_pretrained(gated_delta_target)
    told: list[str] = []
    assert fast_paths.slow_down(fast_paths.KERNELS[1], text, torch.device("cuda"), told.append) == said
    assert told == ["timing a layer with causal-conv1d and without: its first time on a machine can take two minutes"]
    assert fast_paths.slow_down(fast_paths.KERNELS[1], text, torch.device("cpu")) == "slow-down without it not measured"


def test_an_attention_target_wants_nothing(tiny_run):
    findings = {finding.check: finding for finding in examine(tiny_run("plain"))}
    assert findings["target layers"].text == "qwen3: attention only, no extra kernels wanted"
    assert findings["drafter attention"].text == "dense, eager, on the CPU by name"


@pytest.fixture
def convolution_target(tmp_path, tiny_target) -> Path:
    """A folder with a tiny LFM2's configuration, whose layers convolve or attend, and weights of some other model."""
    from transformers import Lfm2Config

    folder = tmp_path / "convolutions"
    shutil.copytree(tiny_target, folder)
    Lfm2Config(
        vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, layer_types=["conv", "conv", "conv", "full_attention"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


def test_short_convolutions_want_kernels_too(tiny_run, convolution_target):
    findings = examine(tiny_run("lfm2", target={"path": str(convolution_target)}))
    (found,) = [finding for finding in findings if finding.check == "target layers"]
    assert found.level == "bad"
    assert found.text.startswith("lfm2: causal convolution of 3 layers runs in plain PyTorch: causal-conv1d")


@pytest.mark.parametrize(
    ("kind", "layer_types", "said"),
    [
        ("qwen3", None, ""),
        ("gemma3_text", ["sliding_attention", "full_attention"], ""),
        ("mixtral", None, ""),
        ("minimax", ["linear_attention", "full_attention"], "linear_attention (1), full_attention (1); transformers'"),
        ("zamba2", None, "linear_attention (45), hybrid (9); a tiny zamba2 does not run on cpu"),
        ("recurrent_gemma", None, "recurrent (18), attention (8); transformers'"),
    ],
)
def test_only_attention_is_called_attention_only(kind, layer_types, said):
    from transformers import CONFIG_MAPPING

    more = {"layer_types": layer_types, "num_hidden_layers": 2} if layer_types else {}
    text = CONFIG_MAPPING[kind](**more)
    (found,) = fast_paths._layers(text, torch.device("cpu"), lambda _text: None)
    if said:
        assert found.level == "unknown"
        assert not healthy([found])
        assert verdict([found]) == "the configured fast path may be taken, as far as could be found out"
        assert found.text.startswith(f"{kind}: the kernels of its layers were not checked: {said}")
        assert found.mend
    else:
        assert (found.level, found.text) == ("ok", f"{kind}: attention only, no extra kernels wanted")


@pytest.mark.parametrize(
    ("kind", "whats"),
    [
        ("nemotron_h", ["causal convolution", "state-space scan"]),
        ("jamba", ["causal convolution", "selective scan"]),
        ("bamba", ["causal convolution", "state-space scan"]),
        ("kimi_linear", ["causal convolution", "Kimi delta rule"]),
        ("olmo_hybrid", ["gated delta rule", "causal convolution"]),
    ],
)
def test_each_model_wants_the_kernels_of_its_own_module(kind, whats):
    """No state-space model is told to install the gated delta rule."""
    from transformers import CONFIG_MAPPING

    found = fast_paths._layers(CONFIG_MAPPING[kind](), torch.device("cpu"), lambda _text: None)
    assert [each.level for each in found] == ["bad"] * len(whats)
    for each, what in zip(found, whats, strict=True):
        assert f": {what} of" in each.text


def test_a_kernel_that_fails_is_bad_and_a_model_that_fails_is_not_checked(gated_delta_target, monkeypatch):
    from transformers import AutoConfig
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    text = AutoConfig.from_pretrained(gated_delta_target)
    kernel = {"__name__": "fla.ops.gated"}
    exec("def fail(*arguments, **more):\n    raise RuntimeError('no such image')", kernel)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", kernel["fail"])
    (found,) = fast_paths.linear_attention(text, torch.device("cpu"), 3)
    assert (found.level, found.mend.split()[-1]) == ("bad", "flash-linear-attention")
    assert "no such image" in found.text
    kernel["__name__"] = "elsewhere"
    (found,) = fast_paths.linear_attention(text, torch.device("cpu"), 3)
    assert found.level == "unknown"
    assert "no such image" in found.text
    assert "linear_attention (3), full_attention (1)" in found.text


CUDA = torch.device("cuda", 1)


@pytest.fixture
def half_on_a_gpu(monkeypatch):
    """Tiny targets stay on the CPU, and say that the kernel is there; what is called instead of it is a parameter."""
    real = packed_rows.small_target

    def on_the_cpu(text, _device, _dtype, trust):
        return real(text, torch.device("cpu"), torch.float32, trust)

    monkeypatch.setattr(packed_rows, "current", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(packed_rows, "small_target", on_the_cpu)
    monkeypatch.setattr(packed, "missing", lambda *_arguments: "")
    monkeypatch.setattr(packed_rows, "masked_kernel", lambda dim, *_: fast_paths.Finding("masked", "ok", str(dim)))


def read_text(path: Path):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


def test_rows_in_pieces_are_named_by_their_kernel(tiny_target, half_on_a_gpu, monkeypatch):
    def slow_kernel(query, key, value, cuts, _longest, scale, window):
        assert window == -1
        out = torch.empty_like(query)
        for start, end in zip(cuts.tolist(), cuts.tolist()[1:], strict=False):
            piece = [each[None, start:end].transpose(1, 2) for each in (query, key, value)]
            options = {"is_causal": True, "scale": scale, "enable_gqa": True}
            out[start:end] = torch.nn.functional.scaled_dot_product_attention(*piece, **options)[0].transpose(0, 1)
        return out

    monkeypatch.setattr(packed, "kernel", slow_kernel)
    (found,) = packed_rows.check(read_text(tiny_target), 16, CUDA, torch.bfloat16)
    assert found.level == "ok"
    assert found.text.startswith("rows run in pieces through torch's variable-length kernel (varlen_attn): ")


def test_a_kernel_that_is_refused_leaves_the_mask(tiny_target, half_on_a_gpu, monkeypatch):
    def refuse(*_arguments):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer")

    monkeypatch.setattr(packed, "kernel", refuse)
    found, masked = packed_rows.check(read_text(tiny_target), 16, CUDA, torch.bfloat16)
    assert (found.level, found.check) == ("bad", "target packing")
    assert found.text.startswith("rows run with a mask of S², not through torch's variable-length kernel")
    assert "it refuses variable-length attention" in found.text
    assert masked.text == "16"


@pytest.mark.parametrize(
    ("head_dim", "dtype", "why", "mend"),
    [
        (20, torch.bfloat16, "no variable-length kernel for heads of 20", "lower rows.length"),
        (512, torch.bfloat16, "no variable-length kernel for heads of 512", "lower rows.length"),
        (64, torch.float32, "no variable-length kernel for float32", "target.dtype=bfloat16"),
    ],
)
def test_where_there_is_no_variable_length_kernel(tiny_target, monkeypatch, head_dim, dtype, why, mend):
    """By the function that training asks; a CPU has none and is not asked."""
    monkeypatch.setattr(packed_rows, "masked_kernel", lambda dim, *_: fast_paths.Finding("masked", "ok", str(dim)))
    text = read_text(tiny_target)
    found, masked = packed_rows.check(text, head_dim, CUDA, dtype)
    assert (found.level, masked.text) == ("warn", str(head_dim))
    assert found.text.endswith(why)
    assert found.mend.startswith(mend)
    assert list(packed_rows.check(text, head_dim, torch.device("cpu"), dtype)) == []


def test_attention_that_is_not_sdpa_runs_with_a_mask(half_on_a_gpu):
    from transformers import GptOssConfig

    (found,) = packed_rows.check(GptOssConfig(), 64, CUDA, torch.bfloat16)
    assert found.level == "warn"
    assert "rows run with a mask of S²" in found.text
    assert "its attention is eager, not sdpa" in found.text


def test_layers_that_no_mask_separates_run_separately(convolution_target, gated_delta_target, half_on_a_gpu):
    (found,) = packed_rows.check(read_text(convolution_target), 16, CUDA, torch.bfloat16)
    assert (found.level, found.text) == (
        "warn",
        "rows run as separate documents: it has conv layers, which no mask can separate",
    )
    (found,) = packed_rows.check(read_text(gated_delta_target), 16, CUDA, torch.bfloat16)
    assert found.level == "warn"
    assert found.text.startswith("rows run as separate documents, not through")


def test_a_model_that_cannot_be_tried_is_not_called_fast(tiny_target, half_on_a_gpu, monkeypatch):
    def fail(*_arguments):
        raise ValueError("sizes do not fit\nat all")

    monkeypatch.setattr(packed_rows, "small_target", fail)
    (found,) = packed_rows.check(read_text(tiny_target), 16, CUDA, torch.bfloat16)
    assert found.level == "unknown"
    assert "not tried on a tiny qwen3: sizes do not fit" in found.text


@pytest.mark.parametrize(
    ("pipeline", "more"),
    [
        ({"targets": ["cuda:0"], "drafters": ["cuda:5"]}, {}),
        ({"targets": ["cuda:0+cuda:3"], "drafters": ["cuda:0"]}, {}),
        ({"targets": ["auto"], "drafters": ["cuda:0"]}, {}),
        ({"targets": ["cuda:0"], "drafters": ["tpu"]}, {}),
    ],
)
def test_devices_that_training_refuses_are_bad(tiny_run, monkeypatch, pipeline, more):
    """In its words, and nothing is tried on another card instead."""
    gpus(monkeypatch, 1)
    monkeypatch.setattr(machine, "_gpus", lambda _config: [])
    monkeypatch.setattr(fast_paths, "check", lambda *_: pytest.fail("tried on some device"))
    config = tiny_run("absent", pipeline=pipeline, **more)
    findings = examine(config)
    (found,) = [finding for finding in findings if finding.check == "devices"]
    with pytest.raises(UserError) as refused:
        make_plan(config)
    assert (found.level, found.text) == ("bad", f"{refused.value.where}: {refused.value.what}")
    assert not healthy(findings)


def test_a_device_to_decode_on_that_is_absent_is_bad(tiny_run, monkeypatch):
    config = tiny_run("decode", decoding={"every": 10, "device": "cuda:7"})
    found = [finding for finding in examine(config) if finding.check == "devices"]
    with pytest.raises(UserError) as refused:
        decoding_device(config.decoding, topology_of(config))
    assert [each.level for each in found] == ["ok", "bad"]
    assert found[1].text == f"decoding.device: {refused.value.what}"


def test_probes_run_on_the_configured_devices(tiny_run, gated_delta_target, monkeypatch):
    """The first drafter's, and the first device of the first target's span."""
    gpus(monkeypatch, 4)
    seen: dict[str, list] = {"compiles": [], "packed": [], "fp8": [], "layers": []}

    def layers(_text, device, *_more):
        seen["layers"].append(device.index)
        return []

    def packing(_text, _dim, device, dtype, _trust):
        assert dtype == torch.bfloat16
        seen["packed"].append(device.index)
        return []

    monkeypatch.setattr(fast_paths, "compiles", lambda device: seen["compiles"].append(device.index) or "")
    monkeypatch.setattr(fast_paths, "linear_attention", layers)
    monkeypatch.setattr(packed_rows, "check", packing)
    monkeypatch.setattr(fp8, "missing", lambda device, _dtype: seen["fp8"].append(device.index) or "")
    sections = {
        "target": {"path": str(gated_delta_target), "precision": "fp8"},
        "rows": {"length": 256, "anchors": 32},
        "training": {"rows_per_update": 2},
    }
    devices = {"targets": ["cuda:1+cuda:2", "cuda:0"], "drafters": ["cuda:3", "cuda:2"]}
    config = tiny_run("placed", pipeline=devices, **sections)
    found = fast_paths.check(config, topology_of(config))
    assert seen == {"compiles": [3, 1], "packed": [1], "fp8": [1, 0], "layers": [1]}
    assert any("seen to run compiled on cuda:3 and cuda:1" in each.text for each in found)
    for each in seen.values():
        each.clear()
    config = tiny_run("auto", pipeline={"targets": ["auto"], "drafters": ["auto"]}, **sections)
    fast_paths.check(config, topology_of(config))
    assert seen == {"compiles": [0], "packed": [0], "fp8": [0], "layers": [0]}


def test_a_cpu_among_the_drafters_makes_all_of_them_slow(tiny_run, monkeypatch):
    gpus(monkeypatch, 1)
    devices = {"targets": ["cuda:0"], "drafters": ["cuda:0", "cpu"]}
    config = tiny_run("mixed", pipeline=devices, training={"rows_per_update": 2})
    warned, _ = fast_paths._drafter(config, topology_of(config))
    assert (warned.level, "attend densely" in warned.text) == ("warn", True)


@pytest.mark.parametrize(
    ("sections", "check"),
    [
        ({"rows": {"length": 2**20, "anchors": 8}}, "rows"),
        ({"drafter": {"taps": [99], "layers": 2, "block_size": 4}}, "drafter"),
        ({"drafter": {"heads": 3, "kv_heads": 2, "layers": 2, "block_size": 4}}, "drafter"),
        ({"drafter": {"mask_token_id": 10**6, "layers": 2, "block_size": 4}}, "drafter"),
    ],
)
def test_sizes_that_training_refuses_are_bad(tiny_run, sections, check):
    config = tiny_run("refused", **sections)
    with pytest.raises(UserError) as refused:
        make_plan(config)
    found = [finding for finding in examine(config) if finding.check == check and finding.level == "bad"]
    assert [each.text for each in found] == [f"{refused.value.where}: {refused.value.what}"]


def test_trackers_and_files_that_are_missing_are_bad(tiny_run, tiny_target, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    found = [each for each in examine(tiny_run("tracked", training={"trackers": ["mlflow"]})) if each.level == "bad"]
    assert [each.check for each in found] == ["trackers"]
    assert "mlflow" in found[0].mend
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(tiny_target / "config.json", bare)
    findings = examine(tiny_run("bare", target={"path": str(bare)}))
    bad = {each.check: each.text for each in findings if each.level == "bad"}
    assert bad == {"drafter": f"{bare}: holds no tokenizer", "target weights": f"{bare}: holds no weights"}


def test_compiling_on_the_cpu_is_tried(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    config = tiny_run("compiled", compile={"enabled": "on"})
    findings = {finding.check: finding for finding in examine(config)}
    assert findings["gpu"].text == "none: dense attention, compiled, on the CPU by name"
    attention = findings["drafter attention"]
    assert attention.level == "ok"
    assert attention.text.startswith("dense, compiled, on the CPU by name; a tiny compiled function was seen")
    monkeypatch.setattr(fast_paths, "compiles", lambda device: f"no compiler on {device}")
    attention = next(finding for finding in examine(config) if finding.check == "drafter attention")
    assert attention.level == "bad"
    assert "no compiler on cpu" in attention.text
    assert "compile.enabled=auto" in attention.mend
    flex_run = tiny_run("flex", drafter={"attention": "flex"})
    (flex,) = fast_paths._drafter(flex_run, topology_of(flex_run))
    assert (flex.level, flex.mend) == ("bad", "set it to dense or auto")


@pytest.mark.parametrize(
    ("sections", "level", "text"),
    [
        ({}, "ok", "flex, compiled; a tiny compiled function was seen to run compiled"),
        ({"rows": {"length": 200}}, "bad", "rows: rows.length is 200; flex attention works in tiles of 128"),
        (
            {"rows": {"anchors": 5}},
            "bad",
            "rows: rows.anchors x block_size is 20; flex attention works",
        ),
        (
            {"compile": {"enabled": "off"}},
            "bad",
            "compile.enabled: flex attention without compiling computes",
        ),
        ({"drafter": {"attention": "dense"}}, "warn", "dense attention on CUDA, as configured: slow"),
    ],
)
def test_on_a_gpu_the_doctor_says_what_training_would(tiny_run, monkeypatch, sections, level, text):
    """What training refuses is bad here, in the same words."""
    gpus(monkeypatch, 1)
    monkeypatch.setattr(fast_paths, "compiles", lambda _device: "")
    sections = {"rows": {}, "drafter": {}, **sections}
    sections["rows"] = {"length": 256, "anchors": 32, **sections["rows"]}
    sections["drafter"] = {"layers": 2, "block_size": 4, **sections["drafter"]}
    config = tiny_run("gpu", pipeline={"targets": ["auto"], "drafters": ["auto"]}, **sections)
    found = next(fast_paths._drafter(config, topology_of(config)))
    assert found.level == level
    assert found.text.startswith(text)
    if level == "bad":
        with pytest.raises(UserError) as refused:
            resolve_attention(config, config.drafter.block_size, True, [])
        assert found.text == f"{refused.value.where}: {refused.value.what}"


def test_the_block_size_of_the_drafter_to_start_from_counts(tiny_run, monkeypatch):
    gpus(monkeypatch, 1)
    monkeypatch.setattr(fast_paths, "read_spec_to_start_from", lambda *_: SimpleNamespace(block_size=5))
    rows, devices = {"length": 256, "anchors": 32}, {"targets": ["auto"], "drafters": ["auto"]}
    config = tiny_run("init", rows=rows, drafter={"init": "d", "block_size": 4}, pipeline=devices)
    (found,) = fast_paths._drafter(config, topology_of(config))
    assert found.text.startswith("rows: rows.anchors x block_size is 160;")


def test_without_a_compiler_nothing_compiles(tmp_path):
    """In a process of its own: torch remembers the compiler that it found."""
    code = "import torch; from draftsmith.doctor.fast_paths import compiles; print(compiles(torch.device('cpu')))"
    environment = os.environ | {"CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "/nonexistent" in done.stdout


def test_folders_are_written_to(tiny_run, tmp_path, monkeypatch):
    """What the rights say is not enough: root may everything, and still makes no file in /proc."""
    monkeypatch.setenv("DRAFTSMITH_CACHE_DIR", "/proc/x")
    (tmp_path / "file").touch()
    found = {finding.check: finding for finding in machine.check(tiny_run("file/run"))}
    for name, setting in (("compile cache", "DRAFTSMITH_CACHE_DIR"), ("run folder", "training.output")):
        assert found[name].level == "bad"
        assert "cannot be written" in found[name].text
        assert setting in found[name].mend
    assert found["inductor cache"].level == "ok"


def test_a_gpu_that_cannot_be_used_is_a_finding(monkeypatch):
    """Torch counts what the driver's library names, also where the driver is too old for torch's CUDA."""

    def refuse(_index):
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12080).\nPlease update it")

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.mem_get_info", refuse)
    (found,) = (finding for finding in machine.check() if finding.check in ("gpu", "peer access"))
    assert (found.level, found.text) == (
        "bad",
        "cuda:0 cannot be used: The NVIDIA driver on your system is too old (found version 12080).",
    )


def test_keys_on_the_command_line_count(tiny_run, tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(tiny_run("plain").model_dump_json())
    assert main(["doctor", str(config)]) == 0
    assert "drafter attention: dense, eager" in capsys.readouterr().out
    assert main(["doctor", str(config), "compile.flex_backend=flash", "drafter.attention=flex"]) == 1
    assert "BAD   drafter attention: drafter.attention: flex attention" in capsys.readouterr().out
    assert main(["doctor", str(config), "compile.flex_backend=flesh"]) == 2
    assert main(["doctor", str(config), "drafter.layers=0"]) == 2


def test_what_is_amiss_comes_with_what_mends_it(tiny_run, gated_delta_target, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    findings = examine(tiny_run("gdn", target={"path": str(gated_delta_target)}))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _index: (2**30, 2**35))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _index: (7, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _index: "card")
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda _one, _other: False)
    monkeypatch.setattr(machine, "_memory_available", lambda: 2**30)
    findings += machine.check()
    assert {"target layers", "gpu", "peer access", "memory"} <= {each.check for each in findings if each.level != "ok"}
    assert [finding for finding in findings if finding.level != "ok" and not finding.mend] == []


def test_precision_and_quantised_weights(tiny_run, tiny_target, tmp_path):
    by_name = {finding.check: finding for finding in examine(tiny_run(target={"precision": "fp8"}))}
    assert "no fast fp8 products on cpu" in by_name["target precision"].text
    assert (by_name["target precision"].level, by_name["target precision"].mend) == ("bad", "target.precision=full")
    folder = tmp_path / "quantised"
    shutil.copytree(tiny_target, folder)
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "aqlm"}
    (folder / "config.json").write_text(json.dumps(content))
    by_name = {finding.check: finding for finding in examine(tiny_run(target={"path": str(folder)}))}
    assert by_name["target weights"].level == "bad"
    assert by_name["target weights"].mend.startswith("pip install ")
    assert by_name["target weights"].mend.endswith("aqlm")
    names = {finding.check for finding in examine(tiny_run())}
    assert not names & {"target weights", "target precision"}


def test_a_gpu_that_is_not_there_is_bad(tiny_run):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    findings = examine(tiny_run("gpu", pipeline={"targets": ["cuda:0"], "drafters": ["cuda:1"]}))
    (gpu,) = [finding for finding in findings if finding.check == "gpu"]
    assert (gpu.level, healthy(findings)) == ("bad", False)


def test_a_folder_that_is_no_run_is_named_in_full(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for option in ("--against", "--restore"):
        assert main(["doctor", option, "."]) == 2
        assert f"{tmp_path.resolve()}: no record of an environment here" in capsys.readouterr().err


def test_against_and_restore(tmp_path):
    record = environment_record()
    (tmp_path / "environment.json").write_text(json.dumps(record, default=str))
    assert against(tmp_path) == []
    torch_version = record["packages"]["torch"]
    record["packages"] |= {"torch": "2.11.0+cu130", "pytest": "0.1"}
    record["sources"] = "other"
    record["commit"] = {"id": "0123456789abcdef", "changes": ""}
    (tmp_path / "environment.json").write_text(json.dumps(record, default=str))
    changed = against(tmp_path)
    assert f"packages.torch: 2.11.0+cu130 there, {torch_version} here" in changed
    assert any(line.startswith("sources: other there") for line in changed)
    commands = restore(tmp_path)
    assert "git worktree add ../draftsmith-0123456789ab 0123456789abcdef" in commands
    assert ".venv/bin/pip install torch==2.11.0 --index-url https://download.pytorch.org/whl/cu130" in commands
    assert any("pytest==0.1" in line and "--no-deps" in line for line in commands)
    assert not any("not restored" in line and "driver" not in line for line in commands)


def test_what_cannot_be_restored_is_said_and_values_are_quoted(tmp_path):
    record = {
        "draftsmith": "0.1",
        "machine": {"python": "3.11.7", "environment": {"TORCH_LOGS": "it's; rm -r x"}},
        "packages": {"torch": "2.13.0+gitabc", "own": "1.0+mine", "setuptools": "80", "numpy": "2.0", "pip": "26"},
        "commit": {"id": "0123456789abcdef", "changes": "", "untracked": ["new.py"]},
    }
    (tmp_path / "environment.json").write_text(json.dumps(record))
    commands = restore(tmp_path)
    assert shlex.split(commands[-1]) == ["export", "TORCH_LOGS=it's; rm -r x"]
    assert ".venv/bin/pip install pip==26 setuptools==80" in commands
    assert ".venv/bin/pip install --no-deps numpy==2.0" in commands
    comments = "\n".join(line for line in commands if line.startswith("#"))
    assert "no index holds: torch 2.13.0+gitabc, own 1.0+mine: not restored" in comments
    assert "did not track: new.py" in comments


def test_a_run_without_a_commit_is_not_asked_of_an_index(tmp_path):
    record = {"draftsmith": "0.1", "machine": {"python": "3.11.7", "environment": {}}, "packages": {}, "commit": None}
    for sources, said in (("abc123", "sources with hash abc123"), (None, "no hash of its sources")):
        content = record | ({"sources": sources} if sources else {})
        (tmp_path / "environment.json").write_text(json.dumps(content))
        commands = restore(tmp_path)
        assert [line for line in commands if not line.startswith("#")] == ["python3.11 -m venv .venv"]
        assert f"# draftsmith 0.1: no index holds it, and the run recorded no commit, but {said}" in commands
    record["commit"] = {"id": "0123456789abcdef", "changes": ""}
    (tmp_path / "environment.json").write_text(json.dumps(record))
    assert restore(tmp_path)[-1] == ".venv/bin/pip install --no-deps --editable ."


RECORD = {"draftsmith": "1", "machine": {"environment": {}}, "packages": {}, "commit": None}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "all of it: Input should be a valid dictionary"),
        ({}, "draftsmith: Field required"),
        ({"draftsmith": 1}, "draftsmith: Input should be a valid string"),
        ({"draftsmith": "1", "machine": []}, "machine: Input should be a valid dictionary"),
        ({"draftsmith": "1", "machine": {}}, "machine.environment: Field required"),
        ({"draftsmith": "1", "machine": {"environment": {"A": 1}}}, "machine.environment.A: Input should be"),
        (RECORD | {"packages": {"torch": 2}}, "packages.torch: Input should be a valid string"),
        (RECORD | {"commit": "x"}, "commit: Input should be a valid dictionary"),
        (RECORD | {"commit": {"id": "x", "untracked": "y"}}, "commit.untracked: Input should be a valid list"),
    ],
)
def test_a_damaged_record_is_refused(tmp_path, capsys, content, said):
    (tmp_path / "environment.json").write_text(json.dumps(content))
    for option in ("--restore", "--against"):
        assert main(["doctor", option, str(tmp_path)]) == 2
        assert said in capsys.readouterr().err


def test_one_question_at_a_time(tmp_path, capsys):
    for words in (["c.yaml", "--against", "run"], ["c.yaml", "--restore", "run"], ["--against", "a", "--restore", "b"]):
        assert main(["doctor", *words]) == 2
        assert "one at a time" in capsys.readouterr().err


def test_the_commit_is_that_of_the_sources(tmp_path, monkeypatch):
    """And not that of a repository which only has an environment inside."""

    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    sources = tmp_path / "src" / "draftsmith"
    sources.mkdir(parents=True)
    (sources / "__init__.py").write_text("")
    (tmp_path / "own.py").write_text("")
    monkeypatch.setattr(environment, "SOURCES", sources)
    git("init")
    git("add", "own.py")
    git("commit", "-m", "own")
    assert environment.commit() is None
    git("add", "src")
    git("commit", "-m", "sources")
    found = environment.commit()
    assert found is not None
    assert found.keys() == {"id", "changes"}
    (sources / "new.py").write_text("")
    assert environment.commit() == found | {"untracked": ["new.py"]}


def test_command(capsys, tmp_path, monkeypatch):
    assert main(["doctor", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["healthy"] is True
    assert {"python", "torch", "serving stack"} <= {finding["check"] for finding in content["findings"]}
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "BAD   environment variables: TORCH_COMPILE_DISABLE=1: nothing is compiled" in out
    assert "mend: unset TORCH_COMPILE_DISABLE" in out
    assert main(["doctor", "--against", str(tmp_path)]) == 2
