"""From a config to a plan: everything resolved that can be resolved without loading weights.

Devices and roles, dtype, attention path, taps, mask token, rows per epoch, steps, and an estimate of memory by device.
`draftsmith train --plan` prints it and stops; `train` starts from it. Everything that was chosen rather than given, and
everything that will be slow, dense or idle, is one line in `notices`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.config import RunConfig
from draftsmith.data.corpus import Corpus, prepare_corpus
from draftsmith.data.report import DataReport
from draftsmith.drafter import DrafterSpec, flash, read_spec, resolve_spec
from draftsmith.drafter.attention import in_words
from draftsmith.drafter.model import DraftModel
from draftsmith.errors import UserError
from draftsmith.observe.run_folder import next_free
from draftsmith.pipeline.costs import counted_costs
from draftsmith.pipeline.jobs import JobSequence
from draftsmith.pipeline.lowering import check_precision
from draftsmith.pipeline.memory import GIB, DeviceMemory, estimate_memory
from draftsmith.pipeline.sync import exchange_line
from draftsmith.pipeline.topology import Topology, resolve_topology
from draftsmith.target.geometry import TargetGeometry, read_geometry, read_kinds
from draftsmith.target.load import load_tokenizer, read_stop_ids
from draftsmith.target.taps import MaskToken, choose_mask_token
from draftsmith.target.weights import count_weights

# A row may hold documents that use all positions, but no use is known for so many.
MOST_ROWS_OF_POSITIONS = 64
# Times the anchors that an average row can have: above it most of the draft work is padding.
MANY_ANCHORS = 2
# Updates in which a run that learns one row has to fit it, unless it is given others.
OVERFIT_STEPS = 500
# Fields of the config's drafter section that a drafter to start from decides.
_OF_INIT = (
    *("layers", "block_size", "taps", "mask_token_id", "heads", "kv_heads", "head_dim", "intermediate_size"),
    *("layer_types", "sliding_window", "causal"),
)


@dataclass(frozen=True)
class Plan:
    """A run, resolved.

    Attributes:
        config: as given.
        topology: devices of targets and drafters.
        geometry: of the target.
        kinds: what each of its layers attends to, by transformers' names.
        spec: of the drafter.
        mask: the mask token and the rule that chose it.
        dtype: compute dtype of the drafter.
        target_dtype: of the target's weights and features.
        attention: "flex" or "dense".
        compiled: whether regions are compiled.
        corpus: tokenised data.
        sequence: the order of work.
        parameters: of the drafter.
        memory: estimate by device.
        notices: one line each.
        overfit: one row is learned, and nothing else of the data.
    """

    config: RunConfig
    topology: Topology
    geometry: TargetGeometry
    kinds: tuple[str, ...]
    spec: DrafterSpec
    mask: MaskToken
    dtype: torch.dtype
    target_dtype: torch.dtype
    attention: str
    compiled: bool
    corpus: Corpus
    sequence: JobSequence
    parameters: int
    memory: tuple[DeviceMemory, ...]
    notices: tuple[str, ...]
    overfit: bool = False

    def lacks(self, *, empty: bool = False) -> Callable[[Topology], str]:
        """Why a topology does not fit into what is free now, or into devices without anything else; "" if it does."""
        devices = [device for device in self.topology.devices if device.type == "cuda"]
        free = {str(device): torch.cuda.mem_get_info(device)[1 if empty else 0] for device in devices}
        return lambda topology: _lacks(_memory(self, topology), free)

    @property
    def way(self) -> str:
        """How the drafter attends, for people."""
        return in_words(self.attention, self.compiled, self.config.compile.flex_backend)

    @property
    def steps(self) -> int:
        """Updates of the whole run."""
        return self.sequence.steps

    def lines(self) -> list[str]:
        """For people."""
        config, spec, rows = self.config, self.spec, self.corpus.train.rows_per_epoch
        epochs = self.steps * config.training.rows_per_update / rows
        topology = self.topology
        lines = [
            f"target    {config.target.path}: {self.geometry.layers} layers x {self.geometry.hidden_size}, "
            f"{self.geometry.vocab_rows:,} vocabulary rows, {_name(self.target_dtype)}"
            f"{', fp8 up to the last tap' if config.target.precision == 'fp8' else ''}",
            f"drafter   {spec.layers} layers, {self.parameters / 1e6:.1f} M parameters, {_name(self.dtype)}; "
            f"B={spec.block_size}, taps {list(spec.taps)}, mask token {spec.mask_token_id} ({self.mask.rule})",
            f"rows      S={config.rows.length}, N={config.rows.anchors}, Q={config.rows.anchors * spec.block_size}; "
            f"{rows:,} rows per epoch, {100 * self.corpus.train.waste:.1f} % padding",
            f"steps     {self.steps:,} updates of {config.training.rows_per_update} rows, {epochs:.1f} epochs, "
            f"{config.optimizer.name} at {config.optimizer.lr:g}, {config.optimizer.schedule}",
            f"devices   targets on {_names(topology.targets)}; drafters on {_names(topology.drafters)}; "
            f"{config.pipeline.prefetch} prefetch workers ({topology.reason})",
            f"attention {self.way}",
        ]
        sequence = self.sequence
        if sequence.ranks > 1:
            lines.append(
                f"ranks     this is {sequence.rank} of {sequence.ranks}, with {sequence.own_rows} rows of every update"
            )
        backend = "NCCL" if topology.drafters[0].type == "cuda" else "gloo"
        exchange = exchange_line(self.parameters, self.dtype.itemsize, len(topology.drafters), sequence.ranks, backend)
        lines += [f"exchange  {exchange}"] if exchange else []
        lines += [f"memory    {memory.line()}" for memory in self.memory]
        lines += [f"data      {line}" for line in self.corpus.report.lines()]
        lines += [f"note      {notice}" for notice in self.notices]
        return lines

    def to_json(self) -> dict[str, Any]:
        """The resolved facts of the run."""
        return {
            "target": {"path": self.config.target.path, "dtype": _name(self.target_dtype), **vars(self.geometry)},
            "drafter": {**vars(self.spec), "parameters": self.parameters, "dtype": _name(self.dtype)},
            "mask_token_rule": self.mask.rule,
            "attention": self.attention,
            "flex_backend": self.config.compile.flex_backend if self.attention == "flex" else None,
            "compiled": self.compiled,
            "devices": {
                "targets": [str(device) for device in self.topology.targets],
                "drafters": [str(device) for device in self.topology.drafters],
                "prefetch": self.config.pipeline.prefetch,
                "reason": self.topology.reason,
                "costs": self.topology.costs and self.topology.costs.to_json(),
            },
            "rows_per_epoch": self.corpus.train.rows_per_epoch,
            "steps": self.steps,
            "overfit": self.overfit,
            "memory": [vars(memory) for memory in self.memory],
            "data": self.corpus.report.to_json(),
            "notices": list(self.notices),
        }


def make_plan(
    config: RunConfig,
    *,
    overfit: bool = False,
    progress: Callable[[str], None] = lambda _text: None,
    rank: int = 0,
    ranks: int = 1,
) -> Plan:
    """Resolves a config; reads the target's config and tokenizer, and all of the data.

    Args:
        config: the run.
        overfit: one row, no evaluation, constant learning rate, `OVERFIT_STEPS` updates where the config names none.
        progress: told what takes long.
        rank, ranks: whose plan, of how many; devices are this rank's own.

    Raises:
        UserError: anything in the config that cannot be done on this machine or with this target and data.
    """
    notices: list[str] = []
    geometry = read_geometry(config.target)
    check_length(config.rows.length, geometry)
    tokenizer = load_tokenizer(config.target)
    own_rows = len(range(rank, config.training.rows_per_update, ranks))
    topology = resolve_topology(config.pipeline, own_rows)
    on_cuda = {device.type == "cuda" for device in topology.drafters} == {True}
    dtype = _dtype(config.training.dtype, on_cuda)
    target_dtype = _dtype(config.target.dtype, all(device.type == "cuda" for device in topology.targets))
    check_precision(config, topology.targets, target_dtype)

    spec = read_spec_to_start_from(config, geometry, notices) if config.drafter.init else None
    block_size = spec.block_size if spec else config.drafter.block_size
    progress("reading and tokenising the data")
    corpus = prepare_corpus(
        config.data,
        tokenizer,
        length=config.rows.length,
        seed=config.training.seed,
        block_size=block_size,
        stop_ids=read_stop_ids(config.target, tokenizer),
    )
    configured = spec.mask_token_id if spec else config.drafter.mask_token_id
    mask = choose_mask_token(tokenizer, geometry.vocab_rows, torch.from_numpy(corpus.used_ids), configured)
    spec = spec or resolve_spec(config.drafter, geometry, mask.id)

    notices += beyond_positions(config.rows.length, corpus.report, geometry)
    notices += spare_anchors(config.rows.anchors, corpus.report)
    attention, compiled = resolve_attention(config, spec.block_size, on_cuda, notices)
    check_flex_backend(config, attention, spec.head_dim, dtype, topology.drafters)
    sequence = replace(_sequence(config, corpus, overfit, notices), rank=rank, ranks=ranks)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in DraftModel(spec).parameters())
    plan = Plan(
        config, topology, geometry, read_kinds(config.target), spec, mask, dtype, target_dtype, attention, compiled,
        corpus, sequence, parameters, (), tuple(notices), overfit,
    )  # fmt: skip
    if topology.to_measure:
        counted = counted_costs(config, geometry, spec, parameters, dtype.itemsize)
        topology = resolve_topology(config.pipeline, own_rows, counted, plan.lacks())
    return with_topology(plan, topology)


def with_topology(plan: Plan, topology: Topology) -> Plan:
    """The same plan on other devices.

    Raises:
        UserError: some drafters would never get a row.
    """
    before: list[str] = []
    now: list[str] = []
    sequence = plan.sequence
    for devices, found in ((plan.topology.drafters, before), (topology.drafters, now)):
        check_dealing(plan.config, sequence.own_rows, len(devices), sequence.rank, sequence.ranks, found)
    notices = [notice for notice in plan.notices if notice not in before] + now
    return replace(plan, topology=topology, memory=_memory(plan, topology), notices=tuple(notices))


def _memory(plan: Plan, topology: Topology) -> tuple[DeviceMemory, ...]:
    return estimate_memory(
        plan.config,
        topology,
        plan.geometry,
        plan.spec,
        plan.parameters,
        plan.dtype,
        plan.target_dtype,
        plan.attention,
        None if plan.config.target.features else count_weights(plan.config.target, plan.target_dtype),
    )


def _lacks(memory: tuple[DeviceMemory, ...], free: dict[str, int]) -> str:
    """What the first device that is too small for it lacks, for people; "" if there is none."""
    for each in memory:
        room = free.get(each.device)
        if room is not None and each.total > room:
            return f"needs about {each.total / GIB:.0f} GiB on {each.device}, of which {room / GIB:.0f} are free"
    return ""


def check_dealing(config: RunConfig, own_rows: int, drafters: int, rank: int, ranks: int, notices: list[str]) -> None:
    """Whether the rows of an update can be dealt to all ranks and drafters; what stays idle becomes a notice.

    Raises:
        UserError: some would never get a row.
    """
    total = config.training.rows_per_update
    if own_rows < drafters:
        whom = f"rank {rank} of {ranks} gets {own_rows}" if ranks > 1 else f"there are {own_rows}"
        raise UserError(
            f"{total} rows for each update are too few: {whom}, for {drafters} drafters",
            where="training.rows_per_update",
            fix=f"raise it to {ranks * drafters}",
        )
    if total % ranks:
        notices.append(f"rows_per_update {total} is not a multiple of {ranks} ranks: some wait for others")
    idle = -own_rows % drafters
    if idle:
        notices.append(
            f"rows_per_update {own_rows} is not a multiple of {drafters} drafters"
            f": {100 * idle / (own_rows + idle):.0f} % of the drafters' time is idle"
        )


def check_length(length: int, geometry: TargetGeometry) -> None:
    """Refuses rows so long that packing them and estimating their memory would be all that ever happens.

    Raises:
        UserError: more than `MOST_ROWS_OF_POSITIONS` times the target's positions.
    """
    positions = geometry.max_position_embeddings
    if length > MOST_ROWS_OF_POSITIONS * positions:
        raise UserError(
            f"{length:,} tokens are more than {MOST_ROWS_OF_POSITIONS} times the {positions:,} positions of the target",
            where="rows.length",
            fix=f"{positions} holds any document that the target can read",
        )


def spare_anchors(anchors: int, report: DataReport) -> list[str]:
    """What is to be said where rows are asked for far more anchors than they can have."""
    mean = report.train.anchors / report.train.rows
    if anchors <= MANY_ANCHORS * mean:
        return []
    return [
        f"rows.anchors {anchors:,} is far above the {mean:,.0f} that a row of this data has on average: "
        f"{1 - mean / anchors:.0%} of the drafter's work is padding (lower it to {math.ceil(mean)})"
    ]


def beyond_positions(length: int, report: DataReport, geometry: TargetGeometry) -> list[str]:
    """What is to be said where rows are longer than the target's positions. Positions begin anew in each document."""
    most = geometry.max_position_embeddings
    if length <= most:
        return []
    longest = max(part.lengths.most for part in (report.train, report.held_out) if part is not None)
    what = f"rows.length {length:,} is more than the {most:,} positions of the target"
    if longest <= most:
        return [f"{what}; no document is longer than {longest:,} tokens, so none gets there"]
    return [f"{what}, and documents of up to {longest:,} tokens go beyond them: lower it to {most} to cut them there"]


