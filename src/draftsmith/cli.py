"""The command `draftsmith`: each command parses, calls one function, and prints.

Exit codes: 0 fine, 1 "no" to what was asked (not lossless, the overfit check did not fit), 2 wrong input, 130
interrupted, 143 ended by SIGTERM. People's text goes to stdout, progress to stderr; with `--json`, one JSON object goes
to stdout and everything else to stderr. What a command needs is imported when it runs and its arguments are checked, so
that neither `--help` nor a slip of the pen waits for torch.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

import draftsmith
from draftsmith.cli_bench import bench
from draftsmith.cli_compile import compile_app, doctor
from draftsmith.cli_data import data_app
from draftsmith.cli_export import chat, export, import_drafter
from draftsmith.cli_options import (
    PROMPTS_HELP,
    BlockSize,
    Compile,
    Device,
    DType,
    GgufFile,
    Json,
    Limit,
    MaxNewTokens,
    OutputLost,
    Overrides,
    Seed,
    TargetPath,
    Temperature,
    TopK,
    TopP,
    TrustRemoteCode,
    let_go,
    need_prompts,
    put,
    reader_left,
    refuse_given,
    target_config,
    tell,
    telling,
)
from draftsmith.cli_run import report, status, watch
from draftsmith.errors import UserError
from draftsmith.observe.live import short_loss

if TYPE_CHECKING:
    from draftsmith.pipeline.run import TrainResult

STILL_FALLING = 0.95  # of the quarter of the updates before the last one, in the mean of losses
TELLING_SECONDS = 3.0  # that rank 0 needs to collect what is wrong in all ranks, and to say it
# What a machine answers where a place that somebody named cannot be used; a file that is missing is not among them.
_REFUSED = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.ENOTDIR, errno.EISDIR),
}


class _Interrupted(Exception):
    """Carries a KeyboardInterrupt, its cause, past typer, which makes an exit code of it and says nothing."""


class _Closed(Exception):
    """Carries a BrokenPipeError, its cause, past typer, which ends the process with code 1 and says nothing."""


class _Commands(typer.core.TyperGroup):
    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _past_typer():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _past_typer():
            code = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where it may fail; at exit it would only be complained about
            return code


@contextlib.contextmanager
def _past_typer() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise _Interrupted from interrupt
    except BrokenPipeError as closed:
        raise _Closed from closed


app = typer.Typer(
    cls=_Commands,
    help="Train DFlash drafters for your own model, and measure what they are worth.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data_app, name="data")
app.command()(bench)
app.add_typer(compile_app, name="compile")
app.command()(doctor)
app.command()(status)
app.command()(watch)
app.command()(report)
app.command()(export)
app.command("import")(import_drafter)
app.command()(chat)


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    Args:
        arguments: none: those of this process, which is the command's alone and ends with it.
    """
    own, arguments = arguments is None, sys.argv[1:] if arguments is None else arguments
    _print_anything()
    try:
        code = app(args=arguments or ["--help"], prog_name="draftsmith", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _leave_it_to_another() if error.told else _refuse(str(error))
    except _usage_error() as error:
        if _another_finds_it():
            return _leave_it_to_another()
        said = error.format_message().replace(": Value error, ", ": ")  # type: ignore[attr-defined]  # pydantic's words
        return _refuse(f"{said} (draftsmith --help tells more)")  # type: ignore[attr-defined]
    except (_Interrupted, KeyboardInterrupt, typer.Abort) as error:
        code = _say_who_ended_it(error.__cause__ if isinstance(error, _Interrupted) else error)
        if own and threading.active_count() > 1:
            # A second Ctrl-C left threads at work. Python would wait for them, or pull the interpreter from under
            # those that are in torch, which aborts.
            if sys.stdout is not None:
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
            os._exit(code)
        return code
    except _Closed:
        if not reader_left(sys.stdout) or reader_left(sys.stderr):  # another pipe, or the work's progress
            raise
        let_go(sys.stdout)  # the reader of our output has seen enough
        return 0
    except OSError as error:
        if error.filename is None and _output_fails():
            return _refuse(str(OutputLost(error)))
        if _is_inductors(error):
            where, why = f"TORCHINDUCTOR_CACHE_DIR={error.filename}", error.strerror
            return _refuse(f"{where}: torch cannot make that folder: {why} (name one that you may write, or none)")
        if error.filename is None or error.errno not in _REFUSED:
            raise
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))  # such as the worker
        return _refuse(f"{error.filename}: cannot be used: {error.strerror}{notes}")
    except (RuntimeError, MemoryError) as error:
        from draftsmith.pipeline.out_of_memory import asked_for, is_out_of_memory

        if not is_out_of_memory(error):
            raise
        return _refuse(f"out of memory{asked_for(error)} (smaller sizes, another device, or what others hold there)")


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder to write; a number is added if it is in use.")] = Path(
        "runs/demo"
    ),
    seed: Seed = 0,
    quick: Annotated[bool, typer.Option("--quick", help="The same way with little work; its τ says nothing.")] = False,
    json_: Json = False,
) -> int:
    """Train a drafter for the embedded target, decode held-out prompts with and without it, and compare."""
    from draftsmith.demo.run import run_demo
    from draftsmith.observe.live import LiveLine
    from draftsmith.observe.run_folder import next_free

    with telling(json_) as report, LiveLine() as live:
        result = run_demo(next_free(output), seed=seed, listener=live, quick=quick)
        report(result["text"], {key: value for key, value in result.items() if key != "text"})
    return 0 if result["passed"] else 1


