"""`draftsmith export`, `import` and `chat`: drafters in the layouts that others load, and one seen at work.

`export DRAFTER OUT` writes a layout, `export check DIR` reads one as each engine would.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftsmith.cli_options import (
    BlockSize,
    Compile,
    Device,
    DType,
    GgufFile,
    Json,
    MaxNewTokens,
    MaybeTargetPath,
    Seed,
    TargetPath,
    Temperature,
    TopK,
    TopP,
    TrustRemoteCode,
    put,
    refuse_given,
    target_config,
    tell,
    telling,
)
from draftsmith.errors import UserError

if TYPE_CHECKING:
    from draftsmith.export.convert import Converted, Verifier

LayoutName = Literal["zlab", "speculators"]
StoredDType = Literal["as-is", "float32", "bfloat16", "float16"]

# What only writing a layout uses.
_OF_WRITING = (
    *("layout", "verifier", "dtype", "evaluation", "licence", "target_licence", "data_licence", "push", "private"),
)


def export(
    ctx: typer.Context,
    drafter: Annotated[
        str, typer.Argument(metavar="DRAFTER|check", help="A checkpoint or any drafter; or the word check.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT|DIR", help="Folder to write; after check: folder to read.")],
    layout: Annotated[LayoutName, typer.Option(help="zlab: dflash, SGLang, vLLM; speculators: it and vLLM.")] = "zlab",
    target: MaybeTargetPath = None,
    gguf_file: GgufFile = None,
    verifier: Annotated[
        str | None, typer.Option(help="The target's name as written into speculators' layout; by default --target.")
    ] = None,
    dtype: Annotated[StoredDType, typer.Option(help="Of the weights on disk.")] = "as-is",
    evaluation: Annotated[
        list[str] | None, typer.Option(help="For the model card: TASK=FILE of draftsmith eval --json; repeatable.")
    ] = None,
    licence: Annotated[str, typer.Option(help="Licence of the weights, for the model card.")] = "",
    target_licence: Annotated[str, typer.Option(help="Licence of the target, for the model card.")] = "",
    data_licence: Annotated[str, typer.Option(help="Licence of the data, for the model card.")] = "",
    push: Annotated[
        str | None,
        typer.Option(help="Upload into this hub repository (owner/name) as well, also what OUT holds already."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="A repository that --push makes is private.")] = False,
    engine: Annotated[
        list[str] | None, typer.Option(help="Of check: zlab, sglang, vllm, speculators; repeatable. By layout if none.")
    ] = None,
    json_: Json = False,
) -> int:
    """Write a drafter in a layout that serving engines load, with a model card; or check one (export check DIR)."""
    _refuse_gguf(ctx, target)
    if drafter == "check":
        refuse_given(ctx, _OF_WRITING, "export check writes nothing")
        return _check(output, target, gguf_file, tuple(engine or ()), json_)
    refuse_given(ctx, ["engine"], "only export check asks about engines")
    if push is None:
        refuse_given(ctx, ["private"], "without --push no repository is made")
    from draftsmith.export.card import (
        Licences,
        check_evaluation,
        check_run,
        find_run,
        model_card,
        read_evaluation,
    )
    from draftsmith.export.convert import convert_drafter
    from draftsmith.export.hub import fetch

    source = fetch(drafter)
    measured = [_task_and_file(entry) for entry in evaluation or []]
    evaluations = [(task, read_evaluation(path)) for task, path in measured]
    run = find_run(source)
    if target is None and layout == "speculators" and run is not None:
        target, gguf_file = run.config["target"]["path"], run.config["target"].get("gguf_file")
    facts = _target_facts(target, gguf_file, verifier)

    notes: list[str] = []

    def card(result: Converted) -> str:
        for (task, figures), (_, path) in zip(evaluations, measured, strict=True):
            notes.extend(check_evaluation(figures, result, verifier or target, f"--evaluation {task}={path}"))
        notes.extend(check_run(run, verifier or target))
        licences = Licences(licence, target_licence, data_licence)
        name = verifier or target
        return model_card(result, target=name, run=run, evaluations=evaluations, licences=licences)

    result = convert_drafter(
        source,
        output,
        layout,
        verifier=None if facts is None else facts[1],
        target_layers=None if facts is None else facts[0],
        dtype=_dtype(dtype),
        card=card,
        again=push is not None,
    )
    lines, content = [*result.lines(), *(f"note: {note}" for note in notes)], result.to_json()
    content["notices"] += notes
    with telling(json_) as report:
        if push is not None:
            put("\n".join(lines), sys.stdout)  # whatever becomes of the upload, this is there
            content["pushed"] = _pushed(output, push, private)
            lines = [f"pushed: {content['pushed']}"]
        report(lines, content)
    return 0


def _pushed(folder: Path, repository: str, private: bool) -> str:
    """The commit's address.

    Raises:
        UserError: as `push`, and says that the export itself is there.
    """
    from draftsmith.export.hub import push

    try:
        return push(folder, repository, private=private)
    except UserError as error:
        what = f"{error.what}; {folder} is written"
        raise UserError(what, where=error.where, fix=f"{error.fix}, and give the same command again") from error


def _check(folder: Path, target: str | None, gguf_file: str | None, engines: tuple[str, ...], json_: bool) -> int:
    """0 if every engine asked about loads the drafter as it was trained, else 1."""
    from draftsmith.export.engines import ENGINES
    from draftsmith.export.lint import lint

    for name in engines:
        if name not in ENGINES:
            raise UserError(f"no such engine: {name!r}", where="--engine", fix=f"one of {', '.join(ENGINES)}")
    report = lint(folder, None if target is None else target_config(target, gguf_file), engines)
    tell(report.lines(), report.to_json(), json_)
    return 0 if report.fine else 1


def import_drafter(
    ctx: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="DRAFTER", help="Folder or hub name, z-lab's or speculators' layout.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write, our own layout (z-lab's).")],
    target: MaybeTargetPath = None,
    gguf_file: GgufFile = None,
    dtype: Annotated[StoredDType, typer.Option(help="Of the weights on disk.")] = "as-is",
    json_: Json = False,
) -> int:
    """Read a published drafter of either layout into our own; drafter.init then starts training from it."""
    from draftsmith.export.convert import convert_drafter
    from draftsmith.export.hub import fetch

    _refuse_gguf(ctx, target)
    facts = _target_facts(target, gguf_file, None)
    result = convert_drafter(
        fetch(source), output, "zlab", target_layers=None if facts is None else facts[0], dtype=_dtype(dtype)
    )
    tell([*result.lines(), f"to train on: drafter.init={output}"], result.to_json(), json_)
    return 0


def chat(
    ctx: typer.Context,
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="Folder of a drafter, of either layout.")],
    target: TargetPath,
    gguf_file: GgufFile = None,
    prompt: Annotated[str | None, typer.Option(help="Ask this and end; by default you are asked.")] = None,
    block_size: BlockSize = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: DType = "auto",
    trust_remote_code: TrustRemoteCode = False,
    compile: Compile = "auto",
) -> int:
    """Talk to a target while its drafter drafts: accepted words coloured by slot, τ and speed as they come."""
    from rich.console import Console
    from rich.text import Text

    if not temperature:
        refuse_given(ctx, ("top_k", "top_p", "seed"), "without --temperature nothing is sampled")
    from draftsmith.decode.chat import Chat, answer, converse, legend, tell
    from draftsmith.decode.proposers import check_block_size
    from draftsmith.decode.static import StaticRounds
    from draftsmith.drafter.native import load_drafter_for
    from draftsmith.export.hub import fetch
    from draftsmith.pipeline.topology import place_and_dtype
    from draftsmith.target.load import load_target

    place = place_and_dtype(device, dtype)
    config = target_config(target, gguf_file, dtype, trust_remote_code)
    model = load_drafter_for(config, fetch(drafter))
    check_block_size(block_size, model.spec.block_size)
    frozen = load_target(config, *place)
    model.to(frozen.device, frozen.dtype)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    rounds = StaticRounds(frozen, compile)
    talk = Chat(frozen, model, max_new_tokens=max_new_tokens, block_size=block_size, sampling=sampling, rounds=rounds)
    console = Console(highlight=False)

    def ask() -> str:
        # What is no UTF-8 arrives as lone surrogates, which no tokenizer takes.
        return console.input(Text("> ", style="bold")).encode("utf-8", "replace").decode("utf-8")

    if prompt is None:
        converse(talk, frozen, console, ask)
    else:
        console.print(legend(talk.block_size))
        answer(talk, frozen, console, prompt)
    tell(console, rounds.line())
    return 0


def _refuse_gguf(ctx: typer.Context, target: str | None) -> None:
    if target is None:
        refuse_given(ctx, ["gguf_file"], "without --target there is no GGUF file to take")


def _target_facts(target: str | None, gguf_file: str | None, verifier: str | None) -> tuple[int, Verifier] | None:
    """(depth, verifier) of a target; loads no weights."""
    if target is None:
        if verifier is not None:
            raise UserError("--verifier names a target that --target has to describe", where="command line")
        return None
    from draftsmith.export.convert import Verifier
    from draftsmith.target.geometry import geometry_of
    from draftsmith.target.source import locate, read_config

    config = target_config(target, gguf_file)
    source = locate(config)
    described = read_config(config)
    # A GGUF file is no place to fetch tensors from by name; its own path is still the honest name of the target.
    name = verifier or (str(Path(source.place).resolve()) if source.local else source.place)
    return geometry_of(described, source.name).layers, Verifier(name, tuple(described.architectures or ()))


def _task_and_file(entry: str) -> tuple[str, Path]:
    task, equals, path = entry.rpartition("=")
    return (task, Path(path)) if equals else (Path(entry).stem, Path(entry))


def _dtype(name: StoredDType) -> Any:
    if name == "as-is":
        return None
    import torch

    return getattr(torch, name)
