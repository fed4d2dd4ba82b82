"""Build, save and load the tiny Mixture-of-Experts model, and watch its router."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from traces.tiny import CHECKPOINT_DIR
from traces.tiny.experts import register
from traces.tiny.tokenizer import CharTokenizer

MAX_POSITIONS = 1024
# At temperature 1 the share of texts with a wrong step is that of the training texts.
SAMPLING_TEMPERATURE = 1.0


def make_config(tokenizer: CharTokenizer, **sizes: Any) -> Qwen3MoeConfig:
    """Return the configuration of the committed model; ``sizes`` override it for tests."""
    shape: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    }
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=MAX_POSITIONS,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        use_sliding_window=False,
        pad_token_id=tokenizer.pad_id,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        **{**shape, **sizes},
    )


def new_model(tokenizer: CharTokenizer, seed: int, **sizes: Any) -> Qwen3MoeForCausalLM:
    """Return a freshly initialised model in float32 that trains with the sorted experts."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(make_config(tokenizer, **sizes))
    for layer in model.model.layers:
        nn.init.normal_(layer.mlp.gate.weight, std=0.02)
    model.set_experts_implementation(register())
    return model


def sampling(tokenizer: CharTokenizer) -> GenerationConfig:
    """Return how texts are sampled for recording: from the whole distribution, up to EOS."""
    return GenerationConfig(
        do_sample=True,
        temperature=SAMPLING_TEMPERATURE,
        top_k=0,
        max_length=MAX_POSITIONS,
        pad_token_id=tokenizer.pad_id,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
    )


def save_model(model: Qwen3MoeForCausalLM, tokenizer: CharTokenizer, folder: Path) -> None:
    """Write the weights in bfloat16, the configuration and the vocabulary to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    clone = copy.deepcopy(model).bfloat16()
    clone.generation_config = sampling(tokenizer)
    clone.save_pretrained(folder)
    tokenizer.save(folder)


def load_model(path: Path | None = None) -> tuple[Qwen3MoeForCausalLM, CharTokenizer]:
    """Load a checkpoint (the committed one by default) in float32, ready for inference."""
    folder = path or CHECKPOINT_DIR
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), CharTokenizer.load(folder)


class RouterTap:
    """Keep each layer's router logits (T, E) and chosen experts (T, K) of the last forward."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        """Hook the router of every layer of ``model``."""
        self.logits: dict[int, Tensor] = {}
        self.chosen: dict[int, Tensor] = {}
        self._handles = [
            layer.mlp.gate.register_forward_hook(self._hook(index))
            for index, layer in enumerate(model.model.layers)
        ]

    def _hook(self, index: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            self.logits[index], _, self.chosen[index] = output

        return keep

    def balance_loss(self, real: Tensor) -> Tensor:
        """Return the mean load-balance loss of the layers over real tokens (T,); 1 is even."""
        losses = []
        for index, logits in self.logits.items():
            probabilities = torch.softmax(logits[real], dim=1).mean(dim=0)
            losses.append((self.shares(index, real) * probabilities).sum() * logits.shape[1])
        return torch.stack(losses).mean()

    def shares(self, index: int, real: Tensor) -> Tensor:
        """Return the share of one layer's token slots that each expert serves: (E,)."""
        chosen = self.chosen[index][real].reshape(-1)
        counts = torch.bincount(chosen, minlength=self.logits[index].shape[1])
        return counts / counts.sum()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
