"""The training forward: what a block can know, packing, gradients; and the decoding cache's bookkeeping."""

from __future__ import annotations

import pytest
import torch
from tiny_drafters import LAYOUTS, VOCAB, batch_of, random_model, random_row, tiny_spec, training_hidden
from torch import Tensor

from draftsmith.blocks import DraftBatch, Row
from draftsmith.config import ObjectiveConfig
from draftsmith.drafter import DrafterSpec, DraftModel, build_masks
from draftsmith.drafter.model import Layer, initialise
from draftsmith.objective import HeadTerms, Objective

LENGTHS, LENGTH = [14, 25, 9], 53


def problem(layout: str, block_size: int = 7) -> tuple[DraftModel, Row, DraftBatch, Tensor, Tensor]:
    spec = tiny_spec(layout, block_size)
    row = random_row(LENGTHS, LENGTH)
    generator = torch.Generator().manual_seed(1)
    features_SF = torch.randn(LENGTH, 3 * spec.hidden_size, generator=generator)
    embedding_VH = torch.randn(VOCAB, spec.hidden_size, generator=generator)
    return random_model(spec), row, batch_of(row, spec, anchors=50, chunk=40), features_SF, embedding_VH


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_block_knows_nothing_of_its_future_of_other_documents_and_of_other_blocks(layout: str) -> None:
    model, row, batch, features_SF, embedding_VH = problem(layout)
    spec = model.spec
    masks = build_masks(batch, "dense")
    window = max((kind.window or LENGTH) for kind in spec.kinds)
    features_SF.requires_grad_()
    embeddings_QH = embedding_VH[batch.inputs_Q].requires_grad_()
    hidden_NBH = model(features_SF, embeddings_QH, batch.context_positions_S, batch.block_positions_Q, masks).view(
        50, spec.block_size, -1
    )

    blocks = [0, 5, 12, 20, 37, 44, 49]  # of all three documents, first and last anchors; 49 is a padding anchor
    assert not batch.valid_N[49]
    for block in blocks:
        anchor, valid = int(batch.anchors_N[block]), bool(batch.valid_N[block])
        index = torch.arange(LENGTH)
        allowed_S = (row.document_S == row.document_S[anchor]) & (index < anchor) & valid
        own_Q = torch.arange(50 * spec.block_size) // spec.block_size == block

        by_feature, by_embedding = torch.autograd.grad(
            hidden_NBH[block].square().sum(), (features_SF, embeddings_QH), retain_graph=True
        )
        reached_S, reached_Q = by_feature.abs().sum(1) > 0, by_embedding.abs().sum(1) > 0
        assert not (reached_S & ~allowed_S).any()
        assert not (reached_Q & ~own_Q).any()
        # What is near enough is really used, so that the zeros above mean something.
        assert torch.equal(reached_S, allowed_S & (index > anchor - window))
        assert torch.equal(reached_Q, own_Q)

        with torch.no_grad():
            other_features = torch.where(allowed_S[:, None], features_SF, torch.randn(features_SF.shape) * 9)
            other_embeddings = torch.where(own_Q[:, None], embeddings_QH, torch.randn(embeddings_QH.shape) * 9)
            again = model(other_features, other_embeddings, batch.context_positions_S, batch.block_positions_Q, masks)
            assert torch.equal(again.view(hidden_NBH.shape)[block], hidden_NBH[block])


@pytest.mark.parametrize("layout", ["causal full", "mixed", "bidirectional sliding", "full"])
def test_within_a_block_causal_slots_do_not_see_later_ones(layout: str) -> None:
    model, _, batch, features_SF, embedding_VH = problem(layout)
    embeddings_QH = embedding_VH[batch.inputs_Q].requires_grad_()
    size = model.spec.block_size
    masks = build_masks(batch, "dense")
    hidden_QH = model(features_SF, embeddings_QH, batch.context_positions_S, batch.block_positions_Q, masks)
    (gradient_QH,) = torch.autograd.grad(hidden_QH[3 * size + 2].sum(), embeddings_QH)
    reached = (gradient_QH.view(-1, size, gradient_QH.shape[1])[3].abs().sum(1) > 0).tolist()
    causal = all(kind.causal for kind in model.spec.kinds)
    assert reached == [True, True, True] + [not causal] * (size - 3)


