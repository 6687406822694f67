"""One run, described once: the typed, frozen `RunConfig`.

YAML file and `section.key=value` overrides go in, a `RunConfig` comes out. Unknown keys are refused with the nearest
valid name. A value of `None` means "by rule": the room that owns the rule resolves it (taps and mask token in
`target`, γ in `objective`, attention in `drafter`) and the resolved value is recorded in the run's `resolved.json`.

Shapes fixed here and used everywhere: S = `rows.length` context tokens, N = `rows.anchors`, B = `drafter.block_size`,
Q = N·B draft slots of a row.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from draftsmith.errors import UserError, at_home, need_file, reason_of

DType = Literal["float32", "bfloat16"]


def _at_home(path: str) -> str:
    if "\0" in path:
        raise ValueError("a path holds no NUL character")
    try:
        return at_home(path)
    except UserError as error:
        raise ValueError(str(error)) from None  # so that the line names the key


Place = Annotated[str, Field(min_length=1), AfterValidator(_at_home)]  # a file, a folder, or a name of the hub


def _leaves(annotation: object) -> Iterator[object]:
    """The types and words inside an annotation, without what unites or holds them."""
    parts = get_args(annotation)
    if not parts:
        yield annotation
    for part in parts:
        yield from _leaves(part)


def what_json_lacks(value: object) -> str:
    """Why a value that is to be sent or written as JSON cannot be ("Object of type date is …"); "" if it can."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return ""


class Section(BaseModel):
    """Base of every section: frozen, typed, no unknown keys, no numbers without end."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _booleans(cls, value: object, info: ValidationInfo) -> object:
        """YAML 1.1 reads a bare `on` or `off` as a boolean: where the field knows the word, it was meant. To Python
        a boolean is a number: where the field wants one, it was not."""
        given = [entry for entry in (value if isinstance(value, list | tuple) else (value,)) if isinstance(entry, bool)]
        if not given:
            return value
        assert info.field_name is not None
        kinds = list(_leaves(cls.model_fields[info.field_name].annotation))
        word = "on" if given[0] else "off"
        if value is given[0] and word in kinds:
            return word
        if (int in kinds or float in kinds) and bool not in kinds:
            raise ValueError(f"Input should be a number, not {str(given[0]).lower()}")
        return value


class TargetConfig(Section):
    """The frozen model that is to be drafted for."""

    path: Place = Field(description="directory, hub name, .gguf file, or 'demo' for the embedded target")
    gguf_file: str | None = Field(
        None, description="name of the GGUF file inside `path`, if it is a directory or hub name"
    )
    features: Place | None = Field(
        None, description="folder that draftsmith data features wrote; read instead of running the target"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on CUDA, float32 on CPU")
    precision: Literal["full", "fp8"] = Field(
        "full", description="fp8: linear layers up to the last tap in fp8 while training (Ada, Hopper or newer)"
    )
    fp8_bound: float = Field(0.1, gt=0, description="relative change of features above which fp8 is refused")
    trust_remote_code: bool = Field(False, description="run the code that the target's folder or repository brings")

    @model_validator(mode="after")
    def _something_to_lower(self) -> TargetConfig:
        if self.precision == "fp8" and self.features is not None:
            raise ValueError("precision is fp8, but features are read from disk: no target runs")
        return self


class DataSource(Section):
    """One entry of `data.train` or `data.held_out` that needs more than a path."""

    path: Place = Field(description="file, glob pattern, folder, Hugging Face dataset, or '-' for standard input")
    layout: Literal["auto", "messages", "sharegpt", "alpaca", "prompt", "text"] = Field(
        "auto", description="auto: found by inspection, record by record"
    )
    columns: dict[str, str] = Field({}, description="our names to the data's, e.g. {prompt: question}")
    weight: float = Field(
        1.0, gt=0, le=1000, description="times an epoch; 0.5: half of the conversations, 2: all twice"
    )
    split: str | None = Field(None, description="of a dataset; none: train, or everything if it has no splits")
    subset: str | None = Field(None, description="of a dataset; none: its default")


def _kind_of_entry(entry: object) -> str | None:
    return "path" if isinstance(entry, str) else "options" if isinstance(entry, dict | DataSource) else None


# Of the two forms only the one that was written is checked, so that an error is about it.
DataEntry = Annotated[
    Annotated[Place, Tag("path")] | Annotated[DataSource, Tag("options")],
    Discriminator(
        _kind_of_entry,
        custom_error_type="data_entry",
        custom_error_message="Input should be a path, or a section with one",
    ),
]


class DataConfig(Section):
    """Conversations and how they become tokens."""

    train: tuple[DataEntry, ...] = Field(
        description="files of chats or text (JSON, JSON lines, parquet, arrow; compressed or not), folders, datasets",
    )
    held_out: tuple[DataEntry, ...] = Field(
        (), description="files that are only evaluated; empty: split off `held_out_share`"
    )
    held_out_share: float = Field(
        0.02, ge=0.0, le=0.5, description="of data.train, split off by content where data.held_out is empty"
    )
    chat_template: Place | None = Field(None, description="file with a Jinja template; none: the tokenizer's own")
    template_options: dict[str, Any] = Field({}, description="passed to the template, e.g. {enable_thinking: false}")
    too_long: Literal["skip", "truncate"] = Field("truncate", description="conversations longer than rows.length")
    pack: Literal["on", "off"] = Field("on", description="off: one document a row, for targets that cannot be packed")
    cache: Literal["off"] | Place | None = Field(
        None, description="folder of tokenised data; none: the user's cache; off: none kept"
    )

    @field_validator("train", "held_out", mode="before")
    @classmethod
    def _one_or_many(cls, value: object, info: ValidationInfo) -> object:
        entries = value if isinstance(value, list | tuple) else (value,)
        if value in (None, "") or (info.field_name == "train" and not entries):
            raise PydanticCustomError("no_data", "is empty")
        return tuple("-" if entry == [None] else entry for entry in entries)  # `- -`, as YAML reads it

    @field_validator("template_options")
    @classmethod
    def _can_be_sent(cls, options: dict[str, Any]) -> dict[str, Any]:
        """A server gets them as JSON, and so does the run's record; YAML knows dates and numbers that JSON lacks."""
        fault = what_json_lacks(options)
        if fault:
            raise ValueError(f"Input should be what JSON can hold: {fault}")
        return options


