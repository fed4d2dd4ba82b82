"""One brain, two drivers: lockstep and timeline give the same plans wherever they must."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.counter import STEP_COLUMNS
from sim.lockstep import run_lockstep
from sim.types import LayerPlan
from sim.workload import Workload
from tests.doubles import SETUPS, Foresight, Preloaded, Setup
from tests.strategies import (
    FREE,
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
    workloads,
)

SAME = settings(LAW, max_examples=12)
_COUNTS = slice(STEP_COLUMNS.index("accesses"), STEP_COLUMNS.index("kernels"))


def content(plan: LayerPlan) -> tuple[Any, ...]:
    """Return all that a plan decides, in its order."""
    lists = (
        plan.resident,
        plan.late,
        plan.evicts,
        plan.loads,
        plan.bypasses,
        plan.on_cpu,
        plan.deferred,
        plan.prefetches,
    )
    groups = None if plan.groups is None else [group.tolist() for group in plan.groups]
    return (plan.routing.layer, *map(list, lists), plan.bypass_slots, plan.packed, groups)


def check_parity(setup: Setup, workload: Workload, memory: Memory, charged: ConstantCosts) -> None:
    plans: list[LayerPlan] = []
    still = build(workload, setup.policies(workload), memory, charged)
    counted = run_lockstep(workload, still, plans.append).rows
    timed = run_timeline(workload, setup.policies(workload), memory, charged)
    assert [content(plan) for plan in timed.plans] == [content(plan) for plan in plans]
    assert [row[_COUNTS] for row in timed.tables.steps.rows] == [row[_COUNTS] for row in counted]
    assert timed.offloader.residency.state == still.residency.state
    assert timed.offloader.wasted_prefetch_bytes == still.wasted_prefetch_bytes


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
@SAME
@given(data=st.data())
def test_with_no_latency_both_drivers_give_the_same_plans(
    setup: Setup, data: st.DataObject
) -> None:
    workload, memory = data.draw(workloads()), data.draw(memories(setup.per_layer, mixed=True))
    check_parity(setup, workload, memory, FREE)


_UNTIMED = {name: setup for name, setup in SETUPS.items() if not setup.timed}


@pytest.mark.parametrize("setup", _UNTIMED.values(), ids=_UNTIMED.keys())
@SAME
@given(data=st.data())
def test_with_latency_too_where_nothing_depends_on_arrival(
    setup: Setup, data: st.DataObject
) -> None:
    workload, memory = data.draw(workloads()), data.draw(memories(setup.per_layer, mixed=True))
    check_parity(setup, workload, memory, data.draw(costs()))


def test_with_latency_a_prefetch_may_come_late_and_the_plans_part() -> None:
    """Why the law above leaves prefetch out: what lockstep calls a hit is a late hit in time."""
    workload, memory, charged = one_request([[[0], [0]]]), Memory(8), ConstantCosts()

    def policies() -> Any:
        return only(Preloaded([0]), prefetch=Foresight(all_events(workload)))

    plans: list[LayerPlan] = []
    run_lockstep(workload, build(workload, policies(), memory, charged), plans.append)
    timed = run_timeline(workload, policies(), memory, charged).plans
    assert (list(plans[1].resident), list(plans[1].late)) == ([4], [])
    assert (list(timed[1].resident), list(timed[1].late)) == ([], [4])