@app.command()
def init(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Directory, hub name, .gguf file, or 'demo'.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="Conversations: file, folder or dataset.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The config to write.")] = Path("draftsmith.yaml"),
) -> int:
    """Write a commented config for a target and a data file; what can be found out is found out."""
    from draftsmith.pipeline.init import write_config

    path = write_config(target, data, output)
    tell([f"wrote {path}", f"next: draftsmith train {shlex.quote(str(path))} --plan"], {}, as_json=False)
    return 0


@app.command()
def train(
    ctx: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML; draftsmith init writes one.")],
    overrides: Overrides = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would run on which device, and stop.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in training.output.")] = False,
    max_minutes: Annotated[float | None, typer.Option(min=0.0, help="Save and stop after so many minutes.")] = None,
    overfit: Annotated[
        bool, typer.Option("--overfit", help="Train on one row until its loss is near zero, into OUTPUT-overfit.")
    ] = False,
    json_: Json = False,
) -> int:
    """Train a drafter."""
    from draftsmith.pipeline.signals import starting

    # Before torch is imported, which takes seconds.
    ctx.with_resource(starting(ranks=os.environ.get("WORLD_SIZE", "1") != "1"))
    from draftsmith.config import is_overridden, load_config

    if plan:
        refuse_given(ctx, ("resume", "overfit", "max_minutes"), "--plan only plans")
    if overfit:
        refuse_given(ctx, ("resume",), "--overfit begins anew each time, in a folder of its own")
    try:
        run = load_config(config, overrides)
    except UserError as error:
        error.told = _another_finds_it()
        raise
    if overfit and not is_overridden("training.steps", overrides):
        # A check has a limit of its own for updates: the config's is the run's.
        run = run.model_copy(update={"training": run.training.model_copy(update={"steps": None})})
    _take_devices(run.pipeline.devices_per_rank)
    with telling(json_) as report:
        if plan:
            from draftsmith.pipeline.plan import make_plan
            from draftsmith.pipeline.seat import Seat
            from draftsmith.pipeline.starting import check_start, notes_on_folder

            seat = Seat.read()
            if seat.rank == 0:
                notes = notes_on_folder(run)
                made = make_plan(run, ranks=seat.world)
                check_start(made)
                made = replace(made, notices=(*made.notices, *notes))
                report(made.lines(), made.to_json())
            return 0
        from draftsmith.observe.live import LiveLine
        from draftsmith.pipeline.hang import HungError, leave_soon
        from draftsmith.pipeline.run import train as train_run

        try:
            with LiveLine() as live:
                result = train_run(
                    run, resume=resume, max_minutes=max_minutes, overfit=overfit, listener=live, last=True
                )
        except HungError:
            leave_soon()
            raise
        if result.rank == 0:
            try:
                report(_training_lines(result), result.to_json())
            except OutputLost as lost:  # the run is over and saved: its own code says how it went
                _refuse(str(lost))
    if result.reason in ("interrupted", "terminated"):
        return 130 if result.reason == "interrupted" else 143
    return 0 if result.succeeded else 1


