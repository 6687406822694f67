"""What exceptions say, in one line."""

from __future__ import annotations

import pytest

from draftsmith.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("\n connection closed \n  at line 3"), "connection closed "),
        (RuntimeError(" \n"), "RuntimeError"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_the_first_line_of_what_an_exception_says(error: Exception, line: str) -> None:
    assert first_line(error) == line
