"""What one layer-step of every policy costs in lockstep, as a multiple of LRU's in the same run.

Ratios of CPU time, best of some rounds in which the policy and LRU take turns on the same work, all
included: observing, deciding, and the quality ledger of a lossy policy. A table to read, at batch 1 and
8; nothing is asserted of time, for machines differ. ``pytest tests/bench/test_policy_speed.py -m bench
-s`` prints it. The aim is 4 at most, for those that train as they go excepted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.build import build
from sim.ledger import LEDGER_COLUMNS
from sim.lockstep import run_lockstep
from sim.tables import Table
from tests.configs import composed, options
from tests.policy_labels import trace_of
from tests.public_data import routing_file
from traces.importers.experts_npz import read_experts_npz
from traces.store import write_trace

pytestmark = pytest.mark.bench

AIM = 4.0
ROUNDS = 3
BATCHES = (1, 8)
BUNDLED = ("workload.repeat=2",)  # of four requests, so that eight can run at one time
PUBLIC = (
    "workload.requests=[1,2]",
    "workload.length=[1,63]",
    "workload.cut=true",  # 512 tokens are eight requests
    "calibration.requests=[0,1]",
)


def layer_step_ns(config: dict[str, Any]) -> float:
    """Run a configuration in lockstep; return the CPU time of a layer-step."""
    scenario = build(config)
    workload, offloader = scenario.workload, scenario.offloader
    ledger = Table(LEDGER_COLUMNS) if offloader.policies.lossy else None
    gc.collect()
    gc.disable()
    begin_ns = time.process_time_ns()
    counter = run_lockstep(workload, offloader, ledger=ledger)
    spent_ns = time.process_time_ns() - begin_ns
    gc.enable()
    return spent_ns / (len(counter.rows) * workload.num_layers)


def ratio(policy: dict[str, Any], lru: dict[str, Any]) -> tuple[float, float]:
    """Return a policy's best time by LRU's, and the latter in microseconds."""
    rounds = [(layer_step_ns(policy), layer_step_ns(lru)) for _ in range(ROUNDS)]
    own_ns, base_ns = (min(times) for times in zip(*rounds, strict=True))
    return own_ns / base_ns, base_ns / 1000.0


def tabulate(where: str, config: Callable[[str, str, int], dict[str, Any]]) -> dict[str, float]:
    """Print each policy's ratios by batch size; return that at batch 1 where it could run.

    ``config`` takes the policy to run, the one whose trace is chosen, and the batch size.
    """
    print(f"\n{where}: layer-steps of LRU that one of each policy costs (aim: {AIM:.0f} at most)")
    found = {}
    for policy in options("policy"):
        line = f"{policy:26}"
        for batch in BATCHES:
            try:
                own, base_us = ratio(config(policy, policy, batch), config("lru", policy, batch))
            except ValueError as reason:  # a column that the trace does not have
                line += f"  not run: {reason}"
                break
            if batch == BATCHES[0]:
                found[policy] = own
            mark = "*" if own > AIM else " "
            line += f"  batch {batch}: {own:5.1f}{mark} ({base_us:5.1f} us)"
        print(line, flush=True)
    return found


def test_policies_on_the_bundled_traces() -> None:
    def config(policy: str, like: str, batch: int) -> dict[str, Any]:
        return composed(
            f"policy={policy}", *trace_of(like), f"workload.batch_size={batch}", *BUNDLED
        )

    assert tabulate("8 layers x 32 experts, top-4", config).keys() == set(options("policy"))


def test_policies_that_need_ids_only_on_public_routing(tmp_path: Path) -> None:
    path = tmp_path / "public.parquet"
    write_trace(path, read_experts_npz(routing_file("qwen3-30b-a3b_math.npz")))

    def config(policy: str, like: str, batch: int) -> dict[str, Any]:
        chosen = f"policy={policy}", f"trace.path={path}", f"workload.batch_size={batch}"
        return composed(*chosen, *PUBLIC)

    found = tabulate("48 layers x 128 experts, top-8", config)
    assert {"lru", "lfu", "belady", "prefetch_previous"} <= found.keys()
