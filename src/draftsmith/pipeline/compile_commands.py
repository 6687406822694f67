"""`draftsmith compile warm | prove | cache`: the trainer's compiling without training.

`prove` runs what a training run does before and around its first update: warm-up, seal, and one profiled step of all
drafters at once, on made-up rows and random weights of the real shapes; no weights are loaded. `warm` does that in a
second and a third process: one fills a fresh private folder, the next must load everything from it; then the folder
gets its manifest and takes its place. Training runs look there first.

Only the head of the first data file is read: shapes do not depend on the data.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from draftsmith.compiled import Gate, Settings, cache
from draftsmith.config import RunConfig, parse_config
from draftsmith.data.conversations import write_head
from draftsmith.errors import UserError
from draftsmith.observe.events import Event, EventLog, Listener
from draftsmith.observe.live import notable_line
from draftsmith.pipeline.assemble import made_up_drafts, make_replicas
from draftsmith.pipeline.compiling import (
    ELSEWHERE,
    Compiling,
    TargetLayers,
    cache_folder,
    cache_refusals,
    check_cache,
    check_compiler,
    explained,
    machine_facts,
    needs,
    use_cache,
    uses,
)
from draftsmith.pipeline.lowering import lower_target
from draftsmith.pipeline.parent import end_with
from draftsmith.pipeline.plan import Plan, make_plan
from draftsmith.pipeline.proof import make_sample, warm_step
from draftsmith.pipeline.signals import listening
from draftsmith.pipeline.sync import Alone
from draftsmith.target.head import TargetHead
from draftsmith.target.load import shallow_target

NOTHING = "nothing is compiled under this config"
DATA_LINES = 200
# What SIGTERM ends with. A proof compiles into the cache that training uses, which keeps each graph that is finished.
_NO_VERDICT = "terminated without a verdict: nothing is kept but what the compile cache holds by now"
_NOT_BEGUN = "terminated before the filling began: no cache was changed"
_UNFINISHED = "terminated: the unfinished cache is removed, and what was in place is as it was"
_TOLD = "\N{RECORD SEPARATOR}"  # before a line of the process that compiles which is for people


def prove(config: RunConfig, listener: Listener | None = None) -> dict[str, Any]:
    """Warms up and profiles one step; the ledger as a dict, with "ok" and the seconds.

    Args:
        config: of the run.
        listener: gets "warmup", "ledger" and "evidence" events.

    Raises:
        UserError: nothing is compiled under this config, it could not be kept, or the warm-up fails.
    """
    with listening(_NO_VERDICT), tempfile.TemporaryDirectory(prefix="draftsmith-prove-") as scratch:
        plan = make_plan(_short_data(config, Path(scratch)))
        if not plan.compiled:
            raise UserError(
                f"nothing to prove: {plan.attention} attention runs eager on this machine, by name",
                where="compile",
                fix="compile.enabled=on compiles it on the CPU too",
            )
        check_compiler(plan)
        check_cache(plan)
        elsewhere = use_cache(plan)  # as training does
        with EventLog(Path(scratch) / "events.jsonl", [listener] if listener else []) as log:
            if elsewhere:
                log.write("notice", text=elsewhere)
            return _prove(plan, log)


def _prove(plan: Plan, log: EventLog) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(plan.topology.cpu_threads)
    gate = Gate()
    try:
        replicas = make_replicas(plan, _random_head(plan), gate)
        devices = dict.fromkeys(plan.topology.targets)
        shallow = [shallow_target(plan.config.target, device, plan.target_dtype) for device in devices]
        for target in shallow:
            lower_target(plan, target, compare=False)
        targets = [TargetLayers(plan, target, gate, index) for index, target in enumerate(shallow)]
        compiling = Compiling(plan, gate, replicas, Alone(), log, made_up_drafts(plan), targets=targets)
        began = time.perf_counter()
        _in_threads([compiling.warm_targets])
        _in_threads([lambda i=i: compiling.warm_turn(i) for i in range(len(replicas))], one_by_one=True)  # type: ignore[misc]
        compiling.sealed()
        warm_seconds = time.perf_counter() - began
        samples = [make_sample(plan, compiling.draft, device) for device in compiling.devices]
        steps: list[Callable[[], None]] = [
            lambda r=replica, s=sample, d=device: warm_step(r, s, d)  # type: ignore[misc]
            for replica, sample, device in zip(replicas, samples, compiling.devices, strict=True)
        ]
        ok = True
        if compiling.evidence is not None:
            compiling.evidence.begin()
            try:
                with explained():
                    _in_threads([compiling.run_targets, *steps])
                ok = compiling.judge(step=0)
            finally:
                compiling.evidence.abandon()
        content = compiling.ledger.to_json()
        named = [vars(each) for each in uses(plan, compiling.ledger)]
        return {"ok": ok, "warm_up_seconds": warm_seconds, "uses": named, "ledger": content}
    finally:
        gate.close()
        torch.set_num_threads(threads)


def warm(config: RunConfig, tell: Callable[[str], None] = lambda _text: None, *, again: bool = False) -> dict[str, Any]:
    """Fills Draftsmith's own cache for this config and checks it in another process.

    Args:
        config: of the run.
        tell: gets a line for each stage, and those of the warm-up, indented, as they come.
        again: fill an empty one although nothing is missing.

    A cache that holds everything and whose files are those of its manifest stays as it is, unless `again`.

    Returns:
        folder, whether it was filled, and if so the seconds of the filling and of the loading process's warm-up; bytes
        by kind, the coverage line, and whether it is verified.

    Raises:
        UserError: the cache cannot be written, or replaced because another process uses it; a process fails, or the
            second one compiles something.
        KeyboardInterrupt: interrupted or terminated; the process that compiles has ended and its folders are removed.
    """
    with listening(_NOT_BEGUN) as signals, tempfile.TemporaryDirectory(prefix="draftsmith-warm-") as scratch:
        short = _short_data(config, Path(scratch))
        plan = make_plan(short)
        need_compiled(plan)
        check_compiler(plan)
        place = cache_folder(plan)
        if not again and _is_full(plan, place):
            return {"filled": False, **_state(plan, place), "verified": True}
        root = cache.root_folder()
        with cache_refusals(fix=ELSEWHERE):
            cache.make_writable(root)
        with cache_refusals():
            for line in cache.remove_abandoned():
                tell(line)
            cache.check_unused(place)
        with cache.room(root, "filling") as room:
            filling, checking = room / "filling", room / "checking"
            filling.mkdir(mode=0o700)
            signals.words = _UNFINISHED
            tell("filling an empty cache")
            cold = _in_process(short, filling, Path(scratch), tell)
            # Under another name: nothing in it may depend on where it lies.
            os.rename(filling, checking)
            kernels = cache.flash_kernels(checking)
            tell(f"filled in {cold['warm_up_seconds']:.1f} s; loading it in another process")
            second = _in_process(short, checking, Path(scratch), tell)
            entries = second["ledger"]["entries"]
            missed = [f"{e['region']} ({e['direction']})" for e in entries if e["cache"] == "miss"]
            if config.compile.flex_backend == "flash" and not kernels == cache.flash_kernels(checking) != set():
                missed.append("FlashAttention-4's kernels")
            if missed or not any(entry["cache"] == "hit" for entry in entries):
                raise UserError(
                    f"a second process compiled again: {', '.join(missed) or 'no graph came from the cache'}",
                    where="compile warm",
                    fix="draftsmith doctor lists variables that switch the cache off",
                )
            named = [cache.Use(use["name"], tuple(use["keys"]), use["seconds"]) for use in cold["uses"]]
            with cache_refusals():
                cache.write_manifest(checking, machine_facts(), named)
                signals.end = lambda: None  # two renames, and all is done: no half of it
                cache.swap_in(checking, place)
        return {
            "filled": True,
            "cold_seconds": cold["warm_up_seconds"],
            "loaded_seconds": second["warm_up_seconds"],
            **_state(plan, place),
            "verified": second["ok"],
        }


def _is_full(plan: Plan, place: Path) -> bool:
    """Whether `cache verify` would find nothing amiss in a cache, and nothing missing."""
    return not cache.coverage(place, needs(plan)).missing and not cache.verify(place, machine_facts())


def _state(plan: Plan, place: Path) -> dict[str, Any]:
    return {
        "folder": str(place),
        "bytes": cache.sizes(place),
        "coverage": cache.coverage(place, needs(plan)).line(),
    }


def show(config: RunConfig | None = None) -> dict[str, Any]:
    """Size by kind of every cache that matters here, what made it, whether it fits; with a config, what it lacks."""
    places = [path for path, _ in cache.own_caches()]
    inductor = cache.inductor_folder()
    if inductor not in places:
        places.append(inductor)
    found = []
    for place in places:
        manifest = cache.read_manifest(place)
        differing = None if manifest is None else cache.differences(manifest["machine"], machine_facts())
        found.append(
            {
                "folder": str(place),
                "bytes": cache.sizes(place),
                "made": None if manifest is None else manifest["made"],
                "made_by": None if manifest is None else manifest["machine"],
                "differs": differing,
                "uses": [] if manifest is None else [use.name for use in cache.uses_of(manifest)],
            }
        )
    extensions = cache.extensions_folder()
    content: dict[str, Any] = {
        "caches": found,
        "extensions": {"folder": str(extensions), "bytes": sum(cache.sizes(extensions).values())},
    }
    if config is not None:
        plan = plan_of(config)
        if plan.compiled:
            place = cache_folder(plan)
            covered = cache.coverage(place, needs(plan))
            content["config"] = {"folder": str(place), "coverage": covered.line(), "missing": list(covered.missing)}
        else:
            content["config"] = {"folder": None, "coverage": NOTHING, "missing": []}
    return content


def need_compiled(plan: Plan) -> Plan:
    """The plan itself.

    Raises:
        UserError: nothing is compiled under its config.
    """
    if not plan.compiled:
        raise UserError(NOTHING, where="compile", fix="compile.enabled=on")
    return plan


def plan_of(config: RunConfig) -> Plan:
    """The plan of a config from the head of its data."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-plan-") as scratch:
        return make_plan(_short_data(config, Path(scratch)))


