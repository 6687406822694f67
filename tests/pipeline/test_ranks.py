"""Ranks: how rows and devices are dealt, and real runs of several processes over gloo."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.errors import UserError
from draftsmith.objective import Sums
from draftsmith.observe.events import read_events
from draftsmith.pipeline.jobs import JobSequence
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.plan import make_plan
from draftsmith.pipeline.ranks import Note, Ranks, agree_on_start
from draftsmith.pipeline.run import train
from draftsmith.pipeline.seat import Seat, slice_of
from draftsmith.pipeline.starting import run_log
from draftsmith.pipeline.sync import Exchange, exchange_line

SCRIPT = Path(__file__).parents[2] / "scripts" / "ranks_show.py"
FAULTS = Path(__file__).with_name("rank_faults.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
pytestmark = pytest.mark.timeout(900)  # dozens of processes, one after the other


@pytest.mark.parametrize(("rows", "ranks", "evals"), [(6, 2, 3), (7, 3, 1), (4, 4, 2), (5, 1, 0)])
def test_every_row_belongs_to_one_rank_and_numbers_have_no_gaps(rows: int, ranks: int, evals: int) -> None:
    whole = JobSequence(5, rows, 2, evals)
    parts = [JobSequence(5, rows, 2, evals, rank, ranks) for rank in range(ranks)]
    for update in range(5):
        for learn in (True, False):
            dealt = [job for part in parts for job in part.of_update(update)[0 if learn else 1]]
            assert sorted(job.row for job in dealt) == [job.row for job in whole.of_update(update)[0 if learn else 1]]
    for part in parts:
        jobs = list(part.jobs(0))
        assert [job.number for job in jobs] == list(range(len(jobs)))
        for start in range(5):
            assert list(part.jobs(start)) == [job for job in jobs if job.update >= start]
            assert part.first_number(start) == next((job.number for job in jobs if job.update >= start), len(jobs))


def test_the_seat_is_what_torchrun_says() -> None:
    assert Seat.read({}) == Seat()
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Seat.read(given) == Seat(5, 8, 1, 4)
    given |= {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert Seat.read(given) == Seat(5, 8, 1, 4, restarts=2, launched=True)
    assert Seat.read({"WORLD_SIZE": "1"}) == Seat.read({"RANK": "0"}) == Seat()
    with pytest.raises(UserError, match="WORLD_SIZE is 2 and RANK is not set"):
        Seat.read({"WORLD_SIZE": "2"})
    with pytest.raises(UserError, match="RANK is 1 and WORLD_SIZE is not set"):
        Seat.read({"RANK": "1"})
    with pytest.raises(UserError, match="must be numbers"):
        Seat.read({"RANK": "first", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("names", "local_world", "per_rank", "slices"),
    [
        ("0123", 2, None, ["01", "23"]),
        ("4567", 4, None, ["4", "5", "6", "7"]),
        ("01234", 2, None, ["01", "23"]),  # the last one is idle
        ("0123", 2, 1, ["0", "1"]),
        ("0", 2, None, ["0", "0"]),  # shared
    ],
)
def test_each_rank_has_its_own_devices(names: str, local_world: int, per_rank: int | None, slices: list[str]) -> None:
    found = [slice_of(list(names), rank, local_world, per_rank) for rank in range(local_world)]
    assert ["".join(own) for own, _ in found] == slices
    assert ("shared" in found[0][1]) == (len(names) < local_world)
    assert ("belong to no rank" in found[0][1]) == (len(names) > local_world * len(slices[0]) and len(names) > 1)


def test_more_devices_for_each_rank_than_there_are_is_said() -> None:
    with pytest.raises(UserError, match=r"2 ranks of 3 devices need 6; this machine has 4 \(use 2"):
        slice_of(list("0123"), 0, 2, 3)


def test_a_note_comes_back_as_it_was() -> None:
    for note in (Note(), Note(2**40, 1.25, 3, "terminated", True), Note(1, 0.0, 1, "τ " * 60)):
        data = note.pack()
        assert len(data) == 128
        back = Note.unpack(data)
        assert replace(back, end="") == replace(note, end="")
        assert back.end == note.end or (len(back.end) > 50 and note.end.startswith(back.end))


def test_a_start_is_not_taken_for_an_earlier_one() -> None:
    """Three starts through one store, as torchrun's outlives them; the ranks come one after the other."""
    store, names = torch.distributed.HashStore(), []
    for _ in range(3):
        found: list[str] = [""] * 3

        def arrive(rank: int, found: list[str] = found) -> None:
            found[rank] = agree_on_start(store, rank, 3, 60.0)

        threads = [threading.Thread(target=arrive, args=(rank,)) for rank in (1, 0, 2)]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        assert found[0] == found[1] == found[2]
        names.append(found[0])
    assert len(set(names)) == 3
    with pytest.raises(RuntimeError, match="not all were there"):
        agree_on_start(torch.distributed.HashStore(), 0, 2, 0.1)


