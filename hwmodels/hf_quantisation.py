"""What a Hugging Face configuration says of precision: bits a weight of experts, the rest, and the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwmodels.errors import HardwareError, figure_error
from hwmodels.quantisation import FORMATS

_DTYPES = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0}


def bits_of(config: Mapping[str, Any], text: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of bits: those of the weights' type, or of ``quantization_config``.

    Embedding and head keep the weights' type, and so does all but the experts where the configuration
    names attention among what it leaves alone. KV cache takes the weights' type, at most 16 bits.
    """
    plain = _plain_bits(text, where)
    given = config.get("quantization_config") or text.get("quantization_config")
    experts = dense = plain
    if given is not None:
        if not isinstance(given, Mapping):
            raise figure_error(where, "quantization_config", given, "must be a mapping")
        experts, only_experts = _quantised(given, where)
        dense = plain if only_experts else experts
    return {
        "expert_bits": experts,
        "expert_bits_by_layer": None,
        "expert_codebook": False,
        "dense_bits": dense,
        "shared_bits": None,
        "head_bits": None if dense == plain else plain,
        "kv_bits": min(16.0, plain),
    }


def _plain_bits(text: Mapping[str, Any], where: str) -> float:
    name = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in _DTYPES:
        raise figure_error(where, "dtype", name, f"must be one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _quantised(given: Mapping[str, Any], where: str) -> tuple[float, bool]:
    """Return the bits a weight, and whether only the experts have them."""
    method = str(given.get("quant_method", "")).lower().replace("_", "-")
    left = str(given.get("modules_to_not_convert") or given.get("ignore") or "")
    only_experts = "attn" in left
    if method == "mxfp4":
        return FORMATS["MXFP4"], True
    if method == "fp8":
        blocks = given.get("weight_block_size")
        return FORMATS["FP8_BLOCK" if blocks else "FP8"], only_experts
    if method in ("gptq", "awq"):
        bits, group = _count(given, "bits", where), _count(given, "group_size", where)
        return bits + (16 + bits) / group, only_experts  # 16-bit scale and a zero for each group
    if method == "modelopt" and "FP4" in str(given.get("quant_algo", "")):
        return FORMATS["NVFP4"], only_experts
    if method == "compressed-tensors":
        return _compressed(given, where), only_experts
    raise HardwareError(
        f"{where}: quantization_config.quant_method = {method or None}: not known; say the precision "
        "with --quant"
    )


def _compressed(given: Mapping[str, Any], where: str) -> float:
    groups = given.get("config_groups")
    first: object = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        raise HardwareError(f"{where}: quantization_config.config_groups.*.weights: missing")
    bits, group = _count(weights, "num_bits", where), weights.get("group_size")
    if not isinstance(group, int) or group < 1:
        return float(bits)  # a scale a channel or tensor
    scale_bits = 8 if weights.get("type") == "float" and bits == 4 else 16
    return bits + scale_bits / group


def _count(given: Mapping[str, Any], name: str, where: str) -> int:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise figure_error(
            where, f"quantization_config.{name}", value, "must be a whole number > 0"
        )
    return value
