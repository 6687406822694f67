"""How a run is doing, in one look, from its folder alone: another process, another machine, a read-only mount.

Read are the last summary of the event log and the few events behind it (`summary.py`), and whether somebody holds the
folder (`lock.py`). Nothing is written, torch is not imported, and the time does not depend on the length of the log.

    starting   held, no step yet
    running    held, steps come
    silent     held (or it cannot be known), and nothing has come for too long
    finished   ended by itself
    stopped    ended because somebody wanted it to, before all steps were done
    failed     ended with an error
    crashed    nobody holds it, and it never said that it ended: killed, or the machine went down

Healthy is a run that is starting, running, finished or was stopped by hand, with no standing problem: the last
checkpoint written, the compiled path proved, speed near its own best, a finite loss.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from draftsmith.errors import UserError, what_is_at
from draftsmith.observe.live import printable, short_count, short_loss, short_time
from draftsmith.observe.lock import Holder, look_at_lock
from draftsmith.observe.summary import Summary, number, read_summary

SILENT_SECONDS = 300.0  # without any event; vitals come every ten seconds
STEPS_SILENT = 20.0  # or without a step for so many times its usual duration
SLOW_SHARE = 0.7  # of its own best speed
GIB = 2**30
_VITALS = ("devices", "host", "queues", "workers", "interpreter")
_ASKED_FOR = ("interrupted", "time limit")  # by a person, or by the command that started it


@dataclass(frozen=True)
class Status:
    """How a run is doing.

    Attributes:
        folder: of the run.
        state: see the module's docstring.
        reason: why it ended, or what is known of the silence.
        holder: who holds the folder.
        age: seconds since the last event; never negative, whatever the clocks did.
        problems: what keeps it from being healthy, one line each.
        summary: what its events add up to.
    """

    folder: Path
    state: str
    reason: str
    holder: Holder
    age: float | None
    problems: list[str]
    summary: Summary = field(repr=False)

    @property
    def healthy(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Everything that `lines` shows, as JSON can hold it."""
        summary, step = self.summary, self.summary["step"] or {}
        rate, best = summary.rate(), summary["best_rate"]
        return {
            "folder": str(self.folder),
            "state": self.state,
            "reason": self.reason,
            "healthy": self.healthy,
            "problems": self.problems,
            "pid": self.holder.pid,
            "host": self.holder.host,
            "seconds_since_last_event": self.age,
            "step": step.get("step"),
            "steps": step.get("steps") or (summary["run"] or {}).get("steps"),
            "eta_seconds": number(step.get("eta_seconds")),
            "starts": summary["starts"],
            "loss": number(step.get("loss")),
            "tau_proxy": number(step.get("tau_proxy")),
            "held_out": _picked(summary["evaluation"], "step", "loss", "tau_proxy"),
            "best_held_out": summary["best_evaluation"],
            "tau": _picked(summary["tau"], "step", "decode", "walk"),
            "best_tau": summary["best_tau"],
            "tokens_per_second": rate,
            "best_tokens_per_second": None if best is None else best["rate"],
            "share_of_best": None if best is None or rate is None else rate / best["rate"],
            "data_wait": number(step.get("data_wait")),
            **{name: (summary["vitals"] or {}).get(name) for name in _VITALS},
            "balance": _picked(summary["balance"], "step", "text", "workers", "costs", "seconds"),
            "compile": _picked(summary["evidence"], "step", "ok", "text"),
            "checkpoint": _picked(summary["checkpoint"], "step", "path", "stall_seconds", "write_seconds", "time"),
            "failed_saves": summary["save_failures"],
            "errors": list(summary["errors"].values()),
            "error_count": summary["error_count"],
            "notices": list(summary["notices"].values()),
            "events": summary["events"],
            "partial": summary["partial"],
            "malformed": summary["malformed"],
        }

    def lines(self, now: float | None = None) -> list[str]:
        """For people, on a terminal of about 100 columns; whatever the log says, each is one printable line."""
        now = time.time() if now is None else now
        facts, summary = self.to_json(), self.summary
        rows = [("", self._headline(facts)), ("loss", _loss_line(facts)), ("speed", _speed_line(facts))]
        rows += [("devices" if i == 0 else "", line) for i, line in enumerate(_device_lines(facts))]
        rows += [("queues", _queue_line(facts)), ("workers", _worker_line(facts))]
        rows += [("balance", str((facts["balance"] or {}).get("text") or ""))]
        evidence = summary["evidence"]
        if evidence is not None:
            rows.append(("compile", str(evidence.get("text"))))
        elif summary["ledger"] is not None:
            ways = {line.split("  ")[-1].strip() for line in summary["ledger"]["lines"][1:]}
            rows.append(("compile", "; ".join(sorted(ways))[:200]))
        saved = summary["checkpoint"]
        if saved is not None:
            rows.append(("saved", f"{Path(str(saved.get('path'))).name}, {_ago(saved, now)}"))
        at_least = "at least " if summary["partial"] else ""
        for name, word in (("errors", "error"), ("notices", "note")):
            entries = sorted(summary[name].values(), key=lambda each: each.get("time") or 0)[-6:]
            for each in entries:
                times = f"{at_least}{each['count']} x " if at_least or each["count"] > 1 else ""
                rows.append((word, f"{times}{each['text']} ({_ago(each, now)})"))
        if summary["malformed"]:
            rows.append(("note", f"{at_least}{summary['malformed']} malformed events in the log are left out"))
        rows += [("PROBLEM", problem) for problem in self.problems]
        return [printable(f"{name:<8}{text}" if name or text.startswith(" ") else text) for name, text in rows if text]

    def _headline(self, facts: dict[str, Any]) -> str:
        parts = [f"{self.folder}: {self.state}" + (f" ({self.reason})" if self.reason else "")]
        if facts["step"] is not None:
            share = f" ({facts['step'] / facts['steps']:.0%})" if facts["steps"] else ""
            parts.append(f"step {facts['step']:,}" + (f"/{facts['steps']:,}" if facts["steps"] else "") + share)
        if self.state == "running" and facts["eta_seconds"] is not None:
            parts.append(f"ETA {short_time(facts['eta_seconds'])}")
        if facts["starts"] > 1:
            parts.append(f"started {facts['starts']} times")
        if self.holder.held == "yes" and self.holder.pid is not None:
            parts.append(self.holder.name())
        return " · ".join(parts)


