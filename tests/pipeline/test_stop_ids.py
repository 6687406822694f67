"""What generation stops at is taught, also where a template shows it only as the beginning of the next turn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from draftsmith.pipeline.plan import make_plan

# As GLM's: nothing ends an answer but the next turn's opening, and generation stops at that.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' if m['role'] == 'user' else 'assistant:' }}\n"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize("stops", [True, False])
def test_an_answers_end_is_taught_if_the_generation_config_names_it(
    tiny_run, tiny_target: Path, tmp_path: Path, stops: bool
) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    tokens = json.loads((target / "tokenizer.json").read_text())
    opening = next(token["id"] for token in tokens["added_tokens"] if token["content"] == "<|im_start|>")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": opening if stops else 999}))
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": role, "content": "the quick fox"} for role in ("user", "assistant") * 2]
    chats.write_text(
        "".join(json.dumps({"messages": [*turns, {**turns[0], "content": f"{n}"}, turns[1]]}) + "\n" for n in range(9))
    )
    plan = make_plan(tiny_run("run", target={"path": str(target)}, data={"train": str(chats), "held_out_share": 0.0}))
    row = plan.corpus.train.row(0)
    assert (int(row.tokens_S[row.loss_mask_S][-1]) == opening) == stops
