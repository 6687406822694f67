"""The trainer's use of it on the CPU: eager by name, and compiled with a backend that traces and stops there."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from functools import partial, wraps

import pytest
import torch

import draftsmith.pipeline.compiling as compiling
from draftsmith.blocks import make_draft_batch
from draftsmith.compiled import Gate
from draftsmith.compiled.aside import aside_of
from draftsmith.drafter import model
from draftsmith.errors import UserError
from draftsmith.observe.events import read_events
from draftsmith.pipeline.assemble import made_up_drafts, make_replicas
from draftsmith.pipeline.compile_commands import _random_head
from draftsmith.pipeline.environment import write_record
from draftsmith.pipeline.link import Link, Stop
from draftsmith.pipeline.plan import make_plan
from draftsmith.pipeline.proof import (
    FLEX_KERNELS,
    dense_rule,
    differs_from_reference,
    expectations,
    make_sample,
    memory_bound,
)
from draftsmith.pipeline.run import train
from draftsmith.pipeline.sync import Exchange
from draftsmith.pipeline.workers import DrafterWorker
from draftsmith.target.forward import Target

SMALL = {"drafter": {"layers": 1, "block_size": 4}, "training": {"steps": 3, "eval_rows": 0, "save_every": 0}}


@pytest.fixture
def traced(monkeypatch):
    """Regions compile with aot_eager: guards, recompiles and seals are real, graphs never reach Inductor."""
    monkeypatch.setattr(compiling, "Region", partial(compiling.Region, backend="aot_eager"))
    yield
    torch._dynamo.reset()


def events(folder, kind):
    return [event for event in read_events(folder / "events.jsonl") if event["kind"] == kind]


def test_a_run_on_the_cpu_is_eager_by_name(tiny_run):
    result = train(tiny_run("eager", **SMALL))
    ledger = json.loads((result.folder / "ledger.json").read_text())
    assert [entry["how"] for entry in ledger["entries"]] == ["eager: dense attention on cpu, by name"] * 3
    assert any("by name" in line for line in events(result.folder, "ledger")[0]["lines"])
    assert events(result.folder, "warmup") == events(result.folder, "evidence") == []
    record = json.loads((result.folder / "environment.json").read_text())
    assert record["packages"]["torch"] == torch.__version__


def test_a_compiled_run_warms_up_seals_and_is_judged(tiny_run, traced):
    """Same losses as eager, to float tolerance. No graph reaches Inductor here, so evidence rightly says so."""
    eager = train(tiny_run("eager", **SMALL))
    result = train(tiny_run("compiled", **SMALL, compile={"enabled": "on", "evidence": "warn", "evidence_every": 2}))
    assert result.losses == pytest.approx(eager.losses, abs=1e-5)
    turns = events(result.folder, "warmup")
    assert [turn["text"].split(": traced ")[0] for turn in turns] == ["target 0 on cpu", "drafter 0 on cpu"]
    assert all(turn["verified"] is True for turn in turns)
    verdicts = events(result.folder, "evidence")
    assert [verdict["step"] for verdict in verdicts] == [1, 3]
    assert "drafter 0 on cpu ran 12 times without a compiled graph" in verdicts[0]["problems"]
    ledger = json.loads((result.folder / "ledger.json").read_text())
    assert {entry["region"] for entry in ledger["entries"]} == {"target 0", "drafter 0", "objective 0"}
    assert len(ledger["evidence"]) == 2


def test_no_worker_waits_for_another_inside_a_hold(tiny_run, traced, monkeypatch):
    """Else the two could wait for each other: one for a row, the other for the gate."""
    gates: list[Gate] = []
    waits: list[str] = []

    class Listed(Gate):
        def __init__(self):
            super().__init__()
            gates.append(self)

    def outside(method):
        @wraps(method)
        def waits_outside(*arguments):
            waits.append(method.__qualname__)
            assert not any(gate.held for gate in gates), f"{method.__qualname__} inside a hold"
            return method(*arguments)

        return waits_outside

    monkeypatch.setattr("draftsmith.pipeline.run.Gate", Listed)
    for waiting in (Link.reserve, Link.put, Link.take, Exchange.meet):
        owner = Link if waiting.__qualname__.startswith("Link") else Exchange
        monkeypatch.setattr(owner, waiting.__name__, outside(waiting))
    pipeline = {"targets": ["cpu", "cpu"], "drafters": ["cpu", "cpu"]}
    training = SMALL["training"] | {"rows_per_update": 2}
    compiled = {"enabled": "on", "evidence": "warn"}
    train(tiny_run("held", **SMALL | {"training": training}, pipeline=pipeline, compile=compiled))
    assert set(waits) == {"Link.reserve", "Link.put", "Link.take", "Exchange.meet"}
    with gates[0].exclusive(), pytest.raises(AssertionError, match="inside a hold"):
        Link(0, 1, 1, Stop()).take(0)


@pytest.mark.parametrize("layer_types", [None, ["sliding_attention"] + 3 * ["full_attention"]])
def test_a_drafter_by_layers_is_the_whole_one(tiny_run, traced, layer_types):
    """Same losses; equal layers share a graph: there is one of the context, of the first layer (whose input asks for
    no gradient), of those between, and of the last."""
    drafter = {
        "layers": 4,
        "taps": [0, 2, 4],
        "block_size": 4,
        "layer_types": layer_types,
        "sliding_window": 7 if layer_types else None,
    }
    losses, graphs = [], []
    for way in ("layers", "whole"):
        compiling = {"enabled": "on", "evidence": "off", "drafter": way}
        result = train(tiny_run(way, **SMALL | {"drafter": drafter}, compile=compiling))
        losses.append(result.losses)
        ledger = json.loads((result.folder / "ledger.json").read_text())
        reasons = [entry["reason"] for entry in ledger["entries"] if entry["region"] == "drafter 0"]
        graphs.append(len(reasons))
        if way == "layers":
            assert reasons[0] == ""
            assert reasons[1].endswith(": part is another function")
            assert not any("\n" in reason or "0x" in reason for reason in reasons)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert graphs == [4, 1]


def test_what_compiles_after_the_warm_up_is_told_and_written(tiny_run, traced, monkeypatch):
    sealed = compiling.Compiling.sealed

    def sealed_too_early(self):
        sealed(self)
        stranger = compiling.Region("stranger", lambda x: x + 1, gate=self.gate)
        self.ledger.watch([stranger])
        stranger(torch.ones(2))

    monkeypatch.setattr(compiling.Compiling, "sealed", sealed_too_early)
    lax = {"enabled": "on", "evidence": "off", "on_recompile": "warn"}
    with pytest.warns(UserWarning, match="stranger compiles"):
        result = train(tiny_run("late", **SMALL, compile=lax))
    told = [event["text"] for event in events(result.folder, "notice") if "after the warm-up" in event["text"]]
    assert told == [
        "stranger compiled (forward) after the warm-up, while drafter 0 worked: it was never warmed up; "
        "it was called with float32[2] on cpu",
    ]
    ledger = json.loads((result.folder / "ledger.json").read_text())
    assert [entry["region"] for entry in ledger["recompiles"] if entry["late"]] == ["stranger"]


@pytest.mark.parametrize("where", ["target", "evaluation"])
def test_a_late_compile_in_any_worker_ends_the_run_in_one_line(tiny_run, traced, monkeypatch, where):
    """In a target and in an evaluation, too, which stand outside every update."""
    sealed, strangers = compiling.Compiling.sealed, []
    owner, name = (Target, "features") if where == "target" else (DrafterWorker, "_rows")
    plain = getattr(owner, name)

    def sealed_with_a_stranger(self):
        sealed(self)
        strangers.append(compiling.Region("stranger", lambda x: x + 1, gate=self.gate))

    def strange(self, *arguments, **options):
        if strangers and options.get("learn") is not True:
            strangers[0](torch.ones(2))
        return plain(self, *arguments, **options)

    monkeypatch.setattr(compiling.Compiling, "sealed", sealed_with_a_stranger)
    monkeypatch.setattr(owner, name, strange)
    sections = SMALL | {"training": SMALL["training"] | {"eval_rows": 1, "eval_every": 1}}
    with pytest.raises(
        UserError, match=r"stranger: compiling \(forward\) after the warm-up; given float32\[2\]"
    ) as caught:
        train(tiny_run("strange", **sections, compile={"enabled": "on", "evidence": "off"}))
    assert caught.value.where == "compile.on_recompile"
    assert "compile.on_recompile=warn" in caught.value.fix


def test_missing_evidence_ends_the_run(tiny_run, traced):
    with pytest.raises(UserError, match="NOT the compiled path: drafter 0 on cpu ran 12 times") as caught:
        train(tiny_run("missing", **SMALL, compile={"enabled": "on"}))
    assert "compile.evidence=warn" in caught.value.fix


def test_a_warm_up_that_compiles_nothing_ends_the_run(tiny_run, traced):
    with torch.compiler.set_stance("force_eager"), pytest.raises(UserError, match="force_eager"):
        train(tiny_run("nothing", **SMALL, compile={"enabled": "on"}))


def sample_of(tiny_run, **sections):
    plan = make_plan(tiny_run("sample", **SMALL | sections))
    gate = Gate()
    (replica,) = make_replicas(plan, _random_head(plan), gate)
    return plan, replica, make_sample(plan, made_up_drafts(plan), torch.device("cpu"))


SLIDING = {"layers": 2, "block_size": 4, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}


@pytest.mark.parametrize("drafter", [{"layers": 2, "block_size": 4}, SLIDING], ids=["full", "sliding"])
def test_the_reference_agrees_with_the_drafter(tiny_run, drafter):
    assert differs_from_reference(*sample_of(tiny_run, drafter=drafter)) == ""


@pytest.mark.parametrize("wrong", ["one token too many", "the next document", "causal", "another dtype's noise"])
def test_control_wrong_mask(tiny_run, wrong, monkeypatch):
    """The reference catches a drafter whose mask is wrong, though every kernel would be the right one."""
    plan, replica, sample = sample_of(tiny_run)
    right = replica.model.fill_blocks

    def forward(features, embeddings, context, slots, masks):
        masks = dict(masks)
        for kind, mask in masks.items():
            seen, own = mask.context_QS.clone(), mask.own_NBB.clone()
            if wrong == "one token too many":
                seen |= torch.roll(seen, 1, dims=1) & (sample.document_S > 0)[None]
            elif wrong == "the next document":
                seen |= torch.roll(seen, 16, dims=1)
            elif wrong == "causal":
                own &= torch.ones_like(own).tril()
            masks[kind] = type(mask)(seen, own)
        out = right(features, embeddings, context, slots, masks)
        return out + 0.02 * torch.randn_like(out) if wrong == "another dtype's noise" else out

    replica.fill_blocks = forward
    assert "differs from the dense reference" in differs_from_reference(plan, replica, sample)


class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is `factor` times too large."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def attending(replica, monkeypatch, attend):
    """Has the replica's forward, and not the reference's, attend by another function."""
    right = replica.model.fill_blocks

    def forward(*inputs):
        with monkeypatch.context() as patch:
            patch.setattr(model, "attend", attend)
            return right(*inputs)

    replica.fill_blocks = forward


LIKE_A_GPU = {"dtype": "bfloat16"}
DEEP = {"layers": 4, "block_size": 4, "taps": [0, 2, 4]}


@pytest.mark.parametrize("wrong", ["queries", "keys", "values"])
@pytest.mark.parametrize(("training", "factor"), [({}, 1.01), (LIKE_A_GPU, 0.8)], ids=["float32", "bfloat16"])
def test_control_wrong_backward(tiny_run, wrong, training, factor, monkeypatch):
    """The reference catches a kernel whose output is right and whose gradient is not, in one layer of four."""
    plan, replica, sample = sample_of(tiny_run, drafter=DEEP, training={**SMALL["training"], **training})
    attend, calls = model.attend, []

    def attend_wrongly(query, key, value, *more):
        calls.append(wrong)
        given = {"queries": query, "keys": key, "values": value}
        if len(calls) == 1:
            given[wrong] = Scaled.apply(given[wrong], factor)
        return attend(*given.values(), *more)

    attending(replica, monkeypatch, attend_wrongly)
    said = differs_from_reference(plan, replica, sample)
    assert said.startswith(f"its gradient of {wrong} differs from the dense reference by "), said
    assert all(parameter.grad is None for parameter in replica.model.parameters())


@pytest.mark.parametrize("sharpness", [1, 6])
def test_an_honest_kernel_passes_however_sharp_its_attention(tiny_run, sharpness, monkeypatch):
    """In bfloat16: torch's own kernel, which keeps its scores in float32, on weights that look at few tokens each."""
    plan, replica, sample = sample_of(tiny_run, drafter=DEEP, training={**SMALL["training"], **LIKE_A_GPU})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in replica.model.named_parameters():
            if parameter.dim() == 2 and sharpness > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if "q_norm" in name or "k_norm" in name:
                parameter.fill_(sharpness**0.5)

    def attend_by_torch(query, key, value, mask, *_options):
        own = torch.block_diag(*mask.own_NBB).bool()
        group = query.shape[0] // key.shape[0]
        key, value = (each.repeat_interleave(group, dim=0)[None] for each in (key, value))
        visible = torch.cat((mask.context_QS, own), dim=1)
        return torch.nn.functional.scaled_dot_product_attention(query[None], key, value, attn_mask=visible)[0]

    attending(replica, monkeypatch, attend_by_torch)
    assert differs_from_reference(plan, replica, sample) == ""