@app.command("eval")
def evaluate_drafter(
    ctx: typer.Context,
    drafter: Annotated[Path, typer.Argument(metavar="DRAFTER", help="Folder of a drafter: a checkpoint or an export.")],
    target: TargetPath,
    prompts: Annotated[Path, typer.Option(help=PROMPTS_HELP)],
    max_new_tokens: MaxNewTokens = 256,
    limit: Limit = None,
    block_size: BlockSize = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: DType = "auto",
    gguf_file: GgufFile = None,
    trust_remote_code: TrustRemoteCode = False,
    parity: Annotated[
        bool, typer.Option("--parity", help="Compare the decoder's drafter with the training-time forward instead.")
    ] = False,
    compile: Compile = "auto",
    json_: Json = False,
) -> int:
    """Decode prompts with a drafter and without: acceptance length, losslessness, speed-up."""
    if parity:
        idle = ("temperature", "top_k", "top_p", "seed", "block_size", "compile")
        refuse_given(ctx, idle, "--parity compares greedy answers in eager rounds of whole blocks")
    elif not temperature:
        refuse_given(ctx, ("top_k", "top_p", "seed"), "without --temperature nothing is sampled")
    need_prompts(prompts)
    from draftsmith.decode.evaluate import evaluate
    from draftsmith.decode.fitting import fitting, fitting_prompts
    from draftsmith.decode.prompts import later_turns, prompts_digest, read_prompts
    from draftsmith.decode.proposers import check_block_size
    from draftsmith.decode.sampling import Sampling
    from draftsmith.decode.static import StaticRounds
    from draftsmith.drafter.native import load_drafter_for, weights_digest
    from draftsmith.export.parity import check_parity, training_text_of
    from draftsmith.observe.live import LiveLine
    from draftsmith.pipeline.topology import place_and_dtype
    from draftsmith.target.load import load_target

    with telling(json_) as report, LiveLine() as live:
        asked = read_prompts(prompts)[:limit]
        config = target_config(target, gguf_file, dtype, trust_remote_code)
        place = place_and_dtype(device, dtype)
        model = load_drafter_for(config, drafter)
        check_block_size(block_size, model.spec.block_size)
        text = training_text_of(drafter) if parity else None
        digest = None if parity else weights_digest(model.state_dict())  # of the weights as they are on disk
        frozen = load_target(config, *place)
        model.to(frozen.device, frozen.dtype)
        if parity:
            first, _, notes = fitting(frozen, asked, max_new_tokens)
            notes = [note for note in (later_turns(asked, str(prompts)), *notes) if note]
            for note in notes:
                live({"kind": "notice", "text": note})
            compared = check_parity(model, frozen, first, max_new_tokens=max_new_tokens, training_text=text)
            live.close()
            report(compared.lines(), {**compared.to_json(), "notices": notes})
            return 0 if compared.fault is None else 1
        rounds = StaticRounds(frozen, compile)
        encoded, notes = fitting_prompts(frozen, asked, max_new_tokens, rounds)
        for note in notes:
            live({"kind": "notice", "text": note})
        evaluation = evaluate(
            model,
            frozen,
            encoded,
            max_new_tokens=max_new_tokens,
            block_size=block_size,
            sampling=Sampling(temperature, top_k, top_p),
            seed=seed,
            progress=lambda done, total: live({"kind": "step", "unit": "prompt", "step": done, "steps": total}),
            rounds=rounds,
            measured={"drafter": digest, "target": target, "prompts": prompts_digest(asked)},
        )
        live.close()
        report(evaluation.lines(), {**evaluation.to_json(), "notices": notes})
    return 0 if evaluation.lossless else 1


@data_app.command()
def generate(
    ctx: typer.Context,
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="JSON lines to write; continued if this very work stopped before.")
    ],
    target: TargetPath,
    prompts: Annotated[Path | None, typer.Option(help=PROMPTS_HELP)] = None,
    invent: Annotated[int | None, typer.Option(min=1, help="Let the target invent so many prompts.")] = None,
    exclude: Annotated[Path | None, typer.Option(help="Leave out prompts that this file holds.")] = None,
    limit: Limit = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of an answer, or of a prompt that is invented.")
    ] = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Answers at a time; by default what fits.")] = None,
    device: Device = "auto",
    dtype: DType = "auto",
    gguf_file: GgufFile = None,
    trust_remote_code: TrustRemoteCode = False,
    json_: Json = False,
) -> int:
    """Let the target answer prompts (from a file, or its own): the data a drafter learns from."""
    if (prompts is None) == (invent is None):
        raise UserError("give either --prompts FILE or --invent COUNT", where="command line")
    if not temperature:
        refuse_given(ctx, ("top_k", "top_p"), "with --temperature 0 nothing is sampled")
    for path in (prompts, exclude):
        if path is not None:
            need_prompts(path)
    from draftsmith.decode.answers import PROMPT_TOKENS, AnswerOptions, invent_prompts, write_answers
    from draftsmith.decode.prompts import later_turns, read_prompts, without
    from draftsmith.observe.live import LiveLine
    from draftsmith.pipeline.topology import place_and_dtype
    from draftsmith.target.load import load_target

    options = AnswerOptions(max_new_tokens, temperature, top_k, top_p, seed, batch_size)
    with telling(json_) as report, LiveLine() as live:
        asked = read_prompts(prompts) if prompts is not None else None
        known = read_prompts(exclude) if exclude is not None else []
        asked = None if asked is None else without(asked, known)
        frozen = load_target(
            target_config(target, gguf_file, dtype, trust_remote_code), *place_and_dtype(device, dtype)
        )
        if asked is None:
            assert invent is not None
            longest = min(PROMPT_TOKENS, max_new_tokens)
            asked = invent_prompts(
                frozen, invent, output, seed=seed, max_new_tokens=longest, batch_size=batch_size, listener=live
            )
            asked = without(asked, known)
        asked = asked[:limit]
        note = later_turns(asked, str(prompts))
        if note:
            live({"kind": "notice", "text": note})
        result = write_answers(frozen, asked, output, options, listener=live)
        report(result.lines(), result.to_json())
    return 0


