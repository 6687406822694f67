"""`draftsmith compile …`: what it prints and refuses; and the example of the docs page, run as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from draftsmith.cli import main
from draftsmith.compiled import cache
from draftsmith.errors import UserError
from draftsmith.pipeline import compile_commands
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

    def run(config, folder, scratch):
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


def test_warm_refuses_a_cache_that_a_second_process_does_not_load(compiled_run, processes, caches):
    processes["second"] = "miss"
    with pytest.raises(UserError, match=r"a second process compiled again: drafter 0 \(forward\)"):
        compile_commands.warm(compiled_run)
    assert list(caches.iterdir()) == []


def test_clear_asks_first(compiled_run, processes, caches, capsys, monkeypatch):
    compile_commands.warm(compiled_run)
    monkeypatch.setattr("typer.confirm", lambda *_args, **_options: False)
    assert main(["compile", "cache", "clear"]) == 1
    assert len(list(caches.iterdir())) == 1
    monkeypatch.setattr("typer.confirm", lambda *_args, **_options: True)
    assert main(["compile", "cache", "clear"]) == 0
    assert list(caches.iterdir()) == []
    assert "deleted 1 caches" in capsys.readouterr().out


def test_there_is_nothing_to_prove_where_nothing_is_compiled(tiny_run, tmp_path, capsys):
    assert main(["compile", "prove", config_file(tiny_run("eager"), tmp_path)]) == 2
    assert "dense attention runs eager on this machine, by name" in capsys.readouterr().err


def test_prove_says_that_a_run_is_not_compiled(compiled_run, tmp_path, capsys, monkeypatch):
    """Under a backend that stops before Inductor: exit 1, with each problem."""
    from functools import partial

    import draftsmith.pipeline.compiling as compiling

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