def parameter_gradients(model: DraftModel) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def learn(model: DraftModel, batch: DraftBatch, features_SF: Tensor, embedding_VH: Tensor, objective: Objective):
    """One row as the training step does it: hidden states, loss and its gradient, backward. Returns the sums."""
    hidden_QH = training_hidden(model, batch, features_SF, embedding_VH).flatten(0, 1)
    sums, gradient_QH = objective(hidden_QH, batch)
    hidden_QH.backward(gradient_QH)
    return sums


@pytest.mark.parametrize("layout", ["full", "mixed"])
def test_gradients_equal_plain_autograd(layout: str) -> None:
    model, _, batch, features_SF, embedding_VH = problem(layout)
    head_VH = torch.randn(VOCAB, model.spec.hidden_size, generator=torch.Generator().manual_seed(2)) * 0.2
    sums = learn(model, batch, features_SF, embedding_VH, Objective(ObjectiveConfig(), 7, HeadTerms(head_VH)))
    ours = parameter_gradients(model)

    model.zero_grad()
    hidden_QH = training_hidden(model, batch, features_SF, embedding_VH).flatten(0, 1)
    filled = batch.slots_MC > 0
    losses = torch.nn.functional.cross_entropy(
        hidden_QH[batch.slots_MC[filled]] @ head_VH.T, batch.labels_MC[filled], reduction="none"
    )
    weighted = (losses * batch.weights_MC[filled]).sum()
    weighted.backward()
    torch.testing.assert_close(sums.values[0], weighted.detach(), rtol=1e-5, atol=1e-5)
    for name, gradient in parameter_gradients(model).items():
        scale = float(gradient.abs().max())
        assert scale > 0, f"{name} learns nothing"
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * scale)


def test_activation_checkpointing_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = Layer.forward
    monkeypatch.setattr(Layer, "forward", lambda self, *inputs: calls.append(1) or forward(self, *inputs))
    plain, _, batch, features_SF, embedding_VH = problem("mixed")
    saving = random_model(plain.spec, activation_checkpointing=True)
    head_VH = torch.randn(VOCAB, plain.spec.hidden_size, generator=torch.Generator().manual_seed(2))
    objective = Objective(ObjectiveConfig(), 7, HeadTerms(head_VH))
    first = learn(plain, batch, features_SF, embedding_VH, objective)
    assert len(calls) == 3
    second = learn(saving, batch, features_SF, embedding_VH, objective)
    assert len(calls) == 3 + 2 * 3, "nothing was recomputed"
    assert torch.equal(first.values, second.values)
    gradients = parameter_gradients(saving)
    assert all(torch.equal(gradient, gradients[name]) for name, gradient in parameter_gradients(plain).items())
    with torch.no_grad():
        training_hidden(saving, batch, features_SF, embedding_VH)
    assert len(calls) == 3 + 2 * 3 + 3


@pytest.mark.parametrize("layout", ["full", "mixed", "all causal"])
@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_packed_equals_separate_documents(layout: str, weights: str) -> None:
    """Same hidden states, sums and gradients, whether documents share a row or not."""
    packed, row, batch, features_SF, embedding_VH = problem(layout)
    separate = random_model(packed.spec)
    head_VH = torch.randn(VOCAB, packed.spec.hidden_size, generator=torch.Generator().manual_seed(2)) * 0.2
    objective = Objective(ObjectiveConfig(weights=weights), 7, HeadTerms(head_VH))
    sums = learn(packed, batch, features_SF, embedding_VH, objective)
    with torch.no_grad():
        together_NBH = training_hidden(packed, batch, features_SF, embedding_VH)[batch.valid_N]

    total, alone = torch.zeros_like(sums.values), []
    for number, size in enumerate(LENGTHS):
        own = row.document_S == number
        single = random_row([size], size + number)  # rows of other lengths, with and without padding
        single.tokens_S[:size] = row.tokens_S[own]
        features = torch.cat((features_SF[own], torch.full((number, features_SF.shape[1]), 7.0)))
        single_batch = batch_of(single, separate.spec, anchors=size + 3, chunk=19)
        total += learn(separate, single_batch, features, embedding_VH, objective).values
        with torch.no_grad():
            alone.append(training_hidden(separate, single_batch, features, embedding_VH)[single_batch.valid_N])
    torch.testing.assert_close(torch.cat(alone), together_NBH, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(total, sums.values, rtol=1e-5, atol=1e-3)
    gradients = parameter_gradients(separate)
    for name, gradient in parameter_gradients(packed).items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))


