"""Tables that pass their rows on: blocks, files that are whole or not there, memory that stays flat."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from sim.counter import STEP_COLUMNS, StepCounter
from sim.events import Kind, Lane
from sim.metrics import Totals, summarise
from sim.requests import REQUEST_COLUMNS, Outcome, RequestClock
from sim.residency import Residency
from sim.result_tables import StoredTable, streamed_tables
from sim.schedule import Admitted, Refused, WorkStep
from sim.tables import Block, Table
from sim.types import KeySpace, LayerPlan, LayerRouting, Phase, StepInfo

REPO = Path(__file__).parents[1]
ORIGIN = {"trace_kind": "synthetic"}


def test_a_table_without_a_sink_keeps_its_rows() -> None:
    table = Table(("a", "b"), block_rows=2)
    for row in [(1, 2), (3, 4), (5, 6)]:
        table.append(row)
    assert table.rows == [(1, 2), (3, 4), (5, 6)]
    assert [block.tolist() for block in table.blocks()] == [[[1, 2], [3, 4]], [[5, 6]]]
    table.close()
    assert table.rows == [(1, 2), (3, 4), (5, 6)]
    assert Table(("a", "b")).rows == []
    for wrong in [(1,), (1, 2, 3), (1, 1 << 63)]:
        with pytest.raises(struct.error):
            table.append(wrong)


def test_a_sink_sees_every_row_once_in_full_blocks() -> None:
    seen: list[Block] = []
    table = Table(("a", "b"), seen.append, block_rows=2)
    for number in range(5):
        table.append((number, 1 << 62))
    assert [len(block) for block in seen] == [2, 2]
    table.close()
    table.close()
    assert [len(block) for block in seen] == [2, 2, 1]
    assert np.concatenate(seen)[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert {block.dtype for block in seen} == {np.dtype(np.int64)}
    with pytest.raises(ValueError, match="passed its rows on"):
        table.rows  # noqa: B018


# -- what fills them -------------------------------------------------------------------------------


def test_a_step_row_counts_what_plans_say() -> None:
    residency = Residency(KeySpace(2, 4), [8, 20], [0, 0], [1000])
    counter = StepCounter(residency)
    plan = LayerPlan(LayerRouting(1, [4, 5, 6, 7], [1] * 4), resident=[4], late=[5])
    plan.loads, plan.bypasses, plan.reads = [6], [7], [6, 0]
    plan.evicts, plan.demotes, plan.cancels = [0, 1], [1], [2, 3]
    counter.add(plan)
    all_hit = LayerPlan(LayerRouting(0, [0, 1], [1, 1]), resident=[0, 1])
    all_hit.evicts = [3]
    counter.add(all_hit)
    on_cpu = LayerPlan(LayerRouting(0, [0, 1], [1, 3]), resident=[0])
    on_cpu.on_cpu = [1]
    counter.add(on_cpu)
    counter.add_prefetches([0, 4])
    counter.add_given_up([5, 6])
    counter.add_time(10, link_ns=1, cpu_ns=2)
    counter.add_time(1, storage_ns=3, dram_ns=4, host_ns=5)
    info = StepInfo(step=7, phase=Phase.MIXED, num_tokens=3, num_sequences=2, held_kv_tokens=9)
    launched = (55, 6, 700)
    counter.end_step(info, stage=1, start_ns=100, end_ns=125, launched=launched)
    counter.end_step(info, stage=1, start_ns=125, end_ns=125)
    first, second = (dict(zip(STEP_COLUMNS, row, strict=True)) for row in counter.rows)
    assert first == {
        "step": 7, "phase": 2, "num_tokens": 3, "num_sequences": 2, "stage": 1,
        "start_ns": 100, "end_ns": 125, "kv_tokens": 9,
        "accesses": 8, "hits": 4, "late_hits": 1, "loads": 1, "bypasses": 1, "on_cpu": 1,
        "prefetches": 2, "admissions": 0, "evictions": 2 + 1 + 2, "cancels": 2, "reads": 2,
        "demotions": 1, "demand_bytes": 40, "prefetch_bytes": 28, "read_bytes": 28, "d2h_bytes": 8,
        "pairs": 10, "gpu_pairs": 7, "kernels": 55, "padding_tokens": 6, "gather_bytes": 700,
        "deferred": 0, "hits_on_cpu": 0,
        "gpu_busy_ns": 11, "link_stall_ns": 1, "storage_stall_ns": 3, "dram_stall_ns": 4,
        "host_stall_ns": 5, "cpu_stall_ns": 2,
    }  # fmt: skip
    assert {second[name] for name in STEP_COLUMNS[8:]} == {0}, "each step counts anew"


def step(yields: tuple[int, ...], finished: tuple[int, ...] = (), *admitted: Admitted) -> WorkStep:
    info = StepInfo(step=0, phase=Phase.DECODE, num_tokens=len(yields))
    return WorkStep(info, np.empty(0, np.intp), admitted, yields, finished)


def test_a_request_row_gives_the_times_of_its_tokens() -> None:
    clock = RequestClock()
    clock.end_step(step((), (), Admitted(5, 40, 8)), 100, 150)  # a chunk that yields nothing yet
    clock.end_step(step((5,)), 150, 200)
    clock.end_step(step((5, 6), (6,), Admitted(6, 160, 1)), 200, 260)
    clock.end_step(step((5,), (5,)), 300, 400)
    clock.refuse(Refused(9, 170, 70, 80))
    rows = [dict(zip(REQUEST_COLUMNS, row, strict=True)) for row in clock.table.rows]
    assert [row["request_id"] for row in rows] == [6, 5, 9]
    assert rows[1] == {
        "request_id": 5, "arrival_ns": 40, "start_ns": 100, "first_token_ns": 200, "end_ns": 400,
        "prompt_tokens": 8, "output_tokens": 3, "ttft_ns": 160, "tpot_ns": 100, "queue_ns": 60,
        "wait_steps": 0, "longest_wait_steps": 0, "outcome": Outcome.DONE,
    }  # fmt: skip
    assert rows[0]["tpot_ns"] == 0, "one token alone has no time between tokens"
    assert rows[2] == {
        "request_id": 9, "arrival_ns": 170, "start_ns": -1, "first_token_ns": -1, "end_ns": 170,
        "prompt_tokens": 70, "output_tokens": 80, "ttft_ns": -1, "tpot_ns": -1, "queue_ns": -1,
        "wait_steps": -1, "longest_wait_steps": -1, "outcome": Outcome.REFUSED,
    }  # fmt: skip


# -- files -----------------------------------------------------------------------------------------


def random_rows(count: int, columns: tuple[str, ...], seed: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 2, (count, len(columns)))
    return [tuple(row) for row in rows.tolist()]


def test_files_hold_the_rows_that_memory_would(tmp_path: Path) -> None:
    steps, requests = random_rows(9000, STEP_COLUMNS, 1), random_rows(70, REQUEST_COLUMNS, 2)
    totals = Totals()
    with streamed_tables(tmp_path, totals, ORIGIN, 4, record_events=True) as tables:
        for row in steps:
            tables.steps.append(row)
        for row in requests:
            tables.requests.append(row)
        assert tables.events is not None
        tables.events.table.append((0, 5, Lane.H2D, 0, Kind.LOAD, 1, 0, 2, 0, 8))
    stored = pq.read_table(tmp_path / "steps.parquet")
    assert stored.column_names == list(STEP_COLUMNS)
    assert set(stored["phase"].to_pylist()) == {"prefill", "decode"}
    assert stored["hits"].to_pylist() == [row[STEP_COLUMNS.index("hits")] for row in steps]
    assert b'{"trace_kind": "synthetic"}' in stored.schema.metadata[b"greenroom_provenance"]
    outcomes = pq.read_table(tmp_path / "requests.parquet")["outcome"].to_pylist()
    assert outcomes == [Outcome(row[-1]).name.lower() for row in requests]
    blocks = StoredTable(tmp_path / "steps.parquet")
    for _ in range(2):
        assert [tuple(row) for block in blocks for row in block.tolist()] == steps
    (event,) = pq.read_table(tmp_path / "events.parquet").to_pylist()
    assert (event["lane"], event["kind"], event["num_bytes"]) == ("h2d", "load", 8)
    assert len(pq.read_table(tmp_path / "counters.parquet")) == 0
    assert totals.summary() == summarise(steps, requests)


def test_a_run_that_fails_leaves_the_files_of_the_one_before(tmp_path: Path) -> None:
    with streamed_tables(tmp_path, Totals(), ORIGIN, 4) as tables:
        tables.steps.append((1,) * len(STEP_COLUMNS))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(before) == {"steps.parquet", "requests.parquet"}

    def fail() -> None:
        with streamed_tables(tmp_path, Totals(), ORIGIN, 4) as tables:
            for _ in range(5000):
                tables.steps.append((0,) * len(STEP_COLUMNS))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_run_that_succeeds_takes_the_earlier_summary_away_first(tmp_path: Path) -> None:
    for name in ("summary.json", "error.json", "events.parquet"):
        (tmp_path / name).write_text("old")
    with streamed_tables(tmp_path, Totals(), ORIGIN, 4):
        assert (tmp_path / "summary.json").exists()
    assert {file.name for file in tmp_path.iterdir()} == {"steps.parquet", "requests.parquet"}


def test_a_killed_run_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from sim.metrics import Totals\n"
        "from sim.result_tables import streamed_tables; from sim.counter import STEP_COLUMNS\n"
        "with streamed_tables(Path(sys.argv[1]), Totals(), {}, 4) as tables:\n"
        "    for _ in range(9000): tables.steps.append((0,) * len(STEP_COLUMNS))\n"
        f"    os.kill(os.getpid(), {signal.SIGKILL.value})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=REPO, check=False)
    assert done.returncode == -signal.SIGKILL
    left = [file.name for file in tmp_path.iterdir()]
    assert left, "the run had begun to write"
    assert all(name.startswith(".tmp-") for name in left)


def test_memory_does_not_grow_with_the_number_of_steps(tmp_path: Path) -> None:
    many_others = range(1000, 1000 + len(STEP_COLUMNS) - 2)

    def peak_bytes(num_rows: int) -> int:
        with streamed_tables(tmp_path, Totals(), ORIGIN, 4) as tables:
            tracemalloc.start()
            for number in range(num_rows):
                tables.steps.append((number, 1, *many_others))
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        return peak

    peak_bytes(5_000)  # what is made once
    few, many = peak_bytes(5_000), peak_bytes(40_000)
    assert many < 1.2 * few
