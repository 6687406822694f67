"""What the commands share: options of many of them, the printer of results, and the refusal of idle options."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal

import typer

from draftsmith.errors import UserError

DTypeName = Literal["auto", "float32", "bfloat16"]
RoundsName = Literal["auto", "on", "off"]

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, text on stderr.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto: cuda if there is one.")]
DType = Annotated[DTypeName, typer.Option(help="auto: bfloat16 on CUDA, float32 on CPU.")]
TargetPath = Annotated[str, typer.Option("--target", help="Directory, hub name, .gguf file, or 'demo'.")]
MaybeTargetPath = Annotated[str | None, typer.Option("--target", help="Directory, hub name, .gguf file, or 'demo'.")]
GgufFile = Annotated[str | None, typer.Option(help="GGUF file inside --target, if that is a directory or hub name.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the target.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")]
TopK = Annotated[int, typer.Option(min=0, help="Sample from the k likeliest tokens; 0: from all.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens that hold this share.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1)]
Compile = Annotated[RoundsName, typer.Option(help="Rounds in CUDA graphs; auto: on CUDA, if the target lets itself.")]

Teller = Callable[[list[str] | str, dict[str, Any]], None]


@contextlib.contextmanager
def telling(as_json: bool) -> Iterator[Teller]:
    """Yields the printer of a result: (lines for people, the same as one JSON object).

    With `as_json` the object alone goes to stdout; the lines, and whatever else prints meanwhile, go to stderr. Paths,
    dtypes and other values that JSON lacks are written as text.
    """
    stdout = sys.stdout

    def tell(lines: list[str] | str, content: dict[str, Any]) -> None:
        print(lines if isinstance(lines, str) else "\n".join(lines))
        if as_json:
            print(json.dumps(content, default=str), file=stdout, flush=True)

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield tell


def tell(lines: list[str] | str, content: dict[str, Any], as_json: bool) -> None:
    """Prints a result (`telling`) of a command that prints nothing else."""
    with telling(as_json) as printer:
        printer(lines, content)


def given(ctx: typer.Context, names: Iterable[str]) -> dict[str, str]:
    """Those of the parameters that the command line names, also with their default value: name → as people type it."""
    parameters = {parameter.name: parameter for parameter in ctx.command.params}
    typed = {name: parameters[name] for name in names}  # of all of them: a name that is none is our bug
    return {
        name: parameter.opts[0] if parameter.param_type_name == "option" else name.upper()
        for name, parameter in typed.items()
        if _on_command_line(ctx, name)
    }


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
