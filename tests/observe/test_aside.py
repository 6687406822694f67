"""Files that are written aside: whole or not at all, nothing left behind, and no two writers in one file."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.observe import report
from draftsmith.observe.aside import asides, written_aside
from draftsmith.observe.events import EventLog
from draftsmith.observe.report import write_report
from draftsmith.observe.trace import write_trace


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)


def test_a_file_takes_its_place_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with written_aside(path) as file:
        file.write("new")
        assert path.read_text() == "old"
        assert asides(path) == [aside for aside in tmp_path.iterdir() if aside != path] != []
        assert asides(tmp_path / "b.txt") == asides(tmp_path / "txt") == []
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "new"
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_on_an_error_the_old_file_stays_alone(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write() -> None:
        with written_aside(path) as file:
            file.write("half")
            raise error

    with pytest.raises(error):
        write()
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("folder", ["/", "", ".."])
def test_what_can_only_be_a_folder_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with pytest.raises(OSError, match=r"Is a directory|busy"), written_aside(Path(folder)) as file:
        file.write("new")
    assert [each.name for each in tmp_path.rglob("*")] == ["a"]


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with written_aside(path) as last:
        last.write("last, ")
        with written_aside(path) as first:
            first.write("first")
        assert path.read_text() == "first"
        last.write("whole")
    assert path.read_text() == "last, whole"
    assert asides(path) == []


@pytest.mark.parametrize("name", ["report.html", "trace.json"])
def test_a_full_disk_leaves_the_report_or_trace_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("step", step=1, loss=2.0)
        log.write("work", worker="target 0", row=1, start=1.0, end=2.0)
    (tmp_path / name).write_text("old")
    before = sorted(tmp_path.iterdir())
    fill_disk(monkeypatch)
    monkeypatch.setattr(report, "make_report", lambda *_: "new")
    write: Any = write_trace if name == "trace.json" else lambda folder, output: write_report([folder], output)
    with pytest.raises(UserError, match="cannot be written: No space left"):
        write(tmp_path, tmp_path / name)
    assert (tmp_path / name).read_text() == "old"
    assert sorted(tmp_path.iterdir()) == before


def test_a_trace_holds_halves_of_letters(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        '{"time": 1.0, "kind": "work", "worker": "target \\ud800", "row": 1, "start": 1.0, "end": 2.0}\n'
    )
    assert write_trace(tmp_path, tmp_path / "trace.json")["slices"] == 1
    assert "target ?" in (tmp_path / "trace.json").read_text(encoding="utf-8")
