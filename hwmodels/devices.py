"""The parts of a machine as figures: GPU, host link, CPU with its memory, storage.

Rates are what kernels, copies and reads *achieve*, not what a data sheet promises: the rates of a file,
times its derates.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hwmodels.curves import linear, log_log, on_grid
from hwmodels.fields import Rows, Rule


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU: rates are for large buffers and large matrices, times for one kernel."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: int
    """Rate at which weights stream from memory into matrix-vector kernels."""
    matmul_flops: int
    """Dense 16-bit matrix multiplication."""
    kernel_floor_ns: int
    """What the smallest matrix kernel takes."""
    launch_ns: int
    """Distance of kernels launched one after another from a stream."""
    graph_launch_ns: int
    """The same from a CUDA graph: about half."""
    attention_floor_ns: int
    """What decode attention of one layer takes before the KV entries it reads count."""
    step_overhead_ns: int
    """Fixed cost of a step beside its kernels: sampling, synchronisation, the engine's own work."""
    workspace_bytes: int
    """Memory neither weights nor KV can have: context, activations, library buffers."""
    count: int = 1
    """GPUs of this kind in the machine; the other figures are those of one."""
    vector_flops: int | None = None
    """32-bit operations without matrix units; None: as ``matmul_flops``."""
    rate_by_bits: Rows | None = field(default=None, metadata={"columns": ("bits", "bytes_per_s")})
    """Streaming of experts whose decoding is slower than memory; from the last row's bits on it is not."""
    expert_table: Rows | None = field(
        default=None, metadata={"columns": ("num_bytes", "num_tokens", "ns")}
    )
    """Measured kernels of one expert, launches and gathering included; replaces the formula."""
    rate_beside_cpu_ratio: float = 1.0
    """Share of their rate that expert kernels keep while the CPU computes experts: below 1 where both read
    one memory."""

    def expert_bytes_per_s(self, bits: float) -> int:
        """Return the rate at which experts of ``bits`` bits a weight stream into kernels."""
        if self.rate_by_bits is None or bits >= self.rate_by_bits[-1][0]:
            return self.memory_bytes_per_s
        return min(self.memory_bytes_per_s, _decoding(self.rate_by_bits, bits))


@dataclass(frozen=True, slots=True)
class Link:
    """The link between host memory and one GPU, each direction for itself."""

    name: str
    h2d_bytes_per_s: int
    """Host to GPU, large pinned buffers."""
    d2h_bytes_per_s: int
    """GPU to host, large pinned buffers."""
    pageable_bytes_per_s: int
    """Either direction when host memory is not pinned."""
    pageable_host_bytes_per_s: int
    """Rate at which the host thread stages a pageable copy, which it does nothing else beside."""
    copy_setup_ns: int
    """Time before the first byte of an isolated asynchronous copy; hidden behind a copy before it."""
    copy_gap_ns: int
    """Time between two copies that were queued back to back."""
    copy_issue_ns: int
    """Host time to issue one copy."""
    duplex_ratio: float
    """What both directions move together, as a multiple of one alone: in [1, 2]."""
    pinned: bool
    """Whether expert weights lie in pinned host memory."""
    switch_bytes_per_s: int | None = None
    """Rate of the uplink that all GPUs share; None: each GPU has lanes of its own."""
    hop_ns: int = 0
    """Time for activations to go from one GPU to another."""

    @property
    def load_bytes_per_s(self) -> int:
        """Rate of an expert's copy to the GPU, pinned or not."""
        if self.pinned:
            return self.h2d_bytes_per_s
        return min(self.h2d_bytes_per_s, self.pageable_bytes_per_s)

    def rules(self) -> list[Rule]:
        """Return what fields demand of each other."""
        return [("duplex_ratio", 1 <= self.duplex_ratio <= 2, "must be in [1, 2]")]


