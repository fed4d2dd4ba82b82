"""One place for what the tests of sim/ build: traces, workloads, costs, policies, Hypothesis strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hwmodels.host_cost import CPUWork
from sim.counter import STALLS, STEP_COLUMNS
from sim.events import EventLog, Kind, Lane
from sim.hardware import Hardware
from sim.metrics import RunTables
from sim.offloader import Offloader
from sim.policies.base import (
    CachePolicy,
    PolicySet,
)
from sim.residency import Residency
from sim.timeline import Timeline
from sim.types import KeySpace, LayerPlan, LayerRouting
from sim.workload import Workload
from traces.schema import DECODE, NO_EXPERT, PREFILL, Provenance, Trace, TraceMeta

LAW = settings(deadline=None, derandomize=True, max_examples=20, database=None)
"""How a property test runs: the same examples each time, on any machine."""

Token = Sequence[Sequence[int]]
"""The experts of one token, by layer."""


# -- traces and workloads ------------------------------------------------------------------------


def make_trace(
    requests: Sequence[tuple[Sequence[Token], Sequence[Token]]],
    num_experts: int,
    texts: Sequence[str] | None = None,
) -> Trace:
    """Return a trace of (prompt tokens, decoded tokens) by request; short rows end in NO_EXPERT."""
    tokens = [token for prompt, decode in requests for token in (*prompt, *decode)]
    num_layers = len(tokens[0])
    top_k = max(len(chosen) for token in tokens for chosen in token)
    ids = np.full((len(tokens), num_layers, top_k), NO_EXPERT, dtype=np.uint16)
    for row, token in enumerate(tokens):
        for layer, chosen in enumerate(token):
            ids[row, layer, : len(chosen)] = chosen
    lengths = [(len(prompt), len(decode)) for prompt, decode in requests]
    return trace_of_ids(ids, lengths, num_experts, texts)


def trace_of_ids(
    ids: NDArray[np.uint16],
    lengths: Sequence[tuple[int, int]],
    num_experts: int,
    texts: Sequence[str] | None = None,
) -> Trace:
    """Return a trace of ``ids`` [num_tokens, num_layers, top_k], cut into (prompt, decode) lengths."""
    _, num_layers, top_k = ids.shape
    meta = TraceMeta(
        model="test",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        layer_indices=tuple(range(num_layers)),
        provenance=Provenance("synthetic", "tests/strategies.py"),
        sorted_by_weight=False,
    )
    sizes = [prompt + decode for prompt, decode in lengths]
    position = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    kinds = [[PREFILL] * prompt + [DECODE] * decode for prompt, decode in lengths]
    return Trace(
        meta,
        request_id=np.repeat(np.arange(len(sizes), dtype=np.int32), sizes),
        position=position,
        phase=np.array([kind for of_one in kinds for kind in of_one], dtype=np.uint8),
        step=position,
        expert_ids=ids,
        text=None if texts is None else list(texts),
    )


def one_request(tokens: Sequence[Token], num_experts: int = 4) -> Workload:
    """Return a run of one request: the first token is its prompt, the rest are decoded."""
    return Workload(make_trace([(tokens[:1], tokens[1:])], num_experts))


def all_events(workload: Workload) -> list[LayerRouting]:
    """Return the routings of a run in the order a driver plans them."""
    return [routing for step in workload.steps() for routing in workload.routings(step)]


@st.composite
def workloads(draw: st.DrawFn, batch: int = 3, one_token: bool = False) -> Workload:
    """Draw a run of up to 4 layers x 6 experts, 3 requests, ``batch`` at a time, with reuse.

    ``one_token`` keeps every step at one token of exactly top_k experts.
    """
    num_layers, num_experts = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    top_k = draw(st.integers(1, min(3, num_experts)))
    prompt = st.just(1) if one_token else st.integers(1, 4)
    lengths = draw(st.lists(st.tuples(prompt, st.integers(0, 8)), min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    reuse_rate = draw(st.sampled_from([0.0, 0.5, 0.9]))
    ids = local_ids(rng, sum(map(sum, lengths)), num_layers, num_experts, top_k, reuse_rate)
    if not one_token and top_k > 1 and draw(st.booleans()):
        ids[rng.random(ids.shape) < 0.2 * (np.arange(top_k) > 0)] = NO_EXPERT
    batch_size = 1 if one_token else draw(st.integers(1, batch))
    return Workload(trace_of_ids(ids, lengths, num_experts), batch_size)


def local_ids(
    rng: np.random.Generator,
    num_tokens: int,
    num_layers: int,
    num_experts: int,
    top_k: int,
    reuse_rate: float,
) -> NDArray[np.uint16]:
    """Return choices with Zipf popularity that differs by layer; a share repeats the token before."""
    ids = np.empty((num_tokens, num_layers, top_k), dtype=np.uint16)
    popularity = 1.0 / np.arange(1, num_experts + 1)
    order = np.array([rng.permutation(num_experts) for _ in range(num_layers)])
    noise = rng.gumbel(size=(num_tokens, num_layers, num_experts))
    score = np.log(popularity) + noise
    for token in range(num_tokens):
        if token:
            kept = rng.random((num_layers, top_k)) < reuse_rate
            layers, slots = np.nonzero(kept)
            before = np.argsort(order, axis=1)[layers, ids[token - 1, layers, slots]]
            score[token, layers, before] += 100.0
        best = np.argsort(-score[token], axis=1)[:, :top_k]
        ids[token] = np.take_along_axis(order, best, axis=1)
    return ids


# -- costs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConstantCosts:
    """A cost model of constants; a kernel costs ``gpu + gpu_token * tokens`` nanoseconds."""

    load: int = 100
    gpu: int = 10
    gpu_token: int = 0
    cpu: int = 40
    dense: int = 5
    step: int = 3
    pack: int = 0
    packed_gain: int = 0
    handover: int = 0
    activation: int = 0

    def load_ns(self, layer: int) -> int:
        return self.load

    def copy_ns(self, layer: int) -> int:
        return self.load

    def experts_gpu_ns(self, layer: int, token_counts: Sequence[int], packed: bool) -> int:
        return sum(self.expert_gpu_ns(layer, tokens, packed) for tokens in token_counts)

    def expert_gpu_ns(self, layer: int, num_tokens: int, packed: bool) -> int:
        return self.gpu + self.gpu_token * num_tokens - packed * self.packed_gain

    def expert_cpu_ns(self, layer: int, num_tokens: int) -> int:
        return self.cpu * num_tokens

    def cpu_work(self, layer: int, num_tokens: int) -> CPUWork:
        return CPUWork(self.cpu * num_tokens, 0, 1, 0)

    def activation_bytes(self, num_tokens: int) -> int:
        return self.activation * num_tokens

    def dense_ns(self, num_tokens: int, kv_tokens: int, attention_pairs: int) -> int:
        return self.dense

    def step_ns(
        self, num_tokens: int, num_outputs: int, kv_tokens: int, attention_pairs: int
    ) -> int:
        return self.step

    def pack_ns(self, num_tokens: int) -> int:
        return self.pack

    def handover_ns(self, num_tokens: int) -> int:
        return self.handover

    @property
    def is_grouped(self) -> bool:
        return False

    @property
    def pack_launches(self) -> int:
        return 2

    def expert_launches(self, packed: bool) -> int:
        return 3 if packed else 5

    def gather_bytes(self, num_tokens: int, packed: bool) -> int:
        return 0 if packed else 4 * self.activation_bytes(num_tokens)

    def pack_bytes(self, num_tokens: int) -> int:
        return self.activation_bytes(4 * num_tokens)

    def padded_tokens(self, token_counts: Sequence[int]) -> int:
        return sum(token_counts)


FREE = ConstantCosts(load=0, gpu=0, cpu=0, dense=0, step=0)
"""Every latency is zero."""


def costs() -> st.SearchStrategy[ConstantCosts]:
    """Draw costs in which copies, kernels and CPU work may each be the slow part."""
    some = st.sampled_from([0, 1, 7, 50, 300])
    return st.builds(
        ConstantCosts,
        load=some,
        gpu=st.sampled_from([1, 9, 80]),
        gpu_token=st.integers(0, 5),
        cpu=some,
        dense=some,
        step=some,
        pack=st.sampled_from([0, 3]),
        packed_gain=st.sampled_from([0, 1]),
        handover=st.sampled_from([0, 11]),
    )


# -- runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Sizes of a run's memory; a pool has ``slots`` times 8 bytes, an expert 8 unless told otherwise.

    A low-precision copy has 3 bytes, a pool of them half the bytes.
    """

    slots: int
    per_layer: bool = False
    staging_slots: int = 64
    prefetch_limit: int = 2
    layer_bytes: tuple[int, ...] = ()

    def num_pools(self, workload: Workload) -> int:
        return workload.num_layers if self.per_layer else 1


