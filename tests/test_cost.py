"""Costs worked out by hand on round numbers: a byte a nanosecond, ten operations a nanosecond."""

from __future__ import annotations

from typing import Any

import pytest

from hwmodels.cost import CostModel
from hwmodels.errors import HardwareError
from tests.round_hardware import BYTE_A_NS, costs, engine, machine, shape

HALF, QUARTER = BYTE_A_NS // 2, BYTE_A_NS // 4
GROUPED = engine(kernels="grouped")


# -- loads -----------------------------------------------------------------------------------------


def test_load_is_setup_and_bytes() -> None:
    assert costs().load_ns(0) == 30 + 600
    assert costs().copy_ns(0) == 600
    assert costs(link_pinned=False).load_ns(0) == 30 + 2400
    assert costs(link_pinned=False).copy_ns(1) == 2400


def test_a_pageable_copy_is_never_faster_than_the_link() -> None:
    assert costs(link_pinned=False, link_pageable_bytes_per_s=2 * BYTE_A_NS).copy_ns(0) == 600


@pytest.mark.parametrize("parts", [{"link": None}, {"gpu": None, "link": None}])
def test_without_a_link_an_expert_comes_from_storage(parts: dict[str, None]) -> None:
    model = costs(**parts)
    assert (model.load_ns(0), model.copy_ns(0)) == (6005, 6000)


def test_without_link_and_storage_only_the_question_fails() -> None:
    model = costs(link=None, storage=None)
    assert model.expert_gpu_ns(0, 1, True) == 621
    for ask in (model.load_ns, model.copy_ns):
        with pytest.raises(HardwareError, match=r"^machine/round: storage: missing, must be given"):
            ask(0)


def test_storage_is_read_in_the_engines_blocks() -> None:
    curve = ((2**10, 1, QUARTER), (2**20, 1, BYTE_A_NS))
    small = engine(storage_block_bytes=2**10, storage_queue_depth=1)
    assert costs(link=None, storage_curve=curve).load_ns(0) == 5 + 600
    assert costs(chosen=small, link=None, storage_curve=curve).load_ns(0) == 5 + 2400


def test_experts_of_mixed_precision_have_costs_of_their_own() -> None:
    model = costs(shape(expert_bits_by_layer=(4.0, 8.0)))
    assert [model.copy_ns(layer) for layer in (0, 1)] == [300, 600]
    assert [model.expert_gpu_ns(layer, 1, True) for layer in (0, 1)] == [321, 621]
    assert [model.expert_cpu_ns(layer, 1) for layer in (0, 1)] == [400, 700]


# -- experts on the GPU ----------------------------------------------------------------------------


def test_gpu_expert_is_launches_and_the_slowest_of_three() -> None:
    assert costs().expert_gpu_ns(0, 1, False) == 5 * 7 + 600 + 4 * 20  # and the token
    assert costs().expert_gpu_ns(0, 1, True) == 3 * 7 + 600
    assert costs().expert_gpu_ns(0, 5, True) == 3 * 7 + 600  # 5 * 1200 / 10: as long as the weights
    assert costs().expert_gpu_ns(0, 10, True) == 3 * 7 + 1200
    assert costs(gpu_kernel_floor_ns=900).expert_gpu_ns(0, 1, True) == 3 * 7 + 900
    assert costs().expert_gpu_ns(0, 0, False) == 0


def test_a_graph_launches_faster() -> None:
    assert costs(chosen=engine(graph=True)).expert_gpu_ns(0, 1, False) == 5 * 3 + 600 + 80


def test_slow_decoding_of_weights_bounds_a_gpu_expert() -> None:
    rates = ((4.0, QUARTER), (12.0, HALF))  # half-way: 8 bits
    assert costs(gpu_rate_by_bits=rates).expert_gpu_ns(0, 1, True) == 3 * 7 + 1600
    assert costs(gpu_rate_by_bits=((4.0, QUARTER),)).expert_gpu_ns(0, 1, True) == 3 * 7 + 600


def test_kernels_of_each_expert_run_one_after_another() -> None:
    model = costs()
    assert model.experts_gpu_ns(0, [1, 10, 0], False) == (35 + 600 + 80) + (35 + 1200 + 800)
    assert model.experts_gpu_ns(0, [], False) == 0


