"""Turns of the warm-up, what they say, and the ledger that they leave."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from draftsmith.compiled import Entry, Ledger, NotCompiled, Region, WarmUp
from draftsmith.compiled.warmup import Turn


def wave(x):
    return (x.sin() * x).sum()


def leaf(size=8):
    return torch.ones(size, requires_grad=True)


def test_equal_workers_load_what_the_first_compiled(gate, tmp_path):
    """Two turns of equal regions: graphs of the second all come from the cache; seconds add up to the compile's."""
    ledger, told = Ledger(gate, path=tmp_path / "ledger.json"), []
    warm = WarmUp(gate, ledger, devices=["cpu"] * 3, tell=lambda text, figures: told.append(text))
    for index in range(3):
        region = Region(f"drafter {index}", wave, gate=gate, device="cpu")
        warm.turn(f"drafter {index}", "cpu", [region], lambda r=region: r(leaf()).backward(), lambda: "")
    warm.finish("error")
    assert gate.straight
    assert [turn.graphs for turn in warm.turns] == [2, 2, 2]
    assert [turn.hits for turn in warm.turns[1:]] == [2, 2]
    for turn in warm.turns:
        assert turn.traced + turn.compiled + turn.loaded <= turn.seconds + 0.05
        assert turn.verified
    assert told[0].startswith("drafter 0 on cpu: traced ")
    assert told[0].endswith("of 2, verified")
    assert told[1].startswith("3 equal workers: about ")
    assert "from cache 2 of 2, verified" in told[2]
    assert len(told) == 5  # a prediction after the first and the second turn

    content = json.loads((tmp_path / "ledger.json").read_text())
    assert [(e["region"], e["direction"], e["cache"]) for e in content["entries"][2:]] == [
        ("drafter 1", "forward", "hit"),
        ("drafter 1", "backward", "hit"),
        ("drafter 2", "forward", "hit"),
        ("drafter 2", "backward", "hit"),
    ]
    assert len({e["key"] for e in content["entries"]}) == 2
    assert all(e["file"].endswith(e["key"]) for e in content["entries"])
    assert content["recompiles"] == []
    assert len(ledger.table()) == 7


def test_prediction_knows_that_another_device_compiles_again(gate):
    def turn(device: str, compiled: float) -> Turn:
        return Turn("drafter", device, 4.0 + compiled, 2.0, compiled, 0.0, 3, 0, 1.0, True)

    warm = WarmUp(gate, Ledger(gate), devices=["cuda:0", "cuda:1", "cuda:0", "cuda:2"])
    warm.turns.append(turn("cuda:0", 20.0))
    # 25 a new device, of which there are two more; the second worker on cuda:0 loads in a tenth of the compiling.
    assert warm.predicted() == pytest.approx(25 + 25 + (4 + 2 + 1) + 25)
    warm.turns.append(turn("cuda:1", 10.0))
    assert warm.predicted() == pytest.approx(25 + 15 + 7 + 20)
    warm.turns.append(turn("cuda:0", 0.0))
    assert warm.predicted() == pytest.approx(25 + 15 + 5 + 20)


def test_an_eager_region_is_in_the_ledger_by_name(gate):
    ledger = Ledger(gate)
    ledger.watch([Region("drafter 0", wave, gate=gate, device="cpu", enabled=False, why_eager="dense on cpu, by name")])
    assert [entry.how for entry in ledger.entries()] == ["eager: dense on cpu, by name"]
    assert "eager: dense on cpu, by name" in ledger.table()[1]


def test_what_was_compiled_without_a_region_can_be_noted(gate):
    ledger = Ledger(gate)
    ledger.note(Entry("update 0", "cuda:0", "forward", "compiled", compiled=1.25, key="Triton"))
    assert [entry["region"] for entry in ledger.to_json()["entries"]] == ["update 0"]
    assert ledger.table()[1].split() == ["update", "0", "cuda:0", "forward", "-", "1.25", "-", "none", "?", "Triton"]


