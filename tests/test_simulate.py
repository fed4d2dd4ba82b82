"""Whole runs of work of every kind: what their rows, files, notes and digests say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest

from sim.counter import STEP_COLUMNS
from sim.metrics import RunTables
from sim.policies.classic import LRU
from sim.requests import REQUEST_COLUMNS, Outcome
from sim.simulate import simulate
from sim.types import ConfigError, View
from tests.configs import composed

OPEN = ("workload.arrivals=poisson", "workload.rate_per_s=2", "workload.batch_size=3")


def run(
    file: Path, *overrides: str, folder: Path | None = None
) -> tuple[dict[str, Any], RunTables]:
    return simulate(composed(f"trace.path={file}", *overrides), folder)


def dicts(rows: list[tuple[int, ...]], columns: tuple[str, ...]) -> list[dict[str, int]]:
    return [dict(zip(columns, row, strict=True)) for row in rows]


@pytest.mark.parametrize("work", [(), (*OPEN, "workload.prefill_chunk=2", "workload.mixed=true")])
def test_files_of_a_run_hold_what_memory_would(
    work: tuple[str, ...], tmp_path: Path, small_trace_file: Path
) -> None:
    overrides = (*work, "output.events=true")
    summary, tables = run(small_trace_file, *overrides)
    streamed, _ = run(small_trace_file, *overrides, folder=tmp_path)
    assert streamed == summary
    for name, columns, rows in (
        ("steps", STEP_COLUMNS, tables.steps.rows),
        ("requests", REQUEST_COLUMNS, tables.requests.rows),
    ):
        stored = pq.read_table(tmp_path / f"{name}.parquet")
        plain = [column for column in columns if column not in ("phase", "outcome")]
        assert stored.select(plain).to_pylist() == [
            {column: row[column] for column in plain} for row in dicts(rows, columns)
        ]
    assert tables.events is not None
    assert len(pq.read_table(tmp_path / "events.parquet")) == len(tables.events.rows)
    assert not (tmp_path / "summary.json").exists(), "the command writes it, last of all"


def test_every_moment_of_a_run_is_work_or_a_stall_or_idle(small_trace_file: Path) -> None:
    summary, tables = run(small_trace_file, *OPEN)
    steps = dicts(tables.steps.rows, STEP_COLUMNS)
    assert summary["idle_ns"] > 0, "two arrivals a second leave gaps"
    assert summary["idle_ns"] == summary["total_ns"] - sum(
        row["end_ns"] - row["start_ns"] for row in steps
    )
    shares = [summary[name] for name in summary if name.endswith("_stall_share")]
    idle_share = summary["idle_ns"] / summary["total_ns"]
    assert sum(shares) + summary["gpu_share"] + idle_share == pytest.approx(1.0)
    for lane in ("gpu", "h2d"):
        assert 0 < summary[f"{lane}_utilisation"] <= 1


def test_a_longer_prompt_waits_longer_for_its_first_token(small_trace_file: Path) -> None:
    short, _ = run(small_trace_file, "workload.length=[5,4]", "cache.ratio=0.5")
    long, _ = run(small_trace_file, "workload.length=[400,4]", "cache.ratio=0.5")
    assert long["ttft_ns_p50"] > short["ttft_ns_p50"]
    assert long["prompt_tokens"] == 80 * short["prompt_tokens"]
    assert "so that they reuse experts more than recorded" in long["notes"][-1]
    assert long["provenance"]["requests_made"] == long["notes"][-1]


def test_recorded_requests_say_so(small_trace_file: Path) -> None:
    summary, _ = run(small_trace_file)
    assert summary["provenance"]["requests_made"] == "as recorded"
    assert summary["notes"] == []
    assert (summary["refused"], summary["idle_ns"]) == (0, 0)


def test_a_batch_that_never_fills_says_so(small_trace_file: Path) -> None:
    full, _ = run(small_trace_file, "workload.batch_size=5")
    more, _ = run(small_trace_file, "workload.batch_size=6")
    assert full["notes"] == []
    assert more["notes"] == [
        "workload.batch_size is above the number of requests, 5: no more run at one time"
    ]
    assert more["total_ns"] == full["total_ns"]


def test_a_request_that_can_never_fit_is_a_row_of_its_own(small_trace_file: Path) -> None:
    summary, tables = run(small_trace_file, "workload.kv_limit_tokens=44")  # each has 45
    assert (summary["requests"], summary["refused"], summary["output_tokens"]) == (5, 5, 0)
    assert summary["tokens_per_s"] is None
    rows = dicts(tables.requests.rows, REQUEST_COLUMNS)
    assert {row["outcome"] for row in rows} == {Outcome.REFUSED}
    summary, _ = run(small_trace_file, "workload.kv_limit_tokens=45", "workload.batch_size=4")
    assert summary["refused"] == 0
    assert summary["queue_ns_p95"] > 0, "one at a time, whatever the batch"


def test_with_open_arrivals_nobody_knows_the_optimum(small_trace_file: Path) -> None:
    summary, _ = run(small_trace_file, *OPEN)
    assert summary["belady_hit_rate"] is summary["belady_gap"] is None
    assert any("no belady replay, for with open arrivals" in n for n in summary["notes"])
    with pytest.raises(ConfigError, match=r"policy/belady: cache: .*Belady must know the future"):
        run(small_trace_file, *OPEN, "policy=belady")


def test_recorded_arrivals_are_kept_to_and_belong_to_the_digest(
    tmp_path: Path, small_trace_file: Path
) -> None:
    file = tmp_path / "arrivals.csv"
    digests = []
    for first_s in (0.25, 0.5):
        file.write_text("arrival_s\n" + "".join(f"{first_s + n}\n" for n in range(5)))
        summary, tables = run(small_trace_file, f"workload.arrivals={file}")
        rows = dicts(tables.requests.rows, REQUEST_COLUMNS)
        assert [row["arrival_ns"] for row in rows] == [int((first_s + n) * 1e9) for n in range(5)]
        digests.append(summary["provenance"]["inputs_sha256"])
    assert digests[0] != digests[1]


def test_a_timeline_window_beyond_the_run_is_refused_before_it_runs(small_trace_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"output.perfetto = \[5000, null\]"):
        run(small_trace_file, "output.perfetto=[5000,null]")


def test_a_budget_that_kv_shares_has_a_bound_too(small_trace_file: Path) -> None:
    summary, _ = run(small_trace_file, "cache.joint_bytes=3.05e8", "workload.batch_size=4")
    assert summary["evictions"] > 0
    assert summary["belady_gap"] > 0.0


def test_a_run_whose_requests_never_fit_says_so(small_trace_file: Path, tmp_path: Path) -> None:
    summary, _ = run(small_trace_file, "workload.kv_limit_tokens=1", folder=tmp_path)
    assert (summary["steps"], summary["tokens_per_s"]) == (0, None)
    assert summary["refused"] == summary["requests"] > 0
    assert any("every request was refused" in note for note in summary["notes"])


def test_what_a_machine_of_one_memory_loads_is_read_from_storage(small_trace_file: Path) -> None:
    summary, _ = run(small_trace_file, "machine=phone_sd8gen3")
    assert summary["reads"] == summary["loads"] + summary["bypasses"] > 0
    assert (summary["h2d_bytes"], summary["read_bytes"]) == (0, summary["demand_bytes"])
    assert summary["storage_stall_share"] > 0 == summary["link_stall_share"]


def test_a_killed_run_is_cleared_away_by_the_next_one(
    small_trace_file: Path, tmp_path: Path
) -> None:
    dead, mine = tmp_path / ".tmp-999999999-steps.parquet", tmp_path / ".tmp-1-steps.parquet"
    dead.touch()
    mine.touch()  # of a process that lives
    run(small_trace_file, folder=tmp_path)
    assert (dead.exists(), mine.exists()) == (False, True)


class Watched(LRU):
    """Keeps which experts an event used, as the view of host memory says."""

    seen: ClassVar[list[tuple[int, Sequence[int]]]] = []

    def on_insert(self, key: int, view: View) -> None:
        super().on_insert(key, view)
        self.seen.append((view.layer, view.routing.experts))


def test_the_policy_of_host_memory_sees_the_event(small_trace_file: Path) -> None:
    config = composed(f"trace.path={small_trace_file}", "cache.host_bytes=3e8", "model=olmoe_1b_7b")
    config["policy"]["host"] = {"_target_": f"{__name__}.Watched"}
    Watched.seen.clear()
    simulate(config)
    in_run = [(layer, experts) for layer, experts in Watched.seen if experts]
    assert in_run
    assert {layer for layer, _ in in_run} == {experts[0] // 16 for _, experts in in_run}
    assert all(experts[0] // 16 == layer for layer, experts in in_run)
