"""CPU experts beside the GPU, and what shares host memory with them, by hand.

The figures that hold unless a test says otherwise stand at the head of tests/hand.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sim.hardware import Hardware, Memory
from sim.storage import Reading
from sim.types import Service
from tests.doubles import Preloaded, ScriptedPlacement, ScriptedPrefetch
from tests.hand import AMPLE, BYTE_A_NS, ByteCosts, FlatCurve, HandRun, play
from tests.strategies import only

ALONE = Hardware(h2d_bytes_per_s=BYTE_A_NS, d2h_bytes_per_s=BYTE_A_NS)
"""One thing after another on the CPU and on each link; nothing is shared."""
SHARED = replace(ALONE, memory=AMPLE)
"""The same with events for all that could meet in host memory."""


def on_cpu(
    experts: Sequence[int],
    cpu: Sequence[int],
    costs: ByteCosts | None = None,
    hardware: Hardware = SHARED,
) -> HandRun:
    """Run one token: ``experts`` of layer 0, ``cpu`` of them there; 0 and 4 are in GPU memory."""
    placement = ScriptedPlacement(dict.fromkeys(cpu, Service.CPU))
    return play([[experts, [0]]], only(Preloaded([0, 4]), placement=placement), costs, hardware)


def dram(*bytes_per_ns: float, proportional: bool = True, **others: int) -> Hardware:
    """Return hardware whose host memory has these rates, by NUMA node."""
    rates = tuple(int(rate * BYTE_A_NS) for rate in bytes_per_ns)
    return replace(SHARED, memory=Memory(rates, proportional=proportional, **others))


# -- the CPU beside the GPU -----------------------------------------------------------------------


@pytest.mark.parametrize("hardware", [ALONE, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize(
    ("gpu", "layer_0", "end", "stalls"),
    [
        (100, ["5 105", "105 205"], 205, {}),  # the GPU ends last
        (10, ["5 15", "15 25"], 151, {"cpu": 151 - 25}),  # the CPU ends last
    ],
)
def test_a_layer_ends_with_the_later_of_cpu_and_gpu(
    hardware: Hardware, gpu: int, layer_0: list[str], end: int, stalls: dict[str, int]
) -> None:
    placement = ScriptedPlacement({1: Service.CPU})
    costs = ByteCosts(gpu=gpu, handover=6, activation=20)
    policies = only(Preloaded([0, 2, 4]), placement=placement)
    done = play([[[0, 1, 2], [0]]], policies, costs, hardware)
    assert done.of_lane("HANDOVER") == [
        "5 31 HANDOVER 0 -1",  # 6, and the token's 20 bytes
        "131 151 HANDOVER 0 -1",  # 20 bytes back
    ]
    assert done.of_lane("CPU") == ["31 131 EXPERT 0 1"]
    assert done.of_lane("GPU") == [
        "0 5 DENSE 0 -1",
        f"{layer_0[0]} EXPERT 0 0",
        f"{layer_0[1]} EXPERT 0 2",
        f"{end} {end + 5} DENSE 1 -1",
        f"{end + 5} {end + 5 + gpu} EXPERT 1 0",
        f"{end + 5 + gpu} {end + 8 + gpu} STEP -1 -1",
    ]
    assert done.stalls() == stalls


@pytest.mark.parametrize("hardware", [ALONE, SHARED], ids=["alone", "shared"])
def test_a_cpu_that_does_not_overlap_begins_when_the_gpu_has_done_its_part(
    hardware: Hardware,
) -> None:
    costs = ByteCosts(handover=6, activation=20)
    done = on_cpu([0, 1, 2], [1], costs, replace(hardware, cpu_overlaps=False))
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 0",
        "5 105 H2D LOAD 0 2",
        "105 115 GPU EXPERT 0 2",
        "115 141 HANDOVER HANDOVER 0 -1",  # 6 + 20
        "141 241 CPU EXPERT 0 1",
        "241 261 HANDOVER HANDOVER 0 -1",
        "261 266 GPU DENSE 1 -1",
        "266 276 GPU EXPERT 1 0",
        "276 279 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"link": 105 - 15, "cpu": 261 - 115}


# -- what shares host memory and links ------------------------------------------------------------

STREAMS = ByteCosts(expert_bytes=120, cpu_setup=40, cpu_bytes_per_s=3 * BYTE_A_NS)
"""Alone, a copy takes 120 ns and a CPU expert 40 + 40."""


def test_a_fair_memory_gives_a_copy_and_a_cpu_expert_the_same() -> None:
    done = on_cpu([1, 2], [1], STREAMS, dram(2, proportional=False))
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 125 H2D LOAD 0 2",  # half of 2 bytes a ns is all that the link can take
        "5 145 CPU EXPERT 0 1",  # 40; 80 bytes at 1 a ns until 125; 40 at 2
        "125 135 GPU EXPERT 0 2",
        "145 150 GPU DENSE 1 -1",
        "150 160 GPU EXPERT 1 0",
        "160 163 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"link": 120, "dram": 145 - 135}  # alone the CPU ends at 85


def test_a_proportional_memory_gives_the_faster_reader_more() -> None:
    done = on_cpu([1, 2], [1], STREAMS, dram(2))
    assert (
        done.lines()
        == [
            "0 5 GPU DENSE 0 -1",
            "5 125 CPU EXPERT 0 1",  # 40; 120 bytes at 2 * 3 / (3 + 1) = 1.5 a ns
            "5 165 H2D LOAD 0 2",  # 40 bytes in 40; 40 bytes at 0.5 a ns; 40 in 40
            "165 175 GPU EXPERT 0 2",
            "175 180 GPU DENSE 1 -1",
            "180 190 GPU EXPERT 1 0",
            "190 193 GPU STEP -1 -1",
        ]
        or done.lines()[1:3] == ["5 165 H2D LOAD 0 2", "5 125 CPU EXPERT 0 1"]
    )
    assert done.stalls() == {"link": 120, "dram": 40}
    assert done.tables.dram_bytes == 240


def test_two_teams_compute_two_experts_at_once_and_share_memory() -> None:
    hardware = replace(dram(1.5), num_teams=2)
    done = on_cpu([0, 1, 2, 3], [1, 2, 3], ByteCosts(expert_bytes=120), hardware)
    assert done.unit_lines() == [
        "0 5 GPU0 DENSE 0 -1",
        "5 15 GPU0 EXPERT 0 0",
        "5 165 CPU0 EXPERT 0 1",  # 120 bytes at 0.75 a ns
        "5 165 CPU1 EXPERT 0 2",
        "165 285 CPU0 EXPERT 0 3",  # at 1 a ns, its own rate
        "285 290 GPU0 DENSE 1 -1",
        "290 300 GPU0 EXPERT 1 0",
        "300 303 GPU0 STEP -1 -1",
    ]
    assert done.stalls() == {"dram": 40, "cpu": 285 - 15 - 40}  # 40 lost by each of two


def test_activations_share_a_link_that_carries_less_than_both_ways() -> None:
    memory = replace(AMPLE, duplex_bytes_per_s=3 * BYTE_A_NS // 2)
    done = on_cpu([1, 2], [1], ByteCosts(activation=30), replace(SHARED, memory=memory))
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 115 H2D LOAD 0 2",  # 30 bytes at 0.75 a ns, 70 at 1
        "5 45 HANDOVER HANDOVER 0 -1",  # 30 bytes at 0.75 a ns
        "45 145 CPU EXPERT 0 1",
        "115 125 GPU EXPERT 0 2",
        "145 175 HANDOVER HANDOVER 0 -1",  # the copy is over: 30 bytes at 1 a ns
        "175 180 GPU DENSE 1 -1",
        "180 190 GPU EXPERT 1 0",
        "190 193 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"link": 115 - 5, "cpu": 175 - 125}  # host memory has enough
    assert done.tables.dram_bytes == 100 + 100 + 2 * 30


def test_a_pageable_copy_crosses_host_memory_three_times() -> None:
    done = on_cpu([2], [], None, replace(dram(1.5), host_passes=3))
    assert done.lines()[1:3] == [
        "5 205 H2D LOAD 0 2",  # 1.5 / 3 = 0.5 bytes a ns
        "205 215 GPU EXPERT 0 2",
    ]
    assert done.stalls() == {"link": 100, "dram": 100}
    assert done.tables.dram_bytes == 3 * 100


# -- NUMA: experts take turns on two nodes, so 1 and 3 are far from node 0 ------------------------


def test_teams_of_both_nodes_compute_what_lies_there() -> None:
    done = on_cpu([0, 1, 2], [1, 2], None, dram(1, 1, numa_bytes_per_s=BYTE_A_NS // 2))
    assert done.unit_lines()[1:4] == [
        "5 15 GPU0 EXPERT 0 0",
        "5 105 CPU0 EXPERT 0 2",
        "5 105 CPU1 EXPERT 0 1",  # the team of node 1
    ]
    assert done.stalls() == {"cpu": 105 - 15}


def test_without_local_teams_the_far_expert_crosses_the_interconnect() -> None:
    hardware = dram(1, 1, numa_bytes_per_s=BYTE_A_NS // 2)
    done = on_cpu([0, 1, 2], [1, 2], None, replace(hardware, numa_local=False))
    assert done.unit_lines()[1:4] == [
        "5 15 GPU0 EXPERT 0 0",
        "5 205 CPU0 EXPERT 0 1",  # 100 bytes at 0.5 a ns
        "205 305 CPU0 EXPERT 0 2",  # near
    ]
    assert done.stalls() == {"dram": 100, "cpu": 305 - 15 - 100}


def test_a_copy_from_the_far_node_crosses_the_interconnect() -> None:
    done = on_cpu([1, 2], [], None, dram(1, 1, numa_bytes_per_s=BYTE_A_NS // 2))
    assert done.lines()[1:5] == [
        "5 205 H2D LOAD 0 1",
        "205 215 GPU EXPERT 0 1",
        "205 305 H2D LOAD 0 2",
        "305 315 GPU EXPERT 0 2",
    ]
    assert done.stalls() == {"dram": 100, "link": 100 + (305 - 215)}


@pytest.mark.parametrize(
    ("cpu", "hardware"),
    [
        ([1, 2], dram(0.5, 0.5)),  # both lose 100 ns at one time
        ([2], replace(dram(0.5), num_teams=2)),  # the other team has nothing to do
    ],
)
def test_memory_is_to_blame_for_what_a_cpu_expert_loses_to_it(
    cpu: list[int], hardware: Hardware
) -> None:
    done = on_cpu([0, *cpu], cpu, None, hardware)
    assert {line.split(" EXPERT")[0] for line in done.of_lane("CPU")} == {"5 205"}
    assert done.stalls() == {"dram": 100, "cpu": 90}


# -- host memory that holds everything, with storage below it -------------------------------------


@pytest.mark.parametrize("has_storage", [False, True])
def test_issues_take_their_turns_whether_or_not_there_is_storage(has_storage: bool) -> None:
    ahead = ScriptedPrefetch({0: [4, 5, 6]})
    host = Preloaded(range(8)) if has_storage else None
    reading = Reading(FlatCurve(), 100, 1) if has_storage else None
    done = play(
        [[[0], [0]]],
        only(Preloaded([0]), prefetch=ahead, host=host),
        hardware=replace(SHARED, issue_ns=20, reading=reading),
        host_slots=8 if has_storage else None,
    )
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 0",
        "25 125 H2D PREFETCH 1 0",
        "65 70 GPU DENSE 1 -1",  # three issues of 20
        "125 135 GPU EXPERT 1 0",
        "135 138 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"host": 65 - 15, "link": 125 - 70}
