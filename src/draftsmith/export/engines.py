"""What each serving engine makes of a drafter's `config.json`: the rules of their loaders, read from their code.

Every engine is one function from the config to a `Reading`: what it would decode with, or why it refuses. A reading is
compared with what the drafter itself is (`DrafterSpec`), so a rule is written once and its consequence follows. A
reader raises `FieldMissing` where its engine stops for want of a field.

Read from:
- z-lab: the wheel dflash 0.1.0, `model.py`, with transformers 5.17's `Qwen3Config`;
- SGLang: `models/dflash.py` at 003b23d7 and `speculative/dflash_utils.py` at 00731f0b; before that, at 7f151c5e, every
  layer was bidirectional and unwindowed;
- vLLM: `models/qwen3_dflash.py` at 036a00d1, `layers/rotary_embedding/__init__.py` at 07b12f1b, and for speculators'
  layout `update_dflash` in `configs/speculators/algos.py` as of pull request 47453;
- speculators: the wheel 0.9.0, `models/dflash/` and `convert/dflash/converter.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from draftsmith.drafter.spec import DrafterSpec
from draftsmith.drafter.speculators_layout import is_speculators

SLIDING = "sliding_attention"
# Fields that `Qwen3Config` gives a value of its own if they are left out, but never if they are null.
_NEVER_NULL = (
    *("num_hidden_layers", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "attention_dropout"),
    *("tie_word_embeddings", "use_sliding_window", "max_window_layers", "initializer_range", "use_cache"),
)
Layers = tuple[tuple[int | None, bool], ...]


@dataclass(frozen=True)
class Engine:
    """Who serves, and the version whose rules these are."""

    name: str
    version: str


ENGINES: dict[str, Engine] = {
    "zlab": Engine("z-lab dflash", "0.1.0"),
    "sglang": Engine("SGLang", "003b23d7"),
    "vllm": Engine("vLLM", "036a00d1"),
    "speculators": Engine("speculators", "0.9.0"),
}


class FieldMissing(Exception):
    """An engine cannot go on without a field: it refuses."""


@dataclass
class Reading:
    """What an engine decodes with.

    Attributes:
        refusals: (rule, reason) why it does not start; the rest may be empty then.
        notes: (rule, text) conditions under which all is well.
        states: taps as transformers counts hidden states (0 is the embedding).
        layers: (window, causal) of each drafter layer.
        block_size: None where the server's command line decides.
        mask_token, theta, rotary_share, interleaved, embedding_factor, logit_factor, logit_cap: see `DrafterSpec`.
        window_from_anchor: the window counts from the anchor for every slot, not from the slot.
    """

    refusals: list[tuple[str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    states: tuple[int, ...] = ()
    layers: Layers = ()
    block_size: int | None = None
    mask_token: int | None = None
    theta: float = 10000.0
    rope_type: str = "default"
    rotary_share: float = 1.0
    interleaved: bool = False
    embedding_factor: float = 1.0
    logit_factor: float = 1.0
    logit_cap: float | None = None
    window_from_anchor: bool = False

    def refuse(self, rule: str, reason: str) -> None:
        self.refusals.append((rule, reason))


def meant_by(spec: DrafterSpec) -> Reading:
    """What the drafter was trained as."""
    kinds = [spec.layer_kind(layer) for layer in range(spec.layers)]
    return Reading(
        states=tuple(tap + 1 for tap in spec.taps),
        layers=tuple((kind.window, kind.causal) for kind in kinds),
        block_size=spec.block_size,
        mask_token=spec.mask_token_id,
        theta=spec.rope_theta,
        embedding_factor=spec.input_scale,
        logit_factor=spec.logit_multiplier,
        logit_cap=spec.logit_softcap,
    )


def read_as_zlab(config: dict[str, Any]) -> Reading:
    """`dflash_config` first, then the top level; causality from `is_causal`, else from the layer type."""
    reading = Reading()
    if is_speculators(config):
        reading.refuse("layout", "it reads z-lab's layout; the dimensions in transformer_layer_config are not found")
        return reading
    both = _both(config)
    _transformers_layers(config, reading)
    if config.get("num_target_layers") is None:
        reading.refuse("target-depth", "num_target_layers is missing, and it is asked for whatever the taps are")
    taps = both.get("target_layer_ids") or ()
    if not taps and config.get("num_target_layers"):
        taps = _spaced(int(config["num_target_layers"]), int(need(config, "num_hidden_layers", 1)))
    reading.states = tuple(int(tap) + 1 for tap in taps)
    types, window = _types(config), _transformers_window(config)
    override = config.get("is_causal")
    reading.layers = tuple(
        (window if kind == SLIDING else None, kind == SLIDING if override is None else bool(override)) for kind in types
    )
    reading.block_size = int(need(both, "block_size", 16))
    reading.mask_token = both.get("mask_token_id")
    if reading.mask_token is None:
        reading.refuse("mask-token", "mask_token_id is missing")
    _rope(config, reading)
    reading.embedding_factor = float(need(both, "input_embedding_scale", 1.0))
    reading.logit_factor = float(need(both, "output_multiplier", 1.0))
    cap = both.get("final_logit_softcapping")
    reading.logit_cap = float(cap) if cap and float(cap) > 0 else None
    return reading


def read_as_sglang(config: dict[str, Any]) -> Reading:
    """Causality from the layer type alone; factors on logits from `dflash_config`; none on the embedding."""
    reading = Reading()
    if is_speculators(config):
        reading.refuse("layout", "it reads z-lab's layout")
        return reading
    dflash, both = config.get("dflash_config") or {}, _both(config)
    _transformers_layers(config, reading)
    _named_class(config, reading)
    if config.get("hidden_act", "silu") != "silu":
        reading.refuse("activation", f"hidden_act {config['hidden_act']!r}; only silu is served")
    types, window = _types(config), _transformers_window(config)
    if SLIDING in types and window is None:
        reading.refuse("sliding-window", "sliding layers, but transformers sets sliding_window to none")
    odd = sorted(set(types) - {SLIDING, "full_attention"})
    if odd:
        reading.refuse("layer-types", f"layer type {odd[0]!r}")
    reading.layers = tuple((window if kind == SLIDING else None, kind == SLIDING) for kind in types)
    if SLIDING in types:
        reading.notes.append(("causality", "at 7f151c5e and before, every layer was bidirectional without a window"))
    depth = dflash.get("num_target_layers", config.get("num_target_layers"))
    taps = both.get("target_layer_ids")
    if taps is None:
        taps = _spaced(int(depth), int(need(config, "num_hidden_layers"))) if depth else ()
    reading.states = tuple(int(tap) + 1 for tap in taps)
    reading.block_size = int(need(both, "block_size", 16))
    reading.mask_token = both.get("mask_token_id")
    if reading.mask_token is None:
        reading.notes.append(("mask-token", "without mask_token_id the string <|MASK|> is looked up or added"))
    _rope(config, reading)
    if reading.rope_type == "default" and reading.rotary_share != 1.0:
        reading.rotary_share = 1.0  # it rotates the whole head whatever the config says
    reading.interleaved = not bool(config.get("rope_is_neox_style", config.get("is_neox_style", True)))
    reading.logit_factor = float(need(dflash, "output_multiplier", 1.0))
    cap = float(dflash.get("final_logit_softcapping") or 0.0)
    reading.logit_cap = cap if cap > 0 else None
    return reading


def read_as_vllm(config: dict[str, Any]) -> Reading:
    """Causality: `is_causal`, `dflash_config.causal`, layer type. Window: `swa_window_size` first. No factors but
    `logit_scale`. Speculators' layout is translated, with one causality for all layers."""
    reading = Reading()
    if is_speculators(config):
        layer = dict(config.get("transformer_layer_config") or {})
        ids = config.get("aux_hidden_state_layer_ids") or []
        translated = {
            "mask_token_id": config.get("mask_token_id"),
            "target_layer_ids": [int(number) - 1 for number in ids],
            "causal": not config.get("sliding_window_non_causal", True),
        }
        config = {**layer, "architectures": ["DFlashDraftModel"], "dflash_config": translated}
        config["eagle_aux_hidden_state_layer_ids"] = list(ids)
        if not ids:
            reading.refuse("taps", "aux_hidden_state_layer_ids is missing")
    dflash = config.get("dflash_config") or {}
    _transformers_layers(config, reading)
    _named_class(config, reading)
    if config.get("hidden_act", "silu") != "silu":
        reading.refuse("activation", f"hidden_act {config['hidden_act']!r}; only silu is served")
    ids = config.get("eagle_aux_hidden_state_layer_ids") or [
        int(tap) + 1 for tap in dflash.get("target_layer_ids") or []
    ]
    ids = ids or [int(tap) + 1 for tap in config.get("target_layer_ids") or []]
    if not ids:
        reading.refuse("taps", "no target_layer_ids: it would tap its own default layers, which fc does not fit")
    reading.states = tuple(int(number) for number in ids)
    types = _types(config)
    sliding = sum(kind == SLIDING for kind in types)
    forced = bool(dflash.get("use_swa")) and not sliding
    window = dflash.get("swa_window_size", _transformers_window(config))
    if (sliding or forced) and window is None:
        reading.refuse("sliding-window", "sliding layers, no swa_window_size, and transformers sets the window to none")
    if 0 < sliding < len(types):
        reading.notes.append(("mixed-layers", "sliding and full layers together need VLLM_USE_V2_MODEL_RUNNER=1"))
    override = config.get("is_causal")
    override = dflash.get("causal") if override is None else override
    reading.layers = tuple(
        (
            None if not (forced or kind == SLIDING) or window is None else int(window),
            kind == SLIDING if override is None else bool(override),
        )
        for kind in types
    )
    reading.mask_token = dflash.get("mask_token_id")
    if reading.mask_token is None:
        reading.refuse("mask-token", "mask_token_id must stand in dflash_config")
    _rope(config, reading, default=1e6)
    reading.interleaved = not bool(config.get("is_neox_style", True))
    reading.logit_factor = float(config.get("logit_scale") or 1.0)
    reading.notes.append(("block-size", "it drafts num_speculative_tokens, given when it is started: block size - 1"))
    return reading


