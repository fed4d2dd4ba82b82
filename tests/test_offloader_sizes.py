"""Experts of mixed sizes in one pool: layer 0 has 8 bytes an expert, layer 1 has 16."""

from __future__ import annotations

from typing import Any

from sim.offloader import Offloader
from sim.policies.base import CachePolicy, Evictable, PolicySet
from sim.policies.classic import LFU, LRU
from sim.residency import Residency
from sim.room import Admission
from sim.types import KeySpace, LayerPlan, LayerRouting, Phase, StepInfo, View
from tests.doubles import Preloaded, ScriptedPrefetch
from tests.strategies import ConstantCosts


def offloader(cache: CachePolicy, capacity_bytes: int, **parts: Any) -> Offloader:
    """Return one over a pool of both layers, in its first step."""
    residency = Residency(KeySpace(2, 4), [8, 16], [0, 0], [capacity_bytes])
    made = Offloader(residency, PolicySet([cache], **parts), ConstantCosts(), staging_slots=4)
    made.begin_step(StepInfo(0, Phase.DECODE, 1))
    return made


def begin(of: Offloader, *keys: int) -> LayerPlan:
    """Plan the event that uses ``keys`` and report its loads."""
    made = of.plan_layer(LayerRouting(keys[0] // 4, keys, [1] * len(keys)), 0)
    for key in made.loads:
        of.on_load_started(key)
        of.on_loaded(key)
    return made


def use(of: Offloader, *keys: int) -> LayerPlan:
    """Plan the event that uses ``keys``, report its loads and end it."""
    made = begin(of, *keys)
    of.end_layer(made)
    return made


def test_a_large_load_takes_several_victims() -> None:
    of = offloader(LRU(), capacity_bytes=24)
    use(of, 0, 1)
    use(of, 2)
    made = use(of, 4)
    assert (list(made.evicts), list(made.loads)) == ([0, 1], [4])
    assert list(of.residency.resident()) == [2, 4]


def test_a_small_load_frees_a_large_expert_and_leaves_the_rest() -> None:
    of = offloader(LRU(), capacity_bytes=16)
    use(of, 4)
    made = use(of, 0)
    assert (list(made.evicts), of.residency.free_bytes(0)) == ([4], 8)


def test_a_load_that_can_never_fit_drops_nothing() -> None:
    of = offloader(LRU(), capacity_bytes=8)
    use(of, 0)
    made = use(of, 4)
    assert (list(made.evicts), list(made.loads), list(made.bypasses)) == ([], [], [4])
    assert list(of.residency.resident()) == [0]


def test_a_prefetch_that_cannot_fit_beside_the_event_drops_nothing() -> None:
    of = offloader(Preloaded([0, 1]), 16, prefetch=ScriptedPrefetch({0: [4]}))
    made = use(of, 0)
    assert (list(made.evicts), list(made.prefetches)) == ([], [])


def test_slots_told_to_the_policy_are_those_that_surely_fit() -> None:
    told: list[int] = []

    class Listener(LRU):
        def start(self, keys: Any, num_slots: int, view: View) -> None:
            told.append(num_slots)

    offloader(Listener(), capacity_bytes=40)
    assert told == [2]


def test_a_large_newcomer_that_loses_to_the_second_resident_drops_nothing() -> None:
    """Exchange after the event is all or nothing: an eviction that helps nobody would go unreported."""
    of = offloader(LFU(), capacity_bytes=16)
    use(of, 0)
    use(of, 1)
    for _ in range(4):
        use(of, 1)
    begun = begin(of, 4)
    assert of.end_layer(begun) == []
    begun = begin(of, 4)  # now 4 counts 2, more than 0 (1), less than 1 (5)
    assert of.end_layer(begun) == []
    assert list(of.residency.resident()) == [0, 1]


def test_a_large_newcomer_that_beats_both_residents_takes_both_places() -> None:
    of = offloader(LFU(), capacity_bytes=16)
    use(of, 0, 1)
    begun = begin(of, 4)
    assert of.end_layer(begun) == [Admission(4, (0, 1))]
    assert list(of.residency.resident()) == [4]


def test_a_policy_that_refuses_half_way_drops_nothing() -> None:
    class OneAtMost(LRU):
        """Gives up its first key only."""

        def choose_victim(self, evictable: Evictable, view: View) -> int | None:
            return 0 if evictable(0) else None

    of = offloader(OneAtMost(), capacity_bytes=16)
    use(of, 0, 1)
    made = use(of, 4)
    assert (list(made.evicts), list(made.bypasses)) == ([], [4])
    assert list(of.residency.resident()) == [0, 1]
