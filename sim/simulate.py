"""One run from a resolved configuration: build, replay, summarise. No printing."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sim.arrivals import CLOSED, POISSON
from sim.bound import belady_hit_rate
from sim.build import Scenario, build, resolve_path
from sim.events import EventLog
from sim.metrics import RunTables, Totals
from sim.perfetto import check_window
from sim.results import streamed_tables
from sim.timeline import Timeline

Watch = Callable[[int | None], Callable[[], None]]
"""Is told the number of steps, if known, and returns what to call after each."""


def simulate(
    config: Mapping[str, Any], folder: Path | None = None, watch: Watch | None = None
) -> tuple[dict[str, Any], RunTables]:
    """Run a configuration; return its summary row and its tables.

    With a ``folder`` the tables go to files there while the run goes on, and those returned hold no
    rows; without one they hold all.
    """
    scenario = build(config)
    provenance = _provenance(config, scenario)
    record_events = config["output"]["events"] or config["output"]["perfetto"] is not None
    num_experts = scenario.workload.num_experts
    totals = Totals()
    if folder is None:
        tables = RunTables(events=EventLog(num_experts) if record_events else None)
        _run(config, scenario, tables, watch)
        for block in tables.steps.blocks():
            totals.add_steps(block)
        for block in tables.requests.blocks():
            totals.add_requests(block)
    else:
        with streamed_tables(folder, totals, provenance, num_experts, record_events) as tables:
            _run(config, scenario, tables, watch)
    metrics = _metrics(config, scenario, totals, tables)
    return {**_choices(config, scenario), **metrics, "provenance": provenance}, tables


def _run(
    config: Mapping[str, Any], scenario: Scenario, tables: RunTables, watch: Watch | None
) -> None:
    """Fill a run's tables."""
    num_steps = scenario.workload.num_steps
    check_window(config, num_steps)
    on_step = None if watch is None else watch(num_steps)
    parts = (scenario.workload, scenario.offloader, scenario.costs, scenario.hardware)
    Timeline(*parts, tables=tables, on_step=on_step).run()


def _metrics(
    config: Mapping[str, Any], scenario: Scenario, totals: Totals, tables: RunTables
) -> dict[str, Any]:
    """Return the columns that say what came of a run."""
    metrics = totals.summary()
    metrics |= totals.utilisation(tables, scenario.machine.cpu.dram_bytes_per_s)
    if scenario.machine.kind != "discrete":  # one memory: what is loaded comes from storage
        metrics["reads"] = metrics["loads"] + metrics["bypasses"] + metrics["prefetches"]
        metrics["read_bytes"], metrics["h2d_bytes"] = metrics["h2d_bytes"], 0
    metrics["wasted_prefetch_bytes"] = scenario.offloader.wasted_prefetch_bytes
    metrics["stages"] = scenario.offloader.view.stage
    bound, notes = None, _notes(scenario)
    if not metrics["steps"]:
        notes.append("every request was refused: none fits in what KV cache may take")
    if config["output"]["belady"] and scenario.workload.is_open:
        notes.append("no distance to Belady, for with open arrivals the steps depend on the clock")
    elif config["output"]["belady"]:
        bound = belady_hit_rate(scenario, file_sha256(config["trace"]["path"]))
    metrics["belady_hit_rate"] = bound
    metrics["belady_gap"] = None if bound is None else bound - metrics["hit_rate"]
    metrics["notes"] = notes
    return metrics


def _notes(scenario: Scenario) -> list[str]:
    """Return what a reader of the numbers must be told."""
    policies, notes = scenario.offloader.policies, []
    if scenario.calibration_overlaps:
        notes.append("calibration saw requests of the workload; calibrated policies look too good")
    if scenario.costs.engine.exclusive_host and policies.host is None:
        notes.append("engine.exclusive_host changes nothing: no expert has to wait on storage")
    if policies.lossy:
        notes.append("this policy changes the model's answer")
    if scenario.workload.made_note:
        notes.append(scenario.workload.made_note)
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
        "machine_kind": scenario.machine.kind,
        "engine": config["engine"]["name"],
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
        "requests_made": scenario.workload.made_note or "as recorded",
        "calibration_requests": list(calibration.span),
        "calibration_overlaps_workload": scenario.calibration_overlaps,
        "inputs_sha256": inputs_sha256(config),
        "greenroom_version": _version(),
    }


def inputs_sha256(config: Mapping[str, Any]) -> str:
    """Return a digest of all that decides a run's numbers: settings and the content of its traces.

    Two runs of one version with the same digest have the same tables, wherever their files lie.
    """
    groups = ("model", "machine", "engine", "estimate", "policy", "cache")
    inputs = {group: config[group] for group in groups}
    inputs["workload"] = dict(config["workload"])
    arrivals = config["workload"]["arrivals"]
    if arrivals not in (CLOSED, POISSON):
        inputs["workload"]["arrivals"] = _digest(Path(arrivals).expanduser())
    inputs["trace"] = file_sha256(config["trace"]["path"])
    other = config["calibration"]["trace"]
    inputs["calibration"] = [
        config["calibration"]["requests"],
        None if other is None else file_sha256(other),
    ]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def file_sha256(path: str) -> str:
    """Return the digest of a trace file's content; kept, for the points of a sweep share it."""
    return _kept_digest(os.path.realpath(resolve_path(path)))


@lru_cache(maxsize=4)
def _kept_digest(path: str) -> str:
    return _digest(path)


def _digest(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version() -> str:
    try:
        return version("greenroom")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"
