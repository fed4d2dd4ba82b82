"""MoE-Infinity by hand: activation matrices, their collection, and the caches that look at visits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sim.offloader import Offloader
from sim.policies.base import PolicySet
from sim.policies.eam import Collection, EAMPredictor, SequencePrefetch
from sim.policies.predictors import HottestK
from sim.policies.visits import EAMCache, InCacheLFU
from sim.residency import Residency
from sim.types import KeySpace, LayerPlan, LayerRouting, Phase, StepInfo
from sim.workload import Workload
from tests.prediction import ask, past
from tests.strategies import FREE, Token, local_ids, make_trace, one_request, trace_of_ids
from tests.tokens import view_of


def predictor(requests: Sequence[Sequence[Token]], layers: int = 3, **parameters: Any) -> Any:
    return EAMPredictor(layers, 4, past(requests), **parameters)


A: list[Token] = [[[0], [1], [2]]] * 3
B: list[Token] = [[[3], [2], [1]]] * 2


# -- the match -------------------------------------------------------------------------------------


def test_the_layers_ahead_tell_past_sequences_apart() -> None:
    said = ask(one_request([[[3], [2], [1]], [[0], [2], [1]]]), predictor([A, B]), 1, 2)
    # Of the first token nothing is known of the layers ahead: the first matrix is taken.
    assert said.scores[0, 1] == [0, 2.25, 0, 0], "3 tokens, one layer ahead of 3: x (1 - 1/4)"
    assert said.scores[0, 2] == [0, 0, 1.5, 0]
    # At the second token's layer 0 the rows of layers 1 and 2 are those of B; layer 0 does not count.
    assert said.scores[3, 1] == [0, 0, 1.5, 0]
    assert said.scores[3, 2] == [0, 1, 0, 0]
    assert said.scores[5, 1] == [0, 0, 0, 0], "nothing is said of the next token"


def test_rows_are_compared_by_direction_not_by_length() -> None:
    long = [[[0], [1], [1]]] * 50
    short: list[Token] = [[[0], [1], [1]], [[0], [2], [2]]]
    work = one_request([[[0], [1], [1]], [[0], [2], [2]], [[0], [1], [2]]])
    said = ask(work, predictor([long, short]), 1)
    # Rows so far (1, 1) over experts 1, 2: with long 1/sqrt(2), with short 1.
    assert said.scores[6, 1] == [0, 0.75, 0.75, 0]


def test_similarities_kept_step_by_step_are_those_of_the_whole() -> None:
    """Against the formula written out, on 6 random past sequences and a run of 30 tokens."""
    rng, shape = np.random.default_rng(2), (4, 6)
    ids = local_ids(rng, 6 * 20 + 30, *shape, 2, 0.6)
    lengths = [(5, 15)] * 6 + [(5, 25)]
    trace = trace_of_ids(ids, lengths, 6)
    whole = Workload(trace)
    calibration = past([[[[0, 1]] * 4]], num_experts=6)
    object.__setattr__(calibration, "trace", trace)
    object.__setattr__(calibration, "chosen", whole.requests[:6])
    made = EAMPredictor(*shape, calibration)
    work = Workload(trace, requests=(6, 7))
    said = ask(work, made, 1)
    matrices = np.zeros((6, *shape))
    for request in range(6):
        for token in ids[request * 20 : request * 20 + 20]:
            for layer in range(4):
                matrices[request, layer, token[layer]] += 1
    own, event = np.zeros(shape), 0
    for first, last in [(120, 125), *((row, row + 1) for row in range(125, 150))]:
        for layer in range(4):
            for token in ids[first:last]:
                own[layer, token[layer]] += 1
            if layer < 3:
                ahead = slice(layer + 1, None)
                norms = np.linalg.norm(matrices[:, ahead], axis=2) * np.linalg.norm(
                    own[ahead], axis=1
                )
                products = (matrices[:, ahead] * own[ahead]).sum(axis=2)
                alike = np.divide(products, norms, out=np.zeros_like(norms), where=norms > 0).sum(
                    axis=1
                )
                row = matrices[int(alike.argmax()), layer + 1] * (1 - 1 / 5)
                assert said.scores[event, 1] == pytest.approx(row.tolist(), abs=1e-4)
            event += 1


def test_a_batch_adds_up_what_its_matches_say() -> None:
    requests = [([[[0], [1], [2]]], [[[0], [1], [2]]]), ([[[3], [2], [1]]], [[[3], [2], [1]]])]
    said = ask(Workload(make_trace(requests, 4), 2), predictor([A, B]), 1)
    # events 0-2 and 3-5 are the prompts; at 6 both decode
    assert said.scores[6, 1] == [0, 2.25, 1.5, 0]


def test_a_sequence_that_is_over_joins_the_collection() -> None:
    requests = [([[[0], [3], [3]]], [[[0], [3], [3]]]), ([[[0], [3], [3]]], [[[0], [3], [3]]])]
    made = predictor([A])
    said = ask(Workload(make_trace(requests, 4)), made, 1)
    assert said.scores[3, 1] == [0, 2.25, 0, 0], "nothing but A to compare with"
    # The second request's prompt is events 6-8; that the first one is over is seen when a step decodes.
    assert said.scores[6, 1] == [0, 2.25, 0, 0]
    assert said.scores[9, 1] == [0, 0, 0, 1.5], "two tokens of the first request"
    assert made.collection.size == 2


# -- the collection --------------------------------------------------------------------------------


def test_a_full_collection_gives_up_the_least_looked_up() -> None:
    collection = Collection(1, 2, capacity=3)
    rows = [np.array([[n, 1]], dtype=np.float32) for n in range(5)]
    assert [collection.add(row) for row in rows[:3]] == [0, 1, 2]
    collection.lookups[:] = [5, 2, 3]
    assert collection.add(rows[3]) == 1
    assert collection.lookups.tolist() == [5, 1, 3]
    np.testing.assert_allclose(collection.units[0, :, 1], np.array([3, 1]) / 10**0.5, rtol=1e-6)


def test_what_came_from_calibration_is_kept_for_good() -> None:
    collection = Collection(1, 2, capacity=2)
    row = np.ones((1, 2), dtype=np.float32)
    collection.add(row)
    collection.keep_all()
    collection.add(row)
    collection.lookups[:] = [1, 9]
    assert collection.add(row) == 1
    collection.keep_all()
    assert collection.add(row) is None


def test_the_collection_grows_past_its_first_room() -> None:
    requests = [([[[n % 4], [n % 3]]], [[[n % 4], [n % 3]]]) for n in range(40)]
    made = EAMPredictor(2, 4, past([[[[0], [0]]]]), capacity=30)
    ask(Workload(make_trace(requests, 4), 4), made, 1)
    assert made.collection.size == 30
    assert made.collection.units.shape == (2, 4, 30)


# -- what is loaded, and what goes -----------------------------------------------------------------


def offloader(slots: int, layers: int = 3, **roles: Any) -> Offloader:
    """Return one over one pool of ``slots`` experts, 4 a layer, in a decode step."""
    keys = KeySpace(layers, 4)
    residency = Residency(keys, [8] * layers, [0] * layers, [8 * slots])
    made = Offloader(residency, PolicySet([roles.pop("cache")], **roles), FREE, 8, 8)
    made.begin_step(StepInfo(0, Phase.DECODE, 1))
    return made


def plan(of: Offloader, *keys: int) -> LayerPlan:
    made = of.plan_layer(LayerRouting(keys[0] // 4, keys, [1] * len(keys)), 0)
    of.on_loaded_at_once([*made.loads, *made.prefetches])
    of.end_layer(made)
    return made


C: list[Token] = [[[0], [1], [2]], [[0], [1], [2]], [[0], [3], [0]]]
"""Layer 1 uses expert 1 twice and 3 once, layer 2 uses 2 twice and 0 once."""


def test_layers_ahead_are_loaded_by_count_and_nearness() -> None:
    for everything, found in ((False, [5, 10, 7, 8]), (True, [5, 10, 7, 8, 4, 6, 9, 11])):
        made = predictor([C])
        prefetch = SequencePrefetch(made, 8, everything)
        of = offloader(12, cache=InCacheLFU(3, 4), predictor=made, prefetch=prefetch)
        # x 3/4 one layer ahead, x 2/4 two: 1.5, 1.0, 0.75, 0.5
        assert list(plan(of, 0).prefetches) == found


def test_as_many_are_named_as_its_width_and_none_that_is_there() -> None:
    made = predictor([C])
    cache, prefetch = InCacheLFU(3, 4), SequencePrefetch(made, width=2)
    of = offloader(12, cache=cache, predictor=made, prefetch=prefetch)
    assert list(plan(of, 0).prefetches) == [5, 10]
    assert list(plan(of, 5).prefetches) == [8]
    assert list(plan(of, 10).prefetches) == []


def test_the_fewest_visits_go_first_and_are_forgotten() -> None:
    of = offloader(3, layers=2, cache=InCacheLFU(2, 4))
    for keys in ((0, 1), (4,), (0,), (4,), (1,)):
        plan(of, *keys)
    # visits: 0 twice, 1 twice, 4 twice; equals fall to the lower key
    assert list(plan(of, 5).evicts) == [0]
    assert list(plan(of, 0).evicts) == [5], "one visit"
    assert list(plan(of, 6).evicts) == [0], "its earlier visits are forgotten"


def test_a_pool_of_low_copies_counts_its_own_keys() -> None:
    cache, view = InCacheLFU(1, 4), view_of(4, num_copies=2)
    cache.start(range(4, 8), 2, view)
    for key in (4, 5):
        cache.on_insert(key, view)
    cache.on_hit([4], view)
    assert cache.choose_victim(lambda _: True, view) == 5
    cache.on_evict(5)
    assert cache.choose_victim(lambda _: True, view) == 4


def test_the_papers_cache_weighs_layer_share_and_frequency() -> None:
    """Shares in the own matrix, row by row, x visits, x (1 - layer / 2): 2 layers, 3 slots."""
    made = predictor([[[[0], [1]]]], layers=2)
    of = offloader(3, layers=2, cache=EAMCache(2, 4, made), predictor=made)
    for keys in ((0,), (5,), (1,), (5,)):
        plan(of, *keys)
    # 0 and 1: half of row 0 each, one visit; 5: all of row 1, two visits of four, at half the decay.
    # 0 and 1: 1/2 x 1/4 x 1 = 1/8; 5: 1 x 2/4 x 1/2 = 1/4.
    assert list(plan(of, 2).evicts) == [0]
    for _ in range(3):
        plan(of, 2)
    # Of row 0: 1 has 1/6, 2 has 4/6; of 8 visits 1, 4 and 2: .021, .333 and .125. Layer 1 asks.
    assert list(plan(of, 6).evicts) == [1]
    # Then 5 has 2/3 x 2/9 x 1/2 = .074, 6 1/3 x 1/9 x 1/2 = .019, 2 .296.
    assert list(plan(of, 3).evicts) == [6]


def test_a_cache_without_its_predictor_is_refused() -> None:
    other = HottestK(2, 4)
    with pytest.raises(ValueError, match="predictor = HottestK: must be an EAMPredictor"):
        EAMCache(2, 4, other)
    with pytest.raises(ValueError, match="predictor = HottestK: must be an EAMPredictor"):
        SequencePrefetch(other)


def test_the_predictor_refuses_no_capacity() -> None:
    with pytest.raises(ValueError, match="capacity = 0"):
        predictor([A], capacity=0)
