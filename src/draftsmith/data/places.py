"""From an entry of `data.train` to the files it means: file, pattern, folder, Hugging Face dataset, standard input.

A folder is read in the way it describes itself, first answer wins: `dataset_dict.json` and `state.json` (written by
`save_to_disk`), the `configs` in its README (the hub's own rule), else the names of its files and folders, in which a
word like train, test or validation names a split. Without a split in the entry "train" is read; a folder that has no
splits is read whole. Test data is never trained on by accident.

A name like `org/dataset` that is no path here is asked of the hub through huggingface_hub, which keeps it; only data
files are fetched.

Standard input is copied to a temporary file once: what is read twice (to know its content, then to tokenise it) must
stand still.
"""

from __future__ import annotations

import atexit
import glob
import itertools
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from draftsmith.config import DataSource
from draftsmith.data.formats import DATA_SUFFIXES, is_data_name
from draftsmith.data.hub import look_for_hub
from draftsmith.errors import UserError, reason_of, what_is_at

STDIN = "-"
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# JSON that describes a dataset and holds none of it.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_HUB_NAME = re.compile(r"(?:hf://datasets/)?([\w.-]+/[\w.-]+)/?")
_stdin: Path | None = None


class DataFile(NamedTuple):
    """A file to read, and how.

    Attributes:
        name: what messages call it.
        path: where it is.
        entry: the entry that it belongs to.
    """

    name: str
    path: Path
    entry: DataSource


def as_sources(entries: Iterable[str | Path | DataSource]) -> list[DataSource]:
    """Entries in one form.

    Raises:
        UserError: an entry is empty, or in the home of a user who does not exist.
    """
    entries = list(entries)
    if "" in entries:
        raise UserError("an empty name", where="data", fix="name a file, folder or dataset")
    return [
        entry if isinstance(entry, DataSource) else DataSource(path=str(entry))  # type: ignore[call-arg]
        for entry in entries
    ]


def find_files(entries: Iterable[str | Path | DataSource]) -> list[DataFile]:
    """The files of all entries, in order; inside an entry by name.

    Raises:
        UserError: nothing is there, or a split or subset that does not exist is asked for.
    """
    return [file for entry in as_sources(entries) for file in _find(entry)]


def _find(entry: DataSource) -> list[DataFile]:
    if entry.path == STDIN:
        _refuse_parts(entry, "standard input", "split", "subset")
        return [DataFile("stdin", _read_stdin(), entry)]
    path = Path(entry.path)
    there = what_is_at(path)
    if there == "folder":
        return [DataFile(str(file), file, entry) for file in _files_of_folder(path, entry)]
    if there is None:
        found = sorted(glob.glob(entry.path, recursive=True)) if glob.has_magic(entry.path) else []
        if found:
            _refuse_parts(entry, "a file", "split", "subset")
            return [DataFile(name, Path(name), entry) for name in found if not Path(name).is_dir()]
        hub = _HUB_NAME.fullmatch(entry.path)
        if hub and not is_data_name(entry.path) and not entry.path.startswith("."):
            folder = _fetch(hub[1], entry.path)
            files = _files_of_folder(folder, entry)
            return [DataFile(f"{entry.path}/{file.relative_to(folder)}", file, entry) for file in files]
    else:
        _refuse_parts(entry, "a file", "split", "subset")
    # What is missing or may not be opened is said by whoever opens it.
    return [DataFile(entry.path, path, entry)]


def _refuse_parts(entry: DataSource, what: str, *parts: str) -> None:
    """Refuses an entry that names one of the parts ("split", "subset") that `what` cannot have."""
    for part in parts:
        if getattr(entry, part) is not None:
            raise UserError(f"{what} has no {part}s", where=entry.path, fix=f"leave {part} out")


