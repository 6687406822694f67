"""What a run notices by itself, and the causes that it can prove.

A listener of the event log that writes "notice" events with a `topic`. A notice that stands (`standing` true) is taken
back by a later one (`standing` false), so that each lasting trouble is told once, not at every step:

    slow        speed has been below its own best (of all starts of this run) for a while
    slower      its best is below that of an earlier run with the same shapes on the same cards
    tau         τ falls while the loss falls
    anchors     most anchors teach nothing
    loss        a loss far above those before it (told, does not stand)

A cause is named only if the record shows it: a fact that was one way when the run was fast and is another way now. What
cannot be proved is said as such. Cost: some microseconds a step, all from figures that events carry anyway.
"""

from __future__ import annotations

import json
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from draftsmith.errors import UserError
from draftsmith.observe.events import EventLog
from draftsmith.observe.live import short_count, short_loss
from draftsmith.observe.shape import read_record
from draftsmith.observe.summary import Event, number, read_summary

SLOW, FINE = 0.85, 0.95  # shares of the best speed: told below the one, taken back above the other
SLOW_STEPS = 20  # for so many steps in a row
SLOWER, SLOWER_STEPS = 0.9, 60  # against an earlier run, once there are so many steps
SPIKE_BEFORE, SPIKE_GAP = 30, 100  # losses that make a usual one; steps between two notices
TREND_EVALUATIONS, TREND_STEPS = 3, 200  # held-out results, or steps, in each half of a comparison
DEAD_SHARE, DEAD_STEPS = 0.5, 50
MORE_WAIT, MORE_PRESSURE = 0.1, 0.25  # shares of the time
MORE_VOLATILE = 0.05  # share of what the allocator holds
SLOWER_CLOCK = 0.92
SLOWER_WORKER = 1.25
_SHAPES = ("target", "drafter", "rows", "objective", "pipeline", "compile")
_TRAINING_SHAPES = ("rows_per_update", "dtype", "activation_checkpointing")


@dataclass(frozen=True)
class Earlier:
    """An earlier run to compare with: its folder, its best tokens per second, and what was so then."""

    folder: Path
    rate: float
    facts: dict[str, Any]


