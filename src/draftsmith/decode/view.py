"""A private view of the target's model for one decoding: its weights and hooks, but taps and attention of our own.

Other threads may be running the same model while we decode. So a `View` copies the module tree without its
tensors (a few milliseconds): parameters and buffers are the very same objects, and the configuration is a copy in which
the attention function can be changed. Hooks come along, in lists of the view's own: where a target spans devices, those
in front of its layers bring the row there. Only those by which `Target.features` takes its taps stay behind.

That function, `grouped_attention`, exists because transformers repeats K and V over the query heads that share them
whenever there is a mask. In decoding that copy of the whole cache, layer by layer and step by step, costs more than the
attention. Query heads that share a K/V head can as well stand below each other as further query rows: nothing is
copied, and the mask is broadcast over them.

On GPUs cuDNN's attention is kept out as long as a view is open: it builds a new plan for every new shape, and in
decoding every step has one.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from draftsmith.target import packed
from draftsmith.target.forward import LayerForward, TapHook

NAME = "draftsmith_grouped"
# Where torch keeps a module's hooks around its forward, by number, and what it knows of them.
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)
# Longer queries (prefill) are computed, not copied: there the usual kernels are better.
MOST_QUERIES = 64


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' interface.

    Args:
        query: [rows, heads, L, D]; key, value: [rows, kv_heads, columns, D].
        attention_mask: [rows or 1, 1, L, columns], from `decoding_mask`, or None if causality needs none.

    Returns:
        [rows, L, heads, D], and no weights.
    """
    rows, heads, length, size = query.shape
    kv_heads = key.shape[1]
    plain = kwargs.get("position_bias") is None and (length == 1 or attention_mask is not None)
    if heads == kv_heads or length > MOST_QUERIES or not plain:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    group = heads // kv_heads
    stacked = query.reshape(rows, kv_heads, group * length, size)
    if attention_mask is not None and length > 1:
        attention_mask = attention_mask.repeat(1, 1, group, 1)
    attended = F.scaled_dot_product_attention(stacked, key, value, attn_mask=attention_mask, scale=scaling)
    return attended.reshape(rows, heads, length, size).transpose(1, 2).contiguous(), None


def decoding_mask(*args: Any, q_length: int, dtype: torch.dtype, **kwargs: Any) -> Tensor | None:
    """transformers' mask, for short queries as numbers to be added: else every layer turns it into them anew."""
    visible = sdpa_mask(*args, q_length=q_length, dtype=dtype, **kwargs)
    if visible is None or q_length > MOST_QUERIES:
        return visible
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, decoding_mask)


class View:
    """The target's model as one decoding sees it.

    Args:
        target: with `model` and `layers`.
        taps: layers whose outputs are kept.

    Attributes:
        model: call it as the Hugging Face model that it is.
    """

    def __init__(self, target: Any, taps: tuple[int, ...] = ()) -> None:
        twins = _twins(target.model)
        self.model: Any = twins[id(target.model)]
        self._taps, self._device = taps, target.device
        self._outputs = _Outputs()
        self._handles = [twins[id(target.layers[tap])].register_forward_hook(self._keeper(tap)) for tap in taps]

    def __enter__(self) -> View:
        _cudnn_ban.enter()
        return self

    def __exit__(self, *failure: object) -> None:
        _cudnn_ban.leave()
        for handle in self._handles:
            handle.remove()

    def features(self, count: int, first: int = 0) -> Tensor:
        """[count, taps·H] of `count` tokens of this thread's newest forward, from its token `first` on; on the target's
        device, wherever the tapped layers are."""
        outputs = self._outputs.by_tap
        return torch.cat([outputs[tap][0, first : first + count].to(self._device) for tap in self._taps], dim=-1)

    def _keeper(self, tap: int) -> Any:
        """Forward hook of layer `tap`."""

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self._outputs.by_tap[tap] = output[0] if isinstance(output, tuple) else output

        return keep


class _Outputs(threading.local):
    """What the layers gave in this thread's forward: where a model is used as it is, others' come by here as well."""

    def __init__(self) -> None:
        self.by_tap: dict[int, Tensor] = {}


class _CudnnBan:
    """cuDNN attention off while anyone is inside, then as it was. The switch belongs to the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = False

    def enter(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


_cudnn_ban = _CudnnBan()


def _twins(model: Any) -> dict[int, Any]:
    """Module of the view by the id of the model's; every module itself where the tree is not plain enough to copy.

    Not plain are modules whose `forward` was replaced on the instance, as for models spread over devices; a compiled
    target's layers are plain, and the view's are uncompiled.
    """
    if any(not isinstance(vars(module).get("forward"), LayerForward | None) for module in model.modules()):
        return {id(module): module for module in model.modules()}
    configs: dict[int, Any] = {}
    copy.deepcopy(model.config, configs)
    twins: dict[int, Any] = {}

    def twin(module: nn.Module) -> nn.Module:
        if id(module) not in twins:
            new = twins[id(module)] = copy.copy(module)
            new._modules = {name: child and twin(child) for name, child in module._modules.items()}
            inside = vars(new)
            mine = {number for number, hook in module._forward_hooks.copy().items() if isinstance(hook, TapHook)}
            for name in _HOOKS:
                inside[name] = OrderedDict((n, hook) for n, hook in inside[name].copy().items() if n not in mine)
            inside.pop("forward", None)
            if "config" in inside:
                inside["config"] = configs.get(id(inside["config"]), inside["config"])
        return twins[id(module)]

    view: Any = twin(model)
    if model.config._attn_implementation in ("sdpa", packed.NAME):
        view.config._attn_implementation = NAME
    return twins
