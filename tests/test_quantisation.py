"""Bits a weight of formats and file types, against ggml's own tables and the sizes of real files."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hwmodels.errors import HardwareError
from hwmodels.file_types import FILE_TYPES, SCHEMES, quantised
from hwmodels.model_shape import ModelShape
from hwmodels.quantisation import FORMATS, GGML_BLOCKS, fallback, format_bits
from tests.public_data import routing_file
from tests.round_hardware import read, shape


def model(name: str, **changes: Any) -> ModelShape:
    return ModelShape.from_mapping({**read("model", name), **changes}, name)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("bf16", 16.0),
        ("fp8", 8.0),
        ("Q8_0", 8.5),
        ("Q6_K", 6.5625),
        ("q4_k", 4.5),
        ("Q4-K", 4.5),
        ("Q3_K", 3.4375),
        ("IQ4_XS", 4.25),
        ("IQ2_XXS", 2.0625),
        ("IQ5_K", 5.5),
        ("IQ5_K_R4", 5.5),
        ("MXFP4", 4.25),
        ("NVFP4", 4.5),
        ("GPTQ_INT4", 4 + (16 + 4) / 128),
        ("fp8_block", 8 + 32 / 128**2),
    ],
)
def test_bits_of_formats(name: str, bits: float) -> None:
    assert format_bits(name) == bits


def test_blocks_are_those_of_ggml() -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    theirs = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {name: theirs[name] for name in GGML_BLOCKS} == GGML_BLOCKS
    left_out = {"F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0"}  # no weights' formats
    assert set(theirs) - set(GGML_BLOCKS) <= left_out


@pytest.mark.parametrize(
    ("name", "row", "found"),
    [
        ("Q4_K", 768, "Q4_K"),
        ("Q4_K", 1408, "Q5_0"),  # 5.5 blocks of 256
        ("Q6_K", 1408, "Q8_0"),
        ("IQ4_XS", 2880, "IQ4_NL"),
        ("MXFP4", 2880, "MXFP4"),
        ("Q4_K", 100, "F16"),
    ],
)
def test_rows_that_do_not_divide_fall_back(name: str, row: int, found: str) -> None:
    assert fallback(name, row) == found


# -- what the bytes of real files say --------------------------------------------------------------


@pytest.mark.public_data
def test_q4_k_m_gives_each_layer_its_recorded_bytes() -> None:
    """A phone's engine printed the bytes of experts and of all else, layer by layer."""
    file = routing_file("qwen3-30b-a3b_q4km_k6.route.csv")
    head = [line for line in file.read_text(encoding="utf-8").splitlines()[:60] if "layer=" in line]
    found = [re.findall(r"=(\d+)", line) for line in head if "expert_bytes" in line]
    made = quantised(model("qwen3_30b_a3b"), "Q4_K_M")
    assert len(found) == 48
    assert [made.expert_bytes(int(layer)) for layer, *_ in found] == [int(e) for _, e, _ in found]
    norms = 2 * 128 * 4  # of queries and keys, which the shape leaves out
    mean = sum(int(dense) for *_, dense in found) / 48 - norms
    assert made.dense_layer_bytes(0) == pytest.approx(mean, abs=1)


@pytest.mark.parametrize(
    ("name", "scheme", "size_bytes", "within"),
    [
        # llama-bench's tables: qwen3moe 30B.A3B, deepseek2 16B and 671B, qwen3moe 235B.A22B
        ("qwen3_30b_a3b", "Q4_K_M", 17.28 * 2**30, 0.002),
        ("qwen3_30b_a3b", "Q4_K_S", 16.25 * 2**30, 0.002),
        ("deepseek_v2_lite", "Q4_K_M", 9.65 * 2**30, 0.002),
        ("deepseek_v3", "Q4_K_M", 376.65 * 2**30, 0.005),
        # bartowski's lists of files, in GB
        ("qwen3_30b_a3b", "Q8_0", 32.48e9, 0.002),
        ("qwen3_30b_a3b", "Q6_K", 25.10e9, 0.002),
        ("qwen3_30b_a3b", "Q5_K_M", 21.74e9, 0.002),
        ("qwen3_30b_a3b", "Q5_K_S", 21.10e9, 0.002),
        ("qwen3_30b_a3b", "IQ4_XS", 16.6e9, 0.015),
        ("glm_4_7_flash", "bf16", 59.91e9, 0.002),
        ("glm_4_7_flash", "Q8_0", 31.84e9, 0.002),
        ("glm_4_7_flash", "Q6_K", 24.83e9, 0.01),
        ("glm_4_7_flash", "Q4_K_M", 18.47e9, 0.02),
    ],
)
def test_file_types_give_files_of_their_published_size(
    name: str, scheme: str, size_bytes: float, within: float
) -> None:
    assert quantised(model(name), scheme).total_bytes == pytest.approx(size_bytes, rel=within)


