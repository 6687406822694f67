"""Compile caches on disk: what they say of themselves, and what is refused. Files are made up; nothing compiles."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from draftsmith.compiled import cache
from draftsmith.compiled.cache import CacheRefused, Use
from draftsmith.compiled.machine import differences, facts, source_hash

HERE = {"torch": "2.13.0", "cuda": None, "environment": {"TORCH_X": "1"}}
KEYS = ("fabcdef", "fghijkl")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Draftsmith's root with one cache of two graphs in it."""
    monkeypatch.setenv("DRAFTSMITH_CACHE_DIR", str(tmp_path / "own"))
    folder = tmp_path / "own" / "first"
    for key in KEYS:
        file = cache.graph_file(folder, key) / "entry"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"graph of " + key.encode())
    (folder / "ab").mkdir()
    (folder / "ab" / "code.py").write_text("print()\n" * 10)
    (folder / "locks").mkdir()
    (folder / "locks" / "x.lock").write_text("")
    cache.write_manifest(folder, HERE, [Use("drafter 0", KEYS, 20.0), Use("objective 0", (), 3.0)])
    return folder


def test_sizes_by_kind(own):
    assert cache.sizes(own) == {"Inductor graphs": 32, "code and objects": 80}


def test_a_cache_says_what_it_lacks_of_a_config(own):
    needs = {"drafter 0": 20.0, "objective 0": 4.0, "drafter 1": 3.0}
    covered = cache.coverage(own, needs)
    assert covered.line() == "1 of 3 regions present; 2 will compile, about 7 s"
    shutil.rmtree(cache.graph_file(own, KEYS[0]))
    assert cache.coverage(own, {"drafter 0": None}).line() == "0 of 1 regions present; 1 will compile, time unknown"
    assert cache.coverage(own.parent / "nowhere", needs).line().startswith("0 of 3 regions present; 3 will compile")


def test_verify_names_fields_and_files(own):
    assert cache.verify(own, HERE) == []
    assert cache.verify(own, {**HERE, "torch": "2.11.0", "environment": {"TORCH_X": "2"}}) == [
        "made elsewhere: environment.TORCH_X: 1 there, 2 here",
        "made elsewhere: torch: 2.13.0 there, 2.11.0 here",
    ]
    (own / "ab" / "code.py").write_text("other")
    shutil.rmtree(cache.graph_file(own, KEYS[1]))
    assert cache.verify(own, HERE) == [f"missing: fxgraph/gh/{KEYS[1]}/entry", "changed: ab/code.py"]
    (own / cache.MANIFEST).unlink()
    assert "no manifest" in cache.verify(own, HERE)[0]


def test_pack_and_unpack(own, tmp_path):
    archive = tmp_path / "cache.tar.gz"
    assert cache.pack(own, archive) == archive.stat().st_size
    place = own.parent / "second"
    place.mkdir()
    (place / "old").write_text("replaced")
    cache.unpack(archive, place, HERE)
    assert cache.verify(place, HERE) == []
    assert not (place / "old").exists()
    assert [item.name for item in own.parent.iterdir() if item.name.startswith(".")] == []


def test_unpack_refuses_another_machine_and_leaves_what_was_there(own, tmp_path):
    archive, place = tmp_path / "cache.tar.gz", own.parent / "second"
    cache.pack(own, archive)
    place.mkdir()
    (place / "old").write_text("stays")
    with pytest.raises(CacheRefused, match=r"torch: 2\.13\.0 there, 2\.14\.0 here"):
        cache.unpack(archive, place, {**HERE, "torch": "2.14.0"})
    assert (place / "old").read_text() == "stays"


@pytest.mark.parametrize("damage", ["changed", "added", "no manifest", "outside", "link", "not an archive"])
def test_unpack_refuses_what_no_checksum_vouches_for(own, tmp_path, damage):
    archive, evil = tmp_path / "cache.tar.gz", tmp_path / "evil.tar.gz"
    cache.pack(own, archive)
    with tarfile.open(archive) as good, tarfile.open(evil, "w:gz") as bad:
        for member in good.getmembers():
            content = good.extractfile(member).read()
            if damage == "no manifest" and member.name == cache.MANIFEST:
                continue
            if damage == "changed" and member.name == "ab/code.py":
                content = b"import os"
                member.size = len(content)
            bad.addfile(member, io.BytesIO(content))
        if damage in ("added", "outside"):
            member = tarfile.TarInfo("ab/more.py" if damage == "added" else "../more.py")
            bad.addfile(member, io.BytesIO(b""))
        if damage == "link":
            member = tarfile.TarInfo("ab/link")
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            bad.addfile(member)
    if damage == "not an archive":
        evil.write_bytes(b"no")
    with pytest.raises(CacheRefused):
        cache.unpack(evil, own.parent / "second", HERE)
    assert not (own.parent / "second").exists()
    assert not (own.parent.parent / "more.py").exists()


def test_clear_deletes_own_caches_only(own, tmp_path):
    other = tmp_path / "torchinductor"
    other.mkdir()
    (own.parent / "link").symlink_to(other)
    with pytest.raises(CacheRefused):
        cache.clear([other])
    with pytest.raises(CacheRefused):
        cache.clear([own.parent / "link"])
    with pytest.raises(CacheRefused):
        cache.clear([own.parent / ".." / "torchinductor"])
    assert cache.own_caches()[0] == (own, 112)
    assert cache.clear([own]) == 112
    assert other.is_dir()
    assert not own.exists()


def test_the_environment_decides_where_inductor_looks(own, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    assert cache.use(own) is False
    assert cache.inductor_folder() == Path("/somewhere")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert cache.use(own) is True
    assert cache.inductor_folder() == own


def test_facts_are_json_and_notice_sources_and_variables(tmp_path, monkeypatch):
    source = tmp_path / "a.py"
    source.write_text("x = 1\n")
    before = json.loads(json.dumps(facts([tmp_path])))
    assert before["sources"] == source_hash([tmp_path])
    source.write_text("x = 2\n")
    monkeypatch.setenv("TORCHINDUCTOR_SOMETHING", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")  # a place changes nothing
    changed = differences(before, json.loads(json.dumps(facts([tmp_path]))))
    assert [line.split(":")[0] for line in changed] == ["environment.TORCHINDUCTOR_SOMETHING", "sources"]