def read_as_speculators(config: dict[str, Any]) -> Reading:
    """Its own layout, or z-lab's through its converter: full layers bidirectional, sliding ones causal unless told."""
    reading = Reading()
    if is_speculators(config):
        layer = config.get("transformer_layer_config") or {}
        ids = config.get("aux_hidden_state_layer_ids") or []
        reading.block_size, reading.mask_token = int(need(config, "block_size", 8)), config.get("mask_token_id")
        free = bool(config.get("sliding_window_non_causal", False))
        verifier = (config.get("speculators_config") or {}).get("verifier") or {}
        if not verifier.get("name_or_path"):
            reading.refuse("verifier", "no verifier is named, so embedding and head stay empty")
    else:
        layer, dflash = config, config.get("dflash_config") or {}
        depth = config.get("num_target_layers")
        taps = dflash.get("target_layer_ids") or []
        ids = [int(tap) + 1 for tap in taps if int(tap) + 1 != depth]
        if len(ids) != len(taps):
            reading.refuse("last-layer", "its converter drops a tap of the target's last layer, and fc no longer fits")
        size = config.get("block_size") or dflash.get("block_size")
        if size is None:
            reading.refuse("block-size", "its converter finds no block_size")
        reading.block_size, reading.mask_token, free = int(size or 0), dflash.get("mask_token_id"), False
        reading.notes.append(("layout", "z-lab's layout is converted first; it must be given the verifier"))
    if not ids and not reading.refusals:
        reading.refuse("taps", "no taps are named")
    if reading.mask_token is None:
        reading.refuse("mask-token", "mask_token_id is missing")
    _transformers_layers(layer, reading)
    types, window = _types(layer), _transformers_window(layer)
    if SLIDING in types and window is None:
        reading.refuse("sliding-window", "sliding layers without a window: its mask subtracts none")
    reading.states = tuple(int(number) for number in ids)
    reading.layers = tuple((window if kind == SLIDING else None, kind == SLIDING and not free) for kind in types)
    reading.window_from_anchor = SLIDING in types
    _rope(layer, reading)
    return reading


