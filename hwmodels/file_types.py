"""What a GGUF file type such as Q4_K_M makes of a model: which tensor of which layer gets which format.

llama.cpp mixes formats by rules of its own (ggml-org/llama.cpp src/llama-quant.cpp, as of 5a44f27). Read
here for Mixture-of-Experts models, quantised with an importance matrix (which published files mostly are):
routers and norms stay 32-bit, the head has a format of its own, values and down projections get more bits
in some layers, and rows that do not divide into blocks fall back to another format. Latent and linear
attention keep the base format in all their matrices (llama.cpp's finer rules for some of them change a
layer's bytes by a few per cent). Makers' own mixes (UD-..., _L) are not file types: give their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hwmodels.attention_shape import AttentionShape
from hwmodels.errors import figure_error
from hwmodels.quantisation import (
    FORMATS,
    canonical,
    fallback,
    format_bits,
    is_codebook,
    unknown_scheme,
)

if TYPE_CHECKING:
    from hwmodels.model_shape import ModelShape

Pick = Callable[[int, int], bool]
"""Whether a rule holds for layer ``i`` of ``n``."""
_F32_BITS = 32.0


def _always(layer: int, count: int) -> bool:
    return True


def _first_eighth(layer: int, count: int) -> bool:
    return layer < count // 8


def _more_bits(layer: int, count: int) -> bool:
    """Tell whether llama.cpp's ``use_more_bits`` holds: first and last eighth, every third between."""
    first = count // 8
    return layer < first or layer >= 7 * count // 8 or (layer - first) % 3 == 2


def _middle(layer: int, count: int) -> bool:
    return count // 8 <= layer < 7 * count // 8


def _first(number: int) -> Pick:
    return lambda layer, count: layer < number


def _first_sixteenth(layer: int, count: int) -> bool:
    return layer < count // 16


Rules = tuple[tuple[Pick, str], ...]
"""The first that holds gives the format."""


@dataclass(frozen=True, slots=True)
class FileType:
    """The formats of one file type; a tensor without a rule that holds has ``base``."""

    base: str
    down: Rules = ()
    up: Rules = ()
    value: Rules = ()
    grouped_value: str | None = None
    """Of values where at least 4 query heads share them."""
    query: str | None = None
    """Of queries and keys."""
    output: str | None = None
    """Of the output projection of attention."""
    head: str = "Q6_K"
    dense: str | None = None
    """Of all but routed experts, where that differs from the experts."""
    eight: str | None = "Q5_K"
    """Of the output projection of attention with 8 experts, which also have Q8_0 keys and values."""


def _low(base: str, early: str, output: str | None) -> FileType:
    """Return a file type of about two bits: values and the first down projections have more."""
    return FileType(
        base, ((_first_eighth, early),), value=((_always, "Q4_K"),), output=output, head="Q5_K"
    )


FILE_TYPES = {
    "Q4_0": FileType("Q4_0", ((_first_eighth, "Q4_1"),), eight=None),
    "Q4_1": FileType("Q4_1", eight=None),
    "Q5_0": FileType("Q5_0", ((_first_eighth, "Q5_1"),), eight=None),
    "Q5_1": FileType("Q5_1", eight=None),
    "Q8_0": FileType("Q8_0", head="Q8_0", eight=None),
    "Q2_K": FileType(
        "Q2_K",
        ((_always, "Q3_K"),),
        value=((_always, "Q3_K"),),
        grouped_value="Q4_K",
        output="Q3_K",
    ),
    "Q2_K_S": FileType("Q2_K", ((_first_eighth, "Q4_K"),), grouped_value="Q4_K", eight=None),
    "Q3_K_S": FileType("Q3_K"),
    "Q3_K_M": FileType(
        "Q3_K",
        ((_first_sixteenth, "Q5_K"), (_always, "Q4_K")),
        value=((_first(2), "Q5_K"), (_always, "Q4_K")),
        output="Q4_K",
    ),
    "Q3_K_L": FileType(
        "Q3_K", ((_always, "Q5_K"),), value=((_always, "Q5_K"),), output="Q5_K", eight=None
    ),
    "Q4_K_S": FileType("Q4_K", ((_first_eighth, "Q5_K"),), value=((_first(4), "Q5_K"),)),
    "Q4_K_M": FileType("Q4_K", ((_more_bits, "Q6_K"),), value=((_more_bits, "Q6_K"),)),
    "Q5_K_S": FileType("Q5_K", eight=None),
    "Q5_K_M": FileType("Q5_K", ((_more_bits, "Q6_K"),), value=((_more_bits, "Q6_K"),), eight=None),
    "Q6_K": FileType("Q6_K", eight=None),
    "IQ4_NL": FileType("IQ4_NL", grouped_value="Q5_K"),
    "IQ4_XS": FileType("IQ4_XS", grouped_value="Q5_K"),
    "IQ3_M": FileType(
        "IQ3_S", ((_first_eighth, "Q4_K"),), value=((_always, "Q4_K"),), output="Q4_K"
    ),
    "IQ3_S": FileType("IQ3_S", grouped_value="Q4_K"),
    "IQ3_XS": FileType("IQ3_S", up=((_middle, "IQ3_XXS"),), grouped_value="Q4_K", query="IQ3_XXS"),
    "IQ3_XXS": FileType(
        "IQ3_XXS", grouped_value="Q4_K", query="IQ2_S", output="IQ3_S", head="Q5_K"
    ),
    "IQ2_M": _low("IQ2_S", "IQ3_S", "IQ3_S"),
    "IQ2_S": _low("IQ2_XS", "IQ3_S", "IQ3_S"),
    "IQ2_XS": _low("IQ2_XS", "Q2_K", None),
    "IQ2_XXS": _low("IQ2_XXS", "Q2_K", None),
    "IQ1_M": _low("IQ1_M", "Q2_K", "IQ2_XXS"),
    "IQ1_S": _low("IQ1_S", "Q2_K", "IQ2_XXS"),
    "MXFP4_MOE": FileType("MXFP4", head="Q8_0", dense="Q8_0", eight=None),
}
"""The file types of llama.cpp, by the name that ``llama-quantize`` takes."""

