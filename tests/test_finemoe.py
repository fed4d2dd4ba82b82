"""FineMoE by hand: expert maps, trajectories, what is selected, and its cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sim.calibration import Calibration
from sim.policies.base import PolicySet
from sim.policies.finemoe import MapPredictor, MapPrefetch, MapStore, probabilities_of
from sim.policies.predictors import HottestK
from sim.policies.visits import MapCache
from sim.workload import Workload
from tests.prediction import ask, past
from tests.strategies import FREE, Memory, Token, build, make_trace, one_request
from traces.schema import NO_EXPERT


def predictor(calibration: Calibration, top_k: int = 1, **parameters: Any) -> MapPredictor:
    return MapPredictor(calibration.num_layers, 4, top_k, calibration, **parameters)


# -- probabilities ---------------------------------------------------------------------------------


def test_the_best_that_is_recorded_makes_the_map() -> None:
    ids = np.array([[0, 2], [2, NO_EXPERT]], dtype=np.uint16)
    weights = np.array([[0.75, 0.25], [1.0, 0.0]], dtype=np.float16)
    logits = np.log(np.array([[0.5, 0.25, 0.25, 1e-9], [0.1, 0.4, 0.4, 0.1]])).astype(np.float32)
    equal = probabilities_of(ids, None, None, 4)
    np.testing.assert_allclose(equal, [1 / 3, 0, 2 / 3, 0], rtol=1e-6)
    np.testing.assert_allclose(probabilities_of(ids, weights, None, 4), [0.375, 0, 0.625, 0])
    told = probabilities_of(ids, weights, logits, 4)
    np.testing.assert_allclose(told, [0.3, 0.325, 0.325, 0.05], atol=1e-5)


# -- trajectories ----------------------------------------------------------------------------------

PATHS: list[Token] = [[[0], [1], [2], [3]], [[0], [2], [1], [0]], [[3], [3], [3], [3]]]
"""A prompt and two iterations, which become maps."""


def test_the_trajectory_so_far_picks_the_map() -> None:
    made = predictor(past([PATHS]), distance=2)
    said = ask(one_request([[[0], [2], [1], [0]], [[3], [2], [1], [0]]]), made, 2)
    assert said.scores[0, 2] == [0, 1, 0, 0], "layer 2 as in the map that begins with 0"
    assert said.scores[4, 2] == [0, 0, 0, 1], "as in the one that begins with 3"
    # After 3, 2 either map has one of two layers in common; the first is taken.
    assert said.scores[5, 2] == [1, 0, 0, 0]


def test_the_less_alike_the_more_is_selected() -> None:
    """Maps of four experts with .4 .3 .2 .1 of the mass in layer 1."""
    tokens: list[Token] = [[[0], [0]], [[0, 1, 2, 3], [3, 1, 0, 2]]]
    trace = make_trace([(tokens[:1], tokens[1:])], 4)
    weights = np.zeros(trace.expert_ids.shape, dtype=np.float16)
    weights[1] = [[0.25, 0.25, 0.25, 0.25], [0.4, 0.3, 0.2, 0.1]]
    trace = replace(trace, expert_weights=weights)
    calibration = Calibration(trace, (0, 1), Workload(trace).requests)
    # Layer 0 of the run uses one expert: its cosine with four equal ones is 1/2, so half the mass is wanted.
    made = predictor(calibration, distance=1)
    ask(one_request([[[2], [0]]]), made)
    assert made.selected[1] == [1, 3], "the .4 are less than half, with the .3 it is more"
    made = predictor(calibration, top_k=3, distance=1)
    ask(one_request([[[2], [0]]]), made)
    assert made.selected[1] == [0, 1, 3], "at least top_k"
    # Two experts: cosine .707, so .293 of the mass is wanted.
    made = predictor(calibration, distance=1)
    ask(one_request([[[2, 3], [0]]]), made)
    assert made.selected[1] == [3]


def test_first_layers_come_from_the_last_token_of_the_same_text() -> None:
    tokens: list[Token] = [[[0], [0]], [[1], [1]], [[2], [2]], [[3], [3]]]
    texts = ["<", "a", "b", "a"]
    trace = make_trace([(tokens[:1], tokens[1:])], 4, texts)
    calibration = Calibration(trace, (0, 1), Workload(trace).requests)
    made = predictor(calibration, distance=2)
    run = make_trace(
        [([[[0], [0]]], [[[0], [0]], [[0], [0]], [[1], [0]]])], 4, ["x", "a", "c", "b"]
    )
    found: list[list[int]] = []
    work = Workload(run)
    policies = PolicySet([MapCache(2, 4, made)], predictor=made)
    offloader = build(work, policies, Memory(8), FREE)
    for step in work.steps():
        offloader.begin_step(step.info)
        found.append([expert for layer in made.selected for expert in layer])
    # "a" was last the token of 3; nobody knows "c"; "b" is that of 2.
    assert found == [[], [3, 3], [], [2, 2]]


def test_a_batch_takes_the_largest_word_of_its_iterations() -> None:
    made = predictor(past([PATHS]), distance=1)
    requests = [([[[0], [2], [1], [0]]], [[[0], [2], [1], [0]]])]
    requests += [([[[3], [3], [3], [3]]], [[[3], [3], [3], [3]]])]
    said = ask(Workload(make_trace(requests, 4), 2), made)
    assert said.scores[8, 1] == [0, 0, 1, 1]


# -- the store -------------------------------------------------------------------------------------


def test_a_full_store_replaces_the_most_similar_map() -> None:
    made = predictor(past([[PATHS[0], PATHS[1], PATHS[2]]]), capacity=2, distance=1)
    assert made.store.size == 2
    ask(one_request([[[3], [3], [3], [2]]]), made)
    last = made.store.maps[:, :, 1].argmax(axis=1).tolist()
    assert last == [3, 3, 3, 2], "three layers of four in common with the second map"
    assert made.store.maps[:, :, 0].argmax(axis=1).tolist() == [0, 2, 1, 0]


def test_lengths_are_those_of_the_layers_so_far() -> None:
    store = MapStore(2, 2, 3)
    store.add(np.array([[0.6, 0.4], [1.0, 0.0]], dtype=np.float32), 0)
    np.testing.assert_allclose(store.lengths[:, 0], [0.52**0.5, 1.52**0.5], rtol=1e-6)


# -- what is loaded, and what goes -----------------------------------------------------------------


def test_selected_experts_are_loaded_the_nearer_the_sooner() -> None:
    made = predictor(past([PATHS]), distance=2)
    work = one_request([[[0], [2], [1], [0]], [[0], [2], [1], [0]]])
    policies = PolicySet([MapCache(4, 4, made)], predictor=made, prefetch=MapPrefetch(made))
    offloader = build(work, policies, Memory(16, prefetch_limit=4), FREE)
    loaded = []
    for step in work.steps():
        offloader.begin_step(step.info)
        for routing in work.routings(step):
            plan = offloader.plan_layer(routing, 0)
            offloader.on_loaded_at_once([*plan.loads, *plan.prefetches])
            offloader.end_layer(plan)
            loaded.append(list(plan.prefetches))
    assert loaded[:4] == [[9], [12], [], []], "layer 2 at layer 0, layer 3 at layer 1"
    assert loaded[4:] == [[], [], [], []], "all of it is there"


def test_the_lowest_probability_times_visits_goes() -> None:
    made = predictor(past([PATHS]), distance=1)
    made.probabilities[:] = [[0.5, 0.2, 0.9, 0.0]] * 4
    work = one_request([[[0, 1, 2], [0], [0], [0]]] * 2)
    cache = MapCache(4, 4, made)
    offloader = build(work, PolicySet([cache], predictor=made), Memory(3), FREE)
    view = offloader.view
    for key in (0, 1, 2):
        cache.on_insert(key, view)
    cache.visits[:3] = [1, 3, 1]
    # .5 x 1, .2 x 3, .9 x 1
    assert cache.choose_victim(lambda key: True, view) == 0
    cache.on_evict(0)
    assert cache.choose_victim(lambda key: True, view) == 1


def test_parts_without_their_predictor_are_refused() -> None:
    other = HottestK(4, 4)
    for make in (lambda: MapPrefetch(other), lambda: MapCache(4, 4, other)):
        with pytest.raises(ValueError, match="predictor = HottestK: must be a MapPredictor"):
            make()


@pytest.mark.parametrize("parameters", [{"capacity": 0}, {"distance": 0}])
def test_the_predictor_refuses(parameters: dict[str, int]) -> None:
    name = next(iter(parameters))
    with pytest.raises(ValueError, match=f"{name} = 0"):
        predictor(past([PATHS]), **parameters)
