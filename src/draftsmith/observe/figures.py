"""Figures of one or several runs, drawn by plotly: curves over the steps, devices over time, the pipeline's timeline.

Every figure leaves its background and its text colour to the page, which knows whether it is light or dark. Long curves
are thinned out to at most `POINTS` places; of each stretch the lowest and the highest value are kept, so that a spike
of one step in a million still shows.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftsmith.observe.history import Curve, History

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

POINTS = 1200
TIMELINE_SPANS = 500
# Legible on white and on near-black; the second of each pair is the thin line under the first.
COLOURS = ("#2f81f7", "#e0701a", "#2da44e", "#b35cd6", "#d64550", "#8b949e")
GIB = 2**30


def figures_of(runs: Sequence[History]) -> list[tuple[str, str, str, Any]]:
    """(identifier, title, caption, figure) of everything there is to draw; what no run recorded is left out."""
    drawn: list[tuple[str, str, str, Any]] = []

    def add(name: str, title: str, caption: str, figure: Figure | None) -> None:
        if figure is not None:
            drawn.append((name, title, caption, figure))

    add(
        "loss",
        "Loss",
        "Weighted mean over taught slots, nats. Thin: every step; thick: running mean; points: held-out.",
        _with_held_out(runs, "loss"),
    )
    add(
        "tau",
        "τ, tokens per target forward",
        "The proxy is a mean over uniform anchors and usually too high; decoding fixed prompts tells the true one.",
        _tau(runs),
    )
    for run in runs:
        many = len(runs) > 1
        add(
            f"slots-{runs.index(run)}",
            f"Acceptance by slot{f': {run.name}' if many else ''}",
            "Share of blocks whose drafts up to this slot all stand.",
            _slots(run),
        )
    for name, title, caption in (
        ("lr", "Learning rate", ""),
        ("grad_norm", "Gradient norm", "Before clipping."),
        ("tokens_per_second", "Speed, tokens per second", "Real tokens, over the last seconds."),
        ("data_wait", "Data-wait", "Share of the drafters' time spent waiting for rows."),
    ):
        share = name == "data_wait"
        add(name, title, caption, _simple(runs, name, log=name == "grad_norm", percent=share))
    add("use", "Device use", "Share of the time in which a kernel ran.", _vitals(runs, "use", percent=True))
    add("memory", "Device memory, GiB", "In use on the card, by everybody.", _vitals(runs, "memory_used", scale=GIB))
    for index, run in enumerate(runs):
        named = f": {run.name}" if len(runs) > 1 else ""
        add(
            f"shares-{index}",
            f"Where time goes{named}",
            "Mean over the workers of a role, since the last look; what is missing to 100 % is starting and ending.",
            _shares(run),
        )
        add(
            f"queues-{index}",
            f"Queues{named}",
            "Rows that waited in front of each worker when it took one.",
            _queues(run),
        )
    for index, run in enumerate(runs):
        add(
            f"timeline-{index}",
            f"Pipeline timeline{f': {run.name}' if len(runs) > 1 else ''}",
            "The last rows, by worker; gaps are waiting. Host time.",
            _timeline(run),
        )
    return drawn


def _figure(x: str = "step", **layout: Any) -> Figure:
    from plotly.graph_objects import Figure

    figure = Figure()
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 56, "r": 12, "t": 8, "b": 44},
        height=320,
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        xaxis={"title": {"text": x}, "automargin": True, "zeroline": False},
        yaxis={"automargin": True, "zeroline": False},
    )
    figure.update_layout(**layout)
    return figure


def _line(figure: Figure, x: Sequence[Any], y: Sequence[float], name: str, colour: str, **more: Any) -> None:
    """`name` is text of a run's: plotly reads markup in it, so it is escaped."""
    line = {"color": colour, "width": more.pop("width", 2), "dash": more.pop("dash", "solid")}
    figure.add_scatter(x=list(x), y=list(y), name=html.escape(name), line=line, **{"mode": "lines", **more})


def _name(runs: Sequence[History], index: int, what: str) -> str:
    return what if len(runs) == 1 else f"{runs[index].name}: {what}"


