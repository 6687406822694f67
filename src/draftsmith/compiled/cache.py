"""Compile caches: what is in one, whether it fits this machine and these needs, and moving it safely.

A *cache* is a folder that Inductor is pointed at (`TORCHINDUCTOR_CACHE_DIR`); Triton's lies inside it. With a
`manifest.json` it also knows what produced it: the machine's facts, the uses that were compiled (a name for each, the
graph keys behind it, the seconds it took) and a checksum of every file.

Cached graphs are pickles, so a cache from elsewhere is only unpacked when every checksum matches and the facts of the
machine are the same; a checksum proves that nothing changed on the way, not that the maker was honest.

Draftsmith's own caches live under `DRAFTSMITH_CACHE_DIR` or `~/.cache/draftsmith/compiled`. Only folders named as they
are (`cache_names`) are ever deleted, wherever that variable points.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith.compiled.cache_names import is_unfinished, own_name, why_kept
from draftsmith.compiled.machine import differences

MANIFEST = "manifest.json"
VERSION = 1
_KINDS = {
    "fxgraph": "Inductor graphs",
    "aotautograd": "AOTAutograd graphs",
    "triton": "Triton kernels",
}


_TRITON_ASIDE = "tmp.pid_"  # in a folder of such a name Triton writes what it then renames
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)  # a folder that is not empty stands where another is to be renamed to

_used: str | None = None  # the folder that `use` chose last: a later run of this process may choose another


class CacheRefused(RuntimeError):
    """A cache does not fit or is damaged; the message names the field or the file."""


@dataclass(frozen=True)
class Use:
    """One thing that a program compiles: `name` tells programs and shapes apart ("drafter S=4096 N=512 ... cuda")."""

    name: str
    keys: tuple[str, ...]
    seconds: float


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
    """Where Draftsmith's own caches live."""
    given = os.environ.get("DRAFTSMITH_CACHE_DIR")
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "draftsmith" / "compiled"


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
    """Point Inductor of this process at a folder, unless the environment names one already; whether it was done."""
    global _used
    if not may_choose():
        return False
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _used = str(folder)
    return True


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

    Other processes may compile into the same folder meanwhile: what vanishes is left out.

    Raises:
        OSError: it cannot be written.
    """
    checksums = {}
    for file in _files(folder):
        with suppress(FileNotFoundError):
            checksums[str(file.relative_to(folder))] = _checksum(file)
    content = {
        "version": VERSION,
        "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": machine,
        "uses": [asdict(use) for use in uses],
        "files": checksums,
    }
    aside = folder / own_name(MANIFEST)
    try:
        aside.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
        os.replace(aside, folder / MANIFEST)
    finally:
        aside.unlink(missing_ok=True)
    return content


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest; None where there is none or it is damaged. Whoever uses it need not check its form again."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if _well_formed(content) else None


def _well_formed(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and content.get("version") == VERSION
        and isinstance(content.get("made"), str)
        and isinstance(content.get("machine"), dict)
        and isinstance(content.get("uses"), list)
        and all(_well_formed_use(use) for use in content["uses"])
        and isinstance(content.get("files"), dict)
        and all(_inside(name) and isinstance(checksum, str) for name, checksum in content["files"].items())
    )


def _well_formed_use(use: Any) -> bool:
    return (
        isinstance(use, dict)
        and isinstance(use.get("name"), str)
        and isinstance(use.get("seconds"), int | float)
        and isinstance(use.get("keys"), list)
        and all(isinstance(key, str) and re.fullmatch(r"\w+", key) for key in use["keys"])
    )


def _inside(name: str) -> bool:
    """Whether a file's name in a manifest or an archive stays inside the cache."""
    return bool(name) and not name.startswith("/") and ".." not in Path(name).parts


def uses_of(manifest: Mapping[str, Any]) -> list[Use]:
    """The uses a manifest names."""
    return [Use(use["name"], tuple(use["keys"]), float(use["seconds"])) for use in manifest["uses"]]


