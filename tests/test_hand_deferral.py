"""CPU experts that are deferred to the next layer, by hand.

The figures that hold unless a test says otherwise stand at the head of tests/hand.py; here there are 3
layers, of each of which the first expert (0, 4 and 8) is in GPU memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sim.hardware import Hardware, Memory
from sim.policies.base import CachePolicy, Evictable
from sim.storage import Reading
from sim.types import Service, View
from tests.doubles import Preloaded, ScriptedPlacement, ScriptedPrefetch
from tests.hand import AMPLE, BYTE_A_NS, ByteCosts, FlatCurve, HandRun, play
from tests.strategies import only

ALONE = Hardware(h2d_bytes_per_s=BYTE_A_NS, d2h_bytes_per_s=BYTE_A_NS)
SHARED = replace(ALONE, memory=AMPLE)
READS = replace(SHARED, reading=Reading(FlatCurve(), 100, 1))
either = pytest.mark.parametrize("hardware", [ALONE, SHARED], ids=["alone", "shared"])
HANDS_OVER = ByteCosts(handover=6, activation=20)
ON_GPU = (0, 4, 8)


def deferring(
    layers: Sequence[Sequence[int]],
    deferred: Sequence[int],
    cpu: Sequence[int] = (),
    costs: ByteCosts | None = None,
    hardware: Hardware = SHARED,
    host: CachePolicy | None = None,
    **sizes: Any,
) -> HandRun:
    """Run one token, whose experts are ``layers``, some of them on the CPU or deferred."""
    script = dict.fromkeys(deferred, Service.DEFER) | dict.fromkeys(cpu, Service.CPU)
    policies = only(Preloaded(ON_GPU), placement=ScriptedPlacement(script), host=host)
    return play([layers], policies, costs, hardware, slots=12, **sizes)


# -- who waits -------------------------------------------------------------------------------------


@either
def test_the_end_of_the_next_layer_waits_for_what_is_deferred_and_not_its_own(
    hardware: Hardware,
) -> None:
    done = deferring([[0, 1], [0], [0]], [1], (), HANDS_OVER, hardware)
    assert done.unit_lines() == [
        "0 5 GPU0 DENSE 0 -1",
        "5 15 GPU0 EXPERT 0 0",
        "5 31 DEFERRAL0 HANDOVER 0 -1",  # 6, and the token's 20 bytes
        "15 20 GPU0 DENSE 1 -1",  # beside all that
        "20 30 GPU0 EXPERT 1 0",
        "31 131 CPU0 EXPERT 0 1",
        "131 151 DEFERRAL0 HANDOVER 0 -1",  # 20 bytes back
        "151 156 GPU0 DENSE 2 -1",
        "156 166 GPU0 EXPERT 2 0",
        "166 169 GPU0 STEP -1 -1",
    ]
    assert done.stalls() == {"cpu": 151 - 30}


@either
def test_a_layers_own_experts_come_first_and_the_next_layers_after_what_is_deferred(
    hardware: Hardware,
) -> None:
    done = deferring([[0, 1, 2], [0, 1], [0]], [1], [2, 5], HANDS_OVER, hardware)
    assert done.unit_lines() == [
        "0 5 GPU0 DENSE 0 -1",
        "5 15 GPU0 EXPERT 0 0",
        "5 31 HANDOVER0 HANDOVER 0 -1",  # for both: two experts of one token
        "31 131 CPU0 EXPERT 0 2",
        "131 231 CPU0 EXPERT 0 1",
        "131 151 HANDOVER0 HANDOVER 0 -1",
        "151 156 GPU0 DENSE 1 -1",
        "156 166 GPU0 EXPERT 1 0",
        "156 182 HANDOVER0 HANDOVER 1 -1",
        "231 331 CPU0 EXPERT 1 1",
        "231 251 DEFERRAL0 HANDOVER 0 -1",
        "331 351 HANDOVER0 HANDOVER 1 -1",
        "351 356 GPU0 DENSE 2 -1",
        "356 366 GPU0 EXPERT 2 0",
        "366 369 GPU0 STEP -1 -1",
    ]
    assert done.stalls() == {"cpu": (151 - 15) + (351 - 166)}


@either
def test_a_chain_of_deferrals_hides_all_but_what_the_cpu_cannot_keep_up_with(
    hardware: Hardware,
) -> None:
    done = deferring([[0, 1], [0, 1], [0]], [1, 5], (), ByteCosts(gpu=60), hardware)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 65 GPU EXPERT 0 0",
        "5 105 CPU EXPERT 0 1",
        "65 70 GPU DENSE 1 -1",
        "70 130 GPU EXPERT 1 0",  # the first deferral has long been back
        "105 205 CPU EXPERT 1 1",
        "130 135 GPU DENSE 2 -1",
        "135 195 GPU EXPERT 2 0",
        "205 208 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"cpu": 10}
    assert done.tables.busy_ns["cpu"] == 200


@either
def test_the_last_layer_defers_nothing(hardware: Hardware) -> None:
    done = deferring([[0], [0], [1, 0, 2]], [9, 10], (), None, hardware)
    assert (list(done.plans[2].on_cpu), list(done.plans[2].deferred)) == ([9, 10], [])
    assert done.of_lane("CPU") == ["35 135 EXPERT 2 1", "135 235 EXPERT 2 2"]
    assert done.steps()[0]["end_ns"] == 238


@either
def test_an_engine_whose_cpu_does_not_overlap_waits_in_the_same_layer(hardware: Hardware) -> None:
    serial = replace(hardware, cpu_overlaps=False)
    done = deferring([[0, 1, 2], [0], [0]], [1], [2], HANDS_OVER, serial)
    assert done.lines()[1:7] == [
        "5 15 GPU EXPERT 0 0",
        "15 41 HANDOVER HANDOVER 0 -1",
        "41 141 CPU EXPERT 0 2",
        "141 241 CPU EXPERT 0 1",
        "241 261 HANDOVER HANDOVER 0 -1",  # together
        "261 266 GPU DENSE 1 -1",
    ]
    assert done.stalls() == {"cpu": 261 - 15}


# -- what it shares with others --------------------------------------------------------------------


def test_a_free_team_takes_the_next_layers_expert_beside_a_deferred_one() -> None:
    hardware = replace(SHARED, num_teams=2)
    done = deferring([[0, 1, 2, 3], [0, 1], [0]], [2, 3], [1, 5], None, hardware)
    assert done.unit_lines()[1:8] == [
        "5 15 GPU0 EXPERT 0 0",
        "5 105 CPU0 EXPERT 0 1",
        "5 105 CPU1 EXPERT 0 2",
        "105 110 GPU0 DENSE 1 -1",
        "105 205 CPU0 EXPERT 0 3",
        "110 120 GPU0 EXPERT 1 0",
        "110 210 CPU1 EXPERT 1 1",
    ]
    assert done.steps()[0]["end_ns"] == 210 + 18
    assert done.stalls() == {"cpu": (105 - 15) + (210 - 120)}


@pytest.mark.parametrize(
    ("rate", "dram", "lines", "stalls"),
    [
        (
            BYTE_A_NS,
            16 * 10**8,
            [
                "10 130 CPU EXPERT 0 1",  # 20 bytes; 80 at 0.8 a ns
                "30 150 H2D LOAD 1 1",  # 80 bytes at 0.8 a ns; 20 at 1
                "150 160 GPU EXPERT 1 1",
                "160 170 GPU DENSE 2 -1",
            ],
            {"link": 100, "dram": 20},
        ),
        (
            BYTE_A_NS // 2,
            12 * 10**8,
            [
                "10 235 CPU EXPERT 0 1",  # 10 bytes; 50 at 0.4 a ns; 40 at 0.5
                "30 155 H2D LOAD 1 1",  # 0.8 a ns
                "155 165 GPU EXPERT 1 1",
                "235 245 GPU DENSE 2 -1",
            ],
            {"link": 100, "dram": 25 + 25, "cpu": 70 - 25},  # each of them loses a fifth of 125
        ),
    ],
)
def test_what_is_deferred_shares_memory_with_the_next_layers_copies(
    rate: int, dram: int, lines: Sequence[str], stalls: Mapping[str, int]
) -> None:
    costs = ByteCosts(dense=10, cpu_bytes_per_s=rate)
    hardware = replace(SHARED, memory=Memory((dram,)))
    done = deferring([[0, 1], [1], [0]], [1], (), costs, hardware)
    shown = [line for line in done.lines() if "EXPERT 0 0" not in line and "DENSE 1" not in line]
    assert shown[1:5] == lines
    assert done.stalls() == stalls


def test_two_gpus_hand_the_results_to_the_layer_where_they_are_added() -> None:
    """Layers 1 and 2 are on the second GPU; its link carries the copy of layer 1 beside the results."""
    memory = replace(AMPLE, duplex_bytes_per_s=BYTE_A_NS)
    hardware = replace(
        SHARED, memory=memory, gpu_of_key=(0,) * 4 + (1,) * 8, home_of_layer=(0, 1, 1)
    )
    costs = ByteCosts(activation=30, cpu_bytes_per_s=10 * BYTE_A_NS)
    done = deferring([[0, 1], [1], [0]], [1], (), costs, hardware, pool_of_key=(0,) * 12)
    assert done.unit_lines()[1:8] == [
        "5 15 GPU0 EXPERT 0 0",
        "5 35 DEFERRAL0 HANDOVER 0 -1",
        "15 20 GPU1 DENSE 1 -1",
        "20 150 H2D1 LOAD 1 1",  # half the rate while the 30 bytes are on the way
        "35 45 CPU0 EXPERT 0 1",
        "45 105 DEFERRAL0 HANDOVER 0 -1",
        "150 160 GPU1 EXPERT 1 1",
    ]


# -- above storage ---------------------------------------------------------------------------------


class LowestFirst(Preloaded):
    """Drops whatever has the lowest key."""

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        return next(filter(evictable, range(len(view.keys))), None)


def test_a_deferred_expert_is_read_first_and_storage_is_to_blame_until_it_is_there() -> None:
    host = Preloaded([0, 2, 3, 4, 5, 6, 7, 8])
    done = deferring([[0, 1], [0], [0]], [1], (), None, READS, host, host_slots=8)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 0",
        "5 105 STORAGE READ 0 1",
        "15 20 GPU DENSE 1 -1",
        "20 30 GPU EXPERT 1 0",
        "105 205 CPU EXPERT 0 1",
        "205 210 GPU DENSE 2 -1",
        "210 220 GPU EXPERT 2 0",
        "220 223 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"storage": 105 - 30, "cpu": 100}


def test_an_awaited_expert_that_is_read_goes_ahead_of_deferred_ones_that_wait_for_the_cpu() -> None:
    host = Preloaded([0, 2, 3, 4, 5, 6, 7, 8, 9])
    costs = ByteCosts(cpu_bytes_per_s=BYTE_A_NS // 2)
    done = deferring([[0, 1, 2, 3], [0], [0]], [2, 3], [1], costs, READS, host, host_slots=9)
    assert [*done.of_lane("STORAGE"), *done.of_lane("CPU")] == [
        "5 105 READ 0 1",
        "5 205 EXPERT 0 2",  # nothing else is there
        "205 405 EXPERT 0 1",
        "405 605 EXPERT 0 3",
    ]
    assert done.stalls() == {"storage": 105 - 15, "cpu": (405 - 105) + (605 - 420)}


def test_host_memory_keeps_what_is_deferred_through_the_next_layer() -> None:
    host = LowestFirst([1, 2, 3, 6, 7, 8, 9, 10])
    done = deferring([[0, 1], [1], [3]], [1], [5, 11], None, READS, host, host_slots=8)
    assert [list(plan.host_evicts) for plan in done.plans] == [[], [2], [1]]


def test_what_host_memory_cannot_keep_beside_a_whole_layer_is_not_deferred() -> None:
    """A layer may need its 4 experts and 3 that are prefetched; here 7 fit, and above 8."""
    host = Preloaded([1, 2, 3, 4, 5, 6, 7])
    done = deferring([[0, 1], [0], [0]], [1], (), None, READS, host, host_slots=7)
    assert (list(done.plans[0].on_cpu), list(done.plans[0].deferred)) == ([1], [])
    assert done.of_lane("GPU")[2] == "105 110 DENSE 1 -1"


def test_a_prefetch_does_not_take_away_what_the_cpu_computes_with() -> None:
    ahead = ScriptedPrefetch({0: [1], 1: [1], 2: [1]})
    placement = ScriptedPlacement({1: Service.DEFER})
    policies = only(Preloaded(ON_GPU), placement=placement, prefetch=ahead, host=Preloaded())
    sizes = {"slots": 12, "host_slots": 12, "exclusive_host": True}
    done = play([[[0, 1], [0], [0]]], policies, None, READS, **sizes)
    assert [list(plan.prefetches) for plan in done.plans] == [[], [], [1]]