def memories(per_layer: bool, mixed: bool = False) -> st.SearchStrategy[Memory]:
    """Draw sizes from nothing to more than enough; ``mixed``: experts differ in size by layer."""
    sizes = st.tuples(*[st.sampled_from([8, 12, 20])] * 4) if mixed else st.just(())
    return st.builds(
        Memory,
        slots=st.integers(0, 7 if per_layer else 25),
        per_layer=st.just(per_layer),
        staging_slots=st.integers(1, 6),
        prefetch_limit=st.integers(0, 4),
        layer_bytes=sizes,
    )


def build(
    workload: Workload,
    policies: PolicySet,
    memory: Memory,
    costs: Any,
    kind: type[Residency] = Residency,
) -> Offloader:
    """Return an Offloader with one pool, or one a layer; twice as many with low-precision copies."""
    layers, pools = range(workload.num_layers), memory.num_pools(workload)
    copies = len(policies.caches) // pools
    sizes = [*(memory.layer_bytes[: len(layers)] or [8 for _ in layers])]
    pool_of_layer = list(layers) if memory.per_layer else [0 for _ in layers]
    capacities = [memory.slots * 8] * pools
    if copies > 1:
        sizes += [3 for _ in layers]
        pool_of_layer += [pools + pool for pool in pool_of_layer]
        capacities += [memory.slots * 4] * pools
    keys = KeySpace(workload.num_layers, workload.num_experts, copies)
    residency = kind(keys, sizes, pool_of_layer, capacities)
    return Offloader(residency, policies, costs, memory.staging_slots, memory.prefetch_limit)


