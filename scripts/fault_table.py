"""Eight faults between training and serving, put into other people's decoder, and what is said of each.

    python scripts/fault_table.py DRAFTER --target TARGET --prompts prompts.jsonl [--limit 2] [--max-new-tokens 96]

Five faults go into z-lab's decoder (the wheel dflash), two into the training-time row, one into the chat template that
serving uses. For each the acceptance length falls or stays, the two sets of logits differ or do not, and the namer says
what is wrong from logits and artefacts alone. The first line is the healthy drafter.

Prints a table; with --json one JSON object. Exit code 0 if every fault got its name and the healthy run none.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dflash.model as zlab
import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, rotate_half

from draftsmith.blocks import DraftBatch, Intervals, Row
from draftsmith.config import TargetConfig
from draftsmith.decode.prompts import Prompt, encode_prompts, read_prompts
from draftsmith.drafter.native import load_drafter_for
from draftsmith.errors import run_script
from draftsmith.export.parity import TrainingText, name_fault, tolerance_for
from draftsmith.export.traces import Trace, compare, lay, training_batch, training_row, training_trace
from draftsmith.target.load import load_target

Change = Callable[[Row, DraftBatch], DraftBatch]


def zlab_trace(theirs: Any, target: Any, ids: list[int], tokens: int) -> tuple[Trace, int]:
    """What z-lab's decoder lets its drafter say, read off where it makes logits; and its target forwards."""
    said: dict[int, Tensor] = {}
    starts: list[int] = []
    plain = theirs.compute_logits

    def remember(_module: Any, _inputs: Any, keywords: dict[str, Any], _output: Any) -> None:
        starts.append(int(keywords["position_ids"][0, -keywords["noise_embedding"].shape[1]]))

    def logits(hidden: Tensor, head: Any) -> Tensor:
        result = plain(hidden, head)
        if hidden.shape[1] == theirs.block_size - 1:
            said[starts[-1]] = result[0].float().cpu()
        return result

    handle = theirs.register_forward_hook(remember, with_kwargs=True)
    theirs.compute_logits = logits
    forwards: list[int] = []
    count = target.model.register_forward_hook(lambda *_: forwards.append(1))
    try:
        prompt = torch.tensor([ids], device=target.device)
        text = zlab.dflash_generate(theirs, target.model, prompt, tokens, list(target.stop_ids))[0].tolist()
    finally:
        handle.remove()
        count.remove()
        theirs.compute_logits = plain
    return Trace(text, len(ids), lay(said, len(text))), len(forwards) - 1


@contextmanager
def bfloat16_frequencies(theirs: Any) -> Iterator[None]:
    theirs.rotary_emb.inv_freq = theirs.rotary_emb.inv_freq.bfloat16().float()
    yield


@contextmanager
def partial_rotary(theirs: Any) -> Iterator[None]:
    config = copy.deepcopy(theirs.config)
    config.head_dim //= 2
    theirs.rotary_emb = Qwen3RotaryEmbedding(config).to(theirs.device)
    plain = zlab.apply_rotary_pos_emb

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        size = cos.shape[-1]

        def turn(x: Tensor) -> Tensor:
            own_cos, own_sin = cos[:, None, -x.shape[-2] :], sin[:, None, -x.shape[-2] :]
            return torch.cat((x[..., :size] * own_cos + rotate_half(x[..., :size]) * own_sin, x[..., size:]), dim=-1)

        return turn(q), turn(k)

    zlab.apply_rotary_pos_emb = apply
    try:
        yield
    finally:
        zlab.apply_rotary_pos_emb = plain


@contextmanager
def taps_off_by_one(theirs: Any) -> Iterator[None]:
    theirs.target_layer_ids = [tap + 1 for tap in theirs.target_layer_ids]
    yield


@contextmanager
def final_norm_twice(theirs: Any) -> Iterator[None]:
    theirs.norm = nn.Sequential(theirs.norm, theirs.norm)
    yield


@contextmanager
def causal(theirs: Any) -> Iterator[None]:
    for layer in theirs.layers:
        layer.self_attn.is_causal = True
    yield


@contextmanager
def nothing(theirs: Any) -> Iterator[None]:
    yield


def own_feature_visible(_row: Row, batch: DraftBatch) -> DraftBatch:
    """A block sees its anchor's own feature, which decoding does not have yet."""

    def wider(part: Intervals) -> Intervals:
        lo, hi, own_lo, own_hi = part.tensors()
        return Intervals(lo, torch.where(hi > 0, hi + 1, hi), own_lo, own_hi)

    return replace(batch, intervals={kind: wider(part) for kind, part in batch.intervals.items()})


