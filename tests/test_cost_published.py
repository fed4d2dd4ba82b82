"""The bundled machines against points that others measured; each row tells what the model leaves out.

Sources and the letters of their figures are in the machine files. Tolerances are what the model misses
the points by today, rounded up: they may shrink, not grow.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hwmodels.cost import CostModel
from hwmodels.engine import Engine
from hwmodels.machine import Machine
from hwmodels.model_shape import ModelShape
from hwmodels.units import transfer_ns
from tests.round_hardware import engine, read, shape

FUSED = Engine.from_mapping(read("engine", "fused"))


def model(name: str, **changes: object) -> ModelShape:
    return ModelShape.from_mapping({**read("model", name), **changes}, name)


def machine(name: str) -> Machine:
    return Machine.from_mapping(read("machine", name), name)


def costs(shape: ModelShape, machine_name: str, chosen: Engine | None = None) -> CostModel:
    return CostModel(shape, machine(machine_name), chosen or engine())


def expert_of(num_bytes: int) -> ModelShape:
    return shape(hidden_size=num_bytes // 3, expert_intermediate_size=1)


# -- the link --------------------------------------------------------------------------------------


def test_an_isolated_copy_of_864_kib() -> None:
    """27.3 us on a 5090 (kekzl/imp PR 1409); the link's own best rate would give 15.8."""
    assert costs(expert_of(864 * 1024), "rtx5090_ddr5").load_ns(0) == pytest.approx(
        27_300, rel=0.04
    )


