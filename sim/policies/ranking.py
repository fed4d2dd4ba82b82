"""Finding the member with the lowest score without looking at all of them; score caches build on this."""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sim.policies.base import CachePolicy, Evictable
from sim.types import View

_NEVER = (-2, -2)
"""An (event, step) before all others."""


class LazyHeap:
    """Keys by a score that may only grow, lowest first.

    A use costs nothing here: an entry keeps the score it had, which is too low after a use, and is
    brought up to date when it comes to the top. Equal scores fall to the lower key.

    Parameters
    ----------
    score
        Returns a key's score now: a number or a tuple of numbers.
    """

    def __init__(self, score: Callable[[int], Any]) -> None:
        self._score = score
        self._heap: list[tuple[Any, int]] = []
        self._entry: dict[int, tuple[Any, int]] = {}  # the one that counts, by key

    def add(self, key: int) -> None:
        """Add a key that is not in yet."""
        entry = (self._score(key), key)
        self._entry[key] = entry
        heapq.heappush(self._heap, entry)

    def discard(self, key: int) -> None:
        """Take a key out, if it is in; its entry goes when it comes to the top."""
        self._entry.pop(key, None)

    def lowest(self, evictable: Evictable) -> tuple[Any, int] | None:
        """Return (score, key) of the lowest key for which ``evictable`` holds; None if there is none."""
        heap, known, score = self._heap, self._entry, self._score
        aside: list[tuple[Any, int]] = []
        found = None
        while heap:  # as _freshen, which would be a call for each
            top = heap[0]
            key = top[1]
            if known.get(key) is not top:
                heapq.heappop(heap)
            elif (now := score(key)) != top[0]:
                known[key] = entry = (now, key)
                heapq.heapreplace(heap, entry)
            elif evictable(key):
                found = top
                break
            else:
                aside.append(heapq.heappop(heap))
        for entry in aside:
            heapq.heappush(heap, entry)
        return found

    def bound(self, default: Any) -> Any:
        """Return the lowest score; ``default`` if there are no keys."""
        return self._heap[0][0] if self._freshen() else default

    def rebuild(self) -> None:
        """Ask for all scores anew: they have changed otherwise than by growing."""
        self._entry = {key: (self._score(key), key) for key in self._entry}
        self._heap = list(self._entry.values())
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._entry)

    def _freshen(self) -> bool:
        """Make the top entry one that counts and is up to date; False if the heap is empty."""
        heap, known = self._heap, self._entry
        while heap:
            top = heap[0]
            key = top[1]
            if known.get(key) is not top:
                heapq.heappop(heap)
                continue
            score = self._score(key)
            if score == top[0]:
                return True
            entry = (score, key)
            known[key] = entry
            heapq.heapreplace(heap, entry)
        return False


