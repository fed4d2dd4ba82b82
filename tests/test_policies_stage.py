"""StageCache by hand: one pool of 4 experts in layer 0, two of them resident."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from sim.policies.stage import StageCache
from sim.residency import Residency
from sim.types import KeySpace, LayerRouting, Phase, StepInfo, View
from tests.strategies import ConstantCosts

KEYS = KeySpace(1, 4)


def anything(key: int) -> bool:
    return True


class Stages:
    """Plays stages to a StageCache that holds ``slots`` experts, the popular ones 0, 1, .. at first."""

    def __init__(self, slots: int = 2, memory: float = 0.5, hysteresis: float = 1.05) -> None:
        residency = Residency(KEYS, [1], [0], [slots])
        self.view = View(KEYS, ConstantCosts(), StepInfo(0, Phase.DECODE, 1), residency)
        self.cache = StageCache(np.array([[4.0, 3.0, 2.0, 1.0]]), memory, hysteresis)
        self.cache.start(range(4), slots, self.view)
        for key in list(self.cache.preload(self.view))[:slots]:
            self.cache.on_insert(key, self.view)

    def stage(self, uses: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """Play a stage with these uses, enter the next; return who shall come and who may go."""
        for key, tokens in uses.items():
            self.cache.observe(LayerRouting(0, [key], [tokens]), self.view)
        self.view.stage += 1
        self.cache.observe(LayerRouting(0, [], []), self.view)
        wanted = list(self.cache.wants(self.view))
        given_up = []
        while (
            victim := self.cache.choose_victim(lambda k: k not in given_up, self.view)
        ) is not None:
            given_up.append(victim)
        return wanted, given_up


def test_it_begins_with_the_popular_and_admits_no_miss() -> None:
    stages = Stages()
    assert list(stages.cache.preload(stages.view)) == [0, 1, 2, 3]
    assert not stages.cache.admits(2, stages.view)
    assert list(stages.cache.wants(stages.view)) == []
    assert stages.cache.choose_victim(anything, stages.view) is None


def test_a_boundary_swaps_the_best_absent_for_the_worst_resident() -> None:
    assert Stages().stage({0: 5, 1: 2, 2: 7, 3: 1}) == ([2], [1])
    assert Stages().stage({0: 1, 1: 2, 2: 7, 3: 8}) == ([3, 2], [0, 1])


def test_a_newcomer_must_beat_the_resident_by_the_factor() -> None:
    assert Stages(hysteresis=1.5).stage({0: 9, 1: 4, 2: 6}) == ([], [])
    assert Stages(hysteresis=1.5).stage({0: 9, 1: 4, 2: 7}) == ([2], [1])


def test_pairs_stop_at_the_first_that_fails() -> None:
    assert Stages().stage({0: 5, 1: 1, 2: 6, 3: 5}) == ([2], [1])


def test_the_score_keeps_a_share_of_the_past() -> None:
    stages = Stages(memory=0.5)
    stages.stage({0: 9, 1: 8})
    assert stages.stage({0: 1, 2: 4, 3: 5}) == ([3], [1])  # 0: 1 + 4.5, 1: 4, 2: 4, 3: 5
    forgetful = Stages(memory=0.0)
    forgetful.stage({0: 9, 1: 8})
    assert forgetful.stage({0: 1, 2: 4, 3: 5}) == ([3, 2], [1, 0])


def test_free_slots_fill_without_a_victim() -> None:
    stages = Stages(slots=3)
    stages.cache.on_evict(2)
    assert stages.stage({0: 5, 1: 4, 2: 3, 3: 1}) == ([2], [])


def test_what_was_never_used_is_not_brought_in() -> None:
    stages = Stages(slots=3)
    stages.cache.on_evict(2)
    assert stages.stage({0: 5}) == ([], [])


def test_a_swap_is_done_once_and_the_next_boundary_replaces_what_is_open() -> None:
    stages = Stages(memory=0.0)
    assert stages.stage({0: 1, 1: 2, 2: 7, 3: 8}) == ([3, 2], [0, 1])
    stages.cache.on_evict(0)
    stages.cache.on_insert(3, stages.view)
    assert list(stages.cache.wants(stages.view)) == [2]
    assert stages.cache.choose_victim(anything, stages.view) == 1
    assert stages.stage({1: 9, 3: 8, 2: 1}) == ([], []), "2 is no longer wanted"


@pytest.mark.parametrize(
    ("arguments", "message"), [((1.0, 1.05), "memory = 1.0"), ((0.5, 0.9), "hysteresis = 0.9")]
)
def test_it_refuses_bad_parameters(arguments: tuple[float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StageCache(np.ones((1, 4)), *arguments)


def test_memory_that_shrinks_takes_the_worst_scored_and_at_first_the_least_popular() -> None:
    stages = Stages(slots=3)
    assert stages.cache.give_up(anything, stages.view) == 2
    assert stages.cache.give_up(lambda key: key != 2, stages.view) == 1
    stages.stage({0: 1, 1: 5, 2: 3})
    assert stages.cache.give_up(anything, stages.view) == 0


def test_a_pool_that_has_grown_is_filled_at_the_next_boundary() -> None:
    stages = Stages()
    stages.cache.on_resize(3, stages.view)
    assert stages.stage({0: 5, 1: 4, 2: 1}) == ([2], [])


def test_a_newcomer_still_queued_is_stale_when_a_later_boundary_gives_it_up() -> None:
    stages = Stages(memory=0.0)
    assert stages.stage({0: 5, 2: 7}) == ([2], [1])
    stages.cache.on_evict(1)
    stages.cache.on_insert(2, stages.view)  # its copy waits in a queue
    assert stages.cache.stale([2], stages.view) == []
    assert stages.stage({0: 5, 3: 7}) == ([3], [2])
    assert stages.cache.stale([2], stages.view) == [2]
