#!/usr/bin/env python
"""Threads before the house: two targets and two drafters as threads on one card, through compiled flex_attention.

Run `python scripts/spike_threads.py` on a CUDA machine (torch 2.11 or newer, nothing else needed). Four parts, each in
its own process with its own empty Inductor cache and its own time limit; together under four minutes:

  gated    first uses one at a time, forward and backward under one lock, while every worker waits at a barrier; then
           rows through bounded queues under `set_stance("fail_on_recompile")`; losses compared with one thread; what
           the profiler sees; what a violation looks like.
  warm     the same once more on the cache that `gated` left behind: seconds from a filled cache.
  control  the plain variant: both drafters call and go backward without a gate. It hangs on torch 2.11 (expected).
  stagger  warm threads keep calling while another compiles new shapes: counts the "symbolically trace" crash.

`--device cpu` is a smoke test with dense attention (flex has no backward on CPU). `--control` runs only the control.
Prints one JSON summary; everything else goes to `spike.log` in `$OUT` (or the working directory).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import json
import os
import pathlib
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

T, D = 2, 2  # target and drafter threads
S, N, B, TILE = 1024, 64, 16, 128  # context, anchors, block size, tile of the mask
Q, KV = N * B, S + N * B
H, HEADS, KV_HEADS, V = 512, 8, 2, 1024
LIMITS = {"gated": 110, "warm": 45, "control": 60, "stagger": 45}
TOTAL = 225


class Target(nn.Module):
    """Three layers of causal SDPA and MLP; the output of the second is the feature."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.qkv = nn.ModuleList(nn.Linear(H, 3 * H, bias=False) for _ in range(3))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(H, 2 * H), nn.SiLU(), nn.Linear(2 * H, H)) for _ in range(3))

    def forward(self, tokens_S):
        x = self.embed(tokens_S)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = (t.view(1, S, HEADS, H // HEADS).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(S, H)
            x = x + mlp(x)
        return x


class Drafter(nn.Module):
    """Two layers: queries of the blocks over [context ; block], then cross entropy over V."""

    def __init__(self, flex: bool) -> None:
        super().__init__()
        self.flex = flex
        self.q = nn.ModuleList(nn.Linear(H, H, bias=False) for _ in range(2))
        self.kv = nn.ModuleList(nn.Linear(H, 2 * KV_HEADS * (H // HEADS), bias=False) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(H, 2 * H), nn.SiLU(), nn.Linear(2 * H, H)) for _ in range(2))
        self.head = nn.Linear(H, V, bias=False)

    def forward(self, features_SH, block_QH, labels_Q, mask):
        x, e = block_QH, H // HEADS
        for q_proj, kv_proj, mlp in zip(self.q, self.kv, self.mlp, strict=True):
            q = q_proj(x).view(1, Q, HEADS, e).transpose(1, 2)
            k, v = (
                t.view(1, KV, KV_HEADS, e).transpose(1, 2) for t in kv_proj(torch.cat([features_SH, x])).chunk(2, -1)
            )
            if self.flex:
                out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
            else:
                k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + out.transpose(1, 2).reshape(Q, H)
            x = x + mlp(x)
        return F.cross_entropy(self.head(x).float(), labels_Q)


def row(number: int):
    """Tokens, labels and the dense attention rule of row `number`, on the CPU: one document, N sorted anchors."""
    g = torch.Generator().manual_seed(number)
    tokens_S = torch.randint(V, (S,), generator=g)
    anchors_N = torch.randperm(S - 1, generator=g)[:N].sort().values
    labels_Q = torch.randint(V, (Q,), generator=g)
    context = torch.arange(S)[None] < anchors_N.repeat_interleave(B)[:, None]
    own = torch.arange(Q)[:, None] // B == torch.arange(Q)[None] // B
    return tokens_S, labels_Q, anchors_N, torch.cat([context, own], 1)


def tiles(dense_QK: torch.Tensor, anchors_N: torch.Tensor, device: torch.device) -> BlockMask:
    """BlockMask from tiles counted on the CPU; full and partial tiles always both given."""
    t = dense_QK.view(Q // TILE, TILE, KV // TILE, TILE).permute(0, 2, 1, 3).flatten(2)
    full, some = t.all(2), t.any(2)

    def ordered(flags: torch.Tensor):
        count = flags.sum(1, dtype=torch.int32)[None, None]
        return count, flags.int().argsort(dim=1, descending=True, stable=True).int()[None, None]

    bound = anchors_N.to(device).int()

    def rule(b, h, q, kv):
        return torch.where(kv < S, kv < bound[q // B], (kv - S) // B == q // B)

    mask = BlockMask.from_kv_blocks(*ordered(some & ~full), *ordered(full), BLOCK_SIZE=TILE, mask_mod=rule)
    return mask.to(device)


def region(module: nn.Module, name: str, **options):
    """The module's forward compiled under a code object of its own, so that limits are not shared."""

    def call(*args):
        return module(*args)

    call.__code__ = call.__code__.replace(co_name=name)
    return torch.compile(call, fullgraph=True, dynamic=False, **options)


class House:
    """The four workers' models and regions, and one worker's part of one row."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, self.flex = device, device.type == "cuda"
        dtype = torch.bfloat16 if self.flex else torch.float32
        self.targets = [Target().to(device, dtype).requires_grad_(False) for _ in range(T)]
        self.targets[1:] = [_copied(self.targets[0], t) for t in self.targets[1:]]
        self.drafters = [Drafter(self.flex).to(device, dtype) for _ in range(D)]
        self.start = [{k: v.clone() for k, v in d.state_dict().items()} for d in self.drafters]
        self.target_regions = [region(m, f"target_{i}") for i, m in enumerate(self.targets)]
        self.drafter_regions = [region(m, f"drafter_{i}") for i, m in enumerate(self.drafters)]
        self.losses: dict[int, torch.Tensor] = {}

    def reset(self) -> None:
        for drafter, start in zip(self.drafters, self.start, strict=True):
            drafter.load_state_dict(start)
        self.losses = {}

    def sync(self) -> None:
        if self.flex:
            torch.cuda.synchronize(self.device)

    def features(self, t: int, number: int, compiled: bool = True):
        with torch.no_grad():
            tokens_S = row(number)[0].to(self.device)
            return (self.target_regions[t] if compiled else self.targets[t])(tokens_S)

    def loss(self, d: int, number: int, features_SH):
        _, labels_Q, anchors_N, dense_QK = row(number)
        block_QH = self.targets[0].embed(torch.zeros(Q, dtype=torch.long).to(self.device))
        mask = tiles(dense_QK, anchors_N, self.device) if self.flex else dense_QK.to(self.device)
        return self.drafter_regions[d](features_SH, block_QH, labels_Q.to(self.device), mask)

    def update(self, d: int, number: int, features_SH) -> None:
        loss = self.loss(d, number, features_SH)
        loss.backward()
        with torch.no_grad():
            for p in self.drafters[d].parameters():
                p.sub_(p.grad, alpha=0.05)
                p.grad = None
        self.losses[number] = loss.detach()


def _copied(source: nn.Module, to: nn.Module) -> nn.Module:
    to.load_state_dict(source.state_dict())
    return to


def worker_of(number: int) -> tuple[int, int]:
    """Target and drafter of a row, by number; crossed, so that every target feeds every drafter."""
    return number % T, number // T % D


class Workers:
    """T + D threads that run ranges of rows; a failure in one is raised in the caller within a second."""

    def __init__(self, house: House) -> None:
        self.house, self.errors, self.stop = house, [], threading.Event()

    def rows(self, numbers: range) -> None:
        house, links = self.house, {(t, d): queue.Queue(maxsize=2) for t in range(T) for d in range(D)}

        def put(q, item):
            while not self.stop.is_set():
                with contextlib.suppress(queue.Full):
                    return q.put(item, timeout=0.2)

        def get(q):
            while not self.stop.is_set():
                with contextlib.suppress(queue.Empty):
                    return q.get(timeout=0.2)
            raise RuntimeError("stopped")

        def target(t):
            for number in (n for n in numbers if worker_of(n)[0] == t):
                features_SH, event = house.features(t, number), None
                if house.flex:
                    event = torch.cuda.Event()
                    event.record()
                put(links[worker_of(number)], (number, features_SH, event))

        def drafter(d):
            for number in (n for n in numbers if worker_of(n)[1] == d):
                got, features_SH, event = get(links[worker_of(number)])
                assert got == number, f"row {got} came where {number} was due"
                if event is not None:
                    torch.cuda.current_stream().wait_event(event)
                    features_SH.record_stream(torch.cuda.current_stream())
                house.update(d, number, features_SH)

        self.run([(target, t) for t in range(T)] + [(drafter, d) for d in range(D)])

    def run(self, jobs) -> None:
        house = self.house
        house.sync()

        def guarded(job, index):
            try:
                with torch.cuda.stream(torch.cuda.Stream(house.device)) if house.flex else contextlib.nullcontext():
                    job(index)
            except BaseException as error:
                self.errors.append(error)
                self.stop.set()

        threads = [threading.Thread(target=guarded, args=a, daemon=True, name=f"{a[0].__name__}{a[1]}") for a in jobs]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        house.sync()
        if self.errors:
            raise self.errors[0]


def warm_up(house: House) -> dict[str, float]:
    """Each worker's first use in turn, forward and backward under one lock, in the worker's own thread and stream."""
    gate, barrier, seconds = threading.Lock(), threading.Barrier(T + D), {}

    def target(t):
        with gate:
            began = time.perf_counter()
            house.features(t, 0)
            house.sync()
            seconds[f"target_{t}"] = round(time.perf_counter() - began, 2)
        barrier.wait()

    def drafter(d):
        with gate:
            began = time.perf_counter()
            features_SH = torch.zeros(S, H, device=house.device, dtype=house.drafters[0].head.weight.dtype)
            loss = house.loss(d, 0, features_SH)
            house.sync()
            middle = time.perf_counter()
            loss.backward()
            house.sync()
            house.drafters[d].zero_grad()
            seconds[f"drafter_{d}"] = [round(middle - began, 2), round(time.perf_counter() - middle, 2)]
        barrier.wait()

    Workers(house).run([(target, t) for t in range(T)] + [(drafter, d) for d in range(D)])
    return seconds


def profiled(house: House, numbers: range, all_threads: bool) -> dict:
    """What one profiler in the main thread sees of the workers' rows."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if house.flex:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True) if all_threads else None
    with torch.profiler.profile(activities=activities, experimental_config=config) as prof:
        Workers(house).rows(numbers)
    events = prof.events()
    device = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    host = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CPU]
    graphs = collections.Counter(n for n in host if "Call CompiledFxGraph" in n)
    regions = collections.Counter(n for n in host if "Torch-Compiled Region" in n)
    dense = collections.Counter(n for n in host if n in ("aten::_safe_softmax", "aten::bmm", "aten::_softmax"))
    flex = collections.Counter(n for n in device if "flex" in n.lower())
    return {
        "rows": len(numbers),
        "device_events": len(device),
        "host_events": len(host),
        "host_threads": len({e.thread for e in events if e.device_type == torch.autograd.DeviceType.CPU}),
        "flex_kernels": dict(flex),
        "other_kernels": dict(collections.Counter(n[:120] for n in device if "flex" not in n.lower()).most_common(25)),
        "compiled_graph_calls": sum(graphs.values()),
        "compiled_graphs": dict(graphs),
        "compiled_regions": dict(regions),
        "dense_events": dict(dense),
    }


def violations(house: House) -> dict:
    """What a compile after the warm-up looks like under fail_on_recompile: from a worker, and a lazy backward."""
    seen = {}

    def toy(x):
        return (x.sin() * x).sum()

    def first_use_in_forward():
        region(nn.Identity(), "never_warmed")(torch.ones(4, device=house.device))

    fresh = torch.compile(toy, fullgraph=True, dynamic=False)
    x = torch.ones(8, device=house.device, requires_grad=True)
    pending = fresh(x)  # forward compiled here, its backward not yet
    listened = torch.compile(lambda x: (x.cos() * x).sum(), fullgraph=True, dynamic=False)(x)

    def new_shape():
        fresh(torch.ones(9, device=house.device, requires_grad=True))

    def lazy_backward():
        pending.backward()

    def lazy_backward_with_listener():
        """The stance does not see a late backward; a compile-start callback does, and its error stops the compile."""
        from torch._dynamo.callback import callback_handler

        def refuse(args):
            raise RuntimeError(f"refused by the listener: {args.callback_trigger.name} {args.compile_id}")

        callback_handler.register_start_callback(refuse)
        try:
            listened.backward()
        finally:
            callback_handler.remove_start_callback(refuse)

    torch.compiler.set_stance("fail_on_recompile")
    try:
        for probe in (first_use_in_forward, new_shape, lazy_backward, lazy_backward_with_listener):

            def job(index, probe=probe):
                try:
                    probe()
                    seen[probe.__name__] = "no error"
                except BaseException as error:
                    seen[probe.__name__] = f"{type(error).__name__}: {error}"

            Workers(house).run([(job, 0)])
    finally:
        torch.compiler.set_stance("default")
    return seen


def part_gated(house: House, steps: int) -> dict:
    from torch._dynamo.utils import counters

    out: dict = {}
    began = time.perf_counter()
    out["first_use_seconds"] = warm_up(house)
    out["warm_up_seconds"] = round(time.perf_counter() - began, 2)
    out["counters"] = {k: dict(v) for k, v in counters.items() if k in ("stats", "inductor", "aot_autograd")}
    house.reset()
    if house.flex:
        torch.cuda.reset_peak_memory_stats()
    torch.compiler.set_stance("fail_on_recompile")
    try:
        began = time.perf_counter()
        Workers(house).rows(range(steps))
        threaded = time.perf_counter() - began
    finally:
        torch.compiler.set_stance("default")
    threads = [house.losses[n].item() for n in range(steps)]
    out["peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 3) if house.flex else None
    house.reset()
    began = time.perf_counter()
    for n in range(steps):
        t, d = worker_of(n)
        house.update(d, n, house.features(t, n))
    house.sync()
    single = time.perf_counter() - began
    alone = [house.losses[n].item() for n in range(steps)]
    out |= {
        "rows": steps,
        "rows_per_second": [round(steps / threaded, 1), round(steps / single, 1)],
        "loss_first_last": [threads[0], threads[-1]],
        "losses_identical": threads == alone,
        "loss_max_difference": max(abs(a - b) for a, b in zip(threads, alone, strict=True)),
    }
    if house.flex:
        features_SH, dense = house.features(0, 0), Drafter(False).to(house.device, torch.bfloat16)
        dense.load_state_dict(house.drafters[0].state_dict())
        _, labels_Q, _, dense_QK = row(0)
        block_QH = house.targets[0].embed(torch.zeros(Q, dtype=torch.long, device=house.device))
        by_flex = house.loss(0, 0, features_SH).item()
        by_rule = dense(features_SH, block_QH, labels_Q.to(house.device), dense_QK.to(house.device)).item()
        out["loss_flex_and_dense"] = [by_flex, by_rule]
    numbers = range(steps, steps + 4)
    out["profile_main_thread"] = profiled(house, numbers, all_threads=False)
    try:
        out["profile_all_threads"] = profiled(house, numbers, all_threads=True)
    except Exception as error:
        out["profile_all_threads"] = f"{type(error).__name__}: {error}"
    out["violations"] = violations(house)
    return out


def part_control(house: House, steps: int) -> dict:
    """Plain torch.compile from threads: no gate. Expected never to return on torch 2.11 with CUDA."""
    features_SH = torch.zeros(S, H, device=house.device, dtype=house.drafters[0].head.weight.dtype)
    began, barrier = time.perf_counter(), threading.Barrier(T + D)

    def target(t):
        barrier.wait()
        house.features(t, 0)

    def drafter(d):
        barrier.wait()
        house.update(d, 0, features_SH)

    Workers(house).run([(target, t) for t in range(T)] + [(drafter, d) for d in range(D)])
    return {"finished_after": round(time.perf_counter() - began, 2)}


def part_stagger(house: House, steps: int) -> dict:
    """One warm function called by two threads while the main thread compiles other functions: errors by message."""
    warm = region(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "always_warm")
    warm(torch.ones(2, 8))
    done, calls, failed = threading.Event(), [0, 0], collections.Counter()

    def caller(index):
        while not done.is_set():
            time.sleep(0.0002)  # leaves the interpreter lock to the compiling thread
            try:
                calls[index] += 1
                warm(torch.ones(2, 8))
            except Exception as error:
                failed[f"{type(error).__name__}: {str(error)[:90]}"] += 1

    threads = [threading.Thread(target=caller, args=(i,), daemon=True) for i in range(2)]
    for t in threads:
        t.start()
    began, compiled = time.perf_counter(), 0
    while compiled < 4 and time.perf_counter() - began < 20:
        cold = region(nn.Sequential(nn.Linear(8, 8 + compiled), nn.Tanh()), f"cold_{compiled}")
        try:
            cold(torch.ones(3, 8)).sum().backward()
        except Exception as error:
            failed[f"compiling thread, {type(error).__name__}: {str(error)[:90]}"] += 1
        compiled += 1
    done.set()
    for t in threads:
        t.join(5)
    return {"calls": sum(calls), "compiled": compiled, "failed": dict(failed)}


def facts(device: torch.device) -> dict:
    out = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    with contextlib.suppress(ImportError):
        import triton

        out["triton"] = triton.__version__
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        out |= {"gpu": p.name, "capability": f"{p.major}.{p.minor}", "GiB": round(p.total_memory / 2**30, 1)}
        out |= {"gpus": torch.cuda.device_count(), "cudnn": torch.backends.cudnn.version()}
        with contextlib.suppress(OSError):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            out["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    out["environment"] = {k: v for k, v in os.environ.items() if k.startswith(("TORCH", "TRITON", "CUDA_"))}
    out["cpus"] = os.cpu_count()
    return out


def child(args: argparse.Namespace) -> None:
    """One part in this process; writes its JSON to `--result`, and all stacks to `--stacks` when time is up."""
    with open(args.stacks, "w") as stacks:
        faulthandler.dump_traceback_later(max(1.0, args.until - time.time()), exit=True, file=stacks)
        result = {"ok": False}
        try:
            house = House(torch.device(args.device))
            result |= {"facts": facts(house.device)} if args.part == "gated" else {}
            result |= globals()[f"part_{'gated' if args.part == 'warm' else args.part}"](house, args.steps)
            result["ok"] = True
        except BaseException:
            result["error"] = traceback.format_exc()[-6000:]
        pathlib.Path(args.result).write_text(json.dumps(result))
        faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # a worker that hangs must not keep the process


def start_part(part: str, args: argparse.Namespace, cache: str, limit: float, folder: pathlib.Path):
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    for kind in ("json", "stacks.txt"):
        (folder / f"{part}.{kind}").unlink(missing_ok=True)  # a part that is stopped must not show an older result
    paths = [f"--result={folder}/{part}.json", f"--stacks={folder}/{part}.stacks.txt"]
    command = [sys.executable, __file__, f"--part={part}", f"--device={args.device}", f"--steps={args.steps}", *paths]
    log = open(folder / f"{part}.log", "w")  # noqa: SIM115 - closed by finish_part
    process = subprocess.Popen(
        [*command, f"--until={time.time() + limit - 6}"],
        env=env,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return process, time.perf_counter(), limit, log


def finish_part(part: str, started, folder: pathlib.Path) -> dict:
    process, began, limit, log = started
    timed_out = False
    try:
        process.wait(max(1.0, limit - (time.perf_counter() - began)))
    except subprocess.TimeoutExpired:
        timed_out = True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its own group: the part and its compile workers
    process.wait()
    log.close()
    seconds = round(time.perf_counter() - began, 1)
    result = folder / f"{part}.json"
    if result.exists() and result.stat().st_size:
        return json.loads(result.read_text()) | {"process_seconds": seconds}
    stacks = (folder / f"{part}.stacks.txt").read_text() if (folder / f"{part}.stacks.txt").exists() else ""
    return {
        "ok": False,
        "hung": timed_out or bool(stacks),
        "process_seconds": seconds,
        "stacks_mention": {
            n: stacks.count(n) for n in ("joint_f", "compile_fx_backward", "_compile_inner", "backward")
        },
        "stacks": stacks[:14000],
        "log_tail": (folder / f"{part}.log").read_text()[-3000:],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=240, help="rows through the four workers (half for each drafter)")
    parser.add_argument("--control", action="store_true", help="only the plain control")
    parser.add_argument("--parts", default="gated,warm,control,stagger")
    for hidden in ("--part", "--result", "--stacks"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        child(args)
    folder, began = pathlib.Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="spike-")), time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    parts = ["control"] if args.control else args.parts.split(",")
    summary: dict = {"parts": {}}
    with tempfile.TemporaryDirectory(prefix="spike-cache-", ignore_cleanup_errors=True) as cache:
        # `warm` reads the cache of `gated`; `control` and `stagger` run side by side, each on an empty one.
        for group in (["gated"], ["warm"], ["control", "stagger"]):
            left = TOTAL - (time.perf_counter() - began)
            running = {
                p: start_part(
                    p, args, f"{cache}/{'gated' if p == 'warm' else p}", max(10.0, min(LIMITS[p], left)), folder
                )
                for p in group
                if p in parts
            }
            for p, started in running.items():
                summary["parts"][p] = finish_part(p, started, folder)
                print(
                    f"{p}: {summary['parts'][p].get('ok')} after {time.perf_counter() - began:.0f} s", file=sys.stderr
                )
    summary["seconds"] = round(time.perf_counter() - began, 1)
    text = json.dumps(summary, indent=1)
    (folder / "spike.log").write_text(text + "\n")
    print(text)
    if "gated" not in parts:
        return 0
    gated = summary["parts"]["gated"]
    return 0 if gated.get("ok") and gated["losses_identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
