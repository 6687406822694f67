"""Rounds of static shape, run plainly, against the eager loop: round by round, at every length, with caches kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_decoding import VOCAB, plain_answer, random_prompts, tiny_drafter, tiny_target
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from draftsmith.decode import (
    Decoded,
    DrafterProposer,
    GreedyProposer,
    PromptLookupProposer,
    Proposer,
    StaticRounds,
    decode,
    evaluate,
    static,
)
from draftsmith.decode.static import bucket, obstacle
from draftsmith.errors import UserError
from draftsmith.target.forward import Target
from draftsmith.target.geometry import geometry_of, layer_kinds

STOPS = (7, 9)
SMALL = 11  # with so few tokens some drafts are right by chance


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that answers of a few dozen tokens cross borders."""
    monkeypatch.setattr(static, "SMALLEST_BUCKET", 16)


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Tape(TorchDispatchMode):
    """What a CUDA graph does, on the CPU: keeps every operation with the tensors that it had, and does them again.

    Numbers that Python knew are frozen. What operations made is memory that the next graph overwrites: it is spoilt
    after every replay.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {memory_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._steps.append((function, args, kwargs or {}, tensors))
        self._made |= {id(tensor): tensor for tensor in tensors if memory_of(tensor) not in given}
        return result

    def replay(self) -> None:
        for function, args, kwargs, before in self._steps:
            after = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for old, new in zip(before, after, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        for tensor in self._made.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


class TapedGraphs:
    """Stands in for `Graphs`."""

    made = 0

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def capture(self, run: Any) -> Any:
        run()
        type(self).made += 1
        with Tape() as tape:
            run()
        return tape.replay


def plainly(target: Target) -> StaticRounds:
    return StaticRounds(target, "on", graphs=False)


def assert_same(found: Decoded, expected: Decoded) -> None:
    assert found.tokens == expected.tokens
    assert found.finish_reason == expected.finish_reason
    assert found.accepted_per_round == expected.accepted_per_round
    assert found.drafted_per_round == expected.drafted_per_round
    assert found.stood_per_round == expected.stood_per_round


def proposers_for(target: Target, kind: str) -> list[Proposer]:
    drafter = tiny_drafter(kind, vocab=SMALL)
    return [
        DrafterProposer(drafter, target.head()),
        GreedyProposer(),
        DrafterProposer(drafter, target.head(), block_size=3),
        PromptLookupProposer(5),
        DrafterProposer(tiny_drafter(kind, block_size=9, seed=5, vocab=SMALL), target.head()),
        DrafterProposer(drafter, target.head(), block_size=1),
    ]


@pytest.mark.parametrize("kind", ["full", "sliding", "llama"])
def test_round_by_round_the_eager_loop(kind: str) -> None:
    """One object for all proposers, prompts (some longer than a bucket, later ones shorter again) and limits."""
    target = tiny_target(kind, vocab=SMALL)
    rounds, stood = plainly(target), 0
    proposers = proposers_for(target, kind)
    prompts = [*random_prompts(2, vocab=SMALL), [1], random_prompts(1, 40, 5, SMALL)[0] * 2, [3, 4]]
    for number, prompt in enumerate(prompts):
        for by in proposers[:: 1 if number < 1 else 2]:
            limit, stops = (29, ()) if number % 2 else (18 + number, STOPS)
            expected = decode(target, prompt, by, max_new_tokens=limit, stop_ids=stops)
            found = decode(target, prompt, by, max_new_tokens=limit, stop_ids=stops, rounds=rounds)
            assert_same(found, expected)
            stood += sum(found.stood_per_round)
    assert rounds.why_not == ""
    assert stood > 20


def other_target(family: str) -> Target:
    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "vocab_size": SMALL, "max_position_embeddings": 512, "sliding_window": 12,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any
    if family == "gemma2":  # caps of scores and logits, which only the eager attention of transformers applies
        caps = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0, "query_pre_attn_scalar": 8}
        model = Gemma2ForCausalLM(Gemma2Config(**sizes, **caps, attn_implementation="eager"))
    elif family == "gpt_oss":  # sinks, experts
        model = GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=4))
    else:  # a window, and no kinds of layers in the configuration
        model = MistralForCausalLM(MistralConfig(**sizes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.eval().requires_grad_(False)
    return Target(model, None, geometry_of(model.config, family), layer_kinds(model.config), ())


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral"])
def test_other_families(family: str) -> None:
    target = other_target(family)
    rounds, drafter = plainly(target), tiny_drafter("sliding", vocab=SMALL)
    for prompt in random_prompts(2, seed=3, vocab=SMALL):
        for by in (DrafterProposer(drafter, target.head()), GreedyProposer()):
            expected = decode(target, prompt, by, max_new_tokens=24)
            assert_same(decode(target, prompt, by, max_new_tokens=24, rounds=rounds), expected)
    assert rounds.answers == 4


@pytest.mark.parametrize("shape", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_what_is_captured_once_serves_every_round(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations frozen at the first answer and done again later, at other lengths, behind other prompts."""
    monkeypatch.setattr(static, "Graphs", TapedGraphs)
    target = tiny_target("sliding", vocab=SMALL)
    rounds, stood = plainly(target), 0
    rounds._captures = True
    for number, prompt in enumerate([*random_prompts(2, vocab=SMALL), [1, 2], [4] * 21]):
        made = TapedGraphs.made
        for by in proposers_for(target, "sliding")[:: 1 if number < 1 else 2][:4]:
            options: dict[str, Any] = {"max_new_tokens": 15 + number, "seed": number, **shape}
            found = decode(target, prompt, by, rounds=rounds, **options)
            assert_same(found, decode(target, prompt, by, **options))
            stood += sum(found.stood_per_round)
        assert (TapedGraphs.made > made) or number > 0
    assert rounds.why_not == ""
    assert "CUDA graphs" in rounds.line()
    assert stood > 5


