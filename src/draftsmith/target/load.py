"""Loads a target: any Hugging Face causal LM, or a GGUF file, complete or not at all.

Order: locate → configuration → tokenizer → weights → loading report → device → proofs (`proof`). Loading is serialised
between threads. Cost: the weights once in main memory; a GGUF file also seconds of reading, and it is always unpacked.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from draftsmith.config import TargetConfig
from draftsmith.errors import UserError
from draftsmith.target import gguf_model, gguf_tokenizer, quantised
from draftsmith.target.forward import Target
from draftsmith.target.geometry import geometry_of, layer_kinds
from draftsmith.target.gguf_header import read_header
from draftsmith.target.proof import choose_packing, prove_head
from draftsmith.target.source import Source, check_weight_files, explained, loading, locate, read_config
from draftsmith.target.span import spread


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer with its chat template; of a GGUF file, exactly as the file states it.

    Raises:
        UserError: the target or its tokenizer does not exist or cannot be read.
    """
    source = locate(config)
    with loading, explained(source):
        path = source.gguf_path()
        if path is not None and not (source.local and source.has_tokenizer):
            return _gguf_tokenizer(source, path)
        if source.local and not source.has_tokenizer:
            fix = "save the model's tokenizer there, e.g. tokenizer.json and tokenizer_config.json"
            raise UserError("holds no tokenizer", where=source.place, fix=fix)
        return AutoTokenizer.from_pretrained(source.place, trust_remote_code=config.trust_remote_code)


def _gguf_tokenizer(source: Source, path: str) -> Any:
    """From the header alone where its kind is known, else transformers' conversion with the header's special tokens."""
    header = read_header(path)
    if "tokenizer.ggml.tokens" not in header.values:
        raise UserError("holds no tokenizer", where=source.name, fix="put the model's tokenizer.json beside the file")
    tokenizer = gguf_tokenizer.build_tokenizer(header)
    if tokenizer is not None:
        return tokenizer
    return gguf_tokenizer.mend_tokenizer(
        AutoTokenizer.from_pretrained(source.place, gguf_file=source.gguf_file), header
    )


def load_target(
    config: TargetConfig, device: torch.device | str, dtype: torch.dtype, span: Sequence[torch.device] = ()
) -> Target:
    """A frozen target on `device`, with everything proved that training relies on.

    Threads may call this at the same time; they take turns.

    Args:
        config: which, and in what precision.
        device: where rows enter.
        dtype: of weights and features.
        span: devices that its layers are shared out over, `device` first; fewer than two: all are on `device`.

    Raises:
        UserError: the target does not exist, lacks configuration, weights or tokenizer, its weights did not all load,
            or it is a kind of model whose logits this project does not know how to compute.
    """
    source = locate(config)
    with loading:
        check_weight_files(source)
        hf_config = read_config(config)
        geometry = geometry_of(hf_config, where=source.name)
        tokenizer = load_tokenizer(config)
        method = quantised.method_of(hf_config)
        model = _load_model(
            source, hf_config, config.trust_remote_code, dtype, torch.device(device) if method else None
        )
        foreign, remark = quantised.describe(method, model, dtype) if method else ("", "")
        if foreign and len(span) > 1:
            raise UserError(
                "came quantised, and such a target cannot span devices", where=source.name, fix="name one device"
            )
        model.requires_grad_(False)
        model.eval()
        if not foreign and len(span) < 2:
            model.to(device)
        target = Target(
            model,
            tokenizer,
            geometry,
            layer_kinds(hf_config),
            _stop_ids(getattr(model, "generation_config", None), tokenizer),
        )
        rows = model.get_input_embeddings().weight.shape[0]
        if rows != geometry.vocab_rows:
            what = f"has {rows} embedding rows, but its configuration says {geometry.vocab_rows}"
            raise UserError(what, where=source.name, fix="correct vocab_size in its config.json")
        target.foreign, target.remarks = foreign, (remark,) if remark else ()
        if len(span) > 1:
            spread(model, list(target.layers), span)
            target.remarks += (f"the target's layers are shared out over {', '.join(map(str, span))}",)
        with explained(source, quantised.install_line(method)) if foreign else contextlib.nullcontext():
            prove_head(target, source.name)  # the first forward: kernels of a format may only be missed now
            choose_packing(target)
    return target


