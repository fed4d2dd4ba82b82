"""Sizes and costs worked out by hand on round numbers, and laws over random machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.cost import DENSE_LAUNCHES, CostModel
from hwmodels.errors import HardwareError
from hwmodels.machine import CPU, GPU, Link, Machine
from hwmodels.model_shape import ModelShape
from hwmodels.units import GB, compute_ns, transfer_ns, weight_bytes

BYTE_A_NS = GB  # a rate at which one byte, or one operation, takes one nanosecond


def shape(**changes: Any) -> ModelShape:
    """Two MoE layers of 4 experts; an expert has 3 * 10 * 20 = 600 weights of 8 bits."""
    base = ModelShape(
        name="round",
        source="made up",
        num_layers=2,
        num_moe_layers=2,
        num_experts=4,
        top_k=2,
        hidden_size=10,
        expert_intermediate_size=20,
        num_attention_heads=2,
        num_kv_heads=1,
        head_dim=5,
        vocab_size=100,
        tie_embeddings=False,
        expert_bits=8.0,
        dense_bits=8.0,
        kv_bits=8.0,
    )
    return replace(base, **changes)


def machine(**changes: Any) -> Machine:
    """Everything moves a byte a nanosecond and computes ten operations a nanosecond.

    ``changes`` are written as ``gpu_launch_ns=...``.
    """
    gpu = GPU("gpu", 10**6, BYTE_A_NS, 10 * GB, 50, 7, 1000, 0)
    link = Link("link", BYTE_A_NS, BYTE_A_NS, BYTE_A_NS // 4, 30, True)
    cpu = CPU("cpu", 4, 4, 10**6, BYTE_A_NS, BYTE_A_NS, 10 * GB, 100, 40)
    parts: dict[str, Any] = {"gpu": gpu, "link": link, "cpu": cpu}
    for name, value in changes.items():
        part, _, field = name.partition("_")
        parts[part] = replace(parts[part], **{field: value})
    return Machine(name="round", sources={}, **parts)


def costs(**changes: Any) -> CostModel:
    return CostModel(shape(), machine(**changes))


# -- units -----------------------------------------------------------------------------------------


def test_times_are_whole_and_never_too_short() -> None:
    assert transfer_ns(10, 3 * GB) == 4  # 3.33 ns
    assert transfer_ns(0, GB) == 0
    assert compute_ns(20, 10 * GB) == 2
    assert weight_bytes(3, 4.25) == 2  # 12.75 bits


# -- sizes -----------------------------------------------------------------------------------------


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
    for ask in (shape().expert_bytes, shape().dense_layer_bytes, costs().load_ns):
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


# -- costs by hand ---------------------------------------------------------------------------------


def test_load_is_setup_and_bytes() -> None:
    assert costs().load_ns(0) == 30 + 600
    assert costs().load_ns_by_layer == [630, 630]
    assert costs(link_pinned=False).load_ns(0) == 30 + 2400


def test_gpu_expert_is_launches_and_the_slowest_of_three() -> None:
    assert costs().expert_gpu_ns(0, 1, False) == 5 * 7 + 600
    assert costs().expert_gpu_ns(0, 1, True) == 3 * 7 + 600
    assert costs().expert_gpu_ns(0, 5, True) == 3 * 7 + 600  # 5 * 1200 / 10: as long as the weights
    assert costs().expert_gpu_ns(0, 10, True) == 3 * 7 + 1200
    assert costs(gpu_kernel_floor_ns=900).expert_gpu_ns(0, 1, True) == 3 * 7 + 900
    assert costs().expert_gpu_ns(0, 0, False) == 0


def test_cpu_expert_is_flat_until_operations_bind() -> None:
    model = costs()
    assert [model.expert_cpu_ns(0, n) for n in (0, 1, 5, 6)] == [0, 700, 700, 720]
    assert model.handover_ns() == 40


def test_fewer_threads_are_slower() -> None:
    two = costs(cpu_threads_used=2, cpu_thread_bytes_per_s=BYTE_A_NS // 4)
    assert two.expert_cpu_ns(0, 1) == 100 + 1200  # half the memory rate
    assert two.expert_cpu_ns(0, 10) == 2400  # half the operations
    many = costs(cpu_threads_used=400)
    assert many.expert_cpu_ns(0, 10) == costs().expert_cpu_ns(0, 10)


def test_dense_reads_weights_and_kv() -> None:
    assert costs().dense_ns(1, 100) == DENSE_LAUNCHES * 7 + 360 + 100 * 10
    assert costs().dense_ns(0, 0) == 0
    shared = shape(num_shared_experts=2, shared_intermediate_size=20)
    added = CostModel(shared, machine()).dense_ns(1, 100) - costs().dense_ns(1, 100)
    assert added == 4 * 7 + 2 * 600


def test_dense_computes_each_pair_of_a_prompt() -> None:
    # 100 tokens: 2 * 360 * 100 operations, and 4 * 2 * 5 for each of 100 * 101 / 2 pairs
    assert costs().dense_ns(100, 100, 1) == DENSE_LAUNCHES * 7 + 7200 + 5050 * 4


def test_step_is_head_and_dense_only_layers() -> None:
    head_ns = 4 * 7 + 1000 + 20
    assert costs().step_ns(1, 1) == 1000 + head_ns
    deep = CostModel(shape(num_layers=3, dense_intermediate_size=50), machine())
    assert deep.step_ns(1, 1) == 1000 + head_ns + 10 * 7 + (300 + 3 * 10 * 50 + 20)
    assert deep.step_ns(1, 1, 9) - deep.step_ns(1, 1) == 90


def test_pack_moves_activations_twice() -> None:
    assert costs().pack_ns(3) == 2 * 7 + 2 * 3 * 3 * 10 * 2
    assert costs().pack_ns(0) == 0


def test_fiddlers_rule_flips_at_ten_tokens() -> None:
    """Its constants: 7 ms a token on the CPU, 70 ms for a load."""
    slow = machine(
        link_copy_setup_ns=0,
        link_h2d_bytes_per_s=3000,
        cpu_expert_setup_ns=0,
        cpu_matmul_flops=60_000,
    )
    model = CostModel(shape(expert_intermediate_size=7), slow)  # 210 bytes, 420 operations a token
    assert model.load_ns(0) == 70_000_000
    assert model.expert_cpu_ns(0, 1) == 7_000_000
    cheaper_on_cpu = [model.expert_cpu_ns(0, n) < model.load_ns(0) for n in range(1, 13)]
    assert cheaper_on_cpu == [True] * 9 + [False] * 3


@pytest.mark.parametrize(
    "ask",
    [
        lambda c: c.expert_gpu_ns(0, -1, False),
        lambda c: c.expert_cpu_ns(0, -1),
        lambda c: c.dense_ns(-1, 0),
        lambda c: c.dense_ns(1, -1),
        lambda c: c.step_ns(1, -1),
        lambda c: c.pack_ns(-1),
        lambda c: c.transfer_ns(-1),
    ],
)
def test_negative_counts_are_refused(ask: Any) -> None:
    with pytest.raises(ValueError, match=r"= -1: must be >= 0"):
        ask(costs())


# -- laws ------------------------------------------------------------------------------------------

RATES = st.integers(10**6, 10**13)
COUNTS = st.integers(0, 5000)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    rates = ("memory_bytes_per_s", "matmul_flops")
    changes = {f"{part}_{rate}": draw(RATES) for part in ("gpu", "cpu") for rate in rates}
    return machine(**changes, link_h2d_bytes_per_s=draw(RATES), cpu_thread_bytes_per_s=draw(RATES))


def every_cost(model: CostModel, num_tokens: int, kv_tokens: int) -> dict[str, int]:
    return {
        "load": model.load_ns(0),
        "gpu": model.expert_gpu_ns(0, num_tokens, False),
        "gpu packed": model.expert_gpu_ns(0, num_tokens, True),
        "cpu": model.expert_cpu_ns(0, num_tokens),
        "dense": model.dense_ns(num_tokens, kv_tokens + num_tokens),
        "prefill": model.dense_ns(num_tokens, kv_tokens + num_tokens, 1),
        "step": model.step_ns(num_tokens, num_tokens, kv_tokens),
        "pack": model.pack_ns(num_tokens),
    }


@given(machines(), COUNTS, COUNTS, COUNTS)
def test_more_tokens_are_never_cheaper(m: Machine, tokens: int, more: int, kv: int) -> None:
    model = CostModel(shape(), m)
    few, many = every_cost(model, tokens, kv), every_cost(model, tokens + more, kv)
    assert all(few[what] <= many[what] for what in few)


@given(machines(), COUNTS, COUNTS, st.integers(1, 100))
def test_a_faster_part_is_never_slower(m: Machine, tokens: int, kv: int, factor: int) -> None:
    base = every_cost(CostModel(shape(), m), tokens, kv)
    for part, field in [
        ("gpu", "memory_bytes_per_s"),
        ("gpu", "matmul_flops"),
        ("link", "h2d_bytes_per_s"),
        ("cpu", "memory_bytes_per_s"),
        ("cpu", "thread_bytes_per_s"),
        ("cpu", "matmul_flops"),
    ]:
        old = getattr(m, part)
        faster = replace(m, **{part: replace(old, **{field: getattr(old, field) * factor})})
        new = every_cost(CostModel(shape(), faster), tokens, kv)
        assert all(new[what] <= base[what] for what in base), (part, field)


@given(machines(), st.integers(1, 5000))
def test_nothing_beats_its_bytes_or_operations(m: Machine, tokens: int) -> None:
    model, experts = CostModel(shape(), m), shape()
    size, flops = experts.expert_bytes(0), tokens * experts.expert_flops_per_token
    assert model.load_ns(0) * m.link.h2d_bytes_per_s >= size * GB
    assert model.expert_gpu_ns(0, tokens, True) * m.gpu.memory_bytes_per_s >= size * GB
    assert model.expert_gpu_ns(0, tokens, True) * m.gpu.matmul_flops >= flops * GB
    assert model.expert_cpu_ns(0, tokens) * m.cpu.memory_bytes_per_s >= size * GB
    assert model.expert_cpu_ns(0, tokens) * m.cpu.matmul_flops >= flops * GB


@given(machines(), st.integers(1, 5000))
def test_packing_never_slows_an_expert(m: Machine, tokens: int) -> None:
    model = CostModel(shape(), m)
    assert model.expert_gpu_ns(1, tokens, True) <= model.expert_gpu_ns(1, tokens, False)
    assert model.expert_gpu_ns(1, tokens, True) == model.expert_gpu_ns(1, tokens, True)
