"""Random targets on disk: read back as the geometry says, loadable, the same every time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from draftsmith.bench.geometry import GEOMETRIES, find_geometry, kinds_of, twin
from draftsmith.bench.random_data import WORDS, write_conversations, write_texts
from draftsmith.bench.random_target import MASK, TURN_END, chat_tokenizer, model_config, write_random_target
from draftsmith.config import TargetConfig
from draftsmith.target.geometry import geometry_of, layer_kinds, read_geometry
from draftsmith.target.load import load_target

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_a_configuration_says_what_the_geometry_says(name: str) -> None:
    """Also the rope base and the norm's epsilon, which have defaults of their own."""
    for geometry in (GEOMETRIES[name], twin(GEOMETRIES[name])):
        config = model_config(geometry)
        assert geometry_of(config, name) == geometry
        assert layer_kinds(config) == kinds_of(geometry)


@pytest.mark.parametrize("name", ["tiny", "qwen3.5-hybrid"])
def test_a_written_target_loads(name: str, tmp_path: Path) -> None:
    geometry = twin(find_geometry(name))
    write_random_target(tmp_path, geometry)
    config = TargetConfig(path=str(tmp_path))
    assert read_geometry(config) == geometry
    target = load_target(config, CPU, torch.float32)
    assert target.kinds == kinds_of(geometry)
    assert target.stop_ids == (target.tokenizer.convert_tokens_to_ids(TURN_END),)
    assert target.tokenizer.mask_token == MASK
    text = target.tokenizer.apply_chat_template([{"role": "user", "content": "a fox"}], tokenize=False)
    assert target.tokenizer.decode(target.tokenizer.encode(text)) == "<|im_start|>user\na fox<|im_end|>\n"


def test_weights_are_the_same_every_time(tmp_path: Path) -> None:
    geometry = find_geometry("tiny")
    for folder in ("first", "second"):
        write_random_target(tmp_path / folder, geometry, dtype=torch.float32)
        torch.rand(3)
    first, second = (tmp_path / folder / "model.safetensors" for folder in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    write_random_target(tmp_path / "without", geometry, weights=False, initializer_range=0.5)
    assert not list((tmp_path / "without").glob("*.safetensors"))
    assert '"initializer_range": 0.5' in (tmp_path / "without" / "config.json").read_text()
    assert read_geometry(TargetConfig(path=str(tmp_path / "without"))) == geometry


def test_the_tokenizer_knows_the_words() -> None:
    tokenizer = chat_tokenizer()
    # A word, and the space in front of it, is one token.
    assert len(tokenizer.encode(" ".join(WORDS), add_special_tokens=False)) <= len(WORDS) + 1


def test_random_data_is_as_much_as_was_asked_for(tmp_path: Path) -> None:
    write_conversations(tmp_path / "chats.jsonl", random.Random(0), 1000)
    write_texts(tmp_path / "texts.jsonl", random.Random(0), lines=7)
    chats = (tmp_path / "chats.jsonl").read_text().splitlines()
    assert 1000 <= sum(len(line.split()) for line in chats) <= 1000 + 400 + 20 * len(chats)
    assert len((tmp_path / "texts.jsonl").read_text().splitlines()) == 7
