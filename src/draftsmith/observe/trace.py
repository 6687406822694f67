"""A run's rows as a timeline that Perfetto (https://ui.perfetto.dev) and chrome://tracing read.

One track for each worker: what it worked on, row by row, what it waited for in between, updates and the warm-up. Arrows
follow a row from prefetch to target to drafter. Counters: rows in front of each worker, memory and use of devices.
Checkpoints, evaluations and notices are marks. Ranks are processes. Times are the host's: a row's slice ends when the
thread had given it to its device, at most two rows before the device is done.

Of a long run the last `LAST` rows of work are kept. Written in the JSON form, about 300 bytes a row and worker.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError, reason_of, what_is_at
from draftsmith.observe.aside import written_aside
from draftsmith.observe.events import read_events
from draftsmith.observe.summary import MALFORMED, Event, number

LAST = 60_000  # spans of work
MARKS = {"checkpoint": "checkpoint", "eval": "held-out rows", "notice": "note", "tau": "τ decoded", "error": "error"}
ROLES = ("prefetch", "target", "drafter")
_WAITS = {
    "prefetch": ("", "waits for room"),
    "target": ("waits for a row", "held back"),
    "drafter": ("waits for features", ""),
}


def write_trace(folder: str | Path, output: str | Path, last: int = LAST) -> dict[str, int]:
    """Writes the trace of a run, and returns how many slices, arrows and counters it has, and whether malformed events
    were left out, how many.

    Raises:
        UserError: not a run folder, no row in it, or the file cannot be written.
    """
    path, place = Path(folder), Path(output)
    if what_is_at(path) != "folder":
        raise UserError("no such run folder", where=str(path))
    logs = [path / "events.jsonl", *sorted(path.glob("rank-*.jsonl"))]
    events: list[Event] = []
    malformed = 0
    for rank, log in enumerate(logs):
        made, left_out = _rank(rank, log, last)
        events, malformed = events + made, malformed + left_out
    count = {name: sum(event["ph"] in kinds for event in events) for name, kinds in _COUNTED.items()}
    if not count["slices"]:
        raise UserError("no row of work to trace", where=str(path))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(place, errors="replace") as file:  # a log may hold halves of letters
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            file.write(",\n".join(json.dumps(event, ensure_ascii=False, separators=(",", ":")) for event in events))
            file.write("\n]}\n")
    except OSError as error:
        raise UserError(
            f"the trace cannot be written: {reason_of(error)}",
            where=str(place),
            fix="name a file elsewhere with --trace",
        ) from None
    return {**count, "malformed events left out": malformed} if malformed else count


_COUNTED = {"slices": "X", "arrows": "s", "counters": "C", "marks": "i"}


def _rank(rank: int, log: Path, last: int) -> tuple[list[Event], int]:
    """(all of one process, how many of its events are malformed)."""
    spans: deque[Event] = deque(maxlen=last)
    others: deque[Event] = deque(maxlen=last)
    start = malformed = 0
    for event in read_events(log):
        kind = event["kind"]
        if kind == "run":
            start += 1  # rows are numbered anew
        elif kind == MALFORMED:
            malformed += 1
        elif kind in ("work", "phase"):
            spans.append({**event, "run": start})
        elif kind == "vitals" or kind in MARKS:
            others.append(event)
    workers = sorted({str(span["worker"]) for span in spans}, key=_order)
    track = {worker: place + 1 for place, worker in enumerate(workers)}
    made: list[Event] = [_named("process_name", rank, 0, name=f"rank {rank}" if rank else "draftsmith")]
    for worker, thread in track.items():
        made.append(_named("thread_name", rank, thread, name=worker))
        made.append(_named("thread_sort_index", rank, thread, sort_index=thread))
    for span in spans:
        made += _slices(span, rank, track[span["worker"]])
    made += _arrows(spans, rank, track)
    earliest = min((float(span["start"]) for span in spans), default=0.0)
    for event in others:
        if (number(event.get("time")) or 0.0) >= earliest:
            made += _counters(event, rank) if event["kind"] == "vitals" else [_mark(event, rank)]
    return made, malformed


def _order(worker: str) -> tuple[int, int, str]:
    role, _, index = worker.partition(" ")
    return (ROLES.index(role) if role in ROLES else len(ROLES), int(index) if index.isdigit() else 0, worker)


def _named(what: str, rank: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 1)


def _slices(span: Event, rank: int, thread: int) -> Iterator[Event]:
    """A worker's row with the waits before and behind it, and the depth of its queue."""
    start, end = float(span["start"]), float(span["end"])

    def slice_of(name: str, begin: float, seconds: float, category: str) -> Event:
        place = {"pid": rank, "tid": thread, "ts": _micro(begin), "dur": _micro(seconds)}
        return {"ph": "X", "name": name, "cat": category, **place}

    if span["kind"] == "phase":
        yield slice_of(f"{span['what']} {span['number']}", start, end - start, "phase")
        return
    worker = str(span["worker"])
    before, behind = _WAITS.get(worker.split()[0], ("waits", "waits"))
    waited, held = number(span.get("input")) or 0.0, number(span.get("output")) or 0.0
    if waited and before:
        yield slice_of(before, start - waited, waited, "wait")
    yield {**slice_of(f"row {span['row']}", start, end - start, "work"), "args": {"row": span["row"]}}
    if held and behind:
        yield slice_of(behind, end, held, "wait")
    if "queue" in span and not worker.startswith("prefetch"):
        yield _counter(f"rows in front of {worker}", rank, end, rows=span["queue"])


