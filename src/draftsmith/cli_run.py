"""`draftsmith status`, `watch` and `report`: how a run is doing or did, from its folder. None imports torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli_options import Json, let_go, refuse_existing, tell
from draftsmith.errors import UserError

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")]


def status(run: Run, json_: Json = False) -> int:
    """One look at a run, while it goes or afterwards; exit 0 only if it is healthy."""
    from draftsmith.observe.status import read_status

    found = read_status(run)
    tell(found.lines(), found.to_json(), json_)
    return 0 if found.healthy else 1


def watch(run: Run, seconds: Annotated[float, typer.Option(min=0.2, help="Between two looks.")] = 2.0) -> int:
    """Watch a run until it is over; Ctrl-C leaves, and the run goes on. Exit 0 only if it is healthy then."""
    from draftsmith.observe.status import read_status
    from draftsmith.observe.watch import watch as watch_run

    try:
        found = watch_run(run, sys.stdout, seconds=seconds)
    except BrokenPipeError:  # the reader has seen enough: healthy as it is now
        let_go(sys.stdout)
        found = read_status(run)
    return 0 if found.healthy else 1


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN]...", help="One run, or several to compare.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new HTML file; by default report.html in the first run.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Instead, a new file: the last rows' way through the pipeline, for ui.perfetto.dev."),
    ] = None,
    json_: Json = False,
) -> int:
    """Write a run's report, or a comparison of runs, as one HTML file."""
    if trace is not None:
        if output is not None:
            raise UserError("--trace names its own file", where="command line", fix="leave out --output")
        return _trace(runs, trace, json_)
    if output is not None:
        refuse_existing(output)
    from draftsmith.observe.report import write_report

    path = write_report(runs, output or runs[0] / ("report.html" if len(runs) == 1 else "comparison.html"))
    tell(f"wrote {path}", {"report": str(path), "bytes": path.stat().st_size}, json_)
    return 0


def _trace(runs: list[Path], output: Path, json_: bool) -> int:
    from draftsmith.observe.trace import write_trace

    if len(runs) > 1:
        raise UserError("a trace is of one run", where="--trace")
    refuse_existing(output)
    count = write_trace(runs[0], output)
    parts = ", ".join(f"{number:,} {name}" for name, number in count.items())
    content = {"trace": str(output), "bytes": output.stat().st_size, **count}
    tell(f"wrote {output} ({parts}); open it at https://ui.perfetto.dev", content, json_)
    return 0
