"""Tiny runs of the real backend for tests: a trace with all columns, watched layer by layer.

Every layer's output is compared with one computed in float64 by plain formulas, and every slot with what the
Residency says, whatever else a test looks at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from real.dense import DenseWork
from real.device import open_device
from real.executor import Executor
from real.replay import Replay
from real.rig import (
    Tier,
    build_executor,
    real_scenario,
)
from real.store import Store
from real.store_file import FileStore
from sim.build import Scenario
from sim.counter import STEP_COLUMNS
from sim.events import EventLog
from sim.lockstep import run_lockstep
from sim.metrics import RunTables
from sim.residency import ABSENT
from sim.types import LayerPlan, LayerRouting
from tests.real_cases import (
    DECODED,
    EXPERTS,
    FORMAT,
    LAYERS,
    PROMPT,
    TIERS,
    Reference,
    ram_store,
    reference,
    store_of,
    tiny_trace,
)

_COUNTS = slice(STEP_COLUMNS.index("accesses"), STEP_COLUMNS.index("kernels"))


# -- what a plan decides ---------------------------------------------------------------------------

_LISTS = ("resident", "late", "evicts", "loads", "bypasses", "on_cpu", "deferred", "prefetches")
_NUMBERS = ("num_held", "bypass_slots", "hits_on_cpu", "packed")


def decided(plan: LayerPlan) -> dict[str, Any]:
    """Return all that a plan decides, as values that do not change any more."""
    found: dict[str, Any] = {name: list(getattr(plan, name)) for name in (*_LISTS, "cancels")}
    found |= {name: getattr(plan, name) for name in _NUMBERS}
    groups = None if plan.groups is None else [group.tolist() for group in plan.groups]
    found |= {"experts": list(plan.routing.experts), "groups": groups}
    return found | {"num_tokens": [plan.routing.num_tokens(key) for key in plan.routing.experts]}


def listen(scenario: Scenario, told: list[dict[str, Any]]) -> None:
    """Let an offloader tell what it decides: a dictionary a layer."""
    offloader = scenario.offloader
    plan_layer, end_layer = offloader.plan_layer, offloader.end_layer

    def planned(routing: LayerRouting, now_ns: int) -> LayerPlan:
        plan = plan_layer(routing, now_ns)
        told.append({"layer": routing.layer, **decided(plan)})
        return plan

    def ended(plan: LayerPlan) -> Any:
        admissions = end_layer(plan)
        told[-1]["admissions"] = [(one.key, list(one.evicts)) for one in admissions]
        return admissions

    offloader.plan_layer = planned  # type: ignore[method-assign]
    offloader.end_layer = ended  # type: ignore[method-assign]


@dataclass
class Expected:
    """What ``run_lockstep`` decides and counts."""

    plans: list[dict[str, Any]]
    counts: list[tuple[int, ...]]
    state: bytes

    @property
    def has_prefetches(self) -> bool:
        """Tell whether anything came that nobody waited for, so that decisions depend on when."""
        return any(plan["prefetches"] for plan in self.plans)


def expected(config: Mapping[str, Any]) -> Expected:
    """Run a configuration without a clock."""
    scenario, plans = real_scenario(config, tiny_trace()), list[dict[str, Any]]()
    listen(scenario, plans)
    rows = run_lockstep(scenario.workload, scenario.offloader).rows
    return Expected(
        plans, [row[_COUNTS] for row in rows], bytes(scenario.offloader.residency.state)
    )


# -- a watched run ---------------------------------------------------------------------------------


@dataclass
class Run:
    """A real run under watch: what was decided, and tables as the simulator's."""

    scenario: Scenario
    executor: Executor
    replay: Replay
    plans: list[dict[str, Any]] = field(default_factory=list)
    num_layers_checked: int = 0
    num_owed: int = 0
    """Layers whose deferred experts came one layer later."""

    def play(self) -> Run:
        """Run all steps, and close."""
        with self.executor:
            while self.replay.step() is not None:
                pass
        return self

    @property
    def counts(self) -> list[tuple[int, ...]]:
        """What every step has counted, without times."""
        return [row[_COUNTS] for row in self.executor.tables.steps.rows]

    @property
    def totals(self) -> dict[str, int]:
        """What all steps together have counted."""
        sums = np.array(self.counts).sum(axis=0).tolist()
        return dict(zip(STEP_COLUMNS[_COUNTS], sums, strict=True))


