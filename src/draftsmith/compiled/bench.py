"""`python -m draftsmith.compiled.bench`: what the gate adds to an ordinary call, in microseconds.

Calls a tiny compiled function (backend "eager": the call itself is what costs) directly and through a region: with one
tensor and with eight, before the seal, in a `gate.step()` of its own, and after the seal. Each figure is the best of
several rounds of CPU time of this thread, taken in turn with rounds of the compiled function alone, so a busy machine
disturbs it little.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from draftsmith.compiled.gate import Gate
from draftsmith.compiled.region import Region

MANY = 8  # tensors of the larger call


def _double(x: torch.Tensor, *_others: torch.Tensor) -> torch.Tensor:
    return x + x


def measure(calls: int = 2000, rounds: int = 9) -> dict[str, float]:
    """Microseconds a call: "compiled" alone with one tensor, and what a region adds to it: "unsealed", "unsealed_many"
    (eight tensors), "in_step" (a `gate.step()` of its own around the call), "sealed"."""
    gate = Gate()
    try:
        x, others = torch.ones(4), [torch.ones(4) for _ in range(MANY - 1)]
        region = Region("bench", _double, gate=gate, backend="eager")
        plain = torch.compile(_double, backend="eager", fullgraph=True, dynamic=False)

        def stepped() -> None:
            with gate.step():
                region(x)

        for function in (plain, region):
            function(x)
            function(x, *others)
        alone, unsealed = _best_of_both(lambda: plain(x), lambda: region(x), calls, rounds)
        found = {"compiled": alone, "unsealed": unsealed - alone}
        alone, many = _best_of_both(lambda: plain(x, *others), lambda: region(x, *others), calls, rounds)
        found["unsealed_many"] = many - alone
        alone, step = _best_of_both(lambda: plain(x), stepped, calls, rounds)
        found["in_step"] = step - alone
        gate.seal()
        alone, sealed = _best_of_both(lambda: plain(x), lambda: region(x), calls, rounds)
        return {**found, "sealed": sealed - alone}
    finally:
        gate.close()


def lines_of(found: dict[str, float]) -> list[str]:
    """For people: what `measure` found."""
    return [
        f"a compiled call alone                        {found['compiled']:6.2f} µs",
        f"added by a region before the seal            {found['unsealed']:+6.2f} µs",
        f"  called with {MANY} tensors                     {found['unsealed_many']:+6.2f} µs",
        f"  with a `gate.step()` of its own around it  {found['in_step']:+6.2f} µs",
        f"added by a region after the seal             {found['sealed']:+6.2f} µs",
    ]


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
    print("\n".join(lines_of(measure())))
