"""Tokenised files on disk: found again by content alone, never stale, safe under two processes and a killed one."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_tokenizer import CHATML, LLAMA3, THINKING, build_tokenizer

from draftsmith.config import DataConfig, DataSource
from draftsmith.data import tables
from draftsmith.data.corpus import Corpus, make_tokeniser, prepare_corpus
from draftsmith.data.places import find_files
from draftsmith.data.tables import TableCache, TokenTable, fingerprint_tokenizer
from draftsmith.errors import UserError

HERE = Path(__file__).parent


@pytest.fixture
def cache_folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def write(path: Path, count: int = 6, word: str = "answer") -> Path:
    lines = [
        {"messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"{word} {i}"}]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def table_of(path: Path, folder: Path, tokenizer: Any = None, stop_ids: tuple[int, ...] = (), **how: Any) -> TokenTable:
    source = {name: how.pop(name) for name in ("layout", "columns", "weight") if name in how}
    data = DataConfig(train=(DataSource(path=str(path), **source),), cache=str(folder), **how)  # type: ignore[call-arg]
    tokeniser = make_tokeniser(data, tokenizer or build_tokenizer(), stop_ids)
    return TableCache(data.cache, tokeniser).table(find_files(data.train)[0])


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Conversations that were really tokenised, batch by batch."""
    calls: list[int] = []
    real = tables.Tokeniser.__call__
    monkeypatch.setattr(tables.Tokeniser, "__call__", lambda self, batch: calls.append(len(batch)) or real(self, batch))
    return calls


def test_a_file_is_tokenised_once_whatever_it_is_called(
    tmp_path: Path, cache_folder: Path, counting: list[int]
) -> None:
    first = table_of(write(tmp_path / "a.jsonl"), cache_folder)
    again = table_of(write(tmp_path / "b.jsonl"), cache_folder)
    assert counting == [6]
    assert (again.folder, again.digest, again.facts) == (first.folder, first.digest, first.facts)
    assert np.array_equal(again.tokens, first.tokens)
    assert np.array_equal(again.mask, first.mask)
    assert first.facts["layouts"] == {"messages": 6}
    assert not any(".new-" in path.name for path in cache_folder.iterdir())


