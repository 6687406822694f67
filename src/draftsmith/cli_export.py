"""`draftsmith export`, `import` and `chat`: drafters in the layouts that others load, and one seen at work.

`export DRAFTER OUT` writes a layout, `export check DIR` reads one as each engine would.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftsmith.errors import UserError

if TYPE_CHECKING:
    from draftsmith.config import TargetConfig
    from draftsmith.export.convert import Converted, Verifier

LayoutName = Literal["zlab", "speculators"]
DTypeName = Literal["as-is", "float32", "bfloat16", "float16"]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, text on stderr.")]
TargetName = Annotated[str | None, typer.Option("--target", help="Directory, hub name, .gguf file, or 'demo'.")]
GgufFile = Annotated[str | None, typer.Option(help="GGUF file inside --target, if that is a directory or hub name.")]


def export(
    drafter: Annotated[
        str, typer.Argument(metavar="DRAFTER|check", help="A checkpoint or any drafter; or the word check.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT|DIR", help="Folder to write; after check: folder to read.")],
    layout: Annotated[LayoutName, typer.Option(help="zlab: dflash, SGLang, vLLM; speculators: it and vLLM.")] = "zlab",
    target: TargetName = None,
    gguf_file: GgufFile = None,
    verifier: Annotated[
        str | None, typer.Option(help="The target's name as written into speculators' layout; by default --target.")
    ] = None,
    dtype: Annotated[DTypeName, typer.Option(help="Of the weights on disk.")] = "as-is",
    evaluation: Annotated[
        list[str] | None, typer.Option(help="For the model card: TASK=FILE of draftsmith eval --json; repeatable.")
    ] = None,
    licence: Annotated[str, typer.Option(help="Licence of the weights, for the model card.")] = "",
    target_licence: Annotated[str, typer.Option(help="Licence of the target, for the model card.")] = "",
    data_licence: Annotated[str, typer.Option(help="Licence of the data, for the model card.")] = "",
    push: Annotated[str | None, typer.Option(help="Upload into this hub repository (owner/name) as well.")] = None,
    private: Annotated[bool, typer.Option("--private", help="A repository that --push makes is private.")] = False,
    engine: Annotated[
        list[str] | None, typer.Option(help="Of check: zlab, sglang, vllm, speculators; repeatable. By layout if none.")
    ] = None,
    json_: Json = False,
) -> int:
    """Write a drafter in a layout that serving engines load, with a model card; or check one (export check DIR)."""
    if drafter == "check":
        given: dict[str, Any] = {"--layout": layout != "zlab", "--verifier": verifier, "--dtype": dtype != "as-is"}
        given |= {"--evaluation": evaluation, "--licence": licence, "--target-licence": target_licence}
        given |= {"--data-licence": data_licence, "--push": push, "--private": private}
        refuse_options("export check writes nothing", given)
        return _check(output, target, gguf_file, tuple(engine or ()), json_)
    refuse_options("only export check asks about engines", {"--engine": engine})
    _refuse_gguf(target, gguf_file)
    if push is None:
        refuse_options("without --push no repository is made", {"--private": private})
    from draftsmith.export.card import Licences, claim, find_run, model_card, read_evaluation
    from draftsmith.export.convert import convert_drafter
    from draftsmith.export.hub import fetch
    from draftsmith.export.hub import push as upload

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
            notes.extend(claim(figures, result, verifier or target, f"--evaluation {task}={path}"))
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
    )
    lines, content = [*result.lines(), *(f"note: {note}" for note in notes)], result.to_json()
    content["notices"] += notes
    if push is not None:
        content["pushed"] = upload(output, push, private=private)
        lines.append(f"pushed: {content['pushed']}")
    _report(lines, content, json_)
    return 0


def _check(folder: Path, target: str | None, gguf_file: str | None, engines: tuple[str, ...], json_: bool) -> int:
    """0 if every engine asked about loads the drafter as it was trained, else 1."""
    from draftsmith.export.engines import ENGINES
    from draftsmith.export.lint import lint

    _refuse_gguf(target, gguf_file)
    for name in engines:
        if name not in ENGINES:
            raise UserError(f"no such engine: {name!r}", where="--engine", fix=f"one of {', '.join(ENGINES)}")
    report = lint(folder, None if target is None else _target_config(target, gguf_file), engines)
    _report(report.lines(), report.to_json(), json_)
    return 0 if report.fine else 1


def import_drafter(
    source: Annotated[
        str, typer.Argument(metavar="DRAFTER", help="Folder or hub name, z-lab's or speculators' layout.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write, our own layout (z-lab's).")],
    target: TargetName = None,
    gguf_file: GgufFile = None,
    dtype: Annotated[DTypeName, typer.Option(help="Of the weights on disk.")] = "as-is",
    json_: Json = False,
) -> int:
    """Read a published drafter of either layout into our own; drafter.init then starts training from it."""
    from draftsmith.export.convert import convert_drafter
    from draftsmith.export.hub import fetch

    facts = _target_facts(target, gguf_file, None)
    result = convert_drafter(
        fetch(source), output, "zlab", target_layers=None if facts is None else facts[0], dtype=_dtype(dtype)
    )
    _report([*result.lines(), f"to train on: drafter.init={output}"], result.to_json(), json_)
    return 0


def chat(
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="Folder of a drafter, of either layout.")],
    target: Annotated[str, typer.Option("--target", help="Directory, hub name, .gguf file, or 'demo'.")],
    gguf_file: GgufFile = None,
    prompt: Annotated[str | None, typer.Option(help="Ask this and end; by default you are asked.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Slots of a block; by default as trained.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length limit of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k likeliest tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest of this share.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto: cuda if there is one.")] = "auto",
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="auto: bfloat16 on CUDA.")] = "auto",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the target's own code.")] = False,
    compile: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(help="Rounds in CUDA graphs; auto: on CUDA, if the target lets itself."),
    ] = "auto",
) -> int:
    """Talk to a target while its drafter drafts: accepted words coloured by slot, τ and speed as they come."""
    from rich.console import Console
    from rich.text import Text

    if not temperature:
        refuse_options("without --temperature nothing is sampled", {"--top-k": top_k, "--top-p": top_p != 1.0})
    from draftsmith.config import TargetConfig
    from draftsmith.decode.chat import Chat, answer, converse, legend, tell
    from draftsmith.decode.static import StaticRounds
    from draftsmith.drafter.native import load_drafter
    from draftsmith.export.hub import fetch
    from draftsmith.target.load import load_target

    place, number = _device(device, dtype)
    folder = fetch(drafter)
    config = TargetConfig(path=target, gguf_file=gguf_file, dtype=dtype, trust_remote_code=trust_remote_code)
    frozen = load_target(config, place, number)
    model = load_drafter(folder, frozen.device, frozen.dtype, frozen.geometry.layers)
    model.spec.require_target(frozen.geometry, str(folder))
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


def _device(device: str, dtype: str) -> tuple[Any, Any]:
    """(torch device, torch dtype) of what the command line says.

    Raises:
        UserError: no such device.
    """
    import torch

    from draftsmith.pipeline.topology import parse_device

    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    place = parse_device(device)
    if dtype == "auto":
        dtype = "bfloat16" if place.type == "cuda" else "float32"
    return place, getattr(torch, dtype)


def refuse_options(why: str, given: dict[str, Any]) -> None:
    """Raises UserError if any option is given where it would have no effect.

    Args:
        why: nothing comes of them.
        given: option → its value, false where it was left alone.
    """
    idle = [name for name, value in given.items() if value]
    if idle:
        raise UserError(f"{why}: {', '.join(idle)} would do nothing", where="command line", fix="leave it out")


def _refuse_gguf(target: str | None, gguf_file: str | None) -> None:
    if target is None:
        refuse_options("without --target there is no GGUF file to take", {"--gguf-file": gguf_file})


def _target_config(target: str, gguf_file: str | None) -> TargetConfig:
    from draftsmith.config import TargetConfig

    return TargetConfig(path=target, gguf_file=gguf_file, dtype="auto", trust_remote_code=False)


def _target_facts(target: str | None, gguf_file: str | None, verifier: str | None) -> tuple[int, Verifier] | None:
    """(depth, verifier) of a target; loads no weights."""
    _refuse_gguf(target, gguf_file)
    if target is None:
        if verifier is not None:
            raise UserError("--verifier names a target that --target has to describe", where="command line")
        return None
    from draftsmith.export.convert import Verifier
    from draftsmith.target.geometry import geometry_of
    from draftsmith.target.source import locate, read_config

    config = _target_config(target, gguf_file)
    source = locate(config)
    described = read_config(config)
    # A GGUF file is no place to fetch tensors from by name; its own path is still the honest name of the target.
    name = verifier or (str(Path(source.place).resolve()) if source.local else source.place)
    return geometry_of(described, source.name).layers, Verifier(name, tuple(described.architectures or ()))


def _task_and_file(entry: str) -> tuple[str, Path]:
    task, equals, path = entry.rpartition("=")
    return (task, Path(path)) if equals else (Path(entry).stem, Path(entry))


def _dtype(name: DTypeName) -> Any:
    if name == "as-is":
        return None
    import torch

    return getattr(torch, name)


def _report(lines: list[str], content: dict[str, Any], json_: bool) -> None:
    print("\n".join(lines), file=sys.stderr if json_ else sys.stdout)
    if json_:
        print(json.dumps(content, default=str))
