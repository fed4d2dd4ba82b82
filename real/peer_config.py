"""A Qwen3-MoE configuration of a given model shape, for the peer that our backend is timed against.

Knows nothing of how the peer is run; see :mod:`real.peer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hwmodels.model_shape import MLP_MATRICES, ModelShape
from sim.types import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MAX_POSITIONS = 4096
"""Positions that a peer's configuration allows; no memory is taken for them."""

_DTYPES = {16: torch.bfloat16, 32: torch.float32}
_ABSENT = (
    "kv_lora_rank",
    "num_linear_layers",
    "num_window_layers",
    "num_shared_experts",
    "attention_gate",
)
"""What a Qwen3-MoE does not have: these fields of a shape must be 0 or false."""


def peer_config(shape: ModelShape) -> PreTrainedConfig:
    """Return the configuration of a Qwen3-MoE with the sizes of ``shape``.

    Layers, experts, top-k, hidden and intermediate sizes, heads and vocabulary are those of the shape;
    dense-only layers come first. Experts and all the rest have one dtype: bfloat16 for 16 bits a weight,
    float32 for 32. Raises ConfigError for what a Qwen3-MoE cannot have, as latent attention, shared
    experts or quantised weights.
    """
    from transformers import Qwen3MoeConfig

    _check_shape(shape)
    config: Any = Qwen3MoeConfig  # takes head_dim too, which its signature does not name
    return config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.dense_intermediate_size or shape.expert_intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        moe_intermediate_size=shape.expert_intermediate_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        mlp_only_layers=list(range(shape.num_dense_only_layers)),
        tie_word_embeddings=shape.tie_embeddings,
        max_position_embeddings=MAX_POSITIONS,
        dtype=_DTYPES[int(shape.expert_bits)],
    )


def _check_shape(shape: ModelShape) -> None:
    for field in _ABSENT:
        if value := getattr(shape, field):
            raise _wrong(shape, field, value, "must be 0 or false, a Qwen3-MoE has none")
    if shape.expert_matrices != MLP_MATRICES:
        raise _wrong(shape, "expert_matrices", shape.expert_matrices, f"must be {MLP_MATRICES}")
    if shape.v_head_dim not in (0, shape.head_dim):
        raise _wrong(shape, "v_head_dim", shape.v_head_dim, "must be 0, or head_dim")
    by_layer = set(shape.expert_bits_by_layer or (shape.expert_bits,))
    if len(by_layer) > 1 or shape.expert_bits not in _DTYPES:
        raise _wrong(shape, "expert_bits", shape.expert_bits, "must be 16 (bf16) or 32 (float32)")


def _wrong(shape: ModelShape, field: str, value: object, rule: str) -> ConfigError:
    return ConfigError(f"peer: model/{shape.name}: {field} = {value}: {rule}")
