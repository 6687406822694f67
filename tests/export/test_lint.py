"""The serving contract's lint: every fault has its name, every engine its verdict, and a clean export has neither.

Where an engine is installed (z-lab's dflash, speculators), what the lint says of it is tried on the engine itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import LAYERS, saved

from draftsmith import cli
from draftsmith.config import TargetConfig
from draftsmith.drafter import read_spec
from draftsmith.errors import UserError
from draftsmith.export.convert import Verifier, convert_drafter
from draftsmith.export.engines import ENGINES, READERS
from draftsmith.export.lint import LintReport, lint

TARGET = Verifier("owner/target", ("Qwen3ForCausalLM",))
LOADS, DIFFERS, REFUSES = "loads", "differs", "refuses"


def outcomes(report: LintReport) -> dict[str, str]:
    return {name: verdict.outcome for name, verdict in report.verdicts.items()}


def edited(folder: Path, edit: Callable[[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """The drafter with its config (whole, dflash_config) and tensors changed by `edit`."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    edit(config, config.get("dflash_config", {}), weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


# What each engine does with our own export, by the layers' kinds. The reasons are those of the engines' code: SGLang
# knows no override of causality, speculators no window by position and no causal full layer.
CLEAN: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "full": (
        {"zlab": LOADS, "sglang": LOADS, "vllm": LOADS, "speculators": LOADS},
        {"zlab": REFUSES, "sglang": REFUSES, "vllm": LOADS, "speculators": LOADS},
    ),
    "sliding": (
        {"zlab": LOADS, "sglang": LOADS, "vllm": LOADS, "speculators": DIFFERS},
        {"zlab": REFUSES, "sglang": REFUSES, "vllm": LOADS, "speculators": DIFFERS},
    ),
    "mixed": (
        {"zlab": LOADS, "sglang": LOADS, "vllm": LOADS, "speculators": DIFFERS},
        {"zlab": REFUSES, "sglang": REFUSES, "vllm": DIFFERS, "speculators": DIFFERS},
    ),
    "bidirectional": (
        {"zlab": LOADS, "sglang": DIFFERS, "vllm": LOADS, "speculators": DIFFERS},
        {"zlab": REFUSES, "sglang": REFUSES, "vllm": LOADS, "speculators": DIFFERS},
    ),
    "causal": (
        {"zlab": LOADS, "sglang": DIFFERS, "vllm": LOADS, "speculators": DIFFERS},
        {"zlab": REFUSES, "sglang": REFUSES, "vllm": LOADS, "speculators": DIFFERS},
    ),
    "causal full": (
        {"zlab": LOADS, "sglang": DIFFERS, "vllm": LOADS, "speculators": DIFFERS},
        {"zlab": REFUSES, "sglang": REFUSES, "vllm": LOADS, "speculators": DIFFERS},
    ),
}


@pytest.mark.parametrize("layers", list(LAYERS))
def test_our_exports_and_what_each_engine_does_with_them(layers: str, tmp_path: Path) -> None:
    zlab, speculators = CLEAN[layers]
    ours = lint(saved(tmp_path / "a", layers))
    assert outcomes(ours) == zlab
    theirs = lint(convert_drafter(tmp_path / "a", tmp_path / "b", "speculators", verifier=TARGET).folder)
    assert outcomes(theirs) == speculators
    for report in (ours, theirs):
        assert not [finding for finding in report.findings if finding.severity == "error" and finding.rule != "layout"]
        for name, verdict in report.verdicts.items():
            assert bool(verdict.reasons) == (verdict.outcome != LOADS), (name, verdict)
            assert verdict.version == ENGINES[name].version
    assert ours.rules() <= {"causality", "window-rule"}
    assumed = ours.verdicts["zlab"].notes[0]
    spec = read_spec(tmp_path / "a")
    assert assumed.count("bidirectional") == sum(not spec.layer_kind(layer).causal for layer in range(spec.layers))
    assert assumed.count("window") == sum(spec.layer_kind(layer).window is not None for layer in range(spec.layers))


