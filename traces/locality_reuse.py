"""How soon and how widely experts are used again: overlap by lag, popularity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.locality_requests import LiveRequests, choice_counts, rows_of_requests
from traces.locality_sets import bit_sets, sizes
from traces.schema import Trace, TraceError, TraceMeta

LAGS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Expert overlap of tokens of one request that are ``lags`` positions apart.

    Attributes
    ----------
    lags
        int64[num_lags], in tokens.
    common
        int64[num_layers, num_lags]: experts that both tokens of a pair use, summed over pairs.
    uses
        int64[num_layers, num_lags]: experts that the later token of a pair uses, summed.
    pairs
        int64[num_lags].
    """

    lags: NDArray[np.int64]
    common: NDArray[np.int64]
    uses: NDArray[np.int64]
    pairs: NDArray[np.int64]

    @property
    def rates(self) -> NDArray[np.float64]:
        """Share of a token's experts that the token ``lag`` before used, float64[num_layers, num_lags].

        The expert overlap ratio (EOR) of ReMoE at lag 1. nan where there is no such pair.
        """
        with np.errstate(invalid="ignore"):
            return np.asarray(self.common / self.uses)

    @property
    def pooled(self) -> NDArray[np.float64]:
        """The same of all layers together, float64[num_lags]."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.common.sum(axis=0) / self.uses.sum(axis=0))


class OverlapByLag:
    """Counts overlaps, chunk by chunk.

    Parameters
    ----------
    meta
        The header of the trace.
    lags
        Distances in positions, each >= 1.
    phase
        Only pairs of rows of this phase; None: of any.
    """

    def __init__(
        self, meta: TraceMeta, lags: Sequence[int] = LAGS, phase: int | None = None
    ) -> None:
        if not lags or min(lags) < 1:
            raise TraceError(f"lags is {tuple(lags)}: must be one or more numbers >= 1")
        self._lags, self._phase, self._experts = tuple(lags), phase, meta.num_experts
        shape = (meta.num_layers, len(self._lags))
        self._common, self._uses = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        self._pairs = np.zeros(len(self._lags), dtype=np.int64)
        self._tails: LiveRequests[tuple[NDArray[np.int32], NDArray[np.uint16]]]
        self._tails = LiveRequests(2 * max(self._lags) * meta.num_layers * meta.num_experts // 8)

    def add(self, chunk: Trace) -> None:
        """Take the next rows of the trace."""
        sets = bit_sets(np.asarray(chunk.expert_ids), self._experts)
        positions = np.asarray(chunk.position)
        for request, rows in rows_of_requests(chunk, self._phase):
            self._follow(request, positions[rows], sets[rows])

    def _follow(self, request: int, position: NDArray[np.int32], sets: NDArray[np.uint16]) -> None:
        known, tail = len(position), self._tails.get(request)
        if tail is not None:
            position = np.concatenate([tail[0], position])
            sets = np.concatenate([tail[1], sets])
        fresh = len(position) - known
        size = sizes(sets)
        for column, lag in enumerate(self._lags):
            later = np.arange(fresh, len(position))
            earlier = np.searchsorted(position, position[later] - lag)
            found = position[earlier] + lag == position[later]
            later, earlier = later[found], earlier[found]
            self._common[:, column] += sizes(sets[later] & sets[earlier]).sum(axis=0)
            self._uses[:, column] += size[later].sum(axis=0)
            self._pairs[column] += len(later)
        last = max(0, len(position) - max(self._lags))
        self._tails.put(request, (position[last:].copy(), sets[last:].copy()))

    def result(self) -> Overlap:
        """Return what was counted so far."""
        return Overlap(np.array(self._lags), self._common, self._uses, self._pairs)


def overlap_by_lag(
    chunks: Iterable[Trace],
    meta: TraceMeta,
    lags: Sequence[int] = LAGS,
    phase: int | None = None,
) -> Overlap:
    """Return the overlaps of a trace that comes in chunks; see ``OverlapByLag``."""
    counter = OverlapByLag(meta, lags, phase)
    for chunk in chunks:
        counter.add(chunk)
    return counter.result()


@dataclass(frozen=True, slots=True)
class Popularities:
    """How often each expert is chosen: ``counts`` int64[num_layers, num_experts]."""

    counts: NDArray[np.int64]

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of a layer's choices by expert, float64[num_layers, num_experts]; nan without any."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.counts / self.counts.sum(axis=1, keepdims=True))

    @property
    def best_set(self) -> NDArray[np.float64]:
        """Hit rate by layer of the c most popular experts in column c - 1, chosen in hindsight.

        float64[num_layers, num_experts]: what a set that never changes reaches at most.
        """
        return np.cumsum(-np.sort(-self.shares, axis=1), axis=1)

    @property
    def gini(self) -> NDArray[np.float64]:
        """Gini coefficient of the choices by layer, float64[num_layers]: 0 where all are equal."""
        ascending = np.sort(self.shares, axis=1)
        experts = ascending.shape[1]
        weights = 2 * np.arange(1, experts + 1) - experts - 1
        return np.asarray((ascending * weights).sum(axis=1) / experts)

    @property
    def effective_experts(self) -> NDArray[np.float64]:
        """Number of experts that, chosen evenly, have the same entropy: float64[num_layers]."""
        shares = self.shares
        logs = np.log(np.where(shares > 0, shares, 1))
        return np.asarray(np.exp(-(shares * logs).sum(axis=1)))


class Popularity:
    """Counts choices, chunk by chunk; those of one phase, None: all."""

    def __init__(self, meta: TraceMeta, phase: int | None = None) -> None:
        self._phase = phase
        self._counts = np.zeros((meta.num_layers, meta.num_experts), dtype=np.int64)

    def add(self, chunk: Trace) -> None:
        """Take the next rows of the trace."""
        ids = np.asarray(chunk.expert_ids)
        ids = ids if self._phase is None else ids[chunk.phase == self._phase]
        one_group = np.zeros(len(ids), dtype=np.intp)
        self._counts += choice_counts(ids, one_group, 1, self._counts.shape[1])[0]

    def result(self) -> Popularities:
        """Return what was counted so far."""
        return Popularities(self._counts)


def popularity(chunks: Iterable[Trace], meta: TraceMeta, phase: int | None = None) -> Popularities:
    """Return how often a trace that comes in chunks uses each expert."""
    counter = Popularity(meta, phase)
    for chunk in chunks:
        counter.add(chunk)
    return counter.result()