def test_copies_in_a_queue() -> None:
    """586 MB in about 730 copies take 41 % of 27.6 ms on a 5090 (kekzl/imp PR 1377)."""
    model_costs = costs(expert_of(586_000_000 // 730), "rtx5090_ddr5")
    gap_ns = machine("rtx5090_ddr5").link.copy_gap_ns  # type: ignore[union-attr]
    queue_ns = 730 * (gap_ns + model_costs.copy_ns(0))
    assert queue_ns == pytest.approx(0.41 * 27.6e6, rel=0.03)
    assert 586e6 / queue_ns == pytest.approx(51, rel=0.02)


def test_the_host_time_of_a_pageable_copy() -> None:
    """864 KiB keep the host thread for 76 us on a 5090 (kekzl/imp PR 1409)."""
    link = machine("rtx5090_ddr5").link
    assert link is not None
    assert transfer_ns(864 * 1024, link.pageable_host_bytes_per_s) == pytest.approx(
        76_000, rel=0.01
    )


def test_links_in_their_order() -> None:
    files = ("laptop_pcie3_x8", "rtx3090", "rtx4090", "rtx5090_ddr5", "gh200")
    loads = [costs(model("qwen3_30b_a3b"), name).load_ns(0) for name in files]
    assert loads == sorted(loads, reverse=True)
    assert loads[-2] > 4 * loads[-1]  # C2C


# -- experts on the CPU ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "layer_us"),
    [(16, 1315), (16, 1380), (8.5, 750), (6.56, 635), (5.5, 575), (4.85, 520), (2.63, 360)],
)
def test_expert_kernels_by_quantisation(bits: float, layer_us: float) -> None:
    """Six experts of 5120 x 1536 on a Xeon 6454S (KTransformers figure): 145 us + bytes / 229 GB/s."""
    six = shape(hidden_size=5120, expert_intermediate_size=1536, expert_bits=bits)
    layer_ns = 6 * costs(six, "rtx4090_x4").expert_cpu_ns(0, 1)
    assert layer_ns == pytest.approx(layer_us * 1000, rel=0.08)


@pytest.mark.parametrize(
    ("bits", "is_codebook", "gb_per_s"),
    [(16, False, 68.6), (8.5, False, 65), (4.5, False, 60), (2.0625, True, 21)],
)
def test_streaming_by_quantisation(bits: float, is_codebook: bool, gb_per_s: float) -> None:
    """7950X (ik_llama.cpp discussion 164): decoding of codebooks binds, not memory."""
    cpu = machine("rtx4090").cpu
    rate = cpu.team_bytes_per_s(cpu.cores, bits, is_codebook)
    assert rate == pytest.approx(gb_per_s * 1e9, rel=0.09)


def test_cpu_time_of_a_measured_row() -> None:
    """DeepSeek-V2-Lite IQ4_NL, all experts on a 7950X: 13.16 ms a token (the row fits the setup)."""
    found = costs(model("deepseek_v2_lite", expert_bits=4.5), "rtx4090")
    assert 26 * 6 * found.expert_cpu_ns(0, 1) == pytest.approx(13.16e6, rel=0.03)


def cpu_token_ns(kv_tokens: int) -> int:
    """Return a token of Qwen3-30B-A3B IQ4_XS on the 7950X alone."""
    shape = model("qwen3_30b_a3b", expert_bits=4.25, dense_bits=4.25)
    found = CostModel(shape, replace(machine("rtx4090"), gpu=None, link=None), engine())
    layer_ns = found.dense_ns(1, kv_tokens, kv_tokens) + found.experts_gpu_ns(0, [1] * 8, False)
    return 48 * layer_ns + found.step_ns(1, 1, kv_tokens, kv_tokens)


@pytest.mark.parametrize(("kv_tokens", "tokens_per_s"), [(1, 26.35), (8192, 21.19)])
def test_a_cpu_alone(kv_tokens: int, tokens_per_s: float) -> None:
    """ik_llama.cpp discussion 357; dispatch is fitted to the first row. KV reads come out too dear."""
    assert 1e9 / cpu_token_ns(kv_tokens) == pytest.approx(tokens_per_s, rel=0.09)


def test_a_phones_compute() -> None:
    """Qwen3-30B-A3B Q4_K_M on four threads: 107 and 134 ms a token in two runs; the rate lies between."""
    bits = {"expert_bits": 4.84375, "dense_bits": 4.94, "head_bits": 6.5625}
    found = costs(model("qwen3_30b_a3b", **bits), "oneplus_15r")
    layer_ns = found.dense_ns(1, 64, 64) + found.experts_gpu_ns(0, [1] * 8, False)
    assert 48 * layer_ns + found.step_ns(1, 1, 64, 64) == pytest.approx(119e6, rel=0.03)


# -- kernels of the GPU ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_experts", "layer_us"),
    [("qwen3_30b_a3b", 8, 61.7), ("mixtral_8x7b", 2, 454)],
)
def test_fused_experts_of_one_token(name: str, num_experts: int, layer_us: float) -> None:
    """A100, bf16 (aiconfigurator vLLM tables, SXM card)."""
    layer_ns = costs(model(name), "a100_80_pcie", FUSED).experts_gpu_ns(0, [1] * num_experts, False)
    assert layer_ns == pytest.approx(layer_us * 1000, rel=0.08)


