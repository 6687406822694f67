"""What signals do to a run.

    SIGINT   (Ctrl-C) once: finish the update, save, end; twice: end at once
    SIGTERM  (Slurm, Kubernetes, shutdown) finish the update, save within `training.grace` seconds, end; an update
             that takes longer than part of them is given up, and the state before it is saved
    SIGUSR1  (Slurm's --signal=B:USR1@120, or a person) save after this update and go on

SIGINT stays Python's own; this module handles the other two, only in the main thread and only for as long as a run
lasts. Before the first update there is nothing to save: SIGTERM then ends the run at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM before there was anything to save."""

    exit_code = 143


class Signals:
    """Routes SIGTERM and SIGUSR1 to whoever can act on them.

    Attributes:
        end: called on SIGTERM; None: raise `Terminated` where the main thread is.
        save: called on SIGUSR1; None: nothing to save yet, so nothing is done.
    """

    def __init__(self) -> None:
        self.end: Callable[[], None] | None = None
        self.save: Callable[[], None] | None = None

    def _on_terminate(self, _number: int, _frame: Any) -> None:
        if self.end is None:
            raise Terminated("terminated before the first update")
        self.end()

    def _on_user(self, _number: int, _frame: Any) -> None:
        if self.save is not None:
            self.save()


@contextmanager
def listening() -> Iterator[Signals]:
    """Handles both signals inside, and puts back what handled them before. Does nothing outside the main thread."""
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, signals._on_terminate),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, signals._on_user),
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
