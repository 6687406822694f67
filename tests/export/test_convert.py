"""There and back between the layouts, byte for byte; what others published is read; nothing is overwritten."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import types
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import LAYERS, random_drafter, saved, small_spec

from draftsmith import cli
from draftsmith.drafter import load_drafter, read_spec, save_drafter
from draftsmith.drafter.native import weights_digest
from draftsmith.errors import UserError
from draftsmith.export.card import check_run, find_run, model_card
from draftsmith.export.convert import Verifier, convert_drafter
from draftsmith.pipeline.run import train

FILES = ("config.json", "model.safetensors")
TARGET = Verifier("owner/target", ("Qwen3ForCausalLM",))
GEMMA_LIKE = {"input_scale": 5.5, "logit_multiplier": 0.25, "logit_softcap": 30.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", list(LAYERS))
@pytest.mark.parametrize("changes", [{}, GEMMA_LIKE], ids=["plain", "gemma-like"])
def test_there_and_back_is_exact(layers: str, dtype: torch.dtype, changes: dict[str, Any], tmp_path: Path) -> None:
    ours = saved(tmp_path / "ours", layers, dtype, **changes)
    theirs = convert_drafter(ours, tmp_path / "theirs", "speculators", verifier=TARGET).folder
    # What is read in the other layout is the very drafter, without going back.
    there, here = load_drafter(theirs), load_drafter(ours)
    assert there.spec == here.spec
    assert all(torch.equal(value, here.state_dict()[name]) for name, value in there.state_dict().items())
    back = convert_drafter(theirs, tmp_path / "back", "zlab").folder
    again = convert_drafter(back, tmp_path / "again", "speculators", verifier=TARGET).folder
    for name in FILES:
        assert (back / name).read_bytes() == (ours / name).read_bytes()
        assert (again / name).read_bytes() == (theirs / name).read_bytes()


def test_another_dtype_is_written_only_when_asked_for(tmp_path: Path) -> None:
    source = saved(tmp_path / "a")
    narrow = convert_drafter(source, tmp_path / "b", "zlab", dtype=torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    assert json.loads((narrow.folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(load_drafter(narrow.folder).fc.weight, load_drafter(source).fc.weight.bfloat16())
    mixed = {**load_file(source / FILES[1]), "norm.weight": torch.ones(32, dtype=torch.bfloat16)}
    save_file(mixed, source / FILES[1])
    with pytest.raises(UserError, match="several dtypes"):
        convert_drafter(source, tmp_path / "c", "zlab")
    assert not (tmp_path / "c").exists()


def published(folder: Path) -> Path:
    """A directory as z-lab publishes them: weights in several files, block size at top level only, old rope fields,
    fields that mean nothing to us, and no file of ours."""
    source = saved(folder.with_name("source"), dtype=torch.bfloat16)
    config = json.loads((source / "config.json").read_text())
    config["dflash_config"] = {"mask_token_id": 21, "target_layer_ids": [1, 4, 6]}
    del config["rope_parameters"], config["is_causal"], config["dtype"]
    config |= {
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "torch_dtype": "bfloat16", "rope_scaling": None,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 2, "transformers_version": "4.57.1",
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    names = sorted(weights)
    parts = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_published_directory_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = published(tmp_path / "published")
    assert cli.main(["import", str(folder), str(tmp_path / "ours"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "bfloat16"
    assert read_spec(tmp_path / "ours") == small_spec("full", causal=False)
    there, here = load_file(tmp_path / "source" / FILES[1]), load_file(tmp_path / "ours" / FILES[1])
    assert there.keys() == here.keys()
    assert all(torch.equal(value, here[name]) and value.dtype == here[name].dtype for name, value in there.items())
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert cli.main(["import", str(folder), str(tmp_path / "again")]) == 2
    assert "model-00002-of-00002.safetensors is missing" in capsys.readouterr().err


def test_speculators_own_tensors_and_reduced_vocabulary_are_left_out(tmp_path: Path) -> None:
    source = convert_drafter(saved(tmp_path / "a"), tmp_path / "b", "speculators", verifier=TARGET).folder
    config = json.loads((source / "config.json").read_text())
    depth = config.pop("num_target_layers")
    config["draft_vocab_size"] = 10
    (source / "config.json").write_text(json.dumps(config))
    extra = {
        "lm_head.weight": torch.zeros(10, 32), "embed_tokens.weight": torch.zeros(23, 32),
        "t2d": torch.zeros(23, dtype=torch.bool), "d2t": torch.zeros(10, dtype=torch.int64),
    }  # fmt: skip
    save_file({**load_file(source / FILES[1]), **extra}, source / FILES[1])
    with pytest.raises(UserError, match="how many layers its target has"):
        convert_drafter(source, tmp_path / "c", "zlab")
    result = convert_drafter(source, tmp_path / "c", "zlab", target_layers=depth)
    assert (result.folder / FILES[1]).read_bytes() == (tmp_path / "a" / FILES[1]).read_bytes()
    assert "reduced vocabulary of 10 rows is left out" in result.notices[0]
    assert all(name in result.notices[1] for name in extra)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "type 'eagle3', not dflash"),
        ({"sample_from_anchor": True}, "samples from the anchor slot"),
        ({"aux_hidden_state_layer_ids": []}, "aux_hidden_state_layer_ids is missing"),
        ({"target_hidden_size": 64}, "narrower or wider"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
    ],
)
def test_other_speculators_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = convert_drafter(saved(tmp_path / "a"), tmp_path / "b", "speculators", verifier=TARGET).folder
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UserError, match=message):
        load_drafter(source)


def test_nothing_is_overwritten_and_nothing_half_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "a")
    (tmp_path / "there").mkdir()
    assert cli.main(["export", str(source), str(tmp_path / "there")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["export", str(source), str(tmp_path / "out"), "--layout", "speculators"]) == 2
    assert "give --target" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "there"]


def test_an_evaluation_belongs_to_its_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """τ of other weights is no claim of this drafter's; the layout, and the dtype asked for, do not make it another."""
    source = saved(tmp_path / "a")
    figures = {"tau": 2.0, "tau_per_response": 2.0, "answers": 4, "tokens": 9, "speedup": 1.5, "lossless": True}
    weights = weights_digest(load_file(source / FILES[1]))

    def export(folder: Path, name: str, content: dict[str, Any], *options: str) -> tuple[int, str]:
        (tmp_path / "ev.json").write_text(json.dumps(content))
        evaluation = ["--evaluation", f"task={tmp_path}/ev.json"]
        code = cli.main(["export", str(folder), str(tmp_path / name), *evaluation, *options])
        out, err = capsys.readouterr()
        return code, out + err

    measured = {**figures, "setting": {"drafter": weights, "target": "owner/target", "prompts": "1"}}
    code, said = export(source, "b", measured, "--dtype", "bfloat16")
    assert (code, "note" in said) == (0, False)
    narrow = {**measured, "setting": {"drafter": weights_digest(load_file(tmp_path / "b" / FILES[1]))}}
    assert export(source, "c", narrow, "--dtype", "bfloat16")[0] == 0
    theirs = convert_drafter(source, tmp_path / "theirs", "speculators", verifier=TARGET).folder
    assert export(theirs, "d", measured)[0] == 0
    code, said = export(saved(tmp_path / "other", rope_theta=1e6), "e", measured)
    assert code == 0  # the same weights: geometry is no part of them
    save_drafter(random_drafter(small_spec(), seed=1), tmp_path / "another")
    code, said = export(tmp_path / "another", "f", measured)
    assert code == 2
    assert f"measured another drafter (weights {weights}; here" in said
    assert not (tmp_path / "f").exists()
    setting = measured["setting"]
    for change, field in (
        *(({"tau": value}, "tau") for value in ("2.0", None, 10**400, [])),
        *(({"answers": value}, "answers") for value in (True, 1.5, -1)),
        *(({"distribution": value}, "distribution") for value in (0.5, [], "x", True)),
        *(({"distribution": {"p_value": value}}, "distribution.p_value") for value in (None, "0.5", 7, float("inf"))),
        *(({"setting": value}, "setting") for value in (None, [], 1)),
        *(({"setting": {**setting, "drafter": value}}, "setting.drafter") for value in ([], {}, 7)),
        *(({"setting": {**setting, "temperature": value}}, "setting.temperature") for value in (None, "0", False)),
        ({"distribution": {}}, "distribution.p_value"),
        ({"speedup": float("nan")}, "speedup"),
        ({"lossless": "no"}, "lossless"),
    ):
        code, said = export(source, "g", {**measured, **change})
        assert code == 2
        assert f"is not an evaluation: {field}: " in said
        assert said.count("\n") == 1
    assert export(source, "h", {**measured, "distribution": {"p_value": 1}})[0] == 0


