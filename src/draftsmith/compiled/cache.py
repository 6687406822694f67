"""Compile caches: what is in one, whether it fits this machine and these needs, and moving it safely.

A *cache* is a folder that Inductor is pointed at (`TORCHINDUCTOR_CACHE_DIR`); Triton's lies inside it. With a
`manifest.json` it also knows what produced it: the machine's facts, the uses that were compiled (a name for each, the
graph keys behind it, the seconds it took) and a checksum of every file.

Cached graphs are pickles, so a cache from elsewhere is only unpacked when every checksum matches and the facts of the
machine are the same; a checksum proves that nothing changed on the way, not that the maker was honest.

Draftsmith's own caches live under `DRAFTSMITH_CACHE_DIR` or `~/.cache/draftsmith/compiled`; nothing else is ever
deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith.compiled.machine import differences

MANIFEST = "manifest.json"
VERSION = 1
_KINDS = {
    "fxgraph": "Inductor graphs",
    "aotautograd": "AOTAutograd graphs",
    "triton": "Triton kernels",
}


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


def use(folder: Path) -> bool:
    """Point Inductor of this process at a folder, unless the environment names one already; whether it was done.

    Torch writes its own default into the environment at the first look; that one does not count.
    """
    global _used
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") not in (None, _default_folder(), _used):
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
        found[kind] = found.get(kind, 0) + file.stat().st_size
    return found


def write_manifest(folder: Path, machine: dict[str, Any], uses: Iterable[Use]) -> dict[str, Any]:
    """Write what produced the cache and a checksum of each file; returns the manifest."""
    content = {
        "version": VERSION,
        "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": machine,
        "uses": [asdict(use) for use in uses],
        "files": {str(file.relative_to(folder)): _checksum(file) for file in _files(folder)},
    }
    aside = folder / f".{MANIFEST}.new"
    aside.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(aside, folder / MANIFEST)
    return content


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest; None where there is none or it cannot be understood."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    right = isinstance(content, dict) and content.get("version") == VERSION
    return content if right and isinstance(content.get("files"), dict) else None


def uses_of(manifest: Mapping[str, Any]) -> list[Use]:
    """The uses a manifest names."""
    return [Use(use["name"], tuple(use["keys"]), float(use["seconds"])) for use in manifest.get("uses", ())]


def verify(folder: Path, machine: dict[str, Any]) -> list[str]:
    """What is wrong with a cache: no manifest, fields of the machine that differ, files missing, changed or unknown."""
    manifest = read_manifest(folder)
    if manifest is None:
        return [f"{folder} has no manifest: nobody can say what made it"]
    problems = [f"made elsewhere: {line}" for line in differences(manifest.get("machine", {}), _plain(machine))]
    there = {str(file.relative_to(folder)) for file in _files(folder)}
    listed = manifest["files"]
    problems += [f"missing: {name}" for name in sorted(set(listed) - there)]
    problems += [f"changed: {name}" for name in sorted(there & set(listed)) if _checksum(folder / name) != listed[name]]
    return problems


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
        if name not in uses
        or not uses[name].keys
        or not all(graph_file(folder, key).exists() for key in uses[name].keys)
    )
    known = [needs[name] for name in missing]
    seconds = None if any(each is None for each in known) else float(sum(each or 0.0 for each in known))
    return Coverage(len(needs), missing, seconds)


def graph_file(folder: Path, key: str) -> Path:
    """Where Inductor keeps the graph of a key in a cache."""
    return folder / "fxgraph" / key[1:3] / key


def swap_in(new: Path, place: Path) -> None:
    """Put a finished cache in its place in one step; what was there before is removed afterwards."""
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    old = place.with_name(f".{place.name}.old-{os.getpid()}")
    if place.exists():
        os.rename(place, old)
    os.rename(new, place)
    shutil.rmtree(old, ignore_errors=True)


def pack(folder: Path, archive: Path) -> int:
    """Write a cache with its manifest as a .tar.gz; returns its bytes.

    Raises:
        CacheRefused: it has no manifest.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise CacheRefused(f"{folder} has no manifest: fill it with `draftsmith compile warm CONFIG` first")
    aside = archive.with_name(f".{archive.name}.new")
    with tarfile.open(aside, "w:gz", compresslevel=3) as tar:
        for name in (MANIFEST, *sorted(manifest["files"])):
            tar.add(folder / name, arcname=name, recursive=False)
    os.replace(aside, archive)
    return archive.stat().st_size


def unpack(archive: Path, place: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """Check an archive and swap it in at `place`; returns its manifest.

    Raises:
        CacheRefused: it does not match this machine (the message names each field), a file is missing, changed, or not
            in the manifest, or a name points outside.
    """
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=place.parent) as scratch:
        folder = Path(scratch) / "cache"
        folder.mkdir(mode=0o700)
        try:
            with tarfile.open(archive, "r:*") as tar:
                members = tar.getmembers()
                for member in members:
                    if not member.isreg() or member.name.startswith("/") or ".." in Path(member.name).parts:
                        raise CacheRefused(f"{archive}: {member.name!r} is no plain file inside the cache")
                tar.extractall(folder, members=members, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise CacheRefused(f"{archive} cannot be unpacked: {error}") from error
        manifest = read_manifest(folder)
        problems = verify(folder, machine)
        if manifest is not None:
            extra = {str(file.relative_to(folder)) for file in _files(folder)} - set(manifest["files"])
            problems += [f"not in the manifest: {name}" for name in sorted(extra)]
        if manifest is None or problems:
            raise CacheRefused(f"{archive}: {'; '.join(problems[:5])}")
        swap_in(folder, place)
        return manifest


def own_caches() -> list[tuple[Path, int]]:
    """Draftsmith's own caches and their bytes, unfinished ones included."""
    root = root_folder()
    if not root.is_dir():
        return []
    return [(item, sum(sizes(item).values())) for item in sorted(root.iterdir()) if item.is_dir()]


def clear(caches: Sequence[Path]) -> int:
    """Delete caches under the root folder; returns the bytes that were freed. Refuses every other place."""
    root = root_folder().resolve()
    freed = 0
    for place in caches:
        if place.is_symlink() or place.resolve().parent != root:
            raise CacheRefused(f"{place} is not one of Draftsmith's own caches in {root}")
        freed += sum(sizes(place).values())
        shutil.rmtree(place)
    return freed


def _files(folder: Path) -> list[Path]:
    """Files that a cache consists of: not the manifest, locks and what is being written."""
    if not folder.is_dir():
        return []
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and not file.is_symlink()
        and file.name not in (MANIFEST, f".{MANIFEST}.new")
        and file.suffix not in (".lock", ".tmp")
        and "locks" not in file.relative_to(folder).parts[:1]
    )


def _checksum(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _plain(content: Any) -> Any:
    return json.loads(json.dumps(content, default=str))
