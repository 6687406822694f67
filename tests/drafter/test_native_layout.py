"""Drafters on disk: bit for bit there and back, the fields that serving engines read, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_drafters import LAYOUTS, random_model, tiny_spec

from draftsmith.drafter import load_drafter, read_spec, save_drafter
from draftsmith.drafter.native import weight_files, weights_digest
from draftsmith.errors import UserError


def saved(folder: Path, layout: str = "mixed", **changes: Any) -> Path:
    save_drafter(random_model(tiny_spec(layout, **changes)), folder)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def edit(folder: Path, **changes: Any) -> None:
    """Sets top-level fields of the config; None removes."""
    config = {**config_of(folder), **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_round_trip_is_exact(layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
    spec = tiny_spec(layout, input_scale=5.5, logit_multiplier=0.25, logit_softcap=30.0)
    model = random_model(spec).to(dtype)
    save_drafter(model, tmp_path / "deep" / "folder")
    loaded = load_drafter(tmp_path / "deep" / "folder")
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == dtype
        assert torch.equal(loaded.state_dict()[name], value)
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    # `causal` may come back as what it means for every layer; all else is the same.
    assert [loaded.spec.layer_kind(i) for i in range(spec.layers)] == [spec.layer_kind(i) for i in range(spec.layers)]
    for name in spec.__dataclass_fields__:
        if name != "causal":
            assert getattr(loaded.spec, name) == getattr(spec, name), name
    save_drafter(loaded, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "deep" / "folder" / name).read_bytes()


def test_saved_and_loaded_dtype_can_be_chosen(tmp_path: Path) -> None:
    model = random_model(tiny_spec())
    save_drafter(model, tmp_path, torch.bfloat16)
    assert config_of(tmp_path)["dtype"] == "bfloat16"
    assert load_drafter(tmp_path).fc.weight.dtype == torch.bfloat16
    wide = load_drafter(tmp_path, dtype=torch.float32)
    assert torch.equal(wide.fc.weight, model.fc.weight.bfloat16().float())


def test_config_says_what_serving_engines_read(tmp_path: Path) -> None:
    config = config_of(saved(tmp_path, "mixed", block_size=10))
    expected = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 5e5, "max_position_embeddings": 4096,
        "vocab_size": 23, "attention_bias": False, "tie_word_embeddings": False, "num_target_layers": 9,
        "block_size": 10, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 9, "use_sliding_window": True,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert config["dflash_config"] == {
        "target_layer_ids": [1, 4, 6], "mask_token_id": 21, "block_size": 10, "swa_window_size": 9,
    }  # fmt: skip
    assert (tmp_path / "model.safetensors").stat().st_size < 4 * sum(
        p.numel() for p in load_drafter(tmp_path).parameters()
    ) + 5000


@pytest.mark.parametrize(
    ("layout", "causal"),
    [
        ("full", False),
        ("sliding", True),
        ("mixed", None),
        ("bidirectional sliding", False),
        ("all bidirectional sliding", False),
        ("all causal", True),
        ("causal full", True),
    ],
)
def test_causality_is_written_in_both_places_or_in_neither(layout: str, causal: bool | None, tmp_path: Path) -> None:
    config = config_of(saved(tmp_path, layout))
    if causal is None:
        assert "is_causal" not in config
        assert "causal" not in config["dflash_config"]
    else:
        assert config["is_causal"] is causal
        assert config["dflash_config"]["causal"] is causal


def test_unset_causality_means_sliding_causal_and_full_bidirectional(tmp_path: Path) -> None:
    folder = saved(tmp_path, "mixed")
    assert [(kind.window, kind.causal) for kind in map(read_spec(folder).layer_kind, range(3))] == [
        (9, True), (None, False), (9, True),
    ]  # fmt: skip


def test_fields_may_stand_at_top_level_only(tmp_path: Path) -> None:
    folder = saved(tmp_path, "full", input_scale=3.0)
    config = config_of(folder)
    dflash = config.pop("dflash_config")
    edit(folder, dflash_config={}, **dflash)
    spec = read_spec(folder)
    assert (spec.taps, spec.mask_token_id, spec.block_size, spec.input_scale) == ((1, 4, 6), 21, 8, 3.0)


@pytest.mark.parametrize(
    ("layout", "nulls", "name", "value"),
    [
        ("all causal", ("is_causal",), "causal", True),
        ("all causal", ("dflash_config", "causal"), "causal", True),
        ("mixed", ("dflash_config", "swa_window_size"), "sliding_window", 9),
        ("mixed", ("sliding_window",), "sliding_window", 9),
        ("mixed", ("dflash_config", "block_size"), "block_size", 8),
        ("mixed", ("hidden_act",), "sliding_window", 9),
        ("mixed", ("rope_parameters", "rope_type"), "rope_theta", 5e5),
        ("mixed", ("rope_parameters", "rope_theta"), "rope_theta", 5e5),
        ("mixed", ("rope_parameters",), "rope_theta", 5e5),
    ],
)
def test_a_null_field_counts_as_left_out(
    layout: str, nulls: tuple[str, ...], name: str, value: object, tmp_path: Path
) -> None:
    folder = saved(tmp_path, layout)
    config = config_of(folder)
    place = config
    for field in nulls[:-1]:
        place = place[field]
    place[nulls[-1]] = None
    (folder / "config.json").write_text(json.dumps(config))
    assert getattr(read_spec(folder), name) == value


def test_a_softcap_of_zero_is_none(tmp_path: Path) -> None:
    folder = saved(tmp_path, "full")
    edit(folder, final_logit_softcapping=0)
    assert read_spec(folder).logit_softcap is None


def test_rope_theta_may_stand_in_rope_parameters(tmp_path: Path) -> None:
    folder = saved(tmp_path, "full")
    edit(folder, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1234.0})
    assert read_spec(folder).rope_theta == 1234.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "not a DFlash drafter"),
        ({"architectures": ["DFlash2DraftModel"]}, "not a DFlash drafter"),
        ({"architectures": None}, "not a DFlash drafter"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_target_layers": None}, "num_target_layers"),
        ({"num_hidden_layers": "many"}, "many"),
        ({"rope_theta": None, "rope_parameters": None}, "rope_theta is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"dflash_config": {"target_layer_ids": [1, 4, 6]}}, "mask_token_id is missing"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": []}}, "target_layer_ids"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        (
            {"layer_types": ["chunked_attention", "full_attention", "sliding_attention"]},
            "layer type 'chunked_attention'",
        ),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"num_attention_heads": 5}, "5 heads cannot share 2 K/V heads"),
        ({"head_dim": 15}, "head_dim is 15"),
        (
            {"dflash_config": {"mask_token_id": 21, "target_layer_ids": [1, 4, 9]}},
            r"taps \[9\] are outside .* 9 layers",
        ),
        ({"dflash_config": {"mask_token_id": 23, "target_layer_ids": [1, 4, 6]}}, "mask token 23 is outside the 23"),
        ({"rope_theta": "abc"}, "rope_theta is 'abc', not a number above 0"),
        ({"hidden_size": -1}, "hidden_size is -1, not a whole number"),
        ({"intermediate_size": 10**30}, "intermediate_size is 10*, not a whole number"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": [1]}}, r"rope_parameters.rope_theta is \[1\]"),
        ({"dflash_config": {"mask_token_id": True}}, "dflash_config.mask_token_id is True"),
        ({"is_causal": 1}, "is_causal is 1, not true or false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        (
            {"sliding_window": None, "dflash_config": {"target_layer_ids": [1, 4, 6], "mask_token_id": 3}},
            "sliding_window",
        ),
    ],
)
def test_foreign_or_broken_configs_are_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    edit(folder, **changes)
    with pytest.raises(UserError, match=says) as caught:
        load_drafter(folder)
    assert "config.json" in caught.value.where


@pytest.mark.parametrize("text", ["{", "[1, 2]", "3", ""])
def test_unreadable_configs_are_refused(text: str, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError) as caught:
        load_drafter(folder)
    assert "config.json" in caught.value.where


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json is missing"):
        load_drafter(tmp_path / "nowhere")
    folder = saved(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        load_drafter(folder)


def test_the_folder_of_a_run_names_its_newest_drafter(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no drafter here"):
        read_spec(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "checkpoints" / "step-0000009").mkdir(parents=True)  # not whole: holds no drafter
    with pytest.raises(UserError, match="a run that has saved no drafter yet"):
        read_spec(tmp_path)
    for name in ("step-0000002", "step-10000000", "step-9999999", "refused-step-20000000"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    for named in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(UserError) as caught:
            read_spec(named)
        newest = tmp_path / "checkpoints" / "step-10000000"
        assert str(caught.value) == f"{named}: this is a run: its newest drafter is {newest}"
    with pytest.raises(UserError) as caught:
        read_spec(tmp_path / "run.json")
    assert str(caught.value) == f"{tmp_path / 'run.json' / 'config.json'}: cannot be read: Not a directory"


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    path = folder / "model.safetensors"
    for keep in (3, 200, path.stat().st_size - 10):
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(UserError, match="cannot be read"):
            load_drafter(folder)


def test_weights_may_stand_in_several_files(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = {"a.safetensors": sorted(weights)[::2], "b.safetensors": sorted(weights)[1::2]}
    for file, names in halves.items():
        save_file({name: weights[name] for name in names}, folder / file)
    # What an index says of other folders is not followed.
    named = {name: f"/elsewhere/{file}" for file, names in halves.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    assert weight_files(folder) == [folder / file for file in halves]
    loaded = load_drafter(folder).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    path = folder / "model.safetensors"
    weights = load_file(path)
    broken = {
        "fc.weight": {name: value for name, value in weights.items() if name != "fc.weight"},
        "lm_head.weight": {**weights, "lm_head.weight": torch.zeros(3, 3)},
        "norm.weight": {**weights, "norm.weight": torch.zeros(31)},
        "layers.3.mlp.up_proj.weight": {**weights, "layers.3.mlp.up_proj.weight": torch.zeros(48, 32)},
    }
    for name, tensors in broken.items():
        save_file(tensors, path)
        with pytest.raises(UserError, match=name.replace(".", r"\.")) as caught:
            load_drafter(folder)
        assert str(caught.value).count("weight") == 1, "names more than what is wrong"
        assert "model.safetensors" in caught.value.where


def test_tensors_have_to_be_floating_and_finite(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    path = folder / "model.safetensors"
    weights = load_file(path)
    broken = {
        "holds int8 numbers": {**weights, "fc.weight": weights["fc.weight"].to(torch.int8)},
        "holds float8_e4m3fn numbers": {**weights, "fc.weight": weights["fc.weight"].to(torch.float8_e4m3fn)},
        "holds numbers that are not finite": {**weights, "fc.weight": weights["fc.weight"] * float("inf")},
    }
    for says, tensors in broken.items():
        save_file(tensors, path)
        with pytest.raises(UserError, match=f"fc.weight {says}"):
            load_drafter(folder)


def test_the_digest_names_weights_and_nothing_else() -> None:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    name = weights_digest(weights)
    assert weights_digest(dict(reversed(weights.items()))) == name
    assert weights_digest({**weights, "a": weights["a"].T.contiguous().T}) == name
    others = [
        {**weights, "b": torch.tensor([1.0, 1.0000001])},
        {**weights, "a": weights["a"].view(3, 2)},
        {**weights, "b": torch.ones(2, dtype=torch.bfloat16)},
        {"a": weights["a"], "c": weights["b"]},
    ]
    assert len({name, *map(weights_digest, others)}) == 5
