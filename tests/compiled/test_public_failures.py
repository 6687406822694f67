"""Failures reported in public: each with plain torch.compile, and gone through the gate."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.fx._symbolic_trace as symbolic_trace
from torch._dynamo.testing import CompileCounterWithBackend

from draftsmith.compiled import Region, Settings


def long(x):
    for _ in range(30):
        x = x.sin() + x
    return x.sum()


def wave(x):
    return (x.sin() * x).sum()


def own(function):
    """A function with a code object of its own."""
    return type(function)(function.__code__.replace(), function.__globals__)


def staggered(warm, cold):
    """Errors in a thread that keeps calling `warm` while this one makes the first calls in `cold`."""
    begun, done, errors = threading.Event(), threading.Event(), []

    def caller():
        while not done.is_set():
            try:
                warm(torch.ones(4))
            except RuntimeError as error:
                errors.append(str(error))
            begun.set()
            time.sleep(0.0005)

    thread = threading.Thread(target=caller, daemon=True)
    thread.start()
    assert begun.wait(60)
    for size, first in enumerate(cold, start=5):
        first(torch.ones(size, requires_grad=True)).backward()
    done.set()
    thread.join(60)
    assert not thread.is_alive()
    return errors


@pytest.fixture
def as_in_2_11(monkeypatch):
    """The check as it was up to torch 2.12: the process-wide flag alone decides, also in threads that trace nothing."""
    monkeypatch.setattr(symbolic_trace, "is_fx_symbolic_tracing", lambda: symbolic_trace._is_fx_tracing_flag)


def test_warm_thread_while_another_compiles(gate, as_in_2_11):
    plain = torch.compile(own(wave), backend="aot_eager", fullgraph=True, dynamic=False)
    plain(torch.ones(4))
    errors, rounds, until = [], 0, time.monotonic() + 60
    while not any("symbolically trace" in error for error in errors) and time.monotonic() < until:
        cold = [torch.compile(own(long), backend="aot_eager", fullgraph=True, dynamic=False) for _ in range(3)]
        errors, rounds = staggered(plain, cold), rounds + 1  # whether a call meets a trace is a matter of timing
    assert any("symbolically trace" in error for error in errors), "the control did not show the failure"

    warm = Region("warm", wave, gate=gate, backend="aot_eager")
    warm(torch.ones(4))
    cold = [Region(f"cold {i}", long, gate=gate, backend="aot_eager") for i in range(3 * rounds)]
    assert staggered(warm, cold) == []


def test_a_changed_mode_while_a_warm_thread_goes_on(gate, as_in_2_11):
    """A recompile that no shape tells of: the warm thread must not meet its trace either."""
    switched = torch.nn.Dropout(0.0)

    def deep(x):
        return long(switched(x))

    warm = Region("warm", wave, gate=gate, backend="aot_eager")
    warm(torch.ones(4))
    changing = [Region(f"changing {i}", deep, gate=gate, backend="aot_eager") for i in range(4)]

    def change(region):
        def first(x):
            region(x).backward()
            switched.train(not switched.training)
            return region(x)

        return first

    assert staggered(warm, [change(region) for region in changing]) == []
    assert len(gate.compiles) == 9
    assert all(compile_.alone for compile_ in gate.compiles)


def test_first_uses_together_with_backward(gate, in_threads):
    """On CUDA this deadlocks without a gate (scripts/prove_gate.py); here: no overlap, and right gradients."""
    regions = [Region(f"r{i}", long, gate=gate, backend="aot_eager") for i in range(3)]

    def worker(region, size):
        x = torch.full((size,), 0.5, requires_grad=True)
        with gate.step():
            region(x).backward()
        twin = torch.full((size,), 0.5, requires_grad=True)
        long(twin).backward()
        torch.testing.assert_close(x.grad, twin.grad)

    in_threads(*[lambda r=r, n=n: worker(r, n) for n, r in enumerate(regions, start=4)])
    assert all(compile_.alone for compile_ in gate.compiles)


def test_config_does_not_reach_workers(in_threads):
    import torch._dynamo.config as config

    seen = {}
    with config.patch(recompile_limit=99):
        settings = Settings.capture()
        in_threads(
            lambda: seen.update(plain=config.recompile_limit),
            lambda: settings.run(lambda: seen.update(carried=config.recompile_limit)),
        )
    if torch.__version__ >= "2.12":
        assert seen["plain"] == 8
    assert seen["carried"] == 99


def test_settings_carry_grad_mode_and_autocast(in_threads):
    seen = {}

    def look():
        seen.update(grad=torch.is_grad_enabled(), autocast=torch.is_autocast_enabled("cpu"))
        seen["dtype"] = torch.get_autocast_dtype("cpu")

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        settings = Settings.capture()
    in_threads(lambda: settings.run(look))
    assert seen == {"grad": False, "autocast": True, "dtype": torch.float16}
    settings.run(look)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def compiled_by_twelve_threads(in_threads, function, **options):
    """Graphs of a plain compiled function that twelve threads call first and together, with six shapes."""
    counter = CompileCounterWithBackend("eager")
    plain = torch.compile(own(function), backend=counter, dynamic=False, **options)
    in_threads(*[lambda n=n: plain(torch.ones(n // 2 + 2)) for n in range(12)])
    calls = counter.frame_count
    for n in range(12):  # afterwards too: what is past the limit stays eager
        plain(torch.ones(n // 2 + 2))
    return calls, counter.frame_count


def test_twelve_threads_first_calling_one_function(gate, in_threads):
    """Six shapes through one region: one compile each, no duplicates, and the limit is the region's own. Without a gate
    the twelve may compile a shape twice, and what the limit leaves out runs eager in silence."""
    limited = {"recompile_limit": 4} if torch.__version__ >= "2.12" else {}
    if limited:
        assert compiled_by_twelve_threads(in_threads, wave, **limited) == (4, 4), "the control did not show the failure"
    region = Region("shared", wave, gate=gate, backend="aot_eager", **({"recompile_limit": 16} if limited else {}))
    in_threads(*[lambda n=n: region(torch.ones(n // 2 + 2, requires_grad=True)).backward() for n in range(12)])
    assert len(gate.compiles) == 6
    assert len(region.first_uses) == 6
    assert all(compile_.alone for compile_ in gate.compiles)


def test_past_the_recompile_limit(gate):
    """A plain function goes on eager, without an error; a region's raises."""
    counter = CompileCounterWithBackend("eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        plain = torch.compile(own(wave), backend=counter, dynamic=False)
        for size in (4, 5, 6):
            torch.testing.assert_close(plain(torch.ones(size)), wave(torch.ones(size)))
        assert counter.frame_count == 1, "the control did not show the failure"
        region = Region("limited", wave, gate=gate, backend="aot_eager")
        region(torch.ones(4))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            region(torch.ones(5))
