"""The best few of a search, run on a trace with cache policies: does the ranking hold where order counts?

The trace's routing is priced at the model's sizes (its layers, experts and top-k stand in for the model's),
so that the closed form is asked again for just that, with the trace's own use of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from hwmodels.cost import CostModel
from hwmodels.errors import HardwareError
from hwmodels.predict import predict
from hwmodels.usage import Usage
from sim.advise import Point, short
from sim.build import load_trace
from sim.bundled import bundled_trace
from sim.composing import compose_config
from sim.counter import STEP_COLUMNS
from sim.frontier import best_by
from sim.metrics import RunTables
from sim.predict_answer import Asked
from sim.predict_cli import usage_of_path
from sim.simulate import simulate
from sim.types import ConfigError, Phase
from traces.schema import Trace

POLICIES = {
    "gpu_only": ("static",),
    "offload": ("lru", "lfru", "lfu_decay", "static"),
    "gpu_share": ("ktransformers_uniform", "ktransformers", "fiddler", "hybrimoe"),
    "hybrid": ("freetoken", "hybrimoe", "fiddler", "llama_cpp"),
    "cpu_layers": ("llama_cpp_n_cpu_moe",),
}
"""Policies that a kind of placement stands for, or might better be run with."""
_MOST_POINTS = 3


Replayed = tuple[Trace, str, Usage]
"""A trace, its path as the configuration takes it, and its use of experts."""


def load_replayed(path: str) -> Replayed:
    """Read what is replayed; a name may be an option of the group ``trace``."""
    named = bundled_trace(path) or path
    trace = load_trace(named)
    return trace, named, Usage.from_mapping(usage_of_path(named, path), "usage")


def confirm(
    asked: Mapping[str, Asked], points: Sequence[Point], replayed: Replayed
) -> list[dict[str, Any]]:
    """Run the best points with each policy; return rows, the fastest first, those that fail last.

    Of each engine and kind of placement the best point counts, at most three, of which at most one has all
    experts in GPU memory: no policy can do anything there.
    """
    rows = []
    for point in _chosen(points):
        config = asked[f"engine={point.engine}"].composed.config
        for policy in POLICIES[point.kind]:
            rows.append(_row(point, policy, config, replayed))
    return sorted(rows, key=lambda row: -(row["tokens_per_s"] or 0.0))


def _chosen(points: Sequence[Point]) -> list[Point]:
    ways = best_by(points, "engine", "kind")
    resident = [point for point in ways if point.kind == "gpu_only"][:1]
    some = [point for point in ways if point.kind != "gpu_only"]
    return [*resident, *some][:_MOST_POINTS]


def _row(
    point: Point, policy: str, config: Mapping[str, Any], replayed: Replayed
) -> dict[str, Any]:
    """Run one policy and ask the closed form for the same."""
    trace, path, usage = replayed
    meta = trace.meta
    costs = point.case.costs
    shape = costs.shape.priced_as(meta.num_layers, meta.num_experts, meta.top_k)
    placement = _scaled(point, meta.num_layers, meta.num_experts)
    row: dict[str, Any] = {
        "engine": point.engine,
        "placement": short(point.settings),
        "policy": policy,
        "tokens_per_s": None,
        "hit_rate": None,
        "predicted_tokens_per_s": None,
        "notes": [
            f"Replayed: {meta.provenance.kind} trace {path} of {meta.model}, {shape.priced_note()}; "
            "speeds are of decoding on those layers, not of the whole model"
        ],
    }
    settings = _settings(policy, config, point, placement.gpu_ratio)
    if settings["engine"]["releases_memory"] != config["engine"]["releases_memory"]:
        row["notes"].append(
            f"{point.engine} gives back no memory here: cpu.release_bytes_per_s is not known of this machine"
        )
    settings["trace"] = {"name": path, "path": path}
    if policy == "llama_cpp_n_cpu_moe":
        settings["policy"]["cache"]["cpu_layers"] = placement.cpu_layers
        held = (meta.num_layers - (placement.cpu_layers or 0)) * meta.num_experts
        settings["cache"]["bytes"] = held * max(map(shape.expert_bytes, range(meta.num_layers)))
    settings["workload"] |= _requests(trace, point.case.batch_size)
    try:
        summary, tables = simulate(settings)
    except (ConfigError, HardwareError) as error:
        return {**row, "notes": [*row["notes"], f"{policy} could not run: {error}"]}
    step_ns, context = _decoding(tables, point.case.batch_size)
    case = replace(
        point.case,
        costs=CostModel(shape, costs.machine, costs.engine),
        placement=placement,
        usage=usage,
        context_tokens=max(1, round(context)),
    )
    return {
        **row,
        "tokens_per_s": point.case.batch_size * 1e9 / step_ns,
        "hit_rate": summary["hit_rate"],
        "predicted_tokens_per_s": predict(case).tokens_per_s,
    }


def _scaled(point: Point, num_layers: int, num_experts: int) -> Any:
    """Return the point's placement for a trace of other counts: the same share of its layers, or experts."""
    place, shape = point.case.placement, point.case.costs.shape
    on_cpu = -(-place.num_cpu_layers(shape) * num_layers // shape.num_moe_layers)
    held = num_experts if place.gpu_ratio == 1 else int(place.gpu_ratio * num_experts)
    return replace(place, cpu_layers=on_cpu, gpu_ratio=held / num_experts)


def _settings(policy: str, config: Mapping[str, Any], point: Point, ratio: float) -> dict[str, Any]:
    """Return a run's configuration with the point's own model, machine and engine."""
    plain = compose_config("config", [f"policy={policy}"])
    plain |= {group: dict(config[group]) for group in ("machine", "engine")}
    cpu = point.case.costs.machine.cpu
    if cpu.release_bytes_per_s is None:  # an engine made for phones elsewhere
        plain["engine"]["releases_memory"] = False
    plain["model"] = _model(point)
    plain["cache"]["ratio"] = ratio
    plain["output"]["belady"] = False
    plain["workload"]["batch_size"] = point.case.batch_size
    plain["workload"]["prefill_chunk"] = point.case.prefill_chunk
    return plain


def _model(point: Point) -> dict[str, Any]:
    """Return the shape as plain values that a run reads again."""
    values = asdict(point.case.costs.shape)
    for field in ("priced_from", "low_bits"):
        values.pop(field)
    by_layer = values["expert_bits_by_layer"]
    return {**values, "expert_bits_by_layer": None if by_layer is None else list(by_layer)}


def _requests(trace: Trace, batch_size: int) -> dict[str, Any]:
    """Return which requests to warm up with and to run: the first that calibration leaves, as few as do."""
    first = max(1, trace.num_requests // 4)
    spare = trace.num_requests - first
    if spare < 2 * batch_size:
        return {"requests": None, "warm_up": None}
    return {
        "warm_up": [first, first + batch_size],
        "requests": [first + batch_size, first + 2 * batch_size],
    }


def _decoding(tables: RunTables, batch_size: int) -> tuple[float, float]:
    """Return the mean time (ns) of decode steps of a full batch, and their mean context a sequence."""
    rows = np.concatenate(list(tables.steps.blocks()))
    column = {name: rows[:, at] for at, name in enumerate(STEP_COLUMNS)}
    decode = column["phase"] == int(Phase.DECODE)
    full = decode & (column["num_tokens"] == batch_size)
    chosen = full if full.any() else decode
    if not chosen.any():
        raise ConfigError("--sim-trace: the requests replayed have no decode step")
    step_ns = (column["end_ns"] - column["start_ns"])[chosen].mean()
    context = column["kv_tokens"][chosen].sum() / column["num_sequences"][chosen].sum()
    return float(step_ns), float(context)
