"""Compile caches: what is in one, whether it fits this machine and these needs, and moving it safely.

A *cache* is a folder that Inductor is pointed at (`TORCHINDUCTOR_CACHE_DIR`); Triton's lies inside it. With a
`manifest.json` it also knows what produced it: the machine's facts, the uses that were compiled (a name for each, the
graph keys behind it, the seconds it took) and a checksum of every file.

Cached graphs are pickles, so a cache from elsewhere is only unpacked when every checksum matches and the facts of the
machine are the same; a checksum proves that nothing changed on the way, not that the maker was honest.

Draftsmith's own caches live under `DRAFTSMITH_CACHE_DIR` or `~/.cache/draftsmith/compiled`. Only folders named as they
are, which no other process uses (`cache_lock`), are ever deleted or replaced, wherever that variable points.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from draftsmith.compiled.aside import write_aside
from draftsmith.compiled.cache_lock import (
    CacheRefused,
    InUse,
    cache_around,
    exclusively,
    is_ours,
    is_room,
    remove,
    room,
    share,
)
from draftsmith.compiled.machine import differences

MANIFEST = "manifest.json"
VERSION = 1
_KINDS = {
    "fxgraph": "Inductor graphs",
    "aotautograd": "AOTAutograd graphs",
    "triton": "Triton kernels",
    "flash": "FlashAttention-4 kernels",
}
# Read by flash-attn-4 when it is imported; it keeps nothing unless it is told to.
FLASH_SWITCH, FLASH_FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


_TRITON_ASIDE = "tmp."  # so begins a folder in which Triton, or Inductor for it, writes what it then renames
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)  # a folder that is not empty stands where another is to be renamed to

_flash_used: str | None = None  # where `use` had FlashAttention-4 keep its kernels
_used: str | None = None  # the folder that `use` chose last: a later run of this process may choose another
_shared: dict[Path, int] = {}  # locks of the folders that it ever chose, by descriptor: code may be loaded from all


@dataclass(frozen=True)
class Use:
    """One thing that a program compiles: `name` tells programs and shapes apart ("drafter S=4096 N=512 ... cuda")."""

    name: str
    keys: tuple[str, ...]
    seconds: float


def inside(name: str) -> str:
    """The name of a file in a manifest or an archive.

    Raises:
        ValueError: it leads out of the cache, or is none.
    """
    if not name or name.startswith("/") or "\0" in name or ".." in Path(name).parts:
        raise ValueError("no file inside the cache")
    return name


class _Use(TypedDict):
    name: str
    keys: list[Annotated[str, Field(pattern=r"^\w+$")]]
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Manifest(TypedDict):
    version: Literal[1]  # VERSION
    made: str
    machine: dict[str, Any]
    uses: list[_Use]
    files: dict[Annotated[str, AfterValidator(inside)], str]  # name → SHA-256


_MANIFEST = TypeAdapter(_Manifest).validator


@dataclass(frozen=True)
class Coverage:
    """How much of what a program needs a cache holds. `seconds` is the estimate for what is missing, None: unknown."""

    needed: int
    missing: tuple[str, ...]
    seconds: float | None

    def line(self) -> str:
        """For people: "2 of 9 regions present; 7 will compile, about 140 s"."""
        present = self.needed - len(self.missing)
        text = f"{present} of {self.needed} regions present"
        if self.missing:
            about = "time unknown" if self.seconds is None else f"about {self.seconds:.0f} s"
            text += f"; {len(self.missing)} will compile, {about}"
        return text


def root_folder() -> Path:
    """Where Draftsmith's own caches live; absolute, as torch makes the folder that it is given."""
    given = os.environ.get("DRAFTSMITH_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.path.abspath(given or Path(home) / "draftsmith" / "compiled"))


def inductor_folder() -> Path:
    """Where Inductor keeps its cache in this process."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given:
        return Path(given)
    return Path(_default_folder())


def _default_folder() -> str:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.path.abspath(default_cache_dir())


def extensions_folder() -> Path:
    """Where torch builds C++ and CUDA extensions."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "torch_extensions"


def may_choose() -> bool:
    """Whether the environment leaves Inductor's folder to us.

    Torch writes its own default into the environment at the first look; that one does not count.
    """
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, _default_folder(), _used)


