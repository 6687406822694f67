"""Configs: what is wrong is named by its key, with the nearest valid name, in one line."""

from __future__ import annotations

import importlib.util
import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from draftsmith.config import RunConfig, load_config, parse_config
from draftsmith.errors import UserError

MINIMAL: dict[str, Any] = {"target": {"path": "demo"}, "data": {"train": "chats.jsonl"}}
TEXT = "target: {path: demo}\ndata: {train: chats.jsonl}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problem(content: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        parse_config(content, where="run.yaml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("run.yaml: ")
    return message


def test_minimal_config_and_its_published_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, TEXT))
    assert config.data.train == ("chats.jsonl",)
    assert (config.rows.length, config.rows.anchors, config.drafter.block_size) == (3072, 512, 16)
    assert (config.optimizer.lr, config.optimizer.warmup, config.optimizer.clip) == (6e-4, 0.04, 1.0)
    assert config.optimizer.weight_decay == 0.0


def test_overrides_are_read_as_yaml_and_make_missing_sections(tmp_path: Path) -> None:
    overrides = ["drafter.taps=[1, 3]", "training.steps=20", "data.train=other.jsonl", "optimizer.lr=1.0e-3"]
    overrides += ["pipeline.targets=[cpu, cpu]", "drafter.causal=false", "target.gguf_file="]
    config = load_config(write(tmp_path, TEXT + "drafter:\n"), overrides)
    assert config.drafter.taps == (1, 3)
    assert config.training.steps == 20
    assert config.data.train == ("other.jsonl",)
    assert config.optimizer.lr == 1e-3
    assert config.pipeline.targets == ("cpu", "cpu")
    assert config.drafter.causal is False
    assert config.target.gguf_file == ""


def test_standard_input_is_a_dash_although_yaml_reads_a_list_of_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, TEXT)
    assert load_config(file, ["data.train=-", "data.held_out= - "]).data.train == ("-",)
    assert load_config(file, ["data.train=[-, b.jsonl]"]).data.train == ("-", "b.jsonl")
    listed = write(tmp_path, "target: {path: demo}\ndata:\n  train:\n    - -\n    - {path: -, weight: 2}\n")
    plain, weighted = load_config(listed).data.train
    assert (plain, getattr(weighted, "path", None)) == ("-", "-")


@pytest.mark.parametrize("pattern", ["*.jsonl", "*", "**/a?.jsonl.gz", "*.jsonl: x"])
def test_a_pattern_of_files_is_text_although_a_star_begins_something_else_in_yaml(tmp_path: Path, pattern: str) -> None:
    file = write(tmp_path, TEXT)
    for value in (pattern, f" {pattern} ", json.dumps(pattern), json.dumps([pattern])):
        assert load_config(file, [f"data.train={value}"]).data.train == (pattern,)
    with pytest.raises(UserError, match=r"""not valid YAML: '\[\*\]' \(.* needs quotes inside: 'data\.train="…"'\)"""):
        load_config(file, ["data.train=[*]"])
    assert load_config(file, ["data.train=[&a x.jsonl, *a]"]).data.train == ("x.jsonl", "x.jsonl")
    nothing = write(tmp_path, "target: {path: demo}\ndata:\n  train:\n    -\n")
    with pytest.raises(UserError, match=r"data\.train"):
        load_config(nothing)


def test_on_and_off_are_words_although_yaml_reads_booleans(tmp_path: Path) -> None:
    file = write(tmp_path, TEXT + "compile: {enabled: off, evidence: off}\ntraining: {tensorboard: off}\n")
    config = load_config(file)
    assert (config.compile.enabled, config.compile.evidence) == ("off", "off")
    assert config.training.tensorboard is False
    config = load_config(file, ["compile.enabled=on", "compile.evidence=warn", "training.tensorboard=on"])
    assert (config.compile.enabled, config.compile.evidence) == ("on", "warn")
    assert config.training.tensorboard is True
    assert load_config(file, ["compile.evidence=off", "compile.enabled=auto"]).compile.evidence == "off"


def test_a_word_that_the_field_does_not_know_stays_wrong(tmp_path: Path) -> None:
    for override in ("compile.evidence=on", "compile.on_recompile=off", "drafter.attention=off"):
        with pytest.raises(UserError, match=override.split("=")[0]):
            load_config(write(tmp_path, TEXT), [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no sections"),
        ("- a\n- b", "holds no sections"),
        ("target: [", "run.yaml:2: not valid YAML"),
        ("target: {path: demo}\n\tdata: x", "run.yaml:2: not valid YAML"),
        ("target: {path: demo}\n", "key 'data' is missing"),
        (TEXT + "rows: {length: 64}\nrows: {anchors: 3}", "run.yaml:4: not valid YAML: 'rows' occurs twice, first in"),
        (
            TEXT + "rows:\n  anchors: 3\n  anchors: 4",
            "run.yaml:5: not valid YAML: 'anchors' occurs twice, first in line 4",
        ),
    ],
)
def test_broken_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path, text + "\n"))
    assert message in str(caught.value)


