"""One row through the frozen target: features of the tapped layers, and nothing after the last of them.

Hooks on the decoder layers keep the outputs of the tapped ones; the hook of the last tap leaves the forward by a
private exception, so the layers behind it do not run and no logits are made. A layer's hook sees the residual stream as
the next layer does; transformers' own last `hidden_states` entry has the final norm applied, a tap of the last layer
has not.

Packed rows run in one of three ways, decided once per target by `proof.choose_packing`:

- "pieces": one forward over the S tokens with positions that restart in every document and a variable-length attention
  kernel that is told where documents begin (`packed`). CUDA in half precision. Gated-delta-net layers are told the same
  through their library's own index, which their fast kernels read and the reference in plain PyTorch does not.
- "mask": one forward over the S tokens with positions that restart in every document and one explicit mask per kind of
  attention layer. transformers itself can find the documents from restarting positions, but only without a cache and
  without a mask, and it asks the device on every call (a host sync); and a single 4-D mask is taken as it is by *every*
  layer, so sliding layers would lose their window. Given one mask per layer kind, both problems are gone. Cost: S² mask
  entries per kind, made on the device; attention scores of other documents are computed and discarded.
- "separate": documents as rows of a batch of their own, for targets whose layers carry state from token to token (gated
  delta nets, state-space layers) or mask in ways of their own. Documents of like length share a forward: the shorter
  ones are filled up behind their end, which nothing before it can see in a causal model. Filling costs at most a
  quarter of the tokens (`alike`); what is left of the row is not run at all.

Padding gets no features worth reading: finite garbage with "pieces" and "mask", zeros with "separate". Taps are copied
into the row's one tensor as their layers finish, so no second copy of them exists at the end.

A compiled target runs each decoder layer of `features` through one region (`compile_layers`): equal layers are equal
code, so there is one graph for each kind of layer, and hooks and early stop stay outside of it. Everything else that
uses the model (decoding, proofs) runs as it is.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.target import packed
from draftsmith.target.geometry import RECURRENT, SLIDING, TargetGeometry
from draftsmith.target.head import TargetHead
from draftsmith.target.taps import check_taps

FILLING = 0.25  # of the tokens, at most, in a batch of documents of unlike length


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


class TapHook(functools.partial):
    """The forward hook by which `features` takes a layer's output; by its type a copy of the model knows it."""


class _Recording(threading.local):
    """What the running forward of this thread wants from the layers; empty outside of one."""

    running: bool = False
    eager: bool = False
    stop_after: int = -1
    kept: int = 0
    keep: Mapping[int, Callable[[Tensor], None]]

    def __init__(self) -> None:
        self.keep = {}


