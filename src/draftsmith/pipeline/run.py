"""Training from start to end: plan, load, start the workers, supervise, save, stop.

One process. The main thread loads, starts the threads and then only waits (`supervise.py`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftsmith.blocks import DraftBatch, Row, make_draft_batch
from draftsmith.compiled import Gate, cache
from draftsmith.config import RunConfig
from draftsmith.drafter import load_drafter
from draftsmith.drafter.model import DraftModel, initialise
from draftsmith.errors import UserError
from draftsmith.objective import HeadTerms, Objective, decay_weights
from draftsmith.observe.events import Event, EventLog
from draftsmith.observe.notice import Noticer, environment_changes, find_earlier
from draftsmith.observe.run_folder import check_run_folder, open_run_folder
from draftsmith.observe.tensorboard import TensorBoard
from draftsmith.observe.tracking import find_tracker, trackers
from draftsmith.pipeline.compiling import Compiling, TargetLayers, cache_folder, make_regions
from draftsmith.pipeline.environment import environment_record
from draftsmith.pipeline.held_out import HeldOut
from draftsmith.pipeline.jobs import Job
from draftsmith.pipeline.link import Link, Stop
from draftsmith.pipeline.plan import Plan, make_plan, overfit_config
from draftsmith.pipeline.progress import OVERFIT_LOSS, OVERFITTED, Progress
from draftsmith.pipeline.saving import Saver
from draftsmith.pipeline.signals import Signals, listening
from draftsmith.pipeline.stored import stored_targets
from draftsmith.pipeline.supervise import supervise
from draftsmith.pipeline.sync import Exchange
from draftsmith.pipeline.topology import Topology
from draftsmith.pipeline.vitals import Vitals
from draftsmith.pipeline.workers import DrafterWorker, Featured, PrefetchWorker, Prepared, TargetWorker, Worker
from draftsmith.target.forward import Target
from draftsmith.target.head import TargetHead
from draftsmith.target.load import load_target
from draftsmith.training.checkpoint import (
    Checkpoint,
    clean_up,
    newest_usable,
    prune_checkpoints,
    save_checkpoint,
)
from draftsmith.training.step import Replica
from draftsmith.training.update import ReplicaUpdate, make_updates

DISAGREEMENT = "what trains is not what serves"
ABANDONED = ("interrupted", "terminated", DISAGREEMENT)  # reasons after which nothing more is decoded
HELD_OUT_SEED = 0x48454C44  # anchors of held-out rows: fixed, and not those of a training epoch


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        folder: of the run.
        step: updates done.
        reason: why it ended ("all steps done", "time limit", "interrupted", "terminated", "overfitted").
        loss, tau_proxy: of the last update.
        losses: of every update of this process.
        evaluation: last held-out figures, if any.
        checkpoint: folder of the last checkpoint, which is also the exported drafter.
        seconds: from the first row on.
        tokens: real tokens trained on.
        succeeded: false only for an overfit run whose loss stayed up.
    """

    folder: Path
    step: int
    reason: str
    loss: float
    tau_proxy: float
    losses: list[float] = field(repr=False)
    evaluation: dict[str, Any] | None
    checkpoint: Path | None
    seconds: float
    tokens: int
    succeeded: bool = True

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "losses"}
        content["folder"] = str(self.folder)
        content["checkpoint"] = None if self.checkpoint is None else str(self.checkpoint)
        return content


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    max_minutes: float | None = None,
    overfit: bool = False,
    listener: Callable[[Event], None] | None = None,
) -> TrainResult:
    """Trains a drafter as described by `config`, into `config.training.output`.

    Args:
        config: the run.
        resume: continue from the newest checkpoint in the run folder.
        max_minutes: end after this time (warm-up excluded), with a checkpoint.
        overfit: learn one row until its loss is near zero; a check that everything is wired up.
        listener: gets every event, for a live line.

    Raises:
        UserError: wrong input, or training cannot go on (the loss is not finite, the device is out of memory).
        KeyboardInterrupt: interrupted twice.
    """
    if overfit:
        config = overfit_config(config)
    # Whatever can be found wrong without the target's weights is found before the folder is touched.
    check_run_folder(config, resume=resume)
    for name in config.training.trackers:
        find_tracker(name)
    plan = make_plan(config, overfit=overfit)
    with open_run_folder(config, resume=resume) as folder:
        began = threading.Event()
        listeners: list[Callable[[Event], None]] = [lambda event: began.set() if event["kind"] == "run" else None]
        listeners += [listener] if listener else []
        if config.training.tensorboard:
            listeners.append(TensorBoard(folder.tensorboard))
        with EventLog(folder.events, listeners) as log, listening() as signals:
            for tracker in trackers(config.training.trackers, folder.path, lambda text: log.write("notice", text=text)):
                log.listen(tracker)
            try:
                return _train(plan, folder.path, log, signals, resume, max_minutes, overfit)
            except BaseException as error:
                log.write("error", text=str(error) or type(error).__name__, final=True)
                log.write("end", reason="failed", step=None)
                if isinstance(error, UserError) and not began.is_set() and not resume:
                    folder.discard()
                raise


