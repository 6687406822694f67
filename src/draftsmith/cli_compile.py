"""`draftsmith compile …` and `draftsmith doctor`: parse, call one function, print."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli_options import Json, Overrides, ask, refuse_existing, say, tell
from draftsmith.errors import UserError, need_file

compile_app = typer.Typer(help="Compile ahead, prove what runs, look after the caches.", rich_markup_mode=None)
cache_app = typer.Typer(help="Compile caches: show, verify, pack, unpack, clear.", rich_markup_mode=None)
compile_app.add_typer(cache_app, name="cache")

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The config of the run.")]
MaybeConfig = Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="The config of the run.")]
Archive = Annotated[Path, typer.Argument(metavar="FILE.tar.gz")]
MIB = 2**20


def _say_if_runs_look_elsewhere(folder: Path) -> None:
    from draftsmith.compiled import cache

    named = cache.inductor_folder()
    if not cache.may_choose() and named.resolve() != folder.resolve():
        say(f"note: TORCHINDUCTOR_CACHE_DIR is set, so a run uses {named} and not this cache")


@compile_app.command()
def warm(
    config: Config,
    overrides: Overrides = None,
    again: Annotated[bool, typer.Option("--again", help="Fill an empty one also if nothing is missing.")] = False,
    json_: Json = False,
) -> int:
    """Fill the cache for a config, check it in a second process, and put it in place."""
    from draftsmith.config import load_config

    settings = load_config(config, overrides)
    from draftsmith.pipeline.compile_commands import warm as run

    result = run(settings, say, again=again)
    _say_if_runs_look_elsewhere(Path(result["folder"]))
    size = sum(result["bytes"].values()) / MIB
    lines = [f"{result['coverage']}, {size:.1f} MiB in {result['folder']}"]
    if result["filled"]:
        cold, loaded = result["cold_seconds"], result["loaded_seconds"]
        lines.append(f"warm-up from an empty cache {cold:.1f} s, from this one {loaded:.1f} s")
    else:
        lines.append("all is there already, and verified; --again fills an empty one")
    tell(lines, result, json_)
    return 0 if result["verified"] else 1


@compile_app.command()
def prove(config: Config, overrides: Overrides = None, json_: Json = False) -> int:
    """Warm up, profile one step of all drafters, and say whether the compiled kernels ran."""
    from draftsmith.config import load_config

    settings = load_config(config, [*(overrides or ()), "compile.evidence=warn"])
    from draftsmith.observe.live import LiveLine
    from draftsmith.pipeline.compile_commands import prove as run

    with LiveLine() as live:
        result = run(settings, live)
    problems = [problem for verdict in result["ledger"]["evidence"] for problem in verdict["problems"]]
    verdict = "the compiled path ran" if result["ok"] else "NOT the compiled path"
    tell([f"{verdict}; warm-up {result['warm_up_seconds']:.1f} s", *problems], result, json_)
    return 0 if result["ok"] else 1


@compile_app.command()
def gate(json_: Json = False) -> int:
    """Measure what the gate adds to an ordinary compiled call."""
    from draftsmith.compiled.bench import lines_of, measure

    found = measure()
    tell(lines_of(found), {f"{name}_us": value for name, value in found.items()}, json_)
    return 0


@cache_app.command()
def show(config: MaybeConfig = None, overrides: Overrides = None, json_: Json = False) -> int:
    """Sizes by kind, what made each cache, whether it matches this machine; with CONFIG, what is missing."""
    from draftsmith.config import load_config

    settings = load_config(config, overrides) if config else None
    from draftsmith.pipeline.compile_commands import show as look
    from draftsmith.pipeline.compiling import cache_refusals

    with cache_refusals():
        result = look(settings)
    lines = []
    for each in result["caches"]:
        kinds = ", ".join(f"{kind} {size / MIB:.1f}" for kind, size in each["bytes"].items()) or "empty"
        lines.append(f"{each['folder']}: {sum(each['bytes'].values()) / MIB:.1f} MiB ({kinds})")
        if each["made"] is None:
            lines.append("  no manifest that can be read: holds what some program compiled, for whichever shapes")
        else:
            differs = "; ".join(each["differs"][:3])
            match = f"does NOT match: {differs}" if differs else "matches this machine"
            lines.append(f"  made {each['made']} with torch {each['made_by'].get('torch')}; {match}")
    extensions = result["extensions"]
    lines.append(f"{extensions['folder']}: {extensions['bytes'] / MIB:.1f} MiB (torch extensions)")
    if "config" in result:
        lines.append(f"for this config: {result['config']['coverage']}")
        if result["config"]["folder"] is not None:
            _say_if_runs_look_elsewhere(Path(result["config"]["folder"]))
    tell(lines, result, json_)
    return 0


@cache_app.command()
def verify(config: Config, overrides: Overrides = None, json_: Json = False) -> int:
    """Checksums, machine, and whether the cache of a config holds everything it needs; exit 1 if not."""
    from draftsmith.config import load_config

    settings = load_config(config, overrides)
    from draftsmith.compiled import cache
    from draftsmith.pipeline.compile_commands import NOTHING, plan_of
    from draftsmith.pipeline.compiling import cache_folder, machine_facts, needs

    plan = plan_of(settings)
    if not plan.compiled:
        tell([NOTHING], {"folder": None, "problems": [], "coverage": NOTHING, "missing": []}, json_)
        return 0
    folder = cache_folder(plan)
    _say_if_runs_look_elsewhere(folder)
    problems = cache.verify(folder, machine_facts())
    covered = cache.coverage(folder, needs(plan))
    lines = [f"{folder}: {covered.line()}", *problems]
    content = {"folder": str(folder), "problems": problems, "coverage": covered.line(), "missing": covered.missing}
    tell(lines, content, json_)
    return 0 if not problems and not covered.missing else 1


@cache_app.command()
def pack(config: Config, archive: Archive, overrides: Overrides = None, json_: Json = False) -> int:
    """Write the cache of a config, with manifest and checksums, into one file."""
    from draftsmith.config import load_config

    settings = load_config(config, overrides)
    refuse_existing(archive)
    from draftsmith.compiled import archive as archives
    from draftsmith.pipeline.compile_commands import need_compiled, plan_of
    from draftsmith.pipeline.compiling import cache_folder, cache_refusals

    folder = cache_folder(need_compiled(plan_of(settings)))
    with cache_refusals():
        size = archives.pack(folder, archive)
    tell([f"packed {folder} into {archive}, {size / MIB:.1f} MiB"], {"archive": str(archive), "bytes": size}, json_)
    return 0


@cache_app.command()
def unpack(config: Config, archive: Archive, overrides: Overrides = None, json_: Json = False) -> int:
    """Check a packed cache against this machine and config and put it in place; refuses what does not match."""
    from draftsmith.config import load_config

    settings = load_config(config, overrides)
    need_file(archive, "archive")
    from draftsmith.compiled import archive as archives
    from draftsmith.compiled import cache
    from draftsmith.pipeline.compile_commands import need_compiled, plan_of
    from draftsmith.pipeline.compiling import cache_folder, cache_refusals, machine_facts, needs

    plan = need_compiled(plan_of(settings))
    folder, needed = cache_folder(plan), needs(plan)
    _say_if_runs_look_elsewhere(folder)
    with cache_refusals():
        archives.unpack(archive, folder, machine_facts(), needed)
    covered = cache.coverage(folder, needed).line()
    tell([f"unpacked into {folder}: {covered}"], {"folder": str(folder), "coverage": covered}, json_)
    return 0


@cache_app.command()
def clear(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json_: Json = False,
) -> int:
    """Delete Draftsmith's own caches, and nothing else."""
    from draftsmith.compiled import cache
    from draftsmith.pipeline.compiling import cache_refusals

    with cache_refusals():
        kept = cache.left_alone()
        caches = [(path, size) for path, size in cache.own_caches() if path not in kept]
    others = [f"{path.name} ({why})" for path, why in kept.items()]
    for other in others:
        say(f"left alone: {other}")
    if not caches:
        tell([f"nothing to delete in {cache.root_folder()}"], {"freed": 0, "left_alone": others}, json_)
        return 0
    for path, size in caches:
        say(f"{path}: {size / MIB:.1f} MiB")
    total = sum(size for _, size in caches)
    these = "this cache" if len(caches) == 1 else f"these {len(caches)} caches"
    question = f"delete {these} ({total / MIB:.1f} MiB)?"
    refusal = "" if yes else ask(question, "nothing deleted", "deletes without asking")
    if refusal:
        tell([refusal], {"freed": 0, "left_alone": others}, json_)
        return 1
    with cache_refusals():
        freed = cache.clear([path for path, _ in caches])
    count = "1 cache" if len(caches) == 1 else f"{len(caches)} caches"
    tell([f"deleted {count}, {freed / MIB:.1f} MiB"], {"freed": freed, "left_alone": others}, json_)
    return 0


