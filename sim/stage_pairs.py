"""Pairs of tokens at equal distance: do two of one stage share more experts than two of different ones?

Tokens near each other share experts, stages or not, and a stage is a stretch of near tokens. So pairs
are compared with pairs as far apart only. With o(t, d) the share of experts that tokens t and t + d of a
text have in common, and m(d) its mean over all pairs of all texts at distance d, the statistic is ::

    sum over pairs (t, d) within a stage of (o(t, d) - m(d))
    --------------------------------------------------------
              sum over d of n(d) a(d) / (n(d) + a(d))

n(d) and a(d) count pairs within a stage and across boundaries. This equals the mean over d of what pairs
within share minus what pairs across share, each distance weighted by n a / (n + a), the weight of least
variance for a difference of two means. Distances are summed by *bands* (edges[i], edges[i + 1]].
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sim.stage_cuts import Cuts

_BLOCK_TOKENS = 256
Floats = NDArray[np.float64]
Counts = NDArray[np.int64] | NDArray[np.float64]
"""Whole numbers."""


def overlaps(one_layer: NDArray[np.float32], distance: int) -> Floats:
    """Return the products of the rows at each distance 1..``distance``, float64[num_tokens, distance].

    ``one_layer`` is float32[num_tokens, num_experts]. Column d - 1 of row t is row t times row t + d;
    0 where the text has no such row.
    """
    tokens = len(one_layer)
    padded = np.concatenate([one_layer, np.zeros((distance, one_layer.shape[1]), np.float32)])
    found = np.empty((tokens, distance))
    for first in range(0, tokens, _BLOCK_TOKENS):
        rows = one_layer[first : first + _BLOCK_TOKENS]
        ahead = padded[first + 1 : first + len(rows) + distance]
        table = np.ascontiguousarray(rows @ ahead.T)
        down, right = table.strides  # the wanted diagonals, as rows of a view
        shape = (len(rows), distance)
        found[first : first + len(rows)] = np.lib.stride_tricks.as_strided(
            table, shape, (down + right, right), writeable=False
        )
    return found


class Prefixes:
    """Sums of overlaps that answer what the pairs within any stretch of a text share.

    Parameters
    ----------
    overlap
        float64[num_tokens, distance], of :func:`overlaps`.
    """

    def __init__(self, overlap: Floats) -> None:
        tokens, distance = overlap.shape
        # by_start[t, m]: pairs that start before t, at most m apart; by_end: that end before t.
        self._by_start = np.zeros((tokens + 1, distance + 1))
        self._by_end = np.zeros_like(self._by_start)
        for apart in range(1, min(distance, tokens) + 1):
            column = overlap[: tokens - apart, apart - 1]
            self._by_end[apart + 1 :, apart] = column.cumsum()
        self._by_start[1:, 1:] = overlap.cumsum(axis=0)
        for table in (self._by_start, self._by_end):
            np.cumsum(table, axis=1, out=table)

    def within(self, cuts: Cuts, edges: NDArray[np.int64]) -> Floats:
        """Return what the pairs within stages share, by band of distances, float64[num_cuts, bands]."""
        first, last = cuts[:, :-1, None], cuts[:, 1:, None]
        apart = np.minimum(edges, np.maximum(last - first - 1, 0))
        below = self._by_end[last, apart] - self._by_start[first, apart]
        return np.diff(below.sum(axis=1), axis=1)


def count_within(cuts: Cuts, distance: int) -> NDArray[np.int64]:
    """Return the pairs within stages at each distance 1..``distance``, int64[num_cuts, distance]."""
    lengths = np.diff(cuts, axis=1)
    found = np.empty((len(cuts), distance), np.int64)
    for apart in range(1, distance + 1):
        found[:, apart - 1] = np.maximum(lengths - apart, 0).sum(axis=1)
    return found


@dataclass(slots=True)
class PairSums:
    """What the statistic needs of a set of cuts, summed over texts; see the head of this file.

    Attributes
    ----------
    within
        What pairs within stages share, float64[..., num_layers, bands].
    pairs
        Their number, [..., distance].
    """

    within: Floats
    pairs: Counts


@dataclass(slots=True)
class AllPairs:
    """What all pairs of some texts share at each distance, whatever the stages.

    Attributes
    ----------
    shared
        float64[..., num_layers, distance].
    pairs
        [..., distance].
    edges
        int64[bands + 1], from 0.
    """

    shared: Floats
    pairs: Counts
    edges: NDArray[np.int64] = field(repr=False)

    def difference(self, sums: PairSums) -> tuple[Floats, Floats]:
        """Return numerator and denominator of the statistic.

        Leading axes (draws) of the two broadcast. float64[..., num_layers, bands] and [..., bands]; a
        band without pairs of both kinds has 0 and 0.
        """
        inside, every = sums.pairs, self.pairs
        across = every - inside
        means = self.shared / np.maximum(every, 1)[..., None, :]
        counted = (inside > 0) & (across > 0)
        weights = np.where(counted, inside * across / np.maximum(every, 1), 0.0)
        expected = self._by_band(inside[..., None, :] * means)
        return sums.within - expected, self._by_band(weights)

    def _by_band(self, by_distance: Floats) -> Floats:
        return np.add.reduceat(by_distance, self.edges[:-1], axis=-1)


def statistic(parts: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Return the statistic by layer and band, and by layer for all distances together.

    float64[..., num_layers, bands] and [..., num_layers]; nan where there is nothing to compare.
    """
    top, bottom = parts[0], parts[1][..., None, :]
    with np.errstate(invalid="ignore", divide="ignore"):
        by_band = np.where(bottom > 0, top / bottom, np.nan)
        used = np.where(bottom > 0, top, 0.0)
        return by_band, used.sum(axis=-1) / bottom.sum(axis=-1)