def test_a_key_may_stand_where_a_merged_section_has_it_too(tmp_path: Path) -> None:
    merged = "data: {train: a, template_options: {x: &x {k: 1, l: 2}, y: {<<: *x, k: 3}}}\ntarget: {path: demo}\n"
    assert load_config(write(tmp_path, merged)).data.template_options["y"] == {"k": 3, "l": 2}


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (TEXT, ["training.steps=six"], "command line: training.steps: Input should be a valid integer"),
        (TEXT, ["training.step=6"], "command line: unknown key 'training.step' (did you mean 'steps'?)"),
        (TEXT, ["trainin.steps=6"], "command line: unknown key 'trainin' (did you mean 'training'?)"),
        (TEXT, ["data.train=[{pth: a}]"], "command line: unknown key 'data.train.0.pth'"),
        (TEXT, ["data.train=[{path: a, path: b}]"], "command line: the value of 'data.train' is not valid YAML"),
        (TEXT, ["rows.length=64"], "command line: rows: anchors is 512, but a row of 64"),
        (TEXT + "rows: {length: six}\n", ["rows.length=seven"], "command line: rows.length: Input should be a valid"),
        (TEXT + "rows: {length: six}\n", ["training.steps=3"], "run.yaml: rows.length: Input should be a valid"),
        (TEXT + "rows: {length: 64}\n", ["training.steps=3"], "run.yaml: rows: anchors is 512, but a row of 64"),
    ],
)
def test_whose_fault_it_is(tmp_path: Path, text: str, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path, text), overrides)
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(message)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: no such config file \(draftsmith init writes one\)"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r": is a folder, not a config file \(draftsmith init writes one\)"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("target: ä".encode("latin-1"))
    with pytest.raises(UserError, match="cannot be read"):
        load_config(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.layers", "'drafter.layers' is not section.key=value"),
        ("=3", "'=3' is not section.key=value"),
        ("target.path.x=3", "'path' in 'target.path.x' is a value, not a section"),
        ("drafter.taps=[1, 2", "the value of 'drafter.taps' is not valid YAML"),
    ],
)
def test_broken_overrides(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path, TEXT), [override])
    assert str(caught.value).startswith(f"command line: {message}")


@pytest.mark.parametrize(
    ("section", "key", "nearest"),
    [
        ("drafter", "block_sizes", "block_size"),
        ("drafter", "blocksize", "block_size"),
        ("rows", "anchor", "anchors"),
        ("optimizer", "learning_rat", None),
        ("training", "row_per_update", "rows_per_update"),
        ("data", "trainn", "train"),
        ("target", "paths", "path"),
    ],
)
def test_an_unknown_key_names_the_nearest(section: str, key: str, nearest: str | None) -> None:
    message = problem({**MINIMAL, section: {**MINIMAL.get(section, {}), key: 1}})
    assert f"unknown key '{section}.{key}'" in message
    if nearest is None:
        assert "valid: betas, clip" in message
    else:
        assert f"did you mean '{nearest}'?" in message


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"train": [{"pth": "a"}]}}, "run.yaml: unknown key 'data.train.0.pth' (did you mean 'path'?)"),
        ({"data": {"train": {"pth": "a"}}}, "run.yaml: unknown key 'data.train.pth' (did you mean 'path'?)"),
        ({"anchors": {"per_document": {"flor": 1}}}, "'anchors.per_document.flor' (did you mean 'floor'?)"),
        ({"target": {"pth": "demo"}}, "run.yaml: unknown key 'target.pth' (did you mean 'path'?)"),
    ],
)
def test_a_misspelt_key_is_named_and_not_the_one_that_is_missing_for_it(sections: Any, message: str) -> None:
    assert problem({**MINIMAL, **sections}).endswith(message)


def test_an_unknown_section_names_the_nearest() -> None:
    assert "unknown key 'draft' (did you mean 'drafter'?)" in problem({**MINIMAL, "draft": {}})


