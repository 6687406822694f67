"""`draftsmith data …`: prepare, look at, check and regenerate training data. (`generate` is in `cli`.)"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftsmith.cli_options import (
    Device,
    Json,
    Overrides,
    Seed,
    Temperature,
    TopK,
    TopP,
    ask,
    refuse_existing,
    refuse_given,
    say,
    target_config,
    tell,
)
from draftsmith.errors import UserError, need_file, reason_of

if TYPE_CHECKING:
    from draftsmith.config import TargetConfig
    from draftsmith.data.preview import RowPicture
    from draftsmith.target.forward import Target

data_app = typer.Typer(help="Make, look at and check training data.", rich_markup_mode=None)

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML; draftsmith init writes one.")]
IncidentsFile = Annotated[
    Path | None,
    typer.Option("--incidents", help="Write every conversation that is not used in full here, with the reason."),
]


@data_app.command()
def prepare(config: Config, overrides: Overrides = None, incidents: IncidentsFile = None, json_: Json = False) -> int:
    """Read, tokenise and pack a run's data, and say what became of it; training finds the tokens in the cache."""
    from draftsmith.config import load_config

    run = load_config(config, overrides)
    refuse_existing(incidents)
    from draftsmith.observe.live import LiveLine
    from draftsmith.pipeline.data_commands import prepare_data

    with LiveLine() as live:
        prepared = prepare_data(run, _counter(live), incidents)
    tell(prepared.lines(), prepared.to_json(), json_)
    return 0


@data_app.command()
def preview(
    ctx: typer.Context,
    config: Config,
    overrides: Overrides = None,
    row: Annotated[list[int] | None, typer.Option(min=0, help="Row of the training stream; repeatable.")] = None,
    conversation: Annotated[
        str | None, typer.Option(help="Show the row that holds this one: FILE:NUMBER, as reports name it.")
    ] = None,
    block: Annotated[
        int | None, typer.Option(min=0, help="Which block of the row; by default one in the middle.")
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Write a page instead; must not exist.")] = None,
    json_: Json = False,
) -> int:
    """Show training rows: taught and untaught tokens, anchors, one block with its labels and what it sees."""
    if conversation is not None:
        refuse_given(ctx, ("row",), "--conversation names the row")
    from draftsmith.config import load_config

    run = load_config(config, overrides)
    refuse_existing(page)
    from draftsmith.data.preview import to_html
    from draftsmith.pipeline.data_commands import preview_rows

    pictures, corpus = preview_rows(run, row or [0], conversation=conversation, block=block)
    if page is not None:
        _write_new(page, to_html(pictures, f"Training rows of {config}", corpus.report.lines()))
        tell([f"wrote {page}"], {"page": str(page)}, json_)
        return 0
    if json_:
        print(json.dumps({"rows": [_picture_json(picture) for picture in pictures]}))
        return 0
    _show(pictures)
    return 0


@data_app.command()
def check(
    ctx: typer.Context,
    config: Config,
    overrides: Overrides = None,
    score: Annotated[
        bool, typer.Option("--score/--no-score", help="Load the target and let it judge a sample of the answers.")
    ] = True,
    sample_tokens: Annotated[int, typer.Option(min=1, help="Taught tokens that the target judges.")] = 20_000,
    device: Device = "auto",
    incidents: IncidentsFile = None,
    json_: Json = False,
) -> int:
    """Say what is in a run's data and whether a run can learn from it; exit 1 if it cannot, with the reason."""
    from draftsmith.config import load_config

    if not score:
        refuse_given(ctx, ("sample_tokens", "device"), "with --no-score no target is loaded")
    run = load_config(config, overrides)
    refuse_existing(incidents)
    from draftsmith.observe.live import LiveLine
    from draftsmith.pipeline.data_commands import check_data

    load = _loader(run.target, device) if score else None
    with LiveLine() as live:

        def progress(what: str, done: int) -> None:
            live({"kind": "step", "unit": what, "step": done})

        checked = check_data(run, load, sample_tokens=sample_tokens, progress=progress, incidents=incidents)
    tell(checked.lines(), checked.to_json(), json_)
    return 1 if checked.failures else 0


@data_app.command()
def regenerate(
    ctx: typer.Context,
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="JSON lines to write; continued if this very work stopped before.")
    ],
    data: Annotated[
        list[str], typer.Argument(metavar="DATA...", help="Conversations in any layout: files, folders, datasets, -.")
    ],
    server: Annotated[
        str | None, typer.Option(help="OpenAI-compatible API, e.g. http://127.0.0.1:8000/v1 (vLLM, SGLang, any).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model there; none: the only one it has.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Instead of a server: directory, hub name, .gguf file, or 'demo', run here.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length limit of an answer.")] = 4096,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    template_options: Annotated[
        str, typer.Option(help='For the chat template, as JSON: {"enable_thinking": false}. Same as in data.')
    ] = "{}",
    extra: Annotated[str, typer.Option(help="More keys of the request, as JSON.")] = "{}",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at most.")] = 64,
    attempts: Annotated[int, typer.Option(min=1, help="How often a request is tried.")] = 8,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds without a byte before a request is lost.")] = 600.0,
    api_key_env: Annotated[str, typer.Option(help="Environment variable that holds the key.")] = "OPENAI_API_KEY",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many conversations.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="With --target: answers at a time.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="With --target: file with a Jinja template; none: the tokenizer's own.")
    ] = None,
    device: Device = "auto",
    json_: Json = False,
) -> int:
    """Let the target answer every turn of given conversations anew; stopped at any moment, it goes on where it was."""
    import os

    if (server is None) == (target is None):
        raise UserError("give either --server URL or --target PATH", where="command line")
    if server is not None and chat_template is not None:
        raise UserError("a server has its own template", where="--chat-template", fix="give it to the server")
    if server is not None:
        refuse_given(ctx, ("batch_size", "device"), "nothing is decoded here with --server")
    else:
        idle = ("extra", "model", "concurrency", "attempts", "timeout", "api_key_env")
        refuse_given(ctx, idle, "no server is asked")
    if chat_template is not None:
        need_file(chat_template, "chat template", "check --chat-template")
    options, more = _json_object("--template-options", template_options), _json_object("--extra", extra)
    from draftsmith.data.corpus import read_template
    from draftsmith.decode.regenerate import Sampling, regenerate_from_server, regenerate_from_target
    from draftsmith.observe.bar import Bar

    template = None if chat_template is None else read_template(chat_template)
    sampling = Sampling(max_tokens, temperature, top_p, top_k, seed, options, more)
    with Bar() as live:
        if server is not None:
            from draftsmith.decode.server import ChatServer

            chat = ChatServer(
                server,
                model=model,
                api_key=os.environ.get(api_key_env),
                concurrency=concurrency,
                attempts=attempts,
                timeout=timeout,
            )
            done = regenerate_from_server(data, output, chat, sampling, limit=limit, listener=live)
        else:
            from draftsmith.data.places import find_files
            from draftsmith.decode.answers import identity_of

            assert target is not None
            load = _loader(target_config(target), device)
            for file in find_files(data):  # before the target, whose loading may take minutes
                need_file(file.path, "data file")
            frozen = load()
            identity = {"path": target, **identity_of(frozen)}
            done = regenerate_from_target(
                data,
                output,
                frozen,
                sampling,
                identity=identity,
                chat_template=template,
                batch_size=batch_size,
                limit=limit,
                listener=live,
            )
    tell(done.lines(), done.to_json(), json_)
    return 1 if done.failed else 0


