"""What chance would score: boundaries elsewhere, F1, and how often luck does as well."""

from __future__ import annotations

import numpy as np
import pytest

from sim.stage_chance import chance_of
from sim.stage_score import StageScore
from sim.types import Phase, StepInfo
from tests.test_stage_report import score


def test_boundaries_elsewhere_score_as_if_they_had_been_found() -> None:
    held = score([6, 12], [5, 9], tolerance=3)
    again = held.held_against(held.found_steps)
    assert (again.precision, again.recall, again.delays) == (1.0, 1.0, [1, 3])
    for found in ([5, 9], [4, 9], [13], [6, 7], [7, 8]):
        plain = score(found, [5, 9], tolerance=3)
        moved = held.held_against([step + 1 for step in found])  # steps count from 1
        assert (moved.f1, moved.delays, moved.taken) == (plain.f1, plain.delays, plain.taken)


def test_f1_is_the_harmonic_mean() -> None:
    held = score([6, 8, 14], [5, 12], tolerance=3)
    assert (held.precision, held.recall) == (2 / 3, 1.0)
    assert held.f1 == pytest.approx(2 / (1 / held.precision + 1 / held.recall))
    assert (score([], [5], 3).f1, score([5], [], 3).f1) == (0.0, None)


def score_at(found: list[int], true: list[int]) -> StageScore:
    held = StageScore(5)
    held.add(StepInfo(0, Phase.DECODE, 1, request_ids=(0,), stages=(0,)), False)
    held.num_steps, held.true_steps = 1000, true
    return held.held_against(found)


def test_chance_is_what_random_boundaries_score() -> None:
    true = list(range(20, 1000, 20))
    rng = np.random.default_rng(0)
    perfect = chance_of(score_at(true, true), rng, 200)
    assert perfect is not None
    # A random step lies within 5 steps of a true one with 6 / 20, yet takes it only once.
    assert 0.2 < perfect.precision < 0.3
    assert perfect.f1 == pytest.approx(perfect.precision), "as many found as there are"
    assert perfect.p_value < 0.03, "only shifts of 1 to 5 steps find as many: late, not wrong"
    worst = chance_of(score_at([step + 10 for step in true], true), rng, 200)
    assert worst is not None
    assert worst.p_value == 1.0, "no shift scores less than nothing"
    assert chance_of(score_at([], true), rng) is None
    assert chance_of(score_at(true, []), rng) is None


def test_a_detector_that_guesses_is_no_better_than_chance() -> None:
    rng, luck = np.random.default_rng(1), []
    for _ in range(30):
        true, found = (sorted(rng.choice(999, 30, replace=False) + 1) for _ in range(2))
        chance = chance_of(score_at([*map(int, found)], [*map(int, true)]), rng, 50)
        assert chance is not None
        luck.append(chance.p_value)
    assert 0.3 < np.mean(luck) < 0.7
