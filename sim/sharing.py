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

_MOST_KNOWN = 4096


class Use(NamedTuple):
    """A flow's use of one capacity, ``passes`` times its own rate (a buffered read crosses memory thrice)."""

    capacity: int
    passes: int = 1


class Flow:
    """A transfer under way; ``lost_ns`` is what full memory has cost it so far.

    ``left`` counts from ``since_ns``, when its rate last changed; ``end`` is the event of its end as
    things are; ``kind`` numbers what it uses and its cap.
    """

    __slots__ = (
        "cap_bytes_per_s",
        "end",
        "in_full_memory",
        "kind",
        "left",
        "lost_ns",
        "on_end",
        "rate_bytes_per_s",
        "since_ns",
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
        now_ns: int,
        kind: int,
    ) -> None:
        self.kind = kind
        self.left = num_bytes * NS_PER_S
        self.cap_bytes_per_s = cap_bytes_per_s
        self.uses = uses
        self.weight = weight
        self.on_end = on_end
        self.since_ns = now_ns
        self.rate_bytes_per_s = self.lost_ns = 0
        self.in_full_memory = False
        self.end: _End | None = None

    def settle(self, now_ns: int) -> None:
        """Credit what has been moved since the rate last changed."""
        passed_ns = now_ns - self.since_ns
        self.since_ns = now_ns
        self.left -= self.rate_bytes_per_s * passed_ns
        if self.in_full_memory:
            self.lost_ns += passed_ns - passed_ns * self.rate_bytes_per_s // self.cap_bytes_per_s


class _End(Event):
    """The event of a flow's end, if no other has taken its place by then."""

    __slots__ = ("flow",)

    def __init__(self, callback: Callable[[Any], None], flow: Flow) -> None:
        super().__init__(callback)
        self.flow = flow


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
        self._asked = [0] * len(capacities)  # what the flows would take if nobody else were there
        self._is_crowded = False
        self._kinds: dict[tuple[tuple[Use, ...], int], int] = {}
        self._known: dict[tuple[int, ...], tuple[bool, list[tuple[int, bool]]]] = {}

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
        asked, capacities, crowded = self._asked, self._capacities, self._is_crowded
        for index, passes in uses:
            self.moved_bytes[index] += num_bytes * passes
            asked[index] += cap_bytes_per_s * passes
            crowded = crowded or asked[index] > capacities[index]
        now_ns = self._clock.now
        weight = cap_bytes_per_s if self._proportional else 1
        kind = self._kinds.setdefault((tuple(uses), cap_bytes_per_s), len(self._kinds))
        flow = Flow(num_bytes, cap_bytes_per_s, uses, weight, on_end, now_ns, kind)
        self._flows.append(flow)
        if crowded:
            self._divide(now_ns)
        else:
            self._set_rate(flow, cap_bytes_per_s, False, now_ns)

    def count(self, num_bytes: int, uses: Sequence[Use]) -> None:
        """Count bytes that moved without a flow, for they could meet nobody."""
        for index, passes in uses:
            self.moved_bytes[index] += num_bytes * passes

    def _ended(self, event: Any) -> None:
        flow: Flow = event.flow
        if flow.end is not event:  # its rate has changed since
            return
        now_ns = self._clock.now
        flow.settle(now_ns)
        self._flows.remove(flow)
        for index, passes in flow.uses:
            self._asked[index] -= flow.cap_bytes_per_s * passes
        if self._is_crowded:
            self._divide(now_ns)
        flow.on_end(flow.lost_ns)

    def _set_rate(self, flow: Flow, rate: int, in_full_memory: bool, now_ns: int) -> None:
        """Change a flow's rate from now on, and with it the time of its end."""
        if rate != flow.rate_bytes_per_s or in_full_memory != flow.in_full_memory:
            flow.settle(now_ns)
            flow.rate_bytes_per_s, flow.in_full_memory = rate, in_full_memory
            flow.end = end = _End(self._ended, flow)
            left = flow.left
            self._clock.schedule(end, LOAD_ENDED, -(-left // rate) if left > 0 else 0)

    def _divide(self, now_ns: int) -> None:
        """Give every flow its rate, now that one has begun or ended."""
        crowd = tuple([flow.kind for flow in self._flows])
        if crowd not in self._known:  # the same few mixtures come again and again
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            self._known[crowd] = self._rates()
        self._is_crowded, rates = self._known[crowd]
        for flow, (rate, in_full_memory) in zip(self._flows, rates, strict=True):
            self._set_rate(flow, rate, in_full_memory, now_ns)

    def _rates(self) -> tuple[bool, list[tuple[int, bool]]]:
        """Return whether any capacity is full, and of each flow its rate and whether memory binds it."""
        pairs = zip(self._asked, self._capacities, strict=True)
        if not any(asked > capacity for asked, capacity in pairs):
            return False, [(flow.cap_bytes_per_s, False) for flow in self._flows]
        found = {id(flow): (rate, index) for flow, rate, index in self._shared()}
        settled = [found[id(flow)] for flow in self._flows]
        return True, [(max(1, rate), 0 <= at < self._num_memories) for rate, at in settled]

    def _shared(self) -> list[tuple[Flow, int, int]]:
        """Return each flow, its rate and the capacity that binds it (-1: its own cap).

        All flows fill in proportion to their weights until each has met its cap or a full capacity:
        progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2), with weights.
        """
        waiting, settled = self._flows, []
        free = {index: self._capacities[index] for flow in waiting for index, _ in flow.uses}
        while waiting:
            load = dict.fromkeys(free, 0)
            for flow in waiting:
                for index, passes in flow.uses:
                    load[index] += flow.weight * passes
            bounds = [_bound(flow, free, load) for flow in waiting]
            # Those that need the least share of their weight are settled; the others share what is left.
            level = min(bound[0] / flow.weight for bound, flow in zip(bounds, waiting, strict=True))
            left = []
            for flow, (rate, index) in zip(waiting, bounds, strict=True):
                if rate / flow.weight > level:
                    left.append(flow)
                    continue
                settled.append((flow, rate, index))
                for used, passes in flow.uses:
                    free[used] = max(0, free[used] - rate * passes)
            waiting = left
        return settled


def _bound(flow: Flow, free: dict[int, int], load: dict[int, int]) -> tuple[int, int]:
    """Return the rate at which a flow's cap or one of its capacities is met, and which (-1: the cap)."""
    rate, binding = flow.cap_bytes_per_s, -1
    for index, _ in flow.uses:
        share = flow.weight * free[index] // load[index]
        if share < rate:
            rate, binding = share, index
    return rate, binding
