"""TensorBoard as a reader of events: scalars of "step" and "eval" events, text of notices and errors.

`SummaryWriter` (and torch with it) is imported when the first scalar arrives, so that a run that shows nothing never
pays for it. Works as a listener of a running log, or over the file of a finished run (`write_tensorboard`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftsmith.observe.events import Event

_STEP_SCALARS = ("loss", "tau_proxy", "lr", "grad_norm", "tokens_per_second", "data_wait")
_EVAL_SCALARS = ("loss", "tau_proxy")


class TensorBoard:
    """A listener that writes scalars into `folder`, by step.

    After a resume the steps past the checkpoint come again: TensorBoard is told to forget what it has from there on.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "step":
            self._scalars("train", _STEP_SCALARS, event)
        elif kind == "eval":
            self._scalars("held_out", _EVAL_SCALARS, event)
        elif kind in ("notice", "error") and self._writer is not None:
            self._writer.add_text(kind, str(event.get("text")))
        elif kind == "end":
            self.close()

    def close(self) -> None:
        """Writes out what is held back."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalars(self, prefix: str, names: tuple[str, ...], event: Event) -> None:
        step, time = int(event["step"]), event.get("time")
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=str(self.folder), purge_step=step)
        for name in names:
            if event.get(name) is not None:
                self._writer.add_scalar(f"{prefix}/{name}", float(event[name]), step, walltime=time)
        for slot, share in enumerate(event.get("accept_by_slot") or (), start=1):
            if share is not None:
                self._writer.add_scalar(f"{prefix}_accept/slot_{slot:02d}", float(share), step, walltime=time)


def write_tensorboard(events: Iterable[Event], folder: str | Path) -> None:
    """Writes the events of a finished run into `folder`."""
    board = TensorBoard(folder)
    for event in events:
        board(event)
    board.close()
