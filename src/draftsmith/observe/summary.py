"""What the events of a run add up to, small enough to be written into the log itself every now and then.

The log holds a "summary" event every few hundred lines: counts of errors, best speed, last checkpoint, and so on, of
everything before it. A reader starts at the last one and adds the few events behind it, so a log of ten million events
is understood from its last few kilobytes, on a read-only mount and after a crash as well. Folding an event costs some
microseconds. Of events that are shaped otherwise than here (`shape.py`) nothing is kept but their number.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from draftsmith.errors import UserError
from draftsmith.observe.shape import EVENTS, quantity, well_formed

Event = dict[str, Any]

MARK = b',"kind":"summary",'
BLOCK = 256 * 2**10
SEARCH_BYTES = 64 * 2**20  # how far back a summary is looked for: they are some 200 kB apart
HEAD_BYTES, TAIL_BYTES = 2**20, 8 * 2**20  # what is read of a log without one
RATE_SECONDS = 5.0  # that a rate has to cover to count
RATES = 9  # a speed is the median of so many steps
DISTINCT = 40  # texts of errors and notices that are told apart
MALFORMED = "malformed"  # the kind of what should be an event and is not shaped like one
BESTS = 100  # that are remembered, each better than the one before
POINTS = 120  # of the history, at least, once there are as many steps


class Summary:
    """See the module's docstring. `content` is plain JSON; `fold` adds one event."""

    def __init__(self, content: dict[str, Any] | None = None) -> None:
        self.content: dict[str, Any] = {
            "events": 0,
            "starts": 0,
            "first_time": None,
            "time": None,
            "run": None,
            "step": None,
            "step_times": [],
            "rates": [],
            "best_rate": None,
            "row_seconds": {},
            "evaluation": None,
            "best_evaluation": None,
            "best_evaluations_before": [],
            "tau": None,
            "best_tau": None,
            "best_taus_before": [],
            "checkpoint": None,
            "save_failures": 0,
            "evidence": None,
            "ledger": None,
            "vitals": None,
            "balance": None,
            "costs": None,
            "errors": {},
            "error_count": 0,
            "notices": {},
            "standing": {},
            "end": None,
            "history": [],
            "history_every": 1,
            "malformed": 0,
            "partial": False,
            **(content or {}),
        }

    def __getitem__(self, name: str) -> Any:
        return self.content[name]

    def fold(self, event: Event) -> None:
        """Adds one event; summaries themselves add nothing."""
        kind = event["kind"]
        if kind == "summary":
            return
        content = self.content
        content["events"] += 1
        if event.get("time") is not None:
            content["time"] = event["time"]
            content["first_time"] = event["time"] if content["first_time"] is None else content["first_time"]
        handler = getattr(self, f"_{kind}", None) if kind in EVENTS or kind == MALFORMED else None
        if handler is not None:
            handler(event)

    def rate(self) -> float | None:
        """Tokens per second now: the median of the last steps."""
        rates = self.content["rates"]
        return median(rates) if rates else None

    def facts(self) -> dict[str, Any]:
        """What may explain the speed of this moment."""
        content, vitals = self.content, self.content["vitals"] or {}
        return {
            "cards": (content["run"] or {}).get("cards"),
            "data_wait": (content["step"] or {}).get("data_wait"),
            "evidence": content["evidence"] and {name: content["evidence"].get(name) for name in ("ok", "text")},
            "ledger": content["ledger"] and content["ledger"]["lines"],
            "row_seconds": {name: round(value, 6) for name, value in content["row_seconds"].items()},
            "devices": vitals.get("devices", []),
            "workers": vitals.get("workers", {}),
            "host": vitals.get("host", {}),
        }

    def seconds_per_step(self) -> float | None:
        """Median of the last intervals between steps, by the wall clock."""
        times = self.content["step_times"]
        gaps = [late - early for early, late in itertools.pairwise(times) if late > early]
        return median(gaps) if gaps else None

    def _run(self, event: Event) -> None:
        self.content.update(run=event, end=None, step_times=[], rates=[], standing={}, save_failures=0, row_seconds={})
        self.content["starts"] += 1
        if event.get("step") is not None:
            self._forget_after(event["step"])

    def _forget_after(self, step: int) -> None:
        """The run goes on from this step: what lay behind it is done again, and its checkpoints are refused or lost."""
        content = self.content
        for name in ("step", "evaluation", "tau", "checkpoint"):
            if _is_after(content[name], step):
                content[name] = None
        for name in ("best_evaluation", "best_tau"):
            before = content[f"{name}s_before"]
            while _is_after(content[name], step):
                content[name] = before.pop() if before else None
        content["history"] = [each for each in content["history"] if each[0] <= step]

    def _malformed(self, _event: Event) -> None:
        self.content["malformed"] += 1

    def _plan(self, _event: Event) -> None:
        self.content["end"] = None  # started again

    def _step(self, event: Event) -> None:
        content = self.content
        content["step"] = event
        if event.get("time") is not None:
            content["step_times"] = [*content["step_times"][-20:], event["time"]]
        rate = number(event.get("tokens_per_second"))
        # Right after a start queues are full: a rate over few seconds may be one that nobody can keep.
        if rate is not None and (number(event.get("rate_seconds")) or RATE_SECONDS) >= RATE_SECONDS:
            content["rates"] = [*content["rates"][1 - RATES :], rate]
            if len(content["rates"]) == RATES:
                now = median(content["rates"])
                if now > (content["best_rate"] or {"rate": 0.0})["rate"]:
                    content["best_rate"] = {"rate": now, "step": event["step"], "facts": self.facts()}
        if event["step"] % content["history_every"] == 0:
            self._remember([event["step"], number(event.get("loss")), number(event.get("tau_proxy")), rate])

    def _remember(self, point: list[Any]) -> None:
        content = self.content
        content["history"] = [each for each in content["history"] if each[0] < point[0]] + [point]
        if len(content["history"]) > 2 * POINTS:
            content["history_every"] *= 2
            content["history"] = [each for each in content["history"] if each[0] % content["history_every"] == 0]

    def _work(self, event: Event) -> None:
        """Seconds a row by worker: a running mean over some twenty rows."""
        begin, end = number(event.get("start")), number(event.get("end"))
        if begin is None or end is None:
            return
        means, worker = self.content["row_seconds"], str(event.get("worker"))
        means[worker] = means.get(worker, end - begin) * 0.95 + (end - begin) * 0.05

    def _eval(self, event: Event) -> None:
        content = self.content
        content["evaluation"] = event
        loss = number(event.get("loss"))
        best = content["best_evaluation"]
        if loss is not None and (best is None or loss < best["loss"]):
            better = {"loss": loss, "tau_proxy": event.get("tau_proxy"), "step": event.get("step")}
            self._improve("best_evaluation", better)

    def _tau(self, event: Event) -> None:
        content = self.content
        content["tau"] = event
        tau = number(event.get("decode"))
        if tau is not None and (content["best_tau"] is None or tau > content["best_tau"]["decode"]):
            self._improve("best_tau", {"decode": tau, "walk": event.get("walk"), "step": event.get("step")})

    def _improve(self, name: str, better: dict[str, Any]) -> None:
        """A new best; the ones before are kept for a run that goes on from an earlier step."""
        before = self.content[f"{name}s_before"]
        if self.content[name] is not None:
            before.append(self.content[name])
            del before[:-BESTS]
        self.content[name] = better

    def _checkpoint(self, event: Event) -> None:
        self.content.update(checkpoint=event, save_failures=0)

    def _evidence(self, event: Event) -> None:
        self.content["evidence"] = event

    def _ledger(self, event: Event) -> None:
        self.content["ledger"] = {**event, "lines": event.get("lines", [])[:40]}

    def _vitals(self, event: Event) -> None:
        self.content["vitals"] = event

    def _balance(self, event: Event) -> None:
        self.content["balance"] = event

    def _costs(self, event: Event) -> None:
        self.content["costs"] = event

    def _error(self, event: Event) -> None:
        self.content["error_count"] += 1
        self._count("errors", event)
        if event.get("topic") == "checkpoint":
            self.content["save_failures"] += 1

    def _notice(self, event: Event) -> None:
        self._count("notices", event)
        topic = event.get("topic")
        if topic and event.get("standing") is True:
            self.content["standing"][topic] = event
        elif topic and event.get("standing") is False:
            self.content["standing"].pop(topic, None)

    def _end(self, event: Event) -> None:
        self.content["end"] = event

    def _count(self, name: str, event: Event) -> None:
        """Counts texts that differ only in their numbers as one."""
        found = self.content[name]
        text = str(event.get("text"))
        key = re.sub(r"\d+(\.\d+)?", "#", text)[:300]
        if key not in found and len(found) >= DISTINCT:
            key = "others"
        entry = found.setdefault(key, {"count": 0})
        entry.update(count=entry["count"] + 1, text=text[:600], time=event.get("time"), topic=event.get("topic"))