@pytest.mark.parametrize("length", [9, 10, 11, 12])
def test_borders_of_buckets_and_the_last_tokens_before_the_limit(length: int) -> None:
    """Limits that fill a bucket to the last column, one less and one more, down to answers of one token."""
    target = tiny_target("sliding", vocab=SMALL)
    by, rounds = DrafterProposer(tiny_drafter("sliding", vocab=SMALL), target.head()), plainly(target)
    prompt = random_prompts(1, seed=2, vocab=SMALL)[0][:1] * length
    for limit in (1, 2, 6, 15 - length % 4):
        found = decode(target, prompt, by, max_new_tokens=limit, rounds=rounds)
        assert_same(found, decode(target, prompt, by, max_new_tokens=limit))
        assert len(found.tokens) == limit


def test_a_stop_token_in_the_middle_of_a_block() -> None:
    target, prompt = tiny_target(), [1, 5, 2]

    class Oracle(PromptLookupProposer):
        def propose(self, tokens: list[int], width: int) -> tuple[Tensor, None]:
            return torch.tensor(text[len(tokens) : len(tokens) + width - 1]), None

    text = [*prompt, *plain_answer(target, prompt, 30, ())]
    stop = text[13]
    first = text.index(stop, 3)
    rounds = plainly(target)
    for _ in range(2):
        found = decode(target, prompt, Oracle(7), max_new_tokens=30, stop_ids=(stop,), rounds=rounds)
        assert found.tokens == text[3 : first + 1]
        assert found.finish_reason == "stop"
        assert_same(found, decode(target, prompt, Oracle(7), max_new_tokens=30, stop_ids=(stop,)))


@pytest.mark.parametrize("shape", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 6, "top_p": 0.9}])
def test_sampled_answers_are_those_of_the_eager_loop(shape: dict[str, Any]) -> None:
    """Random numbers are drawn in the same order, so even sampled tokens are equal."""
    target = tiny_target("sliding", vocab=SMALL)
    rounds, stood = plainly(target), 0
    for by in proposers_for(target, "sliding")[::2]:
        for seed, prompt in enumerate(random_prompts(2, vocab=SMALL)):
            expected = decode(target, prompt, by, max_new_tokens=20, seed=seed, **shape)
            found = decode(target, prompt, by, max_new_tokens=20, seed=seed, rounds=rounds, **shape)
            assert_same(found, expected)
            stood += sum(found.stood_per_round)
    assert stood > 5


def test_evaluation_says_which_way_it_went() -> None:
    target, drafter = tiny_target(vocab=SMALL), tiny_drafter(vocab=SMALL)
    prompts = random_prompts(2, vocab=SMALL)
    eager = evaluate(drafter, target, prompts, max_new_tokens=12)
    assert eager.setting["rounds"] == "eager"
    assert "no CUDA graphs on cpu" in eager.way
    found = evaluate(drafter, target, prompts, max_new_tokens=12, rounds=plainly(target))
    assert found.lossless is True
    assert found.tau == eager.tau
    assert found.setting["rounds"] == "static"
    assert "static shapes without graphs" in found.way


def test_options() -> None:
    target = tiny_target(layers=1)
    with pytest.raises(UserError, match="no CUDA graphs on cpu"):
        StaticRounds(target, "on")
    assert StaticRounds(target, "off", graphs=False).line() == "decoding: eager, as asked for"
    assert "eager, because" in StaticRounds(target).line()


