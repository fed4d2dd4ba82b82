"""One conformance check over every file of conf/policy, a user's own included."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sim.build import Scenario, build
from sim.counter import STEP_COLUMNS
from sim.events import EventLog
from sim.lockstep import run_lockstep
from sim.metrics import RunTables
from sim.timeline import Timeline
from sim.types import LayerPlan
from tests.configs import composed, options

RATIOS = (0.125, 0.25, 1.0)
BATCHES = (1, 3)


def _scenario(policy: str, ratio: float, batch: int, trace: Path) -> Scenario:
    config = composed(f"policy={policy}", f"trace.path={trace}")
    config["cache"]["ratio"] = ratio
    config["workload"]["batch_size"] = batch
    return build(config)


def _timed(scenario: Scenario, on_plan: Any = None) -> RunTables:
    tables = RunTables(events=EventLog(scenario.workload.num_experts))
    parts = (scenario.workload, scenario.offloader, scenario.costs, scenario.hardware)
    return Timeline(*parts, tables=tables, on_plan=on_plan).run()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("policy", options("policy"))
class TestEveryPolicy:
    def test_serves_each_expert_once_within_memory(
        self, policy: str, ratio: float, batch: int, small_trace_file: Path
    ) -> None:
        scenario = _scenario(policy, ratio, batch, small_trace_file)
        residency = scenario.offloader.residency

        def check(plan: LayerPlan) -> None:
            served = Counter(
                [*plan.resident, *plan.late, *plan.loads, *plan.bypasses, *plan.on_cpu]
            )
            assert served == Counter(plan.routing.experts)
            for pool, capacity in enumerate(residency.capacity_bytes):
                assert 0 <= residency.used_bytes(pool) <= capacity

        tables = _timed(scenario, check)
        tokens = sum(len(r.prompt_rows) + len(r.decode_rows) for r in scenario.workload.requests)
        processed = sum(row[STEP_COLUMNS.index("num_tokens")] for row in tables.steps.rows)
        assert processed == tokens
        assert len(tables.requests.rows) == len(scenario.workload.requests)

    def test_runs_twice_alike(
        self, policy: str, ratio: float, batch: int, small_trace_file: Path
    ) -> None:
        first, again = (_timed(_scenario(policy, ratio, batch, small_trace_file)) for _ in range(2))
        assert first.steps.rows == again.steps.rows
        assert first.requests.rows == again.requests.rows
        assert first.events is not None
        assert again.events is not None
        assert first.events.rows == again.events.rows

    def test_counts_alike_with_and_without_time(
        self, policy: str, ratio: float, batch: int, small_trace_file: Path
    ) -> None:
        scenario = _scenario(policy, ratio, batch, small_trace_file)
        if scenario.offloader.policies.stages is not None:
            pytest.skip("migrations arrive by the clock, so counts may differ")
        columns = [STEP_COLUMNS.index(c) for c in ("hits", "loads", "bypasses", "on_cpu")]
        timed = [[row[c] for c in columns] for row in _timed(scenario).steps.rows]
        fresh = _scenario(policy, ratio, batch, small_trace_file)
        untimed = run_lockstep(fresh.workload, fresh.offloader).rows
        assert timed == [[row[c] for c in columns] for row in untimed]


@pytest.mark.parametrize("policy", options("policy"))
def test_only_oracles_are_marked(policy: str, small_trace_file: Path) -> None:
    scenario = _scenario(policy, 0.25, 1, small_trace_file)
    assert scenario.offloader.policies.oracle == policy.startswith("belady")
    assert not scenario.offloader.policies.lossy
