"""Counts what a step does, plan by plan, and makes its row of the step table."""

from __future__ import annotations

from collections.abc import Sequence

from sim.ledger import Ledger
from sim.residency import Residency
from sim.room import Admission
from sim.tables import Table
from sim.types import LayerPlan, StepInfo

Launched = tuple[int, int, int]
"""Kernels, tokens of padding and bytes of gathering of a step; see sim/launches.py."""

STALLS = ("link", "storage", "dram", "host", "cpu")
"""What the GPU may wait for; a step row has a column ``*_stall_ns`` for each."""
STEP_COLUMNS = (
    "step",
    "phase",
    "num_tokens",
    "num_sequences",
    "stage",
    "start_ns",
    "end_ns",
    "kv_tokens",
    "accesses",
    "hits",
    "late_hits",
    "loads",
    "bypasses",
    "on_cpu",
    "hits_on_cpu",
    "deferred",
    "prefetches",
    "admissions",
    "evictions",
    "cancels",
    "reads",
    "demotions",
    "demand_bytes",
    "prefetch_bytes",
    "read_bytes",
    "d2h_bytes",
    "pairs",
    "gpu_pairs",
    "kernels",
    "padding_tokens",
    "gather_bytes",
    "gpu_busy_ns",
    *(f"{cause}_stall_ns" for cause in STALLS),
)


