"""How much the tokens of a step share, what their kernels come to, and a published curve of unions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sim.counter import STEP_COLUMNS
from sim.hardware import Hardware
from sim.launches import Launches
from sim.lockstep import run_lockstep
from sim.metrics import Totals
from sim.policies.base import PolicySet
from sim.policies.classic import LRU, OnDemand
from sim.policies.repack import ExpertAligned
from sim.report_batch import UNION, WHEN, batch_lines
from sim.simulate import simulate
from sim.types import Service
from sim.workload import Workload
from tests.configs import composed
from tests.doubles import Preloaded, ScriptedPlacement, SplitTokens
from tests.hand import AMPLE, ByteCosts, GroupedCosts, play
from tests.public_data import routing_file
from tests.strategies import ConstantCosts, Memory, build, make_trace, trace_of_ids
from traces.importers.experts_npz import read_experts_npz
from traces.schema import Trace

# One layer of 4 experts, top-2: three requests, each a prompt of one token and one decoded.
THREE = [
    ([[[0, 1]]], [[[0, 1]]]),
    ([[[0, 2]]], [[[0, 2]]]),
    ([[[0, 3]]], [[[0, 1]]]),
]


def three_at_once() -> Workload:
    """Return work of two steps: three prompts, then three tokens of experts 0, 1, 2: 3, 2 and 1 tokens."""
    return Workload(make_trace(THREE, 4), 3, mixed=True)


def column(run: Any, name: str) -> list[int]:
    """Return a column of the step table."""
    return [row[name] for row in run.steps()]


# -- what a step shares ----------------------------------------------------------------------------


def test_pairs_are_tokens_times_their_experts() -> None:
    run = play(three_at_once(), PolicySet([LRU()]))
    assert column(run, "accesses") == [4, 3]
    assert column(run, "pairs") == column(run, "gpu_pairs") == [6, 6]


def test_pairs_on_the_cpu_are_left_out_of_those_on_gpus() -> None:
    script = {0: Service.CPU, 3: Service.CPU}
    run = play(three_at_once(), PolicySet([LRU()], ScriptedPlacement(script)))
    assert column(run, "on_cpu") == [2, 1]
    assert column(run, "gpu_pairs") == [6 - 3 - 1, 6 - 3]


def step_row(**values: int) -> tuple[int, ...]:
    return tuple(values.get(name, 0) for name in STEP_COLUMNS)


def test_the_formulas_of_unions_and_kernels() -> None:
    totals = Totals()
    counts = {"accesses": 30, "pairs": 80, "gpu_pairs": 60, "kernels": 96, "padding_tokens": 20}
    rows = [step_row(phase=0, **counts), step_row(phase=1, accesses=12, pairs=16, kernels=24)]
    totals.add_steps(np.array([*rows, step_row(phase=1, accesses=10, pairs=16)], dtype=np.int64))
    assert totals.unions(num_layers=2, slots=4.0) == {
        "union_size": 22 / 4,
        "union_ratio": 52 / 112,
        "decode_union_ratio": 22 / 32,
        "pool_pressure": 22 / 4 / 4,
        "kernels_per_layer": 120 / 6,
        "padding_ratio": 20 / 80,
    }


def test_nothing_is_divided_by_nothing() -> None:
    assert set(Totals().unions(2, 0.0).values()) == {None}
    assert Totals().summary()["longest_wait_steps_max"] == 0
    assert Totals().summary()["wait_steps_mean"] is None


# -- kernels ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moving(ByteCosts):
    """A token's activations are ten bytes."""

    activation: int = 10


