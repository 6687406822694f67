"""`python -m draftsmith.compiled.bench`: what the gate adds to an ordinary call, in microseconds.

Calls a tiny compiled function (backend "eager": the call itself is what costs) directly, through a region before the
seal, and after it. Each figure is the best of several rounds of CPU time of this thread, taken in turn with rounds of
the compiled function alone, so a busy machine disturbs it little.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from draftsmith.compiled.gate import Gate
from draftsmith.compiled.region import Region


def _double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def measure(calls: int = 2000, rounds: int = 9) -> dict[str, float]:
    """Microseconds a call: "compiled" alone, and what "unsealed" and "sealed" regions add to it."""
    gate = Gate()
    try:
        x = torch.ones(4)
        region = Region("bench", _double, gate=gate, backend="eager")
        plain = torch.compile(_double, backend="eager", fullgraph=True, dynamic=False)
        plain(x)
        region(x)
        ordinary, unsealed = _best_of_both(lambda: plain(x), lambda: region(x), calls, rounds)
        gate.seal()
        under_seal, sealed = _best_of_both(lambda: plain(x), lambda: region(x), calls, rounds)
        return {"compiled": ordinary, "unsealed": unsealed - ordinary, "sealed": sealed - under_seal}
    finally:
        gate.close()


def _best_of_both(
    one: Callable[[], object], other: Callable[[], object], calls: int, rounds: int
) -> tuple[float, float]:
    """Microseconds a call of each, their rounds in turn: what slows the machine down slows both."""
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for which, call in enumerate((one, other)):
            began = time.thread_time()
            for _ in range(calls):
                call()
            best[which] = min(best[which], time.thread_time() - began)
    return best[0] / calls * 1e6, best[1] / calls * 1e6


if __name__ == "__main__":
    found = measure()
    print(f"a compiled call alone      {found['compiled']:6.2f} µs")
    print(f"a region before the seal  +{found['unsealed']:6.2f} µs")
    print(f"a region after the seal   +{found['sealed']:6.2f} µs")