def _is_after(event: dict[str, Any] | None, step: int) -> bool:
    return event is not None and (event.get("step") or 0) > step


def number(value: Any) -> float | None:
    """A finite number; None for everything else, also for the words "nan" and "inf" that events use."""
    return float(value) if quantity(value) else None


def read_summary(path: Path) -> Summary:
    """What the events of a log add up to, in a time that does not depend on its length.

    Of a log that holds no summary (written by other means), head and tail are read: `partial` is then true and counts
    are lower bounds.

    Raises:
        UserError: the file is missing or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            found = _last_summary(file, size)
            if found is not None:
                summary, place = found
                _fold_lines(summary, file, place, size)
                return summary
            summary = Summary()
            if size <= HEAD_BYTES + TAIL_BYTES:
                _fold_lines(summary, file, 0, size)
                return summary
            _fold_lines(summary, file, 0, HEAD_BYTES)
            _fold_lines(summary, file, size - TAIL_BYTES, size)
            summary.content["partial"] = True
            return summary
    except FileNotFoundError:
        raise UserError("no events here: not a run folder?", where=str(Path(path).resolve().parent)) from None
    except OSError as error:
        raise UserError(f"events cannot be read: {error.strerror}", where=str(path)) from None


def _last_summary(file: Any, size: int) -> tuple[Summary, int] | None:
    """The last whole summary of the file and the place behind it."""
    end, rest = size, b""
    while end > max(0, size - SEARCH_BYTES):
        begin = max(0, end - BLOCK)
        file.seek(begin)
        block = file.read(end - begin) + rest
        stop = len(block)
        while (at := block.rfind(MARK, 0, stop)) >= 0:
            start = block.rfind(b"\n", 0, at) + 1
            if start == 0 and begin > 0:
                break  # its beginning is in the block before
            finish = block.find(b"\n", at)
            event = parse(block[start : finish if finish >= 0 else len(block)])
            if finish >= 0 and event is not None and event["kind"] == "summary":
                return Summary(event.get("content")), begin + finish + 1
            stop = at
        first = block.find(b"\n")
        rest = block if first < 0 else block[: first + 1]
        if len(rest) > SEARCH_BYTES:
            return None
        end = begin
    return None


def _fold_lines(summary: Summary, file: Any, begin: int, end: int) -> None:
    for event in _events(file, begin, end):
        summary.fold(event)


def _events(file: Any, begin: int, end: int) -> Iterator[Event]:
    """Whole events between two places; what is cut at either is left out."""
    file.seek(max(0, begin - 1))
    if begin and file.read(1) != b"\n":
        file.readline()
    while (place := file.tell()) < end:
        line = file.readline(end - place)
        event = parse(line)
        if event is not None and line.endswith(b"\n"):
            yield event


def parse(line: bytes) -> Event | None:
    """One line as an event; None if it is torn or something else.

    An event that is not shaped as readers expect comes as one of the kind "malformed". Halves of letters, which JSON
    can spell and UTF-8 cannot, come as question marks.
    """
    try:
        event = json.loads(line.decode())
        if b"\\u" in line:
            event = json.loads(json.dumps(event, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):  # also a UTF-8 sequence cut in the middle
        return None
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
        return None
    return event if well_formed(event) else {"kind": MALFORMED}
