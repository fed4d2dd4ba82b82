"""Carries out what a plan says of memory: who gets which slot, which copies go, and who waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from real.copies import Copy, CopyEngine
from real.device import Device
from real.slots import Arena
from sim.events import Kind
from sim.offloader import Offloader
from sim.room import Admission
from sim.types import LayerPlan


class Mover:
    """Slots and copies of one run.

    Between two layers every expert that the Residency knows (resident, or on its way) has a slot, and nobody
    else. Staged experts have one while their layer runs; those that take turns give theirs to the next one
    as soon as they are computed.

    Parameters
    ----------
    offloader
        Is told what has begun and what has come, at moments when nobody plans.
    arena, copies, device
        Where experts lie, what carries them, and whose kernels may still read a slot.
    on_copy
        Is told every copy that has come.
    at_once
        All copies of a layer come before it ends, and are told in the order of the plan: the decisions are
        then those of a run without a clock.
    """

    def __init__(
        self,
        offloader: Offloader,
        arena: Arena,
        copies: CopyEngine,
        device: Device,
        on_copy: Callable[[Copy], None],
        at_once: bool = False,
    ) -> None:
        self._offloader = offloader
        self._arena = arena
        self._copies = copies
        self._device = device
        self._on_copy = on_copy
        self._at_once = at_once
        self._awaited: set[int] = set()
        self._turns: deque[int] = deque()  # bypasses that wait for a slot
        self._held: set[int] = set()
        self._staged: set[int] = set()

    def fill(self) -> None:
        """Bring what is resident from the beginning: what policies asked for beforehand."""
        for key in self._offloader.residency.resident():
            self._copies.submit(Copy(key, Kind.LOAD, self._arena.take(key)))
        while self._copies.num_under_way:
            self._copies.wait()
        self._copies.take_started()
        self._copies.take_arrived()

    def held(self) -> AbstractContextManager[None]:
        """Let no copy begin meanwhile."""
        return self._copies.held()

    def report(self) -> list[Copy]:
        """Tell the Offloader what has begun and what has come; return the latter."""
        started, arrived = self._copies.take_started(), self._copies.take_arrived()
        for copy in started if not self._at_once else ():
            if copy.kind is not Kind.BYPASS:
                self._offloader.on_load_started(copy.key)
        for copy in arrived:
            self._on_copy(copy)
            if copy.kind is not Kind.BYPASS and not self._at_once:
                self._offloader.on_loaded(copy.key)
        return arrived

    # -- a layer ----------------------------------------------------------------------------------

    def begin(self, plan: LayerPlan) -> None:
        """Take slots back, and let what is now awaited go ahead; call while copies are held."""
        arena, copies = self._arena, self._copies
        for key in plan.cancels:
            self.drop(key)
        for key in plan.evicts:
            arena.free(key)
        for key in plan.late:
            copies.promote(key)
        self._awaited = {*plan.late, *plan.loads, *plan.bypasses}

    def ask(self, plan: LayerPlan) -> None:
        """Ask for a plan's copies, in order; the first may begin while others are asked for."""
        arena, copies = self._arena, self._copies
        fence = self._device.fence() if plan.loads or plan.bypasses or plan.prefetches else None
        for key in plan.loads:
            copies.submit(Copy(key, Kind.LOAD, arena.take(key), fence))
        if plan.bypasses:
            self._begin_bypasses(plan)
        for key in plan.prefetches:
            copies.submit(Copy(key, Kind.PREFETCH, arena.take(key), fence))

    def drop(self, key: int) -> None:
        """Drop a queued copy; RuntimeError if it has begun, which a plan would know."""
        if not self._copies.cancel(key):
            raise RuntimeError(f"the copy of key {key} has begun and cannot be dropped")
        self._arena.free(key)

    def _begin_bypasses(self, plan: LayerPlan) -> None:
        self._held = set(plan.bypasses[: plan.num_held])
        self._turns = deque(plan.bypasses[plan.num_held :])
        for key in plan.bypasses[: plan.num_held]:
            self._stage(key)
        for _ in range(min(len(self._turns), plan.bypass_slots)):
            self._stage(self._turns.popleft())

    def _stage(self, key: int) -> None:
        self._staged.add(key)
        target = self._arena.take(key)
        self._copies.submit(Copy(key, Kind.BYPASS, target, self._device.fence()))

    @property
    def num_awaited(self) -> int:
        """Experts of the layer that have not come yet."""
        return len(self._awaited)

    @property
    def is_stuck(self) -> bool:
        """Tell whether all that is awaited waits for slots of experts that have come and are not computed."""
        return bool(self._turns) and len(self._turns) == len(self._awaited)

    def wait(self) -> list[int]:
        """Wait until something has come; return those of it that the layer waits for, in order."""
        self._copies.wait_for_any()
        found = []
        for copy in self.report():
            if copy.key in self._awaited:
                self._awaited.remove(copy.key)
                found.append(copy.key)
        return found

    def wait_for_all(self) -> list[int]:
        """Wait for all copies, prefetches too; return those that the layer waits for, in order."""
        found = []
        while self._copies.num_under_way or self._copies.has_news:
            found += self.wait()
        return found

    def computed(self, key: int) -> None:
        """Learn that kernels have been asked for that compute a staged expert: its slot may go on."""
        if key not in self._staged or key in self._held:
            return
        self._staged.remove(key)
        self._arena.free(key)
        if self._turns:
            self._stage(self._turns.popleft())

    def settle(self, plan: LayerPlan) -> None:
        """Without a clock: let everything come, and tell it in the order of the plan."""
        self.wait_for_all()
        for keys in (plan.loads, plan.prefetches):
            if keys:
                self._offloader.on_loaded_at_once(keys)

    def end(self, admissions: Sequence[Admission]) -> None:
        """End a layer: staged experts that are kept have their slot, the others give it back."""
        for admission in admissions:
            self._staged.discard(admission.key)
            for key in admission.evicts:
                self._arena.free(key)
        for key in self._staged:
            self._arena.free(key)
        self._staged.clear()
        self._held.clear()