@pytest.mark.parametrize(
    ("num_tokens", "layer_us", "miss"), [(64, 308, 0.05), (256, 341, 0.1), (1024, 416, 0.2)]
)
def test_fused_experts_by_tokens(num_tokens: int, layer_us: float, miss: float) -> None:
    """Qwen3-30B-A3B bf16 on an H200 (aiconfigurator), whose weights stream at 3846-4075 GB/s.

    All 128 experts are touched; time follows their bytes, then activations and operations.
    """
    found = machine("gh200")
    assert found.gpu is not None
    h200 = replace(found, gpu=replace(found.gpu, memory_bytes_per_s=3_960_000_000_000))
    tokens = [num_tokens * 8 // 128] * 128
    layer_ns = CostModel(model("qwen3_30b_a3b"), h200, FUSED).experts_gpu_ns(0, tokens, False)
    assert layer_ns == pytest.approx(layer_us * 1000, rel=miss)


def test_decoding_of_four_bits_binds_a_fast_gpu() -> None:
    """gpt-oss-120b MXFP4, one token on an H100: 62.9 us for four experts (aiconfigurator)."""
    found = costs(model("gpt_oss_120b"), "gh200", FUSED)
    assert found.experts_gpu_ns(0, [1] * 4, False) == pytest.approx(62_900, rel=0.12)


@pytest.mark.parametrize(("kv_tokens", "attention_us"), [(8192, 33.5), (32_768, 72)])
def test_decode_attention_by_length(kv_tokens: int, attention_us: float) -> None:
    """32 heads over 4 KV heads, bf16, A100 (aiconfigurator): floor and bytes add up."""
    found = costs(model("qwen3_30b_a3b"), "a100_80_pcie")
    floor_ns = machine("a100_80_pcie").device.attention_floor_ns
    matrices_ns = found.dense_ns(1, 0, 0) - floor_ns
    attention_ns = found.dense_ns(1, kv_tokens, kv_tokens) - matrices_ns
    assert attention_ns == pytest.approx(attention_us * 1000, rel=0.3)
    assert attention_ns > floor_ns + 10_000


def test_decode_attention_of_a_batch() -> None:
    """16 sequences of 8192 entries, 64 heads over 8 KV heads, bf16, A100: 347 us (aiconfigurator)."""
    wide = model("qwen3_30b_a3b", num_attention_heads=64, num_kv_heads=8)
    found, entries = costs(wide, "a100_80_pcie"), 16 * 8192
    attention_ns = found.dense_ns(16, entries, entries) - found.dense_ns(16, 0, 0) + 12_500
    assert attention_ns == pytest.approx(347_000, rel=0.1)


# -- storage and memory ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_bytes", "queue_depth", "gb_per_s"),
    [(2**16, 1, 0.49), (2**16, 128, 3.90), (2**18, 1, 1.06), (2**18, 4, 2.35), (2**18, 16, 5.22)],
)
def test_storage_by_block_and_depth(block_bytes: int, queue_depth: int, gb_per_s: float) -> None:
    """Phison E27T, O_DIRECT (0xBakeer/deepseek-v41-flash-spark #2)."""
    disk = machine("rtx4090").storage
    assert disk is not None
    assert disk.bytes_per_s(block_bytes, queue_depth) == gb_per_s * 1e9
    assert disk.bytes_per_s(18 * 2**20, 1) == 6.4e9


def test_a_request_to_storage() -> None:
    """256 KiB at depth 1: about 245 us a request."""
    one = engine(storage_block_bytes=2**18, storage_queue_depth=1)
    unified = replace(machine("rtx4090"), link=None)
    read_ns = CostModel(expert_of(2**18), unified, one).load_ns(0)
    assert read_ns == pytest.approx(245_000, rel=0.02)


def test_readers_of_one_memory() -> None:
    """64-core EPYC: 110.3 GB/s of experts and 26.1 of copies alone, 119.5 together (FreeToken)."""
    cpu = machine("a100_80_pcie").cpu
    assert cpu.memory_bytes_per_s < cpu.dram_bytes_per_s < cpu.memory_bytes_per_s + 26_100_000_000
    assert cpu.dram_bytes_per_s / 146e9 == pytest.approx(0.82, abs=0.005)


def test_memory_on_the_wrong_node() -> None:
    """Two Xeon 4510: INT4 experts get 35-40 GB/s unplaced, where half their bytes cross (colibri #537)."""
    cpu = machine("xeon4510_x2").cpu
    assert cpu.numa_bytes_per_s is not None
    assert 35e9 <= 2 * cpu.numa_bytes_per_s <= 40e9 < cpu.memory_bytes_per_s


def test_both_directions_of_a_link() -> None:
    """24 GB/s out and 11 in at the same time on an A100, 24.8 in alone (NVIDIA forum 352186)."""
    link = machine("a100_80_pcie").link
    assert link is not None
    assert link.duplex_ratio * link.h2d_bytes_per_s == pytest.approx(35e9, rel=0.01)