def test_what_cannot_be_served_is_named() -> None:
    target = tiny_target()
    config = target.model.config
    assert obstacle(target) == ""
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "rotary frequencies change with length (dynamic)" in obstacle(target)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    config._attn_implementation = "flex_attention"
    assert "flex_attention" in obstacle(target)
    config._attn_implementation = "sdpa"
    config.layer_types = ["linear_attention", *config.layer_types[1:]]
    assert "snapshot and replay" in obstacle(target)
    config.layer_types = ["hybrid", *config.layer_types[1:]]
    assert "hybrid" in obstacle(target)


@pytest.mark.parametrize("fault", ["blind", "raises", "counts"])
def test_a_model_that_goes_its_own_way_is_found_out(fault: str) -> None:
    """It ignores masks, does not take them, or reads how long the cache is: right when eager, wrong when static."""
    target = tiny_target()
    decoder = type(target.decoder)

    class Odd(decoder):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Tensor, attention_mask: Any = None, **keywords: Any) -> Any:
            if attention_mask is not None:
                if fault == "raises":
                    raise ValueError("no masks, please")
                if fault == "blind":
                    attention_mask = {kind: torch.zeros_like(mask) for kind, mask in attention_mask.items()}
            if fault == "counts":
                past = keywords["past_key_values"].get_seq_length() if keywords.get("past_key_values") else 0
                keywords["position_ids"] = torch.arange(past, past + input_ids.shape[1])[None]
            return super().forward(input_ids, attention_mask=attention_mask, **keywords)

    target.decoder.__class__ = Odd
    by, prompt = DrafterProposer(tiny_drafter(), target.head()), random_prompts(1, seed=6)[0]
    expected = decode(target, prompt, by, max_new_tokens=15)
    rounds = StaticRounds(target, graphs=False)
    assert_same(decode(target, prompt, by, max_new_tokens=15, rounds=rounds), expected)
    assert rounds.answers == 0
    assert ("no masks, please" if fault == "raises" else "logits over a cache of static size") in rounds.why_not
    assert "eager, because" in rounds.line()
    with pytest.raises(UserError, match="--compile on"):
        decode(target, prompt, by, max_new_tokens=15, rounds=plainly(target))


def test_stale_columns_and_slots_that_do_not_count_leave_no_trace() -> None:
    """Caches full of large numbers from an earlier answer, in the target and in the drafter."""
    target = tiny_target("sliding", vocab=SMALL)
    by, rounds = DrafterProposer(tiny_drafter("sliding", vocab=SMALL), target.head()), plainly(target)
    prompt = random_prompts(1, seed=3, vocab=SMALL)[0][:5]
    expected = decode(target, prompt, by, max_new_tokens=23, rounds=rounds)
    assert rounds._cache is not None
    (drafting,) = rounds._draftings.values()
    with torch.inference_mode():
        for layer in rounds._cache.past:
            layer.all_keys.fill_(50.0)
            layer.all_values.fill_(-50.0)
        drafting.cache.keys.fill_(50.0)
        drafting.cache.values.fill_(50.0)
    assert_same(decode(target, prompt, by, max_new_tokens=23, rounds=rounds), expected)


def test_a_table_of_positions_is_not_asked_beyond_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that do not count stand on the last position that does."""
    target, seen = tiny_target(), []

    class Watched(static.View):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            rotary = self.model.get_decoder().rotary_emb
            rotary.register_forward_pre_hook(lambda _module, inputs: seen.append(int(inputs[1].max())))

    monkeypatch.setattr(static, "View", Watched)
    rounds = plainly(target)
    decode(target, [1, 2, 3], DrafterProposer(tiny_drafter(), target.head()), max_new_tokens=12, rounds=rounds)
    assert max(seen) == 3 + 12 - 1


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100, 2047, 2048, 2049, 5000, 40000])
def test_buckets(tokens: int) -> None:
    found = bucket(tokens)
    assert tokens <= found <= max(tokens + 15, tokens * 1.125)
    assert found % 16 == 0
    assert bucket(found) == found


def test_features_of_rejected_slots_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposer with a way of its own gets the features of what stood, and no others."""
    target, told = tiny_target(vocab=VOCAB), []

    class Listening(DrafterProposer):
        def observe(self, features_LF: Tensor, start: int) -> None:
            told.append((start, features_LF.clone()))
            super().observe(features_LF, start)

    by = Listening(tiny_drafter(), target.head())
    found = decode(target, [1, 2, 3], by, max_new_tokens=20, rounds=plainly(target))
    ours, told = told, []
    assert_same(found, decode(target, [1, 2, 3], by, max_new_tokens=20))
    assert [start for start, _ in ours] == [start for start, _ in told]
    for (_, mine), (_, theirs) in zip(ours, told, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