def _train(
    plan: Plan,
    folder: Path,
    log: EventLog,
    signals: Signals,
    resume: bool,
    max_minutes: float | None,
    overfit: bool,
) -> TrainResult:
    checkpoint = _checkpoint_to_resume(folder, plan, log) if resume else None
    facts = plan.to_json()
    record = json.dumps(environment_record(), indent=1, default=str) + "\n"
    (folder / "environment.json").write_text(record, encoding="utf-8")
    (folder / "resolved.json").write_text(json.dumps(facts, indent=2, default=str) + "\n", encoding="utf-8")
    log.write("plan", lines=plan.lines())
    if plan.corpus.report.incidents:
        plan.corpus.report.write_incidents(folder / "data-incidents.jsonl")
    for notice in plan.notices:
        log.write("notice", text=notice)

    with _cpu_threads(plan.topology, log):
        return _load_and_run(plan, folder, log, signals, checkpoint, max_minutes, overfit)


@contextmanager
def _cpu_threads(topology: Topology, log: EventLog) -> Iterator[None]:
    """Shares the cores among the workers that compute on the CPU.

    Each worker brings a team of torch's threads; teams that together outnumber the cores spend their time waiting for
    each other (ten times slower, measured on two cores).
    """
    workers = [device.type for device in (*topology.targets, *topology.drafters)].count("cpu")
    before = torch.get_num_threads()
    if workers:
        torch.set_num_threads(topology.cpu_threads)
        log.write("notice", text=f"{torch.get_num_threads()} CPU threads for each of {workers} workers on the CPU")
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load_and_run(
    plan: Plan,
    folder: Path,
    log: EventLog,
    signals: Signals,
    checkpoint: Checkpoint | None,
    max_minutes: float | None,
    overfit: bool,
) -> TrainResult:
    began = time.monotonic()
    targets = load_targets(plan)
    way = f"{targets[0].packing}: {targets[0].packing_reason}"
    log.write("notice", text=f"target loaded in {time.monotonic() - began:.1f} s; packed rows run as {way}")
    if plan.compiled:
        cache.use(cache_folder(plan))
    gate = Gate()
    try:
        return _run(plan, folder, log, signals, gate, targets, checkpoint, max_minutes, overfit)
    finally:
        gate.close()


