"""The model card: what a drafter is, how it was trained, on what, and what it was measured to be worth.

Only what is known is written. Recipe and data facts come from the run folder around a checkpoint, τ from results that
`draftsmith eval --json` wrote; where there is none, the card says "not measured".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, Required, TypedDict  # pydantic wants this one before Python 3.12

import draftsmith
from draftsmith.config import muon_rate
from draftsmith.errors import UserError
from draftsmith.export.convert import Converted
from draftsmith.observe.shape import Count, Quantity, Whole, read_record


class _Distribution(TypedDict, total=False):
    p_value: Required[Annotated[Quantity, Field(ge=0, le=1)]]


class _Setting(TypedDict, total=False):
    block_size: Count
    drafter: str | None  # digest of its weights
    target: str | None
    temperature: Quantity
    dtype: str
    device: str


class _Evaluation(TypedDict, total=False):
    """What the card reads of a result of `draftsmith eval --json`."""

    answers: Required[Count]
    tokens: Required[Count]
    tau: Required[Quantity]
    tau_per_response: Required[Quantity]
    speedup: Required[Quantity]
    lossless: Required[Annotated[bool, Field(strict=True)]]
    distribution: _Distribution | None
    setting: Required[_Setting]


class _Target(TypedDict, total=False):
    path: Required[str]
    gguf_file: str | None


class _Drafter(TypedDict, total=False):
    init: str | None


class _Rows(TypedDict):
    length: Count
    anchors: Count


class _Training(TypedDict):
    rows_per_update: Count
    seed: Whole


class _Objective(TypedDict):
    labels: str
    weights: str


class _Optimizer(TypedDict):
    name: str
    schedule: str
    lr: Quantity
    warmup: Quantity
    muon_lr: NotRequired[Quantity | None]
    clip: Quantity
    weight_decay: Quantity


class _Config(TypedDict):
    target: _Target
    drafter: _Drafter
    rows: _Rows
    training: _Training
    objective: _Objective
    optimizer: _Optimizer


class _Incident(TypedDict):
    effect: NotRequired[str]
    count: Count


class _Part(TypedDict, total=False):
    conversations: Count
    tokens: Count
    taught_tokens: Count


class _Data(TypedDict, total=False):
    files: list[str]
    used: Count
    conversations: Count
    duplicates: Count
    left_out: Count
    incidents: list[_Incident]
    stop_token: str | None
    train: _Part
    held_out: _Part | None


class _Resolved(TypedDict, total=False):
    steps: Required[Count]
    overfit: Annotated[bool, Field(strict=True)]
    mask_token_rule: str
    data: _Data


class _Records(TypedDict):
    """What the card reads of a run."""

    config: _Config
    resolved: _Resolved
    step: Count | None


_EVALUATION, _RECORDS = TypeAdapter(_Evaluation), TypeAdapter(_Records)


@dataclass(frozen=True)
class Licences:
    """Licence fields of the card; empty ones are left for the owner and said to be open.

    Attributes:
        drafter: licence of the weights (a hub's identifier, such as "apache-2.0").
        target: of the target, whose outputs the drafter learned from.
        data: of the data.
    """

    drafter: str = ""
    target: str = ""
    data: str = ""


@dataclass(frozen=True)
class RunFacts:
    """What a run folder tells about a checkpoint.

    Attributes:
        config: of the run, as configured.
        resolved: what it was resolved to.
        step: updates done at the checkpoint.
    """

    config: dict[str, Any]
    resolved: dict[str, Any]
    step: int | None


def find_run(drafter: Path) -> RunFacts | None:
    """Facts of the run that wrote a checkpoint folder; None where there are no such records that can be read."""
    folder = drafter.resolve().parent.parent
    run, resolved = read_record(folder / "run.json"), read_record(folder / "resolved.json")
    state = read_record(drafter / "state.json")
    if run is None or resolved is None or state is None:
        return None
    facts: dict[str, Any] = {"config": run.get("config"), "resolved": resolved, "step": state.get("step")}
    try:
        _RECORDS.validate_python(facts)
    except ValidationError:
        return None
    return RunFacts(**facts)


def read_evaluation(path: Path) -> dict[str, Any]:
    """A result of `draftsmith eval --json`.

    Raises:
        UserError: the file is missing, holds something else, or no round was measured.
    """
    fix = "give TASK=FILE; draftsmith eval --json > FILE writes one"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), fix=fix) from None
    except (OSError, ValueError, RecursionError):
        raise UserError("is not an evaluation", where=str(path), fix=fix) from None
    try:
        _EVALUATION.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"is not an evaluation: {field}: {first['msg']}", where=str(path), fix=fix) from None
    return content


def check_evaluation(figures: dict[str, Any], result: Converted, target: str | None, where: str) -> list[str]:
    """What is to be told about an evaluation beside an export.

    Args:
        figures: from `read_evaluation`.
        result: the export.
        target: that the card names.
        where: the evaluation, for messages.

    Raises:
        UserError: it was made with other weights.
    """
    setting, notes = figures["setting"], []
    measured = setting.get("drafter")
    if measured is None:
        notes.append(f"{where} does not say which drafter it measured: the card takes your word for it")
    elif measured not in result.digests:
        raise UserError(
            f"measured another drafter (weights {measured}; here {' and '.join(dict.fromkeys(result.digests))})",
            where=where,
            fix="evaluate this drafter, or leave the evaluation out",
        )
    there = setting.get("target")
    if target and there and Path(there).name != Path(target).name:
        notes.append(f"{where} was measured with the target {there}, the card names {target}")
    return notes


def check_run(run: RunFacts | None, target: str | None) -> list[str]:
    """What is to be told where the card names another target than the run's."""
    there = run.config["target"]["path"] if run else None
    if there and target and Path(there).name != Path(target).name:
        return [f"the drafter was trained for the target {there}, the card names {target}"]
    return []


def model_card(
    result: Converted,
    *,
    target: str | None = None,
    run: RunFacts | None = None,
    evaluations: Sequence[tuple[str, dict[str, Any]]] = (),
    licences: Licences | None = None,
) -> str:
    """README.md of an export.

    Args:
        result: the export.
        target: name of the target, if known.
        run: recipe and data, if the source is a checkpoint of a run.
        evaluations: (task, result of `draftsmith eval --json`).
        licences: licence fields.
    """
    licences = licences or Licences()
    target = target or (run.config["target"]["path"] if run else None)
    if target and not _is_hub_name(target):
        target = Path(target).name  # a path of this machine tells others nothing
    head = {
        "license": licences.drafter or "other",
        **({} if licences.drafter else {"license_name": "not-chosen-yet"}),
        # A hub looks this name up, so only a hub's name may stand here.
        **({"base_model": target, "base_model_relation": "adapter"} if target and _is_hub_name(target) else {}),
        "library_name": "transformers" if result.layout == "zlab" else "speculators",
        "tags": ["speculative-decoding", "dflash", "draftsmith"],
    }
    lines = ["---", *yaml.safe_dump(head, sort_keys=False).splitlines(), "---", ""]
    lines += [f"# DFlash drafter for {target or 'its target'}", "", *_what_it_is(result, target), ""]
    lines += ["## What it is worth", "", *_tau_table(evaluations, result.spec.block_size), ""]
    lines += ["## Recipe", "", *_recipe(run), ""]
    lines += ["## Data", "", *_data(run), ""]
    lines += ["## Licences", "", *_licences(licences), ""]
    lines += [f"Written by draftsmith {draftsmith.__version__}.", ""]
    return "\n".join(lines)


def _is_hub_name(target: str) -> bool:
    return target.count("/") == 1 and target[0] not in "./~" and not Path(target).exists()


def _what_it_is(result: Converted, target: str | None) -> list[str]:
    spec = result.spec
    name = str(result.dtype).removeprefix("torch.")
    window = f", window {spec.sliding_window}" if spec.sliding_window else ""
    kinds = ", ".join(
        f"{kind.removesuffix('_attention')} {'causal' if spec.layer_kind(layer).causal else 'bidirectional'}"
        for layer, kind in enumerate(spec.layer_types)
    )
    return [
        "A drafter proposes a block of tokens in one forward; the target checks the block and keeps what it would have",
        "written anyway, so that only the speed should change. The drafter owns neither embedding nor head: it uses",
        "the target's.",
        "",
        "| | |",
        "| --- | --- |",
        f"| layout | {result.layout}, {name} |",
        f"| target | {_cell(target or 'not stated')}: {spec.target_layers} layers, {spec.vocab_rows} embedding rows |",
        f"| drafter | {spec.layers} layers x {spec.hidden_size}, {spec.heads} heads, {spec.kv_heads} K/V heads |",
        f"| attention | {kinds}{window} |",
        f"| block size | {spec.block_size} (slot 0 is the last known token, {spec.block_size - 1} are drafted) |",
        f"| taps | outputs of target layers {list(spec.taps)}, counted from 0 |",
        f"| mask token | {spec.mask_token_id} |",
        f"| rotary | full head, θ = {spec.rope_theta:g}, {spec.max_position_embeddings} positions |",
    ]


def _tau_table(evaluations: Sequence[tuple[str, dict[str, Any]]], block_size: int) -> list[str]:
    if not evaluations:
        return ["Not measured."]
    rows = [
        "τ: tokens per target forward, the target's own included, pooled and as the mean of the answers' own.",
        "Speed-up: against the same loop without a drafter, prefill excluded.",
        "",
        "| task | answers | tokens | τ pooled | τ per answer | speed-up | T | dtype | device | lossless |",
        "| --- | --: | --: | --: | --: | --: | --: | --- | --- | --- |",
    ]
    for task, figures in evaluations:
        setting = figures["setting"]
        temperature = f"{setting['temperature']:g}" if "temperature" in setting else "?"
        if setting.get("block_size", block_size) != block_size:
            task = f"{task}, in blocks of {setting['block_size']}"
        lossless = "yes" if figures.get("lossless") else "no"
        if figures.get("distribution"):
            lossless += f" (p = {figures['distribution']['p_value']:.2g})"
        rows.append(
            f"| {_cell(task)} | {figures['answers']} | {figures['tokens']} | {figures['tau']:.2f} | "
            f"{figures['tau_per_response']:.2f} | {figures['speedup']:.2f}x | {temperature} | "
            f"{_cell(setting.get('dtype', '?'))} | {_cell(setting.get('device', '?'))} | {lossless} |"
        )
    return rows


def _cell(text: Any) -> str:
    """A text inside a table's cell, whatever it holds."""
    return " ".join(str(text).split()).replace("\\", "\\\\").replace("|", "\\|")


def _recipe(run: RunFacts | None) -> list[str]:
    if run is None:
        return ["Not known: the drafter was not exported from a run of draftsmith, or its records cannot be read."]
    optimizer, training, rows = run.config["optimizer"], run.config["training"], run.config["rows"]
    objective, init = run.config["objective"], run.config["drafter"].get("init")
    step = "an unknown number" if run.step is None else run.step
    one_row = ", all of one row: a check of the training, which learned nothing else" if _overfitted(run) else ""
    rate = f"lr {optimizer['lr']:g}"
    if optimizer["name"] == "muon":
        of_muon = muon_rate(optimizer["lr"], optimizer.get("muon_lr"))
        rate = f"lr {of_muon:g} for 2-D weights and {optimizer['lr']:g} for the rest (AdamW)"
    return [
        f"- {step} of {run.resolved['steps']} updates of {training['rows_per_update']} rows, seed {training['seed']}"
        f"{one_row}",
        f"- rows of S = {rows['length']} context tokens with N = {rows['anchors']} anchors",
        f"- {optimizer['name']}, {rate}, {optimizer['schedule']}, warm-up {optimizer['warmup']:g}, "
        f"clip {optimizer['clip']:g}, weight decay {optimizer['weight_decay']:g}",
        f"- labels: {objective['labels']}, slot weights: {objective['weights']}",
        f"- mask token chosen by: {run.resolved.get('mask_token_rule', 'not stated')}",
        # By its name: a path of this machine tells others nothing.
        f"- started from: {'the drafter ' + Path(init).name if init else 'fresh weights'}",
    ]


def _overfitted(run: RunFacts) -> bool:
    return bool(run.resolved.get("overfit", False))


def _data(run: RunFacts | None) -> list[str]:
    if run is None:
        return ["Not known."]
    data = run.resolved.get("data", {})
    train, held_out = data.get("train", {}), data.get("held_out") or {}
    effects: Counter[str] = Counter()
    for entry in data.get("incidents", ()):
        effects[entry.get("effect", "not used in full")] += entry["count"]
    apart = [f"{held_out['conversations']} of them only evaluated"] if "conversations" in held_out else []
    apart += [f"{data['left_out']} of them left out by weights below 1"] if data.get("left_out") else []
    files = ", ".join(f"`{Path(name).name}`" for name in data.get("files", ()))
    return [
        f"- files: {files or 'not stated'}",
        ", ".join(
            [
                f"- {data.get('used', '?')} of {data.get('conversations', '?')} conversations used",
                f"{data.get('duplicates', '?')} of them equal to an earlier one",
                *apart,
            ]
        ),
        f"- not used in full: {', '.join(f'{count} × {effect}' for effect, count in effects.items()) or 'none'}",
        f"- {train.get('tokens', '?')} tokens an epoch, {train.get('taught_tokens', '?')} of them taught"
        f"{'; only one row of them was learned' if _overfitted(run) else ''}",
        f"- stop token: {data.get('stop_token', 'not stated')}",
    ]


def _licences(licences: Licences) -> list[str]:
    named = {"drafter": licences.drafter, "target": licences.target, "data": licences.data}
    return [f"- {what}: {text or 'not stated; to be filled in by the owner'}" for what, text in named.items()]
