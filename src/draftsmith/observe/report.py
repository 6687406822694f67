"""`draftsmith report`: what a run was, or how two differ, as one HTML file that needs nothing else.

Summary, curves, the pipeline's timeline, the compile ledger, facts of the data, the environment and what changed since
the run before, and where everything came from. Read from the run's folder alone, also while it runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError, reason_of
from draftsmith.observe.aside import written_aside
from draftsmith.observe.figures import figures_of
from draftsmith.observe.history import History, flatten, names_of, previous_run, read_history
from draftsmith.observe.live import short_count, short_time
from draftsmith.observe.notice import causes_of, environment_changes
from draftsmith.observe.page import drawing, folded, page, paragraph, table
from draftsmith.observe.shape import read_record
from draftsmith.observe.status import Status, read_status
from draftsmith.observe.summary import number

WIDE = ("timeline",)
MANY = 60  # lines of a list that are shown


def write_report(folders: Sequence[str | Path], output: str | Path) -> Path:
    """Writes the report of one run, or the comparison of several, and returns its path.

    Raises:
        UserError: a folder holds no run with a step, or the file cannot be written.
    """
    runs = [read_history(folder) for folder in folders]
    for run, name in zip(runs, names_of(runs), strict=True):
        run.name = name
    states = [read_status(folder) for folder in folders]
    text = make_report(runs, states)
    path = Path(output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path, errors="replace") as file:  # names of folders need not be UTF-8
            file.write(text)
    except OSError as error:
        raise UserError(
            f"the report cannot be written: {reason_of(error)}",
            where=str(path),
            fix="name a file elsewhere with --output",
        ) from None
    return path


def make_report(runs: Sequence[History], states: Sequence[Status]) -> str:
    """The file's content; `states` are those of the runs."""
    drawn = figures_of(runs)
    names = [run.name for run in runs]
    grid = "".join(drawing(name, title, text, wide=name.startswith(WIDE)) for name, title, text, _ in drawn)
    sections = [
        ("summary", "Summary", _summary(runs, states)),
        ("balance", "Balance", _balances(runs)),
        ("curves", "Curves", f'<div class="figures">{grid}</div>'),
        ("differences", "Differences", _differences(runs) if len(runs) > 1 else ""),
        ("events", "Errors and notices", _events(runs)),
        ("ledger", "Compile ledger", _ledgers(runs)),
        ("data", "Data", _data(runs)),
        ("environment", "Environment", _environment(runs)),
        ("provenance", "Provenance", _provenance(runs)),
    ]
    title = " against ".join(names) if len(runs) > 1 else f"Run {names[0]}"
    return page(title, sections, [(name, figure) for name, _, _, figure in drawn])


def _summary(runs: Sequence[History], states: Sequence[Status]) -> str:
    facts = [state.to_json() for state in states]
    ends = [f"{each.state} ({each.reason})" if each.reason else each.state for each in states]
    rows: list[list[Any]] = [["state", *ends]]

    def add(name: str, values: list[float | None], show: Any, better: int = 0) -> None:
        """`better`: 1 if more is better, -1 if less is, 0 if neither: then no change is shown."""
        if all(value is None for value in values):
            return
        row: list[Any] = [name, *("" if value is None else show(value) for value in values)]
        if len(values) == 2 and better and values[0] and values[1] is not None:
            change = values[1] / values[0] - 1
            word = "" if abs(change) < 0.005 else " better" if change * better > 0 else " worse"
            row.append(f"{change:+.1%}{word}")
        rows.append(row)

    def steps(run: History) -> float | None:
        return run.train.steps[-1]

    def last(run: History, curve: str, name: str) -> float | None:
        values = getattr(run, curve).pairs(name)[1]
        return values[-1] if values else None

    def best(run: History, curve: str, name: str, pick: Any) -> float | None:
        values = getattr(run, curve).pairs(name)[1]
        return pick(values) if values else None

    add("steps", [steps(run) for run in runs], "{:,.0f}".format)
    add("loss, last held-out", [last(run, "held_out", "loss") for run in runs], "{:.4f}".format, -1)
    add("loss, best held-out", [best(run, "held_out", "loss", min) for run in runs], "{:.4f}".format, -1)
    add("loss, last step", [last(run, "train", "loss") for run in runs], "{:.4f}".format, -1)
    add("τ proxy, last held-out", [last(run, "held_out", "tau_proxy") for run in runs], "{:.3f}".format, 1)
    add("τ decoded, last", [last(run, "tau", "decode") for run in runs], "{:.3f}".format, 1)
    add("τ decoded, best", [best(run, "tau", "decode", max) for run in runs], "{:.3f}".format, 1)
    add("tokens per second, best", [each["best_tokens_per_second"] for each in facts], short_count, 1)
    add("tokens per second, last", [each["tokens_per_second"] for each in facts], short_count, 1)
    add("data-wait, last", [each["data_wait"] for each in facts], "{:.1%}".format)
    add("wall time from first to last event", [_wall(run) for run in runs], short_time)
    add("starts", [float(each["starts"]) for each in facts], "{:.0f}".format)
    add("errors", [float(each["error_count"]) for each in facts], "{:.0f}".format)
    saved = [each["checkpoint"] or {"path": "none"} for each in facts]
    rows.append(["last checkpoint", *(Path(str(each["path"])).name for each in saved)])
    head = ["", *(run.name for run in runs), *(["change"] if len(runs) == 2 else [])] if len(runs) > 1 else []
    verdicts = ""
    for run, state in zip(runs, states, strict=True):
        name = f"{run.name}: " if len(runs) > 1 else ""
        problems = [paragraph(f"{name}{problem}", "bad") for problem in state.problems]
        verdicts += "".join(problems) or paragraph(f"{name}healthy", "good")
    return verdicts + table(rows, head)


