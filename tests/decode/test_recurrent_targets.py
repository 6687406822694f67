"""Targets whose layers carry a state that cannot be cut back: copied before a block, put back after a rejection.

Every answer is held against decoding without any cache, so a state that has read a rejected token, or missed one that
stood, shows in the tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_decoding import plain_answer, random_prompts
from torch import Tensor
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from draftsmith.decode import (
    DrafterProposer,
    GreedyProposer,
    PromptLookupProposer,
    decode,
    evaluate,
    generate,
    speculative,
)
from draftsmith.decode.cache import DecodeCache
from draftsmith.decode.distribution import check_distribution
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.view import View
from draftsmith.drafter import DrafterSpec, DraftModel
from draftsmith.errors import UserError
from draftsmith.target.forward import Target
from draftsmith.target.geometry import geometry_of, layer_kinds

VOCAB = 13
LINEAR, FULL = "linear_attention", "full_attention"
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": VOCAB, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


def make(kind: str) -> Any:
    if kind == "qwen3.5":
        types = [LINEAR, FULL, LINEAR, LINEAR]
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **DELTA, num_hidden_layers=4, layer_types=types))
    if kind == "qwen3-next":
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2}
        shared = {"shared_expert_intermediate_size": 16}
        types = [LINEAR, FULL, LINEAR, FULL]
        config = Qwen3NextConfig(**SIZES, **DELTA, **moe, **shared, num_hidden_layers=4, layer_types=types)
        return Qwen3NextForCausalLM(config)
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    types = ["conv", FULL, "conv", "conv"]
    return Lfm2ForCausalLM(Lfm2Config(**sizes, num_hidden_layers=4, layer_types=types, conv_L_cache=3))


def recurrent_target(kind: str) -> Target:
    torch.manual_seed(0)
    model = make(kind)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif "A_log" in name:
                parameter.fill_(-3.0)  # a long memory
    model.eval().requires_grad_(False)
    return Target(model, None, geometry_of(model.config, kind), layer_kinds(model.config), ())


KINDS = ["qwen3.5", "qwen3-next", "lfm2"]


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest) -> Target:
    return recurrent_target(request.param)


class Oracle:
    """Proposes the right answer up to a point that changes from round to round, then wrong tokens."""

    taps: tuple[int, ...] = ()

    def __init__(self, answer: list[int], block_size: int, rights: list[int]) -> None:
        self.answer, self.block_size, self._rights = answer, block_size, rights

    def start(self, *_: Any) -> None:
        self._round = 0

    def observe(self, features_LF: Tensor, start: int) -> None:
        raise AssertionError("asked for no features")

    def propose(self, tokens: list[int], width: int) -> tuple[Tensor, None]:
        right = self._rights[self._round % len(self._rights)]
        self._round += 1
        if right < 0:  # nothing to propose: a block of one slot
            return torch.empty(0, dtype=torch.int64), None
        place = len(tokens)
        drafts = [
            token if slot < right else (token + 1) % VOCAB
            for slot, token in enumerate(self.answer[place : place + width - 1])
        ]
        return torch.tensor(drafts, dtype=torch.int64), None


@pytest.mark.parametrize("rights", [[0], [9], [2, 0, 9, 1], [-1, 3, -1, -1, 0], [1]])
def test_whatever_stands_the_answer_is_the_targets_own(target: Target, rights: list[int]) -> None:
    prompt = [1, 5, 2, 7, 3, 3, 8]
    answer = plain_answer(target, prompt, 40, ())
    proposer = Oracle([*prompt, *answer, *[0] * 9], 6, rights)
    run = decode(target, prompt, proposer, max_new_tokens=40)
    assert run.tokens == answer
    most = max(rights)
    assert max(run.accepted_per_round) == min(6, 1 + max(0, most))


def test_most_rounds_are_one_forward(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stood is read again with the next block; a forward of its own comes once in a block's worth of tokens."""
    lengths: list[int] = []

    class Counting(View):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            model = self.model

            def counted(ids: Tensor, **keywords: Any) -> Any:
                lengths.append(ids.shape[1])
                return model(ids, **keywords)

            self.model = counted

    monkeypatch.setattr(speculative, "View", Counting)
    prompt = [1, 5, 2, 7, 3, 3, 8]
    answer = plain_answer(target, prompt, 61, ())
    run = decode(target, prompt, Oracle([*prompt, *answer, *[0] * 9], 6, [1]), max_new_tokens=61)
    assert run.tokens == answer
    assert run.accepted_per_round == [2] * 30
    # Prefill; then blocks of 6 behind 0, 2 and 4 tokens that are read again; when 6 wait, they are read alone.
    assert lengths[:12] == [7, 6, 8, 10, 6, 6, 8, 10, 6, 6, 8, 10]
    assert len(lengths) - 1 <= 30 + 60 // 6


