"""What a sweep costs beyond its simulations: composing, handing out, writing, collecting."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from sim.composing import composing
from sim.results import read_rows
from sim.simulate import simulate
from sim.sweeps.chunk import config_of
from sim.sweeps.coordinator import run_sweep
from sim.sweeps.pool import cores
from sim.sweeps.question import question_of

pytestmark = pytest.mark.bench

POINTS, SAMPLE = 10_000, 200
WORDS = (
    *("policy=lru,lfu,fifo,static", "cache.ratio=interval(0.05,0.95)", "workload.requests=[24,25]"),
    *(
        "workload.length=[2,2]",
        "output.belady=false",
        "sweep.search=random",
        f"sweep.points={POINTS}",
    ),
)


def simulating_ms(configs: list[Any]) -> float:
    """Return the processor time in ms that a point's simulation alone takes, in the mean."""
    started = time.process_time()
    for config in configs:
        simulate(config, keep_rows=False)
    return 1e3 * (time.process_time() - started) / len(configs)


def test_ten_thousand_points(tmp_path: Path) -> None:
    words = list(WORDS)
    with composing():
        question = question_of(words)
        started = time.process_time()
        (points,) = question.batches()
        composing_ms = 1e3 * (time.process_time() - started) / POINTS
        bases = question.composer.bases
    sample = points[:: POINTS // SAMPLE]
    configs = [config_of(bases[point.base], point.edits) for point in sample]
    simulate(configs[0], keep_rows=False)
    alone_ms = simulating_ms(configs) / 2
    started = time.process_time()
    serial = run_sweep([*words, "sweep=serial", f"sweep.dir={tmp_path / 'serial'}"])
    spent_ms = 1e3 * (time.process_time() - started) / POINTS
    alone_ms += simulating_ms(configs) / 2  # before and after: a busy machine drifts
    started, begun = time.process_time(), time.monotonic()
    pooled = run_sweep([*words, f"sweep.dir={tmp_path / 'pool'}"])
    handing_ms = 1e3 * (time.process_time() - started) / POINTS
    wall_ms = 1e3 * (time.monotonic() - begun) / POINTS
    assert len(serial.rows) == POINTS
    assert read_rows(tmp_path / "pool") == pooled.rows == serial.rows
    print(
        f"\n{POINTS} points of {alone_ms:.2f} CPU-ms each: {spent_ms:.2f} CPU-ms a point in one process, "
        f"{spent_ms - alone_ms:.2f} beyond the simulation (x{spent_ms / alone_ms:.2f}), of which composing "
        f"{composing_ms:.3f}; with a pool of {cores()} the coordinator spends {handing_ms:.2f} CPU-ms a "
        f"point, and a point takes {wall_ms:.2f} ms of wall time"
    )
