"""The most hits any cache of a run's pools and sizes can have: Belady's optimum."""

from __future__ import annotations

from collections.abc import Hashable

from sim.build import Scenario
from sim.lockstep import run_lockstep
from sim.metrics import Totals
from sim.offloader import Offloader
from sim.policies.base import PolicySet
from sim.policies.oracle import Belady, NextUse

_known: dict[Hashable, float | None] = {}
"""Bounds of this process: in a sweep many policies share one."""


def belady_hit_rate(scenario: Scenario, trace_sha256: str) -> float | None:
    """Return the hit rate of Belady with bypass on a scenario's requests, pools and sizes.

    It begins with the best contents and has a staging slot for every miss of an event, so that no
    policy that loads on demand only has a higher rate, whatever it preloads (with prefetch it may).
    With experts of several sizes in one pool it is no bound but a good policy. The workload must be a
    closed loop, whose steps are known beforehand. None if it has no step.
    """
    budget, workload = scenario.budget, scenario.workload
    pools = (budget.pools, budget.pool_bytes, budget.joint)
    key = (trace_sha256, workload.key(), pools)
    if key not in _known:
        _known[key] = _replay(scenario)
    return _known[key]


def _replay(scenario: Scenario) -> float | None:
    budget, workload = scenario.budget, scenario.workload
    keys = scenario.offloader.residency.keys
    residency = budget.residency(keys)
    future = NextUse(routing for step in workload.steps() for routing in workload.routings(step))
    caches = [Belady(future, bypass=True, warm=True) for _ in budget.pool_bytes]
    offloader = Offloader(
        residency, PolicySet(caches), scenario.costs, keys.num_experts, joint=budget.joint
    )
    totals = Totals()
    for block in run_lockstep(workload, offloader).table.blocks():
        totals.add_steps(block)
    rate: float | None = totals.summary()["hit_rate"]
    return rate