@app.command()
def version(json_: Json = False) -> int:
    """Print the versions of draftsmith and of what it stands on."""
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    versions = {"draftsmith": draftsmith.__version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = installed(package)
    with telling(json_) as report:
        report([f"{name} {number}" for name, number in versions.items()], versions)
    return 0


def _training_lines(result: TrainResult) -> list[str]:
    """How a run ended and where its drafter lies."""
    figures = "no update was made"
    if result.losses:
        figures = f"loss {short_loss(result.loss)}, τ proxy {result.tau_proxy:.2f}"
    lines = [f"{result.reason} at step {result.step}: {figures}"]
    if result.checkpoint is not None:
        lines.append(f"drafter in {result.checkpoint}")
    if not result.succeeded and result.step < result.steps:
        lines.append(f"no verdict: stopped at step {result.step} of {result.steps}")
    elif not result.succeeded:
        lines.append(_why_not_learned(result.losses))
    return lines


def _why_not_learned(losses: list[float]) -> str:
    """Of one row that was learned in all updates there were: whether more of them may do it."""
    known = [loss for loss in losses if math.isfinite(loss)]
    fell = f"loss {short_loss(known[0])} → {short_loss(known[-1])}" if known else "no loss that is a number"
    part = max(1, len(known) // 4)
    late, before = known[-part:], known[-2 * part : -part]
    # One row and the same anchors at each update: there is nothing to learn from that would make the loss stray.
    if known and (not before or fmean(late) < STILL_FALLING * fmean(before)):
        updates = f"{len(losses)} update{'s' * (len(losses) != 1)}"
        return f"not in {updates} ({fell}): raise training.steps, on the command line"
    return f"NO: one row was not learned ({fell}); data, labels or gradients do not fit together"


def _usage_error() -> type[Exception]:
    """click's base of wrong command lines; typer carries a click of its own since 0.26 and used the package before."""
    return next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _take_devices(per_rank: int | None) -> None:
    """Under torchrun: keeps to this rank's own GPUs, before anything is imported that looks at them all."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from draftsmith.pipeline.seat import Seat

        Seat.read().take_devices(per_rank)


def _print_anything() -> None:
    """A letter that the terminal's or the log's encoding lacks is printed as a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _output_fails() -> bool:
    """Whether nothing that is printed arrives; an empty line is the trial."""
    try:
        put("", sys.stdout)
    except OutputLost:
        return True
    return False


def _is_inductors(error: OSError) -> bool:
    """Whether torch failed to make the cache folder that the environment names, which it does while it is imported."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    return named != "" and isinstance(error.filename, str) and Path(named).is_relative_to(error.filename)


def _another_finds_it() -> bool:
    """Whether another rank on this machine has the same command line and config, and says what is wrong with them."""
    return os.environ.get("LOCAL_RANK", "0") != "0"


def _leave_it_to_another() -> int:
    """Ends without a word, but not before who has the word: launchers end all ranks as soon as one has left."""
    time.sleep(TELLING_SECONDS)
    return 2


def _say_who_ended_it(interrupt: BaseException | None) -> int:
    """One line, by one rank only; the exit code is the signal's."""
    if os.environ.get("RANK", "0") == "0":
        _say(str(interrupt) or "interrupted")
    return getattr(interrupt, "exit_code", 130)


def _refuse(text: str) -> int:
    _say(" ".join(text.split()))
    return 2


def _say(text: str) -> None:
    with contextlib.suppress(OutputLost):  # then the exit code alone has to do
        put(f"draftsmith: {text}", sys.stderr)