def read_status(folder: str | Path, now: float | None = None) -> Status:
    """Looks at a run.

    Args:
        folder: of the run.
        now: wall clock, for tests.

    Raises:
        UserError: not a run folder, or it cannot be read.
    """
    path = Path(folder)
    now = time.time() if now is None else now
    if what_is_at(path) != "folder":
        raise UserError("no such run folder", where=str(path))
    events = path / "events.jsonl"
    try:
        holder = look_at_lock(path)
    except OSError:
        holder = Holder("unknown", None, None)
    if not events.exists() and (path / "run.json").exists():
        summary = Summary()
    else:
        summary = read_summary(events)
    age = None if summary["time"] is None else max(0.0, now - float(summary["time"]))
    state, reason = _state(summary, holder, age, now)
    return Status(path, state, reason, holder, age, _problems(summary, state, reason, age), summary)


def _state(summary: Summary, holder: Holder, age: float | None, now: float) -> tuple[str, str]:
    end, times = summary["end"], summary["step_times"]
    if end is not None and (holder.held != "yes" or age is None or age < SILENT_SECONDS):
        reason = str(end.get("reason"))
        if reason == "failed":
            return "failed", ""
        if reason in ("all steps done", "overfitted"):
            return "finished", reason
        return "stopped", reason
    usual = summary.seconds_per_step()
    patience = SILENT_SECONDS if usual is None else max(SILENT_SECONDS, STEPS_SILENT * usual)
    if holder.held == "no" and (holder.pid is not None or age is None or age > SILENT_SECONDS):
        return "crashed", "no process holds it, and it never said that it ended"
    if age is not None and age > patience:
        return "silent", f"no event for {short_time(age)}"
    if times and now - times[-1] > patience:
        return "silent", f"no step for {short_time(now - times[-1])}"
    return ("running" if times else "starting"), ""


def _problems(summary: Summary, state: str, reason: str, age: float | None) -> list[str]:
    found = []
    step = summary["step"] or {}
    if state in ("crashed", "silent"):
        found.append(f"{state}: {reason}; continue it with --resume")
    if state == "failed":
        last = max(summary["errors"].values(), key=lambda each: each.get("time") or 0, default={"text": "no word why"})
        found.append(f"failed: {last['text']}")
    if state == "stopped" and reason not in _ASKED_FOR:
        found.append(f"stopped before the last step: {reason}; continue it with --resume")
    if summary["save_failures"]:
        found.append(f"the last {summary['save_failures']} attempts to save failed")
    evidence = summary["evidence"]
    if evidence is not None and evidence.get("ok") is False:
        found.append(f"the compiled path is not proved: {evidence.get('text')}")
    if step and "loss" in step and number(step["loss"]) is None:
        found.append(f"the loss of step {step['step']} is {step['loss']}")
    for topic, event in summary["standing"].items():
        if state == "running" or topic not in ("slow", "slower"):
            found.append(str(event.get("text")))
    rate, best = summary.rate(), summary["best_rate"]
    if state == "running" and "slow" not in summary["standing"] and rate is not None and best is not None:
        share = rate / best["rate"]
        if share < SLOW_SHARE:
            found.append(f"{share:.0%} of its own best speed ({short_count(best['rate'])} tok/s, step {best['step']})")
    return found


