"""The timeline against times computed by hand: 2 layers x 4 experts, constant costs.

Unless a test says otherwise a copy takes 100 ns, an expert 10 on the GPU and 40 a token on the CPU, a
layer's attention 5, a step's head 3. Keys are ``layer * 4 + expert``. Each log line reads: from, to,
lane, kind, layer, expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sim.policies.base import CachePolicy
from sim.policies.classic import LRU, OnDemand
from sim.policies.repack import ExpertAligned
from sim.types import Service
from tests.doubles import Preloaded, ScriptedPlacement, ScriptedPrefetch
from tests.strategies import ConstantCosts, Memory, Run, Token, one_request, only, run_timeline

ALL = Memory(slots=8)
EVERY_KEY = range(8)


def run(
    tokens: Sequence[Token],
    cache: CachePolicy,
    costs: ConstantCosts | None = None,
    memory: Memory = ALL,
    **parts: Any,
) -> Run:
    """Run one request; check that the time of each step is accounted for, to the nanosecond."""
    done = run_timeline(one_request(tokens), only(cache, **parts), memory, costs or ConstantCosts())
    done.check_accounts()
    return done


def test_residents_compute_one_after_another() -> None:
    done = run([[[1, 0], [2, 3]]], Preloaded(EVERY_KEY))
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 1",
        "15 25 GPU EXPERT 0 0",
        "25 30 GPU DENSE 1 -1",
        "30 40 GPU EXPERT 1 2",
        "40 50 GPU EXPERT 1 3",
        "50 53 GPU STEP -1 -1",
    ]
    assert done.steps()[0]["gpu_busy_ns"] == 53


def test_misses_queue_on_the_link_and_compute_as_they_arrive() -> None:
    done = run([[[0, 1], [0]]], LRU())
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 105 H2D LOAD 0 0",
        "105 115 GPU EXPERT 0 0",
        "105 205 H2D LOAD 0 1",
        "205 215 GPU EXPERT 0 1",
        "215 220 GPU DENSE 1 -1",
        "220 320 H2D LOAD 1 0",
        "320 330 GPU EXPERT 1 0",
        "330 333 GPU STEP -1 -1",
    ]
    step = done.steps()[0]
    assert (step["gpu_busy_ns"], step["link_stall_ns"], step["cpu_stall_ns"]) == (43, 290, 0)


def test_residents_compute_while_copies_run() -> None:
    done = run([[[0, 1, 2], [3]]], Preloaded([0, 1, 7]), ConstantCosts(gpu=80))
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 85 GPU EXPERT 0 0",
        "5 105 H2D LOAD 0 2",
        "85 165 GPU EXPERT 0 1",
        "165 245 GPU EXPERT 0 2",  # it arrived at 105, but the GPU was busy
        "245 250 GPU DENSE 1 -1",
        "250 330 GPU EXPERT 1 3",
        "330 333 GPU STEP -1 -1",
    ]
    assert done.steps()[0]["link_stall_ns"] == 0


def test_with_one_staging_slot_a_copy_waits_for_the_compute_before() -> None:
    one_slot = Memory(slots=0, staging_slots=1)
    done = run([[[0, 1, 2], [0]]], OnDemand(), ConstantCosts(gpu=30), one_slot)
    assert done.lines()[1:7] == [
        "5 105 H2D BYPASS 0 0",
        "105 135 GPU EXPERT 0 0",
        "135 235 H2D BYPASS 0 1",
        "235 265 GPU EXPERT 0 1",
        "265 365 H2D BYPASS 0 2",
        "365 395 GPU EXPERT 0 2",
    ]


@pytest.mark.parametrize(("gpu", "third_copy"), [(30, "205 305"), (150, "255 355")])
def test_with_two_staging_slots_the_third_copy_waits_for_the_first_compute(
    gpu: int, third_copy: str
) -> None:
    two_slots = Memory(slots=0, staging_slots=2)
    done = run([[[0, 1, 2], [0]]], OnDemand(), ConstantCosts(gpu=gpu), two_slots)
    assert f"{third_copy} H2D BYPASS 0 2" in done.lines()


def test_a_late_prefetch_goes_ahead_of_queued_ones() -> None:
    memory = Memory(slots=8, prefetch_limit=3)
    done = run(
        [[[0], [2]]], Preloaded([0]), None, memory, prefetch=ScriptedPrefetch({0: [4, 5, 6]})
    )
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 0",
        "5 105 H2D PREFETCH 1 0",
        "15 20 GPU DENSE 1 -1",
        "105 205 H2D PREFETCH 1 2",  # proposed last, wanted first
        "205 215 GPU EXPERT 1 2",
        "215 218 GPU STEP -1 -1",
    ]
    assert done.steps()[0]["late_hits"] == 1
    assert done.plans[1].late == [6]


def test_a_late_prefetch_on_its_way_computes_when_it_arrives() -> None:
    done = run([[[0], [0]]], Preloaded([0]), prefetch=ScriptedPrefetch({0: [4]}))
    assert done.lines()[2:] == [
        "5 105 H2D PREFETCH 1 0",
        "15 20 GPU DENSE 1 -1",
        "105 115 GPU EXPERT 1 0",
        "115 118 GPU STEP -1 -1",
    ]
    assert done.steps()[0]["link_stall_ns"] == 105 - 20


def test_demand_overtakes_queued_prefetches_but_not_a_copy_under_way() -> None:
    done = run([[[0], [3]]], Preloaded([0]), prefetch=ScriptedPrefetch({0: [4, 5]}))
    assert done.lines()[2:] == [
        "5 105 H2D PREFETCH 1 0",
        "15 20 GPU DENSE 1 -1",
        "105 205 H2D LOAD 1 3",
        "205 215 GPU EXPERT 1 3",
        "215 218 GPU STEP -1 -1",  # the copy of key 5 began at 205 and had not come at the end
    ]


def test_late_prefetches_go_ahead_of_demand() -> None:
    done = run([[[0], [3, 1]]], Preloaded([0]), prefetch=ScriptedPrefetch({0: [4, 5]}))
    assert [line for line in done.lines() if "H2D" in line] == [
        "5 105 H2D PREFETCH 1 0",
        "105 205 H2D PREFETCH 1 1",
        "205 305 H2D LOAD 1 3",
    ]


def test_cpu_experts_run_beside_the_gpu_after_one_handover() -> None:
    cpu = ScriptedPlacement({1: Service.CPU, 2: Service.CPU})
    done = run([[[0, 1, 2], [0]]], Preloaded([0, 4]), ConstantCosts(handover=7), placement=cpu)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 0",
        "5 12 HANDOVER HANDOVER 0 -1",
        "12 52 CPU EXPERT 0 1",
        "52 92 CPU EXPERT 0 2",
        "92 97 GPU DENSE 1 -1",
        "97 107 GPU EXPERT 1 0",
        "107 110 GPU STEP -1 -1",
    ]
    step = done.steps()[0]
    assert (step["gpu_busy_ns"], step["cpu_stall_ns"]) == (33, 92 - 15)


def test_cpu_work_that_ends_before_a_copy_costs_nothing() -> None:
    cpu = ScriptedPlacement({1: Service.CPU})
    done = run([[[1, 2], [0]]], Preloaded([4]), ConstantCosts(handover=7), placement=cpu)
    assert done.lines()[1:5] == [
        "5 105 H2D LOAD 0 2",
        "5 12 HANDOVER HANDOVER 0 -1",
        "12 52 CPU EXPERT 0 1",
        "105 115 GPU EXPERT 0 2",
    ]
    step = done.steps()[0]
    assert (step["link_stall_ns"], step["cpu_stall_ns"]) == (100, 0)


def test_cpu_work_that_ends_after_a_copy_stalls_for_the_rest() -> None:
    cpu = ScriptedPlacement({1: Service.CPU})
    done = run([[[1, 2], [0]]], Preloaded([4]), ConstantCosts(cpu=200), placement=cpu)
    step = done.steps()[0]
    assert (step["link_stall_ns"], step["cpu_stall_ns"]) == (100, 205 - 115)


def test_packing_comes_once_a_layer_and_makes_experts_cheaper() -> None:
    packing = ConstantCosts(pack=4, packed_gain=3)
    done = run([[[0, 1], [0]]], Preloaded(EVERY_KEY), packing, repack=ExpertAligned())
    assert done.lines()[:5] == [
        "0 5 GPU DENSE 0 -1",
        "5 9 GPU PACK 0 -1",
        "9 16 GPU EXPERT 0 0",
        "16 23 GPU EXPERT 0 1",
        "23 28 GPU DENSE 1 -1",
    ]
