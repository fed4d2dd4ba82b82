"""Policies that know the future; they bound what any other can reach."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from sim.policies.base import CachePolicy, Evictable
from sim.types import LayerRouting, View

NEVER = 1 << 62
MOST_CHOICES = 50_000_000
"""Choices of experts whose future can be known: each takes some 40 bytes."""


class NextUse:
    """When each expert is used next, for one fixed sequence of events.

    Parameters
    ----------
    events
        The routings of the run in the order the driver will plan them.
    """

    def __init__(self, events: Iterable[LayerRouting]) -> None:
        uses: dict[int, list[int]] = defaultdict(list)
        for event, routing in enumerate(events):
            for key in routing.experts:
                uses[key].append(event)
        self._uses = dict(uses)

    def after(self, key: int, event: int) -> int:
        """Return the first event strictly after ``event`` that uses ``key``; NEVER if none does."""
        uses = self._uses.get(key)
        if uses is None:
            return NEVER
        place = bisect_right(uses, event)
        return uses[place] if place < len(uses) else NEVER


class Future:
    """Which experts each event uses, for one fixed sequence of events.

    Parameters
    ----------
    events
        The routings of the run in the order the driver will plan them.
    """

    def __init__(self, events: Iterable[LayerRouting]) -> None:
        self._used = [tuple(routing.experts) for routing in events]

    def __len__(self) -> int:
        return len(self._used)

    def used(self, event: int) -> Sequence[int]:
        """Return the keys that an event uses, counted from 0; () before the first and past the last."""
        return self._used[event] if 0 <= event < len(self._used) else ()


class Belady(CachePolicy):
    """Drop the expert whose next use is farthest away (Belady 1966).

    Parameters
    ----------
    next_use
        The future of this very run.
    bypass
        False: every miss enters, room being made among experts the event does not use.
        True: a newcomer whose own next use is farthest stays out.
    warm
        Begin with the experts used soonest in memory. With ``bypass`` and a staging slot for every
        miss of an event, no cache of this size that loads on demand only has more hits.
    """

    oracle = True

    def __init__(self, next_use: NextUse, bypass: bool = False, warm: bool = False) -> None:
        self.admits_after = bypass
        self.warm = warm
        self._future = next_use
        self._keys: Sequence[int] = ()
        self._next: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []  # (-next use, key), stale entries left in

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn the pool's keys."""
        self._keys = keys

    def preload(self, view: View) -> Sequence[int]:
        """Return the pool's keys by first use, if warm."""
        if not self.warm:
            return ()
        return sorted(self._keys, key=lambda key: (self._future.after(key, view.event), key))

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the evictable member used farthest in the future."""
        heap, known = self._heap, self._next
        aside = []
        victim = None
        while heap:
            negative, key = heap[0]
            if known.get(key) != -negative:
                heapq.heappop(heap)
                continue
            if evictable(key):
                victim = key
                break
            aside.append(heapq.heappop(heap))
        for entry in aside:
            heapq.heappush(heap, entry)
        return victim

    def on_hit(self, keys: Sequence[int], view: View) -> None:
        """Look up the next use after this one."""
        for key in keys:
            self.on_insert(key, view)

    def on_insert(self, key: int, view: View) -> None:
        """Enter with the next use after this event."""
        due = self._future.after(key, view.event)
        if self._next.get(key) != due:
            self._next[key] = due
            heapq.heappush(self._heap, (-due, key))

    def on_evict(self, key: int) -> None:
        """Leave; heap entries go stale."""
        self._next.pop(key, None)
