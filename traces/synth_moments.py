"""Solves for a score model's parameters: offsets from popularity, correlations from overlap by lag.

Both by simulation of single moments, one layer at a time: the share of draws in which an expert is
chosen, and the overlap of two draws whose states are correlated. The draws are the same for all values
tried, so that what is compared differs by the parameter alone.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.synth_scores import chosen_sets

_DRAWS = 3000
_ROUNDS = 10
_PAIRS = 1200
_TRIED = np.array([-0.3, 0.0, 0.25, 0.5, 0.75, 0.95])
"""Correlations whose overlap is simulated; those between are interpolated."""
_LEAST_SHARE = 3e-4

_quantile = np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])


class Mix(NamedTuple):
    """Classes of a layer's experts, int64[num_experts], and how far the states that they see agree.

    ``agreement`` is float64[num_classes, num_classes], see ``traces.synth_classes``.
    """

    classes: NDArray[np.int64]
    agreement: NDArray[np.float64]


def solve_offsets(
    shares: NDArray[np.float64],
    direction: NDArray[np.float32],
    top_k: int,
    seed: int,
    mix: Mix | None = None,
) -> NDArray[np.float32]:
    """Return offsets under which each expert is chosen as often as it should, of mean zero.

    Parameters
    ----------
    shares
        float64[num_stages, num_experts]: share of the tokens that choose each expert.
    direction
        float32[rank, num_experts] of this layer.
    mix
        None: all experts see the same state.

    Returns
    -------
    float32[num_stages, num_experts]
    """
    scores = _scores(direction, seed, mix)
    wanted = _quantile(np.clip(shares, _LEAST_SHARE, 1 - _LEAST_SHARE))
    offsets = wanted.copy()
    for number in range(_ROUNDS):
        found = np.stack([_chosen_share(scores + own, top_k) for own in offsets.astype(np.float32)])
        found = np.clip(found, 0.5 * _LEAST_SHARE, 1 - 0.5 * _LEAST_SHARE)
        step = 0.8 if number < _ROUNDS // 2 else 0.4  # smaller at the end, as the draws are few
        offsets += step * (wanted - _quantile(found))
    return np.asarray(offsets - offsets.mean(axis=1, keepdims=True), dtype=np.float32)


def chosen_shares(
    offsets: NDArray[np.float32],
    direction: NDArray[np.float32],
    top_k: int,
    seed: int,
    mix: Mix | None = None,
) -> NDArray[np.float64]:
    """Return the share of the tokens that choose each expert, float64[num_stages, num_experts]."""
    scores = _scores(direction, seed, mix)
    return np.stack([_chosen_share(scores + own, top_k) for own in offsets])


def _scores(direction: NDArray[np.float32], seed: int, mix: Mix | None) -> NDArray[np.float32]:
    """Draw scores without offsets, float32[num_draws, num_experts]; the same for the same seed."""
    count = 1 if mix is None else len(mix.agreement)
    shape = (count, _DRAWS, len(direction))
    states = np.random.default_rng([seed, 1]).standard_normal(shape, dtype=np.float32)
    if mix is None:
        return np.asarray(states[0] @ direction)
    root = np.linalg.cholesky(mix.agreement + 1e-6 * np.eye(count)).astype(np.float32)
    states = np.tensordot(root, states, axes=1)
    scores = np.empty((_DRAWS, direction.shape[1]), dtype=np.float32)
    for number in range(count):
        own = mix.classes == number
        scores[:, own] = states[number] @ direction[:, own]
    return scores


def _chosen_share(scores: NDArray[np.float32], top_k: int) -> NDArray[np.float64]:
    return np.asarray(chosen_sets(scores, top_k).mean(axis=0))


class OverlapSolver:
    """Overlap of the choices of two tokens of one layer, by the correlation of their states.

    Parameters
    ----------
    offsets
        float32[num_stages, num_experts] of the layer.
    direction
        float32[rank, num_experts] of the layer.
    """

    def __init__(
        self,
        offsets: NDArray[np.float32],
        direction: NDArray[np.float32],
        top_k: int,
        seed: int,
    ) -> None:
        rng = np.random.default_rng([seed, 2])
        self._offsets, self._direction, self._top_k = offsets, direction, top_k
        shape = (_PAIRS, len(direction))
        self._one = rng.standard_normal(shape, dtype=np.float32)
        self._other = rng.standard_normal(shape, dtype=np.float32)

    @property
    def num_pairs(self) -> int:
        """How many pairs of stages ``curve`` takes."""
        return _PAIRS

    def curve(
        self, earlier: NDArray[np.int16], later: NDArray[np.int16], is_of: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return overlaps at each correlation tried, which ascend, float64[num_tried, num_classes].

        ``earlier`` and ``later`` are int16[num_pairs]: the stages of the pairs of tokens. ``is_of`` is
        float64[num_experts, num_classes], 1 where an expert is of a class, else 0. All classes are moved
        by the same correlation. 0 for a class that is not chosen.
        """
        scores = self._one @ self._direction + self._offsets[earlier]
        before = chosen_sets(scores, self._top_k)
        overlaps = [self._overlap(before, later, float(value), is_of) for value in _TRIED]
        return np.asarray(np.maximum.accumulate(overlaps))

    def _overlap(
        self,
        before: NDArray[np.bool_],
        later: NDArray[np.int16],
        value: float,
        is_of: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        states = np.float32(value) * self._one + np.float32(np.sqrt(1 - value**2)) * self._other
        after = chosen_sets(states @ self._direction + self._offsets[later], self._top_k)
        uses = (before.sum(axis=0) + after.sum(axis=0)) @ is_of / 2
        return np.asarray(((before & after).sum(axis=0) @ is_of) / np.maximum(uses, 1))


def correlation_of(curve: NDArray[np.float64], overlap: float) -> tuple[float, float]:
    """Return the correlation that gives an overlap, and how steeply the curve rises there.

    An overlap beyond the curve gives its end; the slope is not below a tenth of the mean one.
    """
    value = float(np.interp(overlap, curve, _TRIED))
    place = int(np.clip(np.searchsorted(_TRIED, value) - 1, 0, len(_TRIED) - 2))
    slope = (curve[place + 1] - curve[place]) / (_TRIED[place + 1] - _TRIED[place])
    mean_slope = (curve[-1] - curve[0]) / (_TRIED[-1] - _TRIED[0])
    return value, max(float(slope), 0.1 * float(mean_slope), 1e-3)


def solve_sharpness(
    top_share: float, chosen_scores: NDArray[np.float32], most: float = 64.0
) -> float:
    """Return the factor under which the best slot's mean share of the softmax is ``top_share``.

    ``chosen_scores`` is float32[num_draws, top_k], descending. By bisection; 0 gives even weights.
    """
    low, high = 0.0, most
    differences = chosen_scores - chosen_scores[:, :1]
    for _ in range(40):
        middle = (low + high) / 2
        powers = np.exp(differences * middle)
        if float((powers[:, 0] / powers.sum(axis=1)).mean()) < top_share:
            low = middle
        else:
            high = middle
    return (low + high) / 2
