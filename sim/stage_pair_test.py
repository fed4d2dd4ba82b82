"""Tests over pairs of tokens at equal distance: sums over texts, layer by layer, and what they tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sim.stage_cuts import StagedText
from sim.stage_draws import NULLS, SHIFTED, Draws, num_draws
from sim.stage_findings import PairResult
from sim.stage_inference import RESAMPLES, Contrast, Floats, contrast, groups_of, resamples
from sim.stage_pairs import AllPairs, Counts, PairSums, Prefixes, count_within, overlaps, statistic


@dataclass(frozen=True, slots=True)
class _Layer:
    """Sums of one layer over texts."""

    shared: Floats  # of all pairs, [groups, D]
    within: Floats  # of those within stages, [groups, D]
    drawn: dict[str, Floats]  # of those within random cuts, by kind, [draws, bands]


class PairTest:
    """Collects pairs layer by layer; then tells.

    Parameters
    ----------
    texts, draws
        The texts in stages, and their random cuts.
    edges
        Bounds of the bands of distances, in tokens, ascending from 0.
    seed
        For the resamples of requests.
    """

    def __init__(
        self, texts: Sequence[StagedText], draws: Draws, edges: Sequence[int], seed: int
    ) -> None:
        self._texts, self._draws, self._seed = texts, draws, seed
        self._edges = np.array(edges, np.int64)
        self._distance = int(self._edges[-1])
        self._groups = groups_of(len(texts))
        self._layers: list[_Layer] = []

    def add(self, layer: Sequence[NDArray[np.float32]], top_k: int) -> None:
        """Take in a layer: of each text what its tokens use, float32[num_tokens, num_experts]."""
        every = np.arange(self._distance + 1)
        own = np.zeros((2, int(self._groups[-1]) + 1, self._distance))
        shape = (num_draws(self._draws), len(self._edges) - 1)
        drawn = {name: np.zeros(shape) for name in NULLS}
        for group, uses, text, cuts in zip(
            self._groups, layer, self._texts, self._draws, strict=True
        ):
            shared = overlaps(uses, self._distance) / top_k
            prefixes = Prefixes(shared)
            own[0, group] += shared.sum(axis=0)
            own[1, group] += prefixes.within(text.cut[None], every)[0]
            for name, some in cuts.items():
                drawn[name] += some.of(partial(prefixes.within, edges=self._edges))
        self._layers.append(_Layer(own[0], own[1], drawn))

    def tell(self) -> PairResult:
        """Return what the layers say together, and each by itself."""
        inside, every = self._counts()
        shared = np.stack([layer.shared for layer in self._layers], axis=1)
        within = np.stack([layer.within for layer in self._layers], axis=1)
        whole = AllPairs(shared.sum(axis=0), every.sum(axis=0), self._edges)
        own = PairSums(self._by_band(within.sum(axis=0)), inside.sum(axis=0))
        bands, layers = statistic(whole.difference(own))
        again = self._again(shared, within, inside, every)
        null = {name: statistic(whole.difference(self._drawn(name))) for name in NULLS}
        shifted = null[SHIFTED]
        outside = whole.pairs - own.pairs
        mean, resampled = float(layers.mean()), again[1].mean(axis=1)
        return PairResult(
            self._edges,
            *_sides(whole.shared, within.sum(axis=0), own.pairs, outside),
            num_within=own.pairs,
            num_across=outside,
            weights=own.pairs * outside / np.maximum(whole.pairs, 1),
            against={
                n: contrast(mean, resampled, found[1].mean(axis=1)) for n, found in null.items()
            },
            by_band=_each(bands.mean(axis=0), again[0].mean(axis=1), shifted[0].mean(axis=1)),
            by_layer=_each(layers, again[1], shifted[1]),
        )

    def _again(
        self, shared: Floats, within: Floats, inside: NDArray[np.int64], every: NDArray[np.int64]
    ) -> tuple[Floats, Floats]:
        """Return the statistic of resampled requests, by band and for all distances together."""
        rng = np.random.default_rng([self._seed, len(self._texts)])
        weight = resamples(len(every), RESAMPLES, rng)
        whole = AllPairs(np.tensordot(weight, shared, 1), weight @ every, self._edges)
        own = PairSums(self._by_band(np.tensordot(weight, within, 1)), weight @ inside)
        return statistic(whole.difference(own))

    def _counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pairs by group within stages, and in all, int64[groups, D] each."""
        shape = (int(self._groups[-1]) + 1, self._distance)
        inside, every = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        apart = np.arange(1, self._distance + 1)
        for group, text in zip(self._groups, self._texts, strict=True):
            inside[group] += count_within(text.cut[None], self._distance)[0]
            every[group] += np.maximum(len(text.rows) - apart, 0)
        return inside, every

    def _drawn(self, name: str) -> PairSums:
        """Return the sums of random cuts, float64[draws, layers, bands] and int64[draws, D]."""
        within = np.stack([layer.drawn[name] for layer in self._layers], axis=1)
        pairs = np.zeros((len(within), self._distance), np.int64)
        for cuts in self._draws:
            pairs += count_within(cuts[name].cuts, self._distance)[cuts[name].which]
        return PairSums(within, pairs)

    def _by_band(self, values: Floats) -> Floats:
        return np.add.reduceat(values, self._edges[:-1], axis=-1)


def _sides(shared: Floats, within: Floats, inside: Counts, across: Counts) -> tuple[Floats, Floats]:
    """Return what pairs within and across share at each distance, mean over layers, float64[D] each."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return (within / inside).mean(axis=0), ((shared - within) / across).mean(axis=0)


def _each(values: Floats, again: Floats, null: Floats) -> tuple[Contrast, ...]:
    return tuple(
        contrast(float(value), again[:, place], null[:, place])
        for place, value in enumerate(values)
    )