def _wall(run: History) -> float | None:
    first, last = number(run.summary["first_time"]), number(run.summary["time"])
    return None if first is None or last is None else max(0.0, last - first)


def _differences(runs: Sequence[History]) -> str:
    """Configs, environments and what the record proves about speed, of the first run against each other one."""
    text = ""
    for other in runs[1:]:
        first = runs[0]
        pair = f"{first.name} and {other.name}"
        configs = [flatten(run.files["run"].get("config") or {}) for run in (first, other)]
        changed = [
            [key, configs[0].get(key, ""), configs[1].get(key, "")]
            for key in sorted({*configs[0], *configs[1]} - {"training.output"})
            if configs[0].get(key) != configs[1].get(key)
        ]
        head = ["config", first.name, other.name]
        text += table(changed, head) or paragraph(f"The configs of {pair} are equal.")
        lines = environment_changes(first.folder, other.folder)
        text += _listed(f"Environment of {pair}", lines) or paragraph(
            f"The environments of {pair} are equal, or unknown."
        )
        bests = [run.summary["best_rate"] for run in (first, other)]
        if all(bests):
            causes = causes_of(bests[0]["facts"], bests[1]["facts"])
            text += _listed(f"At its best speed, in {other.name} (then: {first.name})", causes)
    return text


def _events(runs: Sequence[History]) -> str:
    rows = []
    for run in runs:
        for kind, name in (("error", "errors"), ("note", "notices")):
            entries = sorted(run.summary[name].values(), key=lambda each: each.get("time") or 0)[-MANY:]
            for entry in entries:
                own = [run.name] if len(runs) > 1 else []
                rows.append([kind, *own, _clock(entry.get("time")), f"{entry['count']}\xa0x", entry["text"]])
        left_out = [f"{run.summary['malformed']} malformed events"] if run.summary["malformed"] else []
        if left_out := left_out + [f"{name}, which cannot be understood" for name in run.damaged]:
            rows.append(["note", *([run.name] if len(runs) > 1 else []), "", "", f"left out: {'; '.join(left_out)}"])
    return table(rows)


def _balances(runs: Sequence[History]) -> str:
    """Who waited for whom: the sentence, each worker's time, and what a row was measured to cost."""
    text = ""
    for run in runs:
        balance = run.summary["balance"]
        if not balance:
            continue
        name = f"{run.name}: " if len(runs) > 1 else ""
        text += paragraph(f"{name}{balance.get('text')}")
        kinds = ("busy", "input", "output", "others", "compiling", "interpreter")
        rows = [
            [worker, *(f"{own.get(kind, 0.0):.1%}" for kind in kinds), own.get("rows", ""), own.get("row_ms", "")]
            for worker, own in (balance.get("workers") or {}).items()
        ]
        head = ["worker", "busy", "waits for rows", "held back", "waits for other drafters", "compiling"]
        text += table(rows, [*head, "waits for the interpreter", "rows", "ms a row"]) + _devices(run)
    return text


def _devices(run: History) -> str:
    """Each GPU's use and memory over the run; how much the memory came and went at most, and why then."""
    seen: dict[str, list[dict[str, Any]]] = {}
    for event in run.vitals:
        for device in event.get("devices") or []:
            seen.setdefault(str(device["device"]), []).append(device)
    rows = []
    for name, facts in sorted(seen.items()):
        uses = [use for each in facts if (use := number(each.get("use"))) is not None]
        held = [size for each in facts if (size := number(each.get("reserved"))) is not None]
        settled = facts[1:] or facts  # the first look is at a run that fills its memory
        worst = max(settled, key=lambda each: number(each.get("volatility")) or 0.0)
        rows.append(
            [
                name,
                f"{sum(uses) / len(uses):.0%}" if uses else "",
                f"{max(held) / 2**30:.2f}" if held else "",
                f"{worst['volatility']:.1%}" if number(worst.get("volatility")) is not None else "",
                worst.get("volatile_because", ""),
            ]
        )
    return table(rows, ["device", "busy on average", "GiB held at most", "volatile at most", "because"])


