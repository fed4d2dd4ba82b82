"""The most hits any cache of a run's pools and sizes can have: Belady's optimum."""

from __future__ import annotations

from collections.abc import Hashable

from sim.build import Scenario
from sim.lockstep import run_lockstep
from sim.metrics import summarise
from sim.offloader import Offloader
from sim.policies.base import PolicySet
from sim.policies.oracle import Belady, NextUse
from sim.residency import Residency

_known: dict[Hashable, float] = {}
"""Bounds of this process: in a sweep many policies share one."""


def belady_hit_rate(scenario: Scenario, trace_sha256: str) -> float:
    """Return the hit rate of Belady with bypass on a scenario's requests, pools and sizes.

    It begins with the best contents and has a staging slot for every miss of an event, so that no
    policy that loads on demand only has a higher rate, whatever it preloads (with prefetch it may).
    With experts of several sizes in one pool it is no bound but a good policy.
    """
    budget, workload = scenario.budget, scenario.workload
    requests = tuple(request.request_id for request in workload.requests)
    pools = (budget.layer_bytes, budget.pool_of_layer, budget.pool_bytes)
    key = (trace_sha256, requests, workload.batch_size, pools)
    if key not in _known:
        _known[key] = _replay(scenario)
    return _known[key]


def _replay(scenario: Scenario) -> float:
    budget, workload = scenario.budget, scenario.workload
    keys = scenario.offloader.residency.keys
    residency = Residency(keys, budget.layer_bytes, budget.pool_of_layer, budget.pool_bytes)
    future = NextUse(routing for step in workload.steps() for routing in workload.routings(step))
    caches = [Belady(future, bypass=True, warm=True) for _ in budget.pool_bytes]
    offloader = Offloader(residency, PolicySet(caches), scenario.costs, keys.num_experts)
    steps = run_lockstep(workload, offloader).rows
    return float(summarise(steps, [])["hit_rate"])
