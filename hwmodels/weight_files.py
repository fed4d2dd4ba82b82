"""A model file's values from weight files: the shape from metadata, the bits a weight from the tensors.

The bits of a part are all its bytes, scales and biases included, over the weights that the shape gives it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hwmodels.errors import HardwareError, figure_error
from hwmodels.gguf_header import GGUFHeader, Tensor
from hwmodels.hf_attention import MOST_LAYERS
from hwmodels.hf_config import model_values
from hwmodels.model_shape import ModelShape

Place = tuple[str, int]
"""The part that a tensor belongs to (experts, shared, dense, head, embedding), and its layer or -1."""


def gguf_values(header: GGUFHeader, name: str, where: str) -> dict[str, Any]:
    """Return the values of a GGUF file's model; HardwareError, with ``where``, for what is missing."""
    config = _gguf_config(header, where)
    values = model_values({**config, "dtype": "float16"}, name, where)
    values["source"] = f"GGUF header of {header.metadata.get('general.name', 'a model')}"
    return _with_bits(values, header.tensors, _gguf_place, where)


def safetensors_values(
    tensors: Iterable[Tensor], config: Mapping[str, Any], name: str, where: str
) -> dict[str, Any]:
    """Return the values of a model of safetensors files with its ``config.json``."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    values = model_values(plain, name, where)
    values["source"] += " and the headers of its safetensors files"
    return _with_bits(values, tensors, _safetensors_place, where)


def read_config(path: Path) -> dict[str, Any]:
    """Return a JSON file's mapping; raise HardwareError if it has none, OSError if it cannot be read."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise HardwareError(f"{path}: no JSON: {error}") from error
    if not isinstance(config, dict):
        raise HardwareError(f"{path}: must be a mapping")
    return config


# -- bits ------------------------------------------------------------------------------------------


def _with_bits(
    values: dict[str, Any], tensors: Iterable[Tensor], place: Callable[[str], Place], where: str
) -> dict[str, Any]:
    shape = ModelShape.from_mapping(values, where)
    bits: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    codebook_bits = 0.0
    for tensor in tensors:
        part, layer = place(tensor.name)
        if layer < shape.num_layers:  # those behind predict further tokens
            bits[part][layer] += tensor.bits
            codebook_bits += tensor.bits if part == "experts" and tensor.is_codebook else 0
    by_layer = _expert_bits(shape, bits["experts"], where)
    is_mixed = len(set(by_layer)) > 1
    params = shape.num_moe_layers * (shape.dense_params - shape.shared_params)
    params += shape.num_dense_only_layers * shape.dense_only_params
    head = bits["head"] or bits["embedding"]
    shared = shape.num_moe_layers * shape.shared_params
    found = {
        "expert_bits": sum(by_layer) / len(by_layer),
        "expert_bits_by_layer": list(by_layer) if is_mixed else None,
        "expert_codebook": 2 * codebook_bits > sum(bits["experts"].values()),
        "dense_bits": _ratio(bits["dense"], params, where, "attention"),
        "shared_bits": _ratio(bits["shared"], shared, where, "shared experts") if shared else None,
        "head_bits": _ratio(head, shape.head_params, where, "the LM head"),
        "tie_embeddings": not bits["head"],
    }
    return {**values, **found}


def _expert_bits(shape: ModelShape, bits: Mapping[int, float], where: str) -> tuple[float, ...]:
    """Return the bits a weight of each MoE layer's routed experts."""
    if len(bits) != shape.num_moe_layers:
        raise HardwareError(
            f"{where}: {len(bits)} layers have expert tensors, but the model has "
            f"{shape.num_moe_layers}: a part of the files is missing, or the names are not known"
        )
    weights = shape.num_experts * shape.expert_params
    return tuple(round(bits[layer] / weights, 6) for layer in sorted(bits))


def _ratio(bits: Mapping[int, float], params: int, where: str, what: str) -> float:
    found = sum(bits.values())
    if not found:
        raise HardwareError(f"{where}: no tensors of {what}: are all parts of the files there?")
    return round(found / params, 6)


# -- names -----------------------------------------------------------------------------------------


def _gguf_place(name: str) -> Place:
    found = re.match(r"blk\.(\d+)\.(.*)", name)
    if not found:
        return {"output.weight": "head", "token_embd.weight": "embedding"}.get(name, "other"), -1
    layer, rest = int(found[1]), found[2]
    if "_exps" in rest:
        return "experts", layer
    return "shared" if "_shexp" in rest and "inp" not in rest else "dense", layer


def _safetensors_place(name: str) -> Place:
    if re.search(r"vision|visual|mtp\.|audio", name):
        return "other", -1
    found = re.search(r"layers\.(\d+)\.(.*)", name)
    if not found:
        part = "head" if "lm_head" in name else "embedding" if "embed_tokens" in name else "other"
        return part, -1
    layer, rest = int(found[1]), found[2]
    if re.search(r"shared_experts?\.|shared_mlp\.", rest):
        return "shared", layer
    return "experts" if ".experts." in rest else "dense", layer


# -- the metadata of GGUF, in the words of config.json ---------------------------------------------

_GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "v_head_dim": "attention.value_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "intermediate_size": "feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_ONE = (
    *("nextn_predict_layers", "attention.key_length_mla", "attention.value_length_mla"),
    "attention.sliding_window",
)
"""Other counts of a GGUF file."""
_LLAMA4_CHUNK = 8192
"""Tokens of a chunk of Llama-4's attention, which its GGUF files do not tell (llama.cpp, M)."""


def _gguf_config(header: GGUFHeader, where: str) -> dict[str, Any]:
    meta = header.metadata
    arch = meta.get("general.architecture")
    if not isinstance(arch, str):
        raise HardwareError(f"{where}: general.architecture: missing, must be given")
    tensors = {tensor.name: tensor for tensor in header.tensors}
    embedding = tensors.get("token_embd.weight")
    blocks = meta.get(f"{arch}.block_count")
    if embedding is None or not isinstance(blocks, int):
        raise HardwareError(f"{where}: token_embd.weight or {arch}.block_count: missing")
    config = {
        ours: _largest(meta[f"{arch}.{key}"])
        for ours, key in _GGUF_KEYS.items()
        if meta.get(f"{arch}.{key}") is not None
    }
    _check_counts(meta, arch, where)
    layers = blocks - meta.get(f"{arch}.nextn_predict_layers", 0)
    if not 0 < layers <= MOST_LAYERS:
        rule = f"must leave 1 to {MOST_LAYERS} layers"
        raise figure_error(where, f"{arch}.block_count", blocks, rule)
    config.setdefault("moe_intermediate_size", config.get("intermediate_size"))
    config |= {"model_type": arch, "num_hidden_layers": layers}
    config["vocab_size"] = embedding.shape[-1]
    config["mlp_layer_types"] = [
        "sparse" if f"blk.{i}.ffn_down_exps.weight" in tensors else "dense" for i in range(layers)
    ]
    config["layer_types"] = _layer_kinds(meta, arch, tensors, layers, config)
    if config.get("kv_lora_rank"):
        _set_latent(config, meta, arch)
    elif arch == "llama4":
        config["attention_chunk_size"] = _LLAMA4_CHUNK
    return _with_projections(config, tensors, layers)


def _check_counts(meta: Mapping[str, Any], arch: str, where: str) -> None:
    """Raise HardwareError for a number that is none; those of config.json may be one a layer."""
    for key in (*_GGUF_KEYS.values(), *_ONE):
        value = meta.get(f"{arch}.{key}", 0)
        found = value if isinstance(value, list) and value and key not in _ONE else [value]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in found):
            raise figure_error(where, f"{arch}.{key}", value, "must be a whole number >= 0")


def _layer_kinds(
    meta: Mapping[str, Any],
    arch: str,
    tensors: Mapping[str, Tensor],
    layers: int,
    config: dict[str, Any],
) -> list[str]:
    """Return the kind of each layer's attention; sets the window, where the file tells which have it."""
    kinds = [
        "linear_attention" if f"blk.{i}.ssm_out.weight" in tensors else "full_attention"
        for i in range(layers)
    ]
    pattern = meta.get(f"{arch}.attention.sliding_window_pattern")
    if arch == "gpt-oss":
        pattern = [i % 2 == 0 for i in range(layers)]  # every other layer, from the first on
    elif arch == "llama4":
        pattern = [(i + 1) % 4 != 0 for i in range(layers)]
    if isinstance(pattern, list):
        config["sliding_window"] = meta.get(f"{arch}.attention.sliding_window", 0)
        windows = ["sliding_attention" if flag else "full_attention" for flag in pattern[:layers]]
        kinds = [w if k == "full_attention" else k for w, k in zip(windows, kinds, strict=False)]
    return kinds


def _set_latent(config: dict[str, Any], meta: Mapping[str, Any], arch: str) -> None:
    """Set the sizes of heads with latent attention, which newer files keep under names of their own."""
    key = meta.get(f"{arch}.attention.key_length_mla", config.get("head_dim", 0))
    value = meta.get(f"{arch}.attention.value_length_mla", config.get("v_head_dim", 0))
    config["qk_nope_head_dim"] = key - config.get("qk_rope_head_dim", 0)
    config["v_head_dim"] = value
    config["num_key_value_heads"] = config.get("num_attention_heads")


def _with_projections(
    config: dict[str, Any], tensors: Mapping[str, Tensor], layers: int
) -> dict[str, Any]:
    """Add what only the tensors tell: an output gate, and the heads of linear attention."""
    heads = config.get("linear_num_value_heads")
    for i in range(layers):
        out, query = tensors.get(f"blk.{i}.ssm_out.weight"), tensors.get(f"blk.{i}.attn_q.weight")
        if out is not None and heads:
            config["linear_value_head_dim"] = out.shape[0] // heads
        if query is not None and {"head_dim", "num_attention_heads"} <= config.keys():
            wide = config["num_attention_heads"] * config["head_dim"]
            config["attn_output_gate"] = query.shape[-1] == 2 * wide
    return config


def _largest(value: Any) -> Any:
    """Return a number, or the largest of one number a layer."""
    return max(value) if isinstance(value, list) and value else value
