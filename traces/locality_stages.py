"""Is text that belongs together routed alike? Windows within a stage, across its boundary, shuffled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.locality_histograms import Coherence, PairMeans
from traces.locality_requests import choice_counts, rows_of_requests
from traces.schema import Trace, TraceError, TraceMeta

_PAIRS = ("adjacent", "apart", "shuffled", "within", "across")
_MOST_BYTES = 32 * 2**20
"""Choices that are held until their request is over."""
_MOST_ROWS = 8192
"""Of one request: a longer one is looked at in parts."""


@dataclass(frozen=True, slots=True)
class StageCoherence:
    """Likeness of two windows of ``length`` tokens that follow one another.

    Attributes
    ----------
    length
        Tokens a window.
    adjacent
        Of windows that lie end to end from a request's beginning.
    apart
        Of windows that lie half of a request apart: what the request as a whole has in common.
        Where adjacent ones are no more alike than these, nearness in the text says nothing.
    shuffled
        Of adjacent windows after the request's tokens were shuffled: what two samples of so few
        tokens have in common. Windows of text may be less alike than that, as neighbouring tokens
        repeat experts, which makes their histograms uneven.
    within, across
        Of windows end to end inside of one annotated stage; of the last and the first window on both
        sides of a boundary. None where the trace has no stages.
    """

    length: int
    adjacent: Coherence
    apart: Coherence
    shuffled: Coherence
    within: Coherence | None
    across: Coherence | None


@dataclass(slots=True)
class _Rows:
    """Rows of a request that wait for its end."""

    ids: list[NDArray[np.uint16]]
    stage: list[NDArray[np.int16]]
    count: int


class StageWindows:
    """Compares windows of whole requests, chunk by chunk.

    Parameters
    ----------
    meta
        The header of the trace.
    length
        Tokens a window, >= 1.
    top
        How many of the most used experts are compared; None: an eighth of a layer's.
    phase
        Only rows of this phase; None: all.
    seed
        Of the shuffling, which depends on this and the request's number only.
    """

    def __init__(
        self,
        meta: TraceMeta,
        length: int = 16,
        top: int | None = None,
        phase: int | None = None,
        seed: int = 0,
    ) -> None:
        if length < 1:
            raise TraceError(f"window length is {length}: must be >= 1")
        self._length, self._phase, self._seed = length, phase, seed
        self._experts = meta.num_experts
        self._means = {name: PairMeans(meta, top) for name in _PAIRS}
        row_bytes = 2 * meta.num_layers * meta.top_k
        self._most_waiting = max(1, _MOST_BYTES // row_bytes)
        self._waiting: dict[int, _Rows] = {}  # the one seen last at the end
        self._num_waiting = 0
        self._has_stages = False

    def add(self, chunk: Trace) -> None:
        """Take the next rows of the trace."""
        ids = np.asarray(chunk.expert_ids)
        self._has_stages |= chunk.stage is not None
        stage = np.full(len(ids), -1, dtype=np.int16) if chunk.stage is None else chunk.stage
        for request, rows in rows_of_requests(chunk, self._phase):
            waiting = self._waiting.pop(request, None) or _Rows([], [], 0)
            waiting.ids.append(ids[rows])
            waiting.stage.append(stage[rows])
            waiting.count += len(rows)
            self._num_waiting += len(rows)
            self._waiting[request] = waiting
            if waiting.count >= _MOST_ROWS:
                self._finish(request)
        while self._num_waiting > self._most_waiting:
            self._finish(next(iter(self._waiting)))

    def _finish(self, request: int) -> None:
        """Compare the windows of what waits of a request."""
        rows = self._waiting.pop(request)
        self._num_waiting -= rows.count
        ids = np.concatenate(rows.ids)
        starts = np.arange(0, len(ids) - self._length + 1, self._length)
        self._compare("adjacent", ids, starts[:-1], starts[1:])
        half = len(starts) // 2
        self._compare("apart", ids, starts[:half], starts[half : 2 * half])
        rng = np.random.default_rng((self._seed, request))
        self._compare("shuffled", rng.permutation(ids), starts[:-1], starts[1:])
        edges = stage_edges(np.concatenate(rows.stage))
        within = [np.arange(a, b - 2 * self._length + 1, self._length) for a, b in edges]
        if within:
            first = np.concatenate(within)
            self._compare("within", ids, first, first + self._length)
        long = edges[:, 1] - edges[:, 0] >= self._length
        begins = edges[1:, 0][long[1:] & long[:-1]]
        self._compare("across", ids, begins - self._length, begins)

    def _compare(
        self, name: str, ids: NDArray[np.uint16], one: NDArray[np.intp], other: NDArray[np.intp]
    ) -> None:
        """Compare the windows that begin at ``one`` with those at ``other``, some at a time."""
        for at in range(0, len(one), 64):
            pairs = [self._counts(ids, starts[at : at + 64]) for starts in (one, other)]
            self._means[name].add(*pairs)

    def _counts(self, ids: NDArray[np.uint16], starts: NDArray[np.intp]) -> NDArray[np.int64]:
        rows = starts[:, None] + np.arange(self._length)
        groups = np.repeat(np.arange(len(starts)), self._length)
        return choice_counts(ids[rows.ravel()], groups, len(starts), self._experts)

    def result(self) -> StageCoherence:
        """Return the means; no rows can be added afterwards."""
        for request in list(self._waiting):
            self._finish(request)
        found = {name: means.result() for name, means in self._means.items()}
        within, across = (found[n] if self._has_stages else None for n in ("within", "across"))
        adjacent, apart, shuffled = (found[n] for n in ("adjacent", "apart", "shuffled"))
        return StageCoherence(self._length, adjacent, apart, shuffled, within, across)


def stage_edges(stage: NDArray[np.int16]) -> NDArray[np.intp]:
    """Return first row and end of each annotated stage of a request, int[num_stages, 2].

    An unknown label (-1) continues the stage before it; rows before the first known label are left
    out.
    """
    known = np.flatnonzero(stage >= 0)
    if not len(known):
        return np.zeros((0, 2), dtype=np.intp)
    starts = known[np.flatnonzero(np.diff(stage[known], prepend=-1))]
    return np.stack([starts, np.append(starts[1:], len(stage))], axis=1)
