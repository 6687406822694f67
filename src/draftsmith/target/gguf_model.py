"""Configuration and weights of a GGUF file.

transformers reads both, but opens the file anew for each and walks its table of names once per submodule: a 135M model
takes a quarter of a minute, nearly all of it bookkeeping. For the dense architectures in `_DENSE` the same steps are
done here once: metadata → configuration through transformers' table, tensor → parameter through gguf's table, and
transformers' own undoing of what the converter did to the values. Other architectures go through transformers.

Cost: the weights once in the target's dtype plus one tensor in float32.

A file whose rope is scaled, or that holds tensors without a place in the model, is refused: transformers ignores both
without a word, and the model would compute something else than the one that is served.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from draftsmith.errors import UserError
from draftsmith.target.gguf_header import Header

# Architectures whose configuration and tensors need nothing beyond the tables, and the model type of each.
_DENSE = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}


def check_supported(header: Header) -> None:
    """Refuses a file whose rope transformers would get wrong.

    Raises:
        UserError: rope scaling in metadata or as a tensor of factors.
    """
    scaling = header.own("rope.scaling.type")
    factors = [tensor.name for tensor in header.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))]
    if scaling not in (None, "none", "") or factors:
        what = f"scales its rope ({factors[0] if factors else scaling}), which transformers does not read from GGUF"
        raise UserError(what, where=header.path, fix="use the model's safetensors instead")


def is_dense(header: Header) -> bool:
    """Whether `read_config` and `read_weights` know this architecture."""
    return header.architecture in _DENSE


def read_config(header: Header) -> Any:
    """transformers' configuration from the metadata of a dense architecture."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    values = header.values
    tokens = values.get("tokenizer.ggml.tokens", [])
    fields: dict[str, Any] = {"vocab_size": len(tokens), "architectures": None}
    table: Any = GGUF_CONFIG_MAPPING
    for key, name in table[header.architecture].items():
        value = header.own(key)
        if name is not None and value is not None:
            fields[name] = value
    # transformers leaves the head dimension of most architectures at their default.
    fields["head_dim"] = header.own("attention.key_length") or fields.get("head_dim")
    if fields["head_dim"] is None:
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        fields[f"{name}_token_id"] = values.get(f"tokenizer.ggml.{key}_token_id")
    fields["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in header.tensors)
    return AutoConfig.for_model(_DENSE[header.architecture], **fields)


def read_weights(header: Header, model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Unpacked weights of a dense architecture under the model's parameter names.

    Args:
        model: the transformers model that they are for; only its names and configuration are read.

    Raises:
        UserError: a tensor has no place in the model, or the file ends before one.
    """
    from gguf import GGMLQuantizationType, dequantize
    from gguf.quants import quant_shape_to_byte_shape
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    names = _parameter_names(header, model)
    strays = [tensor.name for tensor in header.tensors if tensor.name not in names]
    if strays:
        shown = ", ".join(strays[:3]) + (", …" if len(strays) > 3 else "")
        what = f"{len(strays)} tensors have no place in transformers' model: {shown}"
        raise UserError(what, where=header.path, fix="use the model's safetensors instead")
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    data = np.memmap(header.path, mode="r", dtype=np.uint8)
    weights = {}
    for tensor in header.tensors:
        kind = GGMLQuantizationType(tensor.kind)
        *outer, row_bytes = quant_shape_to_byte_shape(tensor.shape, kind)
        end = tensor.offset + int(np.prod(outer, dtype=np.int64)) * row_bytes
        if end > data.size:
            raise UserError(f"ends before {tensor.name}", where=header.path, fix="fetch the file again")
        packed = np.asarray(data[tensor.offset : end]).reshape(*outer, row_bytes)
        values = processor.process(weights=dequantize(packed, kind), name=tensor.name).weights
        weights[names[tensor.name]] = torch.from_numpy(np.array(values)).to(dtype)
    return weights


def _parameter_names(header: Header, model: Any) -> dict[str, str]:
    """llama.cpp's tensor name → the model's parameter name."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
    table = get_tensor_name_map(architecture, model.config.num_hidden_layers)
    names = {}
    for parameter in model.state_dict():
        stem, _, suffix = parameter.rpartition(".")
        found = table.get_name(stem)
        if found is not None:
            names[f"{found}.{suffix}"] = parameter
    return names