def test_alone_everything_is_answered_at_once() -> None:
    with Ranks() as ranks:
        assert ranks.writes
        assert ranks.gather(3) == [3]
        assert ranks.in_turn(lambda: 4) == 4
        assert ranks.post(Note(5))() == [Note(5)]
        assert ranks.across(0) is None
        with pytest.raises(UserError, match="mine"):
            ranks.together(lambda: (_ for _ in ()).throw(UserError("mine")))


def test_what_nccl_says_when_it_is_aborted_is_told_once(tiny_run, capsys: pytest.CaptureFixture[str]) -> None:
    """In the log while there is one, else on stderr; the groups behind it are let go all the same."""

    class Group:
        def __init__(self, error: str = "") -> None:
            self.error, self.aborted = error, 0

        def abort(self) -> None:
            self.aborted += 1
            if self.error:
                raise RuntimeError(self.error)

    config = tiny_run("told")
    ranks = Ranks()
    groups = [Group("unhandled cuda error\nand a trace"), Group()]
    ranks._to_let_go = list(groups)  # type: ignore[arg-type]
    line = "rank 0: NCCL could not be aborted (unhandled cuda error): a device may wait until the end"
    with run_log(config, ranks, False, None) as (folder, _):
        ranks._let_go()
        ranks._let_go()
    assert [group.aborted for group in groups] == [1, 1]
    told = [event for event in read_events(folder / "events.jsonl") if event["kind"] == "notice"]
    assert [event["text"] for event in told] == [line]
    assert line not in capsys.readouterr().err
    ranks._to_let_go = list(groups)  # type: ignore[arg-type]
    ranks._let_go()
    assert capsys.readouterr().err == f"draftsmith: {line}\n"


def test_sums_cross_before_anything_is_divided() -> None:
    """An exchange whose other rank brings the same again: loss and Σ w double, the update stays what it was."""

    class Update:
        device = torch.device("cpu")

        def reduce(self, replicas: Any, weight: torch.Tensor, across: Any) -> torch.Tensor:
            gradient = torch.tensor([3.0, 4.0])
            if across is not None:
                across(gradient)
            self.gradient = gradient / weight
            return self.gradient.square().sum()

        def apply(self, norm: torch.Tensor, lr_factor: float) -> None: ...

        def refresh(self, replicas: Any) -> None: ...

    found = []
    for across in (lambda _index: None, lambda _index: lambda values: values.mul_(2.0)):
        update = Update()
        total, norm = Exchange([update], Stop(), across).update(0, Sums(torch.tensor([6.0, 2.0, 1.0, 0, 0, 0])), 1.0)  # type: ignore[list-item]
        found.append((total.values[:2].tolist(), update.gradient.tolist(), float(norm)))
    assert found[0] == ([6.0, 2.0], [1.5, 2.0], 2.5)
    assert found[1] == ([12.0, 4.0], [1.5, 2.0], 2.5)


