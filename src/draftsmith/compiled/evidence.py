"""Evidence: what ran in one step, seen by a profiler, against what should have run. Missing evidence is a failure.

One profiler for the process, over all threads, for the length of one step. Each region marks its calls in the trace
while the gate is watched, so what ran inside a mark is that region's forward:

    forward    "## Call CompiledFxGraph <key> ##" inside the mark, on the same thread
    backward   the same event inside the "CompiledFunctionBackward" that carries the sequence number and thread of a
               "CompiledFunction" inside the mark; on CUDA it runs in the device's autograd thread
    kernels    names on the region's device that match what was asked for
    forbidden  any operator with an input shaped like a dense score matrix, and every dense softmax, inside a mark or in
               the autograd nodes that belong to it

Besides the trace: peak memory of each device during the step, and an oracle that compares numbers.

Cost: a profiled step is slower by some tens of per cent, and reading the trace takes some microseconds an event
afterwards, while everybody waits.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from draftsmith.compiled import _torch
from draftsmith.compiled._torch import Span
from draftsmith.compiled.gate import Gate
from draftsmith.compiled.ledger import Ledger
from draftsmith.compiled.region import Region, mark

_BACKWARD = "autograd::engine::evaluate_function"
SOFTMAX = re.compile(r"aten::_?(safe_|log_)?softmax(_backward_data)?$")


class EvidenceMissing(RuntimeError):
    """A step ran otherwise than it should have. `.verdict` says how."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.line())
        self.verdict = verdict


@dataclass(frozen=True)
class Expected:
    """What one region must show in a profiled step.

    Attributes:
        region: must be called at least once.
        backward: its compiled backward must run too.
        kernels: regular expressions; each must match a kernel that ran on the region's device. CUDA only.
        score_shapes: (rows, columns) of dense score matrices; no operator of the region may take one.
        softmax: whether a softmax operator may run uncompiled inside the region.
        memory: bytes by which the device's peak may exceed what was allocated before the step; None: not checked.
        oracle: returns "" where numbers equal a reference, else what differs; None: not checked.
    """

    region: Region
    backward: bool = False
    kernels: tuple[str, ...] = ()
    score_shapes: tuple[tuple[int, int], ...] = ()
    softmax: bool = False
    memory: int | None = None
    oracle: Callable[[], str] | None = None


@dataclass
class Seen:
    """What one region showed. Counts of calls, of those among them without a graph, and of graphs; names of kernels on
    its device (shared by its regions)."""

    region: str
    device: str
    calls: int = 0
    eager: int = 0
    forward: int = 0
    backward: int = 0
    keys: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    forbidden: list[str] = field(default_factory=list)
    peak_bytes: int | None = None
    oracle: str | None = None


@dataclass
class Verdict:
    """Outcome of one evidence step. `problems` is empty where everything was seen."""

    step: int
    problems: list[str]
    seen: list[Seen]
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.problems

    def line(self) -> str:
        """For people, and for the live line."""
        if self.ok:
            devices = sorted({seen.device for seen in self.seen if seen.device})
            place = f" on {', '.join(devices)}" if devices else ""
            return f"step {self.step}: the compiled path ran in {len(self.seen)} of {len(self.seen)} regions{place}"
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        return f"step {self.step}: NOT the compiled path: {self.problems[0]}{more}"

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


