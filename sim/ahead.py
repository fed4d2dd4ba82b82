"""Loads nobody waits for: which begin, which are under way, which are given up."""

from __future__ import annotations

from collections.abc import Sequence

from sim.policies.base import CachePolicy, PrefetchPolicy, overriding
from sim.residency import ABSENT, QUEUED, Residency
from sim.room import Room
from sim.types import LayerPlan, LayerRouting, View


class Ahead:
    """Plans prefetches and migrations, at most ``limit`` under way at one time.

    ``owner`` is the cache policy of each expert, [num_keys].

    ``under_way`` are those queued or loading that no layer waits for; ``doubts`` tells whether any
    policy may find them stale.
    """

    def __init__(
        self,
        view: View,
        residency: Residency,
        room: Room,
        prefetch: PrefetchPolicy | None,
        owner: Sequence[CachePolicy],
        caches_of_layer: Sequence[Sequence[CachePolicy]],
        limit: int,
        exclusive_host: bool,
    ) -> None:
        self.under_way: set[int] = set()
        self._view = view
        self._residency = residency
        self._room = room
        self._prefetch = prefetch
        self._wanting = [
            [cache for cache in caches if overriding([cache], "wants")]
            for caches in caches_of_layer
        ]
        self._owner = owner
        self._limit = limit
        self._exclusive_host = exclusive_host
        caches = {id(cache): cache for cache in owner}  # by identity: a policy need not be hashable
        proposers = [*caches.values(), *([prefetch] if prefetch else [])]
        self._doubters = overriding(proposers, "stale")

    @property
    def doubts(self) -> bool:
        """Tell whether any policy may give a queued load up."""
        return bool(self._doubters)

    def cancel(self, routing: LayerRouting) -> Sequence[int]:
        """Give up queued loads that a policy finds stale and this event does not use."""
        state = self._residency.state
        queued = [key for key in self.under_way if state[key] == QUEUED]
        if not queued:
            return ()
        stale: list[int] = []
        for part in self._doubters:
            assert isinstance(part, CachePolicy) or part is self._prefetch
            stale += part.stale(queued, self._view)
        cancels = [
            key for key in dict.fromkeys(stale) if key in queued and key not in routing.experts
        ]
        for key in cancels:
            self._forget(key)
        return cancels

    def give_up(self, keys: Sequence[int]) -> None:
        """Give up queued loads that a driver has dropped."""
        for key in keys:
            self._forget(key)

    def clear(self, pool: int, cancels: list[int]) -> int:
        """Give up all queued loads into a pool; return the bytes that frees."""
        residency, freed_bytes = self._residency, 0
        for key in sorted(self.under_way):
            if residency.pool_of_key[key] == pool and residency.state[key] == QUEUED:
                self._forget(key)
                cancels.append(key)
                freed_bytes += residency.expert_bytes(key)
        return freed_bytes

    def plan(self, plan: LayerPlan, kept: Sequence[int]) -> None:
        """Add to a plan the loads that are worth while and fit; ``kept`` the layer before has deferred."""
        room = self._limit - len(self.under_way)
        if room <= 0:
            return
        residency = self._residency
        wanted = self._wanted(plan)
        if not wanted:
            return
        busy = set(plan.bypasses)  # already on their way to a staging slot
        if self._exclusive_host:  # a copy to the GPU takes away what the CPU computes with
            busy.update(plan.on_cpu, plan.deferred, kept)
        prefetches: list[int] = []
        evicts = list(plan.evicts)
        state, num_keys, admit = residency.state, len(residency.state), self._room.admit
        for key in dict.fromkeys(wanted):
            if not 0 <= key < num_keys:
                residency.keys.check(key, "prefetch")
            absent = state[key] == ABSENT and key not in busy
            if absent and admit(key, self._owner[key], evicts):
                prefetches.append(key)
                if len(prefetches) == room:
                    break
        self.under_way.update(prefetches)
        self._room.unused_prefetches.update(prefetches)
        plan.prefetches = prefetches
        plan.evicts = evicts

    def _wanted(self, plan: LayerPlan) -> list[int]:
        wanted: list[int] = []
        for cache in self._wanting[plan.routing.layer]:
            wanted += cache.wants(self._view)
        if self._prefetch is not None:
            wanted += self._prefetch.propose(plan.routing, self._view)
        return wanted

    def _forget(self, key: int) -> None:
        self._residency.cancel(key)
        self._owner[key].on_evict(key)
        self.under_way.discard(key)
        self._room.unused_prefetches.discard(key)
