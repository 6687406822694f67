"""`draftsmith bench`: one part of the work, timed on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from draftsmith.errors import UserError


def bench(
    part: Annotated[
        str, typer.Argument(metavar="PART", help="step, target, row, mask, loss, update, pipeline, memory, or decode.")
    ],
    drafter: Annotated[str | None, typer.Argument(metavar="[DRAFTER]", help="Of decode: a drafter's folder.")] = None,
    geometry: Annotated[
        str, typer.Option(help="qwen3-8b, qwen3-4b, qwen3-0.6b, qwen3.5-hybrid, smollm2 or tiny; on a CPU small twins.")
    ] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda:N; auto: cuda:0 if there is one.")] = "auto",
    length: Annotated[int | None, typer.Option(min=16, help="S, context tokens of the row.")] = None,
    anchors: Annotated[int | None, typer.Option(min=1, help="N.")] = None,
    block_size: Annotated[int | None, typer.Option(min=2, max=128, help="B.")] = None,
    chunk: Annotated[int | None, typer.Option(min=1, help="Taught slots per head chunk.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, max=16, help="Of the drafter; as many taps.")] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="Documents packed into the row.")] = None,
    precision: Annotated[Literal["full", "fp8"], typer.Option(help="Of target, row: of linear layers.")] = "full",
    packing: Annotated[
        Literal["", "pieces", "mask", "separate"],
        typer.Option(help="Of target, row: how packed rows run."),
    ] = "",
    optimizer: Annotated[Literal["adamw", "muon"], typer.Option(help="Of update.")] = "adamw",
    rows: Annotated[
        int, typer.Option(min=1, help="Of update and pipeline: rows of an update; of pipeline one a drafter at least.")
    ] = 1,
    targets: Annotated[str, typer.Option(help="Of pipeline: cuda:0,cuda:1 or the like, or auto.")] = "",
    drafters: Annotated[str, typer.Option(help="Of pipeline: likewise; devices may repeat.")] = "",
    steps: Annotated[int, typer.Option(min=6, help="Of pipeline: updates.")] = 24,
    sequence: Annotated[bool, typer.Option("--sequence", help="Of pipeline: also in one thread.")] = False,
    autotune: Annotated[
        bool, typer.Option("--autotune", help="Of step, target, row: try several kernels for each product; minutes.")
    ] = False,
    runs: Annotated[int | None, typer.Option(min=1, help="Timed runs.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="An earlier --json result: exit 1 if slower beyond noise.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Of decode: directory, hub name, .gguf file, or 'demo'.")] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help="Of decode: TASK=FILE of prompts or of a benchmark's lines; repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of decode: length limit of an answer.")] = 256,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Of decode: the first so many prompts of a task; of memory: cases.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of decode; 0: the likeliest token.")] = 0.0,
    contexts: Annotated[str, typer.Option(help="Of decode: lengths at which τ is measured, such as 512,4096.")] = "",
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Of decode.")] = "auto",
    compile: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(help="Of decode: rounds in CUDA graphs; auto: on CUDA, if the target lets itself."),
    ] = "auto",
    picture: Annotated[Path | None, typer.Option(help="Of decode: PNG to draw.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, text on stderr.")] = False,
) -> int:
    """Time one part of the work on random weights, or (decode) a drafter at work."""
    if part == "decode":
        if drafter is None or target is None or not prompts:
            raise UserError("needs DRAFTER, --target and --prompts", where="bench decode")
        lengths = _numbers(contexts)
        return _decode(
            drafter,
            target,
            prompts,
            max_new_tokens,
            limit,
            temperature,
            lengths,
            device,
            dtype,
            compile,
            picture,
            json_,
        )
    if compile != "auto":
        raise UserError("--compile is of decode", where=f"bench {part}")
    if drafter is not None:
        raise UserError(f"takes no drafter: {drafter!r}", where=f"bench {part}")
    if part == "memory":
        return _memory(device, limit, json_)
    from dataclasses import replace

    import torch

    from draftsmith.bench.geometry import find_geometry, name_of
    from draftsmith.bench.parts import BENCHES, compare, default_setting
    from draftsmith.bench.row import bench_row
    from draftsmith.config import balanced_chunk
    from draftsmith.pipeline.topology import parse_device

    benches = {**BENCHES, "row": bench_row}
    if part not in (*benches, "pipeline"):
        known = ", ".join([*benches, "pipeline", "memory", "decode"])
        raise UserError(f"{part!r} cannot be timed", where="bench", fix=f"use one of {known}")
    earlier = None if against is None else _read_result(against, part)
    name = ("cuda:0" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    place = parse_device(name)
    shape = find_geometry(geometry or ("qwen3-8b" if place.type == "cuda" else "tiny"))
    given = {
        "length": length, "anchors": anchors, "block_size": block_size, "layers": layers, "chunk": chunk,
        "documents": documents, "runs": runs,
    }  # fmt: skip
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    setting = replace(default_setting(shape, place, geometry or name_of(shape)), **changes)
    setting = replace(setting, precision=precision, packing=packing, autotune=autotune, optimizer=optimizer, rows=rows)
    if chunk is None:
        setting = replace(setting, chunk=balanced_chunk(setting.anchors, setting.block_size))
    if setting.documents > setting.length:
        raise UserError(f"{setting.documents} documents do not fit into a row of {setting.length}", where="--documents")
    if (precision, packing) != ("full", "") and part not in ("target", "row"):
        raise UserError("--precision and --packing are of target and row", where=f"bench {part}")
    if (optimizer, rows) != ("adamw", 1) and part not in ("update", "pipeline"):
        raise UserError("--optimizer and --rows are of update and pipeline", where=f"bench {part}")
    if (targets or drafters or sequence) and part != "pipeline":
        raise UserError("--targets, --drafters and --sequence are of the pipeline", where=f"bench {part}")
    if part == "pipeline":
        from draftsmith.bench.pipeline import PipelineSetting, bench_pipeline, lines_of

        here, there = (tuple(each.strip() for each in (text or name).split(",")) for text in (targets, drafters))
        result = bench_pipeline(PipelineSetting(setting, here, there, max(rows, len(there)), steps, sequence=sequence))
    else:
        result = benches[part](setting)
    ok, change = (True, "") if earlier is None else compare(result, earlier)
    ok = ok and not result.get("host_waits")
    text = sys.stderr if json_ else sys.stdout
    for line in lines_of(result) if part == "pipeline" else _lines(result):
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
    compile: Literal["auto", "on", "off"],
    picture: Path | None,
    json_: bool,
) -> int:
    """`bench decode`: 0 if every task was lossless, else 1."""
    import torch

    from draftsmith.bench.decoding import bench_decode, draw, lines_of
    from draftsmith.config import TargetConfig
    from draftsmith.decode.prompts import read_prompts
    from draftsmith.decode.static import StaticRounds
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
            rounds=StaticRounds(frozen, compile),
        )
    if picture is not None:
        result["picture"] = str(draw(result, picture))
    print("\n".join(lines_of(result)), file=sys.stderr if json_ else sys.stdout)
    if json_:
        print(json.dumps(result))
    return 0 if all(task["lossless"] for task in result["tasks"]) else 1


def _memory(device: str, limit: int | None, json_: bool) -> int:
    """`bench memory`: 0 if what was predicted is right on all held-out configurations, else 1."""
    import torch

    from draftsmith.bench.memory import BOUND, CASES, bench_memory
    from draftsmith.pipeline.topology import parse_device

    text = sys.stderr if json_ else sys.stdout
    place = parse_device(("cuda:0" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    result = bench_memory(place, CASES[:limit], progress=lambda line: print(line, file=text, flush=True))
    print(
        f"held out: off by {result['held_out_worst']:.1%} at most (right below {BOUND:.0%}); "
        f"the others by {result['fit_worst']:.1%}",
        file=text,
    )
    if json_:
        print(json.dumps(result))
    return 0 if result["ok"] else 1


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"{text!r} is not a list of numbers", where="--contexts", fix="512,4096") from None


def _lines(result: dict[str, Any]) -> list[str]:
    shape = " ".join(f"{key}={value}" for key, value in result["shape"].items())
    lines = [
        f"{result['bench']}: {result['ms']:.2f} ms (min {result['ms_min']:.2f}, max {result['ms_max']:.2f}) at {shape}"
        f" ({result['geometry']})"
    ]
    if "share_of_ceiling" in result:
        lines.append(
            f"  {result['tflop_per_second']:.3g} TFLOP/s, {100 * result['share_of_ceiling']:.0f} % of the matmul "
            f"ceiling ({result['ceiling_tflop_per_second']:.3g}); floor {result['floor_ms']:.2f} ms"
        )
    names = {
        "real_tokens_per_second": "real tokens/s",
        "peak_gib": "GiB at most",
        "process_gib": "GiB of this process at most",
        "working_gib": "GiB at most beyond the weights",
        "host_ms": "ms for the host to hand it over",
        "step_peak_gib": "GiB at most in a step",
        "on_device_ms": "ms to put the masks together on the device",
        "gb_per_second": "GB/s of unavoidable traffic",
        "taught": "taught slots",
        "eager_ms": "ms with uncompiled layers",
        "cold_seconds": "s for the first row, compiling included",
    }
    if "share_of_bandwidth" in result:
        lines.append(
            f"  {100 * result['share_of_bandwidth']:.0f} % of what a copy reaches "
            f"({result['ceiling_gb_per_second']:,.0f} GB/s); floor {result['floor_ms']:.2f} ms"
        )
    if result.get("kernels"):
        lines.append(f"  {result['kernels']}")
    if "host_waits" in result:
        waits = result["host_waits"]
        lines.append(f"  the host waits for the device: {waits[0]}" if waits else "  the host waits for nothing in it")
    if result.get("packing_reason"):
        lines.append(f"  packed rows run as {result['packing']}: {result['packing_reason']}")
    if result.get("feature_errors"):
        lines.append(f"  fp8 changes features by {', '.join(f'{error:.1%}' for error in result['feature_errors'])}")
    for key, name in names.items():
        value = result.get(key)
        if value is not None:
            lines.append(f"  {value:,.0f} {name}" if value >= 1e4 else f"  {value:,.4g} {name}")
    return lines


def _read_result(path: Path, part: str) -> dict[str, Any]:
    """An earlier result of this benchmark; whether its shape is the same shows once the new one is there."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = {key: content[key] for key in ("bench", "shape", "ms", "ms_min", "ms_max")}
        found |= {key: content.get(key) for key in ("device", "torch")}
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), fix="write one with --json > FILE") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"is not a benchmark result: {error}", where=str(path)) from None
    if found["bench"] != part:
        raise UserError(f"is a result of bench {found['bench']}, not of bench {part}", where=str(path))
    return found