def shallow_target(config: TargetConfig, device: torch.device | str, dtype: torch.dtype) -> Target:
    """The target's kinds of layers with random weights, as few layers as show every kind: what compiling needs to see.

    Its tokenizer is None. Cost: an embedding and a layer or two, no weights read.

    Raises:
        UserError: the target's configuration cannot be read.
    """
    source = locate(config)
    with loading, explained(source), _Quiet():
        text = copy.deepcopy(read_config(config)).get_text_config(decoder=True)
        kinds = layer_kinds(text)
        depth = 1 + max(kinds.index(kind) for kind in set(kinds))
        text.num_hidden_layers = depth
        if getattr(text, "layer_types", None) is not None:
            text.layer_types = list(kinds[:depth])
        foreign = quantised.method_of(read_config(config))
        if getattr(text, "quantization_config", None) is not None:
            del text.quantization_config
        with torch.device(device):  # where random numbers are drawn fast
            model: Any = AutoModelForCausalLM.from_config(text, dtype=dtype, trust_remote_code=config.trust_remote_code)
        model.requires_grad_(False)
        model.eval()
        model.to(device)
        target = Target(model, None, geometry_of(text, where=source.name), kinds[:depth], ())
        target.foreign = foreign
        choose_packing(target)
    return target


def _load_model(
    source: Source, hf_config: Any, trust_remote_code: bool, dtype: torch.dtype, place: torch.device | None
) -> Any:
    """The transformers model, refused unless every weight came from the files; on the CPU, or straight at `place`, as
    quantised weights want it."""
    if trust_remote_code or type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        family: Any = AutoModelForCausalLM
    else:
        family = AutoModelForImageTextToText
    path = source.gguf_path()
    with explained(source, quantised.install_line(quantised.method_of(hf_config))), _Quiet():
        if path is not None and gguf_model.is_dense(header := read_header(path)):
            kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
            with torch.device("meta"):
                names = kind(hf_config)
            weights = gguf_model.read_weights(header, names, dtype)
            model, report = kind.from_pretrained(
                None, config=hf_config, state_dict=weights, dtype=dtype, output_loading_info=True
            )
        else:
            model, report = family.from_pretrained(
                source.place,
                config=hf_config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **({"gguf_file": source.gguf_file} if path is not None else {}),
                **({"device_map": {"": place}} if place is not None else {}),
            )
    _refuse_incomplete(source, report)
    return model


def _refuse_incomplete(source: Source, report: dict[str, Any]) -> None:
    """Raises unless all weights were loaded; tied weights and files with more than the model needs are fine."""
    problems = sorted(str(key) for key in report["missing_keys"])
    problems += sorted(str(key[0] if isinstance(key, tuple) else key) for key in report["mismatched_keys"])
    if problems:
        shown = ", ".join(problems[:3]) + (", …" if len(problems) > 3 else "")
        what = f"{len(problems)} weights did not load: {shown}"
        raise UserError(what, where=source.name, fix="fetch the model again; its files are incomplete")


def _stop_ids(generation: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's end token and those that the generation settings add."""
    configured = getattr(generation, "eos_token_id", None)
    ids = set(configured) if isinstance(configured, list | tuple) else {configured}
    return tuple(sorted(int(row) for row in ids | {tokenizer.eos_token_id} if row is not None))


def read_stop_ids(config: TargetConfig, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer of the target, as `Target.stop_ids`, without its weights.

    Raises:
        UserError: the target's configuration cannot be read.
    """
    source = locate(config)
    if source.gguf_path() is not None:
        return _stop_ids(GenerationConfig.from_model_config(read_config(config)), tokenizer)
    with loading, explained(source), _Quiet():
        try:
            generation = GenerationConfig.from_pretrained(source.place)
        except OSError:  # has none: transformers then takes it from the model's configuration
            generation = GenerationConfig.from_model_config(read_config(config))
    return _stop_ids(generation, tokenizer)


class _Quiet:
    """Silences transformers' loading report and progress bars: `_refuse_incomplete` says what matters."""

    def __enter__(self) -> None:
        self._level = transformers_logging.get_verbosity()
        self._bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        transformers_logging.set_verbosity(self._level)
        if self._bars:
            transformers_logging.enable_progress_bar()
