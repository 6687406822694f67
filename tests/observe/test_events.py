"""The event log: what is written is read back, torn lines are skipped, a full disk does not stop a run."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from draftsmith.errors import UserError
from draftsmith.observe.events import EventLog, read_events


def test_events_come_back_in_order(tmp_path: Path) -> None:
    with EventLog(tmp_path / "run" / "events.jsonl") as log:
        log.write("run", config=Path("a/b.yaml"), devices=("cpu", "cpu"))
        log.write("step", step=1, loss=float("nan"), accept_by_slot=[1.0, 0.5], text="τ ✓")
    first, second = read_events(tmp_path / "run" / "events.jsonl")
    assert (first["kind"], first["config"], first["devices"]) == ("run", "a/b.yaml", ["cpu", "cpu"])
    assert second["loss"] == "nan"  # strict JSON has no word for it
    assert second["accept_by_slot"] == [1.0, 0.5]
    assert second["text"] == "τ ✓"
    assert first["time"] <= second["time"]


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e.jsonl") as log:
        log.write("step", step=1, loss=float("inf"), nested={"values": [float("-inf"), 1]})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    lines = (tmp_path / "e.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse)["nested"] for line in lines] == [{"values": ["-inf", 1]}]


def test_tensors_become_lists_and_strangers_are_our_bug(tmp_path: Path) -> None:
    import torch

    with EventLog(tmp_path / "e.jsonl") as log:
        log.write("step", step=1, accept=torch.tensor([0.5, 0.25]), loss=torch.tensor(2.0))
        with pytest.raises(TypeError, match="cannot hold object"):
            log.write("step", step=2, loss=object())
    (event,) = read_events(tmp_path / "e.jsonl")
    assert event["accept"] == [0.5, 0.25]
    assert event["loss"] == 2.0


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_last_line_is_skipped_and_closed_by_the_next_writer(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "e.jsonl"
    with EventLog(path) as log:
        log.write("step", step=1)
        log.write("step", step=2, text="ü" * 20)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])  # also cuts through the two bytes of a letter
    before = [event["step"] for event in read_events(path)]
    assert before == ([1, 2] if cut == 1 else [1])  # without its newline alone, a line still parses
    with EventLog(path) as log:
        log.write("step", step=3)
    assert [event["step"] for event in read_events(path)] == [*before, 3]


def test_lines_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    seen: list[int] = []
    log = EventLog(tmp_path / "e.jsonl", [lambda event: seen.append(event["number"])])

    def work(worker: int) -> None:
        for number in range(200):
            log.write("count", worker=worker, number=worker * 1000 + number, text="x" * 300)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    numbers = [event["number"] for event in read_events(tmp_path / "e.jsonl")]
    assert sorted(numbers) == sorted(worker * 1000 + number for worker in range(8) for number in range(200))
    assert seen == numbers  # listeners see the order of the file


def test_a_full_disk_loses_events_but_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    log = EventLog(tmp_path / "e.jsonl", [lambda event: seen.append(event["step"])])
    log.write("step", step=1)
    real_write = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def nearly_full(descriptor: int, data: bytes) -> int:
        return real_write(descriptor, data[:7])

    for step, write in ((2, full), (3, nearly_full)):
        monkeypatch.setattr(os, "write", write)
        log.write("step", step=step)
    assert log.lost == 2
    monkeypatch.setattr(os, "write", real_write)
    log.write("step", step=4)
    log.close()
    kinds = [(event["kind"], event.get("step", event.get("text"))) for event in read_events(tmp_path / "e.jsonl")]
    assert kinds == [("step", 1), ("notice", "2 events could not be written"), ("step", 4)]
    assert seen == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("No space left") == 1


def test_a_failing_listener_is_dropped_and_named(tmp_path: Path) -> None:
    calls: list[str] = []

    def broken(event: dict[str, object]) -> None:
        calls.append(str(event["kind"]))
        raise ValueError("no terminal")

    with EventLog(tmp_path / "e.jsonl", [broken]) as log:
        log.write("step", step=1)
        log.write("step", step=2)
    assert calls == ["step"]
    texts = [event["text"] for event in read_events(tmp_path / "e.jsonl") if event["kind"] == "notice"]
    assert texts == ["a listener failed and was dropped: ValueError: no terminal"]


def test_an_unwritable_log_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(UserError, match=r"e\.jsonl: events cannot be written: Read-only file system"):
        EventLog(tmp_path / "e.jsonl")


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        list(read_events(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="cannot be read"):
        list(read_events(tmp_path))
