"""`draftsmith bench`: one part of the work, timed on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from draftsmith.cli_options import (
    Device,
    DTypeName,
    Json,
    RoundsName,
    given,
    need_prompts,
    refuse_given,
    refuse_temperature,
    say,
    target_config,
    tell,
    telling,
)
from draftsmith.errors import UserError

if TYPE_CHECKING:
    from draftsmith.bench.setting import Setting

Part = Annotated[
    str, typer.Argument(metavar="PART", help="step, target, row, mask, loss, update, pipeline, memory, or decode.")
]
Drafter = Annotated[str | None, typer.Argument(metavar="[DRAFTER]", help="Of decode: a drafter's folder.")]
Runs = Annotated[int | None, typer.Option(min=1, help="Timed runs.")]
Against = Annotated[Path | None, typer.Option(help="An earlier --json result: exit 1 if slower beyond noise.")]

# Sizes.
# Those of `bench.geometry`, which imports torch.
GEOMETRIES = ("qwen3-8b", "qwen3-4b", "qwen3-0.6b", "qwen3.5-hybrid", "smollm2", "tiny")
Geometry = Annotated[str, typer.Option(help=f"One of {', '.join(GEOMETRIES)}; on a CPU large ones have small twins.")]
Length = Annotated[int | None, typer.Option(min=16, help="S, context tokens of the row.")]
Anchors = Annotated[int | None, typer.Option(min=1, help="N.")]
BlockSize = Annotated[int | None, typer.Option(min=2, max=128, help="B.")]
Chunk = Annotated[int | None, typer.Option(min=1, help="Taught slots per head chunk.")]
Layers = Annotated[int | None, typer.Option(min=1, max=16, help="Of the drafter; as many taps.")]
Documents = Annotated[int | None, typer.Option(min=1, help="Documents packed into the row.")]

# Ways of one part or the other.
Precision = Annotated[Literal["full", "fp8"], typer.Option(help="Of target, row: of linear layers.")]
Packing = Annotated[
    Literal["", "pieces", "mask", "separate"], typer.Option(help="Of target, row: how packed rows run.")
]
Optimizer = Annotated[Literal["adamw", "muon"], typer.Option(help="Of update.")]
Rows = Annotated[
    int, typer.Option(min=1, help="Of update and pipeline: rows of an update; of pipeline one a drafter at least.")
]
Targets = Annotated[str, typer.Option(help="Of pipeline: cuda:0,cuda:1 or the like, or auto.")]
Drafters = Annotated[str, typer.Option(help="Of pipeline: likewise; devices may repeat.")]
Steps = Annotated[int | None, typer.Option(min=6, help="Of pipeline: updates; 24, on a CPU 10.")]
Sequence = Annotated[bool, typer.Option("--sequence", help="Of pipeline: also in one thread.")]
Autotune = Annotated[
    bool, typer.Option("--autotune", help="Of step, target, row: try several kernels for each product; minutes.")
]
CompileDrafter = Annotated[
    Literal["layers", "whole"], typer.Option(help="Of step and row: as compile.drafter of a run.")
]
FlexBackend = Annotated[
    Literal["triton", "flash"], typer.Option(help="Of step, row, pipeline: as compile.flex_backend of a run.")
]

# Decoding.
TargetPath = Annotated[str | None, typer.Option(help="Of decode: directory, hub name, .gguf file, or 'demo'.")]
Prompts = Annotated[
    list[str] | None, typer.Option(help="Of decode: TASK=FILE of prompts or of a benchmark's lines; repeatable.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Of decode: length limit of an answer.")]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Of decode: the first so many prompts of a task; of memory: cases.")
]
Temperature = Annotated[
    float, typer.Option(min=0.0, callback=refuse_temperature, help="Of decode; 0: the likeliest token.")
]
Contexts = Annotated[str, typer.Option(help="Of decode: lengths at which τ is measured, such as 512,4096.")]
DType = Annotated[DTypeName, typer.Option(help="Of decode.")]
Compile = Annotated[
    RoundsName,
    typer.Option(help="Of decode: rounds in CUDA graphs; auto: on CUDA, if the target lets itself."),
]
Picture = Annotated[Path | None, typer.Option(help="Of decode: PNG to draw.")]


# Which parts use what; --device and --json are of all.
PartName = Literal["step", "target", "row", "mask", "loss", "update", "pipeline", "memory", "decode"]
PARTS: tuple[PartName, ...] = get_args(PartName)
_TIMED: frozenset[PartName] = frozenset(("step", "target", "row", "mask", "loss", "update"))
_BLOCKS: frozenset[PartName] = frozenset(("step", "row", "mask", "loss", "pipeline"))
_PIPELINE: frozenset[PartName] = frozenset(("pipeline",))
_DECODE: frozenset[PartName] = frozenset(("decode",))
USED_BY: dict[str, frozenset[PartName]] = {
    "geometry": _TIMED | _PIPELINE,
    "length": _TIMED | _PIPELINE,
    "anchors": _BLOCKS,
    "block_size": _BLOCKS,
    "chunk": _BLOCKS,
    "layers": frozenset(("step", "target", "row", "update", "pipeline")),
    "documents": _BLOCKS | {"target"},
    "precision": frozenset(("target", "row")),
    "packing": frozenset(("target", "row")),
    "optimizer": frozenset(("update", "pipeline")),
    "rows": frozenset(("update", "pipeline")),
    "targets": _PIPELINE,
    "drafters": _PIPELINE,
    "steps": _PIPELINE,
    "sequence": _PIPELINE,
    "autotune": frozenset(("step", "target", "row")),
    "compile_drafter": frozenset(("step", "row")),
    "flex_backend": frozenset(("step", "row", "pipeline")),
    "runs": _TIMED,
    "against": _TIMED | _PIPELINE,
    "drafter": _DECODE,
    "target": _DECODE,
    "prompts": _DECODE,
    "max_new_tokens": _DECODE,
    "limit": frozenset(("memory", "decode")),
    "temperature": _DECODE,
    "contexts": _DECODE,
    "dtype": _DECODE,
    "compile": _DECODE,
    "picture": _DECODE,
}


def bench(
    ctx: typer.Context,
    part: Part,
    drafter: Drafter = None,
    geometry: Geometry = "",
    device: Device = "auto",
    length: Length = None,
    anchors: Anchors = None,
    block_size: BlockSize = None,
    chunk: Chunk = None,
    layers: Layers = None,
    documents: Documents = None,
    precision: Precision = "full",
    packing: Packing = "",
    optimizer: Optimizer = "adamw",
    rows: Rows = 1,
    targets: Targets = "",
    drafters: Drafters = "",
    steps: Steps = None,
    sequence: Sequence = False,
    autotune: Autotune = False,
    compile_drafter: CompileDrafter = "layers",
    flex_backend: FlexBackend = "triton",
    runs: Runs = None,
    against: Against = None,
    target: TargetPath = None,
    prompts: Prompts = None,
    max_new_tokens: MaxNewTokens = 256,
    limit: Limit = None,
    temperature: Temperature = 0.0,
    contexts: Contexts = "",
    dtype: DType = "auto",
    compile: Compile = "auto",
    picture: Picture = None,
    json_: Json = False,
) -> int:
    """Time one part of the work on random weights, or (decode) a drafter at work."""
    _refuse_what_is_not_used(ctx, part)
    if geometry and geometry not in GEOMETRIES:
        raise UserError(
            f"{geometry!r} is not a geometry", where="--geometry", fix=f"use one of {', '.join(GEOMETRIES)}"
        )
    if part == "decode":
        if drafter is None or target is None or not prompts:
            raise UserError("needs DRAFTER, --target and --prompts", where="bench decode")
        lengths = _numbers(contexts)
        return _decode(
            drafter, target, prompts, max_new_tokens, limit, temperature, lengths, device, dtype, compile, picture,
            json_,
        )  # fmt: skip
    if part == "memory":
        return _memory(device, limit, json_)
    sizes = {
        "length": length, "anchors": anchors, "block_size": block_size, "layers": layers, "chunk": chunk,
        "documents": documents, "runs": runs,
    }  # fmt: skip
    ways = {
        "precision": precision, "packing": packing, "autotune": autotune, "optimizer": optimizer, "rows": rows,
        "compile_drafter": compile_drafter, "flex_backend": flex_backend,
    }  # fmt: skip
    from draftsmith.bench.results import read_result

    earlier = None if against is None else read_result(against, part)
    setting = _setting(geometry, device, sizes, ways)
    if setting.device.type != "cuda":
        refuse_given(ctx, ("autotune", "compile_drafter", "flex_backend"), "nothing is compiled on the CPU")
    if flex_backend == "flash":
        _need_flash(setting)
    return _report(_timed(part, setting, targets, drafters, steps, sequence, earlier), earlier, json_)


def _need_flash(setting: Setting) -> None:
    """Raises UserError where FlashAttention-4 cannot run."""
    from draftsmith.drafter import flash

    flash.check(setting.device, setting.spec().head_dim, setting.dtype, "--flex-backend")


def _refuse_what_is_not_used(ctx: typer.Context, part: str) -> None:
    """Raises UserError for a part that cannot be timed, or an option that was given and that the part does not use."""
    if part not in PARTS:
        raise UserError(f"{part!r} cannot be timed", where="bench", fix=f"use one of {', '.join(PARTS)}")
    idle = given(ctx, [name for name, parts in USED_BY.items() if part not in parts])
    foreign = [
        f"{typed} is of {', '.join(each for each in PARTS if each in USED_BY[name])}" for name, typed in idle.items()
    ]
    if foreign:
        raise UserError("; ".join(foreign), where=f"bench {part}", fix="leave it out")


def _setting(geometry: str, device: str, sizes: dict[str, int | None], ways: dict[str, Any]) -> Setting:
    """The default setting of a device with what was given changed."""
    from dataclasses import replace

    from draftsmith.bench.geometry import find_geometry, name_of
    from draftsmith.bench.parts import default_setting
    from draftsmith.config import balanced_chunk
    from draftsmith.pipeline.topology import place_and_dtype

    place, _ = place_and_dtype(device, "auto")
    shape = find_geometry(geometry or ("qwen3-8b" if place.type == "cuda" else "tiny"))
    chosen: dict[str, Any] = {key: value for key, value in sizes.items() if value is not None}
    setting = replace(default_setting(shape, place, geometry or name_of(shape)), **chosen, **ways)
    if "chunk" not in chosen:
        setting = replace(setting, chunk=balanced_chunk(setting.anchors, setting.block_size))
    if setting.documents > setting.length:
        raise UserError(f"{setting.documents} documents do not fit into a row of {setting.length}", where="--documents")
    return setting


def _timed(
    part: str,
    setting: Setting,
    targets: str,
    drafters: str,
    steps: int | None,
    sequence: bool,
    earlier: dict[str, Any] | None,
) -> dict[str, Any]:
    """What the part's benchmark returns, with "remarks" on what of the target runs slowly.

    Raises:
        UserError: before anything is timed, if the earlier result is of another shape, as far as that is known by then.
    """
    from draftsmith.bench.parts import BENCHES
    from draftsmith.bench.pipeline import STEPS, STEPS_ON_CPU, PipelineSetting, bench_pipeline, known_shape
    from draftsmith.bench.results import need_same
    from draftsmith.bench.row import bench_row
    from draftsmith.bench.setting import shape_of

    if part == "pipeline":
        here, there = (
            tuple(each.strip() for each in (text or str(setting.device)).split(",")) for text in (targets, drafters)
        )
        rows = max(setting.rows, len(there))
        steps = steps or (STEPS if setting.device.type == "cuda" else STEPS_ON_CPU)
        pipeline = PipelineSetting(setting, here, there, rows, steps, sequence=sequence)
        if earlier is not None:
            need_same(earlier, part, setting.name, known_shape(pipeline))
        result = bench_pipeline(pipeline)
    else:
        if earlier is not None:
            need_same(earlier, part, setting.name, shape_of(part, setting))
        result = {**BENCHES, "row": bench_row}[part](setting)
    remarks = _slow_layers(setting) if part in ("target", "row", "pipeline") else []
    return {**result, **({"remarks": remarks} if remarks else {})}


def _slow_layers(setting: Setting) -> list[str]:
    """What the doctor says of the target's layers with state; nothing where there are none."""
    from draftsmith.bench.geometry import kinds_of
    from draftsmith.bench.random_target import model_config
    from draftsmith.doctor.fast_paths import LINEAR, linear_attention

    count = kinds_of(setting.geometry).count(LINEAR)
    if not count:
        return []
    found = linear_attention(model_config(setting.geometry), setting.device, count, say)
    return [f"{each.text}{f' (mend: {each.mend})' if each.mend else ''}" for each in found]


