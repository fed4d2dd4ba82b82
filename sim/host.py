"""Host memory as a cache above storage: what must be read before an expert can be used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sim.policies.base import CachePolicy
from sim.residency import ABSENT, RESIDENT, Residency
from sim.room import Room
from sim.types import LayerPlan, View


class HostTier:
    """The experts in host memory; all of them are also on storage.

    Inclusive: an expert on the GPU stays in host memory too. Exclusive: it leaves when it has arrived on
    the GPU and comes back, over the link, when the GPU drops it, unless those already on their way back
    fill half of the memory: then it is only on storage until it is read again.

    Parameters
    ----------
    residency
        Host memory, one pool.
    cache
        Its policy. Every expert that is read enters, so the policy is asked for victims only.
    gpu
        GPU memory: an expert that is on its way there may not be dropped here.
    view
        The world as the policy sees it; ``view.is_resident`` means host memory.
    exclusive
        See above.
    prefetch_limit
        Loads to the GPU that may be under way at one time.

    ``kept`` are experts that the layer before deferred: the CPU still computes with them.
    """

    def __init__(
        self,
        residency: Residency,
        cache: CachePolicy,
        gpu: Residency,
        view: View,
        exclusive: bool,
        prefetch_limit: int,
    ) -> None:
        self.kept: Sequence[int] = ()
        self.residency = residency
        self.exclusive = exclusive
        self.view = view
        self._cache = cache
        self._gpu = gpu
        self._room = Room(residency, view, self._evictable)
        self._returning: set[int] = set()
        keys, num_bytes = residency.keys, residency.capacity_bytes[0]
        self._to_keep_bytes = num_bytes
        if num_bytes < sum(residency.size_of_key):
            # As Pools.least_host_bytes: what a layer needs comes first.
            slots = keys.num_experts * keys.num_copies + prefetch_limit
            needed_bytes = slots * residency.largest_bytes(0)
            self._to_keep_bytes = num_bytes // (2 if exclusive else 1) - needed_bytes

    def fill(self) -> None:
        """Begin with full memory: the policy's own choice, then experts by index, a layer (or bank) in turn.

        Takes no time: it stands for the load of the model before the run.
        """
        keys, residency = self.residency.keys, self.residency
        num_slots = residency.capacity_bytes[0] // residency.largest_bytes(0)
        self._cache.start(range(len(keys)), num_slots, self.view)
        in_turn = (
            keys.key(layer, expert)
            for expert in range(keys.num_experts)
            for layer in range(keys.num_banks)
        )
        for key in dict.fromkeys([*self._cache.preload(self.view), *in_turn]):
            keys.check(key, "host preload")
            held_above = self.exclusive and self._gpu.is_resident(key)
            if not held_above and self._room.fill(key, self._cache):
                residency.complete_at_once((key,))

    def supply(
        self, demand: Sequence[int], background: Sequence[int], evicts: list[int]
    ) -> list[int]:
        """Return which experts must come from storage, room made for them.

        ``demand`` is what the layer waits for and ``background`` what nobody waits for yet; what is
        dropped for them is added to ``evicts``.
        """
        # Once each: the CPU may use what is also prefetched.
        wanted = list(dict.fromkeys((*demand, *background)))
        state = self.residency.state
        self.residency.pin([*wanted, *self.kept] if self.kept else wanted)
        here = [key for key in wanted if state[key] == RESIDENT]
        if here:
            self._cache.on_hit(here, self.view)
        missing = [key for key in wanted if state[key] == ABSENT]
        for key in missing:
            self._room.force(key, self._cache, evicts)
        return missing

    def keep(self, plan: LayerPlan) -> None:
        """Let a plan's deferred experts wait in its own layer after all where there is no room for them.

        They must stay through the next layer, beside all that this layer may need.
        """
        left_bytes, deferred, awaited = self._to_keep_bytes, list[int](), list[int]()
        for key in plan.deferred:
            left_bytes -= self.residency.expert_bytes(key)
            (deferred if left_bytes >= 0 else awaited).append(key)
        if awaited:
            plan.on_cpu, plan.deferred = [*plan.on_cpu, *awaited], deferred

    def take_back(self, keys: Iterable[int], evicts: list[int]) -> list[int]:
        """Return which of the experts that the GPU drops must be copied back, room made for them."""
        residency, taken = self.residency, []
        on_way_bytes = sum(map(residency.expert_bytes, self._returning))
        for key in keys:
            on_way_bytes += residency.expert_bytes(key)
            if on_way_bytes > residency.capacity_bytes[0] // 2:
                break
            if residency.state[key] == ABSENT:
                self._room.force(key, self._cache, evicts)
                taken.append(key)
        self._returning.update(taken)
        return taken

    def arrived(self, keys: Iterable[int]) -> None:
        """Learn that experts that were read, or have come back, are in host memory."""
        self._returning.difference_update(keys)

    def hand_over(self, keys: Iterable[int]) -> None:
        """Drop experts that have arrived on the GPU, where memory is exclusive."""
        for key in keys:
            if self.residency.state[key] == RESIDENT:
                self.residency.release(key)
                self._cache.on_evict(key)

    def end_layer(self, deferred: Sequence[int]) -> None:
        """End the event, whose ``deferred`` experts the CPU still computes with."""
        self.kept = deferred
        if deferred:
            self.residency.pin(deferred)
        else:
            self.residency.unpin()

    def _evictable(self, key: int) -> bool:
        return self.residency.evictable(key) and not self._gpu.is_loading(key)
