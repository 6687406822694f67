"""The beginning of a run: what the ranks must agree on, the run's folder and log, and the checkpoint to go on from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import draftsmith
from draftsmith.config import RunConfig
from draftsmith.drafter.model import DraftModel
from draftsmith.errors import UserError
from draftsmith.observe.events import Event, EventLog
from draftsmith.observe.run_folder import check_run_folder, holds_run, open_run_folder
from draftsmith.observe.tensorboard import TensorBoard
from draftsmith.observe.tracking import find_tracker, trackers
from draftsmith.pipeline.compiling import check_cache, check_compiler
from draftsmith.pipeline.held_out import check_decoding
from draftsmith.pipeline.plan import Plan
from draftsmith.pipeline.ranks import Ranks
from draftsmith.pipeline.stored import check_features
from draftsmith.pipeline.workers import Worker
from draftsmith.target.load import load_tokenizer
from draftsmith.training.checkpoint import Checkpoint, clean_up, newest_usable
from draftsmith.training.finite import first_not_finite


def with_output(overfit: RunConfig, ranks: Ranks) -> RunConfig:
    """The overfit config with the folder that rank 0 found free."""
    output = ranks.share(overfit.training.output)
    return overfit.model_copy(update={"training": overfit.training.model_copy(update={"output": output})})


def look_ahead(config: RunConfig, resume: bool, ranks: Ranks) -> None:
    """Raises UserError for what can be found wrong with folder and trackers, which are rank 0's."""
    if ranks.writes:
        check_run_folder(config, resume=resume)
        for name in config.training.trackers:
            find_tracker(name)


def notes_on_folder(config: RunConfig) -> list[str]:
    """What a plan has to say about the run's folder, of which it cannot know whether the run is to be resumed.

    Raises:
        UserError: as `look_ahead`, but not for this very run.
    """
    resume = False
    with suppress(OSError):  # which the check below tells in its own words
        resume = holds_run(config)
    check_run_folder(config, resume=resume)
    return [f"{config.training.output} holds this run: train --resume goes on with it"] if resume else []


def check_start(plan: Plan) -> None:
    """What a run would refuse between its plan and its first row, as far as no weights are needed to find it.

    Raises:
        UserError: trackers that are not there, features that are not this run's, nothing to decode, no compiler
            or no place for what is compiled.
    """
    config = plan.config
    for name in config.training.trackers:
        find_tracker(name)
    if config.target.features:
        folder, tokenizer = Path(config.target.features), load_tokenizer(config.target)
        check_features(folder, config, plan.geometry, tokenizer, tuple(plan.spec.taps))
    check_decoding(plan)
    check_compiler(plan)
    check_cache(plan)


def must_agree(plan: Plan) -> dict[str, Any]:
    """What ranks cannot differ in: they would wait for each other for ever, or learn something else."""
    return {
        "version of draftsmith": draftsmith.__version__,
        "version of torch": torch.__version__,
        "config": plan.config.fingerprint(),
        "data": plan.corpus.train.fingerprint(),
        "number of drafters": len(plan.topology.drafters),
        "kind of drafter device": plan.topology.drafters[0].type,
        "dtype": str(plan.dtype),
        "attention": plan.attention,
        "number of steps": plan.steps,
        "number of held-out rows": plan.sequence.eval_rows,
        "updates between evaluations": plan.sequence.eval_every,
    }


