"""An output that work goes on in: one process at a time, and what fails beside it keeps its own name."""

from __future__ import annotations

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
