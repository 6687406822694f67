"""Which files an entry means: patterns, folders of datasets with splits and subsets, the hub's cache, stdin."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest

from draftsmith.config import DataSource
from draftsmith.data import places
from draftsmith.data.conversations import read_conversations
from draftsmith.data.places import find_files
from draftsmith.errors import UserError


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "x"}\n')
    return folder


def names(folder: Path, **how: str) -> list[str]:
    found = find_files([DataSource(path=str(folder), **how)])  # type: ignore[arg-type]
    return [str(file.path.relative_to(folder)) for file in found]


def test_patterns_are_sorted_and_keep_their_entry(tmp_path: Path) -> None:
    touch(tmp_path, "b.jsonl", "a.jsonl", "c.txt", "sub/d.jsonl")
    entry = DataSource(path=f"{tmp_path}/*.jsonl", weight=2)  # type: ignore[call-arg]
    found = find_files([entry, tmp_path / "c.txt"])
    assert [file.path.name for file in found] == ["a.jsonl", "b.jsonl", "c.txt"]
    assert [file.entry.weight for file in found] == [2, 2, 1]
    assert [file.path.name for file in find_files([f"{tmp_path}/**/d.jsonl"])] == ["d.jsonl"]


def test_a_folder_without_splits_is_read_whole(tmp_path: Path) -> None:
    touch(tmp_path, "b/x.jsonl.gz", "a.jsonl", ".hidden/c.jsonl", "_old/d.jsonl", "readme.txt", "dataset_info.json")
    assert names(tmp_path) == ["a.jsonl", "b/x.jsonl.gz"]
    with pytest.raises(UserError, match=r"has no split 'test' \(it has train\)"):
        names(tmp_path, split="test")


def test_splits_by_name_and_train_by_default(tmp_path: Path) -> None:
    touch(
        tmp_path, "data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-0.jsonl", "val.json"
    )
    assert names(tmp_path) == ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]
    assert names(tmp_path, split="test") == ["data/test-0.jsonl"]
    assert names(tmp_path, split="validation") == ["val.json"]
    only = touch(tmp_path / "only", "test/a.jsonl")
    assert names(only) == ["test/a.jsonl"]
    two = touch(tmp_path / "two", "en/train.jsonl", "de/train.jsonl", "de/test.jsonl")
    assert names(two, subset="de") == ["de/train.jsonl"]
    with pytest.raises(UserError, match=r"has no subset 'fr' \(it has de, en\)"):
        names(two, subset="fr")


@pytest.mark.parametrize("part", ["split", "subset"])
def test_a_file_has_no_parts(tmp_path: Path, part: str) -> None:
    touch(tmp_path, "a.jsonl", "b.jsonl")
    for path in (f"{tmp_path}/a.jsonl", f"{tmp_path}/*.jsonl", "-"):
        with pytest.raises(UserError, match=rf"has no {part}s \(leave {part} out\)"):
            find_files([DataSource(path=path, **{part: "nope"})])  # type: ignore[arg-type]


def test_what_save_to_disk_wrote_has_its_own_split_and_no_subsets(tmp_path: Path) -> None:
    touch(tmp_path, "data-0.arrow")
    state = {"_data_files": [{"filename": "data-0.arrow"}], "_split": "validation"}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert names(tmp_path) == names(tmp_path, split="validation") == ["data-0.arrow"]
    with pytest.raises(UserError, match=r"has no split 'test' \(it has validation\)"):
        names(tmp_path, split="test")
    with pytest.raises(UserError, match=r"has no subsets \(leave subset out\)"):
        names(tmp_path, subset="en")


def test_the_readme_decides_where_it_says_something(tmp_path: Path) -> None:
    touch(tmp_path, "x/1.jsonl", "x/2.jsonl", "y/3.jsonl", "other.jsonl")
    readme = (
        "---\nlicense: mit\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: x/*.jsonl\n"
        "  - split: test\n    path: [y/3.jsonl]\n- config_name: all\n  data_files: '**/*.jsonl'\n---\n# A dataset\n"
    )
    (tmp_path / "README.md").write_text(readme)
    assert names(tmp_path) == ["x/1.jsonl", "x/2.jsonl"]
    assert names(tmp_path, split="test") == ["y/3.jsonl"]
    assert sorted(names(tmp_path, subset="all")) == ["other.jsonl", "x/1.jsonl", "x/2.jsonl", "y/3.jsonl"]
    with pytest.raises(UserError, match=r"has no subset 'none' \(it has default, all\)"):
        names(tmp_path, subset="none")
    (tmp_path / "README.md").write_text(readme.replace("x/*", "gone/*"))
    with pytest.raises(UserError, match="its README names files of the split 'train' that are not there"):
        names(tmp_path)


def test_what_save_to_disk_writes(tmp_path: Path) -> None:
    """The layout of a saved DatasetDict: a folder per split, arrow streams named in state.json."""
    for split, count in (("train", 2), ("test", 1)):
        folder = tmp_path / split
        folder.mkdir()
        parts = [f"data-{i:05d}-of-{count:05d}.arrow" for i in range(count)]
        for part in parts:
            table = pa.Table.from_pylist([{"messages": [{"role": "user", "content": f"{split} {part}"}]}])
            with ipc.new_stream(str(folder / part), table.schema) as writer:
                writer.write_table(table)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": part} for part in parts]}))
        (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert names(tmp_path) == ["train/data-00000-of-00002.arrow", "train/data-00001-of-00002.arrow"]
    assert names(tmp_path, split="test") == ["test/data-00000-of-00001.arrow"]
    assert len(list(read_conversations([tmp_path]))) == 2
    with pytest.raises(UserError, match=r"has no split 'dev' \(it has train, test\)"):
        names(tmp_path, split="dev")


def test_a_dataset_of_the_hub_is_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    cache = tmp_path / "hub" / "datasets--smiths--chats"
    touch(cache / "snapshots" / "0123abc", "data/train.jsonl", "data/test.jsonl")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for name in ("smiths/chats", "hf://datasets/smiths/chats"):
        assert [c.source for c in read_conversations([name])] == [f"{name}/data/train.jsonl:1"]
    with pytest.raises(UserError, match="smiths/none: no such file here, and not to be had from the hub"):
        find_files(["smiths/none"])
    with pytest.raises(UserError, match=r"smiths/none\.jsonl: no such data file"):
        list(read_conversations(["smiths/none.jsonl"]))


def test_stdin_is_read_once_and_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_stdin", None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "one"}\n{"text": "two"}\n')))
    for _ in range(2):
        assert [(c.source, c.text) for c in read_conversations(["-"])] == [("stdin:1", "one"), ("stdin:2", "two")]

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(places, "_stdin", None)
    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(UserError, match="stdin: nothing is piped in"):
        list(read_conversations(["-"]))