@dataclass(frozen=True, slots=True)
class CPU:
    """The host: its memory, and what its cores achieve in expert kernels."""

    name: str
    cores: int
    threads_used: int
    memory_bytes: int
    memory_bytes_per_s: int
    """Rate at which all cores together stream expert weights."""
    thread_bytes_per_s: int
    """The most one thread adds to that rate."""
    dram_bytes_per_s: int
    """What all readers of host memory get together: expert kernels, copies, storage."""
    matmul_flops: int
    """Matrix multiplication by all cores."""
    expert_setup_ns: int
    """Cost of one expert before its first byte: dispatch, fork and join of threads."""
    handover_ns: int
    """Cost of a layer that uses the CPU: activations there and back, synchronisation."""
    launch_issue_ns: int = 0
    """What the host thread takes to launch one kernel."""
    dispatch_ns: int = 0
    """Cost of a layer, beside its bytes and operations, where the CPU computes all of it."""
    release_bytes_per_s: int | None = None
    """Rate at which a thread gives memory back to the operating system; None: not known."""
    predict_ns: int = 0
    """What the driving thread takes to name the next layer's experts (``engine.speculation`` before)."""
    router_ns: int = 0
    """From then to the layer's own routing: the time that such an engine's speculative reads have."""
    dram_sharing: str = field(
        default="proportional", metadata={"choices": ("proportional", "fair")}
    )
    """Readers of a full memory get shares by what each takes alone, or equal ones."""
    numa_nodes: int = 1
    numa_bytes_per_s: int | None = None
    """Rate of the interconnect between NUMA nodes."""
    rate_by_bits: Rows | None = field(default=None, metadata={"columns": ("bits", "bytes_per_s")})
    """As on a GPU, by all threads in use: where decoding bounds, in place of ``memory_bytes_per_s``."""
    decode_weights_per_s: int | None = None
    """Weights that all cores decode, by kernels whose weights are laid out for them; None: never binds."""
    codebook_weights_per_s: int | None = None
    """The same of formats that are indices into a codebook (IQ1 to IQ3)."""
    expert_table: Rows | None = field(
        default=None, metadata={"columns": ("num_bytes", "num_tokens", "ns")}
    )
    """Measured expert kernels of all threads in use; replaces the formula."""

    @property
    def expert_bytes_per_s(self) -> int:
        """Weight streaming by the threads in use: min(threads * one thread, all, memory)."""
        rate = min(self.memory_bytes_per_s, self.threads_used * self.thread_bytes_per_s)
        return min(rate, self.dram_bytes_per_s)

    @property
    def expert_flops(self) -> int:
        """Matrix multiplication by the threads in use: their share of the cores, at most all."""
        return self.team_flops(self.threads_used)

    def team_flops(self, threads: int) -> int:
        """Return the matrix multiplication rate of some threads: their share of the cores."""
        return max(1, self.matmul_flops * min(threads, self.cores) // self.cores)

    def team_bytes_per_s(self, threads: int, bits: float, is_codebook: bool = False) -> int:
        """Return the rate at which some of the threads in use stream weights of ``bits`` bits.

        min(threads * one thread, all cores, memory, decoding); decoding is the threads' own work, of which
        they have their share.
        """
        rate = min(
            self.memory_bytes_per_s, threads * self.thread_bytes_per_s, self.dram_bytes_per_s
        )
        weights = self.codebook_weights_per_s if is_codebook else self.decode_weights_per_s
        if weights is not None:
            share = min(threads, self.cores) / self.cores
            rate = max(1, min(rate, int(weights * share * bits / 8)))
        if self.rate_by_bits is None or bits >= self.rate_by_bits[-1][0]:
            return rate
        return max(1, min(rate, _decoding(self.rate_by_bits, bits) * threads // self.threads_used))

    def rules(self) -> list[Rule]:
        """Return what fields demand of each other."""
        return [
            (
                "numa_bytes_per_s",
                self.numa_nodes == 1 or self.numa_bytes_per_s is not None,
                f"must be given with numa_nodes = {self.numa_nodes}",
            )
        ]


@dataclass(frozen=True, slots=True)
class Derates:
    """Shares of the rates in a part's file that kernels and copies reach; a part has some of them."""

    memory_derate: float = 1.0
    """Of the rate at which memory can be read: what weights stream into kernels with."""
    matmul_derate: float = 1.0
    dram_derate: float = 1.0
    """Of the rate at which host memory can be read: what all its readers get together."""
    rate_derate: float = 1.0
    """Of both directions of a link."""

    def rules(self) -> list[Rule]:
        """Return what must hold of each."""
        names = ("memory_derate", "matmul_derate", "dram_derate", "rate_derate")
        return [(name, getattr(self, name) <= 1, "must be in (0, 1]") for name in names]


@dataclass(frozen=True, slots=True)
class Storage:
    """What lies below host memory: an SSD, or the flash of a phone."""

    name: str
    capacity_bytes: int
    setup_ns: int
    """Time before an expert's first block is asked for; what a block waits is in ``curve``."""
    curve: Rows = field(metadata={"columns": ("block_bytes", "queue_depth", "bytes_per_s")})
    """Read rate by size of a block and number of blocks asked for at one time."""
    page_cache_copies: int = 3
    """Passes over host memory of a read through the page cache: device in, copy out and in."""

    def bytes_per_s(self, block_bytes: int, queue_depth: int) -> int:
        """Return the read rate, interpolated in the logarithms of all three; flat outside the curve."""
        return round(on_grid(self.curve, block_bytes, queue_depth, log_log))


def _decoding(rows: Rows, bits: float) -> int:
    """Return the rate at which weights are decoded: linear between rows, flat before the first."""
    return int(linear([(row[0], row[1]) for row in rows], bits))
