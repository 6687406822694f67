"""`data generate` and `init`: answers of a tiny target, stopped and continued, and the config that fits them."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith import cli
from draftsmith.config import TargetConfig, load_config
from draftsmith.data.conversations import read_conversations
from draftsmith.decode import answers
from draftsmith.decode.answers import AnswerOptions, invent_prompts, write_answers
from draftsmith.decode.generate import Answer
from draftsmith.decode.prompts import Prompt, bare_user_turn, encode_prompts, read_prompts, without
from draftsmith.decode.speculative import GreedyProposer, decode
from draftsmith.errors import UserError
from draftsmith.objective import decay_weights
from draftsmith.target.forward import Target
from draftsmith.target.load import load_target, load_tokenizer

GREEDY = AnswerOptions(max_new_tokens=12, temperature=0.0)
SAMPLED = AnswerOptions(max_new_tokens=12, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(TargetConfig(path=str(tiny_target)), "cpu", torch.float32)


@pytest.fixture(scope="module")
def bare_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same target without a chat template."""
    folder = tmp_path_factory.mktemp("bare") / "target"
    shutil.copytree(tiny_target, folder)
    tokenizer = load_tokenizer(TargetConfig(path=str(folder)))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> list[Prompt]:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"the quick {word}"} for word in ("fox", "dog", "brown fox and a lazy dog", "a", "it")]
    lines.append({"messages": [{"role": "system", "content": "far"}, {"role": "user", "content": "over there"}]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_prompts(path)


def records(path: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({record["prompt_index"] for record in found}) == len(found)
    return {record["prompt_index"]: record for record in sorted(found, key=lambda record: record["prompt_index"])}


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("\n  tell me {x}\n\nand more\n")
    plain = read_prompts(path)
    assert [(prompt.text, prompt.source) for prompt in plain] == [
        ("tell me {x}", f"{path}:2"),
        ("and more", f"{path}:4"),
    ]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    more = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    path.write_text(json.dumps({"messages": messages + more}) + "\n" + json.dumps({"prompt": "p", "messages": None}))
    asked = read_prompts(path)
    assert asked[0].messages == [*messages, more[0]]  # the target writes the last answer itself
    assert asked[1].as_messages() == [{"role": "user", "content": "p"}]
    assert without([*plain, *asked], [Prompt("", messages=[{"role": "user", "content": "p"}])]) == [*plain, asked[0]]
    with pytest.raises(UserError, match="--exclude: leaves out all 2 prompts"):
        without(plain, plain)


def test_answers_are_the_targets_own(target: Target, prompts: list[Prompt], tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    report = write_answers(target, prompts, tmp_path / "out.jsonl", GREEDY, listener=seen.append)
    found = records(tmp_path / "out.jsonl")
    assert list(found) == list(range(6))
    stops = set(target.stop_ids)
    for index, ids in enumerate(encode_prompts(prompts, target.tokenizer)):
        slow = decode(target, ids, GreedyProposer(), max_new_tokens=12, stop_ids=stops)
        text = target.tokenizer.decode([token for token in slow.tokens if token not in stops])
        assert found[index]["messages"] == [
            *prompts[index].as_messages(),
            {"role": "assistant", "content": text},
        ]
        assert found[index]["finish_reason"] == slow.finish_reason
        assert found[index]["answer_tokens"] == len(slow.tokens)
    assert report.written == 6
    assert report.tokens == sum(record["answer_tokens"] for record in found.values())
    assert report.checked == 6 - report.empty
    assert (seen[-1]["step"], seen[-1]["steps"], seen[-1]["eta_seconds"]) == (6, 6, 0.0)
    assert len(list(read_conversations([tmp_path / "out.jsonl"]))) == 6
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["options"] == {"max_new_tokens": 12, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}


def test_prompts_that_fill_the_positions_are_left_out_by_name(
    target: Target, prompts: list[Prompt], tmp_path: Path
) -> None:
    long = Prompt("long.jsonl:7", text="x " * target.geometry.max_position_embeddings)
    report = write_answers(target, [prompts[0], long, prompts[1]], tmp_path / "out.jsonl", GREEDY)
    assert list(records(tmp_path / "out.jsonl")) == [0, 2]
    assert report.too_long == report.to_json()["too_long"] == ["long.jsonl:7"]
    assert "left out, because they fill the target's positions: long.jsonl:7" in report.lines()


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_stopped_and_continued_is_the_same_and_repeats_nothing(
    target: Target,
    prompts: list[Prompt],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: AnswerOptions,
    torn: bool,
) -> None:
    write_answers(target, prompts, tmp_path / "whole.jsonl", options)
    output = tmp_path / "out.jsonl"
    real, asked = answers.generate, []

    def stops_early(target: Any, prompts: Any, *, indices: Any, **options: Any) -> Any:
        for count, answer in enumerate(real(target, prompts, indices=indices, **options)):
            if count == 2:
                raise KeyboardInterrupt
            yield answer

    def counting(target: Any, prompts: Any, *, indices: Any, **options: Any) -> Any:
        asked.extend(indices)
        return real(target, prompts, indices=indices, **options)

    monkeypatch.setattr(answers, "generate", stops_early)
    with pytest.raises(KeyboardInterrupt):
        write_answers(target, prompts, output, options)
    done = list(records(output))
    assert len(done) == 2
    if torn:
        with output.open("ab") as file:
            file.write(b'{"messages": [{"role"')
    monkeypatch.setattr(answers, "generate", counting)
    report = write_answers(target, prompts, output, options)
    assert sorted([*done, *asked]) == list(range(6))
    assert (report.found, report.written) == (2, 4)
    assert records(output) == records(tmp_path / "whole.jsonl")
    assert write_answers(target, prompts, output, options).written == 0


def test_other_work_in_the_output_is_refused(target: Target, prompts: list[Prompt], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    write_answers(target, prompts, output, GREEDY)
    before = output.read_bytes()
    with pytest.raises(UserError, match=r"holds other work \(options "):
        write_answers(target, prompts, output, SAMPLED)
    with pytest.raises(UserError, match=r"holds other work \(prompts 6 there, 5 here"):
        write_answers(target, prompts[:5], output, GREEDY)
    with pytest.raises(UserError, match="holds other work"):
        write_answers(target, [*prompts[:5], Prompt("", text="other")], output, GREEDY)
    assert output.read_bytes() == before
    (tmp_path / "mine.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"mine\.jsonl: exists and is not the output of this work"):
        write_answers(target, prompts, tmp_path / "mine.jsonl", GREEDY)
    output.write_bytes(before + b"edited\n")
    with pytest.raises(UserError, match=r"out\.jsonl:7: not a line that was written here"):
        write_answers(target, prompts, output, GREEDY)
    with pytest.raises(UserError, match="no prompts to answer"):
        write_answers(target, [], tmp_path / "none.jsonl", GREEDY)


def test_an_output_is_written_by_one_process(
    target: Target, prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = answers.generate

    def second_start(target: Any, prompts_: Any, **options: Any) -> Any:
        with pytest.raises(UserError, match="another process is writing it"):
            write_answers(target, prompts, tmp_path / "out.jsonl", GREEDY)
        return real(target, prompts_, **options)

    monkeypatch.setattr(answers, "generate", second_start)
    assert write_answers(target, prompts, tmp_path / "out.jsonl", GREEDY).written == 6


def test_a_full_disk_ends_the_work_in_one_line(
    target: Target, prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, real, calls = tmp_path / "out.jsonl", os.write, [0]

    def full(descriptor: int, data: bytes) -> int:
        calls[0] += 1
        if calls[0] < 3:
            return real(descriptor, data)
        return real(descriptor, data[:5])  # what still fits

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(UserError, match=r"out\.jsonl: cannot be written: 5 of"):
        write_answers(target, prompts, output, GREEDY)
    monkeypatch.setattr(os, "write", real)
    report = write_answers(target, prompts, output, GREEDY)
    assert (report.found, report.written) == (2, 4)
    assert len(records(output)) == 6

    def read_only(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(UserError, match="Read-only file system"):
        write_answers(target, prompts, tmp_path / "other.jsonl", GREEDY)


def test_a_target_without_a_template_continues_text(bare_target: Path, tmp_path: Path) -> None:
    target = load_target(TargetConfig(path=str(bare_target)), "cpu", torch.float32)
    write_answers(target, [Prompt("p:1", text="the quick")], tmp_path / "out.jsonl", GREEDY)
    record = records(tmp_path / "out.jsonl")[0]
    assert record["text"].startswith("the quick")
    assert len(record["text"]) > len("the quick")
    assert "messages" not in record
    with pytest.raises(UserError, match="p:2: chat messages, but the tokenizer has no chat template"):
        encode_prompts([Prompt("p:2", messages=[{"role": "user", "content": "a"}])], target.tokenizer)
    with pytest.raises(UserError, match="no user turn to invent prompts from"):
        invent_prompts(target, 3, tmp_path / "invented.jsonl")


def test_a_template_that_fails_names_the_prompt(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.tokenizer, "chat_template", "{{ raise_exception('no system turn, please') }}")
    with pytest.raises(UserError, match=r"p:7: the chat template fails on it: TemplateError: no system turn"):
        encode_prompts([Prompt("p:7", text="a")], target.tokenizer)


def test_prompts_are_invented_from_the_bare_user_turn(target: Target, tmp_path: Path) -> None:
    turn = bare_user_turn(target.tokenizer)
    assert target.tokenizer.decode(turn.opening) == "<|im_start|>user\n"
    assert target.tokenizer.decode([turn.stop_id]) == "<|im_end|>"
    notices: list[dict[str, Any]] = []
    output = tmp_path / "out.jsonl"
    invented = invent_prompts(target, 40, output, seed=1, temperature=2.0, listener=notices.append)
    lines = records(Path(f"{output}.prompts.jsonl"))
    assert list(lines) == list(range(40))
    usable = {record["prompt"] for record in lines.values() if record["finish_reason"] == "stop"} - {""}
    assert len(invented) == len(usable) > 5  # different random numbers for every one
    assert {prompt.text for prompt in invented} == usable
    cut = sum(record["finish_reason"] == "length" for record in lines.values())
    empty = sum(record["finish_reason"] == "stop" and not record["prompt"] for record in lines.values())
    counts = ((cut, "cut at 256 tokens"), (empty, "empty"), (40 - len(usable) - cut - empty, "repeated"))
    reasons = ", ".join(f"{number} {what}" for number, what in counts if number)
    text = f"{40 - len(usable)} of 40 invented prompts are left out: {reasons}"
    assert (notices[-1].get("text") == text) == (len(usable) < 40)
    assert invent_prompts(target, 40, output, seed=1, temperature=2.0) == invented
    with pytest.raises(UserError, match="holds other work"):
        invent_prompts(target, 40, output, seed=2, temperature=2.0)


def test_why_no_invented_prompt_is_usable_is_counted_and_nothing_is_kept(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, stop = tmp_path / "out.jsonl", bare_user_turn(target.tokenizer).stop_id
    assert stop is not None
    said = {0: ([5] * 4, "length"), 1: ([stop], "stop"), 2: ([5] * 4, "length")}

    def scripted(_target: Any, _prompts: Any, *, indices: Any, **_options: Any) -> Any:
        return (Answer(index, *said[index]) for index in indices)

    monkeypatch.setattr(answers, "generate", scripted)
    none = r"none of 3 invented prompts is usable: 2 cut at 4 tokens, 1 empty \(raise --max-new-tokens, .* 256 at most"
    with pytest.raises(UserError, match=none):
        invent_prompts(target, 3, output, max_new_tokens=4)
    none = r"usable: 2 cut at 256 tokens, 1 empty \(give --prompts\)"  # no other limit would help
    with pytest.raises(UserError, match=none):
        invent_prompts(target, 3, output, max_new_tokens=256)
    said |= {0: ([5, 6, stop], "stop"), 2: ([5, 6, stop], "stop")}
    notices: list[dict[str, Any]] = []
    (prompt,) = invent_prompts(target, 3, output, max_new_tokens=8, listener=notices.append)
    assert prompt.source == f"{output}.prompts.jsonl:0"
    assert notices[-1]["text"] == "2 of 3 invented prompts are left out: 1 empty, 1 repeated"


@pytest.mark.parametrize("wrong", [{"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"temperature": -1.0}])
def test_sampling_that_cannot_be_is_refused_before_a_file_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="sampling: "):
        AnswerOptions(**wrong)


@pytest.mark.parametrize("top_p", ["0", "-0.5", "1.5", "nan"])
@pytest.mark.parametrize(
    "command",
    [
        "eval d --target t --prompts p --temperature 1",
        "chat d --target t --temperature 1",
        "data generate o --target t --invent 3",
        "data regenerate o p --target t",
        "data regenerate o p --server http://s",
    ],
)
def test_a_top_p_that_cannot_be_sampled_with(capsys: pytest.CaptureFixture[str], command: str, top_p: str) -> None:
    assert cli.main([*command.split(), "--top-p", top_p]) == 2
    assert f"Invalid value for '--top-p': {top_p} is not above 0 and at most 1." in capsys.readouterr().err


def test_a_refused_start_does_not_block_the_corrected_one(
    target: Target, prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> Any:
        raise UserError("too little memory", where="decoding")

    monkeypatch.setattr(answers, "generate", refuses)
    with pytest.raises(UserError, match="too little memory"):
        write_answers(target, prompts, tmp_path / "out.jsonl", GREEDY)
    monkeypatch.undo()
    assert write_answers(target, prompts[:5], tmp_path / "out.jsonl", SAMPLED).written == 5


def test_data_generate_says_what_leaves_no_prompt(
    tiny_target: Path, prompts: list[Prompt], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = str(tmp_path / "prompts.jsonl")
    arguments = ["data", "generate", str(tmp_path / "o.jsonl"), "--target", str(tiny_target), "--device", "cpu"]
    assert cli.main([*arguments, "--prompts", asked, "--exclude", asked]) == 2
    assert "draftsmith: --exclude: leaves out all 6 prompts" in capsys.readouterr().err
    assert not (tmp_path / "o.jsonl").exists()


@pytest.mark.parametrize("target", ["demo", "{tmp}"])
def test_a_gguf_file_that_is_not_there_is_named_by_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    (tmp_path / "p.txt").write_text("the fox\n")
    arguments = ["data", "generate", str(tmp_path / "o.jsonl"), "--target", target.format(tmp=tmp_path)]
    arguments += ["--prompts", str(tmp_path / "p.txt"), "--device", "cpu", "--gguf-file", "x.gguf"]
    assert cli.main(arguments) == 2
    assert "holds no x.gguf (check --gguf-file)" in capsys.readouterr().err


def test_a_prompt_longer_than_the_positions_is_left_to_the_decoder_to_name(
    tiny_target: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would warn of indexing errors that never come."""
    tokenizer = load_tokenizer(TargetConfig(path=str(tiny_target)))
    tokenizer.model_max_length = 8
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    (ids,) = encode_prompts([Prompt("p:1", text="the quick fox " * 20)], tokenizer)
    tokenizer.chat_template = None
    encode_prompts([Prompt("p:1", text="the quick fox " * 20)], tokenizer)
    assert len(ids) > 8
    assert caplog.records == []
    tokenizer("the quick fox " * 20)
    assert "indexing errors" in caplog.text  # else the test would see nothing, whatever is said


def test_data_generate(
    tiny_target: Path, prompts: list[Prompt], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "answers.jsonl"
    arguments = ["data", "generate", str(output), "--target", str(tiny_target), "--device", "cpu", "--json"]
    arguments += ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "20", "--limit", "5"]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (result["written"], result["prompts"]) == (5, 5)
    assert "answer 5/5" in err
    assert list(records(output)) == [0, 1, 2, 3, 4]


def test_init_writes_what_train_takes(
    tiny_target: Path, tiny_chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tiny.yaml"
    assert cli.main(["init", str(tiny_target), str(tiny_chats), "--output", str(config)]) == 0
    assert f"draftsmith train {config} --plan" in capsys.readouterr().out
    run = load_config(config)
    assert run.target.path == str(tiny_target)
    assert (run.drafter.layers, run.drafter.taps) == (1, (1, 2, 3))
    assert run.drafter.mask_token_id == load_tokenizer(run.target).mask_token_id
    assert (
        "  gamma: null                 # decay of the slot weights; null: by rule, 7 for B=16\n" in config.read_text()
    )
    for override, gamma in (("drafter.block_size=4", 1.8), ("objective.gamma=3", 3), ("drafter.block_size=16", 7)):
        given = load_config(config, [override])
        weights = decay_weights(given.drafter.block_size, given.objective.gamma)
        assert weights[2] == pytest.approx(math.exp(-1 / gamma))
    assert (run.rows.length, run.rows.anchors) == (512, 80)
    text = config.read_text()
    assert "# tokenizer.mask_token; does not occur in the data looked at" in text

    assert cli.main(["init", str(tiny_target), str(tiny_chats), "--output", str(config)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert config.read_text() == text


def test_init_counts_half_a_surrogate_pair_and_goes_on(tiny_target: Path, tiny_chats: Path, tmp_path: Path) -> None:
    data = tmp_path / "halves.jsonl"
    broken = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b \\ud83d"}]}\n'
    data.write_text(broken + tiny_chats.read_text())
    assert cli.main(["init", str(tiny_target), str(data), "--output", str(tmp_path / "run.yaml")]) == 0


def test_init_reads_what_train_reads(
    tiny_target: Path, tiny_chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    for part in range(2):
        with gzip.open(folder / f"train-{part}.jsonl.gz", "wb") as file:
            file.write(tiny_chats.read_bytes())
    monkeypatch.setattr("draftsmith.pipeline.init.SAMPLE", 50)
    config = tmp_path / "tiny.yaml"
    assert cli.main(["init", str(tiny_target), str(folder), "--output", str(config)]) == 0
    assert load_config(config).data.train == (str(folder),)


def test_init_counts_the_rows_of_an_epoch_once(
    tiny_target: Path, tiny_chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last row is one too, though it is not full."""
    config = tmp_path / "tiny.yaml"
    assert cli.main(["init", str(tiny_target), str(tiny_chats), "--output", str(config)]) == 0
    text = config.read_text()
    (rows,) = re.findall(r"an epoch of this little data has about (\d+) rows", text)
    (tokens,) = re.findall(r"# Data: ([\d,]+) tokens", text)
    assert int(rows) == -(-int(tokens.replace(",", "")) // 512)
    assert f"# about {6 * int(rows)} updates" in text


@pytest.mark.parametrize(
    ("target", "data", "message"),
    [
        ("nowhere/at/all", "chats.jsonl", "nowhere/at/all"),
        (None, "none.jsonl", "no such data file"),
        (None, "empty.jsonl", "is empty"),
        (None, "broken.jsonl", "broken.jsonl:2: not valid JSON"),
        (None, "asks.jsonl", "none of the first 1 conversations can be taught"),
    ],
)
def test_init_refuses(
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    target: str | None,
    data: str,
    message: str,
) -> None:
    chat = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c d"}]})
    (tmp_path / "chats.jsonl").write_text(chat + "\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl").write_text("\n{\n")
    (tmp_path / "asks.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    config = tmp_path / "new.yaml"
    assert cli.main(["init", target or str(tiny_target), str(tmp_path / data), "-o", str(config)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not config.exists()