class DrafterConfig(Section):
    """Geometry of the drafter; hidden size and vocabulary are always the target's."""

    variant: str = Field("dflash", description="kind of drafter")
    layers: int = Field(5, ge=1, le=256, description="decoder layers")
    block_size: int = Field(16, ge=2, le=128, description="B: the last known token and B-1 drafted ones")
    taps: tuple[int, ...] | None = Field(None, description="target layers to tap; none: evenly spaced by rule")
    mask_token_id: int | None = Field(None, ge=0, description="an existing embedding row; none: chosen by rule")
    heads: int | None = Field(None, ge=1, le=4096, description="none: the target's")
    kv_heads: int | None = Field(None, ge=1, le=4096, description="none: the target's")
    head_dim: int | None = Field(None, ge=2, le=4096, description="none: the target's")
    intermediate_size: int | None = Field(None, ge=1, le=2**24, description="none: the target's")
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = Field(
        None, description="one for each layer; none: full attention in all"
    )
    sliding_window: int | None = Field(None, ge=1, le=2**31, description="tokens that a sliding layer sees back")
    causal: bool | None = Field(None, description="overrides every layer; none: sliding causal, full bidirectional")
    attention: Literal["auto", "flex", "dense"] = Field("auto", description="auto: flex on CUDA, dense on CPU")
    init: Place | None = Field(
        None, description="drafter to start from, z-lab's or speculators' layout; its geometry wins"
    )

    @model_validator(mode="after")
    def _layer_types_fit(self) -> DrafterConfig:
        types = self.layer_types
        if types is not None and len(types) != self.layers:
            raise ValueError(f"layer_types names {len(types)} layers, drafter.layers is {self.layers}")
        if types is not None and "sliding_attention" in types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention, so sliding_window must be set")
        if self.sliding_window is not None and (types is None or "sliding_attention" not in types):
            raise ValueError("sliding_window is set, but no entry of layer_types is sliding_attention")
        if self.taps is not None and len(set(self.taps)) != len(self.taps):
            raise ValueError(f"taps {list(self.taps)} names a layer twice")
        return self


class RowsConfig(Section):
    """The static shape of one training row."""

    length: int = Field(3072, ge=16, le=2**24, description="S: context tokens of a row")
    anchors: int = Field(512, ge=1, le=2**24, description="N: anchors of a row, fewer than its tokens")

    @model_validator(mode="after")
    def _anchors_fit(self) -> RowsConfig:
        if self.anchors >= self.length:
            raise ValueError(
                f"anchors is {self.anchors}, but a row of {self.length} tokens has at most {self.length - 1} "
                "(lower rows.anchors, or raise rows.length)"
            )
        return self