def read_spec_to_start_from(config: RunConfig, geometry: TargetGeometry, notices: list[str]) -> DrafterSpec:
    """Spec of `drafter.init`, which must fit the target. It decides the whole geometry; what of the config says
    otherwise becomes a notice.

    Raises:
        UserError: not a drafter, or one for another target.
    """
    assert config.drafter.init is not None
    spec = read_spec(Path(config.drafter.init), geometry.layers)
    spec.require_target(geometry, config.drafter.init)
    notices.append(f"weights and geometry of the drafter come from {config.drafter.init}")
    given = config.drafter.model_fields_set
    replaced = [
        f"drafter.{name} ({getattr(config.drafter, name)}, there {getattr(spec, name)})"
        for name in _OF_INIT
        if name in given and getattr(config.drafter, name) not in (None, getattr(spec, name))
    ]
    if replaced:
        notices.append(f"drafter.init replaces {', '.join(replaced)}")
    for name, there, here in (
        ("rope_theta", spec.rope_theta, geometry.rope_theta),
        ("input embedding factor", spec.input_scale, geometry.embedding_scale),
        ("logit factor", spec.logit_multiplier, geometry.logit_multiplier),
        ("logit cap", spec.logit_softcap, geometry.logit_softcap),
    ):
        if there != here:
            notices.append(f"drafter.init has {name} {there}, the target {here}; its own is kept")
    return spec