def _counter(name: str, rank: int, moment: float, **values: float) -> Event:
    return {"ph": "C", "name": name, "pid": rank, "tid": 0, "ts": _micro(moment), "args": values}


def _arrows(spans: deque[Event], rank: int, track: dict[str, int]) -> Iterator[Event]:
    """From the worker that finished a row to the one that took it."""
    by_row: dict[tuple[int, int], dict[str, Event]] = {}
    for span in spans:
        if span["kind"] == "work":
            by_row.setdefault((span["run"], span["row"]), {})[str(span["worker"]).split()[0]] = span
    for (run, row), found in by_row.items():
        for place, (giver, taker) in enumerate(itertools.pairwise(ROLES)):
            if giver not in found or taker not in found:
                continue
            first, then = found[giver], found[taker]
            common = {"name": "row", "cat": f"{giver} to {taker}", "pid": rank}
            common["id"] = f"{rank}.{run}.{row}.{place}"
            # An arrow leaves within its slice: a moment before the end of it.
            leaves = max(float(first["start"]), float(first["end"]) - 1e-6)
            yield {**common, "ph": "s", "tid": track[first["worker"]], "ts": _micro(leaves)}
            yield {**common, "ph": "f", "bp": "e", "tid": track[then["worker"]], "ts": _micro(float(then["start"]))}


def _counters(event: Event, rank: int) -> Iterator[Event]:
    moment = float(event["time"])
    for device in event.get("devices") or []:
        name = device["device"]
        for fact, what, scale in (("use", "use", 100.0), ("reserved", "memory held, GiB", 2.0**-30)):
            if fact in device:
                yield _counter(f"{name} {what}", rank, moment, value=round(device[fact] * scale, 3))
    taken = (event.get("interpreter") or {}).get("taken")
    if taken is not None:
        yield _counter("interpreter taken, per cent", rank, moment, value=round(100 * taken, 1))


def _mark(event: Event, rank: int) -> Event:
    text = event.get("text") or (f"step {event['step']}" if "step" in event else "")
    place = {"pid": rank, "tid": 0, "ts": _micro(float(event["time"]))}
    return {"ph": "i", "s": "p", "name": MARKS[event["kind"]], "cat": event["kind"], **place, "args": {"text": text}}