class StepCounter:
    """Counts one step at a time, layer by layer; adds its row to ``table`` when it ends.

    What the columns mean stands at the head of sim/metrics.py. None: a table that keeps its rows.
    ``ledger`` is the table of a lossy run's quality ledger.
    """

    def __init__(
        self, residency: Residency, table: Table | None = None, ledger: Table | None = None
    ) -> None:
        self.table = Table(STEP_COLUMNS) if table is None else table
        self._ledger = None if ledger is None else Ledger(ledger, residency.keys.num_experts)
        self._counts: Sequence[int] = ()
        self._num_pairs = 0
        self._layer_bytes = residency.layer_bytes
        self._has_low = residency.keys.num_copies > 1
        self._is_lossy = self._has_low or ledger is not None
        self._expert_bytes = residency.expert_bytes
        self._reset()

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The rows so far, where the table keeps them."""
        return self.table.rows

    def add(self, plan: LayerPlan) -> None:
        """Count one layer's plan."""
        accesses, hits = len(plan.routing.experts), len(plan.resident)
        self.accesses += accesses
        counts = plan.routing.token_counts
        if counts is not self._counts:  # layers of one token share theirs
            self._counts, self._num_pairs = counts, sum(counts)
        pairs = self._num_pairs
        self.pairs += pairs
        self.hits += hits
        if hits != accesses:
            if plan.late:
                self.late_hits += len(plan.late)
            if plan.loads:
                self.loads += len(plan.loads)
                self.demand_bytes += len(plan.loads) * self._layer_bytes[plan.routing.layer]
            if plan.bypasses:
                self.bypasses += len(plan.bypasses)
                self.demand_bytes += len(plan.bypasses) * self._layer_bytes[plan.routing.layer]
            if plan.on_cpu:
                moved = plan.hits_on_cpu
                self.on_cpu += len(plan.on_cpu) - moved
                if moved:
                    self.hits += moved
                    self.hits_on_cpu += moved
                one_each = pairs == accesses
                self.cpu_pairs += (
                    len(plan.on_cpu) if one_each else sum(map(plan.routing.num_tokens, plan.on_cpu))
                )
            if plan.deferred:
                self.on_cpu += len(plan.deferred)
                self.deferred += len(plan.deferred)
                self.cpu_pairs += sum(map(plan.routing.num_tokens, plan.deferred))
        if plan.evicts:
            self.evictions += len(plan.evicts)
            if plan.demotes:
                self.add_demotions(plan.demotes)
        if plan.cancels or plan.reads:
            self.cancels += len(plan.cancels)
            self.reads += len(plan.reads)
            self.read_bytes += sum(map(self._expert_bytes, plan.reads))
        if self._is_lossy:
            self._add_lossy(plan)

    def _add_lossy(self, plan: LayerPlan) -> None:
        """Count what only lossy runs have: a ledger, and copies of low precision, which have fewer bytes."""
        if self._ledger is not None:
            self._ledger.add(plan)
        if self._has_low:
            keys = [*plan.loads, *plan.bypasses]
            self.demand_bytes -= len(keys) * self._layer_bytes[plan.routing.layer]
            self.demand_bytes += sum(map(self._expert_bytes, keys))

    def add_prefetches(self, keys: Sequence[int]) -> None:
        """Count prefetches that have arrived, in the step in which they did."""
        self.prefetches += len(keys)
        self.prefetch_bytes += sum(map(self._expert_bytes, keys))

    def add_admissions(self, admissions: Sequence[Admission]) -> None:
        """Count staged experts that stay."""
        self.admissions += len(admissions)
        self.evictions += sum(len(admission.evicts) for admission in admissions)

    def add_given_up(self, keys: Sequence[int], cancels: Sequence[int] = ()) -> None:
        """Count experts whose memory a growing KV cache took, and queued prefetches that it stopped."""
        self.evictions += len(keys)
        self.cancels += len(cancels)

    def add_demotions(self, keys: Sequence[int]) -> None:
        """Count evicted experts that go back to host memory."""
        self.demotions += len(keys)
        self.d2h_bytes += sum(map(self._expert_bytes, keys))

    def add_time(
        self,
        gpu_busy_ns: int,
        link_ns: int = 0,
        storage_ns: int = 0,
        dram_ns: int = 0,
        host_ns: int = 0,
        cpu_ns: int = 0,
    ) -> None:
        """Count how a stretch of the step's time was spent: GPU work, and waiting by cause."""
        self.gpu_busy_ns += gpu_busy_ns
        self.link_ns += link_ns
        self.cpu_ns += cpu_ns
        if storage_ns or dram_ns or host_ns:
            self.storage_ns += storage_ns
            self.dram_ns += dram_ns
            self.host_ns += host_ns

    def end_step(
        self,
        info: StepInfo,
        stage: int,
        start_ns: int,
        end_ns: int,
        launched: Launched = (0, 0, 0),
    ) -> None:
        """Close the step's row; ``launched`` is 0 where no time passes."""
        self.table.append((
            info.step, int(info.phase), info.num_tokens, info.num_sequences,
            stage, start_ns, end_ns, info.held_kv_tokens,
            self.accesses, self.hits, self.late_hits,
            self.loads, self.bypasses, self.on_cpu, self.hits_on_cpu, self.deferred, self.prefetches,
            self.admissions, self.evictions, self.cancels, self.reads, self.demotions,
            self.demand_bytes, self.prefetch_bytes, self.read_bytes, self.d2h_bytes,
            self.pairs, self.pairs - self.cpu_pairs, *launched,
            self.gpu_busy_ns, self.link_ns, self.storage_ns, self.dram_ns, self.host_ns, self.cpu_ns,
        ))  # fmt: skip
        if self._ledger is not None:
            self._ledger.end_step(info)
        self._reset()

    def _reset(self) -> None:
        self.accesses = self.hits = self.late_hits = 0
        self.loads = self.bypasses = self.on_cpu = self.prefetches = 0
        self.hits_on_cpu = self.deferred = 0
        self.admissions = self.evictions = self.cancels = self.reads = self.demotions = 0
        self.demand_bytes = self.prefetch_bytes = self.read_bytes = self.d2h_bytes = 0
        self.pairs = self.cpu_pairs = 0
        self.gpu_busy_ns = self.link_ns = self.storage_ns = 0
        self.dram_ns = self.host_ns = self.cpu_ns = 0
