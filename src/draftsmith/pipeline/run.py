"""Training from start to end: plan, load, start the workers, supervise, save, stop.

One process, or one for each rank (`ranks.py`). The main thread loads, starts the threads and then only waits
(`supervise.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftsmith.compiled import Gate
from draftsmith.config import RunConfig
from draftsmith.errors import UserError
from draftsmith.observe.events import Event, EventLog
from draftsmith.observe.notice import Noticer, environment_changes, find_earlier
from draftsmith.observe.run_folder import holds_run
from draftsmith.pipeline.assemble import load_targets, make_replicas, make_workers
from draftsmith.pipeline.balance import balance_of
from draftsmith.pipeline.compiling import use_cache
from draftsmith.pipeline.environment import environment_record, write_record
from draftsmith.pipeline.held_out import HeldOut
from draftsmith.pipeline.link import Stop
from draftsmith.pipeline.measure import settle
from draftsmith.pipeline.not_finite import NotFinite
from draftsmith.pipeline.out_of_memory import explain, explained
from draftsmith.pipeline.phases import StartPhases
from draftsmith.pipeline.plan import Plan, make_plan, overfit_config
from draftsmith.pipeline.progress import OVERFIT_LOSS, OVERFITTED, Progress
from draftsmith.pipeline.ranks import Ranks
from draftsmith.pipeline.saving import Saver
from draftsmith.pipeline.seat import Seat
from draftsmith.pipeline.signals import Signals, listening
from draftsmith.pipeline.starting import (
    check_start,
    checkpoint_to_resume,
    gathered,
    look_ahead,
    must_agree,
    run_log,
    shared,
    with_output,
)
from draftsmith.pipeline.supervise import supervise
from draftsmith.pipeline.sync import Exchange
from draftsmith.pipeline.topology import Topology
from draftsmith.pipeline.vitals import Vitals
from draftsmith.pipeline.workers import DrafterWorker, TargetWorker, Worker
from draftsmith.target.forward import Target
from draftsmith.training.checkpoint import (
    Checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from draftsmith.training.step import Replica
from draftsmith.training.update import ReplicaUpdate, make_updates

DISAGREEMENT = "what trains is not what serves"
ABANDONED = ("interrupted", "terminated", DISAGREEMENT)  # reasons after which nothing more is decoded


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        folder: of the run.
        step: updates done.
        steps: updates of the whole run.
        reason: why it ended ("all steps done", "time limit", "interrupted", "terminated", "overfitted").
        loss, tau_proxy: of the last update; not numbers if this process made none.
        losses: of every update of this process.
        evaluation: last held-out figures, if any.
        checkpoint: folder of the last checkpoint, which is also the exported drafter.
        seconds: from the first row on.
        tokens: real tokens trained on.
        succeeded: false only for an overfit run whose loss stayed up, be it because it was stopped.
        rank: of this process; rank 0 tells people.
    """

    folder: Path
    step: int
    steps: int
    reason: str
    loss: float
    tau_proxy: float
    losses: list[float] = field(repr=False)
    evaluation: dict[str, Any] | None
    checkpoint: Path | None
    seconds: float
    tokens: int
    succeeded: bool = True
    rank: int = 0

    def to_json(self) -> dict[str, Any]:
        """For `--json`, which knows no NaN: what is not a finite number is null."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "losses"}
        content.update(_finite({"loss": self.loss, "tau_proxy": self.tau_proxy}))
        content["evaluation"] = None if self.evaluation is None else _finite(self.evaluation)
        content["folder"] = str(self.folder)
        content["checkpoint"] = None if self.checkpoint is None else str(self.checkpoint)
        return content


@dataclass(frozen=True)
class _Setting:
    """What a run has around it, besides its plan.

    Attributes:
        folder: of the run.
        log: of its events.
        signals: that end it or make it save.
        ranks: it and the others.
        max_minutes, overfit: as for `train`.
    """

    folder: Path
    log: EventLog
    signals: Signals
    ranks: Ranks
    max_minutes: float | None
    overfit: bool


def _finite(content: dict[str, Any]) -> dict[str, Any]:
    """The same with None for every number that is not finite; figures may be lists of numbers."""
    return json.loads(json.dumps(content), parse_constant=lambda _: None)  # type: ignore[no-any-return]


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    max_minutes: float | None = None,
    overfit: bool = False,
    listener: Callable[[Event], None] | None = None,
    last: bool = False,
) -> TrainResult:
    """Trains a drafter as described by `config`, into `config.training.output`.

    Args:
        config: the run.
        resume: continue from the newest checkpoint in the run folder.
        max_minutes: end after this time (warm-up excluded), with a checkpoint.
        overfit: learn one row until its loss is near zero; a check that everything is wired up.
        listener: gets every event, for a live line.
        last: nothing but the end of the process follows the run, which SIGTERM does not turn into a failure any more.

    Raises:
        UserError: wrong input, or training cannot go on (the loss is not finite, the device is out of memory).
        KeyboardInterrupt: interrupted twice.
    """
    began = time.time()
    seat = Seat.read()
    devices = seat.take_devices(config.pipeline.devices_per_rank) if seat.world > 1 else ""
    ranks = Ranks(seat)  # waits for the others where no handler of signals would be heard
    with listening(last=last) as signals, ranks:
        if overfit:
            config = with_output(overfit_config(config), ranks)
        # Whatever can be found wrong without the target's weights is found before the folder is touched.
        again = any(ranks.gather(seat.restarts > 0))
        resume = ranks.share(resume or (again and holds_run(config)))
        ranks.together(lambda: look_ahead(config, resume, ranks))
        plan = ranks.in_turn(lambda: make_plan(config, overfit=overfit, rank=ranks.rank, ranks=ranks.world))
        ranks.together(lambda: check_start(plan))
        ranks.agree(must_agree(plan))
        with run_log(config, ranks, resume, listener) as (folder, log):
            log.listen(StartPhases(log, began))
            try:
                if devices:
                    log.write("notice", text=f"rank {ranks.rank} of {ranks.world} has {devices}")
                return _train(plan, _Setting(folder, log, signals, ranks, max_minutes, overfit), resume)
            except BaseException as error:
                log.write("error", text=str(error) or type(error).__name__, final=True)
                log.write("end", reason="failed", step=None)
                raise


def _train(plan: Plan, setting: _Setting, resume: bool) -> TrainResult:
    folder, log, ranks = setting.folder, setting.log, setting.ranks
    checkpoint = shared(checkpoint_to_resume(folder, plan, log) if resume and ranks.writes else None, ranks)
    with explained(plan):
        plan, loaded = settle(plan, folder, log, resume=resume, share=ranks.share)
    ranks.agree(must_agree(plan))
    log.write("plan", lines=plan.lines())
    if ranks.writes:
        write_record(folder / "environment.json", environment_record())
        write_record(folder / "resolved.json", plan.to_json())
        if plan.corpus.report.incidents:
            plan.corpus.report.incidents.write(folder / "data-incidents.jsonl")
    for notice in plan.notices:
        log.write("notice", text=notice)

    with _cpu_threads(plan.topology, log), explained(plan):
        return _load_and_run(plan, setting, loaded, checkpoint)


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
        log.write("notice", text=f"CPU threads for each of the {workers} workers on the CPU: {torch.get_num_threads()}")
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load_and_run(
    plan: Plan, setting: _Setting, loaded: dict[torch.device, Target], checkpoint: Checkpoint | None
) -> TrainResult:
    log = setting.log
    began = time.monotonic()
    targets = load_targets(plan, loaded)
    way, seconds = f"{targets[0].packing}: {targets[0].packing_reason}", time.monotonic() - began
    log.write("notice", text=f"target loaded in {seconds:.1f} s; packed rows run as {way}", weights_seconds=seconds)
    for remark in targets[0].remarks:
        log.write("notice", text=remark)
    if plan.compiled:
        elsewhere = use_cache(plan)
        if elsewhere:
            log.write("notice", text=elsewhere)
    gate = Gate()
    try:
        return _run(plan, setting, gate, targets, checkpoint)
    finally:
        gate.close()


def _make_updates(
    plan: Plan, setting: _Setting, replicas: list[Replica], checkpoint: Checkpoint | None
) -> list[ReplicaUpdate]:
    """Of every replica, as a run begins or as the checkpoint left them, and connected with the other ranks'."""
    log, ranks = setting.log, setting.ranks
    updates = make_updates([replica.model for replica in replicas], plan.config.optimizer)
    for update in updates:
        if update.device.type == "cuda":
            log.write("notice", text=f"update of drafter {update.index}: {update.describe()}")
    if checkpoint:
        for update in updates:
            update.load_state_tensors(checkpoint.tensors)
        for update in updates:
            update.refresh(updates)
        for update in updates:
            update.settle()
        checkpoint.tensors.clear()  # as large as masters and optimizer state together
    way = ranks.connect([update.device for update in updates])
    if way:
        log.write("notice", text=f"{ranks.world} ranks exchange gradients through {way}")
    return updates


