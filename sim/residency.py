"""Where every expert is: bytes, states, pins and pools; the mechanism that no policy can overrule.

A pool is a share of GPU memory with its own capacity: one a layer, one for some layers, or one for all;
low-precision copies have pools of their own. Bytes are taken when a load is queued, so resident + loading
bytes never exceed the capacity. Weights never change, so an eviction costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from sim.types import ABSENT as ABSENT
from sim.types import LOADING as LOADING
from sim.types import QUEUED as QUEUED
from sim.types import RESIDENT as RESIDENT
from sim.types import ConfigError, KeySpace

_NOT_EVICTABLE = "may not be evicted: absent, loading, in use or kept"
_SHORT = 16
"""Up to this many keys, searching a list beats building a set."""


class ResidencyError(RuntimeError):
    """A decider or driver asked for what memory does not allow; always a bug, never a user's mistake."""


class Residency:
    """The state of all experts on one device.

    Parameters
    ----------
    keys
        The key space.
    layer_bytes
        Bytes of one expert, by layer, [num_layers]; where there are low-precision copies, by bank.
    pool_of_layer
        Index of the pool that serves each layer, [num_layers]; or each bank, likewise.
    capacity_bytes
        Capacity of each pool, [num_pools].
    pool_of_key
        Index of the pool that serves each expert, [num_keys], where a layer's experts are spread over
        several; ``pool_of_layer`` then names the first of them.

    ``state``, ``size_of_key``, ``pool_of_key`` and ``free_of_pool`` (bytes) are for others to read, where a
    call would cost too much, and never to write. ``watch`` is None, or is called with each expert that has
    come (True) or gone (False).
    """

    def __init__(
        self,
        keys: KeySpace,
        layer_bytes: Sequence[int],
        pool_of_layer: Sequence[int],
        capacity_bytes: Sequence[int],
        pool_of_key: Sequence[int] | None = None,
    ) -> None:
        if len(layer_bytes) != keys.num_banks or len(pool_of_layer) != keys.num_banks:
            raise ConfigError(
                f"layer_bytes and pool_of_layer must have {keys.num_banks} entries, one a layer"
                + (" and precision" if keys.num_copies > 1 else "")
            )
        self.keys = keys
        self.layer_bytes = list(layer_bytes)
        self.pool_of_layer = list(pool_of_layer)
        self.capacity_bytes = list(capacity_bytes)
        self.state = bytearray(len(keys))
        self.size_of_key = [size for size in layer_bytes for _ in range(keys.num_experts)]
        spread = [pool for pool in pool_of_layer for _ in range(keys.num_experts)]
        self.pool_of_key = spread if pool_of_key is None else list(pool_of_key)
        self.free_of_pool = list(capacity_bytes)
        self._largest_bytes = [0] * len(self.capacity_bytes)
        for pool, size in zip(self.pool_of_key, self.size_of_key, strict=True):
            self._largest_bytes[pool] = max(self._largest_bytes[pool], size)
        self._pinned_for_good = bytearray(len(keys))
        self._pinned: Container[int] = ()
        self.watch: Callable[[int, bool], None] | None = None

    # -- questions ---------------------------------------------------------------------------

    def is_resident(self, key: int) -> bool:
        """Tell whether ``key`` can compute now."""
        return self.state[key] == RESIDENT

    def is_loading(self, key: int) -> bool:
        """Tell whether ``key`` is queued or on its way."""
        return 0 < self.state[key] < RESIDENT

    def resident(self) -> Iterable[int]:
        """Yield resident keys in key order."""
        return (key for key, state in enumerate(self.state) if state == RESIDENT)

    def evictable(self, key: int) -> bool:
        """Tell whether ``key`` may be dropped now: resident, not in use and not kept."""
        return (
            self.state[key] == RESIDENT
            and key not in self._pinned
            and not self._pinned_for_good[key]
        )

    def expert_bytes(self, key: int) -> int:
        """Bytes of one expert."""
        return self.size_of_key[key]

    def free_bytes(self, layer: int) -> int:
        """Unused bytes of the pools that serve ``layer``, or a bank of low-precision copies."""
        keys = self.keys.layer_keys(layer)
        return sum(self.free_of_pool[pool] for pool in {self.pool_of_key[key] for key in keys})

    def pools_of_layer(self, layer: int) -> list[int]:
        """Return the pools that serve ``layer``, in the order of its experts, low copies last."""
        keys = self.keys
        banks = range(layer, keys.num_banks, keys.num_layers)
        own = (self.pool_of_key[key] for bank in banks for key in keys.layer_keys(bank))
        return list(dict.fromkeys(own))

    @property
    def has_mixed_pools(self) -> bool:
        """Tell whether experts of one pool differ in size."""
        sizes: dict[int, int] = {}
        pairs = zip(self.pool_of_key, self.size_of_key, strict=True)
        return any(sizes.setdefault(pool, size) != size for pool, size in pairs)

    def used_bytes(self, pool: int) -> int:
        """Bytes taken in a pool: resident, loading and queued."""
        return self.capacity_bytes[pool] - self.free_of_pool[pool]

    def largest_bytes(self, pool: int) -> int:
        """Bytes of the largest expert that a pool serves."""
        return self._largest_bytes[pool]

    def shortage_bytes(self, key: int) -> int:
        """Bytes that must be freed before ``key`` fits; 0 or less when it fits now."""
        return self.size_of_key[key] - self.free_of_pool[self.pool_of_key[key]]

    # -- changes -----------------------------------------------------------------------------

    def pin(self, keys: Sequence[int]) -> None:
        """Pin the experts of one event; they replace those of the event before."""
        self._pinned = keys if len(keys) <= _SHORT else frozenset(keys)

    def unpin(self) -> None:
        """Unpin: the event is over."""
        self._pinned = ()

    def pin_for_good(self, key: int) -> None:
        """Protect a resident ``key`` from eviction for good."""
        self._pinned_for_good[key] = 1

    def reserve(self, key: int) -> None:
        """Queue a load and take its bytes."""
        pool, state = self.pool_of_key[key], self.state
        free = self.free_of_pool[pool] - self.size_of_key[key]
        if state[key] != ABSENT or free < 0:
            why = "is queued twice" if state[key] else f"does not fit: {-free} bytes too many"
            raise ResidencyError(f"{self.keys.unpack(key)} {why}")
        state[key] = QUEUED
        self.free_of_pool[pool] = free

    def replace(self, victim: int, key: int) -> None:
        """Drop ``victim`` and queue ``key``, of the same pool and size, in its place."""
        state = self.state
        if victim < 0 or not self.evictable(victim):
            raise ResidencyError(f"{self.keys.unpack(victim)} {_NOT_EVICTABLE}")
        pool, size = self.pool_of_key, self.size_of_key
        if state[key] != ABSENT or pool[victim] != pool[key] or size[victim] != size[key]:
            raise ResidencyError(
                f"{self.keys.unpack(key)} cannot take the place of {self.keys.unpack(victim)}: "
                "not absent, or of another pool or size"
            )
        state[victim] = ABSENT
        state[key] = QUEUED
        if self.watch is not None:
            self.watch(victim, False)

    def start(self, key: int) -> None:
        """Record that the copy of ``key`` has begun."""
        if self.state[key] != QUEUED:
            raise ResidencyError(f"{self.keys.unpack(key)} starts to load without being queued")
        self.state[key] = LOADING

    def complete(self, key: int) -> None:
        """Record that ``key`` has arrived."""
        if self.state[key] != LOADING:
            raise ResidencyError(f"{self.keys.unpack(key)} arrives without having started")
        self.state[key] = RESIDENT
        if self.watch is not None:
            self.watch(key, True)

    def complete_at_once(self, keys: Sequence[int]) -> None:
        """Record that queued ``keys`` have arrived in no time."""
        state = self.state
        for key in keys:
            if state[key] != QUEUED:
                raise ResidencyError(f"{self.keys.unpack(key)} arrives without being queued")
            state[key] = RESIDENT
            if self.watch is not None:
                self.watch(key, True)

    def cancel(self, key: int) -> None:
        """Give up a queued load whose copy has not begun."""
        if self.state[key] != QUEUED:
            raise ResidencyError(f"{self.keys.unpack(key)} is cancelled without being queued")
        self.state[key] = ABSENT
        self.free_of_pool[self.pool_of_key[key]] += self.size_of_key[key]

    def unpin_for_good(self, key: int) -> None:
        """Let a kept ``key`` be evicted after all: memory shrinks."""
        self._pinned_for_good[key] = 0

    def resize(self, pool: int, capacity_bytes: int) -> int:
        """Change a pool's capacity; return how many bytes must still be freed for what is in it.

        Free bytes are negative until that is done, so that nothing new is let in meanwhile.
        """
        self.free_of_pool[pool] += capacity_bytes - self.capacity_bytes[pool]
        self.capacity_bytes[pool] = capacity_bytes
        return max(0, -self.free_of_pool[pool])

    def evict(self, key: int) -> int:
        """Drop a resident key; return the bytes that frees."""
        if key < 0 or not self.evictable(key):  # below 0 Python would count from the end
            raise ResidencyError(f"{self.keys.unpack(key)} {_NOT_EVICTABLE}")
        return self.release(key)

    def release(self, key: int) -> int:
        """Drop a resident key that has moved elsewhere, in use or not; return the bytes that frees."""
        if self.state[key] != RESIDENT:
            raise ResidencyError(f"{self.keys.unpack(key)} is released without being resident")
        self.state[key] = ABSENT
        size = self.size_of_key[key]
        self.free_of_pool[self.pool_of_key[key]] += size
        if self.watch is not None:
            self.watch(key, False)
        return size
