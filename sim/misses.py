"""How the experts of an event are served that are not on the GPU, or that are and are placed elsewhere."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from functools import partial

from sim.policies.base import CachePolicy, PlacementPolicy, PolicySet, overriding
from sim.room import Room
from sim.types import ConfigError, ExpertWork, LayerPlan, Service, View

_FOR_MISSES = (Service.LOAD, Service.BYPASS, Service.CPU, Service.DEFER)
_FOR_HITS = (Service.STAY, Service.CPU)
_FOR_ANY = tuple(Service)
_NUM_SERVICES = len(_FOR_ANY)
_made = partial(tuple.__new__, ExpertWork)  # from a tuple, without the call of a Python function


class Misses:
    """Asks the placement and cache policies about missing experts, and about hits if placement wants to.

    ``owner`` is the cache policy of each expert, [num_keys]. ``held`` are the experts of the event
    under way that run in staging slots and may stay afterwards. ``places_hits`` tells whether events
    without a miss are placed too. With ``hits_stay`` an expert on the GPU is not in host memory as well:
    there is nothing for the CPU to compute with, and CPU for a hit is served as STAY.
    """

    def __init__(
        self,
        view: View,
        room: Room,
        policies: PolicySet,
        owner: Sequence[CachePolicy],
        caches_of_layer: Sequence[Sequence[CachePolicy]],
        staging_slots: int,
        hits_stay: bool = False,
    ) -> None:
        self.held: Sequence[int] = ()
        self.places_hits = policies.placement is not None and policies.placement.places_hits
        self._hits_stay = hits_stay
        self._view = view
        self._room = room
        self._placement = policies.placement
        may_defer = policies.placement is not None and policies.placement.lossy
        self._for_misses = _FOR_MISSES if may_defer else _FOR_MISSES[:-1]
        self._insert_cap = policies.insert_cap
        self._owner = owner
        self._screens = [bool(overriding(caches, "admits")) for caches in caches_of_layer]
        self._admits_after = [caches[0].admits_after for caches in caches_of_layer]
        self._staging_slots = staging_slots

    def serve(self, plan: LayerPlan, missing: list[int]) -> None:
        """Decide how each missing expert is served, and make room for those that are loaded."""
        bypasses: list[int] = []
        if self._placement is not None:
            missing = self._place(plan, missing, bypasses)
            if not missing and not bypasses:
                return
        owner, view = self._owner, self._view
        if self._screens[plan.routing.layer]:
            admitted = [key for key in missing if owner[key].admits(key, view)]
            bypasses += [key for key in missing if key not in admitted]
            missing = admitted
        cap = self._insert_cap
        if cap is not None:
            bypasses += missing[cap:]
            missing = missing[:cap]
        if self._admits_after[plan.routing.layer]:
            self._hold(plan, bypasses, missing)
            return
        loads: list[int] = []
        evicts: list[int] = []
        admit, refused = self._room.admit, None
        for key in missing:
            cache = owner[key]
            if cache is refused:  # it named nobody, and within an event nobody else becomes free
                bypasses.append(key)
            elif admit(key, cache, evicts):
                loads.append(key)
            else:
                bypasses.append(key)
                if not self._room.mixed_sizes:
                    refused = cache
        plan.loads = loads
        plan.evicts = evicts
        if bypasses:
            plan.bypasses = bypasses
            plan.bypass_slots = self._staging_slots

    def _place(self, plan: LayerPlan, missing: list[int], bypasses: list[int]) -> list[int]:
        """Ask the placement policy; return the keys to be loaded, and fill the other lists."""
        routing, placement, absent = plan.routing, self._placement, set(missing)
        assert placement is not None
        if self.places_hits:
            hits = [key not in absent for key in routing.experts]
            work = list(map(_made, zip(routing.experts, routing.token_counts, hits, strict=True)))
        else:
            work = [ExpertWork(key, routing.num_tokens(key)) for key in missing]
        services = placement.place(work, self._view)
        if not isinstance(services, Sized):
            raise ConfigError(f"{type(placement).__name__}.place = {services}: must be a list")
        if len(services) != len(work):
            raise ConfigError(
                f"{type(placement).__name__}.place: {len(services)} services for {len(work)} experts"
            )
        chosen: list[list[int]] = [[] for _ in range(_NUM_SERVICES)]
        # What a step computes must be complete when it ends: its last layer has nobody to defer to.
        is_last = routing.layer == self._view.num_layers - 1
        for_hits, for_misses = _FOR_HITS, self._for_misses
        for (key, _, is_hit), answer in zip(work, services, strict=True):
            service = answer
            if service not in (for_hits if is_hit else for_misses):
                raise _refusal(placement, key, service, is_hit)
            if is_last and service == Service.DEFER:
                service = Service.CPU
            chosen[service].append(key)
        plan.on_cpu = chosen[Service.CPU]
        if chosen[Service.DEFER]:
            plan.deferred = chosen[Service.DEFER]
        if self.places_hits and plan.on_cpu:
            self._move_hits(plan, absent)
        bypasses.extend(chosen[Service.BYPASS])
        return chosen[Service.LOAD]

    def _move_hits(self, plan: LayerPlan, absent: set[int]) -> None:
        """Take the hits that run on the CPU out of what the GPU computes."""
        if self._hits_stay:
            plan.on_cpu = [key for key in plan.on_cpu if key in absent]
            return
        moved = set(plan.on_cpu).difference(absent)
        if moved:
            num_hits = len(plan.resident)
            plan.resident = [key for key in plan.resident if key not in moved]
            plan.late = [key for key in plan.late if key not in moved]
            plan.hits_on_cpu = num_hits - len(plan.resident)

    def _hold(self, plan: LayerPlan, bypasses: list[int], missing: list[int]) -> None:
        """Load into free room; serve the rest from staging slots, from which some may stay afterwards.

        Those that may stay hold a slot until then, so there are no more of them than slots.
        """
        plan.loads = [key for key in missing if self._room.fill(key, self._owner[key])]
        candidates = [key for key in missing if key not in plan.loads]
        slots = self._staging_slots
        whole = len(bypasses) + len(candidates) <= slots
        plan.num_held = len(candidates) if whole else min(len(candidates), max(0, slots - 2))
        plan.bypasses = [*candidates, *bypasses]
        plan.bypass_slots = max(1, slots - plan.num_held)
        self.held = candidates[: plan.num_held]


def _refusal(placement: PlacementPolicy, key: int, service: int, is_hit: bool) -> ConfigError:
    """Return the error of a service that an expert cannot have."""
    name = Service(service).name if service in _FOR_ANY else repr(service)
    if service == Service.DEFER and not is_hit and not placement.lossy:
        return ConfigError(
            f"{type(placement).__name__}.place: DEFER for key = {key}: adds an expert's output a layer late, "
            "which changes the answer: the class must be marked lossy = True"
        )
    where = "on the GPU or on its way there" if is_hit else "not on the GPU"
    names = [allowed.name for allowed in (_FOR_HITS if is_hit else _FOR_MISSES)]
    rule = f"must be {', '.join(names[:-1])} or {names[-1]}"
    return ConfigError(
        f"{type(placement).__name__}.place: {name} for key = {key}, which is {where}: {rule}"
    )
