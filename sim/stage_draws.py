"""The random cuts of a test: drawn once, each distinct one kept once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.stage_cuts import Cuts, StagedText, shifted_cuts, shuffled_cuts, window_cuts
from sim.stage_inference import Floats


@dataclass(frozen=True, slots=True)
class Drawn:
    """Random cuts of one text: the distinct ones, and which of them each draw has, int64[draws].

    A text of five stages has at most 120 orders of them, however many are drawn.
    """

    cuts: Cuts
    which: NDArray[np.int64]

    def of(self, measure: Callable[[Cuts], Floats]) -> Floats:
        """Return a measure of each draw, float64[draws, ...]."""
        return measure(self.cuts)[self.which]


Draws = list[dict[str, Drawn]]
"""Of each text its random cuts, by kind: see ``NULLS``."""

SHIFTED, SHUFFLED, WINDOWS = NULLS = ("shifted", "shuffled", "windows")
"""The stages' own boundaries moved around the text together; their own lengths in random order; windows of
their mean length. What holds of the stages against all three is neither a matter of where in a request texts
usually change, nor of how long their stages are."""


def draw_cuts(texts: Sequence[StagedText], draws: int, seed: int) -> Draws:
    """Draw ``draws`` cuts of each kind for every text."""
    length, found = mean_length(texts), []
    for number, text in enumerate(texts):
        rng = np.random.default_rng([seed, number])
        cuts = (
            shifted_cuts(text, draws, rng),
            shuffled_cuts(text, draws, rng),
            window_cuts(text, length, draws, rng),
        )
        found.append({name: _distinct(some) for name, some in zip(NULLS, cuts, strict=True)})
    return found


def num_draws(draws: Draws) -> int:
    """Return how many cuts of each kind there are of a text."""
    return len(draws[0][SHIFTED].which)


def mean_length(texts: Sequence[StagedText]) -> int:
    """Return the mean length of a stage, in whole tokens."""
    tokens = sum(len(text.rows) for text in texts)
    return max(1, round(tokens / sum(len(text.kinds) for text in texts)))


def _distinct(cuts: Cuts) -> Drawn:
    found, which = np.unique(cuts, axis=0, return_inverse=True)
    return Drawn(found, which.reshape(-1))
