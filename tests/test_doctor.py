"""The doctor: findings from made-up packages and variables, a gated-delta-net target, and comparing with a run."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch

from draftsmith.cli import main
from draftsmith.doctor import against, examine, healthy, restore
from draftsmith.doctor.fast_paths import modules_entered
from draftsmith.doctor.machine import variables
from draftsmith.doctor.packages import drift, flavours, foreign_modules, leftovers, serving
from draftsmith.pipeline.environment import environment_record


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


def test_leftovers(tmp_path):
    installed(tmp_path, "whole", "1.0")
    assert [finding.level for finding in leftovers([tmp_path])] == ["ok"]
    installed(tmp_path, "hollow", "1.0", files=False)
    (tmp_path / "~orch").mkdir()
    torn, hollow = leftovers([tmp_path])
    assert "~orch" in torn.text
    assert "hollow 1.0 is listed, but its files are gone" in hollow.text


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
    assert foreign_modules(["torch"])[0].level == "ok"


def test_variables_that_change_compiling():
    assert [finding.level for finding in variables({})] == ["ok"]
    found = variables({"TORCH_COMPILE_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "1", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"})
    assert [finding.level for finding in found] == ["bad", "warn", "warn"]
    assert found[0].mend == "unset TORCH_COMPILE_DISABLE"
    assert variables({"TORCH_COMPILE_DISABLE": "0", "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"})[0].level == "ok"


def test_drift_from_pinned_versions(tmp_path):
    pins = tmp_path / "constraints.txt"
    here = metadata.version("pytest")
    pins.write_text(f'pytest=={here}\n# a comment\nnever-installed==1\nnumpy==0.1; python_version < "3"\n')
    assert drift(pins)[0].text == "all 1 as in constraints.txt"
    pins.write_text("pytest==0.1\ntorch==" + torch.__version__.partition("+")[0] + "\n")
    (found,) = drift(pins)
    assert found.text == f"1 differ from constraints.txt: pytest {here} (pinned ==0.1)"
    assert drift(tmp_path / "none.txt") == []


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
    assert rule.level == "warn"
    assert rule.text.startswith("qwen3_next: gated delta rule of 3 layers runs in plain PyTorch")
    assert "flash-linear-attention" in rule.text
    assert "not measured" in rule.text
    assert "causal-conv1d" in convolution.text
    assert healthy(findings)


def test_an_attention_target_wants_nothing(tiny_run):
    findings = {finding.check: finding for finding in examine(tiny_run("plain"))}
    assert findings["target layers"].text == "qwen3: attention only, no extra kernels wanted"
    assert findings["drafter attention"].text == "dense, on the CPU by name"


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
