"""What is trained is what is served: training forward, our decoding and z-lab's decoder give the same hidden states.

The reference is the wheel `dflash`, loaded from a directory that `save_drafter` wrote, so the config fields (rope θ,
window, causality) are proved as well. `make test` installs it; without it this file fails, it is not skipped.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import dflash.model as zlab
import pytest
import torch
from tiny_drafters import LAYOUTS, MASK_TOKEN, VOCAB, batch_of, random_model, random_row, tiny_spec, training_hidden
from torch import Tensor

from draftsmith.config import ObjectiveConfig
from draftsmith.drafter import DraftModel, load_drafter, save_drafter
from draftsmith.drafter.rope import rotary_tables
from draftsmith.objective import HeadTerms, Objective

TOLERANCE = 1e-4


def zlab_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return zlab.DFlashDraftModel.from_pretrained(folder, dtype=dtype).eval()


def zlab_blocks(
    model: Any, features_LF: Tensor, inputs: dict[int, Tensor], starts: list[int], embedding_VH: Tensor
) -> dict[int, Tensor]:
    """Hidden states of the blocks at `starts`, the cache filled and cropped as the reference's loop does.

    Args:
        features_LF: of one document.
        inputs: block inputs [B] by start.
        starts: ascending; the first one is the length of the prompt.
    """
    cache = zlab._make_cache(model.config)
    positions = torch.arange(features_LF.shape[0] + model.block_size)[None]
    held, hidden = 0, {}
    for start in starts:
        new_features = features_LF[None, held:start]
        block = inputs[start]
        hidden[start] = model(
            target_hidden=new_features,
            noise_embedding=embedding_VH[block][None],
            position_ids=positions[:, held : start + block.numel()],
            past_key_values=cache,
            use_cache=True,
        )[0]
        zlab._crop_to(cache, start)
        held = start
    return hidden


def our_blocks(
    model: DraftModel, features_LF: Tensor, inputs: dict[int, Tensor], starts: list[int], embedding_VH: Tensor
) -> dict[int, Tensor]:
    """The same through `extend` and `draft`."""
    cache = model.new_cache(features_LF.shape[0] + 1, torch.device("cpu"), features_LF.dtype)
    held, hidden = 0, {}
    for start in starts:
        if start > held:
            model.extend(cache, features_LF[held:start], held)
        hidden[start] = model.draft(cache, embedding_VH[inputs[start]], start)
        held = start
    return hidden


def walks(length: int, block_size: int) -> list[list[int]]:
    """Starts of several decodings of one document that together visit every anchor 1..length-2, in strides 1..B."""
    every = list(range(1, length - 1))
    generator = torch.Generator().manual_seed(length)
    result = [every, list(range(2, length - 1, block_size)), [length - 2]]
    for _ in range(3):
        start, starts = int(torch.randint(1, 6, (1,), generator=generator)), []
        while start < length - 1:
            starts.append(start)
            start += int(torch.randint(1, block_size + 1, (1,), generator=generator))
        result.append(starts)
    return [starts for starts in result if starts]


def largest_gap(a_bH: Tensor, b_bH: Tensor) -> float:
    """Of slots 1 and up: slot 0 predicts nothing, and training does not compute it to the end."""
    return (a_bH.float() - b_bH.float())[1:].abs().max().item()


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@torch.no_grad()
def test_training_equals_both_decoders_at_every_anchor(layout: str, block_size: int, tmp_path: Path) -> None:
    spec = tiny_spec(layout, block_size)
    save_drafter(random_model(spec), tmp_path)
    ours, reference = load_drafter(tmp_path), zlab_model(tmp_path)
    lengths, length = [9, 31, 2, 22], 70
    row = random_row(lengths, length)
    generator = torch.Generator().manual_seed(1)
    features_SF = torch.randn(length, 3 * spec.hidden_size, generator=generator)
    embedding_VH = torch.randn(VOCAB, spec.hidden_size, generator=generator)
    batch = batch_of(row, spec, anchors=sum(lengths))  # more than there are: some are padding
    trained_NBH = training_hidden(ours, batch, features_SF, embedding_VH)
    assert int(batch.valid_N.sum()) == sum(n - 1 for n in lengths)

    compared = 0
    for number, size in enumerate(lengths):
        first = sum(lengths[:number])
        trained = {
            int(anchor) - first: trained_NBH[n]
            for n, anchor in enumerate(batch.anchors_N)
            if batch.valid_N[n] and row.document_S[anchor] == number
        }
        inputs = {
            start: torch.tensor([int(row.tokens_S[first + start])] + [MASK_TOKEN] * (block_size - 1))
            for start in trained
        }
        # A prompt is never empty, so anchor 0 has no counterpart in a decoding of z-lab's.
        for starts in walks(size, block_size):
            arguments = (features_SF[first : first + size], inputs, starts, embedding_VH)
            theirs, drafted = zlab_blocks(reference, *arguments), our_blocks(ours, *arguments)
            for start in starts:
                assert largest_gap(trained[start], theirs[start]) < TOLERANCE, (number, start)
                assert largest_gap(drafted[start], theirs[start]) < TOLERANCE, (number, start)
                compared += 1
        drafted = our_blocks(ours, features_SF[first : first + size], inputs, [0], embedding_VH)
        assert largest_gap(drafted[0], trained[0]) < TOLERANCE
        # The reference shortens its last block at the length limit; training has no counterpart, decoding has.
        start = size - 1
        arguments = (features_SF[first : first + size], {start: inputs[0][:3]}, [start], embedding_VH)
        theirs, drafted = zlab_blocks(reference, *arguments), our_blocks(ours, *arguments)
        assert largest_gap(drafted[start], theirs[start]) < TOLERANCE
    assert compared > 60


@pytest.mark.parametrize("layout", ["full", "mixed"])
@torch.no_grad()
def test_training_equals_the_references_own_generation(layout: str, tmp_path: Path) -> None:
    """`dflash_generate` itself on a small random target: the blocks it drafted, met again in a training row."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    block_size, prompt = 8, torch.tensor([[1, 5, 2, 7, 3]])
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=9, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    target = Qwen3ForCausalLM(config).eval()
    spec = tiny_spec(layout, block_size, input_scale=1.5, logit_multiplier=0.5, logit_softcap=3.0)
    save_drafter(random_model(spec), tmp_path)
    ours, reference = load_drafter(tmp_path), zlab_model(tmp_path)

    answer = target.generate(prompt, max_new_tokens=60, do_sample=False)[0]
    # What each call of its loop drafted, by where the block stood. Random weights guess nothing right, so the choice of
    # tokens is handed in: the first r drafts are the target's own, r = 0, 1, …, 7, 0, …
    drafted: dict[int, Tensor] = {}
    reference.register_forward_hook(
        lambda _module, _inputs, keywords, hidden: drafted.update({_start(keywords): hidden[0].clone()}),
        with_kwargs=True,
    )

    def guided(hidden: Tensor, _head: object) -> Tensor:
        start, right = max(drafted), (len(drafted) - 1) % block_size
        choice = answer[start + 1 : start + 1 + hidden.shape[1]].clone()
        choice[right:] = (choice[right:] + 1) % VOCAB
        return torch.nn.functional.one_hot(choice, VOCAB).float()[None]

    reference.compute_logits = guided
    text = zlab.dflash_generate(reference, target, prompt, max_new_tokens=60, stop_token_ids=None)[0]
    assert torch.equal(text, answer)
    starts = sorted(drafted)
    assert {later - start for start, later in pairwise(starts)} == set(range(1, block_size + 1))

    states = target(text[None], output_hidden_states=True).hidden_states
    features_SF = torch.cat([states[tap + 1][0] for tap in spec.taps], dim=-1)
    row = random_row([text.numel()], text.numel())
    row.tokens_S.copy_(text)
    batch = batch_of(row, spec, anchors=text.numel())
    embedding_VH = target.get_input_embeddings().weight * spec.input_scale
    trained_NBH = training_hidden(ours, batch, features_SF, embedding_VH)
    compared = 0
    for n, anchor in enumerate(batch.anchors_N.tolist()):
        block = drafted.get(anchor)
        if not batch.valid_N[n] or block is None or block.shape[0] < block_size:
            continue  # never drafted from, or a block shortened by the length limit
        assert largest_gap(trained_NBH[n], block) < TOLERANCE, anchor
        compared += 1
    assert compared >= block_size


