"""The roles a policy can play, one verb each; every other hook does nothing unless overridden.

A :class:`CachePolicy` object rules one pool (one layer's slots, or the slots of all layers): the
builder makes one copy a pool. The Offloader calls, for each event (step, layer) in this order:
rewrite, observe (the predictor first), on_hit, place, then admits / choose_victim / on_insert /
on_evict for each miss, then wants and propose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

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
    assumed: ClassVar[bool] = False
    """True for a policy whose accuracy is set, not earned: runs of it are labelled."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Optional trace columns without which the policy cannot work."""
    needs_low: ClassVar[bool] = False
    """True for a policy that cannot work without low-precision copies (``policy.low``)."""

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


class Predictor(Policy):
    """Says how likely experts are to be used; one object, which cache, prefetch and placement share."""

    def scores(self, layer: int, view: View) -> Sequence[float] | NDArray[np.floating]:
        """Return how likely each expert of ``layer`` is used at that layer's next event, [num_experts].

        For a layer after ``view.layer`` that is in this step, for others in the next one. Higher is
        likelier; what is 0 or less is not expected at all.
        """
        raise NotImplementedError


class PlacementPolicy(Policy):
    """Decides how missing experts are served."""

    places_hits: ClassVar[bool] = False
    """True: :meth:`place` is asked about all experts of an event, in the routing's order, hits included.

    ``ExpertWork.resident`` marks those on the GPU and prefetches on their way there (``view.is_loading``
    tells them apart)."""

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        """Return a service for each expert asked about, in the order given.

        A missing expert may be answered LOAD, BYPASS, CPU or DEFER, one marked ``resident`` STAY or CPU.
        A hit on the CPU is still a hit, and stays where it is; where host memory does not keep what the
        GPU holds (exclusive), it is served as STAY. A prefetch whose expert runs on the CPU goes on, but
        nobody waits for it. DEFER is for classes marked ``lossy``; it is served as CPU in the last layer,
        and where host memory is a cache above storage without room to keep the expert for another layer.
        """
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


class SizingPolicy(Policy):
    """Shares the slots of GPU memory among the pools of the layers."""

    def slots(self, num_slots: int) -> Sequence[int]:
        """Return how many of ``num_slots`` slots each layer gets, [num_layers]; the sum may be less."""
        raise NotImplementedError


class Waiting(NamedTuple):
    """A request that may decode next.

    ``steps_waited`` counts the steps that have decoded without it since it last ran, ``num_tokens`` the
    tokens of it that are processed, prompt included; ``last_keys`` has a bit for each key (of all
    layers) that the last of them used, 0 where there is none.
    """

    request_id: int
    steps_waited: int
    num_tokens: int
    last_keys: int


class BatchFormer(Policy):
    """Chooses which requests decode together where more are in memory than a step decodes.

    Its answers may depend on what :meth:`choose` is told, now and before, and on nothing else: the steps
    of a run are also worked out beforehand, by another object of the same kind. So it must not override
    begin_step or observe.
    """

    def choose(
        self, waiting: Sequence[Waiting], size: int, due: Sequence[Waiting] = ()
    ) -> Sequence[int]:
        """Return the places in ``waiting`` of those that run next, at most ``size``.

        At least one unless some are ``due``: these have waited as long as they may and run besides.
        Called in each step in which more wait than fit; ``waiting`` and ``due`` are in the order of the
        time waited, the longest first.
        """
        raise NotImplementedError


@dataclass(slots=True)
class PolicySet:
    """The parts that together run a model: ``caches`` holds one policy a pool of GPU memory.

    ``host`` rules host memory where that is a cache above storage. ``calibrated`` tells whether any part
    has learned from calibration requests. ``insert_cap`` is how many missing experts of an event are
    offered to the cache, the others being bypassed; None: all.
    """

    caches: Sequence[CachePolicy]
    placement: PlacementPolicy | None = None
    prefetch: PrefetchPolicy | None = None
    routing: RoutingPolicy | None = None
    repack: RepackPolicy | None = None
    stages: StageDetector | None = None
    host: CachePolicy | None = None
    predictor: Predictor | None = None
    sizing: SizingPolicy | None = None
    former: BatchFormer | None = None
    calibrated: bool = False
    insert_cap: int | None = None

    def parts(self) -> list[Policy]:
        """Return the distinct policy objects that may learn, in a fixed order."""
        found: list[Policy] = []
        deciders = (
            self.placement,
            self.prefetch,
            self.routing,
            self.repack,
            self.stages,
            self.host,
        )
        for part in (self.predictor, *self.caches, *deciders, self.sizing, self.former):
            if part is not None and not any(part is known for known in found):
                found.append(part)
        return found

    @property
    def oracle(self) -> bool:
        """True when any part knows the future."""
        return any(part.oracle for part in self.parts())

    @property
    def assumed(self) -> bool:
        """True when the accuracy of any part is assumed."""
        return any(part.assumed for part in self.parts())

    @property
    def lossy(self) -> bool:
        """True when any part changes the answer."""
        return any(part.lossy for part in self.parts())


def overriding(parts: Sequence[Policy], hook: str) -> list[Policy]:
    """Return the parts whose class overrides ``hook``, so that no-ops cost nothing in the hot path."""
    bases = (Policy, CachePolicy, PrefetchPolicy)  # those with no-op hooks
    return [
        part
        for part in parts
        if not any(getattr(type(part), hook) is getattr(base, hook, None) for base in bases)
    ]
