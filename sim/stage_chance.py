"""What a stage detector would score by chance, with as many boundaries as it has found.

Two questions, two draws. How much of a score is worth anything? As many boundaries at decode steps drawn
at random say so. Is the rest of it luck? A detector that keeps a distance between its boundaries covers a
run better than random steps do, so its own boundaries are moved around the run together, by a random
number of steps: that keeps their number and their distances and breaks only their tie to the text.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim.stage_score import StageScore

DRAWS = 500


class Chance(NamedTuple):
    """Precision, recall and F1 of random boundaries, in the mean of the draws; and a p-value.

    ``p_value`` is (1 + n) / (1 + draws): of the moved boundaries n had an F1 as high as the detector's.
    """

    precision: float
    recall: float
    f1: float
    p_value: float


def chance_of(score: StageScore, rng: np.random.Generator, draws: int = DRAWS) -> Chance | None:
    """Return what chance would score; None where nothing is annotated or was found.

    Parameters
    ----------
    score
        Of a whole run.
    rng
        For the draws.
    draws
        How many of each kind, >= 1.
    """
    found, steps = np.array(score.found_steps), score.num_steps
    if not len(found) or not score.num_true:
        return None
    random = [_random(score, rng) for _ in range(draws)]
    offsets = rng.integers(1, max(2, steps), draws)  # 0 would move nothing
    moved = [np.sort((found - 1 + offset) % steps + 1) for offset in offsets]
    as_high = sum(_f1(score.held_against(place.tolist())) >= _f1(score) for place in moved)
    right = float(np.mean([s.num_right for s in random]))
    f1 = float(np.mean([_f1(s) for s in random]))
    return Chance(right / len(found), right / score.num_true, f1, (1 + as_high) / (1 + draws))


def _random(score: StageScore, rng: np.random.Generator) -> StageScore:
    """Return the score of as many boundaries at distinct random steps."""
    drawn = rng.choice(score.num_steps, size=score.num_found, replace=False)
    return score.held_against((np.sort(drawn) + 1).tolist())


def _f1(score: StageScore) -> float:
    assert score.f1 is not None
    return score.f1
