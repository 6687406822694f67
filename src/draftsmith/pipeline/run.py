"""Training from start to end: plan, load, start the workers, supervise, save, stop.

One process. The main thread loads, starts the threads and then only waits: for the end, for Ctrl-C (once: finish the
update and save; twice: stop at once), or for the first failure, which ends all workers within seconds and is raised
here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from draftsmith.observe.run_folder import check_run_folder, open_run_folder
from draftsmith.observe.tensorboard import TensorBoard
from draftsmith.pipeline.compiling import Compiling, TargetLayers, cache_folder, make_regions
from draftsmith.pipeline.environment import environment_record
from draftsmith.pipeline.jobs import Job
from draftsmith.pipeline.link import Link, Stop
from draftsmith.pipeline.plan import Plan, make_plan, overfit_config
from draftsmith.pipeline.progress import OVERFIT_LOSS, Progress
from draftsmith.pipeline.sync import Exchange
from draftsmith.pipeline.topology import Topology
from draftsmith.pipeline.workers import DrafterWorker, Featured, PrefetchWorker, Prepared, TargetWorker, Worker
from draftsmith.target.forward import Target
from draftsmith.target.head import TargetHead
from draftsmith.target.load import load_target
from draftsmith.training.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from draftsmith.training.step import Replica
from draftsmith.training.update import ReplicaUpdate, make_updates

JOIN_SECONDS = 10.0
HELD_OUT_SEED = 0x48454C44  # anchors of held-out rows: fixed, and not those of a training epoch


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        folder: of the run.
        step: updates done.
        reason: why it ended ("all steps done", "time limit", "interrupted", "overfitted").
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
    # Everything that can be wrong is found before the folder is touched.
    check_run_folder(config, resume=resume)
    plan = make_plan(config, overfit=overfit)
    with open_run_folder(config, resume=resume) as folder:
        listeners = [listener] if listener else []
        if config.training.tensorboard:
            listeners.append(TensorBoard(folder.tensorboard))
        with EventLog(folder.events, listeners) as log:
            try:
                return _train(plan, folder.path, log, resume, max_minutes, overfit)
            except BaseException as error:
                log.write("error", text=str(error) or type(error).__name__)
                log.write("end", reason="failed", step=None)
                raise


def _train(
    plan: Plan, folder: Path, log: EventLog, resume: bool, max_minutes: float | None, overfit: bool
) -> TrainResult:
    checkpoint = _checkpoint_to_resume(folder, plan) if resume else None
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
        return _load_and_run(plan, folder, log, checkpoint, max_minutes, overfit)


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
        return _run(plan, folder, log, gate, targets, checkpoint, max_minutes, overfit)
    finally:
        gate.close()


def _run(
    plan: Plan,
    folder: Path,
    log: EventLog,
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

    def save(step: int) -> Path:
        tensors = {name: value for update in updates for name, value in update.state_tensors().items()}
        state = {"fingerprint": config.fingerprint(), "data": plan.corpus.train.fingerprint(), "loss": progress.loss}
        path = save_checkpoint(folder, step, plan.spec, tensors, plan.dtype, state)
        prune_checkpoints(folder, config.training.keep)
        return path

    workers: list[Worker] = []
    progress = Progress(config, sequence, first_update, log, [], save, max_minutes, overfit)
    stop = Stop()
    workers += _make_workers(plan, targets, replicas, updates, progress, gate, log, first_update, stop, overfit)
    progress.clocks.extend(worker.clock for worker in workers)
    log.write("run", step=first_update, steps=sequence.steps, workers=[worker.name for worker in workers])
    if first_update < sequence.steps:
        _supervise(workers, stop, progress)
    reason = progress.reason
    succeeded = not overfit or progress.loss < OVERFIT_LOSS
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


def _supervise(workers: list[Worker], stop: Stop, progress: Progress) -> None:
    """Starts the workers and waits for the end; raises what went wrong first."""
    waiting = [worker for worker in workers if not isinstance(worker, DrafterWorker)]
    for worker in workers:
        if worker not in waiting:
            worker.start()
    interrupts = 0
    while not stop.is_set():
        try:
            # Everybody else waits until the drafters have compiled.
            if waiting and progress.warm.wait(0.05):
                for worker in waiting:
                    worker.start()
                waiting = []
            stop.wait(0.05)
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts == 1:
                progress.request_end("interrupted")
            else:
                stop.set()
                raise
    deadline = time.monotonic() + JOIN_SECONDS
    for worker in workers:
        if worker not in waiting:
            worker.join(max(0.0, deadline - time.monotonic()))
    cause = stop.cause
    if cause is not None:
        if isinstance(cause, torch.cuda.OutOfMemoryError):
            raise UserError(
                f"{stop.worker} ran out of memory on its device",
                where="pipeline",
                fix="lower rows.anchors, rows.length or objective.chunk, or set training.activation_checkpointing",
            ) from cause
        if not isinstance(cause, UserError) and hasattr(cause, "add_note"):  # Python 3.10 has no notes
            cause.add_note(f"in worker {stop.worker!r}")
        raise cause
    hanging = [worker.name for worker in workers if worker.is_alive()]
    assert not hanging, f"workers did not end: {hanging}"


def load_targets(plan: Plan) -> list[Target]:
    """One `Target` per target worker; workers on one device share it."""
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
            model.load_state_dict(load_drafter(Path(config.drafter.init), dtype=torch.float32).state_dict())
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
    )


def _checkpoint_to_resume(folder: Path, plan: Plan) -> Checkpoint | None:
    """The newest checkpoint, checked against this run; None if the run stopped before its first one."""
    found = list_checkpoints(folder)
    if not found:
        return None
    checkpoint = load_checkpoint(found[-1])
    if checkpoint.state.get("data") != plan.corpus.train.fingerprint():
        raise UserError(
            "its training rows are not those of this checkpoint: data files, tokenizer or template changed",
            where=str(checkpoint.folder),
            fix="restore them, or start a new run with drafter.init set to this checkpoint",
        )
    return checkpoint
