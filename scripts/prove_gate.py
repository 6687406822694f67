#!/usr/bin/env python
"""What only a GPU can show of `draftsmith.compiled`. Four parts within one time limit; one JSON at the end.

  starts      many fresh processes, each with three threads on one card that first-call compiled flex_attention with
              backward: through the gate, and beside them a plain control without one. Private empty caches, six
              processes at a time. A process that is not done in time counts as hung; its stacks are kept.
  staggered   a warm thread keeps calling while another makes first calls: errors without a gate (torch 2.11, 2.12),
              none with it.
  first-step  the drafter at Qwen3-8B geometry: warm-up and first profiled step from an empty cache, and in a fresh
              process from the packed and unpacked one, side by side; names of the kernels that ran.
  layers      a gated-delta-net layer with flash-linear-attention and without, as the doctor times it. Needs the wheels
              flash-linear-attention, fla-core and einops on the path (`--wheels DIR` unpacks them).

    python scripts/prove_gate.py --seconds 380                      # all parts
    python scripts/prove_gate.py --parts starts --starts 100 --controls 20 --together 6 --seconds 330
    python scripts/prove_gate.py --parts starts --starts 30 --controls 10 --device cuda:0,cuda:1 --stagger 4

`--device cpu` is a smoke test: dense attention instead of flex, and the tiny geometry. Writes `prove_gate.json` to $OUT
or the working directory.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

Q, KV, HEADS, HEAD_DIM = 256, 512, 2, 64  # of one start's attention
GATED_LIMIT, CONTROL_LIMIT = 90.0, 45.0  # seconds of one process; one thread alone takes about 10


# -- one start ---------------------------------------------------------------------------------------------------------


def one_start(gated: bool, device_names: str, result: pathlib.Path, until: float, stagger: float) -> None:
    """Three threads, each with a shape of its own, first-call and go backward; the result holds seconds and errors."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from draftsmith.compiled import Gate, Region

    stacks = result.with_suffix(".stacks").open("w")
    faulthandler.dump_traceback_later(max(1.0, until - time.time()), exit=True, file=stacks)
    devices = [torch.device(name) for name in device_names.split(",")]
    flex = devices[0].type == "cuda"
    delays = [random.Random(f"{result.stem} {index}").uniform(0, stagger) for index in range(3)]
    gate, together, errors = Gate(), threading.Barrier(3), []

    def attend(q, k, v, mask):
        if flex:
            return flex_attention(q, k, v, block_mask=mask)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def make(index: int, device: torch.device):
        name = f"worker {index}"
        if gated:
            return Region(name, attend, gate=gate, device=device)
        own = type(attend)(attend.__code__.replace(co_name=name), globals(), name, None, attend.__closure__)
        return torch.compile(own, fullgraph=True, dynamic=False)

    def worker(index: int) -> None:
        try:
            device = devices[index % len(devices)]
            rows = Q * (1 + index)  # another shape for each: nobody's compile helps another

            def tensor(length: int) -> torch.Tensor:
                return torch.randn(1, HEADS, length, HEAD_DIM, device=device, dtype=torch.float32).requires_grad_()

            q, k, v = tensor(rows), tensor(KV), tensor(KV)
            mask = None
            if flex:
                mask = create_block_mask(lambda b, h, i, j: j <= i, 1, 1, rows, KV, device=device)
            call = make(index, device)
            together.wait(60)
            time.sleep(delays[index])
            for _ in range(2):
                with gate.step() if gated else contextlib.nullcontext():
                    call(q, k, v, mask).sum().backward()
            if flex:
                torch.cuda.synchronize(device)
        except BaseException as error:
            errors.append(f"{type(error).__name__}: {str(error)[:300]}")

    began = time.perf_counter()
    threads = [threading.Thread(target=worker, args=(index,), daemon=True) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    facts = {
        "seconds": round(time.perf_counter() - began, 2),
        "errors": errors,
        "compiles": len(gate.compiles),
        "alone": all(compile_.alone for compile_ in gate.compiles),
    }
    result.write_text(json.dumps(facts))
    os._exit(0)


def starts(options: argparse.Namespace, folder: pathlib.Path, limit: float) -> dict:
    """Runs gated starts and controls mixed, `together` at a time, until all are done or the time is up."""
    jobs = ["gated"] * options.starts + ["control"] * options.controls
    random.Random(0).shuffle(jobs)
    began, running, done = time.perf_counter(), {}, []
    number = 0
    with tempfile.TemporaryDirectory(prefix="prove-starts-") as scratch:
        while jobs or running:
            left = limit - (time.perf_counter() - began)
            while jobs and len(running) < options.together and left > GATED_LIMIT / 2:
                kind = jobs.pop()
                running[number] = (kind, *_start(kind, number, options, pathlib.Path(scratch), left))
                number += 1
            if not running:
                break
            time.sleep(0.05)
            for key, (kind, process, result, until) in list(running.items()):
                if process.poll() is None and time.time() < until + 4:
                    continue
                del running[key]
                done.append(_finish(kind, process, result, folder))
    summary: dict = {"not_started": len(jobs), "seconds": round(time.perf_counter() - began, 1)}
    for kind in ("gated", "control"):
        of_kind = [each for each in done if each["kind"] == kind]
        times = sorted(each["seconds"] for each in of_kind if each["how"] == "fine")
        summary[kind] = {
            "started": len(of_kind),
            **{how: sum(each["how"] == how for each in of_kind) for how in ("fine", "failed", "hung")},
            "median_seconds": times[len(times) // 2] if times else None,
            "slowest_seconds": times[-1] if times else None,
            "errors": sorted({error for each in of_kind for error in each.get("errors", [])})[:5],
        }
    summary["ok"] = summary["gated"]["started"] > 0 and summary["gated"]["fine"] == summary["gated"]["started"]
    return summary


def _start(kind: str, number: int, options: argparse.Namespace, scratch: pathlib.Path, left: float):
    result, cache = scratch / f"{kind}-{number}.json", scratch / f"cache-{number}"
    until = time.time() + min(left, GATED_LIMIT if kind == "gated" else CONTROL_LIMIT)
    # No pool of compile processes: six starts at a time would bring six pools.
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment.pop("TRITON_CACHE_DIR", None)
    command = [
        sys.executable, __file__, "--one", kind, "--device", options.device, "--stagger", str(options.stagger),
        "--result", str(result), f"--until={until}",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    return process, result, until


def _finish(kind: str, process: subprocess.Popen, result: pathlib.Path, folder: pathlib.Path) -> dict:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its own group: the start and what it started
    process.wait()
    shutil.rmtree(result.parent / f"cache-{result.stem.split('-')[1]}", ignore_errors=True)
    if result.exists():
        facts = json.loads(result.read_text())
        return {"kind": kind, "how": "failed" if facts["errors"] else "fine", **facts}
    stacks = result.with_suffix(".stacks")
    text = stacks.read_text() if stacks.exists() else ""
    if not text:
        return {"kind": kind, "how": "failed", "errors": [f"ended with {process.returncode} and said nothing"]}
    (folder / f"hung-{kind}.stacks.txt").write_text(text)
    return {"kind": kind, "how": "hung"}


# -- staggered ---------------------------------------------------------------------------------------------------------


def staggered(options: argparse.Namespace, folder: pathlib.Path, limit: float) -> dict:
    """One warm thread keeps calling while this one makes first calls: errors without a gate, and none with it.

    Traced by AOTAutograd only: what breaks is the tracing, and Inductor's CPU probe would take the time.
    """
    import torch

    from draftsmith.compiled import Gate, Region

    device = torch.device(options.device)

    def short(x):
        return (x.sin() * x).sum()

    def long(x):
        for _ in range(60):
            x = x.sin() + x
        return x.sum()

    def count(warm, cold) -> dict:
        finished, errors, calls = threading.Event(), [], 0

        def caller() -> None:
            nonlocal calls
            while not finished.is_set():
                calls += 1
                try:
                    warm(torch.ones(4, device=device))
                except RuntimeError as error:
                    errors.append(str(error)[:90])
                time.sleep(0.0005)

        warm(torch.ones(4, device=device))
        thread = threading.Thread(target=caller, daemon=True)
        thread.start()
        for size, first in enumerate(cold, start=5):
            first(torch.ones(size, device=device, requires_grad=True)).backward()
        finished.set()
        thread.join(20)
        return {"calls": calls, "errors": len(errors), "messages": sorted(set(errors))[:3]}

    def plain(function):
        own = type(function)(function.__code__.replace(), globals())
        return torch.compile(own, backend="aot_eager", fullgraph=True, dynamic=False)

    gate = Gate()
    without = count(plain(short), [plain(long) for _ in range(4)])
    names = [Region(f"cold {number}", long, gate=gate, backend="aot_eager") for number in range(4)]
    gated = count(Region("warm", short, gate=gate, backend="aot_eager"), names)
    gate.close()
    return {"ok": gated["errors"] == 0, "torch": torch.__version__, "plain": without, "gated": gated}


# -- first step --------------------------------------------------------------------------------------------------------


def write_config(folder: pathlib.Path, device: str) -> pathlib.Path:
    """A run config at Qwen3-8B geometry (tiny on the CPU); its target has no weights."""
    import yaml

    from draftsmith.bench.geometry import GEOMETRIES
    from draftsmith.bench.random_data import write_conversations
    from draftsmith.bench.random_target import write_random_target

    big = device != "cpu"
    write_random_target(folder / "target", GEOMETRIES["qwen3-8b" if big else "tiny"], weights=False)
    write_conversations(folder / "chats.jsonl", random.Random(0), 64 * 200)
    content = {
        "target": {"path": str(folder / "target")},
        "data": {"train": str(folder / "chats.jsonl")},
        "rows": {"length": 4096, "anchors": 512} if big else {"length": 96, "anchors": 12},
        "drafter": {"layers": 5, "block_size": 16} if big else {"layers": 1, "block_size": 4},
        "compile": {"enabled": "on", "evidence": "warn"},
        "training": {"output": str(folder / "run")},
        "pipeline": {"targets": [device], "drafters": [device]},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder / "config.yaml"


def first_step(options: argparse.Namespace, folder: pathlib.Path, limit: float) -> dict:
    """`compile prove` from nothing, `cache pack`, `cache unpack` elsewhere, `compile prove`; each in a process."""
    with tempfile.TemporaryDirectory(prefix="prove-first-") as scratch_name:
        scratch = pathlib.Path(scratch_name)
        config, archive = write_config(scratch, options.device), scratch / "cache.tar.gz"
        until = time.perf_counter() + limit

        def command(*arguments: str, root: str) -> dict:
            environment = os.environ | {
                "DRAFTSMITH_CACHE_DIR": str(scratch / root),
                "PYTHONPATH": f"{HERE.parent / 'src'}:{os.environ.get('PYTHONPATH', '')}",
            }
            environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
            environment.pop("TRITON_CACHE_DIR", None)
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "draftsmith", "compile", *arguments, "--json"],
                env=environment,
                capture_output=True,
                text=True,
                timeout=max(1.0, until - began),
            )
            lines = done.stdout.strip().splitlines()
            content = json.loads(lines[-1]) if lines else {"stderr": done.stderr[-2000:]}
            content |= {"rc": done.returncode, "process_seconds": round(time.perf_counter() - began, 1)}
            told = f"compile {' '.join(arguments[:2])}: rc {content['rc']} after {content['process_seconds']} s"
            told += f": {done.stderr.strip().splitlines()[-1]}" if done.returncode and done.stderr.strip() else ""
            seconds = content.get("warm_up_seconds")
            print(told + (f", warm-up {seconds:.1f} s" if seconds else ""), file=sys.stderr, flush=True)
            return content

        empty = command("prove", str(config), root="first")
        if empty["rc"]:
            return {"ok": False, "empty": empty}
        packed = command("cache", "pack", str(config), str(archive), root="first")
        unpacked = command("cache", "unpack", str(config), str(archive), root="second")
        full = command("prove", str(config), root="second")
        hits = [entry["cache"] for entry in full.get("ledger", {}).get("entries", []) if entry["key"]]
        return {
            "ok": full["rc"] == 0 and "miss" not in hits,
            "coverage": unpacked.get("coverage"),
            "packed_bytes": packed.get("bytes"),
            "hits": f"{hits.count('hit')} of {len(hits)}",
            "empty": _figures(empty),
            "packed": _figures(full),
        }


def _figures(proved: dict) -> dict:
    """What a `compile prove` says of its warm-up and its profiled step."""
    ledger = proved.get("ledger", {})
    verdicts = ledger.get("evidence", [])
    seen = [seen for verdict in verdicts for seen in verdict["seen"]]
    return {
        "warm_up_seconds": proved.get("warm_up_seconds"),
        "process_seconds": proved["process_seconds"],
        "warm_up": ledger.get("warm_up"),
        "kernels": {each["region"]: each["kernels"] for each in seen},
        "peak_bytes": {each["region"]: each["peak_bytes"] for each in seen},
        "problems": [problem for verdict in verdicts for problem in verdict["problems"]],
        "stderr": proved.get("stderr", ""),
    }


# -- layers ------------------------------------------------------------------------------------------------------------


def layers(options: argparse.Namespace, folder: pathlib.Path, limit: float) -> dict:
    """What the doctor finds of a Qwen3-Next target's layers, with its timing."""
    code = (
        "import json, torch\n"
        "from transformers import Qwen3NextConfig\n"
        "from draftsmith.doctor.fast_paths import linear_attention\n"
        f"found = linear_attention(Qwen3NextConfig(), torch.device({options.device!r}), 36)\n"
        "print(json.dumps([each.to_json() for each in found]))\n"
    )
    with tempfile.TemporaryDirectory(prefix="prove-wheels-") as wheels:
        for wheel in pathlib.Path(options.wheels).glob("*.whl") if options.wheels else ():
            with zipfile.ZipFile(wheel) as file:
                file.extractall(wheels)
        paths = [str(HERE.parent / "src"), *([wheels] if options.wheels else []), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": ":".join(filter(None, paths))}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=limit
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"ok": False, "error": done.stderr[-3000:]}
    findings = json.loads(lines[-1])
    return {"ok": True, "findings": findings}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="of the starts: several with commas, for threads in turn")
    parser.add_argument("--stagger", type=float, default=0.0, help="seconds at most by which a start's threads differ")
    parser.add_argument("--parts", default="staggered,first-step,layers,starts")
    parser.add_argument("--starts", type=int, default=100)
    parser.add_argument("--controls", type=int, default=20)
    parser.add_argument("--together", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=380.0, help="for all parts together")
    parser.add_argument("--wheels", help="folder with wheels of flash-linear-attention, fla-core and einops")
    parser.add_argument("--one", choices=("gated", "control"), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one_start(options.one == "gated", options.device, options.result, options.until, options.stagger)
    folder = pathlib.Path(os.environ.get("OUT") or ".")
    folder.mkdir(parents=True, exist_ok=True)
    began, summary = time.perf_counter(), {}
    parts = {"starts": starts, "staggered": staggered, "first-step": first_step, "layers": layers}
    for name in options.parts.split(","):
        left = options.seconds - (time.perf_counter() - began)
        try:
            summary[name] = parts[name](options, folder, left)
        except Exception as error:
            summary[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        print(
            f"{name}: ok={summary[name]['ok']} after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True
        )
        (folder / "prove_gate.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    return 0 if all(part["ok"] for part in summary.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
