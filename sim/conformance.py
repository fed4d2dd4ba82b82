"""What must hold of every policy, yours included: checks on short runs of a recorded trace.

Each check takes a configuration and either returns what it saw, in a few words, or raises
:class:`Violation`, which says what was done, where, and what must hold instead.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sim.bound import optimum, replayed_rate
from sim.build import Scenario, build, load_trace
from sim.events import EventLog
from sim.lockstep import run_lockstep
from sim.metrics import RunTables
from sim.simulate import file_sha256
from sim.timeline import Timeline
from sim.types import ConfigError, LayerPlan
from traces.schema import NO_EXPERT, Trace

SIZES = ((0.125, 1), (0.25, 3), (1.0, 1))
"""Cache ratio and batch size of the runs that look at every plan."""
_LENGTH = (6, 24)  # three such requests are long enough for a stage to end
_TOLERANCE = 1e-9


class Violation(AssertionError):  # noqa: N818  # a finding, not a failure of the program
    """A policy does what no policy may; the message says what."""


class NotAsked(Exception):  # noqa: N818  # no error: the check does not concern this policy
    """Says why a check has nothing to say about a policy."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check: ``verdict`` is "ok", "fails" or "does not apply"."""

    check: str
    verdict: str
    detail: str


def short_run(config: Mapping[str, Any], ratio: float = 0.25, batch: int = 1) -> dict[str, Any]:
    """Return a configuration of three short requests, at one cache size and batch size."""
    made = deepcopy(dict(config))
    made["cache"]["ratio"] = ratio
    made["workload"] |= {"batch_size": batch, "length": list(_LENGTH), "requests": None}
    trace = load_trace(made["trace"]["path"])
    if trace.num_requests > 3:
        first = trace.num_requests - 3
        made["workload"]["requests"] = [first, trace.num_requests]
        made["calibration"]["requests"] = [0, min(8, first)]
    made["output"] |= {"belady": False, "perfetto": None, "what_if": False, "sequential": False}
    return made


def timed(scenario: Scenario, on_plan: Callable[[LayerPlan], None] | None = None) -> RunTables:
    """Run a scenario on the timeline, events and all."""
    tables = RunTables(events=EventLog(scenario.workload.num_experts))
    parts = (scenario.workload, scenario.offloader, scenario.costs, scenario.hardware)
    return Timeline(*parts, tables=tables, on_plan=on_plan).run()


def served(plan: LayerPlan) -> list[int]:
    """Return every expert that a plan computes, however it is served."""
    lists = (plan.resident, plan.late, plan.loads, plan.bypasses, plan.on_cpu, plan.deferred)
    return [key for keys in lists for key in keys]


# -- the checks ------------------------------------------------------------------------------------


def serves_each_expert_once_within_memory(config: Mapping[str, Any]) -> str:
    """Hold each plan against its routing, and memory against its capacity at each event."""
    count = 0
    for ratio, batch in SIZES:
        scenario = build(short_run(config, ratio, batch))
        plans = Watch(scenario)
        timed(scenario, plans)
        count += plans.count
    sizes = ", ".join(f"{ratio:g} (batch {batch})" for ratio, batch in SIZES)
    return f"{count} plans at cache ratios {sizes}"


class Watch:
    """Checks plans as they come; ``capacities`` are the sizes that all pools together have had, in bytes."""

    def __init__(self, scenario: Scenario) -> None:
        self.count = 0
        self.capacities: set[int] = set()
        self._residency = scenario.offloader.residency

    def __call__(self, plan: LayerPlan) -> None:
        """Raise Violation if a plan, or memory at this moment, is not as it must be."""
        self.count += 1
        self.capacities.add(sum(self._residency.capacity_bytes))
        if Counter(served(plan)) != Counter(plan.routing.experts):
            raise Violation(
                f"layer {plan.routing.layer}: computes {sorted(served(plan))}, must compute each of "
                f"{sorted(plan.routing.experts)} once"
            )
        for pool, capacity in enumerate(self._residency.capacity_bytes):
            if not 0 <= self._residency.used_bytes(pool) <= capacity:
                used = self._residency.used_bytes(pool)
                raise Violation(f"pool {pool}: uses {used} bytes, must be <= {capacity}")


