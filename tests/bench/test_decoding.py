"""`bench decode`: figures that follow from the rounds, contexts of just the length asked for, JSON and picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith import cli
from draftsmith.bench.decoding import bench_decode, draw, lengthened, lines_of
from draftsmith.config import TargetConfig, parse_config
from draftsmith.decode.prompts import Prompt, encode_prompts
from draftsmith.decode.static import StaticRounds
from draftsmith.drafter import load_drafter, resolve_spec, save_drafter
from draftsmith.drafter.model import DraftModel, initialise
from draftsmith.errors import UserError
from draftsmith.target.forward import Target
from draftsmith.target.load import load_target

TEXTS = [Prompt("p:1", text="the quick fox"), Prompt("p:2", text="a lazy dog runs"), Prompt("p:3", text="far away")]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(TargetConfig(path=str(tiny_target)), "cpu", torch.float32)


@pytest.fixture(scope="module")
def drafter(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = parse_config({"target": {"path": "x"}, "data": {"train": "y"}, "drafter": {"layers": 2, "block_size": 6}})
    model = DraftModel(resolve_spec(config.drafter, target.geometry, 2))
    initialise(model, 0, target.head().final_scale_H)
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(model, folder)
    return folder


def test_what_it_measures(target: Target, drafter: Path, tmp_path: Path) -> None:
    told: list[str] = []
    turns = Prompt("m:1", text="the dog", later=("and then",))
    result = bench_decode(
        load_drafter(drafter),
        target,
        [("one", TEXTS), ("two", [turns])],
        max_new_tokens=12,
        contexts=[16, 200],
        trained_length=100,
        progress=lambda what, _done, _all: told.append(what),
    )
    assert [task["task"] for task in result["tasks"]] == ["one", "two"]
    assert [task["answers"] for task in result["tasks"]] == [3, 2], "every turn is a prompt of its own"
    assert all(task["lossless"] for task in result["tasks"])
    assert [entry["block_size"] for entry in result["block_sizes"]] == [1, 2, 3, 4, 6]
    assert result["block_sizes"][0]["tau"] == 1.0
    fastest = min(result["block_sizes"], key=lambda entry: entry["seconds_per_token"])
    assert result["best_block_size"] == fastest["block_size"]
    for entry in result["block_sizes"]:
        # τ tokens a round: the three figures are one.
        assert entry["seconds_per_round"] == pytest.approx(entry["tau"] * entry["seconds_per_token"])
    assert [(entry["context"], entry["beyond_trained"]) for entry in result["contexts"]] == [(16, False), (200, True)]
    assert {"one", "two", "block size", "context"} <= set(told)
    again = json.loads(json.dumps(result, allow_nan=False))
    text = "\n".join(lines_of(again))
    for said in ("speed-up", "best here", "beyond the trained context", "ms/round", "accepted by slot", "rest "):
        assert said in text, said
    assert draw(again, tmp_path / "p.png").stat().st_size > 10_000
    with pytest.raises(UserError, match="cannot be written"):
        draw(again, tmp_path / "none" / "p.png")


def test_answers_without_rounds_are_named(target: Target, drafter: Path, tmp_path: Path) -> None:
    result = bench_decode(load_drafter(drafter), target, [("one", TEXTS)], max_new_tokens=1, contexts=[16])
    assert result["best_block_size"] is None
    text = lines_of(result)
    assert sum(line.endswith("no rounds: answers ended at their first token") for line in text) == 1 + 5
    assert result["contexts"][0]["beyond_trained"] is None
    assert any(line.startswith("S is not known") for line in text)
    assert draw(result, tmp_path / "p.png").exists()


def test_rounds_of_static_shape_have_the_figures_of_eager_ones(target: Target, drafter: Path) -> None:
    def measured(rounds: StaticRounds) -> dict[str, Any]:
        tasks = [("one", TEXTS)]
        return bench_decode(load_drafter(drafter), target, tasks, max_new_tokens=12, contexts=[40], rounds=rounds)

    eager, static = measured(StaticRounds(target, "off")), measured(StaticRounds(target, "on", graphs=False))
    assert (eager["rounds"], static["rounds"]) == ("eager", "static")
    assert eager["way"] == "decoding: eager, as asked for"
    assert "static shapes" in lines_of(static)[-1]
    for part in ("tasks", "block_sizes", "contexts"):
        assert [entry["tau"] for entry in static[part]] == [entry["tau"] for entry in eager[part]]
    assert static["tasks"][0]["lossless"]


def test_a_longer_context_ends_as_the_prompt_does(target: Target) -> None:
    short = encode_prompts(TEXTS[:1], target.tokenizer)[0]
    for length in (len(short) + 9, 150):
        ids = lengthened(TEXTS, 0, length, target.tokenizer)
        assert len(ids) == length
        # The same question and the same generation prompt stand right before the answer.
        assert ids[-8:] == short[-8:]
    assert lengthened(TEXTS, 0, 60, target.tokenizer) != lengthened(TEXTS, 1, 60, target.tokenizer)


def test_the_command(drafter: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gsm.jsonl").write_text(json.dumps({"question": "the fox", "answer": "4"}) + "\n")
    arguments = ["bench", "decode", str(drafter), "--target", str(tiny_target), "--max-new-tokens", "8"]
    arguments += ["--device", "cpu", "--prompts", f"gsm={tmp_path}/gsm.jsonl"]
    assert cli.main([*arguments, "--json", "--temperature", "1.0", "--picture", str(tmp_path / "p.png")]) == 0
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert content["tasks"][0]["task"] == "gsm"
    assert content["tasks"][0]["distribution"]["tokens"] > 0
    assert "p = " in err
    assert "decoding: eager, because there are no CUDA graphs on cpu" in err
    assert (content["rounds"], content["rounds_eager_because"]) == ("eager", "there are no CUDA graphs on cpu")
    assert (tmp_path / "p.png").exists()
    assert content["picture"] == str(tmp_path / "p.png")
    for wrong, message in (
        (["bench", "decode"], "needs DRAFTER"),
        ([*arguments, "--contexts", "many"], "not a list of numbers"),
        ([*arguments, "--contexts", "500"], "leaves no room for an answer"),
        (["bench", "step", "drafter"], "DRAFTER is of decode"),
        ([*arguments, "--picture", str(tmp_path / "none" / "p.png")], "cannot be written"),
        ([*arguments, "--picture", str(tmp_path / "p.txt")], "not the name of a PNG"),
        ([*arguments, "--compile", "on"], "no CUDA graphs on cpu"),
    ):
        assert cli.main(wrong) == 2
        err = capsys.readouterr().err
        assert message in err
        assert "block size" not in err  # what is wrong is found before anything is decoded


def test_eval_says_how_rounds_ran(
    drafter: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text("the fox\n")
    arguments = ["eval", str(drafter), "--target", str(tiny_target), "--prompts", str(tmp_path / "prompts")]
    arguments += ["--device", "cpu", "--max-new-tokens", "6"]
    assert cli.main([*arguments, "--compile", "off"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("decoding: eager, as asked for")
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["setting"]["rounds"] == "eager"
    for wrong, message in ((["--compile", "on"], "CUDA graphs"), (["--compile", "on", "--parity"], "eager rounds")):
        assert cli.main([*arguments, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_prompts_beyond_the_positions_are_left_out_by_name(target: Target, drafter: Path) -> None:
    model = load_drafter(drafter)
    prompts = [Prompt("p:1", text="the fox"), Prompt("p:2", text="the fox " * 600)]
    result = bench_decode(model, target, [("task", prompts)], max_new_tokens=6)
    assert result["tasks"][0]["answers"] == 1
    (notice,) = result["notices"]
    assert notice.startswith("left out, because the target has 512 positions: p:2 (")
    assert f"note: {notice}" in lines_of(result)
