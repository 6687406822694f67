"""Every format and compression gives the same records, and broken files one clear line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest
from pyarrow import parquet

from draftsmith.data import formats
from draftsmith.data.conversations import read_conversations
from draftsmith.data.formats import read_records
from draftsmith.errors import UserError

CHAT = [{"role": "user", "content": "Hi Æ\u2028"}, {"role": "assistant", "content": "Hello"}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
RECORDS: list[dict[str, Any]] = [
    {"messages": CHAT, "score": 1.5},
    {"messages": [CHAT[0], CALL, {"role": "tool", "content": "2"}, CHAT[1]], "score": 0.5},
    {"messages": CHAT * 40, "score": 2.5},
]


def lines(records: list[Any]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def zstandard(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def write_parquet(path: Path, records: list[Any]) -> None:
    parquet.write_table(pa.Table.from_pylist(records), path, row_group_size=2)


def write_arrow_stream(path: Path, records: list[Any]) -> None:
    table = pa.Table.from_pylist(records)
    with ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_arrow_file(path: Path, records: list[Any]) -> None:
    table = pa.Table.from_pylist(records)
    with ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def bytes_by(make: Callable[[list[Any]], bytes]) -> Callable[[Path, list[Any]], None]:
    return lambda path, records: path.write_bytes(make(records)) and None


WRITERS: dict[str, Callable[[Path, list[Any]], None]] = {
    "a.jsonl": bytes_by(lines),
    "lines.json": bytes_by(lines),
    "no_suffix": bytes_by(lines),
    "array.json": bytes_by(lambda records: json.dumps(records).encode()),
    "indented.json": bytes_by(lambda records: json.dumps(records, indent=2).encode("utf-8-sig")),
    "wrapped.json": bytes_by(lambda records: json.dumps({"version": 1, "data": records}, indent=2).encode()),
    "wrapped_on_one_line.json": bytes_by(lambda records: json.dumps({"data": records}).encode() + b"\n\n"),
    "a.jsonl.gz": bytes_by(lambda records: gzip.compress(lines(records))),
    "a.jsonl.bz2": bytes_by(lambda records: bz2.compress(lines(records))),
    "a.jsonl.xz": bytes_by(lambda records: lzma.compress(lines(records))),
    "a.jsonl.zst": bytes_by(lambda records: zstandard(lines(records))),
    "array.json.gz": bytes_by(lambda records: gzip.compress(json.dumps(records).encode())),
    "a.parquet": write_parquet,
    "stream.arrow": write_arrow_stream,
    "file.arrow": write_arrow_file,
    "misnamed.bin": write_parquet,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_conversations(tmp_path: Path, name: str) -> None:
    plain, path = tmp_path / "plain.jsonl", tmp_path / name
    plain.write_bytes(lines(RECORDS))
    WRITERS[name](path, RECORDS)
    expected, found = list(read_conversations([plain])), list(read_conversations([path]))
    assert [c.source for c in found] == [f"{path}:{number}" for number in (1, 2, 3)]
    assert [(c.messages, c.tools) for c in found] == [(c.messages, c.tools) for c in expected]
    assert [c.key() for c in found] == [c.key() for c in expected]


def test_only_columns_of_text_are_decoded(tmp_path: Path) -> None:
    records = [{"text": "x", "vector": [0.5] * 4, "n": 3, "meta": {"id": 1}, "tags": ["a"]}]
    write_parquet(tmp_path / "a.parquet", records)
    assert [value for _, value in read_records(tmp_path / "a.parquet", "a")] == [{"text": "x", "tags": ["a"]}]


def test_bare_message_lists_are_lines_and_other_lists_are_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(lines([CHAT, CHAT]))
    assert [(number, len(value)) for number, value in read_records(path, "a.json")] == [(1, 2), (2, 2)]
    path.write_text(json.dumps([CHAT, CHAT, {"text": "x"}, "y"], indent=1))
    assert [number for number, _ in read_records(path, "a.json")] == [1, 2, 3, 4]
    assert [c.text for c in read_conversations([path])] == [None, None, "x", "y"]


def test_an_array_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"text": "é" * length, "n": [{"m": "}],["}]} for length in (0, 5, 300, 1, 70)]
    path = tmp_path / "a.json"
    for indent in (None, 1):
        path.write_text(json.dumps(records, indent=indent, ensure_ascii=False), encoding="utf-8")
        for chunk in (1, 7, 64, 1 << 20):
            monkeypatch.setattr(formats, "_CHUNK", chunk)
            assert [value for _, value in read_records(path, "a.json")] == records
    monkeypatch.setattr(formats, "_CHUNK", 16)
    path.write_text('[{"text": "x"}, {"text": "y"')
    read = read_records(path, "a.json")
    assert next(read).value == {"text": "x"}
    with pytest.raises(UserError, match=r"a\.json:2: not valid JSON: .* in element 2 of the array"):
        next(read)
    path.write_bytes(b'[{"text": "' + b"\xff" + b'"}]')
    with pytest.raises(UserError, match=r"a\.json:1: not UTF-8"):
        list(read_records(path, "a.json"))


def test_a_pretty_object_is_one_record_or_holds_them(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"messages": CHAT, "tags": [{"x": 1}]}, indent=2))
    assert [value for _, value in read_records(path, "a.json")] == [{"messages": CHAT, "tags": [{"x": 1}]}]
    path.write_text('{\n "messages": [\n')
    with pytest.raises(UserError, match=r"a\.json:1: not valid JSON"):
        list(read_records(path, "a.json"))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.jsonl.zst", "a.parquet", "file.arrow"])
def test_a_file_that_was_cut_off_is_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](path, [{"text": f"{i * i * 7919}"} for i in range(30_000)])
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match="cannot be read: ") as caught:
        list(read_records(path, name))
    assert caught.value.where.startswith(name)
    assert "\n" not in str(caught.value)


def test_without_pyarrow_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    write_parquet(tmp_path / "a.parquet", RECORDS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"parquet files need the package pyarrow \(pip install pyarrow\)"):
        list(read_records(tmp_path / "a.parquet", "a.parquet"))
