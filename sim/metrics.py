"""Every metric, defined once; drivers of any kind fill the same tables and this file reads them.

A *step row* counts what one step did; a *request row* says when one request began and ended. Rates
and shares lie in [0, 1]; bytes are bytes; times are nanoseconds.

hit_rate             hits / accesses, an access being one distinct expert of one event (step, layer);
                     decode_hit_rate is that of steps that only decode
late_hit_rate        accesses that waited for a prefetch already under way / accesses
miss_rate            (loads + bypasses + on_cpu) / accesses
inserts              loads + prefetches + admissions: experts that entered the cache
admissions           staged experts that were kept when their event was over
evictions            experts dropped from the cache, those that a growing KV cache took included
cancels              prefetches given up while they were still queued
reads, read_bytes    experts that came from storage, counted with the plan that wants them
demotions, d2h_bytes  evicted experts that went back to host memory
demand_bytes         bytes of loads and bypasses; prefetch_bytes those of prefetches that arrived
h2d_bytes            demand_bytes + prefetch_bytes
wasted_prefetch_bytes  prefetches dropped before any use, or arrived and unused at the end
stages               stage boundaries found
requests             those that came; refused: those of them that could never have fitted, which no other
                     count or time of requests includes
tokens_per_s         output tokens of all requests / time from start to the last token
queue_ns             start of the first step that processes the request - its arrival
ttft_ns              first output token - arrival of the request
tpot_ns              (last output token - first) / (output tokens - 1)
idle_ns              time in which there was nothing to run
gpu_share            time the GPU works, the engine's fixed cost of a step included / total time
link_stall_share     time the GPU waits for experts on the link / total time; likewise for storage,
                     dram (host memory's bandwidth), host (its threads) and cpu (experts computed there)
bottleneck           the largest of GPU busy and the stalls: every moment is one of them, or idle
gpu_utilisation      time that a lane worked, over its units / (total time x units); likewise h2d, d2h,
                     cpu and storage; dram_utilisation: bytes moved / (total time x host bandwidth)
belady_gap           the optimum's hit rate (sim/bound.py: same pools and sizes) - this run's hit rate
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.counter import STALLS, STEP_COLUMNS
from sim.requests import REQUEST_COLUMNS, Outcome
from sim.tables import Block, Table
from sim.types import Phase

if TYPE_CHECKING:
    from sim.events import EventLog

LANES = ("gpu", "h2d", "d2h", "cpu", "storage")
_PLACE = {name: place for place, name in enumerate(STEP_COLUMNS)}
_REQUEST_PLACE = {name: place for place, name in enumerate(REQUEST_COLUMNS)}
_COUNTS = STEP_COLUMNS[_PLACE["loads"] : _PLACE["gpu_busy_ns"]]
_SPANS = ("ttft_ns", "tpot_ns", "queue_ns")


@dataclass(slots=True)
class RunTables:
    """What a run leaves: its tables, and what the step table does not add up to.

    Made before the run, so that the rows of a long one can go straight to files.

    Attributes
    ----------
    steps, requests
        See ``STEP_COLUMNS`` and ``REQUEST_COLUMNS``.
    events
        The event log, if one was asked for.
    busy_ns
        Time that each lane ("gpu", "h2d", "d2h", "cpu", "storage") worked, summed over its units.
    units
        How many of a lane there are, each of which may work all the time; 1 where it says nothing.
    dram_bytes
        Bytes that all users of host memory moved; None where nobody kept count, as no two of them
        could have met there.
    idle_ns
        Time between steps, in which there was nothing to run.
    """

    steps: Table = field(default_factory=lambda: Table(STEP_COLUMNS))
    requests: Table = field(default_factory=lambda: Table(REQUEST_COLUMNS))
    events: EventLog | None = None
    busy_ns: dict[str, int] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)
    dram_bytes: int | None = None
    idle_ns: int = 0


class Totals:
    """The metrics of a run, gathered from blocks of its tables as they pass.

    Keeps sums, and of each request three times (for quantiles).
    """

    def __init__(self) -> None:
        self._steps = self._total_ns = 0
        self._sums = np.zeros(len(STEP_COLUMNS), dtype=np.int64)
        self._decode_sums = np.zeros(len(STEP_COLUMNS), dtype=np.int64)
        self._requests = self._refused = self._prompt_tokens = self._output_tokens = 0
        self._spans: dict[str, list[NDArray[np.int64]]] = {name: [] for name in _SPANS}

    def add_steps(self, block: Block) -> None:
        """Count rows of the step table."""
        self._steps += len(block)
        self._sums += block.sum(axis=0)
        self._decode_sums += block[block[:, _PLACE["phase"]] == Phase.DECODE].sum(axis=0)
        self._total_ns = max(self._total_ns, int(block[:, _PLACE["end_ns"]].max(initial=0)))

    def add_requests(self, block: Block) -> None:
        """Count rows of the request table."""
        done = block[block[:, _REQUEST_PLACE["outcome"]] == Outcome.DONE]
        self._requests += len(block)
        self._refused += len(block) - len(done)
        self._prompt_tokens += int(done[:, _REQUEST_PLACE["prompt_tokens"]].sum())
        self._output_tokens += int(done[:, _REQUEST_PLACE["output_tokens"]].sum())
        several = done[:, _REQUEST_PLACE["output_tokens"]] > 1
        for name, values in self._spans.items():
            column = done[:, _REQUEST_PLACE[name]]  # one token alone has no time between tokens
            values.append(column[several] if name == "tpot_ns" else column.copy())

    def summary(self) -> dict[str, Any]:
        """Return the metrics that the step and request tables give."""
        total_ns = self._total_ns
        return {
            "steps": self._steps,
            "requests": self._requests,
            "refused": self._refused,
            "prompt_tokens": self._prompt_tokens,
            "output_tokens": self._output_tokens,
            "total_ns": total_ns,
            "tokens_per_s": self._output_tokens * 1e9 / total_ns if total_ns else None,
            **_hit_rates(self._sums, ""),
            **_hit_rates(self._decode_sums, "decode_"),
            **self._latency(),
            **self._traffic(),
            **self._shares(),
        }

    def utilisation(self, tables: RunTables, dram_bytes_per_s: int) -> dict[str, Any]:
        """Return how busy each resource was, None where it is unknown; and the idle time."""
        found: dict[str, float | int | None] = {"idle_ns": tables.idle_ns}
        for lane in LANES:
            room_ns = self._total_ns * tables.units.get(lane, 1)
            found[f"{lane}_utilisation"] = _share(tables.busy_ns.get(lane), room_ns)
        room_bytes = dram_bytes_per_s * self._total_ns / 1e9
        found["dram_utilisation"] = _share(tables.dram_bytes, room_bytes)
        return found

    def _latency(self) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for name, parts in self._spans.items():
            values = np.concatenate(parts) if parts else np.empty(0)
            quantiles = (95,) if name == "queue_ns" else (50, 95, 99)
            found[f"{name}_mean"] = float(values.mean()) if len(values) else None
            for quantile in quantiles:
                key = f"{name}_p{quantile}"
                found[key] = float(np.percentile(values, quantile)) if len(values) else None
        return found

    def _traffic(self) -> dict[str, int]:
        found = {name: int(self._sums[_PLACE[name]]) for name in _COUNTS}
        found["inserts"] = found["loads"] + found["prefetches"] + found["admissions"]
        found["h2d_bytes"] = found["demand_bytes"] + found["prefetch_bytes"]
        return found

    def _shares(self) -> dict[str, Any]:
        spent = {"gpu": int(self._sums[_PLACE["gpu_busy_ns"]])}
        spent |= {cause: int(self._sums[_PLACE[f"{cause}_stall_ns"]]) for cause in STALLS}
        total_ns = self._total_ns
        names = {name: "gpu_share" if name == "gpu" else f"{name}_stall_share" for name in spent}
        shares = {names[name]: _share(ns, total_ns) for name, ns in spent.items()}
        bottleneck = max(spent, key=lambda name: spent[name]) if total_ns else None
        return {**shares, "bottleneck": bottleneck}


def summarise(
    steps: Sequence[tuple[int, ...]], requests: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """Return the metrics of step and request rows that are at hand."""
    totals = Totals()
    totals.add_steps(np.array(steps, dtype=np.int64).reshape(-1, len(STEP_COLUMNS)))
    totals.add_requests(np.array(requests, dtype=np.int64).reshape(-1, len(REQUEST_COLUMNS)))
    return totals.summary()


def _share(part: int | None, whole: float) -> float | None:
    return part / whole if part is not None and whole else None


def _hit_rates(sums: NDArray[np.int64], prefix: str) -> Mapping[str, float | None]:
    accesses, hits, late_hits = (
        int(sums[_PLACE[name]]) for name in ("accesses", "hits", "late_hits")
    )
    counts = {"hit_rate": hits, "late_hit_rate": late_hits}
    counts["miss_rate"] = accesses - hits - late_hits
    return {f"{prefix}{name}": _share(count, accesses) for name, count in counts.items()}