def make_writable(place: Path) -> None:
    """Make a folder if it is not there, and write to it.

    Raises:
        CacheRefused: one or the other cannot be done.
    """
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise CacheRefused(f"{place} cannot be written: {error.strerror or error}") from error


def use(folder: Path) -> bool:
    """Point Inductor of this process at a folder, unless the environment names one already; whether it was done.

    FlashAttention-4, through which flex attention may run, keeps its kernels beside Inductor's graphs, unless the
    environment names a place of its own. It looks once, when it is imported: a folder that is chosen later in the same
    process gets none of them.

    From then on until this process ends, others neither delete nor replace the folder; warns where it cannot be locked.
    Folders that the environment names are held the same way if they lie in a cache of ours. Others need no lock:
    nothing here deletes or replaces them.

    Raises:
        OSError: the folder cannot be made.
    """
    global _used, _flash_used
    chosen = may_choose()
    if chosen:
        _hold(folder)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = _used = str(folder)
    if os.environ.get(FLASH_FOLDER) in (None, _flash_used):
        os.environ[FLASH_FOLDER] = _flash_used = str(inductor_folder() / "flash")
    os.environ.setdefault(FLASH_SWITCH, "1")
    for own in filter(None, map(own_cache_of, named_folders())):
        if own not in {held.resolve() for held in _shared}:
            _hold(own)
    return chosen


def _hold(folder: Path) -> None:
    lock = share(folder)
    before = _shared.pop(folder, None)  # of a folder of that name which somebody may have deleted by hand
    if before is not None:
        os.close(before)
    if lock is not None:
        _shared[folder] = lock


