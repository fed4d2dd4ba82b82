"""SCH as revised: what a cache hits that knows how often each expert is used in the coming tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.locality_events import Block, EventCutter
from traces.schema import NO_EXPERT, Trace, TraceMeta

_RECENT_BITS = 40
"""Room for the time of the last use, which decides among experts used equally often."""


@dataclass(frozen=True, slots=True)
class LookaheadHits:
    """Hits by layer and size: ``hits`` int64[num_layers, num_sizes], ``uses`` int64[num_layers]."""

    sizes: tuple[int, ...]
    hits: NDArray[np.int64]
    uses: NDArray[np.int64]

    @property
    def pooled(self) -> NDArray[np.float64]:
        """Hit rates of all layers together by size, float64[num_sizes]; nan without uses."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.hits.sum(axis=0) / self.uses.sum())


class LookaheadCurve:
    """A cache that evicts what the segment uses least: the present event and those that come.

    Segment cache best hit rate (SCH) of arXiv 2505.16056 from its third version on: priority is the
    number of uses in the segment, of equals the less recently used one goes; what
    is needed is admitted.

    Parameters
    ----------
    meta
        The header of the trace.
    sizes
        Experts a layer's cache holds. An event that is larger stays until the next one.
    segment_events
        Events a segment, the present one included.
    phase, events
        As in ``LruCurve``.
    """

    def __init__(
        self,
        meta: TraceMeta,
        sizes: Sequence[int],
        segment_events: int = 16,
        phase: int | None = None,
        events: str = "step",
    ) -> None:
        self._cutter = EventCutter(meta, phase, events)
        self._sizes, self._segment = tuple(sizes), segment_events
        shape = (meta.num_layers, meta.num_experts)
        self._coming = np.zeros(shape, dtype=np.int64)  # uses in the events that wait
        self._last_use = np.zeros(shape, dtype=np.int64)
        self._held = np.zeros((len(self._sizes), *shape), dtype=bool)
        self._waiting: deque[tuple[NDArray[np.bool_], bool]] = deque()
        self._hits = np.zeros((meta.num_layers, len(self._sizes)), dtype=np.int64)
        self._uses = np.zeros(meta.num_layers, dtype=np.int64)
        self._experts = np.arange(meta.num_experts)
        self._now = 0

    def add(self, chunk: Trace) -> None:
        """Take the next rows of the trace."""
        for block in self._cutter.cut(chunk):
            self._take(block)

    def result(self) -> LookaheadHits:
        """Return the hits; no rows can be added afterwards."""
        for block in self._cutter.rest():
            self._take(block)
        while self._waiting:
            self._replay()
        return LookaheadHits(self._sizes, self._hits, self._uses)

    def _take(self, block: Block) -> None:
        layers = np.arange(len(self._uses))[:, None]
        for ids, counted in zip(block.ids, block.counted, strict=True):
            used = np.zeros(self._coming.shape, dtype=bool)
            valid = ids != NO_EXPERT
            used[np.broadcast_to(layers, ids.shape)[valid], ids[valid]] = True
            self._coming += used
            self._waiting.append((used, bool(counted)))
            if len(self._waiting) >= self._segment:
                self._replay()

    def _replay(self) -> None:
        """Let the first event that waits happen."""
        used, counted = self._waiting.popleft()
        self._now += 1
        if counted:
            self._uses += used.sum(axis=1)
            self._hits += (self._held & used).sum(axis=2).T
        worth = (self._coming << _RECENT_BITS) | self._last_use
        for held, size in zip(self._held, self._sizes, strict=True):
            _keep_best(held, used, worth, size)
        self._coming -= used
        # The number of the expert makes those of one event distinct.
        stamp = np.broadcast_to(self._now * len(self._experts) + self._experts, used.shape)
        self._last_use[used] = stamp[used]


def _keep_best(
    held: NDArray[np.bool_], used: NDArray[np.bool_], worth: NDArray[np.int64], size: int
) -> None:
    """Admit what is used; of the others keep the best that fit. Values of ``worth`` are distinct."""
    others = np.where(held & ~used, worth, -1)
    room = size - used.sum(axis=1, keepdims=True)
    experts = held.shape[1]
    place = np.clip(experts - room, 0, experts - 1)
    least = np.take_along_axis(np.sort(others, axis=1), place, axis=1)
    held[:] = used | ((others >= np.maximum(least, 0)) & (room > 0))
