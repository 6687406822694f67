"""Tokenised files on disk: a `TokenTable` per data file, made once and found again by what it is made from.

The name of a table is a hash of everything that decides its content: the bytes of the data file and how they are read,
the tokenizer, the chat template and its options, the stop tokens, the versions of the libraries that render and
tokenise, and the source code that reads and tokenises. Nothing is looked up by path or time, so a table cannot be
stale; a file that was written to between being hashed and being read is read again. How rows
are cut from it (S, what is too long, weights, the held-out share) is no part of it: changing those tokenises nothing
again, and a new file tokenises only itself.

Two processes: a table is built in a folder of its own under a lock and becomes visible by one rename when it is whole.
A second process waits for the lock and finds the table. One that dies leaves a folder that the next one removes, and
its lock dies with it.

Files of a table: `tokens` (int32), `mask` (bool), `documents.npz`, `incidents.jsonl`, `table.json`. Cost to build: one
pass of the file through the tokenizer, and one over its bytes to know them; to open: the bytes once, and two mapped
files. Memory: 20 bytes per document and 8 per conversation; tokens stay on disk, and the system keeps what is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
import weakref
import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from draftsmith.data import conversation as conversation_module
from draftsmith.data import conversations as conversations_module
from draftsmith.data import formats, layouts, problems, turns
from draftsmith.data import template as template_module
from draftsmith.data.conversation import Conversation
from draftsmith.data.conversations import read_file
from draftsmith.data.places import DataFile
from draftsmith.data.report import REFUSED, UNTAUGHT
from draftsmith.data.template import Tokenised, Tokeniser
from draftsmith.errors import UserError, reason_of

OFF = "off"
_BATCH = 512  # conversations tokenised at one time …
_BATCH_CHARACTERS = 4_000_000  # … unless they are long
_FORMAT = 1
_HASHED = 8 << 20
_TRIES = 3  # for a file that somebody is writing
_ARRAYS = ("starts_D", "number_D", "conversation_D", "keys_C", "used_ids")

_State = tuple[int, ...] | None

# What decides the content of a table beside its file: every module that reads, renders or tokenises, and the libraries.
_SOURCES = (conversation_module, conversations_module, formats, layouts, problems, template_module, turns)
_READ_WITH = ("jinja2", "pyarrow", "tokenizers", "transformers")


@dataclass(frozen=True)
class TokenTable:
    """One tokenised file.

    Letters: D documents, C conversations of which something is taught.

    Attributes:
        folder: where it lies.
        tokens: int32 [total tokens], mapped.
        mask: bool [total tokens], mapped; true for taught tokens.
        starts_D: int64 [D + 1]; document d is `starts_D[d]:starts_D[d+1]`.
        number_D: int32 [D], line or record of the file.
        conversation_D: int32 [D], index into the conversations.
        keys_C: uint64 [C], hash of the content.
        used_ids: int32, every id that occurs, ascending.
        digest: hash of tokens and mask.
        facts: counts ("conversations", "plain_text", "layouts", "refused") and "stop_token" (id or None).
    """

    folder: Path
    tokens: np.ndarray
    mask: np.ndarray
    starts_D: np.ndarray
    number_D: np.ndarray
    conversation_D: np.ndarray
    keys_C: np.ndarray
    used_ids: np.ndarray
    digest: str
    facts: dict[str, Any]

    def incidents(self) -> Iterator[tuple[int, str, str, str]]:
        """(number, effect, reason, detail) of everything that is not used in full, in reading order."""
        with (self.folder / "incidents.jsonl").open(encoding="utf-8") as file:
            for line in file:
                number, effect, reason, detail = json.loads(line)
                yield number, effect, reason, detail


def default_folder() -> Path:
    """Where tables are kept unless the config says otherwise."""
    given = os.environ.get("DRAFTSMITH_DATA_CACHE")
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "draftsmith" / "data"


class TableCache:
    """Finds tables, or makes them.

    Args:
        folder: where they are kept; "off": in a temporary folder that goes with the last user of this object; None:
            the user's cache.
        tokeniser: makes the tokens.
    """

    def __init__(self, folder: str | None, tokeniser: Tokeniser) -> None:
        self.tokeniser = tokeniser
        self._stem: dict[str, Any] | None = None
        if folder == OFF:
            self.folder = Path(tempfile.mkdtemp(prefix="draftsmith-data-"))
            self._finalizer = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        else:
            self.folder = default_folder() if folder is None else Path(folder)

    def table(self, file: DataFile, progress: Callable[[int], None] | None = None) -> TokenTable:
        """The table of a file.

        Args:
            file: the data file.
            progress: called with the number of its conversations read so far, after every batch.

        Raises:
            UserError: the file is missing, broken or changes all the time, the template is invalid, or the cache cannot
                be written.
        """
        for _ in range(_TRIES):
            before = _state(file.path)
            key = self._key(file)
            found = _open(self.folder / key)
            if found is not None:
                if progress is not None:
                    progress(found.facts["conversations"])
                return found
            found = self._make(key, file, before, progress)
            if found is not None:
                return found
        raise UserError("changes while it is read", where=file.name, fix="wait until it is written")

    def _make(
        self, key: str, file: DataFile, before: _State, progress: Callable[[int], None] | None
    ) -> TokenTable | None:
        """Builds the table of this key; None if the file is no longer the one that was hashed."""
        folder = self.folder / key
        with _lock(self.folder, key):
            found = _open(folder)  # another process was faster
            if found is None:
                for left in self.folder.glob(f"{key}.new-*"):  # by one that died: we hold the lock
                    shutil.rmtree(left, ignore_errors=True)
                new = Path(tempfile.mkdtemp(prefix=f"{key}.new-", dir=self.folder))
                try:
                    _TableWriter(new, self.tokeniser.fresh()).write(file, key, progress)
                    if _state(file.path) != before and self._key(file) != key:
                        return None
                    if folder.exists():
                        shutil.rmtree(folder)  # damaged: it could not be opened
                    new.rename(folder)
                except OSError as error:
                    raise _unwritable(self.folder, error) from None
                finally:
                    shutil.rmtree(new, ignore_errors=True)
                found = _open(folder)
        assert found is not None, f"{folder} was written and cannot be opened"
        return found

    def _key(self, file: DataFile) -> str:
        if self._stem is None:
            self._stem = _what_tokenises(self.tokeniser)
        content = {
            **self._stem,
            "content": hash_file(file.path, file.name),
            "suffix": formats.bare_suffix(file.name),
            "layout": file.entry.layout,
            "columns": file.entry.columns,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def _state(path: Path) -> _State:
    """What the system changes with every write to a file; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def hash_file(path: Path, name: str) -> str:
    """Hash of a file's bytes.

    Raises:
        UserError: it is missing or cannot be read.
    """
    digest = hashlib.blake2b(digest_size=20)
    try:
        with path.open("rb") as file:
            while block := file.read(_HASHED):
                digest.update(block)
    except FileNotFoundError:
        raise UserError("no such data file", where=name, fix="check the path") from None
    except OSError as error:
        raise UserError(f"cannot be read: {reason_of(error)}", where=name) from None
    return digest.hexdigest()