def test_factors_that_engines_do_not_read(tmp_path: Path) -> None:
    report = lint(saved(tmp_path / "a", input_scale=5.5, logit_softcap=30.0))
    assert report.rules() == {"embedding-scale", "logit-softcap"}
    assert outcomes(report) == {"zlab": LOADS, "sglang": DIFFERS, "vllm": DIFFERS, "speculators": DIFFERS}
    # The factor on logits is written where vLLM looks as well.
    report = lint(saved(tmp_path / "b", logit_multiplier=0.25))
    assert outcomes(report) == {"zlab": LOADS, "sglang": LOADS, "vllm": LOADS, "speculators": DIFFERS}


def tensor(name: str, value: torch.Tensor | None) -> Callable[..., None]:
    def edit(_config: Any, _dflash: Any, weights: dict[str, torch.Tensor]) -> None:
        weights.pop(name, None)
        if value is not None:
            weights[name] = value

    return edit


def fields(**changes: Any) -> Callable[..., None]:
    """Top-level fields set; None removes. `dflash__x` is x of dflash_config."""

    def edit(config: dict[str, Any], dflash: dict[str, Any], _weights: Any) -> None:
        for key, value in changes.items():
            place, name = (dflash, key.removeprefix("dflash__")) if key.startswith("dflash__") else (config, key)
            place.pop(name, None)
            if value is not None:
                place[name] = value

    return edit


def prefixed(_config: Any, _dflash: Any, weights: dict[str, torch.Tensor]) -> None:
    for name in list(weights):
        weights[f"model.{name}"] = weights.pop(name)


def half_of_them(_config: Any, _dflash: Any, weights: dict[str, torch.Tensor]) -> None:
    for name in list(weights)[::2]:
        weights[name] = weights[name].bfloat16()


