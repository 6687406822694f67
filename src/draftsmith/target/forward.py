"""One row through the frozen target: features of the tapped layers, and nothing after the last of them.

Hooks on the decoder layers keep the outputs of the tapped ones; the hook of the last tap leaves the forward by a
private exception, so the layers behind it do not run and no logits are made. A layer's hook sees the residual stream as
the next layer does; transformers' own last `hidden_states` entry has the final norm applied, a tap of the last layer
has not.

Packed rows run in one of three ways, decided once per target by `proof.choose_packing`:

- "pieces": one forward over the S tokens with positions that restart in every document and a variable-length attention
  kernel that is told where documents begin (`packed`). CUDA in half precision.
- "mask": one forward over the S tokens with positions that restart in every document and one explicit mask per kind of
  attention layer. transformers itself can find the documents from restarting positions, but only without a cache and
  without a mask, and it asks the device on every call (a host sync); and a single 4-D mask is taken as it is by *every*
  layer, so sliding layers would lose their window. Given one mask per layer kind, both problems are gone. Cost: S² mask
  entries per kind, made on the device; attention scores of other documents are computed and discarded.
- "separate": one forward per document, for targets whose layers carry state from token to token (gated delta nets,
  state-space layers) or mask in ways of their own. Exact by construction; many short documents make many launches.

Padding gets no features worth reading: finite garbage with "pieces" and "mask", zeros with "separate".

A compiled target runs each decoder layer of `features` through one region (`compile_layers`): equal layers are equal
code, so there is one graph for each kind of layer, and hooks and early stop stay outside of it. Everything else that
uses the model (decoding, proofs) runs as it is.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.target import packed
from draftsmith.target.geometry import SLIDING, TargetGeometry
from draftsmith.target.head import TargetHead
from draftsmith.target.taps import check_taps


@dataclass(frozen=True)
class Features:
    """What the drafter learns from, of one row.

    Attributes:
        taps_SF: [S, n·H] outputs of the n tapped layers side by side, in the target's dtype and on its device.
        last_SH: [S, H] hidden states after the final norm, ready for the head; None unless asked for.
    """

    taps_SF: Tensor
    last_SH: Tensor | None = None


class _StopForwardError(Exception):
    """Leaves the forward after the last tap; never seen outside this module."""


class LayerForward(functools.partial):
    """What stands in for the `forward` of a compiled target's layers; by its type a copy of the model knows it."""


class _Recording(threading.local):
    """What the running forward of this thread wants from the layers; empty outside of one."""

    running: bool = False
    eager: bool = False
    wanted: frozenset[int] = frozenset()
    stop_after: int = -1
    outputs: dict[int, Tensor]


