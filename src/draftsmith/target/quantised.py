"""Targets whose weights come quantised: fp8, AWQ, GPTQ and what else transformers loads by a `quantization_config`.

They run as they are: nothing is cast, and their layers stay uncompiled, because their kernels are not made to be part
of a graph. What the drafter needs plain is the output head and the embedding; quantisers leave both alone by default,
and a target whose head is quantised as well is refused. Where the device has no kernels for fp8, transformers unpacks
the weights while loading; then the target is a plain one, and a line says so.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError

# What transformers needs beside itself and accelerate, by method; names as pip knows them.
PACKAGES = {
    "fp8": ("kernels",),
    "fbgemm_fp8": ("kernels",),
    "awq": ("gptqmodel",),
    "gptq": ("optimum", "gptqmodel"),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "torchao": ("torchao",),
    "mxfp4": ("kernels",),
    "hqq": ("hqq",),
    "aqlm": ("aqlm",),
    "auto-round": ("auto-round",),
    "quark": ("amd-quark",),
}


def method_of(hf_config: Any) -> str:
    """By which method weights of this configuration are quantised, as transformers calls it; "" if they are plain."""
    for config in (hf_config, hf_config.get_text_config(decoder=True)):
        found = getattr(config, "quantization_config", None)
        if found is not None:
            method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
            return str(getattr(method, "value", method) or "an unnamed method")
    return ""


def install_line(method: str) -> str:
    """The command that brings what this method needs and this machine lacks; "" if nothing is known to be missing."""
    lacking = [name for name in ("accelerate", *PACKAGES.get(method, ())) if not _installed(name)]
    return f"pip install {' '.join(lacking)}" if lacking else ""


def describe(method: str, model: Any, dtype: torch.dtype) -> tuple[str, str]:
    """(method that still holds, one line for people) of a model that was loaded.

    Raises:
        UserError: embedding or output head came quantised too.
    """
    if not getattr(model, "is_quantized", False) and getattr(model, "hf_quantizer", None) is None:
        return "", f"the target came quantised ({method}); unpacked to {_name(dtype)}: no kernels for it here"
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for what, module in (("output head", head), ("embedding", embedding)):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.element_size() < 2:
            raise UserError(
                f"its {what} is quantised ({method}), and the drafter needs it plain",
                where="target.path",
                fix="use a checkpoint that leaves lm_head and the embedding alone",
            )
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return method, (
        f"the target came quantised ({method}) and runs as it is, uncompiled: {size / 2**30:.2f} GiB of weights, "
        f"hidden states in {_name(embedding.weight.dtype)}"
    )


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