def test_grouped_kernels_are_launched_once() -> None:
    model = costs(chosen=GROUPED)
    assert model.experts_gpu_ns(0, [1, 1, 0], True) == 3 * 7 + 1200  # the weights of two
    assert model.experts_gpu_ns(0, [1, 19], True) == 3 * 7 + 2400  # the operations of 20 tokens
    assert model.experts_gpu_ns(0, [0, 0], True) == 0
    # not packed: 20 tokens of 20 bytes, read and written before and after
    assert model.experts_gpu_ns(0, [1, 19], False) == 5 * 7 + 2400 + 4 * 20 * 20
    assert model.expert_gpu_ns(0, 19, False) == model.experts_gpu_ns(0, [19], False)


def test_grouped_kernels_pad_each_expert_to_whole_blocks() -> None:
    model = costs(chosen=engine(kernels="grouped", group_block_tokens=16))
    assert model.padded_tokens([1, 16, 17, 0]) == 16 + 16 + 32
    assert model.experts_gpu_ns(0, [1, 19], True) == 3 * 7 + 48 * 120  # 20 tokens: as 16 + 32
    assert model.expert_gpu_ns(0, 1, True) == 3 * 7 + 16 * 120
    each = costs(chosen=engine(group_block_tokens=16))
    assert each.padded_tokens([1, 16, 17, 0]) == 34
    assert each.expert_gpu_ns(0, 1, True) == 3 * 7 + 600


def test_launches_and_bytes_are_those_that_are_charged() -> None:
    model = costs()
    assert [model.expert_launches(packed) for packed in (False, True)] == [5, 3]
    assert model.pack_launches == 2
    assert [model.gather_bytes(3, packed) for packed in (False, True)] == [4 * 3 * 20, 0]
    assert model.pack_bytes(3) == 2 * 3 * 3 * 20
    none = CostModel(shape(), machine(gpu=None, link=None), engine())
    assert (none.expert_launches(False), none.pack_launches, none.gather_bytes(3, False)) == (
        0,
        0,
        0,
    )


def test_pack_moves_activations_twice() -> None:
    assert costs().pack_ns(3) == 2 * 7 + 2 * 3 * 3 * 10 * 2
    assert costs().pack_ns(0) == 0


def test_packing_has_a_price_and_a_gain() -> None:
    """Its two launches are what one expert saves by it, so bytes decide; more experts save more of both."""
    model = costs()
    saved = [
        model.experts_gpu_ns(0, [1] * n, False) - model.experts_gpu_ns(0, [1] * n, True)
        for n in (1, 2, 10)
    ]
    assert saved == [14 + 80, 28 + 160, 140 + 800]
    assert model.pack_ns(1) == 14 + 120
    grouped = costs(chosen=GROUPED)
    counts = [50, 50, 50, 50]  # of 100 tokens, top-2: 4 * 200 * 20 bytes against 2 * 100 * 3 * 20
    gain = grouped.experts_gpu_ns(0, counts, False) - grouped.experts_gpu_ns(0, counts, True)
    assert gain - grouped.pack_ns(100) == 4000


# -- experts on the CPU ----------------------------------------------------------------------------


def test_cpu_expert_is_flat_until_operations_bind() -> None:
    model = costs()
    assert [model.expert_cpu_ns(0, n) for n in (0, 1, 5, 6)] == [0, 700, 700, 720]
    assert model.handover_ns(3) == 40
    assert model.activation_bytes(3) == 60


def test_fewer_threads_are_slower() -> None:
    two = costs(cpu_threads_used=2, cpu_thread_bytes_per_s=QUARTER)
    assert two.expert_cpu_ns(0, 1) == 100 + 1200  # half the memory rate
    assert two.expert_cpu_ns(0, 10) == 2400  # half the operations
    many = costs(cpu_threads_used=400)
    assert many.expert_cpu_ns(0, 10) == costs().expert_cpu_ns(0, 10)


def test_experts_stream_no_faster_than_the_memory_they_share() -> None:
    assert costs(cpu_dram_bytes_per_s=HALF).expert_cpu_ns(0, 1) == 100 + 1200


def test_teams_divide_the_threads() -> None:
    model = costs(chosen=engine(cpu_experts_at_once=2), cpu_thread_bytes_per_s=QUARTER)
    assert model.num_cpu_teams == 2
    assert model.expert_cpu_ns(0, 1) == 100 + 1200  # two threads
    assert model.expert_cpu_ns(0, 10) == 2400
    assert costs(chosen=engine(cpu_experts_at_once=9)).num_cpu_teams == 4


