"""Drafters on disk, in z-lab's layout: `config.json` and `model.safetensors`, no prefix, no embedding, no head.

What each field means to serving engines:
- `block_size` stands at top level and in `dflash_config`; readers differ in which one wins, so both are always equal.
- Causality: `is_causal` and `dflash_config.causal` override every layer, and engines differ in which of them they read.
  Mixed drafters write neither; all-bidirectional and all-causal ones write both.
- Without `use_sliding_window: true` transformers drops the window without a word.
- A factor on the logits is written twice: z-lab reads `output_multiplier`, vLLM `logit_scale`.

Reading takes what others published as well: weights in several files (an index beside them), and the layout of the
library speculators (`speculators_layout`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftsmith.config import TargetConfig
from draftsmith.drafter.config_fields import field_faults, without_nulls
from draftsmith.drafter.model import DraftModel
from draftsmith.drafter.spec import DrafterSpec
from draftsmith.drafter.speculators_layout import TARGET_OWNED, is_speculators, zlab_fields
from draftsmith.errors import UserError, reason_of
from draftsmith.target.geometry import read_geometry
from draftsmith.target.taps import choose_taps

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def spec_to_config(spec: DrafterSpec, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` of a drafter."""
    dflash: dict[str, Any] = {
        "target_layer_ids": list(spec.taps),
        "mask_token_id": spec.mask_token_id,
        "block_size": spec.block_size,
    }
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "max_position_embeddings": spec.max_position_embeddings,
        "vocab_size": spec.vocab_rows,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "num_target_layers": spec.target_layers,
        "layer_types": list(spec.layer_types),
        "block_size": spec.block_size,
        "dflash_config": dflash,
    }
    if spec.sliding_window is not None:
        config["sliding_window"] = spec.sliding_window
        config["use_sliding_window"] = True
        dflash["swa_window_size"] = spec.sliding_window
    kinds = {kind.causal for kind in spec.kinds}
    if spec.causal is not None or len(kinds) == 1:
        config["is_causal"] = dflash["causal"] = kinds.pop()
    if spec.input_scale != 1.0:
        dflash["input_embedding_scale"] = spec.input_scale
    if spec.logit_multiplier != 1.0:
        dflash["output_multiplier"] = config["logit_scale"] = spec.logit_multiplier
    if spec.logit_softcap is not None:
        dflash["final_logit_softcapping"] = spec.logit_softcap
    return config


def spec_from_config(config: dict[str, Any], where: str) -> DrafterSpec:
    """Reads a z-lab `config.json`; values that may stand in two places are taken from `dflash_config` first.

    Args:
        config: free of `field_faults` and of nulls.

    Raises:
        UserError: not a DFlash drafter, or a mandatory field is missing.
    """
    dflash = config.get("dflash_config") or {}

    def either(name: str, default: Any = None) -> Any:
        return dflash.get(name, config.get(name, default))

    def need(name: str, value: Any = None) -> Any:
        value = config.get(name) if value is None else value
        if value is None:
            raise UserError(f"{name} is missing, and it is mandatory", where=where)
        return value

    if "DFlashDraftModel" not in (config.get("architectures") or []):
        raise UserError(f"is not a DFlash drafter (architectures: {config.get('architectures')})", where=where)
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act {config['hidden_act']!r} is not supported (silu is)", where=where)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(
            f"rope type {rope.get('rope_type', rope.get('type'))!r} is not supported (default is)", where=where
        )
    layers = need("num_hidden_layers")
    types = tuple(config.get("layer_types") or ("full_attention",) * layers)
    sliding = "sliding_attention" in types
    window = dflash.get("swa_window_size", config.get("sliding_window")) if sliding else None
    softcap, taps = either("final_logit_softcapping"), either("target_layer_ids")
    spec = DrafterSpec(
        hidden_size=need("hidden_size"),
        layers=layers,
        heads=need("num_attention_heads"),
        kv_heads=need("num_key_value_heads"),
        head_dim=config.get("head_dim") or need("hidden_size") // need("num_attention_heads"),
        intermediate_size=need("intermediate_size"),
        rms_norm_eps=float(need("rms_norm_eps")),
        # Where both say it, transformers (and so every reader) takes the inner one.
        rope_theta=float(need("rope_theta", rope.get("rope_theta"))),
        max_position_embeddings=need("max_position_embeddings"),
        vocab_rows=need("vocab_size"),
        target_layers=need("num_target_layers"),
        # A drafter that names none has those of the published rule, which z-lab's decoder then follows too.
        taps=choose_taps(need("num_target_layers"), layers) if taps is None else tuple(taps),
        block_size=either("block_size", 16),
        mask_token_id=need("mask_token_id", either("mask_token_id")),
        layer_types=types,
        sliding_window=window,
        causal=config.get("is_causal", dflash.get("causal")),
        input_scale=float(either("input_embedding_scale", 1.0)),
        logit_multiplier=float(either("output_multiplier", 1.0)),
        logit_softcap=float(softcap) if softcap is not None and softcap > 0 else None,
    )
    if not spec.taps or len(types) != layers or (sliding and window is None):
        raise UserError("target_layer_ids, layer_types or sliding_window do not fit the number of layers", where=where)
    return spec


