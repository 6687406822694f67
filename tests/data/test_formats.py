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


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize(
    ("text", "read", "message"),
    [
        ('[{"text": "x"}, {"text": "y"}]\n[{"text": "z"}]', 2, r"a\.json:2: not valid JSON: there is more behind the"),
        (
            '[{"text": "x"}] end',
            1,
            r"a\.json:1: .* behind the array of 1 elements \(one array a file, or JSON lin",
        ),
        ("[] []", 0, r"a\.json: not valid JSON: there is more behind the array of 0 elements"),
        ('[{"text": "x"} {"text": "y"}]', 1, r"a\.json:2: not valid JSON: no comma between elements 1 and 2"),
        (
            f'[{{"text": "x"}}, {{"n": {"1" * 5000}}}]',
            1,
            r"a\.json:2: not JSON that can be read: .* than 4,300 digits",
        ),
    ],
)
def test_an_array_that_is_not_whole_is_read_up_to_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, text: str, read: int, message: str
) -> None:
    """Never cut short in silence: behind the first array of a file there may be another one."""
    monkeypatch.setattr(formats, "_CHUNK", chunk)
    (tmp_path / "a.json").write_text(text)
    records = read_records(tmp_path / "a.json", "a.json")
    assert [next(records).number for _ in range(read)] == list(range(1, read + 1))
    with pytest.raises(UserError, match=message):
        next(records)


def test_a_file_may_end_in_white_space(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "x"}\n]\n \n')
    assert [value for _, value in read_records(tmp_path / "a.json", "a.json")] == [{"text": "x"}]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, kind: str) -> None:
    """Numbers, which nobody reads, may be called as they like."""
    path = tmp_path / f"a.{kind}"
    for names, refused in ((["text", "text", "n"], True), (["text", "n", "n"], False)):
        columns = [pa.array(["x"]), pa.array(["y"]) if refused else pa.array([1]), pa.array([2])]
        table = pa.Table.from_arrays(columns, names)
        if kind == "parquet":
            parquet.write_table(table, path)
        else:
            with ipc.new_file(path, table.schema) as file:
                file.write_table(table)
        if refused:
            with pytest.raises(UserError, match=r"two columns are called 'text' \(give them different names\)"):
                list(read_records(path, path.name))
        else:
            assert [value for _, value in read_records(path, path.name)] == [{"text": "x"}]


def test_a_pretty_object_is_one_record_or_holds_them(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"messages": CHAT, "tags": [{"x": 1}]}, indent=2))
    assert [value for _, value in read_records(path, "a.json")] == [{"messages": CHAT, "tags": [{"x": 1}]}]
    path.write_text('{\n "messages": [\n')
    with pytest.raises(UserError, match=r"a\.json:1: not valid JSON"):
        list(read_conversations([path]))


def test_the_cost_of_an_array_grows_with_its_size_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters moved and parses tried: for small elements, for large ones, and for one that is larger than all."""
    monkeypatch.setattr(formats, "_CHUNK", 1 << 12)
    monkeypatch.setattr(formats, "_AHEAD", 1 << 8)
    windows: list[formats._Window] = []
    tries = [0]

    class Window(formats._Window):
        def __init__(self, file: Any) -> None:
            super().__init__(file)
            windows.append(self)

    class Decoder(json.JSONDecoder):
        def raw_decode(self, text: str, place: int = 0) -> Any:
            tries[0] += 1
            return super().raw_decode(text, place)

    monkeypatch.setattr(formats, "_Window", Window)
    monkeypatch.setattr(formats.json, "JSONDecoder", Decoder)
    path = tmp_path / "a.json"
    for element, counts in (("x" * 40, (2_000, 8_000)), ("x" * 9_000, (20, 80)), ("x" * 600_000, (1, 2))):
        for count in counts:
            path.write_text(json.dumps([{"text": element}] * count))
            size = path.stat().st_size
            windows.clear()
            tries[0] = 0
            assert sum(1 for _ in formats._elements(path, "a")) == count
            (window,) = windows
            assert window.moved < 6 * size, (len(element), count)
            growing = max(1, (len(element) // (1 << 12)).bit_length() + 1)
            assert tries[0] <= count * growing + size / (1 << 12) + 2


def test_a_table_row_of_bytes_that_are_no_text_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    text = pa.array([b"one", b"\xff\xfe", b"three"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": text}), path)
    found = list(read_conversations([path]))
    assert [(each.text, each.malformed) for each in found] == [("one", None), (None, "not UTF-8"), ("three", None)]
    assert found[1].source == f"{path}:2"


def test_columns_of_images_are_not_decoded_and_what_has_one_is_refused(tmp_path: Path) -> None:
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    seen = [{"bytes": b"\x89PNG", "path": None}, None, None]
    several = [[], [{"bytes": b"\x89PNG", "path": "a.png"}], []]
    columns = {"text": pa.array(["a", "b", "c"]), "image": pa.array(seen, image)}
    table = pa.table({**columns, "images": pa.array(several, pa.list_(image))})
    parquet.write_table(table, tmp_path / "a.parquet")
    found = list(read_conversations([tmp_path / "a.parquet"]))
    assert [each.problem for each in found] == ["an image or sound in 'image'", "an image or sound in 'images'", None]
    values = [value for _, value in read_records(tmp_path / "a.parquet", "a")]
    assert values == [{"text": "a", "image": formats.Media()}, {"text": "b", "images": formats.Media()}, {"text": "c"}]


def test_text_of_every_make_is_text(tmp_path: Path) -> None:
    message = pa.struct([("role", pa.string()), ("content", pa.string_view())])
    rows = [CHAT, [CHAT[0], {**CHAT[1], "content": "other"}]]
    vectors = pa.array([[0.5], [1.5]], pa.list_(pa.float32(), 1))
    makes = [pa.list_(message), pa.large_list(message), pa.list_(message, 2), pa.list_view(message)]
    for number, make in enumerate(makes):
        table = pa.table({"messages": pa.array(rows, make), "vector": vectors})
        path = tmp_path / f"{number}.arrow"
        with ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
        assert [value for _, value in read_records(path, "a")] == [{"messages": row} for row in rows]
    for make in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())):
        path = tmp_path / "text.parquet"
        parquet.write_table(pa.table({"text": pa.array(["one", "two"], pa.string()).cast(make)}), path)
        assert [each.text for each in read_conversations([path])] == ["one", "two"]


def test_compressed_in_several_pieces(tmp_path: Path) -> None:
    one, two = lines([{"text": "one"}]), lines([{"text": "two"}])
    empty_frame = b"\x50\x2a\x4d\x18\x04\x00\x00\x00size"
    pieces = {
        "a.jsonl.gz": gzip.compress(one) + gzip.compress(two),
        "a.jsonl.bz2": bz2.compress(one) + bz2.compress(two),
        "a.jsonl.xz": lzma.compress(one) + lzma.compress(two),
        "a.jsonl.zst": empty_frame + zstandard(one) + empty_frame + zstandard(two),
    }
    for name, data in pieces.items():
        (tmp_path / name).write_bytes(data)
        assert [each.text for each in read_conversations([tmp_path / name])] == ["one", "two"], name


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
