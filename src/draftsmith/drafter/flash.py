"""FlashAttention-4 behind flex_attention: whether its kernels can run here.

torch hands compiled flex_attention on to them, forward and backward, where the kernel options say BACKEND=FLASH. They
come from the package flash-attn-4 (`flash_attn.cute`), which compiles them for the card at their first use.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

from draftsmith.errors import UserError, first_line

INSTALL = 'pip install --pre "flash-attn-4[cu13]" (on CUDA 12: flash-attn-4)'
TRITON = "leave it at triton"
# Major compute capability. On 10 and 11 its forward wants masks in query tiles of 256 (4.0.0b36), ours are of 128; on
# 12 it has no backward under such masks.
_CARDS = (9,)
_LARGEST_HEAD = 128  # larger ones want key tiles below 128
_MODULE = "flash_attn.cute"
WHERE = "compile.flex_backend"


def check(device: torch.device, head_dim: int, dtype: torch.dtype, where: str = WHERE) -> None:
    """Whether FlashAttention-4 can compute a drafter's attention, as far as can be told without importing it: where it
    keeps what it compiles is decided when it is imported (see `compiled.cache.use`).

    Args:
        device: of the drafter.
        head_dim, dtype: its D, and what it computes in.
        where: it was asked for.

    Raises:
        UserError: it cannot.
    """
    why, fix = _obstacle(device, head_dim, dtype)
    if why:
        raise UserError(f"flash is not possible: {why}", where=where, fix=fix)


def _obstacle(device: torch.device, head_dim: int, dtype: torch.dtype) -> tuple[str, str]:
    if device.type != "cuda":
        return "it needs a GPU", TRITON
    major = torch.cuda.get_device_capability(device)[0]
    if major not in _CARDS:
        return f"it runs on Hopper (compute capability 9.x), and {device} is {major}.x", TRITON
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}", TRITON
    if head_dim > _LARGEST_HEAD or head_dim % 8:
        smaller = f"{TRITON}, or give a new drafter more heads of drafter.head_dim={_LARGEST_HEAD}"
        return f"it takes heads of up to {_LARGEST_HEAD} in multiples of 8, not of {head_dim}", smaller
    try:
        found = importlib.util.find_spec(_MODULE) is not None
    except Exception:  # looking for it imports the package around it, which may be an older flash-attn
        found = False
    return ("", "") if found else ("the package flash-attn-4 is not installed", INSTALL)


def load(where: str = WHERE) -> None:
    """Imports the kernels' package.

    Args:
        where: it was asked for.

    Raises:
        UserError: that fails; torch would say so from within a compile.
    """
    try:
        importlib.import_module(f"{_MODULE}.interface")
    except Exception as error:  # a package that compiles at import can fail in any way
        what = f"flash-attn-4 cannot be imported: {type(error).__name__}: {first_line(error)}"
        raise UserError(what, where=where, fix=f"{INSTALL}; or {TRITON}") from error
