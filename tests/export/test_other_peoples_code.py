"""Other people's code loads what we export, decodes with it, and reports our τ.

The wheels `dflash` (z-lab's decoder) and `speculators` (whose model drafts here in our loop, having no decoder of its
own) run a drafter of the embedded target that learned a few answers by heart. `make test` installs both; speculators
needs Python 3.11, so only below that its tests are skipped. SmolLM2's turn is in tests/test_smollm2.py.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import dflash.model as zlab
import pytest
import torch
from safetensors.torch import load_file
from small import saved

from draftsmith import cli
from draftsmith.config import TargetConfig, parse_config
from draftsmith.decode.answers import AnswerOptions, write_answers
from draftsmith.decode.prompts import encode_prompts, read_prompts
from draftsmith.decode.speculative import Decoded
from draftsmith.drafter import load_drafter, read_spec
from draftsmith.export.convert import Verifier, convert_drafter
from draftsmith.export.lint import lint
from draftsmith.pipeline.run import train
from draftsmith.target.forward import Target
from draftsmith.target.load import load_target
from draftsmith.target.source import DEMO

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "src" / "draftsmith" / "demo" / "prompts"
TOKENS = 40
needs_speculators = pytest.mark.skipif(sys.version_info < (3, 11), reason="speculators needs Python 3.11")


def compare_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", ROOT / "scripts" / "compare_with_speculators.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare"] = module
    spec.loader.exec_module(module)
    return module


COMPARE = compare_script()


@dataclass(frozen=True)
class Trained:
    """A drafter of the embedded target, its checkpoint, held-out prompts and what our decoder made of them."""

    target: Target
    folder: Path
    encoded: list[list[int]]
    ours: list[Decoded]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("demo")
    target = load_target(TargetConfig(path="demo"), torch.device("cpu"), torch.float32)
    asked = read_prompts(PROMPTS / "held_out.jsonl")[:4]
    # It learns by heart what it is asked below: here it is agreement that counts, and drafts have to be right for it.
    write_answers(target, asked, folder / "answers.jsonl", AnswerOptions(TOKENS, temperature=0.0))
    config: dict[str, Any] = {
        "target": {"path": "demo"},
        "data": {"train": str(folder / "answers.jsonl"), "held_out_share": 0.0},
        "drafter": {"layers": 2, "block_size": 6, "taps": [5, 10, 14]},
        "rows": {"length": 512, "anchors": 64},
        "objective": {"chunk": 320},
        "optimizer": {"name": "muon", "lr": 3e-3, "schedule": "constant"},
        "training": {"output": str(folder / "run"), "steps": 30, "tensorboard": False, "eval_rows": 0},
    }
    checkpoint = train(parse_config(config)).checkpoint
    assert checkpoint is not None
    encoded = encode_prompts(asked, target.tokenizer)
    return Trained(target, checkpoint, encoded, COMPARE.by_draftsmith(checkpoint, target, encoded, TOKENS))


def test_the_drafter_is_worth_comparing(trained: Trained) -> None:
    assert COMPARE.tau(trained.ours) > 1.5, "with no draft right there is nothing to agree about"


def test_dflash_decodes_with_our_export(trained: Trained, tmp_path: Path) -> None:
    assert cli.main(["export", str(trained.folder), str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    drafter = zlab.DFlashDraftModel.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    forwards = []
    handle = trained.target.model.register_forward_hook(lambda *_: forwards.append(1))
    total = 0
    for ids, ours in zip(trained.encoded, trained.ours, strict=True):
        forwards.clear()
        stops = list(trained.target.stop_ids)
        text = zlab.dflash_generate(drafter, trained.target.model, torch.tensor([ids]), TOKENS, stops)[0].tolist()
        assert text[len(ids) :] == ours.tokens
        assert len(forwards) - 1 == ours.target_forwards  # one is the prefill
        total += len(forwards) - 1
    handle.remove()
    theirs = sum(len(one.tokens) - 1 for one in trained.ours) / total
    assert theirs == pytest.approx(COMPARE.tau(trained.ours))


@needs_speculators
def test_speculators_drafts_with_our_export(trained: Trained, tmp_path: Path) -> None:
    theirs, export = COMPARE.by_speculators(trained.folder, trained.target, trained.encoded, TOKENS, tmp_path)
    assert [one.tokens for one in theirs] == [one.tokens for one in trained.ours]
    assert [one.accepted_per_round for one in theirs] == [one.accepted_per_round for one in trained.ours]
    assert COMPARE.tau(theirs) == pytest.approx(COMPARE.tau(trained.ours))
    report = lint(export, TargetConfig(path="demo"))
    assert report.fine, report.lines()


@needs_speculators
def test_what_speculators_saves_comes_back(trained: Trained, tmp_path: Path) -> None:
    """Their loader, their saver, our import: nothing is lost."""
    package = COMPARE.import_speculators()
    verifier = Verifier(str(DEMO), ("Qwen3ForCausalLM",))
    folder = convert_drafter(trained.folder, tmp_path / "a", "speculators", verifier=verifier).folder
    package.DFlashDraftModel.from_pretrained(str(folder)).save_pretrained(str(tmp_path / "b"))
    assert "num_target_layers" in json.loads((tmp_path / "b" / "config.json").read_text())
    back = convert_drafter(tmp_path / "b", tmp_path / "c", "zlab").folder
    assert read_spec(back) == read_spec(trained.folder)
    ours, theirs = load_file(trained.folder / "model.safetensors"), load_file(back / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@needs_speculators
def test_speculators_converts_our_own_layout(trained: Trained, tmp_path: Path) -> None:
    """Its converter from z-lab's layout takes our checkpoint and finds the same taps, block and mask token."""
    package = COMPARE.import_speculators()
    import speculators

    model = speculators.SpeculatorModel.from_pretrained(str(trained.folder), verifier=str(DEMO))
    assert isinstance(model, package.DFlashDraftModel)
    spec = read_spec(trained.folder)
    assert model.target_layer_ids == [tap + 1 for tap in spec.taps]
    assert (model.block_size, model.mask_token_id) == (spec.block_size, spec.mask_token_id)
    mine = load_drafter(trained.folder).state_dict()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in mine.items())


