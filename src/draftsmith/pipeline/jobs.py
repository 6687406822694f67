"""The order of work: one numbered sequence of jobs that every worker derives for itself.

Update u consumes rows u·R .. u·R + R - 1; every `eval_every` updates, and after the last one, the held-out rows follow.
Job j belongs to prefetch worker j mod P, target j mod T and drafter j mod D. Because the sequence is a pure function of
the numbers, no worker asks another what comes next, and resuming is starting at another number.

With several ranks the i-th row of an update, and of an evaluation, belongs to rank i mod W. Each rank numbers its own
jobs, without gaps, so that links need not know of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One row's way through the pipeline.

    Attributes:
        number: place in this rank's sequence.
        learn: a training row; otherwise a held-out row.
        row: number of the row in its source.
        update: index of the update it belongs to, or follows.
    """

    number: int
    learn: bool
    row: int
    update: int


@dataclass(frozen=True)
class JobSequence:
    """All jobs of a run, as one rank sees them.

    Args:
        steps: updates of the whole run.
        rows_per_update: R, of all ranks together.
        eval_every: updates between evaluations; 0: only after the last.
        eval_rows: held-out rows per evaluation, of all ranks together; 0: none.
        rank, ranks: whose jobs these are, of how many.
    """

    steps: int
    rows_per_update: int
    eval_every: int
    eval_rows: int
    rank: int = 0
    ranks: int = 1

    @property
    def own_rows(self) -> int:
        """Training rows of this rank in every update."""
        return len(range(self.rank, self.rows_per_update, self.ranks))

    @property
    def own_eval_rows(self) -> int:
        """Held-out rows of this rank in every evaluation."""
        return len(range(self.rank, self.eval_rows, self.ranks))

    def evaluates_after(self, update: int) -> bool:
        """Whether held-out rows follow update `update` (0-based)."""
        done = update + 1
        due = self.eval_every > 0 and done % self.eval_every == 0
        return self.eval_rows > 0 and (due or done == self.steps)

    def first_number(self, update: int) -> int:
        """Number of the first job of an update."""
        evaluations = 0
        if self.eval_rows > 0:
            evaluations = update // self.eval_every if self.eval_every else 0
            if update >= self.steps and not (self.eval_every and self.steps % self.eval_every == 0):
                evaluations += 1
        return update * self.own_rows + evaluations * self.own_eval_rows

    def of_update(self, update: int) -> tuple[list[Job], list[Job]]:
        """(training jobs, evaluation jobs) of one update; the latter may be none although there is an evaluation."""
        number = self.first_number(update)
        first, total = update * self.rows_per_update, self.rows_per_update
        rows = range(first + self.rank, first + total, self.ranks)
        learn = [Job(number + i, True, row, update) for i, row in enumerate(rows)]
        if not self.evaluates_after(update):
            return learn, []
        number += len(learn)
        held_out = range(self.rank, self.eval_rows, self.ranks)
        return learn, [Job(number + i, False, row, update) for i, row in enumerate(held_out)]

    def jobs(self, first_update: int) -> Iterator[Job]:
        """All jobs from an update on, in order."""
        for update in range(first_update, self.steps):
            learn, evaluate = self.of_update(update)
            yield from learn
            yield from evaluate
