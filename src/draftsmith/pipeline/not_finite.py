"""Updates whose loss or gradient is not finite: which row did it, and whether the run goes on (`training.on_nan`).

The device decides by itself: an update whose gradient norm is not finite changes neither masters nor optimizer state
(`training/update.py`), so nothing waits for the answer. The host hears of it one update later, when the figures have
arrived, names the rows, and ends the run or lets it go on; several skipped updates in a row end it in any case.

Where the weights themselves are not finite, no row is to blame and every further update would be bad: that is looked at
before any row is named, and ends the run whatever the policy says. No checkpoint is written of such weights
(`training/checkpoint.py`).

For every row two numbers stay on its device until its update was found to be in order: Σ w·loss, and the squared norm
of the gradients of all vectors (norm weights). Every gradient of the drafter passes through one of these on its way
back, so what is not finite shows there, for a thousandth of the price of looking at the matrices. A row's gradient is
looked at behind its own backward, before it is added to others'.

Cost: three small kernels a row and two references; a read from the device, and one pass over the weights, only where an
update was bad.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from draftsmith.blocks import Document
from draftsmith.errors import UserError, first_of
from draftsmith.objective import Sums
from draftsmith.pipeline.jobs import Job
from draftsmith.training.finite import first_not_finite

MOST_IN_A_ROW = 10
_NAMED = 4  # documents of a row
_ROWS_NAMED = 3

_Noted = tuple[Job, Tensor, "Tensor | None", "torch.cuda.Event | None"]


class NotFinite:
    """See the module's docstring. `note` is called by any drafter, the rest by the one that reports.

    Args:
        policy: `training.on_nan`.
        documents: of a row of the training stream, by its number.
    """

    def __init__(self, policy: Literal["stop", "skip"], documents: Callable[[int], list[Document]]) -> None:
        self._policy, self._documents = policy, documents
        self._lock = threading.Lock()
        self._noted: dict[int, list[_Noted]] = {}
        self._models: dict[int, torch.nn.Module] = {}
        self._in_a_row = 0
        self.skipped = 0

    def note(self, job: Job, sums: Sums, model: torch.nn.Module) -> None:
        """Keeps what tells whether a row was finite; between its backward and the adding up of its gradient."""
        vectors = [p.grad for p in model.parameters() if p.dim() == 1 and p.grad is not None]
        squares = torch.stack(torch._foreach_norm(vectors)).square().sum() if vectors else None
        device = sums.values.device
        event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        with self._lock:
            self._noted.setdefault(job.update, []).append((job, sums.values[0], squares, event))
            self._models[id(model)] = model

    def fine(self, update: int) -> None:
        """An update was in order."""
        self._in_a_row = 0
        self._forget(update)

    def broken_weight(self) -> str:
        """Name of a drafter's parameter that is not finite; "" if all are."""
        with self._lock:
            models = list(self._models.values())
        return next((name for model in models if (name := first_not_finite(dict(model.named_parameters())))), "")

    def bad(self, update: int, loss: float, norm: float) -> str:
        """An update was not; returns what to tell if the run goes on.

        Raises:
            UserError: by policy, or because it happened too often in a row.
        """
        with self._lock:
            noted = sorted(self._noted.get(update, []), key=lambda each: each[0].number)
        self._forget(update)
        what = f"loss {loss:g} and gradient norm {norm:g} at step {update + 1} are not finite{self._blame(noted)}"
        if self._policy == "stop":
            raise UserError(
                what,
                where="training",
                fix="lower optimizer.lr, look at the row, or resume with training.on_nan=skip, which leaves it out",
            )
        self._in_a_row += 1
        self.skipped += 1
        if self._in_a_row == MOST_IN_A_ROW:
            raise UserError(
                f"{MOST_IN_A_ROW} updates in a row were skipped; {what}",
                where="training",
                fix="lower optimizer.lr, or resume from an earlier checkpoint with other settings",
            )
        return f"step {update + 1} skipped: {what}"

    def _forget(self, update: int) -> None:
        with self._lock:
            for old in [each for each in self._noted if each <= update]:
                del self._noted[old]

    def _blame(self, noted: list[_Noted]) -> str:
        """The rows that are not finite, by their documents; all rows of the update where none shows."""
        culprits = []
        for job, loss, squares, event in noted:
            if event is not None:
                event.synchronize()
            if not math.isfinite(float(loss)) or (squares is not None and not math.isfinite(float(squares))):
                culprits.append(job)
        if culprits:
            rows = culprits[:_ROWS_NAMED]
            more = f" and {len(culprits) - len(rows)} more" if len(culprits) > len(rows) else ""
            every = f"all {len(noted)} rows of the update, so perhaps through none of them: "
            what = every if len(noted) == len(culprits) > 1 else ""
            return f", in {what}{'; '.join(self._name(job) for job in rows)}{more}"
        if not noted:
            return ""
        rows_text = "; ".join(self._name(job) for job, *_ in noted[:_ROWS_NAMED])
        return f"; no single row shows it, the update had {len(noted)}: {rows_text}"

    def _name(self, job: Job) -> str:
        names = list(dict.fromkeys(document.name for document in self._documents(job.row)))
        return f"row {job.row} ({first_of(names, _NAMED)})"