def test_options_that_would_do_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(saved(tmp_path / "a"))
    gguf = ["--gguf-file", "x"]
    cases = (("export", ["--engine", "vllm"]), ("export", ["--private"]), ("export", gguf), ("import", gguf))
    for command, options in cases:
        assert cli.main([command, source, str(tmp_path / "out"), *options]) == 2
        assert f"{options[0]} would do nothing" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_the_card_says_what_is_known_and_nothing_else(
    tiny_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tiny_run(training={"steps": 2}))
    figures = {
        "tau": 2.345, "tau_per_response": 3.456, "answers": 40, "tokens": 999, "speedup": 1.5, "lossless": True,
        "setting": {"temperature": 0.0, "dtype": "float32", "device": "cpu"},
    }  # fmt: skip
    (tmp_path / "gsm8k.json").write_text(json.dumps(figures))
    arguments = ["export", str(run.checkpoint), str(tmp_path / "out"), "--evaluation", f"GSM8K={tmp_path}/gsm8k.json"]
    assert cli.main([*arguments, "--licence", "apache-2.0", "--data-licence", "cc-by-4.0"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    for said in ("| GSM8K | 40 | 999 | 2.35 | 3.46 | 1.50x |", "2 of 2 updates of 6 rows", "- data: cc-by-4.0",
                 "- target: not stated", "`chats.jsonl`", "S = 96 context tokens with N = 12 anchors"):  # fmt: skip
        assert said in card, said
    assert str(tmp_path) not in card, "a path of this machine"
    assert cli.main(["export", str(saved(tmp_path / "bare")), str(tmp_path / "second")]) == 0
    card = (tmp_path / "second" / "README.md").read_text()
    assert "Not measured." in card
    assert "not exported from a run" in card
    assert cli.main([*arguments[:2], str(tmp_path / "named"), "--evaluation", f"a|b={tmp_path}/gsm8k.json"]) == 0
    assert "does not say which drafter it measured" in capsys.readouterr().out
    assert "| a\\|b | 40 |" in (tmp_path / "named" / "README.md").read_text()
    records = {path: json.loads(path.read_text()) for path in (run.folder / "run.json", run.folder / "resolved.json")}
    (own, run_record), (resolved, facts) = records.items()
    assert find_run(run.checkpoint) is not None
    for path, content in (
        *((own, {**run_record, "config": value}) for value in (None, [], {}, "x")),
        *((own, {"config": {**run_record["config"], name: []}}) for name in ("target", "rows", "optimizer", "drafter")),
        *((own, value) for value in (None, [], 7)),
        *((resolved, {**facts, name: "x"}) for name in ("steps", "data")),
        (resolved, {**facts, "data": {**facts["data"], "incidents": [{}]}}),
    ):
        path.write_text(json.dumps(content))
        assert find_run(run.checkpoint) is None, content
        path.write_text(json.dumps(records[path]))
    (tmp_path / "bad.json").write_text("{}")
    arguments = ["export", str(tmp_path / "bare"), str(tmp_path / "third"), "--evaluation", f"{tmp_path}/bad.json"]
    assert cli.main(arguments) == 2


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_training_starts_from_a_published_drafter(layout: Any, tiny_run: Any, tmp_path: Path) -> None:
    first = train(tiny_run("first", training={"steps": 3}))
    assert first.checkpoint is not None
    start = convert_drafter(first.checkpoint, tmp_path / "start", layout, verifier=TARGET).folder
    config = tiny_run(
        "second",
        drafter={"init": str(start), "layers": 5, "block_size": 4},
        optimizer={"lr": 1e-12},
        training={"steps": 1, "eval_rows": 0},
    )
    second = train(config)
    assert second.checkpoint is not None
    ours, theirs = load_drafter(second.checkpoint), load_drafter(first.checkpoint)
    assert ours.spec == theirs.spec
    for name, value in theirs.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], value, atol=1e-8), name
    events = [json.loads(line) for line in (second.folder / "events.jsonl").read_text().splitlines()]
    notices = [event["text"] for event in events if event["kind"] == "notice"]
    assert any(f"come from {start}" in notice for notice in notices)
    assert any("replaces drafter.layers (5, there 2)" in notice for notice in notices)


