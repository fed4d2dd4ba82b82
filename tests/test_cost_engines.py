"""What engines and kinds of attention change in the costs, by hand on the round machine.

One layer of the round model without its experts: 10 launches of 7 ns, 360 bytes of weights, and a floor of
20 ns for attention, whose entries have 10 bytes.
"""

from __future__ import annotations

import pytest

from hwmodels.cost import CostModel
from hwmodels.model_shape import ModelShape
from tests.round_hardware import BYTE_A_NS, costs, engine, read, shape

DENSE_NS = 10 * 7 + 360 + 20


def kv_ns(model: CostModel, kv_tokens: int = 100, num_tokens: int = 1) -> int:
    """Return what KV entries add to a layer."""
    return model.dense_ns(num_tokens, kv_tokens, 0) - model.dense_ns(num_tokens, 0, 0)


def test_a_layer_as_the_docstring_has_it() -> None:
    assert costs().dense_ns(1, 0, 0) == DENSE_NS
    assert costs().dense_launch_ns == 70


# -- launches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "launch_ns"), [(0, 7), (0.5, 7), (0.9, 9), (1, 9), (2, 18)], ids=str
)
def test_a_launch_takes_what_gpu_or_host_need_longer(ratio: float, launch_ns: int) -> None:
    model = costs(chosen=engine(launch_issue_ratio=ratio), cpu_launch_issue_ns=9)
    assert model.dense_ns(1, 0, 0) == DENSE_NS + 10 * (launch_ns - 7)
    assert model.launch_ns == launch_ns


def test_a_graph_needs_no_host() -> None:
    model = costs(chosen=engine(launch_issue_ratio=2, graph=True), cpu_launch_issue_ns=9)
    assert model.dense_ns(1, 0, 0) == DENSE_NS - 10 * (7 - 3)


def test_a_launch_may_wait_for_the_kernel_before_it() -> None:
    """Its floor, 50 ns, comes on top of each launch."""
    stream = costs(chosen=engine(launch_waits=True))
    graph = costs(chosen=engine(launch_waits=True, graph=True))
    assert stream.dense_ns(1, 0, 0) == DENSE_NS + 10 * 50
    assert graph.dense_ns(1, 0, 0) == DENSE_NS + 10 * (50 - 4)


def test_a_layers_experts_may_be_set_up_together() -> None:
    """Once with the handover, and none of them by itself."""
    model = costs(chosen=engine(cpu_setups="layer", cpu_setup_ratio=3))
    assert model.handover_ns(1) == 40 + 3 * 100
    assert model.expert_cpu_ns(0, 1) == 600
    alone = costs(chosen=engine(cpu_setups="expert", cpu_setup_ratio=3))
    assert (alone.handover_ns(1), alone.expert_cpu_ns(0, 1)) == (40, 900)


def test_a_handover_may_be_a_share_of_what_was_measured() -> None:
    assert costs(chosen=engine(handover_ratio=0.5)).handover_ns(1) == 20
    assert costs(chosen=engine(handover_ratio=0)).handover_ns(1) == 0


def test_a_cpu_alone_launches_nothing() -> None:
    slow = engine(launch_issue_ratio=4)
    model = costs(chosen=slow, gpu=None, link=None, cpu_launch_issue_ns=9)
    assert model.dense_ns(1, 0, 0) == costs(gpu=None, link=None).dense_ns(1, 0, 0)


def test_kinds_of_attention_launch_more() -> None:
    latent = shape(kv_lora_rank=4, qk_rope_head_dim=2)
    linear = shape(num_linear_layers=1, linear_params=500, linear_state_bytes=1)
    chosen = engine(latent_launches=6, linear_launches=4)
    assert costs(latent, chosen).dense_launch_ns == 16 * 7
    assert costs(linear, chosen).dense_launch_ns == 12 * 7  # half of the layers
    assert costs(chosen=chosen).dense_launch_ns == 10 * 7


# -- attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "added_ns"), [(None, 1000), (0.5, 4000), (1, 2000)])
def test_attention_of_one_new_token_may_do_without_matrix_units(
    ratio: float | None, added_ns: int
) -> None:
    """100 entries of 10 bytes; 40 operations each, of 2 a nanosecond at most."""
    chosen = engine(attention_vector_ratio=ratio)
    model = costs(chosen=chosen, gpu_vector_flops=2 * BYTE_A_NS)
    one = model.dense_ns(1, 100, 100) - model.dense_ns(1, 0, 0)
    assert one == added_ns
    prompt = model.dense_ns(10, 100, 900) - model.dense_ns(10, 0, 0)
    assert prompt == 3600  # 36,000 operations by matrix units, ten a nanosecond


def test_latent_attention_and_a_cpu_alone_have_no_such_kernels() -> None:
    slow = engine(attention_vector_ratio=0.01)
    latent = costs(shape(kv_lora_rank=8, qk_rope_head_dim=2), slow, gpu_vector_flops=BYTE_A_NS)
    assert latent.dense_ns(1, 100, 100) - latent.dense_ns(1, 0, 0) == 1000
    alone = costs(chosen=slow, gpu=None, link=None)
    assert alone.dense_ns(1, 100, 100) - alone.dense_ns(1, 0, 0) == 1000


