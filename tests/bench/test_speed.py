"""What one decode layer-step costs, in bare SimPy timeouts of the same run; and what a batch costs.

Ratios of CPU time, best of some rounds that take turns, so that neither the machine's speed nor what
else it does decides; garbage collection is off meanwhile, as in ``timeit``, for its cost depends on
what else the process holds. ``pytest tests/bench -m bench -s`` prints them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simpy

from sim.hardware import Hardware
from sim.hardware import Memory as SharedMemory
from sim.lockstep import run_lockstep
from sim.metrics import RunTables
from sim.offloader import Offloader
from sim.policies.base import PolicySet
from sim.policies.classic import LRU
from sim.policies.placement import InSituCPU
from sim.residency import Residency
from sim.storage import Reading
from sim.timeline import Timeline
from sim.types import KeySpace, LayerRouting
from sim.workload import Workload
from tests.machines import Fickle, RatedCosts, Rising
from tests.public_data import routing_file
from tests.strategies import (
    ConstantCosts,
    Memory,
    all_events,
    build,
    local_ids,
    trace_of_ids,
)
from traces.importers.experts_npz import read_experts_npz
from traces.schema import Trace
from traces.store import read_trace, write_trace

pytestmark = pytest.mark.bench

ROUNDS = 5
NUM_TIMEOUTS = 300_000
NUM_TOKENS = 512
SLOTS = 32  # of 128 experts a layer
MAX_LOCKSTEP = 10.0
MAX_TIMELINE = 25.0
AIM_EVERYTHING = 60.0  # not met: some 800 calls of Python a layer-step, 19 of them SimPy events
MAX_EVERYTHING = 400.0  # so that a step backwards is seen
MAX_BATCH = 8.0
BATCH = 32
COSTS = ConstantCosts(load=400_000, gpu=12_000, dense=60_000, step=500_000)
EXPERT_BYTES = 9_437_184  # of Qwen3-30B-A3B in 16 bits


def bare_timeouts() -> None:
    """Run the least that SimPy can: one process, one timeout after another."""
    env = simpy.Environment()

    def process() -> Generator[Any, Any, None]:
        for _ in range(NUM_TIMEOUTS):
            yield env.timeout(1)

    env.run(until=env.process(process()))


def routed_trace() -> Trace:
    """Return one request of public Qwen3-30B-A3B routing, or of synthetic routing much like it."""
    try:
        file = routing_file("qwen3-30b-a3b_math.npz")
    except pytest.skip.Exception:
        ids = local_ids(np.random.default_rng(0), NUM_TOKENS, 48, 128, 8, reuse_rate=0.4)
        print("\nrouting: synthetic")
        return trace_of_ids(ids, [(1, NUM_TOKENS - 1)], 128)
    print(f"\nrouting: {file.name}")
    return read_experts_npz(file).take(slice(0, NUM_TOKENS))


def best_cpu_ns(*runs: Callable[[], object]) -> list[int]:
    """Return the least CPU time of each run over rounds in which they take turns."""
    best = [1 << 62 for _ in runs]
    for _ in range(ROUNDS):
        for place, run in enumerate(runs):
            gc.collect()
            gc.disable()
            begin_ns = time.process_time_ns()
            run()
            best[place] = min(best[place], time.process_time_ns() - begin_ns)
            gc.enable()
    return best


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(routed_trace())


def test_a_layer_step_costs_a_few_bare_timeouts(workload: Workload) -> None:
    layer_steps = NUM_TOKENS * workload.num_layers

    def offloader() -> Any:
        policies = PolicySet([LRU() for _ in range(workload.num_layers)])
        return build(workload, policies, Memory(SLOTS, per_layer=True, staging_slots=10), COSTS)

    bare_ns, lockstep_ns, timeline_ns = best_cpu_ns(
        bare_timeouts,
        lambda: run_lockstep(workload, offloader()),
        lambda: Timeline(workload, offloader(), COSTS).run(),
    )
    unit_ns = bare_ns / NUM_TIMEOUTS
    lockstep, timeline = (ns / layer_steps / unit_ns for ns in (lockstep_ns, timeline_ns))
    print(f"one bare timeout: {unit_ns:.0f} ns of CPU time")
    print(f"one layer-step in lockstep: {lockstep:.1f} bare timeouts (at most {MAX_LOCKSTEP})")
    print(f"one layer-step in the timeline: {timeline:.1f} bare timeouts (at most {MAX_TIMELINE})")
    assert lockstep <= MAX_LOCKSTEP
    assert timeline <= MAX_TIMELINE


# -- with everything on ----------------------------------------------------------------------------

EVERYTHING = Hardware(
    chunks=3,
    chunk_compute=True,
    h2d_bytes_per_s=25 * 10**9,
    d2h_bytes_per_s=25 * 10**9,
    setup_ns=10_000,
    gap_ns=1_000,
    issue_ns=2_000,
    memory=SharedMemory([60 * 10**9]),
    num_teams=2,
    reading=Reading(Rising(10**9), 2**20, 32, 80_000),
    kv_bytes_per_token=98_304,
)


@dataclass(frozen=True)
class HalfOnCPU(RatedCosts):
    """Experts of every second layer are faster on the CPU than over the link."""

    def expert_cpu_ns(self, layer: int, num_tokens: int) -> int:
        return super().expert_cpu_ns(layer, num_tokens) * (4 if layer % 2 else 1)


def everything(workload: Workload, events: list[LayerRouting]) -> Timeline:
    """Return a run with chunks, shared memory, CPU experts, prefetches and cancels, and storage."""
    num_layers, num_experts = workload.num_layers, workload.num_experts
    layers, sizes = range(num_layers), (EXPERT_BYTES,) * num_layers
    costs = HalfOnCPU(
        gpu=12_000,
        dense=60_000,
        step=500_000,
        handover=20_000,
        activation=4_096,
        layer_bytes=sizes,
        h2d_bytes_per_s=EVERYTHING.h2d_bytes_per_s,
        cpu_bytes_per_s=35 * 10**9,
        cpu_setup_ns=5_000,
    )
    keys = KeySpace(num_layers, num_experts)
    memory = Residency(keys, sizes, layers, [SLOTS * EXPERT_BYTES] * num_layers)
    host = Residency(keys, sizes, [0] * num_layers, [len(keys) * 3 // 4 * EXPERT_BYTES])
    caches = [LRU() for _ in layers]
    policies = PolicySet(caches, InSituCPU(), Fickle(events, 2), host=LRU())
    offloader = Offloader(memory, policies, costs, staging_slots=10, host=host)
    return Timeline(workload, offloader, costs, EVERYTHING)


def test_a_layer_step_with_everything_on_costs_some_tens(workload: Workload) -> None:
    events, tables = all_events(workload), list[RunTables]()
    bare_ns, run_ns = best_cpu_ns(
        bare_timeouts, lambda: tables.append(everything(workload, events).run())
    )
    found = run_ns / (NUM_TOKENS * workload.num_layers) / (bare_ns / NUM_TIMEOUTS)
    sums = np.array(tables[-1].steps.rows).sum(axis=0)
    named = dict(zip(tables[-1].steps.columns, sums.tolist(), strict=True))
    counts = ("hits", "late_hits", "loads", "on_cpu", "prefetches", "cancels", "reads")
    print("\n" + ", ".join(f"{named[name]} {name}" for name in counts))
    print(f"one layer-step with everything on: {found:.1f} bare timeouts (aim: {AIM_EVERYTHING})")
    assert all(named[name] for name in counts)
    assert found <= MAX_EVERYTHING


# -- batches ---------------------------------------------------------------------------------------


def test_a_batch_of_32_costs_less_than_8_times_a_single_request(workload: Workload) -> None:
    """A step that decodes; the trace is cut into 32 requests that run at one time."""
    rows = NUM_TOKENS // BATCH
    cut = Workload(workload.trace, BATCH, length=(1, rows), cut=True, mixed=True)
    assert len(cut.requests) == BATCH
    sizes = Memory(SLOTS, per_layer=True, staging_slots=10)

    def offloader(work: Workload) -> Offloader:
        return build(work, PolicySet([LRU() for _ in range(work.num_layers)]), sizes, COSTS)

    print()
    drivers: dict[str, Callable[[Workload], object]] = {
        "lockstep": lambda work: run_lockstep(work, offloader(work)),
        "timeline": lambda work: Timeline(work, offloader(work), COSTS).run(),
    }
    factors = []
    for name, run in drivers.items():
        one_ns, many_ns = best_cpu_ns(partial(run, workload), partial(run, cut))
        factors.append(many_ns / rows / (one_ns / NUM_TOKENS))
        print(f"a step of {BATCH} in the {name}: {factors[-1]:.1f} of one (at most {MAX_BATCH})")
    assert max(factors) <= MAX_BATCH


# -- traces ----------------------------------------------------------------------------------------


def test_reading_a_trace_costs_less_than_running_it(workload: Workload, tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    write_trace(path, workload.trace)
    policies = PolicySet([LRU() for _ in range(workload.num_layers)])
    read_ns, run_ns = best_cpu_ns(
        lambda: read_trace(path),
        lambda: run_lockstep(
            workload, build(workload, policies, Memory(SLOTS, per_layer=True), COSTS)
        ),
    )
    print(f"\nreading {NUM_TOKENS} tokens: {read_ns / 1e6:.1f} ms, {read_ns / run_ns:.3f} of a run")
    assert read_ns < run_ns