def _what_tokenises(tokeniser: Tokeniser) -> dict[str, Any]:
    """Everything but the file that decides a table."""
    template = tokeniser.template or getattr(tokeniser.tokenizer, "chat_template", None)
    sources = hashlib.sha256()
    for module in _SOURCES:
        assert module.__file__ is not None
        sources.update(Path(module.__file__).read_bytes())
    sources.update(Path(__file__).read_bytes())
    return {
        "format": _FORMAT,
        "tokenizer": fingerprint_tokenizer(tokeniser.tokenizer),
        "template": template,
        "options": tokeniser.options,
        "stop_ids": list(tokeniser.stop_ids),
        "versions": {name: _version(name) for name in _READ_WITH},
        "sources": sources.hexdigest(),
        # Such a template renders another text tomorrow.
        "date": time.strftime("%Y-%m-%d") if "strftime_now" in str(template) else None,
    }


def _version(package: str) -> str | None:
    """Installed version; None for pyarrow where it is missing: only tables and zstandard need it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """Hash of what a tokenizer does to text, its chat template left out."""
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()  # both are set again by every call that needs them
        backend.no_padding()
        digest.update(backend.to_str().encode())
    else:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file() and "chat_template" not in path.name:
                    digest.update(path.name.encode() + path.read_bytes())
    special = {name: str(value) for name, value in sorted(tokenizer.special_tokens_map.items())}
    digest.update(json.dumps([type(tokenizer).__name__, special, tokenizer.all_special_ids]).encode())
    return digest.hexdigest()


@contextmanager
def _lock(folder: Path, key: str) -> Iterator[None]:
    """Held by one process at a time; the system drops it when the process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / f"{key}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks
            raise _unwritable(folder, error) from None
        yield
    finally:
        os.close(descriptor)


