"""How the experts of an event that are not on the GPU are served."""

from __future__ import annotations

from collections.abc import Sequence

from sim.policies.base import CachePolicy, PlacementPolicy, overriding
from sim.room import Room
from sim.types import ExpertWork, LayerPlan, Service, View


class Misses:
    """Asks the placement and cache policies about missing experts.

    ``owner`` is the cache policy of each expert, [num_keys]. ``held`` are the experts of the event
    under way that run in staging slots and may stay afterwards.
    """

    def __init__(
        self,
        view: View,
        room: Room,
        placement: PlacementPolicy | None,
        owner: Sequence[CachePolicy],
        caches_of_layer: Sequence[Sequence[CachePolicy]],
        staging_slots: int,
    ) -> None:
        self.held: Sequence[int] = ()
        self._view = view
        self._room = room
        self._placement = placement
        self._owner = owner
        self._screens = [bool(overriding(caches, "admits")) for caches in caches_of_layer]
        self._admits_after = [caches[0].admits_after for caches in caches_of_layer]
        self._staging_slots = staging_slots

    def serve(self, plan: LayerPlan, missing: list[int]) -> None:
        """Decide how each missing expert is served, and make room for those that are loaded."""
        bypasses: list[int] = []
        if self._placement is not None:
            missing = self._place(plan, missing, bypasses)
        owner, view = self._owner, self._view
        if self._screens[plan.routing.layer]:
            admitted = [key for key in missing if owner[key].admits(key, view)]
            bypasses += [key for key in missing if key not in admitted]
            missing = admitted
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
        routing, placement = plan.routing, self._placement
        assert placement is not None
        work = [ExpertWork(key, routing.num_tokens(key)) for key in missing]
        services = [Service(service) for service in placement.place(work, self._view)]
        if len(services) != len(missing):
            raise ValueError(
                f"{type(placement).__name__}.place: {len(services)} services for {len(missing)} experts"
            )
        chosen = list(zip(missing, services, strict=True))
        plan.on_cpu = [key for key, service in chosen if service == Service.CPU]
        bypasses.extend(key for key, service in chosen if service == Service.BYPASS)
        return [key for key, service in chosen if service == Service.LOAD]

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
