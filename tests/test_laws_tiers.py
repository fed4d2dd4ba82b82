"""Laws of machines with storage, of KV cache that takes room from experts, of sharing, and of speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from sim.counter import STEP_COLUMNS
from sim.events import Kind
from sim.hardware import Hardware, Memory
from sim.kv import JointBudget
from sim.lockstep import run_lockstep
from sim.policies.classic import LFU, LRU
from sim.sharing import Shares, Use
from sim.storage import Reading
from sim.types import LayerPlan
from tests.doubles import Foresight, Setup
from tests.machines import BYTE_A_NS, Case, RatedCosts, Rising, cases, pools_of
from tests.strategies import FREE, LAW, all_events, one_request
from tests.test_laws_bounds import setups as named
from tests.test_laws_engine import FEWER, check_laws, every_setup, run_case, table_bytes
from tests.test_parity import content

LAZY = Setup(lambda _: LRU())
_COUNTS = slice(STEP_COLUMNS.index("accesses"), STEP_COLUMNS.index("kernels"))


@st.composite
def joint_cases(draw: st.DrawFn, cases: st.SearchStrategy[Case]) -> Case:
    """Give a drawn case a budget that KV and experts share."""
    case = draw(cases)
    pools, workload = case.pools, case.workload
    slots = max(pools.event_slots(workload.trace.meta.top_k), case.prefetch_limit)
    least = tuple(
        min(slots, count) * size
        for count, size in zip(pools.num_keys, pools.largest_bytes, strict=True)
    )
    per_token = draw(st.sampled_from([1, 25]))
    joint = JointBudget(0, per_token, pools.all_bytes, least)
    total = joint.least_bytes + per_token * draw(st.integers(8, 60))
    joint = replace(joint, total_bytes=total)
    workload.limit_kv(joint.most_kv_tokens)
    return replace(case, joint=joint, pool_bytes=tuple(joint.pool_bytes(0)))


@st.composite
def tiered_cases(draw: st.DrawFn, setup: Setup, closed: bool = False, **options: Any) -> Case:
    """Draw a case with storage below host memory, or (with a fourth of the draws) below one memory."""
    case = draw(cases(setup, shared=True, closed=closed, **options))
    exclusive, direct = draw(st.booleans()), draw(st.integers(0, 3)) == 0
    reading = Reading(
        Rising(draw(st.sampled_from([10**8, 10**9]))),
        block_bytes=draw(st.sampled_from([16, 64])),
        queue_depth=draw(st.integers(1, 4)),
        setup_ns=draw(st.sampled_from([0, 21])),
    )
    changes = {"reading": reading, "storage_passes": draw(st.sampled_from([1, 3]))}
    if direct and case.pools.num_gpus == 1:
        alone = replace(case.hardware.memory, dram_bytes_per_s=(BYTE_A_NS,))  # type: ignore[type-var]
        changes |= {"staging_ns": ()}
        return case.with_hardware(through_host=False, memory=alone, **changes)
    least = case.pools.least_host_bytes(case.prefetch_limit, exclusive)
    extra = draw(st.sampled_from([0, 60, 400]))
    return replace(
        case.with_hardware(**changes),
        host_bytes=least + extra,
        exclusive=exclusive,
        host_cache=draw(st.sampled_from([LRU, lambda: LFU(bypass=False)])),
    )


@every_setup
@LAW
@given(data=st.data())
def test_the_laws_hold_with_storage_and_where_kv_and_experts_share_a_budget(
    setup: Setup, data: st.DataObject
) -> None:
    tiered = tiered_cases(setup)
    either = tiered | joint_cases(cases(setup)) | joint_cases(tiered)
    check_laws(run_case(data.draw(either), setup))


def test_an_expert_that_comes_in_rounds_from_storage_is_computed_as_a_whole() -> None:
    """Rounds are no chunks: of 6 rounds with a third of the kernels each, the last would be negative."""
    workload = one_request([[[0]]])
    hardware = Hardware(
        chunks=3,
        chunk_compute=True,
        through_host=False,
        memory=Memory((BYTE_A_NS,)),
        reading=Reading(Rising(BYTE_A_NS), 16, 1),
    )
    pools = pools_of(workload, (96,), True, 1, "expert")
    run = run_case(
        Case(workload, hardware, RatedCosts(gpu=30, layer_bytes=(96,)), pools, (96,)), LAZY
    )
    (shares,) = [[row[:2] for row in run.rows if row[4] == Kind.EXPERT]]
    assert [end - start for start, end in shares] == [30]


@every_setup
@FEWER
@given(data=st.data())
def test_the_same_run_twice_leaves_the_same_bytes(setup: Setup, data: st.DataObject) -> None:
    case = data.draw(cases(setup) | tiered_cases(setup) | joint_cases(tiered_cases(setup)))
    assert table_bytes(run_case(case, setup)) == table_bytes(run_case(case, setup))


# -- one brain, two drivers ------------------------------------------------------------------------


def decided(plan: LayerPlan) -> tuple[Any, ...]:
    """Return all that a plan decides, host memory included."""
    host = plan.reads, plan.host_evicts, plan.demotes
    return (*content(plan), *map(list, host))


def check_parity(case: Case, setup: Setup) -> None:
    """Check that both drivers decide, count and leave behind the same."""
    timed, still = run_case(case, setup), case.offloader(setup)
    counted = run_lockstep(case.workload, still).rows
    assert list(map(decided, timed.plans)) == list(map(decided, still.plans))
    assert [row[_COUNTS] for row in timed.tables.steps.rows] == [row[_COUNTS] for row in counted]
    assert timed.watched.residency.state == still.residency.state
    assert timed.watched.wasted_prefetch_bytes == still.wasted_prefetch_bytes
    if still.host is not None and timed.watched.host is not None:
        # The last layer's experts may still be on their way back when the run ends.
        held = (host.residency.state for host in (timed.watched.host, still.host))
        first, second = ([state > 0 for state in states] for states in held)
        assert first == second


@every_setup
@FEWER
@given(data=st.data())
def test_with_no_latency_both_drivers_give_the_same_plans(
    setup: Setup, data: st.DataObject
) -> None:
    """Cancels too: nothing ever waits, so that neither driver has anything to cancel."""
    still: dict[str, Any] = {"setup_ns": 0, "gap_ns": 0, "issue_ns": 0, "staging_ns": ()}
    case, free = data.draw(cases(setup, shared=False, **still)), cast(RatedCosts, FREE)
    check_parity(replace(case.with_hardware(hop_ns=0), costs=free), setup)


@every_setup
@FEWER
@given(data=st.data())
def test_where_all_arrives_before_the_next_plan_both_drivers_give_the_same_plans(
    setup: Setup, data: st.DataObject
) -> None:
    """A byte takes some time where capacities are shared, so attention here takes longer than any copies.

    In a closed loop, for open arrivals find other batches when steps take time.
    """
    tiered, plain = tiered_cases(setup, closed=True), cases(setup, closed=True)
    case = data.draw(tiered | joint_cases(tiered) | joint_cases(plain))
    check_parity(replace(case, costs=replace(case.costs, dense=10**8, step=10**8)), setup)


# -- sharing ---------------------------------------------------------------------------------------


Flows = Sequence[tuple[int, Sequence[Use]]]
"""Cap and uses of each flow; in millions of bytes a second, like capacities here."""
_MILLION = 10**6


def observed_rate(probe: int, flows: Flows, capacities: Sequence[int], weighted: bool) -> float:
    """Return the rate of one flow among all that begin together, from when its bytes have come."""
    ended, num_bytes = list[int](), 10**5
    clock: Any = simpy.Environment()
    shares = Shares(clock, [capacity * _MILLION for capacity in capacities], 1, weighted)
    for place, (cap, uses) in enumerate(flows):
        size = num_bytes if place == probe else num_bytes * 10**6
        report = ended.append if place == probe else lambda _: None
        shares.start(size, cap * _MILLION, uses, report)
    while not ended:
        clock.step()
    return num_bytes * 1e9 / clock.now / _MILLION


def poured_rates(
    flows: Flows, capacities: Sequence[int], weighted: bool, drop: float
) -> list[float]:
    """Return the rates when all flows grow by drops, by weight, until a cap or a capacity stops each."""
    rates, growing = [0.0] * len(flows), set(range(len(flows)))
    while growing:
        for place in sorted(growing):
            cap, uses = flows[place]
            rates[place] += drop * (cap if weighted else 1)
            full = any(load(use.capacity, flows, rates) > capacities[use.capacity] for use in uses)
            if full or rates[place] >= cap:
                growing.remove(place)
    return rates


def load(place: int, flows: Flows, rates: Sequence[float]) -> float:
    """Return what all flows together take of a capacity."""
    pairs = zip(flows, rates, strict=True)
    return sum(rate * use.passes for (_, uses), rate in pairs for use in uses if use[0] == place)


@st.composite
def flow_sets(draw: st.DrawFn) -> tuple[Flows, list[int]]:
    """Draw up to 4 flows over up to 3 capacities; each uses one or two, one to three times."""
    capacities = draw(st.lists(st.integers(5, 60), min_size=1, max_size=3))
    places = st.lists(st.integers(0, len(capacities) - 1), min_size=1, max_size=2, unique=True)
    flow = st.tuples(st.integers(1, 60), places, st.sampled_from([1, 1, 3]))
    drawn = draw(st.lists(flow, min_size=1, max_size=4))
    return [(cap, [Use(place, n) for place in on]) for cap, on, n in drawn], capacities


@LAW
@given(drawn=flow_sets(), weighted=st.booleans())
def test_shares_are_those_of_pouring_drop_by_drop(
    drawn: tuple[Flows, list[int]], weighted: bool
) -> None:
    """And nothing is wasted or overdrawn: each flow is at its cap or at a capacity that is full."""
    flows, capacities = drawn
    found = [observed_rate(place, flows, capacities, weighted) for place in range(len(flows))]
    drop = 1e-3 if weighted else 2e-2
    slack = 3 * drop * sum(cap if weighted else 1 for cap, _ in flows)
    assert found == pytest.approx(poured_rates(flows, capacities, weighted, drop), abs=slack)
    full = []
    for place, capacity in enumerate(capacities):
        used = load(place, flows, found)
        assert used <= capacity + 1e-3
        full.append(used >= capacity - 1e-3)
    for (cap, uses), rate in zip(flows, found, strict=True):
        assert rate <= cap + 1e-3
        assert rate >= cap - 1e-3 or any(full[use.capacity] for use in uses)


# -- speed -----------------------------------------------------------------------------------------

demand_only = named({"lru_by_layer", "lru_global", "fifo"})


def duration_ns(case: Case, setup: Setup) -> int:
    return run_case(case, setup, log=False).end_ns


@demand_only
@LAW
@given(data=st.data(), factor=st.integers(2, 5))
def test_a_faster_link_or_memory_is_never_slower_on_demand(
    setup: Setup, data: st.DataObject, factor: int
) -> None:
    """One GPU, batch 1, nothing ahead of its time: copies and kernels keep their order whatever they take,

    so that every time is a maximum of sums of times. It is no law with several GPUs on one switch, nor
    where CPU experts share memory with copies, nor with prefetch: what comes sooner there may take a
    share, or a place in a queue, from what is needed more.
    """
    options: dict[str, Any] = {"most_gpus": 1, "batch": 1, "closed": True}
    case = data.draw(cases(setup, **options))
    rate = case.costs.h2d_bytes_per_s * factor
    costs = replace(case.costs, h2d_bytes_per_s=rate)
    faster = replace(case.with_hardware(h2d_bytes_per_s=rate), costs=costs)
    assert duration_ns(faster, setup) <= duration_ns(case, setup)
    memory = case.hardware.memory
    if memory is not None:
        rates = [rate * factor for rate in memory.dram_bytes_per_s]
        faster = case.with_hardware(memory=replace(memory, dram_bytes_per_s=rates))
        assert duration_ns(faster, setup) <= duration_ns(case, setup)


@demand_only
@LAW
@given(data=st.data(), factor=st.integers(2, 5))
def test_faster_storage_is_never_slower_on_demand(
    setup: Setup, data: st.DataObject, factor: int
) -> None:
    """As above, and with memory for both: a read that is faster may slow a copy that is needed more.

    Host memory inclusive: where copies wait for experts that go back, their order may change.
    """
    case = data.draw(tiered_cases(setup, most_gpus=1, batch=1, closed=True))
    case = replace(case, exclusive=False).with_hardware(memory=Memory((100 * BYTE_A_NS,)))
    slow, fast = (
        case.with_hardware(reading=Reading(Rising(rate), 16, 2)) for rate in (10**8, 10**8 * factor)
    )
    assert duration_ns(fast, setup) <= duration_ns(slow, setup)


@pytest.mark.parametrize("depth", [1, 2, 5])
@LAW
@given(data=st.data(), limit=st.integers(1, 9))
def test_prefetch_saves_no_more_than_the_lesser_of_all_copies_and_all_compute(
    depth: int, data: st.DataObject, limit: int
) -> None:
    """As in tests/test_laws_bounds.py: both runs carry the same copies, for the cache holds all."""
    hasty = Setup(
        lambda _: LRU(), lambda w: {"prefetch": Foresight(all_events(w), depth)}, demand_only=False
    )
    free: dict[str, Any] = {"setup_ns": 0, "gap_ns": 0, "issue_ns": 0, "staging_ns": ()}
    case = data.draw(cases(LAZY, most_gpus=1, closed=True, shared=False, **free))
    costs = replace(case.costs, grouped=False)
    case = replace(case, costs=costs, pool_bytes=case.pools.all_bytes, prefetch_limit=limit)
    plain = run_case(case, LAZY)
    saved_ns = plain.end_ns - duration_ns(case, hasty)
    compute_ns = sum(row["gpu_busy_ns"] for row in plain.steps())
    assert saved_ns <= min(plain.tables.busy_ns["h2d"], compute_ns)
