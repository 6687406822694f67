"""Lines of public benchmarks become the very questions that the public harness asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.decode.prompts import Prompt, ask_in_turn, read_prompts
from draftsmith.errors import UserError

# One line of each, with the fields under which it is published, and the harness's name for it.
LINES: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "Two and two?", "answer": "4 #### 4"},
    "math500": {"problem": "Solve $x=1$.", "solution": "1", "answer": "1", "subject": "Algebra", "level": 1},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "canonical_solution": "", "entry_point": "f"},
    "mbpp": {"source_file": "a", "task_id": 2, "prompt": "Write a function.", "code": "", "test_list": []},
    "mt-bench": {"prompt_id": 1, "category": "writing", "prompt": ["First.", "Second."], "reference": []},
}  # fmt: skip


def written(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("name", list(LINES))
def test_the_question_is_the_harnesss(name: str, tmp_path: Path) -> None:
    benchmark = pytest.importorskip("dflash.benchmark", reason="the harness of the wheel dflash needs requests")
    form = benchmark.DATASETS[name]
    expected = form["format"](LINES[name])
    turns = expected if form.get("multi_turn") else [expected]
    (prompt,) = read_prompts(written(tmp_path, LINES[name]))
    assert [prompt.text, *prompt.later] == turns


def test_the_wording_without_the_harness(tmp_path: Path) -> None:
    asked = read_prompts(written(tmp_path, *LINES.values(), {"question_id": 81, "turns": ["a", "b", "c"]}))
    assert [(prompt.text, prompt.later) for prompt in asked] == [
        ("Two and two?\nPlease reason step by step, and put your final answer within \\boxed{}.", ()),
        ("Solve $x=1$.\nPlease reason step by step, and put your final answer within \\boxed{}.", ()),
        (
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f(x):\n\n```",
            (),
        ),
        ("Write a function.", ()),
        ("First.", ("Second.",)),
        ("a", ("b", "c")),
    ]


def test_plain_prompts_stay_what_they_are(tmp_path: Path) -> None:
    asked = read_prompts(written(tmp_path, {"prompt": "x", "category": "news"}, {"prompt": "y"}))
    assert [prompt.text for prompt in asked] == ["x", "y"]


@pytest.mark.parametrize("line", [{"turns": []}, {"turns": ["a", 3]}, {"turns": 5}, {"question": 3, "answer": "4"}])
def test_lines_that_cannot_be_asked_are_named(line: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="benchmark's line") as caught:
        read_prompts(written(tmp_path, line))
    assert caught.value.where.endswith(":1")


def test_turns_follow_the_targets_own_answers() -> None:
    asked = ask_in_turn([Prompt("p:1", text="a", later=("b", "c")), Prompt("p:2", text="d")], lambda p: f"<{p.source}>")
    assert [len(prompt.as_messages()) for prompt in asked] == [1, 3, 5, 1]
    assert asked[2].as_messages() == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<p:1>"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "<p:1>"},
        {"role": "user", "content": "c"},
    ]
    assert not any(prompt.later for prompt in asked)