class FakeHub(BaseHTTPRequestHandler):
    """As much of a hub as an upload talks to; keeps the files of the last commit."""

    files: ClassVar[dict[str, bytes]] = {}
    made: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self.made.append(json.loads(body))
            self.answer({"url": f"http://{self.headers['Host']}/owner/name", "name": "owner/name"})
        elif self.path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\nlicense:")
            self.answer({"errors": [], "warnings": []})
        elif self.path.startswith("/api/models/owner/name/preupload/"):
            asked = json.loads(body)["files"]
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            self.answer({"files": files})
        elif self.path.startswith("/api/models/owner/name/commit/"):
            import base64

            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self.answer({"commitUrl": f"http://{self.headers['Host']}/owner/name/commit/1", "commitOid": "1" * 40})
        else:
            self.send_error(404, self.path)

    def do_GET(self) -> None:
        self.send_error(404, self.path)

    do_HEAD = do_GET

    def answer(self, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def test_push_uploads_what_was_written(tmp_path: Path) -> None:
    import os

    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        **os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "hf_made_up", "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    source = saved(tmp_path / "a")
    command = [sys.executable, "-m", "draftsmith", "export", str(source)]
    arguments = [str(tmp_path / "out"), "--push", "owner/name", "--private", "--json"]
    result = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
    server.shutdown()
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["pushed"].endswith("/owner/name/commit/1")
    assert FakeHub.made[0]["visibility"] == "private", FakeHub.made
    assert FakeHub.files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(FakeHub.files) == {"README.md", *FILES}
    server.server_close()


class FlakyHub:
    """In the place of the hub's client: out of reach until it is up."""

    up = False
    uploaded: ClassVar[list[dict[str, bytes]]] = []

    def create_repo(self, repository: str, **_: Any) -> Any:
        if not self.up:
            raise OSError("no route to the hub")
        return types.SimpleNamespace(repo_id=repository)

    def upload_folder(self, *, folder_path: Path, repo_id: str, **_: Any) -> Any:
        self.uploaded.append({path.name: path.read_bytes() for path in folder_path.iterdir()})
        return types.SimpleNamespace(commit_url=f"hub/{repo_id}/1")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[FlakyHub]:
    monkeypatch.setattr("huggingface_hub.HfApi", FlakyHub)
    monkeypatch.setattr(FlakyHub, "up", False)
    monkeypatch.setattr(FlakyHub, "uploaded", [])
    return FlakyHub


def test_a_hub_out_of_reach_is_one_line_and_the_same_command_goes_on(
    hub: type[FlakyHub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = saved(tmp_path / "a"), tmp_path / "out"
    command = ["export", str(source), str(out), "--push", "owner/name"]
    assert cli.main(command) == 2
    told, error = capsys.readouterr()
    assert told.startswith(f"{out}: zlab layout, ")
    assert error.startswith(f"draftsmith: owner/name: the hub cannot serve it: no route to the hub; {out} is written (")
    assert error.endswith("and give the same command again)\n")
    assert error.count("\n") == 1
    written = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()}
    assert cli.main([*command, "--json"]) == 2
    told, error = capsys.readouterr()
    assert told == ""
    assert f"{out}: zlab layout, " in error
    hub.up = True
    assert cli.main([*command, "--json"]) == 0
    told, error = capsys.readouterr()
    assert json.loads(told)["pushed"] == "hub/owner/name/1"
    assert json.loads(told)["notices"] == []
    assert "which is there already" in error
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()} == written
    assert hub.uploaded == [{name: content for name, (_, content) in written.items()}]
    assert cli.main(command[:3]) == 2, "without --push there is nothing to go on with"
    assert "exists already" in capsys.readouterr().err


def test_only_this_very_export_is_pushed_where_something_is_there(
    hub: type[FlakyHub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.up = True
    source, out = saved(tmp_path / "a"), tmp_path / "out"
    push = ["--push", "owner/name"]
    assert cli.main(["export", str(source), str(out)]) == 0
    save_drafter(random_drafter(small_spec(), seed=1), tmp_path / "other")
    others = (
        [str(tmp_path / "other"), str(out)],
        [str(source), str(out), "--dtype", "bfloat16"],
        [str(saved(tmp_path / "longer", rope_theta=1e6)), str(out)],
    )
    for arguments in others:
        assert cli.main(["export", *arguments, *push]) == 2
        assert f"{out}: exists already" in capsys.readouterr().err
    (out / "state.json").write_text("{}")
    assert cli.main(["export", str(source), str(out), *push]) == 2, "it would go up as well"
    (out / "state.json").unlink()
    weights = (out / FILES[1]).read_bytes()
    (out / FILES[1]).write_bytes(weights[:-4])
    assert cli.main(["export", str(source), str(out), *push]) == 2, "torn"
    (out / FILES[1]).write_bytes(weights)
    capsys.readouterr()
    assert hub.uploaded == []
    (out / "README.md").write_text("My own words.")
    assert cli.main(["export", str(source), str(out), *push, "--licence", "mit"]) == 0
    assert f"note: {out}/README.md is not the card that this command writes: it stays" in capsys.readouterr().out
    assert [files["README.md"] for files in hub.uploaded] == [b"My own words."]


def test_a_hub_out_of_reach_when_a_drafter_is_fetched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import", "owner/name", str(tmp_path / "b")]) == 2
    assert "the hub cannot serve it" in capsys.readouterr().err


def test_an_evaluation_that_is_not_there_says_how_one_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(saved(tmp_path / "a")), str(tmp_path / "out"), "--evaluation", "foo"]) == 2
    assert capsys.readouterr().err.startswith("draftsmith: foo: no such file (give TASK=FILE; ")


def test_the_card_claims_no_more_than_the_records_do(tiny_run: Any, tmp_path: Path) -> None:
    start = saved(tmp_path / "start" / "step-0000007")
    run = train(tiny_run(training={"steps": 2}, optimizer={"name": "muon", "lr": 1e-3}))
    result = convert_drafter(run.checkpoint, tmp_path / "out", "zlab")
    facts = find_run(run.checkpoint)
    figures = {
        "tau": 2.3, "tau_per_response": 3.4, "answers": 40, "tokens": 999, "speedup": 1.5, "lossless": True,
        "setting": {"dtype": "float32", "device": "cpu", "block_size": 2},
    }  # fmt: skip
    card = model_card(result, run=facts, evaluations=[("chat", figures)])
    assert "| chat, in blocks of 2 | 40 | 999 | 2.30 | 3.40 | 1.50x | ? |" in card, "no temperature is named"
    assert "- muon, lr 0.01 for 2-D weights and 0.001 for the rest (AdamW), " in card
    held_out = facts.resolved["data"]["held_out"]["conversations"]
    assert f"of them equal to an earlier one, {held_out} of them only evaluated" in card
    truncated = sum(entry["count"] for entry in facts.resolved["data"]["incidents"])
    assert f"- not used in full: {truncated} × truncated\n" in card
    assert "one row" not in card
    config = {**facts.config, "drafter": {"init": str(start)}}
    data = {**facts.resolved["data"], "incidents": [{"effect": "truncated", "count": 3}, {"count": 2}], "left_out": 9}
    others = replace(facts, config=config, resolved={**facts.resolved, "data": data, "overfit": True}, step=None)
    card = model_card(result, run=others)
    assert "- an unknown number of 2 updates of 6 rows, seed 0, all of one row: a check" in card
    assert "only one row of them was learned" in card
    assert "- started from: the drafter step-0000007" in card
    assert str(tmp_path) not in card
    assert "9 of them left out by weights below 1" in card
    assert "- not used in full: 3 × truncated, 2 × not used in full" in card
    there = Path(facts.config["target"]["path"])
    assert check_run(facts, f"owner/{there.name}") == check_run(None, "x") == check_run(facts, None) == []
    assert check_run(facts, "owner/x") == [f"the drafter was trained for the target {there}, the card names owner/x"]