class LayeredCache(CachePolicy):
    """Drop the expert that ranks lowest, where the experts of one layer keep their order between uses.

    A subclass gives :meth:`score`, which orders the experts of a layer and only grows, and
    :meth:`rank`, which says how layers compare at this moment. So only the lowest of each layer are
    compared. Equals fall to the lower layer, then to the lower key.
    """

    def __init__(self) -> None:
        self._heaps: list[LazyHeap] = []
        self._place: dict[int, int] = {}  # of a layer, in the lists
        self._layers: list[int] = []
        self._bounds: list[float] = []  # no expert of the layer scores below; infinity: it has none
        self._ranks: list[float] = []  # of the bounds, in the event at which
        self._ranked_at = _NEVER
        self._left = -1  # the place of the layer that lost a member last
        self._num_experts = 1

    @abstractmethod
    def score(self, key: int) -> float:
        """Return what orders ``key`` within its layer; may only grow (or see :meth:`rescore`)."""
        raise NotImplementedError

    def rank(self, layer: int, score: float, view: View) -> float:
        """Return what compares an expert of ``layer`` with those of others; may not fall with score."""
        return score

    def ranks(self, layers: Sequence[int], scores: Sequence[float], view: View) -> list[float]:
        """Return :meth:`rank` of all layers of the pool; overridden where that is faster."""
        return [self.rank(layer, score, view) for layer, score in zip(layers, scores, strict=True)]

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn the pool's layers; a second bank of keys counts as layers of its own."""
        self._num_experts = view.num_experts
        self._layers = list(dict.fromkeys(key // self._num_experts for key in keys))
        self._place = {layer: place for place, layer in enumerate(self._layers)}
        self._heaps = [LazyHeap(self.score) for _ in self._layers]
        self._bounds = [math.inf] * len(self._layers)

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the evictable member that ranks lowest."""
        if len(self._heaps) == 1:
            only = self._heaps[0].lowest(evictable)
            return None if only is None else only[1]
        if self._ranked_at != (view.event, view.step.step):
            self._ranked_at = view.event, view.step.step
            self._ranks = self.ranks(self._layers, self._bounds, view)
        elif self._left >= 0:  # a bound that is known to be too low costs a search
            place, self._left = self._left, -1
            bound = self._bounds[place] = self._heaps[place].bound(math.inf)
            self._ranks[place] = self.rank(self._layers[place], bound, view)
        return self._search(evictable, view)

    def on_insert(self, key: int, view: View) -> None:
        """Join the members."""
        place = self._place[key // self._num_experts]
        self._heaps[place].add(key)
        score = self.score(key)
        if score < self._bounds[place]:
            self._bounds[place] = score
            if self._ranked_at == (view.event, view.step.step):
                self._ranks[place] = self.rank(self._layers[place], score, view)

    def on_evict(self, key: int) -> None:
        """Leave the members; what is known of the expert is kept."""
        self._left = self._place[key // self._num_experts]
        self._heaps[self._left].discard(key)

    def rescore(self, layer: int | None = None) -> None:
        """Ask for the scores of a layer (None: of all) anew, because some have fallen."""
        for place in range(len(self._heaps)) if layer is None else (self._place[layer],):
            self._heaps[place].rebuild()
            self._bounds[place] = self._heaps[place].bound(math.inf)
        self._ranked_at = _NEVER

    def _search(self, evictable: Evictable, view: View) -> int | None:
        """Look into the layers, the lowest first, until a member is surely the lowest evictable one."""
        ranks, scores = self._ranks.copy(), self._bounds.copy()
        while (least := min(ranks)) < math.inf:
            place = ranks.index(least)
            heap = self._heaps[place]
            lowest = heap.lowest(evictable)
            if lowest is None:
                ranks[place] = math.inf
            elif lowest[0] == scores[place]:
                return lowest[1]
            else:
                scores[place] = lowest[0]
                ranks[place] = self.rank(self._layers[place], lowest[0], view)
                if heap.bound(math.inf) == lowest[0]:  # so it holds whatever is evictable
                    self._bounds[place], self._ranks[place] = lowest[0], ranks[place]
        return None


class RankedCache(CachePolicy):
    """Drop the member with the lowest score, where all scores change with time.

    Members are ranked once an event, when the first victim is asked for. A subclass gives
    :meth:`ranks`; what it returns may not change within an event.
    """

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._order: list[tuple[Any, ...]] = []
        self._ranked_at = _NEVER

    @abstractmethod
    def ranks(self, keys: Iterable[int], view: View) -> list[tuple[Any, ...]]:
        """Return a tuple a key that sorts by what goes first and ends with the key."""
        raise NotImplementedError

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the evictable member with the lowest score."""
        members = self._members
        now = view.event, view.step.step
        if self._ranked_at != now:
            self._ranked_at = now
            self._order = self.ranks(members, view)
            self._order.sort()
        for entry in self._order:
            key: int = entry[-1]
            if key in members and evictable(key):
                return key
        return None

    def on_insert(self, key: int, view: View) -> None:
        """Join the members."""
        self._members.add(key)
        if self._ranked_at == (view.event, view.step.step):
            insort(self._order, self.ranks((key,), view)[0])

    def on_evict(self, key: int) -> None:
        """Leave the members; what is known of the expert is kept."""
        self._members.discard(key)
