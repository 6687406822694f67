"""A small byte-level BPE tokenizer, trained here, and chat templates in the manner of known families."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from draftsmith.bench.random_target import train_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same with a system prompt of its own, written only when the conversation brings none.
CHATML_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful smith.<|im_end|>\n{% endif %}" + CHATML
)
# What the assistant wrote is marked by the template itself; transformers can read the marks.
CHATML_GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Begin-of-text in the template, content stripped, nothing behind the end-of-turn token.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Thinking is removed from every assistant turn but the last; without thinking the prompt closes it at once.
THINKING = (
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# A second token closes the whole text whenever no answer is asked for: E_i is not the beginning of E_{i+1}.
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# No token ends a turn, only a newline.
NO_STOP = (
    "{% for m in messages %}{{ m.role | upper }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)
# The prompt opens a thought that the rendered answer does not have.
OPENS_THOUGHT = CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"
# Knows lists of parts and nothing else; a string would be walked through letter by letter.
PARTS_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn, please') }}{% endif %}" + CHATML

_HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|end|>",
]


def build_tokenizer(template: str | None = CHATML, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Trained on this file: enough merges for words, runs of newlines, and odd cuts."""
    texts = [
        Path(__file__).read_text(encoding="utf-8"),
        "\n\n\n\n \n\n a\n\nb\n\n" * 20,
        "user assistant system hello world " * 20,
    ]
    return train_tokenizer(texts, 600, SPECIAL, template, bos_token="<s>", eos_token=eos)