def _run(
    plan: Plan,
    folder: Path,
    log: EventLog,
    signals: Signals,
    gate: Gate,
    targets: list[Target],
    checkpoint: Checkpoint | None,
    max_minutes: float | None,
    overfit: bool,
) -> TrainResult:
    config, sequence = plan.config, plan.sequence
    first_update = checkpoint.step if checkpoint else 0
    replicas = make_replicas(plan, targets[0].head(), gate, checkpoint)
    updates = make_updates([replica.model for replica in replicas], config.optimizer)
    if checkpoint:
        for update in updates:
            update.load_state_tensors(checkpoint.tensors)
        for update in updates:
            update.refresh(updates)

    identity = {"fingerprint": config.fingerprint(), "data": plan.corpus.train.fingerprint()}

    def snapshot() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors = {name: value for update in updates for name, value in update.state_tensors().items()}
        return tensors, {**identity, "loss": progress.loss}

    def write(step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> Path:
        return save_checkpoint(folder, step, plan.spec, tensors, plan.dtype, state)

    held_out: HeldOut | None = None

    def written(step: int, path: Path) -> None:
        if held_out is not None:
            held_out.offer(step, path)
        spare = held_out.spared() if held_out is not None else []
        prune_checkpoints(folder, config.training.keep, keep_every=config.training.keep_every, spare=spare)

    workers: list[Worker] = []
    stop = Stop()
    saver = Saver(write, log, stop, written)
    progress = Progress(config, sequence, first_update, log, [], saver, snapshot, max_minutes, overfit)
    workers += _make_workers(plan, targets, replicas, updates, progress, gate, log, first_update, stop, overfit)
    progress.clocks.extend(worker.clock for worker in workers)
    cards = {str(device): _card(device) for device in plan.topology.devices}
    earlier = find_earlier(folder, cards)
    log.listen(Noticer(log, earlier, environment_changes(earlier.folder, folder) if earlier else []))
    log.write(
        "run",
        step=first_update,
        steps=sequence.steps,
        workers=[worker.name for worker in workers],
        cards=cards,
        **identity,
        anchors=config.rows.anchors * config.training.rows_per_update,
    )
    links = {worker.name: worker.inbox for worker in workers if isinstance(worker, (TargetWorker, DrafterWorker))}
    devices, queue = plan.topology.devices, config.pipeline.queue
    try:
        if first_update < sequence.steps:
            if config.decoding.every:
                held_out = HeldOut(plan, folder, log, lambda: progress.request_end(DISAGREEMENT), first_update)
            with Vitals(log, folder, devices, progress.clocks, links, queue, lambda: progress.steps_done):
                supervise(workers, stop, progress, signals, config.training.grace)
            if held_out is not None and saver.last is not None and progress.reason not in ABANDONED:
                held_out.offer(saver.last_step, saver.last, last=True)
                with suppress(KeyboardInterrupt):  # everything is saved: only the last figure is given up
                    held_out.finish(lambda: progress.urgent)
    finally:
        saver.close()
        if held_out is not None:
            held_out.close()
    if held_out is not None and held_out.failure:
        raise UserError(
            held_out.failure, where="decoding.bound", fix="decoding.on_disagreement=warn trains on as it is"
        )
    reason = progress.reason
    # The update under way when the loss was low enough may have raised it again.
    succeeded = not overfit or reason == OVERFITTED or progress.loss < OVERFIT_LOSS
    log.write("end", reason=reason, step=progress.steps_done)
    return TrainResult(
        folder=folder,
        step=progress.steps_done,
        reason=reason,
        loss=progress.loss,
        tau_proxy=progress.tau_proxy,
        losses=progress.losses,
        evaluation=progress.evaluation,
        checkpoint=progress.checkpoint or (checkpoint.folder if checkpoint else None),
        seconds=progress.seconds,
        tokens=progress.tokens,
        succeeded=succeeded,
    )


def load_targets(plan: Plan) -> list[Target]:
    """One `Target` per target worker, or what stands in for it; workers on one device share it."""
    if plan.config.target.features:
        return stored_targets(plan, Path(plan.config.target.features))
    loaded: dict[torch.device, Target] = {}
    for device in plan.topology.targets:
        if device not in loaded:
            loaded[device] = load_target(plan.config.target, device, plan.target_dtype)
    if plan.config.objective.labels == "data":
        for target in loaded.values():
            target.free_layers_after(max(plan.spec.taps))
    return [loaded[device] for device in plan.topology.targets]


def make_replicas(plan: Plan, head: TargetHead, gate: Gate, checkpoint: Checkpoint | None = None) -> list[Replica]:
    """One replica per drafter of the plan, each on its device with a copy of the target's head."""
    config, spec = plan.config, plan.spec
    replicas = []
    for index, device in enumerate(plan.topology.drafters):
        model = DraftModel(spec, config.training.activation_checkpointing)
        if config.drafter.init and checkpoint is None:
            start = load_drafter(Path(config.drafter.init), dtype=torch.float32, target_layers=spec.target_layers)
            model.load_state_dict(start.state_dict())
        else:
            initialise(model, config.training.seed, head.final_scale_H)
        model = model.to(device, plan.dtype)
        own_head = head.to(device)
        forward, terms = make_regions(plan, index, model.forward, gate)
        head_VH = own_head.head_VH.to(plan.dtype)
        objective = Objective(
            config.objective, spec.block_size, HeadTerms(head_VH, own_head.multiplier, own_head.softcap), terms
        )
        replicas.append(Replica(model, own_head, objective, plan.attention, forward))
    return replicas


def _make_workers(
    plan: Plan,
    targets: list[Target],
    replicas: list[Replica],
    updates: list[ReplicaUpdate],
    progress: Progress,
    gate: Gate,
    log: EventLog,
    first_update: int,
    stop: Stop,
    overfit: bool,
) -> list[Worker]:
    config, sequence = plan.config, plan.sequence
    devices = list(plan.topology.drafters)
    first = sequence.first_number(first_update)
    queue = config.pipeline.queue
    target_links: list[Link[Prepared]] = [
        Link(_first_of(first, index, len(targets)), len(targets), queue, stop) for index in range(len(targets))
    ]
    drafter_links: list[Link[Featured]] = [
        Link(_first_of(first, index, len(devices)), len(devices), queue, stop) for index in range(len(devices))
    ]
    exchange = Exchange(updates, stop)
    compiling = Compiling(
        plan,
        gate,
        replicas,
        exchange,
        log,
        made_up_drafts(plan),
        first_update,
        log.path.parent / "ledger.json",
        [TargetLayers(plan, target, gate) for target in dict.fromkeys(targets)],
    )
    on_cuda = any(device.type == "cuda" for device in devices)
    make = batch_maker(plan, overfit)
    workers: list[Worker] = [
        PrefetchWorker(index, config.pipeline.prefetch, sequence, first_update, make, target_links, stop, pin=on_cuda)
        for index in range(config.pipeline.prefetch)
    ]
    for index, target in enumerate(targets):
        workers.append(
            TargetWorker(
                index,
                target,
                plan.spec.taps,
                config.objective.labels != "data",
                sequence,
                first_update,
                target_links[index],
                len(targets),
                drafter_links,
                devices,
                plan.dtype,
                stop,
            )
        )
    for index, replica in enumerate(replicas):
        workers.append(
            DrafterWorker(
                index,
                replica,
                plan.spec.block_size,
                devices[index],
                sequence,
                first_update,
                drafter_links[index],
                exchange,
                progress,
                compiling,
                stop,
            )
        )
    return workers


def _card(device: torch.device) -> str:
    """What the device is, by its maker's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _first_of(first: int, index: int, count: int) -> int:
    """The lowest number ≥ first that belongs to worker `index` of `count`."""
    return first + (index - first) % count


def batch_maker(plan: Plan, overfit: bool) -> Callable[[Job], tuple[Row, DraftBatch]]:
    """The function of the prefetch workers: job → row and draft batch, from (seed, epoch, row) alone."""
    config, spec = plan.config, plan.spec
    if config.objective.weights == "decay":
        weights = decay_weights(spec.block_size, config.objective.gamma)
    else:
        weights = torch.ones(spec.block_size)

    def make(job: Job) -> tuple[Row, DraftBatch]:
        source = plan.corpus.train if job.learn else plan.corpus.held_out
        assert source is not None
        number = 0 if overfit else job.row
        row = source.row(number)
        # Held-out rows and anchors are the same at every evaluation, whatever the run's seed.
        seed = config.training.seed if job.learn else HELD_OUT_SEED
        return row, draft_batch(plan, row, weights, (seed, number))

    return make


def made_up_drafts(plan: Plan) -> Callable[[Row], DraftBatch]:
    """Row → batch for rows that teach nothing: warm-up and comparisons."""
    weights = torch.ones(plan.spec.block_size)
    return lambda row: draft_batch(plan, row, weights, (0,))


def draft_batch(plan: Plan, row: Row, weights: torch.Tensor, seed: tuple[int, ...]) -> DraftBatch:
    """One row's draft work by the plan's sizes."""
    return make_draft_batch(
        row,
        anchors=plan.config.rows.anchors,
        block_size=plan.spec.block_size,
        mask_token_id=plan.spec.mask_token_id,
        slot_weights_B=weights,
        chunk=plan.config.objective.chunk,
        kinds=plan.spec.kinds,
        seed=seed,
        with_tiles=plan.attention == "flex",
        per_document=plan.config.anchors.limits(),
    )


def _checkpoint_to_resume(folder: Path, plan: Plan, log: EventLog) -> Checkpoint | None:
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
