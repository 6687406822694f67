"""A disk that fails at a chosen call: what stands in for `os` in `draftsmith.training.durable`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

CHANGING = ("makedirs", "open", "write", "fsync", "rename")


class FailingDisk:
    """`os`, whose changing calls are counted; those for which `fails(number, name)` is true raise `OSError(code)`.

    With `short`, every write takes at most so many bytes, as a write to a nearly full disk may.
    """

    def __init__(self, code: int, fails: Callable[[int, str], bool] = lambda _n, _name: False, short: int = 0) -> None:
        self.code, self.fails, self.short = code, fails, short
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CHANGING:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if self.fails(len(self.calls) - 1, name):
                raise OSError(self.code, os.strerror(self.code))
            if name == "write" and self.short:
                descriptor, data = args
                return real(descriptor, data[: self.short])
            return real(*args, **kwargs)

        return call