def test_dense_rule_equals_the_batch_rule(tiny_run):
    """The reference's mask, written from the rule, against the intervals that training uses."""
    from draftsmith.blocks import Row
    from draftsmith.drafter.attention import dense_masks

    plan, _, sample = sample_of(tiny_run, drafter=SLIDING)
    length = sample.document_S.numel()
    index = torch.arange(length)
    row = Row(0, index, torch.ones(length, dtype=torch.bool), sample.document_S, index % 16)
    batch = make_draft_batch(
        row, anchors=9, block_size=4, mask_token_id=1, slot_weights_B=torch.ones(4), chunk=16, kinds=plan.spec.kinds,
        seed=(1,), with_tiles=False,
    )  # fmt: skip
    for kind in plan.spec.kinds:
        ours = dense_rule(kind, sample.document_S, batch.anchors_N, 4)
        theirs = dense_masks(batch.intervals[kind], length, 4)
        assert torch.equal(ours.context_QS, theirs.context_QS)
        assert torch.equal(ours.own_NBB, theirs.own_NBB)


def test_expectations_of_a_plan(tiny_run):
    """The drafter must show a backward and equal the reference; needs name every region of every device once."""
    plan, replica, sample = sample_of(tiny_run)
    drafter, objective = expectations(plan, replica, lambda: sample, torch.device("cpu"))
    assert (drafter.backward, objective.backward) == (True, False)
    assert drafter.oracle is not None
    assert drafter.oracle() == ""
    other = make_plan(tiny_run("other", **SMALL, rows={"length": 112}))
    assert len(compiling.needs(plan)) == 3
    assert set(compiling.needs(plan)).isdisjoint(compiling.needs(other))