def test_every_wrong_key_is_counted() -> None:
    message = problem({**MINIMAL, "rows": {"lenght": 3, "length": "long", "anchors": 0}})
    assert "and 2 more" in message


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("drafter", {"layers": "five"}, "drafter.layers: Input should be a valid integer"),
        ("drafter", {"layers": 2.5}, "drafter.layers: Input should be a valid integer"),
        ("drafter", {"block_size": 129}, "drafter.block_size: Input should be less than or equal to 128"),
        ("drafter", {"block_size": 1}, "drafter.block_size: Input should be greater than or equal to 2"),
        ("drafter", {"mask_token_id": -1}, "drafter.mask_token_id: Input should be greater than or equal to 0"),
        ("drafter", {"attention": "sdpa"}, "drafter.attention: Input should be 'auto', 'flex' or 'dense'"),
        ("drafter", {"taps": [1, 3, 1]}, "taps [1, 3, 1] names a layer twice"),
        (
            "drafter",
            {"layers": 2, "layer_types": ["full_attention"]},
            "layer_types names 1 layers, drafter.layers is 2",
        ),
        ("drafter", {"layers": 1, "layer_types": ["sliding_attention"]}, "so sliding_window must be set"),
        ("drafter", {"sliding_window": 64}, "no entry of layer_types is sliding_attention"),
        ("rows", {"length": 8}, "rows.length: Input should be greater than or equal to 16"),
        ("rows", {"anchors": 0}, "rows.anchors: Input should be greater than or equal to 1"),
        ("rows", 7, "rows: Input should be a section of keys and values"),
        ("target", "demo", "target: Input should be a section of keys and values (write the model as target.path)"),
        ("pipeline", {"targets": None}, "pipeline.targets: Input should be a list"),
        ("anchors", {"per_document": 3}, "anchors.per_document: Input should be a section of keys and values"),
        (
            "data",
            {"train": "a", "held_out_share": 0.9},
            "data.held_out_share: Input should be less than or equal to 0.5",
        ),
        ("data", {"train": {"a": 1}}, "data.train"),
        ("data", {"train": []}, "data.train is empty (name a file, folder or dataset)"),
        ("data", {"train": None}, "data.train is empty (name a file, folder or dataset)"),
        ("data", {"train": ""}, "data.train is empty (name a file, folder or dataset)"),
        ("data", {"train": "a", "held_out": None}, "data.held_out is empty (name a file, folder or dataset)"),
        ("data", {"train": ["a", None]}, "run.yaml: data.train.1: Input should be a path, or a section with one"),
        ("data", {"train": ["a", ""]}, "run.yaml: data.train.1: Input should not be empty"),
        ("data", {"train": {"path": "a", "weight": 0}}, "run.yaml: data.train.weight: Input should be greater than 0"),
        ("data", {"train": "a", "template_options": {"a": float("nan")}}, "data.template_options: Input should be"),
        ("data", {"train": "a", "template_options": {"a": [float("inf")]}}, "data.template_options: Input should be"),
        ("data", {"train": "a", "template_options": {"day": date(2024, 7, 26)}}, "data.template_options: Input should"),
        ("rows", {"length": 512, "anchors": 512}, "rows: anchors is 512, but a row of 512 tokens has at most 511"),
        ("training", {"steps": True}, "training.steps: Input should be a number, not true"),
        ("drafter", {"layers": True}, "drafter.layers: Input should be a number, not true"),
        ("drafter", {"taps": [1, False]}, "drafter.taps: Input should be a number, not false"),
        ("rows", {"anchors": True}, "rows.anchors: Input should be a number, not true"),
        ("objective", {"gamma": True}, "objective.gamma: Input should be a number, not true"),
        ("objective", {"chunk": True}, "objective.chunk: Input should be a number, not true"),
        ("objective", {"chunk": 0}, "objective.chunk: Input should be greater than or equal to 1 or 'auto'"),
        ("optimizer", {"betas": [True, 0.9]}, "optimizer.betas: Input should be a number, not true"),
        ("anchors", {"per_document": {"floor": True}}, "anchors.per_document.floor: Input should be a number, not"),
        ("data", {"train": [{"path": "a", "weight": True}]}, "data.train.0.weight: Input should be a number, not true"),
        ("optimizer", {"lr": 0}, "optimizer.lr: Input should be greater than 0"),
        ("optimizer", {"lr": float("inf")}, "optimizer.lr: Input should be a finite number"),
        ("optimizer", {"betas": [1.5, 0.9]}, "optimizer.betas.0: Input should be less than 1"),
        ("optimizer", {"betas": [0.9, -0.1]}, "optimizer.betas.1: Input should be greater than or equal to 0"),
        ("training", {"epochs": float("inf")}, "training.epochs: Input should be a finite number"),
        ("training", {"seed": 2**64}, "training.seed: Input should be less than 4294967296"),
        ("optimizer", {"name": "sgd"}, "optimizer.name: Input should be 'adamw' or 'muon'"),
        ("pipeline", {"targets": []}, "pipeline.targets: Input should have at least one entry"),
        ("objective", {"labels": "logits"}, "objective.labels: Input should be 'data', 'kl' or 'tv'"),
    ],
)
def test_wrong_values_name_their_key(section: str, values: Any, message: str) -> None:
    assert message in problem({**MINIMAL, section: values})