class Evidence:
    """Profiles single steps and judges them. Made in the main thread; `begin` and `end` are called by one thread while
    no other is in a step.

    Args:
        gate: of the regions; it is watched between `begin` and `end`.
        expected: one entry per region and device.
        ledger: gets every verdict.
    """

    def __init__(self, gate: Gate, expected: Sequence[Expected], ledger: Ledger | None = None) -> None:
        self.gate, self.expected, self.ledger = gate, list(expected), ledger
        self._recorder: _torch.Recorder | None = None
        self._before: dict[str, int] = {}
        _torch.prepare_profiler(bool(self._cuda_devices()))

    def begin(self) -> None:
        """Start watching; everything until `end` belongs to the step.

        Raises:
            RuntimeError: torch's, where its profiler cannot start; nothing is watched then.
        """
        assert self._recorder is None, "an evidence step inside another"
        devices = self._cuda_devices()
        for device in devices:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before[device] = torch.cuda.memory_allocated(device)
        recorder = _torch.Recorder(cuda=bool(devices))
        recorder.start()
        self._recorder = recorder
        self.gate.watch(True)

    def end(self, step: int) -> Verdict:
        """Stop watching and judge; runs the oracles, then writes the ledger.

        Raises:
            OSError: the ledger has a path and cannot be written.
        """
        assert self._recorder is not None, "no evidence step has begun"
        recorder, self._recorder = self._recorder, None
        peaks = {}
        for device in self._cuda_devices():
            torch.cuda.synchronize(device)
            peaks[device] = torch.cuda.max_memory_allocated(device) - self._before[device]
        began = time.perf_counter()
        try:
            trace = Trace(recorder.stop())
        finally:
            self.gate.watch(False)
        seen, problems = [], []
        for expected in self.expected:
            found = self._look(trace, expected, peaks)
            seen.append(found)
            problems += judge(expected, found)
        verdict = Verdict(step, problems, seen, time.perf_counter() - began)
        if self.ledger is not None:
            self.ledger.add_verdict(verdict)
            self.ledger.write()
        return verdict

    def check(self, step: Callable[[], object], number: int = 0) -> Verdict:
        """Profile and judge one call of `step`, for programs whose step is one function.

        Raises:
            EvidenceMissing: something that should have run was not seen.
        """
        self.begin()
        try:
            step()
            verdict = self.end(number)
        finally:
            self.abandon()
        if not verdict.ok:
            raise EvidenceMissing(verdict)
        return verdict

    def abandon(self) -> None:
        """Stop watching without a verdict, when the step itself failed."""
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            self.gate.watch(False)
            recorder.stop()

    def _backward_keys(self, region: Region) -> set[str]:
        return {
            graph.key
            for compile_ in self.gate.compiles
            if compile_.region == region.name
            for graph in compile_.graphs
            if graph.direction == "backward"
        }

    def _cuda_devices(self) -> list[str]:
        names = {expected.region.device for expected in self.expected}
        return sorted(name for name in names if name.startswith("cuda"))

    def _look(self, trace: Trace, expected: Expected, peaks: dict[str, int]) -> Seen:
        region = expected.region
        found = trace.region(region.name)
        kernels = trace.kernels(region.device) if expected.kernels else []
        # Where a trace does not say whose backward a graph belongs to, its key does, if it is nobody else's.
        backward = found.backward or sum(trace.unowned[key] for key in self._backward_keys(region))
        wanted = [name for name in kernels if any(re.search(pattern, name) for pattern in expected.kernels)]
        return Seen(
            region.name,
            region.device,
            calls=found.calls,
            eager=found.calls - found.compiled - (0 if expected.backward else found.cut),
            forward=found.forward,
            backward=backward,
            keys=sorted(found.keys),
            kernels=wanted,
            forbidden=found.forbidden(expected.score_shapes, expected.softmax),
            peak_bytes=peaks.get(region.device),
            oracle=expected.oracle() if expected.oracle else None,
        )


def judge(expected: Expected, seen: Seen) -> list[str]:
    """Problems of one region, each a sentence that begins with the region and its device."""
    place = f"{seen.region} on {seen.device}" if seen.device else seen.region
    if not seen.calls:
        return [f"{place} was never called"]
    problems = []
    if not seen.forward:
        problems.append(f"{place} ran {seen.calls} times without a compiled graph")
    elif seen.eager:
        problems.append(f"{place} ran {seen.eager} of {seen.calls} times without a compiled graph")
    if expected.backward and not seen.backward:
        problems.append(f"{place}: its backward ran no compiled graph")
    problems += [
        f"{place}: no kernel matches {pattern!r}"
        for pattern in expected.kernels
        if not any(re.search(pattern, name) for name in seen.kernels)
    ]
    if seen.forbidden:
        problems.append(f"{place}: dense scores: {', '.join(seen.forbidden[:3])}")
    if expected.memory is not None and seen.peak_bytes is not None and seen.peak_bytes > expected.memory:
        gib = 2**30
        problems.append(
            f"{place}: the step took {seen.peak_bytes / gib:.2f} GiB, more than {expected.memory / gib:.2f} GiB, which "
            "only dense scores explain"
        )
    if seen.oracle:
        problems.append(f"{place}: {seen.oracle}")
    return problems


