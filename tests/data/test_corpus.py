"""From files to rows: the split, the policies, the counts, and the errors."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_tokenizer import STRICT, THINKING, build_tokenizer

from draftsmith.config import DataConfig
from draftsmith.data import problems as reasons
from draftsmith.data.corpus import HELD_OUT_TWIN, TOO_LONG, Corpus, choose_held_out, count_anchors, prepare_corpus
from draftsmith.data.report import REFUSED, TRUNCATED, UNTAUGHT
from draftsmith.data.stream import RowSource
from draftsmith.data.tables import TokenTable
from draftsmith.errors import UserError

S, B = 64, 8


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def prepare(tokenizer: Any, train: Any, length: int = S, seed: int = 0, **options: Any) -> Corpus:
    return prepare_corpus(
        DataConfig(train=train, **options),
        tokenizer,
        length=length,
        seed=seed,
        block_size=B,  # type: ignore[call-arg]
    )


def documents(rows: RowSource | None) -> dict[str, tuple[list[int], list[bool]]]:
    """Every document of an epoch by name."""
    assert rows is not None
    found = [d for packed in range(rows.rows_per_epoch) for d in rows.row_documents(packed)]
    return {d.name: (d.tokens.tolist(), d.loss_mask.tolist()) for d in found}


def numbered(count: int) -> list[dict[str, Any]]:
    return [chat(f"question {i}", f"answer {i * i}") for i in range(count)]


def test_rows_hold_exactly_what_was_tokenised(tokenizer: Any, tmp_path: Path) -> None:
    lines = [*numbered(30), {"text": "plain text is taught from end to end"}]
    path = write(tmp_path / "a.jsonl", lines)
    corpus = prepare(tokenizer, path, held_out_share=0)
    found = documents(corpus.train)
    assert list(found) != [f"{path}:{i}" for i in range(1, 32)], "packed, not in file order"
    assert len(found) == 31
    for number, line in enumerate(lines[:-1], start=1):
        tokens, mask = found[f"{path}:{number}"]
        whole = tokenizer.apply_chat_template(line["messages"], return_dict=False)
        assert tokens == whole[: len(tokens)]
        assert tokenizer.decode(np.array(tokens)[mask]) == line["messages"][1]["content"] + "<|im_end|>"
    assert all(found[f"{path}:31"][1])
    assert corpus.held_out is None
    assert np.flatnonzero(corpus.used_ids).tolist() == sorted({t for tokens, _ in found.values() for t in tokens})


def test_the_report_counts_what_the_rows_hold(tokenizer: Any, tmp_path: Path) -> None:
    corpus = prepare(tokenizer, write(tmp_path / "a.jsonl", [*numbered(200), *numbered(3)]), held_out_share=0.2)
    report = corpus.report
    assert (report.conversations, report.used, report.duplicates, report.plain_text) == (203, 203, 3, 0)
    assert report.stop_token == "<|im_end|>"
    assert report.max_token_id == np.flatnonzero(corpus.used_ids)[-1]
    assert report.held_out is not None
    assert report.train.conversations + report.held_out.conversations == 203
    for rows, part in ((corpus.train, report.train), (corpus.held_out, report.held_out)):
        masks = [mask for _, mask in documents(rows).values()]
        assert part.documents == len(masks) == part.conversations
        assert part.tokens == sum(map(len, masks))
        assert part.taught_tokens == sum(map(sum, masks))
        slots = [slow_slots(mask, a) for mask in masks for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
        assert part.anchors == len(slots)
        assert part.slots_per_anchor == pytest.approx(np.mean(slots))
        assert rows is not None
        real = sum(rows.row(i).real_tokens for i in range(rows.rows_per_epoch))
        assert part.waste == 1 - real / (part.rows * S)


def slow_slots(mask: list[bool], anchor: int) -> int:
    """Slots that a block at `anchor` is taught, straight from the rule: while every one before was."""
    taught = 0
    for slot in range(1, B):
        if anchor + slot >= len(mask) or not mask[anchor + slot]:
            break
        taught += 1
    return taught


def test_anchors_are_counted_as_the_rule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    masks = [[rng.random() < 0.8 for _ in range(rng.randrange(1, 60))] for _ in range(200)]
    used = [rng.randrange(1, len(mask) + 1) if rng.random() < 0.3 else len(mask) for mask in masks]
    starts = np.cumsum([0, *map(len, masks)])
    none = np.empty(0)
    table = TokenTable(Path(), none, np.concatenate(masks), starts, none, none, none, none, "", {})
    expected = []
    for mask, length in zip(masks, used, strict=True):
        short = mask[:length]
        slots = [slow_slots(short, a) for a in range(length - 1) if short[a] and short[a + 1]]
        expected.append([sum(short), len(slots), sum(slots)])
    for piece in (1, 50, 1000, 1 << 20):
        monkeypatch.setattr("draftsmith.data.corpus._PIECE", piece)
        assert count_anchors(table, np.array(used), B).tolist() == expected


def test_the_held_out_share_is_stable_under_reordering_and_growth(tokenizer: Any, tmp_path: Path) -> None:
    lines = numbered(300)
    shuffled = random.Random(0).sample(lines, 300)

    def held_out_contents(name: str, content: list[Any], seed: int = 0) -> set[tuple[int, ...]]:
        corpus = prepare(tokenizer, write(tmp_path / name, content), held_out_share=0.1, seed=seed)
        return {tuple(tokens) for tokens, _ in documents(corpus.held_out).values()}

    first = held_out_contents("a.jsonl", lines)
    assert 10 < len(first) < 60
    assert held_out_contents("b.jsonl", shuffled, seed=5) == first
    grown = held_out_contents("c.jsonl", [chat("new", f"word {i}") for i in range(50)] + lines + lines[:100])
    assert grown >= first


def test_choosing_leaves_neither_side_of_a_small_corpus_empty() -> None:
    keys = np.array([2**63, 2**62, 2**63 + 5, 2**62], dtype=np.uint64)
    assert choose_held_out(keys, 0.0).tolist() == [False] * 4
    assert choose_held_out(keys, 0.01).tolist() == [False, True, False, True]  # nearest, with its duplicate
    assert choose_held_out(keys, 0.5).tolist() == [False, True, False, True]
    assert choose_held_out(np.array([3, 1, 2], dtype=np.uint64), 0.5).tolist() == [False, True, True]
    assert choose_held_out(np.array([7, 7], dtype=np.uint64), 0.5).tolist() == [False, False]
    many = np.random.default_rng(0).integers(0, 2**64, 100_000, dtype=np.uint64)
    assert abs(choose_held_out(many, 0.02).mean() - 0.02) < 0.002


def test_held_out_files_are_never_trained_on(tokenizer: Any, tmp_path: Path) -> None:
    train, held = write(tmp_path / "t.jsonl", numbered(10)), write(tmp_path / "h.jsonl", numbered(3)[1:])
    corpus = prepare(tokenizer, train, held_out=held, held_out_share=0.5)
    assert set(documents(corpus.held_out)) == {f"{held}:1", f"{held}:2"}
    assert set(documents(corpus.train)) == {f"{train}:{i}" for i in (1, 4, 5, 6, 7, 8, 9, 10)}
    assert corpus.report.counts == {(REFUSED, HELD_OUT_TWIN): 2}
    assert corpus.report.conversations == 12
    assert corpus.report.used == 10
    with pytest.raises(UserError, match=r"no usable conversation \(refused: 10 × is in the held-out files as well"):
        prepare(tokenizer, train, held_out=train)


def test_too_long_truncate_and_skip(tokenizer: Any, tmp_path: Path) -> None:
    long_answer, long_question = chat("Hi", "word " * 200), chat("word " * 200, "Hi you")
    path = write(tmp_path / "a.jsonl", [chat("Hi", "Hello you"), long_answer, long_question])
    corpus = prepare(tokenizer, path, too_long="truncate", held_out_share=0)
    found = documents(corpus.train)
    assert set(found) == {f"{path}:1", f"{path}:2"}
    tokens, mask = found[f"{path}:2"]
    assert tokens == tokenizer.apply_chat_template(long_answer["messages"], return_dict=False)[:S]
    assert mask[-1]
    counts = corpus.report.counts
    assert counts == {(TRUNCATED, TOO_LONG): 1, (REFUSED, f"{TOO_LONG}, and nothing taught in what fits"): 1}
    assert [i.source for i in corpus.report.incidents] == [f"{path}:2", f"{path}:3"]
    assert "a row holds 64" in corpus.report.incidents[0].detail

    skipping = prepare(tokenizer, path, too_long="skip", held_out_share=0)
    assert set(documents(skipping.train)) == {f"{path}:1"}
    assert skipping.report.counts == {(REFUSED, TOO_LONG): 2}


def test_a_split_conversation_stays_together_and_loses_only_the_turn_that_is_too_long(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(THINKING)
    thought = "<think>\nhm\n</think>\n\n"
    turns = ["One?", thought + "Yes", "Two? " + "word " * 40, thought + "No"]
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    path = write(tmp_path / "a.jsonl", [{"messages": messages}, *numbered(3)])
    corpus = prepare(tokenizer, path, too_long="skip", held_out_share=0, length=48)
    assert corpus.report.split == 1
    assert corpus.report.counts == {(UNTAUGHT, TOO_LONG): 1}
    assert corpus.report.used == corpus.report.train.documents == 4
    whole = prepare(tokenizer, path, held_out_share=0, length=200)
    assert (whole.report.train.documents, whole.report.train.conversations) == (5, 4)
    for share in (0.1, 0.3, 0.5):
        split = prepare(tokenizer, path, held_out_share=share, length=200)
        names = [[d.name for i in range(rows.rows_per_epoch) for d in rows.row_documents(i)]
                 for rows in (split.train, split.held_out) if rows is not None]  # fmt: skip
        assert sorted(part.count(f"{path}:1") for part in names) == [0, 2]


def test_every_unusable_conversation_is_counted_and_named(tokenizer: Any, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", [*([{"messages": [{"role": "user", "content": "Hi"}]}] * 5), {"text": ""}, *numbered(4)]
    )
    report = prepare(tokenizer, path).report
    assert report.counts == {(REFUSED, reasons.NO_ASSISTANT): 5, (REFUSED, reasons.NO_TEXT): 1}
    text = report.lines()
    assert text[0] == "10 conversations in 1 file: 4 used, 6 refused, 0 truncated, 0 duplicates"
    assert text[-2] == f"refused: 5 × no assistant turn: {path}:1, {path}:2, {path}:3 and 2 more"
    assert text[-1] == f"refused: 1 × no text: {path}:6"
    machine = json.loads(json.dumps(report.to_json()))
    assert machine["train"]["documents"] + machine["held_out"]["documents"] == 4
    assert machine["incidents"][0] == {
        "effect": "refused",
        "reason": "no assistant turn",
        "count": 5,
        "first": [f"{path}:1", f"{path}:2", f"{path}:3"],
    }
    report.incidents.write(tmp_path / "refused.jsonl")
    written = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
    assert [entry["source"] for entry in written] == [f"{path}:{i}" for i in range(1, 7)]
    with pytest.raises(UserError, match="cannot be written"):
        report.incidents.write(tmp_path)


def test_a_malformed_record_is_counted_like_any_other(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": [{"content": "who?"}]}, *numbered(4)])
    with open(path, "a") as file:
        file.write('{"messages": [{"role": "us')
    report = prepare(tokenizer, path).report
    assert report.counts == {(REFUSED, reasons.MALFORMED): 2}
    assert report.lines()[-1].startswith(
        f"refused: 2 × malformed: {path}:1 (message 1 has no role), {path}:6 (not valid"
    )
    assert report.layouts == {"messages": 4}
    assert (report.conversations, report.plain_text) == (6, 0)


def test_nothing_usable_is_an_error_that_says_why(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}, {"text": ""}])
    with pytest.raises(UserError, match=r"a.jsonl: no usable conversation \(refused: 1 × no assistant turn: .*:1; "):
        prepare(tokenizer, path)


def test_a_template_that_fails_on_all_is_an_error_with_its_own_words(tmp_path: Path) -> None:
    lines = [{"messages": [{"role": "system", "content": "x"}, *chat("a", "b")["messages"]]}] * 3
    with pytest.raises(UserError, match=r"3 × the chat template fails on it.*no system turn, please"):
        prepare(build_tokenizer(STRICT), write(tmp_path / "a.jsonl", lines))


def test_the_template_file(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, template = write(tmp_path / "a.jsonl", numbered(5)), tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    )
    corpus = prepare(tokenizer, path, chat_template=str(template), held_out_share=0)
    assert corpus.report.stop_token == "</s>"
    assert tokenizer.decode(documents(corpus.train)[f"{path}:1"][0]) == "<s>question 0</s><s>answer 0</s>"
    with pytest.raises(UserError, match=r"none.jinja: no such chat template"):
        prepare(tokenizer, path, chat_template=str(tmp_path / "none.jinja"))
    template.write_text("{% if %}")
    with pytest.raises(UserError, match=r"chat.jinja:1: not a valid Jinja template"):
        prepare(tokenizer, path, chat_template=str(template))

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(UserError, match=r"chat.jinja: cannot be read: .*Permission denied"):
        prepare(tokenizer, path, chat_template=str(template))


def test_batches_do_not_show(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", [*numbered(40), {"messages": [{"role": "user", "content": "Hi"}]}])
    whole = prepare(tokenizer, path)
    monkeypatch.setattr("draftsmith.data.tables._BATCH_CHARACTERS", 100)
    seen: list[int] = []
    small = prepare_corpus(
        DataConfig(train=path, cache="off"),
        tokenizer,
        length=S,
        seed=0,
        block_size=B,
        progress=seen.append,  # type: ignore
    )
    assert len(seen) > 5
    assert seen[-1] == 41
    assert small.report == whole.report
    assert small.train.fingerprint() == whole.train.fingerprint()
    assert prepare(tokenizer, path, seed=1).train.fingerprint() != whole.train.fingerprint()


def test_weights_give_places_in_an_epoch(tokenizer: Any, tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{name}.jsonl", [chat(f"{name} {i}", f"word {i}") for i in range(100)]) for name in "abc"
    ]
    weights = (2.0, 0.25, 1.5)
    entries = [{"path": path, "weight": weight} for path, weight in zip(files, weights, strict=True)]
    corpus = prepare(tokenizer, entries, held_out_share=0.1)
    rows = corpus.train
    counts: dict[str, list[int]] = {path: [] for path in files}
    found = Counter(d.name for packed in range(rows.rows_per_epoch) for d in rows.row_documents(packed))
    held = set(documents(corpus.held_out))
    for path in files:
        counts[path] = [found[f"{path}:{i}"] for i in range(1, 101) if f"{path}:{i}" not in held]
    assert not held & set(found)
    assert set(counts[files[0]]) == {2}
    assert 0.1 < np.mean(counts[files[1]]) < 0.4
    assert set(counts[files[1]]) == {0, 1}
    assert set(counts[files[2]]) == {1, 2}
    assert 1.35 < np.mean(counts[files[2]]) < 1.65
    assert corpus.report.left_out == counts[files[1]].count(0)
    assert f"{corpus.report.left_out} conversations are left out by weights below 1" in corpus.report.lines()
    assert corpus.report.train.documents == sum(found.values()) == rows.documents
    # Which ones is a matter of content: another seed or order of files moves nobody.
    turned = prepare(tokenizer, entries[::-1], held_out_share=0.1, seed=9).train
    assert Counter(d.name for p in range(turned.rows_per_epoch) for d in turned.row_documents(p)) == found
    with pytest.raises(UserError, match="the weights leave no conversation to train on"):
        prepare(tokenizer, {"path": write(tmp_path / "d.jsonl", [chat("a", "b c")] * 3), "weight": 1e-9})


def test_pack_off_is_one_document_a_row(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", numbered(20))
    corpus = prepare(tokenizer, path, held_out_share=0, pack="off")
    assert corpus.report.train.rows == corpus.report.train.documents == 20
    assert all(len(corpus.train.row_documents(row)) == 1 for row in range(20))
    assert corpus.report.train.waste == 1 - corpus.report.train.tokens / (20 * S) > 0.3
    packed = prepare(tokenizer, path, held_out_share=0)
    assert packed.report.train.waste < corpus.report.train.waste
    assert documents(packed.train) == documents(corpus.train)


def test_files_of_every_layout_train_together(tokenizer: Any, tmp_path: Path) -> None:
    shared = [
        {"conversations": [{"from": "human", "value": f"q {i}"}, {"from": "gpt", "value": "a b"}]} for i in range(3)
    ]
    image = {
        "messages": [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant", "content": "x y"}]
    }
    paths = [
        write(tmp_path / "a.jsonl", [*numbered(2), image]),
        write(tmp_path / "b.jsonl", shared),
        write(tmp_path / "c.jsonl", [{"instruction": "Hi", "output": "Hello you"}, {"prompt": "alone"}]),
    ]
    report = prepare(tokenizer, paths, held_out_share=0).report
    assert report.layouts == {"messages": 3, "sharegpt": 3, "alpaca": 1, "prompt": 1}
    assert report.used == 6
    assert report.counts == {(REFUSED, reasons.NOT_TEXT): 1, (REFUSED, reasons.NO_ASSISTANT): 1}
    assert report.incidents[0].detail == "a part of type 'image_url' in message 1"
