"""Exact results of every policy on the bundled trace, so that no change of numbers goes unseen.

A golden says only that something changed; the laws say what must hold. After a change that is meant:
``pytest tests/test_golden.py --update-golden``, and look at the difference before committing it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sim.simulate import simulate
from tests.configs import composed, options
from tests.policy_labels import config_of, trace_of

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
FEATURES = {
    "serial": ("policy=saem", "engine=serial"),
    "chunked": ("policy=lru", "engine=chunked", "machine.link.pinned=false"),
    "fused": ("policy=lfu", "engine=fused", "workload.batch_size=4"),
    "storage": ("policy=saem", "cache.host_bytes=1.2e9"),
    "exclusive": ("policy=lfu", "cache.host_bytes=1.2e9", "engine.exclusive_host=true"),
    "page_cache": ("policy=lru", "cache.host_bytes=1.2e9", "engine.storage_access=page_cache"),
    "phone": ("policy=lru", "machine=phone_sd8gen3"),
    "jetson": ("policy=lru", "machine=jetson_agx_orin"),
    "four_gpus": ("policy=lru", "machine=rtx4090_x4"),
    "four_gpus_by_layer": ("policy=lfu", "machine=rtx4090_x4", "engine.split=layer"),
    "joint": ("policy=static", "cache.joint_bytes=6.05e8", "workload.batch_size=4"),
    "refusing": ("policy=lru", "cache.kv_bytes=7e6", "workload.batch_size=4"),
    "mixed": ("policy=lru", "workload.prefill_chunk=16", "workload.mixed=true"),
    "formed": (
        "policy=saem_former",
        "workload.batch_size=2",
        "workload.waiting=4",
        "workload.max_wait_steps=4",
    ),
    "poisson": (
        "policy=fiddler",
        "workload.arrivals=poisson",
        "workload.rate_per_s=1",
        "workload.batch_size=4",
    ),
}
"""One run for each part of the model that the policies' own runs leave out."""


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("policy", options("policy"))
def test_results_are_those_of_the_golden(policy: str, batch: int, update_golden: bool) -> None:
    config = config_of(policy, f"workload.batch_size={batch}", "output.belady=false")
    check(f"{policy}-batch{batch}", config, COUNTS, update_golden)


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_gives_what_its_golden_says(feature: str, update_golden: bool) -> None:
    counts = (*COUNTS, "refused", "reads", "demotions", "idle_ns")
    fixed = (*trace_of("lru"), "output.belady=false")
    check(f"feature-{feature}", composed(*fixed, *FEATURES[feature]), counts, update_golden)


def check(name: str, config: Mapping[str, Any], counts: Sequence[str], update: bool) -> None:
    """Run four requests; compare the counts with the golden ``name``, or write it."""
    summary, _ = simulate(config)
    found = {count: summary[count] for count in counts}
    file = GOLDEN / f"{name}.json"
    if update:
        file.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(file.read_text())