@dataclass(frozen=True)
class Padding(GroupedCosts):
    """Grouped kernels in blocks of two tokens."""

    def padded_tokens(self, token_counts: Any) -> int:
        return sum(-(-count // 2) * 2 for count in token_counts)


def test_each_expert_launches_its_kernels_and_gathers_its_tokens() -> None:
    run = play(three_at_once(), PolicySet([LRU()]), Moving())
    assert column(run, "kernels") == [4 * 5, 3 * 5]
    assert column(run, "gather_bytes") == [6 * 4 * 10] * 2


def test_what_the_cpu_computes_launches_nothing() -> None:
    placement = ScriptedPlacement({0: Service.CPU})
    run = play(three_at_once(), PolicySet([LRU()], placement), Moving(), Hardware(memory=AMPLE))
    assert column(run, "kernels") == [3 * 5, 2 * 5]
    assert column(run, "gather_bytes") == [3 * 4 * 10] * 2


def test_packing_launches_its_own_and_saves_each_experts() -> None:
    run = play(three_at_once(), PolicySet([LRU()], repack=ExpertAligned()), Moving())
    assert column(run, "kernels") == [4 * 3 + 2, 3 * 3 + 2]
    assert column(run, "gather_bytes") == [4 * 3 * 10] * 2  # pack_bytes of the double


def test_grouped_kernels_are_launched_once_for_all_that_are_ready_together() -> None:
    run = play(three_at_once(), PolicySet([Preloaded([0, 1])]), GroupedCosts())
    # First step: 0 and 1 together, then 2 and 3 as each comes. Second: 0, 1 and 2 are there.
    assert column(run, "kernels") == [(1 + 2) * 5, 5]
    packed = PolicySet([Preloaded([0, 1])], repack=ExpertAligned())
    assert column(play(three_at_once(), packed, GroupedCosts()), "kernels") == [3 * 3 + 2, 3 + 2]


def test_an_engine_that_waits_for_all_launches_once() -> None:
    serial = Hardware(copies_overlap=False)
    run = play(three_at_once(), PolicySet([LRU()]), GroupedCosts(), serial)
    assert column(run, "kernels") == [5, 5]


def test_chunks_of_an_expert_are_not_launches_more() -> None:
    chunked = Hardware(chunks=3, chunk_compute=True)
    for costs in (ByteCosts(expert_bytes=99), GroupedCosts(expert_bytes=99)):
        run = play(three_at_once(), PolicySet([OnDemand()]), costs, chunked)
        assert column(run, "kernels") == [4 * 5, 3 * 5]


def test_each_gpu_launches_its_own() -> None:
    two = Hardware(gpu_of_key=(0, 1, 0, 1), home_of_layer=(0,))
    caches = [Preloaded([0]), Preloaded([1])]
    run = play(three_at_once(), PolicySet(caches), GroupedCosts(), two, pool_of_key=(0, 1, 0, 1))
    # 0 on the first, 1 on the second, then 2 and 3 as they come; later 0 and 2 on the first, 1 there.
    assert column(run, "kernels") == [4 * 5, 2 * 5]


def test_grouped_kernels_pad_to_whole_blocks() -> None:
    run = play(three_at_once(), PolicySet([LRU()]), Padding())
    # Tokens of 0, 1, 2, 3: 3 1 1 1, then 3 2 1.
    assert column(run, "padding_tokens") == [1 + 1 + 1 + 1, 1 + 0 + 1]
    one = Workload(make_trace(THREE[:1], 4))
    assert column(play(one, PolicySet([LRU()]), Padding()), "padding_tokens") == [2, 2]
    placed = PolicySet([LRU()], ScriptedPlacement({0: Service.CPU}))
    assert column(play(three_at_once(), placed, Padding()), "padding_tokens") == [3, 1]


def test_micro_batches_launch_their_own() -> None:
    run = play(three_at_once(), PolicySet([LRU()], repack=SplitTokens(2)))
    # Groups (0, 2) and (1): first 0 1 3 and 0 2, then 0 1 and 0 2.
    assert column(run, "kernels") == [(3 + 2) * 5, (2 + 2) * 5]


def test_lockstep_launches_nothing() -> None:
    work = three_at_once()
    counter = run_lockstep(work, build(work, PolicySet([LRU()]), Memory(4), ConstantCosts()))
    rows = [dict(zip(STEP_COLUMNS, row, strict=True)) for row in counter.rows]
    assert [row["kernels"] for row in rows] == [0, 0]
    assert [row["pairs"] for row in rows] == [6, 6]


def test_launches_learn_layers_only_where_tokens_are_padded_or_split() -> None:
    work = three_at_once()
    policies = PolicySet([LRU()])
    keys = build(work, policies, Memory(4), ConstantCosts()).residency.keys
    kernels: Any = None
    watching = [
        Launches(costs, kernels, False, keys, splits).watches
        for costs, splits in ((ByteCosts(), False), (Padding(), False), (ByteCosts(), True))
    ]
    assert watching == [False, True, True]


# -- in the summary --------------------------------------------------------------------------------


def test_a_summary_agrees_with_counts_worked_out_another_way() -> None:
    options = ("workload.requests=[24,28]", "calibration.requests=[0,24]", "output.belady=false")
    config = composed(*options, "workload.batch_size=4", "engine=fused", "policy=lru")
    row, tables = simulate(config)
    work = Workload.from_settings(config["workload"], _trace(config))
    events = [routing for step in work.steps() for routing in work.routings(step)]
    assert row["pairs"] == sum(sum(routing.token_counts) for routing in events)
    unions = [
        len(routing.experts)
        for step in work.steps()
        if step.info.num_decoding
        for routing in work.routings(step)
    ]
    assert row["union_size"] == pytest.approx(np.mean(unions), rel=1e-12)
    blocks = sum(-(-count // 16) for routing in events for count in routing.token_counts)
    assert row["padding_tokens"] == 16 * blocks - row["pairs"]
    slots = int(work.num_experts * config["cache"]["ratio"])
    assert row["pool_pressure"] == pytest.approx(row["union_size"] / slots)
    assert len(tables.steps.rows) * work.num_layers * 5 <= row["kernels"]


def _trace(config: dict[str, Any]) -> Trace:
    from sim.build import load_trace

    return load_trace(config["trace"]["path"])


# -- a published curve -----------------------------------------------------------------------------

UNIONS = {1: 8.0, 2: 14.3, 4: 24.4, 8: 38.7, 16: 56.0, 32: 72.8}
"""A count written apart: distinct experts a layer of B independent segments of the math trace."""


@pytest.fixture(scope="module")
def math_trace() -> Trace:
    """Return the public trace as one text, so that it can be cut into segments of any length."""
    found = read_experts_npz(routing_file("qwen3-30b-a3b_math.npz"))
    return trace_of_ids(found.expert_ids, [(1, len(found.expert_ids) - 1)], 128)


@pytest.mark.public_data
@pytest.mark.parametrize("batch", UNIONS)
def test_unions_of_independent_segments_are_those_published(math_trace: Trace, batch: int) -> None:
    size = len(math_trace.expert_ids) // batch
    work = Workload(math_trace, batch, length=(1, size), cut=True, mixed=True)
    assert len(work.requests) == batch
    every = max(1, 16 // batch)  # of the steps, enough for a mean
    found = [
        len(routing.experts)
        for step in work.steps()
        if step.info.num_decoding and step.info.step % every == 0
        for routing in work.routings(step)
    ]
    assert np.mean(found) == pytest.approx(UNIONS[batch], rel=0.02)


@pytest.mark.public_data
def test_eight_segments_share_four_of_ten_experts(math_trace: Trace) -> None:
    work = Workload(math_trace, 8, length=(1, 1000), cut=True, mixed=True)
    sizes = Memory(64, per_layer=True)
    caches = PolicySet([LRU() for _ in range(work.num_layers)])
    counter, totals = run_lockstep(work, build(work, caches, sizes, ConstantCosts())), Totals()
    for block in counter.table.blocks():
        totals.add_steps(block)
    found = totals.unions(work.num_layers, 64.0)
    assert found["decode_union_ratio"] == pytest.approx(0.604, rel=0.02)
    assert found["union_size"] == pytest.approx(UNIONS[8], rel=0.02)
    assert found["pool_pressure"] == pytest.approx(UNIONS[8] / 64, rel=0.02)


# -- in words --------------------------------------------------------------------------------------


def test_a_run_says_what_its_batch_shares_and_what_waiting_cost() -> None:
    row: dict[str, Any] = {
        "union_size": 38.72, "decode_union_ratio": 0.6046, "pool_pressure": 1.21, "kernels": 9,
        "kernels_per_layer": 34.0, "gather_bytes": 2_500_000_000, "padding_ratio": 0.25,
        "waiting": 16, "batch_size": 8, "wait_steps_mean": 70.25, "longest_wait_steps_max": 4,
    }  # fmt: skip
    assert batch_lines(row) == [
        "Batch: a decode step uses 38.7 experts of a layer, 1.21 of what its pool holds; they are 60.5% of "
        "its (token, expert) pairs.",
        "Kernels: 34.0 launches of a layer's experts, which move 2.500 GB to lay tokens out; 25.0% of the "
        "tokens they compute are padding.",
        "Waiting: 16 requests in memory share batches of 8; on average one sits out 70.2 steps in all, at "
        "most 4 in a row.",
    ]
    assert UNION["union"](row) == "38.7"
    assert WHEN["union"](row)
    alone = row | {"decode_union_ratio": 1.0, "kernels": 0, "longest_wait_steps_max": 0}
    assert batch_lines(alone) == []
    assert not WHEN["union"](alone)
    assert UNION["union"]({}) == "-"
