"""What a new thread does not inherit, carried over.

From torch 2.12 on, Dynamo's and Inductor's configuration lives in context variables: what the main thread sets is
invisible in a worker (`recompile_limit` 99 here, 8 there). Grad mode, autocast and the number of threads of an operator
are thread-local too; a region that is warmed up under one setting and called under another does not fit its guards.

    settings = Settings.capture()            # in the main thread, once everything is set
    Thread(target=settings.run, args=(work,)).start()
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

Result = TypeVar("Result")
_AUTOCAST = ("cpu", "cuda")


@dataclass(frozen=True)
class Settings:
    """Settings of the thread that captured them; `run` may be called in any thread, any number of times."""

    context: contextvars.Context
    grad: bool
    threads: int
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def capture(cls) -> Settings:
        """Those of the calling thread, now."""
        autocast = tuple(
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST
        )
        return cls(contextvars.copy_context(), torch.is_grad_enabled(), torch.get_num_threads(), autocast)

    def run(self, function: Callable[[], Result]) -> Result:
        """Call `function` under these settings."""
        # A context can be entered once at a time; each call gets its own copy.
        return self.context.copy().run(self._inside, function)

    def _inside(self, function: Callable[[], Result]) -> Result:
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            return function()