class Target:
    """A frozen causal LM on one device. Several threads may call `features` at the same time.

    Attributes:
        model: the transformers model, in eval mode, no parameter requires a gradient.
        decoder: its text decoder: embedding, layers, final norm.
        layers: the decoder's layers.
        kinds: what each layer attends to, by transformers' names.
        packing: "pieces", "mask" or "separate"; how packed rows run.
        packing_reason: why, for people.
        stop_ids: tokens that end an answer.
    """

    def __init__(
        self, model: Any, tokenizer: Any, geometry: TargetGeometry, kinds: tuple[str, ...], stop_ids: tuple[int, ...]
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.geometry = geometry
        self.kinds = kinds
        self.stop_ids = stop_ids
        self.decoder = model.get_decoder()
        self.layers = _decoder_layers(self.decoder, geometry.layers)
        self.packing = "separate"
        self.packing_reason = "not decided yet"
        self._layer: Callable[..., Any] | None = None
        self._freed_after = geometry.layers
        self._recording = _Recording()
        for number, layer in enumerate(self.layers):
            layer.register_forward_hook(self._keeper(number))

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    def head(self) -> TargetHead:
        """Embedding and head, sharing the model's tensors."""
        return TargetHead(
            embedding_VH=self.model.get_input_embeddings().weight.detach(),
            head_VH=self.model.get_output_embeddings().weight.detach(),
            softcap=self.geometry.logit_softcap,
            multiplier=self.geometry.logit_multiplier,
            embedding_scale=self.geometry.embedding_scale,
            final_scale_H=self._final_norm_scale(),
        )

    @torch.no_grad()
    def _final_norm_scale(self) -> Tensor | None:
        """Scale [H] by which the final norm multiplies a normalised hidden state; None for a decoder without one.

        Read by sending ones through it, whose RMS is one: norms differ in how they store their weight.
        """
        norm = getattr(self.decoder, "norm", None)
        if norm is None:
            return None
        return norm(torch.ones(self.geometry.hidden_size, dtype=self.dtype, device=self.device)).float().cpu()

    def compile_layers(self, layer: Callable[..., Any]) -> None:
        """From now on `features` runs every decoder layer as `layer(module, *inputs)`, a compiled `run_layer`."""
        if self._layer is None:
            for module in self.layers:
                module.forward = LayerForward(self._run_one, module)  # type: ignore[method-assign]
        self._layer = layer

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Within it, `features` of this thread runs its layers uncompiled."""
        self._recording.eager = True
        try:
            yield
        finally:
            self._recording.eager = False

    def _run_one(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recording = self._recording
        run = run_layer if self._layer is None or recording.eager or not recording.running else self._layer
        return run(module, *args, **kwargs)

    def free_layers_after(self, tap: int) -> None:
        """Gives back the memory of the layers behind `tap`; neither `last_hidden` nor decoding is possible then."""
        for layer in self.layers[tap + 1 :]:
            layer.to("meta")
        self._freed_after = min(self._freed_after, tap + 1)

    @torch.no_grad()  # not inference_mode: the drafter saves features for its backward
    def features(
        self,
        tokens_S: Tensor,
        document_S: Tensor,
        positions_S: Tensor,
        taps: tuple[int, ...],
        last_hidden: bool = False,
    ) -> Features:
        """Features of a packed row.

        Nothing here waits for the device: the row comes from the CPU, where its documents' bounds are known.

        Args:
            tokens_S: int64 on the CPU.
            document_S: int32 on the CPU, index of the document, -1 on padding.
            positions_S: int64 on the CPU, restarting at 0 in every document.
            taps: layers whose outputs are wanted, in the order in which they are laid side by side.
            last_hidden: also run the remaining layers and the final norm.

        Raises:
            UserError: a tap is out of range or named twice.
        """
        check_taps(taps, self.geometry.layers)
        needed = self.geometry.layers if last_hidden else max(taps) + 1
        assert needed <= self._freed_after, "layers that are needed have been freed"
        if self.packing in ("pieces", "mask"):
            return self._features_packed(tokens_S, document_S, positions_S, taps, last_hidden)
        return self._features_separate(tokens_S, document_S, positions_S, taps, last_hidden)

    def _features_packed(
        self, tokens_S: Tensor, document_S: Tensor, positions_S: Tensor, taps: tuple[int, ...], last_hidden: bool
    ) -> Features:
        """All documents in one forward; see the module's docstring."""
        device = self.device
        tokens = tokens_S.to(device, non_blocking=True)[None]
        positions = positions_S.to(device, non_blocking=True)[None]
        more: dict[str, Any] = {}
        if self.packing == "pieces":
            cuts = packed.pieces(document_S).to(device, non_blocking=True)
            torch._dynamo.mark_dynamic(cuts, 0)
            more = {"cu_seq_lens_q": cuts, "max_length_q": tokens_S.numel()}
            # Four dimensions: "prepared already", so that the model neither makes masks nor looks for documents.
            masks = self._by_kind(lambda _window: torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device))
        else:
            masks = self._masks(document_S.to(device, non_blocking=True))
        outputs, last = self._run(tokens, positions, masks, taps, last_hidden, more)
        return Features(torch.cat([outputs[tap][0] for tap in taps], dim=-1), None if last is None else last[0])

    def _features_separate(
        self, tokens_S: Tensor, document_S: Tensor, positions_S: Tensor, taps: tuple[int, ...], last_hidden: bool
    ) -> Features:
        """One plain forward per document, written to its place in the row."""
        size, hidden = tokens_S.numel(), self.geometry.hidden_size
        taps_SF = torch.zeros(size, len(taps) * hidden, dtype=self.dtype, device=self.device)
        last_SH = torch.zeros(size, hidden, dtype=self.dtype, device=self.device) if last_hidden else None
        tokens = tokens_S.to(self.device, non_blocking=True)[None]
        positions = positions_S.to(self.device, non_blocking=True)[None]
        for start, end in document_spans(document_S):
            outputs, last = self._run(tokens[:, start:end], positions[:, start:end], None, taps, last_hidden)
            torch.cat([outputs[tap][0] for tap in taps], dim=-1, out=taps_SF[start:end])
            if last_SH is not None:
                assert last is not None
                last_SH[start:end] = last[0]
        return Features(taps_SF, last_SH)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Any,
        taps: tuple[int, ...],
        last_hidden: bool,
        more: dict[str, Any] | None = None,
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        """Outputs [1, L, H] of the tapped layers, and the final hidden states [1, L, H] if wanted."""
        recording = self._recording
        recording.running, recording.wanted, recording.outputs = True, frozenset(taps), {}
        recording.stop_after = -1 if last_hidden else max(taps)
        last = None
        try:
            result = self.decoder(
                input_ids=tokens,
                attention_mask=masks,
                position_ids=positions,
                use_cache=False,
                return_dict=True,
                **(more or {}),
            )
            last = result.last_hidden_state
        except _StopForwardError:
            pass
        finally:
            outputs, recording.outputs, recording.wanted = recording.outputs, {}, frozenset()
            recording.running = False
        assert (last is None) != last_hidden, "the forward ended on the wrong side of the last tap"
        return outputs, last

    def _keeper(self, number: int) -> Any:
        """Forward hook of layer `number`."""

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            recording = self._recording
            if number not in recording.wanted:
                return
            recording.outputs[number] = output[0] if isinstance(output, tuple) else output
            if number == recording.stop_after:
                raise _StopForwardError

        return keep

    def _masks(self, document_S: Tensor) -> Any:
        """Explicit masks in the form the decoder takes."""
        config = self.decoder.config
        return self._by_kind(
            lambda window: _attention_form(document_mask(document_S, window), config, self.dtype),
        )

    def _by_kind(self, make: Callable[[int | None], Tensor]) -> Any:
        """What `make` gives for a window, by layer kind if the decoder's configuration names kinds, else one."""
        config = self.decoder.config
        by_kind = {kind: make(config.sliding_window if kind == SLIDING else None) for kind in sorted(set(self.kinds))}
        return by_kind if getattr(config, "layer_types", None) is not None else by_kind[self.kinds[0]]


