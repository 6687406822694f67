"""Evidence: what it sees of a compiled step, and that every known way of not running compiled is caught, by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from draftsmith.compiled import (
    CompiledTooLate,
    Evidence,
    EvidenceMissing,
    Expected,
    Ledger,
    NotCompiled,
    Region,
    WarmUp,
    _torch,
)
from draftsmith.compiled._torch import Span
from draftsmith.compiled.evidence import Seen, Trace, judge
from draftsmith.pipeline.compiling import FLASH_KERNEL
from draftsmith.pipeline.proof import FLEX_KERNELS

Q, KV = 24, 40


def wave(x):
    return (x.sin() * x).sum()


def leaf(size=8):
    return torch.ones(size, requires_grad=True)


def warmed(gate, *names, **options):
    """Regions of `wave`, compiled with Inductor forward and backward, and the gate sealed."""
    regions = [Region(name, wave, gate=gate, device="cpu", **options) for name in names]
    for region in regions:
        with gate.exclusive():
            region(leaf()).backward()
    gate.seal()
    return regions


def problems_of(gate, expected, step):
    evidence = Evidence(gate, expected)
    with pytest.raises(EvidenceMissing) as caught:
        evidence.check(step)
    return caught.value.verdict.problems


def test_a_compiled_step_in_threads_is_attributed_to_each_region(gate, in_threads):
    first, second = warmed(gate, "a", "b")
    ledger = Ledger(gate)
    evidence = Evidence(gate, [Expected(first, backward=True), Expected(second, backward=True)], ledger)

    def work(region, times):
        for _ in range(times):
            (region(leaf()) * 3).backward()

    verdict = evidence.check(lambda: in_threads(lambda: work(first, 2), lambda: work(second, 1)), number=7)
    assert [(s.region, s.calls, s.forward, s.backward) for s in verdict.seen] == [("a", 2, 2, 2), ("b", 1, 1, 1)]
    # Forward and backward of one function, the very graphs of the ledger.
    assert set(verdict.seen[0].keys) == {entry.key for entry in ledger.entries()}
    assert len(verdict.seen[0].keys) == 2
    assert ledger.to_json()["evidence"][0]["ok"] is True
    assert gate.straight, "nobody watches any more"


def test_profiling_does_not_warn_into_the_output_of_a_run(gate, monkeypatch):
    """torch up to 2.11 warns at the start of a profiler, once a process, about cycles that we do not have."""
    monkeypatch.setattr(torch.profiler.profiler, "_WARNINGS_SHOWN", set(), raising=False)
    [region] = warmed(gate, "a")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*Profiler clears events")
        verdict = Evidence(gate, [Expected(region, backward=True)]).check(lambda: region(leaf()).backward())
    assert verdict.ok


def test_a_backward_in_another_thread_belongs_to_the_forward(gate, in_threads):
    """As on CUDA, where backwards run in the device's autograd thread."""
    first, second = warmed(gate, "a", "b")
    evidence, losses = Evidence(gate, [Expected(first, backward=True), Expected(second)]), []

    def step():
        in_threads(lambda: losses.append(first(leaf()) * 2), lambda: second(leaf()))
        in_threads(lambda: losses[0].backward())

    assert [(s.region, s.forward, s.backward) for s in evidence.check(step).seen] == [("a", 1, 1), ("b", 1, 0)]


