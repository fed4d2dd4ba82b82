"""Engines and budgets of the real backend: what overlaps, in which order, and with how little memory."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from real.carriers import RAMCarrier
from real.copies import Copy, CopyEngine
from sim.events import Kind, Lane
from tests.real_cases import LAYERS, MIXED, ONE, config_of
from tests.real_events import COPIES, check_events, key_of
from tests.real_runs import Run, check_same, expected, play, ram_run

PATIENCE_S = 1  # after which a copy that nobody asks for goes on
SERIAL = ("engine=serial",)
IN_ORDER = ("engine.order=routing",)
GROUPED = ("engine.kernels=grouped",)
TEAMS = ("engine.cpu_experts_at_once=2",)
ENGINES = {
    "serial": SERIAL,
    "grouped": GROUPED,
    "grouped serial": (*SERIAL, *GROUPED),
    "chunks": ("engine.chunks=3",),
    "in order": IN_ORDER,
}
POLICIES = ("lfu", "on_demand", "prefetch_next_gate", "saem", "ktransformers_deferral", "hobbit")


def tight(policy: str, *overrides: str, tier: str = "ram") -> dict[str, Any]:
    """Return a batch of eight with too few staging slots for a layer, so that bypasses take turns."""
    return config_of(policy, *MIXED, "cache.staging_slots=2", *overrides, tier=tier)


@pytest.mark.parametrize(
    ("engine", "policy"),
    [
        *((engine, policy) for engine in ("serial", "grouped", "in order") for policy in POLICIES),
        *(("grouped serial", policy) for policy in ("lfu", "hobbit")),
        *(("chunks", policy) for policy in ("lfu", "prefetch_next_gate")),
    ],
)
def test_every_engine_computes_the_same_of_the_same_plans(engine: str, policy: str) -> None:
    config = tight(policy, *ENGINES[engine])
    wanted = expected(config)
    run = play(config, events=True)
    check_events(run)
    if not wanted.has_prefetches or engine.endswith("serial"):
        check_same(run, wanted)
    if policy == "ktransformers_deferral":
        assert run.totals["deferred"] > 0
        # Where nothing overlaps the CPU's part, it is there in time for its own layer.
        assert run.num_owed > 0 or engine.endswith("serial")


def rows_by_event(run: Run, *kinds: Kind) -> dict[int, list[tuple[int, ...]]]:
    """Return the rows of each layer, ordered by their start."""
    log = run.executor.tables.events
    assert log is not None
    found: dict[int, list[tuple[int, ...]]] = {}
    for row in sorted(log.rows):
        if row[4] in kinds and row[2] != Lane.CPU:
            found.setdefault(row[5] * LAYERS + row[6], []).append(row)
    return found


@pytest.mark.parametrize("engine", [SERIAL, IN_ORDER, (*IN_ORDER, *GROUPED)])
@pytest.mark.parametrize("waits", [True, False])
def test_experts_compute_in_the_order_of_the_plan(engine: tuple[str, ...], waits: bool) -> None:
    """Also where all copies have come before the first of them is asked for."""
    config = config_of("lru", *MIXED, *engine)
    run = ram_run(config, events=True)
    planned, copies = run.executor.accounts.planned, run.executor.parts.copies

    def planned_late(*told: Any) -> None:
        planned(*told)
        while copies.num_under_way:
            pass

    if waits:
        run.executor.accounts.planned = planned_late  # type: ignore[method-assign]
    run.play()
    experts, loads = rows_by_event(run, Kind.EXPERT), rows_by_event(run, *COPIES)
    for event, plan in enumerate(run.plans):
        order = [key_of(row) for row in experts[event]]
        if GROUPED[0] in engine:  # those that are ready together may go in any order
            assert sorted(order) == sorted(plan["experts"])
            continue
        assert order == plan["experts"]
        if engine is SERIAL and event in loads:
            assert max(row[1] for row in loads[event]) <= experts[event][0][0]


def test_bypasses_that_take_turns_get_slots_although_others_must_wait() -> None:
    """In order, the first ones' slots are needed by those that must be computed before the others."""
    for engine in (SERIAL, IN_ORDER, ()):
        config = tight("on_demand", *engine)
        wanted = expected(config)
        assert any(len(plan["bypasses"]) > plan["bypass_slots"] > 0 for plan in wanted.plans)
        for tier in ("ram", "link"):
            check_same(play(config, tier), wanted)


def test_teams_of_the_cpu_have_lanes_of_their_own() -> None:
    run = play(tight("saem", *TEAMS), events=True)
    log = run.executor.tables.events
    assert log is not None
    assert {row[3] for row in log.rows if row[2] == Lane.CPU} <= {0, 1}
    assert run.executor.tables.units["cpu"] == 2
    spent_ns = sum(row[1] - row[0] for row in log.rows if row[2] == Lane.CPU)
    assert run.executor.tables.busy_ns["cpu"] == spent_ns


def test_what_a_layer_waits_for_is_moved_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefetches do not come before somebody waits for them, so that all that are used come late."""
    carry, promote = RAMCarrier.carry, CopyEngine.promote
    promoted: dict[int, Event] = defaultdict(Event)
    called: list[int] = []

    def waiting(carrier: RAMCarrier, copy: Copy, offset: int, size: int) -> None:
        if copy.kind is Kind.PREFETCH:
            promoted[copy.key].wait(PATIENCE_S)
            promoted[copy.key].clear()
        carry(carrier, copy, offset, size)

    def promoting(engine: CopyEngine, key: int) -> None:
        called.append(key)
        promote(engine, key)
        promoted[key].set()

    monkeypatch.setattr(RAMCarrier, "carry", waiting)
    monkeypatch.setattr(CopyEngine, "promote", promoting)
    run = play(config_of("prefetch_perfect", *ONE), events=True)
    check_events(run)
    assert called == [key for plan in run.plans for key in plan["late"]] != []


def test_reads_beside_one_another_are_stretches_of_one_lane(tmp_path: Path) -> None:
    for policy in ("on_demand", "prefetch_next_gate"):
        config = config_of(policy, *MIXED, tier="storage")
        run = play(config, "storage", tmp_path, events=True)
        check_events(run)
        assert "storage" in run.executor.tables.busy_ns


# -- budgets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0, 0.125, 1.0])
@pytest.mark.parametrize("policy", ["lru", "lfu", "on_demand", "saem", "hobbit"])
def test_any_budget_runs(policy: str, ratio: float) -> None:
    """Nothing, one expert a layer (a token needs two), and all."""
    config = config_of(policy, *ONE, f"cache.ratio={ratio}", "cache.staging_slots=2")
    wanted = expected(config)
    check_same(play(config, lockstep=True), wanted)
    run = play(config, events=True)
    check_events(run)
    if not wanted.has_prefetches:
        check_same(run, wanted)
    if policy == "lru":
        assert (run.totals["bypasses"] > 0) is (ratio < 1)
        assert (run.totals["evictions"] > 0) is (ratio == 0.125)


@pytest.mark.parametrize("policy", ["lru", "lfu", "prefetch_next_gate", "hobbit"])
def test_memory_of_the_device_is_that_of_the_budget(policy: str) -> None:
    config = config_of(policy, *ONE)
    run = ram_run(config)
    device, budget = run.executor.parts.device, run.scenario.budget
    full, low = 12_288, 4_096
    staging_bytes = budget.staging_slots * (full + low * (policy == "hobbit"))
    assert 0 < run.executor.parts.arena.num_bytes <= budget.cache_bytes + staging_bytes
    run.play()
    assert device.peak_bytes() == run.executor.parts.arena.num_bytes
    assert device.held_bytes == 0
