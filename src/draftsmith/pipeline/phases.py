"""What a start takes until the first update is done, phase by phase; one line and its figures.

A reader of the run's own events, like everything else that tells of a run: the plan's event ends planning (data
included), which a notice of `MEASURING` interrupts until "costs", "run" ends building, each turn of the warm-up brings
what it traced, compiled and loaded from the cache, the ledger ends the warm-up, and the first evidence or step ends the
first update. A step is told one update late, evidence right away; where evidence is off, the first update counts the
second as well.

Loading the target's weights is told apart: it is the disk's time and not ours.
"""

from __future__ import annotations

from draftsmith.observe.events import Event, EventLog

PHASES = ("plan", "measure", "load", "build", "trace", "compile", "from cache", "warm", "first update")
MEASURING = "measuring"  # topic
_ENDS = {"plan": "plan", "costs": "measure", "run": "build", "ledger": "warm"}
_TURN = {"traced": "trace", "compiled": "compile", "loaded": "from cache"}


class StartPhases:
    """A listener that writes one notice when the first update is done. Belongs to one log.

    Args:
        log: takes the notice.
        began: seconds since the epoch when the run was asked for.
    """

    def __init__(self, log: EventLog, began: float) -> None:
        self.log, self._mark, self._began = log, began, began
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._told = False

    def __call__(self, event: Event) -> None:
        """Takes one event."""
        if self._told:
            return
        kind, now = str(event["kind"]), float(event["time"])
        if "weights_seconds" in event:
            self._take("load", float(event["weights_seconds"]))
        elif event.get("topic") == MEASURING:
            self._until("plan", now)
        elif kind in _ENDS:
            self._until(_ENDS[kind], now)
        elif kind == "warmup" and "traced" in event:
            for field, phase in _TURN.items():
                self._take(phase, float(event[field]))
        elif kind in ("evidence", "step"):
            self._told = True
            self._until("first update", now)
            self._tell(now)

    def _take(self, phase: str, seconds: float) -> None:
        """Seconds that an event counts itself; what is left until the next mark belongs to another phase."""
        self.seconds[phase] += seconds
        self._mark += seconds

    def _until(self, phase: str, now: float) -> None:
        self.seconds[phase] += max(0.0, now - self._mark)
        self._mark = now

    def _tell(self, now: float) -> None:
        without = now - self._began - self.seconds["load"]
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items() if seconds >= 0.05)
        self.log.write(
            "notice",
            topic="startup",
            text=f"first update after {without:.1f} s without loading the target: {parts} s",
            seconds=round(without, 3),
            phases={name: round(seconds, 3) for name, seconds in self.seconds.items()},
        )
