"""An output that work goes on in: one process at a time, and what fails beside it keeps its own name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from draftsmith.decode.resumable import open_output
from draftsmith.errors import UserError


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), BlockingIOError(11, "try again")])
def test_what_fails_while_it_is_open_is_not_the_files_fault(tmp_path: Path, error: OSError) -> None:
    """A terminal that is gone, say."""
    with pytest.raises(type(error)) as raised, open_output(tmp_path / "out.jsonl", {}):
        raise error
    assert raised.value is error


def test_a_second_process_is_refused_and_a_later_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_output(path, {"work": 1}) as lines:
        lines.append({"prompt_index": 3})
        with pytest.raises(UserError, match="another process is writing it"), open_output(path, {"work": 1}):
            pass
    with open_output(path, {"work": 1}) as lines:
        assert lines.done == {3}


def test_an_output_without_a_line_is_free_for_other_work(tmp_path: Path) -> None:
    """Whoever opened it was refused before anything was done; nothing is lost."""
    path, meta = tmp_path / "out.jsonl", tmp_path / "out.jsonl.meta.json"
    path.touch()  # by hand
    with open_output(path, {"work": 1}):
        pass
    with open_output(path, {"work": 2}, noted={"server": "b"}) as lines:
        assert json.loads(meta.read_text()) == {"work": 2, "server": "b"}
        lines.append({"prompt_index": 3})
    with pytest.raises(UserError, match=r"holds other work \(work 2 there, 1 here\)"), open_output(path, {"work": 1}):
        pass
    assert path.read_text() == '{"prompt_index": 3}\n'
    with open_output(path, {"work": 2}) as lines:
        lines.drop()
        assert lines.done == set()


@pytest.mark.parametrize("content", ["no JSON", '{"precious": 1}', "[]"])
def test_what_lies_in_the_way_of_its_facts_is_somebodys(tmp_path: Path, content: str) -> None:
    meta = tmp_path / "out.jsonl.meta.json"
    meta.write_text(content)
    with (
        pytest.raises(UserError, match=r"out\.jsonl\.meta\.json: (was not written here|cannot be understood)"),
        open_output(tmp_path / "out.jsonl", {"work": 1}),
    ):
        pass
    assert meta.read_text() == content


@pytest.mark.parametrize("content", ["mine", " ", "\n"])
def test_whatever_is_in_a_file_is_somebodys(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match="is not the output of this work"), open_output(path, {"work": 1}):
        pass
    (tmp_path / "out.jsonl.meta.json").write_text('{"work": 2}')
    with pytest.raises(UserError, match="holds other work"), open_output(path, {"work": 1}):
        pass
    assert path.read_text() == content


def test_a_pipe_has_no_size_that_says_that_it_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is not the output of this work"), open_output(tmp_path / "pipe", {}):
        pass
