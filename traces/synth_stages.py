"""The chain of a request's stages: which begins, how long it lasts, which comes next, when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = np.linspace(0, 1, 9)


@dataclass(frozen=True, slots=True)
class StageChain:
    """A Markov chain over stages whose stays have any distribution of lengths.

    Attributes
    ----------
    begins
        float64[num_stages]: how likely each stage is the first.
    follows
        float64[num_stages, num_stages + 1]: how likely each is next; the last column: the end.
    lasts
        float64[num_stages, 9]: octiles of the lengths of stays, in tokens, smallest and largest
        included.
    """

    begins: NDArray[np.float64]
    follows: NDArray[np.float64]
    lasts: NDArray[np.float64]

    def draw(self, num_tokens: int | None, rng: np.random.Generator) -> NDArray[np.int16]:
        """Return the stage of each token, int16[num_tokens]; None: until the chain ends.

        With a number of tokens a chain that ends early begins anew.
        """
        parts: list[NDArray[np.int16]] = []
        length, stage = 0, self._first(rng)
        while num_tokens is None or length < num_tokens:
            stay = max(1, round(float(np.interp(rng.random(), QUANTILES, self.lasts[stage]))))
            parts.append(np.full(stay, stage, dtype=np.int16))
            length += stay
            stage = int(rng.choice(len(self.begins) + 1, p=self.follows[stage]))
            if stage == len(self.begins):
                if num_tokens is None:
                    break
                stage = self._first(rng)
        return np.concatenate(parts)[:num_tokens]

    def _first(self, rng: np.random.Generator) -> int:
        return int(rng.choice(len(self.begins), p=self.begins))

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain lists."""
        return {name: getattr(self, name).round(6).tolist() for name in self.__slots__}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StageChain:
        """Read what ``to_dict`` gave; likelihoods are made to sum to one again."""
        begins, follows, lasts = (np.array(values[name], dtype=float) for name in cls.__slots__)
        return cls(begins / begins.sum(), follows / follows.sum(axis=1, keepdims=True), lasts)


def fit_chain(sequences: Sequence[NDArray[np.int16]], num_stages: int) -> StageChain:
    """Count begins, successions and lengths of stays in the stages of requests.

    A stage that never occurs is followed by the end. The last stay of a sequence counts as a whole
    one, and as followed by the end.
    """
    begins, follows = np.zeros(num_stages), np.zeros((num_stages, num_stages + 1))
    stays: list[list[int]] = [[] for _ in range(num_stages)]
    for labels in sequences:
        edges = np.concatenate([[0], np.flatnonzero(np.diff(labels)) + 1, [len(labels)]])
        order = labels[edges[:-1]].tolist()
        begins[order[0]] += 1
        for stage, after, length in zip(
            order, [*order[1:], num_stages], np.diff(edges).tolist(), strict=True
        ):
            follows[stage, after] += 1
            stays[stage].append(length)
    follows[follows.sum(axis=1) == 0, -1] = 1
    lasts = np.array([np.quantile(stay or [1], QUANTILES) for stay in stays])
    return StageChain(begins / begins.sum(), follows / follows.sum(axis=1, keepdims=True), lasts)


def cluster_windows(
    histograms: NDArray[np.float64], num_clusters: int, seed: int
) -> NDArray[np.int16]:
    """Return the cluster of each window by k-means, int16[num_windows], for a trace without stages.

    ``histograms`` is float64[num_windows, num_layers, num_experts], shares of the choices; their
    square roots are compared, which makes all experts count alike (Hellinger distance). The most
    common cluster is number 0.
    """
    points = np.sqrt(histograms).reshape(len(histograms), -1)
    rng = np.random.default_rng([seed, num_clusters])
    centres = points[_far_apart(points, num_clusters, rng)]
    for _ in range(50):
        nearest = _distances(points, centres).argmin(axis=1)
        means = [points[nearest == c].mean(axis=0) for c in range(num_clusters) if c in nearest]
        if len(means) == len(centres) and np.allclose(means, centres):
            break
        centres = np.array(means)
        num_clusters = len(centres)
    _, label, sizes = np.unique(nearest, return_inverse=True, return_counts=True)
    rank = np.argsort(np.argsort(-sizes, kind="stable"), kind="stable")
    return rank[label].astype(np.int16)


def _far_apart(points: NDArray[np.float64], number: int, rng: np.random.Generator) -> list[int]:
    """Choose starting points as k-means++ does: far from those chosen with higher likelihood."""
    chosen = [int(rng.integers(len(points)))]
    while len(chosen) < number:
        near = _distances(points, points[chosen]).min(axis=1)
        if near.sum() <= 0:
            break
        chosen.append(int(rng.choice(len(points), p=near / near.sum())))
    return chosen


def _distances(points: NDArray[np.float64], centres: NDArray[np.float64]) -> NDArray[np.float64]:
    squares = (points**2).sum(axis=1)[:, None] - 2 * points @ centres.T
    return np.maximum(squares + (centres**2).sum(axis=1), 0)
