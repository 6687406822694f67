"""Numbers that are not finite, memory that is full, workers that raise: what is said, and what is left behind."""

from __future__ import annotations

import _thread
import dataclasses
import gc
import re
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.bench.row import host_waits
from draftsmith.errors import UserError
from draftsmith.objective import Sums
from draftsmith.observe.events import read_events
from draftsmith.pipeline import assemble, not_finite, supervise
from draftsmith.pipeline import run as run_module
from draftsmith.pipeline.compiling import Compiling
from draftsmith.pipeline.hang import HangWatch
from draftsmith.pipeline.jobs import Job
from draftsmith.pipeline.memory import estimate_memory
from draftsmith.pipeline.out_of_memory import explain, is_out_of_memory, savings
from draftsmith.pipeline.plan import make_plan
from draftsmith.pipeline.progress import Progress
from draftsmith.pipeline.run import train
from draftsmith.pipeline.saving import Saver
from draftsmith.pipeline.topology import Topology
from draftsmith.target.forward import Target
from draftsmith.training import checkpoint
from draftsmith.training.finite import first_not_finite
from draftsmith.training.step import Replica
from draftsmith.training.update import ReplicaUpdate

pytestmark = pytest.mark.usefixtures("one_thread")
TWO = {"drafters": ["cpu", "cpu"], "targets": ["cpu"]}


def poison(monkeypatch: pytest.MonkeyPatch, what: str, rows: set[int]) -> None:
    """Makes training rows give a loss or a gradient that is not finite, by their number in the stream."""
    step, made = Replica.step, assemble.make_draft_batch
    numbers: dict[int, int] = {}
    lock = threading.Lock()

    def remember(row, **settings):
        batch = made(row, **settings)
        with lock:
            numbers[batch.inputs_Q.data_ptr()] = row.number
        return batch

    def bad(self, features, batch, *, learn: bool = True):
        sums = step(self, features, batch, learn=learn)
        number = numbers.get(batch.inputs_Q.data_ptr())
        if learn and number in rows:
            if what == "loss":
                return Sums(torch.cat((torch.full((1,), float("nan")), sums.values[1:])))
            # as it comes from a loss that overflows: through every parameter
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(float("inf"))
        return sums

    monkeypatch.setattr(assemble, "make_draft_batch", remember)
    monkeypatch.setattr(Replica, "step", bad)


def notices(folder: Path) -> list[str]:
    events = read_events(folder / "events.jsonl")
    return [event["text"] for event in events if event["kind"] == "notice" and event.get("topic") == "not finite"]


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_skipped_update_changes_nothing_and_its_row_is_named(
    tiny_run, monkeypatch, what: str, optimizer: str
) -> None:
    """Update 2 (rows 6 to 11) is bad in row 9: the checkpoints before and after it hold the same state."""
    poison(monkeypatch, what, {9})
    # every checkpoint, however busy the disk is
    monkeypatch.setattr(Saver, "ready", property(lambda self: self._wait_until_idle() is None))
    config = tiny_run(
        "skipped",
        optimizer={"name": optimizer},
        training={"on_nan": "skip", "steps": 3, "save_every": 1, "eval_rows": 0},
        pipeline=TWO,
    )
    result = train(config)
    assert result.step == 3
    before, after, last = (
        load_file(result.folder / "checkpoints" / f"step-{step:07d}" / "trainer.safetensors") for step in (1, 2, 3)
    )
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    assert any(not torch.equal(last[name], value) for name, value in after.items())
    assert all(bool(torch.isfinite(value).all()) for value in last.values())
    (text,) = notices(result.folder)
    plan = make_plan(config)
    rows = plan.corpus.train
    names = [document.name for document in rows.row_documents(rows.packed_row(9))]
    assert text.startswith("step 2 skipped: loss ")
    assert f"in row 9 ({names[0]}" in text
    assert "row 8" not in text
    steps = [event for event in read_events(result.folder / "events.jsonl") if event["kind"] == "step"]
    assert [event.get("skipped", False) for event in steps] == [False, True, False]


