"""A tiny random target on disk and conversations for it, made once per test session."""

from __future__ import annotations

import os

# Before anything imports the hub's client: a test that names a target which does not exist should not ask a hub for it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before torch looks: a machine's GPUs are for `make test-gpu`; everything else is about the CPU, whatever is there.
if not os.environ.get("DRAFTSMITH_TEST_GPU"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import json
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.bench.geometry import GEOMETRIES
from draftsmith.bench.random_data import WORDS
from draftsmith.bench.random_target import chat_tokenizer, write_random_target
from draftsmith.config import RunConfig, parse_config

if os.environ.get("DRAFTSMITH_TEST_GPU") and not torch.cuda.is_available():
    pytest.exit("torch sees no GPU, so there is nothing to test on one", returncode=1)

# What is printed is compared, in this process and in those that tests start: whatever terminal the tests run in.
for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
os.environ["TERM"] = "xterm"


def sentence(generator: random.Random, words: int) -> str:
    """Words at random, in a text that a tiny tokenizer cuts into few tokens."""
    return " ".join(generator.choice(WORDS) for _ in range(words))


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """A shell that starts the tests in the background has them ignore SIGINT, and tests of Ctrl-C wait for ever."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def tokenised_data(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tables of tokens go to a folder of the test session, and not to the user's cache."""
    os.environ["DRAFTSMITH_DATA_CACHE"] = str(tmp_path_factory.mktemp("tokenised"))


@pytest.fixture
def default_signals():
    """Signals do what the system lets them do, also under nohup, whose children ignore SIGHUP."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def one_thread():
    """Torch computes in one thread: what is compared bit for bit, and what would make teams of threads wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random Qwen3 of 6 layers × 32 and a ChatML tokenizer of about 300 tokens."""
    folder = tmp_path_factory.mktemp("tiny-target")
    tokenizer = chat_tokenizer(300)
    geometry = replace(
        GEOMETRIES["tiny"],
        hidden_size=32,
        intermediate_size=64,
        layers=6,
        head_dim=8,
        max_position_embeddings=512,
        vocab_rows=len(tokenizer),
    )
    # As loud as a trained one: logits of size 1, so that a loss can go to zero.
    write_random_target(folder, geometry, dtype=torch.float32, tokenizer=tokenizer, initializer_range=0.15)
    return folder


@pytest.fixture(scope="session")
def tiny_chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 conversations of one or two turns, JSON lines."""
    generator = random.Random(0)
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with path.open("w") as file:
        for _ in range(120):
            messages = []
            for _ in range(generator.randint(1, 2)):
                messages.append({"role": "user", "content": sentence(generator, generator.randint(2, 8))})
                messages.append({"role": "assistant", "content": sentence(generator, generator.randint(5, 30))})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture
def tiny_run(tiny_target: Path, tiny_chats: Path, tmp_path: Path):
    """A function that makes a `RunConfig` of seconds; keyword arguments override by section."""

    def make(output: str = "run", **sections: dict[str, object]) -> RunConfig:
        content: dict[str, dict[str, object]] = {
            "target": {"path": str(tiny_target)},
            "data": {"train": str(tiny_chats), "held_out_share": 0.1},
            "drafter": {"layers": 2, "block_size": 4},
            "rows": {"length": 96, "anchors": 12},
            "objective": {"chunk": 16},
            "optimizer": {"lr": 1e-3},
            "training": {
                "steps": 4,
                "rows_per_update": 6,
                "eval_every": 2,
                "eval_rows": 2,
                "save_every": 2,
                "keep": 9,
                "tensorboard": False,
                "output": str(tmp_path / output),
            },
        }
        for section, values in sections.items():
            content.setdefault(section, {}).update(values)
        return parse_config(content)

    return make
