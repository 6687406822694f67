"""`draftsmith compile …`: what it prints and refuses; and the example of the docs page, run as it stands there."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler

from draftsmith.cli import main
from draftsmith.compiled import Ledger, cache, cache_lock
from draftsmith.errors import UserError
from draftsmith.pipeline import compile_commands, compiling
from draftsmith.pipeline.compiling import cache_folder, needs
from draftsmith.pipeline.plan import make_plan

DOCS = Path(__file__).parents[2] / "docs" / "compiled.md"


@pytest.fixture
def compiled_run(tiny_run):
    return tiny_run("compiled", drafter={"layers": 1, "block_size": 4}, compile={"enabled": "on"})


@pytest.fixture
def processes(monkeypatch):
    """Stands in for the two processes of `warm`: the first leaves graphs behind, the second says what it found."""
    state = {"second": "hit", "folders": []}

    def run(config, folder, scratch, tell):
        plan = make_plan(config)
        first = not state["folders"]
        state["folders"].append(folder.name)
        named = [{"name": name, "keys": [f"f{number}key"], "seconds": 2.0} for number, name in enumerate(needs(plan))]
        for use in named:
            cache.graph_file(folder, use["keys"][0]).mkdir(parents=True, exist_ok=True)
            (cache.graph_file(folder, use["keys"][0]) / "graph").write_text("graph")
        how = "miss" if first else state["second"]
        entries = [{"region": "drafter 0", "direction": "forward", "cache": how}]
        return {"ok": True, "warm_up_seconds": 9.0 if first else 2.0, "uses": named, "ledger": {"entries": entries}}

    monkeypatch.setattr(compile_commands, "_in_process", run)
    return state


def config_file(config, tmp_path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
    return str(path)


def test_warm_fills_checks_and_swaps_in(compiled_run, processes, caches, tmp_path, capsys):
    config = config_file(compiled_run, tmp_path)
    assert main(["compile", "cache", "verify", config]) == 1
    assert "0 of 3 regions present; 3 will compile" in capsys.readouterr().out
    assert main(["compile", "warm", config]) == 0
    assert "3 of 3 regions present" in capsys.readouterr().out
    assert len(set(processes["folders"])) == 2, "the second process must find the cache under another name"
    assert [folder.name for folder in caches.iterdir()] == [cache_folder(make_plan(compiled_run)).name]
    assert main(["compile", "cache", "verify", config]) == 0
    assert main(["compile", "cache", "show", config, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert shown["config"]["coverage"] == "3 of 3 regions present"
    assert shown["caches"][0]["differs"] == []


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ((["one.o"], []), ""),
        ((["one.o"], ["one.o", "two.o"]), "a second process compiled again: FlashAttention-4's kernels"),
        (([], []), "a second process compiled again: FlashAttention-4's kernels"),
    ],
    ids=["loaded", "compiled anew", "kept nothing"],
)
def test_warm_looks_for_flash_attentions_kernels_too(tiny_run, processes, caches, monkeypatch, kept, said):
    """Inductor's ledger knows nothing of them."""
    monkeypatch.setattr("draftsmith.pipeline.plan.check_flex_backend", lambda *_: None)
    run, kept = compile_commands._in_process, iter(kept)

    def keeping(config, folder, scratch, tell):
        (folder / "flash").mkdir(exist_ok=True)
        for name in next(kept):
            (folder / "flash" / name).touch()
        return run(config, folder, scratch, tell)

    monkeypatch.setattr(compile_commands, "_in_process", keeping)
    flash = {"enabled": "on", "flex_backend": "flash"}
    config = tiny_run("flash", drafter={"layers": 1, "block_size": 4}, compile=flash)
    if not said:
        assert compile_commands.warm(config)["verified"]
        return
    with pytest.raises(UserError, match=said):
        compile_commands.warm(config)