def named_folders() -> list[Path]:
    """Where the environment has Inductor, Triton and FlashAttention-4 keep what they compile."""
    given = (os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", FLASH_FOLDER))
    return [Path(folder) for folder in given if folder]


def own_cache_of(folder: Path) -> Path | None:
    """The cache of ours that a folder is, or lies in; None if it is elsewhere, or in the room of a process."""
    return cache_around(folder.resolve(), root_folder().resolve())


def sizes(folder: Path) -> dict[str, int]:
    """Bytes by kind: Inductor graphs, AOTAutograd graphs, Triton kernels, code and objects."""
    found: dict[str, int] = {}
    for file in _files(folder):
        top = file.relative_to(folder).parts[0]
        kind = _KINDS.get(top, "code and objects")
        with suppress(FileNotFoundError):
            found[kind] = found.get(kind, 0) + file.stat().st_size
    return found


def write_manifest(folder: Path, machine: dict[str, Any], uses: Iterable[Use]) -> dict[str, Any]:
    """Write what produced the cache and a checksum of each file; returns the manifest.

    A use that was there before with the same graphs keeps its seconds if they are more: it is loaded now, and was
    compiled then. Other processes may compile into the same folder meanwhile: what vanishes is left out.

    Raises:
        OSError: it cannot be written.
    """
    before = {use.name: use for use in uses_of(earlier)} if (earlier := read_manifest(folder)) else {}
    kept = [
        replace(use, seconds=max(use.seconds, before[use.name].seconds))
        if use.name in before and set(use.keys) == set(before[use.name].keys)
        else use
        for use in uses
    ]
    checksums = {}
    for file in _files(folder):
        with suppress(FileNotFoundError):
            checksums[str(file.relative_to(folder))] = _checksum(file)
    content = {
        "version": VERSION,
        "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": machine,
        "uses": [asdict(use) for use in kept],
        "files": checksums,
    }
    write_aside(folder / MANIFEST, json.dumps(content, indent=1, default=str) + "\n")
    return content


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest; None where there is none or it is damaged. Whoever uses it need not check its form again."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if _MANIFEST.isinstance_python(content, strict=True) else None


def uses_of(manifest: Mapping[str, Any]) -> list[Use]:
    """The uses a manifest names."""
    return [Use(use["name"], tuple(use["keys"]), float(use["seconds"])) for use in manifest["uses"]]


def verify(folder: Path, machine: dict[str, Any]) -> list[str]:
    """What is wrong with a cache: no manifest, fields of the machine that differ, files missing, changed or unknown."""
    manifest = read_manifest(folder)
    if manifest is None:
        return [without_manifest(folder)]
    problems = [f"made elsewhere: {line}" for line in differences(manifest["machine"], machine)]
    return problems + wrong_files(folder, manifest["files"])


def without_manifest(folder: Path) -> str:
    if (folder / MANIFEST).exists():
        return f"{folder} has a manifest that is damaged: nobody can say what made it"
    if not folder.exists():
        return f"{folder} is not there: every config, machine and version of the sources has a cache of its own"
    return f"{folder} has no manifest: nobody can say what made it"


def wrong_files(folder: Path, listed: Mapping[str, str]) -> list[str]:
    """Files that are missing, changed, unreadable or unknown to a manifest, one line each."""
    there = {str(file.relative_to(folder)) for file in _files(folder)}
    problems = [f"missing: {name}" for name in sorted(set(listed) - there)]
    for name in sorted(there & set(listed)):
        try:
            if _checksum(folder / name) != listed[name]:
                problems.append(f"changed: {name}")
        except OSError as error:
            problems.append(f"cannot be read: {name} ({error.strerror})")
    return problems + [f"unknown: {name}" for name in sorted(there - set(listed))]


def coverage(folder: Path, needs: Mapping[str, float | None]) -> Coverage:
    """Which of the named needs the cache holds: a use of that name whose graphs are all on disk.

    Args:
        folder: the cache.
        needs: name → seconds that compiling it is expected to take, None if unknown; what the manifest knows to have
            taken so long goes before.
    """
    manifest = read_manifest(folder)
    uses = {use.name: use for use in uses_of(manifest)} if manifest else {}
    missing = tuple(
        name
        for name in needs
        if name not in uses or not uses[name].keys or not all(_has_graph(folder, key) for key in uses[name].keys)
    )
    known = [uses[name].seconds if name in uses and uses[name].seconds else needs[name] for name in missing]
    seconds = None if any(each is None for each in known) else float(sum(each or 0.0 for each in known))
    return Coverage(len(needs), missing, seconds)


def graph_file(folder: Path, key: str) -> Path:
    """Where Inductor keeps the graph of a key in a cache: a folder, with a file for each set of guards."""
    return folder / "fxgraph" / key[1:3] / key


def _has_graph(folder: Path, key: str) -> bool:
    place = graph_file(folder, key)
    return place.is_dir() and any(file.is_file() for file in place.iterdir())


def check_unused(place: Path) -> None:
    """Whether `swap_in` could replace what is at a place now.

    Raises:
        CacheRefused: another process uses it, or that cannot be known.
    """
    with suppress(FileNotFoundError), exclusively(place):
        pass


def swap_in(new: Path, place: Path) -> None:
    """Put a finished cache in its place; what was there before is deleted, unless another process uses it.

    Two renames: between them nothing is there for a moment, and what starts then compiles. Where several processes do
    this at once, each puts its own in place and the last one's stays. A failure puts back what was there.

    Raises:
        CacheRefused: another process uses what is there, or that cannot be known; it stays.
        OSError: it cannot be done.
    """
    with room(place.parent, "old") as old:
        before = old / place.name
        while True:
            try:
                with suppress(FileNotFoundError), exclusively(place):
                    os.rename(place, before)
                os.rename(new, place)
                return
            except BaseException as error:
                if isinstance(error, OSError) and error.errno in _TAKEN:  # by another process, since the first rename
                    shutil.rmtree(before, ignore_errors=True)
                    continue
                with suppress(OSError):
                    os.rename(before, place)
                raise


def hand_on(filled: Path, place: Path) -> None:
    """Copy what a cache holds to a place that has none yet; who comes first is the one that stays.

    Raises:
        OSError: it cannot be copied.
    """
    with room(place.parent, "filling") as aside:
        new = aside / place.name
        new.mkdir(mode=0o700)
        for file in _files(filled):
            copy = new / file.relative_to(filled)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                shutil.copy2(file, copy)
        try:
            os.rename(new, place)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise


def own_caches() -> list[tuple[Path, int]]:
    """Draftsmith's own caches and their bytes, with what processes are making, or left unfinished."""
    return [(item, sum(sizes(item).values())) for item in _in_root() if is_ours(item)]


def left_alone() -> dict[Path, str]:
    """What of the root folder `clear` does not delete, each with the reason."""
    return {item: why for item in _in_root() if (why := _why_kept(item))}


def _why_kept(item: Path) -> str:
    """Why something in the root may not be deleted now; "" if it may."""
    if not is_ours(item):
        return "not made by Draftsmith"
    try:
        check_unused(item)
    except InUse:
        return "in use by another process"
    except CacheRefused as error:
        return str(error).removeprefix(f"{item} ")
    return ""


def clear(caches: Sequence[Path]) -> int:
    """Delete caches under the root folder; returns the bytes that were freed.

    Raises:
        CacheRefused: one is not Draftsmith's own, in use by another process, or cannot be deleted.
    """
    root = root_folder().resolve()
    freed = 0
    for place in caches:
        if not os.path.lexists(place):  # another process was faster
            continue
        if place.resolve().parent != root:
            raise CacheRefused(f"{place} is not deleted: not in {root}")
        if not is_ours(place):
            raise CacheRefused(f"{place} is not deleted: not made by Draftsmith")
        size = sum(sizes(place).values())
        try:
            remove(place)
        except OSError as error:
            raise CacheRefused(f"{place} cannot be deleted: {error}") from error
        freed += size
    return freed


def remove_abandoned() -> list[str]:
    """Delete what processes that have ended left unfinished; a line for each that is deleted, or cannot be."""
    said = []
    for item in filter(is_room, _in_root()):
        try:
            remove(item)
            said.append(f"removed {item.name}, which a process that has ended left unfinished")
        except (InUse, FileNotFoundError):  # its process lives; another one was faster
            continue
        except (CacheRefused, OSError) as error:
            said.append(f"what may be left of a process that has ended stays: {error}")
    return said


def _in_root() -> list[Path]:
    root = root_folder()
    try:
        return sorted(root.iterdir()) if root.is_dir() else []
    except OSError as error:
        raise CacheRefused(f"{root} cannot be read: {error.strerror or error}") from error


def _files(folder: Path) -> list[Path]:
    """Files that a cache consists of: not the manifest, locks and what is being written.

    Other processes may write and rename in it meanwhile, so a file may be gone when it is opened.
    """
    found = []
    for place, folders, names in os.walk(folder):
        here = Path(place)
        at_top = here == folder
        folders[:] = [
            name for name in folders if not name.startswith(_TRITON_ASIDE) and not (at_top and name == "locks")
        ]
        found += [here / name for name in names if name != MANIFEST and not name.startswith(f".{MANIFEST}")]
    unfinished = (".lock", ".tmp", ".tmp.o")  # the last: FlashAttention-4's
    return sorted(
        file for file in found if not file.name.endswith(unfinished) and file.is_file() and not file.is_symlink()
    )


def flash_kernels(folder: Path) -> set[Path]:
    """Kernels of FlashAttention-4 in a cache."""
    return {file for file in _files(folder / "flash") if file.suffix == ".o"}


def _checksum(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
