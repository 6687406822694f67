"""A compile cache as an archive: packed on one machine, unpacked on others like it.

Only plain files that the manifest names get in, each copied by its content alone; what is there already stays unless
the new one is worth as much.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftsmith.compiled.aside import aside_of
from draftsmith.compiled.cache import (
    MANIFEST,
    Coverage,
    coverage,
    inside,
    make_writable,
    read_manifest,
    swap_in,
    verify,
    without_manifest,
    wrong_files,
)
from draftsmith.compiled.cache_lock import CacheRefused, room, shared


def pack(folder: Path, archive: Path) -> int:
    """Write a cache with its manifest as a .tar.gz; returns its bytes. Meanwhile nobody deletes or replaces the cache.

    Raises:
        CacheRefused: it has no manifest, its files are not those of its manifest, or the archive cannot be written.
    """
    try:
        with shared(folder):
            return _pack(folder, archive)
    except FileNotFoundError:
        raise CacheRefused(_unfilled(folder)) from None


def _pack(folder: Path, archive: Path) -> int:
    manifest = read_manifest(folder)
    if manifest is None:
        raise CacheRefused(_unfilled(folder))
    # Files that came after the manifest stay behind.
    problems = [line for line in wrong_files(folder, manifest["files"]) if not line.startswith("unknown")]
    if problems:
        raise CacheRefused(f"{folder}: {_first(problems)}; `draftsmith compile warm CONFIG` fills it anew")
    aside = aside_of(archive)
    try:
        with tarfile.open(aside, "w:gz", compresslevel=3) as tar:
            _add_manifest(tar, manifest)
            for name in sorted(manifest["files"]):
                tar.add(folder / name, arcname=name, recursive=False)
        os.replace(aside, archive)
        return archive.stat().st_size
    except OSError as error:
        raise CacheRefused(f"{archive} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def _unfilled(folder: Path) -> str:
    return f"{without_manifest(folder)}; `draftsmith compile warm CONFIG` fills it"


def _add_manifest(tar: tarfile.TarFile, manifest: dict[str, Any]) -> None:
    """The one whose files are packed: a run that uses the cache may have written another since."""
    content = (json.dumps(manifest, indent=1) + "\n").encode()
    member = tarfile.TarInfo(MANIFEST)
    member.size, member.mtime = len(content), int(time.time())
    tar.addfile(member, io.BytesIO(content))


def unpack(archive: Path, place: Path, machine: dict[str, Any], needs: Mapping[str, float | None]) -> dict[str, Any]:
    """Check an archive and swap it in at `place`; returns its manifest.

    Args:
        archive: what `pack` wrote.
        place: of the cache; what it holds stays if the archive is refused.
        machine: facts of this one.
        needs: what the cache is for, as in `coverage`.

    Raises:
        CacheRefused: it does not match this machine (the message names each field), a file is missing, changed, or not
            in the manifest, a name points outside; it holds nothing of `needs`, or lacks some that is there already;
            another process uses what is there.
    """
    make_writable(place.parent)
    try:
        with room(place.parent, "unpacking") as scratch:
            new = scratch / place.name
            manifest = _unpacked(archive, new, machine)
            _check_gain(archive, coverage(new, needs), place, coverage(place, needs))
            swap_in(new, place)
            return manifest
    except OSError as error:
        raise CacheRefused(f"{archive} cannot be unpacked: {error}") from error


def _unpacked(archive: Path, folder: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """Unpack an archive that fits this machine into a new folder; its manifest."""
    members = _extract(archive, folder)
    manifest = read_manifest(folder)
    if manifest is None:
        raise CacheRefused(f"{archive} has no manifest, or a damaged one: nobody can say what made it")
    # By the archive's own list: files that a cache does not count as its own are not let in either.
    problems = [f"not in the manifest: {name}" for name in sorted(members - {MANIFEST, *manifest["files"]})]
    problems = problems or verify(folder, machine)
    if problems:
        raise CacheRefused(f"{archive}: {_first(problems)}")
    return manifest


def _extract(archive: Path, folder: Path) -> set[str]:
    """Unpack plain files into a new folder; their names."""
    folder.mkdir(mode=0o700)
    try:
        with tarfile.open(archive, "r:*") as tar:
            members = tar.getmembers()
            for member in members:
                _check_member(archive, member)
            for member in members:
                _extract_member(tar, member, folder / member.name)
            return {member.name for member in members}
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise CacheRefused(f"{archive} cannot be unpacked: {error}") from error


def _check_member(archive: Path, member: tarfile.TarInfo) -> None:
    try:
        inside(member.name)
    except ValueError:
        plain = False
    else:
        plain = member.isreg()
    if not plain:
        raise CacheRefused(f"{archive}: {member.name!r} is no plain file inside the cache")


def _extract_member(tar: tarfile.TarFile, member: tarfile.TarInfo, file: Path) -> None:
    """Copy what a plain file holds, and nothing that is said of it: owner, mode, time."""
    content = tar.extractfile(member)
    assert content is not None, "a plain file"
    file.parent.mkdir(parents=True, exist_ok=True)
    with content, open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
        shutil.copyfileobj(content, copy)


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