def run_layer(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """One decoder layer by its class's forward; what a region compiles."""
    return type(module).forward(module, *args, **kwargs)


def document_mask(document_S: Tensor, window: int | None) -> Tensor:
    """bool [S, S]: query i sees key j iff j ≤ i, both are in one document, and, with a window W, i - j < W.

    Within a document, distance in the row is distance in positions. Padding (-1) sees padding, so no query is blind.
    """
    index_S = torch.arange(document_S.numel(), dtype=torch.int32, device=document_S.device)
    distance = index_S[:, None] - index_S[None, :]
    visible = (distance >= 0) & (document_S[:, None] == document_S[None, :])
    return visible if window is None else visible & (distance < window)


def _attention_form(visible: Tensor, config: Any, dtype: torch.dtype) -> Tensor:
    """[1, 1, S, S] as the attention code reads it: eager attention *adds* its mask, so a bool one would be no mask."""
    if config._attn_implementation in ("sdpa", packed.NAME):
        return visible[None, None]
    blocked = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return blocked.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


def document_spans(document_S: Tensor) -> list[tuple[int, int]]:
    """(start, end) of every document of a row on the CPU, padding left out."""
    index = document_S.tolist()
    bounds = [0, *(i for i in range(1, len(index)) if index[i] != index[i - 1]), len(index)]
    return [(start, end) for start, end in itertools.pairwise(bounds) if index[start] >= 0]


def _decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    """The decoder's list of `count` layers, under whatever name the model gives it.

    Raises:
        UserError: there is none.
    """
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise UserError(
        f"{type(decoder).__name__} has no list of {count} layers", where="target.path", fix="use a decoder-only model"
    )
