"""What one decode layer-step costs, in bare SimPy timeouts of the same run.

Ratios of CPU time, best of some rounds that take turns, so that neither the machine's speed nor what
else it does decides; garbage collection is off meanwhile, as in ``timeit``, for its cost depends on
what else the process holds. ``pytest tests/bench -m bench -s`` prints them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simpy

from sim.lockstep import run_lockstep
from sim.policies.base import PolicySet
from sim.policies.classic import LRU
from sim.timeline import Timeline
from sim.workload import Workload
from tests.public_data import routing_file
from tests.strategies import ConstantCosts, Memory, build, local_ids, trace_of_ids
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
COSTS = ConstantCosts(load=400_000, gpu=12_000, dense=60_000, step=500_000)


def bare_timeouts() -> None:
    """Run the least that SimPy can: one process, one timeout after another."""
    env = simpy.Environment()

    def process() -> Iterator[Any]:
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
