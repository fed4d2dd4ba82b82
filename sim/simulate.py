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
from sim.bound import yardsticks
from sim.build import Scenario, build, file_stamp, resolve_path
from sim.bundled import trace_name
from sim.events import EventLog
from sim.ledger import LEDGER_COLUMNS
from sim.metrics import RunTables, Totals
from sim.perfetto import check_window
from sim.policies.detectors import CueStageDetector
from sim.result_tables import passing_tables, streamed_tables
from sim.roofline import roofline_of_run, summary_rows
from sim.roofline_work import CountingCosts
from sim.tables import Table
from sim.timeline import Timeline
from traces.part import split_part

Watch = Callable[[int | None], Callable[[], None]]
"""Is told the number of steps, if known, and returns what to call after each."""


def simulate(
    config: Mapping[str, Any],
    folder: Path | None = None,
    watch: Watch | None = None,
    *,
    keep_rows: bool = True,
) -> tuple[dict[str, Any], RunTables]:
    """Run a configuration; return its summary row and its tables.

    With a ``folder`` the tables go to files there while the run goes on, and those returned hold no
    rows; without one they hold all, or with ``keep_rows=False`` none: the summary is then all there is.
    """
    scenario = build(config)
    if config["output"]["roofline"]:
        scenario.costs = CountingCosts(scenario.costs, scenario.offloader.residency.keys)
    provenance = provenance_of(config, scenario)
    record_events = config["output"]["events"] or config["output"]["perfetto"] is not None
    num_layers, num_experts = scenario.workload.num_layers, scenario.workload.num_experts
    totals, lossy = Totals(), scenario.offloader.policies.lossy
    shape = num_experts, record_events, num_layers, lossy
    if folder is None and keep_rows:
        tables = _kept_tables(*shape)
        _run(config, scenario, tables, watch)
        _add_up(tables, totals)
    else:
        opened = (
            passing_tables(totals, lossy)
            if folder is None
            else streamed_tables(folder, totals, provenance, *shape)
        )
        with opened as tables:
            _run(config, scenario, tables, watch)
    metrics = metrics_of(config, scenario, totals, tables)
    if isinstance(scenario.costs, CountingCosts):
        found = roofline_of_run(config, scenario, tables, metrics, scenario.costs)
        metrics["roofline"] = summary_rows(found)
    return {**choices_of(config, scenario), **metrics, "provenance": provenance}, tables


def _kept_tables(num_experts: int, record_events: bool, num_layers: int, lossy: bool) -> RunTables:
    log = EventLog(num_experts, num_layers=num_layers) if record_events else None
    return RunTables(events=log, ledger=Table(LEDGER_COLUMNS) if lossy else None)


def _add_up(tables: RunTables, totals: Totals) -> None:
    """Count the rows of tables that hold them."""
    for block in tables.steps.blocks():
        totals.add_steps(block)
    for block in tables.requests.blocks():
        totals.add_requests(block)
    for block in () if tables.ledger is None else tables.ledger.blocks():
        totals.add_ledger(block)


def _run(
    config: Mapping[str, Any], scenario: Scenario, tables: RunTables, watch: Watch | None
) -> None:
    """Fill a run's tables."""
    num_steps = scenario.workload.num_steps
    check_window(config, num_steps)
    on_step = None if watch is None else watch(num_steps)
    costs = scenario.costs
    on_plan = costs.on_plan if isinstance(costs, CountingCosts) else None
    parts = (scenario.workload, scenario.offloader, costs, scenario.hardware)
    Timeline(*parts, tables=tables, on_step=on_step, on_plan=on_plan).run()


def metrics_of(
    config: Mapping[str, Any], scenario: Scenario, totals: Totals, tables: RunTables
) -> dict[str, Any]:
    """Return the columns that say what came of a run."""
    metrics = totals.summary()
    metrics |= totals.utilisation(tables, scenario.machine.cpu.dram_bytes_per_s)
    metrics |= totals.unions(scenario.workload.num_layers, _slots_of_a_layer(scenario))
    if scenario.machine.kind != "discrete":  # one memory: what is loaded comes from storage
        metrics["reads"] = metrics["loads"] + metrics["bypasses"] + metrics["prefetches"]
        metrics["read_bytes"], metrics["h2d_bytes"] = metrics["h2d_bytes"], 0
    metrics["wasted_prefetch_bytes"] = scenario.offloader.wasted_prefetch_bytes
    useful, prefetches = scenario.offloader.room.num_useful_prefetches, metrics["prefetches"]
    metrics["prefetch_useful_rate"] = useful / prefetches if prefetches else None
    score = scenario.offloader.stage_score
    metrics["stages"] = score.num_found
    metrics["stage_precision"], metrics["stage_recall"] = score.precision, score.recall
    notes = _notes(scenario)
    if not metrics["steps"]:
        notes.append("every request was refused: none fits in what KV cache may take")
    columns, why_not = yardsticks(config, scenario, metrics, file_sha256(config["trace"]["path"]))
    return {**metrics, **columns, "notes": notes + why_not}


