"""One direction of the host link: a server of callbacks with two queues, demand and background.

Knows no clock library: the timeline hands in ``schedule``, which calls an event back after a delay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from sim.events import Kind


class Event:
    """The least that SimPy's loop needs: callbacks to call, a success flag and a value."""

    __slots__ = ("_ok", "_value", "callbacks", "key", "kind")

    def __init__(
        self,
        callback: Callable[[Any], None] | None = None,
        key: int = -1,
        kind: Kind = Kind.DENSE,
    ) -> None:
        self.callbacks: list[Callable[[Any], None]] = [] if callback is None else [callback]
        self._ok = True
        self._value = None
        self.key = key
        self.kind = kind


class Link:
    """Carries one copy at a time, t0 + bytes / rate each; a copy under way is finished.

    Demand copies go ahead of prefetches; within a queue the first come is the first served.

    Parameters
    ----------
    schedule
        Calls an event's callbacks after a delay in nanoseconds.
    copy_ns
        Time of one expert's copy, by layer.
    num_experts
        Experts a layer, to find a key's layer.
    on_start
        Told (key, kind) when a copy is about to begin; returns how long it must wait for a slot.
    on_end
        Told (key, kind) when a copy has arrived.
    """

    def __init__(
        self,
        schedule: Callable[[Event, int], None],
        copy_ns: Sequence[int],
        num_experts: int,
        on_start: Callable[[int, Kind], int],
        on_end: Callable[[int, Kind], None],
    ) -> None:
        self._schedule = schedule
        self._copy_ns = copy_ns
        self._num_experts = num_experts
        self._on_start = on_start
        self._on_end = on_end
        self._demand: deque[tuple[int, Kind]] = deque()
        self._background: deque[tuple[int, Kind]] = deque()
        self._busy = False

    def demand(self, key: int, kind: Kind) -> None:
        """Queue a copy that a layer waits for."""
        self._demand.append((key, kind))
        if not self._busy:
            self._start_next()

    def prefetch(self, key: int) -> None:
        """Queue a copy that nobody waits for yet."""
        self._background.append((key, Kind.PREFETCH))
        if not self._busy:
            self._start_next()

    def promote(self, key: int) -> None:
        """Move a queued prefetch among the demand copies; one that is on its way stays so."""
        entry = (key, Kind.PREFETCH)
        if entry in self._background:
            self._background.remove(entry)
            self._demand.append(entry)

    def _start_next(self) -> None:
        queue = self._demand or self._background
        if not queue:
            self._busy = False
            return
        self._busy = True
        key, kind = queue.popleft()
        delay_ns = self._on_start(key, kind) + self._copy_ns[key // self._num_experts]
        self._schedule(Event(self._ended, key, kind), delay_ns)

    def _ended(self, event: Event) -> None:
        self._on_end(event.key, event.kind)
        self._start_next()
