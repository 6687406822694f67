"""Captured rounds on a GPU: the tokens of rounds that are not captured, whatever is replayed after whatever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_decoding import random_prompts, tiny_drafter, tiny_target
from torch import Tensor

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
from draftsmith.drafter import DraftModel
from draftsmith.errors import UserError
from draftsmith.target.forward import Target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SMALL = 11
STOPS = (7, 9)
GREEDY: dict[str, Any] = {}
SAMPLED = {"temperature": 0.9, "top_k": 8, "top_p": 0.95}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "SMALLEST_BUCKET", 32)


def pair(kind: str, dtype: torch.dtype) -> tuple[Target, DraftModel]:
    target, drafter = tiny_target(kind, vocab=SMALL), tiny_drafter(kind, vocab=SMALL)
    target.model.to("cuda", dtype)
    return target, drafter.to("cuda", dtype)


def assert_same(found: Decoded, expected: Decoded) -> None:
    assert found.tokens == expected.tokens
    assert found.accepted_per_round == expected.accepted_per_round
    assert found.stood_per_round == expected.stood_per_round


@pytest.mark.parametrize("shape", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["full", "sliding", "llama"])
def test_graphs_give_the_tokens_of_plain_rounds(kind: str, dtype: torch.dtype, shape: dict[str, Any]) -> None:
    """All proposers in turn over the same caches, so that graphs are replayed in an order other than captured."""
    target, drafter = pair(kind, dtype)
    captured, plain = StaticRounds(target, "on"), StaticRounds(target, "on", graphs=False)
    proposers: list[Proposer] = [
        DrafterProposer(drafter, target.head()),
        GreedyProposer(),
        DrafterProposer(drafter, target.head(), block_size=3),
        PromptLookupProposer(5),
    ]
    stood = 0
    for number, prompt in enumerate([*random_prompts(3, vocab=SMALL), [1] * 60, [3, 4]]):
        for by in proposers:
            options = {"max_new_tokens": 25 + number, "stop_ids": STOPS if number % 2 else (), "seed": number, **shape}
            found = decode(target, prompt, by, rounds=captured, **options)
            assert_same(found, decode(target, prompt, by, rounds=plain, **options))
            if dtype == torch.float32:
                assert_same(found, decode(target, prompt, by, **options))
            stood += sum(found.stood_per_round)
            assert 0 <= found.draft_seconds <= found.seconds
            assert 0 < found.target_seconds <= found.seconds or not found.accepted_per_round
    assert (captured.why_not, plain.why_not) == ("", "")
    assert stood > 20


def test_a_second_drafter_and_new_weights_of_the_first() -> None:
    """Graphs read weights where they lie: changed in place they count, and another drafter has graphs of its own."""
    target, drafter = pair("full", torch.float32)
    other = tiny_drafter(seed=9, vocab=SMALL).to("cuda")
    rounds, prompt = StaticRounds(target, "on"), random_prompts(1, vocab=SMALL)[0]
    for model in (drafter, other, drafter):
        by = DrafterProposer(model, target.head())
        assert_same(decode(target, prompt, by, max_new_tokens=30, rounds=rounds),
                    decode(target, prompt, by, max_new_tokens=30))  # fmt: skip
    drafter.load_state_dict(other.state_dict())
    by = DrafterProposer(drafter, target.head())
    expected = decode(target, prompt, DrafterProposer(other, target.head()), max_new_tokens=30)
    assert_same(decode(target, prompt, by, max_new_tokens=30, rounds=rounds), expected)


def test_evaluation_takes_graphs_by_itself() -> None:
    target, drafter = pair("sliding", torch.float32)
    prompts = random_prompts(3, vocab=SMALL)
    found = evaluate(drafter, target, prompts, max_new_tokens=30)
    assert found.lossless is True
    assert found.setting["rounds"] == "graphs"
    assert "CUDA graphs" in found.way
    eager = evaluate(drafter, target, prompts, max_new_tokens=30, rounds=StaticRounds(target, "off"))
    assert eager.setting["rounds"] == "eager"
    assert eager.tau == found.tau


def test_a_forward_that_waits_for_the_device_decodes_eagerly_and_says_so() -> None:
    target, drafter = pair("full", torch.float32)
    decoder = type(target.decoder)

    class Curious(decoder):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Tensor, **keywords: Any) -> Any:
            assert int(input_ids.max()) < SMALL
            return super().forward(input_ids, **keywords)

    target.decoder.__class__ = Curious
    by, prompt = DrafterProposer(drafter, target.head()), random_prompts(1, vocab=SMALL)[0]
    rounds = StaticRounds(target)
    found = decode(target, prompt, by, max_new_tokens=20, rounds=rounds)
    assert "waits for the device" in rounds.why_not
    assert torch.cuda.get_sync_debug_mode() == 0
    assert_same(found, decode(target, prompt, by, max_new_tokens=20))
    with pytest.raises(UserError, match="waits for the device"):
        decode(target, prompt, by, max_new_tokens=20, rounds=StaticRounds(target, "on"))


def test_a_round_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's alarm on from the first token to the last: what a greedy round reads back comes without a sync."""
    target, drafter = pair("full", torch.float32)
    by, prompt = DrafterProposer(drafter, target.head()), random_prompts(1, vocab=SMALL)[0]
    rounds = StaticRounds(target, "on")
    expected = decode(target, prompt, by, max_new_tokens=30, rounds=rounds)

    def alarm(tokens: list[int], drafted: int) -> None:
        torch.cuda.set_sync_debug_mode("error")

    stop = static.Stopwatch.stop

    def stopped(watch: Any) -> float:
        torch.cuda.set_sync_debug_mode("default")
        return stop(watch)

    monkeypatch.setattr(static.Stopwatch, "stop", stopped)
    try:
        found = decode(target, prompt, by, max_new_tokens=30, rounds=rounds, on_round=alarm)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.tokens == expected.tokens
