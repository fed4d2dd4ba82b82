"""Score caches against plain models: a set of keys, and all scores worked out anew for each decision."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sim.policies.base import CachePolicy
from sim.policies.classic import LFU, LRU
from sim.policies.scored import LFRU, LLRU, LeastStale
from sim.policies.window import DALI, HotWindow
from tests.cache_replay import (
    NUM_EXPERTS,
    Model,
    agree,
    contents,
    num_hits,
    one_layer,
    run_of,
    skewed,
)
from tests.test_policies_unit import make_view

# -- LFU, LFRU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize(("decay", "num_layers"), [(1.0, 1), (0.9, 1), (0.75, 3), (0.98, 3)])
def test_lfu_drops_the_lowest_decayed_count(decay: float, num_layers: int, bypass: bool) -> None:
    def score(model: Model, key: int, step: int, layer: int) -> tuple[float, ...]:
        count = sum(decay ** (step - at) for at, _ in model.uses[key])
        return count, model.last[key]

    agree(lambda: LFU(decay, bypass), score, bypass, num_layers)


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_lfru_drops_the_lowest_uses_over_age(num_layers: int, bypass: bool) -> None:
    def score(model: Model, key: int, step: int, layer: int) -> tuple[float, ...]:
        return len(model.uses[key]) / (model.events - model.last[key]), model.last[key]

    agree(lambda: LFRU(bypass), score, bypass, num_layers)


def test_lfru_as_in_tinyserve_forgets_what_leaves_and_counts_age_in_uses() -> None:
    # One slot is left for 2 or 3 beside 0, used three times and last at use 5.
    events = [[0, 1], [0, 1], [0, 2], [0, 3], [2, 3]]
    workload = one_layer(events, 4)
    found = contents(workload, lambda: LFRU(False, remember=False, clock="uses"), 3)
    # Event 3, clock 8: 1 has 2 uses, age 8 - 4 + 1 = 5; 2 has 1 use, age 8 - 6 + 1 = 3: 1 / 3 < 2 / 5.
    assert found[3] == {0, 1, 3}
    # Event 4, clock 10 while 2 comes in: 1: 2 / 7, 0: 4 / 4; 1 goes. By events 1 would be 2 / 4 = 0.5.
    assert found[4] == {0, 2, 3}


def test_lfru_counts_uses_from_entry_if_it_does_not_remember() -> None:
    # 0 is used three times and leaves; when it is back its one use counts as one.
    events = [[0], [0], [0], [1], [1], [1], [1], [2], [2], [0], [3]]
    policy = lambda keep: contents(one_layer(events, 4), lambda: LFRU(False, remember=keep), 2)  # noqa: E731
    # At event 7 (2 enters): 0 scores 3 / 6, 1 scores 4 / 2: 0 leaves. At event 9 (0 enters) the ages are
    # 4 for 1 and 2 for 2: 4 / 4 against 2 / 2, the older goes: 1. At event 10: 2 scores 2 / 3;
    # 0 scores 1 / 2 anew or 4 / 2 remembered.
    assert policy(True)[-1] == {0, 3}
    assert policy(False)[-1] == {2, 3}


def test_lfru_refuses_another_clock() -> None:
    with pytest.raises(ValueError, match="clock = steps: must be one of events, uses"):
        LFRU(clock="steps")


# -- layers ---------------------------------------------------------------------------------------


def test_llru_drops_what_has_let_most_turns_of_its_layer_pass_then_what_comes_latest() -> None:
    num_layers = 4

    def score(model: Model, key: int, step: int, layer: int) -> tuple[float, ...]:
        last_step, own = model.uses[key][-1]
        turns = sum(last_step < at for at in range(step if own > layer else step + 1))
        until_next = own - layer if own > layer else own - layer + num_layers
        return -turns, -until_next, model.order[key]

    for slots in (2, 3, 5):
        agree(LLRU, score, False, num_layers, slots)


@pytest.mark.parametrize("slots", [3, 6])
@pytest.mark.parametrize("make", [LLRU, LeastStale])
def test_llru_and_least_stale_are_lru_in_a_pool_of_one_layer(
    make: Callable[[], CachePolicy], slots: int
) -> None:
    for tokens_a_step in (1, 3):
        ids = skewed(3, 300, 3, NUM_EXPERTS, 2)
        workload = run_of(ids, NUM_EXPERTS, tokens_a_step)
        assert contents(workload, make, slots) == contents(workload, LRU, slots)


@pytest.mark.parametrize("tokens_a_step", [1, 4])
def test_least_stale_is_lru_in_a_pool_of_all_layers_too(tokens_a_step: int) -> None:
    workload = run_of(skewed(4, 400, 3, NUM_EXPERTS, 2), NUM_EXPERTS, tokens_a_step)
    for slots in (6, 12, 20):
        assert contents(workload, LeastStale, slots, True) == contents(workload, LRU, slots, True)


def test_least_stale_leaves_a_fresh_key_where_it_is() -> None:
    policy, view = LeastStale(), make_view()
    for key in (0, 1):  # prefetched in this pass, then used in it, 0 last
        policy.on_insert(key, view)
    policy.on_hit([1, 0], view)
    assert policy.choose_victim(lambda key: True, view) == 0


def test_llru_in_one_pool_does_not_fall_off_lrus_cliff() -> None:
    # A pass uses 3 x 2 experts, always the same, and 4 fit. LRU drops each just before its next use. LLRU
    # drops what the layer before has used, whose next turn is latest. So after the first pass, which leaves
    # layers 0 and 2, every other event hits: 29 of the 57.
    workload = run_of(np.tile(np.array([[[0, 1]] * 3]), (20, 1, 1)), NUM_EXPERTS)
    lru, llru = (num_hits(workload, contents(workload, make, 4, True)) for make in (LRU, LLRU))
    assert (lru, llru) == (0, 58)


# -- windows --------------------------------------------------------------------------------------


def test_dali_fills_free_room_and_then_moves_only_when_a_window_ends() -> None:
    # Window of 3 tokens, 2 slots. Sums of the first window: 0: 1, 1: 1, 2: 2, 3: 2.
    events = [[0, 1], [2, 3], [2, 3], [0, 1], [0, 2], [0, 2], [4, 5]]
    found = contents(one_layer(events, 6), lambda: DALI(window=3), 2)
    assert found[:3] == [{0, 1}] * 3
    # The window ends at event 3: 2 is to replace 1, and 3 to replace 0, but the event uses both. Event 4 uses
    # 0 and, from a staging slot, 2: so 3 comes, and 1 goes. Event 5 is the same.
    assert found[3:6] == [{0, 1}, {0, 3}, {0, 3}]
    # The second window, events 3 to 5: 0: 3, 2: 2, 1: 1, 3: 0. So 2 replaces 3, and 1 does not beat 0.
    assert found[6] == {0, 2}


def test_dali_exchanges_no_more_than_it_may() -> None:
    events = [[0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    found = {n: contents(one_layer(events, 6), lambda n=n: DALI(3, n), 2)[-1] for n in (0, 1)}
    assert found == {0: {2, 3}, 1: {0, 2}}  # of equals the higher key goes first


def test_hot_window_keeps_the_hot_and_is_lru_for_the_others() -> None:
    # 4 uses in the window and half of them make an expert hot: 2.
    events = [[0], [0], [1], [2], [3], [4]]
    found = contents(one_layer(events, 6), lambda: HotWindow(4, 0.5), 2)
    # Event 3: of the window 0 1 2 with 0 twice, 0 is hot: 1 goes. Event 4: 0 1 2 3, 0 is not: LRU, 0.
    assert found == [{0}, {0}, {0, 1}, {0, 2}, {2, 3}, {3, 4}]


def test_hot_window_drops_the_first_to_enter_if_all_are_hot() -> None:
    events = [[0], [1], [1], [0], [2]]
    assert contents(one_layer(events, 3), lambda: HotWindow(4, 0.25), 2)[-1] == {1, 2}
