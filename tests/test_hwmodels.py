"""Sizes of models worked out by hand on round numbers."""

from __future__ import annotations

import pytest

from hwmodels.errors import HardwareError
from hwmodels.model_shape import ModelShape
from hwmodels.units import GB, compute_ns, transfer_ns, weight_bytes
from tests.round_hardware import read, shape


def test_times_are_whole_and_never_too_short() -> None:
    assert transfer_ns(10, 3 * GB) == 4  # 3.33 ns
    assert transfer_ns(0, GB) == 0
    assert compute_ns(20, 10 * GB) == 2
    assert weight_bytes(3, 4.25) == 2  # 12.75 bits


def test_sizes_by_hand() -> None:
    model = shape()
    assert model.expert_bytes(0) == 600
    assert model.expert_flops_per_token == 1200
    assert model.attention_bytes == 10 * 10 + 2 * 10 * 5 + 10 * 10  # q, k and v, output
    assert model.dense_layer_bytes(1) == 300 + 4 * 10 + 2 * 10  # attention, router, norms
    assert model.embedding_bytes == model.head_bytes == 1000
    assert model.kv_bytes_per_token_layer == 10
    assert model.non_expert_bytes(2) == 2 * 360 + 2000
    assert model.total_params == 2 * (360 + 4 * 600) + 2000


def test_a_tied_head_takes_no_memory_but_is_read() -> None:
    model = shape(tie_embeddings=True)
    assert model.non_expert_bytes(2) == shape().non_expert_bytes(2) - 1000
    assert model.head_bytes == 1000


def test_latent_attention_keeps_the_compressed_latents() -> None:
    model = shape(kv_lora_rank=6, qk_rope_head_dim=2)
    query, latent, up, out = 10 * 2 * 7, 10 * 8, 6 * 2 * 10, 2 * 5 * 10
    assert model.attention_params == query + latent + up + out
    assert model.kv_bytes_per_token_layer == 8


def test_expert_bits_change_experts_only() -> None:
    assert shape(expert_bits=4.5).expert_bytes(0) == 338  # 337.5
    assert shape(expert_bits=4.5).dense_layer_bytes(0) == shape().dense_layer_bytes(0)


@pytest.mark.parametrize("layer", [-1, 2])
def test_no_such_layer(layer: int) -> None:
    for ask in (shape().expert_bytes, shape().expert_bits_of, shape().dense_layer_bytes):
        with pytest.raises(ValueError, match=rf"layer = {layer}: must be in \[0, 2\)"):
            ask(layer)


def test_priced_as_keeps_the_sizes_of_a_layer() -> None:
    model = shape(num_layers=3, dense_intermediate_size=50)
    priced = model.priced_as(1, 8, 2)
    assert priced.expert_bytes(0) == model.expert_bytes(0)
    assert priced.num_dense_only_layers == 1
    assert priced.priced_note() == "round: 1 of 2 layers, 8 (not 4) experts, top-2"
    assert priced.priced_as(2, 4, 1).priced_note() == "round: 2 layers, 4 experts, top-1 of 2"
    assert model.priced_note() == "round: 2 layers, 4 experts, top-2"
    with pytest.raises(HardwareError, match="top-9"):
        model.priced_as(2, 8, 9)


# -- mixed quantisation ----------------------------------------------------------------------------


def test_each_layer_has_the_bits_of_its_own() -> None:
    mixed = shape(expert_bits_by_layer=(4.0, 8.0))
    assert [mixed.expert_bytes(layer) for layer in (0, 1)] == [300, 600]


def test_bits_by_layer_are_cut_or_repeated_for_a_trace() -> None:
    mixed = shape(expert_bits_by_layer=(4.0, 8.0), expert_bits=6.0)
    assert mixed.priced_as(1, 4, 2).expert_bits_by_layer == (4.0,)
    assert mixed.priced_as(1, 4, 2).expert_bits == 4.0
    assert mixed.priced_as(5, 4, 2).expert_bits_by_layer == (4.0, 8.0, 4.0, 8.0, 4.0)
    assert mixed.priced_as(5, 4, 2).expert_bits == 5.6


@pytest.mark.parametrize("given", [{}, {"expert_bits": 16}, {"expert_bits": None}])
def test_expert_bits_are_the_mean_of_the_layers(given: dict[str, object]) -> None:
    plain = read("model", "mixtral_8x7b")
    del plain["expert_bits"]
    mixed = [2.5] * 16 + [4.5] * 16
    made = ModelShape.from_mapping({**plain, **given, "expert_bits_by_layer": mixed})
    assert made.expert_bits == 3.5
    assert made.expert_bytes(0) < made.expert_bytes(31)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([4.5] * 31, r"must have num_moe_layers = 32 numbers"),
        ([], r"expert_bits_by_layer = \[\]: must be a list of numbers that is not empty"),
        (4.5, r"expert_bits_by_layer = 4.5: must be a list of numbers"),
        ([4.5] * 31 + [0], r"expert_bits_by_layer\[31\] = 0: must be > 0"),
        ([-1] * 32, r"expert_bits_by_layer\[0\] = -1: must be >"),
        ([4.5] * 31 + [float("nan")], r"expert_bits_by_layer\[31\] = nan: must be finite"),
        ([4.5] * 31 + [64], r"expert_bits_by_layer = .*: must be numbers <= 32"),
        ([4.5] * 31 + [16**4000], r"\[31\] = of more than 4300 digits: must be <= 1e\+18"),
        (["four"] * 32, r"expert_bits_by_layer\[0\] = 'four': must be a number, not str"),
    ],
)
def test_bad_bits_by_layer_are_named(given: object, message: str) -> None:
    plain = read("model", "mixtral_8x7b")
    with pytest.raises(HardwareError, match=message) as error:
        ModelShape.from_mapping({**plain, "expert_bits_by_layer": given}, "model/mine")
    assert str(error.value).startswith("model/mine: expert_bits_by_layer")
