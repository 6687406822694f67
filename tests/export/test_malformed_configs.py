"""Every field of a `config.json` with a value that it cannot have: one line for the user, never a traceback.

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

from draftsmith.errors import UserError
from draftsmith.export.convert import LAYOUTS, Layout, Verifier, convert_drafter
from draftsmith.export.lint import lint

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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_value_of_any_field_is_a_traceback(layout: Layout, tmp_path: Path) -> None:
    verifier = Verifier("owner/target", ("Qwen3ForCausalLM",))
    source = convert_drafter(saved(tmp_path / "ours", "mixed"), tmp_path / "source", layout, verifier=verifier).folder
    config = json.loads((source / "config.json").read_text())
    output = tmp_path / "output"
    refused, praised = 0, []
    for path in (*paths(config), *FURTHER[layout]):
        for value in VALUES:
            (source / "config.json").write_text(json.dumps(changed(config, path, value)))
            report = lint(source)
            try:
                convert_drafter(source, output, "speculators" if layout == "zlab" else "zlab", verifier=verifier)
            except UserError as error:
                refused += 1
                praised += [(path, value, str(error))] * report.fine
            shutil.rmtree(output, ignore_errors=True)
    assert refused > 200
    assert praised == [], "the check finds no fault in what cannot be read"
