"""A process that must not outlive the one that started it."""

from __future__ import annotations

import os
import threading
import time


def end_with(parent: int, every: float = 0.5) -> None:
    """Ends this process, whatever it is doing, within `every` seconds of its parent's end.

    A run that is killed cannot say so, and its end of a pipe is looked at only between two answers: until then the GPU
    memory would be missing to the run that goes on.

    Args:
        parent: number of the process that started this one, as that one knows it: if it has ended since, this one's
            parent is another by now.
        every: seconds between two looks.
    """

    def watch() -> None:
        while os.getppid() == parent:  # an orphan has another parent
            time.sleep(every)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
