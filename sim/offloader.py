"""The Offloader: one layer's routing in, one :class:`LayerPlan` out; pure of time and hardware.

Every driver (timeline, lockstep, a real executor) runs the same loop: ``begin_step``; for each layer
``plan_layer``, carry the plan out while reporting ``on_load_started`` and ``on_loaded``, ``end_layer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sim.policies.base import CachePolicy, Evictable, Policy, PolicySet
from sim.residency import ABSENT, RESIDENT, Residency
from sim.types import (
    CostModel,
    ExpertWork,
    LayerPlan,
    LayerRouting,
    Phase,
    Service,
    StepInfo,
    View,
)


class Admission(NamedTuple):
    """A staged expert that stays: its staging slot becomes a cache slot, those of ``evicts`` are freed."""

    key: int
    evicts: tuple[int, ...]


class Offloader:
    """Applies a set of policies to the state of memory.

    Parameters
    ----------
    residency
        The memory; only the Offloader changes it.
    policies
        One cache policy a pool of ``residency``, and the optional other roles.
    costs
        The estimate that policies may ask.
    staging_slots
        Experts that may be held outside the cache during one event.
    prefetch_limit
        Prefetches that may be under way (queued or loading) at one time.
    """

    def __init__(
        self,
        residency: Residency,
        policies: PolicySet,
        costs: CostModel,
        staging_slots: int,
        prefetch_limit: int = 2,
    ) -> None:
        self.residency = residency
        self.policies = policies
        self.staging_slots = staging_slots
        self.prefetch_limit = prefetch_limit
        idle = StepInfo(step=-1, phase=Phase.PREFILL, num_tokens=0)
        self.view = View(residency.keys, costs, idle, residency)
        self.wasted_prefetch_bytes = 0
        self._prefetching: set[int] = set()
        self._unused_prefetches: set[int] = set()
        self._staged: Sequence[int] = ()
        self._cache_of_layer = [policies.caches[pool] for pool in residency.pool_of_layer]
        self._evictable = residency.evictable
        self._mixed_sizes = len(set(residency.layer_bytes)) > 1
        self._starters = _overriding(policies.parts(), "begin_step")
        others = [part for part in policies.parts() if not isinstance(part, CachePolicy)]
        self._observers = [
            _overriding([cache, *others], "observe") for cache in self._cache_of_layer
        ]
        self._migrates = [bool(_overriding([c], "wants")) for c in self._cache_of_layer]
        self._screens = [bool(_overriding([c], "admits")) for c in self._cache_of_layer]
        self._start_caches()

    # -- the driver's calls --------------------------------------------------------------------

    def begin_step(self, step: StepInfo) -> None:
        """Tell that a step begins; finds stage boundaries."""
        view = self.view
        view.step = step
        if self.policies.stages is not None and self.policies.stages.observe(step):
            view.stage += 1
        for part in self._starters:
            part.begin_step(view)

    def plan_layer(self, routing: LayerRouting, now_ns: int) -> LayerPlan:
        """Decide how one layer of the current step is computed."""
        policies, view, residency = self.policies, self.view, self.residency
        layer = routing.layer
        view.layer, view.now_ns = layer, now_ns
        view.event += 1
        if policies.routing is not None:
            routing = policies.routing.rewrite(routing, view)
        for part in self._observers[layer]:
            part.observe(routing, view)
        cache = self._cache_of_layer[layer]
        plan, missing = self._classify(routing)
        residency.protect(routing.experts)
        if plan.resident or plan.late:
            used = [*plan.resident, *plan.late] if plan.late else plan.resident
            cache.on_hit(used, view)
            if self._unused_prefetches:
                self._unused_prefetches.difference_update(used)
        if missing:
            self._serve(plan, cache, missing)
        if policies.repack is not None:
            plan.groups = policies.repack.repack(routing, view)
            plan.packed = policies.repack.packed
        if self._migrates[layer] or policies.prefetch is not None:
            self._prefetch(plan, cache)
        return plan

    def on_load_started(self, key: int) -> None:
        """Report that the copy of a planned load has begun."""
        self.residency.start(key)

    def on_loaded(self, key: int) -> None:
        """Report that a planned load has arrived."""
        self.residency.complete(key)
        if self._prefetching:
            self._prefetching.discard(key)

    def end_layer(self, plan: LayerPlan) -> Sequence[Admission]:
        """End the event: unpin, and let staged experts stay where the policy admits after the event."""
        self.residency.release()
        if not self._staged:
            return ()
        cache = self._cache_of_layer[plan.routing.layer]
        exchanged = [self._exchange(key, cache) for key in self._staged]
        self._staged = ()
        return [admission for admission in exchanged if admission is not None]

    # -- classification and service of misses --------------------------------------------------

    def _classify(self, routing: LayerRouting) -> tuple[LayerPlan, list[int]]:
        state, experts = self.residency.state, routing.experts
        here = RESIDENT  # a local is read faster than a global
        resident = [key for key in experts if state[key] == here]
        if len(resident) == len(experts):
            return LayerPlan(routing, resident), []
        missing = [key for key in experts if not state[key]]
        late: Sequence[int] = ()
        if len(resident) + len(missing) < len(experts):
            late = [key for key in experts if ABSENT < state[key] < RESIDENT]
            self._prefetching.difference_update(late)
        return LayerPlan(routing, resident, late), missing

    def _serve(self, plan: LayerPlan, cache: CachePolicy, missing: list[int]) -> None:
        bypasses: list[int] = []
        if self.policies.placement is not None:
            missing = self._place(plan, missing, bypasses)
        if cache.admits_after:
            self._stage(plan, bypasses, missing)
            return
        loads: list[int] = []
        evicts: list[int] = []
        screens = self._screens[plan.routing.layer]
        for key in missing:
            admitted = not screens or cache.admits(key, self.view)
            if admitted and self._admit(key, cache, evicts):
                loads.append(key)
            else:
                bypasses.append(key)
        plan.loads = loads
        plan.evicts = evicts
        if bypasses:
            plan.bypasses = bypasses
            plan.bypass_slots = self.staging_slots

    def _place(self, plan: LayerPlan, missing: list[int], bypasses: list[int]) -> list[int]:
        """Ask the placement policy; return the keys to be loaded, and fill the other lists."""
        routing, placement = plan.routing, self.policies.placement
        assert placement is not None
        work = [ExpertWork(key, routing.num_tokens(key)) for key in missing]
        services = placement.place(work, self.view)
        if len(services) != len(missing):
            raise ValueError(
                f"{type(placement).__name__}.place: {len(services)} services for {len(missing)} experts"
            )
        chosen = list(zip(missing, services, strict=True))
        plan.on_cpu = [key for key, service in chosen if service == Service.CPU]
        bypasses.extend(key for key, service in chosen if service == Service.BYPASS)
        return [key for key, service in chosen if service == Service.LOAD]

    def _stage(self, plan: LayerPlan, bypasses: list[int], missing: list[int]) -> None:
        """Serve misses from staging slots; as many as have a slot of their own may stay afterwards."""
        slots = self.staging_slots
        whole = len(bypasses) + len(missing) <= slots
        keep = len(missing) if whole else max(0, slots - 2)
        self._staged = missing[:keep]
        plan.bypasses = [*missing, *bypasses]
        # Staged experts hold their slots to the end of the event; the others take turns in the rest.
        plan.bypass_slots = slots if whole else max(1, slots - len(self._staged))

    # -- making room ---------------------------------------------------------------------------

    def _admit(self, key: int, cache: CachePolicy, evicts: list[int]) -> bool:
        """Give ``key`` room in its pool; False if that cannot be had or the policy refuses."""
        residency = self.residency
        if residency.shortage_bytes(key) > 0:
            if self._mixed_sizes and not residency.can_make_room(key):
                return False
            victims = self._make_room(key, cache, self._evictable)
            if not victims:
                return False
            evicts += victims
        residency.reserve(key)
        cache.on_insert(key, self.view)
        return True

    def _make_room(self, key: int, cache: CachePolicy, evictable: Evictable) -> list[int]:
        """Drop what ``cache`` chooses for ``key``, which lacks room; nothing if it refuses half-way."""
        shortage = self.residency.shortage_bytes(key)
        victims: list[int] = []

        def remains(other: int) -> bool:
            return other not in victims and evictable(other)

        while shortage > 0:
            victim = cache.choose_victim(remains if victims else evictable, self.view)
            if victim is None or victim == key:
                return []
            shortage -= self.residency.expert_bytes(victim)
            victims.append(victim)
        for victim in victims:
            size = self.residency.evict(victim)
            cache.on_evict(victim)
            if victim in self._unused_prefetches:
                self._unused_prefetches.remove(victim)
                self.wasted_prefetch_bytes += size
        return victims

    def _exchange(self, key: int, cache: CachePolicy) -> Admission | None:
        """Let a staged newcomer compete with the residents; None if it loses."""
        residency = self.residency
        cache.on_insert(key, self.view)

        def evictable(other: int) -> bool:
            return other == key or residency.evictable(other)

        evicts: list[int] = []
        if residency.shortage_bytes(key) > 0:
            evicts = self._make_room(key, cache, evictable)
            if not evicts:
                cache.on_evict(key)
                return None
        residency.reserve(key)
        residency.start(key)
        residency.complete(key)
        return Admission(key, tuple(evicts))

    # -- loads nobody waits for ----------------------------------------------------------------

    def _prefetch(self, plan: LayerPlan, cache: CachePolicy) -> None:
        room = self.prefetch_limit - len(self._prefetching)
        if room <= 0:
            return
        residency, layer = self.residency, plan.routing.layer
        wanted = list(cache.wants(self.view)) if self._migrates[layer] else []
        if self.policies.prefetch is not None:
            wanted += self.policies.prefetch.propose(plan.routing, self.view)
        busy = set(plan.bypasses)  # already on their way to a staging slot
        prefetches: list[int] = []
        evicts = list(plan.evicts)
        for key in dict.fromkeys(wanted):
            if len(prefetches) == room:
                break
            if residency.state[key] == ABSENT and key not in busy:
                owner = self._cache_of_layer[key // residency.keys.num_experts]
                if self._admit(key, owner, evicts):
                    prefetches.append(key)
        self._prefetching.update(prefetches)
        self._unused_prefetches.update(prefetches)
        plan.prefetches = prefetches
        plan.evicts = evicts

    # -- before the first step -----------------------------------------------------------------

    def _start_caches(self) -> None:
        residency, view = self.residency, self.view
        for pool, cache in enumerate(self.policies.caches):
            layers = [i for i, p in enumerate(residency.pool_of_layer) if p == pool]
            keys = [key for layer in layers for key in residency.keys.layer_keys(layer)]
            largest = max(residency.layer_bytes[layer] for layer in layers)
            cache.start(keys, residency.capacity_bytes[pool] // largest, view)
            for key in cache.preload(view):
                if residency.shortage_bytes(key) <= 0:
                    self._preload(key, cache)

    def _preload(self, key: int, cache: CachePolicy) -> None:
        residency = self.residency
        residency.reserve(key)
        residency.start(key)
        residency.complete(key)
        cache.on_insert(key, self.view)
        if cache.keeps(key):
            residency.keep(key)


def _overriding(parts: Sequence[Policy], hook: str) -> list[Policy]:
    """Return the parts whose class overrides ``hook``, so that no-ops cost nothing in the hot path."""
    bases = (Policy, CachePolicy)
    return [
        part
        for part in parts
        if not any(getattr(type(part), hook) is getattr(base, hook, None) for base in bases)
    ]
