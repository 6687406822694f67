"""The course of a run, read once from its whole event log: curves, spans of work, vitals, notices.

A step that a resume repeated counts once, with its last value: whatever lies at or past a repeated step is dropped, and
so is what lies past the step from which a run went on.
Memory grows with the number of steps (some 200 bytes each), not with that of events. About 150,000 events a second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError, what_is_at
from draftsmith.observe.events import read_events
from draftsmith.observe.shape import read_record
from draftsmith.observe.summary import Event, Summary, number

STEP_FIELDS = ("loss", "tau_proxy", "lr", "grad_norm", "tokens_per_second", "data_wait")
EVAL_FIELDS = ("loss", "tau_proxy")
TAU_FIELDS = ("decode", "walk")
SPANS = 4000


@dataclass
class Curve:
    """Values by step, steps rising; a value may be None."""

    steps: list[int] = field(default_factory=list)
    values: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Appends a step; one that was there already drops everything from there on."""
        self.drop_from(step)
        self.steps.append(step)
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)

    def drop_from(self, step: int) -> None:
        """Forgets this step and all behind it."""
        if not self.steps or self.steps[-1] < step:
            return
        place = bisect_left(self.steps, step)
        del self.steps[place:]
        for column in self.values.values():
            del column[place:]

    def pairs(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one column, without those that are None."""
        found = [(step, value) for step, value in zip(self.steps, self.values.get(name, []), strict=False)]
        kept = [(step, value) for step, value in found if value is not None]
        return [step for step, _ in kept], [value for _, value in kept]


@dataclass
class History:
    """What a report needs of a run; see the module's docstring.

    Attributes:
        folder: of the run.
        name: of the run, for people; a report of several makes them differ (`names_of`).
        summary: what all events add up to.
        train, held_out, tau: curves of "step", "eval" and "tau" events.
        slots: accepted share by slot, of "step" events.
        vitals: all "vitals" events, thinned out evenly if there are very many.
        spans: the last spans of work: worker, row, start, end (wall clock, seconds).
        evidence: all "evidence" events.
        files: the run's JSON files by name ("run", "resolved", "environment", "ledger"); missing ones are empty.
        damaged: names of the files that are there and cannot be understood; they are empty, too.
    """

    folder: Path
    name: str = ""
    summary: Summary = field(default_factory=Summary)
    train: Curve = field(default_factory=Curve)
    held_out: Curve = field(default_factory=Curve)
    tau: Curve = field(default_factory=Curve)
    slots: Curve = field(default_factory=Curve)
    vitals: list[Event] = field(default_factory=list)
    spans: deque[Event] = field(default_factory=lambda: deque(maxlen=SPANS))
    evidence: list[Event] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)


def read_history(folder: str | Path, most_vitals: int = 3000) -> History:
    """Reads a run.

    Raises:
        UserError: not a run folder, or no step in it.
    """
    path = Path(folder)
    if what_is_at(path) != "folder":
        raise UserError("no such run folder", where=str(path))
    history = History(path, path.resolve().name)
    _fold(history, read_events(path / "events.jsonl"), most_vitals)
    if not history.train.steps:
        raise UserError("no training step to report", where=str(path))
    for name in ("run", "resolved", "environment", "ledger"):
        file = path / f"{name}.json"
        record = read_record(file)
        history.files[name] = record or {}
        if record is None and file.exists():
            history.damaged.append(file.name)
    return history


def names_of(runs: Iterable[History]) -> list[str]:
    """A name for each run: its folder's, with as many folders around it as tell it from the others."""
    places = [run.folder.resolve() for run in runs]

    def tail(place: Path, length: int) -> str:
        return "/".join(place.parts[-length:])

    names = []
    for place in places:
        others, length = {each for each in places if each != place}, 1
        while any(tail(other, length) == tail(place, length) for other in others):
            length += 1
        names.append(tail(place, length))
    return names


def _fold(history: History, events: Iterable[Event], most_vitals: int) -> None:
    every, seen = 1, 0
    for event in events:
        history.summary.fold(event)
        kind = event["kind"]
        if kind == "run" and event.get("step") is not None:
            for curve in (history.train, history.held_out, history.tau, history.slots):
                curve.drop_from(event["step"] + 1)
        elif kind == "work":
            history.spans.append(event)
        elif kind == "step":
            history.train.add(event["step"], {name: number(event.get(name)) for name in STEP_FIELDS})
            shares = [number(share) for share in event.get("accept_by_slot") or ()]
            if shares:
                history.slots.add(event["step"], {str(slot): share for slot, share in enumerate(shares, start=1)})
        elif kind == "eval":
            history.held_out.add(event["step"], {name: number(event.get(name)) for name in EVAL_FIELDS})
        elif kind == "tau":
            history.tau.add(event["step"], {name: number(event.get(name)) for name in TAU_FIELDS})
        elif kind == "evidence":
            history.evidence.append(event)
        elif kind == "vitals":
            seen += 1
            if seen % every == 0:
                history.vitals.append(event)
            if len(history.vitals) >= 2 * most_vitals:
                history.vitals, every = history.vitals[::2], every * 2


def flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, "drafter.layers": 5."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def previous_run(folder: Path) -> Path | None:
    """The run beside `folder` that was started last before it; None if there is none, or nobody knows."""
    own = (read_record(folder / "run.json") or {}).get("created")
    if not isinstance(own, str):
        return None
    found = []
    with suppress(OSError):  # the folder around it may be closed to us
        for path in folder.resolve().parent.iterdir():
            created = (read_record(path / "run.json") or {}).get("created")
            if isinstance(created, str) and created < own and path != folder.resolve():
                found.append((created, path))
    return max(found)[1] if found else None
