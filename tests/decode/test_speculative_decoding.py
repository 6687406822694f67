"""The decoding loop: the target's own greedy answer for every proposer, and z-lab's decoder round by round."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoding import VOCAB, plain_answer, random_prompts, tiny_drafter, tiny_target
from torch import Tensor

from draftsmith.decode import (
    Decoded,
    DrafterProposer,
    GreedyProposer,
    PromptLookupProposer,
    Proposer,
    Sampling,
    decode,
)
from draftsmith.drafter import save_drafter
from draftsmith.errors import UserError

STOPS = (7, 9)


class Oracle:
    """Proposes the target's own answer, with every `wrong`-th draft spoilt: makes rounds of every length."""

    taps: tuple[int, ...] = ()

    def __init__(self, answer: list[int], prompt: list[int], block_size: int, wrong: int) -> None:
        self.block_size, self._text, self._wrong = block_size, prompt + answer, wrong

    def start(self, max_length: int, device: torch.device, sampling: Sampling, generator: torch.Generator) -> None:
        pass

    def observe(self, features_LF: Tensor, start: int) -> None:
        raise AssertionError

    def propose(self, tokens: list[int], width: int) -> tuple[Tensor, None]:
        places = range(len(tokens), len(tokens) + width - 1)
        right = [self._text[place] if place < len(self._text) else 0 for place in places]
        return torch.tensor([(t + (p % self._wrong == 0)) % VOCAB for t, p in zip(right, places, strict=True)]), None


@pytest.mark.parametrize("kind", ["full", "sliding", "llama"])
def test_every_proposer_gives_the_targets_own_answer(kind: str) -> None:
    target, drafter = tiny_target(kind), tiny_drafter(kind)
    for number, prompt in enumerate(random_prompts(3)):
        expected = plain_answer(target, prompt, 26, STOPS)
        proposers: list[Proposer] = [
            GreedyProposer(),
            DrafterProposer(drafter, target.head()),
            DrafterProposer(drafter, target.head(), block_size=3),
            PromptLookupProposer(5),
            *(Oracle(expected, prompt, block_size, wrong) for block_size, wrong in ((2, 3), (7, 3), (7, 5), (7, 1000))),
        ]
        for proposer in proposers:
            answer = decode(target, prompt, proposer, max_new_tokens=26, stop_ids=STOPS)
            assert answer.tokens == expected, (number, type(proposer))
            assert sum(answer.accepted_per_round) == len(answer.tokens) - 1
            assert answer.finish_reason == ("stop" if expected[-1] in STOPS else "length")
            # A round emits what stood and one token of the target's own, unless it was clipped.
            assert all(
                emitted == stood + 1
                for emitted, stood in zip(answer.accepted_per_round[:-1], answer.stood_per_round[:-1], strict=True)
            )


def test_perfect_drafts_take_one_forward_per_block() -> None:
    target, prompt = tiny_target(), random_prompts(1)[0]
    expected = plain_answer(target, prompt, 29, ())
    answer = decode(target, prompt, Oracle(expected, prompt, 7, 1000), max_new_tokens=29)
    # 1 token from the prefill, then 7 per forward.
    assert answer.accepted_per_round == [7, 7, 7, 7]
    assert answer.stood_per_round == answer.drafted_per_round == [6, 6, 6, 6]
    # One more token is a block of one: with the limit a token away nothing is left to draft.
    answer = decode(target, prompt, Oracle(expected, prompt, 7, 1000), max_new_tokens=30)
    assert answer.accepted_per_round == [7, 7, 7, 7, 1]


def test_what_stands_behind_a_stop_token_is_not_counted() -> None:
    target, prompt = tiny_target(), random_prompts(1, seed=3)[0]
    free = plain_answer(target, prompt, 40, ())
    place = 10
    stop = free[place]
    expected = free[: free.index(stop) + 1]
    answer = decode(target, prompt, Oracle(free, prompt, 8, 1000), max_new_tokens=40, stop_ids=[stop])
    assert answer.tokens == expected
    assert answer.finish_reason == "stop"
    assert sum(answer.accepted_per_round) == len(expected) - 1
    assert answer.drafted_per_round[-1] <= answer.accepted_per_round[-1]
    first = decode(target, prompt, GreedyProposer(), max_new_tokens=40, stop_ids=[free[0]])
    assert (first.tokens, first.accepted_per_round, first.finish_reason) == ([free[0]], [], "stop")


