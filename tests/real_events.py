"""What the event table of a real run must obey, whatever policy and engine it had."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

from sim.counter import STALLS, STEP_COLUMNS
from sim.events import Kind, Lane
from tests.real_cases import EXPERTS, LAYERS
from tests.real_runs import Run

COPIES = (Kind.LOAD, Kind.BYPASS, Kind.PREFETCH)
Row = tuple[int, ...]


def key_of(row: Row) -> int:
    """Return the expert of a row; low-precision copies are numbered behind all of a layer's."""
    is_low, expert = divmod(row[7], EXPERTS)
    return (row[6] + is_low * LAYERS) * EXPERTS + expert


def check_events(run: Run) -> None:
    """Check lanes, times of steps, bytes, and that experts are computed once, after their copies."""
    log = run.executor.tables.events
    assert log is not None
    check_lanes(log.rows)
    check_steps(run)
    copies = [row for row in log.rows if row[4] in COPIES]
    totals = run.totals
    asked_bytes = sum(row[9] for row in copies if row[4] != Kind.PREFETCH)
    assert asked_bytes == totals["demand_bytes"]
    assert sum(row[9] for row in copies if row[4] == Kind.PREFETCH) == totals["prefetch_bytes"]
    check_experts(run, copies)


def check_lanes(rows: list[Row]) -> None:
    """Check that no lane does two things at once."""
    lanes = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for row in rows:
        assert 0 <= row[0] <= row[1]
        lanes[row[2], row[3]].append((row[0], row[1]))
    for spans in lanes.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def check_steps(run: Run) -> None:
    """Check that steps follow one another, and that kernels and stalls make up each one's time."""
    rows = [dict(zip(STEP_COLUMNS, row, strict=True)) for row in run.executor.tables.steps.rows]
    for row in rows:
        waited = [row[f"{cause}_stall_ns"] for cause in STALLS]
        assert min(waited) >= 0
        assert row["gpu_busy_ns"] + sum(waited) == row["end_ns"] - row["start_ns"]
        served = ("hits", "late_hits", "loads", "bypasses", "on_cpu")
        assert row["accesses"] == sum(row[name] for name in served)
    assert all(before["end_ns"] <= after["start_ns"] for before, after in pairwise(rows))


def check_experts(run: Run, copies: list[Row]) -> None:
    """Check that each plan's experts have one row each, on the right lane, and begin with weights there."""
    log = run.executor.tables.events
    assert log is not None
    computed = defaultdict[int, dict[int, Row]](dict)
    for row in log.rows:
        if row[4] == Kind.EXPERT:
            event = row[5] * LAYERS + row[6]
            assert key_of(row) not in computed[event]
            computed[event][key_of(row)] = row
    asked = Counter[int]()
    for event, plan in enumerate(run.plans):
        asked.subtract(plan["cancels"])
        asked.update([*plan["loads"], *plan["bypasses"]])
        off_gpu = [*plan["on_cpu"], *plan["deferred"]]
        assert sorted(computed[event]) == sorted(plan["experts"])
        for key, row in computed[event].items():
            assert row[2] == (Lane.CPU if key in off_gpu else Lane.GPU)
            assert row[8] == plan["num_tokens"][plan["experts"].index(key)]
            if key not in off_gpu:
                ended = sum(key_of(copy) == key and copy[1] <= row[0] for copy in copies)
                assert ended >= asked[key]
        asked.update(plan["prefetches"])
