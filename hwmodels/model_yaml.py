"""Writes a model file: one field a line, each with what it means, in the order of the bundled files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hwmodels.model_shape import ModelShape

_NOTES = {
    "expert_matrices": "gate, up, down",
    "shared_intermediate_size": "of one shared expert",
    "dense_intermediate_size": "of layers without experts",
    "v_head_dim": "of a value head; 0: as head_dim",
    "attention_gate": "true: an output gate makes the query projection twice as wide",
    "kv_lora_rank": "> 0 for latent attention (MLA)",
    "num_linear_layers": "of num_layers, with linear attention",
    "linear_params": "weights of one such attention",
    "linear_state_bytes": "of one sequence in one such layer",
    "num_window_layers": "of num_layers, which see the last window_tokens only",
    "expert_bits": "per expert weight, scales included; or a scheme, as Q4_K_M",
    "expert_bits_by_layer": "one number a MoE layer; expert_bits is then their mean",
    "expert_codebook": "true: indices into a codebook (IQ1 to IQ3), which CPUs decode slowly",
    "dense_bits": "per weight of all the rest",
    "shared_bits": "per weight of shared experts; null: dense_bits",
    "head_bits": "per weight of the LM head; null: dense_bits",
}
ORDER = (
    *("name", "source", "num_layers", "num_moe_layers", "num_experts", "top_k", "hidden_size"),
    *("expert_intermediate_size", "expert_matrices", "num_shared_experts"),
    *("shared_intermediate_size", "dense_intermediate_size", "num_attention_heads"),
    *("num_kv_heads", "head_dim", "v_head_dim", "attention_gate", "kv_lora_rank", "q_lora_rank"),
    *("qk_rope_head_dim", "num_linear_layers", "linear_params", "linear_state_bytes"),
    *("num_window_layers", "window_tokens", "vocab_size", "tie_embeddings", "expert_bits"),
    *(
        "expert_bits_by_layer",
        "expert_codebook",
        "dense_bits",
        "shared_bits",
        "head_bits",
        "kv_bits",
    ),
)
"""The fields of a model file, in its order."""


def model_yaml(values: Mapping[str, Any], heading: str) -> str:
    """Return the text of a model file; ``values`` has all of ``ORDER``, and ``heading`` says what it is."""
    lines = [f"# {line}" for line in heading.splitlines()]
    for field in ORDER:
        note = f" # {_NOTES[field]}" if field in _NOTES else ""
        lines.append(f"{field}: {_plain(values[field])}{note}")
    return "\n".join(lines) + "\n"


def values_of(shape: ModelShape) -> dict[str, Any]:
    """Return a shape's values as a model file has them."""
    values = {field.name: getattr(shape, field.name) for field in fields(shape)}
    return {name: values[name] for name in ORDER}


def heading_of(shape: ModelShape) -> str:
    """Return one line that says how large a model is."""
    dense = shape.num_dense_only_layers
    kinds = f", {dense} of them dense" if dense else ""
    size = shape.num_experts * sum(map(shape.expert_bytes, range(shape.num_moe_layers)))
    mean = size / shape.num_moe_layers / shape.num_experts
    return (
        f"{shape.name}: {shape.num_layers} layers{kinds}, {shape.num_experts} experts, "
        f"top-{shape.top_k}; an expert is {mean / 1e6:.3g} MB, all {size / 1e9:.4g} GB; "
        f"{shape.total_params / 1e9:.4g} B weights"
    )


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_plain(item) for item in value)}]"
    if isinstance(value, str):
        is_safe = (
            value and not any(c in value for c in ":#\"'{}[]&*!|>%@`,\\") and value.isprintable()
        )
        return value if is_safe and value[0].isalpha() else json.dumps(value)
    return json.dumps(value)
