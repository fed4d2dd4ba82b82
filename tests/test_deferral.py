"""What may be answered for hits and misses, what is counted, and laws of deferral on random machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.counter import STEP_COLUMNS
from sim.events import Kind, Lane
from sim.lockstep import run_lockstep
from sim.perfetto import write_timeline
from sim.policies.base import PlacementPolicy
from sim.policies.classic import LRU, OnDemand
from sim.types import ExpertWork, LayerPlan, Service, View
from tests.doubles import InTurn, Preloaded, ScriptedEverywhere, ScriptedPlacement, Setup
from tests.hand import ByteCosts, play
from tests.machines import cases
from tests.perfetto_check import lane_names, problems, read
from tests.strategies import FREE, LAW, Memory, build, one_request, only
from tests.test_laws_bounds import setups as named
from tests.test_laws_engine import FEWER, Told, check_laws, run_case
from tests.test_laws_tiers import tiered_cases
from tests.test_perfetto import ABOUT, COUNTERS, blocks

TOKENS = [[[0, 1, 2], [0, 1, 2]], [[0, 1, 2], [0, 1, 2]]]
"""Two layers of four experts, of which the first of each layer is in GPU memory."""
deferring = named({"lru_in_turn", "lru_anywhere", "lfu_anywhere", "lru_anywhere_ahead"})


def counted(placement: PlacementPolicy) -> tuple[list[dict[str, int]], list[LayerPlan]]:
    """Run TOKENS without time, nothing but 0 and 4 on the GPU; return the step rows and the plans."""
    workload, plans = one_request(TOKENS), list[LayerPlan]()
    policies = only(Preloaded([0, 4]), placement=placement)
    rows = run_lockstep(workload, build(workload, policies, Memory(2), FREE), plans.append).rows
    return [dict(zip(STEP_COLUMNS, row, strict=True)) for row in rows], plans


# -- what may be answered --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "service", "said"),
    [
        (
            0,
            Service.LOAD,
            "LOAD for key = 0, which is on the GPU or on its way there: must be STAY or CPU",
        ),
        (0, Service.BYPASS, "BYPASS for key = 0"),
        (0, Service.DEFER, "DEFER for key = 0"),
        (
            1,
            Service.STAY,
            "STAY for key = 1, which is not on the GPU: must be LOAD, BYPASS, CPU or DEFER",
        ),
    ],
)
def test_a_service_that_an_expert_cannot_have_is_refused(
    key: int, service: Service, said: str
) -> None:
    with pytest.raises(ValueError, match=rf"^ScriptedEverywhere\.place: {said}"):
        counted(ScriptedEverywhere({key: service}))


def test_only_a_policy_that_is_marked_lossy_may_defer() -> None:
    class Unmarked(ScriptedPlacement):
        lossy = False

    with pytest.raises(
        ValueError, match=r"^Unmarked\.place: DEFER .* must be marked lossy = True$"
    ):
        counted(Unmarked({5: Service.DEFER}))


def test_a_policy_that_is_asked_about_misses_only_cannot_let_them_stay() -> None:
    with pytest.raises(ValueError, match=r"^ScriptedPlacement\.place: STAY for key = 5"):
        counted(ScriptedPlacement({5: Service.STAY}))


@pytest.mark.parametrize("places_hits", [False, True])
def test_placement_is_asked_about_misses_or_about_all(places_hits: bool) -> None:
    asked: list[Sequence[ExpertWork]] = []

    class Asked(PlacementPolicy):
        def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
            asked.append(list(work))
            return [Service.STAY if one.resident else Service.CPU for one in work]

    Asked.places_hits = places_hits
    counted(Asked())
    misses = [(1, 1, False), (2, 1, False)]
    assert asked[0] == ([(0, 1, True), *misses] if places_hits else misses)
    assert len(asked) == 4


def test_an_event_without_a_miss_is_placed_too_and_need_load_nothing() -> None:
    workload = one_request([[[0, 1], [0]]])
    policies = only(Preloaded([0, 1, 4]), placement=ScriptedEverywhere({1: Service.CPU}))
    offloader = build(workload, policies, Memory(3), FREE)
    plans: list[LayerPlan] = []
    run_lockstep(workload, offloader, plans.append)
    assert [(list(plan.resident), list(plan.on_cpu)) for plan in plans] == [([0], [1]), ([4], [])]
    assert [plan.hits_on_cpu for plan in plans] == [1, 0]


# -- what is counted -------------------------------------------------------------------------------


def test_deferred_experts_are_misses_on_the_cpu_and_have_a_column() -> None:
    script = {1: Service.DEFER, 2: Service.DEFER, 5: Service.DEFER, 6: Service.CPU, 0: Service.CPU}
    rows, plans = counted(ScriptedEverywhere(script))
    assert [list(plan.deferred) for plan in plans[:2]] == [[1, 2], []]
    assert [list(plan.on_cpu) for plan in plans[:2]] == [
        [0],
        [5, 6],
    ]  # the last layer defers nothing
    names = ("accesses", "hits", "hits_on_cpu", "on_cpu", "deferred", "loads")
    assert [[row[name] for name in names] for row in rows] == [[6, 2, 1, 4, 2, 0]] * 2


@deferring
@FEWER
@given(data=st.data())
def test_every_access_is_a_hit_or_late_or_one_kind_of_miss(
    setup: Setup, data: st.DataObject
) -> None:
    run = run_case(data.draw(cases(setup) | tiered_cases(setup)), setup)
    for row in run.steps():
        misses = row["loads"] + row["bypasses"] + row["on_cpu"]
        assert row["accesses"] == row["hits"] + row["late_hits"] + misses
        assert row["deferred"] <= row["on_cpu"]
        assert row["hits_on_cpu"] <= row["hits"]


# -- time ------------------------------------------------------------------------------------------


def check_deferral(run: Told) -> None:
    """What is deferred is computed and back by the end of the next layer; the last layer defers nothing."""
    num_layers, num_experts = run.case.workload.num_layers, run.case.workload.num_experts
    ends = {row["step"]: row["end_ns"] for row in run.steps()}
    deferred = {(event, key) for event, plan in enumerate(run.plans) for key in plan.deferred}
    assert all((event + 1) % num_layers for event, _ in deferred)
    for row in run.rows:
        event = row[5] * num_layers + row[6]
        is_expert = row[4] == Kind.EXPERT and (event, row[6] * num_experts + row[7]) in deferred
        if is_expert or row[2] == Lane.DEFERRAL:
            is_last = row[6] + 2 == num_layers
            assert row[1] <= (ends[row[5]] if is_last else run.watched.times_ns[event + 2])


@deferring
@LAW
@given(data=st.data())
def test_the_next_layer_does_not_end_before_what_is_deferred_to_it_is_back(
    setup: Setup, data: st.DataObject
) -> None:
    run = run_case(data.draw(cases(setup) | tiered_cases(setup)), setup)
    check_laws(run)
    check_deferral(run)


@LAW
@given(data=st.data())
def test_where_nothing_is_shared_deferral_is_never_slower_than_the_cpu_at_once(
    data: st.DataObject,
) -> None:
    """Nor without events: these runs have a log or none."""
    late, now = (
        Setup(lambda _: LRU(), lambda _, service=service: {"placement": InTurn(service)})
        for service in (Service.DEFER, Service.CPU)
    )
    case = data.draw(cases(late, shared=False, closed=True))
    first, second = run_case(case, late), run_case(case, now)
    assert [sorted(of) for of in map(on_cpu, first.plans)] == list(map(on_cpu, second.plans))
    assert first.end_ns <= second.end_ns
    quick = run_case(replace(case), late, log=False)
    assert quick.tables.steps.rows == first.tables.steps.rows


def on_cpu(plan: LayerPlan) -> list[int]:
    """Return the experts that the CPU computes for a plan, now or later."""
    return sorted([*plan.on_cpu, *plan.deferred])


# -- what is shown ---------------------------------------------------------------------------------


def test_a_timeline_shows_the_handover_of_deferred_experts_in_lanes_of_their_own(
    tmp_path: Path,
) -> None:
    placement = ScriptedPlacement({0: Service.DEFER, 4: Service.DEFER})
    costs = ByteCosts(handover=6)
    done = play([[[0], [0], [0]]], only(OnDemand(), placement=placement), costs, slots=12)
    path, rows = tmp_path / "timeline.json.gz", np.array(done.rows, dtype=np.int64)
    write_timeline(path, [rows], blocks(COUNTERS), ABOUT)
    document = read(path)
    assert problems(document) == []
    assert {f"host / handover of deferred experts, slot {slot}" for slot in (0, 1)} <= set(
        lane_names(document).values()
    )
