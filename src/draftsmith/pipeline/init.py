"""The config that `draftsmith init` writes: everything that can be found out is found out, and the comment says how.

Geometry comes from the target's configuration, the mask token from its tokenizer and a sample of the data, the shape of
rows from the lengths of that sample. What is a choice and not a fact is the published recipe. No weights are loaded.

Cost: tokenising at most `SAMPLE` conversations.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.config import TargetConfig, load_config
from draftsmith.data.conversations import read_conversations
from draftsmith.data.places import find_files
from draftsmith.data.template import Tokeniser
from draftsmith.errors import UserError, reason_of, what_is_at
from draftsmith.objective.weights import default_gamma
from draftsmith.target.geometry import TargetGeometry, read_geometry
from draftsmith.target.load import load_tokenizer
from draftsmith.target.taps import choose_mask_token, choose_taps

SAMPLE = 2000
BLOCK_SIZE = 16
EPOCHS = 6
_BATCH = 256
# An epoch should have this many rows at least, so that shuffling means something; short data gets shorter rows.
_LEAST_ROWS = 64
_SMALL, _LONGER = 1e9, 8192  # parameters of the layers, tokens


@dataclass(frozen=True)
class DataFacts:
    """What a sample of the data tells.

    Attributes:
        conversations: looked at.
        usable: of them.
        tokens: estimate for the whole file, of documents that no row cuts.
        long_length: tokens that 99 of 100 documents do not exceed.
        taught: bool, true for tokens that the assistant wrote, of each document looked at.
        used_ids: bool [V], true for tokens that occur in the sample.
        whole: the sample is the whole file.
    """

    conversations: int
    usable: int
    tokens: int
    long_length: int
    taught: tuple[Tensor, ...]
    used_ids: Tensor
    whole: bool

    def tokens_in(self, length: int) -> int:
        """Estimate for the whole file in rows of `length`, which cut what is longer."""
        cut = sum(min(len(each), length) for each in self.taught)
        return self.tokens * cut // sum(map(len, self.taught))

    def rows_in(self, length: int) -> int:
        """Estimate of the rows of an epoch, the last one included, which is not full."""
        return max(1, -(-self.tokens_in(length) // length))

    def taught_in(self, length: int) -> float:
        """Share of those that the assistant wrote."""
        cut = [each[:length] for each in self.taught]
        return sum(int(each.sum()) for each in cut) / sum(map(len, cut))


def write_config(target: str, data: str, path: Path) -> Path:
    """Writes a commented config for training on `data` for `target`; returns `path`.

    Args:
        target: directory, hub name, `.gguf` file, or "demo".
        data: file, folder or dataset of conversations, as `data.train` takes it.
        path: the YAML file to write; must not exist.

    Raises:
        UserError: the file exists or cannot be written, the target or the data cannot be read, or nothing in the data
            can be taught.
    """
    where = str(path)
    if what_is_at(path):
        raise UserError("exists already", where=where, fix="name another file with --output, or remove it")
    config = TargetConfig(path=target)  # type: ignore[call-arg]
    geometry = read_geometry(config)
    tokenizer = load_tokenizer(config)
    facts = look_at_data(data, tokenizer, geometry.vocab_rows)
    text = _config_text(target, data, path, geometry, tokenizer, facts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"cannot be written: {reason_of(error)}", where=where) from None
    load_config(path)  # what init writes, train must take
    return path


def look_at_data(data: str, tokenizer: Any, vocab_rows: int) -> DataFacts:
    """Tokenises a sample as training will.

    Raises:
        UserError: the file cannot be read or holds nothing that can be taught.
    """
    tokeniser = Tokeniser(tokenizer)
    used = torch.zeros(vocab_rows, dtype=torch.bool)
    conversations = read_conversations([data])
    taught: list[Tensor] = []
    seen = usable = characters = 0
    while seen < SAMPLE:
        batch = list(islice(conversations, min(_BATCH, SAMPLE - seen)))
        if not batch:
            break
        seen += len(batch)
        for conversation, result in zip(batch, tokeniser(batch), strict=True):
            text = json.dumps(conversation.messages or conversation.text, ensure_ascii=False)
            characters += len(text.encode(errors="surrogatepass"))  # halves of pairs are refused, but counted
            usable += bool(result.documents)
            for document in result.documents:
                taught.append(document.loss_mask.bool())
                used[document.tokens[document.tokens < vocab_rows]] = True
    if not taught:
        raise UserError(
            f"none of the first {seen} conversations can be taught",
            where=data,
            fix="every conversation needs an assistant turn, or text",
        )
    whole = next(iter(conversations), None) is None
    tokens = sum(map(len, taught))
    if not whole:
        size = sum(file.path.stat().st_size for file in find_files([data]))  # of compressed data, a lower bound
        tokens = int(tokens * max(1.0, size / max(1, characters)))
    lengths = sorted(map(len, taught))
    longest = lengths[min(len(lengths) - 1, len(lengths) * 99 // 100)]
    return DataFacts(seen, usable, tokens, longest, tuple(taught), used, whole)


def choose_row_length(facts: DataFacts, geometry: TargetGeometry) -> tuple[int, str]:
    """S and the reason for it: 3072 or 4096 as published, less for little data or a target of short context."""
    length = 3072 if facts.long_length <= 3072 else 4096
    reason = "as published" if length == 3072 else f"1 in 100 documents is longer than {facts.long_length} tokens"
    while length > 512 and facts.tokens_in(length) < _LEAST_ROWS * length:
        length = 2048 if length > 2048 else length // 2
        reason = f"so that an epoch of this little data has about {facts.rows_in(length)} rows"
    most = geometry.max_position_embeddings
    if length > most:
        longer = (
            f"; 1 in 100 documents is longer ({facts.long_length} tokens) and is cut"
            if facts.long_length > most
            else ""
        )
        return most, f"all positions that the target has{longer}"
    return length, reason


def longer_rows(facts: DataFacts, geometry: TargetGeometry, length: int) -> str:
    """What to try where a row is too little work for a large GPU: launching a small target's kernels takes the host
    longer than running them takes the device, and longer rows are more work for the same launches. "" elsewhere."""
    longer = min(_LONGER, geometry.max_position_embeddings)
    small = geometry.layers * geometry.layer_parameters < _SMALL
    if not small or longer < 2 * length or facts.tokens_in(longer) < _LEAST_ROWS * longer:
        return ""
    return f"; on a large GPU try {longer}, for so small a target (draftsmith bench row)"


def choose_depth(geometry: TargetGeometry) -> tuple[int, tuple[int, ...]]:
    """Drafter layers (a sixth of the target's, 1 to 5) and taps (five, fewer where the target is too shallow)."""
    layers = max(1, min(5, round(geometry.layers / 6)))
    for count in range(5, 1, -1):
        try:
            return layers, choose_taps(geometry.layers, count)
        except UserError:
            continue
    return layers, choose_taps(geometry.layers, 1)


def _config_text(target: str, data: str, path: Path, geometry: TargetGeometry, tokenizer: Any, facts: DataFacts) -> str:
    length, length_reason = choose_row_length(facts, geometry)
    layers, taps = choose_depth(geometry)
    mask = choose_mask_token(tokenizer, geometry.vocab_rows, facts.used_ids)
    anchors = min(512, max(8, length // 6 // 8 * 8))
    rows_per_update = max(1, torch.cuda.device_count())
    tokens = facts.tokens_in(length)
    updates = max(1, EPOCHS * facts.rows_in(length) // rows_per_update)
    about = "" if facts.whole else "about "
    lines: list[str | tuple[str, str]] = [
        f"# draftsmith train {shlex.quote(str(path))} [section.key=value ...]",
        f"# Target: {geometry.layers} layers x {geometry.hidden_size} ({geometry.model_type}), "
        f"{geometry.vocab_rows:,} embedding rows, {geometry.max_position_embeddings:,} positions.",
        f"# Data: {about}{tokens:,} tokens, {facts.taught_in(length):.0%} of them taught; {facts.usable} of the "
        f"{facts.conversations} conversations looked at can be used.",
        "",
        "target:",
        f"  path: {_text(target)}",
        "",
        "data:",
        (f"  train: {_text(data)}", "best: the target's own answers (draftsmith data generate)"),
        ("  held_out_share: 0.02", "split off by content, only evaluated"),
        "",
        "drafter:",
        (f"  layers: {layers}", f"a sixth of the target's {geometry.layers}, 1 to 5"),
        (f"  block_size: {BLOCK_SIZE}", "B, as published; slot 0 is the last known token"),
        (f"  taps: {list(taps)}", "target layers, evenly spaced by rule"),
        (f"  mask_token_id: {mask.id}", f"{mask.rule}; does not occur in the data looked at"),
        "",
        "rows:",
        (f"  length: {length}", f"S, {length_reason}{longer_rows(facts, geometry, length)}"),
        (f"  anchors: {anchors}", "N, a sixth of S, at most 512"),
        "",
        "objective:",
        # Not the number: it would stay where another block_size is given.
        (
            "  gamma: null",
            f"decay of the slot weights; null: by rule, {default_gamma(BLOCK_SIZE):g} for B={BLOCK_SIZE}",
        ),
        "",
        ("optimizer:", "the published recipe"),
        "  lr: 6.0e-4",
        "  schedule: cosine",
        "  warmup: 0.04",
        "  clip: 1.0",
        "",
        "training:",
        f"  output: {_text(f'runs/{path.stem}')}",
        (f"  epochs: {EPOCHS}", f"about {updates:,} updates; documents do not fill their rows to the last token"),
        (f"  rows_per_update: {rows_per_update}", _rows_reason()),
        "  eval_every: 200",
        "  save_every: 500",
        "",
        ("pipeline:", "draftsmith train CONFIG --plan shows what auto means here"),
        "  targets: auto",
        "  drafters: auto",
    ]
    return "".join(f"{line}\n" if isinstance(line, str) else f"{line[0]:<28}  # {line[1]}\n" for line in lines)


def _rows_reason() -> str:
    count = torch.cuda.device_count()
    return f"one for each of {count} GPUs" if count > 1 else "a multiple of the number of drafters"


def _text(value: str) -> str:
    """A string as YAML reads it back, whatever is in it."""
    return json.dumps(value, ensure_ascii=False)
