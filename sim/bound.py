"""What a run's hit rate is measured against: Belady's optimum, and replay expert by expert."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from sim.build import Scenario, build
from sim.lockstep import run_lockstep
from sim.metrics import Totals
from sim.offloader import Offloader
from sim.policies.base import PolicySet
from sim.policies.oracle import MOST_CHOICES, Belady, NextUse


class Optimum(NamedTuple):
    """Belady's hit rates: free to keep newcomers out, and forced to admit every miss.

    None: there is no step, or (``forced``) a pool cannot hold the experts of an event.
    """

    free: float | None
    forced: float | None


_known: dict[Hashable, Optimum] = {}
"""Optima of this process: in a sweep many policies share one."""


def optimum(scenario: Scenario, trace_sha256: str) -> Optimum:
    """Return the hit rates of Belady on a scenario's requests, pools and sizes.

    Both begin with the best contents. The free one has a staging slot for every miss of an event, so that
    no policy that loads on demand only has a higher rate, whatever it preloads (with prefetch it may).
    With experts of several sizes in one pool it is no bound but a good policy. The workload must be a
    closed loop, whose steps are known beforehand.
    """
    budget, workload = scenario.budget, scenario.workload
    key = (trace_sha256, workload.key(), budget.pools, budget.pool_bytes, budget.joint)
    if key not in _known:
        _known[key] = Optimum(_replay(scenario, True), _forced(scenario))
    return _known[key]


def yardsticks(
    config: Mapping[str, Any], scenario: Scenario, metrics: Mapping[str, Any], trace_sha256: str
) -> tuple[dict[str, float | None], list[str]]:
    """Return the columns that compare a run with other replays of its work, and why some are left out.

    ``metrics`` are the run's own. The columns are defined at the head of sim/metrics.py.
    """
    why_not, best = "", Optimum(None, None)
    output = config["output"]
    if scenario.workload.is_open:
        why_not = "with open arrivals the steps depend on the clock"
    elif scenario.offloader.policies.routing is not None:
        why_not = "this policy changes which experts are used"
    elif scenario.workload.num_choices > MOST_CHOICES:
        why_not = (
            f"it would keep all {scenario.workload.num_choices:.2g} choices of experts in memory"
        )
    elif output["belady"]:
        best = optimum(scenario, trace_sha256)
    wanted = [name for name in ("belady", "sequential") if output[name]]
    notes = [f"no {' nor '.join(wanted)} replay, for {why_not}"] if why_not and wanted else []
    hit_rate, columns = metrics["hit_rate"], dict[str, float | None]()
    columns["belady_hit_rate"], columns["belady_forced_hit_rate"] = best
    columns["belady_gap"] = _difference(best.free, hit_rate)
    columns["gap_by_admission"] = _difference(best.free, best.forced)
    columns["gap_by_victim"] = _difference(best.forced, hit_rate)
    if output["sequential"]:
        columns["sequential_miss_rate"] = None if why_not else sequential_miss_rate(config)
    return columns, notes


def _difference(better: float | None, worse: float | None) -> float | None:
    return None if better is None or worse is None else better - worse


def _forced(scenario: Scenario) -> float | None:
    pools, slots = scenario.budget.pools, scenario.workload.trace.meta.top_k
    sizes = zip(scenario.budget.pool_bytes, pools.largest_bytes, strict=True)
    if any(size // largest < pools.event_slots(slots) for size, largest in sizes):
        return None
    return _replay(scenario, False)


def _replay(scenario: Scenario, bypass: bool) -> float | None:
    budget, workload = scenario.budget, scenario.workload
    keys = scenario.offloader.residency.keys
    residency = budget.residency(keys)
    future = NextUse(routing for step in workload.steps() for routing in workload.routings(step))
    caches = [Belady(future, bypass=bypass, warm=True) for _ in budget.pool_bytes]
    offloader = Offloader(
        residency, PolicySet(caches), scenario.costs, keys.num_experts, joint=budget.joint
    )
    return replayed_rate(scenario, offloader, "hit_rate")


def sequential_miss_rate(config: Mapping[str, Any]) -> float | None:
    """Return the miss rate of a configuration that is replayed expert by expert, not layer by layer.

    An expert that is admitted may then push out one that the same layer still needs, which no engine
    does that protects a layer's experts: the rate is inflated (arXiv 2608.07911: by 27 to 29 % for LRU
    and LFRU, Qwen3-30B, batch 8). Accesses are the same distinct experts by layer and step.
    """
    scenario = build(config, one_by_one=True)
    return replayed_rate(scenario, scenario.offloader, "miss_rate")


def replayed_rate(scenario: Scenario, offloader: Offloader, name: str) -> float | None:
    """Return a rate of the summary ("hit_rate", ...) of a scenario's work, replayed without time."""
    totals = Totals()
    for block in run_lockstep(scenario.workload, offloader).table.blocks():
        totals.add_steps(block)
    rate: float | None = totals.summary()[name]
    return rate