def test_kernel_names_of_a_real_trace_match():
    """Names pinned from an H200 (torch 2.11, triton 3.6): what the trainer asks for is what Inductor calls them."""
    forward, backward = FLEX_KERNELS["triton"]
    assert re.search(forward, "triton_tem_fused_flex_attention_split_transpose_view_1")
    for name in (
        "triton_tem_fused_flex_attention_backward_transpose_view_7",
        "triton_per_fused_flex_attention_backward_transpose_view_6",
    ):
        assert re.search(backward, name)
        assert not re.search(forward, name)
    for name in ("triton_poi_fused_silu_2", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7"):
        assert not re.search(f"{forward}|{backward}", name)


def test_kernel_names_of_flash_attention_match():
    """Pinned from an H200 (torch 2.11, flash-attn-4 4.0.0b36); a target's are not taken for a drafter's beside it."""
    forward, backward = FLEX_KERNELS["flash"]
    prefix = "kernel_cutlass_kernel_flash_attncuteflash_"
    names = {
        "forward": prefix + "fwd_sm90FlashAttentionForwardSm90_object_at__tensor0000o11101213_tensor0000o11101213_0",
        "backward": prefix + "bwd_sm90FlashAttentionBackwardSm90_object_at__tensor0000o11101213_tensor0000o11101213_0",
        "before": prefix + "bwd_preprocessFlashAttentionBackwardPreprocess_object_at__tensorptrbf16gmemalign16_0",
        "after": prefix + "bwd_postprocessFlashAttentionBackwardPostprocess_object_at__tensorptrf32gmemalign16_0",
        "target": "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false> >",
    }

    def matching(pattern: str) -> list[str]:
        return [what for what, name in names.items() if re.search(pattern, name)]

    assert matching(forward) == ["forward"]
    assert matching(backward) == ["backward"]
    assert matching(FLASH_KERNEL) == ["target"]


@pytest.fixture
def limit_of_one():
    """Each function may be compiled once. (torch before 2.12 takes no limit for one function.)"""
    with torch._dynamo.config.patch(recompile_limit=1):
        yield


def test_a_call_that_the_end_cuts_off_is_no_fallback(gate, limit_of_one):
    """A target goes on while the profiler stops: a thread's last call may show no graph. Not so in a region with a
    backward, which stands still by then, and not if there is no other call."""
    loose = Region("loose", wave, gate=gate, device="cpu", fullgraph=False)
    for size in (8, 9):
        loose(leaf(size))
    cut = lambda: (loose(leaf(8)), loose(leaf(9)))  # noqa: E731
    assert Evidence(gate, [Expected(loose)]).check(cut).seen[0].eager == 0
    assert "loose on cpu ran 1 of 2 times without a compiled graph" in problems_of(
        gate, [Expected(loose, backward=True)], cut
    )
    assert problems_of(gate, [Expected(loose)], lambda: loose(leaf(9))) == [
        "loose on cpu ran 1 times without a compiled graph"
    ]


def test_control_region_never_called(gate):
    first, second = warmed(gate, "called", "idle")
    assert problems_of(gate, [Expected(first), Expected(second)], lambda: first(leaf())) == [
        "idle on cpu was never called"
    ]


def test_control_fallback_on_one_of_two_devices(gate, in_threads):
    """Two workers' regions of one function; the second one's runs eager."""
    (first,) = warmed(gate, "drafter 0")
    second = Region("drafter 1", wave, gate=gate, device="cpu", enabled=False)
    found = problems_of(
        gate,
        [Expected(first, backward=True), Expected(second, backward=True)],
        lambda: in_threads(lambda: first(leaf()).backward(), lambda: second(leaf()).backward()),
    )
    assert found == [
        "drafter 1 on cpu ran 1 times without a compiled graph",
        "drafter 1 on cpu: its backward ran no compiled graph",
    ]


def test_control_force_eager_stance(gate):
    (region,) = warmed(gate, "a")
    gate.unseal()
    with torch.compiler.set_stance("force_eager"):
        found = problems_of(gate, [Expected(region, backward=True)], lambda: region(leaf()).backward())
    assert found[0] == "a on cpu ran 1 times without a compiled graph"


def test_control_recompile_limit_of_one(gate, limit_of_one):
    """Past the limit a function without fullgraph runs eager, silently; one with fullgraph raises."""
    loose = Region("loose", wave, gate=gate, device="cpu", fullgraph=False)
    loose(leaf(8)).backward()
    loose(leaf(9))  # past the limit
    assert problems_of(gate, [Expected(loose)], lambda: loose(leaf(9))) == [
        "loose on cpu ran 1 times without a compiled graph"
    ]
    # Also where some of its calls are compiled: a drafter by layers, one kind of which falls back.
    partly = lambda: (loose(leaf(9)), loose(leaf(8)))  # noqa: E731
    assert problems_of(gate, [Expected(loose)], partly) == ["loose on cpu ran 1 of 2 times without a compiled graph"]
    strict = Region("strict", wave, gate=gate, backend="aot_eager")
    strict(leaf(8))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        strict(leaf(9))


def test_control_backward_that_runs_eager(gate):
    """Forward compiled, backward not: the graph of a function under no_grad, with a hand-written backward around it."""
    (region,) = warmed(gate, "a")
    gate.unseal()

    class Around(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return region(x.detach())

        @staticmethod
        def backward(ctx, g):
            return g.expand(8)

    region(torch.ones(8))
    found = problems_of(gate, [Expected(region, backward=True)], lambda: Around.apply(leaf()).backward())
    assert found == ["a on cpu: its backward ran no compiled graph"]


def test_control_eager_flex(gate):
    """Eager flex_attention computes all scores: operators shaped [.., Q, KV] and a softmax are seen."""

    def attend(q, k, v):
        return flex_attention(q, k, v)

    region = Region("attention", attend, gate=gate, device="cpu", enabled=False)
    q, k, v = torch.randn(1, 2, Q, 16), torch.randn(1, 2, KV, 16), torch.randn(1, 2, KV, 16)
    found = problems_of(gate, [Expected(region, score_shapes=((Q, KV),))], lambda: region(q, k, v))
    assert "ran 1 times without a compiled graph" in found[0]
    assert "dense scores" in found[1]
    assert f"{Q}, {KV}]" in found[1]


def test_dense_scores_are_told_from_activations_of_the_same_size(gate):
    """A 2-D activation [Q, KV] (an MLP as wide as KV) is none; scores of another region are not this one's."""
    mlp = Region("mlp", lambda x, w: x @ w, gate=gate, device="cpu", enabled=False)
    scores = Region("scores", lambda x, w: (x @ w).softmax(-1), gate=gate, device="cpu", enabled=False)
    expected = [Expected(r, score_shapes=((Q, KV),), softmax=True) for r in (mlp, scores)]
    evidence = Evidence(gate, expected)
    evidence.begin()
    mlp(torch.ones(Q, KV), torch.ones(KV, 3))
    scores(torch.ones(2, Q, 5), torch.ones(2, 5, KV))
    seen = evidence.end(0).seen
    assert seen[0].forbidden == []
    assert any(f"[2, {Q}, {KV}]" in name for name in seen[1].forbidden)


def test_control_wrong_numbers(gate):
    (region,) = warmed(gate, "a")
    expected = Expected(region, oracle=lambda: "its output differs from the reference by 0.3")
    assert problems_of(gate, [expected], lambda: region(leaf())) == [
        "a on cpu: its output differs from the reference by 0.3"
    ]


def test_kernels_belong_to_the_device_that_ran_them():
    """One card's kernels are no evidence for another."""

    def kernel(name, device):
        return Span(name, device, thread=7, start=10, end=20, sequence=-1, forward_thread=0, event=None)

    trace = Trace([kernel("flex forward", 0), kernel("flex backward", 0), kernel("dense", 1), kernel("dense", 1)])
    assert trace.kernels("cuda:0") == ["flex backward", "flex forward"]
    assert trace.kernels("cuda:1") == ["dense"]
    assert trace.kernels("cuda:2") == []


def test_control_memory_and_kernels(gate):
    """Judged without a GPU: a peak over the bound, and a backward kernel that did not run."""
    region = Region("drafter 0", wave, gate=gate, device="cuda:0", enabled=False)
    expected = Expected(region, kernels=("flex_attention(?!_backward)", "flex_attention_backward"), memory=2**30)
    fine = Seen("drafter 0", "cuda:0", calls=1, forward=1, peak_bytes=2**29)
    forward, backward = "triton_tem_fused_flex_attention_1", "triton_tem_fused_flex_attention_backward_7"
    fine.kernels = [forward, backward]
    assert judge(expected, fine) == []
    fine.kernels, fine.peak_bytes = [forward], 3 * 2**30
    found = judge(expected, fine)
    assert "no kernel matches 'flex_attention_backward'" in found[0]
    assert "3.00 GiB, more than 1.00 GiB" in found[1]
    fine.kernels = [backward]
    assert "no kernel matches 'flex_attention(?!_backward)'" in judge(expected, fine)[0]


@pytest.mark.parametrize("how", ["512 and 4096", "no_grad", "another thread's settings"])
def test_control_warmed_otherwise_than_trained(gate, how):
    """Nothing that was warmed up under other guards runs after the seal; the error names the guard."""
    region = Region("drafter", wave, gate=gate, backend="aot_eager")
    if how == "512 and 4096":
        with gate.exclusive():
            region(leaf(512)).backward()
    elif how == "no_grad":
        with gate.exclusive(), torch.no_grad():
            region(leaf(4096))
    else:

        def other():
            with gate.exclusive(), torch.autocast("cpu", dtype=torch.bfloat16):
                region(leaf(4096)).backward()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    gate.seal()
    with pytest.raises(CompiledTooLate) as caught:
        region(leaf(4096))
    guard = {"512 and 4096": "expected 512, actual 4096", "no_grad": "grad_mode", "another": "autocast"}
    assert guard[how if how in guard else "another"] in caught.value.reason
    assert caught.value.given == "float32[4096] on cpu"


def test_warm_up_that_never_reaches_the_compiled_path_says_so(gate):
    """A warm-up that ran without errors and compiled nothing: not called, a stance, a variable."""
    warm = WarmUp(gate, Ledger(gate), ["cpu"])
    region = Region("drafter 0", wave, gate=gate, backend="aot_eager")
    with pytest.raises(NotCompiled, match=r"'drafter 0' was never called"):
        warm.turn("drafter 0", "cpu", [region], lambda: wave(leaf()).backward())
    with torch.compiler.set_stance("force_eager"), pytest.raises(NotCompiled, match="force_eager"):
        warm.turn("drafter 0", "cpu", [region], lambda: region(leaf()).backward())


DISABLED = """
import torch
from draftsmith.compiled import Evidence, EvidenceMissing, Expected, Gate, Ledger, NotCompiled, Region, WarmUp

gate, x = Gate(), torch.ones(8, requires_grad=True)
region, loose = (
    Region("drafter 0", lambda x: (x.sin() * x).sum(), gate=gate, fullgraph=full) for full in (True, False)
)
for attempt in (
    lambda: WarmUp(gate, Ledger(gate), ["cpu"]).turn("drafter 0", "cpu", [loose], lambda: loose(x).backward()),
    lambda: WarmUp(gate, Ledger(gate), ["cpu"]).turn("drafter 0", "cpu", [region], lambda: region(x).backward()),
    lambda: Evidence(gate, [Expected(loose, backward=True)]).check(lambda: loose(x).backward()),
):
    try:
        attempt()
        print("passed")
    except (NotCompiled, EvidenceMissing) as error:
        print(error)
"""


def test_control_torch_compile_disable():
    """In a process of its own, as a user would meet it: the warm-up says why, and evidence alone catches it too."""
    environment = os.environ | {"TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", DISABLED], env=environment, capture_output=True, text=True, check=True)
    warm, strict, evidence = done.stdout.splitlines()
    assert "nothing was compiled (TORCH_COMPILE_DISABLE=1 is set)" in strict
    assert warm == "drafter 0: region 'drafter 0' ran, but nothing was compiled (TORCH_COMPILE_DISABLE=1 is set)"
    assert "drafter 0 ran 1 times without a compiled graph" in evidence


def test_a_profiler_that_does_not_start_or_stop_leaves_nothing_watched(gate, monkeypatch):
    region = Region("r", torch.sin, gate=gate, backend="eager")
    evidence = Evidence(gate, [Expected(region)])

    def fails(_recorder):
        raise RuntimeError("a profiler runs already")

    with monkeypatch.context() as patch:
        patch.setattr(_torch.Recorder, "start", fails)
        with pytest.raises(RuntimeError, match="runs already"):
            evidence.check(lambda: region(torch.ones(2)))
    assert not gate.watched
    evidence.begin()
    recorder = evidence._recorder
    with monkeypatch.context() as patch:
        patch.setattr(_torch.Recorder, "stop", fails)
        with pytest.raises(RuntimeError, match="runs already"):
            evidence.end(0)
    recorder.stop()
    assert not gate.watched
    assert evidence.begin() is None
    evidence.abandon()