@contextmanager
def run_log(
    config: RunConfig, ranks: Ranks, resume: bool, listener: Callable[[Event], None] | None
) -> Iterator[tuple[Path, EventLog]]:
    """The run's folder and this rank's event log: rank 0's is the run's, the others have `rank-1.jsonl` and so on."""
    path = Path(config.training.output)
    with ExitStack() as stack:
        held = ranks.together(
            lambda: stack.enter_context(open_run_folder(config, resume=resume)) if ranks.writes else None
        )
        if held is None:
            path.mkdir(parents=True, exist_ok=True)
            own = stack.enter_context(EventLog(path / f"rank-{ranks.rank}.jsonl"))
            _tell_by(ranks, own, stack)
            yield path, own
            return
        began = threading.Event()
        listeners: list[Callable[[Event], None]] = [lambda event: began.set() if event["kind"] == "run" else None]
        listeners += [listener] if listener else []
        if config.training.tensorboard:
            listeners.append(TensorBoard(held.tensorboard))
        log = stack.enter_context(EventLog(held.events, listeners))
        _tell_by(ranks, log, stack)
        for tracker in trackers(config.training.trackers, held.path, lambda text: log.write("notice", text=text)):
            log.listen(tracker)
        try:
            yield path, log
        except UserError:
            if not began.is_set() and not resume:
                held.discard()
            raise


def _tell_by(ranks: Ranks, log: EventLog, stack: ExitStack) -> None:
    """Has the ranks say in the log what they have to say, for as long as it is open."""
    ranks.tell_by(lambda text: log.write("notice", topic="ranks", text=text))
    stack.callback(ranks.tell_by, None)


def checkpoint_to_resume(folder: Path, plan: Plan, log: EventLog) -> Checkpoint | None:
    """The newest checkpoint that is whole and of this run; None if the run stopped before its first one.

    Raises:
        UserError: none of them can be used, or the training rows are others.
    """
    with torch.device("meta"):
        expected = {name: tuple(value.shape) for name, value in DraftModel(plan.spec).named_parameters()}

    def accept(checkpoint: Checkpoint) -> None:
        if checkpoint.state.get("fingerprint") != plan.config.fingerprint():
            raise UserError("this checkpoint is of another run", where=str(checkpoint.folder))
        if {name: tuple(value.shape) for name, value in checkpoint.masters.items()} != expected:
            raise UserError("this checkpoint is of another drafter", where=str(checkpoint.folder))
        broken = first_not_finite(checkpoint.tensors)
        if broken:
            raise UserError(f"the weights of this checkpoint are not finite ({broken})", where=str(checkpoint.folder))

    def refused(error: UserError, place: Path) -> None:
        log.write("notice", topic="checkpoint", text=f"refused {error}; it lies in {place.name}")

    clean_up(folder)
    checkpoint = newest_usable(folder, accept, refused)
    if checkpoint is None:
        log.write("notice", text="there is no checkpoint yet: starts from the first step")
        return None
    if checkpoint.state.get("data") != plan.corpus.train.fingerprint():
        raise UserError(
            "its training rows are not those of this checkpoint: data files, tokenizer or template changed",
            where=str(checkpoint.folder),
            fix="restore them, or start a new run with drafter.init set to this checkpoint",
        )
    log.write("notice", text=f"resumed from {checkpoint.folder.name}")
    return checkpoint


def shared(checkpoint: Checkpoint | None, ranks: Ranks) -> Checkpoint | None:
    """Rank 0's checkpoint, in all ranks; they need not see its folder."""
    found = ranks.share(None if checkpoint is None else [str(checkpoint.folder), checkpoint.step])
    if found is None:
        return None
    tensors = ranks.share_tensors(checkpoint.tensors if checkpoint is not None else {})
    return checkpoint or Checkpoint(Path(found[0]), found[1], tensors, {})


def gathered(plan: Plan, workers: list[Worker], ranks: Ranks) -> tuple[dict[str, str], list[str]]:
    """(what each device is, names of the workers) of all ranks; those of other ranks than the first say which."""
    own = [{str(device): _card(device) for device in plan.topology.devices}, [worker.name for worker in workers]]
    cards: dict[str, str] = {}
    names: list[str] = []
    for rank, (devices, workers_there) in enumerate(ranks.gather(own)):
        of = f" of rank {rank}" if rank else ""
        cards.update({f"{device}{of}": card for device, card in devices.items()})
        names += [f"{name}{of}" for name in workers_there]
    return cards, names


def _card(device: torch.device) -> str:
    """What the device is, by its maker's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
