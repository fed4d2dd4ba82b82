"""Random machines of every feature, runs on them, and what a run's event rows tell of each copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from hwmodels.host_cost import CPUWork
from hwmodels.units import transfer_ns
from sim.hardware import Hardware, Memory
from sim.kv import JointBudget
from sim.offloader import Offloader, Shrink
from sim.policies.base import CachePolicy
from sim.policies.classic import LFU, LRU
from sim.pools import Pools
from sim.residency import RESIDENT, Residency
from sim.room import Admission
from sim.types import KeySpace, LayerPlan, LayerRouting, StepInfo, View
from sim.workload import Workload
from tests.doubles import SETUPS, Foresight, Setup
from tests.strategies import ConstantCosts, all_events, workloads

BYTE_A_NS = 10**9
AMPLE = 1 << 60


class Fickle(Foresight):
    """Proposes what comes, then gives every second of the loads that are still queued up."""

    def stale(self, queued: Sequence[int], view: View) -> Sequence[int]:
        return queued[::2]


def _fickle(workload: Workload) -> dict[str, Any]:
    return {"prefetch": Fickle(all_events(workload), 2)}


EVERY = {
    **SETUPS,
    "lru_fickle": Setup(lambda _: LRU(), _fickle, demand_only=False, timed=True),
    "lfu_fickle": Setup(lambda _: LFU(), _fickle, True, demand_only=False, timed=True),
}


# -- costs of real bytes and rates -----------------------------------------------------------------


@dataclass(frozen=True)
class RatedCosts(ConstantCosts):
    """Copies and CPU experts move bytes at rates; ``grouped``: kernels launched together cost less.

    From bank ``first_low`` on, kernels take half as long: those of low-precision copies.
    """

    layer_bytes: tuple[int, ...] = ()
    first_low: int = 1 << 30
    h2d_bytes_per_s: int = BYTE_A_NS
    cpu_bytes_per_s: int = BYTE_A_NS
    cpu_setup_ns: int = 0
    cpu_token_ns: int = 0
    grouped: bool = False

    def copy_ns(self, layer: int) -> int:
        return transfer_ns(self.layer_bytes[layer], self.h2d_bytes_per_s)

    def load_ns(self, layer: int) -> int:
        return self.copy_ns(layer)

    def expert_gpu_ns(self, layer: int, num_tokens: int, packed: bool) -> int:
        whole_ns = super().expert_gpu_ns(layer, num_tokens, packed)
        return whole_ns if layer < self.first_low else -(-whole_ns // 2)

    def experts_gpu_ns(self, layer: int, token_counts: Sequence[int], packed: bool) -> int:
        gpu_ns = self.gpu if layer < self.first_low else self.gpu // 2
        spared = gpu_ns // 2 * max(0, len(token_counts) - 1) if self.grouped else 0
        return super().experts_gpu_ns(layer, token_counts, packed) - spared

    def expert_cpu_ns(self, layer: int, num_tokens: int) -> int:
        return self.cpu_work(layer, num_tokens).alone_ns

    def cpu_work(self, layer: int, num_tokens: int) -> CPUWork:
        least_ns = self.cpu_token_ns * num_tokens
        return CPUWork(self.cpu_setup_ns, self.layer_bytes[layer], self.cpu_bytes_per_s, least_ns)


@dataclass(frozen=True)
class Rising:
    """A storage curve that grows with the queue up to a depth of 4."""

    base_bytes_per_s: int

    def bytes_per_s(self, block_bytes: int, queue_depth: int) -> int:
        return self.base_bytes_per_s * min(4, queue_depth)


# -- a case: all that a run depends on but its policies --------------------------------------------


class Watched(Offloader):
    """Notes what it decides and when, and checks what must hold at every one of these moments.

    ``orders[event, key]`` counts the copies to the GPU, and the arrivals in host memory, that have been
    planned of an expert up to and with the plan that wants it; both come in the order of their plans.
    """

    def __init__(self, *args: Any) -> None:
        self.plans: list[LayerPlan] = []
        self.times_ns: list[int] = []
        self.orders: dict[tuple[int, int], tuple[int, int]] = {}
        self._asked = defaultdict[int, int](int)
        self._returned = defaultdict[int, int](int)
        self._asker: dict[int, int] = {}  # the event that asked last
        super().__init__(*args)

    def begin_step(self, step: StepInfo) -> Shrink | None:
        shrink = super().begin_step(step)
        if shrink is not None:
            self._count(shrink.cancels, (), shrink.demotes)
        return shrink

    def plan_layer(self, routing: LayerRouting, now_ns: int) -> LayerPlan:
        plan = super().plan_layer(routing, now_ns)
        assert not self.times_ns or now_ns >= self.times_ns[-1], "the clock falls"
        wanted = [*plan.loads, *plan.bypasses, *plan.prefetches]
        self._count(plan.cancels, wanted, [*plan.reads, *plan.demotes])
        self._asker.update(dict.fromkeys(wanted, len(self.plans)))
        for key in [*wanted, *plan.late, *plan.on_cpu, *plan.deferred]:
            self.orders[len(self.plans), key] = self._asked[key], self._returned[key]
        self.plans.append(plan)
        self.times_ns.append(now_ns)
        self._check_memory()
        return plan

    def end_layer(self, plan: LayerPlan) -> Sequence[Admission]:
        admissions = super().end_layer(plan)
        if admissions and self.host is not None and self.host.exclusive:
            self._count((), (), plan.demotes)
        return admissions

    def _count(
        self, cancels: Sequence[int], wanted: Sequence[int], returning: Sequence[int]
    ) -> None:
        for key in cancels:
            self._asked[key] -= 1
            del self.orders[self._asker[key], key]
        for key in wanted:
            self._asked[key] += 1
        for key in returning:
            self._returned[key] += 1

    def on_load_started(self, key: int) -> None:
        if self.host is not None:
            assert self.host.residency.state[key] == RESIDENT, "copied before it is in host memory"
        super().on_load_started(key)

    def _check_memory(self) -> None:
        pools = range(len(self.residency.capacity_bytes))
        used = [self.residency.used_bytes(pool) for pool in pools]
        assert all(map(int.__le__, used, self.residency.capacity_bytes))
        if self._joint is not None:
            kv_bytes = self.view.step.held_kv_tokens * self._joint.kv_bytes_per_token
            assert sum(used) + kv_bytes <= self._joint.total_bytes
        if self.host is not None and self.host.exclusive:
            both = zip(self.residency.state, self.host.residency.state, strict=True)
            assert (RESIDENT, RESIDENT) not in both, "on the GPU and in exclusive host memory"


@dataclass(frozen=True)
class Case:
    """A workload, a machine, its costs, and how its memory is divided."""

    workload: Workload
    hardware: Hardware
    costs: RatedCosts
    pools: Pools
    pool_bytes: tuple[int, ...]
    staging_slots: int = 8
    prefetch_limit: int = 2
    host_bytes: int | None = None
    exclusive: bool = False
    host_cache: Callable[[], CachePolicy] = LRU
    joint: JointBudget | None = None

    def offloader(self, setup: Setup, kind: type[Residency] = Residency) -> Watched:
        workload, pools, joint = self.workload, self.pools, self.joint
        keys = KeySpace(workload.num_layers, workload.num_experts, pools.num_copies)
        policies = setup.policies(workload)
        policies.caches = [setup.cache(workload) for _ in self.pool_bytes]
        if not self.hardware.through_host:
            policies.placement = None  # one memory: a missing expert can only be loaded
        host = None
        if self.host_bytes is not None:
            policies.host = self.host_cache()
            zeros = [0] * keys.num_banks
            host = kind(keys, pools.layer_bytes, zeros, [self.host_bytes])
        memory = kind(
            keys, pools.layer_bytes, pools.pool_of_layer, self.pool_bytes, pools.pool_of_key
        )
        sizes = (self.staging_slots, self.prefetch_limit, joint, host, self.exclusive)
        return Watched(memory, policies, self.costs, *sizes)

    def with_hardware(self, **changes: Any) -> Case:
        return replace(self, hardware=replace(self.hardware, **changes))


def key_of(keys: KeySpace, layer: int, expert: int) -> int:
    """Return the key of an event row's expert; low-precision copies have the numbers from num_experts on."""
    low, expert = divmod(expert, keys.num_experts)
    return keys.low(keys.key(layer, expert)) if low else keys.key(layer, expert)