class Noticer:
    """See the module's docstring.

    Args:
        log: gets the notices; this is to be one of its listeners.
        earlier: run to compare with, if there is one.
        changed: what differs from the earlier run's environment, one line each.
    """

    def __init__(self, log: EventLog, earlier: Earlier | None = None, changed: list[str] | None = None) -> None:
        self._log, self._earlier, self._changed = log, earlier, changed or []
        self._standing: set[str] = set()
        self._below, self._steps, self._best = 0, 0, 0.0
        self._losses: deque[float] = deque(maxlen=SPIKE_BEFORE * 3)
        self._last_spike = -SPIKE_GAP
        self._trend: deque[tuple[float, float]] = deque(maxlen=2 * TREND_STEPS)
        self._evaluations: deque[tuple[float, float]] = deque(maxlen=2 * TREND_EVALUATIONS)
        self._dead: deque[float] = deque(maxlen=DEAD_STEPS)
        self._norms: deque[float] = deque(maxlen=SPIKE_BEFORE * 3)

    def __call__(self, event: Event) -> None:
        if event["kind"] == "step":
            self._steps += 1
            self._speed(event)
            self._earlier_speed(event)
            self._loss(event)
            self._anchors(event)
            self._follow(event, self._trend, TREND_STEPS, "training")
        elif event["kind"] == "eval":
            self._follow(event, self._evaluations, TREND_EVALUATIONS, "held-out")

    def _tell(self, topic: str, standing: bool | None, text: str, **more: Any) -> None:
        if standing is True:
            self._standing.add(topic)
        elif standing is False:
            self._standing.discard(topic)
        state = {} if standing is None else {"standing": standing}
        self._log.write("notice", topic=topic, **state, text=text, **more)

    def _speed(self, event: Event) -> None:
        summary = self._log.summary
        best, rate = summary["best_rate"], summary.rate()
        if best is None or rate is None or self._steps < SLOW_STEPS:
            return
        share = rate / best["rate"]
        self._below = self._below + 1 if share < SLOW else 0
        if "slow" in self._standing:
            if share >= FINE:
                self._tell("slow", False, f"speed is back at {share:.0%} of its best")
        elif self._below >= SLOW_STEPS:
            causes = causes_of(best["facts"], summary.facts())
            text = (
                f"{short_count(rate)} tok/s, {share:.0%} of its best ({short_count(best['rate'])} at step "
                f"{best['step']}): {_listed(causes)}"
            )
            self._tell("slow", True, text, causes=causes, step=event["step"])

    def _earlier_speed(self, event: Event) -> None:
        self._best = max(self._best, self._log.summary.rate() or 0.0) if self._steps >= 9 else 0.0
        earlier = self._earlier
        if earlier is None or self._steps < SLOWER_STEPS:
            return
        if "slower" in self._standing:
            if self._best >= FINE * earlier.rate:
                self._tell("slower", False, f"as fast as {earlier.folder} now")
        elif self._steps == SLOWER_STEPS and self._best < SLOWER * earlier.rate:
            causes = [*causes_of(earlier.facts, self._log.summary.facts()), *self._changed[:5]]
            share = self._best / earlier.rate
            text = (
                f"{share:.0%} of the speed of {earlier.folder} ({short_count(earlier.rate)} tok/s), same shapes and "
                f"cards: {_listed(causes)}"
            )
            self._tell("slower", True, text, causes=causes, step=event["step"])

    def _loss(self, event: Event) -> None:
        loss, norm = number(event.get("loss")), number(event.get("grad_norm"))
        if loss is None:
            return
        if len(self._losses) >= SPIKE_BEFORE:
            usual = median(self._losses)
            spread = 1.4826 * median(abs(each - usual) for each in self._losses)
            far = usual + max(8 * spread, 0.15 * abs(usual))
            if loss > far and event["step"] - self._last_spike >= SPIKE_GAP:
                self._last_spike = event["step"]
                norms = ""
                if norm is not None and self._norms:
                    norms = f"; gradient norm {norm:.3g}, usually {median(self._norms):.3g}"
                self._tell(
                    "loss", None, f"loss {short_loss(loss)} at step {event['step']}, usually {short_loss(usual)}{norms}"
                )
        self._losses.append(loss)
        if norm is not None:
            self._norms.append(norm)

    def _anchors(self, event: Event) -> None:
        anchors = (self._log.summary["run"] or {}).get("anchors")
        blocks = number(event.get("blocks"))
        if not anchors or blocks is None:
            return
        self._dead.append(1 - blocks / anchors)
        if len(self._dead) < DEAD_STEPS:
            return
        share = mean(self._dead)
        if "anchors" not in self._standing and share > DEAD_SHARE:
            text = f"{share:.0%} of the anchors teach nothing: rows hold too few taught tokens for rows.anchors"
            self._tell("anchors", True, text)
        elif "anchors" in self._standing and share < 0.8 * DEAD_SHARE:
            self._tell("anchors", False, f"{share:.0%} of the anchors teach nothing now")

    def _follow(self, event: Event, points: deque[tuple[float, float]], half: int, which: str) -> None:
        """Compares the means of the last `half` results with those of the `half` before."""
        loss, tau = number(event.get("loss")), number(event.get("tau_proxy"))
        if loss is None or tau is None:
            return
        points.append((loss, tau))
        if len(points) < 2 * half:
            return
        early, late = list(points)[:half], list(points)[half:]
        losses = mean(each[0] for each in early), mean(each[0] for each in late)
        taus = mean(each[1] for each in early), mean(each[1] for each in late)
        topic = f"tau {which}"
        # τ counts from 1: that is a token which needs no drafter.
        falls = losses[1] < 0.98 * losses[0] and taus[1] - 1 < 0.95 * (taus[0] - 1)
        if falls and topic not in self._standing:
            text = (
                f"{which}: τ falls ({taus[0]:.2f} to {taus[1]:.2f}) while the loss falls ({short_loss(losses[0])} to "
                f"{short_loss(losses[1])}): early slots are given up for late ones; see objective.gamma"
            )
            self._tell(topic, True, text, step=event["step"])
        elif topic in self._standing and taus[1] >= taus[0]:
            self._tell(topic, False, f"{which}: τ rises again ({taus[1]:.2f})")


