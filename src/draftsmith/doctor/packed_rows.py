"""How packed rows will run through the target on a GPU: a variable-length kernel, a mask of S², or separate documents.

Decided as training decides it (`target.proof.choose_packing`), on a tiny model of the target's class with heads of the
target's size. A slower way is a warning with the reason; where the kernel should run and is refused, it is bad.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from draftsmith.doctor.finding import Finding, Level
from draftsmith.doctor.tiny import current, small_target
from draftsmith.errors import first_line
from draftsmith.target import packed
from draftsmith.target.geometry import FULL, RECURRENT, SLIDING, layer_kinds
from draftsmith.target.proof import choose_packing

KERNEL = "torch's variable-length kernel (varlen_attn)"
_MASKED = "rows run with a mask of S²"
_SEPARATE = "rows run as separate documents"
_SHORTER = "lower rows.length: the mask grows with its square"


def check(
    text: Any, head_dim: int, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False
) -> Iterator[Finding]:
    """One finding, and where a mask is used one more about the kernel that takes it. Nothing on a CPU.

    Args:
        text: the target's text configuration.
        head_dim: of its attention.
        device: where the target runs.
        dtype: of its weights and features.
        trust_remote_code: whether code that comes with the target may run.
    """
    if device.type != "cuda":
        return
    foreign = sorted(set(layer_kinds(text)) - {FULL, SLIDING})
    if foreign not in ([], [RECURRENT]):
        why = f"it has {', '.join(foreign)} layers, which no mask can separate"
        yield Finding("target packing", "warn", f"{_SEPARATE}: {why}")
        return
    slower = _SEPARATE if foreign else _MASKED
    refused = False
    why = packed.missing(device, dtype, head_dim)
    implementation = str(getattr(text, "_attn_implementation", None) or "sdpa")
    if not why:
        try:
            with current(device):
                target = small_target(text, device, dtype, trust_remote_code)
                implementation = str(target.model.config._attn_implementation)
                choose_packing(target)
        except Exception as error:  # whatever a model of any kind raises
            said = f"not tried on a tiny {text.model_type}: {first_line(error)}"
            mend = "the first lines of a run say how its rows run"
            yield Finding("target packing", "unknown", f"{KERNEL} or {slower}: {said}", mend)
            return
        if target.packing == "pieces":
            yield Finding("target packing", "ok", f"rows run in pieces through {KERNEL}: {target.packing_reason}")
            return
        slower = _MASKED if target.packing == "mask" else _SEPARATE
        why = target.packing_reason
        refused = implementation == "sdpa" and not foreign
    if implementation != "sdpa":
        why = f"its attention is {implementation}, not sdpa; {why}"
    mend = "target.dtype=bfloat16" if dtype == torch.float32 else _SHORTER if slower == _MASKED else ""
    level: Level = "bad" if refused else "warn"  # a kernel that should run, or none for such a target
    yield Finding("target packing", level, f"{slower}, not through {KERNEL}: {why}", mend)
    if slower == _MASKED and implementation == "sdpa":
        yield masked_kernel(head_dim, device, dtype)


def masked_kernel(head_dim: int, device: torch.device, dtype: torch.dtype) -> Finding:
    """Which kernel scaled_dot_product_attention takes at this head size with a mask."""
    with current(device):
        query = torch.randn(1, 2, 256, head_dim, device=device, dtype=dtype)
        mask = torch.ones(256, 256, dtype=torch.bool, device=device).tril()
        torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
            torch.cuda.synchronize(device)
    names = {event.name for event in profiler.events() or []}
    fused = sorted(name for name in names if re.search(r"flash|fmha|efficient|cudnn_generated", name, re.IGNORECASE))
    if fused:
        return Finding("target attention", "ok", f"head size {head_dim}, masked: {fused[0][:80]}")
    text = f"head size {head_dim}, masked: no fused kernel was seen, all scores are computed"
    return Finding("target attention", "bad", text, "unset what disables SDPA kernels (torch.backends.cuda.*_sdp)")
