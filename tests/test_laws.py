"""Laws of any run: they hold for every policy set, workload, size of memory and set of costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.events import Kind, Lane
from sim.residency import Residency
from sim.types import LayerPlan
from sim.workload import Workload
from tests.doubles import SETUPS, Setup, SplitTokens
from tests.strategies import (
    LAW,
    ConstantCosts,
    Memory,
    Run,
    costs,
    memories,
    only,
    run_timeline,
    workloads,
)
from traces.schema import NO_EXPERT

FEWER = settings(LAW, max_examples=8)
"""For laws that run over every setup."""

every_setup = pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())


def any_run(data: st.DataObject, setup: Setup, kind: type[Residency] = Residency) -> Run:
    """Draw all that a run depends on, and run it."""
    workload, memory = data.draw(workloads()), data.draw(memories(setup.per_layer, mixed=True))
    return run_timeline(workload, setup.policies(workload), memory, data.draw(costs()), kind)


def served(plan: LayerPlan) -> list[int]:
    """Return every expert the plan computes, however it is served."""
    on_gpu = [*plan.resident, *plan.late, *plan.loads, *plan.bypasses]
    return [*on_gpu, *plan.on_cpu, *plan.deferred]


def chosen_tokens(workload: Workload) -> Counter[tuple[int, int, int]]:
    """Return the tokens of each (step, layer, expert), straight from the trace."""
    found: Counter[tuple[int, int, int]] = Counter()
    for step in workload.steps():
        ids = workload.trace.expert_ids[step.rows]
        for token, layer, slot in np.argwhere(ids != NO_EXPERT).tolist():
            found[step.info.step, layer, int(ids[token, layer, slot])] += 1
    return found


@every_setup
@FEWER
@given(data=st.data())
def test_each_chosen_expert_of_each_token_is_computed_exactly_once(
    setup: Setup, data: st.DataObject
) -> None:
    workload, memory = data.draw(workloads()), data.draw(memories(setup.per_layer, mixed=True))
    run = run_timeline(workload, setup.policies(workload), memory, data.draw(costs()))
    for plan in run.plans:
        assert Counter(served(plan)) == Counter(plan.routing.experts)
    rows = [row for row in run.rows if row[4] == Kind.EXPERT]
    computed = {(step, layer, expert): tokens for *_, step, layer, expert, tokens, _ in rows}
    assert len(computed) == len(rows), "an expert computes once an event, in each precision"
    assert of_either_copy(computed, workload.num_experts) == chosen_tokens(workload)


def of_either_copy(
    computed: Mapping[tuple[int, int, int], int], num_experts: int
) -> Counter[tuple[int, int, int]]:
    """Return the tokens of each (step, layer, expert), whether its low-precision copy served them or not."""
    found: Counter[tuple[int, int, int]] = Counter()
    for (step, layer, expert), tokens in computed.items():
        found[step, layer, expert % num_experts] += tokens
    return found


class Audited(Residency):
    """Checks after every change that bytes add up and fit."""

    def _audit(self) -> None:
        used = [0] * len(self.capacity_bytes)
        for key, state in enumerate(self.state):
            if state:
                layer = key // self.keys.num_experts
                used[self.pool_of_layer[layer]] += self.layer_bytes[layer]
        for pool, capacity in enumerate(self.capacity_bytes):
            assert self.used_bytes(pool) == used[pool] <= capacity

    def reserve(self, key: int) -> None:
        super().reserve(key)
        self._audit()

    def complete(self, key: int) -> None:
        super().complete(key)
        self._audit()

    def evict(self, key: int) -> int:
        size = super().evict(key)
        self._audit()
        return size


@every_setup
@FEWER
@given(data=st.data())
def test_resident_and_loading_bytes_never_exceed_capacity(
    setup: Setup, data: st.DataObject
) -> None:
    any_run(data, setup, Audited)


@every_setup
@FEWER
@given(data=st.data())
def test_no_expert_in_use_is_evicted_and_nothing_absent_is(
    setup: Setup, data: st.DataObject
) -> None:
    run = any_run(data, setup)
    for plan in run.plans:
        assert not set(plan.evicts) & set(plan.routing.experts)
        assert len(set(plan.evicts)) == len(plan.evicts)


@every_setup
@FEWER
@given(data=st.data())
def test_the_clock_never_falls_and_all_time_is_accounted_for(
    setup: Setup, data: st.DataObject
) -> None:
    run = any_run(data, setup)
    run.check_accounts()
    steps = run.steps()
    assert steps[0]["start_ns"] == 0
    for before, after in pairwise(steps):
        assert before["start_ns"] <= before["end_ns"] == after["start_ns"]
    ends = [row[1] for row in run.rows if row[2] != Lane.H2D]
    assert max(ends) == steps[-1]["end_ns"]


@every_setup
@FEWER
@given(data=st.data())
def test_a_lane_never_does_two_things_at_once(setup: Setup, data: st.DataObject) -> None:
    run = any_run(data, setup)
    for unit in {row[2:4] for row in run.rows}:
        spans = sorted(row[:2] for row in run.rows if row[2:4] == unit)
        assert all(start <= end for start, end in spans)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


@every_setup
@FEWER
@given(data=st.data())
def test_an_expert_computes_only_after_its_copy_arrived(setup: Setup, data: st.DataObject) -> None:
    run = any_run(data, setup)
    arrived: dict[tuple[int, int], int] = {}
    for start, end, lane, _, kind, _, layer, expert, *_ in run.rows:
        if lane == Lane.H2D:
            arrived[layer, expert] = end
        elif lane == Lane.GPU and kind == Kind.EXPERT:
            assert start >= arrived.get((layer, expert), 0)


@every_setup
@FEWER
@given(data=st.data())
def test_what_the_plan_loads_is_what_the_link_carries(setup: Setup, data: st.DataObject) -> None:
    """All that is demanded is carried; a prefetch may still wait in its queue when the run ends."""
    run = any_run(data, setup)
    for kind, name in ((Kind.LOAD, "loads"), (Kind.BYPASS, "bypasses")):
        carried = Counter((row[5], row[6], row[7]) for row in run.rows if row[4] == kind)
        assert carried == planned(run, name)
    prefetched = sum(row[4] == Kind.PREFETCH for row in run.rows)
    left = sum(map(run.offloader.residency.is_loading, range(len(run.offloader.residency.keys))))
    assert prefetched <= planned(run, "prefetches").total() <= prefetched + left


def planned(run: Run, name: str) -> Counter[tuple[int, int, int]]:
    """Return what plans list under ``name``, by (step, layer, expert)."""
    keys = run.offloader.residency.keys
    return Counter(
        (event // keys.num_layers, keys.unpack(key).layer, key % keys.num_experts + low)
        for event, plan in enumerate(run.plans)
        for key in getattr(plan, name)
        for low in [keys.num_experts * keys.is_low(key)]
    )


@every_setup
@FEWER
@given(data=st.data())
def test_no_more_experts_are_staged_than_there_are_staging_slots(
    setup: Setup, data: st.DataObject
) -> None:
    """A slot is held from the copy's start to the compute's end; the first ``num_held`` to the last one's."""
    memory = data.draw(memories(setup.per_layer))
    workload = data.draw(workloads())
    run = run_timeline(workload, setup.policies(workload), memory, data.draw(costs()))
    for plan, spans in zip(run.plans, bypass_spans(run), strict=True):
        last = max((end for _, end in spans), default=0)
        held = [(a, last if i < plan.num_held else b) for i, (a, b) in enumerate(spans)]
        for moment, _ in held:
            assert sum(a <= moment < b for a, b in held) <= memory.staging_slots


