"""How many bytes a target's weights take, before any of them is read: its module tree on no device at all.

Counts what the model is made of (experts, gated delta nets, a vision tower), not what a formula says of a dense one.
Cost: a tenth to a third of a second once for each target; nothing is allocated.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from draftsmith.config import TargetConfig
from draftsmith.target import quantised
from draftsmith.target.forward import decoder_layers
from draftsmith.target.source import explained, loading, locate, read_config


@dataclass(frozen=True)
class Weights:
    """Bytes of a target's weights.

    Attributes:
        layers: of each decoder layer.
        rest: of everything else: embedding, head, norms, towers of other kinds.
    """

    layers: tuple[int, ...]
    rest: int

    def first(self, count: int) -> int:
        """Of the first layers."""
        return sum(self.layers[:count])


def count_weights(config: TargetConfig, dtype: torch.dtype) -> Weights:
    """Bytes of a target in a dtype; of a local one that comes quantised, those of its files.

    Raises:
        UserError: the target's configuration cannot be read, or is of no model that transformers builds.
    """
    return _count(config.path, config.gguf_file, config.trust_remote_code, dtype.itemsize)


@functools.lru_cache(maxsize=32)
def _count(path: str, gguf_file: str | None, trust_remote_code: bool, size: int) -> Weights:
    config = TargetConfig(path=path, gguf_file=gguf_file, trust_remote_code=trust_remote_code)  # type: ignore[call-arg]
    source = locate(config)
    with loading, explained(source):
        hf_config = read_config(config)
        causal = trust_remote_code or type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING
        family = AutoModelForCausalLM if causal else AutoModelForImageTextToText
        method = quantised.method_of(hf_config)
        if hasattr(hf_config, "quantization_config"):
            del hf_config.quantization_config
        with torch.device("meta"):
            model = family.from_config(hf_config, trust_remote_code=trust_remote_code)
    text = hf_config.get_text_config(decoder=True)
    layers = decoder_layers(model.get_decoder(), text.num_hidden_layers)
    numbers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    rest = (sum(parameter.numel() for parameter in model.parameters()) - sum(numbers)) * size
    files = sum(file.stat().st_size for file in Path(source.place).glob("*.safetensors")) if source.local else 0
    if method and files > rest:
        return Weights(tuple((files - rest) * number // sum(numbers) for number in numbers), rest)
    return Weights(tuple(number * size for number in numbers), rest)