ALL = dict.fromkeys(ENGINES, DIFFERS)
# fault, layers it is made in, (rule, engines for which it matters and how)
FAULTS: list[tuple[str, Callable[..., None], str, dict[str, str]]] = [
    ("full", tensor("layers.0.self_attn.q_norm.weight", None), "tensor-missing", ALL),
    ("full", tensor("layers.2.mlp.up_proj.weight", torch.zeros(48, 32)), "tensor-extra",
     {"vllm": REFUSES, "speculators": REFUSES}),
    ("full", tensor("lm_head.weight", torch.zeros(23, 32)), "tensor-extra", {"vllm": DIFFERS, "speculators": REFUSES}),
    ("full", tensor("norm.weight", torch.ones(31)), "tensor-shape", dict.fromkeys(ENGINES, REFUSES)),
    ("full", prefixed, "tensor-prefix", {"vllm": REFUSES, "speculators": REFUSES}),
    ("full", half_of_them, "dtype", {}),
    ("full", fields(dtype="float16"), "dtype", {}),
    ("full", fields(dtype="abc"), "dtype", dict.fromkeys(ENGINES, REFUSES)),
    ("full", fields(attention_bias=True), "attention-bias", ALL),
    ("full", fields(quantization_config={"quant_method": "fp8"}), "quantization", ALL),
    ("full", fields(rope_theta="abc"), "config", dict.fromkeys(ENGINES, REFUSES)),
    ("full", fields(dflash__mask_token_id=23), "mask-token-range", dict.fromkeys(ENGINES, REFUSES)),
    ("full", fields(num_attention_heads=5), "head-sizes", dict.fromkeys(ENGINES, REFUSES)),
    ("full", fields(layer_types=["chunked_attention", "full_attention"]), "layer-type-unknown",
     {"zlab": DIFFERS, "vllm": DIFFERS, "speculators": DIFFERS}),
    ("full", fields(block_size=12), "block-size-differs", {"speculators": DIFFERS}),
    ("full", fields(block_size=None, dflash__block_size=None), "block-size", {"speculators": REFUSES}),
    ("full", fields(dflash__target_layer_ids=[1, 4, 8]), "last-layer",
     {"zlab": DIFFERS, "sglang": DIFFERS, "vllm": DIFFERS, "speculators": REFUSES}),
    ("full", fields(dflash__target_layer_ids=[1, 4, 9]), "tap-range", dict.fromkeys(ENGINES, REFUSES)),
    ("full", fields(eagle_aux_hidden_state_layer_ids=[1, 4, 6]), "tap-offset", {"vllm": DIFFERS}),
    ("full", fields(dflash__mask_token_id=None, mask_token_id=21), "mask-token",
     {"vllm": REFUSES, "speculators": REFUSES}),
    ("mixed", fields(use_sliding_window=None), "sliding-window", {"sglang": REFUSES, "speculators": REFUSES}),
    ("mixed", fields(use_sliding_window=None), "window", {"zlab": DIFFERS}),
    ("mixed", fields(dflash__swa_window_size=5), "window",
     {"zlab": DIFFERS, "sglang": DIFFERS, "speculators": DIFFERS}),
    ("mixed", fields(layer_types=["full_attention"]), "config", {}),
    ("full", fields(is_causal=None, dflash__causal=True), "causality",
     {"zlab": DIFFERS, "sglang": DIFFERS, "speculators": DIFFERS}),
    ("full", fields(dflash__use_swa=True, dflash__swa_window_size=64), "window", {"vllm": DIFFERS}),
    ("full", fields(rope_parameters={"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}),
     "partial-rotary", {"vllm": DIFFERS}),
    ("full", fields(rope_parameters={"rope_type": "default", "rope_theta": 5e5, "mrope_section": [8, 4, 4]}),
     "rope-mrope", {"vllm": DIFFERS, "sglang": DIFFERS}),
    ("full", fields(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "config", {}),
    ("full", fields(rope_theta=1e6), "rope-theta-twice", {}),
    ("full", fields(is_neox_style=False), "rope-layout", {"vllm": DIFFERS, "sglang": DIFFERS}),
    ("full", fields(hidden_act="gelu"), "activation", {"vllm": REFUSES, "sglang": REFUSES}),
    ("full", fields(model_type="llama"), "model-type", {"vllm": REFUSES, "sglang": REFUSES}),
    ("full", fields(num_target_layers=None), "target-depth", {"zlab": REFUSES}),
    ("full", fields(draft_vocab_size=10), "vocabulary-maps", {"vllm": REFUSES, "speculators": REFUSES}),
    ("full", fields(dflash__target_layers_id=[1]), "field-slip", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "fault", "rule", "effect"), FAULTS, ids=[f"{n}-{f[2]}" for n, f in enumerate(FAULTS)]
)
def test_every_fault_has_its_name(
    layers: str, fault: Callable[..., None], rule: str, effect: dict[str, str], tmp_path: Path
) -> None:
    clean = lint(saved(tmp_path / "a", layers))
    report = lint(edited(tmp_path / "a", fault))
    assert rule in report.rules() - clean.rules() or rule == "window"
    found = next(finding for finding in report.findings if finding.rule == rule and finding.severity != "info")
    assert found.outcomes == effect
    for name, outcome in effect.items():
        rank = [LOADS, DIFFERS, REFUSES]
        assert rank.index(report.verdicts[name].outcome) >= rank.index(outcome)
        assert any(reason.startswith(rule) for reason in report.verdicts[name].reasons)


def reduced(folder: Path, tokens: list[int], *, absolute: bool = False) -> Path:
    """Speculators' layout with a vocabulary reduced to `tokens`."""

    def edit(config: dict[str, Any], _dflash: Any, weights: dict[str, torch.Tensor]) -> None:
        config["draft_vocab_size"] = len(tokens)
        ids = torch.tensor(tokens)
        weights["t2d"] = torch.zeros(23, dtype=torch.bool)
        weights["t2d"][ids] = True
        weights["d2t"] = ids if absolute else ids - torch.arange(len(tokens))
        weights["lm_head.weight"] = torch.zeros(len(tokens), 32)

    return edited(folder, edit)


def test_vocabulary_maps(tmp_path: Path) -> None:
    def speculators(name: str) -> Path:
        return convert_drafter(tmp_path / "a", tmp_path / name, "speculators", verifier=TARGET).folder

    saved(tmp_path / "a")
    fine = lint(reduced(speculators("b"), [0, 3, 4, 20]))
    assert outcomes(fine) == CLEAN["full"][1]
    assert any(finding.rule == "vocabulary-maps" and finding.severity == "info" for finding in fine.findings)
    wrong = lint(reduced(speculators("c"), [0, 3, 4, 20], absolute=True))
    assert "vocabulary-maps" in wrong.rules()
    assert "d2t holds token ids, not offsets" in next(f.text for f in wrong.findings if f.rule == "vocabulary-maps")
    report = lint(edited(reduced(speculators("d"), [0, 3]), tensor("t2d", torch.ones(23, dtype=torch.bool))))
    assert "t2d marks 23 tokens" in next(f.text for f in report.findings if f.rule == "vocabulary-maps")


def test_against_the_target(tiny_target: Path, tmp_path: Path) -> None:
    target = TargetConfig(path=str(tiny_target))  # 6 layers x 32, θ 10000, 512 positions
    rows = json.loads((tiny_target / "config.json").read_text())["vocab_size"]
    fits = {"vocab_rows": rows, "target_layers": 6, "taps": (1, 2, 3), "rope_theta": 1e4, "mask_token_id": 2}
    assert lint(saved(tmp_path / "fits", **fits), target).rules() == set()
    cases: dict[str, dict[str, object]] = {
        "target-hidden-size": {"hidden_size": 64},
        "target-depth": {"target_layers": 7},
        "target-vocabulary": {"vocab_rows": rows + 1},
        "target-mask-token": {"mask_token_id": 40},
        "target-rope-theta": {"rope_theta": 1e6},
        "target-positions": {"max_position_embeddings": 256},
        "target-embedding-scale": {"input_scale": 2.0},
        "target-logit-softcap": {"logit_softcap": 30.0},
        "target-logit-factor": {"logit_multiplier": 0.5},
    }
    for number, (rule, changes) in enumerate(cases.items()):
        report = lint(saved(tmp_path / str(number), **{**fits, **changes}), target)
        assert rule in report.rules(), rule
        assert not {other for other in cases if other != rule} & report.rules(), rule
    folder = convert_drafter(
        tmp_path / "fits",
        tmp_path / "s",
        "speculators",
        verifier=Verifier(str(tmp_path / "fits" / "..")),
        target_layers=6,
    ).folder
    assert "verifier" in lint(folder, target).rules()
    folder = convert_drafter(
        tmp_path / "fits", tmp_path / "t", "speculators", verifier=Verifier(str(tiny_target)), target_layers=6
    ).folder
    assert lint(folder, target).rules() <= {"layout"}


def with_biases(config: dict[str, Any], _dflash: Any, weights: dict[str, torch.Tensor]) -> None:
    config["attention_bias"] = True
    for layer in range(2):
        for name, size in (("q", 64), ("k", 32), ("v", 32), ("o", 32)):
            weights[f"layers.{layer}.self_attn.{name}_proj.bias"] = torch.full((size,), 0.5)


def test_attention_biases(tmp_path: Path) -> None:
    """With all their tensors engines load them; with some missing, or of another size, nobody says so."""
    report = lint(edited(saved(tmp_path / "a"), with_biases))
    assert report.fine
    assert outcomes(report) == CLEAN["full"][0]
    assert report.rules() == {"attention-bias"}
    with pytest.raises(UserError, match="attention with biases is not supported"):
        read_spec(tmp_path / "a")
    report = lint(edited(tmp_path / "a", tensor("layers.1.self_attn.o_proj.bias", None)))
    assert not report.fine
    assert "layers.1.self_attn.o_proj.bias" in next(f.text for f in report.findings if f.rule == "attention-bias")
    assert (
        "tensor-shape" in lint(edited(tmp_path / "a", tensor("layers.1.self_attn.o_proj.bias", torch.ones(31)))).rules()
    )
    # Without the flag no engine makes a place for them.
    assert "tensor-extra" in lint(edited(tmp_path / "a", fields(attention_bias=False))).rules()


def test_several_broken_fields_are_all_told(tmp_path: Path) -> None:
    report = lint(edited(saved(tmp_path / "a"), fields(hidden_size=-1, dflash__block_size="8", layer_types=[None])))
    texts = [finding.text for finding in report.findings if finding.severity == "error"]
    assert len(texts) == 3
    assert any(text.startswith("dflash_config.block_size is '8', not a whole number") for text in texts)
    assert "nothing else was checked" in report.findings[-1].text


def test_an_engine_that_misses_a_field_refuses(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["output_multiplier"] = None
    (folder / "config.json").write_text(json.dumps(config))
    verdicts = lint(folder).verdicts
    for name in ("zlab", "sglang"):
        assert "config: output_multiplier is null" in verdicts[name].reasons
        assert verdicts[name].outcome == "refuses"
    assert verdicts["vllm"].outcome == "loads"


@pytest.mark.parametrize("fault", [KeyError("x"), TypeError("x")])
def test_a_fault_of_ours_is_no_engine_that_refuses(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(config: dict[str, Any]) -> Any:
        raise fault

    monkeypatch.setitem(READERS, "zlab", broken)
    with pytest.raises(type(fault)):
        lint(saved(tmp_path))


def test_zlab_does_what_the_lint_says_of_it(tmp_path: Path) -> None:
    zlab = pytest.importorskip("dflash.model", reason="the reference decoder is installed by `make test`")

    def load(name: str, layers: str, fault: Callable[..., None], **changes: object) -> Any:
        folder = edited(saved(tmp_path / name, layers, **changes), fault)
        return zlab.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)

    model = load("a", "mixed", fields(use_sliding_window=None))
    assert [(layer.self_attn.is_causal, layer.self_attn.sliding_window) for layer in model.layers] == [
        (True, None), (False, None), (True, None),
    ]  # fmt: skip
    assert not load("b", "full", fields(is_causal=None, dflash__causal=True)).layers[0].self_attn.is_causal
    assert load("c", "full", fields(block_size=12)).block_size == 8
    with pytest.raises(AttributeError, match="num_target_layers"):
        load("d", "full", fields(num_target_layers=None))
    model = load("e", "full", fields(dflash__target_layer_ids=None), taps=(1, 6))
    assert model.target_layer_ids == [1, 6]
    assert outcomes(lint(tmp_path / "e")) == {"zlab": LOADS, "sglang": LOADS, "vllm": REFUSES, "speculators": REFUSES}
    model = load("f", "full", fields(rope_theta=1e6))
    assert model.rotary_emb.inv_freq[1] == pytest.approx(5e5 ** (-2 / 16))
    model = load(
        "g", "full", fields(rope_parameters={"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5})
    )
    assert model.rotary_emb.inv_freq.numel() == 8  # the whole head of 16
    model = load("h", "full", with_biases)
    assert all(torch.equal(layer.self_attn.q_proj.bias, torch.full((64,), 0.5)) for layer in model.layers)
    with pytest.raises(AttributeError, match="abc"):
        load("i", "full", fields(dtype="abc"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(saved(tmp_path / "a"))
    assert cli.main(["export", "check", folder]) == 0
    assert "z-lab dflash (0.1.0): will load" in capsys.readouterr().out
    assert cli.main(["export", "check", folder, "--engine", "speculators", "--json"]) == 0
    edited(tmp_path / "a", fields(dflash__mask_token_id=None, mask_token_id=21))
    assert cli.main(["export", "check", folder, "--engine", "zlab"]) == 0
    capsys.readouterr()
    assert cli.main(["export", "check", folder, "--json"]) == 1
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert content["verdicts"]["vllm"]["outcome"] == "refuses"
    assert "vLLM (036a00d1): will not load" in err
    idle = ["--layout", "speculators", "--dtype", "float16", "--licence", "mit", "--push", "a/b", "--evaluation", "x"]
    assert cli.main(["export", "check", folder, *idle, "--private"]) == 2
    err = capsys.readouterr().err
    assert "export check writes nothing" in err
    assert all(option in err for option in (*idle[::2], "--private"))
    assert cli.main(["export", "check", folder, "--gguf-file", "x"]) == 2
    assert "without --target there is no GGUF file" in capsys.readouterr().err
    assert cli.main(["export", "check", folder, "--engine", "trt"]) == 2
    assert "no such engine" in capsys.readouterr().err
    assert cli.main(["export", "check", str(tmp_path / "none")]) == 2
    (tmp_path / "a" / "model.safetensors").unlink()
    (tmp_path / "a" / "pytorch_model.bin").write_bytes(b"")
    assert cli.main(["export", "check", folder]) == 2
    assert "pickled weights are not read" in capsys.readouterr().err
