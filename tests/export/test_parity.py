"""Eight faults, eight names; ten healthy runs, none.

Most faults are injected into z-lab's own decoder (other people's code, so that what is injected shares nothing with
what names it), the rest into the training row or the serving template; `scripts/fault_table.py` does it, so that it can
be done on real drafters as well. The namer gets two traces and the artefacts.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import dflash.model as zlab
import pytest
import torch
from small import FULL, SLIDING, random_drafter, small_spec
from torch import Tensor, nn

from draftsmith import cli
from draftsmith.blocks import DraftBatch, Row
from draftsmith.config import TargetConfig
from draftsmith.decode.prompts import Prompt, encode_prompts
from draftsmith.drafter import DraftModel, save_drafter
from draftsmith.export.parity import (
    FLOAT32_TOLERANCE,
    Diagnosis,
    Parity,
    TrainingText,
    check_parity,
    name_fault,
    tolerance_for,
)
from draftsmith.export.traces import (
    RecordingProposer,
    Trace,
    compare,
    decoding_trace,
    lay,
    training_batch,
    training_row,
    training_trace,
)
from draftsmith.export.whatif import NOTHING, block_logits, known_faults
from draftsmith.target.forward import Target
from draftsmith.target.load import load_target

PROMPT = Prompt(
    "prompts:1", text="the quick brown fox jumps over the lazy dog and then it runs far away from here to there"
)
TOKENS = 32


def fault_table() -> ModuleType:
    """scripts/fault_table.py, which puts the faults in."""
    path = Path(__file__).parents[2] / "scripts" / "fault_table.py"
    spec = importlib.util.spec_from_file_location("fault_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fault_table"] = module
    spec.loader.exec_module(module)
    return module


TABLE = fault_table()
Change = Callable[[Row, DraftBatch], DraftBatch]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(TargetConfig(path=str(tiny_target)), "cpu", torch.float32)


def drafter_for(target: Target, layers: str = "full", seed: int = 0, **changes: Any) -> DraftModel:
    geometry = target.geometry
    sizes = {"vocab_rows": geometry.vocab_rows, "target_layers": geometry.layers, "taps": (1, 2, 3), "rope_theta": 1e4}
    return random_drafter(small_spec(layers, mask_token_id=2, **{**sizes, **changes}), seed)


def prompt_ids(target: Target) -> list[int]:
    return encode_prompts([PROMPT], target.tokenizer)[0]


def reference(model: DraftModel, folder: Path) -> Any:
    """The same drafter as z-lab's code loads it."""
    save_drafter(model, folder)
    return zlab.DFlashDraftModel.from_pretrained(folder, dtype=model.fc.weight.dtype).eval()


def zlab_trace(theirs: Any, target: Target, ids: list[int]) -> Trace:
    """What z-lab's decoder lets its drafter say."""
    return TABLE.zlab_trace(theirs, target, ids, TOKENS)[0]


def trained_on(
    served: Trace, target: Target, model: DraftModel, change: Callable[[Row, DraftBatch], DraftBatch] | None = None
) -> Trace:
    row = training_row(served.tokens, served.prompt)
    batch = training_batch(row, model)
    if change is not None:
        batch = change(row, batch)
    return training_trace(target, model, row, served.prompt, served.anchors, batch)


# name of the fault → what is done to z-lab's decoder, or to the training row
DECODER = {name: put for put, change, other, name in TABLE.FAULTS.values() if name and not change and not other}
TRAINING = {name: change for _, change, _, name in TABLE.FAULTS.values() if change}


def test_there_are_eight_faults() -> None:
    assert (len(DECODER), len(TRAINING), len(TABLE.FAULTS)) == (5, 2, 1 + 5 + 2 + 1)  # none; …; the template


@pytest.mark.parametrize("name", list(DECODER))
def test_faults_of_a_decoder_are_named(name: str, target: Target, tmp_path: Path) -> None:
    model = drafter_for(target)
    theirs = reference(model, tmp_path)
    with DECODER[name](theirs):
        served = zlab_trace(theirs, target, prompt_ids(target))
    trained = trained_on(served, target, model)
    fault = name_fault(served, trained, target, model, FLOAT32_TOLERANCE, prompt=PROMPT)
    assert fault is not None
    assert (fault.name, fault.side, fault.kind) == (name, "decoder", name.split(":")[0])
    assert fault.left <= FLOAT32_TOLERANCE < fault.difference
    # The first position at which the two part, found again without the namer.
    first = next(key for key, gap in compare(served, trained) if gap > FLOAT32_TOLERANCE)
    assert (fault.anchor, fault.position, fault.slot) == (*first, first[1] - first[0])


def test_a_tap_that_slips_onto_the_last_layer_meets_the_final_norm(target: Target, tmp_path: Path) -> None:
    model = drafter_for(target, taps=(1, 2, target.geometry.layers - 2))
    theirs = reference(model, tmp_path)
    theirs.target_layer_ids = [tap + 1 for tap in theirs.target_layer_ids]
    served = zlab_trace(theirs, target, prompt_ids(target))
    fault = name_fault(served, trained_on(served, target, model), target, model, FLOAT32_TOLERANCE)
    assert fault is not None
    assert fault.name == "tap: taps 1 layer(s) too late, the last one normed"


