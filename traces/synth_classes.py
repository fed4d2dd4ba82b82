"""Classes of experts by popularity, and how the experts of each are used again.

Experts that are rarely used come in bursts and popular ones do not, so that one autocorrelation for all
of a layer is too low for the ones and too high for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.schema import Trace
from traces.synth_scores import BLOCK_TOKENS, filters

BOUNDS = (0.45, 0.8, 0.94)
"""Shares of a layer's uses at which a class ends, from the most popular expert on."""
NUM_CLASSES = len(BOUNDS) + 1
_LEAST_USES = 300
"""A class with fewer uses in a layer is joined to the more popular one: nothing can be fitted to it."""
_SETTLED_BLOCKS = 4


def popularity_classes(trace: Trace) -> NDArray[np.int64]:
    """Return the class of each expert, int64[num_layers, num_experts]; 0 has the most popular ones."""
    layers, experts = trace.meta.num_layers, trace.meta.num_experts
    classes = np.empty((layers, experts), dtype=np.int64)
    for layer in range(layers):
        counts = np.bincount(trace.expert_ids[:, layer].ravel(), minlength=experts)
        order = np.argsort(-counts, kind="stable")
        before = np.cumsum(counts[order]) - counts[order]
        own = np.searchsorted(BOUNDS, before / counts.sum(), side="right")
        for number in range(NUM_CLASSES - 1, 0, -1):
            if counts[order][own == number].sum() < _LEAST_USES:
                own[own == number] -= 1
        classes[layer, order] = own
    return classes


@dataclass(frozen=True, slots=True)
class ClassOverlap:
    """Expert overlap of tokens of one request, by class.

    Attributes
    ----------
    lags
        int64[num_lags], in tokens.
    rates
        float64[num_layers, NUM_CLASSES, num_lags]: share of the uses of a class's experts that were
        uses of the same expert ``lag`` tokens before. Uses are the mean of both tokens'. nan where there
        are none.
    pairs
        int64[num_lags]: pairs of tokens.
    """

    lags: NDArray[np.int64]
    rates: NDArray[np.float64]
    pairs: NDArray[np.int64]


def class_overlap(trace: Trace, classes: NDArray[np.int64], lags: Sequence[int]) -> ClassOverlap:
    """Return the overlaps of a trace whose rows are in the order of its requests."""
    request = np.asarray(trace.request_id)
    earlier = [np.flatnonzero(request[lag:] == request[:-lag]) for lag in lags]
    rates = np.full((len(classes), NUM_CLASSES, len(lags)), np.nan)
    is_used = np.zeros((len(request), trace.meta.num_experts), dtype=bool)
    for layer, own in enumerate(classes):
        ids = trace.expert_ids[:, layer].astype(np.intp)
        is_used[:] = False
        np.put_along_axis(is_used, ids, True, axis=1)
        class_of = own[ids]
        for column, (lag, rows) in enumerate(zip(lags, earlier, strict=True)):
            again = np.take_along_axis(is_used[rows], ids[rows + lag], axis=1)
            common = _counts(class_of[rows + lag][again])
            uses = (_counts(class_of[rows]) + _counts(class_of[rows + lag])) / 2
            np.divide(common, uses, out=rates[layer, :, column], where=uses > 0)
    return ClassOverlap(np.array(lags), rates, np.array([len(rows) for rows in earlier]))


def _counts(classes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.bincount(classes.ravel(), minlength=NUM_CLASSES)


def agreement(correlations: NDArray[np.float64], stays: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how far the states of two classes agree at a time, float64[num_layers, classes, classes].

    They come of the same noise through different filters; 1 where these are equal. ``correlations`` and
    ``stays`` are those of ``traces.synth_model``.
    """
    found = np.sqrt(stays[:, :, None] * stays[:, None, :])
    for layer in range(len(stays)):
        blocks = filters(correlations[layer] * (1 - stays[layer])[:, None])
        carry, fresh = blocks.carry.astype(np.float64), blocks.fresh.astype(np.float64)
        joint = _across(blocks.first.astype(np.float64))
        for _ in range(_SETTLED_BLOCKS):
            joint = np.einsum("gij,ghjk,hlk->ghil", carry, joint, carry, optimize=True)
            joint += _across(fresh)
        found[layer] += np.trace(joint, axis1=-2, axis2=-1) / BLOCK_TOKENS
    return found


def _across(roots: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the covariances of what each class makes of the same noise."""
    return np.asarray(roots[:, None] @ roots[None].swapaxes(-1, -2))
