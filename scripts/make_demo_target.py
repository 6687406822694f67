"""Train the small target that the package carries for `draftsmith demo`.

What comes out (`--out DIR`): a Qwen3-architecture causal language model in bf16 safetensors, its tokenizer with a chat
template, the demo's prompts (`prompts.train.jsonl`, `prompts.held_out.jsonl`) and `training.json` (how it was made, how
well it does). Needs torch, transformers, tokenizers and numpy, and no network.

Algorithm
1. Read Python files (by default the running interpreter's own standard library with its tests). A file is held out
   by the hash of its path.
2. Cut every function out of them as a chat of two turns: the user gives the place, the signature and the first
   paragraph of the docstring, the assistant answers with the body. Chats end, so greedy answers end too instead of
   running into a loop. Bodies that repeat themselves (few distinct 4-grams) are left out: they teach looping.
   A share of plain file text is mixed in.
3. Train a byte-level BPE tokenizer on that text.
4. Train deep and thin (a CPU forward costs about the same per layer whatever the width) with AdamW and a cosine
   schedule on a stream of shuffled documents, and take the state with the lowest held-out loss (saved as `base/`).
5. Polish, a few rounds: the model answers training prompts greedily; the answers that end by themselves and do not
   loop go back into the training text for a few hundred updates. What a larger model has from its instruction tuning:
   answers that end, and a mode that is worth following.
6. Answer held-out prompts greedily, report length and looping, and choose the demo's held-out prompts: from held-out
   files, no 8-gram of tokens in common with any training prompt, answers of some length that do not loop.

Cost: about 8 M tokens of text; some 3 M parameters; three minutes on one H200. `--steps 20 --device cpu
--limit-files 60` is a smoke test of a minute. With `--steps` the run follows from `--seed`; with `--minutes` the number
of steps comes from the measured speed, is printed, and stands in `training.json`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import random
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

END_OF_TEXT, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, MASK)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LEFT_OUT_FOLDERS = {"site-packages", "__pycache__", "pydoc_data"}
LOOP_GRAM = 4  # an answer loops when fewer than LOOP_SHARE of its 4-grams are distinct
LOOP_SHARE = 0.6
MIN_HELD_OUT = 24  # tokens of a held-out prompt's answer: shorter ones are two or three rounds of decoding
SHARED_GRAM = 8  # a held-out prompt shares no 8-gram of tokens with a training prompt
WARMUP_STEPS = 100  # also the steps over which the speed is measured when --minutes sets the schedule


@dataclass(frozen=True)
class SourceFile:
    path: str
    text: str
    held_out: bool


@dataclass(frozen=True)
class Example:
    """One function: `user` names it, `answer` is its body."""

    user: str
    answer: str
    held_out: bool


# ---------------------------------------------------------------------------------------------------------------- text


def read_sources(root: Path, held_out_share: float, limit: int | None) -> list[SourceFile]:
    """All parseable UTF-8 Python files under `root`, sorted by path; held out by the hash of the path."""
    paths = sorted(p for p in root.rglob("*.py") if not LEFT_OUT_FOLDERS.intersection(p.relative_to(root).parts))
    if limit is not None:  # spread over the folders instead of the first few of them
        paths = sorted(paths, key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest())[:limit]
    files = []
    for path in paths:
        name = path.relative_to(root).as_posix()
        try:
            text = path.read_text(encoding="utf-8")
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
            continue  # the library's tests hold files that are broken on purpose
        if any(token in text for token in SPECIAL_TOKENS):
            continue
        draw = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
        files.append(SourceFile(name, text, draw < held_out_share))
    return files


def functions_of(body: Sequence[ast.stmt], owner: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions of a module and of its classes with their owner's name; functions inside functions stay inside."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner, node
        elif isinstance(node, ast.ClassDef):
            yield from functions_of(node.body, f"{owner}.{node.name}")
        else:
            for field in ("body", "orelse", "finalbody"):
                if isinstance(inner := getattr(node, field, None), list):
                    yield from functions_of(inner, owner)


def example_of(owner: str, node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], held_out: bool) -> Any:
    """The chat made of one function, or None if it has no body of its own lines."""
    documented = ast.get_docstring(node) is not None
    body = node.body[1:] if documented else node.body
    if not body:
        return None
    first = min([body[0].lineno, *(d.lineno for d in getattr(body[0], "decorator_list", []))])
    head_end = node.body[0].lineno - 1 if documented else first - 1  # lines before it, comments included, are asked
    answer_start = node.body[0].end_lineno if documented else first - 1
    if head_end < node.lineno or answer_start is None or answer_start >= first:
        return None  # a one-liner
    head = textwrap.dedent("\n".join(lines[node.lineno - 1 : head_end])).rstrip()
    if documented:
        paragraph = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
        head += "\n" + textwrap.indent(f'"""{paragraph}"""', "    ")
    answer = textwrap.dedent("\n".join(lines[answer_start : node.end_lineno])).strip("\n").rstrip()
    if not answer or answer[0].isspace():
        return None  # a string that reaches the margin keeps the body from being dedented
    return Example(f"{owner}\n{head}", answer, held_out)


def extract_examples(files: Iterable[SourceFile]) -> list[Example]:
    """One chat per function, exact duplicates once (a held-out one goes if a training file has the same)."""
    seen: set[str] = set()
    examples = []
    for file in sorted(files, key=lambda f: f.held_out):
        module = file.path.removesuffix(".py").removesuffix("/__init__").rsplit("/", 1)[-1]
        lines = file.text.split("\n")
        for owner, node in functions_of(ast.parse(file.text).body, module):
            example = example_of(owner, node, lines, file.held_out)
            if example is not None and example.answer not in seen:
                seen.add(example.answer)
                examples.append(example)
    return examples


def chat_text(example: Example) -> str:
    """What CHAT_TEMPLATE makes of the two turns; `check_template` holds the two to each other."""
    return prompt_text(example.user) + f"{example.answer}{TURN_END}\n"


def prompt_text(user: str) -> str:
    return f"{TURN_START}user\n{user}{TURN_END}\n{TURN_START}assistant\n"


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """bf16 weights and the tokenizer; the model stays as it is, in fp32."""
    state = {name: weight.detach().to(torch.bfloat16) for name, weight in model.state_dict().items()}
    copy: Any = Qwen3ForCausalLM(model.config)
    copy.to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.generation_config = model.generation_config
    copy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def distinct_share(tokens: Sequence[int], gram: int = LOOP_GRAM) -> float:
    """Distinct n-grams over n-grams, 1.0 for a text too short to have any."""
    grams = [tuple(tokens[i : i + gram]) for i in range(len(tokens) - gram + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


# ----------------------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; ids 0..3 are the special tokens, and <|mask|> is never written into any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=END_OF_TEXT,
        eos_token=TURN_END,
        mask_token=MASK,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=2048,
    )


def check_template(tokenizer: Any, example: Example) -> None:
    """The text trained on is the text the chat template makes, and a round trip keeps it."""
    turns = [{"role": "user", "content": example.user}, {"role": "assistant", "content": example.answer}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == chat_text(example)
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == prompt_text(example.user)
    assert tokenizer.decode(encode(tokenizer, [chat_text(example)])[0]) == chat_text(example)


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids; a few texts at a time, because the tokenizer's own records are a hundred bytes a token."""
    tokenizer.backend_tokenizer.no_padding()  # a call of the tokenizer with padding leaves it switched on
    ids: list[list[int]] = []
    for start in range(0, len(texts), 256):
        batch = tokenizer.backend_tokenizer.encode_batch_fast(texts[start : start + 256], add_special_tokens=False)
        ids += [encoding.ids for encoding in batch]
    return ids