def resolve_attention(config: RunConfig, block_size: int, on_cuda: bool, notices: list[str]) -> tuple[str, bool]:
    """Names the attention path and whether it is compiled; on CUDA a dense path has to be asked for.

    Args:
        config: the run.
        block_size: of the drafter, which `drafter.init` decides before the config.
        on_cuda: whether all drafters are on GPUs.
        notices: gets what is dense, one line.

    Raises:
        UserError: the path that is asked for cannot be taken.
    """
    attention = config.drafter.attention
    if attention == "auto":
        attention = "flex" if on_cuda else "dense"
        if not on_cuda:
            eager = "" if config.compile.enabled == "on" else ", eager"
            notices.append(f"dense attention{eager}: flex_attention has no backward on CPU")
    elif attention == "dense" and on_cuda:
        notices.append("dense attention on CUDA, as configured: slow, and memory grows with Q x S")
    if attention == "flex":
        if not on_cuda:
            raise UserError(
                "flex attention cannot learn on CPU", where="drafter.attention", fix="set it to dense or auto"
            )
        queries = config.rows.anchors * block_size
        for name, value in (("rows.length", config.rows.length), ("rows.anchors x block_size", queries)):
            if value % 128:
                raise UserError(
                    f"{name} is {value}; flex attention works in tiles of 128",
                    where="rows",
                    fix=f"use {math.ceil(value / 128) * 128}",
                )
        if config.compile.enabled == "off":
            raise UserError(
                "flex attention without compiling computes all scores", where="compile.enabled", fix="set it to on"
            )
    return attention, attention == "flex" or config.compile.enabled == "on"


