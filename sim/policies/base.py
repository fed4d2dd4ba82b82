"""The roles a policy can play, one verb each; every other hook does nothing unless overridden.

A :class:`CachePolicy` object rules one pool (one layer's slots, or the slots of all layers): the
builder makes one copy a pool. The Offloader calls, for each event (step, layer) in this order:
rewrite, observe, on_hit, place, then admits / choose_victim / on_insert / on_evict for each miss,
then wants and propose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.types import ExpertWork, LayerRouting, Service, StepInfo, View

Evictable = Callable[[int], bool]


class Policy:
    """What all roles share: hooks to learn from; decisions are made elsewhere."""

    oracle: ClassVar[bool] = False
    """True for a policy that was given the future through its constructor."""
    lossy: ClassVar[bool] = False
    """True for a policy that changes the model's answer."""

    def begin_step(self, view: View) -> None:
        """Learn that a step begins; ``view.step`` tells which."""

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Learn what a layer's router chose. Called once an event, before any decision."""


class CachePolicy(Policy):
    """Chooses who stays in one pool of GPU memory."""

    admits_after: bool = False
    """When misses enter the cache. False: before their load, room being made among experts the event
    does not use. True: they run in staging slots, and when the event is over
    ``choose_victim`` picks among residents and newcomers alike (a newcomer that is picked is bypassed)."""
    needs_event_room: bool = True
    """False for a policy that admits no misses, so that its pool may be smaller than one event."""

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn the pool: its keys, and how many experts surely fit. Called once, before all else."""

    def preload(self, view: View) -> Sequence[int]:
        """Return keys to hold before the first step, best first; what does not fit is left out."""
        return ()

    def pins(self, key: int) -> bool:
        """Tell whether a preloaded ``key`` may never be evicted."""
        return False

    def admits(self, key: int, view: View) -> bool:
        """Tell whether a missed ``key`` may enter the cache (else it is bypassed)."""
        return True

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the key to drop, one for which ``evictable`` holds; None refuses (bypass)."""
        raise NotImplementedError

    def give_up(self, evictable: Evictable, view: View) -> int | None:
        """Return the key to drop because the pool shrinks, or because there must be room.

        Unlike in :meth:`choose_victim`, keys kept by :meth:`pins` may be named, and None is a last
        word only if nothing is evictable: the run ends with an error otherwise.
        """
        return self.choose_victim(evictable, view)

    def on_resize(self, num_slots: int, view: View) -> None:
        """Learn that the pool now surely holds ``num_slots`` experts; what is too much goes next."""

    def wants(self, view: View) -> Sequence[int]:
        """Return absent keys of this pool worth loading at low priority, best first."""
        return ()

    def stale(self, queued: Sequence[int], view: View) -> Sequence[int]:
        """Return those of the queued low-priority loads that are no longer worth their copy."""
        return ()

    def on_hit(self, keys: Sequence[int], view: View) -> None:
        """Learn that an event uses these keys, all in GPU memory or on their way."""

    def on_insert(self, key: int, view: View) -> None:
        """Learn that ``key`` has been given room."""

    def on_evict(self, key: int) -> None:
        """Learn that ``key`` has gone; only here may it leave the policy's order."""


class PrefetchPolicy(Policy):
    """Guesses what will be wanted soon."""

    def propose(self, routing: LayerRouting, view: View) -> Sequence[int]:
        """Return keys to load ahead, best first; the Offloader filters and bounds them."""
        raise NotImplementedError

    def stale(self, queued: Sequence[int], view: View) -> Sequence[int]:
        """Return those of the queued loads (none has begun) that are no longer worth their copy."""
        return ()


class PlacementPolicy(Policy):
    """Decides how missing experts are served."""

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        """Return a service for each missing expert of the event, in the order given."""
        raise NotImplementedError


class RoutingPolicy(Policy):
    """Changes the routing itself: lossy."""

    lossy = True

    def rewrite(self, routing: LayerRouting, view: View) -> LayerRouting:
        """Return the routing to be computed instead."""
        raise NotImplementedError


class RepackPolicy(Policy):
    """Decides how an event's tokens are laid out for the expert kernels."""

    packed: ClassVar[bool] = False
    """True when tokens are sorted by expert once a layer, so that no expert gathers or scatters."""

    def repack(self, routing: LayerRouting, view: View) -> Sequence[NDArray[np.intp]] | None:
        """Return a partition of the step's token indices; None keeps one micro-batch of all."""
        return None


class StageDetector(Policy):
    """Finds where one reasoning stage ends and the next begins."""

    def is_boundary(self, step: StepInfo) -> bool:
        """Return True when a new stage begins with this step."""
        raise NotImplementedError


@dataclass(slots=True)
class PolicySet:
    """The parts that together run a model: ``caches`` holds one policy a pool of GPU memory.

    ``host`` rules host memory where that is a cache above storage.
    """

    caches: Sequence[CachePolicy]
    placement: PlacementPolicy | None = None
    prefetch: PrefetchPolicy | None = None
    routing: RoutingPolicy | None = None
    repack: RepackPolicy | None = None
    stages: StageDetector | None = None
    host: CachePolicy | None = None

    def parts(self) -> list[Policy]:
        """Return the distinct policy objects that may learn, in a fixed order."""
        found: list[Policy] = []
        others = (self.placement, self.prefetch, self.routing, self.repack, self.stages, self.host)
        for part in (*self.caches, *others):
            if part is not None and not any(part is known for known in found):
                found.append(part)
        return found

    @property
    def oracle(self) -> bool:
        """True when any part knows the future."""
        return any(part.oracle for part in self.parts())

    @property
    def lossy(self) -> bool:
        """True when any part changes the answer."""
        return any(part.lossy for part in self.parts())


def overriding(parts: Sequence[Policy], hook: str) -> list[Policy]:
    """Return the parts whose class overrides ``hook``, so that no-ops cost nothing in the hot path."""
    bases = (Policy, CachePolicy, PrefetchPolicy)
    return [
        part
        for part in parts
        if not any(getattr(type(part), hook) is getattr(base, hook, None) for base in bases)
    ]