# ---------------------------------------------------------------------------------------------------------------- data


@dataclass
class Texts:
    """Token ids of what is trained on and what is held out; every document ends with its end token."""

    chats: list[np.ndarray]
    plain: list[np.ndarray]
    held_out: list[np.ndarray]
    train_examples: list[Example]
    held_out_examples: list[Example]


def tokenise(files: list[SourceFile], examples: list[Example], tokenizer: Any, args: argparse.Namespace) -> Texts:
    """Chats within the length limits and without repetition; plain text of the training files in pieces."""
    bodies = encode(tokenizer, [e.answer for e in examples])
    fits = [
        args.min_answer <= len(body) <= args.max_answer and distinct_share(body) >= LOOP_SHARE and len(e.user) <= 480
        for e, body in zip(examples, bodies, strict=True)
    ]
    examples = [e for e, ok in zip(examples, fits, strict=True) if ok]
    chats = [np.array(ids, dtype=np.int32) for ids in encode(tokenizer, [chat_text(e) for e in examples])]
    plain = []
    for ids in encode(tokenizer, [f.text for f in files if not f.held_out]):
        pieces = [ids[i : i + args.length] for i in range(0, len(ids), args.length)]
        plain += [np.array([*p, 0], dtype=np.int32) for p in pieces if distinct_share(p) >= LOOP_SHARE]
    mask_id = tokenizer.mask_token_id
    assert not any((ids == mask_id).any() for ids in [*chats, *plain])
    return Texts(
        chats=[c for c, e in zip(chats, examples, strict=True) if not e.held_out],
        plain=plain,
        held_out=[c for c, e in zip(chats, examples, strict=True) if e.held_out],
        train_examples=[e for e in examples if not e.held_out],
        held_out_examples=[e for e in examples if e.held_out],
    )


