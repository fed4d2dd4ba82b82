"""What a long request takes of memory: no more than a short one.

Each run is a process of its own, which prints its peak; ``pytest tests/bench -m bench -s`` shows them.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sim.lockstep import run_lockstep
from sim.metrics import Totals
from sim.policies.base import PolicySet
from sim.policies.classic import LRU
from sim.result_tables import streamed_tables
from sim.timeline import Timeline
from sim.workload import Workload
from tests.bench.test_speed import COSTS, SLOTS, routed_trace
from tests.strategies import Memory, build

pytestmark = pytest.mark.bench

ROOT = Path(__file__).parents[2]
SHORT, LONG = 8_192, 32_768
MAX_GROWTH = 1.1


def run_long(driver: str, num_tokens: int, folder: Path) -> None:
    """Run one request of so many tokens; tables go to files."""
    workload = Workload(routed_trace(), length=(1, num_tokens))
    policies = PolicySet([LRU() for _ in range(workload.num_layers)])
    memory = Memory(SLOTS, per_layer=True, staging_slots=10)
    offloader = build(workload, policies, memory, COSTS)
    with streamed_tables(folder, Totals(), {}, workload.num_experts) as tables:
        if driver == "lockstep":
            run_lockstep(workload, offloader, steps=tables.steps)
            return
        Timeline(workload, offloader, COSTS, tables=tables).run()


def peak_kib(driver: str, num_tokens: int, folder: Path) -> int:
    """Return the peak resident memory of a process that does just that."""
    begin_s = time.monotonic()
    command = [sys.executable, "-m", "tests.bench.test_scale", driver, str(num_tokens), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    peak = int(done.stdout.split()[-1])
    print(
        f"{driver}, {num_tokens} tokens: {peak / 1024:.1f} MiB, {time.monotonic() - begin_s:.0f} s"
    )
    return peak


@pytest.mark.parametrize("driver", ["lockstep", "timeline"])
def test_a_long_request_takes_no_more_memory_than_a_short_one(driver: str, tmp_path: Path) -> None:
    """48 layers of 128 experts, public Qwen3-30B-A3B routing where it is at hand, tiled."""
    print()
    short, long = (peak_kib(driver, size, tmp_path / str(size)) for size in (SHORT, LONG))
    assert long <= MAX_GROWTH * short


if __name__ == "__main__":
    run_long(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
