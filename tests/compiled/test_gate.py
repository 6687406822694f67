"""The gate and its regions on CPU: exclusion, inheritance, sealing, names in errors."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import types
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from draftsmith.compiled import CompiledTooLate, GateError, Region
from draftsmith.compiled.bench import lines_of, measure


def square(x):
    return (x.sin() * x).sum()


def region(name, gate, function=square, **options):
    return Region(name, function, gate=gate, backend="aot_eager", **options)


def in_threads(*jobs):
    errors = []

    def guarded(job):
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive(), "a worker hangs"
    if errors:
        raise errors[0]


def test_exclusive_excludes_steps_and_steps_overlap(gate):
    inside, seen, lock, together = [0, 0], [], threading.Lock(), threading.Barrier(4)

    def worker(index):
        with gate.step():
            together.wait(60)
        for turn in range(30):
            alone = (turn + index) % 5 == 0
            with gate.exclusive() if alone else gate.step():
                with lock:
                    inside[alone] += 1
                    seen.append(tuple(inside))
                time.sleep(0.0005)
                with lock:
                    inside[alone] -= 1

    in_threads(*[lambda i=i: worker(i) for i in range(4)])
    assert all(alone == 0 or (alone == 1 and sharing == 0) for sharing, alone in seen)


def test_two_upgrades_at_once_do_not_wait_for_each_other(gate):
    together, order = threading.Barrier(2), []

    def worker(index):
        with gate.step():
            together.wait(60)  # both hold a share; only a test may wait inside a step
            with gate.exclusive():
                order.append(("in", index))
                time.sleep(0.01)
            order.append(("out", index))  # an upgrade lasts to the end of the step

    in_threads(lambda: worker(0), lambda: worker(1))
    assert [index for _, index in order] in ([0, 0, 1, 1], [1, 1, 0, 0])


def test_a_first_use_inside_an_ordinary_call_is_alone_and_ends_with_it(gate):
    """The region's own hold is that of all its calls, so the call that goes on alone must get another one."""
    going = []

    @torch._dynamo.disable
    def between(x):
        return inner(x) if going else x

    inner = region("inner", gate)
    outer = Region("outer", lambda x: between(x * 2) * 3, gate=gate, backend="eager", fullgraph=False)
    x = torch.ones(3)
    outer(x), outer(x)
    going.append(True)
    torch.testing.assert_close(outer(x), 3 * square(2 * x))
    assert gate.compiles[-1].alone
    assert not gate.held
    in_threads(lambda: region("another", gate)(x))  # its first use waits for all calls that are still inside


def test_a_failure_inside_leaves_the_gate_free(gate):
    with pytest.raises(KeyError), gate.step(), gate.exclusive():
        raise KeyError
    assert not gate.held
    in_threads(lambda: gate.exclusive().__enter__())


def test_first_use_is_alone_through_backward_and_recorded_once(gate):
    calls = region("toy", gate)
    overlapping = []

    def worker():
        x = torch.ones(4, requires_grad=True)
        with gate.step():
            loss = calls(x)
            overlapping.append(gate._sharing if gate._alone else 0)
            loss.backward()
        assert torch.allclose(x.grad, x.detach().cos() * x.detach() + x.detach().sin())

    in_threads(*[worker] * 6)
    assert len(calls.first_uses) == 1
    assert overlapping == [0] * 6
    assert [(c.region, c.direction, c.alone) for c in gate.compiles] == [("toy", "forward", True)]
    assert gate.compiles[0].seconds > 0


def test_a_new_shape_or_grad_mode_is_a_first_use(gate):
    calls = region("toy", gate)
    for size in (4, 4, 5):
        calls(torch.ones(size))
    with torch.no_grad():
        calls(torch.ones(4))
    assert [u.given for u in calls.first_uses] == ["float32[4] on cpu", "float32[5] on cpu", "float32[4] on cpu"]
    assert len(gate.compiles) == 3


def test_regions_of_one_function_share_no_recompile_limit_and_no_dynamic_shapes(gate):
    regions = [region(f"r{i}", gate, fullgraph=True) for i in range(12)]  # the default limit is 8
    for i, r in enumerate(regions):
        r(torch.ones(3 + i))
    assert [c.region for c in gate.compiles] == [f"r{i}" for i in range(12)]
    assert len({r._compiled.__wrapped__.__code__ for r in regions}) == 12


def test_sealed_gate_refuses_a_new_shape_and_names_region_guard_and_shape(gate):
    calls = region("drafter@cpu", gate)
    with gate.exclusive():
        calls(torch.ones(4))
    gate.seal()
    assert calls(torch.ones(4)) == square(torch.ones(4))

    def late():
        with pytest.raises(CompiledTooLate) as caught:
            calls(torch.ones(5))
        assert caught.value.region == "drafter@cpu"
        assert "expected 4, actual 5" in caught.value.reason
        assert caught.value.given == "float32[5] on cpu"

    in_threads(late)
    gate.unseal()
    calls(torch.ones(5))


