"""`draftsmith bench`: one part of the work, timed on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftsmith.errors import UserError

if TYPE_CHECKING:
    import torch

    from draftsmith.bench.setting import Setting

Part = Annotated[
    str, typer.Argument(metavar="PART", help="step, target, row, mask, loss, update, pipeline, memory, or decode.")
]
Drafter = Annotated[str | None, typer.Argument(metavar="[DRAFTER]", help="Of decode: a drafter's folder.")]
Device = Annotated[str, typer.Option(help="cpu, cuda:N; auto: cuda:0 if there is one.")]
Runs = Annotated[int | None, typer.Option(min=1, help="Timed runs.")]
Against = Annotated[Path | None, typer.Option(help="An earlier --json result: exit 1 if slower beyond noise.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, text on stderr.")]

# Sizes.
Geometry = Annotated[
    str, typer.Option(help="qwen3-8b, qwen3-4b, qwen3-0.6b, qwen3.5-hybrid, smollm2 or tiny; on a CPU small twins.")
]
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
Steps = Annotated[int, typer.Option(min=6, help="Of pipeline: updates.")]
Sequence = Annotated[bool, typer.Option("--sequence", help="Of pipeline: also in one thread.")]
Autotune = Annotated[
    bool, typer.Option("--autotune", help="Of step, target, row: try several kernels for each product; minutes.")
]
CompileDrafter = Annotated[
    Literal["layers", "whole"], typer.Option(help="Of step and row: as compile.drafter of a run.")
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
Temperature = Annotated[float, typer.Option(min=0.0, help="Of decode; 0: the likeliest token.")]
Contexts = Annotated[str, typer.Option(help="Of decode: lengths at which τ is measured, such as 512,4096.")]
DType = Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Of decode.")]
Compile = Annotated[
    Literal["auto", "on", "off"],
    typer.Option(help="Of decode: rounds in CUDA graphs; auto: on CUDA, if the target lets itself."),
]
Picture = Annotated[Path | None, typer.Option(help="Of decode: PNG to draw.")]


def bench(
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
    steps: Steps = 24,
    sequence: Sequence = False,
    autotune: Autotune = False,
    compile_drafter: CompileDrafter = "layers",
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
    if part == "decode":
        if drafter is None or target is None or not prompts:
            raise UserError("needs DRAFTER, --target and --prompts", where="bench decode")
        sampling, lengths = {"temperature": temperature}, _numbers(contexts)
        return _decode(
            drafter, target, prompts, max_new_tokens, limit, sampling, lengths, device, dtype, compile, picture, json_
        )  # fmt: skip
    _refuse(part, "--compile is of decode", compile != "auto")
    _refuse(part, f"takes no drafter: {drafter!r}", drafter is not None)
    if part == "memory":
        return _memory(device, limit, json_)
    sizes = {
        "length": length, "anchors": anchors, "block_size": block_size, "layers": layers, "chunk": chunk,
        "documents": documents, "runs": runs,
    }  # fmt: skip
    ways = {
        "precision": precision, "packing": packing, "autotune": autotune, "optimizer": optimizer, "rows": rows,
        "compile_drafter": compile_drafter,
    }  # fmt: skip
    earlier = _earlier(part, against)
    setting = _setting(geometry, device, sizes, ways)
    of_rows, of_update = (precision, packing) != ("full", ""), (optimizer, rows) != ("adamw", 1)
    of_pipeline = bool(targets or drafters or sequence)
    _refuse(part, "--precision and --packing are of target and row", of_rows, "target row")
    _refuse(part, "--autotune is of step, target and row", autotune, "step target row")
    _refuse(part, "--compile-drafter is of step and row", compile_drafter != "layers", "step row")
    _refuse(part, "--optimizer and --rows are of update and pipeline", of_update, "update pipeline")
    _refuse(part, "--targets, --drafters and --sequence are of the pipeline", of_pipeline, "pipeline")
    return _report(_timed(part, setting, targets, drafters, steps, sequence), earlier, json_)


def _refuse(part: str, why: str, given: bool, parts: str = "") -> None:
    """Raises UserError where an option is given that this part has not."""
    if given and part not in parts.split():
        raise UserError(why, where=f"bench {part}")


def _earlier(part: str, against: Path | None) -> dict[str, Any] | None:
    """The result to compare with. Raises UserError if the part is none, or the file no result of it."""
    from draftsmith.bench.parts import BENCHES
    from draftsmith.bench.results import read_result

    known = [*BENCHES, "row", "pipeline", "memory", "decode"]
    if part not in known:
        raise UserError(f"{part!r} cannot be timed", where="bench", fix=f"use one of {', '.join(known)}")
    return None if against is None else read_result(against, part)


def _place(device: str) -> torch.device:
    """The device of a name."""
    import torch

    from draftsmith.pipeline.topology import parse_device

    return parse_device(("cuda:0" if torch.cuda.is_available() else "cpu") if device == "auto" else device)


def _setting(geometry: str, device: str, sizes: dict[str, int | None], ways: dict[str, Any]) -> Setting:
    """The default setting of a device with what was given changed."""
    from dataclasses import replace

    from draftsmith.bench.geometry import find_geometry, name_of
    from draftsmith.bench.parts import default_setting
    from draftsmith.config import balanced_chunk

    place = _place(device)
    shape = find_geometry(geometry or ("qwen3-8b" if place.type == "cuda" else "tiny"))
    given: dict[str, Any] = {key: value for key, value in sizes.items() if value is not None}
    setting = replace(default_setting(shape, place, geometry or name_of(shape)), **given, **ways)
    if "chunk" not in given:
        setting = replace(setting, chunk=balanced_chunk(setting.anchors, setting.block_size))
    if setting.documents > setting.length:
        raise UserError(f"{setting.documents} documents do not fit into a row of {setting.length}", where="--documents")
    return setting


def _timed(part: str, setting: Setting, targets: str, drafters: str, steps: int, sequence: bool) -> dict[str, Any]:
    """What the part's benchmark returns, with "remarks" on what of the target runs slowly."""
    from draftsmith.bench.parts import BENCHES
    from draftsmith.bench.pipeline import PipelineSetting, bench_pipeline
    from draftsmith.bench.row import bench_row

    if part == "pipeline":
        here, there = (
            tuple(each.strip() for each in (text or str(setting.device)).split(",")) for text in (targets, drafters)
        )
        bench = PipelineSetting(setting, here, there, max(setting.rows, len(there)), steps, sequence=sequence)
        result = bench_pipeline(bench)
    else:
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
    found = linear_attention(model_config(setting.geometry), setting.device, count)
    return [f"{each.text}{f' (mend: {each.mend})' if each.mend else ''}" for each in found]


