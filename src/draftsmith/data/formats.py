"""Files to records: JSON lines, JSON, parquet and arrow, plain or compressed, in memory that does not grow.

What a file is, its bytes say: compression by its magic number (gzip, bzip2, xz, zstandard), parquet and arrow by
theirs, JSON lines against a JSON array by the first value in it. Only the suffixes `.jsonl` and `.ndjson` are believed:
a line of such a file that is no JSON is a broken line and not the beginning of a document.

A record has a number, from 1: its line in JSON lines, as every editor counts them, else its place in the file.

Cost: one pass. Memory: one line or array element of JSON; of parquet a row group's wanted columns, decoded a batch at a
time; arrow is mapped. A JSON document that is one object is read whole, so its size is limited.
"""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

from draftsmith.data.problems import UnusableData
from draftsmith.errors import UserError

WHOLE_DOCUMENT_BYTES = 128 * 2**20
LINE_SUFFIXES = (".jsonl", ".ndjson")
DATA_SUFFIXES = (*LINE_SUFFIXES, ".json", ".parquet", ".arrow", ".feather")
COMPRESSION_SUFFIXES = (".gz", ".bz2", ".xz", ".lzma", ".zst", ".zstd")

_MAGIC = (
    *((b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"\xfd7zXZ\x00", "xz"), (b"\x28\xb5\x2f\xfd", "zstandard")),
    # What is compressed by several threads begins with a frame that holds no data (pzstd).
    *((bytes([first]) + b"\x2a\x4d\x18", "zstandard") for first in range(0x50, 0x60)),
)
_CHUNK = 1 << 20
_ROWS = 256  # parquet rows decoded at a time
_BROKEN = (EOFError, OSError, lzma.LZMAError, zlib.error)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_WHITE = re.compile(r"[ \t\r\n]*")
_AHEAD = 1 << 16  # characters of an array behind the place that is parsed


class Record(NamedTuple):
    """One value of a data file and its number in it, from 1. The value may be `Malformed`."""

    number: int
    value: Any


class Malformed(NamedTuple):
    """In place of a value: why it cannot be read, though what follows can."""

    error: UserError


class Media(NamedTuple):
    """In place of an image or a sound in a table's column, which is not decoded."""


def is_data_name(name: str) -> bool:
    """Whether a file name ends as data files do, compressed or not."""
    return bare_suffix(name) in DATA_SUFFIXES


def bare_suffix(name: str) -> str:
    """Lower-case suffix below that of a compression: "a.JSONL.gz" → ".jsonl"."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSION_SUFFIXES else path.suffix


def read_records(path: Path, name: str) -> Iterator[Record]:
    """Yields every record of a file.

    Args:
        path: the file.
        name: what messages call it.

    A line of JSON lines that is no JSON, and a table's row whose text is none, are `Malformed`: what follows is read.

    Raises:
        UnusableData: it is cut off, broken, or not JSON where an array or object should stand. `where` names the
            record.
        UserError: it is missing, a folder, not to be read, or needs a package that is not installed.
    """
    number = 0
    try:
        kind = _kind_of(path)
        if kind in ("parquet", "arrow"):
            records = _read_parquet(path, name) if kind == "parquet" else _read_arrow(path, name)
        elif bare_suffix(name) in LINE_SUFFIXES:
            records = _read_lines(path, name)
        else:
            records = _read_json(path, name)
        for record in records:
            number = record.number
            yield record
    except FileNotFoundError:
        raise UserError("no such data file", where=name, fix="check the path") from None
    except IsADirectoryError:
        raise UserError("is a directory, not a data file", where=name, fix="name the files in it") from None
    except _BROKEN as error:
        place = f"{name}:{number + 1}" if number else name
        # What the system refuses has a number; the rest is said by those who unpack what was read.
        kind_of_error = UserError if getattr(error, "errno", None) else UnusableData
        raise kind_of_error(f"cannot be read: {getattr(error, 'strerror', None) or error}", where=place) from None


def open_bytes(path: Path) -> BinaryIO:
    """The file's content, decompressed."""
    with path.open("rb") as file:
        head = file.read(8)
    kind = next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)
    if kind is None:
        return path.open("rb")
    if kind == "gzip":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if kind == "bzip2":
        return bz2.open(path, "rb")  # type: ignore[return-value]
    if kind == "xz":
        return lzma.open(path, "rb")  # type: ignore[return-value]
    arrow = _pyarrow("zstandard files")
    return io.BufferedReader(_Raw(arrow.input_stream(str(path), compression="zstd")), _CHUNK)


