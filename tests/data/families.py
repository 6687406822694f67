"""Chat templates in the manner of well-known model families, written from their published prompt formats.

Each family has its template, the tokens that its tokenizer adds, and one conversation as tokens must come out of it:
pieces of text and whether they are taught, a list for each document. The conversation is always the same: "Be brief"
from the system (where the family has one), "One?", "Yes", "Two?", "No".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, pre_tokenizers
from toy_tokenizer import build_tokenizer

Pieces = list[tuple[str, bool]]


@dataclass(frozen=True)
class Family:
    """A chat format.

    Attributes:
        template: Jinja source.
        specials: tokens that the tokenizer adds, marked special.
        eos: its end token.
        documents: what the conversation becomes.
        answers: the two answers as recorded.
        system: whether the conversation has a system turn.
        options: for the template.
        stop_ids: tokens at which generation stops, where the template does not show them.
    """

    template: str
    specials: tuple[str, ...]
    eos: str
    documents: list[Pieces]
    answers: tuple[str, str] = ("Yes", "No")
    system: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()

    def tokenizer(self) -> Any:
        tokenizer = build_tokenizer(self.template, eos="</s>")
        # Runs of newlines are tokens of their own, as in every family since 2023.
        words = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s?\S+|\s+"), "isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
        tokenizer.add_tokens(list(self.specials), special_tokens=True)
        tokenizer.eos_token = self.eos
        return tokenizer

    def messages(self) -> list[dict[str, str]]:
        said = [("user", "One?"), ("assistant", self.answers[0]), ("user", "Two?"), ("assistant", self.answers[1])]
        return [{"role": role, "content": content} for role, content in [("system", "Be brief")] * self.system + said]


def two(start: str, first: str, between: str, second: str) -> list[Pieces]:
    """One document in which both answers are taught."""
    return [[(start, False), (first, True), (between, False), (second, True)]]


FAMILIES: dict[str, Family] = {}

# A system turn of its own where the conversation brings none.
FAMILIES["Qwen2.5"] = Family(
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|endoftext|>",),
    "<|im_end|>",
    two(
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n",
        "Yes<|im_end|>",
        "\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n",
        "No<|im_end|>",
    ),
)

# Thoughts stay only behind the last user turn; without thinking the prompt closes an empty one.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}{% set answer = parts[-1].lstrip('\n') %}"
    "{% if loop.index0 > ns.last %}<think>\n"
    "{{ parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' }}\n</think>\n\n{% endif %}{{ answer }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_QWEN3_ONE = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
_QWEN3_TWO = _QWEN3_ONE + "Yes<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
FAMILIES["Qwen3, thinking"] = Family(
    QWEN3,
    ("<think>", "</think>"),
    "<|im_end|>",
    [
        [(_QWEN3_ONE, False), ("<think>\nhm\n</think>\n\nYes<|im_end|>", True)],
        [(_QWEN3_TWO, False), ("<think>\nha\n</think>\n\nNo<|im_end|>", True)],
    ],
    answers=("<think>\nhm\n</think>\n\nYes", "<think>ha</think>No"),
)
_EMPTY = "<think>\n\n</think>\n\n"
FAMILIES["Qwen3, not thinking"] = Family(
    QWEN3,
    ("<think>", "</think>"),
    "<|im_end|>",
    [[(_QWEN3_ONE + _EMPTY, False), ("Yes<|im_end|>", True)], [(_QWEN3_TWO + _EMPTY, False), ("No<|im_end|>", True)]],
    options={"enable_thinking": False},
)

# The system prompt lives inside the first user turn; blanks around everything.
FAMILIES["Llama 2"] = Family(
    "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = '<<SYS>>\n' ~ m.content ~ '\n<</SYS>>\n\n' %}"
    "{% elif m.role == 'user' %}{{ bos_token }}[INST] {{ ns.system ~ m.content.strip() }} [/INST]"
    "{% set ns.system = '' %}"
    "{% else %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}",
    (),
    "</s>",
    two("<s>[INST] <<SYS>>\nBe brief\n<</SYS>>\n\nOne? [/INST]", " Yes </s>", "<s>[INST] Two? [/INST]", " No </s>"),
)

_LLAMA3 = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
_LLAMA3_ASK = "<|start_header_id|>assistant<|end_header_id|>\n\n"
FAMILIES["Llama 3"] = Family(
    "{{ '<|begin_of_text|>' }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ("<|begin_of_text|>", "<|end_of_text|>"),
    "<|eot_id|>",
    two(
        "<|begin_of_text|>" + _LLAMA3.format("system", "Be brief") + _LLAMA3.format("user", "One?") + _LLAMA3_ASK,
        "Yes<|eot_id|>",
        _LLAMA3.format("user", "Two?") + _LLAMA3_ASK,
        "No<|eot_id|>",
    ),
)

# Writes a date, and a system turn whether there is one or not.
FAMILIES["Llama 3.1"] = Family(
    "{{ '<|begin_of_text|>' }}{% set first = messages[0] %}<|start_header_id|>system<|end_header_id|>\n\n"
    "Today Date: {{ date_string if date_string is defined else '26 Jul 2024' }}\n\n"
    "{% if first.role == 'system' %}{{ first.content | trim }}{% endif %}<|eot_id|>"
    "{% for m in (messages[1:] if first.role == 'system' else messages) %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ("<|begin_of_text|>", "<|eom_id|>"),
    "<|eot_id|>",
    two(
        "<|begin_of_text|>"
        + _LLAMA3.format("system", "Today Date: 1 May 2026\n\nBe brief")
        + _LLAMA3.format("user", "One?")
        + _LLAMA3_ASK,
        "Yes<|eot_id|>",
        _LLAMA3.format("user", "Two?") + _LLAMA3_ASK,
        "No<|eot_id|>",
    ),
    options={"date_string": "1 May 2026"},
)

_LLAMA4 = "<|header_start|>{}<|header_end|>\n\n{}<|eot|>"
_LLAMA4_ASK = "<|header_start|>assistant<|header_end|>\n\n"
FAMILIES["Llama 4"] = Family(
    "{{ '<|begin_of_text|>' }}{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}",
    ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>"),
    "<|eot|>",
    two(
        "<|begin_of_text|>" + _LLAMA4.format("system", "Be brief") + _LLAMA4.format("user", "One?") + _LLAMA4_ASK,
        "Yes<|eot|>",
        _LLAMA4.format("user", "Two?") + _LLAMA4_ASK,
        "No<|eot|>",
    ),
)

# The system prompt stands in the *last* user turn, so every turn rewrites those before it.
FAMILIES["Mistral"] = Family(
    "{% set system = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}{{ bos_token }}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ system if loop.index0 == ns.last else '' }}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    ("[INST]", "[/INST]"),
    "</s>",
    [
        [("<s>[INST]Be brief\n\nOne?[/INST]", False), ("Yes</s>", True)],
        [("<s>[INST]One?[/INST]Yes</s>[INST]Be brief\n\nTwo?[/INST]", False), ("No</s>", True)],
    ],
)

# The older spacing, and no system turn.
FAMILIES["Mistral 7B v0.1"] = Family(
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ ' ' if not loop.first }}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('user and assistant only') }}{% endif %}{% endfor %}",
    (),
    "</s>",
    two("<s>[INST] One? [/INST]", " Yes</s>", " [INST] Two? [/INST]", " No</s>"),
    system=False,
)

# Another name for the assistant, and no system turn.
FAMILIES["Gemma 2"] = Family(
    "{{ '<bos>' }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "<eos>",
    two(
        "<bos><start_of_turn>user\nOne?<end_of_turn>\n<start_of_turn>model\n",
        "Yes<end_of_turn>",
        "\n<start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n",
        "No<end_of_turn>",
    ),
    system=False,
)

# The system prompt goes into the first user turn.
FAMILIES["Gemma 3"] = Family(
    "{{ '<bos>' }}{% set system = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}"
    "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}{% for m in turns %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ system if loop.first }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "<eos>",
    two(
        "<bos><start_of_turn>user\nBe brief\n\nOne?<end_of_turn>\n<start_of_turn>model\n",
        "Yes<end_of_turn>",
        "\n<start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n",
        "No<end_of_turn>",
    ),
)

# A second token closes the whole text whenever no answer is asked for.
FAMILIES["Phi-3"] = Family(
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>"),
    "<|endoftext|>",
    two(
        "<|system|>\nBe brief<|end|>\n<|user|>\nOne?<|end|>\n<|assistant|>\n",
        "Yes<|end|>",
        "\n<|user|>\nTwo?<|end|>\n<|assistant|>\n",
        "No<|end|>",
    ),
)

FAMILIES["Phi-4"] = Family(
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}",
    ("<|im_sep|>", "<|endoftext|>"),
    "<|im_end|>",
    two(
        "<|im_start|>system<|im_sep|>Be brief<|im_end|><|im_start|>user<|im_sep|>One?<|im_end|>"
        "<|im_start|>assistant<|im_sep|>",
        "Yes<|im_end|>",
        "<|im_start|>user<|im_sep|>Two?<|im_end|><|im_start|>assistant<|im_sep|>",
        "No<|im_end|>",
    ),
)

_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_BEGIN, _END, _USER, _ASSISTANT = _DEEPSEEK
FAMILIES["DeepSeek-V3"] = Family(
    f"{_BEGIN}{{% for m in messages %}}{{% if m.role == 'system' %}}{{{{ m.content }}}}"
    f"{{% elif m.role == 'user' %}}{_USER}{{{{ m.content }}}}"
    f"{{% else %}}{_ASSISTANT}{{{{ m.content }}}}{_END}{{% endif %}}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{_ASSISTANT}{{% endif %}}",
    _DEEPSEEK,
    _END,
    two(f"{_BEGIN}Be brief{_USER}One?{_ASSISTANT}", f"Yes{_END}", f"{_USER}Two?{_ASSISTANT}", f"No{_END}"),
)

# Thoughts are hidden in every turn, the last one too, and the prompt opens one.
FAMILIES["DeepSeek-R1"] = Family(
    f"{_BEGIN}{{% for m in messages %}}{{% if m.role == 'system' %}}{{{{ m.content }}}}"
    f"{{% elif m.role == 'user' %}}{_USER}{{{{ m.content }}}}"
    f"{{% else %}}{_ASSISTANT}{{{{ m.content.split('</think>')[-1] }}}}{_END}{{% endif %}}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{_ASSISTANT}<think>\n{{% endif %}}",
    (*_DEEPSEEK, "<think>", "</think>"),
    _END,
    [
        [(f"{_BEGIN}Be brief{_USER}One?{_ASSISTANT}<think>\n", False), (f"hm\n</think>\n\nYes{_END}", True)],
        [
            (f"{_BEGIN}Be brief{_USER}One?{_ASSISTANT}\n\nYes{_END}{_USER}Two?{_ASSISTANT}<think>\n", False),
            (f"ha</think>No{_END}", True),
        ],
    ],
    answers=("<think>\nhm\n</think>\n\nYes", "<think>\nha</think>No"),
)

# Role marks that are no special tokens.
FAMILIES["Zephyr"] = Family(
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content ~ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    (),
    "</s>",
    two(
        "<|system|>\nBe brief</s>\n<|user|>\nOne?</s>\n<|assistant|>\n",
        "Yes</s>",
        "\n<|user|>\nTwo?</s>\n<|assistant|>\n",
        "No</s>",
    ),
)

FAMILIES["Vicuna"] = Family(
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} "
    "{% elif m.role == 'user' %}USER: {{ m.content }} "
    "{% else %}ASSISTANT: {{ m.content ~ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    (),
    "</s>",
    two("Be brief USER: One? ASSISTANT:", " Yes</s>", "USER: Two? ASSISTANT:", " No</s>"),
)

FAMILIES["Alpaca"] = Family(
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n"
    "{% elif m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n"
    "{% else %}### Response:\n{{ m.content ~ eos_token }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Response:\n{% endif %}",
    (),
    "</s>",
    two(
        "Be brief\n\n### Instruction:\nOne?\n\n### Response:\n",
        "Yes</s>",
        "\n\n### Instruction:\nTwo?\n\n### Response:\n",
        "No</s>",
    ),
)

_COHERE = ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>")
_COHERE_ROLES = ("<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")
_T, _E = _COHERE[1:]
_S, _U, _C = _COHERE_ROLES
FAMILIES["Command R"] = Family(
    f"<BOS_TOKEN>{{% for m in messages %}}{_T}"
    f"{{{{ {{'system': '{_S}', 'user': '{_U}', 'assistant': '{_C}'}}[m.role] }}}}{{{{ m.content.strip() }}}}{_E}"
    f"{{% endfor %}}{{% if add_generation_prompt %}}{_T}{_C}{{% endif %}}",
    (*_COHERE, *_COHERE_ROLES),
    _E,
    two(
        f"<BOS_TOKEN>{_T}{_S}Be brief{_E}{_T}{_U}One?{_E}{_T}{_C}",
        f"Yes{_E}",
        f"{_T}{_U}Two?{_E}{_T}{_C}",
        f"No{_E}",
    ),
)

# No token behind an answer: generation stops where the next turn would begin.
FAMILIES["GLM-4"] = Family(
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
    "<|endoftext|>",
    two(
        "[gMASK]<sop><|system|>\nBe brief<|user|>\nOne?<|assistant|>",
        "\nYes<|user|>",
        "\nTwo?<|assistant|>",
        "\nNo<|user|>",
    ),
    stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
)

# The last message ends in another token than the same message as history.
_HARMONY_ONE = "<|start|>developer<|message|>Be brief<|end|><|start|>user<|message|>One?<|end|><|start|>assistant"
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>")
FAMILIES["gpt-oss"] = Family(
    "{% for m in messages %}<|start|>{{ 'developer' if m.role == 'system' else m.role }}"
    "{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    _HARMONY,
    "<|return|>",
    [
        [(_HARMONY_ONE, False), ("<|channel|>final<|message|>Yes<|return|>", True)],
        [
            (
                _HARMONY_ONE + "<|channel|>final<|message|>Yes<|end|>"
                "<|start|>user<|message|>Two?<|end|><|start|>assistant",
                False,
            ),
            ("<|channel|>final<|message|>No<|return|>", True),
        ],
    ],
)

_GRANITE = "<|start_of_role|>{}<|end_of_role|>{}<|end_of_text|>\n"
_GRANITE_ASK = "<|start_of_role|>assistant<|end_of_role|>"
FAMILIES["Granite 3"] = Family(
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
    ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    "<|end_of_text|>",
    two(
        _GRANITE.format("system", "Be brief") + _GRANITE.format("user", "One?") + _GRANITE_ASK,
        "Yes<|end_of_text|>",
        "\n" + _GRANITE.format("user", "Two?") + _GRANITE_ASK,
        "No<|end_of_text|>",
    ),
)

# A newline behind every answer but the last.
FAMILIES["OLMo 2"] = Family(
    "{{ '<|endoftext|>' }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' }}{{ '\n' if not loop.last or m.role != 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    ("<|endoftext|>",),
    "<|endoftext|>",
    two(
        "<|endoftext|><|system|>\nBe brief\n<|user|>\nOne?\n<|assistant|>\n",
        "Yes<|endoftext|>",
        "\n<|user|>\nTwo?\n<|assistant|>\n",
        "No<|endoftext|>",
    ),
)

FAMILIES["OpenChat"] = Family(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% else %}GPT4 Correct {{ m.role | title }}: {{ m.content }}{% endif %}<|end_of_turn|>{% endfor %}"
    "{% if add_generation_prompt %}GPT4 Correct Assistant:{% endif %}",
    ("<|end_of_turn|>",),
    "<|end_of_turn|>",
    two(
        "<s>Be brief<|end_of_turn|>GPT4 Correct User: One?<|end_of_turn|>GPT4 Correct Assistant:",
        " Yes<|end_of_turn|>",
        "GPT4 Correct User: Two?<|end_of_turn|>GPT4 Correct Assistant:",
        " No<|end_of_turn|>",
    ),
)

_KIMI = "<|im_{0}|>{0}<|im_middle|>{1}<|im_end|>"
FAMILIES["Kimi K2"] = Family(
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
    ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
    "<|im_end|>",
    two(
        _KIMI.format("system", "Be brief") + _KIMI.format("user", "One?") + "<|im_assistant|>assistant<|im_middle|>",
        "Yes<|im_end|>",
        _KIMI.format("user", "Two?") + "<|im_assistant|>assistant<|im_middle|>",
        "No<|im_end|>",
    ),
)

# User turns have no end token.
FAMILIES["EXAONE 3"] = Family(
    "{% for m in messages %}[|{{ m.role }}|]{{ m.content }}{{ '[|endofturn|]' if m.role != 'user' }}\n{% endfor %}"
    "{% if add_generation_prompt %}[|assistant|]{% endif %}",
    ("[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]"),
    "[|endofturn|]",
    two(
        "[|system|]Be brief[|endofturn|]\n[|user|]One?\n[|assistant|]",
        "Yes[|endofturn|]",
        "\n[|user|]Two?\n[|assistant|]",
        "No[|endofturn|]",
    ),
)

FAMILIES["Seed-OSS"] = Family(
    "{% for m in messages %}<seed:bos>{{ m.role }}\n{{ m.content }}<seed:eos>{% endfor %}"
    "{% if add_generation_prompt %}<seed:bos>assistant\n{% endif %}",
    ("<seed:bos>", "<seed:eos>"),
    "<seed:eos>",
    two(
        "<seed:bos>system\nBe brief<seed:eos><seed:bos>user\nOne?<seed:eos><seed:bos>assistant\n",
        "Yes<seed:eos>",
        "<seed:bos>user\nTwo?<seed:eos><seed:bos>assistant\n",
        "No<seed:eos>",
    ),
)
