"""True τ in the loop: decoding and the training forward accept the same drafts, the best is kept, a difference ends
the run, and a decoder that fails costs the figures only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.blocks import make_draft_batch
from draftsmith.config import RunConfig, TargetConfig
from draftsmith.decode import walk as walk_module
from draftsmith.decode.rounds import stop_ids_of
from draftsmith.decode.speculative import GreedyProposer, decode
from draftsmith.decode.walk import accepted_from_every_token, answer_row
from draftsmith.drafter import DrafterSpec, DraftModel, build_masks, load_drafter
from draftsmith.drafter.native import save_drafter
from draftsmith.errors import UserError
from draftsmith.observe.events import Event, EventLog, read_events
from draftsmith.observe.live import notable_line
from draftsmith.observe.status import read_status
from draftsmith.pipeline import decoder_process, held_out
from draftsmith.pipeline.decoder_process import compare
from draftsmith.pipeline.held_out import HeldOut, held_out_prompts
from draftsmith.pipeline.plan import make_plan
from draftsmith.pipeline.run import train
from draftsmith.target.forward import Target
from draftsmith.target.load import load_target

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = 30


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(TargetConfig(path=str(tiny_target)), "cpu", torch.float32)


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 300, (5 + i,), generator=generator).tolist() for i in range(3)]


@pytest.fixture(scope="module")
def drafter(target: Target, prompts: list[list[int]]) -> DraftModel:
    """Learns the target's own answers to the prompts, so that decoding accepts drafts of every length."""
    spec = DrafterSpec(
        hidden_size=32, layers=1, heads=4, kv_heads=2, head_dim=8, intermediate_size=64, rms_norm_eps=1e-6,
        rope_theta=1e4, max_position_embeddings=512, vocab_rows=target.geometry.vocab_rows, target_layers=6,
        taps=(1, 3), block_size=5, mask_token_id=2, layer_types=("full_attention",),
    )  # fmt: skip
    torch.manual_seed(0)
    model = DraftModel(spec)
    head, stops = target.head(), stop_ids_of(target)
    rows = []
    for prompt in prompts:
        answer = decode(target, prompt, GreedyProposer(), max_new_tokens=TOKENS, stop_ids=stops)
        rows.append(answer_row(prompt, answer.tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(120):
        row = rows[step % len(rows)]
        features = target.features(row.tokens_S, row.document_S, row.positions_S, spec.taps)
        anchors = int(row.loss_mask_S.sum()) - 1
        batch = make_draft_batch(
            row, anchors=anchors, block_size=5, mask_token_id=2, slot_weights_B=torch.ones(5), chunk=5,
            kinds=spec.kinds, seed=(0,), with_tiles=False,
        )  # fmt: skip
        hidden = model(
            features.taps_SF, head.embed(batch.inputs_Q), batch.context_positions_S, batch.block_positions_Q,
            build_masks(batch, "dense"),
        )  # fmt: skip
        place = batch.anchors_N[:, None] + torch.arange(5)
        labels = row.tokens_S[place.clamp(max=row.tokens_S.numel() - 1)]
        labels[place >= row.tokens_S.numel()] = -100
        labels[:, 0] = -100
        loss = torch.nn.functional.cross_entropy(head.logits(hidden), labels.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def test_walk_and_decoding_are_equal_block_by_block(target: Target, prompts, drafter: DraftModel) -> None:
    found = compare(drafter, target, prompts, TOKENS)
    assert found["decode"] > 1.5  # drafts are accepted, and not all
    assert found["decode"] < 5
    assert found["agree"] == 1.0
    assert found["walk_whole"] == found["decode_whole"]
    # The whole figures, and not only those that are compared, agree with decoding done plainly.
    stops = stop_ids_of(target)
    proposer = decoder_process.DrafterProposer(drafter, target.head())
    rounds = [
        decode(target, prompt, proposer, max_new_tokens=TOKENS, stop_ids=stops).accepted_per_round for prompt in prompts
    ]
    flat = [tokens for each in rounds for tokens in each]
    assert found["decode"] == sum(flat) / len(flat)
    assert (found["tokens"], found["forwards"]) == (sum(flat), len(flat))
    assert (found["answers"], found["too_long"]) == (len(prompts), 0)


def test_no_answer_goes_beyond_the_positions_of_the_target(target: Target, prompts, drafter: DraftModel) -> None:
    positions = target.geometry.max_position_embeddings
    longest = [3] * positions
    found = compare(drafter, target, [prompts[0], longest[:-9], longest], TOKENS)
    assert (found["answers"], found["too_long"]) == (2, 1)
    assert found["walk_whole"] == found["decode_whole"]
    alone = compare(drafter, target, prompts[:1], TOKENS)
    assert found["tokens"] - alone["tokens"] <= 8  # nine positions are left, and the first token is the prefill's


@pytest.mark.parametrize("wrong", ["features", "positions", "mask token"])
def test_a_training_forward_that_is_not_what_serves_is_seen(
    target: Target, prompts, drafter: DraftModel, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three classical mistakes, each in the walk alone."""
    features, make = Target.features, make_draft_batch

    def shifted(self: Target, *args: Any, **kwargs: Any) -> Any:
        found = features(self, *args, **kwargs)
        return type(found)(found.taps_SF.roll(1, 0), found.last_SH)

    def other_positions(row: Any, **kwargs: Any) -> Any:
        batch = make(row, **kwargs)
        batch.block_positions_Q.add_(7)
        return batch

    if wrong == "features":
        monkeypatch.setattr(Target, "features", shifted)
    elif wrong == "positions":
        monkeypatch.setattr(walk_module, "make_draft_batch", other_positions)
    else:
        monkeypatch.setattr(
            walk_module, "make_draft_batch", lambda row, **kwargs: make(row, **{**kwargs, "mask_token_id": 7})
        )
    found = compare(drafter, target, prompts, TOKENS)
    assert found["agree"] < 0.9
    assert abs(found["walk_whole"] / found["decode_whole"] - 1) > 0.05


def test_accepted_from_every_token_by_hand(target: Target, prompts, drafter: DraftModel) -> None:
    """One anchor at a time, with the cache of decoding instead of a mask."""
    prompt, head = prompts[0], target.head()
    answer = decode(target, prompt, GreedyProposer(), max_new_tokens=TOKENS, stop_ids=stop_ids_of(target))
    row = answer_row(prompt, answer.tokens)
    features = target.features(row.tokens_S, row.document_S, row.positions_S, drafter.spec.taps)
    accepted = accepted_from_every_token(drafter, head, row, features.taps_SF)
    assert sorted(accepted) == list(range(len(prompt), row.tokens_S.numel() - 1))
    features = target.features(row.tokens_S, row.document_S, row.positions_S, drafter.spec.taps).taps_SF
    block = torch.full((5,), 2)
    for place in list(accepted)[::4]:
        cache = drafter.new_cache(512, torch.device("cpu"), torch.float32)
        with torch.no_grad():
            drafter.extend(cache, features[:place], 0)
            block[0] = row.tokens_S[place]
            drafts = head.logits(drafter.draft(cache, head.embed(block), place)[1:]).argmax(-1)
        text = row.tokens_S[place + 1 : place + 5]
        right = (drafts[: len(text)] == text).long().cumprod(0).sum()
        assert accepted[place] == int(right)


def decoding_run(tiny_run: Any, name: str, **decoding: Any) -> RunConfig:
    training = {"steps": 8, "save_every": 0, "eval_every": 0, "keep": 1, "rows_per_update": 2}
    settings = {"every": 4, "limit": 2, "max_new_tokens": 12, **decoding}
    return tiny_run(name, training=training, decoding=settings)


def of_kind(folder: Path, kind: str) -> list[Event]:
    return [event for event in read_events(folder / "events.jsonl") if event["kind"] == kind]


def test_a_run_decodes_keeps_the_best_and_ends_with_its_true_tau(tiny_run, tiny_target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the quick brown fox\nover the lazy dog\n")
    plain = train(tiny_run("plain", training={"steps": 8, "save_every": 0, "eval_every": 0, "rows_per_update": 2}))
    result = train(decoding_run(tiny_run, "decoded", prompts=str(prompts)))
    assert result.losses == plain.losses  # looking changes nothing
    taus = of_kind(result.folder, "tau")
    assert taus[-1]["step"] == 8
    assert all(event["agree"] == 1.0 and event["answers"] == 2 for event in taus)
    facts = read_status(result.folder).to_json()
    assert facts["tau"]["decode"] == taus[-1]["decode"]
    best = max(taus, key=lambda event: event["decode"])
    link = result.folder / "checkpoints" / "best"
    assert link.resolve().name == f"step-{best['step']:07d}"
    load_drafter(link)
    assert notable_line(taus[-1]) == (
        f"held-out prompts at step 8: τ {taus[-1]['decode']:.3f} decoded, {taus[-1]['walk']:.3f} walked along the text"
    )


def test_prompts_come_from_held_out_conversations(tiny_run, tiny_target: Path) -> None:
    plan = make_plan(decoding_run(tiny_run, "prompts", limit=5))
    prompts = held_out_prompts(plan)
    assert len(prompts) == 5
    texts = [load_target(plan.config.target, "cpu", torch.float32).tokenizer.decode(prompt) for prompt in prompts]
    for text in texts:
        assert text.startswith("<|im_start|>user\n")
        assert text.endswith("<|im_start|>assistant\n")
    assert held_out_prompts(make_plan(decoding_run(tiny_run, "again", limit=5))) == prompts
    bare = make_plan(tiny_run("bare", data={"held_out_share": 0.0}, decoding={"every": 4}))
    with pytest.raises(UserError, match=r"no held-out conversations to decode \(set decoding.prompts to a file\)"):
        held_out_prompts(bare)


class Stub:
    """Stands in for the decoder's process: answers from a list."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, Any] | None]) -> None:
        self.asked: list[int] = []
        monkeypatch.setattr(held_out, "_start", lambda *_: None)

        def ask(_self: HeldOut, request: dict[str, Any]) -> dict[str, Any] | None:
            self.asked.append(request["step"])
            answer = answers.pop(0)
            return answer and {"step": request["step"], "agree": 0.5, **answer}

        monkeypatch.setattr(HeldOut, "_ask", ask)


def figures(decode: float, walk: float | None = None) -> dict[str, Any]:
    walk = decode if walk is None else walk
    return {"decode": decode, "walk": walk, "decode_whole": decode, "walk_whole": walk, "too_long": 0}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    for step in range(1, 10):
        (tmp_path / "run" / "checkpoints" / f"step-{step:07d}").mkdir(parents=True)
    return tmp_path / "run"


def serve(tiny_run, folder: Path, offers: list[int], ends: list[str] | None = None, **decoding: Any) -> HeldOut:
    plan = make_plan(decoding_run(tiny_run, "stubbed", **decoding))
    with EventLog(folder / "events.jsonl") as log:
        watcher = HeldOut(plan, folder, log, lambda: (ends if ends is not None else []).append("end"))
        for step in offers:
            watcher.offer(step, folder / "checkpoints" / f"step-{step:07d}")
            watcher.finish(lambda: False)
        watcher.close()
    return watcher


def test_the_best_is_spared_and_known_after_a_resume(tiny_run, run_folder: Path, monkeypatch) -> None:
    stub = Stub(monkeypatch, [figures(1.5), figures(2.5), figures(2.0), figures(2.2)])
    watcher = serve(tiny_run, run_folder, [1, 2, 3], every=1)
    assert stub.asked == [1, 2, 3]
    assert [path.name for path in watcher.spared()] == ["step-0000002"]
    assert os.readlink(run_folder / "checkpoints" / "best") == "step-0000002"
    again = serve(tiny_run, run_folder, [4], every=1)
    assert [path.name for path in again.spared()] == ["step-0000002"]
    shutil.rmtree(run_folder / "checkpoints" / "step-0000002")
    assert serve(tiny_run, run_folder, [], every=1).spared() == []


def test_only_the_first_checkpoint_after_each_multiple_is_decoded(tiny_run, run_folder: Path, monkeypatch) -> None:
    stub = Stub(monkeypatch, [figures(1.5)] * 9)
    serve(tiny_run, run_folder, [1, 2, 4, 5, 7, 8, 9], every=3)
    assert stub.asked == [4, 7, 9]


def test_a_difference_ends_the_run_and_a_small_one_does_not(tiny_run, run_folder: Path, monkeypatch) -> None:
    ends: list[str] = []
    Stub(monkeypatch, [figures(2.0, 2.09), figures(2.0, 2.2), figures(2.0, 2.2)])
    watcher = serve(tiny_run, run_folder, [1, 2, 3], ends, every=1)
    assert ends == ["end"]
    assert watcher.failure.startswith(
        "what trains is not what serves: at step 2 decoding reaches τ 2.000, the training forward over the same text "
        "2.200 (10.0% apart"
    )
    Stub(monkeypatch, [figures(2.0, 3.0)])
    watcher = serve(tiny_run, run_folder, [4], ends, every=1, on_disagreement="warn")
    assert (ends, watcher.failure) == (["end"], "")
    assert any("what trains is not" in problem for problem in read_status(run_folder).problems)


def test_a_disagreement_saves_and_ends_the_run_with_an_error(tiny_run, monkeypatch: pytest.MonkeyPatch) -> None:
    Stub(monkeypatch, [figures(2.0, 3.0)])
    config = decoding_run(tiny_run, "parity", every=1)
    config = config.model_copy(update={"training": config.training.model_copy(update={"steps": 3000})})
    with pytest.raises(UserError, match="what trains is not what serves: at step"):
        train(config)
    folder = Path(config.training.output)
    steps = of_kind(folder, "step")
    assert len(steps) < 3000
    assert of_kind(folder, "checkpoint")[-1]["step"] == steps[-1]["step"]
    assert [event["reason"] for event in of_kind(folder, "end")] == ["failed"]


def test_a_decoder_that_fails_costs_its_figures_only(tiny_run, run_folder: Path, monkeypatch) -> None:
    Stub(monkeypatch, [{"error": "OSError: torn"}, figures(1.5), None])
    watcher = serve(tiny_run, run_folder, [1, 2, 3], every=1)
    watcher.offer(4, run_folder)
    watcher.finish(lambda: False)
    texts = [event["text"] for event in of_kind(run_folder, "error")]
    assert texts == [
        "step 1 could not be decoded: OSError: torn",
        "held-out prompts are not decoded any more: its process ended without a word",
    ]
    assert len(of_kind(run_folder, "tau")) == 1


def test_the_process_answers_a_bad_checkpoint_by_its_error(target, drafter, tiny_target: Path, tmp_path: Path) -> None:
    import io

    save_drafter(drafter, tmp_path / "good")
    setting = {
        "target": {"path": str(tiny_target)}, "target_dtype": "float32", "drafter_dtype": "float32", "device": "cpu",
        "prompts": [[5, 6, 7]], "limit": 1, "max_new_tokens": 8,
    }  # fmt: skip
    requests = [setting, {"step": 1, "folder": str(tmp_path / "bad")}, {"step": 2, "folder": str(tmp_path / "good")}]
    out = io.StringIO()
    decoder_process.serve(io.StringIO("".join(json.dumps(each) + "\n" for each in requests)), out)
    bad, good = (json.loads(line) for line in out.getvalue().splitlines())
    assert (bad["step"], good["step"]) == (1, 2)
    assert "no drafter here" in bad["error"]
    assert good["agree"] == 1.0


def test_a_decoder_that_hangs_holds_no_run_up_for_ever(tiny_run, run_folder: Path, monkeypatch) -> None:
    """Its process says nothing: given up after the run's limit, and ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*_: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "import time; time.sleep(250)"]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    monkeypatch.setattr(held_out, "_start", start)
    config = decoding_run(tiny_run, "hangs", every=1)
    config = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"hang_seconds": 1.0})})
    began = time.monotonic()
    with EventLog(run_folder / "events.jsonl") as log:
        watcher = HeldOut(make_plan(config), run_folder, log, lambda: None)
        watcher.offer(1, run_folder / "checkpoints" / "step-0000001")
        watcher.finish(lambda: False)
        watcher.close()
    assert time.monotonic() - began < 120
    assert started[0].returncode is not None
    (text,) = [event["text"] for event in of_kind(run_folder, "error")]
    assert text == "held-out prompts are not decoded any more: nothing came for 1 s (pipeline.hang_seconds)"


def test_a_decoder_in_the_middle_of_an_answer_ends_with_a_run_that_is_killed() -> None:
    """The child never looks at its input. Its parent's end is told by the pipe that both write to."""
    child = (
        "import os, time; from draftsmith.pipeline.parent import end_with; "
        "end_with(os.getppid(), every=0.05); print('watches', flush=True); time.sleep(250)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    run = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "watches\n"
    run.kill()
    assert run.communicate(timeout=120)[0] == ""


def test_a_decoder_whose_run_died_while_it_was_starting_ends() -> None:
    """Its parent is another process by then; its input stays open, as where something else holds the pipe."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [sys.executable, "-m", "draftsmith.pipeline.decoder_process", str(gone.pid)]
    decoder = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        assert decoder.wait(120) == 1
    finally:
        decoder.kill()


def test_the_run_says_who_it_is_to_its_decoder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport sys; sys.stdin.read(); print(sys.argv[-1], flush=True)\n")
    program.chmod(0o755)
    monkeypatch.setattr(held_out.sys, "executable", str(program))
    with (tmp_path / "errors").open("wb") as errors:
        assert held_out._start(errors).communicate()[0] == f"{os.getpid()}\n"


def test_a_decoder_that_is_still_starting_ends_with_the_run(tiny_run, run_folder: Path, monkeypatch) -> None:
    """It reads nothing yet, and what it is to decode fills the pipe."""
    started: list[subprocess.Popen[str]] = []

    class Starting(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, _command: list[str], **named: Any) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(250)"], **named)
            started.append(self)

    monkeypatch.setattr(held_out.subprocess, "Popen", Starting)
    monkeypatch.setattr(held_out, "held_out_prompts", lambda _plan: [[7] * 200_000])
    with EventLog(run_folder / "events.jsonl") as log:
        watcher = HeldOut(make_plan(decoding_run(tiny_run, "starts", every=1)), run_folder, log, lambda: None)
        watcher.offer(1, run_folder / "checkpoints" / "step-0000001")
        deadline = time.monotonic() + 60
        while not started and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        watcher.close()
        assert started[0].returncode is not None
        assert not watcher._thread.is_alive()
    assert of_kind(run_folder, "error") == []


def test_the_last_checkpoint_is_decoded_once(tiny_run, run_folder: Path, monkeypatch) -> None:
    stub = Stub(monkeypatch, [figures(1.5)] * 2)
    folder = run_folder / "checkpoints" / "step-0000004"
    with EventLog(run_folder / "events.jsonl") as log:
        watcher = HeldOut(make_plan(decoding_run(tiny_run, "once")), run_folder, log, lambda: None)
        for last in (False, True):
            watcher.offer(4, folder, last=last)
            watcher.finish(lambda: False)
        watcher.close()
    assert stub.asked == [4]
