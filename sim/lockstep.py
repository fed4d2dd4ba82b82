"""The driver without time: every load arrives at once; exact hits and bytes, fast."""

from __future__ import annotations

from collections.abc import Callable

from sim.counter import StepCounter
from sim.offloader import Offloader
from sim.tables import Table
from sim.types import LayerPlan
from sim.workload import Workload


def run_lockstep(
    workload: Workload,
    offloader: Offloader,
    on_plan: Callable[[LayerPlan], None] | None = None,
    steps: Table | None = None,
    ledger: Table | None = None,
) -> StepCounter:
    """Run a workload through the Offloader; ``on_plan`` sees every plan. All times are 0.

    ``steps`` is where the step table's rows go; None: into memory. ``ledger`` is where those of the
    quality ledger go; None: none is kept.
    """
    counter = StepCounter(offloader.residency, steps, ledger)
    has_tiers = offloader.host is not None
    for step in workload.steps():
        shrink = offloader.begin_step(step.info)
        if shrink is not None:
            counter.add_given_up(shrink.evicts, shrink.cancels)
            counter.add_demotions(shrink.demotes)
            if shrink.demotes:
                offloader.on_host_arrived_at_once(shrink.demotes)
        for routing in workload.routings(step):
            plan = offloader.plan_layer(routing, 0)
            counter.add(plan)
            if on_plan is not None:
                on_plan(plan)
            if has_tiers and (plan.reads or plan.demotes):
                offloader.on_host_arrived_at_once([*plan.reads, *plan.demotes])
            if plan.loads:
                offloader.on_loaded_at_once(plan.loads)
            if plan.prefetches:
                offloader.on_loaded_at_once(plan.prefetches)
                counter.add_prefetches(plan.prefetches)
            admissions = offloader.end_layer(plan)
            if admissions:
                counter.add_admissions(admissions)
                if plan.demotes:
                    counter.add_demotions(plan.demotes)
                    offloader.on_host_arrived_at_once(plan.demotes)
        counter.end_step(step.info, offloader.view.stage, 0, 0)
    return counter
