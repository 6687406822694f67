"""The shape that readers of a run's files rely on; checked once, where a line or a file becomes a dict.

A log may be another program's, another release's, or damaged in a way that leaves JSON behind. Readers (summary,
status, history, trace, notices) take fields as they are: what is shaped otherwise does not reach them. Fields and kinds
that are not named here pass, because nobody reads them. Cost: one to four microseconds an event, about as much as
reading its JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Check = Callable[[Any], bool]

LARGEST = 1e100  # sums and squares of such numbers are still finite
WHOLE = 2**53  # whole numbers up to it are exact as floats
LAST_MOMENT = 1e11  # seconds: the year 5138, which calendars still know


def quantity(value: Any) -> bool:
    """A finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -WHOLE < value < WHOLE


def positive(value: Any) -> bool:
    return quantity(value) and value > 0


def count(value: Any) -> bool:
    return whole(value) and value >= 0


def moment(value: Any) -> bool:
    """Seconds since 1970."""
    return quantity(value) and 0 <= value < LAST_MOMENT


def figure(value: Any) -> bool:
    """What was measured: a number, the word that stands for one that is not finite, or nothing."""
    return value is None or quantity(value) or value in ("nan", "inf", "-inf")


def text(value: Any) -> bool:
    return isinstance(value, str)


def name(value: Any) -> bool:
    """Of a worker or a device: at least one word."""
    return isinstance(value, str) and bool(value.strip())


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def dict_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def named(check: Check) -> Check:
    """A dict with names as keys."""
    return lambda value: isinstance(value, dict) and all(map(name, value)) and all(map(check, value.values()))


def row(*checks: Check) -> Check:
    """A list with one value for each check."""
    return lambda value: (
        isinstance(value, list) and len(value) == len(checks) and all(c(v) for c, v in zip(checks, value, strict=True))
    )


def record(needed: dict[str, Check] | None = None, /, **others: Check) -> Check:
    """A dict with all of `needed`; `others` may be missing."""
    required = list((needed or {}).items())
    optional = list(others.items())

    def check(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and all(key in value and good(value[key]) for key, good in required)
            and all(key not in value or good(value[key]) for key, good in optional)
        )

    return check


anything = record()
_SHARES = named(named(quantity))
_DEVICE_FIGURES = (
    *("memory_used", "memory_total", "use", "clock", "clock_max", "power", "power_limit", "temperature"),
    *("allocated", "allocated_peak", "reserved", "retries", "volatility"),
)
_DEVICE = record(
    {"device": name},
    **dict.fromkeys(_DEVICE_FIGURES, quantity),
    slowed_by=or_none(list_of(text)),
    volatile_because=text,
)


def _event(needed: dict[str, Check] | None = None, /, **others: Check) -> Check:
    return record({"time": moment, **(needed or {})}, **others)


_STEP_FIGURES = (
    *("loss", "tau_proxy", "lr", "grad_norm", "tokens_per_second", "rate_seconds", "data_wait", "eta_seconds"),
    "blocks",
)
_SPAN = {"worker": name, "start": quantity, "end": quantity}
_UNKNOWN = _event()
EVENTS: dict[str, Check] = {
    "plan": _event(lines=list_of(text)),
    "run": _event(steps=or_none(whole), cards=or_none(named(text)), anchors=or_none(quantity)),
    "step": _event(
        {"step": whole},
        steps=or_none(whole),
        accept_by_slot=or_none(list_of(figure)),
        unit=text,
        **dict.fromkeys(_STEP_FIGURES, figure),
    ),
    "work": _event({**_SPAN, "row": whole}, queue=quantity, input=figure, output=figure),
    "phase": _event({**_SPAN, "what": text, "number": whole}),
    "eval": _event({"step": whole}, loss=figure, tau_proxy=figure),
    "tau": _event({"step": whole}, decode=figure, walk=figure),
    "checkpoint": _event(path=text),
    "evidence": _UNKNOWN,
    "ledger": _event(lines=list_of(text)),
    "vitals": _event(
        step=whole,
        devices=or_none(list_of(_DEVICE)),
        host=or_none(named(quantity)),
        queues=or_none(named(row(quantity, quantity))),
        workers=or_none(_SHARES),
        interpreter=or_none(record(taken=or_none(quantity))),
    ),
    "balance": _event(workers=or_none(_SHARES)),
    "costs": _UNKNOWN,
    "error": _event(topic=or_none(text)),
    "notice": _event(topic=or_none(text)),
    "end": _UNKNOWN,
}

_FACTS = record(
    cards=or_none(named(text)),
    data_wait=figure,
    evidence=or_none(anything),
    ledger=or_none(list_of(text)),
    row_seconds=or_none(named(quantity)),
    devices=or_none(list_of(_DEVICE)),
    workers=or_none(_SHARES),
    host=or_none(named(quantity)),
)
_TOLD = dict_of(record({"count": count, "text": text}, time=or_none(moment), topic=or_none(text)))
_LATEST = {"run": "run", "step": "step", "evaluation": "eval"}
_LATEST.update({kind: kind for kind in ("tau", "checkpoint", "evidence", "vitals", "balance", "costs", "end")})
_SUMMARY = record(
    **dict.fromkeys(("events", "starts", "save_failures", "error_count", "malformed"), count),
    **dict.fromkeys(("first_time", "time"), or_none(moment)),
    **{place: or_none(EVENTS[kind]) for place, kind in _LATEST.items()},
    step_times=list_of(moment),
    rates=list_of(quantity),
    best_rate=or_none(record({"rate": positive, "step": whole, "facts": _FACTS})),
    row_seconds=named(quantity),
    best_evaluation=or_none(record({"loss": quantity})),
    best_tau=or_none(record({"decode": quantity, "step": whole})),
    ledger=or_none(_event({"lines": list_of(text)})),
    errors=_TOLD,
    notices=_TOLD,
    standing=dict_of(anything),
    history=list_of(row(whole, *3 * [or_none(quantity)])),
    history_every=lambda value: count(value) and value > 0,
)
EVENTS["summary"] = _event({"content": _SUMMARY})

FILES: dict[str, Check] = {
    "run.json": record(config=or_none(record(training=or_none(anything)))),
    "resolved.json": record(data=or_none(anything)),
    "environment.json": record(machine=or_none(anything), packages=or_none(anything)),
    "ledger.json": record(entries=or_none(list_of(anything))),
}


def well_formed(event: dict[str, Any]) -> bool:
    """Whether readers can take an event, which has a kind, as it is."""
    return EVENTS.get(event["kind"], _UNKNOWN)(event)


def read_record(path: Path) -> dict[str, Any] | None:
    """A JSON file of a run's folder; None if it is missing, cannot be read, or is shaped otherwise."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return content if FILES.get(path.name, anything)(content) else None