@pytest.mark.parametrize(
    ("bits", "expert_ns"), [(2.0, 100 + 600), (4.0, 100 + 600), (6.0, 100 + 600), (8.0, 700)]
)
def test_slow_decoding_of_weights_bounds_a_cpu_expert(bits: float, expert_ns: int) -> None:
    """Rates chosen so that fewer bytes take as long: a quarter, a half, three quarters of a byte a ns."""
    rates = ((2.0, QUARTER), (8.0, BYTE_A_NS))
    assert costs(shape(expert_bits=bits), cpu_rate_by_bits=rates).expert_cpu_ns(0, 1) == expert_ns


def test_a_team_decodes_with_the_threads_it_has() -> None:
    cpu = machine(cpu_rate_by_bits=((2.0, QUARTER), (8.0, BYTE_A_NS))).cpu
    assert cpu.team_bytes_per_s(4, 2.0) == QUARTER
    assert cpu.team_bytes_per_s(2, 2.0) == QUARTER // 2
    assert cpu.team_bytes_per_s(2, 8.0) == BYTE_A_NS  # nothing to decode: memory bounds


TABLE = ((300, 1, 1000), (300, 4, 1300), (900, 1, 2000), (900, 4, 2600))


@pytest.mark.parametrize(
    ("bits", "num_tokens", "expert_ns"),
    [
        (4.0, 1, 1000),  # a row of the table: 300 bytes
        (4.0, 2, 1100),
        (8.0, 4, 1950),  # half-way from 1300 to 2600
        (8.0, 2, 1650),
        (12.0, 8, 5200),  # beyond the last: in proportion to tokens
        (24.0, 1, 4000),  # and to bytes
        (2.0, 1, 1000),  # below the first: flat
    ],
)
def test_a_measured_table_replaces_the_formula(
    bits: float, num_tokens: int, expert_ns: int
) -> None:
    model = costs(shape(expert_bits=bits), cpu_expert_table=TABLE)
    assert model.expert_cpu_ns(0, num_tokens) == expert_ns
    assert model.cpu_work(0, num_tokens).setup_ns == 0
    halves = costs(shape(expert_bits=bits), engine(cpu_experts_at_once=2), cpu_expert_table=TABLE)
    assert halves.expert_cpu_ns(0, num_tokens) == 2 * expert_ns


def test_cpu_work_says_what_bounds_it() -> None:
    assert costs().cpu_work(0, 6) == (100, 600, BYTE_A_NS, 720)
    assert costs().cpu_work(0, 0) == (0, 0, 1, 0)
    assert costs(cpu_expert_table=TABLE).cpu_work(0, 1) == (0, 600, 400_000_000, 1500)


# -- all the rest ----------------------------------------------------------------------------------


def test_dense_is_matrices_and_then_attention() -> None:
    assert costs().dense_ns(1, 100, 100) == 10 * 7 + 360 + 20 + 100 * 10
    assert costs().dense_ns(0, 0, 0) == 0
    assert costs(chosen=engine(graph=True)).dense_ns(1, 100, 100) == 10 * 3 + 360 + 20 + 1000
    assert costs(gpu_kernel_floor_ns=900).dense_ns(1, 0, 0) == 10 * 7 + 900 + 20


def test_shared_experts_are_launches_and_weights() -> None:
    shared = shape(num_shared_experts=2, shared_intermediate_size=20)
    added = costs(shared).dense_ns(1, 100, 100) - costs().dense_ns(1, 100, 100)
    assert added == 4 * 7 + 2 * 600


def test_attention_computes_each_pair_of_a_prompt() -> None:
    # 100 tokens: 2 * 360 * 100 operations, and 4 * 2 * 5 for each of 100 * 101 / 2 pairs
    assert costs().dense_ns(100, 100, 5050) == 10 * 7 + 7200 + 20 + 5050 * 4


def test_step_is_head_and_dense_only_layers() -> None:
    head_ns = 4 * 7 + 1000 + 20
    assert costs().step_ns(1, 1, 0, 0) == 1000 + head_ns
    deep = shape(num_layers=3, dense_intermediate_size=50)
    dense_only_ns = 10 * 7 + (300 + 3 * 10 * 50 + 20) + 20
    assert costs(deep).step_ns(1, 1, 0, 0) == 1000 + head_ns + dense_only_ns
    assert costs(deep).step_ns(1, 1, 9, 0) - costs(deep).step_ns(1, 1, 0, 0) == 90
    assert costs(deep).step_ns(1, 1, 9, 30) - costs(deep).step_ns(1, 1, 0, 0) == 120


