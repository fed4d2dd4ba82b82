"""What a phone's engine does that others do not, by hand: memory given back, reads that have a window.

Storage moves a byte a nanosecond straight to where experts compute, an expert of 100 bytes as one block;
the other figures stand at the head of tests/hand.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from hwmodels.engine import Engine
from hwmodels.errors import HardwareError
from sim.build import build
from sim.hardware import Hardware
from sim.policies.classic import LRU
from sim.storage import Reading
from sim.types import ConfigError
from tests.configs import composed
from tests.doubles import Preloaded, ScriptedPrefetch
from tests.hand import AMPLE, BYTE_A_NS, FlatCurve, HandRun, play
from tests.round_hardware import read
from tests.strategies import only


def phone(block: int = 100, depth: int = 1, in_windows: bool = False, **others: Any) -> Hardware:
    """Return hardware of one memory and storage."""
    reading = Reading(FlatCurve(), block, depth, 0, in_windows)
    return Hardware(memory=AMPLE, reading=reading, through_host=False, **others)


# -- memory of dropped experts --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "overlaps", "begins", "stalls"),
    [
        (BYTE_A_NS // 2, True, 205, {"host": 200}),  # asked for at 5; 200 ns, longer than the read
        (2 * BYTE_A_NS, True, 105, {"host": 50, "storage": 50}),
        (BYTE_A_NS // 2, False, 305, {"host": 200, "storage": 100}),  # one after the other
        (0, True, 105, {"storage": 100}),
        (0, False, 105, {"storage": 100}),
    ],
)
def test_kernels_wait_until_a_dropped_experts_memory_is_given_back(
    rate: int, overlaps: bool, begins: int, stalls: dict[str, int]
) -> None:
    hardware = phone(release_bytes_per_s=rate, copies_overlap=overlaps)
    done = play([[[1], [0]]], only(Preloaded([0, 4])), None, hardware, slots=2)
    assert done.plans[0].evicts == [0]
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 105 STORAGE LOAD 0 1",
        f"{begins} {begins + 10} GPU EXPERT 0 1",
        f"{begins + 10} {begins + 15} GPU DENSE 1 -1",
        f"{begins + 15} {begins + 25} GPU EXPERT 1 0",  # a hit, so that nothing is dropped
        f"{begins + 25} {begins + 28} GPU STEP -1 -1",
    ]
    assert done.stalls() == stalls


# -- reads before a layer's routing ---------------------------------------------------------------


def speculate(ahead: list[int], router_ns: int, **others: Any) -> HandRun:
    """Run a token of expert 0 and then expert 1 of layer 1, ``ahead`` named by the plan of layer 0."""
    hardware = phone(in_windows=True, predict_ns=20, router_ns=router_ns, **others)
    policies = only(Preloaded([0]), prefetch=ScriptedPrefetch({0: ahead}))
    return play([[[0], [1]]], policies, None, hardware)


def test_a_read_that_comes_within_its_window_is_a_hit() -> None:
    done = speculate([5], 150)
    assert done.lines() == [
        "0 175 GPU DENSE 0 -1",  # 5, naming 20, the router 150
        "175 185 GPU EXPERT 0 0",
        "185 360 GPU DENSE 1 -1",
        "210 310 STORAGE PREFETCH 1 1",  # not before its window
        "360 370 GPU EXPERT 1 1",
        "370 373 GPU STEP -1 -1",
    ]
    assert done.stalls() == {}
    step = done.steps()[0]
    assert (step["hits"], step["prefetches"], step["prefetch_bytes"]) == (2, 1, 100)
    assert done.offloader.wasted_prefetch_bytes == 0


def test_a_read_under_way_when_its_window_closes_is_waited_for_and_thrown_away() -> None:
    done = speculate([5], 60)
    assert done.lines() == [
        "0 85 GPU DENSE 0 -1",
        "85 95 GPU EXPERT 0 0",
        "95 180 GPU DENSE 1 -1",  # the window from 120 to 180, the read from 120 to 220
        "220 320 STORAGE LOAD 1 1",  # all of it again
        "320 330 GPU EXPERT 1 1",
        "330 333 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"storage": (220 - 180) + 100}
    step = done.steps()[0]
    assert (step["hits"], step["loads"], step["cancels"]) == (1, 1, 1)
    assert (step["prefetches"], step["prefetch_bytes"]) == (0, 100)
    assert done.offloader.wasted_prefetch_bytes == 100
    assert done.tables.busy_ns["storage"] == 200
    assert done.offloader.residency.used_bytes(0) == 200


def test_blocks_that_are_outstanding_when_a_window_closes_are_read_as_well() -> None:
    done = speculate([5, 6, 7], 60, block=50, depth=4, release_bytes_per_s=BYTE_A_NS)
    # At 180 the first read lacks 40 bytes, one block; three blocks of the others are outstanding.
    settled = 220 + 150
    assert done.lines()[3:] == [
        f"{settled} {settled + 100} STORAGE LOAD 1 1",
        f"{settled + 250} {settled + 260} GPU EXPERT 1 1",  # 250 bytes are given back
        f"{settled + 260} {settled + 263} GPU STEP -1 -1",
    ]
    assert done.stalls() == {"storage": settled - 180, "host": 250}
    step = done.steps()[0]
    assert (step["cancels"], step["prefetch_bytes"]) == (3, 250)


def test_a_read_that_has_not_been_asked_for_costs_nothing() -> None:
    done = speculate([6, 5], 60)  # one block at a time
    assert done.of_lane("STORAGE") == ["220 320 LOAD 1 1"]
    step = done.steps()[0]
    assert (step["cancels"], step["prefetch_bytes"]) == (2, 100)


def test_of_two_reads_the_first_comes_and_the_second_is_thrown_away() -> None:
    done = speculate([6, 5], 100)
    assert done.of_lane("STORAGE") == [
        "160 260 PREFETCH 1 2",  # comes as the window closes
        "360 460 LOAD 1 1",
    ]
    step = done.steps()[0]
    assert (step["prefetches"], step["cancels"], step["prefetch_bytes"]) == (1, 1, 200)
    assert done.offloader.wasted_prefetch_bytes == 200  # expert 2 was not used either


def test_without_a_prefetcher_nothing_is_named_and_no_window_opens() -> None:
    hardware = phone(in_windows=True, predict_ns=20, router_ns=60)
    done = play([[[0], [1]]], only(LRU()), None, hardware)
    assert done.lines()[:3] == [
        "0 5 GPU DENSE 0 -1",
        "5 105 STORAGE LOAD 0 0",
        "105 115 GPU EXPERT 0 0",
    ]


# -- mistakes -------------------------------------------------------------------------------------


def test_an_engine_that_waits_for_all_reads_has_no_windows() -> None:
    with pytest.raises(
        HardwareError, match=r"speculation = 'before': must be beside without copies_"
    ):
        Engine.from_mapping({**read("engine", "phone_stream"), "copies_overlap": False})


def test_a_processor_must_say_how_fast_it_gives_memory_back() -> None:
    config = composed("machine=phone_sd8gen3", "engine=phone_stream", "model.expert_bits=4.5")
    with pytest.raises(HardwareError, match=r"release_bytes_per_s: missing, must be given with"):
        build(config)


def test_reads_over_a_link_have_no_windows() -> None:
    config = composed(
        "engine=phone_stream", "engine.releases_memory=false", "policy=lru_global_next_gate"
    )
    with pytest.raises(
        ConfigError, match=r"speculation = before: machine rtx4090 loads over a link"
    ):
        build(config)
