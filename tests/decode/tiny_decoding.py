"""Small random targets and drafters for the tests of this folder, and greedy decoding without any cache."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from draftsmith.drafter import DrafterSpec, DraftModel
from draftsmith.target.forward import Target
from draftsmith.target.geometry import geometry_of, layer_kinds

VOCAB = 41
FULL, SLIDING = "full_attention", "sliding_attention"


def tiny_target(kind: str = "full", seed: int = 0, layers: int = 4, vocab: int = VOCAB) -> Target:
    """Random float32 target with weights large enough that every token of the past shows in the logits.

    Args:
        kind: "full" and "sliding" are Qwen3 (the latter alternates with full layers, window 12), "llama" is Llama.
    """
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        window = {"use_sliding_window": True, "sliding_window": 12} if kind == "sliding" else {}
        types = [SLIDING if kind == "sliding" and layer % 2 == 0 else FULL for layer in range(layers)]
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **window, layer_types=types))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.35)
    model.eval().requires_grad_(False)
    return Target(model, None, geometry_of(model.config, "tiny"), layer_kinds(model.config), (7, 9))


def tiny_drafter(kind: str = "full", block_size: int = 6, seed: int = 4, vocab: int = VOCAB) -> DraftModel:
    """Random float32 drafter for `tiny_target`; "sliding" has one sliding layer (window 7) and one full.

    MASK is the last row. With a small vocabulary some of its drafts are right by chance.
    """
    spec = DrafterSpec(
        hidden_size=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=512,
        vocab_rows=vocab,
        target_layers=4,
        taps=(0, 2),
        block_size=block_size,
        mask_token_id=vocab - 1,
        layer_types=(SLIDING if kind == "sliding" else FULL, FULL),
        sliding_window=7 if kind == "sliding" else None,
    )
    model = DraftModel(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def random_prompts(count: int, longest: int = 25, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab - 1, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def plain_answer(target: Target, prompt: list[int], max_new_tokens: int, stop_ids: tuple[int, ...]) -> list[int]:
    """Greedy answer by running the whole text again for every token: no cache, no batch, no block."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        tokens.append(int(target.model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """p-value of Pearson's test that `counts` were drawn with the probabilities behind `expected`."""
    counts, expected = counts.double().flatten(), expected.double().flatten()
    seen = expected > 0
    assert counts[~seen].sum() == 0, "an impossible outcome occurred"
    statistic = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
    freedom = torch.tensor(float(seen.sum()) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
