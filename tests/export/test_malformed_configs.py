"""Every field of a `config.json`, and of an index of weights, with a value that it cannot have: one line for the user,
never a traceback.

A value that a field can have is fine as well: what is asked here is only that nothing but `UserError` comes out of
reading, checking, importing and exporting, whoever wrote the file.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small import saved

from draftsmith.drafter.native import load_drafter, stated_spec
from draftsmith.errors import UserError
from draftsmith.export.convert import LAYOUTS, Layout, Verifier, convert_drafter
from draftsmith.export.lint import lint

VERIFIER = Verifier("owner/target", ("Qwen3ForCausalLM",))
LEFT_OUT = object()
VALUES = (LEFT_OUT, None, 0, -1, 1.5, "abc", [], {}, [None], ["x"], [1, 2], True, 10**30, 7, math.nan)
FURTHER: dict[Layout, tuple[tuple[str, ...], ...]] = {
    "zlab": (
        *(("rope_scaling",), ("partial_rotary_factor",), ("eagle_aux_hidden_state_layer_ids",), ("logit_scale",)),
        *(("max_window_layers",), ("draft_vocab_size",), ("quantization_config",), ("use_sliding_window",)),
        *(("dflash_config", "input_embedding_scale"), ("dflash_config", "output_multiplier")),
        *(("dflash_config", "final_logit_softcapping"), ("dflash_config", "use_swa")),
    ),
    "speculators": (("dflash_config",), ("target_hidden_size",), ("speculators_config", "proposal_methods")),
}


def paths(config: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from paths(value, (*above, name))


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    place = config
    for name in path[:-1]:
        place = place[name]
    place.pop(path[-1], None)
    if value is not LEFT_OUT:
        place[path[-1]] = value
    return config


def published(tmp_path: Path, layout: Layout) -> Path:
    return convert_drafter(saved(tmp_path / "ours", "mixed"), tmp_path / "source", layout, verifier=VERIFIER).folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_value_of_any_field_is_a_traceback(layout: Layout, tmp_path: Path) -> None:
    source = published(tmp_path, layout)
    config = json.loads((source / "config.json").read_text())
    output = tmp_path / "output"
    refused, praised = 0, []
    for path in (*paths(config), *FURTHER[layout]):
        for value in VALUES:
            (source / "config.json").write_text(json.dumps(changed(config, path, value)))
            report = lint(source)
            try:
                convert_drafter(source, output, "speculators" if layout == "zlab" else "zlab", verifier=VERIFIER)
            except UserError as error:
                refused += 1
                praised += [(path, value, str(error))] * report.fine
            shutil.rmtree(output, ignore_errors=True)
    assert refused > 200
    assert praised == [], "the check finds no fault in what cannot be read"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_null_is_read_as_left_out(layout: Layout, tmp_path: Path) -> None:
    config = json.loads((published(tmp_path, layout) / "config.json").read_text())

    def read(path: tuple[str, ...], value: Any) -> Any:
        try:
            return stated_spec(changed(config, path, value), "here")
        except UserError as error:
            return str(error)

    for path in (*paths(config), *FURTHER[layout]):
        assert read(path, None) == read(path, LEFT_OUT), path


def test_what_transformers_refuses_as_null_is_not_praised(tmp_path: Path) -> None:
    """Our own reading takes null for left out; `Qwen3Config`, through which every engine reads, does not."""
    source = published(tmp_path, "zlab")
    config = json.loads((source / "config.json").read_text())
    for name in ("hidden_act", "head_dim", "attention_bias", "num_hidden_layers"):
        (source / "config.json").write_text(json.dumps({**config, name: None}))
        for verdict in lint(source).verdicts.values():
            assert verdict.outcome == "refuses"
            assert f"config: {name} is null" in verdict.reasons


@pytest.mark.parametrize(
    "index",
    [
        *("", "[", "[" * 100_000, "null", "[]", "7", '"a"', "{}", '{"weight_map": null}', '{"weight_map": []}'),
        *(
            '{"weight_map": {}}',
            '{"weight_map": {"a": 1}}',
            '{"weight_map": {"a": null}}',
            '{"weight_map": {"a": [1]}}',
        ),
        *('{"weight_map": {"a": ""}}', '{"weight_map": {"a": ".."}}', '{"weight_map": {"a": "x", "b": {}}}'),
        *('{"weight_map": {"a": "none.safetensors"}}', '{"weight_map": {"a": "\\u0000"}}'),
        *('{"weight_map": {"a": "\\ud800"}}', json.dumps({"weight_map": {"a": "x" * 5000}})),
    ],
    ids=lambda index: index[:40],
)
def test_no_index_of_weights_is_a_traceback(index: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(index)
    for read in (lint, load_drafter, lambda folder: convert_drafter(folder, tmp_path / "output", "zlab")):
        with pytest.raises(UserError) as told:
            read(source)
        assert str(source) in str(told.value)
