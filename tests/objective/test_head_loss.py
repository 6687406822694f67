"""Chunked loss and gradient against autograd over all logits at once, in float64, from the formulas."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.blocks import Document, DraftBatch, LayerKind, Row, make_draft_batch, pack_row
from draftsmith.config import ObjectiveConfig
from draftsmith.objective import HeadTerms, Objective, Sums, decay_weights, default_gamma, dpace_weights

VOCAB, HIDDEN = 37, 12


def random_row(seed: int, length: int = 61) -> Row:
    rng = np.random.default_rng(seed)
    documents, left = [], length - 3
    while left:
        size = min(left, int(rng.integers(1, 25)))
        documents.append(
            Document(torch.from_numpy(rng.integers(0, VOCAB, size)), torch.from_numpy(rng.random(size) < 0.9))
        )
        left -= size
    return pack_row(seed, documents, length)


def batch_of(row: Row, block_size: int, chunk: int, anchors: int = 14, gamma: float | None = None) -> DraftBatch:
    return make_draft_batch(
        row,
        anchors=anchors,
        block_size=block_size,
        mask_token_id=0,
        slot_weights_B=decay_weights(block_size, gamma),
        chunk=chunk,
        kinds=(LayerKind(),),
        seed=(row.number,),
        with_tiles=False,
    )


def random_problem(seed: int, block_size: int, chunk: int) -> tuple[DraftBatch, Tensor, Tensor, Tensor]:
    """Batch, hidden states [Q, H], head [V, H] and the target's final hidden states [S, H]."""
    row = random_row(seed)
    batch = batch_of(row, block_size, chunk)
    generator = torch.Generator().manual_seed(seed)
    hidden_QH = torch.randn(batch.inputs_Q.numel(), HIDDEN, generator=generator)
    head_VH = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.7
    last_SH = torch.randn(row.tokens_S.numel(), HIDDEN, generator=generator)
    return batch, hidden_QH, head_VH, last_SH


def taught_slots(batch: DraftBatch) -> list[tuple[int, int, int]]:
    """(slot in Q, label, teacher) of every taught slot."""
    filled = batch.slots_MC > 0
    return list(
        zip(*(part[filled].tolist() for part in (batch.slots_MC, batch.labels_MC, batch.teacher_MC)), strict=True)
    )


