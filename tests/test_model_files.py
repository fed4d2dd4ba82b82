"""The bundled models build and agree with what is published of them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hwmodels.errors import HardwareError
from hwmodels.model_shape import ModelShape
from tests.configs import options
from tests.round_hardware import read

ROOT = Path(__file__).resolve().parents[1]
MODELS = options("model")
NOT_IN_FILES = {"priced_from", "low_bits"}

# published total parameters; M weights an expert; bank in GB and GB a token at bf16
PUBLISHED = {
    "olmoe_1b_7b": (6.9e9, 6.29, 12.9, 1.61),
    "qwen3_30b_a3b": (30.5e9, 4.72, 58.0, 3.62),
    "qwen3_235b_a22b": (235.1e9, 18.87, 454.2, 28.39),
    "deepseek_v2_lite": (15.7e9, 8.65, 28.8, 2.70),
    "deepseek_v3": (671.0e9, 44.04, 1307.8, 40.87),
    "deepseek_r1_ud_q2_k_xl": (671.0e9, 44.04, 1307.8, 40.87),
    "mixtral_8x7b": (46.7e9, 176.16, 90.2, 22.55),
    "mixtral_8x22b": (140.6e9, 301.99, 270.6, 67.65),
    "gpt_oss_20b": (20.9e9, 24.88, 38.2, 4.78),
    "gpt_oss_120b": (116.8e9, 24.88, 229.3, 7.17),
    "qwen1_5_moe_a2_7b": (14.3e9, 8.65, 24.9, 1.66),
    "qwen2_57b_a14b": (57.4e9, 27.53, 98.7, 12.33),
    "phi_3_5_moe": (41.9e9, 78.64, 80.5, 10.07),
    "llama4_scout": (107.8e9, 125.83, 193.3, 12.08),  # 109 B with its vision tower
    "glm_4_5_air": (106.9e9, 17.30, 199.3, 12.46),
    "glm_4_7_flash": (29.95e9, 9.44, 55.6, 3.47),
    "kimi_k2": (1026e9, 44.04, 2029.4, 42.28),
    "qwen3_next_80b_a3b": (79.7e9, 3.15, 154.6, 3.02),
    "qwen3_coder_next": (79.7e9, 3.15, 154.6, 3.02),
    "qwen3_6_35b_a3b": (34.7e9, 3.15, 64.4, 2.01),
    "qwen3_8_flash_next": (125e9, 4.92, 241.6, 4.72),
    "ernie_4_5_21b_a3b": (21.8e9, 11.80, 40.8, 3.82),
}
ACTIVE = {
    "qwen3_30b_a3b": 3.3e9,  # embedding included
    "qwen3_235b_a22b": 22.2e9,
    "deepseek_v3": 37.6e9,
    "mixtral_8x7b": 12.9e9,
    "mixtral_8x22b": 39.1e9,
    "gpt_oss_120b": 5.7e9,
    "qwen1_5_moe_a2_7b": 2.7e9,
    "kimi_k2": 32.9e9,
}
"""Weights a token goes through, as published, which counts the embedding."""


def model(name: str, **changes: Any) -> ModelShape:
    return ModelShape.from_mapping({**read("model", name), **changes}, name)


def test_there_are_files() -> None:
    assert set(MODELS) == {*PUBLISHED, "tiny", "replay_moe"}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_builds_and_gives_all_fields(name: str) -> None:
    plain = read("model", name)
    assert ModelShape.from_mapping(plain, name).name == name
    assert (
        set(plain) == {f.name for f in fields(ModelShape)} - NOT_IN_FILES
    )  # each can be overridden


@pytest.mark.parametrize("name", PUBLISHED)
def test_model_sizes_are_the_published_ones(name: str) -> None:
    total, expert, bank, token = PUBLISHED[name]
    shape = model(name, expert_bits=16, expert_bits_by_layer=None)
    assert shape.total_params == pytest.approx(total, rel=0.01)
    assert shape.expert_params / 1e6 == pytest.approx(expert, abs=0.006)
    layers, size = shape.num_moe_layers, shape.expert_bytes(0) / 1e9
    assert layers * shape.num_experts * size == pytest.approx(bank, abs=0.06)
    assert layers * shape.top_k * size == pytest.approx(token, abs=0.006)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_weights_are_the_published_ones(name: str) -> None:
    shape = model(name)
    assert shape.active_params + shape.head_params == pytest.approx(ACTIVE[name], rel=0.03)


@pytest.mark.parametrize(
    ("name", "bits", "expert_bytes"),
    [
        ("qwen3_30b_a3b", 4.5, 2_654_208),  # as recorded from a Q4_K_M file
        ("qwen3_235b_a22b", 4.5, 10_616_832),
        ("gpt_oss_120b", None, 13_219_200),  # as recorded from an MXFP4 file
        ("gpt_oss_20b", None, 13_219_200),
        ("qwen3_coder_next", None, 1_671_168),  # 1.671 MB as measured
        ("qwen3_8_flash_next", None, 2_764_800),  # 2.765 MB
    ],
)
def test_quantised_experts_have_their_recorded_bytes(
    name: str, bits: float | None, expert_bytes: int
) -> None:
    shape = model(name) if bits is None else model(name, expert_bits=bits)
    assert shape.expert_bytes(0) == expert_bytes


def test_the_two_bit_file_of_r1_has_its_published_size() -> None:
    assert model("deepseek_r1_ud_q2_k_xl").total_bytes / 2**30 == pytest.approx(211.03, rel=0.002)


def test_fp8_files_hold_a_scale_for_128_by_128_weights() -> None:
    shape = model("deepseek_v3")
    assert shape.expert_bytes(0) == 3 * 7168 * 2048 + 4 * 3 * (7168 // 128) * (2048 // 128)


# -- kinds of attention ----------------------------------------------------------------------------


def test_layers_of_several_kinds_cost_their_mean() -> None:
    """12 of 48 layers of Qwen3-Next have full attention: 2048 wide, 16 heads of 256 with a gate, 2 KV."""
    shape = model("qwen3_next_80b_a3b")
    full = 2048 * (2 * 16 * 256 + 2 * 2 * 256 + 16 * 256)
    projections = 2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4096 * 2048
    linear = projections + 4 * (2 * 2048 + 4096)  # and a convolution over four tokens
    assert shape.full_attention_params == full
    assert shape.linear_params == linear
    assert shape.attention_params == (12 * full + 36 * linear) / 48
    assert shape.kv_bytes_per_token_full_layer == 2 * 2 * 256 * 2
    assert shape.kv_bytes_per_token_layer == 2 * 2 * 256 * 2 / 4
    state = 4 * (32 * 128 * 128 + 3 * (2 * 2048 + 4096))
    assert shape.kv_bytes(1000) == 12 * 1000 * 2048 + 36 * state
    assert shape.attended_tokens(1001, 1) == 251  # 250.25, rounded up


def test_windows_bound_what_is_kept_and_read() -> None:
    shape = model("gpt_oss_120b")
    entry = 2 * 8 * 64 * 2
    assert shape.kv_bytes(100) == 36 * 100 * entry  # within the window
    assert shape.kv_bytes(1000) == (18 * 1000 + 18 * 128) * entry
    assert shape.kv_bytes_per_token_layer == entry  # the upper bound
    assert shape.attended_tokens(1000, 1) == (1000 + 128) // 2
    assert shape.attended_tokens(1000, 10) == 1000  # ten sequences of 100
    assert shape.attended_tokens(0, 0) == 0


def test_a_plain_model_attends_to_everything() -> None:
    shape = model("qwen3_30b_a3b")
    assert shape.attended_tokens(777, 1) == 777
    assert shape.kv_bytes(10) == 10 * 48 * shape.kv_bytes_per_token_layer


def test_value_heads_may_be_of_another_size() -> None:
    shape = model("glm_4_7_flash")  # 20 heads: 192 + 64 rotary, values of 256
    query = 768 * (2048 + 20 * 256)
    latent = 2048 * (512 + 64) + 512 * 20 * (192 + 256)
    assert shape.attention_params == query + latent + 20 * 256 * 2048
    assert shape.attention_flops_per_pair == 2 * 20 * (512 + 512 + 64)
    assert shape.kv_bytes_per_token_layer == 2 * 576


def test_a_traces_layers_keep_the_shares_of_the_kinds() -> None:
    assert model("qwen3_next_80b_a3b").priced_as(8, 512, 10).num_linear_layers == 6
    priced = model("gpt_oss_120b").priced_as(7, 128, 4)
    assert (priced.num_window_layers, priced.num_linear_layers) == (4, 0)  # 3.5
    assert priced.kv_bytes(1) == 7 * priced.kv_bytes_per_token_layer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_linear_layers": 49}, "num_linear_layers = 49: must be <= num_layers = 48"),
        ({"num_linear_layers": 3}, "linear_params = 0: must be > 0 with num_linear_layers = 3"),
        (
            {"num_linear_layers": 3, "linear_params": 9},
            "linear_state_bytes = 0: must be > 0 with num_linear_layers = 3",
        ),
        ({"num_window_layers": 3}, "window_tokens = 0: must be > 0 with num_window_layers = 3"),
        (
            {
                "num_window_layers": 20,
                "window_tokens": 9,
                "num_linear_layers": 30,
                "linear_params": 9,
                "linear_state_bytes": 9,
            },
            "num_window_layers = 20: must be <= 18, the layers without linear attention",
        ),
        ({"head_bits": 64}, "head_bits = 64.0: must be <= 32"),
        ({"shared_bits": 0}, "shared_bits = 0: must be > 0"),
    ],
)
def test_a_bad_kind_of_attention_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError) as error:
        model("qwen3_30b_a3b", **change)
    assert str(error.value) == f"qwen3_30b_a3b: {message}"


def test_head_and_shared_experts_may_have_bits_of_their_own() -> None:
    plain = model("deepseek_v2_lite")
    shape = model("deepseek_v2_lite", head_bits=8, shared_bits=4)
    assert shape.head_bytes == plain.head_bytes // 2
    assert shape.embedding_bytes == plain.embedding_bytes
    saved = plain.shared_params * 12 // 8
    assert shape.dense_layer_bytes(0) == plain.dense_layer_bytes(0) - saved
    assert (
        plain.non_expert_bytes(26) - shape.non_expert_bytes(26)
        == 26 * saved + plain.head_bytes // 2
    )


def test_the_tiny_model_is_the_bundled_checkpoint() -> None:
    config = json.loads((ROOT / "traces/tiny/checkpoint/config.json").read_text(encoding="utf-8"))
    shape = model("tiny")
    fields = {
        "num_hidden_layers": shape.num_moe_layers,
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "hidden_size": shape.hidden_size,
        "moe_intermediate_size": shape.expert_intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_embeddings,
    }
    assert {key: config[key] for key in fields} == fields
    assert config["dtype"] == "bfloat16"
    assert shape.expert_bits == 16