def test_more_drafters_than_rows_per_update() -> None:
    content = {**MINIMAL, "pipeline": {"drafters": ["cpu"] * 3}, "training": {"rows_per_update": 2}}
    message = problem(content)
    assert "pipeline.drafters has 3 devices but training.rows_per_update is 2" in message
    assert "multiple of 3" in message
    content["training"] = {"rows_per_update": 3}
    assert len(parse_config(content).pipeline.drafters) == 3


def test_a_chunk_must_hold_a_block() -> None:
    content = {**MINIMAL, "objective": {"chunk": 14}}
    assert "objective.chunk 14 cannot hold the 15 taught slots of a block" in problem(content)
    parse_config({**MINIMAL, "objective": {"chunk": 15}})


@pytest.mark.parametrize(
    ("anchors", "block_size", "chunk", "chunks"),
    [(512, 16, 1920, 4), (1024, 8, 1792, 4), (12, 4, 64, 1), (3, 2, 64, 1)],
)
def test_chunks_share_a_row_evenly(anchors: int, block_size: int, chunk: int, chunks: int) -> None:
    content = {**MINIMAL, "rows": {"anchors": anchors}, "drafter": {"block_size": block_size}}
    assert parse_config(content).head_chunk(block_size) == chunk
    blocks = chunk // (block_size - 1)
    assert -(-anchors // blocks) == chunks  # whole blocks to a chunk
    assert parse_config({**content, "objective": {"chunk": 99}}).head_chunk(block_size) == 99


def test_a_chunk_holds_the_blocks_of_the_drafter_that_training_starts_from() -> None:
    config = parse_config({**MINIMAL, "rows": {"anchors": 3}})
    assert config.drafter.block_size == 16
    assert config.head_chunk(128) >= 127


def test_unknown_variant() -> None:
    assert "drafter.variant 'eagle' is unknown (valid: 'dflash')" in problem(
        {**MINIMAL, "drafter": {"variant": "eagle"}}
    )


def test_the_page_of_all_keys_is_current() -> None:
    """docs/config.md, by `python scripts/config_page.py --write`."""
    root = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location("config_page", root / "scripts" / "config_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (root / "docs" / "config.md").read_text(encoding="utf-8") == module.page()


@pytest.mark.parametrize(
    "key",
    [
        *("drafter.layers", "drafter.intermediate_size", "drafter.head_dim", "drafter.heads", "rows.length"),
        *("training.rows_per_update", "training.epochs", "training.steps", "pipeline.prefetch", "pipeline.queue"),
    ],
)
def test_numbers_beyond_sense_are_refused_where_they_stand(key: str) -> None:
    """They would be overflows, or hours, later."""
    section, name = key.split(".")
    assert f"{key}: Input should be less than or equal to" in problem({**MINIMAL, section: {name: 10**26}})


@pytest.mark.parametrize(("section", "name"), [("data", "chat_template"), ("target", "path"), ("training", "output")])
def test_a_path_with_a_nul_is_refused(section: str, name: str) -> None:
    content: dict[str, Any] = {key: dict(value) for key, value in MINIMAL.items()}
    content.setdefault(section, {})[name] = "a\0b"
    assert f"{section}.{name}: a path holds no NUL character" in problem(content)


def test_a_config_is_frozen() -> None:
    config = parse_config(MINIMAL)
    with pytest.raises(ValidationError):
        config.drafter.layers = 3  # type: ignore[misc]


def test_the_fingerprint_is_of_what_is_learned() -> None:
    def fingerprint(**sections: Any) -> str:
        return parse_config({**MINIMAL, **sections}).fingerprint()

    assert fingerprint() == fingerprint(training={"output": "elsewhere"})
    assert fingerprint() == fingerprint(drafter={"layers": 5})
    assert fingerprint() == fingerprint(pipeline={"targets": ["cpu"] * 3, "drafters": ["cpu"], "devices_per_rank": 2})
    watching: dict[str, Any] = {"on_recompile": "warn", "evidence": "off", "evidence_every": 7}
    assert fingerprint() == fingerprint(compile=watching)
    assert fingerprint() == fingerprint(training={"eval_every": 3, "eval_rows": 1, "activation_checkpointing": True})
    assert fingerprint() != fingerprint(compile={"enabled": "on"})
    assert fingerprint() != fingerprint(drafter={"layers": 4})
    assert fingerprint() != fingerprint(training={"seed": 1})


def test_a_config_survives_json() -> None:
    config = parse_config({**MINIMAL, "drafter": {"taps": [1, 3]}})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_user_errors_are_one_line() -> None:
    error = UserError("what\n  happened", where="a.yaml", fix="do\nthat")
    assert str(error) == "a.yaml: what happened (do that)"
    assert str(UserError("bare")) == "bare"