def need(config: dict[str, Any], name: str, default: Any = None) -> Any:
    """A field that an engine computes with; `default` where it is left out.

    Raises:
        FieldMissing: it is null, or left out without a default.
    """
    value = config.get(name, default)
    if value is None:
        raise FieldMissing(f"{name} is {'null' if name in config else 'missing'}")
    return value


READERS: dict[str, Callable[[dict[str, Any]], Reading]] = {
    "zlab": read_as_zlab,
    "sglang": read_as_sglang,
    "vllm": read_as_vllm,
    "speculators": read_as_speculators,
}


def differences(reading: Reading, meant: Reading) -> list[tuple[str, str]]:
    """(rule, text) of everything in which an engine would not decode with the drafter that was trained."""
    found: list[tuple[str, str]] = []

    def differs(rule: str, text: str) -> None:
        found.append((rule, text))

    if reading.states != meant.states:
        differs("taps", f"taps hidden states {list(reading.states)} instead of {list(meant.states)}")
    pairs = list(zip(reading.layers, meant.layers, strict=False))
    windows = [index for index, (there, here) in enumerate(pairs) if there[0] != here[0]]
    if windows:
        there, here = pairs[windows[0]]
        differs("window", f"layers {windows}: {there[0] or 'no window'} instead of {here[0] or 'no window'}")
    causal = [index for index, (there, here) in enumerate(pairs) if there[1] != here[1]]
    if causal:
        words = ("bidirectional", "causal")
        there, here = pairs[causal[0]]
        differs("causality", f"layers {causal}: {words[there[1]]} instead of {words[here[1]]}")
    if reading.window_from_anchor and any(window for window, _ in meant.layers):
        differs("window-rule", "the window is counted from the anchor for every slot, not from the slot's own position")
    compared: list[tuple[str, Any, Any]] = [
        ("block-size", reading.block_size, meant.block_size),
        ("mask-token", reading.mask_token, meant.mask_token),
        ("rope-theta", reading.theta, meant.theta),
        ("rope-type", reading.rope_type, meant.rope_type),
        ("partial-rotary", reading.rotary_share, meant.rotary_share),
        ("embedding-scale", reading.embedding_factor, meant.embedding_factor),
    ]
    for rule, theirs, ours in compared:
        if theirs != ours and not (rule == "block-size" and theirs is None):
            differs(rule, f"{_WORDS[rule]} {theirs} instead of {ours}")
    if reading.interleaved:
        differs("rope-layout", "rotates neighbouring pairs instead of halves (is_neox_style is false)")
    if reading.logit_factor != meant.logit_factor:
        differs("logit-factor", f"logits times {reading.logit_factor:g} instead of {meant.logit_factor:g}; {_GREEDY}")
    if reading.logit_cap != meant.logit_cap:
        differs("logit-softcap", f"logits capped at {reading.logit_cap} instead of {meant.logit_cap}; {_GREEDY}")
    return found