def causes_of(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Facts that were one way when it was fast and are another way now, each as a line; see `Summary.facts`."""
    kinds = (_compile_causes, _device_causes, _worker_causes, _host_causes)
    return [line for kind in kinds for line in kind(then, now)]


def _compile_causes(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if then.get("cards") and now.get("cards") and sorted(then["cards"].values()) != sorted(now["cards"].values()):
        yield f"other cards: {_names(now['cards'])}, {_names(then['cards'])} then"
    before, after = then.get("evidence") or {}, now.get("evidence") or {}
    if before.get("ok") and after and not after.get("ok"):
        yield f"compile evidence changed: {after.get('text')}"
    for line in sorted(_eager_lines(now) - _eager_lines(then)):
        yield f"a fast path is gone: {line}"


def _eager_lines(facts: dict[str, Any]) -> set[str]:
    """Why regions run eager, by the ledger's table."""
    return {line[line.index("eager:") :].strip() for line in facts.get("ledger") or [] if "eager:" in line}


def _device_causes(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    before = {device["device"]: device for device in then.get("devices") or []}
    for device in now.get("devices") or []:
        name, other = device["device"], before.get(device["device"], {})
        clock, clock_then = device.get("clock"), other.get("clock")
        why = [each for each in device.get("slowed_by") or [] if each not in (other.get("slowed_by") or [])]
        reason = f" ({', '.join(why)})" if why else ""
        if clock and clock_then and clock < SLOWER_CLOCK * clock_then:
            yield f"{name} runs at {clock} MHz, {clock_then} MHz then{reason}"
        elif why:
            yield f"{name} is slowed down: {', '.join(why)}"
        retries = device.get("retries", 0) - other.get("retries", 0)
        if other and retries > 0:
            yield f"{name} is short of memory: the allocator gave memory back and asked again {retries} times since"
        volatile, volatile_then = device.get("volatility"), other.get("volatility")
        because = device.get("volatile_because")  # none at the first look, which proves nothing
        if volatile is None or volatile_then is None or not because:
            continue
        if volatile > volatile_then + MORE_VOLATILE:
            yield f"memory on {name} is {volatile:.0%} volatile, {volatile_then:.0%} then ({because})"


def _worker_causes(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    wait, wait_then = number(now.get("data_wait")), number(then.get("data_wait"))
    if wait is not None and wait_then is not None and wait > wait_then + MORE_WAIT:
        yield f"drafters wait for rows {wait:.0%} of the time, {wait_then:.0%} then{_bottleneck(now)}"
    rows, rows_then = now.get("row_seconds") or {}, then.get("row_seconds") or {}
    for role in ("prefetch", "target", "drafter"):
        own = {name: seconds for name, seconds in rows.items() if name.startswith(role)}
        for name, seconds in own.items():
            others = [each for other, each in own.items() if other != name]
            known = rows_then.get(name)
            others_then = [each for other, each in rows_then.items() if other.startswith(role) and other != name]
            if not (others and known and others_then and median(others) and median(others_then)):
                continue
            ratio, ratio_then = seconds / median(others), known / median(others_then)
            if ratio > SLOWER_WORKER and ratio > SLOWER_WORKER * ratio_then:
                yield f"imbalance: {name} takes {ratio:.1f} times as long for a row as its like, {ratio_then:.1f} then"
    for role in ("target", "drafter"):
        all_now = [seconds for name, seconds in rows.items() if name.startswith(role)]
        all_then = [seconds for name, seconds in rows_then.items() if name.startswith(role)]
        if all_now and all_then and median(all_now) > SLOWER_WORKER * median(all_then):
            yield f"{role}s take {1e3 * median(all_now):.3g} ms for a row, {1e3 * median(all_then):.3g} ms then"


def _bottleneck(now: dict[str, Any]) -> str:
    """Which role keeps the drafters waiting, by where the others' time goes."""
    shares: dict[str, list[dict[str, float]]] = {}
    for name, share in (now.get("workers") or {}).items():
        shares.setdefault(name.split()[0], []).append(share)
    if not shares.get("target"):
        return ""
    busy, waiting = (mean(each.get(what, 0.0) for each in shares["target"]) for what in ("busy", "input"))
    if busy > 0.8:
        return f": targets are {busy:.0%} busy"
    if waiting > 0.2:
        return f": targets wait for prefetch {waiting:.0%} of the time"
    return ""


def _host_causes(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    host, host_then = now.get("host") or {}, then.get("host") or {}
    load, load_then, cores = (number(each) for each in (host.get("load"), host_then.get("load"), host.get("cores")))
    if load and load_then is not None and cores and load > 1.3 * cores and load > 1.5 * load_then:
        yield f"the machine's load is {load:.1f} on {cores:.0f} cores, {load_then:.1f} then"
    pressure, pressure_then = number(host.get("cpu_pressure")), number(host_then.get("cpu_pressure"))
    if pressure is not None and pressure_then is not None and pressure > pressure_then + MORE_PRESSURE:
        yield f"somebody waits for a core {pressure:.0%} of the time, {pressure_then:.0%} then"
    if "memory_available" in host and host["memory_available"] < 0.03 * host.get("memory_total", 0):
        yield f"the machine has {host['memory_available'] / 2**30:.1f} GiB of memory left"


def _listed(causes: list[str]) -> str:
    return "; ".join(causes) if causes else "no cause can be proved"


def _names(cards: dict[str, str]) -> str:
    return ", ".join(sorted(set(cards.values())))


def find_earlier(folder: Path, cards: dict[str, str], *, most: int = 200) -> Earlier | None:
    """The fastest earlier run beside `folder` (its parent is searched) with the same shapes on the same cards.

    Args:
        folder: of this run; its `run.json` says the config.
        cards: makers' names by device.
        most: folders that are looked at, newest first.

    Runs that cannot be read are passed over: they are others' and prove nothing.
    """
    own = _config_of(folder)
    if own is None:
        return None
    found: Earlier | None = None
    for path in _runs_beside(folder)[:most]:
        config = _config_of(path)
        if config is None or _shapes(config) != _shapes(own):
            continue
        try:
            summary = read_summary(path / "events.jsonl")
        except UserError:
            continue
        best = summary["best_rate"]
        if best is None or sorted(((summary["run"] or {}).get("cards") or {}).values()) != sorted(cards.values()):
            continue
        if found is None or best["rate"] > found.rate:
            found = Earlier(folder.parent / path.name, best["rate"], best["facts"])
    return found


def _runs_beside(folder: Path) -> list[Path]:
    """Folders with a log beside `folder`, last written first; what may not be looked into is left out."""
    own, dated = folder.resolve(), []
    with suppress(OSError):
        for path in own.parent.iterdir():
            with suppress(OSError):
                log = (path / "events.jsonl").stat()
                if path != own and stat.S_ISREG(log.st_mode):
                    dated.append((log.st_mtime, path))
    return [path for _, path in sorted(dated, reverse=True)]


def environment_changes(earlier: Path, now: Path) -> list[str]:
    """What differs between the environments of two runs, "torch 2.11.0 then, 2.13.0 now"; empty if unknown."""
    records = []
    for folder in (earlier, now):
        record = read_record(folder / "environment.json")
        if record is None:
            return []
        machine = {name: json.dumps(value, sort_keys=True) for name, value in (record.get("machine") or {}).items()}
        records.append({**machine, **(record.get("packages") or {}), "sources": record.get("sources")})
    then, here = records
    return [
        f"{name} {_short(then.get(name))} then, {_short(here.get(name))} now"
        for name in sorted({*then, *here})
        if then.get(name) != here.get(name)
    ]


def _short(value: Any) -> str:
    text = "none" if value is None else str(value).strip('"')
    return text if len(text) <= 60 else f"{text[:57]}..."


def _config_of(folder: Path) -> dict[str, Any] | None:
    return (read_record(folder / "run.json") or {}).get("config")


def _shapes(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that decides speed."""
    training = config.get("training") or {}
    return {**{name: config.get(name) for name in _SHAPES}, **{name: training.get(name) for name in _TRAINING_SHAPES}}