def _with_held_out(runs: Sequence[History], name: str) -> Figure | None:
    figure = _figure()
    for index, run in enumerate(runs):
        colour = COLOURS[index if len(runs) > 1 else 0]
        steps, values = run.train.pairs(name)
        if steps:
            _line(figure, *thin(steps, values), "", colour, width=0.8, opacity=0.4, showlegend=False, hoverinfo="skip")
            _line(figure, *thin(steps, smooth(values)), _name(runs, index, "training"), colour)
        steps, values = run.held_out.pairs(name)
        if steps:
            colour = colour if len(runs) > 1 else COLOURS[1]
            marks = {"mode": "lines+markers", "marker": {"size": 6}, "dash": "dot"}
            _line(figure, steps, values, _name(runs, index, "held-out"), colour, **marks)
    _frame(figure, [run.train.pairs(name)[1] for run in runs] + [run.held_out.pairs(name)[1] for run in runs])
    return figure if figure.data else None


def _frame(figure: Figure, columns: Sequence[list[float]]) -> None:
    """Sets the range of values, and adds room for long legends, which stand in one column on a narrow screen."""
    entries = sum(trace.showlegend is not False for trace in figure.data)
    figure.update_layout(yaxis={"range": _settled(columns)}, height=320 + 19 * max(0, entries - 3))


