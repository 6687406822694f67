"""Features on disk: what is read is what the target computes, training learns the same, and nothing foreign is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.cli import main
from draftsmith.config import RunConfig
from draftsmith.data.corpus import Corpus, prepare_corpus
from draftsmith.errors import UserError
from draftsmith.pipeline import assemble
from draftsmith.pipeline import features as features_room
from draftsmith.pipeline import run as run_module
from draftsmith.pipeline.features import (
    Wanted,
    describe_run,
    document_key,
    from_fp8,
    predict,
    to_fp8,
    wanted_by,
    write_features,
)
from draftsmith.pipeline.plan import make_plan
from draftsmith.pipeline.run import train
from draftsmith.pipeline.stored import StoredTarget, open_features
from draftsmith.target.forward import Target
from draftsmith.target.geometry import read_geometry
from draftsmith.target.load import load_target, load_tokenizer

CPU = torch.device("cpu")
TOLERANCE = {"bf16": 2**-8, "fp8": 2**-4}  # of a token's largest value: eight and four bits of mantissa, rounded


def corpus_of(config: RunConfig, tokenizer: Any) -> Corpus:
    return prepare_corpus(
        config.data,
        tokenizer,
        length=config.rows.length,
        seed=config.training.seed,
        block_size=config.drafter.block_size,
    )


def written(
    config: RunConfig, folder: Path, dtype: str = "bf16", shard_bytes: int = 20_000
) -> tuple[Target, Corpus, Wanted]:
    geometry, tokenizer = read_geometry(config.target), load_tokenizer(config.target)
    target = load_target(config.target, CPU, torch.float32)
    corpus, wanted = corpus_of(config, tokenizer), wanted_by(config, geometry, dtype)  # type: ignore[arg-type]
    write_features(target, corpus, wanted, describe_run(config, geometry, tokenizer), folder, shard_bytes=shard_bytes)
    return target, corpus, wanted


def opened(config: RunConfig, folder: Path, taps: tuple[int, ...] | None = None) -> StoredTarget:
    geometry, tokenizer = read_geometry(config.target), load_tokenizer(config.target)
    taps = taps or wanted_by(config, geometry, "bf16").taps
    return open_features(folder, config, geometry, tokenizer, taps, CPU, torch.float32)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_what_is_read_is_what_the_target_computes(tiny_run: Any, tmp_path: Path, dtype: str) -> None:
    config = tiny_run(objective={"labels": "kl", "chunk": 16})
    target, corpus, wanted = written(config, tmp_path / "features", dtype)
    assert len(list((tmp_path / "features").glob("features-*.safetensors"))) > 2
    stored = opened(config, tmp_path / "features")
    for number in (0, 1, corpus.train.rows_per_epoch):
        row = corpus.train.row(number)
        arguments = (row.tokens_S, row.document_S, row.positions_S, wanted.taps, True)
        exact, read = target.features(*arguments), stored.features(*arguments)
        real = row.document_S >= 0
        for one, other, close in (
            (exact.taps_SF, read.taps_SF, TOLERANCE[dtype]),
            (exact.last_SH, read.last_SH, TOLERANCE["bf16"]),
        ):
            assert one is not None
            assert other is not None
            by_tap, read_by_tap = (part[real].unflatten(-1, (-1, 32)) for part in (one, other))
            error = (by_tap - read_by_tap).abs().amax(-1) / by_tap.abs().amax(-1)
            assert error.max() < close
            assert (other[~real] == 0).all()
    # Other taps of those that are there, in any order.
    some = (wanted.taps[1], wanted.taps[0])
    read = stored.features(row.tokens_S, row.document_S, row.positions_S, some)
    assert read.last_SH is None
    whole = stored.features(*arguments).taps_SF.unflatten(-1, (-1, 32))
    assert torch.equal(read.taps_SF.unflatten(-1, (-1, 32)), whole[:, [1, 0]])
    head, theirs = stored.head(), target.head()
    assert torch.equal(head.head_VH, theirs.head_VH)
    assert head.head_VH.data_ptr() == head.embedding_VH.data_ptr()  # tied, as the target's
    assert torch.equal(head.final_scale_H, theirs.final_scale_H)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "close"), [("bf16", 0.003), ("fp8", 0.05)])
def test_training_learns_the_same(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, close: float
) -> None:
    online = run_module.train(tiny_run("online", training={"steps": 6}))
    config = tiny_run("stored", training={"steps": 6})
    written(config, tmp_path / "features", dtype)

    def no_target(*_: object, **__: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(assemble, "load_target", no_target)
    reading = tiny_run("stored", training={"steps": 6}, target={"features": str(tmp_path / "features")})
    stored = run_module.train(reading)
    assert stored.losses == pytest.approx(online.losses, rel=close)
    assert stored.losses != online.losses
    assert stored.losses[-1] < stored.losses[0]


def test_stopped_in_the_middle_it_goes_on(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, folder = tiny_run(), tmp_path / "features"
    written(config, tmp_path / "whole")
    real, calls = Target.features, [0]

    def stops(self: Target, *arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] > 12:
            raise KeyboardInterrupt
        return real(self, *arguments, **options)

    monkeypatch.setattr(Target, "features", stops)
    with pytest.raises(KeyboardInterrupt):
        written(config, folder)
    monkeypatch.setattr(Target, "features", real)
    with pytest.raises(UserError, match="is not complete"):
        opened(config, folder)
    (folder / "features-00099.safetensors.new").write_bytes(b"torn")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("features-*.safetensors")}
    assert before
    _, corpus, wanted = written(config, folder)
    assert all(path.stat().st_mtime_ns == before[path] for path in before)
    assert not list(folder.glob("*.new"))
    one, other = opened(config, folder), opened(config, tmp_path / "whole")
    for number in range(corpus.train.rows_per_epoch):
        row = corpus.train.row(number)
        arguments = (row.tokens_S, row.document_S, row.positions_S, wanted.taps)
        assert torch.equal(one.features(*arguments).taps_SF, other.features(*arguments).taps_SF)
    # Complete already: nothing is computed again.
    monkeypatch.setattr(Target, "features", stops)
    calls[0] = 0
    tokenizer = load_tokenizer(config.target)
    geometry = read_geometry(config.target)
    target = load_target(config.target, CPU, torch.float32)
    calls[0] = 0
    assert write_features(target, corpus, wanted, describe_run(config, geometry, tokenizer), folder) == 0
    assert calls[0] == 0


def test_rows_may_be_packed_anew_and_other_data_is_not_found(tiny_run: Any, tmp_path: Path) -> None:
    config, folder = tiny_run(), tmp_path / "features"
    _, corpus, wanted = written(config, folder)
    longer = tiny_run(rows={"length": 128, "anchors": 12}, training={"seed": 5})
    row = corpus_of(longer, load_tokenizer(config.target)).train.row(0)
    stored = opened(longer, folder)
    assert stored.features(row.tokens_S, row.document_S, row.positions_S, wanted.taps).taps_SF.abs().sum() > 0
    row = corpus.train.row(0)
    changed = row.tokens_S.clone()
    changed[3] += 1
    with pytest.raises(UserError, match=r"holds no features of a document of \d+ tokens"):
        stored.features(changed, row.document_S, row.positions_S, wanted.taps)


def test_features_of_something_else_are_refused(tiny_run: Any, tiny_target: Path, tmp_path: Path) -> None:
    config, folder = tiny_run(), tmp_path / "features"
    with pytest.raises(UserError, match=r"holds no features \(draftsmith data features"):
        opened(config, folder)
    written(config, folder)
    opened(config, folder)
    with pytest.raises(UserError, match="other taps"):
        opened(config, folder, taps=(0, 5))
    with pytest.raises(UserError, match="no last hidden states"):
        opened(tiny_run(objective={"labels": "kl", "chunk": 16}), folder)
    with pytest.raises(UserError, match="another template options"):
        opened(tiny_run(data={"template_options": {"enable_thinking": False}}), folder)
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="another template "):
        opened(tiny_run(data={"chat_template": str(template)}), folder)
    # The same architecture with one changed weight far inside a layer.
    other = tmp_path / "other"
    shutil.copytree(tiny_target, other)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(UserError, match="another weights"):
        opened(tiny_run(target={"path": str(other)}), folder)
    # Where there are no weights at all, there is nothing to compare; that is what features are for.
    weights.unlink()
    opened(tiny_run(target={"path": str(other)}), folder)
    geometry = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**geometry, "vocab_size": 400}))
    with pytest.raises(UserError, match="another target"):
        opened(tiny_run(target={"path": str(other)}), folder)


def test_the_size_is_known_before(tiny_run: Any, tmp_path: Path) -> None:
    for labels, dtype in (("data", "bf16"), ("kl", "fp8")):
        config = tiny_run(objective={"labels": labels, "chunk": 16})
        folder = tmp_path / f"features-{dtype}"
        geometry = read_geometry(config.target)
        wanted = wanted_by(config, geometry, dtype)  # type: ignore[arg-type]
        corpus = corpus_of(config, load_tokenizer(config.target))
        told = predict(corpus, wanted, geometry, folder, torch.float32)
        assert (told.there, told.missing) == (0, told.bytes)
        written(config, folder, dtype, shard_bytes=1 << 30)
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert told.bytes == pytest.approx(size, rel=0.05)  # headers of the files, and the manifest
        head = (folder / "head.safetensors").stat().st_size
        halved = predict(corpus, wanted, geometry, tmp_path, torch.bfloat16)
        assert told.bytes - halved.bytes == pytest.approx(head / 2, rel=0.05)
        again = predict(corpus, wanted, geometry, folder, torch.float32)
        assert again.missing < 0.05 * told.bytes
        assert " are there, " in again.line()
        assert told.tokens == sum(
            {document_key(d.tokens): len(d) for part in (corpus.train, corpus.held_out) if part is not None
             for row in range(part.rows_per_epoch) for d in part.row_documents(row)}.values()
        )  # fmt: skip
        assert told.line().endswith("free")


def test_fp8_keeps_every_tap_to_its_own_scale() -> None:
    taps = torch.randn(5, 12) * torch.tensor([1e-6, 1.0, 1e4]).repeat_interleave(4)
    taps[3] = 0
    stored, scales = to_fp8(taps, 3)
    assert (stored.dtype, scales.shape) == (torch.float8_e4m3fn, (5, 3))
    back = from_fp8(stored, scales)
    by_tap = taps.unflatten(-1, (3, 4))
    error = (back.unflatten(-1, (3, 4)) - by_tap).abs().amax(-1)
    assert (error <= by_tap.abs().amax(-1) * 2**-4).all()
    assert (back[3] == 0).all()


def test_the_plan_needs_no_weights(tiny_run: Any, tiny_target: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_target, bare)
    (bare / "model.safetensors").unlink()
    assert make_plan(tiny_run(target={"path": str(bare)})).spec.taps


def test_a_drafter_to_start_from_decides_the_taps(tiny_run: Any) -> None:
    first = run_module.train(tiny_run("first", drafter={"taps": [0, 4]}, training={"steps": 1}))
    later = tiny_run("later", drafter={"init": str(first.checkpoint), "taps": [1, 2]})
    assert wanted_by(later, read_geometry(later.target), "bf16").taps == (0, 4)


def test_a_plan_refuses_what_a_start_would(tiny_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same line, and without a weight loaded; what a start takes, the plan takes."""
    folder = tmp_path / "features"

    def planned(output: str = "run", **sections: Any) -> tuple[int, str]:
        config = tiny_run(output, **sections)
        path = tmp_path / "run.yaml"
        path.write_text(config.model_dump_json())
        code = main(["train", str(path), "--plan"])
        said = capsys.readouterr().err
        if code:
            with pytest.raises(UserError) as error:
                train(config)
            assert said == f"draftsmith: {error.value}\n"
            capsys.readouterr()
        return code, said

    stored = {"target": {"features": str(folder)}}
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        (stored, "holds no features"),
        ({"decoding": {"every": 2, "prompts": str(tmp_path / "nope.jsonl")}}, "nope.jsonl"),
        ({"decoding": {"every": 2, "device": "cuda:99"}}, "does not exist"),
        ({"data": {"held_out_share": 0.0}, "decoding": {"every": 2}}, "no held-out conversations to decode"),
        ({"training": {"trackers": ["mlflow"]}}, "mlflow"),
    )
    for number, (sections, line) in enumerate(cases):
        code, said = planned(f"run-{number}", **sections)
        assert (code, line in said) == (2, True), said
    written(tiny_run(), folder)
    assert planned(**stored) == (0, "")


def test_a_manifest_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(UserError, match=r"manifest\.json: cannot be written: "):
        features_room._write_manifest(tmp_path, {})


def test_what_fails_while_features_are_written_is_not_another_process(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError), features_room._locked(tmp_path):
        raise BlockingIOError(11, "a terminal that cannot take more")
