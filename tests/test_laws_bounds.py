"""Laws that bound a run: the oracles, compulsory misses, bandwidth, compute, prefetch, the LRU cliff."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.counter import STEP_COLUMNS
from sim.lockstep import run_lockstep
from sim.policies.base import PolicySet
from sim.policies.classic import LRU
from sim.policies.oracle import Belady, NextUse
from sim.timeline import Timeline
from sim.types import LayerRouting
from sim.workload import Workload
from tests.doubles import SETUPS, Foresight, Preloaded, ScriptedPrefetch, Setup
from tests.strategies import (
    LAW,
    ConstantCosts,
    Memory,
    all_events,
    build,
    costs,
    memories,
    one_request,
    only,
    run_timeline,
    trace_of_ids,
    workloads,
)

PLENTY = 64
"""Slots, and staging slots, enough for all experts of any drawn model."""


def setups(keep: Iterable[str]) -> pytest.MarkDecorator:
    names = sorted(keep)
    return pytest.mark.parametrize("setup", [SETUPS[name] for name in names], ids=names)


def total(workload: Workload, policies: PolicySet, memory: Memory, column: str) -> int:
    """Run without time; return the sum of a column of the step table."""
    rows = run_lockstep(workload, build(workload, policies, memory, ConstantCosts())).rows
    return sum(row[STEP_COLUMNS.index(column)] for row in rows)


def duration(
    workload: Workload, policies: PolicySet, memory: Memory, charged: ConstantCosts
) -> int:
    """Run with time; return how long it took."""
    offloader = build(workload, policies, memory, charged)
    return Timeline(workload, offloader, charged).run().steps.rows[-1][STEP_COLUMNS.index("end_ns")]


# -- oracles ---------------------------------------------------------------------------------------


def belady(workload: Workload, per_layer: bool, bypass: bool) -> PolicySet:
    pools = workload.num_layers if per_layer else 1
    future = NextUse(all_events(workload))
    return PolicySet([Belady(future, bypass) for _ in range(pools)])


@setups(name for name, setup in SETUPS.items() if setup.forced)
@LAW
@given(data=st.data())
def test_no_forced_demand_only_cache_beats_forced_belady(setup: Setup, data: st.DataObject) -> None:
    """True while every event fits its pool: else some misses are bypassed, by order and not by choice."""
    workload = data.draw(workloads())
    largest = max(len(event.experts) for event in all_events(workload))
    memory = Memory(data.draw(st.integers(largest, largest + 9)), setup.per_layer)
    best = total(workload, belady(workload, setup.per_layer, bypass=False), memory, "hits")
    assert total(workload, setup.policies(workload), memory, "hits") <= best


@setups(name for name, setup in SETUPS.items() if setup.demand_only)
@LAW
@given(data=st.data())
def test_no_demand_only_cache_beats_belady_with_bypass(setup: Setup, data: st.DataObject) -> None:
    """True at equal sizes of experts, with a staging slot for each miss of an event.

    With fewer, `_stage` lets only some of an event's misses stay, and Belady is held back by it.
    """
    workload, memory = data.draw(workloads()), data.draw(memories(setup.per_layer))
    roomy = Memory(memory.slots, setup.per_layer, staging_slots=PLENTY)
    best = total(workload, belady(workload, setup.per_layer, bypass=True), roomy, "hits")
    assert total(workload, setup.policies(workload), memory, "hits") <= best


def optimum(events: Sequence[LayerRouting], slots: int, forced: bool) -> int:
    """Return the most hits that any demand-only cache can have, by trying all of them."""
    best = {frozenset[int](): 0}
    for event in events:
        used = frozenset(event.experts)
        grown: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            may_stay = (held - used) if forced else (held | used)
            room = slots - len(used) if forced else slots
            for size in range(min(room, len(may_stay)) + 1):
                for chosen in combinations(sorted(may_stay), size):
                    after = frozenset(chosen) | (used if forced else frozenset())
                    grown[after] = max(grown.get(after, 0), hits + len(held & used))
        best = grown
    return max(best.values())


@pytest.mark.parametrize("forced", [False, True])
@LAW
@given(rng=st.integers(0, 2**32 - 1), slots=st.integers(3, 4))
def test_belady_reaches_the_optimum_of_all_caches(forced: bool, rng: int, slots: int) -> None:
    """3 experts a layer, so that every event fits."""
    ids = np.random.default_rng(rng).permuted(np.tile(np.arange(3), (7, 2, 1)), axis=2)[..., :2]
    workload = Workload(trace_of_ids(ids.astype(np.uint16), [(1, 4), (2, 0)], 3))
    memory = Memory(slots, staging_slots=PLENTY)
    found = total(workload, belady(workload, per_layer=False, bypass=not forced), memory, "hits")
    assert found == optimum(all_events(workload), slots, forced)


@setups({"lru_by_layer", "lru_global", "fifo", "lfu_forced", "lfu_bypass", "lfu_decay"})
@LAW
@given(workload=workloads())
def test_with_room_for_all_only_first_uses_miss(setup: Setup, workload: Workload) -> None:
    """A cache that admits after the event needs a staging slot for each miss of it, too."""
    memory = Memory(PLENTY, setup.per_layer, staging_slots=PLENTY)
    first_uses = len({key for event in all_events(workload) for key in event.experts})
    accesses = total(workload, setup.policies(workload), memory, "accesses")
    hits = total(workload, setup.policies(workload), memory, "hits")
    assert accesses - hits == first_uses
    assert total(workload, setup.policies(workload), memory, "evictions") == 0


# -- time ------------------------------------------------------------------------------------------


@setups({"lru_global", "lru_by_layer", "lfu_bypass", "on_demand", "static"})
@LAW
@given(data=st.data(), loads=st.tuples(st.integers(0, 300), st.integers(0, 300)))
def test_a_faster_link_is_never_slower_without_prefetch(
    setup: Setup, data: st.DataObject, loads: tuple[int, int]
) -> None:
    workload, memory = data.draw(workloads()), data.draw(memories(setup.per_layer))
    fast, slow = (
        duration(workload, setup.policies(workload), memory, ConstantCosts(load=load, gpu=40))
        for load in sorted(loads)
    )
    assert fast <= slow


@setups(SETUPS)
@LAW
@given(data=st.data())
def test_no_run_is_faster_than_its_bytes_or_its_compute(setup: Setup, data: st.DataObject) -> None:
    workload, memory = data.draw(workloads()), data.draw(memories(setup.per_layer))
    charged = data.draw(costs())
    run = run_timeline(workload, setup.policies(workload), memory, charged)
    end_ns = run.steps()[-1]["end_ns"]
    demand_bytes = sum(row["demand_bytes"] for row in run.steps())
    assert end_ns >= demand_bytes // 8 * charged.load
    least_ns = 0
    for plan in run.plans:
        counts = plan.routing
        on_gpu = [
            charged.expert_gpu_ns(0, counts.num_tokens(key), plan.packed)
            for key in counts.experts
            if key not in plan.on_cpu and key not in plan.deferred
        ]
        on_cpu = [charged.expert_cpu_ns(0, counts.num_tokens(key)) for key in plan.on_cpu]
        least_ns += charged.dense + max(sum(on_gpu), sum(on_cpu))
    assert end_ns >= least_ns + charged.step * len(run.steps())


@pytest.mark.parametrize("depth", [1, 2, 5])
@LAW
@given(workload=workloads(), charged=costs(), limit=st.integers(1, 9))
def test_prefetch_saves_no_more_than_the_lesser_of_all_copies_and_all_compute(
    depth: int, workload: Workload, charged: ConstantCosts, limit: int
) -> None:
    """Of a run that carries the same copies: here a cache for all, and a prefetcher never wrong.

    "The sum over layers of min(copy, compute)" is a bound only for a prefetcher that looks one
    layer ahead: see the next test.
    """
    memory = Memory(PLENTY, prefetch_limit=limit)
    plain = run_timeline(workload, only(LRU()), memory, charged)
    ahead = Foresight(all_events(workload), depth)
    hasty = run_timeline(workload, only(LRU(), prefetch=ahead), memory, charged)
    copies = sum(row["loads"] for row in plain.steps()) * charged.load
    compute = sum(row["gpu_busy_ns"] for row in plain.steps())
    saved = plain.steps()[-1]["end_ns"] - hasty.steps()[-1]["end_ns"]
    assert saved <= min(copies, compute)


def test_prefetch_over_two_layers_saves_more_than_the_sum_over_layers() -> None:
    """Layer 0 computes 150 ns, layer 1 only 55, and layer 2 has one copy of 150."""
    workload = one_request([[[0, 1, 2], [0], [0]]])
    charged, memory = ConstantCosts(load=150, gpu=50, dense=5), Memory(12)
    here = [0, 1, 2, 4]
    plain = duration(workload, only(Preloaded(here)), memory, charged)
    script = ScriptedPrefetch({0: [8]})
    hasty = duration(workload, only(Preloaded(here), prefetch=script), memory, charged)
    one_layer_ahead = min(150, 55)  # copy of layer 2 beside attention and experts of layer 1
    assert plain - hasty == 150 > one_layer_ahead


# -- the cliff of a global LRU ---------------------------------------------------------------------


@LAW
@given(data=st.data(), workload=workloads(one_token=True))
def test_a_global_lru_of_at_most_the_other_layers_demand_never_hits(
    data: st.DataObject, workload: Workload
) -> None:
    """Between two uses of an expert the other layers use (layers - 1) * top_k others: whatever they are,
    an LRU of no more slots than that has dropped it. (Not: of fewer than layers * top_k slots.)
    """
    cliff = (workload.num_layers - 1) * workload.trace.meta.top_k
    memory = Memory(data.draw(st.integers(0, cliff)))
    assert total(workload, only(LRU()), memory, "hits") == 0


@pytest.mark.parametrize("extra_slots", range(6))
def test_between_the_other_layers_demand_and_a_tokens_each_extra_slot_is_a_hit(
    extra_slots: int,
) -> None:
    """Same experts each token, 3 layers, top 4: from 8 slots on, each event hits the extra slots."""
    ids = np.tile(np.arange(4, dtype=np.uint16), (6, 3, 1))
    workload = Workload(trace_of_ids(ids, [(1, 5)], 4))
    hits = total(workload, only(LRU()), Memory(8 + extra_slots), "hits")
    assert hits == 5 * 3 * min(extra_slots, 4)
