"""Exact results of every policy on the bundled trace, so that no change of numbers goes unseen.

A golden says only that something changed; the laws say what must hold. After a change that is meant:
``pytest tests/test_golden.py --update-golden``, and look at the difference before committing it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.simulate import simulate
from tests.configs import composed, options

GOLDEN = Path(__file__).parent / "golden"
COUNTS = (
    "steps",
    "total_ns",
    "loads",
    "bypasses",
    "on_cpu",
    "prefetches",
    "admissions",
    "evictions",
    "h2d_bytes",
    "wasted_prefetch_bytes",
    "stages",
)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("policy", options("policy"))
def test_results_are_those_of_the_golden(policy: str, batch: int, update_golden: bool) -> None:
    config = composed(
        f"policy={policy}", "workload.requests=[24,28]", "calibration.requests=[0,24]"
    )
    config["workload"]["batch_size"] = batch
    config["output"]["belady"] = False
    summary, _ = simulate(config)
    found = {name: summary[name] for name in COUNTS}
    file = GOLDEN / f"{policy}-batch{batch}.json"
    if update_golden:
        file.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(file.read_text())
