"""Errors that a user can mend.

`UserError` is the only exception that the command line turns into one line and exit code 2. Everything else that
escapes is a fault of ours and keeps its traceback; invariants inside the code are `assert` statements. Scripts beside
the command line do the same by `run_script`.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NoReturn


class UserError(Exception):
    """Wrong input. Says what is wrong, where it is and what to do about it, in one line.

    Args:
        what: what is wrong ("row 17 is not valid JSON").
        where: file, line, config key or device; empty when there is no place to name.
        fix: what the user can do ("quote the string, or pass --skip-broken").

    Attributes:
        told: another process of the same run says it; this one ends without a word.
    """

    told = False

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = " ".join(str(what).split())
        self.where = " ".join(str(where).split())
        self.fix = " ".join(str(fix).split())
        super().__init__(str(self))

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        remedy = f" ({self.fix})" if self.fix else ""
        return f"{place}{self.what}{remedy}"


def first_of(names: Sequence[str], most: int = 5) -> str:
    """What to tell of many names: the first ones, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def reason_of(error: Exception) -> str:
    """Why a file could not be had, without its path, which the line names already."""
    return getattr(error, "strerror", None) or str(error)


def first_line(error: BaseException) -> str:
    """What an exception says, without what follows in further lines; its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def at_home(path: str) -> str:
    """A path with a leading `~` or `~user` put in full: what stands in a config was seen by no shell.

    Raises:
        UserError: it is empty, or there is no such user.
    """
    if not path:
        raise UserError("an empty path", fix="name a file or a folder")
    full = os.path.expanduser(path)
    if full.startswith("~"):
        raise UserError("no such user's home", where=path, fix="give the path in full, or begin it with ./")
    return full


def what_is_at(path: str | Path) -> Literal["file", "folder"] | None:
    """What a path leads to; whatever is no folder is a file. None: nothing is there.

    Raises:
        UserError: nobody may look, for one because a folder on the way may not be entered, or its name is too long.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        raise UserError(f"cannot be looked at: {reason_of(error)}", where=str(path)) from None
    return "folder" if stat.S_ISDIR(mode) else "file"


def need_file(path: str | Path, what: str, fix: str = "") -> None:
    """Raises UserError if `path` is no file that can be read; opens nothing, so pipes keep what is in them.

    Args:
        path: of the file.
        what: it should be ("prompt file").
        fix: what the user can do.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise UserError(f"no such {what}", where=str(path), fix=fix) from None
    except OSError as error:
        raise UserError(f"cannot be read: {reason_of(error)}", where=str(path)) from None
    if stat.S_ISDIR(mode):
        raise UserError(f"is a folder, not a {what}", where=str(path), fix=fix)


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Runs a script and ends the process with its exit code; a user error is one line on stderr and code 2."""
    try:
        code = main()
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        code = 2
    sys.exit(code or 0)
