"""Checkpoints: one folder each, a drafter that serving engines load plus what resuming needs.

    <run>/checkpoints/step-0000120/
        config.json, model.safetensors   the drafter, z-lab's layout
        trainer.safetensors              float32 masters and optimizer state, by parameter name
        state.json                       update number, run, fingerprint of the data
        manifest.json                    format, version, and size and SHA-256 of every file above

Written aside, synced and renamed (`durable.py`), so a folder with the final name is always complete; none is written of
weights that are not finite. What is read back is checked against the manifest first; a checkpoint that is torn,
altered, of another run or of a later release is refused by name, set aside as `refused-step-…`, and the one before it
is used. All randomness of a run is drawn from (seed, epoch, row), so the position in the stream is the state of every
generator.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import draftsmith
from draftsmith.drafter import DrafterSpec
from draftsmith.drafter.native import CONFIG, WEIGHTS, spec_to_config
from draftsmith.errors import UserError, reason_of
from draftsmith.training.durable import Folder, Written, set_aside, sum_file, tensor_pieces
from draftsmith.training.finite import broken_weights, first_not_finite

TRAINER = "trainer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
FORMAT = "draftsmith checkpoint"
VERSION = 2


@dataclass(frozen=True)
class Checkpoint:
    """What was read back.

    Attributes:
        folder: where it lies.
        step: updates done.
        tensors: masters and optimizer state, as `ReplicaUpdate.state_tensors` names them, on the CPU.
        state: the rest of `state.json`.
    """

    folder: Path
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def masters(self) -> dict[str, Tensor]:
        return masters_of(self.tensors)


def masters_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float32 masters among masters and optimizer state, by parameter name."""
    return {name.removeprefix("master/"): t for name, t in tensors.items() if name.startswith("master/")}


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:07d}"


def save_checkpoint(
    run: Path, step: int, spec: DrafterSpec, tensors: dict[str, Tensor], dtype: torch.dtype, state: dict[str, Any]
) -> Path:
    """Writes the checkpoint of update `step` and returns its folder.

    Args:
        run: run folder.
        step: updates done.
        spec: of the drafter.
        tensors: masters and optimizer state of all replicas; the drafter's weights are the masters in `dtype`.
        dtype: of the drafter's weights on disk.
        state: further facts for `state.json`.

    Raises:
        OSError: disk full, quota, read-only, and the like. Nothing with the final name is left behind then.
        UserError: masters or optimizer state are not finite; nothing is written then.
    """
    broken = first_not_finite(tensors)
    if broken:
        raise broken_weights(step, broken, newest_step(run))
    folder = Folder(checkpoint_folder(run, step))
    try:
        on_cpu = {name: value.to("cpu") for name, value in tensors.items()}
        folder.write_json(CONFIG, spec_to_config(spec, dtype))
        folder.write(WEIGHTS, tensor_pieces(masters_of(on_cpu), dtype, {"format": "pt"}))
        folder.write(TRAINER, tensor_pieces(on_cpu))
        folder.write_json(STATE, {"step": step, **state})
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "draftsmith": draftsmith.__version__,
            "step": step,
            "files": {name: vars(written) for name, written in folder.files.items()},
        }
        folder.write_json(MANIFEST, manifest)
        return folder.put_in_place()
    except BaseException:
        folder.abandon()
        raise


def prune_checkpoints(run: Path, keep: int, *, keep_every: int = 0, spare: Iterable[Path] = ()) -> list[Path]:
    """Removes all but the newest `keep` and returns what was removed.

    Args:
        keep_every: steps that are a multiple of it stay as well; 0: none.
        spare: folders that stay whatever their age (the best one).

    Raises:
        OSError: one could not be removed. Each is renamed first, so none is left half removed under its name.
    """
    spared = {path.name for path in spare}
    removed = []
    for folder in list_checkpoints(run)[:-keep]:
        if folder.name in spared or (keep_every and step_of(folder) % keep_every == 0):
            continue
        going = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(going, ignore_errors=True)
        folder.rename(going)
        shutil.rmtree(going)
        removed.append(folder)
    return removed


def list_checkpoints(run: Path) -> list[Path]:
    """Folders with the name of a complete checkpoint, oldest first."""
    root = run / "checkpoints"
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if re.fullmatch(r"step-\d{7,}", path.name)), key=step_of)


