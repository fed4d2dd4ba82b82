"""Predicts runs that were measured, from what reference runs of the same minutes showed, and compares."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from real.observed import sum_of
from real.rig import real_scenario
from real.validate_machine import beliefs, machine_of, python_ns
from real.validate_runs import Run, Setting, config_of, decode_ns
from sim.counter import STEP_COLUMNS
from sim.lockstep import run_lockstep
from sim.offloader import Offloader
from sim.simulate import simulate
from sim.types import LayerPlan, LayerRouting

_COUNTS = (
    *("accesses", "hits", "late_hits", "loads", "bypasses", "on_cpu", "prefetches"),
    *("admissions", "evictions", "demand_bytes", "prefetch_bytes"),
)
RESOURCES = ("gpu_busy_ns", "link_stall_ns", "storage_stall_ns", "cpu_stall_ns", "host_stall_ns")


@dataclass(frozen=True, slots=True)
class Compared:
    """One run, measured and predicted; times are of a decode step, in the mean, ns.

    noise       relative standard error of the measured time over the prediction, turn by turn
    counts      by name, (predicted, measured) over all steps
    resources   by cause, (predicted, measured) a decode step, ns
    times_matter    decisions depend on when copies come: there were copies that nobody waited for
    """

    tier: str
    batch_size: int
    ratio: float
    policy: str
    measured_ns: float
    predicted_ns: float
    noise: float
    num_steps: int
    counts: Mapping[str, tuple[int, int]]
    resources: Mapping[str, tuple[float, float]]
    times_matter: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_ns / self.measured_ns - 1

    @property
    def counts_equal(self) -> bool:
        """Tell whether hits, insertions and bytes are the same."""
        return all(predicted == measured for predicted, measured in self.counts.values())


def deciding_ns(config: Mapping[str, Any]) -> float:
    """Return how long one decision of a run's policy takes, in the mean, without anything beside it."""
    scenario = real_scenario(config)
    timed = _Timed(scenario.offloader)
    run_lockstep(scenario.workload, timed)  # type: ignore[arg-type]
    return timed.total_ns / max(1, timed.count)


class _Timed:
    """An Offloader whose decisions are timed."""

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self.total_ns = self.count = 0

    def plan_layer(self, routing: LayerRouting, now_ns: int) -> LayerPlan:
        """Decide, and take the time."""
        begin_ns = time.perf_counter_ns()
        plan = self._offloader.plan_layer(routing, now_ns)
        self.total_ns += time.perf_counter_ns() - begin_ns
        self.count += 1
        return plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._offloader, name)


def predict(
    setting: Setting,
    runs: Sequence[Run],
    references: Sequence[Run],
    believed: Mapping[str, Any],
) -> list[Compared]:
    """Return the runs as the simulator predicts them from what the references showed.

    ``believed`` is the machine that the policies' estimates of costs went by.
    """
    dry_ns = {run.policy: deciding_ns(run.config) for run in (*references, *runs)}
    found = []
    for own in _by_host_path(runs):
        shown = [run for run in references if _uses_host(run) == _uses_host(own[0])] or references
        seen = sum_of(run.observed for run in references)
        seen.python = sum_of(run.observed for run in shown).python
        seen.decide = sum_of(run.observed for run in shown).decide
        machine = machine_of(
            seen, setting.device, setting.tier, setting.batch_size, setting.threads
        )
        slower = seen.decide.value() / np.mean([dry_ns[run.policy] for run in shown])
        for run in own:
            plan_ns = max(0, round(slower * dry_ns[run.policy]))
            found.append(_compare(setting, run, machine, believed, plan_ns, python_ns(seen)))
    return found


def _uses_host(run: Run) -> bool:
    """Tell whether the host computes experts, which slows the kernels beside it."""
    return run.executor.offloader.policies.placement is not None


def _by_host_path(runs: Sequence[Run]) -> list[list[Run]]:
    parts = [run for run in runs if not _uses_host(run)], [run for run in runs if _uses_host(run)]
    return [part for part in parts if part]


def _compare(
    setting: Setting,
    run: Run,
    machine: Mapping[str, Any],
    believed: Mapping[str, Any],
    plan_ns: int,
    layer_ns: int,
) -> Compared:
    """Simulate one run and compare; ``layer_ns`` is what the machine's dense work has of Python."""
    config = config_of(setting, run.policy, run.ratio, machine)
    config["policy"]["plan_ns"] = plan_ns
    config["estimate"] = beliefs(config_of(setting, run.policy, run.ratio, believed)["machine"])
    config["output"] |= {"belady": False, "events": False, "perfetto": None}
    _, tables = simulate(config)
    predicted = np.concatenate(list(tables.steps.blocks()))
    measured = run.steps()
    num_steps = len(measured)
    predicted = predicted[:num_steps]
    own, other = decode_ns(measured), decode_ns(predicted)
    ratios = [
        decode_ns(measured, *turn).sum() / decode_ns(predicted, *turn).sum()
        for turn in run.turns
        if len(decode_ns(predicted, *turn))
    ]
    noise = (
        float(np.std(ratios, ddof=1) / np.sqrt(len(ratios)) / np.mean(ratios))
        if len(ratios) > 1
        else 1.0
    )
    counts = {name: (_sum(predicted, name), _sum(measured, name)) for name in _COUNTS}
    resources = {name: (_mean(predicted, name), _mean(measured, name)) for name in RESOURCES}
    _move(resources, layer_ns * run.executor.offloader.view.num_layers)
    return Compared(
        *(setting.tier.kind, setting.batch_size, run.ratio, run.policy),
        float(own.mean()),
        float(other.mean()),
        noise,
        len(own),
        counts,
        resources,
        any(counts["prefetches"]) or run.executor.offloader.policies.prefetch is not None,
    )


def _move(resources: dict[str, tuple[float, float]], python_ns: float) -> None:
    """Count Python's share of the predicted dense work as the host's, as in the measured rows."""
    for name, change in (("gpu_busy_ns", -python_ns), ("host_stall_ns", python_ns)):
        predicted, measured = resources[name]
        resources[name] = predicted + change, measured


def _sum(rows: np.ndarray, name: str) -> int:
    return int(rows[:, STEP_COLUMNS.index(name)].sum())


def _mean(rows: np.ndarray, name: str) -> float:
    decoding = rows[rows[:, STEP_COLUMNS.index("phase")] == 1]
    return float(decoding[:, STEP_COLUMNS.index(name)].mean())
