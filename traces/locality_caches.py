"""Hit rates of each layer's expert cache at all sizes, in one pass: least recently used, and optimal.

Both policies are stack algorithms (Mattson, Gecsei, Slutz, Traiger, 1970): what a cache of C experts
holds is the first C of one list, whatever C is, so that the places of the hits in that list give the
hit rates of all sizes. Events are atomic: what hits is settled before anything is admitted or evicted,
and what an event needs is always admitted. Caches are those of single layers and live across requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.locality_events import Block, EventCutter
from traces.locality_future import HOLE, Future
from traces.schema import NO_EXPERT, Trace, TraceMeta


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Hits of a cache by layer and size.

    Attributes
    ----------
    hits
        int64[num_layers, num_experts]; column c - 1 counts the hits of a cache of c experts.
    uses
        int64[num_layers]: distinct experts of the counted events, summed.
    first_uses
        int64[num_layers]: how many of ``uses`` are the first ones of their expert, which no cache
        without prefetching hits.
    least_size
        Experts of the largest counted event. A smaller cache cannot hold an event; its hits are
        those of what happened to be resident.
    """

    hits: NDArray[np.int64]
    uses: NDArray[np.int64]
    first_uses: NDArray[np.int64]
    least_size: int

    @property
    def rates(self) -> NDArray[np.float64]:
        """Hit rates by layer and size, float64[num_layers, num_experts]; nan without uses."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.hits / self.uses[:, None])

    @property
    def pooled(self) -> NDArray[np.float64]:
        """Hit rates of all layers together by size, float64[num_experts]."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.hits.sum(axis=0) / self.uses.sum())


class _Curve:
    """What both policies share: events, counts of hits by place in the list, counts of uses."""

    def __init__(self, meta: TraceMeta, phase: int | None, events: str) -> None:
        self._layers, self._experts = meta.num_layers, meta.num_experts
        self._cutter = EventCutter(meta, phase, events)
        self._hits_at = np.zeros((self._layers, self._experts), dtype=np.int64)
        self._uses = np.zeros(self._layers, dtype=np.int64)
        self._first_uses = np.zeros(self._layers, dtype=np.int64)
        self._num_seen = np.zeros(self._layers, dtype=np.int64)  # experts in the list, by layer
        self._least_size = 0

    def add(self, chunk: Trace) -> None:
        """Take the next rows of the trace."""
        for block in self._cutter.cut(chunk):
            self._take(block)

    def result(self) -> HitCurve:
        """Return the curve; no rows can be added afterwards."""
        for block in self._cutter.rest():
            self._take(block)
        self._end()
        hits = np.cumsum(self._hits_at, axis=1)
        return HitCurve(hits, self._uses, self._first_uses, self._least_size)

    def _take(self, block: Block) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        """Deal with what still waits."""

    def _count(self, sizes: NDArray[np.int64], first: NDArray[np.int64], counted: bool) -> None:
        """Count an event's experts by layer, of which ``first`` were never used before."""
        self._num_seen += first
        if counted:
            self._uses += sizes
            self._first_uses += first
            self._least_size = max(self._least_size, int(sizes.max(initial=0)))


class LruCurve(_Curve):
    """Least recently used. Within an event the first choice counts as the most recent.

    Parameters
    ----------
    meta
        The header of the trace.
    phase
        Count events with a row of this phase only; all events are replayed. None: count all.
    events
        "step" or "token", see ``EventCutter``.
    """

    def __init__(self, meta: TraceMeta, phase: int | None = None, events: str = "step") -> None:
        super().__init__(meta, phase, events)
        # By layer the experts, the most recently used first, as keys layer * num_experts + expert;
        # those never used are behind ``num_seen`` others.
        self._order = np.arange(self._layers * self._experts).reshape(self._layers, -1)
        self._offsets = self._order[:, :1].copy()
        self._places = np.arange(self._experts)

    def _take(self, block: Block) -> None:
        sizes = (block.ids != NO_EXPERT).sum(axis=2)
        is_chosen = np.zeros(self._order.size, dtype=bool)
        for event, size, counted in zip(block.ids, sizes, block.counted, strict=True):
            keys = event + self._offsets
            if full := bool((size == event.shape[1]).all()):
                is_chosen[keys] = True
            else:
                is_chosen[keys[event != NO_EXPERT]] = True
            moved = is_chosen[self._order]
            known = self._places < self._num_seen[:, None]
            if counted:
                self._hits_at += moved & known
            self._count(size, (moved & ~known).sum(axis=1), bool(counted))
            is_chosen[self._order[moved]] = False
            self._to_front(keys, event != NO_EXPERT, moved, full)

    def _to_front(
        self,
        keys: NDArray[np.int64],
        valid: NDArray[np.bool_],
        moved: NDArray[np.bool_],
        full: bool,
    ) -> None:
        """Move an event's experts to the front, in their order."""
        if full:  # so many in every layer
            rest = self._order[~moved].reshape(self._layers, -1)
            self._order = np.concatenate([keys, rest], axis=1)
            return
        for order, own, its, gone in zip(self._order, keys, valid, moved, strict=True):
            order[:] = np.concatenate([own[its], order[~gone]])


