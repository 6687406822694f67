"""What the commands share: options of many of them, the printer of results, and what they refuse alike."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from draftsmith.errors import UserError, at_home, need_file, reason_of, what_is_at

if TYPE_CHECKING:
    from draftsmith.config import TargetConfig

DTypeName = Literal["auto", "float32", "bfloat16"]
RoundsName = Literal["auto", "on", "off"]
LOWEST_TEMPERATURE = 1e-5  # as in `decode.sampling`, which imports torch


def refuse_temperature(temperature: float) -> float:
    """Callback of options: refuses what `decode.sampling.check_sampling` refuses, before torch is imported."""
    if temperature != 0 and not LOWEST_TEMPERATURE <= temperature < math.inf:
        raise typer.BadParameter(f"{temperature:g} is neither 0 nor a finite number from {LOWEST_TEMPERATURE:g} up.")
    return temperature


def refuse_top_p(top_p: float) -> float:
    """Callback of options: refuses what `decode.sampling.check_sampling` refuses, before torch is imported."""
    if not 0 < top_p <= 1:
        raise typer.BadParameter(f"{top_p:g} is not above 0 and at most 1.")
    return top_p


Overrides = Annotated[list[str] | None, typer.Argument(metavar="[section.key=value]...")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, text on stderr.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto: cuda if there is one.")]
DType = Annotated[DTypeName, typer.Option(help="auto: bfloat16 on CUDA, float32 on CPU.")]
TargetPath = Annotated[str, typer.Option("--target", help="Directory, hub name, .gguf file, or 'demo'.")]
MaybeTargetPath = Annotated[str | None, typer.Option("--target", help="Directory, hub name, .gguf file, or 'demo'.")]
GgufFile = Annotated[str | None, typer.Option(help="GGUF file inside --target, if that is a directory or hub name.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the target.")]
PROMPTS_HELP = "JSON lines of prompts or messages, or plain lines."
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first so many prompts.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Length limit of an answer.")]
BlockSize = Annotated[int | None, typer.Option(min=1, help="Slots of a block; by default as trained.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, callback=refuse_temperature, help="0: always the likeliest token.")
]
TopK = Annotated[int, typer.Option(min=0, help="Sample from the k likeliest tokens; 0: from all.")]
TopP = Annotated[
    float,
    typer.Option(callback=refuse_top_p, help="Sample from the likeliest tokens that hold this share, above 0 up to 1."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1)]
Compile = Annotated[RoundsName, typer.Option(help="Rounds in CUDA graphs; auto: on CUDA, if the target lets itself.")]

Teller = Callable[[list[str] | str, dict[str, Any]], None]


class OutputLost(UserError):
    """What a command prints cannot be written, for one because the disk is full."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot be written: {reason_of(error)}", where="output")


@contextlib.contextmanager
def telling(as_json: bool) -> Iterator[Teller]:
    """Yields the printer of a result: (lines for people, the same as one JSON object).

    With `as_json` the object alone goes to stdout; the lines, and whatever else prints meanwhile, go to stderr. Paths,
    dtypes and other values that JSON lacks are written as text.

    Raises (the printer):
        OutputLost: as `put`.
    """
    stdout = sys.stdout

    def tell(lines: list[str] | str, content: dict[str, Any]) -> None:
        put(lines if isinstance(lines, str) else "\n".join(lines), sys.stdout)
        if as_json:
            put(json.dumps(content, default=str), stdout)

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield tell


def tell(lines: list[str] | str, content: dict[str, Any], as_json: bool) -> None:
    """Prints a result (`telling`) of a command that prints nothing else."""
    with telling(as_json) as printer:
        printer(lines, content)


def say(text: str) -> None:
    """A line on stderr, for who waits or must know."""
    put(text, sys.stderr)


def put(text: str, stream: TextIO) -> None:
    """Prints a text at once. A reader who has left (a closed pipe) has seen enough: the command goes on.

    Raises:
        OutputLost: it cannot be written.
    """
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        let_go(stream)
    except OSError as error:
        let_go(stream)
        raise OutputLost(error) from None


def let_go(stream: TextIO) -> None:
    """What a stream still holds, and all that comes, goes nowhere; else it fails again when the process ends."""
    with contextlib.suppress(OSError):  # a stand-in has no descriptor
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def reader_left(stream: TextIO) -> bool:
    """Whether a stream is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # asks for errors and hang-ups, which are always told
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def refuse_existing(path: Path | None) -> None:
    """Raises UserError if something is there already where a file is to be written, if one is."""
    if path is None:
        return
    if os.path.isdir(path):
        raise UserError("is a folder", where=str(path), fix="name a file")
    if os.path.lexists(path):
        raise UserError("exists already", where=str(path), fix="name another file, or remove it")


def ask(question: str, refusal: str, with_yes: str) -> str:
    """Asks before something is done; "" for yes, else why it is not.

    Args:
        question: for people, on stderr.
        refusal: what an answer that is no yes means ("nothing deleted").
        with_yes: what --yes does, for whom nobody answers ("deletes without asking").
    """
    try:
        return "" if typer.confirm(question, err=True) else refusal
    except typer.Abort as abort:
        if not isinstance(abort.__context__, EOFError):  # Ctrl-C
            raise
        print(file=sys.stderr)  # the question's line is still open
        return f"{refusal} (--yes {with_yes})"


def given(ctx: typer.Context, names: Iterable[str]) -> dict[str, str]:
    """Those of the parameters that the command line names, also with their default value: name → as people type it."""
    parameters = {parameter.name: parameter for parameter in ctx.command.params}
    typed = {name: parameters[name] for name in names}  # of all of them: a name that is none is our bug
    return {
        name: parameter.opts[0] if parameter.param_type_name == "option" else name.upper()
        for name, parameter in typed.items()
        if _on_command_line(ctx, name)
    }


def need_prompts(path: Path) -> None:
    """Raises UserError if there is no such file of prompts, before torch is imported to read it."""
    need_file(path, "prompt file", "give a file of prompts: JSON lines or plain lines")


def target_config(
    path: str, gguf_file: str | None = None, dtype: DTypeName = "auto", trust_remote_code: bool = False
) -> TargetConfig:
    """The target that these options name.

    Raises:
        UserError: an empty path, one that begins with the home of nobody, or a local folder without that file.
    """
    from draftsmith.config import TargetConfig

    try:
        path = at_home(path)
    except UserError as error:
        raise UserError(str(error), where="--target") from None
    config = TargetConfig(path=path, gguf_file=gguf_file, dtype=dtype, trust_remote_code=trust_remote_code)
    if gguf_file is not None and (path == "demo" or what_is_at(path)):
        from draftsmith.target.source import locate

        try:
            locate(config)
        except UserError as error:  # names the key of a config, and here is none
            fix = error.fix.replace("target.gguf_file", "--gguf-file")
            raise UserError(error.what, where=error.where, fix=fix) from None
    return config


def refuse_given(ctx: typer.Context, names: Iterable[str], why: str) -> None:
    """Raises UserError if any of these parameters is given where it would have no effect.

    Args:
        ctx: of the command.
        names: of parameters, as the function has them.
        why: nothing comes of them.
    """
    idle = given(ctx, names)
    if idle:
        raise UserError(f"{why}: {', '.join(idle.values())} would do nothing", where="command line", fix="leave it out")


def _on_command_line(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"  # by name: typer may carry a click of its own