_GREEDY = "greedy drafts are the same, sampled ones are not"
_WORDS = {
    "block-size": "block size",
    "mask-token": "mask token",
    "rope-theta": "θ",
    "rope-type": "rope type",
    "partial-rotary": "rotates a share of the head of",
    "embedding-scale": "embedding rows times",
}


def _both(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of both places; those of `dflash_config` win, null as well."""
    return {**config, **(config.get("dflash_config") or {})}


def _spaced(depth: int, count: int) -> tuple[int, ...]:
    """Taps by the published rule, for configs that name none."""
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + index * (depth - 4) / (count - 1)) for index in range(count))


def _types(config: dict[str, Any]) -> list[str]:
    """Layer types as `Qwen3Config` fills them in."""
    layers = int(need(config, "num_hidden_layers", 32))
    if config.get("layer_types"):
        return list(config["layer_types"])
    first = int(need(config, "max_window_layers", 28)) if _transformers_window(config) is not None else layers
    return [SLIDING if index >= first else "full_attention" for index in range(layers)]


def _transformers_window(config: dict[str, Any]) -> int | None:
    """`sliding_window` as `Qwen3Config` keeps it: none unless `use_sliding_window`, 4096 unless given."""
    if not config.get("use_sliding_window", False):
        return None
    window = config.get("sliding_window", 4096)
    return None if window is None else int(window)


def _transformers_layers(config: dict[str, Any], reading: Reading) -> None:
    for name in _NEVER_NULL:
        if name in config:
            need(config, name)
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if types and layers is not None and len(types) != int(layers):
        reading.refuse("layer-types", f"{len(types)} layer_types for {layers} layers, which transformers refuses")


def _named_class(config: dict[str, Any], reading: Reading) -> None:
    names = config.get("architectures") or []
    if "DFlashDraftModel" not in names:
        reading.refuse("architecture", f"architectures {names} names no class that it knows as a drafter")
    if config.get("model_type") != "qwen3":
        reading.refuse("model-type", f"model_type {config.get('model_type')!r}: the config is read as another model's")


def _rope(config: dict[str, Any], reading: Reading, default: float = 10000.0) -> None:
    """θ and kind as transformers gathers them: the inner fields first."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    gathered = {**config, **rope}
    reading.theta = float(need(gathered, "rope_theta", default))
    reading.rope_type = str(rope.get("rope_type", rope.get("type", "default")))
    share = float(need(gathered, "partial_rotary_factor", 1.0))
    # Qwen3's own rotary embedding ignores the factor; vLLM's applies it. SGLang's reader sets it back.
    reading.rotary_share = share if default == 1e6 else 1.0
