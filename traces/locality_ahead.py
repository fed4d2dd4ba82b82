"""How well the experts of the next layer are known early: from this layer's, or as its gate said."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.locality_requests import LiveRequests, rows_of_requests
from traces.schema import GATE_COLUMNS, NO_EXPERT, Trace, TraceMeta

_ROWS = 256
"""Rows whose scores are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Foresight:
    """Share of a layer's choices that a prediction of as many experts contains.

    Each float64[num_layers]; entry l is about the choices of layer l, nan where there is none.

    Attributes
    ----------
    pairs
        Predicted from the layer before: experts that went together with its choices most often.
    popularity
        Predicted to be the most popular ones, whatever the token.
    gates
        float64[3, num_layers]: what the gate of the layer picked on the input of the layer 1, 2 and
        3 before, as recorded.
    pairs_new, popularity_new
        The same shares of those choices only that the layer did not make for the token before: a
        cache has the others anyway.
    learn_tokens, test_tokens
        How many tokens the counts were learnt on and tested on; the gates need no learning, and
        count on all.
    """

    pairs: NDArray[np.float64]
    popularity: NDArray[np.float64]
    gates: NDArray[np.float64]
    pairs_new: NDArray[np.float64]
    popularity_new: NDArray[np.float64]
    learn_tokens: int
    test_tokens: int


class NextLayer:
    """Counts pairs of experts of neighbouring layers on the first rows and predicts on later ones.

    Parameters
    ----------
    meta
        The header of the trace.
    learn_tokens
        Rows to learn on; half of the trace is meant.
    phase
        Only rows of this phase are predicted; all are learnt from. None: all.
    most_tokens
        Learn on so many of the rows at most, those before the middle, and test on as many.
    """

    def __init__(
        self,
        meta: TraceMeta,
        learn_tokens: int,
        phase: int | None = None,
        most_tokens: int = 10_000,
    ) -> None:
        self._layers, self._experts, self._phase = meta.num_layers, meta.num_experts, phase
        self._first = max(0, learn_tokens - most_tokens)
        self._middle, self._most = learn_tokens, most_tokens
        width = self._experts + 1  # the last: no expert
        self._pairs = np.zeros((max(0, self._layers - 1), width, width), dtype=np.int32)
        self._counts = np.zeros((self._layers, width), dtype=np.int64)
        self._row = self._learnt = self._tested = 0
        # Choices that were predicted, from pairs and by popularity; all of them, and the new ones.
        self._right = np.zeros((2, 2, self._layers), dtype=np.int64)
        self._uses = np.zeros((2, self._layers), dtype=np.int64)
        self._last: LiveRequests[tuple[int, NDArray[np.intp]]]
        self._last = LiveRequests(8 * meta.num_layers * meta.top_k)
        self._gates = np.zeros((2, len(GATE_COLUMNS), self._layers), dtype=np.int64)

    def add(self, chunk: Trace) -> None:
        """Take the next rows of the trace."""
        first, self._row = self._row, self._row + len(chunk)
        ids = np.minimum(np.asarray(chunk.expert_ids), self._experts).astype(np.intp)
        learn = slice(max(0, self._first - first), max(0, self._middle - first))
        self._learn(ids[learn])
        self._count_gates(chunk)
        phase = chunk.phase if self._phase is not None else None
        rows = np.arange(max(0, self._middle - first), len(chunk))
        rows = rows if phase is None else rows[phase[rows] == self._phase]
        rows = rows[: self._most - self._tested]
        before = self._before(chunk, ids)
        for at in range(0, len(rows), _ROWS):
            part = rows[at : at + _ROWS]
            self._test(ids[part], before[part])

    def _learn(self, ids: NDArray[np.intp]) -> None:
        self._learnt += len(ids)
        width = self._experts + 1
        for layer in range(self._layers):
            own = ids[:, layer]
            self._counts[layer] += np.bincount(own.ravel(), minlength=width)
            if layer + 1 < self._layers and len(ids):
                cells = own[:, :, None] * width + ids[:, layer + 1, None, :]
                pairs = np.bincount(cells.ravel(), minlength=width * width)
                self._pairs[layer] += pairs.reshape(width, width).astype(np.int32)

    def _before(self, chunk: Trace, ids: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return for each row the choices of its request's token before, -1 where unknown."""
        before = np.full_like(ids, -1)
        position = np.asarray(chunk.position)
        for request, rows in rows_of_requests(chunk, None):
            follows = position[rows[1:]] == position[rows[:-1]] + 1
            before[rows[1:][follows]] = ids[rows[:-1][follows]]
            last = self._last.get(request)
            if last is not None and last[0] + 1 == position[rows[0]]:
                before[rows[0]] = last[1]
            self._last.put(request, (int(position[rows[-1]]), ids[rows[-1]].copy()))
        return before

    def _test(self, ids: NDArray[np.intp], before: NDArray[np.intp]) -> None:
        """Predict as many experts as are chosen at most, and count those that are."""
        self._tested += len(ids)
        rows, top_k = np.arange(len(ids))[:, None], ids.shape[2]
        for layer in range(self._layers):
            own = ids[:, layer]
            kept = (own[:, :, None] == before[:, layer, None, :]).any(axis=2)
            used = own < self._experts
            new = used & ~kept & (before[:, layer, :1] >= 0)
            popular = self._counts[layer, :-1] / max(1, self._counts[layer, :-1].sum())
            hits = [_best(popular[None], top_k)[0][own]]
            if layer:
                given = self._pairs[layer - 1, :, :-1]
                share = given / np.maximum(1, given.sum(axis=1, keepdims=True))
                # Popularity settles what the pairs leave equal, as for experts never seen before.
                scores = share[ids[:, layer - 1]].sum(axis=1) + 1e-6 * popular
                hits.append(_best(scores, top_k)[rows, own])
            for kind, hit in enumerate(hits):
                self._right[kind, :, layer] += (hit & used).sum(), (hit & new).sum()
            self._uses[:, layer] += used.sum(), new.sum()

    def _count_gates(self, chunk: Trace) -> None:
        """Count what the recorded early gates have in common with the choices."""
        wanted = slice(None) if self._phase is None else chunk.phase == self._phase
        for number, name in enumerate(GATE_COLUMNS):
            column, ahead = getattr(chunk, name), number + 1
            if column is None or ahead >= self._layers:
                continue
            early, chosen = column[wanted][:, :-ahead], chunk.expert_ids[wanted][:, ahead:]
            for slot in range(chosen.shape[2]):
                own = chosen[:, :, slot, None]
                hit = ((early == own) & (own != NO_EXPERT)).any(axis=2)
                self._gates[0, number, ahead:] += hit.sum(axis=0)
                self._gates[1, number, ahead:] += (own[:, :, 0] != NO_EXPERT).sum(axis=0)

    def result(self) -> Foresight:
        """Return the shares so far."""
        with np.errstate(invalid="ignore"):
            (popular, popular_new), (pairs, pairs_new) = self._right / self._uses
            gates = self._gates[0] / self._gates[1]
        pairs[0] = pairs_new[0] = np.nan  # there is no layer before the first
        shares = (pairs, popular, gates, pairs_new, popular_new)
        return Foresight(*shares, self._learnt, self._tested)


def _best(scores: NDArray[np.float64], top_k: int) -> NDArray[np.bool_]:
    """Return which experts have the best scores, bool[num_rows, num_experts + 1], the last False."""
    best = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
    found = np.zeros((len(scores), scores.shape[1] + 1), dtype=bool)
    np.put_along_axis(found, best, True, axis=1)
    return found
