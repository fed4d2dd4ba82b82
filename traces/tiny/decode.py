"""Batched generation with a key-value cache, greedy or sampled."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3MoeForCausalLM

from traces.tiny.tokenizer import CharTokenizer

# Newer versions of transformers have renamed the argument.
_PARAMETERS = inspect.signature(Qwen3MoeForCausalLM.forward).parameters
_CACHE = "cache" if "cache" in _PARAMETERS else "past_key_values"


def _pad_left(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return ids (B, L) padded on the left, and the mask of real tokens (B, L)."""
    length = max(map(len, rows))
    ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Pick one token per row of (B, V): the likeliest at temperature 0, else a sample."""
    if temperature == 0:
        return logits.argmax(dim=1)
    weights = torch.softmax(logits / temperature, dim=1)
    return torch.multinomial(weights, 1, generator=generator)[:, 0]


@torch.inference_mode()
def generate(
    model: Qwen3MoeForCausalLM,
    tokenizer: CharTokenizer,
    prompts: list[str],
    temperature: float = 0.0,
    seed: int = 0,
    max_new: int = 640,
) -> list[str]:
    """Continue every prompt until EOS or ``max_new`` characters; return the new texts."""
    rows = [tokenizer.encode(prompt, bos=True) for prompt in prompts]
    ids, mask = _pad_left(rows, tokenizer.pad_id)
    generator = torch.Generator().manual_seed(seed)
    cache = DynamicCache(config=model.config)
    out: list[Tensor] = []
    done = torch.zeros(len(rows), dtype=torch.bool)
    while len(out) < max_new and not bool(done.all()):
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{_CACHE: cache},
        ).logits[:, -1]
        token = _choose(logits, temperature, generator).masked_fill(done, tokenizer.pad_id)
        done |= token == tokenizer.eos_id
        out.append(token)
        ids = token[:, None]
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return [tokenizer.decode(row) for row in torch.stack(out, dim=1).tolist()]