def drafter_for(target: Target) -> DraftModel:
    spec = DrafterSpec(
        hidden_size=32, layers=1, heads=4, kv_heads=2, head_dim=8, intermediate_size=48, rms_norm_eps=1e-6,
        rope_theta=1e4, max_position_embeddings=512, vocab_rows=VOCAB, target_layers=4, taps=(0, 2), block_size=5,
        mask_token_id=VOCAB - 1, layer_types=(FULL,),
    )  # fmt: skip
    model = DraftModel(spec)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def test_drafter_baseline_and_look_up(target: Target) -> None:
    drafter = drafter_for(target)
    prompts = random_prompts(3, longest=12, seed=3, vocab=VOCAB)
    result = evaluate(drafter, target, prompts, max_new_tokens=30)
    assert result.lossless is True
    for prompt, ours, base, look in zip(prompts, result.decoded, result.baseline, result.lookup, strict=True):
        assert ours.tokens == base.tokens == look.tokens == plain_answer(target, prompt, 30, ())
    accepted = sum(sum(run.stood_per_round) for run in (*result.decoded, *result.lookup))
    rejected = sum(sum(run.drafted_per_round) for run in (*result.decoded, *result.lookup)) - accepted
    assert accepted > 0
    assert rejected > 0


def test_the_drafter_gets_the_features_of_what_stood(target: Target) -> None:
    """Tokens that are read again stand before the block in the same forward; their features are not the block's."""
    drafter, prompt = drafter_for(target), [1, 5, 2, 7]
    seen: dict[int, Tensor] = {}

    class Watching(DrafterProposer):
        def observe(self, features_LF: Tensor, start: int) -> None:
            seen.update({start + at: row for at, row in enumerate(features_LF)})
            super().observe(features_LF, start)

    run = decode(target, prompt, Watching(drafter, target.head()), max_new_tokens=30)
    tokens = [*prompt, *run.tokens]
    states = target.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    for place, row in seen.items():
        expected = torch.cat([states[tap + 1][0, place] for tap in (0, 2)])
        assert torch.allclose(row, expected, atol=1e-4), place
    assert set(seen) == set(range(len(tokens) - 1))


def test_sampled_answers_are_the_targets_own() -> None:
    target = recurrent_target("qwen3.5")
    proposer = DrafterProposer(drafter_for(target), target.head())
    prompts = random_prompts(16, longest=8, vocab=VOCAB)
    said = [
        decode(target, prompt, proposer, max_new_tokens=30, temperature=1.0, seed=number).tokens
        for number, prompt in enumerate(prompts)
    ]
    assert check_distribution(target, prompts, said, Sampling(1.0)).passed


def test_a_copy_can_be_put_back_more_than_once(target: Target) -> None:
    cache = DecodeCache(target.model.config, 1, 40)
    assert cache.states
    ids, positions = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), torch.arange(40)[None]

    def read(first: int, last: int) -> Tensor:
        return target.model(
            ids[:, first:last], position_ids=positions[:, first:last], past_key_values=cache, use_cache=True
        ).logits[0, -1]

    read(0, 4)
    copy = cache.snapshot()
    first = read(4, 8)
    for _ in range(2):
        cache.restore(copy)
        cache.crop_to(4)
        assert torch.allclose(read(4, 8), first, atol=1e-5)
    cache.crop_to(4)
    assert not torch.allclose(read(4, 8), first, atol=1e-3), "without the copy the state has read them twice"


def test_what_cannot_be_decoded_is_refused() -> None:
    target = recurrent_target("qwen3.5")
    with pytest.raises(UserError, match="linear_attention layers, whose state cannot be moved"):
        list(generate(target, [[1, 2]], max_new_tokens=3))
    target.model.config.layer_types = ["hybrid", *target.model.config.layer_types[1:]]
    with pytest.raises(UserError, match="hybrid layers, whose memory is not known"):
        decode(target, [1, 2], GreedyProposer(), max_new_tokens=3)
    target.model.config.layer_types = [LINEAR] * 4
    with pytest.raises(UserError, match="no layer with keys and values"):
        decode(target, [1, 2], PromptLookupProposer(4), max_new_tokens=3)
