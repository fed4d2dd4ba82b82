"""Reads a model's shape from the ``config.json`` that its weights come with on Hugging Face.

The classes differ in names more than in kind, so each fact is looked up under every name that is in use
(Mixtral, Qwen2/3-MoE, Qwen3-Next, Qwen3.5-MoE, DeepSeek-V2/V3, Kimi-K2, GLM-4-MoE and -Lite, OLMoE,
Phi-MoE, gpt-oss, Llama-4, ERNIE-4.5 and their likes, as transformers 5.24 has them). Not read: vision
towers, and the extra layers that predict several tokens at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwmodels.attention_shape import AttentionShape
from hwmodels.errors import HardwareError, figure_error
from hwmodels.hf_attention import attention_of
from hwmodels.hf_quantisation import bits_of

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_topk")
_EXPERT_SIZE = ("moe_intermediate_size", "expert_intermediate_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_WHOLE_MLP = ("mixtral", "olmoe", "phimoe", "gpt_oss", "llama4_text", "llama4", "minimax", "jamba")
"""Classes whose ``intermediate_size`` is that of an expert."""
_TIED = ("ernie4_5_moe",)
"""Classes that tie embedding and head unless their config says otherwise."""


class Config:
    """A configuration with the names that facts go by; ``where`` begins its complaints."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def whole(
        self, *names: str, default: int | None = None, least: int = 0, most: int | None = None
    ) -> int:
        """Return the first of the names that is given; HardwareError if none is, or it is no count."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, list) and value:  # one number a modality: the text's comes first
                value = value[0]
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise figure_error(self.where, name, value, f"must be a whole number >= {least}")
            if most is not None and value > most:
                raise figure_error(self.where, name, value, f"must be <= {most}")
            return value
        if default is None:
            others = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise HardwareError(f"{self.where}: {names[0]}{others}: missing, must be given")
        return default

    def listed(self, name: str) -> list[Any]:
        """Return a list, empty where it is not given."""
        value = self.values.get(name)
        return list(value) if isinstance(value, list | tuple) else []

    @property
    def model_type(self) -> str:
        """The class of the model, in the words of transformers."""
        return str(self.values.get("model_type", ""))


def model_values(config: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return a model file's values for a configuration, in the file's order.

    Raises HardwareError, beginning with ``where``, for what is missing or is not understood.
    """
    read = _read(config, where)
    attention = attention_of(read)
    return {
        "name": name,
        "source": _source(config, read),
        **_mlp(read, attention),
        **{field: getattr(attention, field) for field in AttentionShape.__slots__},
        **bits_of(config, read.values, where),
    }


def _read(config: Mapping[str, Any], where: str) -> Config:
    """Return the values of the text model."""
    if not isinstance(config, Mapping):
        raise figure_error(where, "(all)", type(config).__name__, "must be a mapping")
    text = config.get("text_config")
    has_text = isinstance(text, Mapping) and "num_hidden_layers" in text
    values = {**config, **text} if has_text and isinstance(text, Mapping) else dict(config)
    return Config(values, where)


def _source(config: Mapping[str, Any], read: Config) -> str:
    origin = config.get("_name_or_path") or read.model_type or "a model"
    return f"config.json of {origin}"


def _mlp(read: Config, attention: AttentionShape) -> dict[str, Any]:
    """Return what the values say of experts, shared experts, dense layers, embedding and head."""
    layers = attention.num_layers
    whole = read.model_type in _WHOLE_MLP
    size = read.whole("intermediate_size") if whole else read.whole(*_EXPERT_SIZE)
    num_shared, shared_size = _shared(read, size)
    num_moe = len(_moe_layers(read, layers))
    dense = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size")
    return {
        "num_moe_layers": num_moe,
        "num_experts": read.whole(*_NUM_EXPERTS),
        "top_k": read.whole(*_TOP_K),
        "expert_intermediate_size": size,
        "expert_matrices": 3,
        "num_shared_experts": num_shared,
        "shared_intermediate_size": shared_size,
        "dense_intermediate_size": read.whole(*dense) if num_moe < layers else 0,
        "vocab_size": read.whole("vocab_size"),
        "tie_embeddings": bool(read.values.get("tie_word_embeddings", read.model_type in _TIED)),
    }


def _shared(read: Config, expert_size: int) -> tuple[int, int]:
    """Return how many shared experts there are, and the size of one."""
    if read.model_type.startswith("llama4"):
        return 1, expert_size  # one of an expert's size, which no key tells
    size = read.whole("shared_expert_intermediate_size", default=0)
    if size:
        return 1, size
    number = read.whole(*_SHARED, default=0)
    return number, expert_size if number else 0


def moe_layers(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Return the absolute indices of the layers that route, ascending; HardwareError for what is missing."""
    read = _read(config, where)
    return tuple(_moe_layers(read, read.whole("num_hidden_layers", least=1)))


def _moe_layers(read: Config, layers: int) -> list[int]:
    if kinds := read.listed("mlp_layer_types"):
        return [index for index, kind in enumerate(kinds) if kind != "dense"]
    if frequency := read.listed("moe_layer_freq"):
        return [index for index, value in enumerate(frequency) if value]
    if moe := read.listed("moe_layers"):
        return sorted(moe)
    if "moe_layer_start_index" in read.values:
        return list(_ernie_layers(read, layers))
    if "first_k_dense_replace" in read.values:
        return list(range(min(layers, read.whole("first_k_dense_replace")), layers))
    if "interleave_moe_layer_step" in read.values:
        step = max(1, read.whole("interleave_moe_layer_step"))
        return list(range(step - 1, layers, step))
    step, plain = read.whole("decoder_sparse_step", default=1), read.listed("mlp_only_layers")
    return [i for i in range(layers) if i not in plain and (i + 1) % max(1, step) == 0]


def _ernie_layers(read: Config, layers: int) -> range:
    first = read.whole("moe_layer_start_index")
    is_last = read.values.get("moe_layer_end_index") in (-1, [-1])
    last = layers - 1 if is_last else read.whole("moe_layer_end_index", default=layers - 1)
    step = read.whole("moe_layer_interval", default=1, least=1)
    return range(first, min(last, layers - 1) + 1, step)
