"""The driver without time: every load arrives at once; exact hits and bytes, fast."""

from __future__ import annotations

from collections.abc import Callable

from sim.metrics import StepCounter
from sim.offloader import Offloader
from sim.types import LayerPlan
from sim.workload import Workload


def run_lockstep(
    workload: Workload, offloader: Offloader, on_plan: Callable[[LayerPlan], None] | None = None
) -> StepCounter:
    """Run a workload through the Offloader; ``on_plan`` sees every plan. All times are 0."""
    counter = StepCounter(offloader.residency)
    for step in workload.steps():
        offloader.begin_step(step.info)
        for routing in workload.routings(step):
            plan = offloader.plan_layer(routing, 0)
            counter.add(plan)
            if on_plan is not None:
                on_plan(plan)
            if plan.loads:
                offloader.on_loaded_at_once(plan.loads)
            if plan.prefetches:
                offloader.on_loaded_at_once(plan.prefetches)
                counter.add_prefetches(plan.prefetches)
            admissions = offloader.end_layer(plan)
            if admissions:
                counter.add_admissions(admissions)
        counter.end_step(step.info, offloader.view.stage, 0, 0)
    return counter