@dataclass
class Run:
    """A finished timeline run: its tables, every plan, and the Offloader as it was left."""

    tables: RunTables
    plans: list[LayerPlan]
    offloader: Offloader
    rows: list[tuple[int, ...]]

    def steps(self) -> list[dict[str, int]]:
        """Return the step table's rows by column name."""
        return [dict(zip(STEP_COLUMNS, row, strict=True)) for row in self.tables.steps.rows]

    def lines(self) -> list[str]:
        """Return the event table by start, then lane: from, to, lane, kind, layer, expert."""
        lines = sorted(
            (row[0], row[2], row[1], *row[3:]) for row in self.rows if row[2] != Lane.CACHE
        )
        return [
            f"{start} {end} {Lane(lane).name} {Kind(kind).name} {layer} {expert}"
            for start, lane, end, _, kind, _, layer, expert, *_ in lines
        ]

    def check_accounts(self) -> None:
        """Check that GPU work and the two stalls make up each step's time, to the nanosecond."""
        for row in self.steps():
            waited = [row[f"{cause}_stall_ns"] for cause in STALLS]
            assert min(waited) >= 0
            spent = row["gpu_busy_ns"] + sum(waited)
            assert spent == row["end_ns"] - row["start_ns"]


def run_timeline(
    workload: Workload,
    policies: PolicySet,
    memory: Memory,
    costs: ConstantCosts,
    kind: type[Residency] = Residency,
    hardware: Hardware | None = None,
) -> Run:
    """Run and record everything."""
    offloader = build(workload, policies, memory, costs, kind)
    plans: list[LayerPlan] = []
    tables = RunTables(events=EventLog(workload.num_experts, num_layers=workload.num_layers))
    Timeline(workload, offloader, costs, hardware, tables, on_plan=plans.append).run()
    assert tables.events is not None
    return Run(tables, plans, offloader, tables.events.rows)


def only(cache: CachePolicy, **others: Any) -> PolicySet:
    """Return the policies of a run with one pool."""
    return PolicySet([cache], **others)