def twin(
    hidden_QH: Tensor, batch: DraftBatch, head_VH: Tensor, last_SH: Tensor, block_size: int, config: ObjectiveConfig,
    multiplier: float, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Σ w·loss and Σ w from all logits, differentiable; one slot after the other."""

    def log_probabilities(hidden: Tensor) -> Tensor:
        logits = hidden.double() @ head_VH.double().T * multiplier
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return torch.log_softmax(logits, -1)

    drafted_QV, wanted_SV = log_probabilities(hidden_QH), log_probabilities(last_SH)
    ce = {slot: -drafted_QV[slot, label] for slot, label, _ in taught_slots(batch)}
    gamma = default_gamma(block_size) if config.gamma is None else config.gamma
    weighted, weight = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for slot, _, teacher in taught_slots(batch):
        block, k = divmod(slot, block_size)
        if config.weights == "decay":
            w = math.exp(-(k - 1) / gamma)
        else:
            in_block = {s % block_size: float(value.detach()) for s, value in ce.items() if s // block_size == block}
            w = brute_force_dpace(in_block, k, config.alpha)
        p, q = wanted_SV[teacher], drafted_QV[slot]
        if config.labels == "data":
            loss = ce[slot]
        elif config.labels == "kl":
            loss = (p.exp() * (p - q)).sum()
        else:
            loss = 0.5 * (p.exp() - q.exp()).abs().sum()
        weighted, weight = weighted + w * loss, weight + w
    return weighted, weight


def brute_force_dpace(ce_by_slot: dict[int, float], k: int, alpha: float) -> float:
    """w_k = Σ over taught m ≥ k of Π over taught i ≤ m of ((1-α)·exp(-CE_i) + α)."""
    return sum(
        math.prod((1 - alpha) * math.exp(-ce_by_slot[i]) + alpha for i in ce_by_slot if i <= m)
        for m in ce_by_slot
        if m >= k
    )


HEADS = [(1.0, None), (0.4, None), (1.0, 2.5), (1.7, 3.0)]


@pytest.mark.parametrize(("labels", "weights"), list(product(("data", "kl", "tv"), ("decay", "dpace"))))
def test_loss_and_gradient_equal_autograd_over_all_logits(labels: str, weights: str) -> None:
    for case, ((multiplier, softcap), block_size) in enumerate(product(HEADS, (4, 7, 16))):
        chunk = (block_size - 1, block_size, 33, 200)[case % 4]
        batch, hidden_QH, head_VH, last_SH = random_problem(case, block_size, chunk)
        config = ObjectiveConfig(labels=labels, weights=weights, alpha=0.3)
        leaf_QH = hidden_QH.clone().requires_grad_()
        weighted, weight = twin(leaf_QH, batch, head_VH, last_SH, block_size, config, multiplier, softcap)
        (expected_QH,) = torch.autograd.grad(weighted, leaf_QH)
        objective = Objective(config, block_size, HeadTerms(head_VH, multiplier, softcap))
        sums, gradient_QH = objective(hidden_QH, batch, last_SH)
        torch.testing.assert_close(sums.values[0].double(), weighted.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sums.weight.double(), weight, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient_QH, expected_QH, rtol=1e-4, atol=1e-6)
        untaught = torch.ones(hidden_QH.shape[0], dtype=torch.bool)
        untaught[batch.slots_MC.flatten()] = False
        untaught[0] = True
        assert not gradient_QH[untaught].any()
        assert gradient_QH.dtype == hidden_QH.dtype


@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_chunk_size_does_not_matter(weights: str) -> None:
    row, block_size = random_row(5), 8
    config = ObjectiveConfig(weights=weights)
    results = []
    for chunk in (7, 8, 13, 31, 500):
        batch = batch_of(row, block_size, chunk)
        generator = torch.Generator().manual_seed(0)
        hidden_QH = torch.randn(batch.inputs_Q.numel(), HIDDEN, generator=generator)
        head_VH = torch.randn(VOCAB, HIDDEN, generator=generator)
        sums, gradient_QH = Objective(config, block_size, HeadTerms(head_VH))(hidden_QH, batch)
        results.append((sums.values, gradient_QH))
    for values, gradient_QH in results[1:]:
        torch.testing.assert_close(values, results[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient_QH, results[0][1], rtol=1e-5, atol=1e-6)


class RowsThroughTheHead(TorchDispatchMode):
    """Records how many rows of every tensor with a vocabulary axis are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[int] = []
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() == 2 and out.shape[1] == VOCAB and out.shape[0] != HIDDEN:
            self.largest = max(self.largest, out.shape[0])
            if function.overloadpacket is torch.ops.aten.mm:
                self.products.append(out.shape[0])
        return out


def test_untaught_slots_cost_no_logits() -> None:
    block_size, chunk = 8, 21
    batch, hidden_QH, head_VH, _ = random_problem(1, block_size, chunk)
    with RowsThroughTheHead() as seen:
        Objective(ObjectiveConfig(), block_size, HeadTerms(head_VH))(hidden_QH, batch)
    chunks = batch.slots_MC.shape[0]
    assert seen.products == [chunk] * chunks
    assert chunks > 1
    # Filling: less than a block in every chunk but the last, which may be anything.
    assert sum(seen.products) < batch.taught + (chunks - 1) * (block_size - 1) + chunk
    assert sum(seen.products) < 0.8 * hidden_QH.shape[0]
    assert seen.largest == chunk, "more than one chunk's logits existed at a time"


def test_rows_add_up_to_one_computation_however_they_are_split() -> None:
    """Two rows, or the same documents in one row: same sums, same gradients; nothing is divided before the end."""
    block_size, config = 8, ObjectiveConfig(weights="dpace")
    parts = [random_row(seed, 40) for seed in (3, 4)]
    documents = [
        Document(row.tokens_S[row.document_S == d], row.loss_mask_S[row.document_S == d])
        for row in parts
        for d in range(int(row.document_S.max()) + 1)
    ]
    merged = pack_row(0, documents, 80)
    head_VH = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
    objective = Objective(config, block_size, HeadTerms(head_VH))

    def evaluate(row: Row) -> tuple[Sums, dict[int, Tensor]]:
        batch = batch_of(row, block_size, chunk=30, anchors=80)
        # Hidden states are a function of what is drafted, so that both layouts see the same ones.
        keys = [(int(row.tokens_S[a]) * 71 + int(row.positions_S[a]) * 13) if ok else 0 for a, ok in _anchors(batch)]
        hidden_NBH = torch.stack(
            [torch.randn(block_size, HIDDEN, generator=torch.Generator().manual_seed(key)) for key in keys]
        )
        sums, gradient_QH = objective(hidden_NBH.flatten(0, 1), batch)
        return sums, gradient_QH.view(-1, block_size, HIDDEN)[batch.valid_N]

    (first, first_gradient), (second, second_gradient), (whole, whole_gradient) = map(evaluate, (*parts, merged))
    assert first.weight > 0
    assert second.weight > 0
    torch.testing.assert_close(first.values + second.values, whole.values, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(torch.cat((first_gradient, second_gradient)), whole_gradient)


def _anchors(batch: DraftBatch) -> list[tuple[int, bool]]:
    return list(zip(batch.anchors_N.tolist(), batch.valid_N.tolist(), strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_statistics_equal_a_loop(tied: bool) -> None:
    """`tied`: whole numbers, many of them equal; the first of the largest is the choice, as for decoding's argmax."""
    for seed, block_size in ((0, 4), (1, 7), (2, 16)):
        batch, hidden_QH, head_VH, _ = random_problem(seed, block_size, 3 * block_size)
        for slot, label, _ in taught_slots(batch)[::2]:
            hidden_QH[slot] = 5 * head_VH[label]  # every other slot is drafted right
        if tied:
            hidden_QH, head_VH = hidden_QH.sign(), head_VH.sign() * (head_VH.abs() > 0.5)
            logits_QV = hidden_QH @ head_VH.T
            assert ((logits_QV == logits_QV.amax(-1, keepdim=True)).sum(-1) > 1).float().mean() > 0.1
        sums, _ = Objective(ObjectiveConfig(), block_size, HeadTerms(head_VH))(hidden_QH, batch)
        choice = (hidden_QH @ head_VH.T).argmax(-1)
        labels = {slot: label for slot, label, _ in taught_slots(batch)}
        taught, correct, accepted = ([0] * block_size for _ in range(3))
        blocks = 0
        for block in range(batch.anchors_N.numel()):
            of_block = {
                k: labels[block * block_size + k] for k in range(block_size) if block * block_size + k in labels
            }
            blocks += bool(of_block)
            prefix = True
            for k, label in of_block.items():
                right = int(choice[block * block_size + k]) == label
                prefix &= right
                taught[k] += 1
                correct[k] += right
                accepted[k] += prefix
        assert sums.values[2:].tolist() == [blocks, *taught, *correct, *accepted]
        assert sums.values.numel() == Sums.size(block_size)
        assert sum(accepted) > 0
        summary = sums.summary()
        assert summary["tau_proxy"] == pytest.approx(1 + sum(accepted) / blocks)
        assert summary["blocks"] == blocks
        assert summary["loss"] == pytest.approx(float(sums.values[0] / sums.values[1]))
        for name, counts in (("accept_by_slot", accepted), ("correct_by_slot", correct)):
            expected = [c / t if t else math.nan for c, t in zip(counts[1:], taught[1:], strict=True)]
            assert summary[name] == pytest.approx(expected, nan_ok=True)


def test_a_drafter_that_says_nothing_is_not_right() -> None:
    """All logits equal: the choice is token 0, and not whatever the label is."""
    block_size = 8
    batch, hidden_QH, head_VH, _ = random_problem(3, block_size, 24)
    sums, _ = Objective(ObjectiveConfig(), block_size, HeadTerms(head_VH))(torch.zeros_like(hidden_QH), batch)
    right = sum(label == 0 for _, label, _ in taught_slots(batch))
    assert sum(sums.values[3 + block_size : 3 + 2 * block_size].tolist()) == right
    assert sums.summary()["tau_proxy"] < 1.2


def test_a_row_without_taught_slots_is_all_zero() -> None:
    row = pack_row(0, [Document(torch.arange(6), torch.zeros(6, dtype=torch.bool))], 8)
    for weights in ("decay", "dpace"):
        hidden_QH = torch.randn(12, HIDDEN)
        objective = Objective(ObjectiveConfig(weights=weights), 4, HeadTerms(torch.randn(VOCAB, HIDDEN)))
        sums, gradient_QH = objective(hidden_QH, batch_of(row, 4, 9, anchors=3))
        assert not sums.values.any()
        assert not gradient_QH.any()
        assert math.isnan(sums.summary()["loss"])


def test_bfloat16_stays_near_float32() -> None:
    batch, hidden_QH, head_VH, last_SH = random_problem(2, 8, 32)
    hidden_QH, head_VH, last_SH = hidden_QH.bfloat16(), head_VH.bfloat16(), last_SH.bfloat16()
    for labels in ("data", "kl", "tv"):
        config = ObjectiveConfig(labels=labels)
        narrow, gradient = Objective(config, 8, HeadTerms(head_VH))(hidden_QH, batch, last_SH)
        wide, exact = Objective(config, 8, HeadTerms(head_VH.float()))(hidden_QH.float(), batch, last_SH.float())
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(narrow.values[:2], wide.values[:2], rtol=5e-3, atol=1e-3)
        assert (gradient.float() - exact).norm() < 0.02 * exact.norm()


def test_no_graph_is_built_and_no_input_changed() -> None:
    batch, hidden_QH, head_VH, _ = random_problem(3, 8, 32)
    leaf_QH = hidden_QH.clone().requires_grad_()
    sums, gradient_QH = Objective(ObjectiveConfig(), 8, HeadTerms(head_VH))(leaf_QH * 1.0, batch)
    assert not sums.values.requires_grad
    assert not gradient_QH.requires_grad
    assert torch.equal(leaf_QH.detach(), hidden_QH)


def test_distillation_without_the_targets_hidden_states_is_a_fault() -> None:
    batch, hidden_QH, head_VH, _ = random_problem(3, 8, 32)
    with pytest.raises(AssertionError):
        Objective(ObjectiveConfig(labels="kl"), 8, HeadTerms(head_VH))(hidden_QH, batch)


def test_decay_weights() -> None:
    assert [default_gamma(size) for size in (16, 8, 10, 4)] == [7.0, 4.0, 4.5, 1.8]
    for block_size, gamma in ((16, 7.0), (8, 4.0), (7, 3.15)):
        expected = [0.0] + [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]
        assert decay_weights(block_size).tolist() == pytest.approx(expected)
    assert decay_weights(5, gamma=2.0).tolist() == pytest.approx([0, 1, math.exp(-0.5), math.exp(-1), math.exp(-1.5)])


def test_dpace_weights_equal_the_formula() -> None:
    """Untaught slots count as factor 1 and give no term, wherever they stand."""
    generator = torch.Generator().manual_seed(0)
    for alpha in (0.0, 0.5, 1.0):
        loss_NB = torch.rand(20, 7, generator=generator) * 4
        taught_NB = torch.rand(20, 7, generator=generator) < 0.7
        taught_NB[:, 0] = False
        weights_NB = dpace_weights(loss_NB.clone().requires_grad_(), taught_NB, alpha)
        assert not weights_NB.requires_grad
        for block in range(20):
            ce = {k: float(loss_NB[block, k]) for k in range(7) if taught_NB[block, k]}
            expected = [brute_force_dpace(ce, k, alpha) if k in ce else 0.0 for k in range(7)]
            assert weights_NB[block].tolist() == pytest.approx(expected, rel=1e-5)
    # α = 1 makes every factor 1: slot k counts the taught slots from k on.
    assert dpace_weights(torch.rand(1, 5), torch.tensor([[False, True, True, True, False]]), 1.0).tolist() == [
        [0, 3, 2, 1, 0]
    ]
