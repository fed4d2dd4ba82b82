"""Every metric, defined once; drivers of any kind fill the same tables and this file reads them.

A *step row* counts what one step did; a *request row* says when one request began and ended. Rates
and shares lie in [0, 1]; bytes are bytes; times are nanoseconds.

hit_rate             hits / accesses, an access being one distinct expert of one event (step, layer);
                     decode_hit_rate is that of steps that only decode
late_hit_rate        accesses that waited for a prefetch already under way / accesses
miss_rate            (loads + bypasses + on_cpu) / accesses
on_cpu               experts not on the GPU that ran on the CPU (or whose prefetch was not waited for);
                     deferred: those of them whose output was added one layer later
hits_on_cpu          hits that ran on the CPU all the same; accesses = hits + late_hits + loads +
                     bypasses + on_cpu
inserts              loads + prefetches + admissions: experts that entered the cache
admissions           staged experts that were kept when their event was over
evictions            experts dropped from the cache, those that a growing KV cache took included
cancels              prefetches given up while they were still queued
reads, read_bytes    experts that came from storage, counted with the plan that wants them
demotions, d2h_bytes  evicted experts that went back to host memory
demand_bytes         bytes of loads and bypasses; prefetch_bytes those of prefetches that arrived, or were
                     thrown away under way (engine.speculation: before)
h2d_bytes            demand_bytes + prefetch_bytes
wasted_prefetch_bytes  prefetches thrown away under way, or dropped before any use, or unused at the end
prefetch_useful_rate  prefetches used before they were dropped / prefetches that arrived
pairs, gpu_pairs     (token, expert) pairs computed, and those of them on GPUs
union_size           distinct experts of an event, mean over steps that only decode
union_ratio          accesses / pairs: 1 where no two tokens share an expert; decode_union_ratio likewise
pool_pressure        union_size / slots for experts that serve a layer (mean over layers): above 1 an event
                     alone is more than its pool holds
kernels              launches for routed experts on GPUs, permuting tokens included (hwmodels/kernel_cost.py)
kernels_per_layer    kernels / (steps x MoE layers)
padding_tokens       tokens that grouped kernels compute beyond gpu_pairs, to whole blocks an expert;
                     padding_ratio = padding_tokens / (gpu_pairs + padding_tokens)
gather_bytes         activation bytes moved to lay tokens out for expert kernels: gathered and scattered, or
                     permuted by expert
stages               stage boundaries found
stage_precision      those of them that are right by the trace's annotation / stages; stage_recall: the same
                     / boundaries annotated (sim/stage_score.py says what is right)
requests             those that came; refused: those of them that could never have fitted, which no other
                     count or time of requests includes
tokens_per_s         output tokens of all requests / time from start to the last token
queue_ns             start of the first step that processes the request - its arrival
ttft_ns              first output token - arrival of the request
tpot_ns              (last output token - first) / (output tokens - 1)
wait_steps           steps that decoded without the request while it was in memory; longest_wait_steps: most
                     of them in a row; wait_steps_mean and longest_wait_steps_max are over requests
idle_ns              time in which there was nothing to run
gpu_share            time the GPU works, the engine's fixed cost of a step included / total time
link_stall_share     time the GPU waits for experts on the link / total time; likewise for storage,
                     dram (host memory's bandwidth), host (its threads) and cpu (experts computed there;
                     the layer that waits for what the one before deferred has the stall)
bottleneck           the largest of GPU busy and the stalls: every moment is one of them, or idle
gpu_utilisation      time that a lane worked, over its units / (total time x units); likewise h2d, d2h,
                     cpu and storage; dram_utilisation: bytes moved / (total time x host bandwidth)
belady_hit_rate      that of Belady's optimum with the same pools and sizes (sim/bound.py)
belady_gap           belady_hit_rate - hit_rate = gap_by_admission + gap_by_victim, where
gap_by_admission     belady_hit_rate - belady_forced_hit_rate: what it gains by keeping newcomers out
gap_by_victim        belady_forced_hit_rate - hit_rate: what remains, the choice of who is dropped; below 0
                     where a policy that keeps newcomers out beats the forced optimum
sequential_miss_rate  miss rate of the same policy replayed expert by expert, not layer by layer

A lossy run has a quality ledger too (sim/ledger.py), of slots (an expert of a token in a layer, as the
router chose it) and their mass (the weight recorded with it); also for steps that only decode, as decode_*:

route_agreement      slots whose token computes the slot's expert / slots
substituted_slot_rate  slots whose place another expert takes / slots; dropped_slot_rate: nobody takes
low_slot_rate        slots computed in low precision / slots; deferred_slot_rate: added a layer late
substituted_mass_rate  mass of those slots / mass of all; likewise dropped, low and deferred; None in a trace
                     without weights
route_kl             mean over tokens and layers of ln(P(router's picks) / P(computed picks)), P the softmax
                     of the router's scores, in nats; None in a trace without them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.counter import STALLS, STEP_COLUMNS
from sim.ledger import LEDGER_COLUMNS, quality
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
    ledger
        The quality ledger, see ``LEDGER_COLUMNS``; None where the policy is lossless.
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
    ledger: Table | None = None
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
        self._steps = self._decode_steps = self._total_ns = 0
        self._wait_steps = self._longest_wait_steps = 0
        self._sums = np.zeros(len(STEP_COLUMNS), dtype=np.int64)
        self._decode_sums = np.zeros(len(STEP_COLUMNS), dtype=np.int64)
        self._requests = self._refused = self._prompt_tokens = self._output_tokens = 0
        self._spans: dict[str, list[NDArray[np.int64]]] = {name: [] for name in _SPANS}
        self._ledger: NDArray[np.int64] | None = None  # sums of all steps, and of decode steps

    def add_steps(self, block: Block) -> None:
        """Count rows of the step table."""
        self._steps += len(block)
        self._sums += block.sum(axis=0)
        decoded = block[block[:, _PLACE["phase"]] == Phase.DECODE]
        self._decode_steps += len(decoded)
        self._decode_sums += decoded.sum(axis=0)
        self._total_ns = max(self._total_ns, int(block[:, _PLACE["end_ns"]].max(initial=0)))

    def add_requests(self, block: Block) -> None:
        """Count rows of the request table."""
        done = block[block[:, _REQUEST_PLACE["outcome"]] == Outcome.DONE]
        self._requests += len(block)
        self._refused += len(block) - len(done)
        self._prompt_tokens += int(done[:, _REQUEST_PLACE["prompt_tokens"]].sum())
        self._output_tokens += int(done[:, _REQUEST_PLACE["output_tokens"]].sum())
        self._wait_steps += int(done[:, _REQUEST_PLACE["wait_steps"]].sum())
        longest = done[:, _REQUEST_PLACE["longest_wait_steps"]].max(initial=0)
        self._longest_wait_steps = max(self._longest_wait_steps, int(longest))
        several = done[:, _REQUEST_PLACE["output_tokens"]] > 1
        for name, values in self._spans.items():
            column = done[:, _REQUEST_PLACE[name]]  # one token alone has no time between tokens
            values.append(column[several] if name == "tpot_ns" else column.copy())

    def add_ledger(self, block: Block) -> None:
        """Count rows of the quality ledger."""
        decoded = block[block[:, LEDGER_COLUMNS.index("phase")] == Phase.DECODE]
        sums = np.stack([block.sum(axis=0), decoded.sum(axis=0)])
        self._ledger = sums if self._ledger is None else self._ledger + sums

    def summary(self) -> dict[str, Any]:
        """Return the metrics that the step and request tables give, and the ledger if there is one."""
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
            "wait_steps_mean": _share(self._wait_steps, self._requests - self._refused),
            "longest_wait_steps_max": self._longest_wait_steps,
            **self._traffic(),
            **self._shares(),
            **self._quality(),
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

    def unions(self, num_layers: int, slots: float) -> dict[str, float | None]:
        """Return how much the tokens of a step share, and what their kernels come to.

        ``slots`` is how many experts the pools that serve a layer hold, mean over layers.
        """
        every, decoded = self._sums, self._decode_sums
        accesses, pairs, kernels = (_PLACE[name] for name in ("accesses", "pairs", "kernels"))
        padding = int(every[_PLACE["padding_tokens"]])
        size = _share(int(decoded[accesses]), self._decode_steps * num_layers)
        return {
            "union_size": size,
            "union_ratio": _share(int(every[accesses]), int(every[pairs])),
            "decode_union_ratio": _share(int(decoded[accesses]), int(decoded[pairs])),
            "pool_pressure": None if size is None or not slots else size / slots,
            "kernels_per_layer": _share(int(every[kernels]), self._steps * num_layers),
            "padding_ratio": _share(padding, int(every[_PLACE["gpu_pairs"]]) + padding),
        }

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

    def _quality(self) -> dict[str, float | None]:
        if self._ledger is None:
            return {}
        every, decoded = self._ledger.tolist()
        return {**quality(every), **quality(decoded, "decode_")}

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
