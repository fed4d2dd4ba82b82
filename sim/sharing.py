"""Transfers that share what carries them: host memory, links, a switch, a storage device.

A *flow* moves bytes through several capacities at once, never faster than its own cap. Rates are
weighted max-min fair: all flows grow in proportion to their weights until their cap or a capacity
they use is reached, and are settled anew whenever a flow begins or ends. A weight equal to the cap
shares a full capacity in proportion to what each flow would take alone.

Knows no clock library. Progress is counted in (bytes per second) x nanoseconds, whole numbers, so that
a flow that is alone takes exactly its bytes / rate, rounded up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hwmodels.units import NS_PER_S
from sim.clock import LOAD_ENDED, Clock, Event


class Use(NamedTuple):
    """A flow's use of one capacity, ``passes`` times its own rate (a buffered read crosses memory thrice)."""

    capacity: int
    passes: int = 1


class Flow:
    """A transfer under way; ``lost_ns`` is what full memory has cost it so far."""

    __slots__ = (
        "cap_bytes_per_s",
        "in_full_memory",
        "left",
        "lost_ns",
        "on_end",
        "rate_bytes_per_s",
        "uses",
        "weight",
    )

    def __init__(
        self,
        num_bytes: int,
        cap_bytes_per_s: int,
        uses: Sequence[Use],
        weight: int,
        on_end: Callable[[int], None],
    ) -> None:
        self.in_full_memory = False
        self.lost_ns = 0
        self.left = num_bytes * NS_PER_S
        self.cap_bytes_per_s = cap_bytes_per_s
        self.rate_bytes_per_s = 0
        self.uses = uses
        self.weight = weight
        self.on_end = on_end


class Shares:
    """All flows of a machine and the capacities they share.

    Parameters
    ----------
    clock
        Tells the time and calls back.
    capacities
        Bytes a second of each.
    num_memories
        The first so many capacities are memory: what they cost a flow when they are full is told apart.
    proportional
        Whether a flow's weight is its cap; else all weigh the same.
    """

    def __init__(
        self,
        clock: Clock,
        capacities: Sequence[int],
        num_memories: int = 0,
        proportional: bool = True,
    ) -> None:
        self.moved_bytes = [0] * len(capacities)
        self._clock = clock
        self._capacities = capacities
        self._num_memories = num_memories
        self._proportional = proportional
        self._flows: list[Flow] = []
        self._settled_ns = 0
        self._wake: Event | None = None

    def start(
        self,
        num_bytes: int,
        cap_bytes_per_s: int,
        uses: Sequence[Use],
        on_end: Callable[[int], None],
    ) -> None:
        """Begin to move ``num_bytes``; ``on_end`` is told what full memory has cost when all have arrived.

        That is the time, in nanoseconds, in which the flow could have moved what it was kept from moving.
        """
        for use in uses:
            self.moved_bytes[use.capacity] += num_bytes * use.passes
        self._settle()
        weight = cap_bytes_per_s if self._proportional else 1
        self._flows.append(Flow(num_bytes, cap_bytes_per_s, uses, weight, on_end))
        self._plan()

    def _settle(self) -> None:
        """Credit every flow with what it has moved since the last change of rates."""
        now_ns = self._clock.now
        passed_ns = now_ns - self._settled_ns
        if passed_ns:
            for flow in self._flows:
                flow.left -= flow.rate_bytes_per_s * passed_ns
                if flow.in_full_memory:
                    used_ns = passed_ns * flow.rate_bytes_per_s // flow.cap_bytes_per_s
                    flow.lost_ns += passed_ns - used_ns
        self._settled_ns = now_ns

    def _plan(self) -> None:
        """Give every flow its rate and be woken when the first ends."""
        flows = self._flows
        if not flows:
            self._wake = None
            return
        if len(flows) == 1:
            only = flows[0]
            only.rate_bytes_per_s = self._alone(only)
        else:
            self._share()
        delay_ns = min(max(0, -(-flow.left // flow.rate_bytes_per_s)) for flow in flows)
        self._wake = wake = Event(self._woken)
        self._clock.schedule(wake, LOAD_ENDED, delay_ns)

    def _woken(self, event: Any) -> None:
        if event is not self._wake:  # rates have changed since it was scheduled
            return
        self._settle()
        ended = [flow for flow in self._flows if flow.left <= 0]
        self._flows = [flow for flow in self._flows if flow.left > 0]
        self._plan()
        for flow in ended:
            flow.on_end(flow.lost_ns)

    def _alone(self, flow: Flow) -> int:
        """Return the rate of a flow that shares with nobody."""
        rate, flow.in_full_memory = flow.cap_bytes_per_s, False
        for use in flow.uses:
            limit = self._capacities[use.capacity] // use.passes
            if limit < rate:
                rate, flow.in_full_memory = limit, use.capacity < self._num_memories
        return max(1, rate)

    def _share(self) -> None:
        """Fill all flows in proportion to their weights until each has met its cap or a full capacity.

        Progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2), with weights.
        """
        waiting = self._flows
        free = {
            use.capacity: self._capacities[use.capacity] for flow in waiting for use in flow.uses
        }
        while waiting:
            load = dict.fromkeys(free, 0)
            for flow in waiting:
                for use in flow.uses:
                    load[use.capacity] += flow.weight * use.passes
            rates = [self._next_rate(flow, free, load) for flow in waiting]
            # Those that need the least share of their weight are settled; the others share what is left.
            level = min(rate / flow.weight for rate, flow in zip(rates, waiting, strict=True))
            left = []
            for flow, rate in zip(waiting, rates, strict=True):
                if rate / flow.weight > level:
                    left.append(flow)
                    continue
                flow.rate_bytes_per_s = max(1, rate)
                for use in flow.uses:
                    free[use.capacity] = max(0, free[use.capacity] - rate * use.passes)
            waiting = left

    def _next_rate(self, flow: Flow, free: dict[int, int], load: dict[int, int]) -> int:
        """Return the rate at which a flow's cap or one of its capacities would be met."""
        rate, flow.in_full_memory = flow.cap_bytes_per_s, False
        for use in flow.uses:
            share = flow.weight * free[use.capacity] // load[use.capacity]
            if share < rate:
                rate, flow.in_full_memory = share, use.capacity < self._num_memories
        return rate