def test_a_window_bounds_what_is_read() -> None:
    """One of two layers sees ten tokens: (100 + 10) / 2 entries in the mean."""
    model = costs(shape(num_window_layers=1, window_tokens=10))
    assert kv_ns(model) == 550
    assert kv_ns(model, kv_tokens=8) == 80
    assert kv_ns(model, num_tokens=4) == (100 + 40) * 10 // 2


def test_linear_attention_reads_no_entries() -> None:
    model = costs(shape(num_linear_layers=1, linear_params=500, linear_state_bytes=1))
    assert kv_ns(model) == 500
    assert model.dense_ns(1, 0, 0) == 70 + (360 - 300 + 400) + 20  # mean of 300 and 500 weights


# -- rates -----------------------------------------------------------------------------------------


def test_kernels_may_reach_a_share_of_the_matmul_rate() -> None:
    """1000 tokens: 720,000 operations, ten a nanosecond."""
    assert costs().dense_ns(1000, 0, 0) == 70 + 72_000 + 20
    half = costs(chosen=engine(matmul_ratio=0.5))
    assert half.dense_ns(1000, 0, 0) == 70 + 144_000 + 20
    assert half.expert_gpu_ns(0, 1000, True) == 21 + 240_000
    alone = {"gpu": None, "link": None}
    assert costs(chosen=engine(matmul_ratio=0.5), **alone).dense_ns(1000, 0, 0) == costs(
        **alone
    ).dense_ns(1000, 0, 0)


DECODES = {"cpu_decode_weights_per_s": BYTE_A_NS // 2, "cpu_codebook_weights_per_s": BYTE_A_NS // 4}
"""Half a weight a nanosecond by all four cores, in codebooks a quarter; a weight is one byte here."""


def test_decoding_weights_may_bind_a_cpu() -> None:
    assert costs(**DECODES).expert_cpu_ns(0, 1) == 100 + 1200
    assert costs(**DECODES, cpu_threads_used=2).expert_cpu_ns(0, 1) == 100 + 2400
    slow = engine(cpu_decode_ratio=0.5)
    assert costs(chosen=slow, **DECODES).expert_cpu_ns(0, 1) == 100 + 2400
    assert costs(chosen=slow).expert_cpu_ns(0, 1) == 100 + 600  # nothing is decoded
    fast = {"cpu_decode_weights_per_s": 2 * BYTE_A_NS}
    assert costs(**fast).expert_cpu_ns(0, 1) == 100 + 600  # memory binds


def test_fewer_bits_are_never_slower() -> None:
    """Weights are decoded at one rate whatever their bits, so that time follows the larger of two."""
    times = [
        costs(shape(expert_bits=bits), **DECODES).expert_cpu_ns(0, 1) for bits in (2, 4, 6, 8, 16)
    ]
    assert times == sorted(times) == [1300, 1300, 1300, 1300, 1300]
    wide = costs(shape(expert_bits=32), **DECODES).expert_cpu_ns(0, 1)
    assert wide == 100 + 2400


def test_codebooks_are_slower_and_named_by_their_scheme() -> None:
    own = {**read("model", "qwen3_30b_a3b"), "dense_bits": 8}
    plain, codebook, ik = (
        ModelShape.from_mapping({**own, "expert_bits": name})
        for name in ("Q2_K", "IQ2_XS", "IQ2_K")
    )
    assert [plain.expert_codebook, codebook.expert_codebook, ik.expert_codebook] == [
        False,
        True,
        False,
    ]
    assert costs(shape(expert_codebook=True), **DECODES).expert_cpu_ns(0, 1) == 100 + 2400


def test_gpus_may_share_each_matrix() -> None:
    two = {"gpu_count": 2, "link_hop_ns": 15}
    model = costs(chosen=engine(tensor_parallel=True), **two)
    assert model.dense_ns(1, 0, 0) == 70 + 180 + 20 + 2 * (2 * 15)
    assert kv_ns(model) == 500
    assert costs(**two).dense_ns(1, 0, 0) == DENSE_NS
    head_ns = [each.step_ns(1, 1, 0, 0) for each in (costs(**two), model)]
    assert head_ns[0] - head_ns[1] == 500  # half of the head's 1000 bytes


def test_an_engine_may_set_up_and_multiply_otherwise_on_the_cpu() -> None:
    assert costs(chosen=engine(cpu_setup_ratio=0.25)).expert_cpu_ns(0, 1) == 25 + 600
    assert costs(chosen=engine(cpu_setup_ratio=0)).expert_cpu_ns(0, 1) == 600
    half = costs(chosen=engine(cpu_matmul_ratio=0.5))
    assert (costs().expert_cpu_ns(0, 100), half.expert_cpu_ns(0, 100)) == (12_000, 24_000)
