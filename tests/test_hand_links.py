"""Copies to the GPU by hand: prefetches, preemption, chunks, setups and gaps, the host thread's part.

The figures that hold unless a test says otherwise stand at the head of tests/hand.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import simpy

from sim.clock import PLAN, Event
from sim.events import Kind
from sim.hardware import Hardware
from sim.link import Carriage, Copy, Link
from sim.policies.classic import LRU, OnDemand
from tests.doubles import Preloaded, ScriptedPrefetch
from tests.hand import ByteCosts, Doubting, play
from tests.strategies import only

THIRDS = ByteCosts(expert_bytes=90)
"""Three chunks of 30 ns."""


# -- prefetches that are not there yet ------------------------------------------------------------


def test_a_queued_prefetch_that_is_late_goes_ahead_and_its_setup_is_hidden() -> None:
    ahead = ScriptedPrefetch({0: [4, 5, 6]})
    hardware = Hardware(setup_ns=30, gap_ns=4)
    done = play([[[0], [2]]], only(Preloaded([0]), prefetch=ahead), hardware=hardware)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 0",
        "5 135 H2D PREFETCH 1 0",  # setup 30 + 100
        "15 20 GPU DENSE 1 -1",
        "135 239 H2D PREFETCH 1 2",  # ahead of 5; issued at 5, so only the gap is left: 4 + 100
        "239 249 GPU EXPERT 1 2",
        "249 252 GPU STEP -1 -1",
    ]
    assert done.plans[1].late == [6]
    assert done.stalls() == {"link": 239 - 20}


def test_a_prefetch_in_chunks_is_late_until_its_last_one() -> None:
    ahead = ScriptedPrefetch({0: [4]})
    hardware = Hardware(chunks=3, setup_ns=6, gap_ns=2)
    done = play([[[0], [0]]], only(Preloaded([0]), prefetch=ahead), THIRDS, hardware)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 0",
        "5 41 H2D PREFETCH 1 0",  # setup 6 + 30
        "15 20 GPU DENSE 1 -1",
        "41 73 H2D PREFETCH 1 0",  # gap 2 + 30
        "73 105 H2D PREFETCH 1 0",
        "105 115 GPU EXPERT 1 0",
        "115 118 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"link": 105 - 20}
    assert done.steps()[0]["late_hits"] == done.steps()[0]["prefetches"] == 1


def test_demand_overtakes_a_prefetch_at_a_chunk_edge_which_goes_on_afterwards() -> None:
    ahead = ScriptedPrefetch({0: [5]})
    tokens = [[[0], [3]], [[0], [1]]]
    done = play(tokens, only(Preloaded([0]), prefetch=ahead), THIRDS, Hardware(chunks=3))
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 0",
        "5 35 H2D PREFETCH 1 1",
        "15 20 GPU DENSE 1 -1",
        "35 65 H2D LOAD 1 3",  # wanted at 20
        "65 95 H2D LOAD 1 3",
        "95 125 H2D LOAD 1 3",
        "125 135 GPU EXPERT 1 3",
        "125 155 H2D PREFETCH 1 1",  # the second third
        "135 138 GPU STEP -1 -1",
        "138 143 GPU DENSE 0 -1",
        "143 153 GPU EXPERT 0 0",
        "153 158 GPU DENSE 1 -1",
        "155 185 H2D PREFETCH 1 1",  # on the wire when it is wanted, at 158
        "185 195 GPU EXPERT 1 1",
        "195 198 GPU STEP -1 -1",
    ]
    assert [done.stalls(step) for step in (0, 1)] == [{"link": 125 - 20}, {"link": 185 - 158}]
    assert [step["late_hits"] for step in done.steps()] == [0, 1]


def test_a_copy_stopped_between_chunks_can_be_promoted_but_not_cancelled() -> None:
    """A link alone: a layer waits for all its demand copies, so none is on the wire when it plans."""
    env: Any = simpy.Environment()
    chunks, cancelled = list[tuple[int, int]](), list[bool]()

    def arrived(copy: Copy) -> None:
        chunks.append((int(env.now), copy.key))

    def later(delay_ns: int, action: Callable[[Any], Any]) -> None:
        env.schedule(Event(action), PLAN, delay_ns)

    link = Link(env, Carriage([[30] * 3] * 2), 4, lambda _: 0, arrived)
    later(0, lambda _: link.background(4, Kind.PREFETCH, 0))
    later(10, lambda _: link.demand(0, Kind.LOAD, 10))
    later(40, lambda _: cancelled.append(link.cancel(4)))
    later(50, lambda _: link.promote(4))
    later(70, lambda _: link.demand(2, Kind.LOAD, 70))
    env.run()
    assert cancelled == [False]
    assert chunks == [
        (30, 4),
        *[(60, 0), (90, 0), (120, 0)],
        *[(150, 4), (180, 4)],  # wanted since 50, and so before 2, which is wanted since 70
        *[(210, 2), (240, 2), (270, 2)],
    ]
    assert link.busy_ns == 270


def test_a_stale_prefetch_is_cancelled_while_it_is_queued() -> None:
    ahead = Doubting({0: [5, 6]}, stale={1: [6]})
    done = play([[[0], [0]], [[0], [2]]], only(Preloaded([0, 4]), prefetch=ahead))
    assert done.lines()[2:] == [
        "5 105 H2D PREFETCH 1 1",
        "15 20 GPU DENSE 1 -1",
        "20 30 GPU EXPERT 1 0",  # this plan cancels 6, which is queued behind 5
        "30 33 GPU STEP -1 -1",
        "33 38 GPU DENSE 0 -1",
        "38 48 GPU EXPERT 0 0",
        "48 53 GPU DENSE 1 -1",
        "105 205 H2D LOAD 1 2",  # and so 6 is a miss at 53; 5 is still on the wire
        "205 215 GPU EXPERT 1 2",
        "215 218 GPU STEP -1 -1",
    ]
    columns = "cancels", "late_hits", "loads", "prefetches"
    counts = [[step[name] for name in columns] for step in done.steps()]
    assert counts == [[1, 0, 0, 0], [0, 0, 1, 1]]
    assert done.stalls(1) == {"link": 205 - 53}


def test_a_copy_that_has_begun_is_not_cancelled() -> None:
    ahead = Doubting({0: [5, 6]}, stale={1: [5, 6]})
    done = play([[[0], [0]], [[0], [1]]], only(Preloaded([0, 4]), prefetch=ahead))
    assert ahead.asked[1] == [6]  # 5 has begun, so nobody is asked about it
    assert done.plans[1].cancels == [6]
    assert done.lines()[-3:] == [
        "48 53 GPU DENSE 1 -1",
        "105 115 GPU EXPERT 1 1",  # 5 came at 105, as if nobody had doubted it
        "115 118 GPU STEP -1 -1",
    ]
    assert done.of_lane("H2D") == ["5 105 PREFETCH 1 1"]
    assert (done.steps()[1]["late_hits"], done.stalls(1)) == (1, {"link": 105 - 53})


# -- chunks that compute --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "kernels"),
    [
        (32, ["41 51", "73 83", "105 117"]),  # 32 // 3 = 10 a chunk as it comes, the last 32 - 20
        (150, ["41 91", "91 141", "141 191"]),  # 50 a chunk, each ready before the one before ends
    ],
)
def test_a_third_of_the_kernels_runs_as_each_chunk_comes(gpu: int, kernels: list[str]) -> None:
    hardware = Hardware(chunks=3, chunk_compute=True, setup_ns=6, gap_ns=2)
    costs = ByteCosts(expert_bytes=90, gpu=gpu)
    done = play([[[0], [0]]], only(Preloaded([4])), costs, hardware)
    end = int(kernels[-1].split()[1])
    assert done.of_lane("H2D") == ["5 41 LOAD 0 0", "41 73 LOAD 0 0", "73 105 LOAD 0 0"]
    assert done.of_lane("GPU") == [
        "0 5 DENSE 0 -1",
        *[f"{span} EXPERT 0 0" for span in kernels],
        f"{end} {end + 5} DENSE 1 -1",
        f"{end + 5} {end + 5 + gpu} EXPERT 1 0",  # resident: all at once
        f"{end + 5 + gpu} {end + 8 + gpu} STEP -1 -1",
    ]
    assert done.stalls() == {"link": end - 5 - gpu}


def chunk_that_came_before_it_was_wanted() -> list[str]:
    """Chunks come at 35, 65, 95; the layer plans at 40. Kernels: 10 a chunk."""
    ahead = ScriptedPrefetch({0: [4]})
    hardware = Hardware(chunks=3, chunk_compute=True)
    costs = ByteCosts(expert_bytes=90, gpu=30)
    done = play([[[0], [0]]], only(Preloaded([0]), prefetch=ahead), costs, hardware)
    assert done.of_lane("H2D") == ["5 35 PREFETCH 1 0", "35 65 PREFETCH 1 0", "65 95 PREFETCH 1 0"]
    return done.of_lane("GPU")


def test_a_late_prefetch_computes_what_comes_after_it_is_wanted() -> None:
    assert chunk_that_came_before_it_was_wanted()[2] == "35 40 DENSE 1 -1"
    assert "65 75 EXPERT 1 0" in chunk_that_came_before_it_was_wanted()


def test_the_share_of_a_chunk_that_came_before_the_plan_runs_with_the_plan() -> None:
    assert chunk_that_came_before_it_was_wanted()[3:] == [
        "40 50 EXPERT 1 0",  # its weights are there
        "65 75 EXPERT 1 0",
        "95 105 EXPERT 1 0",
        "105 108 STEP -1 -1",
    ]


# -- setups and gaps ------------------------------------------------------------------------------


def test_a_setup_is_hidden_in_a_queue_and_paid_again_on_an_idle_link() -> None:
    done = play([[[0, 1], [0]]], only(LRU()), hardware=Hardware(setup_ns=30, gap_ns=4))
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 135 H2D LOAD 0 0",  # 30 + 100
        "135 145 GPU EXPERT 0 0",
        "135 239 H2D LOAD 0 1",  # 4 + 100
        "239 249 GPU EXPERT 0 1",
        "249 254 GPU DENSE 1 -1",
        "254 384 H2D LOAD 1 0",  # idle since 239: 30 + 100
        "384 394 GPU EXPERT 1 0",
        "394 397 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"link": (239 - 5 - 10) + (384 - 254)}
    assert done.tables.busy_ns["h2d"] == 130 + 104 + 130


def test_what_a_queue_does_not_hide_of_a_setup_shows() -> None:
    ahead, hardware = ScriptedPrefetch({0: [4]}), Hardware(setup_ns=30, gap_ns=4)
    costs = ByteCosts(gpu=100)
    done = play([[[0], [3]]], only(Preloaded([0]), prefetch=ahead), costs, hardware)
    assert done.lines()[1:] == [
        "5 105 GPU EXPERT 0 0",
        "5 135 H2D PREFETCH 1 0",
        "105 110 GPU DENSE 1 -1",
        "135 240 H2D LOAD 1 3",  # issued at 110, set up at 140, one later than the gap ends
        "240 340 GPU EXPERT 1 3",
        "340 343 GPU STEP -1 -1",
    ]


def test_a_copy_that_waits_for_its_slot_is_set_up_when_it_has_it() -> None:
    hardware, costs = Hardware(setup_ns=30, gap_ns=4), ByteCosts(gpu=50)
    done = play([[[0, 1], [0]]], only(OnDemand()), costs, hardware, staging_slots=1)
    assert done.lines()[1:5] == [
        "5 135 H2D BYPASS 0 0",
        "135 185 GPU EXPERT 0 0",
        "185 315 H2D BYPASS 0 1",  # the slot is free at 185; then 30 + 100, nothing hidden
        "315 365 GPU EXPERT 0 1",
    ]
    assert done.lines()[-2:] == ["500 550 GPU EXPERT 1 0", "550 553 GPU STEP -1 -1"]


# -- the host thread ------------------------------------------------------------------------------


def test_the_issue_of_copies_holds_up_resident_kernels() -> None:
    done = play([[[0, 1, 2], [0]]], only(Preloaded([0, 4])), hardware=Hardware(issue_ns=7))
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "12 112 H2D LOAD 0 1",  # issued at 5 + 7
        "19 29 GPU EXPERT 0 0",  # launched when both copies have been issued: 5 + 7 + 7
        "112 122 GPU EXPERT 0 1",
        "112 212 H2D LOAD 0 2",
        "212 222 GPU EXPERT 0 2",
        "222 227 GPU DENSE 1 -1",
        "227 237 GPU EXPERT 1 0",
        "237 240 GPU STEP -1 -1",
    ]
    # 5 to 19 the host; 29 to 112 and 122 to 212 the link
    assert done.stalls() == {"host": 14, "link": 83 + 90}


def test_of_several_copies_only_the_first_issue_shows() -> None:
    done = play([[[1, 2], [0]]], only(Preloaded([4])), hardware=Hardware(issue_ns=7))
    assert done.lines()[1:5] == [
        "12 112 H2D LOAD 0 1",
        "112 122 GPU EXPERT 0 1",
        "112 212 H2D LOAD 0 2",  # issued at 19, while the first was on its way
        "212 222 GPU EXPERT 0 2",
    ]
    assert done.stalls() == {"host": 7, "link": 100 + 90}


def test_the_next_layer_waits_until_prefetches_are_issued() -> None:
    ahead, hardware = ScriptedPrefetch({0: [4, 5, 6]}), Hardware(issue_ns=20)
    done = play([[[0], [0]]], only(Preloaded([0]), prefetch=ahead), hardware=hardware)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 0",  # prefetches hold up no kernels of this layer
        "25 125 H2D PREFETCH 1 0",
        "65 70 GPU DENSE 1 -1",  # 5 + 3 * 20
        "125 135 GPU EXPERT 1 0",
        "135 138 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"host": 65 - 15, "link": 125 - 70}


def test_staging_a_pageable_prefetch_holds_up_the_next_layer() -> None:
    ahead, hardware = ScriptedPrefetch({0: [4]}), Hardware(staging_ns=(40, 40))
    done = play([[[0], [3]]], only(Preloaded([0, 7]), prefetch=ahead), hardware=hardware)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 0",
        "45 50 GPU DENSE 1 -1",  # the host thread stages from 5 to 45
        "50 60 GPU EXPERT 1 3",
        "60 63 GPU STEP -1 -1",  # the copy, 5 to 105, has not come
    ]
    assert done.stalls() == {"host": 45 - 15}
