"""The live line: on a terminal one line in place, elsewhere a plain line every few seconds."""

from __future__ import annotations

import io
from typing import Any

from draftsmith.observe.bar import Bar
from draftsmith.observe.live import LiveLine, notable_line, short_count, short_loss, short_time, step_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "steps": 100, **fields}


def test_step_line_tells_everything_it_has() -> None:
    event = step(7, loss=2.3456, tau_proxy=1.918, tokens_per_second=21_540.0, data_wait=0.034, eta_seconds=185.2)
    assert step_line(event) == "step 7/100 · loss 2.346 · τ proxy 1.92 · 21.5k tok/s · data-wait 3% · ETA 3:05"
    assert step_line({"kind": "step", "step": 7}) == "step 7"
    assert step_line({"kind": "step", "unit": "conversation", "step": 23552}) == "23,552 conversations"
    assert step_line(step(7, loss="nan")) == "step 7/100 · loss nan"


def test_a_loss_near_zero_keeps_digits_that_tell() -> None:
    values = [46.7, 2.3456, 0.1, 0.0951, 1.2345e-5, 0.0, -0.5, float("nan")]
    said = ["46.700", "2.346", "0.100", "0.0951", "1.23e-05", "0.000", "-0.500", "nan"]
    assert [short_loss(value) for value in values] == said
    assert notable_line({"kind": "eval", "step": 3, "loss": 0.000123}) == "held-out at step 3: loss 0.000123"


def test_elsewhere_a_plain_line_every_few_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    with LiveLine(stream, clock=clock) as live:
        for number in range(1, 23):
            live(step(number, loss=1.0))
            clock.now += 0.5
    lines = stream.getvalue().splitlines()
    assert [line.split(" ")[1] for line in lines] == ["1/100", "11/100", "21/100", "22/100"]
    assert "\x1b" not in stream.getvalue()


def test_what_should_stay_is_printed_at_once() -> None:
    stream = io.StringIO()
    live = LiveLine(stream, clock=Clock())
    live(step(1, loss=3.0))
    live(step(2, loss=2.5))
    live({"kind": "eval", "step": 2, "loss": 2.75, "tau_proxy": 1.5})
    live({"kind": "work", "worker": "target 0", "row": 1})
    live({"kind": "end", "reason": "all steps done", "step": 2})
    assert stream.getvalue().splitlines() == [
        "step 1/100 · loss 3.000",
        "held-out at step 2: loss 2.750 τ proxy 1.50",
        "step 2/100 · loss 2.500",
        "ended at step 2: all steps done",
    ]


def test_a_terminal_is_redrawn_in_place() -> None:
    clock, stream = Clock(), Terminal()
    with LiveLine(stream, clock=clock) as live:
        live(step(1, loss=3.0))
        live(step(2, loss=2.5))  # too soon to be drawn
        clock.now = 1.0
        live(step(3, loss=2.0))
        live({"kind": "notice", "text": "data [bold]wait[/bold]"})
    shown = stream.getvalue()
    assert "step 1/100" in shown
    assert "step 3/100" in shown
    assert "step 2/100" not in shown
    assert "note: data [bold]wait[/bold]" in shown  # text of others is never markup
    assert "\x1b[?25h" in shown  # the cursor is back


def test_counts_and_times() -> None:
    assert [short_count(value) for value in (0, 999, 1234, 5_000_000)] == ["0", "999", "1.2k", "5.0M"]
    times = [short_time(value) for value in (0, 59.4, 59.6, 3599, 3723, float("nan"), float("inf"), -1)]
    assert times == ["0 s", "59 s", "1:00", "59:59", "1:02:03", "?", "?", "?"]


def test_kinds_without_a_line() -> None:
    assert notable_line({"kind": "work", "worker": "target 0"}) is None
    plan = {"kind": "plan", "lines": ["target    demo", "note      dense", "steps     20"]}
    assert notable_line(plan) == "target    demo\nsteps     20"
    assert notable_line({"kind": "error", "text": "target 1 died"}) == "error: target 1 died"
    assert notable_line({"kind": "checkpoint", "path": "runs/a/checkpoints/5", "step": 5}) == (
        "saved runs/a/checkpoints/5 (step 5)"
    )


def test_a_bar_on_a_terminal_and_the_line_elsewhere() -> None:
    event = step(40, unit="60 requests (2 again) · conversation", tokens_per_second=1200.0, eta_seconds=65.0)
    line = "60 requests (2 again) · conversation 40/100 · 1.2k tok/s · ETA 1:05"
    plain = io.StringIO()
    with Bar(plain) as bar:
        bar(event)
    assert plain.getvalue() == line + "\n"
    terminal = Terminal()
    with Bar(terminal) as bar:
        bar(event)
        bar({"kind": "notice", "text": "the server is slow"})
        bar({"kind": "step", "step": 7})  # without an end there is no bar
    shown = terminal.getvalue()
    assert "━" in shown
    assert " 40% · 60 requests (2 again)" in shown
    assert "note: the server is slow" in shown
    assert "step 7" in shown