def test_expectations_of_flex_attention(tiny_run):
    """On CUDA its kernels must be seen, forward and backward, and no scores; peak memory is bound where scores show."""
    plan, replica, sample = sample_of(tiny_run)
    plan = replace(plan, attention="flex")
    rows = plan.config.rows
    queries = rows.anchors * plan.spec.block_size
    scores = plan.spec.layers * plan.spec.heads * queries * (rows.length + queries) * plan.dtype.itemsize
    for device, kernels in (("cpu", ()), ("cuda:1", FLEX_KERNELS["triton"])):
        (drafter, _) = expectations(plan, replica, lambda: sample, torch.device(device))
        assert drafter.kernels == kernels
        assert drafter.score_shapes == ((queries, rows.length + queries),)
        assert not drafter.softmax

    def with_activations(activations):
        here, there = (replace(plan.memory[0], device=name, activations=activations) for name in ("cuda:0", "cuda:1"))
        return replace(plan, memory=(replace(here, activations=1), there))

    # Scores of less than half of what is expected anyway would not show.
    assert memory_bound(with_activations(2 * scores), torch.device("cuda:1")) == 2 * scores + scores // 2
    assert memory_bound(with_activations(2 * scores + 2), torch.device("cuda:1")) is None
    assert memory_bound(with_activations(2 * scores + 2), torch.device("cuda:0")) == 1 + scores // 2