def rows_of(documents: list[np.ndarray], length: int, device: torch.device) -> torch.Tensor:
    """int64 [rows, length + 1] on the device: the documents one after another, cut into rows; the rest is dropped."""
    stream = np.concatenate(documents)
    rows = max(1, len(stream) // (length + 1))
    stream = np.resize(stream, rows * (length + 1))
    return torch.from_numpy(stream.astype(np.int64)).view(rows, length + 1).to(device)


def epoch_rows(texts: Texts, args: argparse.Namespace, epoch: int, device: torch.device) -> torch.Tensor:
    """The rows of one epoch: every chat, and plain pieces drawn until they make up their share of the tokens."""
    draw = random.Random(f"{args.seed}/{epoch}")
    wanted = sum(map(len, texts.chats)) * args.plain_share / (1 - args.plain_share)
    documents = list(texts.chats)
    for piece in draw.sample(texts.plain, len(texts.plain)):
        if wanted <= 0:
            break
        documents.append(piece)
        wanted -= len(piece)
    draw.shuffle(documents)
    return rows_of(documents, args.length, device)


# ------------------------------------------------------------------------------------------------------------ training


def build_model(args: argparse.Namespace, vocab_size: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(TURN_END),
        pad_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # each layer adds twice to the residual stream: keep its variance from growing with depth
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_((2 * args.layers) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * args.layers) ** -0.5)
    return model


def head_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of hidden [R, S, H] against labels [R, S] through the tied head [V, H]."""
    logits = hidden @ head.t()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def learning_rate(step: int, steps: int | None, peak: float) -> float:
    """Linear warm-up, then cosine to 3 % of the peak; `steps` may still be unknown during the warm-up."""
    warmup = WARMUP_STEPS if steps is None else min(WARMUP_STEPS, max(1, steps // 10))
    if step < warmup or steps is None:
        return peak * (step + 1) / warmup
    return peak * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


class Trainer:
    """The loop around model, optimizer and held-out loss; keeps the best state on the CPU."""

    def __init__(self, model: Qwen3ForCausalLM, texts: Texts, args: argparse.Namespace, device: torch.device) -> None:
        self.model, self.texts, self.args, self.device = model, texts, args, device
        self.loss_of = head_loss
        if args.compile:  # in place and layer by layer: one graph serves all layers, names of weights stay
            for layer in model.model.layers:
                layer.compile(dynamic=False)
            self.loss_of = torch.compile(head_loss, dynamic=False)
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")
        held_out = rows_of(texts.held_out, args.length, device)
        self.held_out_rows = held_out[: max(1, min(len(held_out) // args.rows, 16)) * args.rows]
        self.best = (math.inf, 0)
        self.best_state: dict[str, torch.Tensor] = {}

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = self.model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
            return self.loss_of(hidden, self.model.lm_head.weight, rows[:, 1:])

    @torch.no_grad()
    def held_out_loss(self) -> float:
        batches = self.held_out_rows.split(self.args.rows)
        return sum(float(self.loss(batch)) * len(batch) for batch in batches) / len(self.held_out_rows)

    def update(self, batch: torch.Tensor, rate: float) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def polish(self, answered: list[np.ndarray], steps: int) -> dict[str, Any]:
        """Updates on the model's own answers mixed with some of the chats; the rate falls to zero."""
        draw, queue, running = random.Random(f"{self.args.seed}/polish"), torch.empty(0), torch.zeros(())
        own_tokens, at = sum(map(len, answered)), 0
        for step in range(steps):
            if at + self.args.rows > len(queue):
                share = min(1.0, self.args.polish_mix * own_tokens / sum(map(len, self.texts.chats)))
                documents = [*answered, *draw.sample(self.texts.chats, int(share * len(self.texts.chats)))]
                draw.shuffle(documents)
                queue, at = rows_of(documents, self.args.length, self.device), 0
            batch = queue[torch.arange(at, at + self.args.rows, device=self.device) % len(queue)]
            at += self.args.rows
            running = self.update(batch, self.args.polish_lr * (1 - step / steps))
        facts = {"steps": steps, "own_tokens": own_tokens, "last_loss": round(float(running), 4)}
        return {**facts, "held_out_loss": round(self.held_out_loss(), 4)}

    def run(self) -> dict[str, Any]:
        """Train to the step count or for the minutes asked for; returns the facts of the run."""
        args, started, epoch, tokens = self.args, time.perf_counter(), 0, 0
        steps = args.steps
        rows, at = epoch_rows(self.texts, args, epoch, self.device), 0
        running = torch.zeros((), device=self.device)
        step = since = 0
        mark = (started, 0)
        train_loss = math.nan
        while steps is None or step < steps:
            if at + args.rows > len(rows):
                epoch += 1
                rows, at = epoch_rows(self.texts, args, epoch, self.device), 0
            batch = rows[torch.arange(at, at + args.rows, device=self.device) % len(rows)]
            at += args.rows
            running += self.update(batch, learning_rate(step, steps, args.lr))
            step, since, tokens = step + 1, since + 1, tokens + batch[:, 1:].numel()
            if steps is None and step in (WARMUP_STEPS // 5, WARMUP_STEPS):  # the first steps compile
                self.synchronize()
                now = time.perf_counter()
                if step == WARMUP_STEPS:
                    per_step = (now - mark[0]) / (step - mark[1])
                    left = max(0.0, 60 * args.minutes - (now - started))
                    steps = step + int(0.94 * left / per_step)  # the rest goes to held-out losses and epoch turns
                    print(f"schedule: {steps} steps of {1000 * per_step:.1f} ms", flush=True)
                mark = (now, step)
            if step % args.eval_every == 0 or step == steps:
                train_loss = float(running) / since
                held_out = self.held_out_loss()
                if held_out < self.best[0]:
                    self.best = (held_out, step)
                    self.best_state = {k: v.detach().cpu().clone() for k, v in self.model.state_dict().items()}
                speed = tokens / (time.perf_counter() - started)
                print(
                    f"step {step}/{steps or '?'} epoch {epoch} loss {train_loss:.4f} held-out {held_out:.4f} "
                    f"lr {self.optimizer.param_groups[0]['lr']:.2e} {speed / 1000:.0f}k tok/s",
                    flush=True,
                )
                running.zero_()
                since = 0
        self.model.load_state_dict(self.best_state)
        return {
            "steps": step,
            "epochs": round(epoch + at / len(rows), 2),
            "tokens": tokens,
            "seconds": round(time.perf_counter() - started, 1),
            "train_loss": round(train_loss, 4),
            "held_out_loss": round(self.best[0], 4),
            "held_out_loss_step": self.best[1],
        }

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# ------------------------------------------------------------------------------------------------- answers and prompts


@torch.no_grad()
def greedy_answers(model: Any, tokenizer: Any, users: Sequence[str], limit: int, rows: int = 1024) -> list[list[int]]:
    """Greedy answers in fp32, cut after the first end token, which stays as the last token if it was reached."""
    ends_at = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    order = sorted(range(len(users)), key=lambda i: len(users[i]))
    answers: list[list[int]] = [[] for _ in users]
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        inputs = tokenizer([prompt_text(users[i]) for i in chosen], return_tensors="pt", padding=True)
        out = model.generate(
            input_ids=inputs["input_ids"].to(model.device),
            attention_mask=inputs["attention_mask"].to(model.device),
            max_new_tokens=limit,
        )
        for i, ids in zip(chosen, out[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            ends = [k for k, token in enumerate(ids) if token in ends_at]
            answers[i] = ids[: ends[0] + 1] if ends else ids
    return answers


def answer_report(answers: list[list[int]], eos: int) -> dict[str, float]:
    """What the demo depends on: answers of some length that end by themselves and do not loop."""
    lengths = [len(a) for a in answers]
    return {
        "prompts": len(answers),
        "mean_length": round(float(np.mean(lengths)), 1),
        "share_ended": round(float(np.mean([a[-1] == eos for a in answers])), 3),
        "share_not_looping": round(float(np.mean([distinct_share(a) >= LOOP_SHARE for a in answers])), 3),
        "share_of_40_tokens_not_looping": round(
            float(np.mean([distinct_share(a) >= LOOP_SHARE and len(a) >= 40 for a in answers])), 3
        ),
        "share_of_distinct_openings": round(len({tuple(a[:24]) for a in answers}) / len(answers), 3),
        "mean_distinct_share": round(float(np.mean([distinct_share(a) for a in answers])), 3),
    }


def grams_of(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    """The 8-grams of a prompt; a shorter prompt is one gram as a whole."""
    return {tuple(tokens[i : i + SHARED_GRAM]) for i in range(max(1, len(tokens) - SHARED_GRAM + 1))}


def write_prompts(path: Path, users: Iterable[str]) -> None:
    lines = [json.dumps({"messages": [{"role": "user", "content": u}]}, ensure_ascii=False) for u in users]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def load(folder: Path, device: torch.device) -> tuple[Any, Any]:
    """What was saved, loaded as a user would, in fp32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)


def own_answers(model: Any, tokenizer: Any, texts: Texts, args: argparse.Namespace, turn: int) -> list[np.ndarray]:
    """Chats of training prompts with the model's greedy answers: ended by themselves, not short, not looping."""
    users = sorted({e.user for e in texts.train_examples})
    users = random.Random(f"{args.seed}/own/{turn}").sample(users, min(args.polish_prompts, len(users)))
    answers = greedy_answers(model, tokenizer, users, args.answer_limit)
    print(f"own answers to training prompts: {answer_report(answers, tokenizer.eos_token_id)}", flush=True)
    newline = encode(tokenizer, ["\n"])[0]
    return [
        np.array([*prompt, *answer, *newline], dtype=np.int32)
        for prompt, answer in zip(encode(tokenizer, [prompt_text(u) for u in users]), answers, strict=True)
        if answer[-1] == tokenizer.eos_token_id and len(answer) >= 24 and distinct_share(answer) >= 0.75
    ]


def choose_prompts(
    good: Sequence[str], train_users: Sequence[str], tokenizer: Any, args: argparse.Namespace
) -> tuple[list[str], list[str]]:
    """(held-out, training) prompts, none of one sharing an 8-gram of tokens with any of the other.

    Held out are the first of `good`, in their (random) order. Training prompts that share something with one are
    dropped, and as many as asked for are drawn from the rest.
    """
    holders: dict[tuple[int, ...], set[int]] = {}
    for number, ids in enumerate(encode(tokenizer, list(train_users))):
        for gram in grams_of(ids):
            holders.setdefault(gram, set()).add(number)
    chosen = list(good[: args.held_out_prompts])
    grams = set().union(*(grams_of(ids) for ids in encode(tokenizer, chosen)))
    lost = set().union(*(holders.get(gram, set()) for gram in grams))
    left = [user for number, user in enumerate(train_users) if number not in lost]
    print(f"{len(chosen)} held-out prompts cost {len(lost)} of {len(train_users)} training prompts")
    return chosen, random.Random(args.seed).sample(left, min(args.train_prompts, len(left)))


def finish(texts: Texts, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Choose and write the prompts; return the report on the greedy answers."""
    model, tokenizer = load(args.out, device)
    draw = random.Random(args.seed)
    train_users = sorted({e.user for e in texts.train_examples})
    held_out_users = sorted({e.user for e in texts.held_out_examples} - set(train_users))
    draw.shuffle(held_out_users)
    eos = tokenizer.eos_token_id
    answers = greedy_answers(model, tokenizer, held_out_users, args.answer_limit)
    reported = held_out_users[: args.report_prompts]
    base = greedy_answers(load(args.out / "base", device)[0], tokenizer, reported, args.answer_limit)
    good = [
        user
        for user, answer in zip(held_out_users, answers, strict=True)
        if len(answer) >= MIN_HELD_OUT and distinct_share(answer) >= LOOP_SHARE
    ]
    chosen, train_users = choose_prompts(good, train_users, tokenizer, args)
    write_prompts(args.out / "prompts.train.jsonl", train_users)
    write_prompts(args.out / "prompts.held_out.jsonl", chosen)
    for user, answer in list(zip(reported, answers, strict=False))[:5]:
        print(f"--- {user}\n>>> {tokenizer.decode(answer)}")
    return {
        "held_out_prompts_greedy": answer_report(answers, eos),
        "held_out_prompts_greedy_before_polish": answer_report(base, eos),
        "train_prompts": len(train_users),
        "held_out_candidates": len(held_out_users),
        "held_out_candidates_answered_well": len(good),
        "held_out_prompts": len(chosen),
    }


# ---------------------------------------------------------------------------------------------------------------- main


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--source", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of Python files")
    add("--out", type=Path, required=True, help="folder to write; must not hold a model yet")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--minutes", type=float, default=2.5, help="training time that sets the schedule")
    add("--steps", type=int, help="number of updates instead of --minutes")
    add("--compile", action=argparse.BooleanOptionalAction, default=False, help="torch.compile, layer by layer")
    add("--limit-files", type=int, help="use only so many files")
    size = parser.add_argument_group("model")
    size.add_argument("--vocab", type=int, default=2048)
    size.add_argument("--layers", type=int, default=16)
    size.add_argument("--hidden", type=int, default=128)
    size.add_argument("--intermediate", type=int, default=352)
    size.add_argument("--heads", type=int, default=4)
    size.add_argument("--kv-heads", type=int, default=2)
    size.add_argument("--head-dim", type=int, default=32)
    recipe = parser.add_argument_group("recipe")
    recipe.add_argument("--length", type=int, default=512, help="tokens of a row")
    recipe.add_argument("--rows", type=int, default=64, help="rows of an update")
    recipe.add_argument("--lr", type=float, default=3e-3)
    recipe.add_argument("--weight-decay", type=float, default=0.1)
    recipe.add_argument("--eval-every", type=int, default=200, help="updates between held-out losses")
    recipe.add_argument("--polish-rounds", type=int, default=2, help="times the model answers and learns from it")
    recipe.add_argument("--polish-steps", type=int, default=300, help="updates on the model's own answers per round")
    recipe.add_argument("--polish-mix", type=float, default=0.5, help="tokens of chats for each token of own answers")
    recipe.add_argument("--polish-prompts", type=int, default=6000, help="training prompts answered for it")
    recipe.add_argument("--polish-lr", type=float, default=5e-4)
    data = parser.add_argument_group("data")
    data.add_argument("--held-out-share", type=float, default=0.06, help="share of the files")
    data.add_argument("--plain-share", type=float, default=0.4, help="plain file text, share of the trained tokens")
    data.add_argument("--min-answer", type=int, default=16, help="shortest body trained on, tokens")
    data.add_argument("--max-answer", type=int, default=224, help="longest body trained on, tokens")
    data.add_argument("--train-prompts", type=int, default=3000)
    data.add_argument("--held-out-prompts", type=int, default=48)
    data.add_argument("--report-prompts", type=int, default=200)
    data.add_argument("--answer-limit", type=int, default=128, help="tokens of an answer in the report")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if (args.out / "model.safetensors").exists():
        raise SystemExit(f"{args.out} already holds a model; give another --out")
    warnings.simplefilter("ignore", SyntaxWarning)
    warnings.simplefilter("ignore", DeprecationWarning)  # both come from parsing other people's sources
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("highest")
    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)

    started = time.perf_counter()
    files = read_sources(args.source, args.held_out_share, args.limit_files)
    examples = extract_examples(files)
    if not any(e.held_out for e in examples) or all(e.held_out for e in examples):
        raise SystemExit(f"{len(files)} files under {args.source} do not give text to train on and to hold out")
    trained_on = [f.text for f in files if not f.held_out] + [chat_text(e) for e in examples if not e.held_out]
    tokenizer = train_tokenizer(trained_on, args.vocab)
    check_template(tokenizer, examples[0])
    texts = tokenise(files, examples, tokenizer, args)
    data_facts = {
        "files": len(files),
        "functions": len(examples),
        "chats": len(texts.chats),
        "chat_tokens": sum(map(len, texts.chats)),
        "plain_tokens": sum(map(len, texts.plain)),
        "held_out_chats": len(texts.held_out),
        "held_out_tokens": sum(map(len, texts.held_out)),
    }
    print(f"data in {time.perf_counter() - started:.0f} s: {data_facts}", flush=True)

    model: Any = build_model(args, len(tokenizer))
    model.to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {2 * parameters / 1e6:.2f} MB in bf16", flush=True)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=0
    )
    trainer = Trainer(model, texts, args, device)
    run_facts = trainer.run()
    save(model, tokenizer, args.out / "base")
    polish_facts = []
    for turn in range(args.polish_rounds):
        answered = own_answers(model, tokenizer, texts, args, turn)
        if answered:
            polish_facts.append(trainer.polish(answered, args.polish_steps))
            print(f"polish on {len(answered)} own answers: {polish_facts[-1]}", flush=True)
    save(model, tokenizer, args.out)

    answer_facts = finish(texts, args, device)
    settings = {k: v for k, v in vars(args).items() if k not in ("source", "out")}
    facts = {
        "parameters": parameters,
        "data": data_facts,
        "run": run_facts,
        "polish": polish_facts,
        "answers": answer_facts,
    }
    (args.out / "training.json").write_text(json.dumps({**facts, "settings": settings}, indent=1) + "\n")
    print(json.dumps(facts, indent=1))
    for path in sorted(args.out.iterdir()):
        print(f"{path.stat().st_size:>9} {path.name}")


if __name__ == "__main__":
    main()
