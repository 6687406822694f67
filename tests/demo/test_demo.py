"""The demo's package data, and the demo itself with little work: the same way from prompts to figures."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.config import TargetConfig, load_config
from draftsmith.decode.generate import Answer, generate
from draftsmith.decode.prompts import encode_prompts, read_prompts
from draftsmith.demo.run import FULL, PROMPTS, SPEEDUP_ASSERTED, TAU_ASSERTED, asserted, run_demo, shortcomings
from draftsmith.drafter import load_drafter
from draftsmith.errors import UserError
from draftsmith.pipeline.signals import Terminated
from draftsmith.target.load import Target, load_target
from draftsmith.target.source import DEMO

GRAM = 8


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(path="demo", dtype="float32"), "cpu", torch.float32)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """(run folder, result) of one quick demo."""
    output = tmp_path_factory.mktemp("demo") / "run"
    return output, run_demo(output, quick=True)


def test_package_data_is_small() -> None:
    files = [file for folder in (DEMO, PROMPTS) for file in folder.rglob("*") if file.is_file()]
    assert {"model.safetensors", "config.json", "tokenizer.json", "held_out.jsonl"} <= {file.name for file in files}
    assert sum(file.stat().st_size for file in files) <= 8_000_000


def test_held_out_prompts_share_no_gram_with_training_prompts(target: Target) -> None:
    def grams(text: str) -> set[tuple[int, ...]]:
        tokens = target.tokenizer(text, add_special_tokens=False)["input_ids"]
        return {tuple(tokens[place : place + GRAM]) for place in range(max(1, len(tokens) - GRAM + 1))}

    texts = {
        name: [prompt.as_messages()[-1]["content"] for prompt in read_prompts(PROMPTS / f"{name}.jsonl")]
        for name in ("train", "held_out")
    }
    known = set().union(*(grams(text) for text in texts["train"]))
    assert len(texts["train"]) >= FULL.prompts
    assert len(texts["held_out"]) >= FULL.held_out
    assert len(known) > 10_000
    shared = [text for text in texts["held_out"] if grams(text) & known]
    assert not shared


def test_target_answers_and_ends(target: Target) -> None:
    """All weights load (`load_target` refuses otherwise), and most answers end by themselves."""
    assert target.dtype == torch.float32
    prompts = encode_prompts(read_prompts(PROMPTS / "held_out.jsonl")[:12], target.tokenizer)
    answers = list(generate(target, prompts, max_new_tokens=FULL.answer_tokens, stop_ids=target.stop_ids))
    assert sum(answer.finish_reason == "stop" for answer in answers) >= 9
    assert len({tuple(answer.tokens) for answer in answers}) > 6


def test_quick_demo_writes_what_it_says(finished: tuple[Path, dict[str, object]]) -> None:
    output, returned = finished
    result = json.loads((output / "result.json").read_text(encoding="utf-8"))
    assert result == {key: value for key, value in returned.items() if key != "text"}
    assert result["lossless"] is True
    assert result["passed"] is True
    assert result["exact_answers"] == result["prompts"] == len(result["tau_per_prompt"])
    assert len(result["accept_by_slot"]) == load_config(output / "config.yaml").drafter.block_size - 1
    assert 1 <= result["tau"] <= 1 + len(result["accept_by_slot"])
    assert result["tau_prompt_lookup"] >= 1
    assert result["speedup"] > 0
    assert 0 <= result["prompts_not_looping"] <= result["prompts"]
    assert (result["not_looping"] is None) == (result["prompts_not_looping"] == 0)
    assert result["seconds"]["total"] > 0
    assert (output / "training.png").stat().st_size > 10_000
    assert (output / "events.jsonl").exists()
    drafter = load_drafter(Path(result["training"]["drafter"]), "cpu", torch.float32)
    assert drafter.spec.block_size == len(result["accept_by_slot"]) + 1
    assert "lossless: yes" in str(returned["text"])


def test_config_repeats_the_run(finished: tuple[Path, dict[str, object]]) -> None:
    """config.yaml is the run's own, and it names the answers that lie beside it."""
    output, _ = finished
    config = load_config(output / "config.yaml")
    assert json.loads((output / "run.json").read_text())["fingerprint"] == config.fingerprint()
    assert [Path(path).parent for path in config.data.train] == [output / "data"]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="in use"):
        run_demo(tmp_path, quick=True)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_an_interrupt_ends_the_answers_of_all_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = itertools.count()

    def slow(_target: Target, _prompts: Any, *, indices: list[int], **_: Any) -> Iterator[Answer]:
        for index in itertools.cycle(indices):
            if next(made) > 6000:  # a minute: nobody stopped it
                return
            time.sleep(0.02)
            yield Answer(index, [1], "stop")

    def interrupt(event: dict[str, Any]) -> None:
        if event["unit"] == "answer" and event["step"] == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr("draftsmith.demo.run.generate", slow)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path / "run", quick=True, listener=interrupt)
    assert next(made) < 6000


@pytest.mark.parametrize(("reason", "raised"), [("interrupted", KeyboardInterrupt), ("terminated", Terminated)])
def test_a_training_that_was_stopped_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str, raised: type[KeyboardInterrupt]
) -> None:
    stopped = types.SimpleNamespace(reason=reason, step=3, loss=1.0, checkpoint=Path("step-0000003"))
    monkeypatch.setattr("draftsmith.demo.run.train", lambda *_, **__: stopped)
    with pytest.raises(KeyboardInterrupt, match=f"^{reason} at step 3 .* what is kept is step-0000003$") as ended:
        run_demo(tmp_path / "run", quick=True)
    assert type(ended.value) is raised


def test_what_the_demo_stands_for() -> None:
    full = {
        "quick": False,
        "lossless": True,
        "tau": TAU_ASSERTED,
        "tau_prompt_lookup": TAU_ASSERTED - 0.1,
        "speedup": SPEEDUP_ASSERTED,
    }
    assert asserted(full)
    assert not asserted({**full, "tau": TAU_ASSERTED - 0.01})
    assert not asserted({**full, "lossless": False})
    assert not asserted({**full, "tau_prompt_lookup": TAU_ASSERTED})
    assert not asserted({**full, "speedup": SPEEDUP_ASSERTED - 0.01})
    assert len(shortcomings({**full, "tau": 1.0, "lossless": False})) == 3
    assert asserted({**full, "quick": True, "tau": 1.0})
    assert not asserted({**full, "quick": True, "lossless": False})
