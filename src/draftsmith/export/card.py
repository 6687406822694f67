"""The model card: what a drafter is, how it was trained, on what, and what it was measured to be worth.

Only what is known is written. Recipe and data facts come from the run folder around a checkpoint, τ from results that
`draftsmith eval --json` wrote; where there is none, the card says "not measured".
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import draftsmith
from draftsmith.errors import UserError
from draftsmith.export.convert import Converted


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
    """Facts of the run that wrote a checkpoint folder; None where it is no checkpoint of a run."""
    folder = drafter.resolve().parent.parent
    try:
        config = json.loads((folder / "run.json").read_text(encoding="utf-8"))["config"]
        resolved = json.loads((folder / "resolved.json").read_text(encoding="utf-8"))
        step = json.loads((drafter / "state.json").read_text(encoding="utf-8")).get("step")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return RunFacts(config, resolved, step)


def read_evaluation(path: Path) -> dict[str, Any]:
    """A result of `draftsmith eval --json`.

    Raises:
        UserError: the file is missing, holds something else, or no round was measured.
    """
    fix = "write one with draftsmith eval --json > FILE"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), fix=fix) from None
    except (OSError, ValueError, RecursionError):
        raise UserError("is not an evaluation", where=str(path), fix=fix) from None
    if not isinstance(content, dict) or not isinstance(content.get("setting"), dict):
        raise UserError("is not an evaluation", where=str(path), fix=fix)
    sampled = content.get("distribution")
    numbers = {name: content.get(name) for name in ("tau", "tau_per_response", "answers", "tokens", "speedup")}
    numbers["temperature"] = content["setting"].get("temperature", 0)
    numbers["p_value"] = 1.0 if sampled is None else sampled.get("p_value") if isinstance(sampled, dict) else sampled
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"is not an evaluation: {name} is {value!r}, not a number", where=str(path), fix=fix)
    return content


def claim(figures: dict[str, Any], result: Converted, target: str | None, where: str) -> list[str]:
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
    if target and there and Path(str(there)).name != Path(target).name:
        notes.append(f"{where} was measured with the target {there}, the card names {target}")
    return notes


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
    lines += ["## What it is worth", "", *_tau_table(evaluations), ""]
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
        "written anyway. The output does not change, only the speed. The drafter owns neither embedding nor head: it",
        "uses the target's.",
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


def _tau_table(evaluations: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
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
        lossless = "yes" if figures.get("lossless") else "no"
        if figures.get("distribution"):
            lossless += f" (p = {figures['distribution']['p_value']:.2g})"
        rows.append(
            f"| {_cell(task)} | {figures['answers']} | {figures['tokens']} | {figures['tau']:.2f} | "
            f"{figures['tau_per_response']:.2f} | {figures['speedup']:.2f}x | {setting.get('temperature', 0):g} | "
            f"{_cell(setting.get('dtype', '?'))} | {_cell(setting.get('device', '?'))} | {lossless} |"
        )
    return rows


def _cell(text: Any) -> str:
    """A text inside a table's cell, whatever it holds."""
    return " ".join(str(text).split()).replace("\\", "\\\\").replace("|", "\\|")


def _recipe(run: RunFacts | None) -> list[str]:
    if run is None:
        return ["Not known: the drafter was not exported from a run of draftsmith."]
    optimizer, training, rows = run.config["optimizer"], run.config["training"], run.config["rows"]
    objective = run.config["objective"]
    return [
        f"- {run.step if run.step is not None else run.resolved['steps']} of {run.resolved['steps']} updates of "
        f"{training['rows_per_update']} rows, seed {training['seed']}",
        f"- rows of S = {rows['length']} context tokens with N = {rows['anchors']} anchors",
        f"- {optimizer['name']}, lr {optimizer['lr']:g}, {optimizer['schedule']}, warm-up {optimizer['warmup']:g}, "
        f"clip {optimizer['clip']:g}, weight decay {optimizer['weight_decay']:g}",
        f"- labels: {objective['labels']}, slot weights: {objective['weights']}",
        f"- mask token chosen by: {run.resolved.get('mask_token_rule', 'not stated')}",
        f"- started from: {run.config['drafter'].get('init') or 'fresh weights'}",
    ]


def _data(run: RunFacts | None) -> list[str]:
    if run is None:
        return ["Not known."]
    data = run.resolved.get("data", {})
    train = data.get("train", {})
    files = ", ".join(f"`{Path(name).name}`" for name in data.get("files", ()))
    incidents = sum(entry["count"] for entry in data.get("incidents", ()))
    return [
        f"- files: {files or 'not stated'}",
        f"- {data.get('used', '?')} of {data.get('conversations', '?')} conversations used, "
        f"{data.get('duplicates', '?')} duplicates left out, {incidents} truncated, refused or partly untaught",
        f"- {train.get('tokens', '?')} tokens an epoch, {train.get('taught_tokens', '?')} of them taught",
        f"- stop token: {data.get('stop_token', 'not stated')}",
    ]


def _licences(licences: Licences) -> list[str]:
    named = {"drafter": licences.drafter, "target": licences.target, "data": licences.data}
    return [f"- {what}: {text or 'not stated; to be filled in by the owner'}" for what, text in named.items()]
