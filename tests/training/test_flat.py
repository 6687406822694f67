"""Flat buffers: where parameters lie, and that cutting the work into pieces or batches changes no bit."""

from __future__ import annotations

import math

import pytest
import torch
from test_update import fresh
from test_update_state import Trainer, assert_same

from draftsmith.training import adamw, muon, update
from draftsmith.training.flat import BLOCK, DECAYED, MUON, PLAIN, make_layout, span, views
from draftsmith.training.update import choose_owners

SHAPES = {
    "wide": torch.Size([3, BLOCK]),
    "tall": torch.Size([70, 90]),
    "same": torch.Size([70, 90]),
    "norm": torch.Size([BLOCK]),
    "scale": torch.Size([5]),
    "other": torch.Size([90, 70]),
}


@pytest.mark.parametrize("with_muon", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 9])
def test_every_element_has_one_place(replicas: int, with_muon: bool) -> None:
    owners = choose_owners({name: math.prod(shape) for name, shape in SHAPES.items()}, replicas)
    layout = make_layout(SHAPES, owners, muon=with_muon)
    assert layout == make_layout(dict(reversed(list(SHAPES.items()))), owners, muon=with_muon)
    flat = torch.zeros(layout.size)
    for view in views(flat, layout.segments):
        view += 1
    assert flat.sum() == sum(math.prod(shape) for shape in SHAPES.values()), "a place is taken twice, or by nobody"
    assert {each.name: each.shape for each in layout.segments} == SHAPES
    end = 0
    for owner in range(replicas):
        owned = layout.owned_by(owner)
        assert {each.name for each in owned} == {name for name, of in owners.items() if of == owner}
        if owned:
            assert span(owned) == (end, end + sum(each.stop - each.start for each in owned))
            end = span(owned)[1]
            rules = [each.rule for each in owned]
            assert rules == sorted(rules, key=[DECAYED, PLAIN, MUON].index)
        for each in owned:
            assert each.start % BLOCK == 0
            assert each.rule == (PLAIN if len(each.shape) == 1 else MUON if with_muon else DECAYED)
    assert end == layout.size


def test_a_part_of_a_buffer_is_viewed_from_where_it_begins() -> None:
    layout = make_layout(SHAPES, dict.fromkeys(SHAPES, 0), muon=True)
    flat = torch.arange(layout.size)
    part = layout.owned_by(0, MUON)
    start, stop = span(part)
    for ours, whole in zip(views(flat[start:stop], part, start), views(flat, part), strict=True):
        assert torch.equal(ours, whole)
    assert span(()) == (0, 0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_pieces_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = Trainer(3, name=name), Trainer(3, name=name)
    for step in range(3):
        whole.step(step)
    monkeypatch.setattr(adamw, "PIECE", {"cpu": BLOCK})
    monkeypatch.setattr(update, "PIECE", BLOCK)
    for step in range(3):
        pieces.step(step)
    assert_same(pieces.state(), whole.state())


SIZES = [(24, 40), (40, 24), (24, 40), (16, 16), (24, 40), (1, 30), (64, 64)]


@pytest.mark.parametrize("most", [1, 2 * 24 * 40, 2**26], ids=["alone", "pairs", "all"])
def test_muon_in_batches_is_torchs_own_matrix_by_matrix(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide, tall and square. Tolerance: a bfloat16 step in the update, lr · √(rows / columns) · 2⁻⁸ a step."""
    monkeypatch.setattr(muon, "LARGEST_BATCH", most)
    lr, decay, generator = 0.02, 0.1, torch.Generator().manual_seed(1)
    shapes = {f"m{i}": torch.Size(size) for i, size in enumerate(SIZES)}
    theirs = {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}
    optimizer = torch.optim.Muon(list(theirs.values()), lr=lr, weight_decay=decay)

    layout = make_layout(shapes, dict.fromkeys(shapes, 0), muon=True)
    found = muon.batches(layout.segments, 0)
    counts = sorted(each.count for each in found if (each.rows, each.columns) == (24, 40))
    assert counts == {1: [1, 1, 1], 2 * 24 * 40: [1, 2], 2**26: [3]}[most]
    master, momentum, gradient = (torch.zeros(layout.size) for _ in range(3))
    for view, each in zip(views(master, layout.segments), layout.segments, strict=True):
        view.copy_(theirs[each.name].detach())
    go, scale = torch.tensor(True), torch.tensor(0.5)
    for _ in range(4):
        for view, each in zip(views(gradient, layout.segments), layout.segments, strict=True):
            view.copy_(torch.randn(each.shape, generator=generator))
            theirs[each.name].grad = view * scale
        optimizer.step()
        for batch in found:
            muon.muon_step(*(batch.of(flat) for flat in (master, momentum, gradient)), go, scale, lr, decay)
    for flat, values in (
        (master, theirs),
        (momentum, {name: optimizer.state[value]["momentum_buffer"] for name, value in theirs.items()}),
    ):
        for view, each in zip(views(flat, layout.segments), layout.segments, strict=True):
            ratio = max(1.0, each.shape[0] / each.shape[1]) ** 0.5
            torch.testing.assert_close(view, values[each.name], rtol=0, atol=4 * lr * ratio * 2**-8, msg=each.name)
    before = master.clone()
    gradient.fill_(float("nan"))
    for batch in found:
        muon.muon_step(*(batch.of(flat) for flat in (master, momentum, gradient)), ~go, scale * 0, lr, decay)
    assert torch.equal(master, before)
    assert momentum.isfinite().all()


def test_orthogonal_means_orthogonal() -> None:
    """Five steps bring singular values between 0.3 and 1.3 whatever they were, except those next to nothing."""
    x = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(muon.orthogonalise(x.bfloat16()).float())
    assert values.min() > 0.3
    assert values.max() < 1.3
    assert muon.orthogonalise(torch.zeros(1, 4, 5).bfloat16()).abs().max() == 0


def test_the_models_of_these_tests_have_more_than_one_matrix_of_a_shape() -> None:
    shapes = [p.shape for p in fresh().parameters() if p.dim() == 2]
    assert len(set(shapes)) < len(shapes)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_buffers_are_as_large_as_planned(name: str, replicas: int) -> None:
    """Apart from padding, and from Muon's vectors, which have two moments instead of one."""
    trainer = Trainer(replicas, name=name)
    trainer.step(0)
    held = sum(
        flat.numel() * flat.element_size()
        for each in trainer.updates
        for flat in (each._sums, each._master, each._exp_avg, each._exp_avg_sq, each._momentum)
        if flat is not None
    )
    layout = trainer.updates[0].layout
    padding = sum(each.stop - each.start - each.size for each in layout.segments)
    vectors = sum(each.size for each in layout.segments if len(each.shape) == 1) if name == "muon" else 0
    expected = replicas * update.buffer_bytes(
        layout.size - padding, replicas, 4, trainer.updates[0].config, torch.device("cpu")
    )
    more = (4 * replicas + 12) * padding
    assert expected <= held <= expected + more + 4 * vectors
