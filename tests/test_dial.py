"""Assumed accuracy is what comes out, whatever is asked for when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.policies.dial import AssumedAccuracy, Perfect
from sim.policies.oracle import Future
from sim.workload import Workload
from tests.configs import composed
from tests.prediction import Witness, ask
from tests.strategies import all_events, local_ids, one_request, trace_of_ids


def work(num_layers: int = 3, num_experts: int = 16, top_k: int = 4, tokens: int = 400) -> Workload:
    """Return a run of one request with random choices."""
    ids = local_ids(np.random.default_rng(5), tokens, num_layers, num_experts, top_k, 0.3)
    return Workload(trace_of_ids(ids, [(1, tokens - 1)], num_experts))


def dial(of: Workload, **parameters: Any) -> AssumedAccuracy:
    future = Future(all_events(of))
    return AssumedAccuracy(future, np.random.default_rng(11), of.num_layers, **parameters)


def overlaps(of: Workload, said: Witness, ahead: int, layer: int | None = None) -> list[float]:
    """Return the share of each event's experts that were named ``ahead`` events before."""
    found = []
    for event, routing in enumerate(all_events(of)):
        if event >= ahead and layer in (None, routing.layer):
            truth = {key % of.num_experts for key in routing.experts}
            found.append(len(truth & set(said.names[event - ahead, ahead])) / len(truth))
    return found


@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.886, 1.0])
def test_the_realised_accuracy_is_the_one_assumed(accuracy: float) -> None:
    of = work()
    found = overlaps(of, ask(of, dial(of, accuracy=accuracy)), 1)
    error = (
        accuracy * (1 - accuracy) / (4 * len(found))
    ) ** 0.5  # of the mean of independent slots
    assert abs(np.mean(found) - accuracy) <= 4 * error


def test_as_many_experts_are_named_as_are_used() -> None:
    of = work()
    said = ask(of, dial(of, accuracy=0.5))
    named = [said.names[event, 1] for event in range(of.num_layers * 400 - 1)]
    assert {len(set(names)) for names in named} == {4}


def test_a_wrong_one_has_the_place_of_the_right_one_that_is_lost() -> None:
    """So that a prefetcher which loads only the first is as often wrong as any other."""
    of = work()
    said = ask(of, dial(of, accuracy=0.5), width=1)
    found = overlaps(of, said, 1)
    assert abs(4 * np.mean(found) - 0.5) < 0.06


def test_wrong_ones_may_come_last() -> None:
    """Four of which each is right with .5: the first named is wrong only if all are, .5^4 of the time."""
    of = work()
    first = overlaps(of, ask(of, dial(of, accuracy=0.5, wrong_last=True), width=1), 1)
    assert abs(4 * np.mean(first) - (1 - 0.5**4)) < 0.03
    whole = overlaps(of, ask(of, dial(of, accuracy=0.5, wrong_last=True)), 1)
    assert abs(np.mean(whole) - 0.5) < 0.03  # as many are right as otherwise


def test_each_layer_has_an_accuracy_of_its_own() -> None:
    of = work()
    said = ask(of, dial(of, accuracy=[0.9, 0.2, 0.6]))
    found = [np.mean(overlaps(of, said, 1, layer)) for layer in range(3)]
    assert found == pytest.approx([0.9, 0.2, 0.6], abs=0.05)


def test_a_list_for_another_model_is_read_by_depth() -> None:
    of = work(num_layers=4, tokens=2)
    assert dial(of, accuracy=[0.1, 0.9]).accuracy == [0.1, 0.1, 0.9, 0.9]
    assert dial(of, accuracy=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]).accuracy == [
        0.1,
        0.3,
        0.5,
        0.7,
    ]


def test_what_is_right_from_afar_is_right_from_near() -> None:
    of = work()
    said = ask(of, dial(of, accuracy=0.8, loss_per_layer=0.2), 1, 2, 3)
    near, mid, far = (np.array(overlaps(of, said, ahead)[3 - ahead :]) for ahead in (1, 2, 3))
    assert (near >= mid).all()
    assert (mid >= far).all()
    assert [near.mean(), mid.mean(), far.mean()] == pytest.approx([0.8, 0.6, 0.4], abs=0.05)


def test_where_nearly_all_experts_are_used_few_can_be_wrong() -> None:
    of = one_request([[[0, 1, 2], [0, 1, 2]]])
    said = ask(of, dial(of, accuracy=0.0))
    assert said.names[0, 1] == [3], "there is but one other expert"


def test_perfect_says_the_truth() -> None:
    of = one_request([[[0, 1], [2, 3]], [[3, 1], [1, 0]]])
    said = ask(of, Perfect(Future(all_events(of))), 1, 2)
    assert said.names[0, 1] == [2, 3]
    assert said.names[1, 1] == [3, 1]
    assert said.scores[0, 2] == [0, 1, 0, 1], "the same layer's next event"
    assert said.names[3, 1] == [], "there is nothing after the end"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"accuracy": 1.2}, "accuracy = 1.2"),
        ({"accuracy": []}, r"accuracy = \[\]"),
        ({"accuracy": [0.5, -1.0]}, r"accuracy = \[0.5, -1.0\]"),
        ({"loss_per_layer": 2.0}, "loss_per_layer = 2.0"),
    ],
)
def test_the_dial_refuses(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dial(work(tokens=2), **parameters)


def test_the_preset_has_a_number_for_each_of_mixtrals_layers() -> None:
    table = composed("policy=prefetch_assumed_adapmoe")["policy"]["predictor"]["accuracy"]
    assert (len(table), table[1:4], table[-1]) == (32, [0.566, 0.721, 0.789], 0.85)
