"""How many experts a stretch of text, or a batch, touches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.locality_requests import LiveRequests, rows_of_requests
from traces.locality_sets import bit_sets, sizes
from traces.schema import Trace, TraceMeta


@dataclass(frozen=True, slots=True)
class Touched:
    """Distinct experts that groups of tokens touch.

    Attributes
    ----------
    tokens
        int64[num_sizes]: tokens a group.
    experts
        float64[num_layers, num_sizes]: distinct experts a group and layer, in the mean.
    groups
        int64[num_sizes]: how many groups there were; sizes without any are left out.
    """

    tokens: NDArray[np.int64]
    experts: NDArray[np.float64]
    groups: NDArray[np.int64]


class TouchedSums:
    """Sums of distinct experts by size of the group."""

    def __init__(self, num_layers: int, tokens: tuple[int, ...]) -> None:
        self._tokens = np.array(tokens)
        self._experts = np.zeros((num_layers, len(tokens)), dtype=np.int64)
        self._groups = np.zeros(len(tokens), dtype=np.int64)

    def add(self, column: int, sets: NDArray[np.uint16]) -> None:
        """Take the unions of groups, as bits [num_groups, num_layers, num_words]."""
        self._experts[:, column] += sizes(sets).sum(axis=0)
        self._groups[column] += len(sets)

    def result(self) -> Touched:
        """Return the means so far."""
        any_ = self._groups > 0
        experts = self._experts[:, any_] / self._groups[any_]
        return Touched(self._tokens[any_], experts, self._groups[any_])


class WorkingSet:
    """Distinct experts of runs of 1, 2, 4, ... consecutive tokens of a request, chunk by chunk.

    Runs begin at a request's first row and lie end to end; what is left at its end is dropped.

    Parameters
    ----------
    meta
        The header of the trace.
    phase
        Only rows of this phase; None: all.
    doublings
        The longest runs are of 2 ** ``doublings`` tokens.
    """

    def __init__(self, meta: TraceMeta, phase: int | None = None, doublings: int = 11) -> None:
        self._phase, self._experts = phase, meta.num_experts
        self._sums = TouchedSums(meta.num_layers, tuple(2**n for n in range(doublings + 1)))
        self._doublings = doublings
        # Of each request, by length of the run, the one that waits for its other half.
        self._halves: LiveRequests[list[NDArray[np.uint16]]]
        self._halves = LiveRequests((doublings + 1) * meta.num_layers * meta.num_experts // 8)

    def add(self, chunk: Trace) -> None:
        """Take the next rows of the trace."""
        sets = bit_sets(np.asarray(chunk.expert_ids), self._experts)
        for request, rows in rows_of_requests(chunk, self._phase):
            halves = self._halves.get(request) or [sets[:0]] * (self._doublings + 1)
            runs, left = sets[rows], list[NDArray[np.uint16]]()
            for column, half in enumerate(halves):
                self._sums.add(column, runs)
                runs = np.concatenate([half, runs])
                paired = len(runs) // 2 * 2
                left.append(runs[paired:].copy())
                runs = runs[0:paired:2] | runs[1:paired:2]
            self._halves.put(request, left)

    def result(self) -> Touched:
        """Return the means so far."""
        return self._sums.result()