def _start(keywords: dict[str, Any]) -> int:
    return int(keywords["position_ids"][0, -keywords["noise_embedding"].shape[1]])


@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.5, 3.0)])
@torch.no_grad()
def test_loss_is_that_of_the_references_logits(multiplier: float, softcap: float | None, tmp_path: Path) -> None:
    """Factor and cap of the logits survive in the config and mean the same in training."""
    spec = tiny_spec(logit_multiplier=multiplier, logit_softcap=softcap)
    save_drafter(random_model(spec), tmp_path)
    spec = load_drafter(tmp_path).spec
    batch = batch_of(random_row([30, 9], 40), spec, anchors=20, chunk=17)
    generator = torch.Generator().manual_seed(1)
    hidden_QH = torch.randn(batch.inputs_Q.numel(), spec.hidden_size, generator=generator)
    head = torch.nn.Linear(spec.hidden_size, VOCAB, bias=False)
    terms = HeadTerms(head.weight, spec.logit_multiplier, spec.logit_softcap)
    sums, _ = Objective(ObjectiveConfig(), spec.block_size, terms)(hidden_QH, batch)
    filled = batch.slots_MC > 0
    logits = zlab_model(tmp_path).compute_logits(hidden_QH[batch.slots_MC[filled]], head)
    losses = torch.nn.functional.cross_entropy(logits, batch.labels_MC[filled], reduction="none")
    assert float(sums.values[0]) == pytest.approx(float((losses * batch.weights_MC[filled]).sum()), rel=1e-5)


