"""Keys and values of the target while it decodes: allocated once, written in place, cut back for nothing.

A `DecodeCache` holds, for every layer, K and V as [rows, kv_heads, columns, head_dim]. Rows are sequences; a token of
any sequence is written at the next column. The model sees the columns from `first` to `first + length` of the live
rows, as a view. Costs: appending copies the new tokens and nothing else (concatenation would copy the whole past of
every layer at every step); `crop` changes a number; `move_rows` copies the rows that move.

Sliding layers keep their whole past, so that rejected tokens can be taken back; they show the model the window's last
`window - 1` columns and the new ones. Unwritten columns are zero and stale ones are finite: a masked column weighs
exactly nothing.

A cache of one row can be fixed: `fixed` names, as tensors, where the next tokens go, and the model is shown all columns
up to a constant one, so that shapes and addresses are the same in every forward; a mask by position has to hide the
rest. Then a forward can be captured once and replayed at any length.

Recurrent layers (gated delta nets, short convolutions) keep one state that stands behind all tokens read: it cannot be
cut back. `snapshot` copies it and `restore` puts the copy back; what was read since must then be read again. Only a
cache of one row may hold such layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from draftsmith.errors import UserError
from draftsmith.target.geometry import FULL, SLIDING, layer_kinds

# Layer kinds, by transformers' names, whose only memory is a state of fixed size.
RECURRENT = ("linear_attention", "conv")


class DecodeLayer(CacheLayerMixin):
    """One layer's keys and values.

    Args:
        rows: sequences that fit.
        columns: tokens per row that fit.
        window: attention window of a sliding layer; None: the layer sees everything.
    """

    is_croppable = True

    def __init__(self, rows: int, columns: int, window: int | None) -> None:
        super().__init__()
        self.rows, self.columns, self.window = rows, columns, window
        self.is_sliding = window is not None
        self.first = 0
        self.length = 0
        self.all_keys = self.all_values = torch.empty(0)
        self.places_L: Tensor | None = None
        self.shown = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the buffers in the dtype and on the device of the first keys."""
        heads = key_states.shape[1]
        self.all_keys = key_states.new_zeros(self.rows, heads, self.columns, key_states.shape[-1])
        self.all_values = value_states.new_zeros(self.rows, heads, self.columns, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends [live rows, kv_heads, new, head_dim] and returns the columns that the new tokens may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.places_L is not None:
            self.all_keys.index_copy_(2, self.places_L, key_states)
            self.all_values.index_copy_(2, self.places_L, value_states)
            return self.all_keys[:, :, : self.shown], self.all_values[:, :, : self.shown]
        live, new = key_states.shape[0], key_states.shape[2]
        end = self.first + self.length
        assert end + new <= self.columns, f"{end} + {new} tokens in a cache of {self.columns}"
        self.all_keys[:live, :, end : end + new] = key_states
        self.all_values[:live, :, end : end + new] = value_states
        start = self.first + self._hidden()
        self.length += new
        return self.all_keys[:live, :, start : end + new], self.all_values[:live, :, start : end + new]

    def _hidden(self) -> int:
        """Columns before the window of the next token."""
        return 0 if self.window is None else max(0, self.length - self.window + 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns shown, number of the first one), asked for before `update`."""
        if self.places_L is not None:
            return self.shown, 0
        hidden = self._hidden()
        return self.length + query_length - hidden, hidden

    def get_seq_length(self) -> int:
        # A number would be frozen into a captured forward. A model that needs one must not seem to get along without.
        return self.length if self.places_L is None else 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` columns."""
        assert -self.length <= tokens_to_remove <= 0
        self.length += tokens_to_remove


class DecodeCache(Cache):
    """The layers of one target; see the module's docstring.

    Args:
        config: the target's Hugging Face config.
        rows: sequences that fit.
        columns: tokens per row that fit, rejected drafts included.

    Attributes:
        past: the layers that keep keys and values.
        states: the recurrent ones.

    Raises:
        UserError: the target has layers of a kind that is not known, or none with keys and values; or recurrent ones
            for more than one row.
    """

    def __init__(self, config: Any, rows: int, columns: int) -> None:
        if rows != 1:
            attention_windows(config)
        layers: list[Any] = [
            LinearAttentionLayer() if kind in RECURRENT else DecodeLayer(rows, columns, window)
            for kind, window in kinds_and_windows(config)
        ]
        self.past = [layer for layer in layers if isinstance(layer, DecodeLayer)]
        self.states = [layer for layer in layers if not isinstance(layer, DecodeLayer)]
        if not self.past:
            raise UserError("the target has no layer with keys and values", where="target", fix="use another target")
        super().__init__(layers=layers)

    def snapshot(self) -> list[tuple[dict[int, Tensor], dict[int, Tensor]]]:
        """A copy of every recurrent state; empty where there are none."""
        return [
            (
                {key: state.clone() for key, state in layer.conv_states.items() if state is not None},
                {key: state.clone() for key, state in layer.recurrent_states.items() if state is not None},
            )
            for layer in self.states
        ]

    def restore(self, snapshot: list[tuple[dict[int, Tensor], dict[int, Tensor]]]) -> None:
        """Puts a copy back; it may be put back again."""
        for layer, (conv, recurrent) in zip(self.states, snapshot, strict=True):
            for key, state in conv.items():
                layer.conv_states[key].copy_(state)
            for key, state in recurrent.items():
                layer.recurrent_states[key].copy_(state)

    @property
    def first(self) -> int:
        """First column shown to the model."""
        return self.past[0].first

    @property
    def length(self) -> int:
        """Columns shown to the model."""
        return self.past[0].length

    def show(self, first: int, length: int) -> None:
        """Makes the model see `length` columns from `first`."""
        for layer in self.past:
            layer.first, layer.length = first, length

    @contextmanager
    def fixed(self, places_L: Tensor, shown: int) -> Iterator[None]:
        """Within it, L new tokens go to columns `places_L` (int64 [L]) and the model sees the first `shown` columns."""
        for layer in self.past:
            layer.places_L, layer.shown = places_L, shown
        try:
            yield
        finally:
            for layer in self.past:
                layer.places_L = None

    def crop_to(self, length: int) -> None:
        """Keeps the first `length` columns shown."""
        for layer in self.past:
            assert length <= layer.length
            layer.length = length

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copies rows `sources` over rows `targets` (int64 [n] each, no row in both)."""
        moves = {device: (sources.to(device), targets.to(device)) for device in self._devices()}
        for layer in self.past:
            shown = slice(layer.first, layer.first + layer.length)
            fro, to = moves[layer.all_keys.device]
            layer.all_keys[to, :, shown] = layer.all_keys[fro, :, shown]
            layer.all_values[to, :, shown] = layer.all_values[fro, :, shown]

    def shift(self, live: int) -> None:
        """Moves the columns shown of the first `live` rows to the front, so that there is room behind them."""
        for layer in self.past:
            shown = slice(layer.first, layer.first + layer.length)
            layer.all_keys[:live, :, : layer.length] = layer.all_keys[:live, :, shown].clone()
            layer.all_values[:live, :, : layer.length] = layer.all_values[:live, :, shown].clone()
            layer.first = 0

    def _devices(self) -> set[torch.device]:
        """Where the layers lie: several devices if the target spans them."""
        return {layer.all_keys.device for layer in self.past}

    def insert(self, source: DecodeCache, source_columns: Tensor, row: int) -> None:
        """Writes rows of another cache so that they end where the columns shown end.

        Args:
            source: holds n rows.
            source_columns: int64 [n, W]; entry (i, j) is the column of `source` row i that lands in the j-th of the
                last W columns shown.
            row: first row written; n rows are.
        """
        count, width = source_columns.shape
        columns = {device: source_columns.to(device) for device in source._devices()}
        for layer, other in zip(self.past, source.past, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(other.all_keys, other.all_values)
            end = layer.first + layer.length
            for buffer, taken in ((layer.all_keys, other.all_keys), (layer.all_values, other.all_values)):
                index = columns[taken.device][:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
                buffer[row : row + count, :, end - width : end] = taken.gather(2, index)


def attention_windows(config: Any) -> list[int | None]:
    """Window of every layer of a Hugging Face config that keeps K and V; None for full attention.

    Raises:
        UserError: a layer is neither full nor sliding attention.
    """
    pairs = kinds_and_windows(config)
    recurrent = sorted({kind for kind, _ in pairs} & set(RECURRENT))
    if recurrent:
        raise UserError(
            f"the target has {', '.join(recurrent)} layers, whose state cannot be moved between the rows of a batch",
            where=f"target ({getattr(config.get_text_config(decoder=True), 'model_type', 'unknown')})",
            fix="decode answers one at a time",
        )
    return [window for _, window in pairs]


def kinds_and_windows(config: Any) -> list[tuple[str, int | None]]:
    """(kind, window) of every layer that has a memory of its own."""
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    kinds = layer_kinds(config)
    # Some models let their last layers read the K and V of earlier ones.
    kinds = kinds[: len(kinds) - (getattr(text, "num_kv_shared_layers", None) or 0)]
    odd = sorted(set(kinds) - {FULL, SLIDING, *RECURRENT})
    if odd:
        raise UserError(
            f"the target has {', '.join(odd)} layers, whose memory is not known here",
            where=f"target ({getattr(text, 'model_type', 'unknown')})",
            fix=f"decoding supports {FULL}, {SLIDING}, {', '.join(RECURRENT)}",
        )
    return [(kind, window if kind == SLIDING else None) for kind in kinds]
