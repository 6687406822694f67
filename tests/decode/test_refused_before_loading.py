"""What is wrong with a drafter, or with the prompts, is said before its target is loaded, which may take minutes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_decoding import tiny_drafter

from draftsmith import cli
from draftsmith.config import TargetConfig
from draftsmith.drafter import DraftModel, save_drafter
from draftsmith.target.geometry import read_geometry

EVAL, CHAT, BENCH = "eval", "chat", "bench decode"


@pytest.fixture
def drafter(tiny_target: Path, tmp_path: Path) -> Path:
    geometry = read_geometry(TargetConfig(path=str(tiny_target)))
    shape = {"vocab_rows": geometry.vocab_rows, "target_layers": geometry.layers, "mask_token_id": 2}
    save_drafter(DraftModel(replace(tiny_drafter().spec, **shape)), tmp_path / "drafter")
    return tmp_path / "drafter"


@pytest.fixture(autouse=True)
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the target is loaded")

    monkeypatch.setattr("draftsmith.target.load.load_target", load)


def arguments(command: str, drafter: Path, target: Path, prompts: Path) -> list[str]:
    asked = ["--prompt", "the fox"] if command == CHAT else ["--prompts", str(prompts)]
    return [*command.split(), str(drafter), "--target", str(target), "--device", "cpu", *asked]


def change(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def torn_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def weights_of_another(folder: Path) -> None:
    change(folder, intermediate_size=20)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def foreign(folder: Path) -> None:
    change(folder, architectures=["LlamaForCausalLM"])


def of_a_deeper_target(folder: Path) -> None:
    change(folder, num_target_layers=40)


@pytest.mark.parametrize("command", [EVAL, f"{EVAL} --parity", CHAT, BENCH])
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (no_config, "no drafter here: config.json is missing"),
        (foreign, "is not a DFlash drafter"),
        (no_weights, "no weights here: model.safetensors is missing"),
        (torn_weights, "cannot be read"),
        (weights_of_another, "tensors missing, left over or of another shape"),
        (of_a_deeper_target, "is for another target"),
    ],
)
def test_a_drafter_that_is_none(
    command: str, spoil: Any, says: str, drafter: Path, tiny_target: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "p.txt").write_text("the fox\n")
    spoil(drafter)
    assert cli.main(arguments(command, drafter, tiny_target, tmp_path / "p.txt")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert says in error
    assert str(drafter) in error


@pytest.mark.parametrize("command", [EVAL, CHAT, BENCH])
def test_a_folder_that_is_not_there_is_told_before_its_target_is_looked_for(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("the fox\n")
    line = arguments(command, tmp_path / "none", Path("owner/target-of-the-hub"), tmp_path / "p.txt")
    assert cli.main(line) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"draftsmith: {tmp_path / 'none'}: no ")


@pytest.mark.parametrize("command", [EVAL, CHAT])
def test_more_slots_than_were_trained(
    command: str, drafter: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("the fox\n")
    assert cli.main([*arguments(command, drafter, tiny_target, tmp_path / "p.txt"), "--block-size", "99"]) == 2
    assert "block size 99 is outside 1.." in capsys.readouterr().err


@pytest.mark.parametrize("command", [EVAL, BENCH, "data generate"])
@pytest.mark.parametrize("content", [None, "", '{"prompt": 3}\n'])
def test_prompts_that_are_none(
    command: str, content: str | None, drafter: Path, tiny_target: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked = tmp_path / "p.jsonl"
    if content is not None:
        asked.write_text(content)
    assert cli.main(arguments(command, drafter, tiny_target, asked)) == 2
    assert str(asked) in capsys.readouterr().err


def test_conversations_that_are_not_there(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["data", "regenerate", str(tmp_path / "out.jsonl"), str(tmp_path / "none.jsonl"), "--device", "cpu"]
    line += ["--target", str(tiny_target)]
    assert cli.main([*line, "--extra", "{}"]) == 2
    assert "no server is asked: --extra would do nothing" in capsys.readouterr().err
    assert cli.main(line) == 2
    assert f"{tmp_path / 'none.jsonl'}: no such data file" in capsys.readouterr().err


@pytest.mark.parametrize("command", [EVAL, CHAT, BENCH])
def test_a_good_drafter_goes_on_to_the_target(command: str, drafter: Path, tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("the fox\n")
    with pytest.raises(AssertionError, match="the target is loaded"):
        cli.main(arguments(command, drafter, tiny_target, tmp_path / "p.txt"))
