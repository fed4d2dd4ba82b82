"""Random experts modules of transformers, and the same experts packed in slots, for tests of real/."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from real.experts import ExpertFormat, ExpertWeights
from sim.types import KeySpace, LayerRouting

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 12, 48, 40, 3
LAYER = 1
KEYS = KeySpace(num_layers=3, num_experts=EXPERTS, num_copies=2)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def experts_module(kind: str, dtype: str) -> Any:
    """Return a module of 12 random experts: "qwen3_moe", or "gpt_oss" (transposed, biases, own gate)."""
    if kind == "qwen3_moe":
        config: Any = Qwen3MoeConfig(
            num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE
        )
        module: Any = Qwen3MoeExperts(config)
    else:
        config = GptOssConfig(
            num_local_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE
        )
        module = GptOssExperts(config)
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return module.to(DTYPES[dtype]).requires_grad_(False)


def format_of(kind: str, dtype: str) -> ExpertFormat:
    """Return how the experts of :func:`experts_module` lie."""
    is_gpt = kind == "gpt_oss"
    return ExpertFormat(HIDDEN, INTERMEDIATE, dtype, has_bias=is_gpt, is_transposed=is_gpt)


def packed_slots(module: Any, format: ExpertFormat) -> Tensor:
    """Return the module's experts as bytes, uint8[experts, slot_bytes]; slot i holds expert i."""
    slots = torch.zeros(EXPERTS, format.slot_bytes, dtype=torch.uint8)
    names = ["gate_up_proj", "down_proj"]
    names += ["gate_up_proj_bias", "down_proj_bias"] if format.has_bias else []
    for expert in range(EXPERTS):
        parts = [getattr(module, name)[expert] for name in names]
        format.pack(ExpertWeights(*parts), slots[expert])
    return slots


def module_output(module: Any, how: str, *arguments: Tensor) -> Tensor:
    """Return what transformers' own implementation ``how`` computes: "eager" or "grouped_mm"."""
    module.config._experts_implementation = how
    result: Tensor = module(*arguments)
    return result


def routing_of(ids: Any, weights: Any = None, low: Any = None) -> LayerRouting:
    """Return the routing of layer 1 with these experts by token and slot."""
    ids = np.asarray(ids, dtype=np.uint16)
    return LayerRouting(LAYER, [], []).rewritten(KEYS, ids, weights, low)