SCHEMES = (*FILE_TYPES, *(name for name in FORMATS if name not in FILE_TYPES))
"""What a field of bits may name: a file type, else a format."""

BITS_FIELDS = ("expert_bits", "dense_bits", "shared_bits", "head_bits", "kv_bits")
"""Fields of a model that take a scheme's name in place of a number."""


def named_bits(mapping: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Split a model's plain values into numbers and the schemes that its fields of bits name.

    A field with a scheme has 1 in its place until :func:`scheme_bits` replaces it; formats in a list by
    layer are resolved here. Raises HardwareError for a text that is no scheme.
    """
    if not isinstance(mapping, Mapping):
        raise figure_error(where, "(all)", mapping, "must be a mapping")
    values, names = dict(mapping), {}
    for field in BITS_FIELDS:
        value = values.get(field)
        if not isinstance(value, str):
            continue
        known = tuple(FORMATS) if field == "kv_bits" else SCHEMES
        if canonical(value) not in known:
            raise unknown_scheme(where, field, value, known)
        names[field], values[field] = value, 1
    by_layer = values.get("expert_bits_by_layer")
    if isinstance(by_layer, list | tuple):
        values["expert_bits_by_layer"] = [
            _layer_bits(value, f"expert_bits_by_layer[{i}]", where)
            for i, value in enumerate(by_layer)
        ]
    return values, names


def _layer_bits(value: Any, field: str, where: str) -> Any:
    if not isinstance(value, str):
        return value
    if canonical(value) not in FORMATS:
        raise unknown_scheme(where, field, value, FORMATS)
    return format_bits(value)


def scheme_bits(shape: ModelShape, field: str, name: str) -> dict[str, Any]:
    """Return what a scheme makes of a model's field of bits, as changes to its fields.

    A file type means what it does to those tensors: ``expert_bits`` then come layer by layer,
    ``dense_bits`` with the 32 bits of router and norms. A format means just its bits; ``kv_bits`` too.
    """
    file_type = FILE_TYPES.get(canonical(name))
    if file_type is None or field == "kv_bits":
        return {field: format_bits(name)}
    if field == "expert_bits":
        by_layer = expert_bits(shape, file_type)
        mean = sum(by_layer) / len(by_layer)
        return {field: mean, "expert_bits_by_layer": by_layer if len(set(by_layer)) > 1 else None}
    if field == "head_bits":
        return {field: format_bits(fallback(file_type.head, shape.hidden_size))}
    if field == "shared_bits":
        return {field: shared_bits(shape, file_type)}
    return {field: dense_bits(shape, file_type)}


def quantised(shape: ModelShape, name: str) -> ModelShape:
    """Return the model as a file in that scheme has it; KV cache stays.

    A file type covers all weights. A format covers all but embedding and head, or only the routed experts
    where published files have it so (MXFP4, NVFP4, INT4_G32: gpt-oss, Kimi-K2-Thinking and the like).
    """
    changes: dict[str, Any] = {"expert_bits_by_layer": None, "expert_codebook": is_codebook(name)}
    fields = ["expert_bits"]
    if canonical(name) in FILE_TYPES:
        fields += [
            "dense_bits",
            "head_bits",
            *(["shared_bits"] if shape.num_shared_experts else []),
        ]
    elif canonical(name) not in _OF_EXPERTS_ONLY:
        changes |= {"head_bits": shape.head_bits or shape.dense_bits, "shared_bits": None}
        fields += ["dense_bits"]
    for field in fields:
        changes |= scheme_bits(shape, field, name)
    return replace(shape, **changes)


_OF_EXPERTS_ONLY = ("MXFP4", "NVFP4", "INT4_G32")


def expert_bits(shape: ModelShape, file_type: FileType) -> tuple[float, ...]:
    """Return the bits a weight of the routed experts, for each MoE layer; dense-only layers come first."""
    first = shape.num_dense_only_layers
    layers = range(first, shape.num_layers)
    size = shape.expert_intermediate_size
    return tuple(_mlp_bits(shape, file_type, size, layer, file_type.base) for layer in layers)


def shared_bits(shape: ModelShape, file_type: FileType) -> float:
    """Return the bits a weight of the shared experts, the mean over layers."""
    size = shape.num_shared_experts * shape.shared_intermediate_size or shape.hidden_size
    layers = range(shape.num_dense_only_layers, shape.num_layers)
    base = file_type.dense or file_type.base
    return sum(_mlp_bits(shape, file_type, size, layer, base) for layer in layers) / len(layers)


def dense_bits(shape: ModelShape, file_type: FileType) -> float:
    """Return the bits a weight of attention, router and norms, the mean over layers."""
    attention = shape.attention_params
    own = attention * attention_bits(shape, file_type)
    exact = shape.hidden_size * (shape.num_experts + 2)
    return (own + exact * _F32_BITS) / (attention + exact)


def attention_bits(shape: AttentionShape, file_type: FileType) -> float:
    """Return the bits a weight of attention, the mean over layers."""
    base = file_type.dense or file_type.base
    if shape.kv_lora_rank:
        return format_bits(fallback(base, shape.hidden_size))
    hidden, heads, kv_heads = shape.hidden_size, shape.num_attention_heads, shape.num_kv_heads
    full = shape.num_layers - shape.num_linear_layers
    has_eight = getattr(shape, "num_experts", 0) == 8 and file_type.eight is not None
    query, key, value, output = _projections(shape, file_type, has_eight)
    gate = 2 if shape.attention_gate else 1
    weighted = full * hidden * gate * heads * shape.head_dim * query
    weighted += full * hidden * kv_heads * shape.head_dim * key
    weighted += full * hidden * kv_heads * shape.value_dim * value
    weighted += full * hidden * heads * shape.value_dim * output
    linear = shape.num_linear_layers * shape.linear_params
    weighted += linear * format_bits(fallback(base, hidden))
    return weighted / (full * shape.full_attention_params + linear)


def _projections(
    shape: AttentionShape, file_type: FileType, has_eight: bool
) -> tuple[float, float, float, float]:
    """Return the bits of queries, keys, values (the mean over layers) and output."""
    base, hidden = file_type.dense or file_type.base, shape.hidden_size
    rows = shape.num_attention_heads * shape.value_dim
    query = format_bits(fallback(file_type.query or base, hidden))
    output = file_type.eight if has_eight and file_type.eight else file_type.output
    output_bits = format_bits(fallback(output or base, rows))
    if has_eight:
        eight = format_bits(fallback("Q8_0", hidden))
        return query, eight, eight, output_bits
    count = shape.num_layers - shape.num_linear_layers
    rules = file_type.value
    if file_type.grouped_value and shape.num_attention_heads >= 4 * shape.num_kv_heads:
        rules = ((_always, file_type.grouped_value),)
    values = [format_bits(fallback(_pick(rules, i, count, base), hidden)) for i in range(count)]
    return query, query, sum(values) / max(1, count), output_bits


def _mlp_bits(shape: ModelShape, file_type: FileType, size: int, layer: int, base: str) -> float:
    """Return the bits of gate, up and down projections of ``size`` in one layer, their mean."""
    count, matrices = shape.num_layers, shape.expert_matrices
    up = fallback(_pick(file_type.up, layer, count, base), shape.hidden_size)
    down = fallback(_pick(file_type.down, layer, count, base), size)
    return ((matrices - 1) * format_bits(up) + format_bits(down)) / matrices


def _pick(rules: Rules, layer: int, count: int, base: str) -> str:
    return next((name for holds, name in rules if holds(layer, count)), base)