@pytest.mark.parametrize("name", list(TRAINING))
def test_faults_of_the_training_forward_are_named(name: str, target: Target, tmp_path: Path) -> None:
    model = drafter_for(target)
    served = zlab_trace(reference(model, tmp_path), target, prompt_ids(target))
    trained = trained_on(served, target, model, TRAINING[name])
    fault = name_fault(served, trained, target, model, FLOAT32_TOLERANCE, prompt=PROMPT)
    assert fault is not None
    assert (fault.name, fault.side) == (name, "training")


def test_a_changed_template_is_named(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = drafter_for(target)
    as_trained = target.tokenizer.chat_template
    monkeypatch.setattr(target.tokenizer, "chat_template", as_trained.replace("assistant\n", "assistant: "))
    served = zlab_trace(reference(model, tmp_path), target, prompt_ids(target))
    trained = trained_on(served, target, model)
    text = TrainingText(template=as_trained)
    fault = name_fault(served, trained, target, model, FLOAT32_TOLERANCE, prompt=PROMPT, training_text=text)
    assert fault is not None
    assert (fault.kind, fault.side) == ("template", "data")
    assert fault.name.startswith(
        f"template: token {served.prompt - 2} of the prompt is ':' as served, '\\n' as trained"
    )


def test_labels_that_were_shifted_in_training_show_in_the_drafts(target: Target) -> None:
    """Decoding and training agree to the bit, and the drafter is useless: the field's standing complaint."""
    shifted, right = drafter_for(target, seed=3), drafter_for(target, seed=3)
    served = decoding_trace(target, RecordingProposer(right, target.head()), prompt_ids(target), 60, ())
    row = training_row(served.tokens, served.prompt)
    for model, offset in ((shifted, 1), (right, 0)):
        learn(model, target, row, offset)
        # Without a stop token the text is the same; only the drafts differ.
        served = decoding_trace(target, RecordingProposer(model, target.head()), prompt_ids(target), 60, ())
        fault = name_fault(served, trained_on(served, target, model), target, model, FLOAT32_TOLERANCE, prompt=PROMPT)
        if offset:
            assert fault is not None
            assert fault.name.startswith("labels: drafts name the token one place after theirs")
            assert fault.side == "both"
        else:
            assert fault is None


def learn(model: DraftModel, target: Target, row: Row, offset: int) -> None:
    """Teaches one text by heart, labels `offset` places off."""
    from draftsmith.drafter import build_masks

    batch = training_batch(row, model)
    features = target.features(row.tokens_S, row.document_S, row.positions_S, model.spec.taps).taps_SF
    filled = batch.slots_MC > 0
    slots, places = batch.slots_MC[filled], batch.teacher_MC[filled] + 1 + offset
    inside = places < row.tokens_S.numel()
    embeddings, masks = target.head().embed(batch.inputs_Q), build_masks(batch, "dense")
    model.requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    for _ in range(60):
        hidden = model(features, embeddings, batch.context_positions_S, batch.block_positions_Q, masks)
        logits = target.head().logits(hidden[slots[inside]])
        loss = nn.functional.cross_entropy(logits, row.tokens_S[places[inside]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.requires_grad_(False)


def test_what_nobody_knows_is_unknown_and_still_located(target: Target, tmp_path: Path) -> None:
    model = drafter_for(target)
    theirs = reference(model, tmp_path)
    with torch.no_grad():
        theirs.layers[1].mlp.up_proj.weight.mul_(1.5)
    served = zlab_trace(theirs, target, prompt_ids(target))
    fault = name_fault(served, trained_on(served, target, model), target, model, FLOAT32_TOLERANCE)
    assert fault is not None
    assert (fault.kind, fault.side) == ("unknown", "decoder")
    assert fault.anchor == served.prompt
    assert fault.left > FLOAT32_TOLERANCE


# layers, block size, seed, other changes, who decodes
HEALTHY: list[tuple[str, int, int, dict[str, Any], str]] = [
    ("full", 8, 1, {}, "zlab"),
    ("full", 16, 2, {"taps": (3,)}, "ours"),
    ("sliding", 8, 3, {}, "zlab"),
    ("sliding", 4, 4, {"sliding_window": 3}, "ours"),
    ("mixed", 8, 5, {}, "zlab"),
    ("bidirectional", 6, 6, {}, "zlab"),
    ("causal", 8, 7, {}, "ours"),
    ("causal full", 8, 8, {"head_dim": 32, "rope_theta": 1e6}, "zlab"),
    ("full", 8, 9, {"rope_theta": 5e5, "layer_types": (SLIDING, FULL), "sliding_window": 40}, "zlab"),
    ("full", 8, 10, {}, "bfloat16"),
]


@pytest.mark.parametrize(("layers", "block_size", "seed", "changes", "decoder"), HEALTHY)
def test_healthy_runs_are_left_alone(
    layers: str,
    block_size: int,
    seed: int,
    changes: dict[str, Any],
    decoder: str,
    target: Target,
    tiny_target: Path,
    tmp_path: Path,
) -> None:
    if decoder == "bfloat16":
        target = load_target(TargetConfig(path=str(tiny_target)), "cpu", torch.bfloat16)
    model = drafter_for(target, layers, seed, block_size=block_size, **changes).to(target.dtype)
    if decoder == "zlab":
        served = zlab_trace(reference(model, tmp_path), target, prompt_ids(target))
    else:
        served = decoding_trace(
            target, RecordingProposer(model, target.head()), prompt_ids(target), TOKENS, target.stop_ids
        )
    trained = trained_on(served, target, model)
    tolerance = tolerance_for(target, model, training_row(served.tokens, served.prompt), served.prompt, served.anchors)
    assert len(compare(served, trained)) > 3 * block_size
    assert name_fault(served, trained, target, model, tolerance, prompt=PROMPT, training_text=TrainingText()) is None


@pytest.mark.parametrize("layers", ["full", "sliding", "mixed", "bidirectional", "causal"])
def test_the_third_opinion_is_the_drafter_itself(layers: str, target: Target) -> None:
    """With no switch on it equals the training-time forward; every switch that is offered changes something."""
    model = drafter_for(target, layers)
    row = training_row(prompt_ids(target) + list(range(3, 40)), 20)
    anchors = list(range(20, row.tokens_S.numel() - 1))
    trained = training_trace(target, model, row, 20, anchors)
    tokens = row.tokens_S.tolist()

    def of(fault: Any) -> dict[tuple[int, int], Tensor]:
        taps = tuple(tap + fault.tap_shift for tap in model.spec.taps)
        features = target.features(row.tokens_S, row.document_S, row.positions_S, taps).taps_SF
        said = {a: block_logits(model, target.head(), features, tokens, a, fault) for a in anchors[::5]}
        return lay(said, len(tokens))

    clean = of(NOTHING)
    assert max(float((trained.logits[key] - row_).abs().max()) for key, row_ in clean.items()) < 1e-4
    faults = known_faults(model, target.head(), target.geometry.layers)
    for fault in faults:
        worst = max(float((clean[key] - row_).abs().nan_to_num(9.0).max()) for key, row_ in of(fault).items())
        assert worst > 5e-4, fault.name  # rounding frequencies to float16 is this mild in the first hundred tokens
    assert len({fault.name for fault in faults}) == len(faults)


def test_the_command(
    target: Target,
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_drafter(drafter_for(target), tmp_path / "drafter")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT.text}) + "\n")
    arguments = ["eval", str(tmp_path / "drafter"), "--target", str(tiny_target), "--parity"]
    arguments += ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "40", "--device", "cpu"]
    assert cli.main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert content["fault"] is None
    assert content["positions"] > 50
    assert "what was trained is what decodes" in err

    from draftsmith.drafter import model as drafter_model

    plain = drafter_model.rotary_tables

    def narrow(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if positions[0] == 0 and len(positions) > 100:  # the decoder's table
            frequency = (1.0 / theta ** (torch.arange(0, head_dim, 2) / head_dim)).bfloat16().float()
            angle = (positions.float()[:, None] * frequency).repeat(1, 2)
            return angle.cos(), angle.sin()
        return plain(positions, head_dim, theta, dtype)

    monkeypatch.setattr(drafter_model, "rotary_tables", narrow)
    assert cli.main(arguments) == 1
    assert (
        "NO: rotary: inverse frequencies rounded to bfloat16, in decoding; first at position" in capsys.readouterr().out
    )


def test_the_command_says_what_it_leaves_out(
    target: Target, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_drafter(drafter_for(target), tmp_path / "drafter")
    prompts = [{"prompt": PROMPT.text}, {"prompt": "the fox " * 400}, {"turns": ["the fox", "and then"]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    arguments = ["eval", str(tmp_path / "drafter"), "--target", str(tiny_target), "--parity", "--device", "cpu"]
    arguments += ["--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "30"]
    assert cli.main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert content["answers"] == 2
    assert "1 prompts have 1 further turns, which are not asked here" in content["notices"][0]
    assert "left out, because the target has 512 positions" in content["notices"][1]
    assert "p.jsonl:2 (" in content["notices"][1]
    assert all(notice in err for notice in content["notices"])
    options = {"--temperature": "0.8", "--block-size": "4", "--top-k": "3", "--top-p": "0.5", "--seed": "5"}
    for name, value in options.items():
        assert cli.main([*arguments, name, value]) == 2
        assert f"{name} would do nothing" in capsys.readouterr().err


def test_checking_says_what_was_compared(target: Target) -> None:
    result = check_parity(drafter_for(target), target, [PROMPT, Prompt("b", text="here")], max_new_tokens=30)
    assert isinstance(result, Parity)
    assert (result.answers, result.fault, result.tolerance) == (2, None, FLOAT32_TOLERANCE)
    assert 0 < result.largest < FLOAT32_TOLERANCE
    line = Diagnosis("mask: x", "mask", "decoder", 7, 9, 2, 0.5, 0.0).line()
    assert line == "mask: x, in decoding; first at position 9 (anchor 7, slot 2)"
