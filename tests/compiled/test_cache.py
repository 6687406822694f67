"""Compile caches on disk: what they say of themselves, and what is refused. Files are made up; nothing compiles."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.compiled import archive as archives
from draftsmith.compiled import cache, cache_lock
from draftsmith.compiled.cache import CacheRefused, Use
from draftsmith.compiled.machine import differences, facts, harmless_environment, source_hash

HERE = {"torch": "2.13.0", "cuda": None, "environment": {"TORCH_X": "1"}}
KEYS = ("fabcdef", "fghijkl")
FIRST, SECOND = "0123456789abcdef", "fedcba9876543210"
NEEDS = {"drafter 0": 20.0, "objective 0": 4.0}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Draftsmith's root with one cache of two graphs in it."""
    monkeypatch.setenv("DRAFTSMITH_CACHE_DIR", str(tmp_path / "own"))
    folder = tmp_path / "own" / FIRST
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


@contextlib.contextmanager
def another_process(code: str):
    """Runs code in a process of its own up to its first line of output, which is yielded; killed at the end."""
    program = (
        f"import time; from pathlib import Path; from draftsmith.compiled import cache_lock; {code}; time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def using(folder):
    """A process that compiles into a folder, or loads from it."""
    return another_process(f"cache_lock.share(Path({str(folder)!r})); print('uses', flush=True)")


def making(root):
    """A process that makes something in the root; the name of its room is yielded."""
    return another_process(
        f"room = cache_lock.room(Path({str(root)!r}), 'filling'); print(room.__enter__().name, flush=True)"
    )


@pytest.fixture
def without_locks(monkeypatch):
    """A file system that knows no locks."""

    def flock(_descriptor, _how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache_lock.fcntl, "flock", flock)


def test_sizes_by_kind(own):
    assert cache.sizes(own) == {"Inductor graphs": 32, "code and objects": 80}


def test_a_cache_says_what_it_lacks_of_a_config(own):
    needs = {"drafter 0": 20.0, "objective 0": 4.0, "drafter 1": 3.0}
    covered = cache.coverage(own, needs)
    assert covered.line() == "1 of 3 regions present; 2 will compile, about 6 s"
    shutil.rmtree(cache.graph_file(own, KEYS[0]))
    assert cache.coverage(own, {"another 0": None}).line() == "0 of 1 regions present; 1 will compile, time unknown"
    use, _ = cache.uses_of(cache.read_manifest(own))
    for seconds, known in ((31.0, 31), (0.5, 31), (40.0, 40)):  # compiled, loaded, compiled again
        cache.write_manifest(own, HERE, [replace(use, seconds=seconds)])
        covered = cache.coverage(own, {use.name: None})
        assert covered.line() == f"0 of 1 regions present; 1 will compile, about {known} s"
    cache.write_manifest(own, HERE, [replace(use, keys=("fother",), seconds=1.0)])
    assert cache.coverage(own, {use.name: None}).line().endswith("about 1 s")
    assert cache.coverage(own.parent / "nowhere", needs).line().startswith("0 of 3 regions present; 3 will compile")


def test_verify_names_fields_and_files(own):
    assert cache.verify(own, HERE) == []
    assert cache.verify(own, {**HERE, "torch": "2.11.0", "environment": {"TORCH_X": "2"}}) == [
        "made elsewhere: environment.TORCH_X: 1 there, 2 here",
        "made elsewhere: torch: 2.13.0 there, 2.11.0 here",
    ]
    (own / "ab" / "code.py").write_text("other")
    shutil.rmtree(cache.graph_file(own, KEYS[1]))
    (own / "ab" / "more.py").write_text("who wrote this?")
    assert cache.verify(own, HERE) == [
        f"missing: fxgraph/gh/{KEYS[1]}/entry",
        "changed: ab/code.py",
        "unknown: ab/more.py",
    ]
    (own / cache.MANIFEST).unlink()
    assert "no manifest" in cache.verify(own, HERE)[0]
    shutil.rmtree(own)
    assert "is not there" in cache.verify(own, HERE)[0]


def test_the_place_of_caches_is_absolute(tmp_path, monkeypatch):
    """Torch makes the folder that it is told absolute, and the two must be one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAFTSMITH_CACHE_DIR", "here/../there")
    assert cache.root_folder() == tmp_path / "there"


def test_pack_and_unpack(own, tmp_path):
    archive = tmp_path / "cache.tar.gz"
    assert archives.pack(own, archive) == archive.stat().st_size
    place = own.parent / SECOND
    place.mkdir()
    (place / "old").write_text("replaced")
    archives.unpack(archive, place, HERE, NEEDS)
    assert cache.verify(place, HERE) == []
    assert not (place / "old").exists()
    assert [item.name for item in own.parent.iterdir() if item.name.startswith(".")] == []


def test_unpack_refuses_another_machine_and_leaves_what_was_there(own, tmp_path):
    archive, place = tmp_path / "cache.tar.gz", own.parent / SECOND
    archives.pack(own, archive)
    place.mkdir()
    (place / "old").write_text("stays")
    with pytest.raises(CacheRefused, match=r"torch: 2\.13\.0 there, 2\.14\.0 here"):
        archives.unpack(archive, place, {**HERE, "torch": "2.14.0"}, NEEDS)
    assert (place / "old").read_text() == "stays"


@pytest.mark.parametrize(
    "damage",
    [
        *("changed", "added", "added aside", "no manifest", "outside", "link", "not an archive", "a lock", "twice"),
        "no file's name",
    ],
)
def test_unpack_refuses_what_no_checksum_vouches_for(own, tmp_path, damage):
    archive, evil = tmp_path / "cache.tar.gz", tmp_path / "evil.tar.gz"
    archives.pack(own, archive)
    with tarfile.open(archive) as good, tarfile.open(evil, "w:gz") as bad:
        for member in good.getmembers():
            content = good.extractfile(member).read()
            if damage == "no manifest" and member.name == cache.MANIFEST:
                continue
            if damage == "changed" and member.name == "ab/code.py":
                content = b"import os"
                member.size = len(content)
            bad.addfile(member, io.BytesIO(content))
        more = {
            "added": "ab/more.py",
            "added aside": f"fxgraph/gh/{KEYS[1]}/more.tmp",
            "outside": "../more.py",
            "a lock": cache_lock.LOCK,
            "twice": "ab/code.py",
        }
        if damage in more:
            bad.addfile(tarfile.TarInfo(more[damage]), io.BytesIO(b""))
        if damage == "no file's name":
            member = tarfile.TarInfo("ab/more.py")
            member.pax_headers = {"path": "ab/more\0.py"}
            bad.addfile(member)
        if damage == "link":
            member = tarfile.TarInfo("ab/link")
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            bad.addfile(member)
    if damage == "not an archive":
        evil.write_bytes(b"no")
    with pytest.raises(CacheRefused):
        archives.unpack(evil, own.parent / SECOND, HERE, NEEDS)
    assert not (own.parent / SECOND).exists()
    assert not (own.parent.parent / "more.py").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("machine", None),
        ("made", None),
        ("uses", [{"name": "drafter 0", "seconds": 1.0}]),
        ("uses", [{"name": "drafter 0", "keys": [""], "seconds": 1.0}]),
        ("uses", [{"name": "drafter 0", "keys": [".."], "seconds": 1.0}]),
        ("uses", [{"name": "drafter 0", "keys": ["fkey\n"], "seconds": 1.0}]),
        ("uses", [{"name": "drafter 0", "keys": ["fkey"], "seconds": "1"}]),
        ("uses", [{"name": "drafter 0", "keys": ["fkey"], "seconds": float("nan")}]),
        ("uses", {"drafter 0": []}),
        ("version", 2),
        ("version", "1"),
        ("files", {"../../elsewhere": "0"}),
        ("files", {"/etc/passwd": "0"}),
        ("files", ["ab/code.py"]),
        ("files", {"ab/code.py": 1}),
    ],
)
def test_a_damaged_manifest_is_as_good_as_none(own, tmp_path, field, value):
    content = json.loads((own / cache.MANIFEST).read_text())
    (own / cache.MANIFEST).write_text(json.dumps({**content, field: value}))
    assert cache.read_manifest(own) is None
    assert cache.verify(own, HERE) == [f"{own} has a manifest that is damaged: nobody can say what made it"]
    assert cache.coverage(own, {"drafter 0": 1.0}).missing == ("drafter 0",)
    with pytest.raises(CacheRefused, match="damaged"):
        archives.pack(own, tmp_path / "cache.tar.gz")


def test_a_graph_whose_files_are_gone_is_missing(own):
    (cache.graph_file(own, KEYS[0]) / "entry").unlink()
    assert cache.coverage(own, {"drafter 0": 1.0}).missing == ("drafter 0",)


def test_a_manifest_is_written_while_others_compile_into_the_folder(own, monkeypatch):
    """Parts that Triton is writing are none of the cache's, and a file may go between listing and reading."""
    being_written = own / "triton" / "KERNEL" / "tmp.pid_12_ab"
    being_written.mkdir(parents=True)
    (being_written / "kernel.cubin").write_text("half of it")
    left_by_inductor = (
        own / "triton" / "0" / "tmp.0b4dc5de-8a0f-4c1e-9d8b-1f8b7a1c2d3e"
    )  # it lost the race to its place
    left_by_inductor.mkdir(parents=True)
    (left_by_inductor / "kernel.cubin").write_text("a twin")
    (own / f".{cache.MANIFEST}-12-elsewhere").write_text("another process's")
    checksum = cache._checksum

    def vanishing(file):
        (own / "ab" / "code.py").unlink(missing_ok=True)
        return checksum(file)

    monkeypatch.setattr(cache, "_checksum", vanishing)
    written = cache.write_manifest(own, HERE, [])
    assert sorted(written["files"]) == [f"fxgraph/{key[1:3]}/{key}/entry" for key in KEYS]
    assert cache.verify(own, HERE) == []
    assert cache.sizes(own) == {"Inductor graphs": 32}


def test_a_manifest_that_cannot_be_written_leaves_nothing_behind(own, monkeypatch):
    def full(_from, _to):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(own.iterdir())
    monkeypatch.setattr(cache.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        cache.write_manifest(own, HERE, [])
    assert sorted(own.iterdir()) == before


def test_pack_refuses_what_its_manifest_does_not_vouch_for(own, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (own / "ab" / "more.py").write_text("came later, stays behind")
    archives.pack(own, out / "good.tar.gz")
    with tarfile.open(out / "good.tar.gz") as tar:
        assert "ab/more.py" not in tar.getnames()
    with pytest.raises(CacheRefused, match=r"nowhere/cache\.tar\.gz cannot be written: No such file or directory"):
        archives.pack(own, tmp_path / "nowhere" / "cache.tar.gz")
    (own / "ab" / "code.py").write_text("other")
    with pytest.raises(CacheRefused, match=r"changed: ab/code\.py"):
        archives.pack(own, out / "bad.tar.gz")
    (own / "ab" / "code.py").unlink()
    with pytest.raises(CacheRefused, match=r"missing: ab/code\.py"):
        archives.pack(own, out / "bad.tar.gz")
    assert [item.name for item in out.iterdir()] == ["good.tar.gz"]


def test_pack_that_fails_half_way_leaves_nothing_behind(own, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()

    def failing(_tar, name, **_options):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(name))

    monkeypatch.setattr(tarfile.TarFile, "add", failing)
    with pytest.raises(CacheRefused, match="cannot be written"):
        archives.pack(own, out / "cache.tar.gz")
    assert list(out.iterdir()) == []


def test_unpack_does_not_replace_a_cache_by_one_that_is_worth_less(own, tmp_path):
    archive, place = tmp_path / "cache.tar.gz", own.parent / SECOND
    archives.pack(own, archive)
    with pytest.raises(CacheRefused, match="holds nothing that this config needs"):
        archives.unpack(archive, place, HERE, {"drafter of another config": 1.0})
    assert not place.exists()
    shutil.copytree(own, place)
    uses = [Use("drafter 0", KEYS, 20.0), Use("objective 0", KEYS[:1], 3.0)]
    cache.write_manifest(place, HERE, uses)
    with pytest.raises(CacheRefused, match=r"lacks objective 0, which .* holds"):
        archives.unpack(archive, place, HERE, NEEDS)
    assert cache.coverage(place, NEEDS).missing == ()
    archives.unpack(archive, place, HERE, {"drafter 0": 20.0})
    assert cache.coverage(place, NEEDS).missing == ("objective 0",)


@pytest.mark.parametrize("root", ["/dev/null/x", "/proc/x"])
def test_a_place_that_cannot_be_written_is_refused(own, tmp_path, root):
    archive = tmp_path / "cache.tar.gz"
    archives.pack(own, archive)
    with pytest.raises(CacheRefused, match=f"{root} cannot be written"):
        archives.unpack(archive, Path(root) / FIRST, HERE, NEEDS)


def test_of_two_that_swap_in_at_once_the_last_one_stays(own, monkeypatch):
    """The other one comes between the two renames."""
    place, ours, theirs = own.parent / SECOND, own.parent / "ours", own.parent / "theirs"
    for folder in (place, ours, theirs):
        folder.mkdir()
        (folder / "who").write_text(folder.name)
    rename, calls = os.rename, []

    def interrupted(one, other):
        calls.append(one)
        rename(one, other)
        if len(calls) == 1:
            rename(theirs, place)

    monkeypatch.setattr(cache.os, "rename", interrupted)
    cache.swap_in(ours, place)
    assert (place / "who").read_text() == "ours"
    assert sorted(item.name for item in own.parent.iterdir()) == sorted([FIRST, SECOND])


@pytest.mark.parametrize("end", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")])
def test_a_swap_that_fails_puts_back_what_was_there(own, monkeypatch, end):
    rename, new = os.rename, own.parent / "new"
    new.mkdir()

    def failing(one, other):
        if one == new:
            raise end
        rename(one, other)

    monkeypatch.setattr(cache.os, "rename", failing)
    with pytest.raises(type(end)):
        cache.swap_in(new, own)
    assert cache.verify(own, HERE) == []


def test_handing_on_leaves_the_first_that_came(own):
    place = own.parent / SECOND
    cache.hand_on(own, place)
    assert cache.sizes(place) == cache.sizes(own)
    (place / "ab" / "code.py").write_text("the first")
    cache.hand_on(own, place)
    assert (place / "ab" / "code.py").read_text() == "the first"
    assert sorted(item.name for item in own.parent.iterdir()) == [FIRST, SECOND]


def test_clear_deletes_own_caches_only(own, tmp_path):
    other = tmp_path / "torchinductor"
    other.mkdir()
    photos, link = own.parent / "photos", own.parent / SECOND
    photos.mkdir()
    link.symlink_to(other)
    for place in (other, photos, link, own.parent / ".." / "torchinductor"):
        with pytest.raises(CacheRefused, match="is not deleted"):
            cache.clear([place])
    assert cache.own_caches() == [(own, 112)]
    assert cache.left_alone() == dict.fromkeys((link, photos), "not made by Draftsmith")
    assert cache.clear([own]) == 112
    assert other.is_dir()
    assert photos.is_dir()
    assert not own.exists()


def test_what_a_process_left_unfinished_is_deleted_when_it_has_ended(own):
    with making(own.parent) as name:
        assert cache.left_alone() == {own.parent / name: "in use by another process"}
        assert cache.remove_abandoned() == []
        with pytest.raises(CacheRefused, match=f"{name} is in use by another process"):
            cache.clear([own.parent / name])
        assert (own.parent / name).is_dir()
    assert cache.left_alone() == {}
    assert cache.remove_abandoned() == [f"removed {name}, which a process that has ended left unfinished"]
    assert [item.name for item in own.parent.iterdir()] == [FIRST]


def test_a_room_is_nobody_elses_and_leaves_nothing(own):
    """Also not that of a process with the same number, which containers that share the root may have."""
    with cache.room(own.parent, "filling") as ours, cache.room(own.parent, "filling") as theirs:
        (ours / "graph").write_text("half of it")
        assert ours != theirs
        assert cache.remove_abandoned() == []
        assert (ours / "graph").exists()
    assert [item.name for item in own.parent.iterdir()] == [FIRST]


def test_a_cache_in_use_is_neither_deleted_nor_replaced(own, tmp_path):
    archive, new = tmp_path / "cache.tar.gz", own.parent / "new"
    archives.pack(own, archive)
    new.mkdir()
    with using(own):
        assert cache.left_alone() == {own: "in use by another process", new: "not made by Draftsmith"}
        for refused in (
            lambda: cache.clear([own]),
            lambda: cache.check_unused(own),
            lambda: cache.swap_in(new, own),
            lambda: archives.unpack(archive, own, HERE, NEEDS),
        ):
            with pytest.raises(CacheRefused, match=f"{own} is in use by another process"):
                refused()
        assert cache.verify(own, HERE) == []
        assert sorted(item.name for item in own.parent.iterdir()) == [FIRST, "new"]
    archives.unpack(archive, own, HERE, NEEDS)
    assert cache.clear([own]) == 112


def test_a_process_uses_what_it_chose_until_it_ends(own, monkeypatch):
    """Of several folders, all; the lock is no part of the cache, and several processes may hold it."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(cache, "_shared", {})
    with using(own):
        assert cache.use(own)
        assert cache.use(own.parent / SECOND)
        assert cache.use(own)
    assert cache.verify(own, HERE) == []
    assert cache.sizes(own.parent / SECOND) == {}
    for place in (own, own.parent / SECOND):
        with pytest.raises(CacheRefused, match="is in use"):
            cache.clear([place])
    shutil.rmtree(own)  # by hand
    assert cache.use(own)
    with pytest.raises(CacheRefused, match="is in use"):
        cache.clear([own])
    for lock in cache._shared.values():
        os.close(lock)


def test_who_comes_while_a_cache_is_deleted_makes_a_new_one(own, monkeypatch):
    """Between the opening of the lock's file and the lock."""
    flock, first = cache_lock.fcntl.flock, []

    def late(descriptor, how):
        if not first:
            first.append(descriptor)
            shutil.rmtree(own)
        flock(descriptor, how)

    monkeypatch.setattr(cache_lock.fcntl, "flock", late)
    lock = cache_lock.share(own)
    monkeypatch.undo()
    with pytest.raises(CacheRefused, match="is in use"), cache.exclusively(own):
        pass
    os.close(lock)


def test_nothing_is_deleted_where_the_file_system_knows_no_locks(own, tmp_path, without_locks):
    archive, left = tmp_path / "cache.tar.gz", own.parent / ".filling-abcd_123"
    left.mkdir()
    why = "cannot be locked, so it may be in use: No locks available"
    assert cache.left_alone() == {left: why, own: why}
    with pytest.raises(CacheRefused, match=why):
        cache.clear([own])
    assert cache.remove_abandoned() == [f"what may be left of a process that has ended stays: {left} {why}"]
    archives.pack(own, archive)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        archives.unpack(archive, own.parent / SECOND, HERE, NEEDS)  # where nothing is, nothing is replaced
        with pytest.raises(CacheRefused, match=why):
            archives.unpack(archive, own, HERE, NEEDS)
        assert cache_lock.share(own) is None
    assert [str(each.message) for each in warned] == [
        f"compile caches in {own.parent} cannot be locked, so others may delete or replace them: No locks available"
    ]
    assert sorted(item.name for item in own.parent.iterdir()) == sorted([left.name, FIRST, SECOND])


@pytest.mark.parametrize("locked_before", [True, False])
def test_a_cache_that_may_only_be_read_is_used(own, monkeypatch, locked_before):
    if locked_before:
        os.close(cache_lock.share(own))
    opens = os.open

    def read_only(file, flags, *mode):
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, "Read-only file system")
        return opens(file, flags, *mode)

    monkeypatch.setattr(cache_lock.os, "open", read_only)
    if locked_before:
        os.close(cache_lock.share(own))
    else:
        with pytest.warns(UserWarning, match="cannot be locked, .*: Read-only file system"):
            assert cache_lock.share(own) is None


def test_a_folder_that_the_environment_names_is_held_if_it_lies_in_a_cache_of_ours(own, tmp_path, monkeypatch):
    """Also Triton's. Elsewhere, and in the room of a process, which waits for those that it started, nothing is."""
    monkeypatch.setattr(cache, "_shared", {})
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with making(own.parent) as room_of_another:
        for elsewhere in (tmp_path / "elsewhere", own.parent / room_of_another / "filling"):
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(elsewhere))
            assert cache.use(own) is False
            assert cache._shared == {}
            assert not (elsewhere / cache_lock.LOCK).exists()
    for variable, named in (("TORCHINDUCTOR_CACHE_DIR", own), ("TRITON_CACHE_DIR", own.parent / SECOND / "triton")):
        monkeypatch.setenv(variable, str(named))
        for _ in range(2):
            assert cache.use(tmp_path / "other") is False
    assert list(cache._shared) == [own, own.parent / SECOND]
    for held, lock in cache._shared.items():
        with pytest.raises(CacheRefused, match="is in use"):
            cache.clear([held])
        os.close(lock)


def test_a_cache_is_neither_deleted_nor_replaced_while_it_is_packed(own, tmp_path, monkeypatch):
    """A run may write another manifest meanwhile; packed is the one of the files that are packed."""
    add, archive = tarfile.TarFile.add, tmp_path / "cache.tar.gz"

    def late(tar, *arguments, **options):
        with pytest.raises(CacheRefused, match="is in use"):
            cache.clear([own])
        (own / "more.py").write_text("more")
        cache.write_manifest(own, HERE, [])
        add(tar, *arguments, **options)

    monkeypatch.setattr(tarfile.TarFile, "add", late)
    archives.pack(own, archive)
    assert [use["name"] for use in archives.unpack(archive, own.parent / SECOND, HERE, NEEDS)["uses"]] == list(NEEDS)
    with pytest.raises(CacheRefused, match=r"is not there: every config, .* own; `draftsmith compile warm"):
        archives.pack(own.parent / "nowhere", tmp_path / "other.tar.gz")
    assert not (own.parent / "nowhere").exists()


def test_the_environment_decides_where_inductor_looks(own, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    assert cache.use(own) is False
    assert cache.inductor_folder() == Path("/somewhere")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert cache.use(own) is True
    assert cache.inductor_folder() == own


def test_ranks_and_starts_under_torchrun_look_for_the_same_cache(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("TORCH", "PYTORCH", "TRITON", "CUDA"))]:
        monkeypatch.delenv(name)
    alone = facts()
    for run, rank in (("one", "0"), ("one", "1"), ("two", "0")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/{run}/{rank}/error.json")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", rank)
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", rank)
        assert facts() == alone


@pytest.mark.parametrize(
    "name",
    [
        "TORCH_LOGS",
        "TORCHDYNAMO_VERBOSE",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
    ],
)
def test_variables_that_change_nothing_that_is_compiled(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    before = facts()
    monkeypatch.setenv(name, "1")
    assert facts() == before
    assert harmless_environment()[name] == "1"


def test_facts_are_json_and_notice_sources_and_variables(tmp_path, monkeypatch):
    source = tmp_path / "a.py"
    source.write_text("x = 1\n")
    before = json.loads(json.dumps(facts([tmp_path])))
    assert before["sources"] == source_hash([tmp_path])
    source.write_text("x = 2\n")
    monkeypatch.setenv("TORCHINDUCTOR_SOMETHING", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")  # a place changes nothing
    changed = differences(before, facts([tmp_path]))
    assert [line.split(":")[0] for line in changed] == ["environment.TORCHINDUCTOR_SOMETHING", "sources"]


@pytest.fixture
def flash_variables(monkeypatch):
    """None are set, and the process has chosen no place yet."""
    for name in (cache.FLASH_SWITCH, cache.FLASH_FOLDER, "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever the test sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(cache, "_flash_used", None)
    monkeypatch.setattr(cache, "_used", None)


def flash_place() -> tuple[str | None, str | None]:
    return os.environ.get(cache.FLASH_SWITCH), os.environ.get(cache.FLASH_FOLDER)


def test_flash_attention_keeps_its_kernels_beside_the_graphs(own, flash_variables, monkeypatch):
    """In the folder that was chosen last; in one that the environment names for Inductor, too."""
    for name in ("0123456789abcdef", "fedcba9876543210"):
        assert cache.use(own / name)
        assert flash_place() == ("1", str(own / name / "flash"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(own / "mine"))
    assert not cache.use(own / "0123456789abcdef")
    assert flash_place() == ("1", str(own / "mine" / "flash"))


def test_a_place_of_the_users_own_is_kept_and_used(own, flash_variables, monkeypatch, tmp_path):
    monkeypatch.setenv(cache.FLASH_FOLDER, str(tmp_path / "kernels"))
    cache.use(own / "0123456789abcdef")
    assert flash_place() == ("1", str(tmp_path / "kernels"))
    monkeypatch.setenv(cache.FLASH_SWITCH, "0")
    cache.use(own / "0123456789abcdef")
    assert flash_place() == ("0", str(tmp_path / "kernels"))


def test_what_flash_attention_is_writing_is_no_part_of_a_cache(own):
    folder = own / "0123456789abcdef" / "flash" / "sources" / "fwd"
    folder.mkdir(parents=True)
    for name in ("one.o", "one.lock", ".one.77.tmp.o"):
        (folder / name).write_text("x")
    content = cache.write_manifest(own / "0123456789abcdef", {}, [])
    assert list(content["files"]) == ["flash/sources/fwd/one.o"]
    assert cache.flash_kernels(own / "0123456789abcdef") == {folder / "one.o"}
    assert cache.sizes(own / "0123456789abcdef") == {"FlashAttention-4 kernels": 1}