def _settled(columns: Sequence[list[float]]) -> list[float] | None:
    """The range of values once the first twentieth is over, which may be ten times higher; a double click shows all."""
    late = [value for column in columns for value in column[len(column) // 20 :]]
    if not late:
        return None
    low, high = min(late), max(late)
    margin = 0.06 * (high - low) or 0.1
    return [low - margin, high + margin]


def _tau(runs: Sequence[History]) -> Figure | None:
    figure = _with_held_out(runs, "tau_proxy")
    if figure is None:
        return None
    for trace in figure.data:
        if trace.name:
            trace.name += " (proxy)"
    kinds = [(2, "decode", "decoded"), (3, "walk", "walk along the target's text")]
    for index, run in enumerate(runs):
        for offset, name, what in kinds if len(runs) == 1 else kinds[:1]:
            steps, values = run.tau.pairs(name)
            if steps:
                colour = COLOURS[offset if len(runs) == 1 else index]
                dash = "solid" if name == "decode" else "dash"
                _line(figure, steps, values, _name(runs, index, what), colour, mode="lines+markers", dash=dash)
    columns = [run.train.pairs("tau_proxy")[1] for run in runs] + [run.held_out.pairs("tau_proxy")[1] for run in runs]
    _frame(figure, columns + [run.tau.pairs(name)[1] for run in runs for _, name, _ in kinds])
    return figure


def _slots(run: History) -> Figure | None:
    slots = list(run.slots.values)
    if not slots:
        return None
    figure = _figure(yaxis={"tickformat": ".0%", "automargin": True, "rangemode": "tozero"})
    for number, slot in enumerate(slots):
        steps, values = run.slots.pairs(slot)
        share = number / max(1, len(slots) - 1)
        colour = f"hsl({210 - 180 * share:.0f}, 70%, 55%)"
        _line(figure, *thin(steps, smooth(values)), f"slot {slot}", colour, width=1.5)
    return figure


def _simple(runs: Sequence[History], name: str, *, log: bool, percent: bool) -> Figure | None:
    kind: dict[str, Any] = {"type": "log", "dtick": "D2"} if log else {"rangemode": "tozero"}
    figure = _figure(yaxis={**kind, "automargin": True, **({"tickformat": ".0%"} if percent else {})})
    for index, run in enumerate(runs):
        steps, values = run.train.pairs(name)
        if steps:
            shown = len(runs) > 1
            _line(figure, *thin(steps, values), run.name, COLOURS[index], showlegend=shown, width=1.5)
    return figure if figure.data else None


def _vitals(runs: Sequence[History], fact: str, *, percent: bool = False, scale: float = 1.0) -> Figure | None:
    figure = _figure(yaxis={"rangemode": "tozero", "automargin": True, **({"tickformat": ".0%"} if percent else {})})
    for index, run in enumerate(runs):
        lines: dict[str, Curve] = {}
        for event in run.vitals:
            for device in event.get("devices") or []:
                if fact in device:
                    lines.setdefault(device["device"], Curve()).add(event.get("step", 0), {fact: device[fact] / scale})
        for number, (device, curve) in enumerate(sorted(lines.items())):
            colour = COLOURS[(number if len(runs) == 1 else index) % len(COLOURS)]
            steps, values = curve.pairs(fact)
            _line(figure, *thin(steps, values), _name(runs, index, device), colour, width=1.5)
    return figure if figure.data else None


_KINDS = ("busy", "interpreter", "input", "output", "others", "compiling")


def _shares(run: History) -> Figure | None:
    """Targets' and drafters' time by kind, over the steps; only kinds that ever took a hundredth.

    None for a run that was looked at once: a point is no curve, and the balance has its figures.
    """
    figure = _figure(yaxis={"tickformat": ".0%", "automargin": True, "rangemode": "tozero"})
    for role, dash in (("target", "dot"), ("drafter", "solid")):
        curve = Curve()
        for event in run.vitals:
            own = [share for name, share in (event.get("workers") or {}).items() if name.startswith(role)]
            if own:
                means = {kind: sum(each.get(kind, 0.0) for each in own) / len(own) for kind in _KINDS}
                curve.add(event.get("step", 0), means)
        for kind, colour in zip(_KINDS, COLOURS, strict=True):
            steps, values = curve.pairs(kind)
            if len(values) > 1 and max(values) >= 0.01:
                _line(figure, *thin(steps, values), f"{role}s: {kind}", colour, width=1.5, dash=dash)
    return figure if figure.data else None


def _queues(run: History) -> Figure | None:
    spans = [span for span in run.spans if "queue" in span and not str(span["worker"]).startswith("prefetch")]
    if not spans:
        return None
    began = min(span["start"] for span in spans)
    figure = _figure("seconds", yaxis={"rangemode": "tozero", "automargin": True, "dtick": 1})
    for number, worker in enumerate(sorted({str(span["worker"]) for span in spans}, key=_role_order)):
        own = [span for span in spans if span["worker"] == worker]
        moments, depths = [span["start"] - began for span in own], [float(span["queue"]) for span in own]
        shape: dict[str, Any] = {"dash": "dot" if worker.startswith("target") else "solid", "width": 1.5}
        _line(figure, *thin(moments, depths, 300), worker, COLOURS[number % len(COLOURS)], **shape)
    return figure


def _timeline(run: History) -> Figure | None:
    spans = list(run.spans)[-TIMELINE_SPANS:]
    if not spans:
        return None
    began = min(span["start"] for span in spans)
    workers = sorted({str(span["worker"]) for span in spans}, key=_role_order)
    names = [html.escape(worker) for worker in workers]
    figure = _figure(
        "seconds",
        hovermode="closest",
        height=90 + 30 * len(workers),
        showlegend=False,
        yaxis={"categoryorder": "array", "categoryarray": names[::-1], "automargin": True},
        bargap=0.25,
        barmode="overlay",
    )
    for worker, name in zip(workers, names, strict=True):
        own = [span for span in spans if span["worker"] == worker]
        role = _role_order(worker)[0]
        figure.add_bar(
            y=[name] * len(own),
            x=[span["end"] - span["start"] for span in own],
            base=[span["start"] - began for span in own],
            orientation="h",
            marker={"color": COLOURS[role], "line": {"width": 0}},
            name=name,
            customdata=[span.get("row") for span in own],
            hovertemplate="row %{customdata}: %{x:.3f} s<extra>%{y}</extra>",
        )
    return figure


_ROLES = ("prefetch", "target", "drafter")


def _role_order(worker: str) -> tuple[int, str]:
    role = worker.split()[0]
    return (_ROLES.index(role) if role in _ROLES else len(_ROLES), worker)


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean over about a fortieth of the values, without the pull towards 0 at the start."""
    keep = 1 - 1 / max(1.0, len(values) / 40)
    mean, weight, found = 0.0, 0.0, []
    for value in values:
        mean = keep * mean + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        found.append(mean / weight)
    return found


def thin(x: Sequence[Any], y: Sequence[float], points: int = POINTS) -> tuple[list[Any], list[float]]:
    """At most `points` pairs: of each stretch the lowest and the highest, in their order; first and last stay."""
    count = len(x)
    if count <= points:
        return list(x), list(y)
    stretches = points // 2 - 1
    kept = [0]
    for stretch in range(stretches):
        begin, end = 1 + (count - 2) * stretch // stretches, 1 + (count - 2) * (stretch + 1) // stretches
        stretch_of = range(begin, end)
        low, high = min(stretch_of, key=y.__getitem__), max(stretch_of, key=y.__getitem__)
        kept += [low] if low == high else sorted((low, high))
    kept.append(count - 1)
    return [x[i] for i in kept], [float(y[i]) for i in kept]
