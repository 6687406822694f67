"""TensorBoard, the tracker that a run has unless its config says otherwise.

`SummaryWriter` (and torch with it) is imported when the first scalar arrives, so that a run that shows nothing never
pays for it. Works as a listener of a running log, or over the file of a finished run (`write_tensorboard`). It writes
to a local file, so it needs no thread of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from draftsmith.observe.summary import Event
from draftsmith.observe.tracking import Tracking


class _Writer:
    """After a resume the steps past the checkpoint come again: TensorBoard is told to forget what it has from there."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder), purge_step=step)

    def scalars(self, step: int, values: dict[str, float], seconds: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=seconds)

    def text(self, kind: str, text: str) -> None:
        self._writer.add_text(kind, text)

    def close(self) -> None:
        self._writer.close()


class TensorBoard(Tracking):
    """A listener that writes scalars into `folder`, by step."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        super().__init__(lambda step: _Writer(self.folder, step))


def write_tensorboard(events: Iterable[Event], folder: str | Path) -> None:
    """Writes the events of a finished run into `folder`."""
    board = TensorBoard(folder)
    for event in events:
        board(event)
    board.close()
