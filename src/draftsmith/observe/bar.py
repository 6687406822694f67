"""A progress bar for work that has an end: on a terminal a bar with the live line behind it, elsewhere that line alone.

A listener like `LiveLine`, of "step" events with `step` and `steps`. Cost: as the live line's.
"""

from __future__ import annotations

from draftsmith.observe.live import LiveLine, step_line

_WIDTH = 24


class Bar(LiveLine):
    """See the module's docstring."""

    def _show_step(self, now: float) -> None:
        event = self._pending
        if not self._terminal or event is None or not event.get("steps"):
            super()._show_step(now)
            return
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        self._pending, self._shown_at = None, now
        if self._live is None:
            self._start()
        assert self._live is not None
        line = Table.grid(padding=(0, 1))
        line.add_column(width=_WIDTH)
        line.add_column(no_wrap=True, overflow="ellipsis")
        share = event["step"] / event["steps"]
        bar = ProgressBar(total=event["steps"], completed=event["step"], width=_WIDTH)
        line.add_row(bar, Text(f"{share:4.0%} · {step_line(event)}", overflow="ellipsis", no_wrap=True))
        self._live.update(line, refresh=True)
