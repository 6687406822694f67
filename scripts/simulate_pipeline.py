"""The pipeline with workers that only sleep, beside the bound, the model that "auto" chooses by, and every other split.

    python scripts/simulate_pipeline.py                      # 5 + 3, times like those of a 27 B target
    python scripts/simulate_pipeline.py --targets 2 --drafters 1 --target 0.1 --drafter 0.13 --update 0.01 --rows 4

Threads, links and exchange are the trainer's; time passes. Exit 1 if it is slower than the bound by more than 5 %.
"""

from __future__ import annotations

import argparse
import math

from draftsmith.errors import run_script
from draftsmith.pipeline.costs import Costs, choose, seconds_per_update, split
from draftsmith.pipeline.simulation import simulate


def main() -> int:
    """Parses, simulates, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=5)
    parser.add_argument("--drafters", type=int, default=3)
    parser.add_argument("--target", type=float, default=1.15, help="seconds a row")
    parser.add_argument("--drafter", type=float, default=0.62, help="seconds a row")
    parser.add_argument("--update", type=float, default=0.06, help="seconds of an update on one device")
    parser.add_argument("--exchange", type=float, default=0.25, help="seconds for gradients there and weights back")
    parser.add_argument("--rows", type=int, default=6, help="of an update")
    parser.add_argument("--queue", type=int, default=2)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--scale", type=float, default=0.2, help="of all times, to be done sooner")
    given = parser.parse_args()
    seconds = (given.scale * value for value in (given.target, given.drafter, given.update, given.exchange))
    costs = Costs(*seconds, tokens=1.0)
    ends = simulate(costs, given.targets, given.drafters, given.rows, given.queue, given.updates, sleeping=True)
    counted = math.ceil(given.updates / 2)
    slept = (ends[-1] - ends[-1 - counted]) / counted / given.rows
    bound = costs.bound(given.targets, given.drafters, given.rows)
    played = seconds_per_update(costs, split(given.targets, given.drafters), given.rows, given.queue) / given.rows
    print(f"{given.targets} + {given.drafters}, {given.rows} rows an update, times x {given.scale}")
    print(f"bound     {1e3 * bound:8.2f} ms a row: max(target/T, (⌈R/D⌉·drafter + update(D)) / R)")
    print(f"model     {1e3 * played:8.2f} ms a row, {played / bound:.4f} of the bound")
    print(f"threads   {1e3 * slept:8.2f} ms a row, {slept / bound:.4f} of the bound, sleeping")
    for choice in choose(costs, given.targets + given.drafters, given.rows, given.queue):
        print(f"          {1e3 * choice.seconds:8.2f} ms a row by the model: {choice.placement.name()}")
    return 0 if slept / bound <= 1.05 else 1


if __name__ == "__main__":
    run_script(main)