@pytest.mark.parametrize(
    ("dense", "gib"),
    [
        (16, 60.87),  # "F16"
        ("MXFP4_MOE", 59.02),
    ],
)
def test_gpt_oss_files_have_their_published_size(dense: float | str, gib: float) -> None:
    """Biases of experts in 32 bits (36 x 128 x 3 x 2880 of them) come on top of the shape."""
    made = model("gpt_oss_120b", dense_bits=dense, head_bits=dense)
    biases = 36 * 128 * 3 * 2880 * 4
    assert (made.total_bytes + biases) / 2**30 == pytest.approx(gib, rel=0.002)


# -- by hand ---------------------------------------------------------------------------------------


def test_q4_k_m_of_a_small_model_by_hand() -> None:
    """Of 8 layers the first, the last and layers 3 and 6 have more bits."""
    small = shape(
        num_layers=8,
        num_moe_layers=8,
        hidden_size=256,
        expert_intermediate_size=256,
        num_attention_heads=2,
        num_kv_heads=1,
        head_dim=128,
    )
    made = quantised(small, "Q4_K_M")
    more, less = (4.5 + 4.5 + 6.5625) / 3, 4.5
    assert made.expert_bits_by_layer == (more, less, less, more, less, less, more, more)
    assert made.head_bits == 6.5625
    values = 256 * 128
    weights = 256 * 256 * 2 + 2 * values
    exact = 256 * 4 + 2 * 256
    bits = weights * 4.5 + values * (6.5625 - 4.5) / 2 + exact * 32
    assert made.dense_bits == pytest.approx(bits / (weights + exact))


def test_eight_experts_have_rules_of_their_own() -> None:
    """Mixtral: keys and values in Q8_0, output in Q5_K, router and norms in 32 bits."""
    made = model("mixtral_8x7b", dense_bits="Q4_K_M")
    square, narrow, exact = 4096 * 4096, 4096 * 1024, 4096 * (8 + 2)
    bits = square * 4.5 + 2 * narrow * 8.5 + square * 5.5 + exact * 32
    assert made.dense_bits == pytest.approx(bits / (2 * square + 2 * narrow + exact))


def test_a_file_type_names_the_shared_experts_and_the_head() -> None:
    made = model("deepseek_v2_lite", shared_bits="Q4_K_M", head_bits="Q4_K_M", kv_bits="Q8_0")
    assert made.head_bits == 6.5625
    assert made.kv_bits == 8.5
    assert 4.5 < made.shared_bits < 6.5625  # two experts of 1408 are 11 blocks of 256
    assert model("deepseek_v2_lite", shared_bits="Q6_K").shared_bits == 6.5625


def test_mxfp4_files_keep_all_but_the_experts_in_eight_bits() -> None:
    made = quantised(model("gpt_oss_20b"), "MXFP4_MOE")
    assert (made.expert_bits, made.head_bits) == (4.25, 8.5)
    assert 8.5 < made.dense_bits < 9


def test_formats_leave_the_head_and_some_of_them_all_but_experts() -> None:
    made = quantised(model("qwen3_30b_a3b"), "fp8")
    assert (made.expert_bits, made.dense_bits, made.head_bits) == (8, 8, 16)
    made = quantised(model("qwen3_30b_a3b"), "nvfp4")
    assert (made.expert_bits, made.dense_bits, made.head_bits) == (4.5, 16, None)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["deepseek_v2_lite", "mixtral_8x7b", "qwen3_next_80b_a3b"])
def test_every_scheme_serves_every_kind_of_model(name: str, scheme: str) -> None:
    made = quantised(model(name), scheme)
    least = min(FORMATS[FILE_TYPES[scheme].base] if scheme in FILE_TYPES else FORMATS[scheme], 16)
    assert least * 0.8 <= made.expert_bits <= 32
    assert 1 <= made.dense_bits <= 32


# -- names in a model's fields ---------------------------------------------------------------------


def test_layers_may_name_formats() -> None:
    names = ["Q6_K"] + ["q4_k"] * 47
    assert model("qwen3_30b_a3b", expert_bits_by_layer=names).expert_bits_by_layer == (
        6.5625,
        *[4.5] * 47,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_bits": "Q4_KM"}, "expert_bits = 'Q4_KM': must be a number, not str, or a"),
        ({"expert_bits": "Q4_KM"}, "did you mean 'Q4_K_M'?"),
        ({"dense_bits": "bf61"}, "did you mean 'BF16'?"),
        ({"kv_bits": "Q4_K_M"}, "kv_bits = 'Q4_K_M': must be a number, not str, or a"),
        ({"expert_bits_by_layer": ["Q4_K_M"] * 48}, "expert_bits_by_layer[0] = 'Q4_K_M': must be"),
    ],
)
def test_a_name_that_is_no_scheme_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError, match=re.escape(message)):
        model("qwen3_30b_a3b", **change)
