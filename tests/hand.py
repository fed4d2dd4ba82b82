"""What the hand-computed scenarios share: costs in bytes and rates, storage doubles, and :func:`play`.

Unless a test says otherwise there are 2 layers x 4 experts of 100 bytes, the link and a CPU team move one
byte a nanosecond, an expert takes 10 ns on the GPU, a layer's attention 5, a step's head 3. Keys are
``layer * 4 + expert``. Each log line reads: from, to, lane, kind, layer, expert.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hwmodels.host_cost import CPUWork
from hwmodels.units import transfer_ns
from sim.events import EventLog, Kind, Lane
from sim.hardware import Hardware, Memory
from sim.kv import JointBudget
from sim.metrics import RunTables
from sim.offloader import Offloader
from sim.policies.base import PolicySet
from sim.residency import Residency
from sim.timeline import Timeline
from sim.types import KeySpace, LayerPlan, View
from sim.workload import Workload
from tests.doubles import ScriptedPrefetch
from tests.strategies import ConstantCosts, Run, Token, one_request

BYTE_A_NS = 10**9
"""A rate in bytes a second at which one byte takes one nanosecond."""
AMPLE = Memory(dram_bytes_per_s=(1000 * BYTE_A_NS,))
"""Host memory that binds nobody, though all that moves is counted in it."""
EVERY_KEY = range(8)


@dataclass(frozen=True)
class ByteCosts(ConstantCosts):
    """Constant kernels; copies and CPU work by bytes and rates.

    A CPU expert is set up for ``cpu_setup`` nanoseconds and then streams its bytes.
    """

    expert_bytes: int = 100
    link_bytes_per_s: int = BYTE_A_NS
    cpu_setup: int = 0
    cpu_bytes_per_s: int = BYTE_A_NS

    def bytes_of(self, layer: int) -> int:
        return self.expert_bytes

    def load_ns(self, layer: int) -> int:
        return transfer_ns(self.bytes_of(layer), self.link_bytes_per_s)

    def copy_ns(self, layer: int) -> int:
        return transfer_ns(self.bytes_of(layer), self.link_bytes_per_s)

    def cpu_work(self, layer: int, num_tokens: int) -> CPUWork:
        return CPUWork(self.cpu_setup, self.bytes_of(layer), self.cpu_bytes_per_s, 0)

    def expert_cpu_ns(self, layer: int, num_tokens: int) -> int:
        return self.cpu_work(layer, num_tokens).alone_ns


@dataclass(frozen=True)
class GroupedCosts(ByteCosts):
    """One set of kernels for all that are ready together: ``gpu``, and ``gpu_token`` a token."""

    @property
    def is_grouped(self) -> bool:
        return True

    def experts_gpu_ns(self, layer: int, token_counts: Sequence[int], packed: bool) -> int:
        return self.gpu + self.gpu_token * sum(token_counts) if token_counts else 0

    def expert_gpu_ns(self, layer: int, num_tokens: int, packed: bool) -> int:
        return self.experts_gpu_ns(layer, (num_tokens,), packed)


@dataclass(frozen=True)
class FlatCurve:
    """A device with one rate, whatever is outstanding."""

    rate: int = BYTE_A_NS

    def bytes_per_s(self, block_bytes: int, queue_depth: int) -> int:
        return self.rate


@dataclass(frozen=True)
class DepthCurve:
    """A device whose rate is that of the number of blocks outstanding."""

    rates: Mapping[int, int]

    def bytes_per_s(self, block_bytes: int, queue_depth: int) -> int:
        return self.rates[queue_depth]


class Doubting(ScriptedPrefetch):
    """A scripted prefetcher that at some events finds keys stale; ``asked`` keeps what was queued."""

    def __init__(
        self, script: Mapping[int, Sequence[int]], stale: Mapping[int, Sequence[int]]
    ) -> None:
        super().__init__(script)
        self._stale = stale
        self.asked: dict[int, list[int]] = {}

    def stale(self, queued: Sequence[int], view: View) -> Sequence[int]:
        self.asked[view.event] = sorted(queued)
        return self._stale.get(view.event, ())


class HandRun(Run):
    """A finished run, and its log by unit."""

    def unit_lines(self) -> list[str]:
        """Return the log with the unit (GPU or CPU team) after the lane."""
        lines = sorted((row[0], row[2], row[1], *row[3:]) for row in self.rows)
        return [
            f"{start} {end} {Lane(lane).name}{unit} {Kind(kind).name} {layer} {expert}"
            for start, lane, end, unit, kind, _, layer, expert, *_ in lines
        ]

    def of_lane(self, lane: str) -> list[str]:
        """Return the lines of one lane, without its name."""
        return [line.replace(f"{lane} ", "", 1) for line in self.lines() if f" {lane} " in line]

    def stalls(self, step: int = 0) -> dict[str, int]:
        """Return a step's waiting by cause, those of 0 ns left out."""
        names = ("link", "storage", "dram", "host", "cpu")
        row = self.steps()[step]
        return {name: row[f"{name}_stall_ns"] for name in names if row[f"{name}_stall_ns"]}

    def check_lanes(self) -> None:
        """Check that no lane does two things at once."""
        by_lane = defaultdict(list)
        for start_ns, end_ns, lane, unit, *_ in self.rows:
            by_lane[lane, unit].append((start_ns, end_ns))
        for spans in by_lane.values():
            spans.sort()
            for (_, end_ns), (next_ns, _) in pairwise(spans):
                assert end_ns <= next_ns


