"""Decodes the same prompts with a drafter twice: by draftsmith, and with the drafter run by the library speculators.

    python scripts/compare_with_speculators.py DRAFTER --target TARGET --prompts prompts.jsonl [--limit 16]

The drafter is exported into speculators' layout, loaded by speculators' own `DFlashDraftModel.from_pretrained` (which
fetches embedding and head from the target's files), and asked for one block per round through that model's own forward.
It has no decoder, so the loop around it is ours; the drafts are not. In float32 both must write the same tokens and
need the same number of target forwards.

Prints one JSON object. Exit code 0 if all tokens are equal and τ agrees within 0.05, else 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.config import TargetConfig
from draftsmith.decode.prompts import encode_prompts, read_prompts
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.speculative import Decoded, DrafterProposer, decode
from draftsmith.drafter import load_drafter
from draftsmith.errors import run_script
from draftsmith.export.convert import Verifier, convert_drafter
from draftsmith.target.forward import Target
from draftsmith.target.load import load_target

TOLERANCE = 0.05
# Imported with the package, used by its data generation alone.
_UNUSED = ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "datasets")


def import_speculators() -> Any:
    """`speculators.models.dflash`. Where its HTTP client and its data-set library are not installed, empty modules
    stand in for them while it is imported: nothing here generates data."""
    missing = [name for name in _UNUSED if name not in sys.modules and find_spec(name.partition(".")[0]) is None]
    for name in missing:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__getattr__ = lambda attribute: type(attribute, (), {})  # type: ignore[method-assign]
        sys.modules[name] = module
    try:
        return importlib.import_module("speculators.models.dflash")
    finally:
        for name in missing:
            del sys.modules[name]


def verifier_folder(target: Target, folder: Path) -> Path:
    """What speculators fetches of a target: its config, embedding, final norm and head, under the usual names."""
    folder.mkdir(parents=True)
    embedding, head = target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": target.decoder.norm.weight}
    if head.data_ptr() != embedding.data_ptr():
        tensors["lm_head.weight"] = head
    save_file(
        {name: value.detach().cpu().contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )
    target.model.config.save_pretrained(folder)
    return folder


class SpeculatorsProposer:
    """A drafter that speculators runs: one anchor, one block, through its training-time forward.

    Args:
        folder: of the drafter, in speculators' layout.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        package = import_speculators()
        config = package.DFlashSpeculatorConfig.from_pretrained(str(folder))
        config.transformer_layer_config._attn_implementation = "eager"  # flex compiles, which takes a GPU or minutes
        model = package.DFlashDraftModel.from_pretrained(str(folder), config=config)
        self.model = model.to(device, dtype).eval()
        self.block_size = int(config.block_size)
        self.taps = tuple(number - 1 for number in config.aux_hidden_state_layer_ids)

    def start(self, max_length: int, device: torch.device, sampling: Sampling, generator: torch.Generator) -> None:
        assert sampling.greedy
        self._features = torch.empty(0, device=device)

    def observe(self, features_LF: Tensor, start: int) -> None:
        self._features = features_LF if start == 0 else torch.cat((self._features[:start], features_LF))

    def propose(self, tokens: list[int], width: int) -> tuple[Tensor, None]:
        anchor, device = len(tokens) - 1, self._features.device
        assert self._features.shape[0] == anchor, "a block sees exactly what was accepted"
        self.model.block_size = width  # near the length limit blocks are shorter, here as everywhere
        # It draws anchors from a loss mask, and none from the last block of a row.
        length = anchor + 1 + width
        hidden = torch.zeros(1, length, self._features.shape[1], dtype=self._features.dtype, device=device)
        hidden[0, :anchor] = self._features
        mask = torch.zeros(1, length, dtype=torch.bool, device=device)
        mask[0, anchor] = True
        ids = torch.zeros(1, length, dtype=torch.int64, device=device)
        ids[0, anchor] = tokens[-1]
        _, logits, *_ = self.model._backbone_forward(
            hidden,
            ids,
            mask,
            torch.zeros(1, length, self.model.hidden_size, dtype=hidden.dtype, device=device),
            torch.zeros(1, length, dtype=torch.int64, device=device),
            max_anchors=1,
        )
        return logits[0, 1:width].argmax(-1), None


def by_speculators(
    folder: Path, target: Target, encoded: list[list[int]], tokens: int, work: Path
) -> tuple[list[Decoded], Path]:
    """(answers, the export that was loaded): the drafter of `folder` exported into `work` and run by speculators."""
    verifier = verifier_folder(target, work / "target")
    names = tuple(target.model.config.architectures or ())
    export = convert_drafter(folder, work / "export", "speculators", verifier=Verifier(str(verifier), names))
    proposer = SpeculatorsProposer(export.folder, torch.device(target.device), target.dtype)
    answers = [decode(target, ids, proposer, max_new_tokens=tokens, stop_ids=target.stop_ids) for ids in encoded]
    return answers, export.folder


def by_draftsmith(folder: Path, target: Target, encoded: list[list[int]], tokens: int) -> list[Decoded]:
    """Answers with our own drafter."""
    proposer = DrafterProposer(load_drafter(folder, target.device, target.dtype), target.head())
    return [decode(target, ids, proposer, max_new_tokens=tokens, stop_ids=target.stop_ids) for ids in encoded]


def tau(answers: list[Decoded]) -> float:
    """Pooled over all answers."""
    return sum(len(one.tokens) - 1 for one in answers) / max(1, sum(one.target_forwards for one in answers))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    target = load_target(TargetConfig(path=arguments.target), device, dtype)
    encoded = encode_prompts(read_prompts(arguments.prompts)[: arguments.limit], target.tokenizer)
    ours = by_draftsmith(arguments.drafter, target, encoded, arguments.max_new_tokens)
    with tempfile.TemporaryDirectory() as work:
        theirs, _ = by_speculators(arguments.drafter, target, encoded, arguments.max_new_tokens, Path(work))
    equal = [a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True)]
    result = {
        "prompts": len(encoded),
        "dtype": arguments.dtype,
        "device": arguments.device,
        "equal": all(equal),
        "tau_draftsmith": tau(ours),
        "tau_speculators": tau(theirs),
        "forwards_draftsmith": [one.target_forwards for one in ours],
        "forwards_speculators": [one.target_forwards for one in theirs],
    }
    print(json.dumps(result))
    return 0 if all(equal) and abs(tau(ours) - tau(theirs)) <= TOLERANCE else 1


if __name__ == "__main__":
    run_script(main)