def _run(
    plan: Plan, setting: _Setting, gate: Gate, targets: list[Target], checkpoint: Checkpoint | None
) -> TrainResult:
    config, sequence = plan.config, plan.sequence
    folder, log, ranks, overfit = setting.folder, setting.log, setting.ranks, setting.overfit
    first_update = checkpoint.step if checkpoint else 0
    replicas = make_replicas(plan, targets[0].head(), gate, checkpoint)
    updates = _make_updates(plan, setting, replicas, checkpoint)
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

    stop = Stop()
    ranks.watch(stop)
    saver = Saver(write, log, stop, written)
    rows = plan.corpus.train
    not_finite = NotFinite(
        config.training.on_nan, lambda row: rows.row_documents(rows.packed_row(0 if overfit else row))
    )
    progress = Progress(
        config, sequence, first_update, log, [], saver, snapshot, setting.max_minutes, overfit, not_finite, ranks
    )
    exchange = Exchange(updates, stop, ranks.across)
    workers = make_workers(plan, targets, replicas, exchange, progress, gate, log, first_update, stop, overfit)
    progress.clocks.extend(worker.clock for worker in workers)
    _announce(plan, setting, workers, first_update, identity)
    links = {worker.name: worker.inbox for worker in workers if isinstance(worker, (TargetWorker, DrafterWorker))}
    devices, queue = plan.topology.devices, config.pipeline.queue
    try:
        if first_update < sequence.steps:
            if config.decoding.every and ranks.writes:
                held_out = HeldOut(plan, folder, log, lambda: progress.request_end(DISAGREEMENT), first_update)
            if ranks.writes:
                saver.prepare(snapshot()[0])  # while the warm-up compiles
            balance = balance_of(plan, progress.clocks)
            done, others = (lambda: progress.steps_done), ranks.post_sample
            with Vitals(log, folder, devices, progress.clocks, links, queue, done, balance, others):
                supervise(workers, stop, progress, setting.signals, config.training.grace, partial(explain, plan))
            if held_out is not None and saver.last is not None and progress.reason not in ABANDONED:
                held_out.offer(saver.last_step, saver.last, last=True)
                with suppress(KeyboardInterrupt):  # everything is saved: only the last figure is given up
                    held_out.finish(lambda: progress.urgent)
    finally:
        stop.set()  # whatever came out: nobody works on
        try:
            saver.close()
        finally:
            if held_out is not None:
                held_out.close()
    if held_out is not None and held_out.failure:
        raise UserError(
            held_out.failure, where="decoding.bound", fix="decoding.on_disagreement=warn trains on as it is"
        )
    return _result(setting, progress, checkpoint)


