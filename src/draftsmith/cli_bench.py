"""`draftsmith bench`: one part of the work, timed on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from draftsmith.errors import UserError


def bench(
    part: Annotated[str, typer.Argument(metavar="PART", help="step, target, mask, loss, update, or decode.")],
    drafter: Annotated[str | None, typer.Argument(metavar="[DRAFTER]", help="Of decode: a drafter's folder.")] = None,
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
    target: Annotated[str | None, typer.Option(help="Of decode: directory, hub name, .gguf file, or 'demo'.")] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help="Of decode: TASK=FILE of prompts or of a benchmark's lines; repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of decode: length limit of an answer.")] = 256,
    limit: Annotated[int | None, typer.Option(min=1, help="Of decode: the first so many prompts of a task.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of decode; 0: the likeliest token.")] = 0.0,
    contexts: Annotated[str, typer.Option(help="Of decode: lengths at which τ is measured, such as 512,4096.")] = "",
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Of decode.")] = "auto",
    picture: Annotated[Path | None, typer.Option(help="Of decode: PNG to draw.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, text on stderr.")] = False,
) -> int:
    """Time one part of the work on random weights, or (decode) a drafter at work."""
    if part == "decode":
        if drafter is None or target is None or not prompts:
            raise UserError("needs DRAFTER, --target and --prompts", where="bench decode")
        lengths = _numbers(contexts)
        return _decode(
            drafter, target, prompts, max_new_tokens, limit, temperature, lengths, device, dtype, picture, json_
        )
    if drafter is not None:
        raise UserError(f"takes no drafter: {drafter!r}", where=f"bench {part}")
    from dataclasses import replace

    import torch

    from draftsmith.bench.geometry import find_geometry
    from draftsmith.bench.parts import BENCHES, compare, default_setting
    from draftsmith.pipeline.topology import parse_device

    if part not in BENCHES:
        known = ", ".join([*BENCHES, "decode"])
        raise UserError(f"{part!r} cannot be timed", where="bench", fix=f"use one of {known}")
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


def _decode(
    drafter: str,
    target: str,
    prompts: list[str],
    max_new_tokens: int,
    limit: int | None,
    temperature: float,
    contexts: list[int],
    device: str,
    dtype: str,
    picture: Path | None,
    json_: bool,
) -> int:
    """`bench decode`: 0 if every task was lossless, else 1."""
    import torch

    from draftsmith.bench.decoding import bench_decode, draw, lines_of
    from draftsmith.config import TargetConfig
    from draftsmith.decode.prompts import read_prompts
    from draftsmith.drafter.native import load_drafter
    from draftsmith.export.card import find_run
    from draftsmith.observe.live import LiveLine
    from draftsmith.pipeline.topology import parse_device
    from draftsmith.target.load import load_target

    tasks = []
    for entry in prompts:
        name, equals, file = entry.partition("=")
        path = Path(file if equals else entry)
        tasks.append((name if equals else path.stem, read_prompts(path)[:limit]))
    place = parse_device(("cuda:0" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    name = ("bfloat16" if place.type == "cuda" else "float32") if dtype == "auto" else dtype
    frozen = load_target(TargetConfig(path=target), place, getattr(torch, name))  # type: ignore[call-arg]
    model = load_drafter(Path(drafter), frozen.device, frozen.dtype, frozen.geometry.layers)
    model.spec.require_target(frozen.geometry, str(drafter))
    run = find_run(Path(drafter))
    with LiveLine() as live:
        result = bench_decode(
            model,
            frozen,
            tasks,
            max_new_tokens=max_new_tokens,
            sampling={"temperature": temperature},
            contexts=contexts,
            trained_length=None if run is None else run.config["rows"]["length"],
            progress=lambda what, done, total: live({"kind": "step", "unit": what, "step": done, "steps": total}),
        )
    if picture is not None:
        result["picture"] = str(draw(result, picture))
    print("\n".join(lines_of(result)), file=sys.stderr if json_ else sys.stdout)
    if json_:
        print(json.dumps(result))
    return 0 if all(task["lossless"] for task in result["tasks"]) else 1


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"{text!r} is not a list of numbers", where="--contexts", fix="512,4096") from None


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
        "eager_ms": "ms with uncompiled layers",
        "cold_seconds": "s for the first row, compiling included",
    }
    lines += [f"  {result[key]:,.4g} {name}" for key, name in names.items() if result.get(key) is not None]
    return lines


def _read_result(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {key: content[key] for key in ("bench", "shape", "ms", "ms_min", "ms_max")}
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), fix="write one with --json > FILE") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"is not a benchmark result: {error}", where=str(path)) from None
