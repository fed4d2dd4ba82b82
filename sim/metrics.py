"""Every metric, defined once; drivers of any kind fill the same tables and this file reads them.

A *step row* counts what one step did; a *request row* says when one request began and ended. Rates
and shares lie in [0, 1]; bytes are bytes; times are nanoseconds.

hit_rate             hits / accesses, an access being one distinct expert of one event (step, layer)
late_hit_rate        accesses that waited for a prefetch already under way / accesses
miss_rate            (loads + bypasses + on_cpu) / accesses
inserts              loads + prefetches + admissions: experts that entered the cache
admissions           staged experts that were kept when their event was over
evictions            experts dropped from the cache
demand_bytes         bytes of loads and bypasses; prefetch_bytes those of prefetches that arrived
h2d_bytes            demand_bytes + prefetch_bytes
wasted_prefetch_bytes  prefetches dropped before any use, or arrived and unused at the end
stages               stage boundaries found
tokens_per_s         output tokens of all requests / time from start to the last token
ttft_ns              first output token - arrival of the request
tpot_ns              (last output token - first) / (output tokens - 1)
gpu_share            time the GPU works, the engine's fixed cost of a step included / total time
link_stall_share     time the GPU waits for experts on the link / total time
cpu_stall_share      time the GPU waits for experts on the CPU / total time
bottleneck           the largest of GPU busy, link stall and CPU stall: every moment of a run is one of them
belady_gap           the optimum's hit rate (sim/bound.py: same pools and sizes) - this run's hit rate
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sim.residency import Residency
from sim.room import Admission
from sim.types import LayerPlan, Phase, StepInfo

STEP_COLUMNS = (
    "step",
    "phase",
    "num_tokens",
    "num_sequences",
    "stage",
    "start_ns",
    "end_ns",
    "accesses",
    "hits",
    "late_hits",
    "loads",
    "bypasses",
    "on_cpu",
    "prefetches",
    "admissions",
    "evictions",
    "demand_bytes",
    "prefetch_bytes",
    "gpu_busy_ns",
    "link_stall_ns",
    "cpu_stall_ns",
)
REQUEST_COLUMNS = (
    "request_id",
    "arrival_ns",
    "start_ns",
    "first_token_ns",
    "end_ns",
    "prompt_tokens",
    "output_tokens",
    "ttft_ns",
    "tpot_ns",
)


class StepCounter:
    """Counts one step at a time, layer by layer, and keeps the rows of the step table."""

    def __init__(self, residency: Residency) -> None:
        self.rows: list[tuple[int, ...]] = []
        self._layer_bytes = residency.layer_bytes
        self._expert_bytes = residency.expert_bytes
        self._reset()

    def add(self, plan: LayerPlan) -> None:
        """Count one layer's plan."""
        size = self._layer_bytes[plan.routing.layer]
        self.accesses += len(plan.routing.experts)
        self.hits += len(plan.resident)
        if plan.late:
            self.late_hits += len(plan.late)
        if plan.evicts:
            self.evictions += len(plan.evicts)
        if plan.loads:
            self.loads += len(plan.loads)
            self.demand_bytes += len(plan.loads) * size
        if plan.bypasses:
            self.bypasses += len(plan.bypasses)
            self.demand_bytes += len(plan.bypasses) * size
        if plan.on_cpu:
            self.on_cpu += len(plan.on_cpu)

    def add_prefetches(self, keys: Sequence[int]) -> None:
        """Count prefetches that have arrived, in the step in which they did."""
        self.prefetches += len(keys)
        self.prefetch_bytes += sum(map(self._expert_bytes, keys))

    def add_admissions(self, admissions: Sequence[Admission]) -> None:
        """Count staged experts that stay."""
        self.admissions += len(admissions)
        self.evictions += sum(len(admission.evicts) for admission in admissions)

    def add_time(self, gpu_busy_ns: int, link_stall_ns: int, cpu_stall_ns: int) -> None:
        """Count how a stretch of the step's time was spent."""
        self.gpu_busy_ns += gpu_busy_ns
        self.link_stall_ns += link_stall_ns
        self.cpu_stall_ns += cpu_stall_ns

    def end_step(self, info: StepInfo, stage: int, start_ns: int, end_ns: int) -> None:
        """Close the step's row."""
        self.rows.append(
            (
                info.step,
                int(info.phase),
                info.num_tokens,
                info.num_sequences,
                stage,
                start_ns,
                end_ns,
                self.accesses,
                self.hits,
                self.late_hits,
                self.loads,
                self.bypasses,
                self.on_cpu,
                self.prefetches,
                self.admissions,
                self.evictions,
                self.demand_bytes,
                self.prefetch_bytes,
                self.gpu_busy_ns,
                self.link_stall_ns,
                self.cpu_stall_ns,
            )
        )
        self._reset()

    def _reset(self) -> None:
        self.accesses = self.hits = self.late_hits = 0
        self.loads = self.bypasses = self.on_cpu = self.prefetches = 0
        self.admissions = self.evictions = 0
        self.demand_bytes = self.prefetch_bytes = 0
        self.gpu_busy_ns = self.link_stall_ns = self.cpu_stall_ns = 0


