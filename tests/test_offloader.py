"""The Offloader's contract with policies and drivers, by hand: 2 layers x 4 experts of 8 bytes.

Keys are ``layer * 4 + expert``. The tests play the driver: :func:`plan` plans one event and reports
its loads, but leaves prefetches queued unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sim.offloader import Offloader
from sim.policies.base import CachePolicy, Evictable, PlacementPolicy, PolicySet, PrefetchPolicy
from sim.policies.classic import LFU, LRU, OnDemand, Static
from sim.residency import Residency
from sim.room import Admission
from sim.types import (
    ConfigError,
    ExpertWork,
    KeySpace,
    LayerPlan,
    LayerRouting,
    Phase,
    Service,
    StepInfo,
    View,
)
from tests.doubles import Preloaded, ScriptedPlacement, ScriptedPrefetch
from tests.strategies import ConstantCosts


def offloader(
    cache: CachePolicy,
    slots: int,
    staging_slots: int = 4,
    prefetch_limit: int = 2,
    layer_bytes: Sequence[int] = (8, 8),
    **parts: Any,
) -> Offloader:
    """Return one over a global pool of ``slots`` times 8 bytes, in its first step."""
    residency = Residency(KeySpace(2, 4), layer_bytes, [0, 0], [8 * slots])
    policies = PolicySet([cache], **parts)
    made = Offloader(residency, policies, ConstantCosts(), staging_slots, prefetch_limit)
    made.begin_step(StepInfo(0, Phase.DECODE, 1))
    return made


def plan(of: Offloader, *keys: int, prefetched: bool = False, ends: bool = True) -> LayerPlan:
    """Plan the event that uses ``keys``; report its loads, and prefetches too if ``prefetched``."""
    routing = LayerRouting(keys[0] // 4, keys, [1] * len(keys))
    made = of.plan_layer(routing, 0)
    report(of, *made.loads, *(made.prefetches if prefetched else ()))
    if ends:
        of.end_layer(made)
    return made


def report(of: Offloader, *keys: int) -> None:
    for key in keys:
        of.on_load_started(key)
        of.on_loaded(key)


# -- a user's policy -----------------------------------------------------------------------------


class MostRecentlyUsed(CachePolicy):
    """What a user writes: drop what was used last."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        return next(filter(evictable, reversed(self.order)), None)

    def on_insert(self, key: int, view: View) -> None:
        self.order.append(key)

    def on_evict(self, key: int) -> None:
        self.order.remove(key)


def test_a_policy_of_ten_lines_rules_the_cache() -> None:
    of = offloader(MostRecentlyUsed(), slots=3)
    plan(of, 0, 1)
    plan(of, 4)
    third = plan(of, 2)
    assert (list(third.evicts), list(third.loads)) == ([4], [2])
    assert list(of.residency.resident()) == [0, 1, 2]


def test_experts_of_the_event_are_never_offered_as_victims() -> None:
    of = offloader(MostRecentlyUsed(), slots=2)
    plan(of, 0, 1)
    both = plan(of, 1, 2)  # 1 was used last, but this event uses it
    assert (list(both.resident), list(both.evicts), list(both.loads)) == ([1], [0], [2])


def test_a_policy_that_names_what_is_in_use_is_refused() -> None:
    class Stubborn(MostRecentlyUsed):
        def choose_victim(self, evictable: Evictable, view: View) -> int | None:
            return self.order[-1]

    of = offloader(Stubborn(), slots=2)
    plan(of, 0, 1)
    with pytest.raises(ConfigError, match=r"Stubborn\.choose_victim: names 1 to be dropped"):
        plan(of, 1, 2)


def test_misses_without_room_are_bypassed() -> None:
    of = offloader(LRU(), slots=2)
    made = plan(of, 0, 1, 2)
    assert (list(made.loads), list(made.bypasses), made.bypass_slots) == ([0, 1], [2], 4)


def test_preload_fills_what_fits_and_keeps_what_the_policy_keeps() -> None:
    popularity = [[1, 4, 0, 0], [3, 2, 0, 0]]
    of = offloader(Static(popularity), slots=3)  # type: ignore[arg-type]
    assert list(of.residency.resident()) == [1, 4, 5]
    assert not any(of.residency.evictable(key) for key in range(8))
    made = plan(of, 0, 1)
    assert (list(made.resident), list(made.bypasses)) == ([1], [0])


