"""Every metric from tables made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.counter import STEP_COLUMNS
from sim.metrics import RunTables, Totals, summarise
from sim.requests import REQUEST_COLUMNS, Outcome

PREFILL = {
    "step": 0, "phase": 0, "num_tokens": 4, "num_sequences": 1, "end_ns": 1_000,
    "accesses": 10, "hits": 2, "loads": 5, "bypasses": 3, "demand_bytes": 80,
    "gpu_busy_ns": 300, "link_stall_ns": 700, "evictions": 1, "admissions": 2,
    "reads": 2, "read_bytes": 16, "demotions": 1, "d2h_bytes": 8,
}  # fmt: skip
DECODE = {
    "step": 1, "phase": 1, "num_tokens": 1, "num_sequences": 1, "start_ns": 1_000, "end_ns": 4_000,
    "accesses": 10, "hits": 6, "late_hits": 1, "loads": 1, "on_cpu": 2, "prefetches": 3,
    "demand_bytes": 10, "prefetch_bytes": 24, "gpu_busy_ns": 1_000, "cpu_stall_ns": 1_900,
    "link_stall_ns": 100, "evictions": 4,
}  # fmt: skip


def step_row(**values: int) -> tuple[int, ...]:
    return tuple(values.get(column, 0) for column in STEP_COLUMNS)


def request(first: int, end: int, output: int, arrival: int = 0, start: int = 0) -> tuple[int, ...]:
    tpot = (end - first) // (output - 1) if output > 1 else 0
    values = {
        "arrival_ns": arrival, "start_ns": start, "first_token_ns": first, "end_ns": end, "prompt_tokens": 4,
        "output_tokens": output, "ttft_ns": first - arrival, "tpot_ns": tpot,
        "queue_ns": start - arrival,
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
    assert (summary["cancels"], summary["reads"], summary["read_bytes"]) == (0, 2, 16)
    assert (summary["demotions"], summary["d2h_bytes"]) == (1, 8)


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
    assert [summary[f"{cause}_stall_share"] for cause in ("storage", "dram", "host")] == [0, 0, 0]


@pytest.mark.parametrize("cause", ["link", "storage", "dram", "host", "cpu"])
def test_any_cause_may_be_the_bottleneck(cause: str) -> None:
    found = summarise([step_row(end_ns=10, gpu_busy_ns=4, **{f"{cause}_stall_ns": 6})], [])
    assert found[f"{cause}_stall_share"] == 0.6
    assert found["bottleneck"] == cause


def test_mixed_steps_are_not_counted_as_decoding() -> None:
    mixed = step_row(phase=2, accesses=10, hits=9, end_ns=10)
    found = summarise([step_row(**PREFILL), mixed, step_row(**DECODE)], [])
    assert found["hit_rate"] == 17 / 30
    assert found["decode_hit_rate"] == 6 / 10


def test_a_refused_request_counts_for_nothing_but_itself() -> None:
    values = {"arrival_ns": 50, "start_ns": -1, "prompt_tokens": 900, "output_tokens": 900}
    values |= {"ttft_ns": -1, "tpot_ns": -1, "queue_ns": -1, "outcome": int(Outcome.REFUSED)}
    refused = tuple(values.get(column, 0) for column in REQUEST_COLUMNS)
    found = summarise([step_row(**DECODE)], [request(2_000, 4_000, 3, 100, start=400), refused])
    assert (found["requests"], found["refused"]) == (2, 1)
    assert (found["prompt_tokens"], found["output_tokens"]) == (4, 3)
    assert (found["ttft_ns_p99"], found["tpot_ns_p50"]) == (1_900, 1_000)
    assert found["queue_ns_mean"] == found["queue_ns_p95"] == 300


def test_metrics_do_not_depend_on_how_rows_are_cut_into_blocks() -> None:
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 50, (97, len(STEP_COLUMNS)))
    users = rng.integers(0, 2, (31, len(REQUEST_COLUMNS)))
    totals = Totals()
    for first in range(0, 100, 7):
        totals.add_steps(steps[first : first + 7])
        totals.add_requests(users[first : first + 7])
    assert totals.summary() == summarise(steps.tolist(), users.tolist())


def test_utilisation_is_work_over_the_time_of_all_units() -> None:
    totals = Totals()
    totals.add_steps(np.array([step_row(**DECODE)]))  # ends at 4000 ns
    tables = RunTables(
        busy_ns={"gpu": 6_000, "h2d": 1_000}, units={"gpu": 2}, dram_bytes=4_000, idle_ns=70
    )
    found = totals.utilisation(tables, dram_bytes_per_s=2_000_000_000)
    assert found == {
        "idle_ns": 70, "gpu_utilisation": 0.75, "h2d_utilisation": 0.25, "d2h_utilisation": None,
        "cpu_utilisation": None, "storage_utilisation": None, "dram_utilisation": 0.5,
    }  # fmt: skip


def test_a_run_without_time_has_counts_only() -> None:
    timeless = {**DECODE, "start_ns": 0, "end_ns": 0}
    found = summarise([step_row(**timeless)], [])
    assert found["hit_rate"] == 0.6
    for name in ("tokens_per_s", "gpu_share", "bottleneck", "ttft_ns_mean", "tpot_ns_p50"):
        assert found[name] is None
    assert set(Totals().utilisation(RunTables(busy_ns={"gpu": 3}), 5).values()) == {0, None}
