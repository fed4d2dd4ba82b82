"""How many experts a batch touches: of the steps as recorded, and of tokens of different requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.locality_requests import rows_of_requests
from traces.locality_sets import bit_sets
from traces.locality_working_set import Touched, TouchedSums
from traces.schema import DECODE, Trace, TraceMeta

SIZES = (1, 2, 4, 8, 16, 32)
_SAMPLES = 16
"""Tokens that are kept of a request, evenly spread."""
_MOST_REQUESTS = 256


class RecordedBatches:
    """Distinct experts of the decode rows of each step, by how many there are, chunk by chunk.

    Whatever the order of the file's rows; only its first steps count.

    Parameters
    ----------
    meta
        The header of the trace.
    most
        The largest batch that is reported.
    most_steps
        Steps 0 to ``most_steps`` - 1 are looked at; memory grows with it.
    """

    def __init__(self, meta: TraceMeta, most: int = SIZES[-1], most_steps: int = 4096) -> None:
        self._most, self._layers, self._experts = most, meta.num_layers, meta.num_experts
        none = np.zeros((most_steps, self._layers, 0), dtype=np.uint16)
        self._unions = bit_sets(none, self._experts)
        self._rows = np.zeros(most_steps, dtype=np.int64)

    def add(self, chunk: Trace) -> None:
        """Take the next rows of the trace."""
        rows = np.flatnonzero((chunk.phase == DECODE) & (chunk.step < len(self._rows)))
        if not len(rows):
            return
        rows = rows[np.argsort(chunk.step[rows], kind="stable")]
        steps, starts, counts = np.unique(chunk.step[rows], return_index=True, return_counts=True)
        sets = bit_sets(np.asarray(chunk.expert_ids)[rows], self._experts)
        self._unions[steps] |= np.bitwise_or.reduceat(sets, starts, axis=0)
        self._rows[steps] += counts

    def result(self) -> Touched:
        """Return the means so far."""
        sums = TouchedSums(self._layers, tuple(range(1, self._most + 1)))
        for size in range(1, self._most + 1):
            sums.add(size - 1, self._unions[self._rows == size])
        return sums.result()


@dataclass(slots=True)
class _Spread:
    """Rows of a request at equal distances: each ``every``-th one, of ``seen``."""

    every: int
    seen: int
    sets: NDArray[np.uint16]


class RequestBatches:
    """Distinct experts of one token each of 1, 2, 4, ... requests, chunk by chunk.

    Of a request evenly spread tokens are kept; a group takes them from different places of its
    requests' texts, which often begin alike.

    Parameters
    ----------
    meta
        The header of the trace.
    phase
        Only rows of this phase; None: all.
    sizes
        Requests a group; the requests are at most 256.
    """

    def __init__(
        self, meta: TraceMeta, phase: int | None = None, sizes: tuple[int, ...] = SIZES
    ) -> None:
        self._sizes = sizes
        self._phase, self._layers, self._experts = phase, meta.num_layers, meta.num_experts
        self._kept: dict[int, _Spread] = {}

    def add(self, chunk: Trace) -> None:
        """Take the next rows of the trace."""
        ids = np.asarray(chunk.expert_ids)
        for request, rows in rows_of_requests(chunk, self._phase):
            if request not in self._kept:
                if len(self._kept) >= _MOST_REQUESTS:
                    continue
                none = bit_sets(ids[:0], self._experts)
                self._kept[request] = _Spread(1, 0, none)
            self._spread(self._kept[request], ids, rows)

    def _spread(self, kept: _Spread, ids: NDArray[np.uint16], rows: NDArray[np.intp]) -> None:
        """Keep every so many rows, and fewer when there are too many."""
        first = -kept.seen % kept.every
        kept.seen += len(rows)
        chosen = rows[first :: kept.every]
        while len(kept.sets) + len(chosen) >= 2 * _SAMPLES:
            odd = len(kept.sets) % 2
            kept.sets, chosen = kept.sets[::2], chosen[odd::2]
            kept.every *= 2
        kept.sets = np.concatenate([kept.sets, bit_sets(ids[chosen], self._experts)])

    def result(self) -> Touched:
        """Return the means over neighbouring requests, as far as there are enough of them."""
        sums = TouchedSums(self._layers, self._sizes)
        requests = list(self._kept.values())
        for column, size in enumerate(self._sizes):
            for first in range(0, len(requests) - size + 1, size):
                sums.add(column, _groups(requests[first : first + size]))
        return sums.result()


def _groups(requests: list[_Spread]) -> NDArray[np.uint16]:
    """Return the unions of one token a request, from shifting places."""
    chosen = []
    for number, kept in enumerate(requests):
        # Steps of 7 reach all of 16 places, and no two neighbours are at the same one.
        place = (np.arange(_SAMPLES) + 7 * number) % _SAMPLES
        chosen.append(kept.sets[len(kept.sets) * place // _SAMPLES])
    return np.asarray(np.bitwise_or.reduce(chosen))