# -- placement -----------------------------------------------------------------------------------


def test_placement_sends_each_miss_where_it_says() -> None:
    where = ScriptedPlacement({1: Service.CPU, 2: Service.BYPASS})
    made = plan(offloader(LRU(), slots=4, placement=where), 0, 1, 2)
    assert (list(made.loads), list(made.on_cpu), list(made.bypasses)) == ([0], [1], [2])


def test_a_placement_with_too_few_services_is_an_error() -> None:
    class Forgetful(PlacementPolicy):
        def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
            return [Service.CPU] * (len(work) - 1)

    with pytest.raises(ValueError, match=r"Forgetful\.place: 1 services for 2 experts"):
        plan(offloader(LRU(), slots=4, placement=Forgetful()), 0, 1)


def test_a_placement_with_an_unknown_service_loses_no_expert_unseen() -> None:
    with pytest.raises(ValueError, match=r"ScriptedPlacement\.place: 7 for key = 0, which"):
        plan(offloader(LRU(), slots=4, placement=ScriptedPlacement({0: 7})), 0)  # type: ignore[dict-item]


# -- prefetch ------------------------------------------------------------------------------------


def test_the_limit_bounds_prefetches_queued_and_loading() -> None:
    script = ScriptedPrefetch({0: [4, 5, 6], 1: [6, 7], 2: [6, 7], 3: [7]})
    of = offloader(LRU(), slots=8, prefetch=script)
    assert list(plan(of, 0).prefetches) == [4, 5]
    of.on_load_started(4)
    assert list(plan(of, 1).prefetches) == [], "both are still under way"
    of.on_loaded(4)
    assert list(plan(of, 2).prefetches) == [6]
    report(of, 5, 6)
    assert list(plan(of, 3).prefetches) == [7]


def test_proposals_that_are_here_coming_or_repeated_are_skipped() -> None:
    script = ScriptedPrefetch({0: [0, 4, 4, 5], 1: [4, 0, 6]})
    of = offloader(LRU(), slots=8, prefetch_limit=4, prefetch=script)
    assert list(plan(of, 0).prefetches) == [4, 5]
    assert list(plan(of, 1).prefetches) == [6]


def test_a_bypassed_expert_is_not_prefetched_in_the_same_event() -> None:
    of = offloader(OnDemand(), slots=8, prefetch=ScriptedPrefetch({0: [0, 1]}))
    made = plan(of, 0)
    assert (list(made.bypasses), list(made.prefetches)) == ([0], [1])


def test_a_use_of_what_is_on_its_way_is_a_late_hit_and_frees_the_limit() -> None:
    script = ScriptedPrefetch({0: [4, 5], 1: [6, 7]})
    of = offloader(LRU(), slots=8, prefetch=script)
    plan(of, 0)
    made = plan(of, 5, 6, ends=False)
    assert (list(made.late), list(made.loads)) == ([5], [6])
    assert list(made.prefetches) == [7], "5 is demand now, 4 still counts, 6 is loaded already"


def test_prefetch_makes_room_but_never_among_what_the_event_uses() -> None:
    of = offloader(Preloaded([0, 1]), slots=2, prefetch=ScriptedPrefetch({0: [4, 5]}))
    made = plan(of, 0)
    assert (list(made.evicts), list(made.prefetches)) == ([1], [4])


def test_a_prefetch_evicted_unused_is_wasted() -> None:
    of = offloader(LRU(), slots=2, prefetch=ScriptedPrefetch({0: [4, 5]}))
    plan(of, 0, prefetched=True)  # 0, 4 resident
    plan(of, 1)  # evicts 0
    plan(of, 2)  # evicts 4, never used
    assert of.wasted_prefetch_bytes == 8


def test_a_prefetch_used_once_is_not_wasted() -> None:
    of = offloader(LRU(), slots=2, prefetch=ScriptedPrefetch({0: [4]}))
    plan(of, 0, prefetched=True)
    plan(of, 4)
    plan(of, 1)
    plan(of, 2)
    assert of.wasted_prefetch_bytes == 0