def test_everything_that_decides_the_tokens_decides_the_table(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl")
    template = tmp_path / "t.jinja"
    template.write_text(CHATML.replace("assistant\n", "assistant\n\n"))
    more = build_tokenizer()
    more.add_tokens(["question"])
    folders = {
        "plain": table_of(path, cache_folder).folder,
        "other template": table_of(path, cache_folder, build_tokenizer(THINKING)).folder,
        "template file": table_of(path, cache_folder, chat_template=str(template)).folder,
        "options": table_of(path, cache_folder, template_options={"enable_thinking": True}).folder,
        "stop ids": table_of(path, cache_folder, stop_ids=(3,)).folder,
        "added token": table_of(path, cache_folder, more).folder,
        "end token": table_of(path, cache_folder, build_tokenizer(eos="</s>")).folder,
        "layout": table_of(path, cache_folder, layout="messages").folder,
        "content": table_of(write(tmp_path / "b.jsonl", word="other"), cache_folder).folder,
    }
    dated = build_tokenizer("{% set now = strftime_now %}" + CHATML)
    for day in ("2026-01-01", "2026-01-02"):
        monkeypatch.setattr(time, "strftime", lambda _format, day=day: day)
        folders[f"a template with a date, {day}"] = table_of(path, cache_folder, dated).folder
    monkeypatch.setattr(tables, "version", lambda _name: "9")
    folders["versions"] = table_of(path, cache_folder).folder
    assert len(set(folders.values())) == len(folders), folders


def test_what_does_not_decide_the_tokens_finds_the_table(
    tmp_path: Path, cache_folder: Path, counting: list[int]
) -> None:
    path = write(tmp_path / "a.jsonl")
    for how in ({}, {"weight": 2.0}, {"too_long": "skip"}, {"held_out_share": 0.3}, {"pack": "off"}):
        table_of(path, cache_folder, **how)
    table_of(path, cache_folder, build_tokenizer())
    assert counting == [6]
    # Rows of another length and block size come from the same tokens; a new file tokenises only itself.
    data = DataConfig(train=(str(path), str(write(tmp_path / "b.jsonl", 3, "b"))), cache=str(cache_folder))  # type: ignore[call-arg]
    for length in (64, 128):
        prepare_corpus(data, build_tokenizer(), length=length, seed=0, block_size=4)
    assert counting == [6, 3]


def test_a_file_that_changes_under_the_same_name_and_time_is_seen(tmp_path: Path, cache_folder: Path) -> None:
    path = write(tmp_path / "a.jsonl", word="answer")
    before = path.stat()
    first = table_of(path, cache_folder)
    write(path, word="Answer")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert table_of(path, cache_folder).digest != first.digest


@pytest.mark.parametrize("damage", ["tokens", "mask", "documents.npz", "table.json"])
def test_a_damaged_table_is_made_again(tmp_path: Path, cache_folder: Path, counting: list[int], damage: str) -> None:
    path = write(tmp_path / "a.jsonl")
    first = table_of(path, cache_folder)
    digest, broken = first.digest, first.folder / damage
    for content in (broken.read_bytes()[:-3], b"", b"[1]", b"null", None):
        broken.unlink() if content is None else broken.write_bytes(content)
        assert table_of(path, cache_folder).digest == digest
    assert counting == [6] * 6


def test_a_broken_file_leaves_nothing_behind(tmp_path: Path, cache_folder: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "one"}, {"text": ')
    with pytest.raises(UserError, match=r"a\.json:2: not valid JSON"):
        table_of(path, cache_folder)
    assert [entry.suffix for entry in cache_folder.iterdir()] == [".lock"]


def test_every_module_that_makes_a_table_is_part_of_its_name() -> None:
    """All that the writer of tables imports from this room, directly or through others, except what cuts rows."""
    import ast

    import draftsmith.data as room

    folder = Path(room.__file__).parent
    seen: set[str] = set()
    waiting = ["conversations", "template"]
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            found = node.module if isinstance(node, ast.ImportFrom) else None
            if found and found.startswith("draftsmith.data."):
                waiting += {found.rpartition(".")[2]} - seen - {"places"}  # which finds files, and reads none
    hashed = {module.__name__.rpartition(".")[2] for module in tables._SOURCES}
    assert hashed == seen


def test_a_file_that_is_written_while_it_is_read_is_read_again(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its hash and its reading another content comes; what is found later must be of its own content."""
    path = write(tmp_path / "a.jsonl", word="old")
    read, writes = tables.read_file, [1]

    def late(file: Any) -> Any:
        if writes[0]:
            writes[0] -= 1
            write(path, word=f"new{writes[0]}")
        return read(file)

    monkeypatch.setattr(tables, "read_file", late)
    table = table_of(path, cache_folder)
    assert table.facts["key"] == table.folder.name
    monkeypatch.setattr(tables, "read_file", read)
    expected = table_of(path, tmp_path / "fresh")
    assert (table.folder.name, table.digest) == (expected.folder.name, expected.digest)
    write(path, word="old")
    assert table_of(path, cache_folder).digest != table.digest
    path.write_text(path.read_text() + path.read_text())
    writes[0] = 10**6
    monkeypatch.setattr(tables, "read_file", late)
    with pytest.raises(UserError, match=r"a\.jsonl: changes while it is read"):
        table_of(path, cache_folder)
    assert not [entry for entry in cache_folder.iterdir() if ".new-" in entry.name]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    refused = r"the cache of tokenised data cannot be written: .*data\.cache to another"
    with pytest.raises(UserError, match=refused):
        table_of(write(tmp_path / "a.jsonl"), tmp_path / "file" / "cache")

    def no_locks(_descriptor: int, _kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)  # as some network file systems do
    with pytest.raises(UserError, match=refused):
        table_of(write(tmp_path / "a.jsonl"), tmp_path / "cache")


def test_off_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counting: list[int]) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    path = write(tmp_path / "a.jsonl", 30)
    data = DataConfig(train=str(path), cache="off")  # type: ignore[arg-type, call-arg]

    def prepare() -> Corpus:
        return prepare_corpus(data, build_tokenizer(), length=64, seed=0, block_size=4)

    corpus = prepare()
    folders = list((tmp_path / "tmp").iterdir())
    assert len(folders) == 1
    assert corpus.train.row(0).real_tokens > 0
    assert list(corpus.report.incidents) == []
    del corpus
    assert list((tmp_path / "tmp").iterdir()) == []
    prepare()
    assert counting == [30, 30]


CHILD = """
import sys, time
sys.path.insert(0, {here!r})
from pathlib import Path
from toy_tokenizer import build_tokenizer
from test_tables import table_of
from draftsmith.data import tables
tables._BATCH = 50
real = tables.Tokeniser.__call__
def slow(self, batch):
    print("batch", flush=True)
    time.sleep(0.02)
    return real(self, batch)
tables.Tokeniser.__call__ = slow
print("ready", flush=True)
sys.stdin.readline()
print(table_of(Path(sys.argv[1]), Path(sys.argv[2])).digest, flush=True)
"""


def child(path: Path, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD.format(here=str(HERE)), str(path), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_processes_and_a_killed_one_share_one_table(
    tmp_path: Path, cache_folder: Path, counting: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_BATCH", 50)
    path = write(tmp_path / "a.jsonl", 400)
    killed, other = child(path, cache_folder), child(path, cache_folder)

    def says(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    def go(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    assert [says(killed), says(other)] == ["ready\n"] * 2
    go(killed)
    assert says(killed) == "batch\n"  # it is in the middle of the file, and holds the lock
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert any(".new-" in entry.name for entry in cache_folder.iterdir())
    go(other)
    ours = table_of(path, cache_folder).digest  # at the same time
    output = other.communicate()[0].split()
    assert other.returncode == 0
    # One of the two tokenised all eight batches, the other none; both have the table, and what the dead one left is
    # gone.
    assert sorted([output.count("batch"), len(counting)]) == [0, 8]
    assert output[-1] == ours
    assert not any(".new-" in entry.name for entry in cache_folder.iterdir())


def test_a_tokenizer_is_known_by_what_it_does(tmp_path: Path) -> None:
    first = build_tokenizer()
    assert fingerprint_tokenizer(build_tokenizer(LLAMA3)) == fingerprint_tokenizer(first)  # the template counts apart
    first(["a", "bb"], truncation=True, max_length=1)
    assert fingerprint_tokenizer(first) == fingerprint_tokenizer(build_tokenizer())
    first.add_tokens(["more"])
    assert fingerprint_tokenizer(first) != fingerprint_tokenizer(build_tokenizer())

    class Slow:
        """Without a backend that can be asked: known by the files it saves."""

        special_tokens_map: dict[str, str] = {}  # noqa: RUF012
        all_special_ids: list[int] = []  # noqa: RUF012

        def __init__(self, words: str) -> None:
            self.words = words

        def save_pretrained(self, folder: str) -> None:
            Path(folder, "vocab.txt").write_text(self.words)

    assert fingerprint_tokenizer(Slow("a")) == fingerprint_tokenizer(Slow("a")) != fingerprint_tokenizer(Slow("b"))
