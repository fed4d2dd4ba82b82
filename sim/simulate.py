"""One run from a resolved configuration: build, replay, summarise. No files, no printing."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sim.bound import belady_hit_rate
from sim.build import Scenario, build, resolve_path
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
        record_events=config["output"]["events"],
        on_step=on_step,
    )
    tables = timeline.run()
    metrics = summarise(tables.steps, tables.requests)
    metrics["wasted_prefetch_bytes"] = scenario.offloader.wasted_prefetch_bytes
    metrics["stages"] = scenario.offloader.view.stage
    bound = None
    if config["output"]["belady"]:
        bound = belady_hit_rate(scenario, file_sha256(config["trace"]["path"]))
    metrics["belady_hit_rate"] = bound
    metrics["belady_gap"] = None if bound is None else bound - metrics["hit_rate"]
    metrics["notes"] = _notes(scenario)
    return {
        **_choices(config, scenario),
        **metrics,
        "provenance": _provenance(config, scenario),
    }, tables


def _notes(scenario: Scenario) -> list[str]:
    """Return what a reader of the numbers must be told."""
    policies, notes = scenario.offloader.policies, []
    if scenario.calibration_overlaps:
        notes.append("calibration saw requests of the workload; calibrated policies look too good")
    if policies.lossy:
        notes.append("this policy changes the model's answer")
    if policies.stages is not None and scenario.workload.trace.text is None:
        notes.append("the trace has no text, so that no cue of a new stage can be found")
    return notes


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
    """Return where the numbers come from: the trace's origin, how it was priced, and digests."""
    meta, calibration = scenario.workload.trace.meta, scenario.calibration
    return {
        "trace_kind": meta.provenance.kind,
        "trace_source": meta.provenance.source,
        "trace_model": meta.model,
        "trace_sha256": file_sha256(config["trace"]["path"]),
        "priced_as": scenario.shape.priced_note(),
        "calibration_requests": list(calibration.span),
        "calibration_overlaps_workload": scenario.calibration_overlaps,
        "inputs_sha256": inputs_sha256(config),
        "greenroom_version": _version(),
    }


def inputs_sha256(config: Mapping[str, Any]) -> str:
    """Return a digest of all that decides a run's numbers: settings and the content of its traces.

    Two runs of one version with the same digest have the same tables, wherever their files lie.
    """
    groups = ("model", "machine", "estimate", "policy", "cache", "workload")
    inputs = {group: config[group] for group in groups}
    inputs["trace"] = file_sha256(config["trace"]["path"])
    other = config["calibration"]["trace"]
    inputs["calibration"] = [
        config["calibration"]["requests"],
        None if other is None else file_sha256(other),
    ]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def file_sha256(path: str) -> str:
    """Return the digest of a trace file's content; kept, for the points of a sweep share it."""
    return _file_sha256(os.path.realpath(resolve_path(path)))


@lru_cache(maxsize=4)
def _file_sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version() -> str:
    try:
        return version("greenroom")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"
