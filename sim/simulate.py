"""One run from a resolved configuration: build, replay, summarise. No files, no printing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sim.bound import belady_hit_rate
from sim.build import Scenario, build
from sim.metrics import summarise
from sim.timeline import RunTables, Timeline


def simulate(
    config: Mapping[str, Any],
    watch: Callable[[int], Callable[[], None]] | None = None,
) -> tuple[dict[str, Any], RunTables]:
    """Run a configuration; return its summary row and its tables.

    ``watch`` is told the number of steps and returns what to call after each.
    """
    scenario = build(config)
    on_step = None if watch is None else watch(scenario.workload.num_steps)
    timeline = Timeline(
        scenario.workload,
        scenario.offloader,
        scenario.costs,
        record_events=bool(config["output"]["events"]),
        on_step=on_step,
    )
    tables = timeline.run()
    metrics = summarise(tables.steps, tables.requests)
    metrics["wasted_prefetch_bytes"] = scenario.offloader.wasted_prefetch_bytes
    metrics["stages"] = scenario.offloader.view.stage
    bound = None
    if config["output"]["belady"]:
        bound = belady_hit_rate(scenario, config["trace"]["path"])
    metrics["belady_hit_rate"] = bound
    metrics["belady_gap"] = None if bound is None else bound - metrics["hit_rate"]
    return {
        **_choices(config, scenario),
        **metrics,
        "provenance": _provenance(config, scenario),
    }, tables


def _choices(config: Mapping[str, Any], scenario: Scenario) -> dict[str, Any]:
    """Return the columns that say what was run."""
    budget, policies = scenario.budget, scenario.offloader.policies
    return {
        "policy": config["policy"]["name"],
        "scope": config["policy"]["scope"],
        "oracle": policies.oracle,
        "lossy": policies.lossy,
        "trace": config["trace"]["name"],
        "model": config["model"]["name"],
        "machine": config["machine"]["name"],
        "batch_size": scenario.workload.batch_size,
        "cache_ratio": budget.cache_ratio,
        "cache_bytes": budget.cache_bytes,
        "staging_bytes": budget.staging_bytes,
        "gpu_bytes": budget.total_bytes(),
    }


def _provenance(config: Mapping[str, Any], scenario: Scenario) -> dict[str, Any]:
    """Return where the numbers come from: the trace's origin and how it was priced."""
    meta, shape = scenario.workload.trace.meta, scenario.shape
    return {
        "trace_kind": meta.provenance.kind,
        "trace_source": meta.provenance.source,
        "trace_model": meta.model,
        "priced_as": shape.priced_note(),
        "calibration_requests": list(scenario.calibration.span),
        "calibration_overlaps_workload": scenario.calibration_overlaps,
        "seed": config["seed"],
        "config_sha256": config_hash(config),
        "greenroom_version": _version(),
    }


def config_hash(config: Mapping[str, Any]) -> str:
    """Return a digest of all that decides a run's result."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def _version() -> str:
    try:
        return version("greenroom")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"
