"""`data prepare`, `data preview` and `data check`: what they say of good data, and why they say no to bad data."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import draftsmith
from draftsmith import cli
from draftsmith.config import TargetConfig, load_config
from draftsmith.data.survey import guess_language, survey
from draftsmith.decode.answers import AnswerOptions, write_answers
from draftsmith.decode.prompts import read_prompts
from draftsmith.decode.score import score_rows
from draftsmith.pipeline.assemble import batch_maker
from draftsmith.pipeline.data_commands import preview_rows
from draftsmith.pipeline.jobs import Job
from draftsmith.pipeline.plan import make_plan
from draftsmith.target.forward import Target
from draftsmith.target.load import load_target


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(TargetConfig(path=str(tiny_target)), "cpu", torch.float32)  # type: ignore[call-arg]


@pytest.fixture
def config(tiny_target: Path, tiny_chats: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path / "run.yaml", tiny_target, tiny_chats)


def write_config(path: Path, target: Path, data: Path | str) -> Path:
    content = {
        "target": {"path": str(target)},
        "data": {"train": str(data), "held_out_share": 0.1},
        "drafter": {"layers": 2, "block_size": 4, "layer_types": ["full_attention", "sliding_attention"]},
        "rows": {"length": 96, "anchors": 12},
    }
    content["drafter"]["sliding_window"] = 8
    path.write_text(yaml.safe_dump(content))
    return path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = cli.main([*arguments, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def write_chats(path: Path, chats: list[list[str]], **more: Any) -> Path:
    roles = ("user", "assistant")
    lines = [
        {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)], **more}
        for turns in chats
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_prepare_says_what_became_of_it_and_leaves_it_in_the_cache(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTSMITH_DATA_CACHE", str(tmp_path / "cache"))
    code, first, err = run_json(capsys, "data", "prepare", str(config))
    assert code == 0
    assert first["report"]["conversations"] == 120
    assert first["tokens"] == first["report"]["train"]["tokens"] + first["report"]["held_out"]["tokens"]
    assert first["seconds"] > 0
    assert "padding" in err
    assert "tokens/s" in err
    table = next(path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    before = (table / "tokens").stat().st_mtime_ns
    assert run_json(capsys, "data", "prepare", str(config))[1]["report"] == first["report"]
    assert (table / "tokens").stat().st_mtime_ns == before


def test_the_preview_is_what_training_gets(config: Path) -> None:
    run = load_config(config)
    make = batch_maker(make_plan(run), overfit=False)
    pictures, corpus = preview_rows(run, [0, 3], block=2)
    for shown in pictures:
        row, batch = make(Job(0, True, shown.number, 0))
        tokens = [token for document in shown.documents for token in document]
        assert [token.id for token in tokens] == row.tokens_S[row.document_S >= 0].tolist()
        assert [token.index for token in tokens if token.anchor] == batch.anchors_N[batch.valid_N].tolist()
        assert shown.anchor == int(batch.anchors_N[2])
        assert [view.position for view in shown.block] == batch.block_positions_Q[8:12].tolist()
        assert len(shown.kinds) == 2
    name = pictures[1].names[-1]
    (found,), _ = preview_rows(run, [], conversation=name)
    assert name in found.names
    every = {d.name for i in range(corpus.train.rows_per_epoch) for d in corpus.train.row_documents(i)}
    assert all(name in preview_rows(run, [], conversation=name)[0][0].names for name in sorted(every)[:3])


def test_a_floor_and_a_ceiling_reach_training_and_preview(config: Path) -> None:
    run = load_config(config, ["anchors.per_document={floor: 1, ceiling: 3}"])
    row, batch = batch_maker(make_plan(run), overfit=False)(Job(0, True, 0, 0))
    per_document = torch.bincount(row.document_S[batch.anchors_N[batch.valid_N]])
    assert per_document.max() == 3
    assert per_document.min() >= 1
    (shown,), _ = preview_rows(run, [0])
    drawn = [token.index for document in shown.documents for token in document if token.anchor]
    assert drawn == batch.anchors_N[batch.valid_N].tolist()


def test_features_by_command(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "features"
    code, found, err = run_json(capsys, "data", "features", str(config), str(folder), "--yes", "--device", "cpu")
    assert code == 0
    assert found["written"] == found["documents"] > 100
    assert "GiB to write" in err
    assert run_json(capsys, "data", "features", str(config), str(folder), "--yes", "--device", "cpu")[1]["written"] == 0


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_features_are_written_after_a_yes(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch, answer: str, code: int
) -> None:
    """The size comes first, then the question; without a yes nothing is written and no target is loaded."""
    folder = tmp_path / "features"
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    if code:
        monkeypatch.setattr("draftsmith.target.load.load_target", lambda *_: pytest.fail("loaded"))
    assert cli.main(["data", "features", str(config), str(folder), "--device", "cpu"]) == code
    told = capsys.readouterr().err
    assert told.index("GiB to write") < told.index("Write them? [y/N]")
    assert folder.exists() == (code == 0)


def test_features_say_how_to_write_where_nobody_answers(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    command = ["data", "features", str(config), str(tmp_path / "features"), "--device", "cpu"]
    assert cli.main(command) == 1
    assert capsys.readouterr().out.strip() == "nothing written (--yes writes without asking)"
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, found, _ = run_json(capsys, *command)
    assert (code, found["written"]) == (1, 0)
    assert found["documents"] > 100
    assert not (tmp_path / "features").exists()


def test_features_that_do_not_fit_are_refused_also_where_some_are_there(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "features"
    folder.mkdir()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=1000))
    command = ["data", "features", str(config), str(folder), "--yes", "--device", "cpu"]
    assert cli.main(command) == 2
    assert "not enough room on this disk" in capsys.readouterr().err
    monkeypatch.undo()
    assert cli.main(command) == 0
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=1000))
    assert cli.main(command) == 0, "what is there needs no room"


@pytest.mark.parametrize("command", ["prepare", "check"])
def test_every_incident_goes_to_a_file(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    data = tmp_path / "some.jsonl"
    lines = [json.dumps({"messages": [{"role": "user", "content": "?"}]})] * 5 + ["{"] * 2
    lines += [json.dumps({"text": f"the quick brown fox {number} jumps over it"}) for number in range(6)]
    data.write_text("\n".join(lines))
    listed = tmp_path / "incidents.jsonl"
    arguments = ["data", command, str(config), f"data.train={data}", "--incidents", str(listed)]
    arguments += ["--no-score"] if command == "check" else []
    cli.main(arguments)
    found = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [each["source"] for each in found] == [f"{data}:{number}" for number in range(1, 8)]
    assert [each["reason"] for each in found] == ["no assistant turn"] * 5 + ["malformed"] * 2
    capsys.readouterr()
    assert cli.main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
    # where nothing is left the list is wanted most
    data.write_text("\n".join(lines[:5]))
    listed.unlink()
    assert cli.main(arguments) == (1 if command == "check" else 2)
    assert len(listed.read_text().splitlines()) == 5


def test_preview_prints_and_writes_a_page(config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["data", "preview", str(config), "--row", "0", "--row", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("row 0: ")
    assert "\nrow 1: " in text
    assert "sliding attention, window 8" in text
    page = tmp_path / "page.html"
    assert cli.main(["data", "preview", str(config), "--html", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert "conversations in 1 file" in page.read_text()
    capsys.readouterr()
    assert cli.main(["data", "preview", str(config), "--html", str(page)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["data", "preview", str(config), "--conversation", "nowhere.jsonl:3"]) == 2
    assert "nowhere.jsonl:3: is in no training row" in capsys.readouterr().err
    _, shown, _ = run_json(capsys, "data", "preview", str(config), "--block", "0")
    assert shown["rows"][0]["block"][0]["slot"] == 0


def test_scores_against_one_document_at_a_time(target: Target, config: Path) -> None:
    _, corpus = preview_rows(load_config(config), [0])
    rows = [corpus.train.row(number) for number in range(3)]
    score = score_rows(target, rows, 10**9)
    assert score is not None
    logprobs, equal = [], []
    for number in range(3):
        for document in corpus.train.row_documents(corpus.train.packed_row(number)):
            logits = target.model(document.tokens[None]).logits[0].log_softmax(-1)
            for place in range(1, len(document)):
                if document.loss_mask[place]:
                    logprobs.append(float(logits[place - 1, document.tokens[place]]))
                    equal.append(int(logits[place - 1].argmax()) == int(document.tokens[place]))
    assert score.tokens == len(logprobs)
    assert score.mean_logprob == pytest.approx(sum(logprobs) / len(logprobs), abs=1e-4)
    assert score.greedy_share == pytest.approx(sum(equal) / len(equal))
    first = score_rows(target, rows, 1)
    assert first is not None
    assert first.tokens == int(rows[0].loss_mask_S.sum())


def test_check_says_yes_to_the_targets_own_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = load_target(TargetConfig(path="demo"), "cpu", torch.float32)  # type: ignore[call-arg]
    prompts = read_prompts(Path(draftsmith.__file__).parent / "demo" / "prompts" / "held_out.jsonl")[:12]
    answers = tmp_path / "answers.jsonl"
    write_answers(demo, prompts, answers, AnswerOptions(max_new_tokens=32, temperature=0.0))
    config = tmp_path / "run.yaml"
    config.write_text(
        yaml.safe_dump(
            {"target": {"path": "demo"}, "data": {"train": str(answers)}, "rows": {"length": 256, "anchors": 16}}
        )
    )
    code, found, err = run_json(capsys, "data", "check", str(config), "--device", "cpu")
    assert (code, found["ok"], found["failures"]) == (0, True, [])
    assert found["score"]["greedy_share"] > 0.98
    assert found["template_is_tokenizers"] is True
    assert found["feeds"] == "<|im_end|>\n<|im_start|>assistant\n"
    assert found["report"]["stop_token"] == "<|im_end|>"
    assert found["survey"]["thinking_share"] == 0
    assert "yes: a run can learn from this data" in err
    assert "anchors of a document" in err


def test_check_says_no_to_what_the_target_would_never_say(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, err = run_json(capsys, "data", "check", str(config), "--device", "cpu", "--sample-tokens", "500")
    assert (code, found["ok"]) == (1, False)
    assert found["score"]["tokens"] >= 500
    assert "first choice: this is not text of this target" in found["failures"][0]
    assert err.rstrip().splitlines()[-1].startswith("NO: only ")
    code, found, _ = run_json(capsys, "data", "check", str(config), "--no-score")
    assert (code, found["score"]) == (0, None)


BAD: dict[str, tuple[list[list[str]], list[str], str]] = {
    "nothing taught": ([["only a question"]], [], "no usable conversation (refused: 1 × no assistant turn"),
    "an empty file": ([], [], "is empty: no conversation in it"),
    "all too long": (
        [["the quick", "fox " * 200]] * 3,
        ["data.too_long=skip"],
        "no usable conversation (refused: 3 × longer than a row",
    ),
    "mask token in the data": (
        [["the", "quick <|mask|> fox"]] * 3,
        ["drafter.mask_token_id=2"],
        "cannot stand for MASK",
    ),
    "hardly anything usable": ([["?"]] * 30 + [["the", "quick fox"]] * 2, [], "of the conversations are refused"),
}


@pytest.mark.parametrize("name", BAD)
def test_check_says_no_with_the_reason(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    chats, overrides, reason = BAD[name]
    config = write_config(tmp_path / "run.yaml", tiny_target, write_chats(tmp_path / "chats.jsonl", chats))
    code, found, err = run_json(capsys, "data", "check", str(config), *overrides, "--no-score")
    assert (code, found["ok"]) == (1, False)
    assert reason in " ".join(found["failures"])
    assert "NO: " in err


def test_check_says_no_to_files_that_are_broken(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content, reason in (
        ("lines.jsonl", b"no\nJSON\n", "not valid JSON"),
        ("array.json", b'[{"text": "a"}, {', "in element 2 of the array"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a b c"}\n' * 99)[:-9], "cannot be read"),
    ):
        (tmp_path / name).write_bytes(content)
        code, found, _ = run_json(capsys, "data", "check", str(config), f"data.train={tmp_path / name}", "--no-score")
        assert (code, found["ok"]) == (1, False)
        assert reason in found["failures"][0]


WRONG: dict[str, tuple[list[str], str]] = {
    "no training file": (["data.train=none.jsonl"], "none.jsonl: no such data file"),
    "no held-out file": (["data.held_out=none.jsonl"], "none.jsonl: no such data file"),
    "a pattern of nothing": (["data.train=*.nothing"], "*.nothing: no such data file"),
    "no dataset": (["data.train=smiths/none"], "smiths/none: no such file here"),
    "a folder without data": (["data.train={tmp}/empty"], "is a directory without data files"),
    "a split of a file": (["data.train=[{{path: {chats}, split: train}}]"], "a file has no splits"),
    "no template": (["data.chat_template=none.jinja"], "none.jinja: no such chat template (check data.chat_template)"),
    "a template that is none": (["data.chat_template={tmp}/bad.jinja"], "not a valid Jinja template"),
    "a template option of ours": (["data.template_options={{tokenize: true}}"], "cannot be a template option"),
    "weights that leave nothing": (["data.train=[{{path: {tmp}/one.jsonl, weight: 1.0e-9}}]"], "the weights leave no"),
    "rows beyond all positions": (["rows.length=1000000"], "positions of the target"),
    "a mask token beyond all": (["drafter.mask_token_id=99999"], "is outside the target's"),
}


@pytest.mark.parametrize("name", WRONG)
def test_check_answers_about_data_only_what_is_wrong_before_is_an_error(
    config: Path, tiny_chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch, name: str
) -> None:
    overrides, message = WRONG[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jinja").write_text("{% if %}")
    write_chats(tmp_path / "one.jsonl", [["the", "quick brown fox"], ["the", "lazy brown dog"]])
    overrides = [each.format(tmp=tmp_path, chats=tiny_chats) for each in overrides]
    assert cli.main(["data", "check", str(config), *overrides, "--no-score"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]
    assert cli.main(["train", str(config), *overrides, "--plan"]) == 2  # the same to both
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", [["check"], ["features", "out"]])
def test_a_device_that_is_not_there_is_told_before_the_data_are_read(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr("draftsmith.data.tables.TableCache.table", lambda *_: pytest.fail("reads"))
    assert cli.main(["data", command[0], str(config), *command[1:], "--device", "cuda:99"]) == 2
    assert "--device: 'cuda:99' does not exist" in capsys.readouterr().err


def test_check_says_no_to_another_targets_tokenizer(
    tiny_target: Path, tiny_chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_target, folder)
    geometry = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**geometry, "vocab_size": 200}))
    config = write_config(tmp_path / "run.yaml", folder, tiny_chats)
    code, found, _ = run_json(capsys, "data", "check", str(config), "--no-score")
    assert code == 1
    assert "the target has 200 embedding rows: the tokenizer is not this target's" in found["failures"][0]


def test_check_notes_what_costs_quality(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = [["the quick", "<think>hm</think> a fox"], ["the lazy", "dog it"], ["the lazy", "dog it"]] * 4
    template = tmp_path / "other.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    config = write_config(tmp_path / "run.yaml", tiny_target, write_chats(tmp_path / "chats.jsonl", chats))
    overrides = [f"data.chat_template={template}", "rows.anchors=90", "drafter.block_size=64", "objective.chunk=64"]
    overrides.append("training.rows_per_update=40")
    code, found, _ = run_json(capsys, "data", "check", str(config), *overrides, "--no-score")
    assert code == 0
    notes = " ".join(found["notes"])
    for part in (
        "repeat an earlier one",
        "most drafts are padding",
        "answers are short for blocks of 64",
        "33.3% of the answers think",
        "the chat template is not the tokenizer's",
        "learnt several times in one update",
    ):
        assert part in notes
    assert found["template_is_tokenizers"] is False
    assert found["feeds"] == "<|im_end|><|im_start|>assistant: "
    assert "ends answers with no token" not in notes
    # newlines around it, and nothing that generation is known to stop at
    template.write_text("{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n\n{% endfor %}")
    found = run_json(capsys, "data", "check", str(config), *overrides, "--no-score")[1]
    assert any("the template ends answers with no token, so no end is taught" in note for note in found["notes"])


def test_thoughts_and_tools_that_the_template_does_not_write_are_named(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [
        {"role": "assistant", "content": text, "reasoning": "hm"}
        for text in ("a quick brown dog", "the lazy dog jumps", "over the fox again")
    ]
    tools = [{"type": "function", "function": {"name": "jump", "parameters": {"type": "object", "properties": {}}}}]
    chats = [{"messages": [{"role": "user", "content": "the fox"}, answer]} for answer in answers]
    lines = [json.dumps(chat | ({"tools": tools} if number else {})) for number, chat in enumerate(chats)]
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(lines))
    config = write_config(tmp_path / "run.yaml", tiny_target, data)
    found = run_json(capsys, "data", "check", str(config), "--no-score")[1]
    wanted = "3 answers have a thought in 'reasoning_content', which the chat template does not write"
    assert any(note.startswith(wanted) for note in found["notes"])
    wanted = "2 conversations bring tools, which the chat template does not write"
    assert any(note.startswith(wanted) for note in found["notes"])


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The quick brown fox jumps over the lazy dog, and that is it.", "English"),
        ("Der Hund ist nicht so schnell wie der Fuchs, und das ist auch gut so.", "German"),
        ("Le chat et le chien sont dans la maison avec une souris.", "French"),
        ("El perro y el gato no son los más rápidos, pero lo que cuenta es el fin.", "Spanish"),
        ("敏捷的棕色狐狸跳过懒狗", "Chinese"),
        ("素早い茶色の狐がのろまな犬を飛び越える", "Japanese"),
        ("빠른 갈색 여우", "Korean"),
        ("Быстрая лиса", "Cyrillic"),
        ("x = f(y)", "Latin, other"),
        ("123 + 456 = 579", "no letters"),
    ],
)
def test_languages_are_guessed(text: str, language: str) -> None:
    assert guess_language(text) == language


def test_the_survey_counts() -> None:
    from draftsmith.data.conversation import Conversation

    ask, say = {"role": "user", "content": "the and of"}, {"role": "assistant", "content": "is that it"}
    thinks = {**say, "reasoning_content": "hm"}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    parts = {"role": "assistant", "content": [{"type": "text", "text": "<think>x</think>y"}]}
    chats = [
        Conversation("a:1", messages=[{"role": "system", "content": "s"}, ask, thinks, ask, say]),
        Conversation("a:2", messages=[ask, calls, {"role": "tool", "content": "2"}, parts]),
        Conversation("a:3", text="der die das und"),
    ]
    found = survey(chats)
    assert (found.conversations, found.answers, found.thinking, found.calls, found.with_system) == (3, 4, 2, 1, 1)
    assert dict(found.turns) == {2: 2, 0: 1}
    assert dict(found.languages) == {"English": 2, "German": 1}
    assert sum(survey(chats, every=2).languages.values()) == 2
    assert "50.0% with a thought, 25.0% call a tool; 66.7% of conversations have several" in "\n".join(found.lines())
