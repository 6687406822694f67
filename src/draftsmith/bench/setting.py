"""What is benchmarked, and the form that every result has."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.bench.timing import Timing, fp8_ceiling, matmul_ceiling
from draftsmith.blocks import Document, DraftBatch, Row, make_draft_batch, pack_row
from draftsmith.config import DrafterConfig
from draftsmith.drafter import DrafterSpec, resolve_spec
from draftsmith.drafter.attention import in_words
from draftsmith.objective import decay_weights
from draftsmith.target.geometry import TargetGeometry

GIB = 2**30
_LARGEST_HEAD = 128  # of a drafter: larger heads are split, at the same width


@dataclass(frozen=True)
class Setting:
    """What is benchmarked.

    Attributes:
        geometry: of the target.
        device: where.
        length, anchors, block_size, layers: S, N, B and the drafter's depth.
        chunk: taught slots per head chunk.
        documents: documents packed into the row.
        runs: that are timed.
        name: of the geometry, for people.
        precision: "full" or "fp8", of the target.
        packing: how the target's packed rows run; "" as it would choose.
        optimizer: "adamw" or "muon", of the update.
        rows: of an update.
        autotune: Inductor tries several kernels for each matrix product, for minutes.
        compile_drafter: "layers" or "whole", as `compile.drafter` of a run.
        flex_backend: "triton" or "flash", as `compile.flex_backend` of a run.
    """

    geometry: TargetGeometry
    device: torch.device
    length: int
    anchors: int
    block_size: int
    layers: int
    chunk: int
    documents: int
    runs: int = 10
    name: str = ""
    precision: str = "full"
    packing: str = ""
    optimizer: str = "adamw"
    rows: int = 1
    autotune: bool = False
    compile_drafter: str = "layers"
    flex_backend: str = "triton"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def attention(self) -> str:
        return "flex" if self.device.type == "cuda" else "dense"

    @property
    def way(self) -> str:
        """How the drafter runs, as a run's plan says it."""
        return in_words(self.attention, self.attention == "flex", self.flex_backend)

    @property
    def compile_options(self) -> dict[str, Any]:
        """For regions."""
        return {"mode": "max-autotune-no-cudagraphs"} if self.autotune else {}

    def spec(self) -> DrafterSpec:
        """Of the drafter, MASK being the last embedding row."""
        g = self.geometry
        split = max(1, g.head_dim // _LARGEST_HEAD)
        config = DrafterConfig(
            layers=self.layers,
            block_size=self.block_size,
            heads=g.heads * split,
            kv_heads=g.kv_heads * split,
            head_dim=g.head_dim // split,
        )
        return resolve_spec(config, g, g.vocab_rows - 1)

    def row(self) -> Row:
        """A row of equal documents, all tokens the assistant's."""
        generator = torch.Generator().manual_seed(0)
        size = self.length // self.documents
        sizes = [size] * (self.documents - 1) + [self.length - size * (self.documents - 1)]
        documents = [
            Document(
                torch.randint(self.geometry.vocab_rows - 1, (n,), generator=generator), torch.ones(n, dtype=torch.bool)
            )
            for n in sizes
        ]
        return pack_row(0, documents, self.length)

    def batch(self) -> DraftBatch:
        """The row's draft work, on the CPU."""
        spec = self.spec()
        return make_draft_batch(
            self.row(),
            anchors=self.anchors,
            block_size=self.block_size,
            mask_token_id=spec.mask_token_id,
            slot_weights_B=decay_weights(self.block_size),
            chunk=self.chunk,
            kinds=spec.kinds,
            seed=(0,),
            with_tiles=self.attention == "flex",
        )


def start(setting: Setting) -> None:
    """Seeds, and forgets what memory was used before."""
    torch.manual_seed(0)
    if setting.device.type == "cuda":
        torch.cuda.init()  # without it the next line knows no device
        torch.cuda.reset_peak_memory_stats(setting.device)


def shape_of(name: str, setting: Setting) -> dict[str, Any]:
    """What of a result's shape follows from the setting; results compare where their shapes are equal.

    Args:
        name: of the benchmark; not the pipeline's, whose shape is its plan's.
        setting: of it.
    """
    shape: dict[str, Any] = {
        "S": setting.length, "N": setting.anchors, "B": setting.block_size, "layers": setting.layers,
        "H": setting.geometry.hidden_size, "V": setting.geometry.vocab_rows, "chunk": setting.chunk,
        "documents": setting.documents,
    }  # fmt: skip
    if name in ("target", "row"):
        shape["precision"] = setting.precision
        if setting.packing:  # else as the target will choose
            shape["packing"] = setting.packing
    elif name == "update":
        shape |= {"optimizer": setting.optimizer, "rows": setting.rows}
    return shape


def result_of(
    name: str, setting: Setting, timing: Timing, flops: float | None, *, fp8_flops: float = 0.0, **more: Any
) -> dict[str, Any]:
    """One flat dictionary, the same for people, `--json` and `--against`.

    Args:
        name: of the benchmark.
        timing: of it.
        flops: of the arithmetic that has to be done; None where it is none.
        fp8_flops: those of them that fp8 products do.
        more: what else there is to say. "shape" adds to the shape what only showed in the run.
    """
    cuda = setting.device.type == "cuda"
    shape = shape_of(name, setting) | more.pop("shape", {})
    result: dict[str, Any] = {
        "bench": name,
        "geometry": setting.name,
        "device": torch.cuda.get_device_name(setting.device) if cuda else "cpu",
        "torch": torch.__version__,
        **timing.to_json(),
        "shape": shape,
    }
    # What was used up to here; the ceiling's own matrices are not the benchmark's.
    if cuda:
        result["peak_gib"] = torch.cuda.max_memory_allocated(setting.device) / GIB
    else:
        result["process_gib"] = process_gib()
    if flops is not None:
        dtype = str(setting.dtype).removeprefix("torch.")
        parts = [(dtype, flops - fp8_flops, matmul_ceiling(setting.device, setting.dtype))]
        if fp8_flops:
            parts.insert(0, ("fp8", fp8_flops, fp8_ceiling(setting.device, setting.dtype)))
        result |= arithmetic(parts, timing.median)
    return result | more


def arithmetic(parts: Sequence[tuple[str, float, float]], milliseconds: float) -> dict[str, Any]:
    """Work that took so long against what the matmul ceilings of its products allow, one part behind the other.

    Args:
        parts: (dtype, FLOP, ceiling in TFLOP/s) of each kind of product.
        milliseconds: what it took.

    Returns:
        "ceiling_tflop_per_second" is that of the mixture; of several parts "products" tells each one's.
    """
    flops = sum(each for _, each, _ in parts)
    floor_ms = sum(each / ceiling for _, each, ceiling in parts) / 1e9
    found: dict[str, Any] = {
        "tflop": flops / 1e12,
        "tflop_per_second": flops / (milliseconds * 1e-3) / 1e12,
        "ceiling_tflop_per_second": flops / floor_ms / 1e9,
        "share_of_ceiling": floor_ms / milliseconds,
        "floor_ms": floor_ms,
    }
    if len(parts) > 1:
        found["products"] = {
            dtype: {"tflop": each / 1e12, "ceiling_tflop_per_second": ceiling} for dtype, each, ceiling in parts
        }
    return found


def process_gib() -> float:
    """The most that this process ever held in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