def doctor(
    config: MaybeConfig = None,
    overrides: Overrides = None,
    against: Annotated[Path | None, typer.Option(metavar="RUN", help="List what changed since that run.")] = None,
    restore: Annotated[Path | None, typer.Option(metavar="RUN", help="Print commands for a like environment.")] = None,
    json_: Json = False,
) -> int:
    """Check machine, environment and, with CONFIG, the fast paths of its target; exit 0 only if they will be taken."""
    from draftsmith.config import load_config

    if sum(given is not None for given in (config, against, restore)) > 1:
        raise UserError("CONFIG, --against and --restore are asked one at a time", where="doctor")
    settings = load_config(config, overrides) if config else None
    for run in (restore, against):
        if run is not None and not os.path.isdir(run):
            raise UserError("no such run folder", where=str(run))
    from draftsmith import doctor as doctors

    if restore is not None:
        lines = doctors.restore(restore)
        tell(lines, {"commands": lines}, json_)
        return 0
    if against is not None:
        changed = doctors.against(against)
        tell(changed or [f"nothing changed since {against}"], {"changed": changed}, json_)
        return 1 if changed else 0
    findings = doctors.examine(settings, say=say)
    healthy = doctors.healthy(findings)
    lines = [finding.line() for finding in findings]
    lines.append(doctors.verdict(findings))
    tell(lines, {"healthy": healthy, "findings": [finding.to_json() for finding in findings]}, json_)
    return 0 if healthy else 1