def _read_stdin() -> Path:
    global _stdin
    if _stdin is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise UserError("nothing is piped in", where="stdin", fix="e.g. zcat chats.jsonl.gz | draftsmith …")
        handle, name = tempfile.mkstemp(prefix="draftsmith-stdin-")
        atexit.register(Path(name).unlink, missing_ok=True)
        with open(handle, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        _stdin = Path(name)
    return _stdin


def _fetch(name: str, entry: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    wanted = [f"*{suffix}{more}" for suffix in DATA_SUFFIXES for more in ("", ".gz", ".bz2", ".xz", ".zst")]
    trouble = look_for_hub()
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=[*wanted, "README.md"]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        first = str(error).strip().splitlines()
        reason = trouble or (first[0] if first else type(error).__name__)
        what = f"no such file here, and not to be had from the hub: {reason}"
        raise UserError(what, where=entry, fix="check the path") from None


# -- folders -------------------------------------------------------------------------------------------------------


def _files_of_folder(folder: Path, entry: DataSource) -> list[Path]:
    where = entry.path
    description = _json(folder / "dataset_dict.json", where)
    if description is not None:
        _refuse_parts(entry, "what save_to_disk wrote", "subset")
        split = _choose(dict.fromkeys(description.get("splits", [])), entry.split, "split", where)
        return _files_of_folder(folder / split, entry.model_copy(update={"split": None}))
    state = _json(folder / "state.json", where)
    if state is not None and state.get("_data_files"):
        _refuse_parts(entry, "what save_to_disk wrote", "subset")
        _choose({state.get("_split") or "train": None}, entry.split, "split", where)
        return [folder / part["filename"] for part in state["_data_files"]]
    described = _described(folder, entry)
    if described is not None:
        return described
    files = _data_files(folder)
    if entry.subset is not None:
        subsets = {part for file in files for part in file.relative_to(folder).parts[:-1]}
        _choose(dict.fromkeys(sorted(subsets)), entry.subset, "subset", where)
        files = [file for file in files if entry.subset in file.relative_to(folder).parts[:-1]]
    if not files:
        raise UserError("is a directory without data files", where=where, fix=f"of {', '.join(DATA_SUFFIXES)}")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(folder)) or "", []).append(file)
    if list(by_split) == [""] and entry.split is None:
        return files
    by_split["train"] = sorted([*by_split.get("train", []), *by_split.pop("", [])])
    return by_split[_choose({name: None for name, found in by_split.items() if found}, entry.split, "split", where)]


def _data_files(folder: Path) -> list[Path]:
    def hidden(path: Path) -> bool:
        return any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)

    return [
        path
        for path in sorted(folder.rglob("*"))
        if is_data_name(path.name) and path.name not in _DESCRIPTIONS and not hidden(path) and path.is_file()
    ]


def _split_of(path: Path) -> str | None:
    """The split that a relative path names, the file before its folders."""
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return None


def _described(folder: Path, entry: DataSource) -> list[Path] | None:
    """Files by the `configs` of the README's front matter; None if it has none."""
    configs = _front_matter(folder / "README.md").get("configs")
    if not isinstance(configs, list) or not configs:
        return None
    by_name = {str(config.get("config_name", "default")): config for config in configs if isinstance(config, dict)}
    marked = next((name for name, config in by_name.items() if config.get("default")), None)
    names: dict[str, Any] = dict.fromkeys(by_name)
    fallback = marked or ("default" if "default" in names or len(names) > 1 else next(iter(names)))
    chosen = by_name[_choose(names, entry.subset or fallback, "subset", entry.path)]
    data_files = chosen.get("data_files")
    if data_files is None:
        return None
    splits: dict[str, list[str]] = {}
    for part in data_files if isinstance(data_files, list) else [data_files]:
        name, patterns = (part.get("split", "train"), part.get("path")) if isinstance(part, dict) else ("train", part)
        splits.setdefault(str(name), []).extend([patterns] if isinstance(patterns, str) else patterns or [])
    split = _choose(dict.fromkeys(splits), entry.split, "split", entry.path)
    found = itertools.chain.from_iterable(sorted(folder.glob(pattern)) for pattern in splits[split])
    files = list(dict.fromkeys(file for file in found if file.is_file()))
    if not files:
        raise UserError(f"its README names files of the split {split!r} that are not there", where=entry.path)
    return files


def _front_matter(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    if not text.startswith("---"):
        return {}
    try:
        content = yaml.safe_load(text.split("---", 2)[1])
    except (yaml.YAMLError, IndexError):
        return {}
    return content if isinstance(content, dict) else {}


def _json(path: Path, where: str) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} cannot be read: {reason_of(error)}", where=where) from None
    return content if isinstance(content, dict) else None


def _choose(names: dict[str, None], wanted: str | None, what: str, where: str) -> str:
    """`wanted`, else "train", else the only one."""
    if wanted is None:
        wanted = next(iter(names)) if len(names) == 1 else "train"
    if wanted not in names:
        raise UserError(f"has no {what} {wanted!r}", where=where, fix=f"it has {', '.join(names) or 'none'}")
    return wanted