def test_a_late_compile_under_warn_is_a_recompile_with_its_reason(gate):
    region = Region("drafter 0", wave, gate=gate, backend="aot_eager")
    ledger = Ledger(gate)
    WarmUp(gate, ledger, devices=["cpu"]).turn("drafter 0", "", [region], lambda: region(leaf(4)).backward())
    gate.seal("warn")
    with pytest.warns(UserWarning, match="after the warm-up"):
        region(leaf(5))
    (late,) = ledger.to_json()["recompiles"]
    assert late["late"] is True
    assert "expected 4, actual 5" in late["reason"]


def test_graph_breaks_are_each_regions_own(gate):
    """Dynamo counts them for the whole process."""

    def broken(x):
        x = x.sin()
        torch._dynamo.graph_break()
        return wave(x)

    ledger = Ledger(gate)
    regions = [
        Region("one break", broken, gate=gate, fullgraph=False),
        Region("no break", wave, gate=gate, fullgraph=False),
        Region("another break", broken, gate=gate, fullgraph=False, backend="aot_eager"),
        Region("whole", wave, gate=gate, backend="aot_eager"),
    ]
    ledger.watch(regions)
    for region in regions:
        region(torch.ones(3))
    breaks: dict[str, list[int | None]] = {}
    for entry in ledger.entries():
        breaks.setdefault(entry.region, []).append(entry.graph_breaks)
    assert {name: sum(found) for name, found in breaks.items()} == {
        "one break": 1,
        "no break": 0,
        "another break": 1,
        "whole": 0,
    }


def test_a_compile_that_failed_in_silence_is_no_warm_up(gate):
    """`suppress_errors` turns what a backend raises into an eager call."""

    def fails(_graph, _inputs):
        raise ValueError("no kernel for this")

    region = Region("suppressed", wave, gate=gate, fullgraph=False, backend=fails)
    warm = WarmUp(gate, Ledger(gate), devices=["cpu"])
    with (
        torch._dynamo.config.patch(suppress_errors=True),
        pytest.raises(NotCompiled, match="region 'suppressed' ran, but nothing was compiled"),
    ):
        warm.turn("drafter 0", "cpu", [region], lambda: region(leaf()).backward())


def test_a_step_that_compiles_every_time_is_no_warm_up(gate):
    region, sizes = Region("drafter 0", wave, gate=gate, backend="aot_eager"), iter(range(4, 99))
    with pytest.raises(NotCompiled, match=r"compiled again: drafter 0 \(forward\).*expected 4, actual 5"):
        WarmUp(gate, Ledger(gate), ["cpu"]).turn("drafter 0", "cpu", [region], lambda: region(leaf(next(sizes))))


def test_a_warm_up_whose_numbers_are_wrong_says_what_differs(gate):
    region = Region("drafter 0", wave, gate=gate, backend="aot_eager")
    with pytest.raises(NotCompiled, match=r"drafter 0 on cpu: differs by 0\.3"):
        WarmUp(gate, Ledger(gate), ["cpu"]).turn(
            "drafter 0", "cpu", [region], lambda: region(leaf()), lambda: "differs by 0.3"
        )


def test_two_regions_of_one_name_are_refused(gate):
    """Nobody could say which of them a compile belongs to."""
    one, other = (Region("worker", torch.sin, gate=gate, backend="eager") for _ in range(2))
    ledger = Ledger(gate)
    ledger.watch([one])
    ledger.watch([one])
    with pytest.raises(ValueError, match="two regions are named 'worker'"):
        ledger.watch([other])


def test_a_ledger_is_there_whole_or_as_it_was(gate, tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "ledger.json"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            Ledger(gate, path=path).write()
    assert [path.read_text() for path in tmp_path.glob("*") if path.is_file()] == ["old"]
    Ledger(gate, path=path).write()
    assert json.loads(path.read_text())["version"] == 1