class BeladyCurve(_Curve):
    """Optimal replacement with forced admission: what is needed again last goes first.

    The next use of an expert is looked for in the events that wait, see ``Future``; a trace that is
    shorter than that is replayed exactly.

    Parameters
    ----------
    meta, phase, events
        As in ``LruCurve``.
    lookahead_uses
        How many uses (over all layers) are looked ahead at least. Beyond, experts count as never
        used again, in any order; memory grows with this number (some 30 bytes each).
    """

    def __init__(
        self,
        meta: TraceMeta,
        phase: int | None = None,
        events: str = "step",
        lookahead_uses: int = 4_000_000,
    ) -> None:
        super().__init__(meta, phase, events)
        self._future = Future(self._layers, self._experts, lookahead_uses)
        # By place and layer the values of ``Future``, HOLE behind ``num_seen``.
        self._list = np.full((self._experts, self._layers), HOLE, dtype=np.int32)
        self._spare = np.zeros((2, 2 * self._experts, self._layers), dtype=np.int32)

    def _take(self, block: Block) -> None:
        self._future.append(block)
        while self._future.is_ready:
            self._replay(whole=False)

    def _end(self) -> None:
        if self._future.num_waiting:
            self._replay(whole=True)

    def _replay(self, whole: bool) -> None:
        """Replay the events whose next uses are known."""
        for now, values, counted in self._future.play(self._list, whole):
            hit = self._list < np.int32((now + 1) * self._experts)
            if counted:
                self._hits_at += hit.T
            sizes = (values != HOLE).sum(axis=1)
            depths = self._holes(hit, sizes).max(axis=0) + 1
            self._list[hit] = HOLE
            for slot, depth in enumerate(depths.tolist()):
                self._push_down(slot, depth, None if slot < sizes.min() else sizes > slot)
            self._put(values, sizes)
            self._count(sizes, sizes - hit.sum(axis=0), bool(counted))

    def _holes(self, hit: NDArray[np.bool_], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places that an event leaves, ascending: int64[num_layers, width].

        Those of its experts, then one behind the list for each that was never used before; where a
        layer has fewer than the others, the last ones mean nothing.
        """
        layer, place = np.nonzero(hit.T)
        counts = hit.sum(axis=0)
        slot = np.arange(len(layer)) - np.repeat(np.cumsum(counts) - counts, counts)
        slots = np.arange(int(sizes.max(initial=0)))
        holes = self._num_seen[:, None] + slots - counts[:, None]
        holes = np.where(slots < sizes[:, None], holes, 0)
        holes[layer, slot] = place
        return holes

    def _push_down(self, first: int, depth: int, layers: NDArray[np.bool_] | None) -> None:
        """Free the place ``first`` of the list: push what is there down to the next hole.

        At each place the better of what comes from above and what is there stays and the worse one
        goes on, so that what arrives at a place is the worst of all above. ``layers`` None: all.
        """
        if layers is None:
            part = self._list[first:depth]
            np.minimum(self._worst(part)[:-1], part[1:], out=part[1:])
        else:
            part = self._list[first:depth, layers]
            stay = np.minimum(self._worst(part)[:-1], part[1:])
            self._list[first + 1 : depth, layers] = stay

    def _worst(self, part: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the running maximum by layer; by doubling, as that is faster than ``accumulate``."""
        depth, layers = part.shape
        one, other = self._spare[
            :, :, :layers
        ]  # what is above the first place is 0, below all values
        one[self._experts : self._experts + depth] = part
        shift, begin, end = 1, self._experts, self._experts + depth
        while shift < depth:
            np.maximum(one[begin:end], one[begin - shift : end - shift], out=other[begin:end])
            one, other = other, one
            shift *= 2
        return one[begin:end]

    def _put(self, values: NDArray[np.int32], sizes: NDArray[np.int64]) -> None:
        """Put an event's experts on top of the list, which has room for them."""
        width = values.shape[1]
        self._list[:width] = np.where(
            np.arange(width)[:, None] < sizes, values.T, self._list[:width]
        )


def lru_curve(
    chunks: Iterable[Trace], meta: TraceMeta, phase: int | None = None, events: str = "step"
) -> HitCurve:
    """Return the hits of least-recently-used caches of all sizes; see ``LruCurve``."""
    return _run(LruCurve(meta, phase, events), chunks)


def belady_curve(
    chunks: Iterable[Trace], meta: TraceMeta, phase: int | None = None, events: str = "step"
) -> HitCurve:
    """Return the hits of optimal caches with forced admission of all sizes; see ``BeladyCurve``."""
    return _run(BeladyCurve(meta, phase, events), chunks)


def _run(curve: _Curve, chunks: Iterable[Trace]) -> HitCurve:
    for chunk in chunks:
        curve.add(chunk)
    return curve.result()