def bypass_spans(run: Run) -> Iterator[list[tuple[int, int]]]:
    """Yield for each plan the (copy start, compute end) of its bypasses, in their order."""
    begun: dict[tuple[int, ...], int] = {}
    spans: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for start, end, lane, _, kind, step, layer, expert, *_ in run.rows:
        if kind == Kind.BYPASS:
            begun[step, layer, expert] = start
        elif kind == Kind.EXPERT and lane == Lane.GPU and (step, layer, expert) in begun:
            spans[step, layer].append((begun[step, layer, expert], end))
    num_layers = run.offloader.residency.keys.num_layers
    for event in range(len(run.plans)):
        yield spans[divmod(event, num_layers)]


@every_setup
@FEWER
@given(data=st.data())
def test_the_same_run_twice_leaves_the_same_tables(setup: Setup, data: st.DataObject) -> None:
    workload, memory = data.draw(workloads()), data.draw(memories(setup.per_layer, mixed=True))
    charged = data.draw(costs())
    first, second = (
        run_timeline(workload, setup.policies(workload), memory, charged) for _ in range(2)
    )
    assert first.rows == second.rows
    assert first.tables.steps.rows == second.tables.steps.rows
    assert first.tables.requests.rows == second.tables.requests.rows


@FEWER
@given(workload=workloads(), slots=st.integers(0, 20), groups=st.integers(1, 4))
def test_a_repack_is_a_partition(workload: Workload, slots: int, groups: int) -> None:
    policies = only(SETUPS["lru_global"].cache(workload), repack=SplitTokens(groups))
    run = run_timeline(workload, policies, Memory(slots), ConstantCosts())
    tokens = [step.info.num_tokens for step in workload.steps() for _ in range(workload.num_layers)]
    for plan, num_tokens in zip(run.plans, tokens, strict=True):
        assert plan.groups is not None
        assert sorted(np.concatenate(plan.groups).tolist()) == list(range(num_tokens))