class RequestClock:
    """Keeps the times of requests and makes the rows of the request table.

    In a closed loop a request arrives when a place becomes free, which is at 0 for the first
    ``num_places`` and then whenever a request ends; it may have to wait for others' prefill.
    """

    def __init__(self, num_places: int) -> None:
        self.rows: list[tuple[int, ...]] = []
        self._free_since_ns = deque([0] * num_places)
        self._begun: dict[int, tuple[int, int, int, int]] = {}  # arrival, start, first, prompt
        self._output_tokens: dict[int, int] = {}

    def end_step(self, info: StepInfo, finished: Sequence[int], start_ns: int, end_ns: int) -> None:
        """Learn that a step ended: each of its sequences has one more token."""
        prompt_tokens = info.num_tokens if info.phase == Phase.PREFILL else 0
        for request in dict.fromkeys(info.request_ids):
            if request in self._begun:
                self._output_tokens[request] += 1
            else:  # its prefill, or the first token of a request whose trace has no prompt
                arrival_ns = self._free_since_ns.popleft()
                self._begun[request] = (arrival_ns, start_ns, end_ns, prompt_tokens)
                self._output_tokens[request] = 1
        for request in finished:
            self._finish(request, end_ns)

    def _finish(self, request: int, end_ns: int) -> None:
        arrival_ns, start_ns, first_ns, prompt = self._begun.pop(request)
        tokens = self._output_tokens.pop(request)
        tpot_ns = (end_ns - first_ns) // (tokens - 1) if tokens > 1 else 0
        row = (request, arrival_ns, start_ns, first_ns, end_ns, prompt, tokens)
        self.rows.append((*row, first_ns - arrival_ns, tpot_ns))
        self._free_since_ns.append(end_ns)


def summarise(
    steps: Sequence[tuple[int, ...]], requests: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """Return the metrics of a run from its step and request rows."""
    table = _columns(steps, STEP_COLUMNS)
    users = _columns(requests, REQUEST_COLUMNS)
    decode = table["phase"] == 1
    total_ns = int(table["end_ns"].max(initial=0))
    output_tokens = int(users["output_tokens"].sum())
    return {
        "steps": len(steps),
        "requests": len(requests),
        "prompt_tokens": int(users["prompt_tokens"].sum()),
        "output_tokens": output_tokens,
        "total_ns": total_ns,
        "tokens_per_s": output_tokens * 1e9 / total_ns if total_ns else None,
        **_hit_rates(table, slice(None), ""),
        **_hit_rates(table, decode, "decode_"),
        **_latency(users),
        **_traffic(table),
        **_shares(table, total_ns),
    }


def _columns(rows: Sequence[tuple[int, ...]], names: Sequence[str]) -> dict[str, np.ndarray]:
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(names))
    return {name: table[:, place] for place, name in enumerate(names)}


def _hit_rates(table: Mapping[str, np.ndarray], rows: Any, prefix: str) -> dict[str, float | None]:
    accesses = int(table["accesses"][rows].sum())
    count = {name: int(table[name][rows].sum()) for name in ("hits", "late_hits")}
    missed = accesses - count["hits"] - count["late_hits"]
    return {
        f"{prefix}hit_rate": count["hits"] / accesses if accesses else None,
        f"{prefix}late_hit_rate": count["late_hits"] / accesses if accesses else None,
        f"{prefix}miss_rate": missed / accesses if accesses else None,
    }


def _latency(users: Mapping[str, np.ndarray]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    several = users["output_tokens"] > 1
    for name, values in (("ttft_ns", users["ttft_ns"]), ("tpot_ns", users["tpot_ns"][several])):
        found[f"{name}_mean"] = float(values.mean()) if len(values) else None
        for quantile in (50, 95, 99):
            key = f"{name}_p{quantile}"
            found[key] = float(np.percentile(values, quantile)) if len(values) else None
    return found


def _traffic(table: Mapping[str, np.ndarray]) -> dict[str, int]:
    places = STEP_COLUMNS.index("loads"), STEP_COLUMNS.index("prefetch_bytes")
    found = {name: int(table[name].sum()) for name in STEP_COLUMNS[places[0] : places[1] + 1]}
    found["inserts"] = found["loads"] + found["prefetches"] + found["admissions"]
    found["h2d_bytes"] = found["demand_bytes"] + found["prefetch_bytes"]
    return found


def _shares(table: Mapping[str, np.ndarray], total_ns: int) -> dict[str, Any]:
    spent = {
        "gpu": int(table["gpu_busy_ns"].sum()),
        "link": int(table["link_stall_ns"].sum()),
        "cpu": int(table["cpu_stall_ns"].sum()),
    }
    if not total_ns:
        return {
            "gpu_share": None,
            "link_stall_share": None,
            "cpu_stall_share": None,
            "bottleneck": None,
        }
    return {
        "gpu_share": spent["gpu"] / total_ns,
        "link_stall_share": spent["link"] / total_ns,
        "cpu_stall_share": spent["cpu"] / total_ns,
        "bottleneck": max(spent, key=lambda name: spent[name]),
    }