def test_rotary_tables_of_a_bfloat16_model_are_those_of_float32() -> None:
    spec = tiny_spec(head_dim=128, rope_theta=1e6)
    positions = torch.tensor([2047, 2048, 3000, 3001])
    wide = rotary_tables(positions, spec.head_dim, spec.rope_theta, torch.float32)
    model = random_model(spec).to(torch.bfloat16)
    cache = model.new_cache(3010, torch.device("cpu"), torch.bfloat16)
    narrow = rotary_tables(positions, spec.head_dim, spec.rope_theta, torch.bfloat16)
    for table, of_cache, of_training in zip(wide, (cache.cos, cache.sin), narrow, strict=True):
        assert torch.equal(of_cache[positions], table.bfloat16())
        assert torch.equal(of_training, table.bfloat16())
    # What rounding the frequencies would do, so that the equality above is known to be able to fail.
    frequency = 1.0 / spec.rope_theta ** (torch.arange(0, 128, 2) / 128)
    off = (frequency.bfloat16().float() - frequency).abs() * 2048
    assert off.max() > 2.0
    # No parameter or buffer holds frequencies, so no conversion of the model can reach them.
    assert not list(model.buffers())


@torch.no_grad()
def test_bfloat16_at_high_positions(tmp_path: Path) -> None:
    """At position 3,000 bf16 differs from fp32 by rounding only, in our forward as in the reference."""
    spec = tiny_spec("full", head_dim=32, rope_theta=1e4)
    save_drafter(random_model(spec), tmp_path)
    length, start = 3002, 3000
    row = random_row([length], length)
    row.loss_mask_S[:start] = False
    generator = torch.Generator().manual_seed(1)
    features_SF = torch.randn(length, 3 * spec.hidden_size, generator=generator)
    embedding_VH = torch.randn(VOCAB, spec.hidden_size, generator=generator)
    batch = batch_of(row, spec, anchors=1)
    assert batch.anchors_N.tolist() == [start]
    assert batch.block_positions_Q.tolist() == list(range(start, start + 8))
    arguments = (features_SF, {start: batch.inputs_Q}, [start], embedding_VH)
    narrow = tuple(part.bfloat16() if isinstance(part, Tensor) else part for part in arguments)

    exact = training_hidden(load_drafter(tmp_path), batch, features_SF, embedding_VH)[0]
    theirs = zlab_blocks(zlab_model(tmp_path), *arguments)[start]
    assert largest_gap(exact, theirs) < TOLERANCE
    ours_bf16 = load_drafter(tmp_path, dtype=torch.bfloat16)
    trained = training_hidden(ours_bf16, batch, features_SF.bfloat16(), embedding_VH.bfloat16())[0]
    drafted = our_blocks(ours_bf16, *narrow)[start]
    theirs_bf16 = zlab_blocks(zlab_model(tmp_path, torch.bfloat16), *narrow)[start]
    scale = exact.abs().max().item()
    for hidden in (trained, drafted, theirs_bf16):
        assert hidden.dtype == torch.bfloat16
        assert largest_gap(hidden, exact) < 0.05 * scale