@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("block_size", [4, 8])
def test_same_rounds_as_the_reference_decoder(kind: str, block_size: int, tmp_path: Path, monkeypatch: Any) -> None:
    zlab = pytest.importorskip("dflash.model", reason="the reference decoder is installed by `make test`")
    # Statistics of the reference wait for a GPU even where there is none.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    target, drafter = tiny_target(kind, vocab=11), tiny_drafter(kind, block_size, vocab=11)
    save_drafter(drafter, tmp_path)
    reference = zlab.DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rounds: list[int] = []
    for prompt in random_prompts(4, seed=5, vocab=11):
        for limit in (1, 2, 33):
            theirs = zlab.dflash_generate(
                reference, target.model, torch.tensor([prompt]), limit, list(STOPS), return_stats=True
            )
            ours = decode(target, prompt, DrafterProposer(drafter, target.head()), max_new_tokens=limit, stop_ids=STOPS)
            assert ours.tokens == theirs.output_ids[0, len(prompt) :].tolist()
            assert ours.accepted_per_round == theirs.acceptance_lengths
            rounds += ours.accepted_per_round
    # Without accepted drafts the comparison would say little; random ones are right by chance.
    assert max(rounds) >= 3
    assert sum(rounds) > 1.1 * len(rounds)


def test_decoding_leaves_the_target_as_it_was_while_another_thread_uses_it() -> None:
    target, drafter = tiny_target("sliding"), tiny_drafter("sliding")
    prompt = random_prompts(1, seed=9)[0]
    hooks = [len(module._forward_hooks) for module in target.model.modules()]
    implementation = target.model.config._attn_implementation
    row = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(2))
    document, positions = torch.zeros(40, dtype=torch.int32), torch.arange(40)

    def features() -> Tensor:
        return target.features(row, document, positions, (0, 2)).taps_SF

    target.packing = "mask"
    expected_features, failures, stop = features(), [], threading.Event()

    def other() -> None:
        while not stop.is_set():
            if not torch.equal(features(), expected_features):
                failures.append("features differ")

    thread = threading.Thread(target=other)
    thread.start()
    try:
        answers = [decode(target, prompt, DrafterProposer(drafter, target.head()), max_new_tokens=25) for _ in range(3)]
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert all(answer.tokens == plain_answer(target, prompt, 25, ()) for answer in answers)
    assert [len(module._forward_hooks) for module in target.model.modules()] == hooks
    assert target.model.config._attn_implementation == implementation


def test_prompt_lookup_copies_what_followed_the_latest_longest_match() -> None:
    def proposals(tokens: list[int], width: int, **sizes: int) -> list[int]:
        """Grown token by token, as in decoding, and checked against a search through the whole text."""
        proposer = PromptLookupProposer(8, **sizes)
        proposer.start(100, torch.device("cpu"), Sampling(), torch.Generator())
        found: list[int] = []
        for end in range(1, len(tokens) + 1):
            found = proposer.propose(tokens[:end], width)[0].tolist()
            assert found == slow_lookup(tokens[:end], width, sizes.get("longest", 3), sizes.get("shortest", 1))
        return found

    def slow_lookup(tokens: list[int], width: int, longest: int, shortest: int) -> list[int]:
        for size in range(longest, shortest - 1, -1):
            for start in range(len(tokens) - size - 1, -1, -1):
                if size <= len(tokens) and tokens[start : start + size] == tokens[-size:]:
                    return tokens[start + size : start + size + width - 1]
        return []

    assert proposals([1, 2, 3, 4, 9, 1, 2, 3], 4) == [4, 9, 1]
    assert proposals([1, 2, 5, 1, 2, 6, 8, 1, 2], 3) == [6, 8]
    assert proposals([1, 2, 3], 4) == []
    assert proposals([4, 4, 4], 4) == [4]
    assert proposals([1, 2, 3, 2], 5, longest=2, shortest=2) == []
    proposals(torch.randint(0, 4, (60,), generator=torch.Generator().manual_seed(0)).tolist(), 6)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {"max_new_tokens": 4}, "no tokens"),
        ([1], {"max_new_tokens": 0}, "no room"),
        ([1], {"max_new_tokens": 4, "temperature": -1.0}, "temperature"),
        ([1], {"max_new_tokens": 4, "temperature": 1.0, "top_p": 0.0}, "top_p"),
        ([1], {"max_new_tokens": 4, "temperature": 1.0, "top_k": -1}, "top_k"),
    ],
)
def test_wrong_requests_are_named(prompt: list[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        decode(tiny_target(layers=1), prompt, GreedyProposer(), **options)


def test_unknown_layers_and_wrong_block_sizes_are_refused() -> None:
    target = tiny_target()
    with pytest.raises(UserError, match="block size 7"):
        DrafterProposer(tiny_drafter(block_size=6), target.head(), block_size=7)
    target.model.config.layer_types = ["hybrid", *target.model.config.layer_types[1:]]
    with pytest.raises(UserError, match="hybrid"):
        decode(target, [1, 2], GreedyProposer(), max_new_tokens=3)


def test_times_are_measured() -> None:
    target, drafter = tiny_target(), tiny_drafter()
    answer: Decoded = decode(target, [1, 2, 3], DrafterProposer(drafter, target.head()), max_new_tokens=20)
    assert answer.prefill_seconds > 0
    assert 0 < answer.draft_seconds < answer.seconds
    assert answer.target_forwards == len(answer.drafted_per_round)