class PerDocument(Section):
    """How many anchors one document may have, whatever its length."""

    floor: int = Field(0, ge=0, description="at least so many, if so many are eligible")
    ceiling: int | None = Field(None, ge=1, description="at most so many; none: no limit")

    @model_validator(mode="after")
    def _in_order(self) -> PerDocument:
        if self.ceiling is not None and self.floor > self.ceiling:
            raise ValueError(f"the floor {self.floor} is above the ceiling {self.ceiling}")
        return self


class AnchorsConfig(Section):
    """How the N anchors of a row are drawn."""

    per_document: PerDocument | None = Field(None, description="none: uniformly over the row")

    def limits(self) -> tuple[int, int | None] | None:
        """Floor and ceiling as `make_draft_batch` takes them."""
        return None if self.per_document is None else (self.per_document.floor, self.per_document.ceiling)


class ObjectiveConfig(Section):
    """What a slot is taught and how much it weighs."""

    labels: Literal["data", "kl", "tv"] = Field(
        "data", description="data: CE; kl, tv: distance to the target's distribution"
    )
    weights: Literal["decay", "dpace"] = Field(
        "decay", description="of slots: decay by their place; dpace also by how likely the ones before are accepted"
    )
    gamma: float | None = Field(None, gt=0, description="decay length; none: 7 for B=16, 4 for B=8, else 0.45·B")
    alpha: float = Field(0.5, ge=0, le=1, description="smoothing of the dpace weights")
    chunk: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="taught slots whose logits exist at one time; auto: equal chunks of about 2,048"
    )


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "muon"] = Field("adamw", description="muon: 2-D weights by Muon, the rest by AdamW")
    lr: float = Field(6e-4, gt=0, description="of AdamW, at the height of the schedule")
    muon_lr: float | None = Field(None, gt=0, description="none: 10 × lr")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="of AdamW"
    )
    eps: float = Field(1e-8, gt=0, description="of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="decoupled, times the rate of the moment")
    clip: float = Field(1.0, gt=0, description="global gradient norm")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine", description="wsd: constant after the warm-up, then down; all begin with the warm-up"
    )
    warmup: float = Field(0.04, ge=0, le=1, description="share of the steps")
    decay: float = Field(0.2, ge=0, le=1, description="share of the steps that wsd decays over")
    final_lr: float = Field(0.0, ge=0, le=1, description="share of lr left at the last step")


class TrainingConfig(Section):
    """How long, how often, and where to."""

    output: Place = Field("runs/default", description="run folder")
    epochs: float = Field(6.0, gt=0, le=1e6, description="passes over the data")
    steps: int | None = Field(None, ge=1, le=10**12, description="updates; overrides epochs")
    rows_per_update: int = Field(1, ge=1, le=2**20, description="a multiple of the number of drafters")
    seed: int = Field(0, ge=0, lt=2**32, description="of weights, order and anchors")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="compute; master weights are always float32"
    )
    activation_checkpointing: bool = Field(
        False, description="compute the drafter's layers again in the backward instead of keeping them"
    )
    eval_every: int = Field(200, ge=0, description="updates between held-out evaluations; 0: only at the end")
    eval_rows: int = Field(8, ge=0, description="held-out rows of one evaluation")
    save_every: int = Field(500, ge=0, description="updates between checkpoints; 0: only at the end")
    keep: int = Field(2, ge=1, description="newest checkpoints kept")
    keep_every: int = Field(
        0, ge=0, description="checkpoints at multiples of so many updates are kept for ever; 0: none"
    )
    grace: float = Field(25.0, gt=0, description="seconds from SIGTERM in which the run saves and ends")
    on_nan: Literal["stop", "skip"] = Field(
        "stop", description="an update whose loss or gradient is not finite: stop ends the run, skip leaves it out"
    )
    tensorboard: bool = Field(True, description="write the run's figures for TensorBoard, too")
    trackers: tuple[Literal["wandb", "mlflow", "trackio"], ...] = Field(
        (), description="further trackers; each needs its extra, draftsmith[wandb] and so on"
    )


