"""FlashAttention-4 behind flex_attention: whether its kernels can run here.

torch hands compiled flex_attention on to them, forward and backward, where the kernel options say BACKEND=FLASH. They
come from the package flash-attn-4 (`flash_attn.cute`), which compiles them for the card at their first use.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

from draftsmith.errors import UserError, first_line

INSTALL = 'pip install --pre "flash-attn-4[cu13]" (on CUDA 12: flash-attn-4), or leave compile.flex_backend at triton'
_CARDS = (9, 10, 11)  # major compute capabilities with a backward under masks in tiles
_LARGEST_HEAD = 128
_MODULE = "flash_attn.cute"


def missing(device: torch.device, head_dim: int, dtype: torch.dtype) -> str:
    """Why FlashAttention-4 cannot compute a drafter's attention; "" if nothing is known to be in the way.

    The package is looked for, not imported: where it keeps what it compiles is decided when it is (see
    `compiled.cache.use`).
    """
    if device.type != "cuda":
        return "it needs a GPU"
    major = torch.cuda.get_device_capability(device)[0]
    if major not in _CARDS:
        return f"it has no backward with masks for cards of compute capability {major}.x"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    if head_dim > _LARGEST_HEAD or head_dim % 8:
        return f"it takes heads of up to {_LARGEST_HEAD} in multiples of 8, not of {head_dim}"
    try:
        found = importlib.util.find_spec(_MODULE) is not None
    except ImportError:
        found = False
    return "" if found else "the package flash-attn-4 is not installed"


def load() -> None:
    """Imports the kernels' package.

    Raises:
        UserError: that fails; torch would say so from within a compile.
    """
    try:
        importlib.import_module(f"{_MODULE}.interface")
    except Exception as error:  # a package that compiles at import can fail in any way
        what = f"flash-attn-4 cannot be imported: {type(error).__name__}: {first_line(error)}"
        raise UserError(what, where="compile.flex_backend", fix=INSTALL) from error