def test_number_of_anchors_does_not_matter_to_a_block() -> None:
    """Padding anchors change nothing: the same blocks with 44 and with 60 anchors."""
    model, row, batch, features_SF, embedding_VH = problem("mixed")
    more = batch_of(row, model.spec, anchors=60)
    with torch.no_grad():
        first = training_hidden(model, batch, features_SF, embedding_VH)[batch.valid_N]
        second = training_hidden(model, more, features_SF, embedding_VH)[more.valid_N]
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(training_hidden(model, more, features_SF, embedding_VH)).all()


def test_names_are_the_native_ones() -> None:
    spec = tiny_spec("full", layers=1, layer_types=("full_attention",), taps=(0, 3))
    shapes = {name: tuple(parameter.shape) for name, parameter in DraftModel(spec).state_dict().items()}
    assert shapes == {
        "fc.weight": (32, 64),
        "hidden_norm.weight": (32,),
        "norm.weight": (32,),
        "layers.0.input_layernorm.weight": (32,),
        "layers.0.post_attention_layernorm.weight": (32,),
        "layers.0.self_attn.q_proj.weight": (64, 32),
        "layers.0.self_attn.k_proj.weight": (32, 32),
        "layers.0.self_attn.v_proj.weight": (32, 32),
        "layers.0.self_attn.o_proj.weight": (32, 64),
        "layers.0.self_attn.q_norm.weight": (16,),
        "layers.0.self_attn.k_norm.weight": (16,),
        "layers.0.mlp.gate_proj.weight": (48, 32),
        "layers.0.mlp.up_proj.weight": (48, 32),
        "layers.0.mlp.down_proj.weight": (32, 48),
    }


def test_initialise_depends_on_the_seed_alone() -> None:
    first, again, other = (DraftModel(tiny_spec("mixed")) for _ in range(3))
    for model, seed in ((first, 4), (again, 4), (other, 5)):
        initialise(model, seed)
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if a.dim() == 1:
            assert (a == 1).all()
        else:
            assert not torch.equal(a, c)
            assert float(a.detach().std()) == pytest.approx(0.02, rel=0.1)


def decoding(layout: str = "mixed") -> tuple[DraftModel, DrafterSpec, Tensor, Tensor]:
    spec = tiny_spec(layout)
    generator = torch.Generator().manual_seed(1)
    features_LF = torch.randn(40, 3 * spec.hidden_size, generator=generator)
    return random_model(spec), spec, features_LF, torch.randn(8, spec.hidden_size, generator=generator)


def test_drafting_leaves_no_trace_and_context_may_come_in_pieces() -> None:
    model, _, features_LF, block_bH = decoding()
    pieces, whole = (model.new_cache(40, torch.device("cpu"), torch.float32) for _ in range(2))
    for start, end in ((0, 7), (7, 8), (8, 20)):
        model.extend(pieces, features_LF[start:end], start)
        model.draft(pieces, torch.randn_like(block_bH), end)
        assert pieces.used == end
    model.extend(whole, features_LF[:20], 0)
    drafted = model.draft(pieces, block_bH, 20)
    torch.testing.assert_close(drafted, model.draft(whole, block_bH, 20), rtol=1e-5, atol=1e-5)
    assert torch.equal(drafted, model.draft(pieces, block_bH, 20))
    # Going back: what was held from there on is forgotten.
    model.extend(whole, features_LF[30:], 20)
    model.extend(whole, features_LF[12:20], 12)
    assert whole.used == 20
    torch.testing.assert_close(model.draft(whole, block_bH, 20), drafted, rtol=1e-5, atol=1e-5)


def test_a_full_cache_still_has_room_for_the_last_block() -> None:
    model, spec, features_LF, block_bH = decoding()
    cache = model.new_cache(40, torch.device("cpu"), torch.float32)
    model.extend(cache, features_LF, 0)
    assert model.draft(cache, block_bH, 40).shape == (spec.block_size, spec.hidden_size)
    assert model.draft(cache, block_bH[:1], 40).shape == (1, spec.hidden_size)


def test_holes_in_the_context_are_faults() -> None:
    model, _, features_LF, block_bH = decoding()
    cache = model.new_cache(40, torch.device("cpu"), torch.float32)
    model.extend(cache, features_LF[:10], 0)
    with pytest.raises(AssertionError, match="hole"):
        model.extend(cache, features_LF[11:12], 11)
    with pytest.raises(AssertionError, match="exactly that much context"):
        model.draft(cache, block_bH, 9)