def _announce(
    plan: Plan, setting: _Setting, workers: list[Worker], first_update: int, identity: dict[str, str]
) -> None:
    """Says in the log that the run starts, and has what it then tells compared with an earlier one."""
    log, ranks = setting.log, setting.ranks
    cards, names = gathered(plan, workers, ranks)
    if ranks.writes:
        earlier = find_earlier(setting.folder, cards)
        changes = environment_changes(earlier.folder, setting.folder) if earlier else []
        log.listen(Noticer(log, earlier, changes))
    log.write(
        "run",
        step=first_update,
        steps=plan.sequence.steps,
        workers=names,
        cards=cards,
        **identity,
        anchors=plan.config.rows.anchors * plan.config.training.rows_per_update,
    )


def _result(setting: _Setting, progress: Progress, checkpoint: Checkpoint | None) -> TrainResult:
    """Of a run that ended in order."""
    reason = progress.reason
    # The update under way when the loss was low enough may have raised it again.
    succeeded = not setting.overfit or reason == OVERFITTED or progress.loss < OVERFIT_LOSS
    setting.signals.end = lambda: None  # SIGTERM changes nothing any more
    setting.log.write("end", reason=reason, step=progress.steps_done)
    return TrainResult(
        folder=setting.folder,
        step=progress.steps_done,
        steps=progress.sequence.steps,
        reason=reason,
        loss=progress.loss,
        tau_proxy=progress.tau_proxy,
        losses=progress.losses,
        evaluation=progress.evaluation,
        checkpoint=progress.checkpoint or (checkpoint.folder if checkpoint else None),
        seconds=progress.seconds,
        tokens=progress.tokens,
        succeeded=succeeded,
        rank=setting.ranks.rank,
    )
