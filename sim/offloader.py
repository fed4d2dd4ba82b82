"""The Offloader: one layer's routing in, one :class:`LayerPlan` out; pure of time and hardware.

Every driver (timeline, lockstep, a real executor) runs the same loop: ``begin_step``; for each layer
``plan_layer``, carry the plan out while reporting ``on_load_started`` and ``on_loaded``, ``end_layer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sim.ahead import Ahead
from sim.answers import check_boundary, check_groups, check_rewritten
from sim.host import HostTier
from sim.kv import JointBudget
from sim.misses import Misses
from sim.policies.base import PolicySet, RepackPolicy, overriding
from sim.preload import preload
from sim.residency import ABSENT, RESIDENT, Residency
from sim.room import Admission, Room
from sim.stage_score import StageScore
from sim.types import (
    CostModel,
    LayerPlan,
    LayerRouting,
    Phase,
    StepInfo,
    View,
)


class Shrink(NamedTuple):
    """What KV growth took from the expert cache: the same lists as in a LayerPlan."""

    evicts: list[int]
    cancels: list[int]
    demotes: list[int]
    host_evicts: list[int]


class Offloader:
    """Applies a set of policies to the state of memory.

    Parameters
    ----------
    residency
        GPU memory; only the Offloader changes it.
    policies
        One cache policy a pool of ``residency``, and the optional other roles.
    costs
        The estimate that policies may ask.
    staging_slots
        Experts that may be held outside the cache during one event, on each GPU.
    prefetch_limit
        Prefetches that may be under way (queued or loading) at one time.
    joint
        The budget that KV cache and experts share; None where KV has memory of its own.
    host, exclusive_host
        Host memory, where it is a cache above storage that ``policies.host`` rules, and whether an
        expert on the GPU leaves it; None where host memory holds everything.
    """

    def __init__(
        self,
        residency: Residency,
        policies: PolicySet,
        costs: CostModel,
        staging_slots: int,
        prefetch_limit: int = 2,
        joint: JointBudget | None = None,
        host: Residency | None = None,
        exclusive_host: bool = False,
    ) -> None:
        if staging_slots < 1:
            raise ValueError(f"staging_slots = {staging_slots}: must be >= 1")
        self.residency = residency
        self.policies = policies
        self.staging_slots = staging_slots
        idle = StepInfo(step=-1, phase=Phase.PREFILL, num_tokens=0)
        self.view = View(residency.keys, costs, idle, residency)
        self.view.packed = policies.repack is not None and policies.repack.packed
        self._joint = joint
        self._held_kv_tokens = 0
        self.stage_score = StageScore()
        self.room = self._room = Room(residency, self.view)
        self._owner = [policies.caches[pool] for pool in residency.pool_of_key]
        self._caches_of_layer = [
            [policies.caches[pool] for pool in residency.pools_of_layer(layer)]
            for layer in range(residency.keys.num_layers)
        ]
        self._learn(policies)
        caches, room = (self._owner, self._caches_of_layer), self._room
        hits_stay = exclusive_host and host is not None
        self._misses = Misses(self.view, room, policies, *caches, staging_slots, hits_stay)
        self._places_hits = self._misses.places_hits
        self._ahead = Ahead(
            *(self.view, residency, room, policies.prefetch),
            *caches,
            prefetch_limit,
            exclusive_host,
        )
        self._doubts = self._ahead.doubts
        self._under_way = self._ahead.under_way
        self.give_up = self._ahead.give_up  # queued prefetches that a driver has dropped
        preload(residency, policies.caches, self.view)
        self.host: HostTier | None = None
        if host is not None:
            assert policies.host is not None
            view = View(residency.keys, costs, idle, host)
            self.host = HostTier(
                host, policies.host, residency, view, exclusive_host, prefetch_limit
            )
            self.host.fill()

    def _learn(self, policies: PolicySet) -> None:
        """Find out which hooks anybody overrides, so that the others cost nothing."""
        self._starters = overriding(policies.parts(), "begin_step")
        others = [part for part in policies.parts() if not any(part is c for c in policies.caches)]
        self._observers = [
            overriding([*caches, *others], "observe") for caches in self._caches_of_layer
        ]
        self._migrates = [bool(overriding(caches, "wants")) for caches in self._caches_of_layer]

    def start_counting(self) -> None:
        """Begin to count waste and stages anew: what came before was to warm up."""
        self._room.start_counting()
        self.stage_score = StageScore()

    @property
    def wasted_prefetch_bytes(self) -> int:
        """Bytes of prefetches that were dropped before any use, or have come and not been used yet."""
        idle = filter(self.residency.is_resident, self._room.unused_prefetches)
        return self._room.wasted_prefetch_bytes + sum(map(self.residency.expert_bytes, idle))

    # -- the driver's calls --------------------------------------------------------------------

    def begin_step(self, step: StepInfo) -> Shrink | None:
        """Tell that a step begins: finds stage boundaries, and makes room for KV that grows.

        Returns what that took from the cache; None if nothing has changed.
        """
        view = self.view
        view.step = step
        if self.host is not None:
            self.host.view.step = step
        if self.policies.stages is not None:
            found = self.policies.stages.is_boundary(step)
            check_boundary(self.policies.stages, found)
            view.stage += found
            self.stage_score.add(step, found)
        for part in self._starters:
            part.begin_step(view)
        if self._joint is None or step.held_kv_tokens == self._held_kv_tokens:
            return None
        self._held_kv_tokens = step.held_kv_tokens
        return self._resize(self._joint.pool_bytes(step.held_kv_tokens))

    def plan_layer(self, routing: LayerRouting, now_ns: int) -> LayerPlan:
        """Decide how one layer of the current step is computed."""
        policies, view, residency = self.policies, self.view, self.residency
        layer = routing.layer
        view.layer, view.now_ns = layer, now_ns
        view.event += 1
        recorded = routing
        if policies.routing is not None:
            routing = policies.routing.rewrite(routing, view)
            if routing is not recorded:
                check_rewritten(policies.routing, routing, recorded, view.keys)
        view.routing = routing
        for part in self._observers[layer]:
            part.observe(routing, view)
        cancels = self._ahead.cancel(routing) if self._doubts else ()
        plan, missing = self._classify(routing)
        plan.recorded = recorded
        residency.pin(routing.experts)
        caches = self._caches_of_layer[layer]
        if plan.resident or plan.late:
            used = [*plan.resident, *plan.late] if plan.late else plan.resident
            if len(caches) == 1:
                caches[0].on_hit(used, view)
            else:
                self._hit_each(used)
        if missing or self._places_hits:
            self._misses.serve(plan, missing)
            if self._places_hits and plan.on_cpu:
                self._leave_on_way(plan)
        if self._room.unused_prefetches:
            self._room.use(plan.resident, plan.late)
        if policies.repack is not None:
            self._repack(plan, policies.repack)
        if self._migrates[layer] or policies.prefetch is not None:
            self._ahead.plan(plan, () if self.host is None else self.host.kept)
        if cancels:
            plan.cancels = cancels
        if self.host is not None:
            self._supply(plan, self.host)
        return plan

    def on_load_started(self, key: int) -> None:
        """Report that the copy of a planned load has begun."""
        self.residency.start(key)

    def on_loaded(self, key: int) -> None:
        """Report that a planned load has arrived."""
        self.residency.complete(key)
        if self._under_way:
            self._under_way.discard(key)
        if self.host is not None and self.host.exclusive:
            self.host.hand_over((key,))

    def on_loaded_at_once(self, keys: Sequence[int]) -> None:
        """Report planned loads that took no time: for drivers without a clock."""
        self.residency.complete_at_once(keys)
        if self._under_way:
            self._under_way.difference_update(keys)
        if self.host is not None and self.host.exclusive:
            self.host.hand_over(keys)

    def on_host_started(self, key: int) -> None:
        """Report that ``key`` is on its way into host memory, from storage or from the GPU."""
        assert self.host is not None
        self.host.residency.start(key)

    def on_host_arrived(self, key: int) -> None:
        """Report that ``key`` is in host memory."""
        assert self.host is not None
        self.host.residency.complete(key)
        self.host.arrived((key,))

    def on_host_arrived_at_once(self, keys: Sequence[int]) -> None:
        """Report arrivals in host memory that took no time."""
        assert self.host is not None
        self.host.residency.complete_at_once(keys)
        self.host.arrived(keys)

    def end_layer(self, plan: LayerPlan) -> Sequence[Admission]:
        """End the event: unpin, and let staged experts stay where the policy admits after the event.

        Those experts' victims that must go back to host memory are ``plan.demotes`` afterwards.
        """
        self.residency.unpin()
        if self.host is not None:
            self.host.end_layer(plan.deferred)
        if not self._misses.held:
            return ()
        exchanged = [self._room.exchange(key, self._owner[key]) for key in self._misses.held]
        self._misses.held = ()
        admissions = [admission for admission in exchanged if admission is not None]
        if self.host is not None and self.host.exclusive:
            self.host.hand_over([admission.key for admission in admissions])
            dropped = [key for admission in admissions for key in admission.evicts]
            plan.demotes = self.host.take_back(dropped, [])
        return admissions

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
            self._under_way.difference_update(late)
        return LayerPlan(routing, resident, late), missing

    def _hit_each(self, used: Sequence[int]) -> None:
        """Tell each cache of a layer that is spread over several pools what it was used for."""
        owner = self._owner
        for cache in {id(owner[key]): owner[key] for key in used}.values():
            cache.on_hit([key for key in used if owner[key] is cache], self.view)

    def _leave_on_way(self, plan: LayerPlan) -> None:
        """Wait no more for prefetches under way whose experts the CPU computes this time."""
        state = self.residency.state
        self._under_way.update([key for key in plan.on_cpu if ABSENT < state[key] < RESIDENT])

    def _repack(self, plan: LayerPlan, repack: RepackPolicy) -> None:
        plan.packed = repack.packed
        plan.groups = groups = repack.repack(plan.routing, self.view)
        if groups is None:
            return
        check_groups(repack, groups, self.view.step.num_tokens)

    # -- memory that KV takes, and host memory ---------------------------------------------------

    def _resize(self, pool_bytes: Sequence[int]) -> Shrink:
        residency, shrink = self.residency, Shrink([], [], [], [])
        for pool, capacity in enumerate(pool_bytes):
            cache, largest = self.policies.caches[pool], residency.largest_bytes(pool)
            slots = residency.capacity_bytes[pool] // largest
            lack_bytes = residency.resize(pool, capacity)
            if capacity // largest != slots:
                cache.on_resize(capacity // largest, self.view)
            if lack_bytes:
                lack_bytes -= self._ahead.clear(pool, shrink.cancels)
                self._room.shrink(pool, cache, lack_bytes, shrink.evicts)
        if self.host is not None and self.host.exclusive:
            shrink.demotes.extend(self.host.take_back(shrink.evicts, shrink.host_evicts))
        return shrink

    def _supply(self, plan: LayerPlan, host: HostTier) -> None:
        """Plan what comes from storage for this layer, and what goes back to host memory."""
        view, other = self.view, host.view
        other.layer, other.event, other.now_ns = view.layer, view.event, view.now_ns
        other.routing, other.stage = view.routing, view.stage
        evicts: list[int] = []
        if plan.deferred:
            host.keep(plan)
        demand = [*plan.loads, *plan.bypasses, *plan.on_cpu, *plan.deferred]
        plan.reads = host.supply(demand, plan.prefetches, evicts)
        if plan.evicts and host.exclusive:
            plan.demotes = host.take_back(plan.evicts, evicts)
        plan.host_evicts = evicts
