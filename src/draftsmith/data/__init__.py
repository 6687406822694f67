"""Conversations in, training rows out: read, tokenise with the model's own template, split, pack, stream."""

from draftsmith.data.conversations import Conversation, read_conversations
from draftsmith.data.corpus import Corpus, prepare_corpus
from draftsmith.data.packing import pack
from draftsmith.data.problems import Problem
from draftsmith.data.report import DataReport, Incident, PartReport
from draftsmith.data.stream import RowSource
from draftsmith.data.template import Tokenised, Tokeniser, tokenise

__all__ = [
    "Conversation",
    "Corpus",
    "DataReport",
    "Incident",
    "PartReport",
    "Problem",
    "RowSource",
    "Tokenised",
    "Tokeniser",
    "pack",
    "prepare_corpus",
    "read_conversations",
    "tokenise",
]
