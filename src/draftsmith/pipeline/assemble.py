"""What a run is put together from: targets, replicas, the makers of draft batches, and all workers with their links.

Nothing here starts a thread or writes to the run's folder; `run` does, and the benchmarks and the measuring of `auto`
put parts of a run together in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from draftsmith.blocks import DraftBatch, Row, make_draft_batch
from draftsmith.compiled import Entry, Gate
from draftsmith.drafter import flash, load_drafter
from draftsmith.drafter.model import DraftModel, empty_model, initialise
from draftsmith.objective import HeadTerms, Objective, decay_weights
from draftsmith.observe.events import EventLog
from draftsmith.pipeline.clock import Pace
from draftsmith.pipeline.compiling import Compiling, TargetLayers, make_regions
from draftsmith.pipeline.handoff import HandOff
from draftsmith.pipeline.jobs import Job
from draftsmith.pipeline.link import Link, Stop
from draftsmith.pipeline.lowering import lower_target
from draftsmith.pipeline.plan import Plan
from draftsmith.pipeline.progress import Progress
from draftsmith.pipeline.stored import stored_targets
from draftsmith.pipeline.sync import Exchange
from draftsmith.pipeline.workers import DrafterWorker, Featured, PrefetchWorker, Prepared, TargetWorker, Worker
from draftsmith.target.forward import Target
from draftsmith.target.head import TargetHead
from draftsmith.target.load import load_target
from draftsmith.training.checkpoint import Checkpoint
from draftsmith.training.step import Replica

HELD_OUT_SEED = 0x48454C44  # anchors of held-out rows: fixed, and not those of a training epoch


def load_targets(plan: Plan, loaded: dict[torch.device, Target] | None = None) -> list[Target]:
    """One `Target` per target worker, or what stands in for it; workers on one device share it.

    Args:
        plan: of the run.
        loaded: what is there already, by device.
    """
    if plan.config.target.features:
        return stored_targets(plan, Path(plan.config.target.features))
    by_span: dict[tuple[torch.device, ...], Target] = {(device,): target for device, target in (loaded or {}).items()}
    for span in plan.topology.spans:
        if span not in by_span:
            by_span[span] = _load_one_target(plan, span)
    return [by_span[span] for span in plan.topology.spans]


def _load_one_target(plan: Plan, span: tuple[torch.device, ...]) -> Target:
    """A target as the plan wants it."""
    target = load_target(plan.config.target, span[0], plan.target_dtype, span)
    if plan.config.objective.labels == "data":
        target.free_layers_after(max(plan.spec.taps))
    lower_target(plan, target)
    return target


def make_replicas(
    plan: Plan,
    head: TargetHead,
    gate: Gate,
    checkpoint: Checkpoint | None = None,
    fill: Callable[[DraftModel], None] | None = None,
) -> list[Replica]:
    """One replica per drafter of the plan, each on its device with a copy of the target's head.

    Args:
        plan: of the run.
        head: of the target.
        gate: of all regions.
        checkpoint: whose weights follow.
        fill: gives the first one its weights; None: as a run begins.

    Raises:
        UserError: the kernels that the config asks for cannot be imported.
    """
    config, spec = plan.config, plan.spec
    backend = config.compile.flex_backend
    if backend == "flash":
        flash.load()
    replicas: list[Replica] = []
    for index, device in enumerate(plan.topology.drafters):
        model = empty_model(
            spec,
            config.training.activation_checkpointing,
            device=device,
            dtype=plan.dtype,
            flex_backend=backend,
        )
        if replicas:
            model.load_state_dict(replicas[0].model.state_dict())
        elif fill is not None:
            fill(model)
        elif config.drafter.init and checkpoint is None:
            start = load_drafter(Path(config.drafter.init), dtype=torch.float32, target_layers=spec.target_layers)
            model.load_state_dict(start.state_dict())
        else:
            initialise(model, config.training.seed, head.final_scale_H)
        own_head = head.to(device)
        fill_blocks, terms = make_regions(plan, index, model, gate)
        head_VH = own_head.head_VH.to(plan.dtype)
        objective = Objective(
            config.objective, spec.block_size, HeadTerms(head_VH, own_head.multiplier, own_head.softcap), terms
        )
        replicas.append(Replica(model, own_head, objective, plan.attention, fill_blocks))
    return replicas


def make_workers(
    plan: Plan,
    targets: list[Target],
    replicas: list[Replica],
    exchange: Exchange,
    progress: Progress,
    gate: Gate,
    log: EventLog,
    first_update: int,
    stop: Stop,
    overfit: bool,
) -> list[Worker]:
    """All threads of the pipeline, with the links between them; none is started."""
    config, sequence = plan.config, plan.sequence
    devices = list(plan.topology.drafters)
    first = sequence.first_number(first_update)
    queue = config.pipeline.queue
    target_links: list[Link[Prepared]] = [
        Link(_first_of(first, index, len(targets)), len(targets), queue, stop) for index in range(len(targets))
    ]
    drafter_links: list[Link[Featured]] = [
        Link(_first_of(first, index, len(devices)), len(devices), queue, stop, config.pipeline.queue_bytes)
        for index in range(len(devices))
    ]
    hand_offs = [HandOff(device, plan.dtype, lambda text: log.write("notice", text=text)) for device in devices]
    compiling = Compiling(
        plan,
        gate,
        replicas,
        exchange,
        log,
        made_up_drafts(plan),
        first_update,
        log.path.with_name("ledger.json" if sequence.rank == 0 else f"ledger-rank-{sequence.rank}.json"),
        [TargetLayers(plan, target, gate, index) for index, target in enumerate(dict.fromkeys(targets))],
        progress.ranks.first_of_machine(),
    )
    for update in exchange.updates:
        if (seconds := update.kernel_seconds) is not None:
            where, name = str(update.device), f"update {update.index}"
            compiling.ledger.note(Entry(name, where, "forward", "compiled", compiled=seconds, key="Triton"))
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
                hand_offs,
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
                hand_offs[index],
                exchange,
                progress,
                compiling,
                stop,
            )
        )
    Pace.share(worker.pace for worker in workers)
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
        chunk=plan.config.head_chunk(plan.spec.block_size),
        kinds=plan.spec.kinds,
        seed=seed,
        with_tiles=plan.attention == "flex",
        per_document=plan.config.anchors.limits(),
    )
