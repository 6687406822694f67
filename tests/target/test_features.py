"""Features of packed rows equal those of every document alone, whatever the target; and they cost no more layers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tiny_models import CONFIGS, packed_row, save_tiny, slow_features

from draftsmith.bench.row import host_waits
from draftsmith.config import TargetConfig
from draftsmith.errors import UserError
from draftsmith.target.forward import Target, alike, document_mask, document_spans
from draftsmith.target.load import load_target

# float32: the packed and the plain forward use different attention kernels, hence other orders of summation.
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}
LENGTHS = (17, 1, 30, 2, 11)
SIZE = 70


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory):
    """Loads each tiny target once."""
    loaded: dict[tuple[str, str], Target] = {}

    def get(name: str, attention: str = "sdpa") -> Target:
        if (name, attention) not in loaded:
            folder = save_tiny(tmp_path_factory.mktemp("target"), name, attention)
            target = load_target(TargetConfig(path=str(folder)), "cpu", torch.float32)
            if attention == "eager":
                target.model.set_attn_implementation("eager")
            loaded[name, attention] = target
        return loaded[name, attention]

    return get


def features(target: Target, row, taps, last_hidden=False):
    return target.features(row.tokens_S, row.document_S, row.positions_S, taps, last_hidden)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_packed_equals_separate(targets, name: str, attention: str) -> None:
    target = targets(name, attention)
    row, taps = packed_row(LENGTHS, SIZE), (0, 2, 3)
    ours = features(target, row, taps, last_hidden=True)
    slow_taps, slow_last = slow_features(target.model, row, taps)
    real = row.document_S >= 0
    torch.testing.assert_close(ours.taps_SF[real], slow_taps, **TOLERANCE)
    torch.testing.assert_close(ours.last_SH[real], slow_last, **TOLERANCE)
    stopped = features(target, row, taps)
    assert torch.equal(stopped.taps_SF[real], ours.taps_SF[real])
    assert stopped.last_SH is None


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_way_of_packing_is_chosen_by_layer_kind(targets, name: str) -> None:
    target = targets(name)
    if name == "qwen3.5":
        assert target.packing == "separate"
        assert "linear_attention" in target.packing_reason
    else:
        assert target.packing == "mask", target.packing_reason


def test_a_leak_would_be_seen(targets) -> None:
    """Without masks the documents of a row do see each other: the comparison above can fail."""
    target = targets("llama")
    row = packed_row(LENGTHS, SIZE)
    leaking = target.decoder(input_ids=row.tokens_S[None], position_ids=row.positions_S[None]).last_hidden_state[0]
    _, separate = slow_features(target.model, row, (0,))
    second = slice(LENGTHS[0], sum(LENGTHS))
    assert (leaking[second] - separate[second]).abs().max() > 0.1


def test_a_target_that_ignores_masks_is_found_out(targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask thrown away before the layers: loading notices and runs documents one by one, exactly."""
    folder = save_tiny(tmp_path, "llama")
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: None)
    target = load_target(TargetConfig(path=str(folder)), "cpu", torch.float32)
    assert target.packing == "separate"
    assert "differ" in target.packing_reason
    row = packed_row(LENGTHS, SIZE)
    slow, _ = slow_features(target.model, row, (1, 4))
    torch.testing.assert_close(features(target, row, (1, 4)).taps_SF[row.document_S >= 0], slow, **TOLERANCE)


def test_a_window_off_by_one_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(tmp_path, "mistral sliding")
    from draftsmith.target import forward

    monkeypatch.setattr(
        forward, "document_mask", lambda document_S, window: document_mask(document_S, window and window + 1)
    )
    assert load_target(TargetConfig(path=str(folder)), "cpu", torch.float32).packing == "separate"


def test_the_trial_leaves_the_window_alone(targets) -> None:
    assert targets("mistral sliding").decoder.config.sliding_window == 6


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
def test_layers_after_the_last_tap_do_not_run(targets, name: str) -> None:
    target = targets(name)
    row, calls = packed_row((20, 10), 32), []
    handles = [
        layer.register_forward_pre_hook(lambda module, inputs, i=i: calls.append(i))
        for i, layer in enumerate(target.layers)
    ]
    norm = target.decoder.norm.register_forward_pre_hook(lambda module, inputs: calls.append("norm"))
    documents = 1 if target.packing == "mask" else 2
    features(target, row, (0, 2))
    assert calls == [0, 1, 2] * documents
    calls.clear()
    features(target, row, (0, 2), last_hidden=True)
    assert calls == [0, 1, 2, 3, 4, "norm"] * documents
    for handle in [*handles, norm]:
        handle.remove()


def test_the_last_layer_is_tapped_before_the_norm(targets) -> None:
    target = targets("qwen3")
    row = packed_row((30,), 32)
    both = features(target, row, (4,), last_hidden=True)
    assert not torch.allclose(both.taps_SF, both.last_SH, atol=0.1)
    torch.testing.assert_close(target.decoder.norm(both.taps_SF), both.last_SH)


def test_order_of_taps_is_kept(targets) -> None:
    target, row = targets("qwen3"), packed_row((30,), 32)
    down, up = features(target, row, (3, 1)).taps_SF, features(target, row, (1, 3)).taps_SF
    assert torch.equal(down, torch.cat([up[:, 32:], up[:, :32]], dim=1))


