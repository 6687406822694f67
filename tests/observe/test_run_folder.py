"""Run folders: nothing is overwritten, one process at a time, every refusal in one line."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from draftsmith.config import RunConfig, parse_config
from draftsmith.errors import UserError
from draftsmith.observe import lock
from draftsmith.observe.run_folder import check_run_folder, next_free, open_run_folder


def config(output: Path, **drafter: Any) -> RunConfig:
    return parse_config(
        {
            "target": {"path": "demo"},
            "data": {"train": "a.jsonl"},
            "drafter": drafter,
            "training": {"output": str(output)},
        }
    )


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def test_create_then_resume(tmp_path: Path) -> None:
    with open_run_folder(config(tmp_path / "deep" / "run")) as folder:
        assert folder.path.is_dir()
        content = json.loads((folder.path / "run.json").read_text())
        assert content["fingerprint"] == config(tmp_path).fingerprint()
    before = snapshot(tmp_path)
    with open_run_folder(config(tmp_path / "deep" / "run"), resume=True) as folder:
        assert folder.events.parent == folder.path
    assert snapshot(tmp_path) == before


def test_a_moved_folder_is_still_the_same_run(tmp_path: Path) -> None:
    open_run_folder(config(tmp_path / "a")).close()
    (tmp_path / "a").rename(tmp_path / "b")
    open_run_folder(config(tmp_path / "b"), resume=True).close()


def test_a_different_run_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    open_run_folder(config(tmp_path / "run", layers=5)).close()
    before = snapshot(tmp_path)
    for resume in (False, True):
        with pytest.raises(UserError, match=r"different run \(drafter\.layers 5 there, 4 here\)"):
            open_run_folder(config(tmp_path / "run", layers=4), resume=resume)
    assert snapshot(tmp_path) == before


def test_only_what_may_not_differ_is_named(tmp_path: Path) -> None:
    """Not what a run may be resumed with, though it differs too; a key that the run's version did not have is at its
    default."""
    given = config(tmp_path / "run")
    open_run_folder(given).close()
    file = tmp_path / "run" / "run.json"
    content = json.loads(file.read_text())
    del content["config"]["compile"]["flex_backend"], content["config"]["optimizer"]["decay"]
    file.write_text(json.dumps(content))
    changed = given.model_dump(mode="json")
    changed["training"] |= {"eval_every": 3, "save_every": 4, "keep": 9, "steps": 7}
    changed["compile"] |= {"flex_backend": "flash", "evidence": "warn"}
    changed["decoding"]["every"] = 5
    with pytest.raises(UserError, match=r"different run \(training\.steps none there, 7 here\)"):
        open_run_folder(parse_config(changed), resume=True)


def test_the_same_run_needs_resume(tmp_path: Path) -> None:
    open_run_folder(config(tmp_path / "run")).close()
    for attempt in (open_run_folder, check_run_folder):
        with pytest.raises(UserError, match="--resume"):
            attempt(config(tmp_path / "run"))


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run here to resume"):
        open_run_folder(config(tmp_path / "run"), resume=True)
    check_run_folder(config(tmp_path / "run"))
    assert not (tmp_path / "run").exists()  # checking writes nothing


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not empty and holds no run"):
        open_run_folder(config(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="is a file"):
        open_run_folder(config(tmp_path / "thesis.tex"))


def test_a_folder_may_hold_the_runs_own_config_and_data(tmp_path: Path) -> None:
    (tmp_path / "run" / "data").mkdir(parents=True)
    (tmp_path / "run" / "data" / "answers.jsonl").write_text("{}\n")
    (tmp_path / "run" / "config.yaml").write_text("target: demo\n")
    before = snapshot(tmp_path)
    open_run_folder(config(tmp_path / "run")).close()
    assert {name: content for name, content in snapshot(tmp_path).items() if "run.json" not in name} == before


def test_a_crash_before_run_json_leaves_a_usable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            open_run_folder(config(tmp_path / "run"))
    open_run_folder(config(tmp_path / "run")).close()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"fingerprint": 3, "config": {}}'])
def test_a_broken_run_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError, match=r"run\.json: cannot be understood"):
        open_run_folder(config(tmp_path), resume=True)
    assert (tmp_path / "run.json").read_text() == content


def test_two_holders_are_refused_also_across_processes(tmp_path: Path) -> None:
    with open_run_folder(config(tmp_path / "run")):
        with pytest.raises(UserError, match=f"in use by another process \\(pid {os.getpid()}\\)"):
            open_run_folder(config(tmp_path / "run"), resume=True)
        code = (
            "import sys; from draftsmith.config import RunConfig; from draftsmith.errors import UserError\n"
            "from draftsmith.observe.run_folder import open_run_folder\n"
            "try: open_run_folder(RunConfig.model_validate_json(sys.argv[1]), resume=True)\n"
            "except UserError as error: print(error)"
        )
        argument = config(tmp_path / "run").model_dump_json()
        result = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, check=True)
        assert f"in use by another process (pid {os.getpid()})" in result.stdout
    open_run_folder(config(tmp_path / "run"), resume=True).close()


@pytest.mark.parametrize(
    ("module", "function", "code"),
    [
        (Path, "mkdir", errno.EROFS),
        (os, "open", errno.EACCES),
        (os, "replace", errno.ENOSPC),
        (lock.fcntl, "flock", errno.ENOLCK),
        (os, "fsync", errno.EIO),
    ],
)
def test_an_unwritable_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object, function: str, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(module, function, fail)
        with pytest.raises(UserError) as caught:
            open_run_folder(config(tmp_path / "run"))
    assert os.strerror(code) in str(caught.value)
    assert str(tmp_path / "run") in str(caught.value)
    open_run_folder(config(tmp_path / "run")).close()  # nothing is left locked or half made


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("file", "is a file, not a run folder"),
        ("file/run", "Not a directory"),
        ("/proc/run", "Permission denied"),
        ("/sys/deep/run", "Permission denied|Read-only file system"),
        ("locked/deep/run", "Permission denied"),
        ("read-only/run", "Read-only file system"),
    ],
)
def test_what_cannot_be_made_is_found_without_making_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, said: str
) -> None:
    (tmp_path / "file").touch()
    for name in ("locked", "read-only"):
        (tmp_path / name).mkdir()
    may, look = os.access, os.statvfs
    # Who runs the tests may be root, who may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "locked" and may(path, mode))
    flags = types.SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda path: flags if Path(path) == tmp_path / "read-only" else look(path))
    for attempt in (check_run_folder, open_run_folder):
        with pytest.raises(UserError, match=said):
            attempt(config(tmp_path / output))
    assert sorted(item.name for item in tmp_path.rglob("*")) == ["file", "locked", "read-only"]


def test_next_free(tmp_path: Path) -> None:
    assert next_free(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    assert next_free(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo" / "result.json").touch()
    (tmp_path / "demo-2").touch()
    assert next_free(tmp_path / "demo") == tmp_path / "demo-3"


def test_a_run_that_never_began_leaves_its_folder_free(tmp_path: Path) -> None:
    output = tmp_path / "run"
    (output / "data").mkdir(parents=True)
    (output / "data" / "answers.jsonl").write_text("{}")
    with open_run_folder(config(output)) as folder:
        (folder.path / "events.jsonl").write_text("{}\n")
        folder.tensorboard.mkdir()
        folder.discard()
    assert sorted(path.name for path in output.iterdir() if path.name != lock.LOCK_FILE) == ["data"]
    assert (output / "data" / "answers.jsonl").exists(), "what was there before stays"
    with open_run_folder(config(output)):
        pass


def test_what_a_killed_start_left_is_no_run_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".run.json.0123abcd.new").write_text('{"finger')
    check_run_folder(config(folder))
    open_run_folder(config(folder)).close()
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "run.json"]


def test_a_start_on_a_full_disk_leaves_the_folder_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left"):
            open_run_folder(config(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
    open_run_folder(config(tmp_path / "run")).close()
