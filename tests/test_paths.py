"""Paths that nobody may look at, homes that nobody has, names that are empty: one line each, wherever given."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.cli import main
from draftsmith.cli_options import target_config
from draftsmith.config import load_config, parse_config
from draftsmith.data.corpus import read_template
from draftsmith.data.places import find_files
from draftsmith.errors import UserError, what_is_at
from draftsmith.export.hub import fetch
from draftsmith.observe.run_folder import next_free

TOO_LONG = "x" * 300  # what `Path.exists` answers with an OSError, as it does behind a folder that may not be entered
MINIMAL = {"target": {"path": "a"}, "data": {"train": "b"}}


def test_what_is_at_a_path(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert what_is_at(file) == what_is_at("/dev/null") == "file"
    assert what_is_at(tmp_path) == "folder"
    assert what_is_at(tmp_path / "nothing") is what_is_at(file / "below") is None
    with pytest.raises(UserError, match=r"x: cannot be looked at: File name too long$"):
        what_is_at(TOO_LONG)
    with pytest.raises(UserError, match="null byte"):
        what_is_at("a\0b")


@pytest.mark.parametrize(
    "command",
    [
        ["status", TOO_LONG],
        ["watch", TOO_LONG],
        ["report", TOO_LONG],
        ["report", TOO_LONG, "--trace", "trace.json"],
        ["init", "demo", "chats.jsonl", "-o", TOO_LONG],
        ["init", "demo", TOO_LONG, "-o", "new.yaml"],
        ["init", TOO_LONG, "chats.jsonl", "-o", "new.yaml"],
        ["demo", "--output", TOO_LONG],
        ["chat", TOO_LONG, "--target", "demo", "--prompt", "hello"],
        ["export", TOO_LONG, "out"],
        ["import", TOO_LONG, "out"],
    ],
    ids=" ".join,
)
def test_a_path_that_nobody_may_look_at_is_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text('{"text": "hello"}\n')
    assert main(command) == 2
    assert "x: cannot be looked at: File name too long" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]


def test_a_config_knows_the_users_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell replaces the ~ of a YAML file, nor that of training.output=~/runs."""
    monkeypatch.setenv("HOME", "/home/me")
    config = parse_config(
        {
            "target": {"path": "~/t", "features": "~/f"},
            "data": {"train": ["~/a*.jsonl", {"path": "~/b"}], "chat_template": "~/c", "cache": "~/d"},
            "drafter": {"init": "~/i"},
            "training": {"output": "~/o"},
            "decoding": {"prompts": "~/p"},
        }
    )
    entries = [str(getattr(entry, "path", entry)) for entry in config.data.train]
    given = [config.target.path, config.target.features, *entries, config.data.chat_template, config.data.cache]
    given += [config.drafter.init, config.training.output, config.decoding.prompts]
    assert given == [f"/home/me/{name}" for name in ("t", "f", "a*.jsonl", "b", "c", "d", "i", "o", "p")]
    for path, said in (("~nobody-has-this-name/x", "no such user's home"), ("", "empty")):
        for key in ("target.path", "training.output"):
            section, name = key.split(".")
            with pytest.raises(UserError, match=f"{key}: .*{said}"):
                parse_config({**MINIMAL, section: {name: path}})
        with pytest.raises(UserError, match=f"^--target: .*{said}"):
            target_config(path)
        with pytest.raises(UserError, match=said):
            fetch(path)


@pytest.mark.parametrize("key", ["training.output", "drafter.init", "data.cache", "data.chat_template"])
def test_an_empty_path_is_not_none(key: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("target: {path: a}\ndata: {train: b}\n")
    with pytest.raises(UserError, match=f"{key}: .*Input should not be empty"):
        load_config(file, [f"{key}="])


def test_data_without_a_name() -> None:
    with pytest.raises(UserError, match="an empty name"):
        find_files([""])


def test_an_empty_template_is_not_the_tokenizers_own(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(" \n")
    with pytest.raises(UserError, match=r"template.jinja: an empty chat template"):
        read_template(file)
    with pytest.raises(UserError, match=r"^\S+: cannot be read: Is a directory$"):
        read_template(tmp_path)


def test_words_and_lists_of_a_config(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("target: {path: a}\ndata: {train: b, cache: off}\n")  # to YAML 1.1 a boolean
    assert load_config(file).data.cache == "off"
    with pytest.raises(UserError, match=r"key 'optimizer.betas.1' is missing"):
        load_config(file, ["optimizer.betas=[0.9]"])


def test_the_next_free_folder(tmp_path: Path) -> None:
    assert next_free(tmp_path / "a") == tmp_path / "a"
    (tmp_path / "a").mkdir()
    assert next_free(tmp_path / "a") == tmp_path / "a"
    (tmp_path / "a" / "file").touch()
    (tmp_path / "a-2").touch()
    assert next_free(tmp_path / "a") == tmp_path / "a-3"


def test_a_row_beside_a_conversation_would_do_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "preview", "run.yaml", "--row", "0", "--conversation", "chats.jsonl:1"]) == 2
    assert "--conversation names the row: --row would do nothing" in capsys.readouterr().err
