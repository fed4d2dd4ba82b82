"""Decisions side by side: the executor without a clock against the driver without time, plan by plan.

Weights are tiny, for only decisions count; all else is as in the runs that are timed: copies, threads,
slots and kernels of the tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from real.replay import Replay, dense_work
from real.rig import build_executor, real_scenario
from real.store import Store
from real.validate_runs import Setting, config_of
from sim.counter import STEP_COLUMNS
from sim.lockstep import run_lockstep
from sim.offloader import Offloader
from sim.types import LayerPlan, LayerRouting

TINY = (
    *("model.hidden_size=64", "model.expert_intermediate_size=32", "model.vocab_size=64"),
    *("model.num_attention_heads=2", "model.num_kv_heads=1", "model.head_dim=16"),
)
"""Overrides that make a model's weights tiny; layers and experts are the trace's."""
_ORDERED = (
    *("resident", "late", "evicts", "loads", "bypasses", "on_cpu", "deferred"),
    *("prefetches", "cancels"),
)
_PLAIN = ("num_held", "bypass_slots", "hits_on_cpu", "packed")
_COUNTS = slice(STEP_COLUMNS.index("accesses"), STEP_COLUMNS.index("kernels"))
Content = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parity:
    """One policy in lockstep: ``difference`` is the first thing that was decided otherwise, or None."""

    tier: str
    batch_size: int
    ratio: float
    policy: str
    num_plans: int
    difference: str | None


def check_parity(
    setting: Setting, store: Store, machine: Mapping[str, Any], policy: str, ratio: float
) -> Parity:
    """Run a policy through both drivers and compare all plans, and what each step counts.

    ``setting`` and ``store`` are those of tiny experts (see :data:`TINY`); the workload runs to its end.
    """
    config = config_of(setting, policy, ratio, machine)
    plans: list[Content] = []
    scenario = real_scenario(config)
    counted = run_lockstep(
        *(scenario.workload, scenario.offloader), lambda plan: plans.append(content(plan))
    )
    carried, rows = _carried_out(setting, store, config)
    found = first_difference(plans, carried)
    if found is None:
        found = _counts_difference([row[_COUNTS] for row in counted.rows], rows)
    return Parity(setting.tier.kind, setting.batch_size, ratio, policy, len(plans), found)


def _carried_out(
    setting: Setting, store: Store, config: Mapping[str, Any]
) -> tuple[list[Content], list[tuple[int, ...]]]:
    """Return what the executor was told to do, and what it counted."""
    scenario = real_scenario(config)
    watched = _Watched(scenario.offloader)
    scenario = replace(scenario, offloader=watched)  # type: ignore[arg-type]
    with build_executor(scenario, store, setting.device, setting.tier, lockstep=True) as executor:
        dense = dense_work(scenario, setting.device, setting.form, setting.seed)
        replay = Replay(scenario, executor, dense)
        while replay.step() is not None:
            pass
        return watched.plans, [row[_COUNTS] for row in executor.tables.steps.rows]


class _Watched:
    """An Offloader whose plans are written down before anybody carries them out."""

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self.plans: list[Content] = []

    def plan_layer(self, routing: LayerRouting, now_ns: int) -> LayerPlan:
        """Decide, and note what."""
        plan = self._offloader.plan_layer(routing, now_ns)
        self.plans.append(content(plan))
        return plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._offloader, name)


def content(plan: LayerPlan) -> Content:
    """Return all that a plan decides, in its order, as plain values."""
    routing = plan.routing
    chosen = routing.topk_ids
    found: Content = {"layer": routing.layer, "experts": list(routing.experts)}
    found["topk_ids"] = None if chosen is None else np.asarray(chosen).tolist()
    found |= {name: list(getattr(plan, name)) for name in _ORDERED}
    found |= {name: getattr(plan, name) for name in _PLAIN}
    found["groups"] = None if plan.groups is None else [group.tolist() for group in plan.groups]
    return found


def first_difference(expected: Sequence[Content], carried: Sequence[Content]) -> str | None:
    """Return in words the first thing in which two sequences of plans differ; None if they are the same."""
    for index, (one, other) in enumerate(zip_longest(expected, carried)):
        if one is None or other is None:
            return f"{len(expected)} plans in lockstep, {len(carried)} carried out"
        for name, value in one.items():
            if other[name] != value:
                return (
                    f"plan {index} (layer {one['layer']}): {name} = {other[name]}: must be {value}"
                )
    return None


def _counts_difference(
    expected: Sequence[tuple[int, ...]], carried: Sequence[tuple[int, ...]]
) -> str | None:
    names = STEP_COLUMNS[_COUNTS]
    if len(expected) != len(carried):
        return f"{len(expected)} steps in lockstep, {len(carried)} carried out"
    for step, (row, other) in enumerate(zip(expected, carried, strict=True)):
        for name, value, counted in zip(names, row, other, strict=True):
            if value != counted:
                return f"step {step}: {name} = {counted}: must be {value}"
    return None
