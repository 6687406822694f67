"""The format of a run's log and JSON files, as far as readers rely on it; checked once, where JSON becomes a dict.

A log may be another program's, another release's, or damaged in a way that leaves JSON behind. Readers (summary,
status, history, trace, notices) take fields as they are: what is shaped otherwise does not reach them. pydantic only
says yes or no; readers keep their dicts. Fields and kinds that are not named here pass, because nobody reads them.
Cost: about a microsecond an event, less than reading its JSON; some 25 ms at the start of a command.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from typing_extensions import Required, TypedDict  # pydantic wants this one before Python 3.12

LARGEST = 1e100  # sums and squares of such numbers are still finite
WHOLE = 2**53  # whole numbers up to it are exact as floats
LAST_MOMENT = 1e11  # seconds: the year 5138, which calendars still know

# Numbers alone are strict: pydantic would take true and "1" for one, but nothing in JSON for a text, a list or a dict
# that is none. A tuple here is a list of that length in JSON, which strictness would refuse.
Quantity = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=-LARGEST, lt=LARGEST)]
Positive = Annotated[Quantity, Field(gt=0)]
Whole = Annotated[int, Field(strict=True, gt=-WHOLE, lt=WHOLE)]
Count = Annotated[Whole, Field(ge=0)]
Moment = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, lt=LAST_MOMENT)]  # seconds since 1970
# What was measured: a number, the word that stands for one that is not finite, or nothing.
Figure = Quantity | Literal["nan", "inf", "-inf"] | None
# Of a worker or a device: at least one word, by Python's notion of white space.
Name = Annotated[str, Field(pattern=r"[^\s\x1c-\x1f]")]
Shares = dict[Name, dict[Name, Quantity]]  # of its time that a worker spent on each thing


class Device(TypedDict, total=False):
    """Bytes, MHz, watts, °C; `use` and `volatility` are shares."""

    device: Required[Name]
    memory_used: Quantity
    memory_total: Quantity
    use: Quantity
    clock: Quantity
    clock_max: Quantity
    power: Quantity
    power_limit: Quantity
    temperature: Quantity
    slowed_by: list[str] | None
    allocated: Quantity
    allocated_peak: Quantity
    reserved: Quantity
    retries: Quantity  # of the allocator, since the start
    volatility: Quantity  # of the reserved memory since the last look
    volatile_because: str


class Interpreter(TypedDict, total=False):
    taken: Quantity | None  # share of the moments at which another thread held it


class Event(TypedDict, total=False):
    """What all events have, besides their `kind`; those of "evidence", "costs" and "end" need no more."""

    time: Required[Moment]


class Lines(Event, total=False):
    """A plan, or the ledger of what is compiled: as people read it."""

    lines: list[str]


class Run(Event, total=False):
    """The run starts, or goes on after a stop."""

    step: Whole | None  # that it goes on from
    steps: Whole | None
    cards: dict[Name, str] | None  # model by device
    anchors: Quantity | None  # of an update, at most


class Step(Event, total=False):
    """An update of the drafter."""

    step: Required[Whole]
    steps: Whole | None
    unit: str  # what is counted, if it is not steps
    loss: Figure
    tau_proxy: Figure
    accept_by_slot: list[Figure] | None
    lr: Figure
    grad_norm: Figure
    blocks: Figure  # anchors that taught something
    tokens_per_second: Figure
    rate_seconds: Figure  # that the rate is the mean of
    data_wait: Figure  # share of the time
    eta_seconds: Figure


class Span(Event, total=False):
    worker: Required[Name]
    start: Required[Quantity]  # seconds since 1970, as is `end`
    end: Required[Quantity]


class Work(Span, total=False):
    """A worker was at a row from `start` to `end`."""

    row: Required[Whole]
    queue: Quantity  # rows that waited for it
    input: Figure  # seconds before `start` with nothing to do: no row had come
    output: Figure  # seconds after `end` with nothing to do: the next queue was full


class Phase(Span, total=False):
    """A worker did something that belongs to no row."""

    what: Required[str]
    number: Required[Whole]


class Evaluation(Event, total=False):
    """On held-out rows."""

    step: Required[Whole]
    loss: Figure
    tau_proxy: Figure


class Tau(Event, total=False):
    """Acceptance length on held-out prompts, decoded and walked along the text."""

    step: Required[Whole]
    decode: Figure
    walk: Figure


class Checkpoint(Event, total=False):
    step: Whole | None
    path: str


class Vitals(Event, total=False):
    step: Whole
    devices: list[Device] | None
    host: dict[Name, Quantity] | None
    queues: dict[Name, tuple[Quantity, Quantity]] | None  # rows in it, and its size
    workers: Shares | None
    interpreter: Interpreter | None


class Balance(Event, total=False):
    workers: Shares | None


class Message(Event, total=False):
    """An error or a notice."""

    topic: str | None


class Facts(TypedDict, total=False):
    """What may explain the speed of a moment."""

    cards: dict[Name, str] | None
    data_wait: Figure
    evidence: dict | None
    ledger: list[str] | None
    row_seconds: dict[Name, Quantity] | None
    devices: list[Device] | None
    workers: Shares | None
    host: dict[Name, Quantity] | None


class BestRate(TypedDict, total=False):
    rate: Required[Positive]
    step: Required[Whole]
    facts: Required[Facts]


class BestEvaluation(TypedDict, total=False):
    loss: Required[Quantity]
    step: Whole | None


class BestTau(TypedDict, total=False):
    decode: Required[Quantity]
    step: Required[Whole]


class KeptLedger(Event, total=False):
    lines: Required[list[str]]


class Told(TypedDict, total=False):
    """A text that errors or notices had in common but for its numbers."""

    count: Required[Count]
    text: Required[str]
    time: Moment | None
    topic: str | None


class Content(TypedDict, total=False):
    """All events before, folded (`summary.Summary`)."""

    events: Count
    starts: Count
    malformed: Count
    first_time: Moment | None
    time: Moment | None
    run: Run | None
    step: Step | None
    step_times: list[Moment]
    rates: list[Quantity]
    best_rate: BestRate | None
    row_seconds: dict[Name, Quantity]
    evaluation: Evaluation | None
    best_evaluation: BestEvaluation | None
    best_evaluations_before: list[BestEvaluation]
    tau: Tau | None
    best_tau: BestTau | None
    best_taus_before: list[BestTau]
    checkpoint: Checkpoint | None
    save_failures: Count
    evidence: Event | None
    ledger: KeptLedger | None
    vitals: Vitals | None
    balance: Balance | None
    costs: Event | None
    error_count: Count
    errors: dict[str, Told]
    notices: dict[str, Told]
    standing: dict[str, dict]
    end: Event | None
    history: list[tuple[Whole, Quantity | None, Quantity | None, Quantity | None]]  # step, loss, τ proxy, tokens/s
    history_every: Annotated[Whole, Field(gt=0)]


class SummaryFields(Event, total=False):
    content: Required[Content]


class RunConfigFields(TypedDict, total=False):
    training: dict | None


class RunFile(TypedDict, total=False):
    config: RunConfigFields | None


class ResolvedFile(TypedDict, total=False):
    data: dict | None


class Machine(TypedDict, total=False):
    environment: Required[dict[str, str]]  # variables


class Commit(TypedDict, total=False):
    id: Required[str]
    changes: str  # hash of what was not committed
    untracked: list[str]


class EnvironmentFile(TypedDict, total=False):
    draftsmith: Required[str]
    sources: str
    machine: Required[Machine]
    packages: Required[dict[str, str]]
    commit: Commit | None


class LedgerFile(TypedDict, total=False):
    entries: list[dict] | None


Check = Callable[[Any], bool]


def _check(shape: Any) -> Check:
    """A function that tells whether a value has the shape."""
    return TypeAdapter(shape).validator.isinstance_python


quantity = _check(Quantity)
ENVIRONMENT = TypeAdapter(EnvironmentFile)
_EVENT = _check(Event)
EVENTS: dict[str, Check] = {
    "plan": _check(Lines),
    "run": _check(Run),
    "step": _check(Step),
    "work": _check(Work),
    "phase": _check(Phase),
    "eval": _check(Evaluation),
    "tau": _check(Tau),
    "checkpoint": _check(Checkpoint),
    "evidence": _EVENT,
    "ledger": _check(Lines),
    "vitals": _check(Vitals),
    "balance": _check(Balance),
    "costs": _EVENT,
    "error": _check(Message),
    "notice": _check(Message),
    "end": _EVENT,
    "summary": _check(SummaryFields),
}
_DICT = _check(dict)
FILES: dict[str, Check] = {
    "run.json": _check(RunFile),
    "resolved.json": _check(ResolvedFile),
    "environment.json": ENVIRONMENT.validator.isinstance_python,
    "ledger.json": _check(LedgerFile),
}


def well_formed(event: dict[str, Any]) -> bool:
    """Whether readers can take an event, which has a kind, as it is."""
    return EVENTS.get(event["kind"], _EVENT)(event)


def read_record(path: Path) -> dict[str, Any] | None:
    """A JSON file of a run's folder; None if it is missing, cannot be read, or is shaped otherwise."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return content if FILES.get(path.name, _DICT)(content) else None