def verify(folder: Path, machine: dict[str, Any]) -> list[str]:
    """What is wrong with a cache: no manifest, fields of the machine that differ, files missing, changed or unknown."""
    manifest = read_manifest(folder)
    if manifest is None:
        return [_without_manifest(folder)]
    problems = [f"made elsewhere: {line}" for line in differences(manifest["machine"], _plain(machine))]
    return problems + _wrong_files(folder, manifest["files"])


def _without_manifest(folder: Path) -> str:
    if (folder / MANIFEST).exists():
        return f"{folder} has a manifest that is damaged: nobody can say what made it"
    return f"{folder} has no manifest: nobody can say what made it"


def _wrong_files(folder: Path, listed: Mapping[str, str]) -> list[str]:
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
        needs: name → seconds that compiling it is expected to take, None if unknown.
    """
    manifest = read_manifest(folder)
    uses = {use.name: use for use in uses_of(manifest)} if manifest else {}
    missing = tuple(
        name
        for name in needs
        if name not in uses or not uses[name].keys or not all(_has_graph(folder, key) for key in uses[name].keys)
    )
    known = [needs[name] for name in missing]
    seconds = None if any(each is None for each in known) else float(sum(each or 0.0 for each in known))
    return Coverage(len(needs), missing, seconds)


def graph_file(folder: Path, key: str) -> Path:
    """Where Inductor keeps the graph of a key in a cache: a folder, with a file for each set of guards."""
    return folder / "fxgraph" / key[1:3] / key


def _has_graph(folder: Path, key: str) -> bool:
    place = graph_file(folder, key)
    return place.is_dir() and any(file.is_file() for file in place.iterdir())


def make_aside(root: Path, kind: str) -> Path:
    """An empty folder in the root for what this process is about to make; its name says whose it is."""
    aside = root / own_name(kind)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(mode=0o700)
    return aside


def swap_in(new: Path, place: Path) -> None:
    """Put a finished cache in its place; what was there before is removed afterwards.

    Two renames: between them nothing is there for a moment, and what starts then compiles. Where several processes do
    this at once, each puts its own in place and the last one's stays. A failure puts back what was there.

    Raises:
        OSError: it cannot be done.
    """
    old = place.with_name(own_name(f"{place.name}.old"))
    while True:
        with suppress(FileNotFoundError):
            os.rename(place, old)
        try:
            os.rename(new, place)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in _TAKEN:  # by another process, since the first rename
                shutil.rmtree(old, ignore_errors=True)
                continue
            with suppress(OSError):
                os.rename(old, place)
            raise
        shutil.rmtree(old, ignore_errors=True)
        return


def hand_on(filled: Path, place: Path) -> None:
    """Copy what a cache holds to a place that has none yet; who comes first is the one that stays.

    Raises:
        OSError: it cannot be copied.
    """
    aside = make_aside(place.parent, "filling")
    try:
        for file in _files(filled):
            copy = aside / file.relative_to(filled)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                shutil.copy2(file, copy)
        os.rename(aside, place)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def pack(folder: Path, archive: Path) -> int:
    """Write a cache with its manifest as a .tar.gz; returns its bytes.

    Raises:
        CacheRefused: it has no manifest, its files are not those of its manifest, or the archive cannot be written.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise CacheRefused(f"{_without_manifest(folder)}; `draftsmith compile warm CONFIG` fills it")
    # Files that came after the manifest stay behind.
    problems = [line for line in _wrong_files(folder, manifest["files"]) if not line.startswith("unknown")]
    if problems:
        raise CacheRefused(f"{folder}: {_first(problems)}; `draftsmith compile warm CONFIG` fills it anew")
    aside = archive.with_name(own_name(archive.name))
    try:
        with tarfile.open(aside, "w:gz", compresslevel=3) as tar:
            for name in (MANIFEST, *sorted(manifest["files"])):
                tar.add(folder / name, arcname=name, recursive=False)
        os.replace(aside, archive)
        return archive.stat().st_size
    except OSError as error:
        raise CacheRefused(f"{archive} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def unpack(archive: Path, place: Path, machine: dict[str, Any], needs: Mapping[str, float | None]) -> dict[str, Any]:
    """Check an archive and swap it in at `place`; returns its manifest.

    Args:
        archive: what `pack` wrote.
        place: of the cache; what it holds stays if the archive is refused.
        machine: facts of this one.
        needs: what the cache is for, as in `coverage`.

    Raises:
        CacheRefused: it does not match this machine (the message names each field), a file is missing, changed, or not
            in the manifest, a name points outside; it holds nothing of `needs`, or lacks some that is there already.
    """
    make_writable(place.parent)
    scratch = make_aside(place.parent, "unpacking")
    try:
        members = _extract(archive, scratch)
        manifest = read_manifest(scratch)
        if manifest is None:
            raise CacheRefused(f"{archive} has no manifest, or a damaged one: nobody can say what made it")
        # By the archive's own list: files that `_files` passes over are not let in either.
        problems = [f"not in the manifest: {name}" for name in sorted(members - {MANIFEST, *manifest["files"]})]
        problems = problems or verify(scratch, machine)
        if problems:
            raise CacheRefused(f"{archive}: {_first(problems)}")
        _check_gain(archive, coverage(scratch, needs), place, coverage(place, needs))
        swap_in(scratch, place)
        return manifest
    except OSError as error:
        raise CacheRefused(f"{archive} cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _extract(archive: Path, folder: Path) -> set[str]:
    """Unpack plain files into a folder; their names."""
    try:
        with tarfile.open(archive, "r:*") as tar:
            members = tar.getmembers()
            for member in members:
                if not member.isreg() or not _inside(member.name):
                    raise CacheRefused(f"{archive}: {member.name!r} is no plain file inside the cache")
            tar.extractall(folder, members=members, filter="data")
            return {member.name for member in members}
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise CacheRefused(f"{archive} cannot be unpacked: {error}") from error


def _check_gain(archive: Path, new: Coverage, place: Path, old: Coverage) -> None:
    """Refuse to replace a cache by one that is worth nothing here, or less."""
    if len(new.missing) == new.needed:
        raise CacheRefused(f"{archive} holds nothing that this config needs: it was packed for another one")
    lost = sorted(set(new.missing) - set(old.missing))
    if lost:
        raise CacheRefused(
            f"{archive} lacks {', '.join(lost)}, which {place} holds: move that folder away to unpack all the same"
        )


def _first(problems: Sequence[str], shown: int = 5) -> str:
    more = f"; and {len(problems) - shown} more" if len(problems) > shown else ""
    return "; ".join(problems[:shown]) + more


def own_caches() -> list[tuple[Path, int]]:
    """Draftsmith's own caches and their bytes, with what a process left unfinished when it ended."""
    return [(item, sum(sizes(item).values())) for item in _in_root() if not why_kept(item)]


def left_alone() -> list[str]:
    """What else lies in the root folder, each with the reason why it is not deleted."""
    return [f"{item.name} ({why})" for item in _in_root() if (why := why_kept(item))]


def clear(caches: Sequence[Path]) -> int:
    """Delete caches under the root folder; returns the bytes that were freed.

    Raises:
        CacheRefused: one is not Draftsmith's own, is being filled, or cannot be deleted.
    """
    root = root_folder().resolve()
    freed = 0
    for place in caches:
        why = why_kept(place) if place.resolve().parent == root else f"not in {root}"
        if why:
            raise CacheRefused(f"{place} is not deleted: {why}")
        size = sum(sizes(place).values())
        try:
            shutil.rmtree(place)
        except OSError as error:
            raise CacheRefused(f"{place} cannot be deleted: {error}") from error
        freed += size
    return freed


def remove_abandoned() -> list[Path]:
    """Delete what processes of this host that have ended left unfinished; returns the folders."""
    abandoned = [item for item in _in_root() if is_unfinished(item) and not why_kept(item)]
    for item in abandoned:
        shutil.rmtree(item, ignore_errors=True)
    return [item for item in abandoned if not item.exists()]


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
    return sorted(
        file for file in found if file.suffix not in (".lock", ".tmp") and file.is_file() and not file.is_symlink()
    )


def _checksum(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _plain(content: Any) -> Any:
    return json.loads(json.dumps(content, default=str))