class _Raw(io.RawIOBase):
    """pyarrow's decompressed stream as Python's raw stream, so that lines can be read from it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def _kind_of(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(8)
    if head[:4] == b"PAR1":
        return "parquet"
    if head[:6] == b"ARROW1" or head[:4] == b"\xff\xff\xff\xff":
        return "arrow"
    return "json"


# -- JSON ----------------------------------------------------------------------------------------------------------


def _read_json(path: Path, name: str) -> Iterator[Record]:
    """JSON of a kind that its first value tells."""
    with open_bytes(path) as file:
        start = _skip_space(file)
    if start == b"[":
        first = next(_elements(path, name), None)
        message = first is not None and isinstance(first.value, dict) and {"role", "from"} & first.value.keys()
        # A line of JSON lines may be a bare list of messages; anything else behind a bracket is an array of records.
        return _read_lines(path, name) if message else _elements(path, name)
    if start == b"{":
        document = _read_document(path)
        if document is not None:
            return (Record(number, value) for number, value in enumerate(document, start=1))
    return _read_lines(path, name)


def _skip_space(file: BinaryIO) -> bytes:
    """The first byte that is neither white space nor a byte order mark; nothing behind it is lost to the caller."""
    if (head := file.read(3)) != _BYTE_ORDER_MARK:
        for byte in head:
            if byte not in _SPACE:
                return bytes([byte])
    while (byte_ := file.read(1)) and byte_ in _SPACE:
        pass
    return byte_


def _read_lines(path: Path, name: str) -> Iterator[Record]:
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.strip():
                try:
                    value = _parse(line, f"{name}:{number}")
                except UserError as error:
                    value = Malformed(error)
                yield Record(number, value)


def _parse(line: bytes, where: str) -> Any:
    fix = 'one conversation per line: {"messages": [{"role": …, "content": …}]} or {"text": …}'
    try:
        return json.loads(line.decode("utf-8").rstrip())  # behind the line's end a fault would be in column 1
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 at byte {error.start + 1} of the line", where=where) from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # Python's words for some faults end in it
        raise UserError(f"not valid JSON: {what} at column {error.colno}", where=where, fix=fix) from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"not JSON that can be read: {error}", where=where, fix=fix) from None


class _Window:
    """The part of a text file that is looked at. `moved` counts the characters that were put into it."""

    def __init__(self, file: io.TextIOBase) -> None:
        self._file = file
        self.text, self.place, self.ended = "", 0, False
        self.moved = 0

    def grow(self, size: int) -> bool:
        """Reads on, and lets go of what lies before `place`; false at the end of the file."""
        more = self._file.read(size)
        self.text = self.text[self.place :] + more
        self.place = 0
        self.moved += len(self.text)
        self.ended = not more
        return not self.ended

    def skip(self) -> str:
        """The next character that is no white space, which `place` is at then; "" at the end of the file."""
        while True:
            match = _WHITE.match(self.text, self.place)
            assert match is not None, "it matches nothing as well"
            self.place = match.end()
            if self.place < len(self.text) or self.ended:
                return self.text[self.place : self.place + 1]
            self.grow(_CHUNK)


def _elements(path: Path, name: str) -> Iterator[Record]:
    """The elements of a JSON array, one at a time.

    An element is parsed where it stands. What is left of the window is moved only to read on: at its end, or in front
    of an element that is not whole, when twice as much is read each time. So the cost stays linear, whatever the
    elements' sizes. What is no JSON ends the reading with a refusal: nobody knows where the next element begins, and
    of a file with more behind the array nobody knows what was meant.
    """
    decoder = json.JSONDecoder()
    number, want, comma = 0, _CHUNK, False
    with open_bytes(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig") as file:
        try:
            window = _Window(file)
            window.skip()
            window.place += 1  # the bracket
            while True:
                if len(window.text) - window.place < min(_CHUNK, _AHEAD) and not window.ended:
                    window.grow(_CHUNK)  # a number must not be cut in two: it would be two numbers
                found = window.skip()
                if found == "," and comma:
                    window.place, comma = window.place + 1, False
                    continue
                if found == "]":
                    window.place += 1
                    if window.skip():
                        raise UnusableData(
                            f"not valid JSON: there is more behind the array of {number} elements",
                            where=f"{name}:{number}" if number else name,
                            fix="one array a file, or JSON lines",
                        )
                    return
                if comma and found:
                    what = f"not valid JSON: no comma between elements {number} and {number + 1} of the array"
                    raise UnusableData(what, where=f"{name}:{number + 1}")
                try:
                    value, window.place = decoder.raw_decode(window.text, window.place)
                except json.JSONDecodeError as error:
                    if want >= WHOLE_DOCUMENT_BYTES or not window.grow(want):
                        what = f"not valid JSON: {error.msg} in element {number + 1} of the array"
                        raise UnusableData(what, where=f"{name}:{number + 1}") from None
                    want *= 2
                    continue
                number, want, comma = number + 1, _CHUNK, True
                yield Record(number, value)
        except UnicodeDecodeError:
            raise UnusableData("not UTF-8", where=f"{name}:{number + 1}") from None
        except RecursionError as error:
            raise UnusableData(f"not JSON that can be read: {error}", where=f"{name}:{number + 1}") from None
        except ValueError:  # the only other one of the parser's
            what = f"not JSON that can be read: a number of more than {sys.get_int_max_str_digits():,} digits"
            raise UnusableData(what, where=f"{name}:{number + 1}") from None


def _read_document(path: Path) -> list[Any] | None:
    """Records of a file that is one JSON object, on one line or several; None if it is not.

    The object is a record itself, or holds the list of them under one key ({"data": […]}).
    """
    with open_bytes(path) as file:
        text = file.readline(_CHUNK).removeprefix(_BYTE_ORDER_MARK)
        if not _is_json(text):
            text += file.read(WHOLE_DOCUMENT_BYTES)
        elif file.read(_CHUNK).strip():
            return None  # lines
    try:
        content = json.loads(text) if len(text) < WHOLE_DOCUMENT_BYTES else None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        return None  # the reader of lines says where it is broken
    lists = [value for value in content.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    own = {"messages", "conversations", "conversation", "text", "prompt", "instruction"} & content.keys()
    return lists[0] if len(lists) == 1 and not own else [content]


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


# -- tables --------------------------------------------------------------------------------------------------------


def _read_parquet(path: Path, name: str) -> Iterator[Record]:
    _pyarrow("parquet files")
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=_ROWS, columns=_wanted(file.schema_arrow, name), use_threads=False)
            yield from _rows(batches, name)
    except pyarrow.ArrowException as error:
        raise OSError(f"not a whole parquet file: {error}") from None


def _read_arrow(path: Path, name: str) -> Iterator[Record]:
    pyarrow = _pyarrow("arrow files")
    import pyarrow.ipc as ipc

    try:
        with pyarrow.memory_map(str(path)) as file:
            if file.read(6) == b"ARROW1":
                file.seek(0)
                reader = ipc.open_file(file)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                file.seek(0)
                batches = iter(ipc.open_stream(file))
            yield from _rows(_slices(batches, name), name)
    except pyarrow.ArrowException as error:
        raise OSError(f"not a whole arrow file: {error}") from None


def _slices(batches: Iterable[Any], name: str) -> Iterator[Any]:
    for batch in batches:
        wanted = batch.select(_wanted(batch.schema, name))
        for start in range(0, wanted.num_rows, _ROWS):
            yield wanted.slice(start, _ROWS)


def _rows(batches: Iterable[Any], name: str) -> Iterator[Record]:
    """Rows as JSON would hold them: a table writes a null for every key that another row has, JSON leaves it out."""
    numbers = itertools.count(1)
    for batch in batches:
        media = [field.name for field in batch.schema if _is_media(field.type)]
        there = {column: _filled(batch.column(column)) for column in media}
        text = batch.select([field.name for field in batch.schema if field.name not in media])
        for place, value in enumerate(_values(text)):
            number = next(numbers)
            if isinstance(value, Malformed):
                yield Record(number, Malformed(UserError(value.error.what, where=f"{name}:{number}")))
            else:
                yield Record(number, {**value, **{column: Media() for column in media if there[column][place]}})


def _values(batch: Any) -> list[Any]:
    """Every row of a batch; what holds bytes that are no text is `Malformed`, and costs its neighbours nothing."""
    try:
        return [_without_nulls(row) for row in batch.to_pylist()] if batch.num_columns else [{}] * batch.num_rows
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [Malformed(UserError("not UTF-8"))]
        return [value for place in range(batch.num_rows) for value in _values(batch.slice(place, 1))]


def _filled(column: Any) -> list[bool]:
    """Where a column of images or sounds holds any."""
    import pyarrow.compute as compute

    if _item_type(column.type) is not None:
        return [bool(length) for length in compute.list_value_length(column).to_pylist()]
    return column.is_valid().to_pylist()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _wanted(schema: Any, name: str) -> list[str]:
    """Columns that can hold text or lists, and those of images and sounds, of which only their being there is read.

    Numbers and embeddings of floats are not even decoded.

    Raises:
        UnusableData: two of them have one name, and nobody knows which is meant.
    """
    import pyarrow.types as types

    texts = (types.is_string, types.is_large_string, types.is_string_view, types.is_dictionary, types.is_map)

    def useful(kind: Any) -> bool:
        item = _item_type(kind)
        if item is not None:
            return useful(item)
        if types.is_struct(kind):
            return any(useful(kind.field(index).type) for index in range(kind.num_fields))
        return any(is_so(kind) for is_so in texts)

    wanted = [field.name for field in schema if useful(field.type) or _is_media(field.type)]
    for column in wanted:
        if schema.names.count(column) > 1:
            raise UnusableData(f"two columns are called {column!r}", where=name, fix="give them different names")
    return wanted


def _item_type(kind: Any) -> Any:
    """What a list of any make holds; None if this is no list."""
    import pyarrow.types as types

    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return kind.value_type if any(is_so(kind) for is_so in lists) else None


def _is_media(kind: Any) -> bool:
    """Whether this is how the library `datasets` keeps images and sounds: as bytes and a path, or lists of these."""
    import pyarrow.types as types

    item = _item_type(kind)
    if item is not None:
        return _is_media(item)
    if not types.is_struct(kind):
        return False
    fields = {kind.field(index).name: kind.field(index).type for index in range(kind.num_fields)}
    data = fields.get("bytes")
    return set(fields) == {"bytes", "path"} and (types.is_binary(data) or types.is_large_binary(data))


def _pyarrow(what: str) -> ModuleType:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{what} need the package pyarrow", where="data", fix="pip install pyarrow") from None
    return pyarrow