def test_warm_leaves_a_full_cache_alone_unless_told_to_fill_one_again(
    compiled_run, processes, caches, tmp_path, capsys
):
    config = config_file(compiled_run, tmp_path)
    assert main(["compile", "warm", config]) == 0
    capsys.readouterr()
    assert main(["compile", "warm", config]) == 0
    out, err = capsys.readouterr()
    assert "3 of 3 regions present" in out
    assert "all is there already, and verified; --again fills an empty one" in out
    assert err == ""
    assert len(processes["folders"]) == 2
    graph = next(file for file in caches.rglob("graph"))
    graph.write_text("damaged")
    processes["folders"].clear()
    assert main(["compile", "warm", config]) == 0
    assert len(processes["folders"]) == 2, "what is damaged is filled anew"
    processes["folders"].clear()
    assert main(["compile", "warm", config, "--again"]) == 0
    assert len(processes["folders"]) == 2


def test_it_is_said_that_runs_look_elsewhere(compiled_run, processes, caches, tmp_path, capsys, monkeypatch):
    config = config_file(compiled_run, tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    said = f"note: TORCHINDUCTOR_CACHE_DIR is set, so a run uses {tmp_path / 'mine'} and not this cache\n"
    assert main(["compile", "warm", config]) == 0
    assert said in capsys.readouterr().err
    for command in ("verify", "show"):
        assert main(["compile", "cache", command, config]) == 0
        assert said in capsys.readouterr().err
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache_folder(compile_commands.plan_of(compiled_run))))
    assert main(["compile", "cache", "show", config]) == 0
    assert capsys.readouterr().err == ""


def test_pack_overwrites_nothing(compiled_run, processes, caches, tmp_path, capsys):
    config, archive = config_file(compiled_run, tmp_path), tmp_path / "cache.tar.gz"
    archive.write_text("mine")
    compile_commands.warm(compiled_run)
    assert main(["compile", "cache", "pack", config, str(archive)]) == 2
    said = f"draftsmith: {archive}: exists already (name another file, or remove it)\n"
    assert capsys.readouterr().err == said
    assert archive.read_text() == "mine"
    assert main(["compile", "cache", "pack", config, "/"]) == 2
    assert "/: is a folder (name a file)" in capsys.readouterr().err
    archive.unlink()
    assert main(["compile", "cache", "pack", config, str(archive)]) == 0