def runs_twice_alike(config: Mapping[str, Any]) -> str:
    """Compare all tables of two runs."""
    first, again = (timed(build(short_run(config, batch=3))) for _ in range(2))
    assert first.events is not None
    assert again.events is not None
    tables = ((first.steps, again.steps), (first.requests, again.requests))
    if any(a.rows != b.rows for a, b in tables) or first.events.rows != again.events.rows:
        raise Violation("two runs of the same configuration differ, must be equal row by row")
    return "steps, requests and events are equal, batch 3"


def counts_alike_with_and_without_time(config: Mapping[str, Any]) -> str:
    """Compare the decisions on the timeline with those in lockstep."""
    scenario = build(short_run(config))
    policies = scenario.offloader.policies
    if policies.prefetch is not None or policies.stages is not None:
        raise NotAsked("loads ahead arrive by the clock, so that decisions may depend on it")
    on_time, untimed = list[Any](), list[Any]()
    timed(scenario, lambda plan: on_time.append(_decisions(plan)))
    fresh = build(short_run(config))
    run_lockstep(fresh.workload, fresh.offloader, lambda plan: untimed.append(_decisions(plan)))
    _same(on_time, untimed, "with and without time")
    return f"{len(untimed)} plans are equal"


def does_not_know_the_future(config: Mapping[str, Any]) -> str:
    """Change what routers choose in the later half of a run; what was decided before must not change."""
    config = short_run(config)
    scenario = build(config)
    if scenario.offloader.policies.oracle:
        raise NotAsked("it says that it knows the future (oracle = True)")
    steps = list(scenario.workload.steps())
    half = len(steps) // 2
    early = {row for step in steps[:half] for row in step.rows.tolist()}
    late = {row for step in steps[half:] for row in step.rows.tolist()} - early
    other = build(config, trace=_changed(scenario.workload.trace, sorted(late)))
    num_plans = half * scenario.workload.num_layers
    ours, theirs = (_lockstep_decisions(one)[:num_plans] for one in (scenario, other))
    _same(ours, theirs, "of runs that differ only later")
    return f"{num_plans} plans do not depend on {len(late)} later tokens"


def says_so_when_it_changes_the_answer(config: Mapping[str, Any]) -> str:
    """Look whether any plan computes something else than the router chose."""
    scenario = build(short_run(config, batch=3))
    changed = 0

    def look(plan: LayerPlan) -> None:
        nonlocal changed
        changed += plan.routing is not plan.recorded or bool(plan.deferred)

    try:
        run_lockstep(scenario.workload, scenario.offloader, look)
    except ConfigError as error:  # the Offloader takes no such answer from an unmarked class
        raise Violation(str(error)) from error
    if scenario.offloader.policies.lossy:
        return f"it is marked lossy; {changed} events were not computed as routed"
    return "every event is computed as routed"


def has_no_more_hits_than_the_optimum(config: Mapping[str, Any]) -> str:
    """Compare hits with Belady's, for a policy that loads on demand only."""
    config = short_run(config)
    scenario = build(config)
    policies = scenario.offloader.policies
    if policies.prefetch is not None or policies.stages is not None or policies.lossy:
        raise NotAsked("Belady bounds lossless policies that load on demand only")
    rate = replayed_rate(scenario, scenario.offloader, "hit_rate")
    best = optimum(build(config), file_sha256(config["trace"]["path"])).free
    assert rate is not None
    assert best is not None
    if rate > best + _TOLERANCE:
        raise Violation(f"hit rate {rate:.4f} exceeds Belady's {best:.4f}, must not")
    return f"hit rate {rate:.3f}, optimum {best:.3f}"


