"""Follows requests through the chunks of a trace, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from traces.schema import Trace

State = TypeVar("State")
_MOST_BYTES = 16 * 2**20


class LiveRequests(Generic[State]):
    """What is remembered of each request; of too many, the least recently seen is forgotten.

    A forgotten request that comes back begins anew, which loses its pairs across that gap and nothing
    else. ``state_bytes`` is what is remembered of one; between 128 and 512 are.
    """

    def __init__(self, state_bytes: int) -> None:
        self._most = min(512, max(128, _MOST_BYTES // max(1, state_bytes)))
        self._states: OrderedDict[int, State] = OrderedDict()

    def get(self, request: int) -> State | None:
        """Return what is remembered of a request."""
        return self._states.get(request)

    def put(self, request: int, state: State) -> None:
        """Remember this of a request."""
        self._states[request] = state
        self._states.move_to_end(request)
        if len(self._states) > self._most:
            self._states.popitem(last=False)


def rows_of_requests(trace: Trace, phase: int | None) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yield the rows of each request of a chunk, in file order; those of one phase, None: all."""
    rows = np.arange(len(trace)) if phase is None else np.flatnonzero(trace.phase == phase)
    requests = np.asarray(trace.request_id)[rows]
    order = np.argsort(requests, kind="stable")
    edges = np.flatnonzero(np.diff(requests[order])) + 1
    for own in np.split(order, edges):
        if len(own):
            yield int(requests[own[0]]), rows[own]


def choice_counts(
    ids: NDArray[np.uint16], groups: NDArray[np.intp], num_groups: int, num_experts: int
) -> NDArray[np.int64]:
    """Return how often each group of rows chooses each expert, int64[num_groups, num_layers, num_experts].

    ``ids`` is uint16[num_rows, num_layers, top_k], ``groups`` int[num_rows]. Empty slots do not count.
    """
    layers, width = ids.shape[1], num_experts + 1
    bins = np.minimum(ids, num_experts).astype(np.int64)  # the last bin: no expert
    bins += (groups[:, None] * layers + np.arange(layers))[:, :, None] * width
    counts = np.bincount(bins.ravel(), minlength=num_groups * layers * width)
    return counts.reshape(num_groups, layers, width)[:, :, :-1]


def expert_uses(ids: NDArray[np.uint16], num_experts: int) -> NDArray[np.int64]:
    """Return how often all rows together choose each expert, int64[num_layers, num_experts]."""
    return choice_counts(ids, np.zeros(len(ids), dtype=np.intp), 1, num_experts)[0]
