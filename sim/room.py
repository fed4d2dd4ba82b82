"""Making room for experts: the cache policy chooses, memory changes, nothing is left half done."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

from sim.policies.base import CachePolicy, Evictable
from sim.residency import Residency, ResidencyError
from sim.types import ConfigError, View


class Admission(NamedTuple):
    """A staged expert that stays: its staging slot becomes a cache slot, those of ``evicts`` are freed."""

    key: int
    evicts: tuple[int, ...]


class Room:
    """Admits experts to their pools and counts prefetches that were of no use.

    ``unused_prefetches`` are those that came, or come, unasked and have not been used yet;
    ``num_useful_prefetches`` counts those that were used before they were dropped.
    ``evictable`` may narrow what the residency lets go; ``mixed_sizes`` tells whether those of a pool differ.
    """

    def __init__(
        self, residency: Residency, view: View, evictable: Evictable | None = None
    ) -> None:
        self.unused_prefetches: set[int] = set()
        self.wasted_prefetch_bytes = self.num_useful_prefetches = 0
        self._residency = residency
        self._view = view
        self._evictable = evictable or residency.evictable
        self._sizes, self._free = residency.size_of_key, residency.free_of_pool
        self._pools = residency.pool_of_key
        self.mixed_sizes = residency.has_mixed_pools

    def start_counting(self) -> None:
        """Begin to count what prefetches were good for; those that have come already count no more."""
        self.wasted_prefetch_bytes = self.num_useful_prefetches = 0
        self.unused_prefetches.clear()

    def use(self, *parts: Sequence[int]) -> None:
        """Learn which experts an event uses: prefetches among them have been of use."""
        before = len(self.unused_prefetches)
        self.unused_prefetches.difference_update(*parts)
        self.num_useful_prefetches += before - len(self.unused_prefetches)

    def fill(self, key: int, cache: CachePolicy) -> bool:
        """Give ``key`` free room; False if there is none."""
        if self._residency.shortage_bytes(key) > 0:
            return False
        self._residency.reserve(key)
        cache.on_insert(key, self._view)
        return True

    def admit(self, key: int, cache: CachePolicy, evicts: list[int]) -> bool:
        """Give ``key`` room in its pool; False if that cannot be had or the policy refuses."""
        residency = self._residency
        if self._sizes[key] <= self._free[self._pools[key]]:
            residency.reserve(key)
        elif self.mixed_sizes:
            lack_bytes = residency.shortage_bytes(key)
            if not self._make_room(key, lack_bytes, cache, self._evictable, evicts):
                return False
            residency.reserve(key)
        else:  # the same as above for experts of one size, where one victim is always enough
            victim = cache.choose_victim(self._evictable, self._view)
            if victim is None:
                return False
            try:
                residency.replace(victim, key)
            except (ResidencyError, IndexError, TypeError):
                self._check(victim, cache, self._pools[key], self._evictable)
                raise
            cache.on_evict(victim)
            evicts.append(victim)
            if self.unused_prefetches:
                self._count_waste(victim)
        cache.on_insert(key, self._view)
        return True

    def force(self, key: int, cache: CachePolicy, evicts: list[int]) -> None:
        """Give ``key`` room whatever the policy thinks of it; it only chooses who goes."""
        residency = self._residency
        while residency.shortage_bytes(key) > 0:
            victim = self._victim(cache, self._pools[key], self._evictable)
            self._drop(victim, cache, evicts)
        residency.reserve(key)
        cache.on_insert(key, self._view)

    def shrink(self, pool: int, cache: CachePolicy, lack_bytes: int, evicts: list[int]) -> None:
        """Free ``lack_bytes`` of a pool that has become smaller; what was kept for good goes as well."""
        residency = self._residency

        def droppable(key: int) -> bool:
            return residency.pool_of_key[key] == pool and residency.is_resident(key)

        while lack_bytes > 0:
            victim = self._victim(cache, pool, droppable)
            residency.unpin_for_good(victim)
            lack_bytes -= residency.expert_bytes(victim)
            self._drop(victim, cache, evicts)

    def _victim(self, cache: CachePolicy, pool: int, evictable: Evictable) -> int:
        victim = cache.choose_victim(evictable, self._view)
        if victim is None:
            victim = cache.give_up(evictable, self._view)
        if victim is None:
            raise ConfigError(
                f"policy: {type(cache).__name__}.give_up: names nobody though memory must be freed; "
                "must return an evictable key while there is one"
            )
        self._check(victim, cache, pool, evictable)
        return victim

    def _check(self, victim: Any, cache: CachePolicy, pool: int, evictable: Evictable) -> None:
        """Raise ConfigError if a policy names what cannot go."""
        is_key = isinstance(victim, Integral) and 0 <= int(victim) < len(self._pools)
        if not is_key or self._pools[victim] != pool or not evictable(victim):
            raise ConfigError(
                f"policy: {type(cache).__name__}.choose_victim: names {victim!r} to be dropped for layer "
                f"{self._view.layer}: must be a key of its pool for which evictable holds, or None"
            )

    def _drop(self, victim: int, cache: CachePolicy, evicts: list[int]) -> None:
        self._residency.evict(victim)
        cache.on_evict(victim)
        evicts.append(victim)
        self._count_waste(victim)

    def _make_room(
        self, key: int, lack_bytes: int, cache: CachePolicy, evictable: Evictable, evicts: list[int]
    ) -> bool:
        """Drop what ``cache`` chooses for ``key``; drop nothing and return False if it refuses half-way."""
        victims = self._choose_several(key, lack_bytes, cache, evictable)
        for victim in victims:
            self._drop(victim, cache, evicts)
        return len(victims) > 0

    def _count_waste(self, victim: int) -> None:
        """Count the bytes of a prefetch that was dropped unused."""
        if victim in self.unused_prefetches:
            self.unused_prefetches.remove(victim)
            self.wasted_prefetch_bytes += self._residency.expert_bytes(victim)

    def _choose_several(
        self, key: int, lack_bytes: int, cache: CachePolicy, evictable: Evictable
    ) -> list[int]:
        """Ask for victims until ``key`` fits; return none if the policy refuses before that."""
        victims: list[int] = []

        def remains(other: int) -> bool:
            return other not in victims and evictable(other)

        while lack_bytes > 0:
            victim = cache.choose_victim(remains, self._view)
            if victim is None or victim == key:
                return []
            self._check(victim, cache, self._pools[key], remains)
            lack_bytes -= self._residency.expert_bytes(victim)
            victims.append(victim)
        return victims

    def exchange(self, key: int, cache: CachePolicy) -> Admission | None:
        """Let a staged newcomer compete with the residents; None if it loses."""
        residency = self._residency
        cache.on_insert(key, self._view)

        def evictable(other: int) -> bool:
            return other == key or self._evictable(other)

        evicts: list[int] = []
        lack_bytes = residency.shortage_bytes(key)
        if lack_bytes > 0 and not self._make_room(key, lack_bytes, cache, evictable, evicts):
            cache.on_evict(key)
            return None
        residency.reserve(key)
        residency.complete_at_once((key,))
        return Admission(key, tuple(evicts))