def test_keys_on_the_command_line_count_as_they_do_for_training(tiny_run, processes, caches, tmp_path, capsys):
    config, archive = config_file(tiny_run("eager"), tmp_path), str(tmp_path / "cache.tar.gz")
    compiled = ["compile.enabled=on", "drafter.block_size=4"]
    assert main(["compile", "cache", "show", config]) == 0
    assert f"for this config: {compile_commands.NOTHING}" in capsys.readouterr().out
    assert main(["compile", "cache", "show", config, *compiled]) == 0
    assert "for this config: 0 of " in capsys.readouterr().out
    assert main(["compile", "warm", config, *compiled]) == 0
    assert main(["compile", "cache", "verify", config, *compiled]) == 0
    assert main(["compile", "cache", "verify", config, *compiled, "rows.anchors=5"]) == 1
    assert main(["compile", "cache", "pack", config, archive, *compiled]) == 0
    assert main(["compile", "cache", "clear", "--yes"]) == 0
    capsys.readouterr()
    assert main(["compile", "cache", "unpack", config, archive]) == 2
    assert compile_commands.NOTHING in capsys.readouterr().err
    assert main(["compile", "cache", "unpack", config, archive, *compiled]) == 0
    assert main(["compile", "prove", config, "compile.enabled=off"]) == 2
    assert "nothing to prove: dense attention runs eager" in capsys.readouterr().err
    assert main(["compile", "warm", config, "compile.enable=on"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_warm_refuses_a_cache_that_a_second_process_does_not_load(compiled_run, processes, caches):
    processes["second"] = "miss"
    with pytest.raises(UserError, match=r"a second process compiled again: drafter 0 \(forward\)"):
        compile_commands.warm(compiled_run)
    assert list(caches.iterdir()) == []


def test_a_config_that_compiles_nothing_has_no_cache(tiny_run, caches, tmp_path, capsys):
    config = tmp_path / "eager.yaml"
    config.write_text(tiny_run("eager").model_dump_json())
    assert main(["compile", "cache", "verify", str(config)]) == 0
    assert capsys.readouterr().out == "nothing is compiled under this config\n"
    (tmp_path / "cache.tar.gz").touch()
    for command in (["pack", str(config), "new.tar.gz"], ["unpack", str(config), str(tmp_path / "cache.tar.gz")]):
        assert main(["compile", "cache", *command]) == 2
        assert "compile: nothing is compiled under this config (compile.enabled=on)" in capsys.readouterr().err


def test_clear_asks_first(compiled_run, processes, caches, capsys, monkeypatch):
    compile_commands.warm(compiled_run)
    monkeypatch.setattr("typer.confirm", lambda *_args, **_options: False)
    assert main(["compile", "cache", "clear"]) == 1
    assert len(list(caches.iterdir())) == 1
    monkeypatch.setattr("typer.confirm", lambda *_args, **_options: True)
    assert main(["compile", "cache", "clear"]) == 0
    assert list(caches.iterdir()) == []
    assert "deleted 1 cache, " in capsys.readouterr().out


def test_clear_says_what_it_leaves_and_that_nobody_answered(compiled_run, processes, caches, capsys, monkeypatch):
    (caches / "photos").mkdir(parents=True)
    assert main(["compile", "cache", "clear", "--yes"]) == 0
    assert "left alone: photos (not made by Draftsmith)" in capsys.readouterr().err
    compile_commands.warm(compiled_run)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["compile", "cache", "clear"]) == 1
    assert capsys.readouterr().out.strip() == "nothing deleted (--yes deletes without asking)"
    assert main(["compile", "cache", "clear", "--yes"]) == 0
    assert [item.name for item in caches.iterdir()] == ["photos"]


@pytest.mark.parametrize("place", ["/dev/null/x", "/proc/x"])
@pytest.mark.parametrize("command", [["compile", "warm"], ["compile", "prove"], ["train"]])
def test_a_cache_that_cannot_be_written_is_one_line(compiled_run, tmp_path, capsys, monkeypatch, command, place):
    config = config_file(compiled_run, tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("DRAFTSMITH_CACHE_DIR", place)
    assert main([*command, config]) == 2
    assert f"draftsmith: compile cache: {place} cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "compiled").exists()


def test_a_full_disk_at_the_seal_is_a_notice(compiled_run, gate, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    plan = make_plan(compiled_run)
    ledger = Ledger(gate, {})
    assert compiling.note_in_cache(plan, ledger) == "", "the user's own cache"
    monkeypatch.setattr(cache, "write_manifest", full)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache_folder(plan)))
    failure = compiling.note_in_cache(plan, ledger)
    assert failure == "what the compile cache holds could not be noted in it: [Errno 28] No space left on device"


def test_warm_refuses_to_replace_a_cache_in_use_before_it_compiles(compiled_run, processes, caches):
    place = cache_folder(make_plan(compiled_run))
    lock = cache_lock.share(place)
    with pytest.raises(UserError, match=r"^compile cache: .* is in use by another process$"):
        compile_commands.warm(compiled_run)
    assert processes["folders"] == []
    assert list(caches.iterdir()) == [place]
    os.close(lock)


def test_warm_removes_what_a_killed_one_left(compiled_run, processes, caches):
    left = caches / ".filling-abcd_123"
    left.mkdir(parents=True)
    told = []
    compile_commands.warm(compiled_run, told.append)
    assert not left.exists()
    assert told[0] == f"removed {left.name}, which a process that has ended left unfinished"


def test_warm_that_is_terminated_ends_its_process_and_leaves_nothing(compiled_run, caches, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR")
    command = [sys.executable, "-m", "draftsmith", "compile", "warm", config_file(compiled_run, tmp_path)]
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(command, env=environment, stderr=said)

        def children() -> list[str]:
            """Of all threads."""
            return " ".join(each.read_text() for each in Path(f"/proc/{process.pid}/task").glob("*/children")).split()

        until = time.monotonic() + 120
        while not (caches.is_dir() and list(caches.iterdir()) and children()):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        (child,) = children()
        process.terminate()
        assert process.wait(60) == 143
        said.seek(0)
        words = "terminated: the unfinished cache is removed, and what was in place is as it was"
        assert said.read().splitlines()[-1] == f"draftsmith: {words}"
    assert not Path(f"/proc/{child}").exists()
    assert list(caches.iterdir()) == []
    assert [item.name for item in temporary.iterdir() if item.name.startswith("draftsmith-")] == []


def test_an_interrupt_while_the_process_of_warm_starts_ends_it(compiled_run, caches, tmp_path, monkeypatch):
    started, start = [], subprocess.Popen

    def slowly(_command, **options):
        started.append(start(["sleep", "100"], **options))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", slowly)
    with pytest.raises(KeyboardInterrupt):
        compile_commands._in_process(compiled_run, caches, tmp_path)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_a_signal_while_the_new_cache_takes_its_place_leaves_no_half(compiled_run, processes, caches, monkeypatch):
    swap = cache.swap_in

    def terminated(new, place):
        os.kill(os.getpid(), signal.SIGTERM)
        swap(new, place)

    monkeypatch.setattr(cache, "swap_in", terminated)
    assert compile_commands.warm(compiled_run)["filled"]
    assert len(list(caches.iterdir())) == 1


@pytest.mark.parametrize("command", ["warm", "prove"])
def test_each_command_says_what_a_signal_leaves(compiled_run, caches, tmp_path, capsys, monkeypatch, command):
    monkeypatch.setattr(compile_commands, "check_compiler", lambda _plan: os.kill(os.getpid(), signal.SIGTERM))
    assert main(["compile", command, config_file(compiled_run, tmp_path)]) == 143
    words = {
        "warm": "terminated before the filling began: no cache was changed",
        "prove": "terminated without a verdict: nothing is kept but what the compile cache holds by now",
    }
    assert capsys.readouterr().err == f"draftsmith: {words[command]}\n"


def test_the_lines_of_a_warm_up_are_told_as_they_come(compiled_run, caches, tmp_path, monkeypatch):
    """The process goes on only once its first line was told; what it says besides is for the error."""
    heard, start, told = tmp_path / "heard", subprocess.Popen, []
    script = f"""
import os, sys, time
sys.stderr.write("a warning\\n{compile_commands._TOLD}warm-up: target 0\\n")
sys.stderr.flush()
until = time.monotonic() + 60
while not os.path.exists({str(heard)!r}) and time.monotonic() < until:
    time.sleep(0.01)
sys.stderr.write(f"{compile_commands._TOLD}warm-up: heard {{os.path.exists({str(heard)!r})}}\\n")
raise ValueError("no such kernel")
"""

    def tell(line):
        told.append(line)
        heard.touch()

    monkeypatch.setattr(
        subprocess, "Popen", lambda _command, **options: start([sys.executable, "-c", script], **options)
    )
    with pytest.raises(UserError, match=r"^compile warm: a process ended with code 1: ValueError: no such kernel$"):
        compile_commands._in_process(compiled_run, caches, tmp_path, tell)
    assert told == ["  warm-up: target 0", "  warm-up: heard True"]


def test_the_process_that_compiles_marks_the_lines_of_its_warm_up(compiled_run, tmp_path, monkeypatch, capsys):
    def prove(_config, listener):
        listener({"kind": "notice", "text": "a cache that lies elsewhere"})
        listener({"kind": "warmup", "text": "drafter 0 on cpu: traced"})
        return {"ok": True}

    monkeypatch.setattr(compile_commands, "prove", prove)
    (tmp_path / "given.json").write_text(compiled_run.model_dump_json())
    compile_commands._child(tmp_path / "given.json", tmp_path / "result.json")
    assert capsys.readouterr().err == f"{compile_commands._TOLD}warm-up: drafter 0 on cpu: traced\n"
    assert json.loads((tmp_path / "result.json").read_text()) == {"ok": True}


def test_what_the_process_of_warm_refuses_comes_in_its_own_words(tiny_run, caches, tmp_path):
    """A config under which nothing is compiled, which `warm` itself would have refused."""
    with pytest.raises(UserError, match=r"^compile: nothing to prove: dense attention runs eager") as refused:
        compile_commands._in_process(tiny_run("eager"), caches, tmp_path)
    assert refused.value.fix == "compile.enabled=on compiles it on the CPU too"


def test_the_last_line_that_looks_like_an_error_is_shown():
    torchs = """Traceback (most recent call last):
      File "x.py", line 1, in <module>
    torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found

    Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace

    """
    assert compile_commands._error_line(torchs).startswith("torch._inductor.exc.InductorError: InvalidCxxCompiler: No")
    assert compile_commands._error_line("one\ntwo\n") == "two"
    assert compile_commands._error_line("") == "no message"
    assert compile_commands._ended(-11) == "was ended by SIGSEGV"


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (InvalidCxxCompiler(), "InvalidCxxCompiler: No working C++ compiler found"),
        (CppCompileError(["g++", "x.cpp"], "x.cpp:3: fatal error: Python.h: No such file\nstopped"), "error: Python.h"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (RuntimeError("worker:\nFailed to find C compiler. Please specify via CC"), "RuntimeError: Failed to find C"),
    ],
)
def test_what_the_machine_lacks_for_compiling_is_the_users_error(cause, said):
    with pytest.raises(UserError, match="torch cannot compile on this machine") as refused, compiling.explained():
        raise InductorError(cause, None)
    assert said in refused.value.what


@pytest.mark.parametrize("fault", [InductorError(KeyError("a fault of torch's"), None), OSError("not from compiling")])
def test_other_failures_keep_their_traceback(fault):
    with pytest.raises(type(fault)), compiling.explained():
        raise fault


@pytest.mark.parametrize("command", ["prove", "warm"])
def test_a_machine_without_a_compiler_is_one_line(compiled_run, tmp_path, capfd, command):
    """Before anything is compiled, and so before torch says anything of it."""
    with torch._inductor.config.patch({"cpp.cxx": (None, str(tmp_path / "g++"))}):
        assert main(["compile", command, config_file(compiled_run, tmp_path)]) == 2
    out, err = capfd.readouterr()
    said = "compile: torch cannot compile on this machine: InvalidCxxCompiler: No working C++ compiler found in "
    assert out == ""
    assert err.startswith(f"draftsmith: {said}")
    assert err.endswith(" (apt-get install g++, and unset CXX if it names another)\n")
    assert err.count("\n") == 1


def test_there_is_nothing_to_prove_where_nothing_is_compiled(tiny_run, tmp_path, capsys):
    assert main(["compile", "prove", config_file(tiny_run("eager"), tmp_path)]) == 2
    assert "dense attention runs eager on this machine, by name" in capsys.readouterr().err


def test_prove_says_that_a_run_is_not_compiled(compiled_run, tmp_path, capsys, monkeypatch):
    """Under a backend that stops before Inductor: exit 1, with each problem."""
    monkeypatch.setattr(compiling, "Region", partial(compiling.Region, backend="aot_eager"))
    assert main(["compile", "prove", config_file(compiled_run, tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "NOT the compiled path" in out
    assert "drafter 0 on cpu ran 2 times without a compiled graph" in out
    torch._dynamo.reset()


def test_the_example_of_the_page_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(example.strip().splitlines()) <= 16
    scope: dict = {}
    exec(compile(example, str(DOCS), "exec"), scope)
    try:
        out = capsys.readouterr().out
        assert "worker on cpu: traced" in out
        assert "the compiled path ran in 1 of 1 regions on cpu" in out
    finally:
        scope["gate"].close()
        torch._dynamo.reset()
