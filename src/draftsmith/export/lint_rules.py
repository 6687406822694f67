"""The lint's single rules: each looks at the files, some at the target as well, and yields findings.

A rule knows nothing of the others. What follows for an engine is said with the finding; rules about how an engine reads
the config are not here but in `engines`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from draftsmith.drafter.native import expected_shapes, layer_config, read_weights, weight_files
from draftsmith.drafter.spec import DrafterSpec
from draftsmith.drafter.speculators_layout import TARGET_OWNED, is_speculators
from draftsmith.errors import UserError, first_of
from draftsmith.export.engines import ENGINES
from draftsmith.target.geometry import TargetGeometry

Severity = Literal["error", "warning", "info"]
Outcome = Literal["loads", "differs", "refuses"]
Tensors = dict[str, tuple[tuple[int, ...], str]]  # name → (shape, dtype)

# Fields that somebody reads, or that are known to be harmless; everything else is named as ignored.
_NAMED = 3  # tensors and fields of a finding
_KNOWN = {
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "auto_map", "use_cache"),
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "hidden_act", "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling"),
    *("max_position_embeddings", "vocab_size", "attention_bias", "attention_dropout", "tie_word_embeddings"),
    *("num_target_layers", "layer_types", "block_size", "dflash_config", "sliding_window", "use_sliding_window"),
    *("max_window_layers", "is_causal", "logit_scale", "initializer_range", "bos_token_id", "eos_token_id"),
    *("pad_token_id", "target_layer_ids", "mask_token_id", "mask_token", "eagle_aux_hidden_state_layer_ids"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "is_neox_style", "rope_is_neox_style"),
    *("partial_rotary_factor", "draft_vocab_size", "target_hidden_size", "quantization_config", "name_or_path"),
    *("speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config"),
    *("aux_hidden_state_layer_ids", "sliding_window_non_causal", "sample_from_anchor", "attention_sink_bias"),
    *("add_swa_attention_sink_bias", "has_embed_tokens", "has_lm_head", "_name_or_path", "return_dict"),
    *("output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id"),
    *("problem_type", "output_attentions"),
}
# dflash_config field → engines that read it.
_READ_BY: dict[str, tuple[str, ...]] = {
    "target_layer_ids": ("zlab", "sglang", "vllm", "speculators"),
    "mask_token_id": ("zlab", "sglang", "vllm", "speculators"),
    "block_size": ("zlab", "sglang", "speculators"),
    "causal": ("vllm",),
    "swa_window_size": ("vllm",),
    "use_swa": ("vllm",),
    "use_aux_hidden_state": ("vllm",),
    "attention_sink_bias": ("sglang", "vllm"),
    "attention_value_scale": ("sglang",),
    "num_target_layers": ("sglang",),
    "mask_token": ("sglang",),
    "input_embedding_scale": ("zlab",),
    "output_multiplier": ("zlab", "sglang"),
    "final_logit_softcapping": ("zlab", "sglang"),
}


@dataclass(frozen=True)
class Finding:
    """One thing about the files.

    Attributes:
        rule: its name, the same in every report.
        severity: "error": no engine does what was trained, or it is wrong in itself; "warning"; "info".
        text: for people.
        outcomes: what follows for which engine.
        said: what is to be said about one engine alone.
    """

    rule: str
    severity: Severity
    text: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Files:
    """What lies in the folder. `config` is free of `field_faults`."""

    folder: Path
    config: dict[str, Any]
    tensors: Tensors
    spec: DrafterSpec | None

    @property
    def layer_config(self) -> dict[str, Any]:
        """Where the dimensions stand."""
        return layer_config(self.config)


@dataclass(frozen=True)
class TargetFacts:
    """What the rules ask of a target."""

    name: str
    geometry: TargetGeometry
    hf_config: Any
    tokenizer: Any


def everybody(outcome: Outcome) -> dict[str, Outcome]:
    return dict.fromkeys(ENGINES, outcome)


def read_tensors(folder: Path) -> Tensors:
    """Names, shapes and dtypes from the headers of all weight files.

    Raises:
        UserError: see `weight_files`; also a file that is torn.
    """
    found = {}
    for path in weight_files(folder):
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118, it is no dictionary
                    part = file.get_slice(name)
                    found[name] = (tuple(part.get_shape()), str(part.get_dtype()))
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot be read: {error}", where=str(path)) from None
    return found


def check_faults(files: Files) -> Iterator[Finding]:
    """Numbers of the config that do not fit each other."""
    for rule, text in () if files.spec is None else files.spec.faults():
        # Only SGLang asks for the kind of a layer, which `engines` says; the others run an unknown one as a full one.
        unasked: dict[str, Outcome] = {"zlab": "differs", "vllm": "differs", "speculators": "differs"}
        outcomes = unasked if rule == "layer-type-unknown" else everybody("refuses")
        yield Finding(rule, "error", text, outcomes)


def check_tensors(files: Files) -> Iterator[Finding]:
    if files.spec is None:
        return
    biases = _bias_shapes(files)
    expected = expected_shapes(files.spec) | biases
    found = {name: shape for name, (shape, _) in files.tensors.items()}
    prefixed = [name for name in found if name.startswith("model.") and name.removeprefix("model.") in expected]
    if prefixed:
        outcomes: dict[str, Outcome] = {"vllm": "refuses", "speculators": "refuses"}
        yield Finding(
            "tensor-prefix",
            "error",
            f"{len(prefixed)} names begin with model., which vLLM adds itself and speculators does not know",
            outcomes,
        )
        found = {name.removeprefix("model."): shape for name, shape in found.items()}
    missing = sorted(expected.keys() - found.keys() - biases.keys())
    if missing:
        yield Finding(
            "tensor-missing",
            "error",
            f"{first_of(missing, _NAMED)}: nobody checks; the engines decode with whatever stands in memory or with "
            "fresh weights",
            everybody("differs"),
        )
    yield from _biases(sorted(biases), sorted(biases.keys() - found.keys()))
    own = TARGET_OWNED if is_speculators(files.config) else frozenset()
    extra = sorted(found.keys() - expected.keys() - own)
    if extra:
        theirs = [name for name in extra if name in TARGET_OWNED]
        outcomes = {"vllm": "refuses", "speculators": "refuses"}
        if theirs == extra:
            outcomes = {"vllm": "differs", "speculators": "refuses"}
        yield Finding(
            "tensor-extra",
            "error",
            f"{first_of(extra, _NAMED)}: z-lab and SGLang ignore them without a word, vLLM "
            + ("takes them for its own embedding or head" if theirs == extra else "has no parameter of that name"),
            outcomes,
        )
    misshapen = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    if misshapen:
        texts = [f"{name} is {list(found[name])}, the config says {list(expected[name])}" for name in misshapen]
        yield Finding("tensor-shape", "error", first_of(texts, _NAMED), everybody("refuses"))
    if (files.folder / "mask_embedding.pt").exists():
        yield Finding(
            "mask-embedding",
            "warning",
            "mask_embedding.pt: vLLM puts it in the mask token's place; the others use the target's row",
            {"zlab": "differs", "sglang": "differs", "speculators": "differs"},
        )


def _bias_shapes(files: Files) -> dict[str, tuple[int, ...]]:
    """Name → shape of the bias tensors that an engine makes for this config; none without `attention_bias`."""
    spec = files.spec
    if spec is None or not files.layer_config.get("attention_bias"):
        return {}
    sizes = {"q": spec.heads * spec.head_dim, "o": spec.hidden_size}
    sizes |= dict.fromkeys("kv", spec.kv_heads * spec.head_dim)
    return {
        f"layers.{layer}.self_attn.{name}_proj.bias": (size,)
        for layer in range(spec.layers)
        for name, size in sizes.items()
    }


def _biases(names: list[str], missing: list[str]) -> Iterator[Finding]:
    """What `attention_bias` does, by the bias tensors that the file lacks."""
    if missing:
        yield Finding(
            "attention-bias",
            "error",
            f"attention_bias is true, but {first_of(missing, _NAMED)} are not here: nobody checks; the engines decode "
            "with fresh biases or whatever stands in memory",
            everybody("differs"),
        )
    elif names:
        yield Finding(
            "attention-bias",
            "warning",
            f"attention has biases ({len(names)} tensors), which z-lab and speculators load and use; draftsmith's own "
            "model has none, so this drafter can be neither imported, decoded nor trained here",
        )


def check_quantization(files: Files) -> Iterator[Finding]:
    """Engines load weights by this field; a drafter whose tensors are plain must not have it."""
    said = files.layer_config.get("quantization_config") or files.config.get("quantization_config")
    if said is not None:
        method = said.get("quant_method", "no method")
        yield Finding(
            "quantization",
            "error",
            f"quantization_config ({method}): transformers, vLLM and SGLang load the weights by it, so they refuse "
            "plain ones, quantise them, or ignore the field, as the method has it",
            everybody("differs"),
        )


def check_block_size(files: Files) -> Iterator[Finding]:
    dflash = files.config.get("dflash_config") or {}
    if is_speculators(files.config):
        methods = (files.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        count = methods[0].get("speculative_tokens")
        if count is not None and files.spec is not None and count != files.spec.block_size - 1:
            yield Finding(
                "block-size-differs",
                "warning",
                f"speculative_tokens is {count} for blocks of {files.spec.block_size}: vLLM drafts {count}",
                {"vllm": "differs"},
            )
        return
    top, inner = files.config.get("block_size"), dflash.get("block_size")
    if top is not None and inner is not None and top != inner:
        yield Finding(
            "block-size-differs",
            "error",
            f"block_size is {top} at top level and {inner} in dflash_config: z-lab and SGLang take the inner one, "
            "speculators the outer one",
            {"speculators": "differs"},
        )
    elif top is None and inner is None:
        yield Finding("block-size-missing", "warning", "block_size is nowhere: z-lab and SGLang assume 16")
    elif top is None or inner is None:
        there = "at top level" if inner is None else "in dflash_config"
        yield Finding("block-size-once", "info", f"block_size stands only {there}; every reader above finds it there")


def check_taps(files: Files) -> Iterator[Finding]:
    spec = files.spec
    if spec is None:
        return
    if len(set(spec.taps)) != len(spec.taps):
        yield Finding("tap-twice", "warning", f"taps {list(spec.taps)} name a layer twice")
    if spec.target_layers - 1 in spec.taps:
        yield Finding(
            "last-layer",
            "error",
            "the target's last layer is tapped: transformers' last hidden state has the final norm applied, a layer's "
            "output has not, and vLLM and SGLang have no layer to capture before",
            {"zlab": "differs", "sglang": "differs", "vllm": "differs", "speculators": "refuses"},
        )
    aux = files.config.get("eagle_aux_hidden_state_layer_ids")
    if aux is not None and [number - 1 for number in aux] != list(spec.taps):
        yield Finding(
            "tap-offset",
            "error",
            f"eagle_aux_hidden_state_layer_ids {aux}, which vLLM uses, are not taps {list(spec.taps)} + 1",
            {"vllm": "differs"},
        )


def check_rope(files: Files) -> Iterator[Finding]:
    config = files.layer_config
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    inner, outer = rope.get("rope_theta"), config.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        yield Finding(
            "rope-theta-twice",
            "warning",
            f"rope_theta is {outer:g} at top level and {inner:g} inside; transformers takes the inner one, SGLang once "
            "took the outer one",
        )
    if inner is None and outer is None:
        yield Finding(
            "rope-theta-missing", "error", "no rope_theta: transformers assumes 1e4, vLLM 1e6", {"vllm": "differs"}
        )
    if "mrope_section" in rope:
        yield Finding(
            "rope-mrope",
            "error",
            "mrope_section was inherited from the target's config: vLLM builds a three-part rotary, z-lab none",
            {"vllm": "differs", "sglang": "differs"},
        )


def check_vocabulary(files: Files) -> Iterator[Finding]:
    rows = files.layer_config.get("vocab_size")
    reduced = files.config.get("draft_vocab_size")
    names: tuple[str, ...] = ("t2d", "d2t", "lm_head.weight")
    held = {name: files.tensors[name][0] for name in names if name in files.tensors}
    if reduced in (None, rows):
        maps = sorted(held.keys() & {"t2d", "d2t"})
        if maps:
            yield Finding("vocabulary-maps", "warning", f"{first_of(maps, _NAMED)}, but the vocabulary is not reduced")
        return
    hidden = files.layer_config.get("hidden_size")
    need: dict[str, tuple[Any, ...]] = {"t2d": (rows,), "d2t": (reduced,), "lm_head.weight": (reduced, hidden)}
    missing = sorted(need.keys() - held.keys())
    if missing:
        yield Finding(
            "vocabulary-maps",
            "error",
            f"draft_vocab_size is {reduced} of {rows}, but {first_of(missing, _NAMED)} is missing",
            {"vllm": "refuses" if "lm_head.weight" in missing else "differs", "speculators": "refuses"},
        )
        return
    wrong = [f"{name} is {list(held[name])}, not {list(need[name])}" for name in need if held[name] != need[name]]
    if not wrong:
        wrong = list(_map_faults(files.folder, reduced))
    if wrong:
        yield Finding(
            "vocabulary-maps", "error", first_of(wrong, _NAMED), {"vllm": "differs", "speculators": "refuses"}
        )
    else:
        yield Finding("vocabulary-maps", "info", f"drafts come from {reduced} of {rows} rows")


def _map_faults(folder: Path, reduced: int) -> Iterator[str]:
    """d2t holds offsets: row i of the reduced vocabulary is token i + d2t[i], and t2d marks just these tokens."""
    weights = read_weights(folder)
    marked = weights["t2d"].bool().nonzero()[:, 0]
    tokens = torch.arange(reduced) + weights["d2t"].long()
    if marked.numel() != reduced:
        yield f"t2d marks {marked.numel()} tokens, the reduced vocabulary has {reduced}"
    elif not torch.equal(marked, tokens.sort().values):
        absolute = torch.equal(marked, weights["d2t"].long().sort().values)
        yield "d2t holds token ids, not offsets" if absolute else "t2d and d2t do not name the same tokens"


def check_dtype(files: Files) -> Iterator[Finding]:
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
    own = {dtype for name, (_, dtype) in files.tensors.items() if name not in TARGET_OWNED}
    found = sorted(names.get(dtype, dtype) for dtype in own)
    said = files.config.get("dtype") or files.config.get("torch_dtype")
    for name in {said, files.layer_config.get("dtype")}:
        if name and not isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype):
            yield Finding("dtype", "error", f"the config's dtype {name!r} is none of torch's", everybody("refuses"))
    if len(found) > 1:
        yield Finding("dtype", "warning", f"tensors of several dtypes: {', '.join(found)}")
    elif found and said is not None and str(said).removeprefix("torch.") != found[0]:
        yield Finding("dtype", "warning", f"the config says {said}, the tensors are {found[0]}; engines convert")
    unusual = [name for name in found if name not in ("float32", "bfloat16", "float16")]
    if unusual:
        yield Finding("dtype", "error", f"tensors of dtype {unusual[0]}", everybody("refuses"))
    if "float16" in found:
        yield Finding("dtype", "warning", "float16: taps of deep targets overflow it; bfloat16 is what engines serve")


def check_ignored(files: Files) -> Iterator[Finding]:
    """Fields that nobody reads, those that only some read, and names that look like slips."""
    dflash = files.config.get("dflash_config") or {}
    strange = sorted(files.config.keys() - _KNOWN) + [
        f"dflash_config.{name}" for name in sorted(dflash.keys() - _READ_BY.keys())
    ]
    for name in strange:
        short = name.removeprefix("dflash_config.")
        near = difflib.get_close_matches(short, [*_READ_BY, *_KNOWN], n=1, cutoff=0.85)
        # Two layers of one name with another number are no slip.
        if near and not re.search(r"\d", short):
            yield Finding("field-slip", "warning", f"{name} is read by nobody; {near[0]} is meant?")
        else:
            yield Finding("field-ignored", "info", f"{name} is read by nobody")
    if is_speculators(files.config):
        return
    for name in sorted(dflash.keys() & _READ_BY.keys()):
        others = [ENGINES[engine].name for engine in ENGINES if engine not in _READ_BY[name]]
        if others:
            yield Finding("field-ignored", "info", f"dflash_config.{name} is ignored by {', '.join(others)}")


def check_target(files: Files, target: TargetFacts) -> Iterator[Finding]:
    spec, geometry = files.spec, target.geometry
    if spec is None:
        return
    if spec.hidden_size != geometry.hidden_size:
        text = f"hidden size {spec.hidden_size}, the target's is {geometry.hidden_size}"
        yield Finding("target-hidden-size", "error", text, everybody("refuses"))
    if spec.target_layers != geometry.layers:
        fits = all(tap < geometry.layers for tap in spec.taps)
        yield Finding(
            "target-depth",
            "error",
            f"num_target_layers {spec.target_layers}, the target has {geometry.layers}: it was trained for another",
            {} if fits else everybody("refuses"),
        )
    if spec.vocab_rows != geometry.vocab_rows:
        yield Finding(
            "target-vocabulary",
            "error",
            f"vocab_size {spec.vocab_rows}, the target's embedding has {geometry.vocab_rows} rows",
            {"vllm": "differs", "speculators": "refuses"},
        )
    yield from _mask_token(spec, target)
    if spec.rope_theta != geometry.rope_theta:
        yield Finding("target-rope-theta", "warning", f"θ {spec.rope_theta:g}, the target's is {geometry.rope_theta:g}")
    if spec.max_position_embeddings < geometry.max_position_embeddings:
        yield Finding(
            "target-positions",
            "warning",
            f"{spec.max_position_embeddings} positions, the target has {geometry.max_position_embeddings}: the rotary "
            "tables of vLLM and SGLang end there",
            {"vllm": "differs", "sglang": "differs"},
        )
    if spec.input_scale != geometry.embedding_scale:
        yield Finding(
            "target-embedding-scale",
            "error",
            f"embedding rows times {spec.input_scale:g}, the target multiplies by {geometry.embedding_scale:g}",
            {"zlab": "differs"},
        )
    for rule, here, there in (
        ("target-logit-softcap", spec.logit_softcap, geometry.logit_softcap),
        ("target-logit-factor", spec.logit_multiplier, geometry.logit_multiplier),
    ):
        if here != there:
            text = f"{here} here, {there} in the target: greedy drafts are the same, sampled ones are not"
            yield Finding(rule, "warning", text, {"zlab": "differs"})
    if is_speculators(files.config):
        yield from _verifier(files, target)


def _mask_token(spec: DrafterSpec, target: TargetFacts) -> Iterator[Finding]:
    mask, tokenizer = spec.mask_token_id, target.tokenizer
    if not 0 <= mask < target.geometry.vocab_rows:
        text = f"mask token {mask} is outside the target's {target.geometry.vocab_rows} embedding rows"
        yield Finding("target-mask-token", "error", text, everybody("refuses"))
        return
    roles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} - {tokenizer.mask_token_id}
    if mask in roles:
        yield Finding("target-mask-token", "warning", f"mask token {mask} begins, ends or pads the target's texts")
    elif mask < len(tokenizer) and mask not in tokenizer.added_tokens_decoder:
        text = f"mask token {mask} is the ordinary token {tokenizer.convert_ids_to_tokens(mask)!r}"
        yield Finding("target-mask-token", "warning", text)


def _verifier(files: Files, target: TargetFacts) -> Iterator[Finding]:
    named = ((files.config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    path = Path(named or "")
    if named and path.is_dir() and not any(path.glob("*.safetensors*")):
        yield Finding(
            "verifier",
            "error",
            f"{named} holds no safetensors: embedding and head cannot be fetched from there",
            {"speculators": "refuses"},
        )