def test_sealed_gate_refuses_a_backward_that_was_never_warmed_up(gate):
    compiled = torch.compile(square, fullgraph=True, dynamic=False)  # lazy backward: no region, no gate
    loss = compiled(torch.ones(4, requires_grad=True))
    gate.seal()
    with pytest.raises(CompiledTooLate, match=r"backward"):
        loss.backward()


def test_a_region_warmed_forward_only_has_its_backward_ready(gate):
    calls = Region("toy", square, gate=gate)
    x = torch.ones(4, requires_grad=True)
    with gate.exclusive():
        calls(x)
    gate.seal()
    calls(x).backward()
    assert torch.allclose(x.grad, x.detach().cos() * x.detach() + x.detach().sin())


def test_sealed_with_warn_names_region_and_guard(gate):
    calls = region("toy", gate)
    calls(torch.ones(4))
    gate.seal("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert calls(torch.ones(6)) == square(torch.ones(6))
    texts = [str(w.message) for w in caught if "after the warm-up" in str(w.message)]
    assert len(texts) == 1
    assert "toy" in texts[0]
    assert "expected 4, actual 6" in texts[0]
    assert texts[0].endswith("; it was called with float32[6] on cpu")


def test_checkpoint_recompute_is_inside_the_hold(gate):
    from torch.utils.checkpoint import checkpoint

    calls, held = region("toy", gate), []

    def layer(x):
        held.append(gate.held)
        return calls(x * 2)

    x = torch.ones(4, requires_grad=True)
    with gate.step():
        checkpoint(layer, x, use_reentrant=False).backward()
    assert held == [True, True]
    assert not gate.held


class Nested(torch.autograd.Function):
    """Runs a backward inside its backward, `depth` deep: past 60, torch goes on in a thread of its own, as on CUDA."""

    @staticmethod
    def forward(ctx, x, depth, innermost):
        ctx.depth, ctx.innermost = depth, innermost
        return x * 1

    @staticmethod
    def backward(ctx, g):
        if ctx.depth == 0:
            ctx.innermost()
        else:
            nested_backward(ctx.innermost, ctx.depth - 1)
        return g, None, None


def nested_backward(innermost, depth=70):
    with torch.enable_grad():
        Nested.apply(torch.ones(1, requires_grad=True), depth, innermost).sum().backward()


def test_a_backward_in_another_thread_finds_the_hold_until_it_ends(gate):
    found = []

    def look():
        found.append((threading.current_thread() is threading.main_thread(), gate.held))

    with gate.step():
        nested_backward(look)
    nested_backward(look)
    with gate.exclusive():
        nested_backward(look)
    assert found == [(False, True), (False, False), (False, True)]


def test_a_place_that_another_hold_has_taken_over_means_nothing_here(gate):
    """The thread-local state of a thread outlives its hold; the place does not, and is given to the next."""
    found, inside, done = [], threading.Event(), threading.Event()

    def other():
        with gate.step():
            inside.set()
            assert done.wait(20)

    with gate.step():
        place = gate._here.hold.place
    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    assert inside.wait(20)
    taken = gate._handed[place] is not None
    nested_backward(lambda: found.append(gate.held))
    done.set()
    thread.join(20)
    assert taken, "the test means something only if the place is used again"
    assert found == [False]


def test_many_reads_inside_a_backward_and_many_holds_after_another(gate):
    """torch 2.11 drops references of what is stored, so nothing is that may be freed: 0 to 255, and -1 for nothing."""
    before = [sys.getrefcount(place) for place in range(-1, 256)]
    with gate.step():
        nested_backward(lambda: [gate.held for _ in range(5000)])
    for _ in range(1000):
        with gate.step():
            pass
    assert sorted(gate._free) == list(range(256))
    assert gate._handed == [None] * 256
    after = [sys.getrefcount(place) for place in range(-1, 256)]
    lost = [place for place, (had, has) in enumerate(zip(before, after, strict=True), -1) if has < had - 50]
    assert lost == []


def test_first_use_inside_a_backward_outside_the_gate_is_refused(gate):
    calls = region("toy", gate)

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return g * calls(torch.ones(7))

    x = torch.ones(4, requires_grad=True)
    with pytest.raises(GateError, match=r"gate\.step"):
        Late.apply(x).sum().backward()


def test_the_gates_cost_is_measured():
    """The command prints the figures; how large they are is not for a test on shared cores to judge."""
    found = measure(calls=50, rounds=3)
    # All but the first are differences, noise included.
    assert found.keys() == {"compiled", "unsealed", "unsealed_many", "in_step", "sealed"}
    assert found["compiled"] > 0
    assert [line.split()[-1] for line in lines_of(found)] == ["µs"] * 5
    torch._dynamo.reset()


def test_disabled_region_runs_the_function_itself(gate):
    calls = Region("eager", square, gate=gate, enabled=False)
    gate.seal()
    assert calls(torch.ones(9)) == square(torch.ones(9))
    assert calls.first_uses == []


@pytest.mark.parametrize("what", ["autocast", "dtype of autocast", "strides"])
def test_what_guards_look_at_besides_shapes_is_a_first_use(gate, what):
    """So it is compiled alone, also through `gate.step()`."""
    region, x = Region("r", lambda x: x @ x, gate=gate, backend="eager"), torch.ones(4, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=what == "dtype of autocast"):
        region(x)
    dtype = torch.float16 if what == "dtype of autocast" else torch.bfloat16
    with torch.autocast("cpu", dtype, enabled=what != "strides"), gate.step():
        region(x.t() if what == "strides" else x)
    assert [compile_.alone for compile_ in gate.compiles] == [True, True]
    assert len(region.first_uses) == 2


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x * (2 if self.training else 3))


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("change", ["mode", "frozen", "deterministic", "object"])
def test_what_only_guards_know_is_compiled_alone_too(gate, change, in_step):
    """The call is made again as a first use; its backward is compiled with it, and the numbers are the changed ones."""
    module, x = Scaled(4, 4), torch.ones(3, 4, requires_grad=True)
    inside = types.SimpleNamespace(factor=torch.ones(1))
    r = region("r", gate, (lambda x, inside: module(x) * inside.factor) if change == "object" else module.forward)
    given = (x, inside) if change == "object" else (x,)
    r(*given).sum().backward()
    try:
        if change == "mode":
            module.eval()
        elif change == "frozen":
            module.weight.requires_grad_(False)
        elif change == "deterministic":
            torch.use_deterministic_algorithms(True)
        else:
            inside.factor = torch.ones(1, dtype=torch.float64)
        with warnings.catch_warnings(), gate.step() if in_step else contextlib.nullcontext():
            warnings.simplefilter("error")
            result = r(*given)
            result.sum().backward()
        torch.testing.assert_close(result, module(x) * inside.factor)
    finally:
        torch.use_deterministic_algorithms(False)
    unseen = change == "frozen" and torch.__version__ < "2.12"  # which looks at inputs' requires_grad only
    assert [(c.direction, c.alone) for c in gate.compiles] == [("forward", True)] * (1 if unseen else 2)
    assert not gate.held
    r(*given)
    assert len(gate.compiles) == (1 if unseen else 2)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_recompute_that_compiles_again_goes_on_and_is_told(gate, sealed):
    """In the backward, where waiting for the gate could hang."""
    module, x = Scaled(4, 4), torch.ones(3, 4, requires_grad=True)
    r = region("r", gate, module.forward)
    with gate.step():
        checkpoint(r, x, use_reentrant=False).sum().backward()
    if sealed:
        gate.seal("warn")
    said = "after the warm-up" if sealed else "beside other threads"
    with gate.step():
        result = checkpoint(r, x, use_reentrant=False, determinism_check="none").sum()
        module.eval()
        with pytest.warns(UserWarning, match=rf"r compiles \(forward\) {said}"):
            result.backward()
    assert not gate.held