def test_a_compiled_run_looks_in_draftsmiths_own_cache(tiny_run, traced, caches):
    """Folder by shapes and machine: the same for the same run, another for other shapes; also in one process."""
    folders = []
    for name, rows in (("one", {"length": 96}), ("two", {"length": 112}), ("three", {"length": 96})):
        config = tiny_run(name, **SMALL, rows=rows, compile={"enabled": "on", "evidence": "off"})
        train(config)
        folders.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        torch._dynamo.reset()
    assert folders[0] == folders[2] != folders[1]
    assert {os.path.dirname(folder) for folder in folders} == {str(caches)}


def test_a_cache_is_found_again_by_a_process_that_has_not_compiled_yet(tiny_run, monkeypatch):
    """Compiling sets variables and options of its own process, which must not change where it keeps things."""
    plan = make_plan(tiny_run("place", **SMALL, compile={"enabled": "on"}))
    place = compiling.cache_folder(plan)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/somewhere/else")
    assert compiling.cache_folder(plan) == place
    compiling.machine_facts.cache_clear()
    assert compiling.cache_folder(plan) != place, "a user's own variable counts"
    compiling.machine_facts.cache_clear()


def test_a_ledger_that_cannot_be_written_does_not_end_the_run(tiny_run, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("draftsmith.compiled.ledger.write_aside", full)
    result = train(tiny_run("full", **SMALL))
    assert result.step == 3
    said = [event["text"] for event in events(result.folder, "notice")]
    assert "the ledger cannot be written: [Errno 28] No space left on device" in said


def test_what_a_killed_writer_left_of_a_ledger_goes(tiny_run):
    config = tiny_run("killed", **SMALL | {"training": SMALL["training"] | {"save_every": 1}})
    folder = train(config, max_minutes=1e-9).folder
    left = aside_of(folder / "ledger.json")
    left.write_text("half of it")
    train(config, resume=True)
    assert not left.exists()
    assert json.loads((folder / "ledger.json").read_text())["entries"]


def test_a_run_says_that_the_environment_names_the_compile_cache(tiny_run, traced, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    result = train(tiny_run("named", **SMALL, compile={"enabled": "on", "evidence": "off"}))
    said = f"TORCHINDUCTOR_CACHE_DIR names the compile cache: {tmp_path / 'mine'}, which has no lock"
    assert [event["text"] for event in events(result.folder, "notice") if event["text"].startswith(said)]


def test_records_of_a_run_stay_whole_where_the_disk_is_full(tmp_path, monkeypatch):
    path = tmp_path / "environment.json"
    path.write_text("old")
    (tmp_path / ".environment.json.0123abcd.new").write_text("left by one that was killed")

    def full(_descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"environment.json: cannot be written: No space left"):
            write_record(path, {"packages": {}})
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir() if each.is_file()] == [(path.name, "old")]
    write_record(path, {"packages": {}})
    assert json.loads(path.read_text()) == {"packages": {}}