def save_drafter(model: DraftModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Writes `config.json` and `model.safetensors` into `folder`, weights in `dtype` (default: as they are)."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in model.state_dict().items()}
    save_weights(weights, model.spec, folder)


def save_weights(weights: dict[str, torch.Tensor], spec: DrafterSpec, folder: Path) -> None:
    """The same from a state dict on the CPU."""
    dtype = next(iter(weights.values())).dtype
    (folder / CONFIG).write_text(json.dumps(spec_to_config(spec, dtype), indent=2) + "\n", encoding="utf-8")
    save_file(weights, str(folder / WEIGHTS), metadata={"format": "pt"})


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a drafter on disk, whatever its layout.

    Raises:
        UserError: no such folder, no `config.json` (of a run's folder: where its newest drafter is), or not a JSON
            object. Its fields may still hold anything.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(_why_no_drafter(folder), where=str(folder)) from None
    except OSError as error:
        raise UserError(f"cannot be read: {reason_of(error)}", where=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from None
    if not isinstance(config, dict):
        raise UserError("is not a JSON object", where=str(path))
    return config


def _why_no_drafter(folder: Path) -> str:
    """Of a folder without `config.json`; runs keep their drafters in `checkpoints/step-…`, and people name the run."""
    for root in (folder / "checkpoints", folder):
        steps = [path.parent for path in root.glob(f"step-*/{CONFIG}") if re.fullmatch(r"step-\d+", path.parent.name)]
        if steps:
            newest = max(steps, key=lambda path: int(path.name.removeprefix("step-")))
            return f"this is a run: its newest drafter is {newest}"
    if (folder / "run.json").exists():
        return "this is a run that has saved no drafter yet"
    return "no drafter here: config.json is missing"


def read_spec(folder: Path, target_layers: int | None = None) -> DrafterSpec:
    """The spec of a drafter on disk that `DraftModel` can be built from.

    Args:
        target_layers: depth of the target, for layouts that do not say it.

    Raises:
        UserError: see `stated_spec`; also a drafter that our model does not hold (biases, quantised weights), or whose
            numbers do not fit each other.
    """
    config, where = read_config(folder), str(folder / CONFIG)
    spec = stated_spec(config, where, target_layers)
    layer = layer_config(config)
    if layer.get("attention_bias"):
        raise UserError("attention_bias is true: attention with biases is not supported", where=where)
    if layer.get("quantization_config") is not None or config.get("quantization_config") is not None:
        raise UserError(
            "its weights are quantised (quantization_config), which is not supported",
            where=where,
            fix="take the drafter in bfloat16 or float32; remove the field if the weights are plain",
        )
    for _, fault in spec.faults():
        raise UserError(fault, where=where)
    return spec


def stated_spec(config: dict[str, Any], where: str, target_layers: int | None = None) -> DrafterSpec:
    """What a `config.json` of either layout says, whether or not anything can decode with it.

    Raises:
        UserError: a field of the wrong type or range, not a DFlash drafter, or a mandatory field is missing.
    """
    for fault in field_faults(config):
        raise UserError(fault, where=where)
    config = without_nulls(config)
    if is_speculators(config):
        config = zlab_fields(config, where, target_layers)
        if "num_target_layers" not in config:
            raise UserError("does not say how many layers its target has", where=where, fix="give the target as well")
    elif "num_target_layers" not in config and target_layers is not None:
        config = {**config, "num_target_layers": target_layers}
    return spec_from_config(config, where)


def layer_config(config: dict[str, Any]) -> dict[str, Any]:
    """Where the dimensions stand, in either layout."""
    return config.get("transformer_layer_config") or {} if is_speculators(config) else config


def weight_files(folder: Path) -> list[Path]:
    """The files with a drafter's tensors: the one, or those that an index beside them names.

    Raises:
        UserError: the index cannot be read, or does not map tensors to the names of files; or a file is missing.
    """
    paths = [folder / WEIGHTS]
    if not paths[0].exists() and (folder / INDEX).exists():
        paths = _indexed(folder)
    # Unlike `Path.is_file`, this one takes every name that an index may hold.
    missing = next((path for path in paths if not os.path.isfile(path)), None)
    if missing is not None:
        pickled = "; pickled weights are not read" if any(folder.glob("*.bin")) else ""
        raise UserError(f"no weights here: {missing.name} is missing{pickled}", where=str(folder))
    return paths


def _indexed(folder: Path) -> list[Path]:
    index = folder / INDEX
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot be read: {error}", where=str(index)) from None
    named = content.get("weight_map") if isinstance(content, dict) else None
    names = list(named.values()) if isinstance(named, dict) else []
    # No file outside the folder is read, whatever the index says.
    files = [Path(name).name if isinstance(name, str) else "" for name in names]
    if not files or not all(files):
        raise UserError("its weight_map does not name a file for each tensor", where=str(index))
    return [folder / name for name in sorted(set(files))]


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a drafter on disk as they are, from one file or from those that an index names.

    Raises:
        UserError: see `weight_files`; also a file that is torn.
    """
    weights: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            weights |= load_file(str(path))
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot be read: {error}", where=str(path)) from None
    return weights


def expected_shapes(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor of a drafter; builds nothing."""
    with torch.device("meta"):
        model = DraftModel(spec)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def read_own_weights(folder: Path, spec: DrafterSpec) -> dict[str, torch.Tensor]:
    """The drafter's tensors in `folder`, complete, of the right shapes, floating and finite.

    What speculators keeps beside them and the target owns (embedding, heads, vocabulary maps) is left out.

    Raises:
        UserError: see `read_weights`; also missing, extra or misshapen tensors, each named, or one that holds no
            finite numbers of a floating dtype.
    """
    found = read_weights(folder)
    if is_speculators(read_config(folder)):
        found = {name: value for name, value in found.items() if name not in TARGET_OWNED}
    expected = expected_shapes(spec)
    shapes = {name: tuple(value.shape) for name, value in found.items()}
    if expected != shapes:
        wrong = sorted(set(expected.items()) ^ set(shapes.items()))
        names = ", ".join(dict.fromkeys(name for name, _ in wrong))
        raise UserError(f"tensors missing, left over or of another shape: {names}", where=str(folder / WEIGHTS))
    for name, value in found.items():
        fault = "numbers that are not finite (nan or inf)"
        if value.dtype not in _FLOATING:
            fault = f"{str(value.dtype).removeprefix('torch.')} numbers, and quantised weights are not read"
        elif value.isfinite().all():
            continue
        raise UserError(f"{name} holds {fault}", where=str(folder / WEIGHTS))
    return found


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Name of a drafter's weights, the same in either layout, however they are divided over files.

    Args:
        weights: its own tensors as they are on disk; another dtype is another drafter.
    """
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def load_drafter(
    folder: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    target_layers: int | None = None,
) -> DraftModel:
    """Builds the drafter saved in `folder`, every tensor present and none left over; either layout.

    Raises:
        UserError: see `read_spec` and `read_own_weights`.
    """
    spec = read_spec(folder, target_layers)
    weights = read_own_weights(folder, spec)
    with torch.device("meta"):
        model = DraftModel(spec)
    model.load_state_dict(weights, assign=True)
    return model.to(device=device, dtype=dtype)


def load_drafter_for(target: TargetConfig, folder: Path) -> DraftModel:
    """The drafter saved in `folder`, on the CPU and in its own dtype, for a target that is not loaded yet: loading may
    take minutes, and what is wrong with the drafter need not wait for it.

    Raises:
        UserError: see `load_drafter`; also a target whose configuration cannot be read, or that it was not trained for.
    """
    read_config(folder)  # before a target is looked for, which may mean to fetch it
    geometry = read_geometry(target)
    drafter = load_drafter(folder, target_layers=geometry.layers)
    drafter.spec.require_target(geometry, str(folder))
    return drafter