def _ledgers(runs: Sequence[History]) -> str:
    text = ""
    for run in runs:
        ledger = run.files["ledger"]
        rows = [
            [
                entry.get("region", ""),
                entry.get("device", ""),
                entry.get("direction", ""),
                entry.get("how", ""),
                *(f"{entry[name]:.2f}" if number(entry.get(name)) else "" for name in ("traced", "compiled", "loaded")),
                entry.get("cache", ""),
                entry.get("reason", ""),
            ]
            for entry in ledger.get("entries") or []
        ]
        head = ["region", "device", "direction", "how", "traced s", "compiled s", "loaded s", "cache", "recompiled for"]
        body = table(rows, head)
        for event in run.evidence[:3] + run.evidence[3:][-MANY:]:
            body += paragraph(f"evidence at step {event.get('step')}: {event.get('text')}", _kind(event.get("ok")))
        if body and len(runs) > 1:
            body = f"{paragraph(run.name)}{body}"
        text += body
    return text


def _data(runs: Sequence[History]) -> str:
    facts = [flatten(run.files["resolved"].get("data") or {}) for run in runs]
    keys = dict.fromkeys(key for each in facts for key in each)
    rows = [[key, *(_short(each.get(key, "")) for each in facts)] for key in keys]
    return table(rows, ["", *(run.name for run in runs)] if len(runs) > 1 else [])


def _environment(runs: Sequence[History]) -> str:
    records = [run.files["environment"] for run in runs]
    machines = [flatten(record.get("machine") or {}) for record in records]
    keys = dict.fromkeys(key for machine in machines for key in machine)
    rows = [[key, *(_short(machine.get(key, "")) for machine in machines)] for key in keys]
    text = table(rows, ["", *(run.name for run in runs)] if len(runs) > 1 else [])
    if len(runs) == 1 and text:
        before = previous_run(runs[0].folder)
        if before is None:
            text += paragraph("No earlier run lies beside this one.")
        else:
            lines = environment_changes(before, runs[0].folder)
            run_files = (read_record(before / "run.json") or {}, runs[0].files["run"])
            config = [flatten(each.get("config") or {}) for each in run_files]
            lines += [
                f"{key}: {_short(config[0].get(key))} then, {_short(config[1].get(key))} now"
                for key in sorted({*config[0], *config[1]} - {"training.output"})
                if config[0].get(key) != config[1].get(key)
            ]
            text += _listed(f"Changed since the run before, {before.name}", lines or ["nothing"])
    for run, record in zip(runs, records, strict=True):
        packages = "\n".join(f"{name} {version}" for name, version in (record.get("packages") or {}).items())
        if packages:
            text += folded(f"packages of {run.name}", packages)
    return text


def _provenance(runs: Sequence[History]) -> str:
    rows: list[list[Any]] = [
        ["folder", *(run.folder.resolve() for run in runs)],
        ["created", *(run.files["run"].get("created", "") for run in runs)],
        ["draftsmith", *(run.files["environment"].get("draftsmith", "") for run in runs)],
        ["config hash", *(run.files["run"].get("fingerprint", "") for run in runs)],
        ["code hash", *(run.files["environment"].get("sources", "") for run in runs)],
        ["commit", *(_commit(run.files["environment"].get("commit")) for run in runs)],
        ["data hash", *((run.summary["run"] or {}).get("data", "") for run in runs)],
        ["report written", *(time.strftime("%Y-%m-%d %H:%M:%S") for _ in runs)],
    ]
    text = table(rows, ["", *(run.name for run in runs)] if len(runs) > 1 else [])
    for run in runs:
        config = run.files["run"].get("config")
        if config:
            text += folded(f"config of {run.name}", json.dumps(config, indent=2, ensure_ascii=False))
    return text


def _commit(commit: Any) -> str:
    if not isinstance(commit, dict):
        return ""
    changes = commit.get("changes")
    return f"{commit.get('id', '')}{f' with changes {changes}' if changes else ''}"


def _listed(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    more = [f"and {len(lines) - MANY} more"] if len(lines) > MANY else []
    return table([[title if index == 0 else "", line] for index, line in enumerate([*lines[:MANY], *more])])


def _kind(ok: Any) -> str:
    return "" if ok is None else "good" if ok else "bad"


def _clock(seconds: Any) -> str:
    moment = number(seconds)
    return "" if moment is None else time.strftime("%Y-%m-%d\xa0%H:%M:%S", time.localtime(moment))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 300 else f"{text[:297]}..."
