"""What signals do to a run.

    SIGINT   (Ctrl-C) once: finish the update, save, end; twice: end at once
    SIGTERM  (Slurm, Kubernetes, shutdown) finish the update, save within `training.grace` seconds, end; an update
             that takes longer than part of them is given up, and the state before it is saved
    SIGUSR1  (Slurm's --signal=B:USR1@120, or a person) save after this update and go on

SIGINT stays Python's own; this module handles the other two, only in the main thread. Before the first update there is
nothing to save: SIGTERM then ends the run at once. SIGUSR1, which without a handler would end the process, is ignored
where there is nothing to save yet or any more: from the start of the command on, and after a run. After a run that
ended in order, the command ignores SIGTERM as well: its exit code stays what the run came to.
"""

from __future__ import annotations

import atexit
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
            raise Terminated("terminated before there was anything to save")
        self.end()

    def _on_user(self, _number: int, _frame: Any) -> None:
        if self.save is not None:
            self.save()


@contextmanager
def listening(*, last: bool = False) -> Iterator[Signals]:
    """Handles both signals inside, and puts back what handled them before; SIGUSR1 is ignored where nothing did.

    Args:
        last: only the end of the process follows: unless an exception comes out, SIGTERM stays without effect.

    Does nothing outside the main thread.
    """
    signals = Signals()
    if not _in_main_thread():
        yield signals
        return
    terminate = signal.signal(signal.SIGTERM, signals._on_terminate)
    user = signal.signal(signal.SIGUSR1, signals._on_user)
    after: Any = terminate if terminate is not None else signal.SIG_DFL
    try:
        yield signals
        if last:
            after = _over
            # The interpreter drops handlers of its own kind before it takes torch down; what is ignored stays so.
            atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGTERM, after)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN if user in (None, signal.SIG_DFL) else user)


def ignore_user_signal() -> None:
    """For a process that is going to run: SIGUSR1 does nothing until a run listens. Only in the main thread."""
    if _in_main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _over(_number: int, _frame: Any) -> None:
    """SIGTERM behind a run's end: there is nothing to save, and the process is about to end."""


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
