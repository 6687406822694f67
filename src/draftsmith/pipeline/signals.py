"""What signals do to a run.

    SIGINT   (Ctrl-C) once: finish the update, save, end; twice: end at once
    SIGTERM  (Slurm, Kubernetes, shutdown) finish the update, save within `training.grace` seconds, end; an update
             that takes longer than part of them is given up, and the state before it is saved
    SIGHUP   (the terminal is gone) the same as SIGTERM, unless it is ignored already, as under nohup
    SIGUSR1  (Slurm's --signal=B:USR1@120, or a person) save after this update and go on

SIGINT stays Python's own; this module handles the others, only in the main thread. Before the first update there is
nothing to save: SIGTERM then ends the run at once. SIGUSR1, which without a handler would end the process, is ignored
where there is nothing to save yet or any more: from the start of the command on, and after a run. After a run that
ended in order, the command ignores SIGTERM as well: its exit code stays what the run came to.

Python runs its handlers between two of its own instructions, and ranks wait for each other inside a call of torch's. So
until all of them are there, signals do to a rank what the system lets them do: they end it.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

ENDING = (signal.SIGTERM, signal.SIGHUP)
NOTHING_TO_SAVE = "terminated before the first update: nothing new to save"


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP before there was anything new to save."""

    exit_code = 143


class Signals:
    """Routes signals to whoever can act on them.

    Attributes:
        end: called on SIGTERM and SIGHUP; None: raise `Terminated` where the main thread is.
        save: called on SIGUSR1; None: nothing to save yet, so nothing is done.
        words: of `Terminated`: what becomes of the work.
    """

    def __init__(self, words: str = NOTHING_TO_SAVE) -> None:
        self.end: Callable[[], None] | None = None
        self.save: Callable[[], None] | None = None
        self.words = words

    def _on_terminate(self, _number: int, _frame: Any) -> None:
        if self.end is None:
            raise Terminated(self.words)
        self.end()

    def _on_user(self, _number: int, _frame: Any) -> None:
        if self.save is not None:
            self.save()


@contextmanager
def listening(words: str = NOTHING_TO_SAVE, *, last: bool = False) -> Iterator[Signals]:
    """Handles the signals inside, and puts back what handled them before; SIGUSR1 is ignored where nothing did.

    Args:
        words: what `Terminated` says, as long as nobody else acts on the signal.
        last: only the end of the process follows: unless an exception comes out, SIGTERM and SIGHUP do nothing then.

    Does nothing outside the main thread.
    """
    signals = Signals(words)
    if not _in_main_thread():
        yield signals
        return
    after = {number: signal.signal(number, signals._on_terminate) for number in _heard()}
    user = signal.signal(signal.SIGUSR1, signals._on_user)
    try:
        yield signals
        if last:
            after = dict.fromkeys(after, _over)
            for number in after:
                # The interpreter drops handlers of its own kind before it takes torch down; what is ignored stays so.
                atexit.register(signal.signal, number, signal.SIG_IGN)
    finally:
        for number, handler in after.items():
            # Behind a run, what `starting` says would no longer be true.
            signal.signal(number, signal.SIG_DFL if handler in (None, _end_now) else handler)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN if user in (None, signal.SIG_DFL) else user)


@contextmanager
def starting(*, ranks: bool) -> Iterator[None]:
    """Around a command that is going to run, until the run listens: SIGUSR1 does nothing, SIGTERM and SIGHUP end it
    with one line. Only in the main thread.

    Args:
        ranks: whether it is one of several, which wait for each other first; then SIGTERM and SIGHUP stay as they are.
    """
    if not _in_main_thread():
        yield
        return
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    numbers = () if ranks else tuple(number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL)
    for number in numbers:
        signal.signal(number, _end_now)
    try:
        yield
    finally:
        for number in numbers:
            if signal.getsignal(number) is _end_now:
                signal.signal(number, signal.SIG_DFL)


def _heard() -> list[signal.Signals]:
    """The signals that end a run: not SIGHUP where whoever started it has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in ENDING if not (ignored and number == signal.SIGHUP)]


def _end_now(_number: int, _frame: Any) -> NoReturn:
    """Ends the process: in the middle of an import nobody can be trusted to pass an exception on."""
    os.write(2, f"draftsmith: {NOTHING_TO_SAVE}\n".encode())
    os._exit(Terminated.exit_code)


def _over(_number: int, _frame: Any) -> None:
    """SIGTERM or SIGHUP behind a run's end: there is nothing to save, and the process is about to end."""


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
