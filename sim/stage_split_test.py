"""Tests over windows on two sides of a place: sums over texts, layer by layer, and what they tell."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sim.stage_cuts import StagedText
from sim.stage_draws import NULLS, WINDOWS, Draws, num_draws
from sim.stage_findings import SplitResult
from sim.stage_inference import RESAMPLES, contrast, groups_of, resamples
from sim.stage_splits import split_cosines, split_means, split_sums


class SplitTest:
    """Collects the cosines of windows of one length, layer by layer; then tells.

    Parameters
    ----------
    texts, draws
        The texts in stages, and their random cuts.
    window
        Tokens on either side.
    seed
        For the resamples of requests.
    """

    def __init__(self, texts: Sequence[StagedText], draws: Draws, window: int, seed: int) -> None:
        self._texts, self._draws, self._seed = texts, draws, seed
        self.window = window
        self._groups = groups_of(len(texts))
        self._own = np.zeros((int(self._groups[-1]) + 1, 4))
        self._drawn = {name: np.zeros((num_draws(draws), 4)) for name in NULLS}

    def add(self, layer: Sequence[NDArray[np.float32]]) -> None:
        """Take in a layer: of each text what its tokens use, float32[num_tokens, num_experts]."""
        for group, uses, text, cuts in zip(
            self._groups, layer, self._texts, self._draws, strict=True
        ):
            cosines = split_cosines(uses, self.window)
            self._own[group] += split_sums(cosines, text.cut[None], self.window)[0]
            for name, some in cuts.items():
                self._drawn[name] += some.of(partial(split_sums, cosines, window=self.window))

    def tell(self) -> SplitResult:
        """Return the means over layers and texts."""
        within, across, difference = split_means(self._own.sum(axis=0)).tolist()
        rng = np.random.default_rng([self._seed, len(self._texts), self.window])
        again = split_means(resamples(len(self._own), RESAMPLES, rng) @ self._own)[:, 2]
        null = {name: split_means(sums) for name, sums in self._drawn.items()}
        fixed = null[WINDOWS]
        known = fixed[~np.isnan(fixed[:, 2]), :2]
        sides = known.mean(axis=0).tolist() if len(known) else [float("nan")] * 2
        against = {name: contrast(difference, again, found[:, 2]) for name, found in null.items()}
        return SplitResult(self.window, within, across, against, *sides)
