"""Storage below host memory, by hand.

Storage moves a byte a nanosecond, an expert of 100 bytes as one block, unless a test says otherwise; the
other figures stand at the head of tests/hand.py. Host memory begins full with the keys that are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from sim.hardware import Hardware, Memory
from sim.policies.base import CachePolicy
from sim.policies.classic import OnDemand
from sim.storage import Curve, Reading
from sim.types import Service
from tests.doubles import Preloaded, ScriptedPlacement, ScriptedPrefetch
from tests.hand import AMPLE, BYTE_A_NS, ByteCosts, DepthCurve, Doubting, FlatCurve, HandRun, play
from tests.strategies import Token, only

SLOW = FlatCurve(BYTE_A_NS // 2)
DEEPER_IS_FASTER = DepthCurve({1: BYTE_A_NS // 2, 2: BYTE_A_NS})


def stored(
    curve: Curve | None = None, setup_ns: int = 0, block: int = 100, depth: int = 1, **others: Any
) -> Hardware:
    """Return hardware with storage; nothing else binds."""
    reading = Reading(curve or FlatCurve(), block, depth, setup_ns)
    base = Hardware(h2d_bytes_per_s=BYTE_A_NS, d2h_bytes_per_s=BYTE_A_NS)
    return replace(base, memory=others.pop("memory", AMPLE), reading=reading, **others)


def run(
    tokens: Sequence[Token],
    gpu: CachePolicy,
    host: Sequence[int],
    hardware: Hardware,
    costs: ByteCosts | None = None,
    slots: int = 8,
    is_exclusive: bool = False,
    **parts: Any,
) -> HandRun:
    """Run with ``host`` in host memory, which has room for no more."""
    policies = only(gpu, host=Preloaded(host), **parts)
    sizes = {"slots": slots, "host_slots": len(host), "exclusive_host": is_exclusive}
    return play(tokens, policies, costs, hardware, **sizes)


def host_keys(done: HandRun) -> list[int]:
    """Return what is in host memory at the end."""
    assert done.offloader.host is not None
    return list(done.offloader.host.residency.resident())


# -- storage, host memory, GPU --------------------------------------------------------------------


def test_one_expert_hits_host_memory_and_the_other_comes_from_storage_first() -> None:
    done = run([[[2, 3], [0]]], Preloaded([4]), [0, 4, 2, 5], stored(SLOW, 20))
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 105 H2D LOAD 0 2",  # from host memory
        "5 225 STORAGE READ 0 3",  # setup 20, 100 bytes at 0.5 a ns
        "105 115 GPU EXPERT 0 2",
        "225 325 H2D LOAD 0 3",
        "325 335 GPU EXPERT 0 3",
        "335 340 GPU DENSE 1 -1",
        "340 350 GPU EXPERT 1 0",
        "350 353 GPU STEP -1 -1",
    ]
    assert done.plans[0].host_evicts == [0]  # the least recently used
    assert done.stalls() == {"storage": 225 - 115, "link": 100 + 100}


def test_of_two_reads_the_first_is_faster_for_the_device_has_both() -> None:
    hardware = stored(DEEPER_IS_FASTER, 20, depth=2)
    done = run([[[2, 3], [0]]], Preloaded([4]), [0, 1, 4, 5], hardware)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 125 STORAGE READ 0 2",  # setup 20; two blocks outstanding: 1 byte a ns
        "125 225 H2D LOAD 0 2",
        "125 325 STORAGE READ 0 3",  # its setup was hidden; one block: 0.5 bytes a ns
        "225 235 GPU EXPERT 0 2",
        "325 425 H2D LOAD 0 3",
        "425 435 GPU EXPERT 0 3",
        "435 440 GPU DENSE 1 -1",
        "440 450 GPU EXPERT 1 0",
        "450 453 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"storage": 120 + (325 - 235), "link": 100 + 100}
    assert done.tables.busy_ns["storage"] == 320
    assert (done.steps()[0]["reads"], done.steps()[0]["read_bytes"]) == (2, 200)


def test_reads_asked_for_at_one_time_are_outstanding_together() -> None:
    hardware = stored(DEEPER_IS_FASTER, depth=2)
    done = run([[[2, 3], [0]]], Preloaded([4]), [0, 1, 4, 5], hardware)
    assert done.of_lane("STORAGE") == ["5 105 READ 0 2", "105 305 READ 0 3"]


def test_between_rounds_of_blocks_a_read_in_need_goes_first() -> None:
    hardware = stored(SLOW, block=50)  # two rounds of 100 ns an expert
    ahead = ScriptedPrefetch({0: [5]})
    done = run([[[0], [3]]], Preloaded([0]), [0, 1, 2, 4], hardware, prefetch=ahead)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 0",
        "5 105 STORAGE READ 1 1",
        "15 20 GPU DENSE 1 -1",
        "105 205 STORAGE READ 1 3",  # wanted at 20
        "205 305 STORAGE READ 1 3",
        "305 405 H2D LOAD 1 3",
        "305 405 STORAGE READ 1 1",  # the second half
        "405 415 GPU EXPERT 1 3",
        "415 418 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"storage": 305 - 20, "link": 100}


def test_a_late_prefetch_that_is_still_on_storage_is_read_and_copied_first() -> None:
    ahead = ScriptedPrefetch({0: [5, 6, 7]})
    done = run([[[0], [3]]], Preloaded([0]), [0, 1, 2, 4], stored(), prefetch=ahead)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 0",
        "5 105 STORAGE READ 1 1",
        "15 20 GPU DENSE 1 -1",
        "105 205 H2D PREFETCH 1 1",
        "105 205 STORAGE READ 1 3",  # asked for last, wanted since 20
        "205 305 H2D PREFETCH 1 3",
        "205 305 STORAGE READ 1 2",
        "305 315 GPU EXPERT 1 3",
        "315 318 GPU STEP -1 -1",
    ]
    assert done.steps()[0]["late_hits"] == 1
    assert done.stalls() == {"storage": 205 - 20, "link": 100}


def test_a_cancelled_prefetch_is_read_to_the_end_but_not_copied() -> None:
    ahead, costs = Doubting({0: [5, 6]}, stale={1: [5, 6]}), ByteCosts(gpu=50)
    tokens: list[Token] = [[[0], [0]], [[0], [2]]]
    done = run(tokens, Preloaded([0, 4]), [0, 1, 2, 4], stored(), costs, prefetch=ahead)
    assert ahead.asked[1] == [5, 6]  # at 60 neither copy to the GPU has begun
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 55 GPU EXPERT 0 0",
        "5 105 STORAGE READ 1 1",
        "55 60 GPU DENSE 1 -1",
        "60 110 GPU EXPERT 1 0",
        "105 205 STORAGE READ 1 2",
        "110 113 GPU STEP -1 -1",
        "113 118 GPU DENSE 0 -1",
        "118 168 GPU EXPERT 0 0",
        "168 173 GPU DENSE 1 -1",
        "205 305 H2D LOAD 1 2",  # a miss at 173, but it need not be read again
        "305 355 GPU EXPERT 1 2",
        "355 358 GPU STEP -1 -1",
    ]
    counts = [[step[name] for name in ("cancels", "reads", "loads")] for step in done.steps()]
    assert counts == [[2, 2, 0], [0, 0, 1]]
    assert done.stalls(1) == {"storage": 205 - 173, "link": 100}


def test_host_memory_drops_the_least_recently_used_and_reads_it_again() -> None:
    tokens: list[Token] = [[[0], [0]], [[1], [0]], [[0], [0]]]
    done = run(tokens, OnDemand(), [0, 4], stored())
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 105 H2D BYPASS 0 0",
        "105 115 GPU EXPERT 0 0",
        "115 120 GPU DENSE 1 -1",
        "120 220 H2D BYPASS 1 0",
        "220 230 GPU EXPERT 1 0",
        "230 233 GPU STEP -1 -1",
        "233 238 GPU DENSE 0 -1",
        "238 338 STORAGE READ 0 1",  # drops 0
        "338 438 H2D BYPASS 0 1",
        "438 448 GPU EXPERT 0 1",
        "448 453 GPU DENSE 1 -1",
        "453 553 H2D BYPASS 1 0",
        "553 563 GPU EXPERT 1 0",
        "563 566 GPU STEP -1 -1",
        "566 571 GPU DENSE 0 -1",
        "571 671 STORAGE READ 0 0",  # drops 1
        "671 771 H2D BYPASS 0 0",
        "771 781 GPU EXPERT 0 0",
        "781 786 GPU DENSE 1 -1",
        "786 886 H2D BYPASS 1 0",
        "886 896 GPU EXPERT 1 0",
        "896 899 GPU STEP -1 -1",
    ]
    assert [list(plan.host_evicts) for plan in done.plans] == [[], [], [0], [], [1], []]
    assert [done.stalls(step) for step in range(3)] == [
        {"link": 200},
        *[{"storage": 100, "link": 200}] * 2,
    ]
    assert host_keys(done) == [0, 4]


@pytest.mark.parametrize(
    ("passes", "layer_0", "stalls", "dram_bytes"),
    [
        # The copy has 40 bytes at 1 a ns, then 60 at 3 / (1 + 3) = 0.75; the read, after its setup,
        # 60 at 0.75 and 40 at 1. Four passes in all: three of the read, one of the copy.
        (3, ("5 125", "5 165", 125), {"dram": 20, "storage": 30, "link": 200}, 3 * 100 + 2 * 100),
        (1, ("5 105", "5 145", 105), {"storage": 30, "link": 200}, 100 + 2 * 100),
    ],
    ids=["page_cache", "direct"],
)
def test_a_read_through_the_page_cache_slows_a_copy(
    passes: int, layer_0: tuple[str, str, int], stalls: dict[str, int], dram_bytes: int
) -> None:
    memory = Memory(dram_bytes_per_s=(3 * BYTE_A_NS,))
    hardware = stored(None, 40, memory=memory, storage_passes=passes)
    done = run([[[2, 3], [0]]], Preloaded([4]), [2, 4, 1], hardware)
    copied, read, there = layer_0
    came = there + 40
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        f"{copied} H2D LOAD 0 2",
        f"{read} STORAGE READ 0 3",
        f"{there} {there + 10} GPU EXPERT 0 2",
        f"{came} {came + 100} H2D LOAD 0 3",
        f"{came + 100} {came + 110} GPU EXPERT 0 3",
        f"{came + 110} {came + 115} GPU DENSE 1 -1",
        f"{came + 115} {came + 125} GPU EXPERT 1 0",
        f"{came + 125} {came + 128} GPU STEP -1 -1",
    ]
    assert done.stalls() == stalls
    assert done.tables.dram_bytes == dram_bytes


def test_the_cpu_waits_for_storage_too() -> None:
    placement, costs = ScriptedPlacement({1: Service.CPU}), ByteCosts(handover=6)
    done = run([[[0, 1], [0]]], Preloaded([0, 4]), [0, 4], stored(), costs, placement=placement)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 0",
        "5 105 STORAGE READ 0 1",
        "5 11 HANDOVER HANDOVER 0 -1",
        "105 205 CPU EXPERT 0 1",
        "205 210 GPU DENSE 1 -1",
        "210 220 GPU EXPERT 1 0",
        "220 223 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"storage": 105 - 15, "cpu": 205 - 105}


# -- host memory that does not keep what the GPU has ----------------------------------------------

BACK = stored(d2h_bytes_per_s=BYTE_A_NS // 2)
"""100 bytes take 200 ns back to the host."""


def exchange() -> HandRun:
    """One slot on the GPU, with 0 in it; 4 is wanted next."""
    return run([[[0], [0]]], Preloaded([0]), [4, 5], BACK, slots=1, is_exclusive=True)


def test_a_copy_waits_until_the_expert_in_its_slot_is_back() -> None:
    done = exchange()
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 0",
        "15 20 GPU DENSE 1 -1",
        "20 220 D2H DEMOTE 0 0",
        "220 320 H2D LOAD 1 0",
        "320 330 GPU EXPERT 1 0",
        "330 333 GPU STEP -1 -1",
    ]
    assert done.plans[1].host_evicts == [5]  # for 0; 4 is wanted
    assert host_keys(done) == [0]  # 4 has left
    assert (done.steps()[0]["demotions"], done.steps()[0]["d2h_bytes"]) == (1, 100)


def test_the_link_is_to_blame_for_the_wait_for_a_slot() -> None:
    assert exchange().stalls() == {"link": 320 - 20}


def test_the_first_copy_takes_the_free_slot_and_the_last_one_waits() -> None:
    done = run([[[0], [0, 1]]], Preloaded([0]), [4, 5, 1], BACK, slots=2, is_exclusive=True)
    assert done.lines()[3:] == [
        "20 120 H2D LOAD 1 0",
        "20 220 D2H DEMOTE 0 0",
        "120 130 GPU EXPERT 1 0",
        "220 320 H2D LOAD 1 1",
        "320 330 GPU EXPERT 1 1",
        "330 333 GPU STEP -1 -1",
    ]


# -- storage straight to where experts compute ----------------------------------------------------


def test_on_one_memory_storage_is_all_that_copies_wait_for() -> None:
    hardware = stored(DEEPER_IS_FASTER, 20, depth=2, through_host=False)
    done = play([[[0, 1], [0]]], only(Preloaded([4])), None, hardware)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 125 STORAGE LOAD 0 0",  # setup 20; two blocks outstanding
        "125 135 GPU EXPERT 0 0",
        "125 325 STORAGE LOAD 0 1",  # one block
        "325 335 GPU EXPERT 0 1",
        "335 340 GPU DENSE 1 -1",
        "340 350 GPU EXPERT 1 0",
        "350 353 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"storage": 120 + (325 - 135)}
    assert done.tables.busy_ns == {"gpu": 43, "cpu": 0, "storage": 320}  # no link