def test_regions_of_one_name_are_whole_only_if_all_are(gate):
    region("same", gate)
    region("same", gate, fullgraph=False)
    region("same", gate)
    region("other", gate)
    assert gate.whole == {"same": False, "other": True}


def test_an_error_of_the_function_itself_is_not_taken_for_a_refusal(gate):
    r = region("r", gate, lambda x, index: x.gather(0, index))
    r(torch.ones(3), torch.tensor([2]))
    with pytest.raises(RuntimeError, match="out of bounds"):
        r(torch.ones(3), torch.tensor([3]))
    assert len(gate.compiles) == 1
    assert not gate.held


def test_a_region_with_graph_breaks_that_compiles_beside_others_is_told(gate):
    """Part of the call has run, so it cannot be made again."""
    module = Scaled(4, 4)

    def broken(x):
        x = module(x)
        torch._dynamo.graph_break()
        return x + 1

    r = region("broken", gate, broken, fullgraph=False)
    r(torch.ones(3, 4))
    module.eval()
    with pytest.warns(UserWarning, match=r"broken compiles \(forward\) beside other threads: .*training"):
        torch.testing.assert_close(r(torch.ones(3, 4)), module(torch.ones(3, 4)) + 1)
    assert not gate.compiles[-1].alone


def test_the_last_place_taken_by_another_thread_is_an_error_of_the_gate(gate):
    gate._free.clear()
    with pytest.raises(GateError, match="more than 256 threads"), gate.step():
        pass
    with pytest.raises(GateError, match="more than 256 threads"), gate.exclusive():
        pass
    assert not gate.held
