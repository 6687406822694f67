"""A drafter from one layout into another, weights bit for bit.

Layouts: "zlab" (our own as well; read by z-lab's dflash, SGLang and vLLM) and "speculators" (read by that library and
by vLLM). Reading knows both, whoever wrote them. A folder is written aside and renamed, so one with the final name is
complete; an existing one is not touched.

Cost: the weights once through memory, twice where they are compared with those of a folder that is there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from draftsmith.drafter.native import (
    CONFIG,
    WEIGHTS,
    read_config,
    read_own_weights,
    read_spec,
    read_weights,
    weights_digest,
)
from draftsmith.drafter.native import spec_to_config as spec_to_zlab
from draftsmith.drafter.spec import DrafterSpec
from draftsmith.drafter.speculators_layout import TARGET_OWNED, is_speculators, spec_to_speculators
from draftsmith.errors import UserError, reason_of, what_is_at

Layout = Literal["zlab", "speculators"]
LAYOUTS: tuple[Layout, ...] = ("zlab", "speculators")
CARD = "README.md"


@dataclass(frozen=True)
class Verifier:
    """The target as a layout names it.

    Attributes:
        name: directory or hub name; speculators fetches embedding and head from there.
        architectures: of its `config.json`.
    """

    name: str
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        folder: the drafter.
        layout: of it.
        source_layout: of what was read.
        spec: geometry.
        dtype: of the weights on disk.
        digests: `weights_digest` of what was read, and of what was written.
        notices: one line for everything of the source that the result does not hold.
        written: false if the folder held this very drafter already.
    """

    folder: Path
    layout: Layout
    source_layout: Layout
    spec: DrafterSpec
    dtype: torch.dtype
    digests: tuple[str, str]
    notices: tuple[str, ...]
    written: bool = True

    def lines(self) -> list[str]:
        """For people."""
        spec, name = self.spec, str(self.dtype).removeprefix("torch.")
        there = "" if self.written else ", which is there already"
        return [
            f"{self.folder}: {self.layout} layout, {spec.layers} layers x {spec.hidden_size}, B={spec.block_size}, "
            f"taps {list(spec.taps)}, {name}{there}",
            *(f"note: {notice}" for notice in self.notices),
        ]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "folder": str(self.folder),
            "layout": self.layout,
            "source_layout": self.source_layout,
            "drafter": vars(self.spec),
            "dtype": str(self.dtype).removeprefix("torch."),
            "weights": self.digests[1],
            "written": self.written,
            "notices": list(self.notices),
        }


def layout_of(folder: Path) -> Layout:
    """Which layout a drafter on disk has.

    Raises:
        UserError: there is none.
    """
    return "speculators" if is_speculators(read_config(folder)) else "zlab"


def convert_drafter(
    source: Path,
    output: Path,
    layout: Layout,
    *,
    verifier: Verifier | None = None,
    target_layers: int | None = None,
    dtype: torch.dtype | None = None,
    card: Callable[[Converted], str] | None = None,
    again: bool = False,
) -> Converted:
    """Writes the drafter of `source` into `output`, which must not exist.

    Args:
        source: a checkpoint, an export, or what others published.
        layout: to write.
        verifier: names the target; speculators' layout needs it.
        target_layers: depth of the target, where the source does not say it.
        dtype: of the weights; none: as they are.
        card: makes the text of README.md.
        again: an `output` that holds just what would be written is taken as it is. Its README.md may be another, such
            as one that its owner went on with: then that is a notice.

    Raises:
        UserError: `source` is not a drafter, `output` exists or cannot be written, or the verifier is missing.
    """
    there = what_is_at(output)
    taken = UserError("exists already", where=str(output), fix="name another folder, or remove it")
    if there and not (again and there == "folder"):
        raise taken
    spec = read_spec(source, target_layers)
    weights = read_own_weights(source, spec)
    notices = _left_behind(source, spec)
    kinds = {value.dtype for value in weights.values()}
    if dtype is None and len(kinds) > 1:
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise UserError(f"its tensors have several dtypes ({names})", where=str(source), fix="choose one with --dtype")
    dtype = dtype or kinds.pop()
    config = spec_to_zlab(spec, dtype)
    if layout == "speculators":
        verifier = verifier or _verifier_of(source)
        if verifier is None:
            raise UserError(
                "speculators' layout names the target, from which it takes embedding and head",
                where=str(output),
                fix="give --target, a directory or hub name",
            )
        config = spec_to_speculators(spec, dtype, verifier.name, verifier.architectures)
        if Path(verifier.name).exists():
            notices += (f"the target is named by a path of this machine ({verifier.name}); --verifier names another",)
    converted = {name: value.to(dtype).contiguous() for name, value in weights.items()}
    digests = weights_digest(weights), weights_digest(converted)
    result = Converted(output, layout, layout_of(source), spec, dtype, digests, notices)
    text = None if card is None else card(result)
    if there:
        if not _holds(output, config, digests[1]):
            raise taken
        if text is not None and _text_of(output / CARD) != text:
            notices += (f"{output / CARD} is not the card that this command writes: it stays as it is",)
        return replace(result, notices=notices, written=False)
    aside = output.with_name(f".{output.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(converted, str(aside / WEIGHTS), metadata={"format": "pt"})
        # Written for its owner alone by default; a served file is read by others.
        os.chmod(aside / WEIGHTS, 0o644)
        if text is not None:
            (aside / CARD).write_text(text, encoding="utf-8")
        os.replace(aside, output)
    except OSError as error:
        raise UserError(f"cannot be written: {reason_of(error)}", where=str(output)) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return result


def _holds(folder: Path, config: dict[str, Any], weights: str) -> bool:
    """Whether a folder holds a drafter of this configuration and this digest of weights, and nothing beside its card
    that would be taken for a part of it."""
    try:
        files = {
            str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".json", ".safetensors")
        }
        as_read = json.loads(json.dumps(config))
        if files != {CONFIG, WEIGHTS} or read_config(folder) != as_read:
            return False
        return weights_digest(read_weights(folder)) == weights
    except (OSError, UserError):
        return False


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _verifier_of(source: Path) -> Verifier | None:
    """The target that a source in speculators' layout names."""
    config = read_config(source)
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    name = verifier.get("name_or_path")
    return Verifier(name, tuple(verifier.get("architectures") or ())) if name else None


def _left_behind(source: Path, spec: DrafterSpec) -> tuple[str, ...]:
    """What of the source the drafter itself does not hold."""
    config = read_config(source)
    notices = []
    if is_speculators(config):
        held = sorted(TARGET_OWNED & set(read_weights(source)))
        if config.get("draft_vocab_size") not in (None, spec.vocab_rows):
            notices.append(
                f"the reduced vocabulary of {config['draft_vocab_size']} rows is left out: drafts come from all "
                f"{spec.vocab_rows} rows of the target's head; hidden states are the same"
            )
        if held:
            notices.append(f"tensors that are the target's are left out: {', '.join(held)}")
    return tuple(notices)