def test_what_an_update_moves_is_in_the_plan(tiny_run) -> None:
    assert exchange_line(10**9, 2, 1, 1, "NCCL") == ""
    assert "3.0 GB into each of 2 drafters" in exchange_line(10**9, 2, 2, 1, "NCCL")
    line = exchange_line(10**9, 2, 2, 4, "NCCL")
    assert "3.0 GB out of and into each drafter over 4 ranks by NCCL (120 ms over PCIe" in line
    config = tiny_run("plan", pipeline={"targets": ["cpu"], "drafters": ["cpu"] * 2})
    lines = make_plan(config, rank=1, ranks=2).lines()
    assert "ranks     this is 1 of 2, with 3 rows of every update" in lines
    assert any(line.startswith("exchange  per update") for line in lines)
    assert any("3 is not a multiple of 2 drafters: 25 %" in line for line in lines)
    with pytest.raises(UserError, match="rank 3 of 4 gets 1, for 2 drafters"):
        make_plan(config, rank=3, ranks=4)


def test_a_checkpoint_knows_nothing_of_targets_and_drafters(tiny_run) -> None:
    whole = train(tiny_run("whole", pipeline={"prefetch": 1}))
    parts = tiny_run("parts", pipeline={"targets": ["cpu"] * 2, "drafters": ["cpu"] * 3})
    train(parts)
    shutil.rmtree(Path(parts.training.output) / "checkpoints" / "step-0000004")
    wide = {**parts.model_dump()["pipeline"], "targets": ["cpu"], "drafters": ["cpu"] * 2}
    other = tiny_run("parts", pipeline=wide)
    resumed = train(other, resume=True)
    assert resumed.step == 4
    torch.testing.assert_close(torch.tensor(resumed.losses), torch.tensor(whole.losses[2:]), rtol=0, atol=2e-5)


def test_topologies_agree_and_a_killed_run_goes_on(tiny_target: Path, tiny_chats: Path) -> None:
    """The script that shows it, kept short: see its docstring for what is compared."""
    command = [sys.executable, str(SCRIPT), "--steps", "12", "--few", "4", "--quick", "--json"]
    result = subprocess.run(
        [*command, "--target", str(tiny_target), "--data", str(tiny_chats)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)["found"]
    ways = [each["way"] for each in found if "way" in each]
    assert len(ways) == 8
    assert all(each["largest_difference"] < 2e-5 for each in found if "way" in each)
    assert [each["rerun_identical"] for each in found if "rerun_identical" in each] == [True]
    killed = next(each for each in found if "killed" in each)
    assert killed["seconds"] < 60


@pytest.fixture(scope="module")
def faults(tiny_target: Path, tiny_chats: Path) -> dict[str, Any]:
    """Everything that goes wrong in one rank, one case after the other."""
    cases = ["user_error_in_one", "bug_in_one", "config_that_is_wrong", "other_settings", "signal_to_one"]
    cases += ["standing_still", "killed_in_the_warm_up", "target_that_hangs", "interrupted_early"]
    command = [sys.executable, str(FAULTS), str(tiny_target), str(tiny_chats), *cases]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def complaints(case: dict[str, Any]) -> list[list[str]]:
    """The lines of each rank with which the command refuses."""
    return [[line for line in said.splitlines() if line.startswith("draftsmith: ")] for said in case["said"]]


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("user_error_in_one", "draftsmith: rank 1: here: a row of mine is odd"),
        ("bug_in_one", "draftsmith: rank 1: RuntimeError: boom"),
        ("config_that_is_wrong", "unknown key 'pipeline.prefetsch'"),
        ("other_settings", "rank 1 has another config than rank 0"),
    ],
)
def test_what_is_wrong_is_said_once_and_ends_all(faults: dict[str, Any], case: str, line: str) -> None:
    first, second = complaints(faults[case])
    assert len(first) == 1
    assert line in first[0]
    assert second == []
    assert 0 not in faults[case]["codes"]
    assert ("Traceback" in faults[case]["said"][1]) == (case == "bug_in_one")


