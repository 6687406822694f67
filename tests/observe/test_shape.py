"""What passes for a number, a name and a row, and that a file's content stays what JSON makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.observe.shape import LARGEST, LAST_MOMENT, WHOLE, read_record, well_formed
from draftsmith.pipeline.environment import environment_record

EVENTS: dict[str, dict[str, Any]] = {
    "work": {"worker": "target 0", "row": 1, "start": 1, "end": 2.5},
    "step": {"step": 1},
    "vitals": {},
    "summary": {"content": {}},
    "unknown": {},
}


def passes(kind: str, **fields: Any) -> bool:
    return well_formed({"time": 1.0, "kind": kind, **EVENTS[kind], **fields})


@pytest.mark.parametrize("kind", EVENTS)
@pytest.mark.parametrize("bad", [None, True, "1", -1, LAST_MOMENT, float("nan"), float("inf"), 10**400, [1], {}])
def test_every_event_has_a_moment(kind: str, bad: Any) -> None:
    assert passes(kind)
    assert passes(kind, time=1, other=[bad])
    assert not passes(kind, time=bad)
    assert not well_formed({"kind": kind, **EVENTS[kind]})


@pytest.mark.parametrize(
    ("kind", "field", "good", "bad"),
    [
        ("work", "queue", (0, -1.5, 0.9 * LARGEST), (None, True, "1", "nan", LARGEST, -LARGEST, 10**400, float("inf"))),
        ("work", "row", (0, -1, WHOLE - 1), (None, True, 1.0, "1", WHOLE, -WHOLE)),
        ("work", "worker", ("target 0", "\u200b", " a "), (None, 1, "", " \n", "\x1c", "\u3000")),
        ("step", "loss", (None, 1, 1.5, "nan", "inf", "-inf"), (True, "1", "NaN", float("nan"), LARGEST, [1])),
        ("step", "accept_by_slot", (None, [], [1, None, "nan"]), (0.5, [True], ["x"], {"a": 1})),
        ("vitals", "queues", (None, {}, {"a": [1, 2]}), ({"a": [1]}, {"a": [1, 2, 3]}, {" ": [1, 2]}, {"a": [1, "2"]})),
        ("vitals", "devices", ([{"device": "cuda:0", "x": {}}],), ([{}], [None], {"device": "cuda:0"})),
        (
            "summary",
            "content",
            ({"history": [[1, None, 2.0, 3]]},),
            ({"history": [[1, None, 2.0]]}, {"events": -1}, []),
        ),
    ],
)
def test_what_passes(kind: str, field: str, good: tuple[Any, ...], bad: tuple[Any, ...]) -> None:
    assert [value for value in good if not passes(kind, **{field: value})] == []
    assert [value for value in bad if passes(kind, **{field: value})] == []


def test_a_file_comes_as_it_is_or_not_at_all(tmp_path: Path) -> None:
    content = {"config": {"training": {"steps": "7"}}, "created": [True, 1.0, None]}
    for name, kept in (("run.json", content), ("else.json", content), ("resolved.json", {"data": None})):
        (tmp_path / name).write_text(json.dumps(kept))
        assert read_record(tmp_path / name) == kept
    for name, text in (("run.json", '{"config": []}'), ("else.json", "[]"), ("ledger.json", '{"entries": [1]}')):
        (tmp_path / name).write_text(text)
        assert read_record(tmp_path / name) is None
    assert read_record(tmp_path / "environment.json") is None


def test_what_a_run_writes_of_its_environment_passes(tmp_path: Path) -> None:
    content = json.loads(json.dumps(environment_record(), default=str))
    (tmp_path / "environment.json").write_text(json.dumps(content))
    assert read_record(tmp_path / "environment.json") == content
    (tmp_path / "environment.json").write_text(json.dumps(content | {"packages": {"torch": 2}}))
    assert read_record(tmp_path / "environment.json") is None