@needs_speculators
@pytest.mark.parametrize("layers", ["mixed", "bidirectional", "sliding"])
def test_speculators_does_what_the_lint_says_of_it(layers: str, tmp_path: Path) -> None:
    package = COMPARE.import_speculators()
    saved(tmp_path / "a", layers)
    folder = convert_drafter(tmp_path / "a", tmp_path / "b", "speculators", verifier=Verifier("owner/name")).folder
    config = package.DFlashSpeculatorConfig.from_pretrained(str(folder))
    config.speculators_config.verifier.name_or_path = None
    model = package.DFlashDraftModel(config)
    spec = read_spec(tmp_path / "a")
    sliding = [index for index in range(spec.layers) if spec.layer_kind(index).window]
    assert (model.sliding_window_indices, model.sliding_window) == (sliding, spec.sliding_window)
    assert model.sliding_window_non_causal == (not spec.layer_kind(sliding[0]).causal)
    # Its window reaches back from the anchor, for every slot as far: the last slot sees more than ours does.
    mask_mod, *_ = package.attention.create_anchor_block_mask_mod(
        torch.zeros(40, dtype=torch.int64), 40, torch.tensor([20]), spec.block_size, spec.sliding_window
    )
    zero, last = torch.tensor(0), torch.tensor(spec.block_size - 1)
    seen = [key for key in range(40) if bool(mask_mod(zero, zero, last, torch.tensor(key)))]
    assert min(seen) == 20 - (spec.sliding_window or 0)
    rules = lint(folder).verdicts["speculators"].reasons
    assert any(reason.startswith("window-rule") for reason in rules)