@dataclass
class Found:
    """A region's part of a trace: its calls, those with a graph inside, and those that the trace's end may have cut
    off before their graph: a thread's last one, of a region that runs freely while the profiler stops."""

    calls: int = 0
    compiled: int = 0
    cut: int = 0
    forward: int = 0
    backward: int = 0
    keys: set[str] = field(default_factory=set)
    operators: list[tuple[str, list[tuple[int, ...]]]] = field(default_factory=list)

    def forbidden(self, score_shapes: Sequence[tuple[int, int]], softmax: bool) -> list[str]:
        """Operators that must not have run, "aten::bmm [32, 8192, 12288]", each once."""
        names: dict[str, None] = {}
        wanted = {frozenset(shape) if shape[0] != shape[1] else shape for shape in score_shapes}
        for name, shapes in self.operators:
            # Scores have heads in front; two dimensions alone may be any activation of that size.
            dense = next((s for s in shapes if len(s) >= 3 and _as_key(s[-2:]) in wanted), None)
            if dense is not None or (not softmax and SOFTMAX.match(name)):
                shape = dense or next((s for s in shapes if s), ())
                names[f"{name} {list(shape)}"] = None
        return list(names)


def _as_key(shape: tuple[int, ...]) -> object:
    return frozenset(shape) if shape[0] != shape[1] else tuple(shape)


class Trace:
    """A profiler's events, by region and device.

    Cost: one pass over the events and one over their spans, sorted; memory as many references as events.
    """

    def __init__(self, events: Sequence[Span]) -> None:
        self.unowned: Counter[str] = Counter()  # graphs by key that ran in a backward of unknown owner
        self._kernels: dict[int, set[str]] = {}
        self._by_thread: dict[int, list[Span]] = {}
        for event in events:
            if event.device is None:
                self._by_thread.setdefault(event.thread, []).append(event)
            else:
                self._kernels.setdefault(event.device, set()).add(event.name)
        for spans in self._by_thread.values():
            spans.sort(key=lambda event: (event.start, -event.end))
        self._regions: dict[str, Found] = {}
        owners: dict[tuple[int, int], str] = {}  # (thread, sequence number) of a forward's autograd node → region
        for thread, spans in self._by_thread.items():
            self._forwards(thread, spans, owners)
        for spans in self._by_thread.values():
            self._backwards(spans, owners)

    def region(self, name: str) -> Found:
        """What a region showed; empty if it was not called."""
        return self._regions.get(mark(name), Found())

    def kernels(self, device: str) -> list[str]:
        """Names of the kernels that ran on a device, sorted."""
        index = torch.device(device).index if device else None
        return sorted(self._kernels.get(index or 0, ()))

    def _forwards(self, thread: int, spans: list[Span], owners: dict[tuple[int, int], str]) -> None:
        name, until, backward_until = "", -1.0, -1.0
        graphs = 0  # inside the call
        for event in spans:
            start, end = event.start, event.end
            if start <= backward_until:
                continue
            if event.name.startswith(_BACKWARD):
                backward_until = end
                continue
            if event.name.startswith(mark("")):
                name, until, graphs = event.name, end, 0
                self._regions.setdefault(name, Found()).calls += 1
                continue
            inside = start <= until
            if event.sequence >= 0:
                # Operators that make no node leave the number to the next one, so the last to show it owns it.
                owners[thread, event.sequence] = name if inside else ""
            if not inside:
                continue
            found = self._regions[name]
            graph = _torch.COMPILED_GRAPH.match(event.name)
            if graph:
                found.forward += 1
                found.compiled += graphs == 0
                found.keys.add(graph[1])
                graphs += 1
            found.operators.append((event.name, event.shapes()))
        if name and not graphs:
            self._regions[name].cut += 1

    def _backwards(self, spans: list[Span], owners: dict[tuple[int, int], str]) -> None:
        name, until = "", -1.0
        for event in spans:
            start, end = event.start, event.end
            if event.name.startswith(_BACKWARD):
                name, until = owners.get((event.forward_thread, event.sequence), ""), end
                continue
            graph = _torch.COMPILED_GRAPH.match(event.name)
            if not name or start > until:
                if graph and start <= until:
                    self.unowned[graph[1]] += 1
                continue
            found = self._regions[name]
            if graph:
                found.backward += 1
                found.keys.add(graph[1])
            found.operators.append((event.name, event.shapes()))
