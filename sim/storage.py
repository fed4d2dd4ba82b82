"""A storage device: reads of whole experts, in order, at a rate that depends on how much is outstanding.

An expert is read in blocks, ``queue_depth`` of them at one time. The device serves blocks in the order
in which they were asked for, so reads do not overtake each other, but the blocks of the reads behind
fill the device's queue: the rate is that of the curve at min(queue depth, blocks outstanding). Between
rounds of ``queue_depth`` blocks a read that somebody waits for goes ahead of one that nobody waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sim.clock import LOAD_ENDED, Clock, Event
from sim.link import Carriage, Copy, Link
from sim.sharing import Shares


class Curve(Protocol):
    """Rates of a device."""

    def bytes_per_s(self, block_bytes: int, queue_depth: int) -> int:
        """Rate at a block size with so many blocks outstanding."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """How an engine reads: block size, blocks asked for at one time, the device's rates and setup."""

    curve: Curve
    block_bytes: int
    queue_depth: int
    setup_ns: int = 0

    def rounds(self, num_bytes: int) -> tuple[int, ...]:
        """Return the bytes of each round of ``queue_depth`` blocks that an expert takes."""
        round_bytes = self.block_bytes * self.queue_depth
        whole, rest = divmod(num_bytes, round_bytes)
        return (round_bytes,) * whole + ((rest,) if rest or not whole else ())


class Storage(Link):
    """A link whose rate grows with what is outstanding."""

    def __init__(
        self,
        clock: Clock,
        reading: Reading,
        carriage: Carriage,
        num_experts: int,
        on_start: Callable[[Copy], int],
        on_chunk: Callable[[Copy], None],
        shares: Shares,
    ) -> None:
        super().__init__(clock, carriage, num_experts, on_start, on_chunk, shares)
        self._reading = reading
        self._blocks = [
            sum(-(-size // reading.block_bytes) for size in sizes) for sizes in carriage.chunk_bytes
        ]
        self._rates: dict[int, int] = {}
        self._is_waking = False

    def _wake_up(self) -> None:
        """Begin when all reads that are asked for at this time are in the queue: they count for the rate."""
        if not self._is_waking:
            self._is_waking = True
            self._clock.schedule(Event(self._woken), LOAD_ENDED, 0)

    def _woken(self, _: Any) -> None:
        self._is_waking = False
        if self._current is None:
            self._start_next(0)

    def _rate(self) -> int:
        """Return the device's rate with what is outstanding now."""
        reading = self._reading
        copies: Sequence[Copy | None] = (self._current, *self._demand, *self._background)
        outstanding = 0
        for copy in copies:
            if outstanding >= reading.queue_depth:
                break
            if copy is not None:
                outstanding += self._blocks[copy.layer]
        depth = max(1, min(reading.queue_depth, outstanding))
        if depth not in self._rates:
            self._rates[depth] = reading.curve.bytes_per_s(reading.block_bytes, depth)
        return self._rates[depth]