def _loss_line(facts: dict[str, Any]) -> str:
    parts = []
    if facts["loss"] is not None:
        parts.append(short_loss(facts["loss"]))
    if facts["tau_proxy"] is not None:
        parts.append(f"τ proxy {facts['tau_proxy']:.2f}")
    held_out = facts["held_out"]
    if held_out is not None and number(held_out["loss"]) is not None:
        proxy = number(held_out["tau_proxy"])
        tau = "" if proxy is None else f", τ proxy {proxy:.2f}"
        parts.append(f"held-out {short_loss(held_out['loss'])}{tau} at step {held_out['step']}")
    tau = facts["tau"]
    if tau is not None and number(tau["decode"]) is not None and facts["best_tau"] is not None:
        parts.append(
            f"τ decoded {tau['decode']:.2f} at step {tau['step']}, best {facts['best_tau']['decode']:.2f} "
            f"at step {facts['best_tau']['step']}"
        )
    return " · ".join(parts)


def _speed_line(facts: dict[str, Any]) -> str:
    if facts["tokens_per_second"] is None:
        return ""
    parts = [f"{short_count(facts['tokens_per_second'])} tok/s"]
    if facts["share_of_best"] is not None:
        parts.append(f"{facts['share_of_best']:.0%} of its best ({short_count(facts['best_tokens_per_second'])})")
    if facts["data_wait"] is not None:
        parts.append(f"data-wait {facts['data_wait']:.0%}")
    return " · ".join(parts)


def _device_lines(facts: dict[str, Any]) -> list[str]:
    lines = []
    for device in facts["devices"] or []:
        parts = [f"{device['device']} {device.get('name', '')}".strip()]
        if {"memory_used", "memory_total"} <= device.keys():
            parts.append(f"{device['memory_used'] / GIB:.1f}/{device['memory_total'] / GIB:.1f} GiB")
        if "allocated" in device:
            parts.append(f"ours {device['allocated'] / GIB:.1f} GiB")
        if device.get("volatile_because") and "volatility" in device:
            parts.append(f"memory {device['volatility']:.0%} volatile: {device['volatile_because']}")
        if "use" in device:
            parts.append(f"{device['use']:.0%} busy")
        if {"clock", "clock_max"} <= device.keys():
            parts.append(f"{device['clock']}/{device['clock_max']} MHz")
        if "power" in device:
            parts.append(f"{device['power']:.0f} W")
        if "temperature" in device:
            parts.append(f"{device['temperature']} °C")
        if device.get("slowed_by"):
            parts.append(f"slowed by {', '.join(device['slowed_by'])}")
        lines.append(" · ".join(parts))
    host = facts["host"] or {}
    parts = []
    if {"load", "cores"} <= host.keys():
        parts.append(f"load {host['load']:.1f} on {host['cores']} cores")
    if "process_memory" in host:
        parts.append(f"process {host['process_memory'] / GIB:.1f} GiB")
    if "disk_free" in host:
        parts.append(f"disk {host['disk_free'] / GIB:.0f} GiB free")
    if parts:
        lines.append("host " + " · ".join(parts))
    return lines


def _queue_line(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {depth}/{size}" for name, (depth, size) in (facts["queues"] or {}).items())


_SHARES = {"busy": "busy", "input": "short of rows", "output": "held back"}
_FURTHER = {  # told where there is some of it
    "others": "waiting for the other drafters",
    "compiling": "compiling",
    "interpreter": "waiting for the interpreter",
}


def _worker_line(facts: dict[str, Any]) -> str:
    """Where the time of each role goes, on average."""
    roles: dict[str, list[dict[str, float]]] = {}
    for name, share in (facts["workers"] or {}).items():
        roles.setdefault(name.split()[0], []).append(share)
    parts = []
    for role, shares in roles.items():
        means = {what: mean(each.get(what, 0.0) for each in shares) for what in (*_SHARES, *_FURTHER)}
        text = ", ".join(f"{means[what]:.0%} {word}" for what, word in _SHARES.items())
        text += "".join(f", {means[what]:.0%} {word}" for what, word in _FURTHER.items() if means[what] >= 0.005)
        parts.append(f"{len(shares)} {role} {text}")
    return " · ".join(parts)


def _picked(event: dict[str, Any] | None, *names: str) -> dict[str, Any] | None:
    return None if event is None else {name: event.get(name) for name in names}


def _ago(event: dict[str, Any], now: float) -> str:
    then = event.get("time")
    if then is None:
        return "at an unknown time"
    seconds = now - float(then)
    return f"{short_time(seconds)} ago" if seconds >= 0 else "later than this machine's clock"
