"""The caches of HybriMoE and HOBBIT: against plain models, and on cases computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sim.policies.base import CachePolicy, Predictor
from sim.policies.hobbit import HOBBIT
from sim.policies.mrs import MRS
from sim.policies.window import DALI, HotWindow
from sim.types import KeySpace, LayerRouting, Phase, StepInfo, View
from sim.workload import Workload
from tests.cache_replay import (
    NUM_EXPERTS,
    Model,
    agree,
    contents,
    learned,
    one_layer,
    run_of,
)
from tests.strategies import trace_of_ids
from tests.test_policies_unit import make_view
from traces.schema import PREFILL


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize(("num_layers", "width"), [(1, 0), (1, 1), (3, 0)])
def test_mrs_follows_a_running_average_of_the_weights(
    num_layers: int, width: int, bypass: bool
) -> None:
    alpha = 0.3
    weights = np.random.default_rng(5).random((160, num_layers, 2)).astype(np.float16)

    def score(model: Model, key: int, step: int, layer: int) -> tuple[float, ...]:
        own = key // NUM_EXPERTS
        chosen = {
            at: model.ids[at, own].tolist().index(key % NUM_EXPERTS) for at, _ in model.uses[key]
        }
        value = 0.0
        for at in range(step if own > layer else step + 1):  # events of the key's layer so far
            pair = weights[at, own].astype(np.float64)
            share = pair[chosen[at]] / pair.sum() if at in chosen else 0.0
            value = (1.0 - alpha) * value + alpha * (share if width == 0 or share > 0.5 else 0.0)
        return (value,)

    agree(lambda: MRS(2, alpha, width, bypass), score, bypass, num_layers, weights=weights)


def test_mrs_counts_the_chosen_alike_where_there_are_no_weights() -> None:
    # alpha = 0.5: 0 has 1/2 * 1/2 and then a half of it a step; 1 and 2 come later and are worth more.
    workload = one_layer([[0, 1], [1, 2], [2, 3]], 4)
    assert contents(workload, lambda: MRS(2), 3)[-1] == {1, 2, 3}


def test_mrs_scores_what_was_nearly_chosen_where_the_trace_has_logits() -> None:
    # 0 and 1 were each chosen once; 0 was first choice then and last ever since, 1 always second.
    logits = np.log(
        np.array([[0.6, 0.1, 0.1, 0.2], [0.05, 0.5, 0.05, 0.4], [0.05, 0.4, 0.05, 0.5]])
    )
    logits = logits[:, None, :].astype(np.float16)
    ids = np.array([0, 1, 3])[:, None, None]
    found = {}
    for name, some in {"logits": logits, "none": None}.items():
        cache = MRS(1, width=2)
        view = learned(cache, run_of(ids, 4, logits=some))
        found[name] = [round(cache.rank(0, cache.score(key), view), 3) for key in range(4)]
    # S = 1/2 p3 + 1/4 p2 + 1/8 p1, the two largest p of an event each.
    assert found["logits"] == [0.075, 0.325, 0.0, 0.375]
    assert found["none"] == [0.125, 0.25, 0.0, 0.5]


def test_mrs_takes_the_mean_over_tokens() -> None:
    weights = np.array([[0.9, 0.1], [0.5, 0.5]], dtype=np.float16)[:, None, :]
    ids = np.array([[0, 1], [1, 2]])[:, None, :]
    cache = MRS(2)
    trace = run_of(ids, 4, 1, weights).trace
    prompt = replace(trace, phase=np.array([PREFILL] * 2, dtype=np.uint8))
    view = learned(cache, Workload(prompt))
    found = [cache.rank(0, cache.score(key), view) for key in range(4)]
    assert found == pytest.approx([0.225, 0.15, 0.125, 0.0], abs=1e-4)


def test_mrs_survives_more_events_than_a_float_can_hold() -> None:
    policy = MRS(1)
    view = learned(policy, one_layer([[step % 3] for step in range(3000)], 4))
    scores = [policy.rank(0, policy.score(key), view) for key in range(4)]
    # Used every third event, the last 3, 2 and 1 events ago: a geometric series of 1 / 8.
    assert scores == pytest.approx([1 / 7, 2 / 7, 4 / 7, 0.0])


@pytest.mark.parametrize("num_layers", [1, 3])
def test_hobbit_adds_up_recency_frequency_and_distance(num_layers: int) -> None:
    weights = {"recency": 0.37, "frequency": 0.19, "high": 0.13, "distance": 0.31}

    def score(model: Model, key: int, step: int, layer: int) -> tuple[float, ...]:
        tokens = step + 1
        uses = len(model.uses[key])
        last = model.uses[key][-1][0] + 1
        ahead = (key // NUM_EXPERTS - layer) % num_layers
        value = (0.37 * last + (0.19 + 0.13) * uses) / tokens + 0.31 * (1 - ahead / num_layers)
        return (round(value, 12),)

    agree(lambda: HOBBIT(2, **weights), score, False, num_layers, num_tokens=120)


class Fixed(Predictor):
    """Expects the experts 1 and 3 of every layer, 3 most."""

    def scores(self, layer: int, view: View) -> np.ndarray:
        return np.array([0.0, 0.5, -1.0, 0.9, 0.1])


@pytest.mark.parametrize(
    ("mask_layers", "top_k", "victims"),
    [(0, 2, [0, 1, 2, 3]), (1, 1, [0, 1, 2, 3]), (1, 2, [0, 2, 1, 3])],
)
def test_hobbit_spares_what_is_expected_while_it_can(
    mask_layers: int, top_k: int, victims: list[int]
) -> None:
    policy = HOBBIT(top_k, 1.0, 0.0, 0.0, 0.0, Fixed(), mask_layers)
    workload = one_layer([[0], [1], [2], [3]], 5)
    view = learned(policy, workload)
    found = []
    while (victim := policy.choose_victim(lambda key: True, view)) is not None:
        found.append(victim)
        policy.on_evict(victim)
    assert found == victims


def test_hobbit_begins_anew_with_each_sequence() -> None:
    # 0 is used twice by the first request; in the second all are used once, 0 first.
    ids = np.array([[0], [0], [1], [2], [0], [1], [2]])[:, None, :]
    trace = trace_of_ids(ids.astype(np.uint16), [(1, 3), (1, 2)], 4)
    policy = HOBBIT(1, 0.0, 0.5, 0.5, 0.0)
    view = learned(policy, Workload(trace))
    assert policy.choose_victim(lambda key: True, view) == 0  # equal counts fall to the lower key


def test_hobbit_counts_uses_of_high_precision_apart() -> None:
    view = make_view()
    view.keys = KeySpace(2, 4, 2)
    victims = {}
    for low in (False, True):
        policy = HOBBIT(1, 0.0, 0.0, 1.0, 0.0)
        keys = [8, 9] if low else [0, 1]
        policy.start(keys, 2, view)
        for key in keys:
            policy.on_insert(key, view)
        for step, (own, other) in enumerate([(0, 9), (0, 9), (1, 8)]):
            view.step = StepInfo(step, Phase.DECODE, 1, request_ids=(0,))
            policy.observe(LayerRouting(0, [own, other], [1, 1]), view)
        victims[low] = policy.choose_victim(lambda key: True, view)
    # In high precision 0 was used twice and 1 once, in low precision 1 twice and 0 once.
    assert victims == {False: 1, True: 8}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DALI(0), "window = 0: must be >= 1"),
        (lambda: DALI(4, -1), "exchanges = -1: must be >= 0"),
        (lambda: HotWindow(0), "window = 0: must be >= 1"),
        (lambda: HotWindow(4, 1.5), r"hot_share = 1.5: must be in \(0, 1\]"),
        (lambda: MRS(2, 1.0), r"alpha = 1.0: must be in \(0, 1\)"),
        (lambda: MRS(2, width=-1), "width = -1: must be >= 0"),
        (lambda: HOBBIT(2, distance=0.5), "must sum to 1"),
        (lambda: HOBBIT(2, -0.5, 0.5, 0.5, 0.5), "recency = -0.5: must be >= 0"),
        (lambda: HOBBIT(2, mask_layers=-1), "mask_layers = -1: must be >= 0"),
    ],
)
def test_bad_parameters_are_refused(make: Callable[[], CachePolicy], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