def _open(folder: Path) -> TokenTable | None:
    """The table in a folder; None if there is none or it is damaged."""
    try:
        facts = json.loads((folder / "table.json").read_text(encoding="utf-8"))
        count = facts.pop("tokens")
        with np.load(folder / "documents.npz") as arrays:  # a zip file: every array is checked by its sum
            documents = {
                name: arrays[name] for name in ("starts_D", "number_D", "conversation_D", "keys_C", "used_ids")
            }
        tokens, mask = (_map(folder / name, kind, count) for name, kind in (("tokens", np.int32), ("mask", np.bool_)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile):
        return None
    return TokenTable(folder, tokens, mask, digest=facts.pop("digest"), facts=facts, **documents)


def _map(path: Path, kind: Any, count: int) -> np.ndarray:
    """A mapped array of `count` entries; ValueError if the file has another size."""
    if path.stat().st_size != count * np.dtype(kind).itemsize:
        raise ValueError(path)
    return np.memmap(path, dtype=kind, mode="r", shape=(count,)) if count else np.empty(0, dtype=kind)


class _TableWriter:
    """Writes one table; one entry per token, per document, per used conversation."""

    def __init__(self, folder: Path, tokeniser: Tokeniser) -> None:
        self.folder, self.tokeniser = folder, tokeniser
        self.starts, self.numbers, self.conversations = array("q", [0]), array("i"), array("i")
        self.keys = array("Q")
        self.used = np.zeros(len(tokeniser.tokenizer), dtype=bool)
        self.digest = hashlib.blake2b(digest_size=16)
        self.read = self.plain_text = self.refused = 0
        self.layouts: Counter[str] = Counter()

    def write(self, file: DataFile, key: str, progress: Callable[[int], None] | None) -> None:
        with (
            (self.folder / "tokens").open("wb") as tokens,
            (self.folder / "mask").open("wb") as mask,
            (self.folder / "incidents.jsonl").open("w", encoding="utf-8") as incidents,
        ):
            for batch in _batches(read_file(file)):
                results = self.tokeniser(batch)
                for conversation, tokenised in zip(batch, results, strict=True):
                    number = int(conversation.source.rpartition(":")[2])
                    for incident in self._incidents(number, tokenised):
                        incidents.write(json.dumps(incident) + "\n")
                    self._documents(number, conversation, tokenised, tokens, mask)
                self.read += len(batch)
                self.plain_text += sum(each.text is not None for each in batch)
                self.layouts.update(each.layout for each in batch if each.malformed is None)
                if progress is not None:
                    progress(self.read)
            for opened in (tokens, mask, incidents):
                opened.flush()
                os.fsync(opened.fileno())
        with (self.folder / "documents.npz").open("wb") as documents:
            np.savez(
                documents,
                starts_D=np.frombuffer(self.starts, dtype=np.int64),
                number_D=np.frombuffer(self.numbers, dtype=np.int32),
                conversation_D=np.frombuffer(self.conversations, dtype=np.int32),
                keys_C=np.frombuffer(self.keys, dtype=np.uint64),
                used_ids=np.flatnonzero(self.used).astype(np.int32),
            )
            documents.flush()
            os.fsync(documents.fileno())
        facts = {
            "key": key,
            "file": file.name,
            "tokens": self.starts[-1],
            "digest": self.digest.hexdigest(),
            "conversations": self.read,
            "plain_text": self.plain_text,
            "refused": self.refused,
            "layouts": dict(self.layouts),
            "stop_token": self.tokeniser.stop_token,
        }
        (self.folder / "table.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")

    def _incidents(self, number: int, tokenised: Tokenised) -> Iterator[tuple[int, str, str, str]]:
        if tokenised.refusal is not None:
            self.refused += 1
            yield number, REFUSED, *tokenised.refusal
            return
        for problem in tokenised.untaught:
            yield number, UNTAUGHT, *problem

    def _documents(
        self, number: int, conversation: Conversation, tokenised: Tokenised, tokens: BinaryIO, mask: BinaryIO
    ) -> None:
        if tokenised.refusal is not None:
            return
        for document in tokenised.documents:
            ids, taught = document.tokens.numpy(), document.loss_mask.numpy()
            largest = int(ids.max())
            if largest >= self.used.size:
                self.used = np.concatenate([self.used, np.zeros(largest + 1 - self.used.size, dtype=bool)])
            self.used[ids] = True
            for data, file in ((ids.astype(np.int32).tobytes(), tokens), (taught.tobytes(), mask)):
                self.digest.update(data)
                file.write(data)
            self.starts.append(self.starts[-1] + ids.size)
            self.numbers.append(number)
            self.conversations.append(len(self.keys))
        self.keys.append(conversation.key())


def _batches(conversations: Iterator[Conversation]) -> Iterator[list[Conversation]]:
    batch: list[Conversation] = []
    characters = 0
    for conversation in conversations:
        batch.append(conversation)
        characters += _size(conversation)
        if len(batch) == _BATCH or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _size(conversation: Conversation) -> int:
    """Characters, roughly; the prompts of a conversation are encoded as well as the whole."""
    if conversation.messages is None:
        return len(conversation.text or "")
    contents: Sequence[Any] = [message.get("content") or "" for message in conversation.messages]
    parts = chain.from_iterable([c] if isinstance(c, str) else [part.get("text", "") for part in c] for c in contents)
    return 2 * sum(map(len, parts))


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"the cache of tokenised data cannot be written: {reason_of(error)}",
        where=str(folder),
        fix="set data.cache to another folder, or to off",
    )