def check_flex_backend(
    config: RunConfig, attention: str, head_dim: int, dtype: torch.dtype, drafters: Iterable[torch.device]
) -> None:
    """Whether the kernels that flex attention is to run through can be had.

    Args:
        config: the run.
        attention: "flex" or "dense", as resolved.
        head_dim, dtype: of the drafter.
        drafters: its devices.

    Raises:
        UserError: they cannot.
    """
    if config.compile.flex_backend != "flash":
        return
    if attention != "flex":
        raise UserError(
            f"flash is a way of flex attention, and attention is {attention} here", where=flash.WHERE, fix=flash.TRITON
        )
    for device in drafters:
        flash.check(device, head_dim, dtype)


def _sequence(config: RunConfig, corpus: Corpus, overfit: bool, notices: list[str]) -> JobSequence:
    training = config.training
    if overfit:
        return JobSequence(training.steps or OVERFIT_STEPS, training.rows_per_update, 0, 0)
    steps = training.steps
    if steps is None:
        steps = max(1, math.ceil(training.epochs * corpus.train.rows_per_epoch / training.rows_per_update))
    eval_rows = min(training.eval_rows, corpus.held_out.rows_per_epoch if corpus.held_out else 0)
    if eval_rows == 0:
        notices.append("no held-out rows: nothing is evaluated while training")
    return JobSequence(steps, training.rows_per_update, training.eval_every, eval_rows)


def _dtype(name: str, on_cuda: bool) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if on_cuda else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(devices: tuple[torch.device, ...]) -> str:
    return ", ".join(map(str, devices))


def overfit_config(config: RunConfig) -> RunConfig:
    """The same run on one row, in a folder of its own beside the run's: no warm-up or decay of the learning rate."""
    output = str(next_free(f"{config.training.output}-overfit"))
    return config.model_copy(
        update={
            "optimizer": config.optimizer.model_copy(update={"schedule": "constant", "warmup": 0.0}),
            "training": config.training.model_copy(update={"output": output}),
        }
    )