def test_a_signal_to_one_rank_ends_all_after_the_same_update(faults: dict[str, Any]) -> None:
    case = faults["signal_to_one"]
    assert case["codes"] == [143, 143]
    assert case["checkpoints"] == [[f"step-{case['steps'][0]:07d}"]]
    assert complaints(case) == [[], []]


def test_an_early_interrupt_of_all_ranks_is_one_line(faults: dict[str, Any]) -> None:
    case = faults["interrupted_early"]
    assert case["codes"] == [130, 130]
    assert complaints(case) == [["draftsmith: interrupted"], []]
    assert not any("Traceback" in said for said in case["said"])


@pytest.mark.parametrize("name", ["standing_still", "killed_in_the_warm_up"])
def test_a_rank_that_is_lost_is_named(faults: dict[str, Any], name: str) -> None:
    case = faults[name]
    assert case["codes"] == [2, -signal.SIGKILL]
    assert "lost rank 1" in complaints(case)[0][0]


def test_a_hang_in_one_rank_is_named_with_its_rank(faults: dict[str, Any]) -> None:
    case = faults["target_that_hangs"]
    assert 0 not in case["codes"]
    first, second = complaints(case)
    assert len(first) == 1
    assert second == []
    assert "rank 1: " in first[0]
    assert "target 0 is busy" in first[0]


def test_under_torchrun_a_refusal_is_heard(tiny_run, tmp_path: Path) -> None:
    """torchrun ends rank 0 as soon as rank 1 has left, which knows just as early and has nothing to say."""
    config = tiny_run("run", training={"steps": 2, "rows_per_update": 2})
    path = tmp_path / "run.yaml"
    path.write_text(config.model_dump_json())
    folder = Path(config.training.output)
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("not a run")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "draftsmith", "train", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if line.startswith("draftsmith: ")]
    assert said == [f"draftsmith: {folder}: is not empty and holds no run (choose another training.output)"]


DIES_ONCE = """
import os, signal, sys, time
from pathlib import Path
from draftsmith.cli import main
from draftsmith.training.step import Replica

config, folder = sys.argv[1:]
step, rows = Replica.step, []

def dies_once(*arguments, **named):
    rows.append(1)
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], len(rows)) == ("1", "0", 60):
        deadline = time.monotonic() + 100
        while not list(Path(folder, "checkpoints").glob("step-*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*arguments, **named)

Replica.step = dies_once
sys.exit(main(["train", config]))
"""


def test_torchrun_starts_a_run_that_lost_a_rank_again(tiny_run, tmp_path: Path) -> None:
    """Rank 1 is killed behind the first checkpoint; torchrun starts both again, and they go on from there unasked."""
    settings = {"steps": 200, "save_every": 20, "rows_per_update": 2, "eval_every": 0, "eval_rows": 0}
    config = tiny_run("run", training=settings, drafter={"layers": 1}, rows={"length": 64, "anchors": 4})
    path = tmp_path / "run.yaml"
    path.write_text(config.model_dump_json())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (tmp_path / "dies_once.py").write_text(DIES_ONCE)
    command = [*torchrun, "--max-restarts", "1", str(tmp_path / "dies_once.py"), str(path), config.training.output]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    assert "lost rank 1" in done.stderr
    events = Path(config.training.output) / "events.jsonl"
    starts = [event["step"] for event in read_events(events) if event["kind"] == "run"]
    assert len(starts) == 2
    assert starts[1] > 0
    assert starts[1] % 20 == 0
    last = [event for event in read_events(events) if event["kind"] == "end"][-1]
    assert (last["reason"], last["step"]) == ("all steps done", 200)
    workers = [event["workers"] for event in read_events(events) if event["kind"] == "vitals"][-1]
    assert {"drafter 0", "drafter 0 of rank 1", "target 0 of rank 1"} <= workers.keys()
