"""The first files of a machine, straight from its measured rows: what a fit then starts from.

Each figure is a median of rows, or follows from one or two, and its source says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwmodels.bench_kinds import ALONE
from hwmodels.microbench import Measurement, storage_curve
from hwmodels.units import NS_PER_S
from sim.types import ConfigError

Figure = tuple[Any, str]
"""A value and its source."""
Part = dict[str, Figure]


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured row with what its table says of it."""

    row: Measurement
    repeats: int
    spread: float

    @property
    def bytes_per_s(self) -> float:
        """The rate of its bytes."""
        return float(self.row.arguments["num_bytes"] * NS_PER_S / self.row.value_ns)


class Draft:
    """Figures of a machine from rows that are about one dtype of experts.

    Parameters
    ----------
    path
        The table, for messages.
    rows
        Its rows.
    facts
        What lies beside it: the machine, and how it was measured.
    """

    def __init__(self, path: Path, rows: Sequence[Measured], facts: Mapping[str, Any]) -> None:
        self._path = path
        self._rows = rows
        self._facts = facts
        self._machine: Mapping[str, Any] = facts["machine"]
        self._is_cuda = self._machine["device"]["kind"] == "cuda"

    # -- rows --------------------------------------------------------------------------------------

    def _of(self, kind: str, needed: str = "", **arguments: Any) -> list[Measured]:
        """Return rows of a kind that nothing ran beside; ConfigError if a figure needs one and none is."""
        wanted = {"beside": ALONE, **arguments}
        found = [
            row
            for row in self._rows
            if row.row.kind == kind
            and all(row.row.arguments.get(k, v) == v for k, v in wanted.items())
        ]
        if needed and not found:
            which = "".join(f", {key} {value}" for key, value in arguments.items())
            raise ConfigError(
                f"{self._path}: has no row of kind {kind}{which}, which {needed} needs; measure for longer"
            )
        return found

    @property
    def tool(self) -> str:
        """With what, and when, and how often the rows were measured."""
        counts = sorted(row.repeats for row in self._rows)
        return f"{self._tool}, medians of {counts[0]} to {counts[-1]} repeats"

    @property
    def _tool(self) -> str:
        machine = self._machine
        version = machine["greenroom"]
        return f"greenroom measure {version}, {self._facts['date']}, torch {machine['torch']}"

    def _source(self, what: str, row: Measured | None = None) -> str:
        head = f"X: {self._tool}: {what}"
        if row is None:
            return head
        return f"{head}; median of {row.repeats} repeats, spread {row.spread:.0%}"

    # -- parts -------------------------------------------------------------------------------------

    def gpu(self) -> Part:
        """Return the figures of what computes."""
        gemv = sorted(self._of("gemv", "gpu.memory_bytes_per_s"), key=_size)
        gemm = self._of("gemm", "gpu.matmul_flops")[0]
        stream = self._of("launch", "gpu.launch_ns", mode="stream")[0]
        launch_ns, largest = _each(stream), gemv[-1]
        work = gemm.row.arguments
        num_flops = 2 * work["m"] * work["n"] * work["k"]
        floor_ns = max(10, round(gemv[0].row.value_ns - launch_ns))
        device = self._machine["device"]
        context = "context" if self._is_cuda else "the device is the CPU, which has no context"
        return {
            "memory_bytes": (device["memory_bytes"], self._source("as the system tells")),
            "memory_bytes_per_s": (
                round(largest.bytes_per_s),
                self._source(f"one row times {_size(largest)} bytes", largest),
            ),
            "matmul_flops": (
                round(num_flops * NS_PER_S / gemm.row.value_ns),
                self._source(f"{work['m']} x {work['n']} x {work['k']} product", gemm),
            ),
            "kernel_floor_ns": (
                floor_ns,
                self._source(f"one row times {_size(gemv[0])} bytes, less a launch", gemv[0]),
            ),
            "launch_ns": (launch_ns, self._source("operations on one number in a row", stream)),
            "graph_launch_ns": self._graph_ns(launch_ns),
            "attention_floor_ns": self._attention_floor(largest.bytes_per_s),
            "step_overhead_ns": (0, "I: 0: not measured by itself"),
            "workspace_bytes": (device.get("context_bytes", 0), self._source(context)),
            "count": (1, "I: one device is measured"),
            "rate_beside_cpu_ratio": self._beside_cpu_ratio(),
            **_nulls("vector_flops", "rate_by_bits", "expert_table"),
        }

    def _graph_ns(self, launch_ns: int) -> Figure:
        rows = self._of("launch", mode="graph")
        if rows:
            return _each(rows[0]), self._source("the same from a CUDA graph", rows[0])
        return launch_ns, "I: as launch_ns: there are no graphs"

    def _attention_floor(self, bytes_per_s: float) -> Figure:
        row = min(self._of("attention", "gpu.attention_floor_ns"), key=_time)
        a = row.row.arguments
        num_bytes = 2 * a["kv_tokens"] * a["num_kv_heads"] * a["head_dim"] * a["kv_bits"] / 8
        floor_ns = max(10, round(row.row.value_ns - num_bytes * NS_PER_S / bytes_per_s))
        return floor_ns, self._source(
            f"decode over {a['kv_tokens']} entries, less their bytes", row
        )

    def _beside_cpu_ratio(self) -> Figure:
        found = self._facts["slowdown"].get("kernels_beside_cpu_experts")
        if found is None:
            return 1.0, "I: 1: not measured"
        what = f"beside experts on the host, {found['repeats']} repeats; 1 at most"
        return round(min(1.0, 1 / found["median"]), 4), self._source(what)

    def link(self) -> Part:
        """Return the figures of copies to the device."""
        queued = sorted(self._of("copy", "link", queued=True, direction="h2d"), key=_size)
        alone = sorted(
            self._of("copy", "link", queued=False, direction="h2d", pinned=True), key=_size
        )
        issue = self._of("copy_issue", "link.copy_issue_ns")[0]
        rate = queued[-1].bytes_per_s
        h2d = round(rate), self._source(f"{_size(queued[-1])} bytes, queued", queued[-1])
        setup_ns = alone[0].row.value_ns - _size(alone[0]) * NS_PER_S / rate
        gap_ns = queued[0].row.value_ns - _size(queued[0]) * NS_PER_S / rate
        pageable = self._rate("copy", "all copies are from one kind of memory", h2d, pinned=False)
        host = "I: as pageable_bytes_per_s: the host thread waits for such a copy"
        return {
            "h2d_bytes_per_s": h2d,
            "d2h_bytes_per_s": self._rate(
                "copy", "copies there and back are alike", h2d, direction="d2h"
            ),
            "pageable_bytes_per_s": pageable,
            "pageable_host_bytes_per_s": (pageable[0], host),
            "copy_setup_ns": (
                max(10, round(setup_ns)),
                self._source(f"{_size(alone[0])} bytes, less their time at the rate", alone[0]),
            ),
            "copy_gap_ns": (
                max(1, round(gap_ns)),
                self._source("the same of copies in a queue", queued[0]),
            ),
            "copy_issue_ns": (_each(issue), self._source("asking for copies", issue)),
            "duplex_ratio": self._duplex_ratio(),
            "switch_bytes_per_s": (None, "I: null: one device"),
            "hop_ns": (0, "I: 0: one device"),
        }

    def _rate(self, kind: str, why_not: str, instead: Figure, **arguments: Any) -> Figure:
        rows = sorted(self._of(kind, **arguments), key=_size)
        if not rows:
            return instead[0], f"I: as h2d_bytes_per_s: {why_not}"
        return round(rows[-1].bytes_per_s), self._source(f"{_size(rows[-1])} bytes", rows[-1])

    def _duplex_ratio(self) -> Figure:
        found = self._facts["slowdown"].get("duplex_ratio")
        if found is None:
            return 1.0, "I: 1: copies there and back share what they have"
        what = f"both directions at once, {found['repeats']} repeats"
        return found["median"], self._source(what)

    def cpu(self) -> Part:
        """Return the figures of experts on the host."""
        cores, threads = self._machine["cores"], self._facts["setting"]["cpu_threads"]
        one = self._fastest(threads=1)
        every = max(
            (self._fastest(threads=n) for n in self._team_sizes()), key=lambda row: row.bytes_per_s
        )
        smallest = min(self._of("expert_cpu", num_tokens=1, threads=1), key=_size)
        setup_ns = smallest.row.value_ns - _size(smallest) * NS_PER_S / one.bytes_per_s
        handover = self._of("handover", "cpu.handover_ns")[0]
        issue = self._of("launch_issue", "cpu.launch_issue_ns")[0]
        return {
            "cores": (cores, self._source("that this process may use")),
            "threads_used": (threads, "I: as it was asked for"),
            "memory_bytes": (self._machine["memory_bytes"], self._source("as the system tells")),
            "memory_bytes_per_s": (
                round(every.bytes_per_s),
                self._source(f"one token, threads: {every.row.arguments['threads']}", every),
            ),
            "thread_bytes_per_s": (
                round(one.bytes_per_s),
                self._source(f"one token, {_size(one)} bytes, one thread", one),
            ),
            "dram_bytes_per_s": self._dram(round(every.bytes_per_s)),
            "matmul_flops": self._matmul(),
            "expert_setup_ns": (
                max(10, round(setup_ns)),
                self._source(f"{_size(smallest)} bytes, less their time at the rate", smallest),
            ),
            "handover_ns": (
                round(handover.row.value_ns),
                self._source("to the threads and back, beside computing", handover),
            ),
            "launch_issue_ns": (_each(issue), self._source("asking for operations", issue)),
            "dispatch_ns": (0, "I: 0: counts only where the CPU computes all layers"),
            "dram_sharing": ("proportional", ""),
            "numa_nodes": (1, "I: taken for one memory"),
            **_nulls("numa_bytes_per_s", "rate_by_bits", "decode_weights_per_s"),
            **_nulls("codebook_weights_per_s", "expert_table"),
        }

    def _team_sizes(self) -> set[int]:
        return {row.row.arguments["threads"] for row in self._of("expert_cpu", num_tokens=1)}

    def _fastest(self, threads: int) -> Measured:
        rows = self._of("expert_cpu", "cpu", num_tokens=1, threads=threads)
        return max(rows, key=lambda row: row.bytes_per_s)

    def _matmul(self) -> Figure:
        """Return the rate of all cores, from the expert that reaches the most for its threads."""
        cores = self._machine["cores"]

        def flops(row: Measured) -> float:
            a = row.row.arguments
            num_flops = 2 * a["num_tokens"] * a["num_bytes"] * 8 / a["bits"]
            return float(num_flops * NS_PER_S / row.row.value_ns * cores / a["threads"])

        best = max(self._of("expert_cpu"), key=flops)
        a = best.row.arguments
        what = f"{a['num_tokens']} tokens, {a['num_bytes']} bytes, threads: {a['threads']}, times cores"
        return round(flops(best)), self._source(what, best)

    def _dram(self, least_bytes_per_s: int) -> Figure:
        """Return what readers of host memory reach together: the most of any two that were measured."""
        readers = ("expert_cpu", "copy") if self._is_cuda else ("expert_cpu", "copy", "expert_gpu")
        names = {"expert_cpu": "cpu_experts", "copy": "copies", "expert_gpu": "kernels"}
        best, pair = least_bytes_per_s, "experts alone reach the most"
        for kind in readers:
            for other in readers:
                a, b = self._beside(kind, names[other]), self._beside(other, names[kind])
                if a and b and a.bytes_per_s + b.bytes_per_s > best:
                    best = round(a.bytes_per_s + b.bytes_per_s)
                    pair = f"{names[kind]} and {names[other]} at once"
        return best, self._source(pair)

    def _beside(self, kind: str, other: str) -> Measured | None:
        return next(iter(self._of(kind, beside=other)), None)

    def storage(self) -> Part | None:
        """Return the figures of storage; None where it was not measured."""
        blocks, reads = self._of("storage"), self._of("storage_read")
        if not blocks or not reads:
            return None
        capacity = self._facts["setting"]["storage"]["capacity_bytes"]
        curve = storage_curve([row.row for row in blocks])
        return {
            "capacity_bytes": (capacity, self._source("of the file system")),
            "setup_ns": (10_000, "I: 10 us: the start of a fit"),
            "curve": (curve, self._source("blocks at random places")),
            "page_cache_copies": (3, "I: device in, copy out and in"),
        }


def _nulls(*names: str) -> Part:
    return dict.fromkeys(names, (None, "I: null: not measured"))


def _size(row: Measured) -> int:
    size: int = row.row.arguments["num_bytes"]
    return size


def _time(row: Measured) -> float:
    return row.row.value_ns


def _each(row: Measured) -> int:
    return max(1, round(row.row.value_ns / row.row.arguments["count"]))


PARTS: dict[str, Callable[[Draft], Part | None]] = {
    "gpu": Draft.gpu,
    "link": Draft.link,
    "cpu": Draft.cpu,
    "storage": Draft.storage,
}
"""How each part's figures are drawn up."""