@data_app.command()
def features(
    config: Config,
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="Folder to write; continued if this very work is in it.")
    ],
    overrides: Overrides = None,
    dtype: Annotated[Literal["bf16", "fp8"], typer.Option(help="How they are stored; fp8 takes half.")] = "bf16",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before writing.")] = False,
    device: Device = "auto",
    json_: Json = False,
) -> int:
    """Run the target over a run's data once and keep what training needs; target.features=OUTPUT then reads it."""
    from draftsmith.config import load_config

    run = load_config(config, overrides)
    from draftsmith.data.corpus import prepare_corpus
    from draftsmith.observe.live import LiveLine
    from draftsmith.pipeline.features import describe_run, predict, wanted_by, write_features
    from draftsmith.pipeline.plan import check_length
    from draftsmith.pipeline.topology import place_and_dtype
    from draftsmith.target.geometry import read_geometry
    from draftsmith.target.load import load_target, load_tokenizer, read_stop_ids

    place = place_and_dtype(device, run.target.dtype)
    geometry, tokenizer = read_geometry(run.target), load_tokenizer(run.target)
    check_length(run.rows.length, geometry)
    length, seed, block_size = run.rows.length, run.training.seed, run.drafter.block_size
    stops = read_stop_ids(run.target, tokenizer)
    corpus = prepare_corpus(run.data, tokenizer, length=length, seed=seed, block_size=block_size, stop_ids=stops)
    wanted = wanted_by(run, geometry, dtype)
    told = predict(corpus, wanted, geometry, output, place[1])
    say(told.line())
    if told.missing > told.free:
        raise UserError("not enough room on this disk", where=str(output), fix="use another, or --dtype fp8")
    content = {"documents": told.documents, "tokens": told.tokens, "bytes": told.bytes}
    refusal = "" if yes else ask("Write them?", "nothing written", "writes without asking")
    if refusal:
        tell([refusal], {"written": 0, **content}, json_)
        return 1
    with LiveLine() as live:
        target = load_target(run.target, *place)
        facts = describe_run(run, geometry, tokenizer)
        written = write_features(target, corpus, wanted, facts, output, listener=live)
    lines = [f"{written:,} documents written, {told.documents:,} there", f"train with target.features={output}"]
    tell(lines, {"written": written, **content}, json_)
    return 0


def _json_object(option: str, text: str) -> dict[str, Any]:
    from draftsmith.config import what_json_lacks

    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON: {error}", where=option) from None
    if not isinstance(content, dict):
        raise UserError("not a JSON object", where=option)
    fault = what_json_lacks(content)  # Python reads more than it may be sent: NaN, Infinity
    if fault:
        raise UserError(f"not valid JSON: {fault}", where=option)
    return content


def _counter(live: Callable[[dict[str, Any]], None]) -> Callable[[int], None]:
    return lambda done: live({"kind": "step", "unit": "conversation", "step": done})


def _show(pictures: list[RowPicture]) -> None:
    """Colours where the terminal has them, brackets elsewhere."""
    from rich.console import Console

    from draftsmith.data.preview import to_plain, to_terminal

    console = Console(highlight=False, soft_wrap=True)
    for picture in pictures:
        if console.is_terminal and console.color_system is not None:
            console.print(to_terminal(picture))
        else:
            print(to_plain(picture))


def _picture_json(picture: RowPicture) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(picture), "padding": picture.padding}


def _write_new(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError("exists already", where=str(path), fix="name another file, or remove it") from None
    except OSError as error:
        raise UserError(f"cannot be written: {reason_of(error)}", where=str(path)) from None


def _loader(config: TargetConfig, device: str) -> Callable[[], Target]:
    """Loads a target when it is called; whether the device is there is found out now."""
    from draftsmith.pipeline.topology import place_and_dtype
    from draftsmith.target.load import load_target

    place = place_and_dtype(device, config.dtype)
    return lambda: load_target(config, *place)