def _report(result: dict[str, Any], earlier: dict[str, Any] | None, json_: bool) -> int:
    """Prints; 0, or 1 if it is slower than earlier or the host waits for the device.

    Raises:
        UserError: what only the run could show makes it another shape; the result is printed all the same.
    """
    from draftsmith.bench.pipeline_figures import lines_of as lines_of_pipeline
    from draftsmith.bench.results import compare, lines_of

    lines = lines_of_pipeline(result) if result["bench"] == "pipeline" else lines_of(result)
    lines += [f"  {remark}" for remark in result.get("remarks", ())]
    ok = True
    if earlier is not None:
        try:
            ok, change = compare(result, earlier)
        except UserError:
            tell(lines, result, json_)
            raise
        lines.append(change)
        result["against"] = change
    tell(lines, result, json_)
    return 0 if ok and not result.get("host_waits") else 1


def _decode(
    drafter: str,
    target: str,
    prompts: list[str],
    max_new_tokens: int,
    limit: int | None,
    temperature: float,
    contexts: list[int],
    device: str,
    dtype: DTypeName,
    compile: RoundsName,
    picture: Path | None,
    json_: bool,
) -> int:
    """`bench decode`: 0 if every task was lossless, else 1."""
    named = [_task_and_file(entry) for entry in prompts]
    for _, path in named:
        need_prompts(path)
    from draftsmith.bench.decoding import bench_decode, check_picture, draw, lines_of
    from draftsmith.decode.prompts import read_prompts
    from draftsmith.decode.sampling import Sampling
    from draftsmith.decode.static import StaticRounds
    from draftsmith.drafter.native import load_drafter_for
    from draftsmith.export.card import find_run
    from draftsmith.observe.live import LiveLine
    from draftsmith.pipeline.topology import place_and_dtype
    from draftsmith.target.load import load_target

    if picture is not None:
        check_picture(picture)
    tasks = [(name, read_prompts(path)[:limit]) for name, path in named]
    config, place = target_config(target, dtype=dtype), place_and_dtype(device, dtype)
    model = load_drafter_for(config, Path(drafter))
    run = find_run(Path(drafter))
    frozen = load_target(config, *place)
    model.to(frozen.device, frozen.dtype)
    with LiveLine() as live:
        result = bench_decode(
            model,
            frozen,
            tasks,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature),
            contexts=contexts,
            trained_length=None if run is None else run.config["rows"]["length"],
            progress=lambda what, done, total: live({"kind": "step", "unit": what, "step": done, "steps": total}),
            rounds=StaticRounds(frozen, compile),
        )
    if picture is not None:
        result["picture"] = str(picture)
    tell(lines_of(result), result, json_)
    if picture is not None:
        draw(result, picture)
    return 0 if all(task["lossless"] for task in result["tasks"]) else 1


def _task_and_file(entry: str) -> tuple[str, Path]:
    name, equals, file = entry.partition("=")
    return (name, Path(file)) if equals else (Path(entry).stem, Path(entry))


def _memory(device: str, limit: int | None, json_: bool) -> int:
    """`bench memory`: 0 if what was predicted is right on all held-out configurations, else 1."""
    from draftsmith.bench.memory import BOUND, CASES, bench_memory
    from draftsmith.pipeline.topology import place_and_dtype

    place, _ = place_and_dtype(device, "auto")
    with telling(json_) as report:
        result = bench_memory(place, CASES[:limit], progress=lambda line: print(line, flush=True))
        report(
            f"held out: off by {result['held_out_worst']:.1%} at most (right below {BOUND:.0%}); "
            f"the others by {result['fit_worst']:.1%}",
            result,
        )
    return 0 if result["ok"] else 1


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"{text!r} is not a list of numbers", where="--contexts", fix="512,4096") from None
