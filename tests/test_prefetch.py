"""Prefetchers by hand: what they propose, what they give up, and what they are worth on a link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given

from sim.offloader import Offloader
from sim.policies.base import CachePolicy, PolicySet, Predictor
from sim.policies.classic import LRU
from sim.policies.dial import AssumedAccuracy, Perfect
from sim.policies.oracle import Future
from sim.policies.prefetch import Impact, NextLayers, SparingLRU, best
from sim.policies.stage_prefetch import AnnotatedStagePrefetch, StagePrefetch
from sim.residency import Residency
from sim.types import KeySpace, LayerPlan, LayerRouting, Phase, StepInfo, View
from sim.workload import Workload
from tests.hand import ByteCosts, play
from tests.prediction import past
from tests.strategies import (
    FREE,
    LAW,
    ConstantCosts,
    Memory,
    all_events,
    one_request,
    run_timeline,
    workloads,
)


class Told(Predictor):
    """Says of each layer what it was told; 0 of others."""

    def __init__(self, scores: Mapping[int, Sequence[float]]) -> None:
        self._scores = scores

    def scores(self, layer: int, view: View) -> Sequence[float]:
        return self._scores.get(layer, [0.0] * view.num_experts)


def offloader(
    num_layers: int,
    cache: Any,
    slots: int,
    costs: ConstantCosts = FREE,
    limit: int = 8,
    **parts: Any,
) -> Offloader:
    """Return one over a pool of ``slots`` experts for each layer, 4 experts a layer, in a decode step."""
    layers = range(num_layers)
    residency = Residency(
        KeySpace(num_layers, 4), [8] * num_layers, layers, [8 * slots] * num_layers
    )
    policies = PolicySet([cache() for _ in layers], **parts)
    made = Offloader(residency, policies, costs, 8, limit)
    made.begin_step(StepInfo(0, Phase.DECODE, 1))
    return made


def plan(of: Offloader, *keys: int, layer: int | None = None, arrive: bool = True) -> LayerPlan:
    """Plan the event that uses ``keys``; all its loads arrive, and prefetches too if ``arrive``."""
    where = keys[0] // 4 if layer is None else layer
    made = of.plan_layer(LayerRouting(where, keys, [1] * len(keys)), 0)
    of.on_loaded_at_once([*made.loads, *(made.prefetches if arrive else ())])
    of.end_layer(made)
    return made


# -- the likeliest ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "threshold", "found"),
    [
        (2, 0.0, [3, 1]),
        (3, 0.0, [3, 1, 2]),
        (9, 0.0, [3, 1, 2, 5]),
        (9, 0.4, [3, 1, 2]),
        (1, 0.9, []),
        (2, 0.5, [3]),
    ],
)
def test_the_best_are_those_above_the_threshold(
    width: int, threshold: float, found: list[int]
) -> None:
    assert best([0.0, 0.5, 0.5, 0.9, 0.0, 0.1], width, threshold) == found


# -- next layers -----------------------------------------------------------------------------------


def test_an_event_without_experts_names_none() -> None:
    assert best([3.0, 1.0], 0, 0.0) == []


def test_the_nearest_layer_comes_first_and_what_is_there_is_passed_over() -> None:
    told = Told({1: [0, 9, 8, 0], 2: [7, 0, 0, 6], 3: [0, 0, 5, 0]})
    of = offloader(4, LRU, 4, prefetch=NextLayers(told, width=2, distance=3))
    assert list(plan(of, 0).prefetches) == [5, 6, 8, 11, 14]
    assert list(plan(of, 4, 6).prefetches) == [], "all of it is there"


def test_after_the_last_layer_comes_the_first() -> None:
    told = Told({0: [0, 0, 1, 0], 1: [1, 0, 0, 0]})
    of = offloader(2, LRU, 4, prefetch=NextLayers(told, distance=2))
    assert list(plan(of, 4).prefetches) == [2], "and then layer 1 again, whose 4 is there"


def test_a_stride_leaves_the_next_layer_out() -> None:
    told = Told({1: [1, 0, 0, 0], 2: [0, 1, 0, 0]})
    of = offloader(3, LRU, 4, prefetch=NextLayers(told, distance=2, first=2))
    assert list(plan(of, 0).prefetches) == [9]


def test_as_many_are_named_as_the_event_uses() -> None:
    told = Told({1: [4, 3, 2, 1]})
    assert len(plan(offloader(2, LRU, 4, prefetch=NextLayers(told)), 0, 1).prefetches) == 2
    assert len(plan(offloader(2, LRU, 4, prefetch=NextLayers(told)), 0, 1, 2).prefetches) == 3


def test_early_preemption_gives_up_what_is_queued_for_a_layer_that_has_spoken() -> None:
    told = Told({1: [1, 1, 0, 0], 2: [1, 1, 0, 0]})
    for preempt, given_up in ((False, []), (True, [4])):
        of = offloader(3, LRU, 4, prefetch=NextLayers(told, 2, 2, preempt=preempt))
        assert list(plan(of, 0, arrive=False).prefetches) == [4, 5, 8, 9]
        made = plan(of, 5, arrive=False)
        assert list(made.cancels) == given_up, "5 is used, 8 and 9 are for another layer"
        assert list(made.late) == [5]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"width": 0}, "width = 0"),
        ({"distance": 0}, "first = 1: must be >= 1 and <= distance = 0"),
        ({"first": 3, "distance": 2}, "first = 3"),
        ({"threshold": -1.0}, "threshold = -1.0"),
    ],
)
def test_next_layers_refuses(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NextLayers(Told({}), **parameters)


# -- impact ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steep(ConstantCosts):
    """A CPU expert takes 30 ns a token; a copy 50 ns, a kernel 1."""

    load: int = 50
    gpu: int = 1
    cpu: int = 30


@dataclass(frozen=True)
class Saturating(ConstantCosts):
    """A CPU expert of one token takes 100 ns, one of several 50: a kernel for few is slow."""

    load: int = 60
    gpu: int = 1

    def expert_cpu_ns(self, layer: int, num_tokens: int) -> int:
        return 100 if num_tokens == 1 else 50


def test_the_largest_impact_comes_first() -> None:
    # 4, 2 and 1 tokens, none on the GPU. With the 4 there: a copy ends at 51, the CPU's small one at 30;
    # then 51 <= 30 + 60: end 51. With the 2 there: 51 > 30, then 51 <= 30 + 120: end 51. With the 1 there:
    # 51 <= 60, then 101 > 60: end 60. Equal impacts fall to the score.
    told = Told({1: [4, 2, 1, 0]})
    of = offloader(2, LRU, 4, Steep(), prefetch=Impact(told, width=3))
    assert list(plan(of, 0).prefetches) == [4, 5, 6]


def test_a_long_copy_is_spared_before_a_short_computation() -> None:
    # Copies take 100. 3, 2, 1 tokens. With the 3 there: 101 > 30, then 101 > 90: end 90. With the 2 there:
    # 101 > 30, then 101 <= 120: end 101. With the 1 there: 101 > 60, then 101 <= 150: end 101.
    costs = ConstantCosts(load=100, gpu=1, cpu=30)
    of = offloader(2, LRU, 4, costs, prefetch=Impact(Told({1: [1, 3, 2, 0]}), width=3))
    assert list(plan(of, 0).prefetches) == [5, 6, 4]


def test_impact_may_prefer_the_lower_score() -> None:
    # 3 tokens and 1. With the 3 there: a copy of the 1 ends at 61, before the CPU at 100: end 61. With the 1
    # there: 61 > 50: the 3 on the CPU, end 50.
    of = offloader(2, LRU, 4, Saturating(), prefetch=Impact(Told({1: [1, 3, 0, 0]}), 2))
    assert list(plan(of, 0, 1).prefetches) == [4, 5]


# -- a cache that spares what is expected ----------------------------------------------------------


def test_what_is_expected_makes_no_room_for_a_prefetch() -> None:
    told = Told({1: [1, 1, 0, 0]})  # two of layer 1 are expected: 4, which is there, and 5
    for cache, evicted in ((LRU, [4]), (lambda: SparingLRU(told), [6])):
        of = offloader(2, cache, 2, prefetch=NextLayers(told))
        plan(of, 4, 6)  # 4 is the older of the two, with the prefetches of layer 0 out of sight
        made = plan(of, 0, 1)
        assert (list(made.prefetches), list(made.evicts)) == ([5], evicted)


def test_a_prefetch_is_refused_when_all_members_are_expected() -> None:
    told = Told({1: [1, 1, 1, 0]})
    of = offloader(2, lambda: SparingLRU(told, width=3), 2, prefetch=NextLayers(told, width=3))
    plan(of, 4, 5)
    made = plan(of, 0)
    assert (list(made.prefetches), list(made.evicts)) == ([], [])


# -- stages ----------------------------------------------------------------------------------------


def test_a_stage_begins_with_the_hot_set_of_the_last() -> None:
    of = offloader(2, LRU, 4, prefetch=StagePrefetch(2, 4, width=1))
    for keys in ((0,), (5,), (1,), (5,), (1,), (6,)):
        assert list(plan(of, *keys).prefetches) == []
    of.residency.evict(5)
    of.policies.caches[1].on_evict(5)
    of.view.stage = 1
    assert list(plan(of, 2).prefetches) == [5], "used twice; 6 once"
    assert list(plan(of, 6).prefetches) == [], "1, the hottest of layer 0, is there"


def test_an_annotated_stage_says_what_it_will_use() -> None:
    calibration = past([[[[0], [1]], [[0], [2]], [[3], [2]]]])
    trace = calibration.trace
    object.__setattr__(calibration, "trace", trace.take(slice(None)))
    calibration.trace.stage = np.array([0, 1, 1], dtype=np.int16)
    prefetch = AnnotatedStagePrefetch(calibration, width=2)
    of = offloader(2, LRU, 4, prefetch=prefetch)
    of.begin_step(StepInfo(1, Phase.DECODE, 1, stages=(1,)))
    of.view.stage = 1
    assert list(plan(of, 1).prefetches) == [6], "both tokens of stage 1 used 2 in layer 1"
    assert list(plan(of, 6).prefetches) == [0, 3]


# -- what a prefetch is worth ----------------------------------------------------------------------


def _dial(work: Workload, accuracy: float) -> Predictor:
    future = Future(all_events(work))
    return AssumedAccuracy(future, np.random.default_rng(3), work.num_layers, accuracy)


TOKENS = [[[0], [1]], [[2], [3]], [[1], [0]], [[3], [2]]] * 3
"""No expert is used again while a pool of two remembers it; of 1024 experts a wrong one is not of use."""


def _total_ns(accuracy: float | None) -> int:
    """Return the time of TOKENS; a copy takes 100 ns, attention 20, a kernel 40, two slots a layer."""
    work = one_request(TOKENS, num_experts=1024)
    parts: dict[str, Any] = {}
    if accuracy is not None:
        dial = _dial(work, accuracy)
        parts = {"predictor": dial, "prefetch": NextLayers(dial)}
    caches: list[CachePolicy] = [LRU(), LRU()]
    costs = ByteCosts(dense=20, gpu=40)
    pools = [0] * 1024 + [1] * 1024
    done = play(work, PolicySet(caches, **parts), costs, slots=2, pool_of_key=pools)
    return done.steps()[-1]["end_ns"]


def test_a_wrong_prefetch_slows_a_run_and_a_right_one_speeds_it_up() -> None:
    """On demand each of 24 events takes 20 + 100 + 40 ns, and the head of each of 12 steps 3.

    A prefetch begins when its event's own load is done. Until the next layer plans, 40 + 20 of its 100 ns
    pass (43 + 20 across steps); the link is not free, or the expert not there, before the other 40 (37).
    """
    demand = _total_ns(None)
    assert demand == 24 * 160 + 12 * 3
    assert _total_ns(0.0) == demand + 12 * 40 + 11 * 37
    assert _total_ns(1.0) == demand - 12 * 60 - 11 * 63
    assert _total_ns(1.0) < _total_ns(0.5) < _total_ns(0.0)


def test_perfect_foresight_over_a_fast_link_misses_only_in_the_first_layer() -> None:
    @LAW
    @given(work=workloads(batch=3))
    def check(work: Workload) -> None:
        assume(work.num_layers > 1)  # else the next event is in the layer whose experts are in use
        largest = max(len(event.experts) for event in all_events(work))
        perfect = Perfect(Future(all_events(work)))
        caches = [SparingLRU(perfect, work.num_experts) for _ in range(work.num_layers)]
        policies = PolicySet(
            caches, prefetch=NextLayers(perfect, work.num_experts), predictor=perfect
        )
        memory = Memory(largest, per_layer=True, prefetch_limit=largest)
        run = run_timeline(work, policies, memory, ConstantCosts(load=0))
        first = run.plans[0]
        assert len(first.loads) == len(first.routing.experts)
        for made in run.plans[1:]:
            assert sorted(made.resident) == sorted(made.routing.experts)

    check()


def test_useful_prefetches_are_counted() -> None:
    told = Told({1: [1, 1, 0, 0]})
    of = offloader(2, LRU, 2, prefetch=NextLayers(told, width=2))
    assert list(plan(of, 0).prefetches) == [4, 5]
    plan(of, 4, 6)  # 4 was of use, 5 made room for 6
    assert of.room.num_useful_prefetches == 1
    assert of.wasted_prefetch_bytes == 8
    of.start_counting()
    assert (of.room.num_useful_prefetches, of.wasted_prefetch_bytes) == (0, 0)