def lives_with_less_memory(config: Mapping[str, Any]) -> str:
    """Let a growing KV cache take a slot back while the run goes on."""
    config = short_run(config, batch=3)
    if config["policy"].get("sizing") or config["policy"].get("low"):
        raise NotAsked("its memory is divided beforehand")
    if config["policy"].get(
        "prefetch_limit"
    ):  # pools keep room for as many: leave them some to lose
        config["policy"]["prefetch_limit"] = 1
    budget = build(config).budget
    config["cache"]["joint_bytes"] = budget.cache_bytes + budget.kv_bytes // 2
    scenario = build(config)
    watch = Watch(scenario)
    timed(scenario, watch)
    if len(watch.capacities) < 2:
        raise Violation("the pools kept their size, must have shrunk: a defect of this check")
    return f"pools shrank from {max(watch.capacities)} to {min(watch.capacities)} bytes on the way"


CHECKS: Sequence[Callable[[Mapping[str, Any]], str]] = (
    serves_each_expert_once_within_memory,
    runs_twice_alike,
    counts_alike_with_and_without_time,
    does_not_know_the_future,
    says_so_when_it_changes_the_answer,
    has_no_more_hits_than_the_optimum,
    lives_with_less_memory,
)


def findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Run every check on a configuration's policy and yield the outcomes as they come.

    Whatever a policy raises while it runs fails the check and ends the suite: it would only do so again.
    Raises ConfigError if it cannot be built.
    """
    build(short_run(config))
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            yield Finding(name, "ok", check(config))
        except NotAsked as reason:
            yield Finding(name, "does not apply", str(reason))
        except Violation as violation:
            yield Finding(name, "fails", str(violation))
        except Exception as error:  # a user's policy may fail in any way
            yield Finding(name, "fails", f"{_where(error)}: {type(error).__name__}: {error}")
            return


def _where(error: Exception) -> str:
    """Return the last place in a traceback that is not the project's own, for there the mistake is."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(__file__).parent
    theirs = [
        frame
        for frame in frames
        if ours not in Path(frame.filename).parents
        and "simpy" not in Path(frame.filename).parts
        and "<" not in frame.filename
    ]
    frame = theirs[-1] if theirs else frames[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


# -- what the checks share -------------------------------------------------------------------------


_LISTS = (
    *("resident", "late", "loads", "bypasses", "on_cpu", "deferred"),
    *("prefetches", "evicts", "cancels"),
)


def _decisions(plan: LayerPlan) -> tuple[Any, ...]:
    return (plan.routing.layer, *(tuple(getattr(plan, name)) for name in _LISTS))


def _lockstep_decisions(scenario: Scenario) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    run_lockstep(scenario.workload, scenario.offloader, lambda plan: found.append(_decisions(plan)))
    return found


def _same(ones: Sequence[Any], others: Sequence[Any], what: str) -> None:
    for event, (one, other) in enumerate(zip(ones, others, strict=True)):
        if one != other:
            raise Violation(
                f"event {event}, layer {one[0]}: the plans {what} differ, must be equal: {one[1:]} and "
                f"{other[1:]} ({', '.join(_LISTS)})"
            )


def _changed(trace: Trace, rows: Sequence[int]) -> Trace:
    """Return a trace whose ``rows`` have other experts, logits, weights, early gates, text and stages."""
    num_experts, changes = trace.meta.num_experts, dict[str, Any]()
    changed = set(rows)
    for name in set(trace.columns) - {"request_id", "position", "phase", "step", "token_id"}:
        column = getattr(trace, name)
        if name == "text":
            changes[name] = ["\nWait" if row in changed else t for row, t in enumerate(column)]
            continue
        part = column[rows]
        if name == "stage":
            part = np.full_like(part, -1)
        elif name in ("router_logits", "expert_weights"):
            part = np.roll(part, 1, axis=2)
        else:
            part = np.where(part == NO_EXPERT, part, (part + 1) % num_experts)
        changes[name] = column.copy()
        changes[name][rows] = part
    return replace(trace, **changes)
