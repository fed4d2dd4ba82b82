"""Predictors by hand, on 2 layers x 4 experts; and how right they are on real routing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.build import load_trace
from sim.calibration import Calibration
from sim.policies.affinity import Affinity
from sim.policies.learned import LearnedPredictor
from sim.policies.predictors import HottestK, NextGate, NextGate3, PreviousToken
from sim.workload import Workload, select_requests
from tests.configs import composed
from tests.prediction import ask, past, slot_overlap
from tests.strategies import make_trace, one_request
from tests.tokens import routing_of, view_of
from traces.schema import NO_EXPERT, Trace


def whole(scores: list[float]) -> list[int]:
    """Return counts without the trifle that ranks equals."""
    return [round(score) for score in scores]


# -- the previous token ----------------------------------------------------------------------------


def test_the_previous_token_is_what_is_expected() -> None:
    work = one_request([[[0, 1], [2, 3]], [[1, 2], [0, 3]], [[3, 0], [1, 0]]])
    said = ask(work, PreviousToken(), 1)
    assert whole(said.scores[0, 1]) == [0, 0, 0, 0], "layer 1 has not been seen yet"
    assert whole(said.scores[1, 1]) == [1, 1, 0, 0], "layer 0 of the next token: as this token"
    assert whole(said.scores[2, 1]) == [0, 0, 1, 1]
    assert said.names[3, 1] == [1, 2]
    assert said.names[5, 1] == [3, 0], "the earlier slot leads"


def test_of_a_prompt_only_the_last_token_counts() -> None:
    prompt, decoded = [[[0], [1]], [[2], [3]]], [[[1], [1]]]
    work = Workload(make_trace([(prompt, decoded)], 4))
    said = ask(work, PreviousToken(), 1)
    assert whole(said.scores[1, 1]) == [0, 0, 1, 0]


def test_a_batch_adds_up_its_tokens_and_keeps_who_sits_out() -> None:
    tokens = [([[[0], [1]]], [[[0], [2]], [[3], [2]]]), ([[[0], [1]]], [[[0], [2]], [[3], [2]]])]
    said = ask(Workload(make_trace(tokens, 4), 2), PreviousToken(), 1)
    # events 0-1 prompt of the first request, 2-3 of the second, 4-5 and 6-7 both decode
    assert whole(said.scores[2, 1]) == [0, 0, 0, 0], (
        "the second request's prompt has no token before"
    )
    assert whole(said.scores[4, 1]) == [0, 2, 0, 0], "both prompts, one a step"
    assert whole(said.scores[6, 1]) == [0, 0, 2, 0]


# -- popularity ------------------------------------------------------------------------------------


def test_the_hottest_are_counted_with_decay() -> None:
    work = one_request([[[0], [1]], [[0], [1]], [[2], [1]]])
    steady, fading = (ask(work, HottestK(2, 4, decay), 1) for decay in (1.0, 0.5))
    assert steady.scores[5, 1] == [2, 0, 1, 0]
    assert fading.scores[5, 1] == [0.25 + 0.5, 0, 1, 0]


# -- gates that speak early ------------------------------------------------------------------------


def with_gates(trace: Trace, *gates: list[list[list[int]]]) -> Trace:
    """Return a trace with columns of gates 1, 2, ... layers ahead."""
    names = ("next_gate_ids", "next_gate_ids_2", "next_gate_ids_3")
    columns = {name: np.array(g, dtype=np.uint16) for name, g in zip(names, gates, strict=False)}
    return replace(trace, **columns)


def test_a_gate_speaks_for_its_layer() -> None:
    trace = make_trace([([[[0, 1], [2, 3]]], [[[1, 2], [0, 3]]])], 4)
    none = [NO_EXPERT, NO_EXPERT]
    said = ask(Workload(with_gates(trace, [[[3, 2], none], [[2, 0], none]])), NextGate(), 1)
    assert said.names[0, 1] == [3, 2], "best first"
    assert whole(said.scores[2, 1]) == [1, 0, 1, 0]
    assert whole(said.scores[3, 1]) == [0, 0, 0, 0], "no gate speaks for the next token"


def test_gates_of_later_layers_have_columns_of_their_own() -> None:
    none = [NO_EXPERT]
    trace = make_trace([([[[0], [1], [2], [3]]], [])], 4)
    gates = [[[1], [3], [0], none]], [[[2], [1], none, none]], [[[3], none, none, none]]
    said = ask(Workload(with_gates(trace, *gates)), NextGate3(), 1, 2, 3)
    assert [said.names[0, ahead] for ahead in (1, 2, 3)] == [[1], [2], [3]]
    assert [said.names[1, ahead] for ahead in (1, 2)] == [[3], [1]]


def test_a_gate_that_was_not_recorded_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not tell what gates 1 layers ahead"):
        ask(one_request([[[0], [1]]]), NextGate(), 1)


def test_the_hottest_are_counted_whatever_their_precision() -> None:
    view, hottest = view_of(4, num_tokens=2, num_copies=2), HottestK(1, 4)
    ids = np.array([[0, 1], [0, 2]], np.uint16)
    low = np.array([[False, True], [True, False]])
    hottest.observe(routing_of(ids.tolist()).rewritten(view.keys, ids, None, low), view)
    assert hottest.scores(0, view).tolist() == [2, 1, 1, 0]


# -- the table -------------------------------------------------------------------------------------


def test_affinity_is_what_followed_in_calibration() -> None:
    # After 0 in layer 0 came 1 (twice) and 2; after 3 came 0. Layer 0 of the next token: 0 -> 0, 0, 3.
    calibration = past([[[[0], [1]], [[0], [1]], [[0], [2]], [[3], [0]]]])
    said = ask(one_request([[[0], [1]], [[3], [2]]]), Affinity(calibration, smoothing=1.0), 1)
    mean = np.array([1, 2, 1, 0]) / 4
    assert said.scores[0, 1] == [round(s, 6) for s in (np.array([0, 2, 1, 0]) + mean) / 4]
    assert said.scores[2, 1] == [round(s, 6) for s in (np.array([1, 0, 0, 0]) + mean) / 2]
    # Experts of layer 1 and of layer 0 one token later: (1, 0), (1, 0), (2, 3); mean use 2/3, 0, 0, 1/3.
    after = np.array([2, 0, 0, 1]) / 3
    assert said.scores[1, 1] == [round(s, 6) for s in (np.array([2, 0, 0, 0]) + after) / 3]


def test_affinity_takes_the_mean_over_slots_and_the_sum_over_tokens() -> None:
    calibration = past([[[[0, 1], [2, 3]], [[0, 2], [2, 1]]]])
    affinity = Affinity(calibration, smoothing=1.0)
    one = ask(one_request([[[0, 1], [2, 3]]]), affinity, 1).scores[0, 1]
    prompt = [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]
    two = ask(Workload(make_trace([(prompt, [])], 4)), affinity, 1).scores[0, 1]
    assert two == pytest.approx([2 * score for score in one], abs=2e-6)
    # P(2 | 0) = (2 + 1) / 3, P(2 | 1) = (1 + 1) / 2: expert 2 is in both tokens
    assert one[2] == pytest.approx((1 + 1) / 2, abs=1e-6)


def test_a_request_does_not_follow_another_one() -> None:
    calibration = past([[[[0], [1]]], [[[3], [2]]]])
    said = ask(one_request([[[0], [1]]]), Affinity(calibration), 1)
    assert said.scores[1, 1] == [0, 0, 0, 0], "1 of the first request is not followed by 3"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"smoothing": 0.0}, "smoothing = 0.0"), ({"max_tokens": 0}, "max_tokens = 0")],
)
def test_affinity_refuses(parameters: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Affinity(past([[[[0], [1]]]]), **parameters)  # type: ignore[arg-type]


# -- on the bundled trace --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def held_out() -> tuple[Calibration, Workload]:
    """Return calibration on the first 24 requests, and 4 others to predict."""
    trace = load_trace(composed()["trace"]["path"])
    chosen = select_requests(trace, (0, 24), "test")
    return Calibration(trace, (0, 24), chosen), Workload(trace, requests=(24, 28))


@pytest.fixture(scope="module")
def hottest(held_out: tuple[Calibration, Workload]) -> float:
    meta = held_out[1].trace.meta
    return slot_overlap(held_out[1], HottestK(meta.num_layers, meta.num_experts))


def test_the_next_gate_is_right_more_often_than_not(
    held_out: tuple[Calibration, Workload], hottest: float
) -> None:
    found = {ahead: slot_overlap(held_out[1], NextGate3(), ahead) for ahead in (1, 2, 3)}
    print(found, hottest)
    assert found[1] > 0.6
    assert found[1] > found[2] > found[3] > 1.5 * hottest


def test_what_was_learned_beats_popularity(
    held_out: tuple[Calibration, Workload], hottest: float
) -> None:
    calibration, work = held_out
    affinity = slot_overlap(work, Affinity(calibration))
    network = LearnedPredictor(calibration, np.random.default_rng(0))
    learned = slot_overlap(work, network)
    previous = slot_overlap(work, PreviousToken())
    print(affinity, learned, previous, hottest)
    assert affinity > 1.3 * hottest
    assert learned > affinity
    told = [share for share in network.held_out[1:] if share is not None]
    assert abs(float(np.mean(told)) - learned) < 0.05, (
        "what it says of itself holds for other requests"
    )