def newest_step(run: Path) -> int | None:
    """Updates of the newest checkpoint; None if there is none."""
    return max(map(step_of, list_checkpoints(run)), default=None)


def step_of(folder: Path) -> int:
    """Updates done, by the folder's name."""
    return int(folder.name.removeprefix("step-"))


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads a checkpoint back, after checking every byte of it.

    Raises:
        UserError: no checkpoint of ours, torn, truncated, altered, or of a version that this release does not know.
    """
    files = _read_manifest(folder)
    for name, expected in files.items():
        _check_file(folder / name, expected)
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        step = int(state["step"])
        tensors = load_file(str(folder / TRAINER))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"this checkpoint is not readable: {error}", where=str(folder)) from None
    if folder.name != checkpoint_folder(Path(), step).name:
        raise UserError(f"this folder holds the checkpoint of step {step}: renamed?", where=str(folder))
    return Checkpoint(folder, step, tensors, state)


def newest_usable(
    run: Path, accept: Callable[[Checkpoint], None], refused: Callable[[UserError, Path], None]
) -> Checkpoint | None:
    """The newest checkpoint that is whole and that `accept` takes; None if the run holds none at all.

    Args:
        accept: raises UserError for a checkpoint that cannot be used.
        refused: told of each refusal and where the refused folder lies now: set aside, unless the disk forbids it.

    Raises:
        UserError: there are checkpoints, and all were refused, now or at an earlier start; says why the newest was.
    """
    first: UserError | None = None
    for folder in reversed(list_checkpoints(run)):
        try:
            checkpoint = load_checkpoint(folder)
            accept(checkpoint)
        except UserError as error:
            first = first or error
            try:
                place = set_aside(folder, "refused")
            except OSError:
                place = folder
            refused(error, place)
            continue
        return checkpoint
    if first is not None:
        raise UserError(
            f"no checkpoint can be used; the newest: {first.what}",
            where=first.where,
            fix="they were renamed to refused-…; put a good one back, or start a new run in another folder",
        )
    if any((run / "checkpoints").glob("refused-step-*")):
        raise UserError(
            "all its checkpoints were refused at an earlier start",
            where=str(run / "checkpoints"),
            fix="put a good one back; to start from nothing, remove the folders refused-…",
        )
    return None


def clean_up(run: Path) -> None:
    """Removes what a killed process left half written or half removed; only for who holds the run folder."""
    for pattern in (".step-*.partial", ".step-*.removed"):
        for path in (run / "checkpoints").glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _read_manifest(folder: Path) -> dict[str, Written]:
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UserError("manifest.json is not that of a Draftsmith checkpoint", where=str(folder))
        version = content["version"]
        if isinstance(version, int) and version > VERSION:
            raise UserError(
                f"written by a later release ({content.get('draftsmith')}, checkpoint version {version}; this one "
                f"reads {VERSION})",
                where=str(folder),
                fix="install that release",
            )
        if version != VERSION:
            raise UserError(f"checkpoint version {version!r} is not {VERSION}", where=str(folder))
        files = {name: Written(int(each["bytes"]), str(each["sha256"])) for name, each in content["files"].items()}
        missing = {CONFIG, WEIGHTS, TRAINER, STATE} - files.keys()
        if missing:
            raise UserError(f"manifest.json does not name {', '.join(sorted(missing))}", where=str(folder))
    except FileNotFoundError:
        raise UserError("manifest.json is missing: no whole checkpoint of this release", where=str(folder)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"manifest.json is not readable: {error}", where=str(folder)) from None
    return files


def _check_file(path: Path, expected: Written) -> None:
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            kind = "truncated" if size < expected.bytes else "too long"
            raise UserError(f"{path.name} is {kind}: {size} of {expected.bytes} bytes", where=str(path.parent))
        if sum_file(path).sha256 != expected.sha256:
            raise UserError(f"{path.name} was altered: its checksum differs", where=str(path.parent))
    except FileNotFoundError:
        raise UserError(f"{path.name} is missing", where=str(path.parent)) from None
    except OSError as error:
        raise UserError(f"{path.name} is not readable: {reason_of(error)}", where=str(path.parent)) from None