def play(
    work: Workload | Sequence[Token],
    policies: PolicySet,
    costs: ByteCosts | None = None,
    hardware: Hardware | None = None,
    **sizes: Any,
) -> HandRun:
    """Run to the end; check the accounts, the lanes, and that a run without a log gives the same tables.

    ``sizes`` are those of :func:`offloader_of`.
    """
    workload = work if isinstance(work, Workload) else one_request(work)
    costs, fresh = costs or ByteCosts(), deepcopy(policies)
    plans: list[LayerPlan] = []
    tables = RunTables()
    log = EventLog(workload.num_experts, num_layers=workload.num_layers)
    tables.events = log
    offloader = offloader_of(workload, policies, costs, **sizes)
    Timeline(workload, offloader, costs, hardware, tables, on_plan=plans.append).run()
    work = [row for row in log.rows if row[2] != Lane.CACHE]
    done = HandRun(tables, plans, offloader, work)
    done.check_accounts()
    done.check_lanes()
    silent = Timeline(
        workload, offloader_of(workload, fresh, costs, **sizes), costs, hardware
    ).run()
    assert silent.steps.rows == tables.steps.rows
    assert silent.requests.rows == tables.requests.rows
    assert silent.busy_ns == tables.busy_ns
    return done


def offloader_of(
    workload: Workload,
    policies: PolicySet,
    costs: ByteCosts,
    *,
    slots: int = 8,
    pool_of_key: Sequence[int] | None = None,
    staging_slots: int = 64,
    prefetch_limit: int = 3,
    host_slots: int | None = None,
    joint: JointBudget | None = None,
    exclusive_host: bool = False,
    low_slots: int | None = None,
) -> Offloader:
    """Return an Offloader each of whose pools holds ``slots`` experts.

    ``host_slots``: host memory is a cache above storage of that many experts. ``joint`` sets the size of
    the one pool. ``low_slots``: a second pool holds that many low-precision copies.
    """
    copies, size = 1 if low_slots is None else 2, costs.expert_bytes
    keys = KeySpace(workload.num_layers, workload.num_experts, copies)
    every, sizes = [0] * keys.num_banks, list(map(costs.bytes_of, range(keys.num_banks)))
    pools = [slots * size] * len(policies.caches) if joint is None else joint.pool_bytes(0)
    pool_of_layer = list(every)
    if low_slots is not None:
        pools[1:] = [low_slots * sizes[-1]]
        pool_of_layer[keys.num_layers :] = [1] * keys.num_layers
    residency = Residency(keys, sizes, pool_of_layer, pools, pool_of_key)
    host = None if host_slots is None else Residency(keys, sizes, every, [host_slots * size])
    return Offloader(
        residency, policies, costs, staging_slots, prefetch_limit, joint, host, exclusive_host
    )
