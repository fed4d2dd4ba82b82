"""How GPU memory is divided, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.budget import Budget
from sim.build import build
from tests.configs import composed

EXPERT = 3 * 128 * 48 * 2  # the tiny model's expert, bf16


def budget(trace: Path, *overrides: str) -> Budget:
    return build(composed("model=tiny", f"trace.path={trace}", *overrides)).budget


def test_a_ratio_gives_each_layer_whole_slots(small_trace_file: Path) -> None:
    found = budget(small_trace_file, "cache.ratio=0.3")
    assert found.pools.layer_bytes == (EXPERT,) * 4
    assert found.pool_bytes == (4 * EXPERT,) * 4, "0.3 of 16 experts is 4 whole ones"
    assert list(found.pools.pool_of_layer) == [0, 1, 2, 3]
    assert found.all_expert_bytes == 4 * 16 * EXPERT
    assert found.cache_ratio == 0.25


def test_a_global_pool_has_all_bytes(small_trace_file: Path) -> None:
    found = budget(small_trace_file, "policy=lru_global", "cache.ratio=0.3")
    assert found.pool_bytes == (int(0.3 * 4 * 16 * EXPERT),)
    assert list(found.pools.pool_of_layer) == [0] * 4


def test_bytes_are_shared_out_among_layers(small_trace_file: Path) -> None:
    found = budget(small_trace_file, f"cache.bytes={40 * EXPERT}")
    assert found.pool_bytes == (10 * EXPERT,) * 4


@pytest.mark.parametrize(("batch", "longest"), [(1, 45), (2, 90), (3, 135)])
def test_kv_grows_with_the_batch(batch: int, longest: int, small_trace_file: Path) -> None:
    """Six requests of 5 + 40 tokens; requests that start together end together."""
    found = budget(small_trace_file, f"workload.batch_size={batch}")
    kv_bytes_per_token = 2 * 2 * 32 * 2 * 4  # K and V, 2 heads of 32, bf16, 4 layers
    assert found.kv_bytes == longest * kv_bytes_per_token


@pytest.mark.parametrize(
    ("overrides", "slots"),
    [((), 4), (("workload.batch_size=3",), 8), (("workload.batch_size=50",), 16)],
)
def test_staging_holds_a_decode_events_experts_and_two(
    overrides: tuple[str, ...], slots: int, small_trace_file: Path
) -> None:
    found = budget(small_trace_file, *overrides)
    assert found.staging_slots == slots
    assert found.staging_bytes == slots * EXPERT


def test_the_total_is_the_sum_of_its_parts(small_trace_file: Path) -> None:
    found: Any = budget(small_trace_file)
    parts = ("non_expert_bytes", "kv_bytes", "workspace_bytes", "staging_bytes", "cache_bytes")
    assert all(getattr(found, part) > 0 for part in parts)
    assert found.total_bytes() == sum(getattr(found, part) for part in parts)