def test_what_the_same_event_evicts_and_prefetches_again_is_not_wasted() -> None:
    of = offloader(Preloaded([5, 6, 7]), slots=3, prefetch=ScriptedPrefetch({0: [5]}))
    made = plan(of, 0)
    assert (list(made.evicts), list(made.prefetches)) == ([5, 6], [5])
    assert of.wasted_prefetch_bytes == 0
    report(of, 5)
    plan(of, 1, 2)  # evicts 7 and 0
    plan(of, 3)  # evicts 5, never used
    assert of.wasted_prefetch_bytes == 8


# -- order of the calls --------------------------------------------------------------------------


def test_policies_hear_of_an_event_in_the_written_order() -> None:
    heard: list[str] = []

    class Listener(LRU):
        def observe(self, routing: LayerRouting, view: View) -> None:
            heard.append(f"observe {view.event} {view.layer}")

        def on_hit(self, keys: Sequence[int], view: View) -> None:
            heard.append(f"hit {list(keys)}")
            super().on_hit(keys, view)

        def choose_victim(self, evictable: Evictable, view: View) -> int | None:
            heard.append("victim")
            return super().choose_victim(evictable, view)

        def on_insert(self, key: int, view: View) -> None:
            heard.append(f"insert {key}")
            super().on_insert(key, view)

        def on_evict(self, key: int) -> None:
            heard.append(f"evict {key}")
            super().on_evict(key)

    class Proposer(PrefetchPolicy):
        def propose(self, routing: LayerRouting, view: View) -> Sequence[int]:
            heard.append("propose")
            return ()

    of = offloader(Listener(), slots=2, prefetch=Proposer())
    plan(of, 0, 1)
    assert heard == ["observe 0 0", "insert 0", "insert 1", "propose"]
    heard.clear()
    plan(of, 1, 2)
    assert heard == ["observe 1 0", "hit [1]", "victim", "evict 0", "insert 2", "propose"]


# -- admission after the event ---------------------------------------------------------------------


def counted(bypass: bool = True, **kwargs: Any) -> Offloader:
    return offloader(LFU(bypass=bypass), **kwargs)


def test_newcomers_take_free_room_at_once() -> None:
    of = counted(slots=2)
    made = plan(of, 0, 1, ends=False)
    assert (list(made.loads), list(made.bypasses)) == ([0, 1], [])
    assert of.end_layer(made) == ()
    assert list(of.residency.resident()) == [0, 1]


def test_a_newcomer_stays_out_when_its_count_is_lowest_and_enters_when_not() -> None:
    of = counted(slots=1)
    plan(of, 0)
    plan(of, 0)
    made = plan(of, 4, ends=False)  # count 1 against 2
    assert of.end_layer(made) == []
    made = plan(of, 4, ends=False)  # 2 against 2: 0 was used longer ago
    assert of.end_layer(made) == [Admission(4, (0,))]


def test_more_misses_than_staging_slots_leave_two_to_take_turns() -> None:
    class Full(LFU):
        def preload(self, view: View) -> Sequence[int]:
            return range(4, 8)

    of = offloader(Full(), slots=4, staging_slots=3)
    made = plan(of, 0, 1, 2, 3, ends=False)
    assert (list(made.bypasses), made.num_held, made.bypass_slots) == ([0, 1, 2, 3], 1, 2)
    assert of.end_layer(made) == [Admission(0, (4,))], "one slot was held to the end"


def test_residents_the_event_used_compete_with_newcomers_afterwards() -> None:
    of = counted(slots=1)
    plan(of, 0)
    made = plan(of, 0, 1, ends=False)
    assert (list(made.resident), list(made.bypasses)) == ([0], [1])
    assert of.end_layer(made) == [], "0 has count 2"


def test_a_policy_that_admits_after_may_still_screen() -> None:
    class Screened(LFU):
        def admits(self, key: int, view: View) -> bool:
            return key != 1

    of = offloader(Screened(), slots=4)
    made = plan(of, 0, 1, ends=False)
    assert (list(made.loads), list(made.bypasses)) == ([0], [1])
    assert of.end_layer(made) == ()
