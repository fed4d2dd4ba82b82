"""The Offloader: one layer's routing in, one :class:`LayerPlan` out; pure of time and hardware.

Every driver (timeline, lockstep, a real executor) runs the same loop: ``begin_step``; for each layer
``plan_layer``, carry the plan out while reporting ``on_load_started`` and ``on_loaded``, ``end_layer``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.policies.base import CachePolicy, PolicySet, RepackPolicy, overriding
from sim.preload import preload
from sim.residency import ABSENT, RESIDENT, Residency
from sim.room import Admission, Room
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
        if staging_slots < 1:
            raise ValueError(f"staging_slots = {staging_slots}: must be >= 1")
        self.residency = residency
        self.policies = policies
        self.staging_slots = staging_slots
        self.prefetch_limit = prefetch_limit
        idle = StepInfo(step=-1, phase=Phase.PREFILL, num_tokens=0)
        self.view = View(residency.keys, costs, idle, residency)
        self._prefetching: set[int] = set()
        self.view.packed = policies.repack is not None and policies.repack.packed
        self._room = Room(residency, self.view)
        self._held: Sequence[int] = ()
        self._cache_of_layer = [policies.caches[pool] for pool in residency.pool_of_layer]
        self._starters = overriding(policies.parts(), "begin_step")
        others = [part for part in policies.parts() if not isinstance(part, CachePolicy)]
        self._observers = [
            overriding([cache, *others], "observe") for cache in self._cache_of_layer
        ]
        self._migrates = [bool(overriding([c], "wants")) for c in self._cache_of_layer]
        self._screens = [bool(overriding([c], "admits")) for c in self._cache_of_layer]
        preload(residency, policies.caches, self.view)

    @property
    def wasted_prefetch_bytes(self) -> int:
        """Bytes of prefetches that were dropped before any use, or have come and not been used yet."""
        idle = filter(self.residency.is_resident, self._room.unused_prefetches)
        return self._room.wasted_prefetch_bytes + sum(map(self.residency.expert_bytes, idle))

    # -- the driver's calls --------------------------------------------------------------------

    def begin_step(self, step: StepInfo) -> None:
        """Tell that a step begins; finds stage boundaries."""
        view = self.view
        view.step = step
        if self.policies.stages is not None and self.policies.stages.is_boundary(step):
            view.stage += 1
        for part in self._starters:
            part.begin_step(view)

    def plan_layer(self, routing: LayerRouting, now_ns: int) -> LayerPlan:
        """Decide how one layer of the current step is computed."""
        policies, view, residency = self.policies, self.view, self.residency
        layer = routing.layer
        view.layer, view.now_ns = layer, now_ns
        view.event += 1
        recorded = routing
        if policies.routing is not None:
            routing = policies.routing.rewrite(routing, view)
        for part in self._observers[layer]:
            part.observe(routing, view)
        cache = self._cache_of_layer[layer]
        plan, missing = self._classify(routing)
        plan.recorded = recorded
        residency.pin(routing.experts)
        if plan.resident or plan.late:
            used = [*plan.resident, *plan.late] if plan.late else plan.resident
            cache.on_hit(used, view)
            if self._room.unused_prefetches:
                self._room.unused_prefetches.difference_update(used)
        if missing:
            self._serve(plan, cache, missing)
        if policies.repack is not None:
            self._repack(plan, policies.repack)
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

    def on_loaded_at_once(self, keys: Sequence[int]) -> None:
        """Report planned loads that took no time: for drivers without a clock."""
        self.residency.complete_at_once(keys)
        if self._prefetching:
            self._prefetching.difference_update(keys)

    def end_layer(self, plan: LayerPlan) -> Sequence[Admission]:
        """End the event: unpin, and let staged experts stay where the policy admits after the event."""
        self.residency.unpin()
        if not self._held:
            return ()
        cache = self._cache_of_layer[plan.routing.layer]
        exchanged = [self._room.exchange(key, cache) for key in self._held]
        self._held = ()
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
        if self._screens[plan.routing.layer]:
            admitted = [key for key in missing if cache.admits(key, self.view)]
            bypasses += [key for key in missing if key not in admitted]
            missing = admitted
        if cache.admits_after:
            self._hold(plan, cache, bypasses, missing)
            return
        loads: list[int] = []
        evicts: list[int] = []
        admit = self._room.admit
        for key in missing:
            if admit(key, cache, evicts):
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
        services = [Service(service) for service in placement.place(work, self.view)]
        if len(services) != len(missing):
            raise ValueError(
                f"{type(placement).__name__}.place: {len(services)} services for {len(missing)} experts"
            )
        chosen = list(zip(missing, services, strict=True))
        plan.on_cpu = [key for key, service in chosen if service == Service.CPU]
        bypasses.extend(key for key, service in chosen if service == Service.BYPASS)
        return [key for key, service in chosen if service == Service.LOAD]

    def _hold(
        self, plan: LayerPlan, cache: CachePolicy, bypasses: list[int], missing: list[int]
    ) -> None:
        """Load into free room; serve the rest from staging slots, from which some may stay afterwards.

        Those that may stay hold a slot until then, so there are no more of them than slots.
        """
        plan.loads = [key for key in missing if self._room.fill(key, cache)]
        candidates = missing[len(plan.loads) :]  # sizes are those of one layer: the first ones fit
        slots = self.staging_slots
        whole = len(bypasses) + len(candidates) <= slots
        plan.num_held = len(candidates) if whole else min(len(candidates), max(0, slots - 2))
        plan.bypasses = [*candidates, *bypasses]
        plan.bypass_slots = max(1, slots - plan.num_held)
        self._held = candidates[: plan.num_held]

    def _repack(self, plan: LayerPlan, repack: RepackPolicy) -> None:
        plan.packed = repack.packed
        plan.groups = groups = repack.repack(plan.routing, self.view)
        if groups is None:
            return
        tokens = np.sort(np.concatenate(groups)) if len(groups) else np.empty(0)
        if not np.array_equal(tokens, np.arange(self.view.step.num_tokens)):
            raise ValueError(
                f"{type(repack).__name__}.repack: must be a partition of the step's "
                f"{self.view.step.num_tokens} tokens, each in exactly one group"
            )

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
            residency.keys.check(key, "prefetch")
            if residency.state[key] == ABSENT and key not in busy:
                owner = self._cache_of_layer[key // residency.keys.num_experts]
                if self._room.admit(key, owner, evicts):
                    prefetches.append(key)
        self._prefetching.update(prefetches)
        self._room.unused_prefetches.update(prefetches)
        plan.prefetches = prefetches
        plan.evicts = evicts
