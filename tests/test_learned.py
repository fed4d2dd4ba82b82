"""The trained predictor: it learns what there is to learn, and says how well."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.policies.learned import LearnedPredictor
from sim.workload import Workload
from tests.prediction import ask, past, slot_overlap
from tests.strategies import Token, make_trace, one_request


def rule_tokens(seed: int, count: int) -> list[Token]:
    """Return tokens whose second layer follows a rule: this token's expert, and the last token's there.

    Layer 1 uses expert (a + b) % 4 where a is layer 0's and b what layer 1 used before; nobody who sees
    but one of them can know.
    """
    rng = np.random.default_rng(seed)
    tokens: list[Token] = []
    last = 0
    for expert in rng.integers(4, size=count).tolist():
        last = (expert + last) % 4
        tokens.append([[expert], [last]])
    return tokens


@pytest.fixture(scope="module")
def trained() -> LearnedPredictor:
    calibration = past([rule_tokens(seed, 400) for seed in range(4)])
    return LearnedPredictor(calibration, np.random.default_rng(0), epochs=30, rate=0.01)


def test_it_learns_a_rule_that_needs_both_inputs(trained: LearnedPredictor) -> None:
    assert trained.held_out[1] == pytest.approx(1.0, abs=0.02)
    assert slot_overlap(one_request(rule_tokens(9, 200)), trained) > 0.98


def test_it_claims_nothing_where_there_is_nothing_to_learn(trained: LearnedPredictor) -> None:
    """Layer 0 of the next token is drawn by chance: one in four."""
    assert trained.held_out[0] == pytest.approx(0.25, abs=0.12)


def test_probabilities_are_sure_of_the_rule(trained: LearnedPredictor) -> None:
    work = one_request([[[1], [1]], [[2], [3]], [[3], [2]]])
    said = ask(work, trained)
    assert said.scores[2, 1][3] > 0.9, "2 now, 1 before"
    assert said.scores[4, 1][2] > 0.9, "3 now, 3 before"
    assert sum(said.scores[4, 1]) == pytest.approx(1.0, abs=0.3)


def test_a_batch_adds_up_its_tokens(trained: LearnedPredictor) -> None:
    requests = [([[[1], [1]]], [[[2], [3]]]), ([[[0], [0]]], [[[2], [2]]])]
    work = Workload(make_trace(requests, 4), 2)
    said = ask(work, trained)
    # events 0-1, 2-3: the prompts; 4: both decode, 2 now, 1 and 0 before
    assert said.scores[4, 1] == pytest.approx([0, 0, 1, 1], abs=0.2)


def test_one_token_is_predicted_as_it_is_among_others(trained: LearnedPredictor) -> None:
    alone = ask(one_request([[[1], [1]], [[2], [3]]]), trained).scores[2, 1]
    twice = [([[[1], [1]]], [[[2], [3]]])] * 2
    both = ask(Workload(make_trace(twice, 4), 2), trained).scores[4, 1]
    assert both == pytest.approx([2 * score for score in alone], abs=1e-4)


def test_the_same_chance_gives_the_same_network() -> None:
    calibration = past([rule_tokens(1, 100)])
    made = [LearnedPredictor(calibration, np.random.default_rng(s), epochs=1) for s in (3, 3, 4)]
    work = one_request(rule_tokens(2, 5))
    first, again, other = (ask(work, predictor).scores for predictor in made)
    assert first == again
    assert first != other


def test_a_stride_is_trained_for_its_distance() -> None:
    tokens: list[Token] = [[[t % 4], [0], [(t + 1) % 4]] for t in range(200)]
    predictor = LearnedPredictor(past([tokens]), np.random.default_rng(0), distance=2, epochs=30)
    said = ask(one_request([[[1], [0], [2]], [[2], [0], [3]]]), predictor, 2)
    assert said.names[3, 2] == [3], "layer 2 from layer 0"
    assert said.names[1, 2] == [2], (
        "layer 0 of the next token from layer 1, which tells nothing: by last"
    )
    with pytest.raises(ValueError, match="asked for 1 layers ahead: must be distance = 2"):
        ask(one_request([[[1], [0], [2]]]), predictor, 1)


@pytest.mark.parametrize(
    "parameters",
    [{"distance": 0}, {"hidden": 0}, {"epochs": 0}, {"max_tokens": 0}, {"rate": 0.0}],
)
def test_it_refuses(parameters: dict[str, Any]) -> None:
    name, value = next(iter(parameters.items()))
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        LearnedPredictor(past([rule_tokens(0, 3)]), np.random.default_rng(0), **parameters)


def test_a_single_token_of_calibration_is_enough_to_run() -> None:
    predictor = LearnedPredictor(past([[[[0], [1]]]]), np.random.default_rng(0))
    assert predictor.held_out == [None, None]
    assert ask(one_request([[[0], [1]]]), predictor).names[0, 1] == [1]