class Target:
    """A frozen causal LM on one device. Several threads may call `features` at the same time.

    Attributes:
        model: the transformers model, in eval mode, no parameter requires a gradient.
        decoder: its text decoder: embedding, layers, final norm.
        layers: the decoder's layers.
        kinds: what each layer attends to, by transformers' names.
        packing: "pieces", "mask" or "separate"; how packed rows run.
        packing_reason: why, for people.
        remarks: what else was found or done while loading, one line each.
        foreign: by which method its weights came quantised; "" if they are plain.
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
        self.layers = decoder_layers(self.decoder, geometry.layers)
        self.packing = "separate"
        self.packing_reason = "not decided yet"
        self.remarks: tuple[str, ...] = ()
        self.foreign = ""
        self._layer: Callable[..., Any] | None = None
        self._unmasked: Tensor | None = None
        self._freed_after = geometry.layers
        self._recording = _Recording()
        for number, layer in enumerate(self.layers):
            layer.register_forward_hook(TapHook(self._keep, number))

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

        Read by sending a vector of mean 0 and RMS 1 through it, and its opposite: norms differ in how they store their
        weight, some subtract the mean, some add a bias (which a drafter's norm has no place for).
        """
        norm = getattr(self.decoder, "norm", None)
        if norm is None:
            return None
        size = self.geometry.hidden_size
        half = (size + 1) // 2
        up, down = math.sqrt((size - half) / half), math.sqrt(half / (size - half))  # 1 and 1 where the size is even
        probe_H = torch.where(torch.arange(size) < half, up, -down).to(self.device, self.dtype)
        return ((norm(probe_H).float() - norm(-probe_H).float()) / (2 * probe_H.float())).cpu()

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
        """Gives back the memory of the layers behind `tap`; neither `last_hidden` nor decoding is possible then.

        Layers that came quantised stay: they are small, and not every format lets itself be moved.
        """
        for layer in self.layers[tap + 1 :]:
            if not self.foreign:
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
        device, hidden = self.device, self.geometry.hidden_size
        tokens, positions = self._moved(torch.stack((tokens_S, positions_S)))[:, None]
        taps_SF = torch.empty(tokens_S.numel(), len(taps) * hidden, dtype=self.dtype, device=device)
        more: dict[str, Any] = {}
        if self.packing == "pieces":
            cuts = self._moved(packed.pieces(document_S))
            torch._dynamo.mark_dynamic(cuts, 0)
            more = {"cu_seq_lens_q": cuts, "max_length_q": tokens_S.numel()}
            if RECURRENT in self.kinds:
                more["seq_idx"] = self._moved(packed.numbers(document_S))[None]
            masks = self._by_kind(lambda _window: self._no_mask())
        else:
            masks = self._masks(self._moved(document_S))

        def keep(columns_SH: Tensor, output: Tensor) -> None:
            columns_SH.copy_(output[0])

        columns = taps_SF.split(hidden, dim=1)
        takers = {tap: functools.partial(keep, columns[place]) for place, tap in enumerate(taps)}
        last = self._run(tokens, positions, masks, takers, last_hidden, more)
        return Features(taps_SF, None if last is None else last[0])

    def _moved(self, values: Tensor) -> Tensor:
        """On the target's device. From page-locked memory: else a copy of more than 64 KiB may wait for the device."""
        if self.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def _no_mask(self) -> Tensor:
        """Four dimensions: "prepared already", so that the model neither makes masks nor looks for documents."""
        if self._unmasked is None:
            self._unmasked = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        return self._unmasked

    def _features_separate(
        self, tokens_S: Tensor, document_S: Tensor, positions_S: Tensor, taps: tuple[int, ...], last_hidden: bool
    ) -> Features:
        """Documents as rows of batches, each written to its place in the row."""
        size, hidden, device = tokens_S.numel(), self.geometry.hidden_size, self.device
        taps_SF = torch.zeros(size, len(taps) * hidden, dtype=self.dtype, device=device)
        last_SH = torch.zeros(size, hidden, dtype=self.dtype, device=device) if last_hidden else None

        def take(spans: list[tuple[int, int]], columns_SH: Tensor, output: Tensor) -> None:
            for row, (start, end) in enumerate(spans):
                columns_SH[start:end] = output[row, : end - start]

        columns = taps_SF.split(hidden, dim=1)
        for spans in alike(document_spans(document_S)):
            longest = spans[0][1] - spans[0][0]
            batch = torch.zeros(2, len(spans), longest, dtype=torch.int64)  # tokens, positions
            batch[1] = torch.arange(longest)
            for row, (start, end) in enumerate(spans):
                batch[0, row, : end - start] = tokens_S[start:end]
                batch[1, row, : end - start] = positions_S[start:end]

            takers = {tap: functools.partial(take, spans, columns[place]) for place, tap in enumerate(taps)}
            tokens, positions = self._moved(batch)
            last = self._run(tokens, positions, None, takers, last_hidden)
            if last_SH is not None:
                assert last is not None
                take(spans, last_SH, last)
        return Features(taps_SF, last_SH)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Any,
        keep: Mapping[int, Callable[[Tensor], None]],
        last_hidden: bool,
        more: dict[str, Any] | None = None,
    ) -> Tensor | None:
        """Runs a batch [M, L]; the outputs [M, L, H] of the tapped layers go to `keep`.

        Returns:
            The final hidden states [M, L, H] if wanted.
        """
        recording = self._recording
        recording.running, recording.keep = True, keep
        recording.stop_after = -1 if last_hidden else max(keep)
        last, missed = None, len(keep)
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
            missed -= recording.kept
            recording.running, recording.keep, recording.kept = False, {}, 0
        assert (last is None) != last_hidden, "the forward ended on the wrong side of the last tap"
        assert missed == 0, "a tapped layer did not run"
        return last

    def _keep(self, number: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Forward hook of layer `number`."""
        recording = self._recording
        take = recording.keep.get(number)
        if take is None:
            return
        take(output[0] if isinstance(output, tuple) else output)
        recording.kept += 1
        if number == recording.stop_after:
            raise _StopForwardError

    def _masks(self, document_S: Tensor) -> Any:
        """Explicit masks in the form the decoder takes."""
        config = self.decoder.config
        return self._by_kind(
            lambda window: _attention_form(document_mask(document_S, window), config, self.dtype),
        )

    def _by_kind(self, make: Callable[[int | None], Tensor]) -> Any:
        """What `make` gives for a window, by layer kind if the decoder's configuration names kinds, else one."""
        config = self.decoder.config
        by_kind = {
            kind: None if kind == RECURRENT else make(config.sliding_window if kind == SLIDING else None)
            for kind in sorted(set(self.kinds))
        }
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


def alike(spans: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Documents in groups that one batch can hold: longest first, filled up to a quarter more tokens at most."""
    groups: list[list[tuple[int, int]]] = []
    real = 0
    for span in sorted(spans, key=lambda span: (span[0] - span[1], span[0])):
        length = span[1] - span[0]
        if groups:
            longest = groups[-1][0][1] - groups[-1][0][0]
            if longest * (len(groups[-1]) + 1) <= (1 + FILLING) * (real + length):
                groups[-1].append(span)
                real += length
                continue
        groups.append([span])
        real = length
    return groups


def decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
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
