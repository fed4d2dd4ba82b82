"""Histograms of expert use of consecutive stretches of each request, and how alike two are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.locality_requests import LiveRequests, choice_counts, rows_of_requests
from traces.schema import Trace, TraceError, TraceMeta

_MOST_STRETCHES = 64
"""Histograms made at a time."""


@dataclass(slots=True)
class _Open:
    """Of a request: how full the stretch is that fills, its counts, and the last full ones."""

    filled: int
    counts: NDArray[np.uint16]  # [num_layers, num_experts]
    before: NDArray[np.uint16]  # [at most kept, num_layers, num_experts]


class Histograms:
    """Cuts each request into stretches of ``length`` rows, from its first one on.

    What is left at a request's end is dropped.

    Parameters
    ----------
    meta
        The header of the trace.
    length
        Rows a stretch, >= 1 and < 65536.
    kept
        How many full stretches of a request are given again before its new ones.
    phase
        Only rows of this phase; None: all.
    """

    def __init__(self, meta: TraceMeta, length: int, kept: int, phase: int | None) -> None:
        if not 1 <= length < 2**16:
            raise TraceError(f"window length is {length}: must be >= 1 and < {2**16}")
        self._shape = (meta.num_layers, meta.num_experts)
        self._length, self._kept, self._phase = length, kept, phase
        state_bytes = 2 * (kept + 1) * meta.num_layers * meta.num_experts
        self._open: LiveRequests[_Open] = LiveRequests(state_bytes)

    def cut(self, chunk: Trace) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield histograms of neighbouring stretches of one request, and how many are given again.

        int64[num_stretches, num_layers, num_experts].
        """
        ids = np.asarray(chunk.expert_ids)
        for request, rows in rows_of_requests(chunk, self._phase):
            most = self._length * _MOST_STRETCHES
            for first in range(0, len(rows), most):
                yield self._follow(request, ids[rows[first : first + most]])

    def _follow(self, request: int, ids: NDArray[np.uint16]) -> tuple[int, NDArray[np.int64]]:
        now = self._open.get(request)
        if now is None:
            empty = np.zeros((1, *self._shape), dtype=np.uint16)
            now = _Open(0, empty[0], empty[:0])
        stretch = (now.filled + np.arange(len(ids))) // self._length
        counts = choice_counts(ids, stretch, int(stretch[-1]) + 1, self._shape[1])
        counts[0] += now.counts
        filled = (now.filled + len(ids)) % self._length
        rest = counts[-1] if filled else np.zeros(self._shape)
        full = np.concatenate([now.before, counts[:-1] if filled else counts], dtype=np.int64)
        before = full[max(0, len(full) - self._kept) :]
        self._open.put(request, _Open(filled, rest.astype(np.uint16), before.astype(np.uint16)))
        return len(now.before), full


def cosines(one: NDArray, other: NDArray) -> NDArray[np.float64]:
    """Return the cosine of histograms [..., num_experts], float64[...]; 0 where one is empty."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    dot = np.einsum("...e,...e->...", one, other)
    norms = np.einsum("...e,...e->...", one, one) * np.einsum("...e,...e->...", other, other)
    return np.asarray(dot / np.sqrt(np.maximum(norms, 1e-12)))


def most_used(counts: NDArray, top: int) -> NDArray[np.bool_]:
    """Return which ``top`` experts of histograms [..., num_experts] are the most used, bool, same shape.

    Equals fall to the lower index.
    """
    experts = counts.shape[-1]
    # Distinct keys, so that exactly ``top`` reach the least of the best.
    keys = counts.astype(np.int32) * np.int32(experts) - np.arange(experts, dtype=np.int32)
    least = np.partition(keys, experts - top, axis=-1)[..., experts - top, None]
    return np.asarray(keys >= least)


@dataclass(frozen=True, slots=True)
class Coherence:
    """Likeness of pairs of histograms, in the mean over pairs.

    Attributes
    ----------
    cosine
        float64[num_layers]: cosine of the two histograms of choices, in [0, 1]; nan without pairs.
    overlap
        float64[num_layers]: share of the ``top`` most used experts that both have; equals fall to
        the lower index.
    num_pairs
        How many pairs there were.
    """

    cosine: NDArray[np.float64]
    overlap: NDArray[np.float64]
    num_pairs: int


class PairMeans:
    """Means over pairs of histograms, by layer; ``top`` None: an eighth of the experts."""

    def __init__(self, meta: TraceMeta, top: int | None = None) -> None:
        self._top = max(1, meta.num_experts // 8) if top is None else top
        self._cosine, self._overlap = np.zeros(meta.num_layers), np.zeros(meta.num_layers)
        self._num_pairs = 0

    def add(self, one: NDArray, other: NDArray) -> None:
        """Take pairs of histograms, [num_pairs, num_layers, num_experts] each."""
        self._cosine += cosines(one, other).sum(axis=0)
        common = most_used(one, self._top) & most_used(other, self._top)
        self._overlap += common.sum(axis=(0, 2)) / self._top
        self._num_pairs += len(one)

    def result(self) -> Coherence:
        """Return the means so far."""
        pairs = self._num_pairs if self._num_pairs else np.nan
        return Coherence(self._cosine / pairs, self._overlap / pairs, self._num_pairs)
