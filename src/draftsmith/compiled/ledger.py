"""The ledger: what was compiled, when, why, how long it took, from which cache, and what proved that it ran.

One entry per region, device and direction, made from what the gate saw and from Dynamo's own figures of that compile.
Seconds are split so that they add up to the wall time of the compile:

    traced    Dynamo and AOTAutograd: spent in every process, whatever the cache holds
    compiled  Inductor, on a miss
    loaded    reading a graph from the cache, on a hit

With the backward compiled together with its forward (as regions do), tracing is booked on the forward.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal

from draftsmith.compiled import _torch
from draftsmith.compiled.aside import write_aside
from draftsmith.compiled.gate import Compile, Gate
from draftsmith.compiled.region import Region

if TYPE_CHECKING:
    from draftsmith.compiled.evidence import Verdict

VERSION = 1
REASON_WIDTH = 80  # of the table; the file has all of it


@dataclass
class Entry:
    """One direction of one compile of a region, or a region that runs eager by name.

    Attributes:
        region, device: as the region is named.
        direction: "forward" or "backward".
        how: "compiled", or why it is not ("eager: dense attention on CPU, by name").
        compile_id: torch's, "3/0"; empty for eager.
        traced, compiled, loaded: seconds.
        cache: "hit", "miss", or "none" where no graph went through the cache (another backend, cache switched off).
        key: of the graph; its file on disk, if it is there, is `file`.
        graph_breaks: of the whole compile; None where others compiled beside it.
        reason: the guards that failed, for a recompile.
        late: compiled after the warm-up.
        alone: no other compiled call ran beside it.
    """

    region: str
    device: str
    direction: Literal["forward", "backward"]
    how: str
    compile_id: str = ""
    traced: float = 0.0
    compiled: float = 0.0
    loaded: float = 0.0
    cache: Literal["hit", "miss", "none"] = "none"
    key: str = ""
    file: str = ""
    graph_breaks: int | None = None
    reason: str = ""
    late: bool = False
    alone: bool = True


@dataclass
class Ledger:
    """Everything a run can say about its compiling. `machine` and `notes` are the caller's (facts, plan)."""

    gate: Gate
    machine: dict[str, Any] = field(default_factory=dict)
    warm_up: list[dict[str, Any]] = field(default_factory=list)
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    regions: dict[str, Region] = field(default_factory=dict)
    path: Path | None = None
    noted: list[Entry] = field(default_factory=list)
    _made: dict[int, list[Entry]] = field(default_factory=dict, repr=False)  # by place in gate.compiles

    def watch(self, regions: Iterable[Region]) -> None:
        """Name the regions whose compiles belong in here; eager ones get an entry at once.

        Raises:
            ValueError: another region has the same name, so nobody could say which of them a compile belongs to.
        """
        for region in regions:
            if self.regions.setdefault(region.name, region) is not region:
                raise ValueError(f"two regions are named {region.name!r}: give each a name of its own")

    def note(self, entry: Entry) -> None:
        """Add what was compiled without torch.compile, such as a Triton kernel of the caller's own."""
        self.noted.append(entry)

    def entries(self) -> list[Entry]:
        """Eager regions first, then what was noted, then compiles in the order in which they happened."""
        found = [
            Entry(region.name, region.device, "forward", f"eager: {region.why_eager}")
            for region in self.regions.values()
            if not region.enabled
        ]
        found += self.noted
        for number in range(len(self.gate.compiles)):
            found += self.entries_of(number)
        return found

    def entries_of(self, number: int) -> list[Entry]:
        """Entries of the gate's compile of that number. Torch forgets old figures, so they are read once and kept."""
        compile_ = self.gate.compiles[number]
        if number in self._made:
            return self._made[number]
        region = self.regions.get(compile_.region)
        made = entries_of(compile_, region.device if region else "")
        if region is not None and region.fullgraph:
            for entry in made:
                entry.graph_breaks = 0  # one would have been an error
        if compile_.seconds is not None:
            self._made[number] = made
        return made

    def add_verdict(self, verdict: Verdict) -> None:
        """Record what an evidence step found."""
        self.verdicts.append(verdict.to_json())

    def to_json(self) -> dict[str, Any]:
        """The whole ledger as JSON can hold it."""
        entries = self.entries()
        return {
            "version": VERSION,
            "machine": self.machine,
            "warm_up": self.warm_up,
            "entries": [asdict(entry) for entry in entries],
            "recompiles": [asdict(entry) for entry in entries if entry.reason or entry.late],
            "evidence": self.verdicts,
        }

    def write(self, path: Path | None = None) -> None:
        """Write `ledger.json`, aside first and then moved into place; nothing where no path is known.

        Raises:
            OSError: it cannot be written; what was there stays.
        """
        path = path or self.path
        if path is None:
            return
        write_aside(path, json.dumps(self.to_json(), indent=1, ensure_ascii=False, default=str) + "\n")

    def table(self) -> list[str]:
        """For people: a line per entry under a head line; numbers in seconds."""
        rows: list[tuple[str, ...]] = [
            ("region", "device", "direction", "traced", "compiled", "loaded", "cache", "breaks", "graph")
        ]
        for entry in self.entries():
            if entry.how != "compiled":
                rows.append((entry.region, entry.device, "all", "", "", "", "", "", entry.how))
                continue
            seconds = (f"{value:.2f}" if value else "-" for value in (entry.traced, entry.compiled, entry.loaded))
            breaks = "?" if entry.graph_breaks is None else str(entry.graph_breaks)
            graph = entry.key[:12] + (" late" if entry.late else "") + ("" if entry.alone else " beside others")
            graph += f" ({shorten(entry.reason, REASON_WIDTH)})" if entry.reason else ""
            rows.append((entry.region, entry.device, entry.direction, *seconds, entry.cache, breaks, graph))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def entries_of(compile_: Compile, device: str) -> list[Entry]:
    """One compile as entries, one for each direction that it made a graph for."""
    figures = _torch.compile_metrics(compile_.compile_id) if compile_.direction == "forward" else {}
    total = compile_.seconds or 0.0
    whole = float(figures.get("entire_frame_compile_time_s") or total)
    hits = sum(graph.hit for graph in compile_.graphs)
    compiled = sum(graph.seconds or 0.0 for graph in compile_.graphs)
    backend = float(figures.get("backend_compile_time_s") or 0.0)
    # With every graph from the cache the backend only loads; with misses among them, loading cannot be told apart.
    loaded = backend if hits and hits == len(compile_.graphs) else 0.0
    traced = max(0.0, min(whole, total or whole) - compiled - loaded)
    common: dict[str, Any] = {
        "region": compile_.region,
        "device": device,
        "how": "compiled",
        "compile_id": compile_.compile_id,
        "graph_breaks": compile_.graph_breaks,
        "reason": compile_.reason,
        "late": compile_.late,
        "alone": compile_.alone,
    }
    if not compile_.graphs:
        return [Entry(direction="backward" if compile_.direction == "backward" else "forward", traced=traced, **common)]
    found = []
    for position, graph in enumerate(compile_.graphs):
        file = _torch.graph_path(graph.key)
        found.append(
            Entry(
                direction="backward" if graph.direction == "backward" else "forward",
                traced=traced if position == 0 else 0.0,
                compiled=graph.seconds or 0.0,
                loaded=loaded / hits if graph.hit else 0.0,
                cache="hit" if graph.hit else "miss",
                key=graph.key,
                file=str(file or ""),
                **common,
            )
        )
    return found
