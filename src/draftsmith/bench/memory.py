"""Predicted memory against measured: the plan's estimate on configurations of several sizes, both roles on one card.

Each case is built as a run would have it, with random weights: a target of twelve layers of a known geometry, stopped
after its last tap and compiled; a replica that shares its embedding and head; masters and moments. Two threads then
work as in training: one makes features without a pause, the other steps and updates, with as many rows waiting in
between as the queue lets wait. Compared is what torch's allocator held at most, after the warm-up, with
`estimate_memory`. Half of the cases are there to correct the count by, the other half were never looked at for that.

Cost: the compiles of a drafter and a target layer for each case, some 15 seconds on an H200.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftsmith.bench.geometry import find_geometry
from draftsmith.bench.parts import make_replica
from draftsmith.bench.random_target import random_target
from draftsmith.bench.setting import GIB, Setting
from draftsmith.compiled.gate import Gate
from draftsmith.compiled.region import Region
from draftsmith.config import OptimizerConfig, RunConfig, parse_config
from draftsmith.drafter.model import DraftModel
from draftsmith.errors import UserError
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.memory import DeviceMemory, estimate_memory
from draftsmith.pipeline.sync import Exchange
from draftsmith.pipeline.topology import Topology
from draftsmith.target.forward import Features, Target, run_layer
from draftsmith.training.step import Replica
from draftsmith.training.update import make_updates

TARGET_LAYERS = 12
BOUND = 0.10  # relative error that is right
_STEPS = 6


@dataclass(frozen=True)
class Case:
    """One configuration. `fit`: it may be looked at to correct the count."""

    name: str
    geometry: str
    layers: int
    length: int
    anchors: int
    block_size: int
    chunk: int
    fit: bool
    checkpointing: bool = False

    def setting(self, device: torch.device) -> Setting:
        """As benchmarks take it."""
        geometry = replace(find_geometry(self.geometry), layers=TARGET_LAYERS)
        return Setting(
            geometry, device, self.length, self.anchors, self.block_size, self.layers, self.chunk, 8, name=self.geometry
        )

    def config(self) -> RunConfig:
        """As a run would be configured."""
        return parse_config(
            {
                "target": {"path": "random"},
                "data": {"train": "random"},
                "drafter": {"layers": self.layers, "block_size": self.block_size},
                "rows": {"length": self.length, "anchors": self.anchors},
                "objective": {"chunk": self.chunk},
                "training": {"activation_checkpointing": self.checkpointing},
            }
        )


# The two kinds by turns, so that the first so many have both.
CASES = (
    Case("wide, one layer", "qwen3-8b", 1, 2048, 256, 16, 2048, fit=True),
    Case("the draft step of Qwen3-8B", "qwen3-8b", 5, 4096, 512, 16, 2048, fit=False),
    Case("small, long rows", "smollm2", 2, 8192, 512, 16, 4096, fit=True),
    Case("small, deep", "smollm2", 4, 4096, 1024, 8, 2048, fit=False),
    Case("wide, few slots", "qwen3-8b", 2, 4096, 64, 16, 512, fit=True),
    Case("middle, short rows", "qwen3-4b", 1, 2048, 128, 16, 2048, fit=False),
    Case("middle", "qwen3-4b", 2, 4096, 512, 16, 2048, fit=True),
    Case("narrow, long rows", "qwen3-0.6b", 2, 8192, 512, 16, 2048, fit=False),
    Case("narrow, many anchors", "qwen3-0.6b", 1, 4096, 1024, 8, 1024, fit=True),
    Case("wide, small chunks", "qwen3-8b", 1, 4096, 512, 16, 1024, fit=False),
)


def predict(case: Case, device: torch.device) -> DeviceMemory:
    """What the plan of such a run would say of its one device."""
    setting, config = case.setting(device), case.config()
    spec, place = setting.spec(), torch.device("cuda", device.index or 0) if device.type == "cuda" else device
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in DraftModel(spec).parameters())
    topology = Topology((place,), (place,), "both roles on one card")
    (memory,) = estimate_memory(
        config, topology, setting.geometry, spec, parameters, torch.bfloat16, torch.bfloat16, "flex"
    )
    return memory


def bench_memory(
    device: torch.device, cases: Sequence[Case] = CASES, progress: Callable[[str], None] = lambda _line: None
) -> dict[str, Any]:
    """Predicts and measures every case.

    Returns:
        "cases", each with predicted and measured GiB and their ratio; "held_out_worst" and "fit_worst", the largest
        relative errors; "ok" where no held-out case is off by more than a tenth.

    Raises:
        UserError: the device has no allocator that counts.
    """
    if device.type != "cuda":
        raise UserError("torch counts memory on CUDA devices only", where="bench memory", fix="--device cuda:0")
    found = []
    for case in cases:
        began = time.perf_counter()
        predicted = predict(case, device)
        measured = _measure(case, device)
        entry: dict[str, Any] = {
            "name": case.name,
            "fit": case.fit,
            "shape": {
                "geometry": case.geometry, "layers": case.layers, "S": case.length, "N": case.anchors,
                "B": case.block_size, "chunk": case.chunk,
            },
            "predicted_gib": predicted.total / GIB,
            "parts_gib": {
                name: getattr(predicted, name) / GIB for name in ("target", "drafter", "optimizer", "activations")
            },
            "ratio": predicted.total / GIB / measured["measured_gib"],
            "seconds": time.perf_counter() - began,
            **measured,
        }  # fmt: skip
        found.append(entry)
        progress(line_of(entry))
    worst = {
        fit: max((abs(entry["ratio"] - 1) for entry in found if entry["fit"] == fit), default=0.0)
        for fit in (True, False)
    }
    return {
        "bench": "memory",
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cases": found,
        "fit_worst": worst[True],
        "held_out_worst": worst[False],
        "ok": worst[False] <= BOUND,
    }


def line_of(entry: dict[str, Any]) -> str:
    """For people."""
    shape = " ".join(f"{key}={value}" for key, value in entry["shape"].items())
    return (
        f"{entry['name']:<28}{entry['predicted_gib']:7.2f} GiB predicted, {entry['measured_gib']:6.2f} measured "
        f"({100 * (entry['ratio'] - 1):+.1f} %), {'to correct by' if entry['fit'] else 'held out'}; {shape}"
    )


def _measure(case: Case, device: torch.device) -> dict[str, float]:
    """Peak of the steady state, and with the warm-up, in GiB; leaves nothing behind."""
    gc.collect()
    torch.cuda.init()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    setting, gate = case.setting(device), Gate()
    try:
        with torch.cuda.device(device):
            target = random_target(setting)
            target.compile_layers(Region("memory target", run_layer, gate=gate, device=device))
            replica = make_replica(setting, gate, target.head(), checkpointing=case.checkpointing)
            target.free_layers_after(max(replica.model.spec.taps))
            steady, held = _work(setting, target, replica, case.config().pipeline.queue, device)
        whole = torch.cuda.max_memory_allocated(device)
    finally:
        gate.close()
    del target, replica
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "measured_gib": (steady - before) / GIB,
        "with_warm_up_gib": (max(whole, steady) - before) / GIB,
        "weights_and_state_gib": (held - before) / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
    }


def _work(setting: Setting, target: Target, replica: Replica, queue: int, device: torch.device) -> tuple[int, int]:
    """(peak, what lay there before the steps) in bytes of two threads that work as a run's target and drafter do."""
    exchange = Exchange(make_updates([replica.model], OptimizerConfig()), Stop())
    row, batch = setting.row(), setting.batch().to(device)
    taps = replica.model.spec.taps

    def features() -> Features:
        return target.features(row.tokens_S, row.document_S, row.positions_S, taps)

    def step(found: Features) -> None:
        sums = replica.step(found, batch)
        exchange.updates[0].accumulate(last=True)
        exchange.update(0, sums, 1.0)

    for _ in range(2):
        step(features())
    torch.cuda.synchronize(device)
    gc.collect()
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    waiting: deque[Features] = deque(maxlen=queue + 1)
    for _ in range(queue + 1):
        waiting.append(features())
    torch.cuda.synchronize(device)
    over = threading.Event()
    errors: list[BaseException] = []

    def make() -> None:
        try:
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)), torch.no_grad():
                while not over.is_set():
                    features()
                    torch.cuda.current_stream(device).synchronize()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        for number in itertools.count():
            step(waiting[number % len(waiting)])
            torch.cuda.synchronize(device)
            if number + 1 >= _STEPS or errors:
                break
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]
    return torch.cuda.max_memory_allocated(device), held