def test_the_head_computes_the_tokens_that_are_put_out() -> None:
    assert costs().step_ns(60, 60, 0, 0) == 1000 + 4 * 7 + 60 * 2 * 1000 // 10
    assert costs().step_ns(60, 0, 0, 0) == 1000 + 4 * 7 + 60 * 20  # no output: no head to read


def test_a_cpu_alone_computes_everything() -> None:
    model = costs(gpu=None, link=None)
    assert model.expert_gpu_ns(0, 6, False) == model.expert_cpu_ns(0, 6) == 720
    assert model.experts_gpu_ns(0, [1, 6], True) == 700 + 720
    assert model.dense_ns(1, 100, 100) == 360 + 1000 + 60  # no launches, but dispatch
    assert model.step_ns(1, 1, 0, 0) == 1020
    grouped = CostModel(shape(), machine(gpu=None, link=None), GROUPED)
    assert grouped.experts_gpu_ns(0, [1, 6], False) == 700 + 720


def test_dispatch_is_for_a_cpu_alone() -> None:
    assert costs(cpu_dispatch_ns=0).dense_ns(1, 9, 9) == costs().dense_ns(1, 9, 9)


def test_fiddlers_rule_flips_at_ten_tokens() -> None:
    """Its constants: 7 ms a token on the CPU, 70 ms for a load."""
    model = costs(
        shape(expert_intermediate_size=7),  # 210 bytes, 420 operations a token
        link_copy_setup_ns=0,
        link_h2d_bytes_per_s=3000,
        cpu_expert_setup_ns=0,
        cpu_matmul_flops=60_000,
    )
    assert model.load_ns(0) == 70_000_000
    assert model.expert_cpu_ns(0, 1) == 7_000_000
    cheaper_on_cpu = [model.expert_cpu_ns(0, n) < model.load_ns(0) for n in range(1, 13)]
    assert cheaper_on_cpu == [True] * 9 + [False] * 3


@pytest.mark.parametrize(
    "ask",
    [
        lambda c: c.expert_gpu_ns(0, -1, False),
        lambda c: c.experts_gpu_ns(0, [-1], False),
        lambda c: c.expert_cpu_ns(0, -1),
        lambda c: c.cpu_work(0, -1),
        lambda c: c.dense_ns(-1, 0, 0),
        lambda c: c.dense_ns(1, -1, 0),
        lambda c: c.dense_ns(1, 0, -1),
        lambda c: c.step_ns(1, -1, 0, 0),
        lambda c: c.pack_ns(-1),
        lambda c: c.handover_ns(-1),
        lambda c: c.activation_bytes(-1),
    ],
)
def test_negative_counts_are_refused(ask: Any) -> None:
    with pytest.raises(ValueError, match=r"= -1: must be >= 0"):
        ask(costs())


@pytest.mark.parametrize("layer", [-1, 2])
def test_no_such_layer(layer: int) -> None:
    model = costs()
    for ask in (
        model.load_ns,
        model.copy_ns,
        lambda n: model.expert_gpu_ns(n, 1, False),
        lambda n: model.expert_cpu_ns(n, 1),
        lambda n: model.cpu_work(n, 1),
    ):
        with pytest.raises(ValueError, match=rf"layer = {layer}: must be in \[0, 2\)"):
            ask(layer)


def test_measured_gpu_experts_replace_the_formula() -> None:
    table = ((600, 1, 100), (600, 4, 160), (1200, 1, 300), (1200, 4, 460))
    model = costs(gpu_expert_table=table)
    assert [model.expert_gpu_ns(0, tokens, False) for tokens in (0, 1, 3, 4, 8)] == [
        *(0, 100, 140, 160),
        320,  # beyond the last in proportion to tokens
    ]
    assert model.experts_gpu_ns(0, (1, 4), True) == 100 + 160
    half = costs(shape(expert_bits=12.0), gpu_expert_table=table)  # 900 bytes: half-way
    assert half.expert_gpu_ns(0, 1, False) == 200
