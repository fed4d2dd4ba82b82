"""What a Hugging Face configuration says of a model's attention: heads, latents, linear layers, windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwmodels.attention_shape import AttentionShape
from hwmodels.errors import HardwareError

if TYPE_CHECKING:
    from hwmodels.hf_config import Config

_GATED = ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
"""Classes with an output gate, unless their config says otherwise."""
_WINDOWS = ("sliding_attention", "chunked_attention")
MOST_LAYERS = 4096
"""More than any model has: a larger number is a broken file."""
_STATE_BYTES = 4
"""The states of linear attention are kept in 32 bits (transformers and llama.cpp)."""


def attention_of(read: Config) -> AttentionShape:
    """Return the attention that a configuration describes; raise HardwareError for what is missing."""
    layers = read.whole("num_hidden_layers", least=1, most=MOST_LAYERS)
    heads = read.whole("num_attention_heads")
    hidden = read.whole("hidden_size")
    rank = read.whole("kv_lora_rank", default=0)
    if rank:
        head_dim, value_dim = read.whole("qk_nope_head_dim"), read.whole("v_head_dim")
    else:
        head_dim = read.whole("head_dim", default=0) or hidden // max(1, heads)
        value_dim = read.whole("v_head_dim", default=head_dim)
    linear = _num_linear(read, layers)
    windows, tokens = _windows(read, layers)
    return AttentionShape(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_kv_heads=read.whole("num_key_value_heads", default=heads),
        head_dim=head_dim,
        v_head_dim=value_dim if value_dim != head_dim else 0,
        attention_gate=bool(read.values.get("attn_output_gate", read.model_type in _GATED)),
        kv_lora_rank=rank,
        q_lora_rank=read.whole("q_lora_rank", default=0) if rank else 0,
        qk_rope_head_dim=read.whole("qk_rope_head_dim") if rank else 0,
        num_linear_layers=linear,
        linear_params=_linear_params(read, hidden) if linear else 0,
        linear_state_bytes=_linear_state_bytes(read) if linear else 0,
        num_window_layers=windows,
        window_tokens=tokens,
        kv_bits=16.0,
    )


def _num_linear(read: Config, layers: int) -> int:
    if "linear_attn_config" in read.values:
        raise HardwareError(
            f"{read.where}: linear_attn_config: this kind of linear attention is not known; "
            "write the model file by hand"
        )
    if kinds := read.listed("layer_types"):
        return kinds.count("linear_attention")
    if "linear_num_value_heads" not in read.values:
        return 0
    return layers - layers // read.whole("full_attention_interval", default=4, least=1)


def _linear_sizes(read: Config) -> tuple[int, int]:
    """Return the widths of all keys and of all values of a gated delta net."""
    key = read.whole("linear_num_key_heads") * read.whole("linear_key_head_dim")
    return key, read.whole("linear_num_value_heads") * read.whole("linear_value_head_dim")


def _linear_params(read: Config, hidden: int) -> int:
    """Return the weights of one gated delta net.

    Projections of queries, keys, values and gate, of two scalars a value head, of the output, and a
    convolution over queries, keys and values (transformers 5.24 modeling_qwen3_next).
    """
    key, value = _linear_sizes(read)
    scalars = 2 * read.whole("linear_num_value_heads")
    convolution = (2 * key + value) * read.whole("linear_conv_kernel_dim", default=4)
    return hidden * (2 * key + 2 * value + scalars) + convolution + value * hidden


def _linear_state_bytes(read: Config) -> int:
    """Return the bytes of one sequence's state in one layer: key x value a head, and the convolution's."""
    key, value = _linear_sizes(read)
    matrix = value * read.whole("linear_key_head_dim")
    past = (2 * key + value) * (read.whole("linear_conv_kernel_dim", default=4) - 1)
    return _STATE_BYTES * (matrix + past)


def _windows(read: Config, layers: int) -> tuple[int, int]:
    """Return how many layers see a window only, and its tokens.

    Attention in chunks is read as a window of a chunk's size, which is the most that a token sees.
    """
    chunk = read.whole("attention_chunk_size", default=0)
    window = chunk or read.whole("sliding_window", default=0)
    if not window or (read.values.get("use_sliding_window") is False and not chunk):
        return 0, 0
    if kinds := read.listed("layer_types"):
        number = sum(kinds.count(kind) for kind in _WINDOWS)
    elif chunk:
        number = layers - layers // max(1, read.whole("no_rope_layer_interval", default=4))
    else:
        number = layers if window < read.whole("max_position_embeddings", default=2**62) else 0
    return (number, window) if number else (0, 0)