def test_features_can_be_saved_for_backward(targets) -> None:
    target, row = targets("qwen3"), packed_row((30,), 32)
    weight = torch.randn(64, 8, requires_grad=True)
    out = features(target, row, (1, 3)).taps_SF @ weight
    out.square().sum().backward()
    assert weight.grad.abs().sum() > 0
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in target.model.parameters())


@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral sliding", "gemma3"])
def test_no_host_sync(targets, name: str) -> None:
    target, row = targets(name), packed_row(LENGTHS, SIZE)
    cpu, inputs = torch.device("cpu"), {"input_ids": row.tokens_S[None], "position_ids": row.positions_S[None]}
    assert host_waits(lambda: features(target, row, (1, 3), last_hidden=True), cpu) == []
    # What restarting positions alone would cost: transformers asks for the documents.
    assert host_waits(lambda: target.decoder(**inputs, use_cache=False), cpu)


def test_threads_share_a_target(targets) -> None:
    """Eight threads, different taps and rows at the same time: each gets its own features."""
    target = targets("qwen3")
    taps = [(0,), (1, 3), (2,), (0, 4)] * 2
    rows = [packed_row((9 + i, 20), 40, seed=i) for i in range(8)]
    expected = [features(target, row, tap) for row, tap in zip(rows, taps, strict=True)]
    got: list[list] = [[] for _ in rows]
    start = threading.Barrier(len(rows))

    def work(i: int) -> None:
        start.wait()
        for _ in range(5):
            got[i].append(features(target, rows[i], taps[i]).taps_SF)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, want in enumerate(expected):
        assert len(got[i]) == 5
        for features_SF in got[i]:
            torch.testing.assert_close(features_SF, want.taps_SF, atol=1e-5, rtol=1e-5)


def test_a_failed_forward_leaves_nothing_behind(targets) -> None:
    target, row = targets("qwen3"), packed_row((30,), 32)
    with pytest.raises(IndexError):
        target.features(row.tokens_S + 10_000, row.document_S, row.positions_S, (1,))
    logits = target.model(row.tokens_S[None]).logits  # a leftover recording would stop this one early
    assert logits.shape == (1, 32, 320)


def test_wrong_taps_are_refused(targets) -> None:
    row = packed_row((30,), 32)
    for taps in ((5,), (-1,), (1, 1), ()):
        with pytest.raises(UserError, match=r"drafter\.taps"):
            features(targets("qwen3"), row, taps)


def test_freed_layers(tmp_path: Path) -> None:
    target = load_target(TargetConfig(path=str(save_tiny(tmp_path, "qwen3"))), "cpu", torch.float32)
    row = packed_row((30,), 32)
    before = features(target, row, (0, 2)).taps_SF
    target.free_layers_after(2)
    assert torch.equal(features(target, row, (0, 2)).taps_SF, before)
    assert {p.device.type for p in target.layers[3].parameters()} == {"meta"}
    with pytest.raises(AssertionError):
        features(target, row, (0, 2), last_hidden=True)


def test_spans_and_mask_by_hand() -> None:
    document = torch.tensor([0, 0, 1, 2, 2, 2, -1, -1], dtype=torch.int32)
    assert document_spans(document) == [(0, 2), (2, 3), (3, 6)]
    assert document_spans(torch.full((3,), -1)) == []
    for window in (None, 1, 2):
        mask = document_mask(document, window)
        for i in range(8):
            for j in range(8):
                near = window is None or i - j < window
                assert bool(mask[i, j]) == (j <= i and document[i] == document[j] and near)


def test_documents_of_like_length_share_a_forward(targets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled up behind their end, at most by a quarter; every token keeps the features of its document alone."""
    target, shapes = targets("qwen3.5"), []
    row = packed_row((20, 7, 18, 7, 1), 60)
    run = target._run

    def noted(tokens, *more):
        shapes.append(tuple(tokens.shape))
        return run(tokens, *more)

    monkeypatch.setattr(target, "_run", noted)
    ours = features(target, row, (0, 3), last_hidden=True)
    assert shapes == [(2, 20), (2, 7), (1, 1)]
    slow_taps, slow_last = slow_features(target.model, row, (0, 3))
    real = row.document_S >= 0
    torch.testing.assert_close(ours.taps_SF[real], slow_taps, **TOLERANCE)
    torch.testing.assert_close(ours.last_SH[real], slow_last, **TOLERANCE)
    assert not ours.taps_SF[~real].any()


@pytest.mark.parametrize("seed", range(5))
def test_groups_hold_every_document_once(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 60, (int(torch.randint(1, 40, (), generator=generator)),), generator=generator)
    ends = lengths.cumsum(0).tolist()
    spans = [(end - length, end) for end, length in zip(ends, lengths.tolist(), strict=True)]
    groups = alike(spans)
    assert sorted(span for group in groups for span in group) == spans
    for group in groups:
        sizes = [end - start for start, end in group]
        assert sizes[0] == max(sizes)
        assert max(sizes) * len(sizes) <= 1.25 * sum(sizes)
