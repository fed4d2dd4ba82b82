"""How an expert's weights lie in bytes: places, packing, quantising; and random weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from real.experts import DTYPES, ExpertFormat, ExpertWeights, dequantise
from real.synthetic import PERIOD, STEP, Synthetic
from sim.types import ConfigError

torch.set_num_threads(1)

FORMATS = st.builds(
    ExpertFormat,
    hidden_size=st.integers(1, 70),
    intermediate_size=st.integers(1, 70),
    dtype=st.sampled_from(sorted(DTYPES)),
    has_gate=st.booleans(),
    has_bias=st.booleans(),
    is_transposed=st.booleans(),
)


def random_weights(format: ExpertFormat, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    """Return float weights of a format's shapes; output ``i`` of a matrix is about ``i`` large."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for part in format.parts:
        if not part.name.endswith("_scale"):
            values = torch.randn(part.shape, generator=generator)
            outputs = -1 if format.is_transposed or len(part.shape) == 1 else 0
            size = torch.arange(1.0, part.shape[outputs] + 1)
            scaled = values * (size if outputs == -1 else size[:, None])
            tensors[part.name] = scaled.to(dtype)
    return ExpertWeights(**tensors)


def packed(format: ExpertFormat, weights: ExpertWeights) -> torch.Tensor:
    buffer = torch.full((format.slot_bytes,), 7, dtype=torch.uint8)
    format.pack(weights, buffer)
    return buffer


@settings(max_examples=60, deadline=None)
@given(FORMATS)
def test_parts_are_aligned_in_order_apart_and_the_slot_is_whole_pages(format: ExpertFormat) -> None:
    end = 0
    for part in format.parts:
        assert part.offset_bytes % 64 == 0
        assert 0 <= part.offset_bytes - end < 64
        end = part.end_bytes
    assert format.num_bytes == end
    assert format.slot_bytes % 4096 == 0
    assert 0 <= format.slot_bytes - end < 4096
    assert format.bits_per_weight() * format.num_weights == pytest.approx(format.slot_bytes * 8)


def test_the_order_is_matrices_biases_scales() -> None:
    format = ExpertFormat(8, 4, "int8", has_bias=True)
    names = ["gate_up", "down", "gate_up_bias", "down_bias", "gate_up_scale", "down_scale"]
    assert [part.name for part in format.parts] == names
    assert [part.shape for part in format.parts] == [(8, 8), (8, 4), (8,), (8,), (8,), (8,)]
    assert ExpertFormat(8, 4, "float32", has_gate=False).parts[0].shape == (4, 8)
    assert ExpertFormat(6, 5, "float32", is_transposed=True).parts[0].shape == (6, 10)


@pytest.mark.parametrize(
    ("dtype", "has_gate", "has_bias", "is_transposed"),
    list(product(["float32", "bfloat16", "float16"], *[[False, True]] * 3)),
)
def test_what_is_packed_is_viewed_bit_for_bit(
    dtype: str, has_gate: bool, has_bias: bool, is_transposed: bool
) -> None:
    format = ExpertFormat(13, 9, dtype, has_gate, has_bias, is_transposed)
    weights = random_weights(format, DTYPES[dtype])
    view = format.view(packed(format, weights))
    for name in ExpertWeights._fields:
        source, seen = getattr(weights, name), getattr(view, name)
        assert (source is None) == (seen is None), name
        assert source is None or torch.equal(source, seen), name


@settings(max_examples=30, deadline=None)
@given(FORMATS)
def test_bytes_outside_the_parts_are_zero(format: ExpertFormat) -> None:
    buffer = packed(format, random_weights(format))
    for part in format.parts:
        buffer[part.offset_bytes : part.end_bytes] = 0
    assert not buffer.any()


def test_a_view_shares_memory_with_a_slot_of_an_arena() -> None:
    format = ExpertFormat(16, 8, "bfloat16", has_bias=True)
    arena = torch.zeros(3, format.slot_bytes, dtype=torch.uint8)
    format.pack(random_weights(format), arena[1])
    stacked = format.view(arena)
    assert stacked.gate_up.shape == (3, 16, 16)
    assert torch.equal(stacked.down[1], format.view(arena[1]).down)
    assert not stacked.down[0].any()
    format.view(arena[1]).down.fill_(2)
    assert (stacked.down[1] == 2).all()
    assert not stacked.down[2].any()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_int8_is_within_half_a_scale_and_has_one_scale_an_output(is_transposed: bool) -> None:
    format = ExpertFormat(24, 10, "int8", has_bias=True, is_transposed=is_transposed)
    weights = random_weights(format)
    view = format.view(packed(format, weights))
    for name, outputs in (("gate_up", 20), ("down", 24)):
        scales, exact = getattr(view, f"{name}_scale"), getattr(weights, name)
        back = dequantise(getattr(view, name), scales, is_transposed)
        across = 0 if is_transposed else 1
        assert scales.shape == (outputs,)
        assert torch.allclose(scales, exact.abs().amax(dim=across) / 127)
        assert ((back - exact).abs() <= scales.unsqueeze(across) / 2 * 1.001).all()
    assert torch.equal(view.down_bias, weights.down_bias)
    assert view.down_bias.dtype == torch.float32