def labels_shifted(row: Row, batch: DraftBatch) -> DraftBatch:
    """Slot k is taught the token after its own."""
    last = row.tokens_S.numel() - 1
    moved = batch.teacher_MC + 1
    inside = (batch.slots_MC > 0) & (moved < last)
    return replace(
        batch,
        slots_MC=torch.where(inside, batch.slots_MC, 0),
        teacher_MC=torch.where(inside, moved, 0),
        labels_MC=torch.where(inside, row.tokens_S[(moved + 1).clamp(max=last)], 0),
    )


# fault → (what is done to the decoder, to the training row, to the served template; how its name begins)
FAULTS: dict[str, tuple[Callable[[Any], Any], Change | None, bool, str]] = {
    "none": (nothing, None, False, ""),
    "bf16 inv_freq": (bfloat16_frequencies, None, False, "rotary: inverse frequencies rounded to bfloat16"),
    "partial rotary": (partial_rotary, None, False, "rotary: only 50% of the head rotated"),
    "tap off by one": (taps_off_by_one, None, False, "tap: taps 1 layer(s) too late"),
    "final norm twice": (final_norm_twice, None, False, "norm: final norm applied twice"),
    "causal for bidirectional": (causal, None, False, "mask: causal where it is bidirectional"),
    "anchor's own feature": (nothing, own_feature_visible, False, "mask: anchor's own feature visible"),
    "label shift": (nothing, labels_shifted, False, "labels: logits one slot late"),
    "template change": (nothing, None, True, "template: "),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    prompts, config = read_prompts(arguments.prompts)[: arguments.limit], TargetConfig(path=arguments.target)
    model = load_drafter_for(config, arguments.drafter).to(device, torch.float32)
    target = load_target(config, device, torch.float32)
    rows = [table_row(name, target, model, arguments, prompts) for name in FAULTS]
    if arguments.json:
        print(json.dumps({"device": str(device), "rows": rows}))
    else:
        print(f"{'fault':<26}{'τ':>6}{'largest difference':>20}  what is said")
        for row in rows:
            print(f"{row['fault']:<26}{row['tau']:>6.2f}{row['difference']:>20.2g}  {row['said'] or 'nothing'}")
    return 0 if all(row["right"] for row in rows) else 1


def table_row(name: str, target: Any, model: Any, arguments: Any, prompts: list[Prompt]) -> dict[str, Any]:
    """One fault on all prompts: τ of z-lab's decoder, the largest difference in logits, and the first thing said."""
    decoder, row_change, template_change, begins = FAULTS[name]
    as_trained = target.tokenizer.chat_template
    if template_change:
        target.tokenizer.chat_template = (
            str(as_trained).replace("assistant\\n", "assistant: ").replace("assistant\n", "assistant: ")
        )
        assert target.tokenizer.chat_template != as_trained, "the template has no assistant turn to change"
    emitted = forwards = 0
    largest, said = 0.0, ""
    try:
        for prompt, ids in zip(prompts, encode_prompts(prompts, target.tokenizer), strict=True):
            theirs = zlab.DFlashDraftModel.from_pretrained(arguments.drafter, dtype=torch.float32)
            theirs = theirs.to(target.device).eval()
            with decoder(theirs):
                served, count = zlab_trace(theirs, target, ids, arguments.max_new_tokens)
            emitted, forwards = emitted + len(served.tokens) - len(ids) - 1, forwards + count
            row = training_row(served.tokens, served.prompt)
            batch = training_batch(row, model)
            trained = training_trace(
                target, model, row, served.prompt, served.anchors, row_change(row, batch) if row_change else batch
            )
            largest = max([largest, *(gap for _, gap in compare(served, trained))])
            tolerance = tolerance_for(target, model, row, served.prompt, served.anchors)
            text = TrainingText(template=as_trained)
            fault = name_fault(served, trained, target, model, tolerance, prompt=prompt, training_text=text)
            said = said or (fault.line() if fault else "")
    finally:
        target.tokenizer.chat_template = as_trained
    right = said.startswith(begins) and bool(said) == bool(begins)
    return {"fault": name, "tau": emitted / max(1, forwards), "difference": largest, "said": said, "right": right}


if __name__ == "__main__":
    run_script(main)
