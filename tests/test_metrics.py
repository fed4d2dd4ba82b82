"""Every metric from tables made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.metrics import REQUEST_COLUMNS, STEP_COLUMNS, summarise

PREFILL = {
    "step": 0, "phase": 0, "num_tokens": 4, "num_sequences": 1, "end_ns": 1_000,
    "accesses": 10, "hits": 2, "loads": 5, "bypasses": 3, "demand_bytes": 80,
    "gpu_busy_ns": 300, "link_stall_ns": 700, "evictions": 1, "admissions": 2,
}  # fmt: skip
DECODE = {
    "step": 1, "phase": 1, "num_tokens": 1, "num_sequences": 1, "start_ns": 1_000, "end_ns": 4_000,
    "accesses": 10, "hits": 6, "late_hits": 1, "loads": 1, "on_cpu": 2, "prefetches": 3,
    "demand_bytes": 10, "prefetch_bytes": 24, "gpu_busy_ns": 1_000, "cpu_stall_ns": 1_900,
    "link_stall_ns": 100, "evictions": 4,
}  # fmt: skip


def step_row(**values: int) -> tuple[int, ...]:
    return tuple(values.get(column, 0) for column in STEP_COLUMNS)


def request(first: int, end: int, output: int, arrival: int = 0) -> tuple[int, ...]:
    tpot = (end - first) // (output - 1) if output > 1 else 0
    values = {
        "arrival_ns": arrival, "first_token_ns": first, "end_ns": end, "prompt_tokens": 4,
        "output_tokens": output, "ttft_ns": first - arrival, "tpot_ns": tpot,
    }  # fmt: skip
    return tuple(values.get(column, 0) for column in REQUEST_COLUMNS)


@pytest.fixture
def summary() -> dict[str, Any]:
    steps = [step_row(**PREFILL), step_row(**DECODE)]
    requests = [request(1_000, 4_000, 4), request(2_000, 2_000, 1), request(500, 2_500, 3, 100)]
    return summarise(steps, requests)


def test_counts_are_sums(summary: dict[str, Any]) -> None:
    assert (summary["steps"], summary["requests"]) == (2, 3)
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (12, 8)
    assert (summary["loads"], summary["bypasses"], summary["on_cpu"]) == (6, 3, 2)
    assert (summary["prefetches"], summary["admissions"], summary["evictions"]) == (3, 2, 5)
    assert summary["inserts"] == 6 + 3 + 2
    assert (summary["demand_bytes"], summary["prefetch_bytes"]) == (90, 24)
    assert summary["h2d_bytes"] == 114


def test_rates_are_shares_of_accesses(summary: dict[str, Any]) -> None:
    assert summary["hit_rate"] == 8 / 20
    assert summary["late_hit_rate"] == 1 / 20
    assert summary["miss_rate"] == 11 / 20
    assert summary["decode_hit_rate"] == 6 / 10
    assert summary["decode_late_hit_rate"] == 1 / 10
    assert summary["decode_miss_rate"] == 3 / 10


def test_speed_is_output_tokens_over_the_whole_time(summary: dict[str, Any]) -> None:
    assert summary["total_ns"] == 4_000
    assert summary["tokens_per_s"] == pytest.approx(8 / 4e-6)


def test_latencies_are_by_request(summary: dict[str, Any]) -> None:
    assert summary["ttft_ns_mean"] == pytest.approx((1_000 + 2_000 + 400) / 3)
    assert summary["ttft_ns_p50"] == 1_000
    assert summary["tpot_ns_mean"] == 1_000, "a request of one token has no time between tokens"
    assert summary["tpot_ns_p99"] == 1_000


def test_time_is_shared_out_and_the_largest_share_is_the_bottleneck(
    summary: dict[str, Any],
) -> None:
    assert summary["gpu_share"] == 1_300 / 4_000
    assert summary["link_stall_share"] == 800 / 4_000
    assert summary["cpu_stall_share"] == 1_900 / 4_000
    assert summary["bottleneck"] == "cpu"


def test_a_run_without_time_has_counts_only() -> None:
    timeless = {**DECODE, "start_ns": 0, "end_ns": 0}
    found = summarise([step_row(**timeless)], [])
    assert found["hit_rate"] == 0.6
    for name in ("tokens_per_s", "gpu_share", "bottleneck", "ttft_ns_mean", "tpot_ns_p50"):
        assert found[name] is None