# -- strategies ------------------------------------------------------------------------------------


def rated_costs(
    layer_bytes: tuple[int, ...], rate: int, first_low: int
) -> st.SearchStrategy[RatedCosts]:
    """Draw costs in which copies, kernels and CPU work may each be the slow part."""
    few = {"gpu": (2, 30, 200), "gpu_token": (0, 3), "dense": (0, 5, 150), "step": (0, 3)}
    few |= {"pack": (0, 3), "packed_gain": (0, 1), "handover": (0, 11), "activation": (0, 6)}
    few |= {"cpu_bytes_per_s": (BYTE_A_NS, BYTE_A_NS // 2, 3 * BYTE_A_NS)}
    few |= {"cpu_setup_ns": (0, 5), "cpu_token_ns": (0, 40), "grouped": (False, True)}
    drawn: dict[str, Any] = {name: st.sampled_from(values) for name, values in few.items()}
    known = {"layer_bytes": st.just(layer_bytes), "h2d_bytes_per_s": st.just(rate)}
    known["first_low"] = st.just(first_low)
    return st.builds(RatedCosts, **drawn, **known)


@st.composite
def works(draw: st.DrawFn, batch: int, closed: bool) -> Workload:
    """Draw a run with chunked prefill, steps that mix it with decoding, and open arrivals."""
    base = draw(workloads(batch))
    is_open = not closed and draw(st.booleans())
    return Workload(
        base.trace,
        base.batch_size,
        prefill_chunk=draw(st.sampled_from([None, 1, 2])),
        mixed=draw(st.booleans()),
        arrivals="poisson" if is_open else "closed",
        rate_per_s=draw(st.sampled_from([1e5, 1e7])) if is_open else None,
    )


def memories_shared() -> st.SearchStrategy[Memory]:
    """Draw capacities some of which bind: of one or two nodes, their interconnect, links, a switch."""
    dram = st.sampled_from([6 * 10**8, 13 * 10**8, 4 * BYTE_A_NS])
    return st.builds(
        Memory,
        dram_bytes_per_s=dram.flatmap(lambda rate: st.sampled_from([(rate,), (rate, rate)])),
        duplex_bytes_per_s=st.sampled_from([12 * 10**8, AMPLE]),
        numa_bytes_per_s=st.sampled_from([5 * 10**8, AMPLE]),
        switch_bytes_per_s=st.sampled_from([None, 8 * 10**8]),
        proportional=st.booleans(),
    )


@st.composite
def engines(draw: st.DrawFn, num_banks: int, **fixed: Any) -> Hardware:
    """Draw what an engine and a link add, on one GPU; ``fixed`` overrides."""
    order = draw(st.sampled_from(["ready", "chunks", "in order", "serial", "serial in order"]))
    rates = st.sampled_from([BYTE_A_NS, BYTE_A_NS // 2])
    drawn = Hardware(
        copies_overlap=not order.startswith("serial"),
        cpu_overlaps=draw(st.booleans()),
        in_order=order.endswith("in order"),
        chunks=3 if order == "chunks" else draw(st.sampled_from([1, 3])),
        chunk_compute=order == "chunks",
        h2d_bytes_per_s=draw(rates),
        d2h_bytes_per_s=draw(st.sampled_from([BYTE_A_NS, BYTE_A_NS // 10])),
        setup_ns=draw(st.sampled_from([0, 13])),
        gap_ns=draw(st.sampled_from([0, 2])),
        issue_ns=draw(st.sampled_from([0, 4])),
        staging_ns=draw(st.sampled_from([(), (35,) * num_banks])),
        host_passes=draw(st.sampled_from([1, 3])),
        num_teams=draw(st.integers(1, 3)),
        numa_local=draw(st.booleans()),
        kv_bytes_per_token=1,
    )
    return replace(drawn, **fixed)


def pools_of(
    workload: Workload, sizes: Sequence[int], is_global: bool, gpus: int, split: str
) -> Pools:
    """Return the pools as a run has them."""
    layers = workload.num_layers
    shape = SimpleNamespace(num_moe_layers=layers, num_banks=len(sizes))
    shape.expert_bytes = sizes.__getitem__
    machine = SimpleNamespace(gpu=SimpleNamespace(count=gpus))
    costs: Any = SimpleNamespace(shape=shape, machine=machine, engine=SimpleNamespace(split=split))
    return Pools.of(costs, workload.num_experts, "global" if is_global else "layer")


@st.composite
def cases(
    draw: st.DrawFn,
    setup: Setup,
    most_gpus: int = 3,
    shared: bool | None = None,
    closed: bool = False,
    batch: int = 3,
    **fixed: Any,
) -> Case:
    """Draw a case without storage; ``shared`` None: either; ``fixed`` overrides the hardware's fields."""
    workload = draw(works(batch, closed))
    sizes = draw(st.tuples(*[st.sampled_from([60, 90, 120])] * workload.num_layers))
    sizes += (30,) * workload.num_layers * (setup.copies - 1)
    gpus = draw(st.integers(1, most_gpus))
    gpus = min(gpus, workload.num_experts)
    split = draw(st.sampled_from(["expert", "layer"])) if gpus <= workload.num_layers else "expert"
    pools = pools_of(workload, sizes, not setup.per_layer, gpus, split)
    is_shared = draw(st.booleans()) if shared is None else shared
    hardware = replace(
        draw(engines(len(sizes), **fixed)),
        gpu_of_key=pools.layout.gpu_of_key,
        home_of_layer=pools.layout.home_of_layer,
        hop_ns=draw(st.sampled_from([0, 9])),
        memory=draw(memories_shared()) if is_shared else None,
    )
    ratios = st.sampled_from([0.0, 0.3, 0.6, 1.0])
    return Case(
        workload,
        hardware,
        draw(rated_costs(sizes, hardware.h2d_bytes_per_s, workload.num_layers)),
        pools,
        tuple(int(draw(ratios) * total) for total in pools.all_bytes),
        staging_slots=draw(st.integers(1, 6)),
        prefetch_limit=draw(st.integers(0, 4)),
    )
