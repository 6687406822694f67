"""The tokenizer inside a GGUF file, as the file states it.

transformers 5 builds it from the *architecture's* rules: for a Llama-architecture file it swaps the begin and end
tokens, drops the padding token, splits numbers and words as GPT-2 does whatever `tokenizer.ggml.pre` says, and of a
Qwen file's special tokens it knows three. A target would then be shown text that it never saw in training. Byte-level
vocabularies ("gpt2") with a known splitter are therefore built here, from the header alone; others keep transformers'
conversion and get their special tokens and template from the header.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from draftsmith.target.gguf_header import Header

# Token types of the header.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(header: Header) -> Any | None:
    """Tokenizer of a byte-level vocabulary, exactly as the file states it; None if it is of another kind."""
    values = header.values
    splitter = _SPLITTERS.get(values.get("tokenizer.ggml.pre", ""))
    if values.get("tokenizer.ggml.model") != "gpt2" or splitter is None:
        return None
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    # Unused entries only fill the embedding up to a round number: leaving them out makes them padded rows.
    vocabulary = {token: row for row, token in enumerate(tokens) if types[row] != _UNUSED}
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    pre, normalizer, ignore_merges = splitter
    backend = Tokenizer(BPE(vocabulary, merges, ignore_merges=ignore_merges))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    _add_special_tokens(backend, header)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=values.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        add_bos_token=bool(values.get("tokenizer.ggml.add_bos_token", False)),
        **_named_tokens(header),
    )


def mend_tokenizer(tokenizer: Any, header: Header) -> Any:
    """Gives a tokenizer that transformers converted the special tokens and template of the file. Returns it."""
    _add_special_tokens(tokenizer.backend_tokenizer, header)
    for name, token in _named_tokens(header).items():
        setattr(tokenizer, name, token)
    tokenizer.chat_template = header.values.get("tokenizer.chat_template")
    # llama.cpp's own defaults: sentencepiece vocabularies begin with the begin token, byte-level ones do not.
    default = header.values.get("tokenizer.ggml.model") == "llama"
    tokenizer.add_bos_token = bool(header.values.get("tokenizer.ggml.add_bos_token", default))
    return tokenizer


def _add_special_tokens(backend: Tokenizer, header: Header) -> None:
    """Makes control tokens special, and both these and the converter's own additions whole."""
    tokens, types = header.values["tokenizer.ggml.tokens"], header.values.get("tokenizer.ggml.token_type", [])
    special = [tokens[row] for row, kind in enumerate(types) if kind == _CONTROL]
    plain = [tokens[row] for row, kind in enumerate(types) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])


def _named_tokens(header: Header) -> dict[str, str]:
    """bos_token, eos_token, … as strings, for those that the file names."""
    tokens = header.values["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: header.values.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    found["mask_token"] = header.values.get("tokenizer.ggml.mask_token_id")
    return {name: tokens[row] for name, row in found.items() if row is not None and 0 <= row < len(tokens)}


def _byte_level(pattern: str | None = None, digits: bool = False) -> Any:
    """Bytes as visible characters, after a split by `pattern` (none: GPT-2's) and, if asked, around each digit."""
    steps: list[Any] = []
    if digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    return pre_tokenizers.Sequence(steps)


# `tokenizer.ggml.pre` → (pre-tokenizer, normalizer, whether a whole word of the vocabulary skips the merges).
_SPLITTERS: dict[str, tuple[Any, Any, bool]] = {
    "gpt-2": (_byte_level(), None, False),
    "smollm": (_byte_level(digits=True), None, False),
    "llama-bpe": (_byte_level(_WORDS + r"|\p{N}{1,3}" + _REST), None, True),
    "qwen2": (_byte_level(_WORDS + r"|\p{N}" + _REST), normalizers.NFC(), False),
    "qwen35": (_byte_level(_MARKED), normalizers.NFC(), False),
}
