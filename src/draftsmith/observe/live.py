"""The live line of a run: where it is, how fast it goes, and when it will end.

A listener of events. On a terminal one line is redrawn in place (rich), everything that is worth keeping (held-out
results, checkpoints, notices, errors) scrolls by above it. Elsewhere (a pipe, a log file, CI) a plain line is printed
every few seconds instead. Cost: formatting happens only when a line is shown, at most `1 / seconds` times a second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from draftsmith.observe.events import Event

if TYPE_CHECKING:
    from rich.live import Live

_REDRAW_SECONDS = 0.25
_PLAIN_SECONDS = 5.0


class LiveLine:
    """Shows events on `stream` (stderr unless given); a listener for `EventLog`.

    Args:
        stream: where to show; a terminal is redrawn in place.
        seconds: least time between two lines; by default 0.25 s on a terminal and 5 s elsewhere.
        clock: monotonic seconds.

    The first and the last step are always shown.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._seconds = seconds if seconds is not None else (_REDRAW_SECONDS if self._terminal else _PLAIN_SECONDS)
        self._clock = clock
        self._shown_at: float | None = None
        self._pending: Event | None = None
        self._live: Live | None = None

    def __call__(self, event: Event) -> None:
        if event["kind"] == "step":
            self._pending = event
            now = self._clock()
            if self._shown_at is None or now - self._shown_at >= self._seconds:
                self._show_step(now)
            return
        if event["kind"] == "end":
            self.close()
        text = notable_line(event)
        if text is not None:
            self._print(text)

    def close(self) -> None:
        """Shows the last step if it was held back, and leaves the terminal as it was."""
        if self._pending is not None:
            self._show_step(self._clock())
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show_step(self, now: float) -> None:
        assert self._pending is not None
        line = step_line(self._pending)
        self._pending = None
        self._shown_at = now
        if not self._terminal:
            print(line, file=self._stream, flush=True)
            return
        from rich.text import Text

        if self._live is None:
            self._start()
        assert self._live is not None
        self._live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)

    def _start(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(file=self._stream, highlight=False), auto_refresh=False)
        self._live.start()

    def _print(self, text: str) -> None:
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(text))
        else:
            print(text, file=self._stream, flush=True)


def step_line(event: Event) -> str:
    """One "step" event as a line; what the event lacks is left out."""
    unit = event.get("unit", "step")  # data generation counts answers
    if "unit" in event and not event.get("steps"):
        return f"{event['step']:,} {unit}s"  # what is read, and nobody knows of how many
    parts = [f"{unit} {event['step']}/{event['steps']}" if event.get("steps") else f"{unit} {event['step']}"]
    if event.get("loss") is not None:
        parts.append(f"loss {short_loss(float(event['loss']))}")
    if event.get("tau_proxy") is not None:
        parts.append(f"τ proxy {float(event['tau_proxy']):.2f}")
    if event.get("tokens_per_second") is not None:
        parts.append(f"{short_count(float(event['tokens_per_second']))} tok/s")
    if event.get("data_wait") is not None:
        parts.append(f"data-wait {float(event['data_wait']):.0%}")
    if event.get("eta_seconds") is not None:
        parts.append(f"ETA {short_time(float(event['eta_seconds']))}")
    return " · ".join(parts)


def notable_line(event: Event) -> str | None:
    """An event that should stay on the screen, as a line; None for the others."""
    kind = event["kind"]
    if kind == "plan" and event.get("lines"):
        # The plan's notes come as events of their own.
        return "\n".join(line for line in event["lines"] if not line.startswith("note"))
    if kind == "eval":
        parts = [f"held-out at step {event.get('step')}:"]
        if event.get("loss") is not None:
            parts.append(f"loss {short_loss(float(event['loss']))}")
        if event.get("tau_proxy") is not None:
            parts.append(f"τ proxy {float(event['tau_proxy']):.2f}")
        return " ".join(parts)
    if kind == "tau":
        return (
            f"held-out prompts at step {event.get('step')}: τ {float(event['decode']):.3f} decoded, "
            f"{float(event['walk']):.3f} walked along the text"
        )
    if kind == "checkpoint":
        return f"saved {event.get('path')} (step {event.get('step')})"
    if kind == "notice":
        return f"note: {event.get('text')}"
    if kind == "error":
        return None if event.get("final") else f"error: {event.get('text')}"  # the command ends with its text
    if kind == "warmup" and event.get("text"):
        return f"warm-up: {event['text']}"
    if kind == "ledger" and event.get("lines"):
        return "\n".join(event["lines"])
    if kind == "balance" and event.get("final"):
        return f"balance: {event.get('text')}"
    if kind == "evidence":
        return f"evidence: {event.get('text')}"
    if kind == "end" and event.get("reason") != "failed":
        return f"ended at step {event.get('step')}: {event.get('reason')}"
    return None


def printable(text: str) -> str:
    """A text as one line that leaves the terminal alone: control characters and halves of letters are replaced."""
    return "".join(
        letter if letter.isprintable() else " " if letter.isspace() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def short_count(value: float) -> str:
    """21500 → "21.5k"; three digits at least, so that a change of a per cent shows."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def short_loss(loss: float) -> str:
    """12.3456 → "12.346", 0.000012345 → "1.23e-05": near zero the digits that tell two losses apart."""
    return f"{loss:.3f}" if abs(loss) >= 0.1 or loss == 0 else f"{loss:.3g}"


def short_time(seconds: float) -> str:
    """Seconds as "12 s", "3:05" or "2:03:05"; "?" for what is not a time."""
    if not 0 <= seconds < 1e9:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