class PipelineConfig(Section):
    """Which device does what. Devices may repeat; CPU devices count."""

    targets: tuple[str, ...] = Field(
        ("auto",), min_length=1, description="devices, one worker each; cuda:0+cuda:1 for one target over both"
    )
    drafters: tuple[str, ...] = Field(
        ("auto",), min_length=1, description="devices, one replica each; auto: the fastest use of all GPUs, measured"
    )
    prefetch: int = Field(2, ge=1, le=256, description="threads that make rows")
    queue: int = Field(2, ge=1, le=2**16, description="rows that may wait in front of each worker")
    queue_gib: float | None = Field(
        None, gt=0, description="GiB of features that may wait in front of each drafter; none: as many as queue rows"
    )
    devices_per_rank: int | None = Field(
        None, ge=1, description="GPUs of each rank under torchrun; none: those of the machine, shared out evenly"
    )
    hang_seconds: float = Field(
        600.0, ge=0, description="without any progress, then the run ends and says who waits for whom; 0: never"
    )

    @property
    def queue_bytes(self) -> int | None:
        """`queue_gib` in bytes."""
        return None if self.queue_gib is None else int(self.queue_gib * 2**30)

    @field_validator("targets", "drafters", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class CompileConfig(Section):
    """torch.compile inside the trainer."""

    enabled: Literal["auto", "on", "off"] = Field("auto", description="auto: on for CUDA, off for CPU")
    target: bool = Field(True, description="the target's layers too, where compiling is on and documents run packed")
    drafter: Literal["layers", "whole"] = Field(
        "layers", description="layers: one graph for equal layers, a fast start; whole: one graph of all, fewer calls"
    )
    flex_backend: Literal["triton", "flash"] = Field(
        "triton", description="flash: FlashAttention-4's kernels, faster for long documents; pip install flash-attn-4"
    )
    on_recompile: Literal["error", "warn"] = Field("error", description="what to do where something compiles late")
    evidence: Literal["error", "warn", "off"] = Field(
        "error", description="profile a step now and then: what to do where the compiled kernels are not seen"
    )
    evidence_every: int = Field(1000, ge=0, description="updates between profiled ones; 0: only the first")


class DecodingConfig(Section):
    """True τ while training: fixed prompts, decoded with the weights of the moment by a process of their own."""

    every: int = Field(0, ge=0, description="updates between decodings; 0: none")
    prompts: Place | None = Field(None, description="file of prompts; none: taken from held-out conversations")
    limit: int = Field(8, ge=1, description="prompts")
    max_new_tokens: int = Field(96, ge=2, description="length limit of an answer")
    device: str | None = Field(None, description="none: a GPU without a role, else the first target's device")
    bound: float = Field(0.05, gt=0, description="share by which decoding and the training forward may differ")
    on_disagreement: Literal["error", "warn"] = Field("error", description="error: save, then end the run")


# Keys that change no number of training: a run may be resumed with others.
_NOT_LEARNED_BY = ("eval_every", "eval_rows", "activation_checkpointing")
_WATCHES = ("on_recompile", "evidence", "evidence_every")
HEAD_CHUNK = 2048  # taught slots: fewer make the head's products small, more only take memory


def balanced_chunk(anchors: int, block_size: int) -> int:
    """Head chunk that cuts a row's N·(B-1) slots into equal parts of about `HEAD_CHUNK`: none is mostly filling.

    Whole blocks, rounded up to 64 slots.
    """
    chunks = -(-anchors * (block_size - 1) // HEAD_CHUNK)
    slots = -(-anchors // chunks) * (block_size - 1)
    return -(-slots // 64) * 64


class RunConfig(Section):
    """Everything a run needs, in one frozen value."""

    target: TargetConfig
    data: DataConfig
    drafter: DrafterConfig = DrafterConfig()
    rows: RowsConfig = RowsConfig()
    anchors: AnchorsConfig = AnchorsConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    pipeline: PipelineConfig = PipelineConfig()
    compile: CompileConfig = CompileConfig()
    decoding: DecodingConfig = DecodingConfig()

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        rows, drafters = self.training.rows_per_update, len(self.pipeline.drafters)
        if drafters > rows:
            raise ValueError(
                f"pipeline.drafters has {drafters} devices but training.rows_per_update is {rows}: "
                f"some would never get a row (raise rows_per_update to a multiple of {drafters})"
            )
        slots, chunk = self.drafter.block_size - 1, self.head_chunk(self.drafter.block_size)
        if chunk < slots:
            raise ValueError(f"objective.chunk {chunk} cannot hold the {slots} taught slots of a block")
        if self.drafter.variant != "dflash":
            raise ValueError(f"drafter.variant {self.drafter.variant!r} is unknown (valid: 'dflash')")
        return self

    def head_chunk(self, block_size: int) -> int:
        """Taught slots per head chunk, "auto" resolved for a drafter's blocks (`drafter.init` may have others)."""
        chunk = self.objective.chunk
        return balanced_chunk(self.rows.anchors, block_size) if chunk == "auto" else chunk

    def fingerprint(self) -> str:
        """Hash of everything that decides what is learned. Where, how often and how long it is kept does not count, nor
        what is evaluated and watched on the way, nor what only saves memory."""
        return hashlib.sha256(json.dumps(self.learned_by(), sort_keys=True).encode()).hexdigest()[:16]

    def learned_by(self) -> dict[str, Any]:
        """What `fingerprint` is of, as JSON holds it."""
        content = self.model_dump(mode="json", exclude={"decoding", "pipeline"})
        for name in ("output", "save_every", "keep", "keep_every", "grace", "tensorboard", "trackers", "on_nan"):
            content["training"].pop(name)
        # As if left at their defaults, not left out: what ran before they stopped counting keeps its fingerprint.
        for section, names in (("training", _NOT_LEARNED_BY), ("compile", _WATCHES)):
            fields = type(getattr(self, section)).model_fields
            content[section] |= {name: fields[name].default for name in names}
        content["target"].pop("fp8_bound")
        content["compile"].pop("flex_backend")  # it rounds otherwise, as another card does
        if content["target"]["precision"] == "full":
            content["target"].pop("precision")
        content["data"].pop("cache")
        return content


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Reads a YAML run description and applies `section.key=value` overrides.

    Relative paths of data files, target and output are taken from the working directory, as a shell would.

    Raises:
        UserError: the file is missing, is not YAML, or names something that does not exist.
    """
    path = Path(path)
    need_file(path, "config file", "draftsmith init writes one")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {reason_of(error)}", where=str(path)) from None
    try:
        content = yaml.load(text, Loader=_EachKeyOnce)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"not valid YAML: {getattr(error, 'problem', error)}", where=place) from None
    if not isinstance(content, dict):
        raise UserError("holds no sections", where=str(path), fix="draftsmith init writes a config to start from")
    changed = copy.deepcopy(content)
    for override in overrides or []:
        _apply_override(changed, override)
    try:
        return RunConfig.model_validate(changed)
    except ValidationError as error:
        problems = _problems(error, changed)
        overridden = _is_of_overrides(problems[0], overrides or [], content)
        raise _explain(problems, "command line" if overridden else str(path)) from None


def muon_rate(lr: float, muon_lr: float | None) -> float:
    """Learning rate of 2-D weights under Muon: `optimizer.muon_lr`, or by rule from `optimizer.lr`."""
    return 10 * lr if muon_lr is None else muon_lr


def is_overridden(key: str, overrides: list[str] | None) -> bool:
    """Whether overrides that `load_config` has taken set `section.key`, by itself or with its section."""
    content: dict[str, Any] = {}
    for override in overrides or []:
        _apply_override(content, override)
    section, _, leaf = key.partition(".")
    return leaf in (content.get(section) or {})


def parse_config(content: dict[str, Any], where: str = "config") -> RunConfig:
    """Validates a nested dict; the first problem becomes one `UserError` with the key's path."""
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise _explain(_problems(error, content), where) from None


class _EachKeyOnce(yaml.SafeLoader):
    """Refuses a key that occurs twice in a mapping, of which YAML's reader would keep the last and say nothing."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)  # type: ignore[misc]
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in lines:
                problem = f"{key.value!r} occurs twice, first in line {lines[key.value]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node


def _apply_override(content: dict[str, Any], override: str) -> None:
    """Sets `a.b=value` in place; the value is read as YAML, so lists and numbers work."""
    key, equals, raw = override.partition("=")
    if not equals or not key:
        raise UserError(f"{override!r} is not section.key=value", where="command line")
    try:
        value = raw.strip() if _is_plain(raw.strip()) else yaml.load(raw, Loader=_EachKeyOnce)
    except yaml.YAMLError:
        fix = f"""text with signs of YAML's needs quotes inside: '{key}="…"'"""
        raise UserError(f"the value of {key!r} is not valid YAML: {raw!r}", where="command line", fix=fix) from None
    *sections, leaf = key.split(".")
    node = content
    for section in sections:
        child = node.setdefault(section, {})
        if child is None:
            child = node[section] = {}
        if not isinstance(child, dict):
            raise UserError(f"{section!r} in {key!r} is a value, not a section", where="command line")
        node = child
    node[leaf] = value


def _is_plain(value: str) -> bool:
    """Whether an override's value is text to people and something else, or nothing, to YAML.

    A bare dash there is a list of nothing, here standard input. A star begins the name of an earlier part of the same
    document, and a value that begins with one has no earlier part: here it begins a pattern of files.
    """
    return value in ("", "-") or value.startswith("*")


_IN_YAML = {  # what the library says in Python's words
    "model_type": "Input should be a section of keys and values",
    "dict_type": "Input should be a section of keys and values",
    "tuple_type": "Input should be a list",
    "too_short": "Input should have at least one entry",
    "string_too_short": "Input should not be empty",
}


class _Problem(NamedTuple):
    """What is wrong with one key of a config.

    Attributes:
        key: where it stands in the config, dotted; "" for the whole.
        kind: pydantic's name for it.
        text: what is wrong, the key included.
        fix: what helps; "" if `text` says it.
    """

    key: str
    kind: str
    text: str
    fix: str = ""


def _problems(error: ValidationError, content: dict[str, Any]) -> list[_Problem]:
    """One for each key, in pydantic's order; `content` is what was validated."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for each in error.errors():
        by_key.setdefault(_key_of(each, content), []).append(each)
    problems = [_problem(key, errors) for key, errors in by_key.items()]
    # A key that is missing beside an unknown one was misspelt.
    misspelt = {problem.key.rpartition(".")[0] for problem in problems if problem.kind == "extra_forbidden"}
    return [each for each in problems if each.kind != "missing" or each.key.rpartition(".")[0] not in misspelt]


def _key_of(error: ErrorDetails, content: object) -> str:
    """Pydantic's place of an error without what the config does not hold: the names of a union's members."""
    *place, last = error["loc"] or ("",)
    key: list[str] = []
    for part in (*place, last):
        listed = isinstance(content, list | tuple) and isinstance(part, int) and part < len(content)
        if listed or (isinstance(content, dict) and part in content):
            content = content[part]  # type: ignore[index]
        elif error["type"] != "missing" or part is not last:
            continue
        key.append(str(part))
    return ".".join(key)


def _problem(key: str, errors: list[ErrorDetails]) -> _Problem:
    """Of the errors of one key; several are of a union, which takes any of what they ask for."""
    kind = errors[0]["type"]
    if kind == "extra_forbidden":
        *section, name = key.split(".")
        valid = _fields_at(section)
        near = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
        fix = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(valid)}"
        return _Problem(key, kind, f"unknown key {key!r}", fix)
    if kind == "missing":
        return _Problem(key, kind, f"key {key!r} is missing")
    if kind == "no_data":
        return _Problem(key, kind, f"{key} is empty", "name a file, folder or dataset")
    if key == "target" and kind == "model_type":
        return _Problem(key, kind, f"{key}: {_IN_YAML[kind]}", "write the model as target.path")
    first, *others = (_IN_YAML.get(each["type"], each["msg"]).removeprefix("Value error, ") for each in errors)
    message = " or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
    return _Problem(key, kind, f"{key + ': ' if key else ''}{message}")


def _explain(problems: list[_Problem], where: str) -> UserError:
    """The first problem as one line that names the key, and the nearest valid name for a wrong one."""
    first, *others = problems
    more = f", and {len(others)} more" if others else ""
    return UserError(first.text + more, where=where, fix=first.fix)


def _is_of_overrides(problem: _Problem, overrides: list[str], content: dict[str, Any]) -> bool:
    """Whether overrides brought a problem: it is in what one of them says, or the file alone does not have it."""
    keys = [override.partition("=")[0] for override in overrides]
    if any(f"{problem.key}.".startswith(f"{key}.") for key in keys):
        return True
    try:
        RunConfig.model_validate(content)
    except ValidationError as error:
        return problem not in _problems(error, content)
    return True


def _fields_at(section: list[str]) -> list[str]:
    """Valid keys of a section, or of the sections in a list."""
    model: type[BaseModel] = RunConfig
    for part in section:
        if part not in model.model_fields:
            continue  # the place in a list
        inside = _leaves(model.model_fields[part].annotation)
        model = next(leaf for leaf in inside if isinstance(leaf, type) and issubclass(leaf, BaseModel))
    return sorted(model.model_fields)
