"""Decoding: the target's own answers in batches, speculative decoding of one answer, and what a drafter is worth."""

from draftsmith.decode.evaluate import Evaluation, evaluate
from draftsmith.decode.figures import Figures
from draftsmith.decode.generate import Answer, generate
from draftsmith.decode.proposers import DrafterProposer, GreedyProposer, PromptLookupProposer, Proposer
from draftsmith.decode.rounds import stop_ids_of
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.speculative import Decoded, decode
from draftsmith.decode.static import StaticRounds
from draftsmith.decode.ties import Tie

__all__ = [
    "Answer",
    "Decoded",
    "DrafterProposer",
    "Evaluation",
    "Figures",
    "GreedyProposer",
    "PromptLookupProposer",
    "Proposer",
    "Sampling",
    "StaticRounds",
    "Tie",
    "decode",
    "evaluate",
    "generate",
    "stop_ids_of",
]
