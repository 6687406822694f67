"""`draftsmith bench`: one part of the work, timed on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from draftsmith.errors import UserError


def bench(
    part: Annotated[str, typer.Argument(metavar="PART", help="step, target, mask, loss or update.")],
    geometry: Annotated[str, typer.Option(help="qwen3-8b, qwen3-4b, qwen3-0.6b, smollm2 or tiny.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda:N; auto: cuda:0 if there is one.")] = "auto",
    length: Annotated[int | None, typer.Option(min=16, help="S, context tokens of the row.")] = None,
    anchors: Annotated[int | None, typer.Option(min=1, help="N.")] = None,
    block_size: Annotated[int | None, typer.Option(min=2, max=128, help="B.")] = None,
    chunk: Annotated[int | None, typer.Option(min=1, help="Taught slots per head chunk.")] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Timed runs.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="An earlier --json result: exit 1 if slower beyond noise.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, text on stderr.")] = False,
) -> int:
    """Time one part of the work on random weights."""
    from dataclasses import replace

    import torch

    from draftsmith.bench.geometry import find_geometry
    from draftsmith.bench.parts import BENCHES, compare, default_setting
    from draftsmith.pipeline.topology import parse_device

    if part not in BENCHES:
        raise UserError(f"{part!r} cannot be timed", where="bench", fix=f"use one of {', '.join(BENCHES)}")
    earlier = None if against is None else _read_result(against)
    name = ("cuda:0" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    place = parse_device(name)
    shape = find_geometry(geometry or ("qwen3-8b" if place.type == "cuda" else "tiny"))
    given = {"length": length, "anchors": anchors, "block_size": block_size, "chunk": chunk, "runs": runs}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    setting = replace(default_setting(shape, place), **changes)
    result = BENCHES[part](setting)
    ok, change = (True, "") if earlier is None else compare(result, earlier)
    text = sys.stderr if json_ else sys.stdout
    for line in _lines(result):
        print(line, file=text)
    if change:
        print(change, file=text)
        result["against"] = change
    if json_:
        print(json.dumps(result))
    return 0 if ok else 1


def _lines(result: dict[str, Any]) -> list[str]:
    shape = " ".join(f"{key}={value}" for key, value in result["shape"].items())
    lines = [
        f"{result['bench']}: {result['ms']:.2f} ms (min {result['ms_min']:.2f}, max {result['ms_max']:.2f}) at {shape}"
    ]
    if "share_of_ceiling" in result:
        lines.append(
            f"  {result['tflop_per_second']:.3g} TFLOP/s, {100 * result['share_of_ceiling']:.0f} % of the matmul "
            f"ceiling ({result['ceiling_tflop_per_second']:.3g}); floor {result['floor_ms']:.2f} ms"
        )
    names = {
        "real_tokens_per_second": "real tokens/s",
        "peak_gib": "GiB at most",
        "step_peak_gib": "GiB at most in a step",
        "on_device_ms": "ms to put the masks together on the device",
        "gb_per_second": "GB/s of unavoidable traffic",
        "taught": "taught slots",
    }
    lines += [f"  {result[key]:,.4g} {name}" for key, name in names.items() if key in result]
    return lines


def _read_result(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {key: content[key] for key in ("bench", "shape", "ms", "ms_min", "ms_max")}
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), fix="write one with --json > FILE") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"is not a benchmark result: {error}", where=str(path)) from None