def test_an_output_of_zeros_is_quantised_to_zeros() -> None:
    format = ExpertFormat(4, 4, "int8")
    weights = ExpertWeights(torch.zeros(8, 4), torch.zeros(4, 4))
    view = format.view(packed(format, weights))
    assert torch.equal(dequantise(view.down, view.down_scale), torch.zeros(4, 4))
    assert torch.isfinite(view.down_scale).all()


def test_int8_weights_keep_their_integers_and_come_back_as_floats() -> None:
    format = ExpertFormat(12, 6, "int8")
    first = packed(format, random_weights(format))
    assert torch.equal(packed(format, format.view(first)), first)
    floats = replace(format, dtype="float32")
    back = floats.view(packed(floats, format.view(first)))
    view = format.view(first)
    assert torch.equal(back.gate_up, dequantise(view.gate_up, view.gate_up_scale))


def test_activations_of_int8_experts_have_a_dtype_of_their_own() -> None:
    assert ExpertFormat(4, 4, "bfloat16").compute_dtype == torch.bfloat16
    assert ExpertFormat(4, 4, "int8").compute_dtype == torch.float32
    format = ExpertFormat(4, 4, "int8", has_bias=True, activation_dtype="bfloat16")
    assert format.compute_dtype == torch.bfloat16
    assert {part.dtype for part in format.parts if "bias" in part.name} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "bfloat61"}, "dtype = bfloat61.*did you mean 'bfloat16'"),
        ({"hidden_size": 0}, "hidden_size = 0: must be at least 1"),
        ({"activation_dtype": "int8"}, "activation_dtype = int8: must be one of"),
    ],
)
def test_a_wrong_format_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertFormat(**{"hidden_size": 4, "intermediate_size": 4, "dtype": "int8", **fields})  # type: ignore[arg-type]


def test_weights_that_do_not_fit_are_refused() -> None:
    format = ExpertFormat(8, 4, "float32", has_bias=True)
    weights = random_weights(format)
    with pytest.raises(ConfigError, match=r"gate_up has shape \[4, 8\]: must be \[8, 8\]"):
        packed(format, weights._replace(gate_up=weights.gate_up[:4]))
    with pytest.raises(ConfigError, match=r"down_bias is missing: must be of shape \[8\]"):
        packed(format, weights._replace(down_bias=None))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_synthetic_experts_differ_and_look_like_weights(dtype: str) -> None:
    format = ExpertFormat(32, 16, dtype, has_bias=True)
    source = Synthetic(3, 20, format, seed=5)
    records = {packed(format, source.expert(n // 20, n % 20)).numpy().tobytes() for n in range(60)}
    assert len(records) == 60
    weights = format.view(packed(format, source.expert(2, 7)))
    down = weights.down.float()
    if format.is_quantised:
        down = dequantise(weights.down, weights.down_scale)
    assert torch.isfinite(down).all()
    assert 0.017 < float(down.std()) < 0.023
    assert abs(float(down.mean())) < 0.005


def test_synthetic_experts_follow_from_the_seed() -> None:
    format = ExpertFormat(16, 8, "float32")
    first, again, other = (Synthetic(2, 4, format, seed).expert(1, 2) for seed in (1, 1, 2))
    assert torch.equal(first.gate_up, again.gate_up)
    assert not torch.equal(first.gate_up, other.gate_up)


def test_synthetic_experts_begin_elsewhere_as_long_as_there_are_places() -> None:
    assert all(PERIOD % divisor for divisor in range(2, 1024))  # prime, so every step comes round
    assert 0 < STEP < PERIOD
    format = ExpertFormat(4, 4, "float32")
    with pytest.raises(ConfigError, match="must be at most 1048573"):
        Synthetic(1, PERIOD + 1, format)
    with pytest.raises(ConfigError, match="num_experts = 0: must be at least 1"):
        Synthetic(1, 0, format)