def test_by_default_the_run_ends_and_says_which_row(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, "gradient", {9})
    config = tiny_run("stopped", training={"steps": 5, "save_every": 1, "eval_rows": 0}, pipeline=TWO)
    with pytest.raises(UserError, match=r"gradient norm (inf|nan) at step 2 are not finite, in row 9 \(.*on_nan=skip"):
        train(config)
    # what was saved is good, and the run can go on without that row
    saved = sorted((Path(config.training.output) / "checkpoints").glob("step-*/trainer.safetensors"))
    assert all(bool(torch.isfinite(value).all()) for path in saved for value in load_file(path).values())
    skipping = config.model_copy(update={"training": config.training.model_copy(update={"on_nan": "skip"})})
    assert skipping.fingerprint() == config.fingerprint()
    assert train(skipping, resume=True).step == 5


def test_too_many_in_a_row_end_the_run(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(not_finite, "MOST_IN_A_ROW", 3)
    poison(monkeypatch, "loss", {0, 12, 18, 24, 25})
    config = tiny_run("often", training={"on_nan": "skip", "steps": 20, "eval_rows": 0, "save_every": 0})
    with pytest.raises(UserError, match=r"3 updates in a row were skipped.*at step 5.*in row 24 \(.*; row 25 \("):
        train(config)
    assert len(notices(Path(config.training.output))) == 3  # of updates 1, 3 and 4


def test_where_no_row_shows_it_all_rows_of_the_update_are_named() -> None:
    class Document:
        name = "chats.jsonl:1"

    judge = not_finite.NotFinite("skip", lambda _row: [Document()])  # type: ignore[list-item,return-value]
    model = torch.nn.LayerNorm(2)
    model(torch.ones(1, 2)).sum().backward()
    jobs = [Job(number, True, number, 0) for number in range(5)]
    for job in jobs:
        judge.note(job, Sums(torch.ones(6)), model)
    text = judge.bad(0, 1.0, float("inf"))
    assert "no single row shows it, the update had 5: row 0 (chats.jsonl:1); row 1 (chats.jsonl:1)" in text
    assert judge._noted == {}


def test_a_row_is_noted_without_reading_anything_back() -> None:
    judge = not_finite.NotFinite("skip", lambda _row: [])
    model = torch.nn.LayerNorm(2)
    model(torch.ones(1, 2)).sum().backward()
    cpu = torch.device("cpu")
    assert host_waits(lambda: judge.note(Job(0, True, 0, 0), Sums(torch.ones(6)), model), cpu) == []
    assert len(host_waits(lambda: judge.bad(0, 1.0, float("nan")), cpu)) == 2, "which this test can see"


def break_after(monkeypatch: pytest.MonkeyPatch, what: str, updates: int) -> None:
    """So many updates in, a number of the drafter's weights, or of their masters, is none."""
    apply, calls = ReplicaUpdate.apply, [0]

    def broken(self, *arguments, **named):
        apply(self, *arguments, **named)
        calls[0] += self.index == 0
        if self.index == 0 and calls[0] == updates:
            {"weights": self._weights, "masters": self._masters}[what][0].detach().view(-1)[0] = float("nan")

    monkeypatch.setattr(ReplicaUpdate, "apply", broken)
    # every checkpoint, however busy the disk is
    monkeypatch.setattr(Saver, "ready", property(lambda self: self._wait_until_idle() is None))


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints, in all of which every number is one."""
    found = sorted((folder / "checkpoints").glob("step-*/trainer.safetensors"))
    assert all(bool(torch.isfinite(value).all()) for path in found for value in load_file(path).values())
    return [int(path.parent.name.removeprefix("step-")) for path in found]


@pytest.mark.parametrize("on_nan", ["skip", "stop"])
def test_broken_weights_end_the_run_and_no_row_is_blamed(tiny_run, monkeypatch: pytest.MonkeyPatch, on_nan) -> None:
    break_after(monkeypatch, "masters", 3)
    settings = {"on_nan": on_nan, "steps": 50, "save_every": 1, "eval_every": 0}
    config = tiny_run("weights", training=settings, pipeline=TWO)
    line = r"weights are not finite since step 3 \(master/.*\) \(go back to checkpoint step 2 with --resume"
    with pytest.raises(UserError, match=line) as error:
        train(config)
    assert "row" not in str(error.value)
    folder = Path(config.training.output)
    assert saved_steps(folder) == [1, 2]
    assert notices(folder) == []


def test_weights_that_are_made_from_good_masters_again_cost_one_update(tiny_run, monkeypatch) -> None:
    """torch's operators write them behind a skipped update too; that all rows show it is said."""
    break_after(monkeypatch, "weights", 3)
    settings = {"on_nan": "skip", "steps": 6, "save_every": 1, "eval_every": 0}
    result = train(tiny_run("healed", training=settings, pipeline=TWO))
    (text,) = notices(result.folder)
    assert text.startswith("step 4 skipped: ")
    assert ", in all 6 rows of the update, so perhaps through none of them: row 18 (" in text
    assert saved_steps(result.folder) == [1, 2, 3, 4, 5, 6]


def test_a_weight_that_is_not_finite_is_found_in_the_drafters_themselves() -> None:
    """On CUDA a skipped update leaves them as they are, however good the masters."""
    judge = not_finite.NotFinite("skip", lambda _row: [])
    models = [torch.nn.LayerNorm(2), torch.nn.LayerNorm(2)]
    for number, model in enumerate(models):
        model(torch.ones(1, 2)).sum().backward()
        judge.note(Job(number, True, 0, number), Sums(torch.ones(6)), model)
    assert judge.broken_weight() == ""
    models[1].bias.data[1] = float("inf")
    assert judge.broken_weight() == "bias"


def test_broken_weights_are_known_without_checkpoints(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    break_after(monkeypatch, "masters", 3)
    config = tiny_run("none", training={"on_nan": "skip", "steps": 50, "save_every": 0, "eval_every": 0})
    # Update 4 writes the weights from the masters, the fifth shows it.
    with pytest.raises(UserError, match=r"not finite since step 5 \(.*\) \(there is no checkpoint: start again"):
        train(config)
    assert saved_steps(Path(config.training.output)) == []


def test_the_last_checkpoint_of_a_run_is_not_one_of_broken_weights(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    break_after(monkeypatch, "masters", 3)
    config = tiny_run("last", training={"steps": 3, "save_every": 2, "eval_every": 0})
    with pytest.raises(UserError, match=r"not finite since step 3 .*go back to checkpoint step 2 with"):
        train(config)
    assert saved_steps(Path(config.training.output)) == [2]


def test_a_checkpoint_of_broken_weights_is_not_resumed(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes one any more; an earlier release did."""
    config = tiny_run("earlier", training={"steps": 3, "save_every": 2, "eval_every": 0})
    with monkeypatch.context() as patched:
        break_after(patched, "masters", 3)
        patched.setattr(checkpoint, "first_not_finite", lambda _tensors: "")
        train(config)
    result = train(config, resume=True)
    assert (result.step, len(result.losses)) == (3, 1)
    assert saved_steps(Path(config.training.output)) == [2, 3]
    told = [event["text"] for event in read_events(result.folder / "events.jsonl") if event["kind"] == "notice"]
    assert any("the weights of this checkpoint are not finite (master/" in text for text in told)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_that_is_not_finite_is_named(bad: float, dtype: torch.dtype) -> None:
    tensors = {name: torch.randn(7, 11).to(dtype) for name in "abc"} | {
        "empty": torch.empty(0),
        "n": torch.ones(2).int(),
    }
    assert first_not_finite(tensors) == ""
    tensors["c"][0, 0] = bad
    assert first_not_finite(tensors) == "c"
    tensors["b"][6, 10] = bad
    assert first_not_finite(tensors) == "b"


# -- memory --------------------------------------------------------------------------------------------------------

CUDA_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.19 GiB is free"
)
CPU_SAYS = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 77 bytes."
# Savings that two digits show.
LARGE: dict[str, dict[str, object]] = {
    "rows": {"length": 1280, "anchors": 600},
    "objective": {"chunk": 8192},
    "drafter": {"layers": 2, "block_size": 16},
}


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError(CUDA_SAYS), ", asking for 2.50 GiB"),
        (RuntimeError(CPU_SAYS), ", asking for 77 bytes"),
        (MemoryError(), ""),
    ],
)
@pytest.mark.parametrize("where", ["Replica.step", "Target.features", "make_replicas"])
def test_out_of_memory_is_one_line_that_says_what_helps(tiny_run, monkeypatch, error, asked: str, where: str) -> None:
    def fail(*_arguments, **_named):
        raise error

    holder, _, name = where.rpartition(".")
    monkeypatch.setattr({"Replica": Replica, "Target": Target, "": run_module}[holder], name, fail)
    if where == "Target.features":  # which loading calls as well
        monkeypatch.undo()
        original = run_module.load_targets

        def load(plan, loaded):
            targets = original(plan, loaded)
            monkeypatch.setattr(Target, "features", fail)
            return targets

        monkeypatch.setattr(run_module, "load_targets", load)
    config = tiny_run("full", **LARGE)
    who = {"Replica.step": "drafter 0", "Target.features": "target 0", "make_replicas": "the run"}[where]
    saves = r"[a-z_]+\.[a-z_]+=[a-z\d]+ saves about \d+\.\d\d GiB"
    with pytest.raises(UserError, match=rf"{who} ran out of memory on cpu{asked} \({saves}(; {saves})*\)$"):
        train(config)


def test_what_is_said_to_be_saved_is_the_difference_of_two_plans(tiny_run) -> None:
    config = tiny_run("plan", **LARGE)
    plan = make_plan(config)
    (device,) = plan.topology.devices
    ways = dict(savings(plan, device))
    assert {"rows.anchors=300", "rows.length=640", "objective.chunk=4096"} <= set(ways)
    assert list(ways.values()) == sorted(ways.values(), reverse=True)
    for way, saved in ways.items():
        section, name, value = re.fullmatch(r"(\w+)\.(\w+)=(\w+)", way).groups()
        old = getattr(config, section)
        changed = type(old).model_validate({**old.model_dump(), name: {"true": True}.get(value, value)})
        lowered = config.model_copy(update={section: changed})
        totals = [
            estimate_memory(
                each,
                plan.topology,
                plan.geometry,
                plan.spec,
                plan.parameters,
                plan.dtype,
                plan.target_dtype,
                plan.attention,
            )[0].total
            for each in (config, lowered)
        ]
        assert totals[0] - totals[1] == saved > 0
    assert "drafter 3 ran out of memory on cpu (" in str(explain(plan, MemoryError(), "drafter 3", device))


def test_a_full_host_of_a_run_on_gpus_is_another_matter(tiny_run) -> None:
    cards = Topology((torch.device("cuda", 0),), (torch.device("cuda", 1),), "as configured")
    plan = dataclasses.replace(make_plan(tiny_run("host")), topology=cards)
    error = explain(plan, MemoryError(), "prefetch 1", torch.device("cpu"))
    assert str(error).startswith(
        "pipeline: prefetch 1 ran out of memory on cpu (lower pipeline.prefetch or pipeline.que"
    )


def test_other_errors_are_not_taken_for_full_memory() -> None:
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"))


# -- workers that raise --------------------------------------------------------------------------------------------


class Broken(RuntimeError):
    """Ours, and nobody else's."""


@pytest.mark.parametrize("at", [1, 14])
@pytest.mark.parametrize("role", ["prefetch", "target", "drafter", "warm-up", "saver", "update"])
def test_whoever_raises_nothing_is_left(tiny_run, tmp_path, monkeypatch, role: str, at: int) -> None:
    """At its first call and later: the cause comes out, no thread of the run lives on, no temporary file."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    owner, name = {
        "prefetch": (assemble, "make_draft_batch"),
        "target": (Target, "features"),
        "drafter": (Replica, "step"),
        "warm-up": (Compiling, "warm_up"),
        "saver": (run_module, "save_checkpoint"),
        "update": (ReplicaUpdate, "apply"),
    }[role]
    at = {"warm-up": min(at, 2), "saver": min(at, 2), "update": at}.get(role, at)
    calls = [0]

    def arm() -> None:
        original = getattr(owner, name)

        def fail(*arguments, **named):
            calls[0] += 1
            if calls[0] == at:
                raise Broken(role)
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, fail)

    if role == "target":
        original_load = run_module.load_targets

        def load(plan, loaded):
            targets = original_load(plan, loaded)
            arm()
            return targets

        monkeypatch.setattr(run_module, "load_targets", load)
    else:
        arm()
    before = set(threading.enumerate())
    config = tiny_run(
        "broken",
        data={"cache": "off"},
        pipeline={"targets": ["cpu"] * 2, "drafters": ["cpu"] * 2, "prefetch": 2},
        training={"steps": 16, "save_every": 1},
    )
    with pytest.raises(Broken, match=role):
        train(config)
    wait_for_the_end_of_threads(before)
    gc.collect()  # the temporary tables live as long as the data that the exception's frames hold
    assert [path.name for path in scratch.iterdir()] == []
    (last,) = [event for event in read_events(Path(config.training.output) / "events.jsonl") if event["kind"] == "end"]
    assert last["reason"] == "failed"


def test_a_fault_of_the_main_thread_ends_the_workers(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    check = HangWatch.check

    def fail(self, done: int, **named):
        if done >= 2:
            raise Broken("watching")
        return check(self, done, **named)

    monkeypatch.setattr(HangWatch, "check", fail)
    before = set(threading.enumerate())
    with pytest.raises(Broken):
        train(tiny_run("watched", training={"steps": 5000, "save_every": 0, "eval_rows": 0}))
    wait_for_the_end_of_threads(before)


def wait_for_the_end_of_threads(before: set[threading.Thread]) -> None:
    """They leave after the row that they are at."""
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [thread.name for thread in set(threading.enumerate()) - before] == []


def children() -> set[str]:
    """Processes that this one started and that are there still."""
    return set(" ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_the_process_that_decodes_ends_with_a_run_that_fails(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    before, step, seen = children(), Replica.step, set()

    def fail_once_it_is_there(self, *arguments, **named):
        deadline = time.monotonic() + 60
        if list((Path(config.training.output) / "checkpoints").glob("step-*")):
            while not (started := children() - before) and time.monotonic() < deadline:
                time.sleep(0.02)
            seen.update(started)
            raise Broken("behind the first checkpoint")
        return step(self, *arguments, **named)

    monkeypatch.setattr(Replica, "step", fail_once_it_is_there)
    config = tiny_run("decoding", decoding={"every": 1}, training={"steps": 500, "save_every": 1, "eval_rows": 2})
    with pytest.raises(Broken):
        train(config)
    assert seen
    deadline = time.monotonic() + 60
    while children() & seen and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not children() & seen


def test_a_second_interrupt_ends_the_run_at_once(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a row that takes long: nothing is saved, no thread lives on."""
    step, request, kept, calls = Replica.step, Progress.request_end, supervise._kept, [0]
    first, second = threading.Event(), threading.Event()

    def hear_first(self, reason, **named):
        request(self, reason, **named)
        first.set()

    def hear_second(progress):
        second.set()
        return kept(progress)

    def slow(self, *arguments, **named):
        calls[0] += 1
        if calls[0] == 8:
            for heard in (first, second):
                _thread.interrupt_main()
                assert heard.wait(60)
        return step(self, *arguments, **named)

    monkeypatch.setattr(Progress, "request_end", hear_first)
    monkeypatch.setattr(supervise, "_kept", hear_second)
    monkeypatch.setattr(Replica, "step", slow)
    before = set(threading.enumerate())
    config = tiny_run("twice", training={"steps": 5000, "save_every": 0, "eval_rows": 0})
    with pytest.raises(KeyboardInterrupt, match=r"^interrupted twice, at step \d: nothing was saved$"):
        train(config)
    assert not list((Path(config.training.output) / "checkpoints").glob("step-*"))
    wait_for_the_end_of_threads(before)
