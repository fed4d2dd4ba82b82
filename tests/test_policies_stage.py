"""StageCache by hand: one pool of 4 experts in layer 0, two of them resident."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from sim.policies.stage import StageCache, StageOracle
from sim.policies.stage_memory import StageMemory
from sim.residency import Residency
from sim.types import KeySpace, LayerRouting, Phase, StepInfo, View
from tests.strategies import ConstantCosts

KEYS = KeySpace(1, 4)
POPULAR = np.array([[4.0, 3.0, 2.0, 1.0]])


def anything(key: int) -> bool:
    return True


class Stages:
    """Plays stages to a StageCache that holds ``slots`` experts, the popular ones 0, 1, .. at first."""

    def __init__(
        self,
        slots: int = 2,
        memory: float = 0.5,
        hysteresis: float = 1.05,
        cache: StageCache | None = None,
        **changes: Any,
    ) -> None:
        residency = Residency(KEYS, [10], [0], [10 * slots])
        self.view = View(KEYS, ConstantCosts(), StepInfo(0, Phase.DECODE, 1), residency)
        self.cache = cache or StageCache(POPULAR, memory, hysteresis, **changes)
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


@pytest.mark.parametrize(
    ("budget", "incoming", "outgoing"),
    [(None, [3, 2], [0, 1]), (20, [3, 2], [0, 1]), (19, [3], [0]), (9, [], [])],
)
def test_a_boundary_brings_in_no_more_than_its_bytes(
    budget: int | None, incoming: list[int], outgoing: list[int]
) -> None:
    stages = Stages(migrate_bytes=budget)
    assert stages.stage({0: 1, 1: 2, 2: 7, 3: 8}) == (incoming, outgoing)


def test_a_pool_has_a_share_of_the_bytes_by_its_experts() -> None:
    """Two layers of 4 experts of 10 bytes: half of 39 bytes is one expert."""
    keys = KeySpace(2, 4)
    residency = Residency(keys, [10, 10], [0, 1], [20, 20])
    view = View(keys, ConstantCosts(), StepInfo(0, Phase.DECODE, 1), residency)
    cache = StageCache(np.ones((2, 4)), migrate_bytes=39)
    cache.start(range(4, 8), 2, view)
    for key in (4, 5):
        cache.on_insert(key, view)
    for key, uses in ((0, 9), (6, 7), (7, 8)):  # 0 is of another pool
        cache.observe(LayerRouting(1, [key], [uses]), view)
    view.stage += 1
    cache.observe(LayerRouting(1, [], []), view)
    assert list(cache.wants(view)) == [7]
    assert cache.choose_victim(anything, view) == 5


@pytest.mark.parametrize("value", [-1, 1.5, True, "1e9"])
def test_a_budget_is_a_whole_number_of_bytes(value: Any) -> None:
    with pytest.raises(ValueError, match=f"migrate_bytes = {value}: must be a whole number"):
        StageCache(POPULAR, migrate_bytes=value)


def test_the_oracle_brings_in_what_the_coming_stage_uses() -> None:
    future = [{0: 9, 1: 9}, {2: 5, 3: 4, 0: 1}, {1: 3}]
    stages = Stages(cache=StageOracle(POPULAR, future))
    assert stages.stage({0: 9, 1: 9}) == ([2, 3], [1, 0])
    for key in (0, 1):
        stages.cache.on_evict(key)
    for key in (2, 3):
        stages.cache.on_insert(key, stages.view)
    assert stages.stage({2: 5, 3: 4, 0: 1}) == ([1], [3])
    assert stages.stage({1: 3}) == ([], []), "past the end nothing is known to come"


class Remembering(Stages):
    """Plays stages to a StageMemory that looks at the first two steps of each."""

    def __init__(self, **changes: Any) -> None:
        settings = {"memory": 0.0, "probe_steps": 2, **changes}
        super().__init__(cache=StageMemory(POPULAR, **settings))
        self.num_steps = 0

    def play(self, *experts: int, boundary: bool = True) -> list[list[int]]:
        """Play a stage of one token of one expert a step; return what is wanted after each."""
        wanted = []
        self.view.stage += boundary
        for expert in experts:
            self.view.step = StepInfo(self.num_steps, Phase.DECODE, 1)
            self.num_steps += 1
            self.cache.observe(LayerRouting(0, [expert], [1]), self.view)
            wanted.append(list(self.cache.wants(self.view)))
        return wanted


def test_a_stage_that_returns_is_recognised_by_its_first_steps() -> None:
    stages = Remembering()
    stages.play(2, 2, 3, 2, boundary=False)  # stage A: experts 2 and 3
    assert stages.play(0, 1, 0, 1) == [[], [], [2, 3], [2, 3]], "nothing known: what A used"
    for key in (0, 1):
        stages.cache.on_evict(key)
    for key in (2, 3):
        stages.cache.on_insert(key, stages.view)
    assert stages.play(2, 2, 2, 2)[-1] == [], "A is back, and its experts are there"
    known = stages.cache._known  # type: ignore[attr-defined]
    assert known == [{0: 2.0, 1: 2.0}, {2: 3.0, 3: 1.0}]


def test_an_unknown_stage_gets_what_the_finished_one_used() -> None:
    stages = Remembering()
    stages.play(2, 2, 3, 2, boundary=False)
    for key, other in ((0, 2), (1, 3)):
        stages.cache.on_evict(key)
        stages.cache.on_insert(other, stages.view)
    stages.play(0, 1, 0)
    assert stages.play(3, 0, 0)[-1] == [0, 1], "as much like B as like A: not recognised"


def test_the_recognised_stage_is_merged_and_the_oldest_forgotten() -> None:
    stages = Remembering(memory=0.5, num_stages=2)
    stages.play(2, 2, 2, boundary=False)
    stages.play(0, 0, 0)
    stages.play(2, 2, 2)
    stages.play(1, 1, 1)
    known = stages.cache._known  # type: ignore[attr-defined]
    assert known == [{0: 3.0}, {2: 4.5}], "3 / 2 + 3 uses of expert 2"
    stages.play(3)
    assert known is not stages.cache._known  # type: ignore[attr-defined]
    assert stages.cache._known == [{2: 4.5}, {1: 3.0}]  # type: ignore[attr-defined]


def test_a_stage_shorter_than_the_probe_moves_nothing() -> None:
    stages = Remembering(probe_steps=3)
    stages.play(2, 2, 2, boundary=False)
    assert stages.play(0, 0, 0) == [[], [], []]
    assert stages.play(3, 3, 3, 3) == [[], [], [], []], "0 is there already"
    assert stages.play(1, 1, 1, 1) == [[], [], [], [3]]


@pytest.mark.parametrize(
    "changes", [{"probe_steps": 0}, {"num_stages": 0}, {"advantage": 0.9}, {"memory": 1.0}]
)
def test_the_memory_refuses_bad_parameters(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name} = "):
        StageMemory(POPULAR, **changes)