def _report(result: dict[str, Any], earlier: dict[str, Any] | None, json_: bool) -> int:
    """Prints; 0, or 1 if it is slower than earlier or the host waits for the device."""
    from draftsmith.bench.pipeline_figures import lines_of as lines_of_pipeline
    from draftsmith.bench.results import compare, lines_of

    ok, change = (True, "") if earlier is None else compare(result, earlier)
    text = sys.stderr if json_ else sys.stdout
    lines = lines_of_pipeline(result) if result["bench"] == "pipeline" else lines_of(result)
    for line in [*lines, *(f"  {remark}" for remark in result.get("remarks", ())), *([change] if change else [])]:
        print(line, file=text)
    if change:
        result["against"] = change
    if json_:
        print(json.dumps(result))
    return 0 if ok and not result.get("host_waits") else 1


def _decode(
    drafter: str,
    target: str,
    prompts: list[str],
    max_new_tokens: int,
    limit: int | None,
    sampling: dict[str, float],
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
    from draftsmith.target.load import load_target

    tasks = []
    for entry in prompts:
        name, equals, file = entry.partition("=")
        path = Path(file if equals else entry)
        tasks.append((name if equals else path.stem, read_prompts(path)[:limit]))
    place = _place(device)
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
            sampling=sampling,
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
    from draftsmith.bench.memory import BOUND, CASES, bench_memory

    text = sys.stderr if json_ else sys.stdout
    result = bench_memory(_place(device), CASES[:limit], progress=lambda line: print(line, file=text, flush=True))
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
