"""What GPU memory holds before the first step."""

from __future__ import annotations

from collections.abc import Sequence

from sim.policies.base import CachePolicy
from sim.residency import Residency
from sim.types import View


def preload(residency: Residency, caches: Sequence[CachePolicy], view: View) -> None:
    """Start the cache policies, one a pool, and bring in what they want to begin with.

    Takes no time and counts as no load: it stands for the time before a run. What does not fit, or
    belongs to another pool, is left out.
    """
    for pool, cache in enumerate(caches):
        keys = [key for key, its in enumerate(residency.pool_of_key) if its == pool]
        view.layer = residency.keys.unpack(keys[0]).layer
        cache.start(keys, residency.capacity_bytes[pool] // residency.largest_bytes(pool), view)
        own = frozenset(keys)
        for key in dict.fromkeys(cache.preload(view)):
            residency.keys.check(key, "preload")
            if key in own and residency.shortage_bytes(key) <= 0:
                residency.reserve(key)
                residency.complete_at_once((key,))
                cache.on_insert(key, view)
                if cache.pins(key):
                    residency.pin_for_good(key)