def _slots_of_a_layer(scenario: Scenario) -> float:
    """Return how many experts the pools that serve a layer hold at the start, mean over layers."""
    residency, pool_bytes = scenario.offloader.residency, scenario.budget.pool_bytes
    slots = [size // residency.largest_bytes(pool) for pool, size in enumerate(pool_bytes)]
    layers = range(scenario.workload.num_layers)
    serving = [slots[pool] for layer in layers for pool in residency.pools_of_layer(layer)]
    return sum(serving) / len(layers)


def _notes(scenario: Scenario) -> list[str]:
    """Return what a reader of the numbers must be told."""
    policies, notes = scenario.offloader.policies, []
    if scenario.calibration_overlaps:
        notes.append("calibration saw requests of the workload; calibrated policies look too good")
    if scenario.costs.engine.exclusive_host and policies.host is None:
        notes.append("engine.exclusive_host changes nothing: no expert has to wait on storage")
    if policies.lossy:
        notes.append("this policy changes the model's answer: read its quality ledger")
        if scenario.workload.trace.expert_weights is None:
            notes.append(
                "the trace has no weights, so that the ledger counts slots, not their mass"
            )
    if policies.former is not None and not scenario.workload.has_choice:
        notes.append("its former has no choice: workload.waiting is not above workload.batch_size")
    workload, num_requests = scenario.workload, len(scenario.workload.requests)
    if workload.batch_size > num_requests:
        notes.append(
            f"workload.batch_size is above the number of requests, {num_requests}: no more run at one time"
        )
    crowded = scenario.budget.crowded(scenario.workload.trace.meta.top_k)
    if crowded:
        notes.append(crowded)
    if scenario.workload.made_note:
        notes.append(scenario.workload.made_note)
    cues = isinstance(policies.stages, CueStageDetector)
    if cues and scenario.workload.trace.text is None:
        notes.append("the trace has no text, so that no cue of a new stage can be found")
    return notes


def choices_of(config: Mapping[str, Any], scenario: Scenario) -> dict[str, Any]:
    """Return the columns that say what was run."""
    budget, policies = scenario.budget, scenario.offloader.policies
    return {
        "policy": config["policy"]["name"],
        "scope": config["policy"]["scope"],
        "oracle": policies.oracle,
        "lossy": policies.lossy,
        "assumed": policies.assumed,
        "baseline": config["output"]["baseline"],
        "highlight": config["output"]["highlight"],
        "trace": trace_name(config["trace"]),
        "model": config["model"]["name"],
        "machine": config["machine"]["name"],
        "machine_kind": scenario.machine.kind,
        "engine": config["engine"]["name"],
        "batch_size": scenario.workload.batch_size,
        "waiting": scenario.workload.limits.places,
        "cache_ratio": budget.cache_ratio,
        "cache_bytes": budget.cache_bytes,
        "staging_bytes": budget.staging_bytes,
        "gpu_bytes": budget.total_bytes(),
    }


def provenance_of(config: Mapping[str, Any], scenario: Scenario) -> dict[str, Any]:
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
        "greenroom_version": version_of_greenroom(),
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
    """Return the digest of a trace file's content; kept, for the points of a sweep share it.

    A part of a trace has the digest of its file with the words that name the part.
    """
    real_path = os.path.realpath(resolve_path(path))
    digest = _kept_digest(real_path, file_stamp(real_path))
    return digest if split_part(path)[1] is None else digest + path[path.rindex("#") :]


@lru_cache(maxsize=4)
def _kept_digest(path: str, stamp: tuple[int, ...]) -> str:
    return _digest(path)


def _digest(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def version_of_greenroom() -> str:
    """Return the version of this program, "unknown" in a checkout that was never installed."""
    try:
        return version("greenroom")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"
