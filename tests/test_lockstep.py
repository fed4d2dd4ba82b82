"""The driver without time: what it counts, by hand, on one request of 2 layers x 4 experts."""

from __future__ import annotations

from typing import Any

from sim.counter import STEP_COLUMNS
from sim.lockstep import run_lockstep
from sim.policies.base import CachePolicy
from sim.policies.classic import LFU, LRU, OnDemand
from sim.types import LayerPlan, Phase, Service
from sim.workload import Workload
from tests.doubles import ScriptedPlacement, ScriptedPrefetch
from tests.strategies import FREE, Memory, Token, build, make_trace, one_request, only

TOKENS: list[Token] = [[[0, 1], [0, 1]], [[0, 2], [0, 1]], [[1, 2], [3, 2]]]


def count(
    cache: CachePolicy, slots: int, workload: Workload | None = None, **parts: Any
) -> list[dict[str, int]]:
    """Return the step rows of a run over a global pool of ``slots`` experts of 8 bytes."""
    workload = workload or one_request(TOKENS)
    counter = run_lockstep(
        workload, build(workload, only(cache, **parts), Memory(slots, prefetch_limit=4), FREE)
    )
    return [dict(zip(STEP_COLUMNS, row, strict=True)) for row in counter.rows]


def test_lru_counts_hits_loads_evictions_and_bytes() -> None:
    first, second, third = count(LRU(), slots=4)
    assert (first["accesses"], first["hits"], first["loads"], first["evictions"]) == (4, 0, 4, 0)
    # Layer 0 hits 0 and loads 2 for 1; layer 1 hits both.
    assert (second["hits"], second["loads"], second["evictions"]) == (3, 1, 1)
    # Layer 0 hits 2 and loads 1 for 0, which is the oldest; layer 1 loads 3 and 2 for its own 0 and 1.
    assert (third["hits"], third["loads"], third["evictions"]) == (1, 3, 3)
    assert [row["demand_bytes"] for row in (first, second, third)] == [32, 8, 24]


def test_on_demand_bypasses_all() -> None:
    rows = count(OnDemand(), slots=0)
    assert [row["bypasses"] for row in rows] == [4, 4, 4]
    assert all(row["hits"] == row["loads"] == row["admissions"] == 0 for row in rows)
    assert [row["demand_bytes"] for row in rows] == [32, 32, 32]


def test_cpu_experts_move_no_bytes() -> None:
    rows = count(OnDemand(), slots=0, placement=ScriptedPlacement({0: Service.CPU}))
    assert [row["on_cpu"] for row in rows] == [1, 1, 0]
    assert [row["demand_bytes"] for row in rows] == [24, 24, 32]


def test_prefetches_arrive_before_the_next_layer() -> None:
    rows = count(LRU(), slots=8, prefetch=ScriptedPrefetch({0: [4, 5], 4: [7, 6]}))
    assert [row["hits"] for row in rows] == [2, 3, 4]
    assert [row["late_hits"] for row in rows] == [0, 0, 0]
    assert [row["prefetches"] for row in rows] == [2, 0, 2]
    assert [row["prefetch_bytes"] for row in rows] == [16, 0, 16]


def test_admissions_after_the_event_are_counted_with_their_evictions() -> None:
    rows = count(LFU(), slots=4)
    assert [row["loads"] for row in rows] == [4, 0, 0], "the first ones find free room"
    assert [row["admissions"] for row in rows] == [0, 1, 1]
    assert [row["bypasses"] for row in rows] == [0, 1, 3]
    assert [row["evictions"] for row in rows] == [0, 1, 1]


def test_every_plan_is_shown_and_every_time_is_zero() -> None:
    workload, plans = one_request(TOKENS), list[LayerPlan]()
    counter = run_lockstep(workload, build(workload, only(LRU()), Memory(4), FREE), plans.append)
    assert [plan.routing.layer for plan in plans] == [0, 1, 0, 1, 0, 1]
    for name in ("start_ns", "end_ns", "gpu_busy_ns", "link_stall_ns", "cpu_stall_ns"):
        assert {row[STEP_COLUMNS.index(name)] for row in counter.rows} == {0}


def test_a_batch_counts_the_union_of_its_tokens() -> None:
    requests = [([TOKENS[0]], [TOKENS[1]]), ([TOKENS[0]], [TOKENS[2]])]
    rows = count(LRU(), 8, Workload(make_trace(requests, 4), batch_size=2))
    assert [row["phase"] for row in rows] == [Phase.PREFILL, Phase.PREFILL, Phase.DECODE]
    assert [row["num_tokens"] for row in rows] == [1, 1, 2]
    assert [row["accesses"] for row in rows] == [4, 4, 7]  # {0, 1, 2} and {0, 1, 2, 3}
    assert [row["hits"] for row in rows] == [0, 4, 4]