def run_of(
    config: Mapping[str, Any],
    store: Store,
    tier: Tier,
    *,
    lockstep: bool = False,
    events: bool = False,
    watch: bool = True,
) -> Run:
    """Return a run that has not begun; ConfigError for what cannot be run for real."""
    scenario = real_scenario(config, tiny_trace())
    plans: list[dict[str, Any]] = []
    listen(scenario, plans)
    log = EventLog(EXPERTS, num_layers=LAYERS) if events else None
    tables, device = RunTables(events=log), open_device("cpu")
    executor = build_executor(scenario, store, device, tier, tables, lockstep=lockstep)
    places = scenario.workload.limits.places
    dense = DenseWork(scenario.shape, device, FORMAT.compute_dtype, places, PROMPT + DECODED)
    run = Run(scenario, executor, Replay(scenario, executor, dense), plans)
    if watch:
        _watch(run, reference(store.num_copies > 1))
    return run


def ram_run(config: Mapping[str, Any], **how: Any) -> Run:
    """Return a run over host memory that has not begun; ``how`` as in :func:`run_of`."""
    return run_of(config, ram_store(bool(config["policy"].get("low"))), TIERS["ram"], **how)


def _watch(run: Run, exact: Reference) -> None:
    """Check every layer's output and slots as it ends."""
    executor, residency = run.executor, run.scenario.offloader.residency
    run_layer, plan_layer = executor.run_layer, executor.offloader.plan_layer
    plans: list[LayerPlan] = []
    owed: list[Tensor] = []
    cpu_overlaps = run.scenario.costs.engine.cpu_overlaps

    def planned(routing: LayerRouting, now_ns: int) -> LayerPlan:
        plans[:] = [plan_layer(routing, now_ns)]
        return plans[0]

    def watched(routing: LayerRouting, hidden: Tensor, *rest: Any) -> Tensor:
        found = run_layer(routing, hidden, *rest)
        (plan,) = plans
        waits = routing.layer < LAYERS - 1 and cpu_overlaps
        later = list(plan.deferred) if waits else []
        now = [key for key in plan.routing.experts if key not in later]
        wanted = exact.output(plan.routing, hidden, now, LAYERS)
        if owed:
            wanted += owed.pop()
            run.num_owed += 1
        if later:
            owed.append(exact.output(plan.routing, hidden, later, LAYERS))
        error = (found.double() - wanted).abs().max()
        assert error <= 1e-5 * max(float(wanted.abs().max()), 1e-3)
        here = {key for key, state in enumerate(residency.state) if state != ABSENT}
        assert executor.parts.arena.keys() == here
        run.num_layers_checked += 1
        return found

    executor.offloader.plan_layer = planned  # type: ignore[method-assign]
    executor.run_layer = watched  # type: ignore[method-assign]


def play(config: Mapping[str, Any], tier: str = "ram", folder: Path = Path(), **how: Any) -> Run:
    """Run a configuration from begin to end; ``how`` as in :func:`run_of`."""
    store = store_of(config, tier, folder)
    try:
        return run_of(config, store, TIERS[tier], **how).play()
    finally:
        if isinstance(store, FileStore):
            store.close()


def check_same(run: Run, wanted: Expected) -> None:
    """Check that a run has decided and counted what one without a clock does."""
    for number, (found, plan) in enumerate(zip(run.plans, wanted.plans, strict=True)):
        assert found == plan, f"plan {number}"
    assert run.num_layers_checked == len(wanted.plans)
    assert run.counts == wanted.counts
    assert bytes(run.scenario.offloader.residency.state) == wanted.state
