"""Speculative reads that have a time of their own: after a layer's attention, before its routing is known.

An engine with ``engine.speculation`` = ``before`` names the next layer's experts as soon as a layer's input
is there, by the thread that drives the layers, and reads them until that layer's own router has spoken.
Then what it needs itself comes first: reads that have not begun are dropped, and those on their way are
waited for and thrown away (BigMoeOnEdge, --spec-gate).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from hwmodels.units import transfer_ns
from sim.clock import PLAN, Clock, Event
from sim.counter import StepCounter
from sim.hardware import Hardware
from sim.offloader import Offloader
from sim.storage import Storage


class Window:
    """The time that speculative reads have, once a layer.

    ``predict_ns`` is what naming experts takes the device before it, ``router_ns`` how long it is.
    """

    def __init__(
        self,
        clock: Clock,
        hardware: Hardware,
        storage: Storage,
        offloader: Offloader,
        counter: StepCounter,
    ) -> None:
        self.predict_ns = hardware.predict_ns
        self.router_ns = hardware.router_ns
        self._clock = clock
        self._storage = storage
        self._offloader = offloader
        self._counter = counter

    def run(self) -> Generator[Any, None, int]:
        """Open the window, close it, and wait for reads on their way; return how long that wait was."""
        clock, storage = self._clock, self._storage
        storage.open()
        yield self._after(self.router_ns)
        closed_ns, thrown_bytes, settled = clock.now, storage.thrown_bytes, Event()
        dropped = storage.close(lambda: clock.schedule(settled, PLAN, 0))
        self._offloader.give_up(dropped)
        self._counter.add_given_up((), dropped)
        thrown_bytes = storage.thrown_bytes - thrown_bytes
        self._counter.prefetch_bytes += thrown_bytes
        self._offloader.room.wasted_prefetch_bytes += thrown_bytes
        if storage.is_settling:
            yield settled
        waited_ns = clock.now - closed_ns
        self._counter.add_time(self.router_ns, storage_ns=waited_ns)
        return waited_ns

    def _after(self, delay_ns: int) -> Event:
        event = Event()
        self._clock.schedule(event, PLAN, delay_ns)
        return event


class Release:
    """What giving memory back to the operating system takes the thread that drives the layers."""

    def __init__(self, hardware: Hardware, offloader: Offloader, storage: Storage | None) -> None:
        self._rate = hardware.release_bytes_per_s
        self._size_of_key = offloader.residency.size_of_key
        self._storage = storage
        self._done_bytes = 0

    def ns(self, evicts: Sequence[int]) -> int:
        """Return the time for the experts that a plan drops, and for reads thrown away before it."""
        num_bytes = sum([self._size_of_key[key] for key in evicts])
        if self._storage is not None and self._storage.thrown_bytes > self._done_bytes:
            num_bytes += self._storage.thrown_bytes - self._done_bytes
            self._done_bytes = self._storage.thrown_bytes
        return transfer_ns(num_bytes, self._rate) if num_bytes else 0
