"""The classic caches: on-demand, LRU, LFU with decay, a static hot set."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import CachePolicy, Evictable
from sim.policies.ranking import LazyHeap
from sim.types import LayerRouting, View

_LEAST_DECAY = 0.01
"""Below it only the last step counts, and weights leave the range of floats."""


class OnDemand(CachePolicy):
    """Keep nothing: every expert is loaded into a staging slot each time it is used."""

    def admits(self, key: int, view: View) -> bool:
        """Refuse all."""
        return False

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return None: nothing is ever resident."""
        return None


class LRU(CachePolicy):
    """Drop the expert whose last use is longest ago."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the least recently used evictable key."""
        for key in self._order:
            if evictable(key):
                return key
        return None

    def on_hit(self, keys: Sequence[int], view: View) -> None:
        """Move the used keys to the young end, in the router's order."""
        move = self._order.move_to_end
        for key in keys:
            move(key)

    def on_insert(self, key: int, view: View) -> None:
        """Enter at the young end."""
        self._order[key] = None

    def on_evict(self, key: int) -> None:
        """Leave the order."""
        del self._order[key]


class FIFO(LRU):
    """Drop the expert that entered longest ago, used or not."""

    def on_hit(self, keys: Sequence[int], view: View) -> None:
        """Ignore uses."""


class LFU(CachePolicy):
    """Drop the expert with the lowest use count; equal counts fall to the least recently used.

    Uses are counted for all experts of the pool, resident or not, and lose a factor ``decay`` a step.
    With ``bypass`` a newcomer competes with the residents when the event is over, and stays out if
    its own count is the lowest.

    Parameters
    ----------
    decay
        Factor in [0.01, 1] applied to all counts at each step; 1 counts for ever.
    bypass
        Whether a newcomer may be kept out.
    """

    def __init__(self, decay: float = 1.0, bypass: bool = True) -> None:
        if not _LEAST_DECAY <= decay <= 1.0:
            raise ValueError(f"decay = {decay}: must be in [{_LEAST_DECAY}, 1]")
        self.decay = decay
        self.admits_after = bypass
        self._count: dict[int, float] = {}
        self._last_use: dict[int, int] = {}
        self._members = LazyHeap(self._score)
        self._weight = 1.0
        self._step = 0

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Count the event's uses; instead of decaying old counts, new ones weigh more."""
        step = view.step.step
        if step != self._step:
            self._weight *= self.decay ** -(step - self._step)
            self._step = step
            if self._weight > 1e200:
                self._rescale()
        count, last, weight, event = self._count, self._last_use, self._weight, view.event
        for key, tokens in zip(routing.experts, routing.token_counts, strict=True):
            count[key] = count.get(key, 0.0) + weight * tokens
            last[key] = event

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the evictable key with the lowest (count, last use)."""
        lowest = self._members.lowest(evictable)
        return None if lowest is None else lowest[1]

    def on_insert(self, key: int, view: View) -> None:
        """Join the members."""
        self._members.add(key)

    def on_evict(self, key: int) -> None:
        """Leave the members; the count is remembered."""
        self._members.discard(key)

    def _score(self, key: int) -> tuple[float, int]:
        return self._count.get(key, 0.0), self._last_use.get(key, -1)

    def _rescale(self) -> None:
        """Divide all counts by the current weight, before floats overflow."""
        self._count = {key: value / self._weight for key, value in self._count.items()}
        self._weight = 1.0
        self._members.rebuild()


class Static(CachePolicy):
    """Pin the experts that a calibration trace uses most; nothing else ever enters.

    When the pool shrinks (KV cache that grows takes its room) the least popular are given up; they are
    loaded again, at low priority, when there is room.

    Parameters
    ----------
    popularity
        Uses of each expert in the calibration trace, float[num_layers, num_experts].
    """

    def __init__(self, popularity: NDArray[np.floating]) -> None:
        self._popularity = by_key(popularity)
        self._keys: Sequence[int] = ()
        self._members: list[int] = []  # the most popular first
        self._given_up: list[
            int
        ] = []  # the same, so that the last one given up is the first to return

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn the pool's keys."""
        self._keys = keys

    def preload(self, view: View) -> Sequence[int]:
        """Return the pool's keys by popularity, the first of equals first."""
        return rank(self._keys, self._popularity)

    def give_up(self, evictable: Evictable, view: View) -> int | None:
        """Return the least popular member."""
        return next(filter(evictable, reversed(self._members)), None)

    def wants(self, view: View) -> Sequence[int]:
        """Return what was given up and may find room again."""
        return self._given_up

    def on_insert(self, key: int, view: View) -> None:
        """Join the members, by popularity."""
        self._members.append(key)
        if key in self._given_up:
            self._given_up.remove(key)
            self._members = rank(self._members, self._popularity)

    def on_evict(self, key: int) -> None:
        """Leave the members, to return when there is room."""
        self._members.remove(key)
        self._given_up.insert(0, key)

    def pins(self, key: int) -> bool:
        """Keep all that was preloaded."""
        return True

    def admits(self, key: int, view: View) -> bool:
        """Refuse all misses."""
        return False

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return None: the set never changes."""
        return None


def by_key(popularity: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the popularity of every key; an expert's low-precision copy has that of the expert."""
    return np.tile(np.asarray(popularity, dtype=np.float64).ravel(), 2)


def rank(keys: Sequence[int], score: NDArray[np.floating]) -> list[int]:
    """Return ``keys`` by falling ``score[key]``, equals in key order."""
    values = np.asarray(keys)
    return values[np.argsort(-score[values], kind="stable")].tolist()
