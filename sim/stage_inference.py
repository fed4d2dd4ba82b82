"""How sure a difference is: an interval by resampling requests, a p-value by random cuts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 500
"""Of the requests, for an interval."""
_MOST_GROUPS = 256
"""Requests are resampled one by one up to so many, beyond that in as many groups of neighbours."""
_LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Contrast:
    """A difference, and how it stands to chance.

    Attributes
    ----------
    value
        What was measured; nan where there was nothing to compare.
    low, high
        Bounds of its 95 % interval, of resampled requests; nan for a single request.
    null_mean, null_sd
        Mean and standard deviation of the same difference for random cuts.
    p_value
        (1 + n) / (1 + draws), n random cuts having a difference as large: one-sided.
    """

    value: float
    low: float
    high: float
    null_mean: float
    null_sd: float
    p_value: float

    @property
    def is_clear(self) -> bool:
        """Tell whether chance explains it in at most one case of twenty, and its interval is above that."""
        return self.p_value <= 1 - _LEVEL and not self.low <= self.null_mean


def contrast(value: float, resampled: Floats, null: Floats) -> Contrast:
    """Return a difference with its interval and its p-value.

    Parameters
    ----------
    value
        As measured.
    resampled
        Of resampled requests, float64[resamples]; empty: no interval.
    null
        Of random cuts, float64[draws].
    """
    if np.isnan(value):
        return Contrast(*[float("nan")] * 6)
    low = high = float("nan")
    known = resampled[~np.isnan(resampled)]
    if len(known):
        tail = (1 - _LEVEL) / 2
        low, high = np.quantile(known, [tail, 1 - tail]).tolist()
    null = null[~np.isnan(null)]
    mean, spread = (float(null.mean()), float(null.std())) if len(null) else [float("nan")] * 2
    # A draw that equals the measured cuts must count as one, whatever rounding did to its sums.
    as_large = int((null >= value - 1e-9 * max(1.0, abs(value))).sum())
    return Contrast(value, low, high, mean, spread, (1 + as_large) / (1 + len(null)))


def groups_of(num_texts: int) -> NDArray[np.int64]:
    """Return the group in which each text is resampled, int64[num_texts]."""
    return np.arange(num_texts) * min(num_texts, _MOST_GROUPS) // max(1, num_texts)


def resamples(num_groups: int, draws: int, rng: np.random.Generator) -> Floats:
    """Return how often each resample has each group, float64[draws, num_groups]; no draw of one group."""
    if num_groups < 2:
        return np.empty((0, num_groups))
    shares = np.full(num_groups, 1 / num_groups)
    return rng.multinomial(num_groups, shares, size=draws).astype(np.float64)