def _in_threads(jobs: list[Callable[[], None]], one_by_one: bool = False) -> None:
    """Runs each job in a thread of its own, as training does, under this thread's settings."""
    errors: list[BaseException] = []
    settings = Settings.capture()

    def guarded(job: Callable[[], None]) -> None:
        try:
            settings.run(job)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
        if one_by_one:
            thread.join()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _random_head(plan: Plan) -> TargetHead:
    geometry = plan.geometry
    device = plan.topology.drafters[0]
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.randn(
        geometry.vocab_rows, geometry.hidden_size, generator=generator, device=device, dtype=plan.dtype
    )
    weights *= 0.02
    return TargetHead(weights, weights, geometry.logit_softcap, geometry.logit_multiplier, geometry.embedding_scale)


def _short_data(config: RunConfig, scratch: Path) -> RunConfig:
    """The config with the head of its data only."""
    head = scratch / "head.jsonl"
    write_head(config.data.train, DATA_LINES, head)
    data = config.data.model_copy(update={"train": (str(head),), "held_out": ()})
    return config.model_copy(update={"data": data})


def _in_process(
    config: RunConfig, folder: Path, scratch: Path, tell: Callable[[str], None] = lambda _text: None
) -> Mapping[str, Any]:
    """`prove` in a fresh process with that folder as its cache, which ends when this one does.

    Args:
        config: of the run, with short data.
        folder: its cache.
        scratch: for what passes between the processes.
        tell: gets the lines of its warm-up as they come. What else it writes, torch's warnings for one, is only looked
            at if it fails.

    Raises:
        UserError: it fails; what it refuses comes in its own words.
    """
    given, result = scratch / "config.json", scratch / "result.json"
    given.write_text(config.model_dump_json(), encoding="utf-8")
    result.unlink(missing_ok=True)
    # What it leaves in temporary folders goes with the scratch folder, however it ends.
    temporary = tempfile.mkdtemp(dir=scratch)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TMPDIR": temporary}
    for name in ("TRITON_CACHE_DIR", cache.FLASH_FOLDER, cache.FLASH_SWITCH):
        environment.pop(name, None)
    command = [sys.executable, "-m", "draftsmith.pipeline.compile_commands", str(given), str(result), str(os.getpid())]
    # In a thread, where no signal raises: a process that has been started is known here, whatever comes meanwhile.
    starter = ThreadPoolExecutor(1)
    # A session of its own, so that its compiling processes can be ended with it.
    started = starter.submit(
        subprocess.Popen,
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        process = started.result()
        assert process.stderr is not None
        errors = ""
        with process.stderr:
            for line in process.stderr:
                if line.startswith(_TOLD):
                    tell(f"  {line.removeprefix(_TOLD).rstrip()}")
                else:
                    errors += line
        process.wait()
    except BaseException:
        if started.exception() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.result().pid, signal.SIGKILL)
            started.result().wait()
        raise
    finally:
        starter.shutdown(wait=False)
    if process.returncode or not result.exists():
        raise UserError(f"a process {_ended(process.returncode)}: {_error_line(errors)}", where="compile warm")
    content: Mapping[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if "refused" in content:
        raise UserError(**content["refused"])
    return content


def _ended(code: int) -> str:
    """How a process ended, in words."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _error_line(errors: str) -> str:
    """What a process said last that looks like an error; torch adds advice after its own."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed|Missing|Interrupt)\b", line)]
    return (named or lines or ["no message"])[-1]


def _child(given: Path, result: Path) -> None:
    config = parse_config(json.loads(given.read_text(encoding="utf-8")))

    def tell(event: Event) -> None:
        # What else it has to say is about a cache and a log that lie elsewhere for the time being.
        if event["kind"] == "warmup":
            for line in (notable_line(event) or "").splitlines():
                sys.stderr.write(f"{_TOLD}{line}\n")
            sys.stderr.flush()

    try:
        content = prove(config, tell)
    except UserError as error:
        content = {"refused": {"what": error.what, "where": error.where, "fix": error.fix}}
    result.write_text(json.dumps(content, default=str), encoding="utf-8")


if __name__ == "__main__":
    end_with(int(sys.argv[3]))
    _child(Path(sys.argv[1]), Path(sys.argv[2]))
