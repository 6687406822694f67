"""What a plan, a run and `data check` say about rows longer than the target, and about prompts with several turns."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith import cli
from draftsmith.errors import UserError
from draftsmith.observe.events import EventLog, read_events
from draftsmith.pipeline import held_out
from draftsmith.pipeline.data_commands import check_data
from draftsmith.pipeline.init import DataFacts, choose_row_length
from draftsmith.pipeline.plan import make_plan
from draftsmith.target.geometry import read_geometry


def test_rows_longer_than_the_targets_positions_are_said(tiny_run: Any, tmp_path: Path) -> None:
    assert not any("positions" in note for note in make_plan(tiny_run(rows={"length": 512})).notices)
    config = tiny_run(rows={"length": 640})
    (note,) = [note for note in make_plan(config).notices if "positions" in note]
    assert note.startswith("rows.length 640 is more than the 512 positions of the target; no document is longer than ")
    long = tmp_path / "long.jsonl"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "then", "it", "runs", "far", "away"]
    text = " ".join(random.Random(1).choices(words, k=700))
    long.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": text[:-9]}) + "\n")
    config = tiny_run(rows={"length": 640}, data={"train": str(long), "held_out_share": 0.0})
    (note,) = [note for note in make_plan(config).notices if "positions" in note]
    assert "documents of up to 640 tokens go beyond them: lower it to 512 to cut them there" in note
    assert note in check_data(config).notes


def test_rows_far_beyond_the_targets_positions_are_refused(tiny_run: Any) -> None:
    make_plan(tiny_run(rows={"length": 64 * 512}))
    config = tiny_run(rows={"length": 10_000_000})
    message = r"rows\.length: 10,000,000 tokens are more than 64 times the 512 positions of the target \(512 holds"
    for refuses in (make_plan, check_data):
        with pytest.raises(UserError, match=message):
            refuses(config)


def test_anchors_far_above_what_rows_have_are_said(tiny_run: Any) -> None:
    plan = make_plan(tiny_run())
    assert not any("rows.anchors" in note for note in plan.notices)
    part = plan.corpus.report.train
    mean = part.anchors / part.rows
    config = tiny_run(rows={"anchors": 95})
    assert mean < 95 / 2  # or the note is not due
    (note,) = [note for note in make_plan(config).notices if "rows.anchors" in note]
    assert note.startswith(f"rows.anchors 95 is far above the {mean:,.0f} that a row of this data has on average: ")
    assert note.endswith(f"{1 - mean / 95:.0%} of the drafter's work is padding (lower it to {math.ceil(mean)})")


def test_init_lowers_rows_to_the_targets_positions_and_says_what_it_cuts(tiny_run: Any) -> None:
    geometry = read_geometry(tiny_run().target)
    facts = DataFacts(10, 10, 10**7, 900, (torch.ones(900, dtype=torch.bool),), torch.zeros(4), True)
    length, reason = choose_row_length(facts, geometry)
    assert length == 512
    assert reason == "all positions that the target has; 1 in 100 documents is longer (900 tokens) and is cut"


def test_init_counts_what_rows_will_hold(tiny_run: Any) -> None:
    """One endless document among short ones: a row takes its beginning."""
    half = torch.arange(100) < 50
    documents = (*[half] * 60, torch.cat((half, torch.zeros(99_900, dtype=torch.bool))))
    facts = DataFacts(61, 61, 106_000, 100, documents, torch.zeros(4), True)
    assert facts.tokens_in(1024) == 60 * 100 + 1024
    assert facts.taught_in(1024) == 61 * 50 / facts.tokens_in(1024)
    length, reason = choose_row_length(facts, read_geometry(tiny_run().target))
    assert (length, reason) == (512, "so that an epoch of this little data has about 13 rows")


TURNS = {"turns": ["first", "second", "third"]}


def test_decoding_while_training_says_that_it_asks_first_turns_only(tiny_run: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "bench.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in (TURNS, {"prompt": "alone"}, TURNS)))
    config = tiny_run(decoding={"every": 1, "prompts": str(prompts), "limit": 2})
    with EventLog(tmp_path / "events.jsonl") as log:
        held_out._setting(make_plan(config), log)
    texts = [event["text"] for event in read_events(tmp_path / "events.jsonl")]
    assert texts == [f"{prompts}: 1 prompts have 2 further turns, which are not asked here: only the first is answered"]


def test_generate_says_so_too(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "bench.jsonl"
    prompts.write_text(json.dumps(TURNS) + "\n")
    arguments = ["--target", str(tiny_target), "--prompts", str(prompts), "--max-new-tokens", "3", "--device", "cpu"]
    assert cli.main(["data", "generate", str(tmp_path / "out.jsonl"), *arguments]) == 0
    assert "2 further turns, which are not asked here" in capsys.readouterr().err
